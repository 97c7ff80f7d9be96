"""The verbs that measure: compare, parity, profile. Heavy imports (torch, Lightning) happen inside them, after what was written is checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .bench.ending import TerminatedError, exit_code
from .bench.errors import UnlikeRecordsError, UserError
from .verb_support import console, parser

__all__ = ["compare_verb", "parity_verb", "profile_verb"]


def compare_verb(argv: Sequence[str]) -> int:
    args = parser(
        "compare",
        "Train a recipe once per arm and round, each in a fresh process, and compare memory, time and losses against the control.",
        "  lightning-gdn compare demo_cpu\n"
        "  lightning-gdn compare demo_cpu --arms none,gdn_conv+layernorm,full:block:4 --rounds 3 trainer.max_steps=20",
    )
    args.add_argument("--arms", metavar="A,B,...", help="arms separated by commas; `none` is added if missing (default: compare.arms)")
    args.add_argument("--rounds", metavar="N", help="how often every arm runs (default: compare.rounds)")
    args.add_argument("--out", metavar="DIR", help="folder of the comparison; new or empty (default: out_dir/NAME-TIME)")
    given = args.parse_intermixed_args(argv)
    from .bench.recipes import load

    overrides = [*given.overrides, *([f"compare.rounds={given.rounds}"] if given.rounds is not None else [])]
    loaded = load(given.recipe, overrides)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("compare starts the processes of every arm itself, also several (trainer.devices); run it without torchrun")
    from .bench.compare import check_runnable, compare, expand, new_folder, prepare, split_arms

    arms = expand(loaded, split_arms(given.arms) if given.arms is not None else prepare(loaded.recipe.compare.arms))
    loaded = replace(
        loaded,
        recipe=replace(loaded.recipe, compare=replace(loaded.recipe.compare, arms=arms)),
        saved={**loaded.saved, "compare": {**loaded.saved["compare"], "arms": list(arms)}},
    )
    check_runnable(loaded, arms, default=given.arms is None)
    folder = new_folder(given.out, loaded)
    print(f"{len(arms)} arms x {loaded.recipe.compare.rounds} rounds, in {folder}", file=sys.stderr)
    try:
        result = compare(loaded, arms, folder)
        sent = _show(loaded, result, folder)
    except UnlikeRecordsError as error:
        print(f"lightning-gdn: {error} The records are in {folder}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, TerminatedError) as stop:
        if any((folder / "arms").glob("*/record.json")):
            stop.add_note(f"records written so far stay in {folder}")
        raise
    return 1 if result["problems"] or not sent else 0


def _show(loaded: Any, result: dict[str, Any], folder: Path) -> bool:
    """Table on the terminal; Markdown, picture and whatever the recipe's logger wants in the folder. False if W&B did not take it."""
    from .bench.plot import draw, draw_pareto
    from .bench.records import read_json
    from .bench.report import caption, markdown, terminal_table, write_csv

    screen = console()
    screen.print(terminal_table(result))
    for line in caption(result):
        screen.print(line, markup=False, highlight=False)
    (folder / "comparison.md").write_text(markdown(result), encoding="utf-8")
    draw(result, folder / "comparison.png")
    pareto = ", pareto.png" if draw_pareto(result, folder / "pareto.png") else ""
    if loaded.recipe.logger == "csv":
        write_csv(result, folder / "comparison.csv")
    sent = True
    if loaded.recipe.logger == "wandb":
        from .bench.wandb_sink import publish

        order = [entry["arm"] for entry in result["arms"]]
        records = [read_json(path) for path in (folder / "arms").glob("*/record.json")]
        records.sort(key=lambda record: (record["round"], order.index(record["arm"])))
        try:
            ids = publish(result, records, loaded.recipe.wandb, folder)
            screen.print(f"W&B: {len(ids)} runs in group {result['name']}", markup=False, highlight=False)
        except Exception as error:  # noqa: BLE001  whatever W&B's client raises, the comparison is done and stays
            sent = False
            print(f"lightning-gdn: W&B did not take the comparison: {type(error).__name__}: {error}", file=sys.stderr)
    screen.print(f"written to {folder}: comparison.json, comparison.md, comparison.png{pareto}, arms/*/record.json", markup=False, highlight=False)
    return sent


def parity_verb(argv: Sequence[str]) -> int:
    args = parser(
        "parity",
        "Run one training step under every arm, from the same bits, and compare losses and gradients with the untouched model's, tensor by tensor.\n"
        "Exit code 1: an arm is outside, failed, or moved nothing although it has offload labels, or the control is no measure.",
        "  lightning-gdn parity demo_cpu\n"
        "  lightning-gdn parity recipes/qwen3_5_0_8b.yaml --arms gdn_conv,full trainer.precision=bf16-mixed data.seq_len=2048\n"
        "  lightning-gdn parity demo_cpu --arms gdn_conv --plant conv@1     must end with exit code 1",
    )
    args.add_argument("--arms", metavar="A,B,...", help="arms separated by commas (default: every label of the model, full, and compare.arms)")
    args.add_argument("--repeats", metavar="N", type=int, default=2, help="runs of the control, more if they differ (default: 2)")
    args.add_argument("--steps", metavar="N", type=int, default=0, help="optimizer steps of a run; then weights are compared too (default: 0)")
    args.add_argument("--micro-batches", metavar="N", type=int, default=1, help="micro-batches per step (default: 1)")
    args.add_argument("--nondeterministic", action="store_true", help="leave PyTorch's kernels as in training")
    args.add_argument("--plant", metavar="REGION[@BLOCK]", help="check the check: an error in that replay, which must be found (exit code 1)")
    args.add_argument("--out", metavar="DIR", help="folder of the check; new or empty (default: out_dir/NAME-TIME)")
    given = args.parse_intermixed_args(argv)
    from .bench.compare import check_runnable, expand, new_folder, prepare, split_arms
    from .bench.data import check_vocabulary
    from .bench.recipes import load

    loaded = load(given.recipe, given.overrides)
    check_vocabulary(loaded.recipe)
    arms = None if given.arms is None else expand(loaded, split_arms(given.arms))
    from .bench.parity import ParityOptions, check, default_arms, in_fresh_process, model_layouts, needs_fresh_process, parity
    from .bench.parity_report import caption, markdown, terminal_table

    layouts = model_layouts(loaded.recipe)
    arms = arms or expand(loaded, prepare(default_arms(layouts, loaded.recipe.compare.arms)))
    text = check_runnable(loaded, arms, default=given.arms is None)
    options = ParityOptions(
        repeats=given.repeats, steps=given.steps, micro_batches=given.micro_batches, deterministic=not given.nondeterministic, plant=given.plant
    )
    check(loaded, arms, options, layouts)
    if needs_fresh_process(loaded.recipe, options):
        return in_fresh_process(loaded, argv)
    folder = new_folder(given.out, loaded)
    record = parity(loaded, arms, folder, options, text=text, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if record["status"] != "ok":
        return _ended(record, folder / "parity.json")
    screen = console()
    screen.print(terminal_table(record))
    for line in caption(record):
        screen.print(line, markup=False, highlight=False)
    (folder / "parity.md").write_text(markdown(record), encoding="utf-8")
    screen.print(f"written to {folder}: parity.json, parity.md, tensors.csv", markup=False, highlight=False)
    return 1 if record["problems"] else 0


def _ended(record: Mapping[str, Any], written: Path) -> int:
    """Say on stderr why there are no figures, what to do and where the record is; returns the exit code."""
    hint = "; the control is part of it and must fit: a smaller data.seq_len or data.batch_size" if record["status"] == "oom" else ""
    print(f"lightning-gdn: {written.stem}: {record['status']}: {record['error']}{hint}. Written to {written}", file=sys.stderr)
    return exit_code(record)


def profile_verb(argv: Sequence[str]) -> int:
    args = parser(
        "profile",
        "Train a recipe for a few dozen steps and measure one steady step region by region: forward, backward and replay time, retained bytes,\n"
        "the kernels that ran, what each label frees and costs, and which phase holds the memory peak.",
        "  lightning-gdn profile demo_cpu\n"
        "  lightning-gdn profile gdn_stack_20 --arms gdn_norm_out,full --rounds 3\n"
        "  lightning-gdn profile demo_cpu --tensors data.seq_len=128",
    )
    args.add_argument("--arms", metavar="A,B,...", help="arms separated by commas (default: every label that applies, full, compare.arms)")
    args.add_argument("--steps", metavar="N", type=int, default=5, help="steps per timed stage, whose median counts (default: 5)")
    args.add_argument("--rounds", metavar="N", type=int, default=0, help="also time whole steps of every arm in N alternating rounds (default: 0)")
    args.add_argument("--tensors", action="store_true", help="also list every saved tensor of one block of each kind")
    args.add_argument("--out", metavar="DIR", help="the profile's folder; new or empty (default: out_dir/NAME-TIME)")
    given = args.parse_intermixed_args(argv)
    for name, least in (("steps", 1), ("rounds", 0)):
        if getattr(given, name) < least:
            raise UserError(f"--{name}: expected a whole number of at least {least}, got {getattr(given, name)}")
    from .bench.recipes import load, write_yaml

    loaded = load(given.recipe, given.overrides)
    from .bench.compare import new_folder, split_arms
    from .bench.profile import Options, profile, refuse

    arms = split_arms(given.arms) if given.arms is not None else None  # equal plans share their figures
    text = refuse(loaded, arms)
    folder = new_folder(given.out, loaded)
    write_yaml(loaded.saved, folder / "recipe.yaml", f"lightning-gdn profile {folder / 'recipe.yaml'}\nresolved from {loaded.source.name}")
    options = Options(steps=given.steps, rounds=given.rounds, tensors=given.tensors)
    record = profile(loaded, arms, folder, options, text=text, progress=console().is_terminal)
    if record["status"] != "ok":
        return _ended(record, folder / "profile.json")
    from .bench.profile_report import arm_table, caption, draw_profile, kernel_table, region_table, tensor_tables, title

    screen = console()
    screen.print(title(record), markup=False, highlight=False)
    for table in (region_table(record), kernel_table(record), *tensor_tables(record), arm_table(record)):
        screen.print(table)
    for line in caption(record):
        screen.print(line, markup=False, highlight=False)
    draw_profile(record, folder / "profile.png")
    screen.print(f"written to {folder}: profile.json, profile.png", markup=False, highlight=False)
    return 0
