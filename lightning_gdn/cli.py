"""The `lightning-gdn` command. Heavy imports (torch, Lightning) happen in the verbs that train or count, not here."""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .bench.errors import UnlikeRecordsError, UserError

__all__ = ["main"]

OVERVIEW = """\
lightning-gdn: selective activation recompute for Gated DeltaNet hybrid models, and its measurement

  lightning-gdn run RECIPE [key=value ...]        train one recipe with one plan
  lightning-gdn compare RECIPE [key=value ...]    train it once per memory configuration and compare
  lightning-gdn parity RECIPE [key=value ...]     every label's losses and gradients against the untouched model's
  lightning-gdn labels [--model RECIPE]           labels, and what each frees on a recipe's model
  lightning-gdn profile RECIPE [key=value ...]    one training step region by region; what each label frees and costs
  lightning-gdn validate RECIPE [key=value ...]   check a recipe without training
  lightning-gdn recipes                           list the shipped recipes

examples:
  lightning-gdn compare recipes/demo_cpu.yaml
  lightning-gdn compare demo_cpu --arms none,gdn_conv+layernorm,full --rounds 3
  lightning-gdn run demo_cpu plan.arm=gdn_conv trainer.max_steps=30 data.path=/path/to/texts
  lightning-gdn labels --model demo_cpu
  lightning-gdn profile demo_cpu

`lightning-gdn VERB --help` shows each verb. Exit codes: 0 done; 1 an arm failed, or its losses (on a CPU; with parity also gradients)
are not the control's; 2 something you wrote cannot work (one line on stderr says what).
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser(verb: str, summary: str, examples: str, *, recipe: bool = True) -> _Parser:
    parser = _Parser(
        prog=f"lightning-gdn {verb}", description=summary, epilog=f"examples:\n{examples}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if recipe:
        parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
        parser.add_argument("overrides", metavar="[key=value ...]", nargs="*", help="dotted overrides, for instance trainer.max_steps=30")
    return parser


def _console() -> Any:
    from rich.console import Console

    # off a terminal rich would fold tables at 80 columns, through the middle of numbers
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 200))


def _run(argv: Sequence[str]) -> int:
    parser = _parser(
        "run",
        "Train one recipe with the plan that plan.arm names, and write record and MemoryMonitor file into a folder of its own.",
        "  lightning-gdn run demo_cpu plan.arm=gdn_conv+gdn_norm_out\n  lightning-gdn run recipes/qwen3_5_0_8b.yaml data.seq_len=8192",
    )
    parser.add_argument("--out", metavar="DIR", help="the run's folder; new or empty (default: out_dir/NAME-TIME)")
    given = parser.parse_intermixed_args(argv)
    from .bench.recipes import load, write_yaml
    from .bench.records import write_json

    loaded = load(given.recipe, given.overrides)
    from .bench.compare import check_runnable, new_folder

    arm = loaded.recipe.plan.arm
    text = check_runnable(loaded, [arm])
    from .bench.arm import run_arm
    from .bench.ranks import check_processes, started_rank

    check_processes(loaded.recipe)
    if loaded.recipe.trainer.devices > 1 and started_rank():
        # rank 0 makes folder, loggers and record, and tells this process where its MemoryMonitor file goes
        other = run_arm(loaded.recipe, loaded.saved, arm, text=text, interactive=True)
        return 0 if other["status"] == "ok" else 1
    folder = new_folder(given.out, loaded)
    write_yaml(loaded.saved, folder / "recipe.yaml", f"lightning-gdn run {folder / 'recipe.yaml'}\nresolved from {loaded.source.name}")
    logger, close = _logger(loaded, folder)
    try:
        record = run_arm(loaded.recipe, loaded.saved, arm, folder=folder, text=text, interactive=True, logger=logger)
    finally:
        close()
    write_json(folder / "record.json", record)
    if record["status"] != "ok":
        print(f"lightning-gdn: arm {arm}: {record['status']}: {record['error']}", file=sys.stderr)
        return 1
    retained = record["retained_bytes"]
    held = "n/a" if retained is None else f"{retained / 2**20:.2f} MiB ({retained:,} B)"
    where = f" on each of {loaded.recipe.trainer.devices} ranks; rank 0's loss" if loaded.recipe.trainer.devices > 1 else ": loss"
    print(f"{arm}{where} {record['loss_first']:.4f} -> {record['loss_last']:.4f}, blocks retain {held} per micro-batch")
    print("kernels: " + (", ".join(f"{region} {kernel}" for region, kernel in record["kernels"].items()) or "n/a"))
    print(f"written to {folder}")
    return 0


def _logger(loaded: Any, folder: Path) -> tuple[Any, Callable[[], None]]:
    kind = loaded.recipe.logger
    if kind == "csv":
        from lightning.pytorch.loggers import CSVLogger

        return CSVLogger(save_dir=str(folder), name="", version=""), lambda: None
    if kind == "wandb":
        from .bench.wandb_sink import lightning_logger

        return lightning_logger(loaded.recipe.wandb, loaded.saved, folder, arm=loaded.recipe.plan.arm)
    return False, lambda: None


def _compare(argv: Sequence[str]) -> int:
    parser = _parser(
        "compare",
        "Train a recipe once per arm and round, each in a fresh process, and compare memory, time and losses against the control.",
        "  lightning-gdn compare demo_cpu\n"
        "  lightning-gdn compare demo_cpu --arms none,gdn_conv+layernorm,full:block:4 --rounds 3 trainer.max_steps=20",
    )
    parser.add_argument("--arms", metavar="A,B,...", help="arms separated by commas; `none` is added if missing (default: compare.arms)")
    parser.add_argument("--rounds", metavar="N", help="how often every arm runs (default: compare.rounds)")
    parser.add_argument("--out", metavar="DIR", help="folder of the comparison; new or empty (default: out_dir/NAME-TIME)")
    given = parser.parse_intermixed_args(argv)
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
    check_runnable(loaded, arms)
    folder = new_folder(given.out, loaded)
    print(f"{len(arms)} arms x {loaded.recipe.compare.rounds} rounds, in {folder}", file=sys.stderr)
    try:
        result = compare(loaded, arms, folder)
    except UnlikeRecordsError as error:
        print(f"lightning-gdn: {error} The records are in {folder}", file=sys.stderr)
        return 1
    sent = _show(loaded, result, folder)
    return 1 if result["problems"] or not sent else 0


def _show(loaded: Any, result: dict[str, Any], folder: Path) -> bool:
    """Table on the terminal; Markdown, picture and whatever the recipe's logger wants in the folder. False if W&B did not take it."""
    from .bench.plot import draw, draw_pareto
    from .bench.records import read_json
    from .bench.report import caption, markdown, terminal_table, write_csv

    console = _console()
    console.print(terminal_table(result))
    for line in caption(result):
        console.print(line, markup=False, highlight=False)
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
            console.print(f"W&B: {len(ids)} runs in group {result['name']}", markup=False, highlight=False)
        except Exception as error:  # noqa: BLE001  whatever W&B's client raises, the comparison is done and stays
            sent = False
            print(f"lightning-gdn: W&B did not take the comparison: {type(error).__name__}: {error}", file=sys.stderr)
    console.print(f"written to {folder}: comparison.json, comparison.md, comparison.png{pareto}, arms/*/record.json", markup=False, highlight=False)
    return sent


def _parity(argv: Sequence[str]) -> int:
    parser = _parser(
        "parity",
        "Run one training step under every arm, from the same bits, and compare losses and gradients with the untouched model's, tensor by tensor.",
        "  lightning-gdn parity demo_cpu\n"
        "  lightning-gdn parity recipes/qwen3_5_0_8b.yaml --arms gdn_conv,full trainer.precision=bf16-mixed data.seq_len=2048\n"
        "  lightning-gdn parity demo_cpu --arms gdn_conv --plant conv@1     must end with exit code 1",
    )
    parser.add_argument("--arms", metavar="A,B,...", help="arms separated by commas (default: every label of the model, full, and compare.arms)")
    parser.add_argument("--repeats", metavar="N", type=int, default=2, help="runs of the control, more if they differ (default: 2)")
    parser.add_argument("--steps", metavar="N", type=int, default=0, help="optimizer steps of a run; then weights are compared too (default: 0)")
    parser.add_argument("--micro-batches", metavar="N", type=int, default=1, help="micro-batches per step (default: 1)")
    parser.add_argument("--nondeterministic", action="store_true", help="leave PyTorch's kernels as in training")
    parser.add_argument("--plant", metavar="REGION[@BLOCK]", help="check the check: an error in that replay, which must be found (exit code 1)")
    parser.add_argument("--out", metavar="DIR", help="folder of the check; new or empty (default: out_dir/NAME-TIME)")
    given = parser.parse_intermixed_args(argv)
    from .bench.compare import check_runnable, new_folder, prepare, split_arms
    from .bench.data import check_vocabulary
    from .bench.recipes import load

    loaded = load(given.recipe, given.overrides)
    check_vocabulary(loaded.recipe)
    arms = None if given.arms is None else split_arms(given.arms)
    from .bench.parity import ParityOptions, check, default_arms, in_fresh_process, model_layouts, needs_fresh_process, parity
    from .bench.parity_report import caption, markdown, terminal_table

    layouts = model_layouts(loaded.recipe)
    arms = arms or prepare(default_arms(layouts, loaded.recipe.compare.arms))
    text = check_runnable(loaded, arms)
    options = ParityOptions(
        repeats=given.repeats, steps=given.steps, micro_batches=given.micro_batches, deterministic=not given.nondeterministic, plant=given.plant
    )
    check(loaded, arms, options, layouts)
    if needs_fresh_process(loaded.recipe, options):
        return in_fresh_process(loaded, argv)
    folder = new_folder(given.out, loaded)
    record = parity(loaded, arms, folder, options, text=text, progress=lambda line: print(line, file=sys.stderr, flush=True))
    console = _console()
    console.print(terminal_table(record))
    for line in caption(record):
        console.print(line, markup=False, highlight=False)
    (folder / "parity.md").write_text(markdown(record), encoding="utf-8")
    console.print(f"written to {folder}: parity.json, parity.md, tensors.csv", markup=False, highlight=False)
    return 1 if record["problems"] else 0


def _labels(argv: Sequence[str]) -> int:
    parser = _parser(
        "labels",
        "Labels and what they stand for; with --model, what each frees on a recipe's model and what the recipe's arms will retain.",
        "  lightning-gdn labels\n  lightning-gdn labels --model recipes/demo_cpu.yaml data.seq_len=1024",
        recipe=False,
    )
    parser.add_argument("--model", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--json", action="store_true", help="print the prediction as JSON (with --model)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="dotted overrides, with --model")
    given = parser.parse_intermixed_args(argv)
    from .bench.labels_table import as_dict, known_labels, model_tables, predict

    console = _console()
    if given.model is None:
        if given.overrides or given.json:
            raise UserError(f"labels: {'--json' if given.json else given.overrides[0]!r} needs --model RECIPE; see lightning-gdn labels --help")
        for table in known_labels():
            console.print(table)
        return 0
    from .bench.compare import prepare
    from .bench.data import check_vocabulary
    from .bench.recipes import load

    loaded = load(given.model, given.overrides)
    check_vocabulary(loaded.recipe)
    arms = prepare(loaded.recipe.compare.arms)
    try:
        prediction = predict(loaded, arms)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"compare.arms: {error}") from None
    if given.json:
        print(json.dumps(as_dict(prediction), indent=1))
        return 0
    labels, table, lines = model_tables(loaded, prediction, arms)
    console.print(labels)
    console.print(table)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return 0


def _profile(argv: Sequence[str]) -> int:
    parser = _parser(
        "profile",
        "Train a recipe for a few dozen steps and measure one steady step region by region: forward, backward and replay time, retained bytes,\n"
        "the kernels that ran, what each label frees and costs, and which phase holds the memory peak.",
        "  lightning-gdn profile demo_cpu\n"
        "  lightning-gdn profile gdn_stack_20 --arms gdn_norm_out,full --rounds 3\n"
        "  lightning-gdn profile demo_cpu --tensors data.seq_len=128",
    )
    parser.add_argument("--arms", metavar="A,B,...", help="arms separated by commas (default: every label that applies, full, compare.arms)")
    parser.add_argument("--steps", metavar="N", type=int, default=5, help="steps per timed stage, whose median counts (default: 5)")
    parser.add_argument("--rounds", metavar="N", type=int, default=0, help="also time whole steps of every arm in N alternating rounds (default: 0)")
    parser.add_argument("--tensors", action="store_true", help="also list every saved tensor of one block of each kind")
    parser.add_argument("--out", metavar="DIR", help="the profile's folder; new or empty (default: out_dir/NAME-TIME)")
    given = parser.parse_intermixed_args(argv)
    for name, least in (("steps", 1), ("rounds", 0)):
        if getattr(given, name) < least:
            raise UserError(f"--{name}: expected a whole number of at least {least}, got {getattr(given, name)}")
    from .bench.recipes import load, write_yaml

    loaded = load(given.recipe, given.overrides)
    from .bench.compare import new_folder, split_arms
    from .bench.profile import Options, profile, refuse

    arms = split_arms(given.arms) if given.arms is not None else None
    text = refuse(loaded, arms)
    folder = new_folder(given.out, loaded)
    write_yaml(loaded.saved, folder / "recipe.yaml", f"lightning-gdn profile {folder / 'recipe.yaml'}\nresolved from {loaded.source.name}")
    options = Options(steps=given.steps, rounds=given.rounds, tensors=given.tensors)
    record = profile(loaded, arms, folder, options, text=text, progress=_console().is_terminal)
    if record["status"] != "ok":
        hint = "; the profile begins with the control, which must fit: a smaller data.seq_len or batch_size" if record["status"] == "oom" else ""
        print(f"lightning-gdn: profile: {record['status']}: {record['error']}{hint}", file=sys.stderr)
        return 1
    from .bench.profile_report import arm_table, caption, draw_profile, kernel_table, region_table, tensor_tables, title

    console = _console()
    console.print(title(record), markup=False, highlight=False)
    for table in (region_table(record), kernel_table(record), *tensor_tables(record), arm_table(record)):
        console.print(table)
    for line in caption(record):
        console.print(line, markup=False, highlight=False)
    draw_profile(record, folder / "profile.png")
    console.print(f"written to {folder}: profile.json, profile.png", markup=False, highlight=False)
    return 0


def _validate(argv: Sequence[str]) -> int:
    parser = _parser(
        "validate",
        "Check a recipe: keys, types, values, arms, text and model folder. Imports no torch, trains and writes nothing.",
        "  lightning-gdn validate my.yaml\n  lightning-gdn validate demo_cpu data.seq_len=1024 --print",
    )
    parser.add_argument("--print", action="store_true", help="print the resolved recipe as YAML")
    given = parser.parse_intermixed_args(argv)
    from .bench.compare import prepare
    from .bench.data import check_vocabulary, read_text
    from .bench.recipes import load, to_yaml

    loaded = load(given.recipe, given.overrides)
    check_vocabulary(loaded.recipe)
    text = read_text(loaded.recipe.data)
    prepare(loaded.recipe.compare.arms)
    if given.print:
        print(to_yaml(loaded.saved), end="")
    else:
        print(f"{loaded.source}: valid; text: {text.source}, {text.files} files, {len(text.data):,} bytes")
        print("not checked without loading torch: whether the model has the regions of its arms, and the device")
    return 0


def _recipes(argv: Sequence[str]) -> int:
    parser = _parser("recipes", "List the shipped recipes with the command that runs each.", "  lightning-gdn recipes", recipe=False)
    parser.parse_args(argv)
    from .bench.recipes import shipped

    for name, path in shipped().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        header = [line.lstrip("# ").rstrip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
        about = " ".join(line for line in header[1:] if line).split(". ")[0].rstrip(".")
        print(f"{name}\n  {about}.\n  {header[0] if header else ''}\n  {path}")
    return 0


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "compare": _compare,
    "parity": _parity,
    "labels": _labels,
    "validate": _validate,
    "recipes": _recipes,
    "profile": _profile,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(OVERVIEW, end="")
            return 0 if words else 2
        if words[0] in ("-V", "--version"):
            print(f"lightning-gdn {__version__}")
            return 0
        verb, rest = words[0], words[1:]
        if verb not in VERBS:
            close = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.4)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise UserError(f"unknown verb {verb!r}; {hint}Verbs: {', '.join(VERBS)}")
        return VERBS[verb](rest)
    except UserError as error:
        print(f"lightning-gdn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lightning-gdn: interrupted; records written so far stay", file=sys.stderr)
        return 130
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
