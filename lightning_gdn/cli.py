"""The `lightning-gdn` command. Heavy imports (torch, Lightning) happen in the verbs that train or count, not here."""

from __future__ import annotations

import difflib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__
from .bench.ending import TERMINATED, TerminatedError
from .bench.errors import UserError
from .measuring import compare_verb, parity_verb, profile_verb
from .verb_support import console, parser

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

`lightning-gdn VERB --help` shows each verb. Exit codes: 0 done; 1 an arm failed, its losses are not finite, or (on a CPU; with parity also
gradients) not the control's, or (parity) it was to move something and moved nothing; 2 something you wrote cannot work (one line on stderr
says what); 130 and 143: ended by Ctrl-C, by SIGTERM.
"""


def _run(argv: Sequence[str]) -> int:
    args = parser(
        "run",
        "Train one recipe with the plan that plan.arm names, and write record and MemoryMonitor file into a folder of its own.",
        "  lightning-gdn run demo_cpu plan.arm=gdn_conv+gdn_norm_out\n  lightning-gdn run recipes/qwen3_5_0_8b.yaml data.seq_len=8192",
    )
    args.add_argument("--out", metavar="DIR", help="the run's folder; new or empty (default: out_dir/NAME-TIME)")
    given = args.parse_intermixed_args(argv)
    from .bench.recipes import load, write_yaml
    from .bench.records import not_finite, write_json

    loaded = load(given.recipe, given.overrides)
    from .bench.compare import check_runnable, new_folder

    arm = loaded.recipe.plan.arm
    text = check_runnable(loaded, [arm])
    from .bench.arm import run_arm
    from .bench.ending import exit_code
    from .bench.ranks import check_processes, started_rank

    check_processes(loaded.recipe)
    if loaded.recipe.trainer.devices > 1 and started_rank():
        # rank 0 makes folder, loggers and record, and tells this process where its MemoryMonitor file goes
        other = run_arm(loaded.recipe, loaded.saved, arm, text=text, interactive=True)
        return exit_code(other)
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
        return exit_code(record)
    retained = record["retained_bytes"]
    from .bench.report import retained_remark

    held = "n/a" if retained is None else f"{retained / 2**20:.2f} MiB ({retained:,} B)"
    where = f" on each of {loaded.recipe.trainer.devices} ranks; rank 0's loss" if loaded.recipe.trainer.devices > 1 else ": loss"
    first, last = (float.fromhex(record["losses_hex"][end]) for end in (0, -1))
    print(f"{arm}{where} {first:.4f} -> {last:.4f}, blocks retain {held} per micro-batch{retained_remark(record)}")
    print("kernels: " + (", ".join(f"{region} {kernel}" for region, kernel in record["kernels"].items()) or "n/a"))
    print(f"written to {folder}")
    diverged = not_finite([record])
    if diverged:
        print(f"lightning-gdn: arm {arm}: {diverged}", file=sys.stderr)
        return 1
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


def _labels(argv: Sequence[str]) -> int:
    args = parser(
        "labels",
        "Labels and what they stand for; with --model, what each frees on a recipe's model and what the recipe's arms will retain.",
        "  lightning-gdn labels\n  lightning-gdn labels --model recipes/demo_cpu.yaml data.seq_len=1024",
        recipe=False,
    )
    args.add_argument("--model", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    args.add_argument("--json", action="store_true", help="print the prediction as JSON (with --model)")
    args.add_argument("overrides", metavar="key=value", nargs="*", help="dotted overrides, with --model")
    given = args.parse_intermixed_args(argv)
    from .bench.labels_table import as_dict, known_labels, model_tables, predict

    screen = console()
    if given.model is None:
        if given.overrides or given.json:
            raise UserError(f"labels: {'--json' if given.json else given.overrides[0]!r} needs --model RECIPE; see lightning-gdn labels --help")
        for table in known_labels():
            screen.print(table)
        return 0
    from .bench.compare import prepare
    from .bench.data import check_vocabulary
    from .bench.recipes import load

    loaded = load(given.model, given.overrides)
    check_vocabulary(loaded.recipe)
    arms = prepare(loaded.recipe.compare.arms)
    prediction = predict(loaded, arms)
    if given.json:
        print(json.dumps(as_dict(prediction), indent=1))
        return 0
    labels, table, lines = model_tables(loaded, prediction, arms)
    screen.print(labels)
    screen.print(table)
    for line in lines:
        screen.print(line, markup=False, highlight=False)
    return 0


def _validate(argv: Sequence[str]) -> int:
    args = parser(
        "validate",
        "Check a recipe: keys, types, values, arms, text and model folder. Imports no torch, trains and writes nothing.",
        "  lightning-gdn validate my.yaml\n  lightning-gdn validate demo_cpu data.seq_len=1024 --print",
    )
    args.add_argument("--print", action="store_true", help="print the resolved recipe as YAML")
    given = args.parse_intermixed_args(argv)
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
    args = parser("recipes", "List the shipped recipes with the command that runs each.", "  lightning-gdn recipes", recipe=False)
    args.parse_args(argv)
    from .bench.recipes import shipped

    for name, path in shipped().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        header = [line.lstrip("# ").rstrip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
        about = " ".join(line for line in header[1:] if line).split(". ")[0].rstrip(".")
        print(f"{name}\n  {about}.\n  {header[0] if header else ''}\n  {path}")
    return 0


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "compare": compare_verb,
    "parity": parity_verb,
    "labels": _labels,
    "validate": _validate,
    "recipes": _recipes,
    "profile": profile_verb,
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
    except (KeyboardInterrupt, TerminatedError) as stop:
        by_signal = isinstance(stop, TerminatedError)
        what = [str(stop) if by_signal else "interrupted", *getattr(stop, "__notes__", [])]
        print(f"lightning-gdn: {'; '.join(what)}", file=sys.stderr)
        return TERMINATED if by_signal else 130
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
