"""A comparison: every arm in a fresh process, arms in alternating order over several rounds, one record each, then the verdict."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .arms import Rival, check_rival, parse, sweep
from .checks import check_arm, check_blocks
from .data import Text, check_vocabulary, read_text
from .ending import terminated_cleanly
from .errors import UserError
from .judge import CONTROL, judge
from .recipes import Loaded, write_yaml
from .records import SCHEMA, read_json, slug, write_json

__all__ = ["check_runnable", "compare", "expand", "new_folder", "prepare", "schedule", "split_arms"]

Launch = Callable[[Path, str, int, Path, Callable[[int, int], None]], int]
"""(recipe file, arm, round, record file, progress) -> exit code. The default starts a process; tests pass a stand-in."""


def split_arms(text: str) -> list[str]:
    """`none,gdn_conv+layernorm,full` as a list; commas separate arms, so an arm cannot hold one.

    Raises:
        UserError: an empty arm, an unknown label, an arm given twice.
    """
    arms = [part.strip() for part in text.split(",")]
    if not all(arms):
        raise UserError(f"--arms: expected arms separated by commas, got {text!r}; for instance none,gdn_conv+layernorm,full")
    return prepare(arms, key="--arms")


def prepare(arms: Sequence[str], *, key: str = "compare.arms") -> list[str]:
    """Check arms and put the control first if it is missing.

    Raises:
        UserError: an unknown label, an arm given twice. (Arms of other names that resolve to one plan are what a sweep over labels compares.)
    """
    for arm in arms:
        check_arm(arm, key)
    seen: dict[Hashable, str] = {}
    for arm in arms:
        plan = _named(arm)
        first = seen.get(plan)
        seen[plan] = arm
        if first is not None:
            what = f"{arm!r} is given twice" if first == arm else f"{first!r} and {arm!r} are the same plan"
            raise UserError(f"{key}: {what}; rounds repeat every arm (compare.rounds)")
    return list(arms) if CONTROL in arms else [CONTROL, *arms]


def _named(arm: str) -> Hashable:
    """Equal for two arms that name the same, in whatever order."""
    chosen = parse(arm)
    if isinstance(chosen, Rival):
        return chosen.kind, frozenset(chosen.names), chosen.num_blocks
    moved = chosen.offload
    return frozenset(chosen.labels), chosen.full, moved and (frozenset(moved.labels), moved.fraction)


def expand(loaded: Loaded, arms: Sequence[str]) -> list[str]:
    """Arms with `checkpoint:sweep` written out for the recipe's number of blocks.

    Raises:
        UserError: `model.path` is no model that transformers can read.
    """
    if not any(parse(arm) == Rival(kind="sweep") for arm in arms):
        return list(arms)
    from .module import block_kinds

    return sweep([arm.strip() for arm in arms], len(block_kinds(loaded.recipe)))


def schedule(arms: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, arm) in running order: every other round runs backwards, so that no arm always comes first on a cold machine."""
    return [(index, arm) for index in range(rounds) for arm in (arms if index % 2 == 0 else list(reversed(arms)))]


def check_runnable(loaded: Loaded, arms: Sequence[str], *, default: bool = False) -> Text:
    """Everything that can be wrong with a run and be known before it: text, vocabulary, device, dimensions, labels, logger.

    Args:
        default: nobody named `arms` on the command line; an error says where the arm comes from.

    Raises:
        UserError: the first problem found.
    """
    recipe = loaded.recipe
    check_vocabulary(recipe)
    text = read_text(recipe.data)
    if recipe.logger == "wandb":
        from .wandb_sink import require_wandb

        require_wandb()
    from ..inspection import inspect_model
    from ..plan import Plan
    from .arm import check_device
    from .data import make_loaders
    from .module import meta_model

    check_device(recipe)
    make_loaders(text, recipe)
    model = meta_model(recipe)
    layouts = inspect_model(model).layouts
    for arm in arms:
        chosen = parse(arm)
        if isinstance(chosen, Rival) or not chosen.is_control:
            check_blocks(layouts)
        try:
            if isinstance(chosen, Rival):
                check_rival(chosen, layouts, hugging_face=hasattr(model, "gradient_checkpointing_enable"))
            else:
                Plan.from_labels(chosen, layouts)
        except ValueError as error:
            origin = f". It comes from compare.arms of {loaded.source.name}; choose others by --arms A,B,... or compare.arms=[A,B]"
            raise UserError(f"arm {arm!r}: {error}{origin if default and arm in recipe.compare.arms else ''}") from None
    return text


def new_folder(out: str | None, loaded: Loaded) -> Path:
    """Make the run's own folder: `out`, or `out_dir/NAME-TIME`.

    Raises:
        UserError: `out` exists and is not empty, or cannot be made.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(out).expanduser() if out else Path(loaded.recipe.out_dir).expanduser() / f"{loaded.name}-{stamp}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if out:
            what = "is not empty" if folder.is_dir() else "is a file"
            raise UserError(f"--out: {folder} exists and {what}; name a new folder")
        folder = folder.with_name(f"{folder.name}-{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{'--out' if out else 'out_dir'}: cannot make the folder {folder}: {error.strerror}") from None
    return folder


def compare(
    loaded: Loaded,
    arms: Sequence[str],
    folder: Path,
    *,
    show: bool = True,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Run every arm `compare.rounds` times and judge the records; writes all of it into `folder`.

    Returns:
        The comparison, as `comparison.json` holds it.

    Raises:
        UnlikeRecordsError: the records differ in more than the arm (software changed under the comparison); they stay in `folder`.
    """
    rounds = loaded.recipe.compare.rounds
    recipe_file = folder / "recipe.yaml"
    write_yaml(loaded.saved, recipe_file, f"lightning-gdn compare {recipe_file} --arms {','.join(arms)}\nresolved from {loaded.source.name}")
    launch = launch or _launch(loaded)
    records = []
    plan = schedule(arms, rounds)
    with terminated_cleanly(), _progress(plan, loaded.recipe.trainer.max_steps, show) as tick:
        for index, arm in plan:
            out = folder / "arms" / f"{slug(arm)}-round{index}" / "record.json"
            out.parent.mkdir(parents=True, exist_ok=True)
            code = launch(recipe_file, arm, index, out, tick(index, arm))
            if not out.exists():
                write_json(out, _dead(loaded, arm, index, code, out.parent / "log.txt"))
            records.append(read_json(out))
    result = judge(records, name=folder.name, arms=arms)
    write_json(folder / "comparison.json", result)
    return result


def _dead(loaded: Loaded, arm: str, index: int, code: int, log: Path) -> dict[str, Any]:
    """The record of a process that could not write one itself."""
    status, told = "failed", _failures(log.parent)
    if told:
        status = "oom" if any(kind == "oom" for kind, _ in told) else "failed"
        reason = "; ".join(text for _, text in told)
    elif code < 0:
        reason = f"killed by {signal.Signals(-code).name}" + (" (the machine ran out of memory?)" if -code == signal.SIGKILL else "")
    else:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
        reason = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code} and no message")
    recipe: Mapping[str, Any] = {**loaded.saved, "plan": {**loaded.saved["plan"], "arm": arm}}
    return {"schema": SCHEMA, "arm": arm, "round": index, "status": status, "error": reason, "environment": None, "recipe": recipe, "monitor": None}


def _failures(folder: Path) -> list[tuple[str, str]]:
    """(status, reason): what MemoryMonitor's files say of ranks that failed: on several devices one rank's failure kills the others."""
    summaries = [read_json(path) for path in sorted(folder.glob("memory_rank*.json"))]
    return [(found["status"], f"rank {found['rank']}: {found['reason']}") for found in summaries if found["status"] in ("oom", "error")]


def _launch(loaded: Loaded) -> Launch:
    def start(recipe_file: Path, arm: str, index: int, out: Path, progress: Callable[[int, int], None]) -> int:
        command = [
            sys.executable,
            "-m",
            "lightning_gdn.bench.arm",
            "--recipe",
            str(recipe_file),
            "--arm",
            arm,
            "--round",
            str(index),
            "--out",
            str(out),
        ]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "env": child_environment(loaded), "text": True}
        with (out.parent / "log.txt").open("wb") as log, subprocess.Popen(command, stderr=log, **pipes) as process:
            try:
                for line in process.stdout or ():
                    words = line.split()
                    if len(words) == 3 and words[0] == "@step":
                        progress(int(words[1]), int(words[2]))
                return process.wait()
            except BaseException:
                # Ctrl-C, or a failing progress bar: no arm outlives the comparison
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise

    return start


def child_environment(loaded: Loaded) -> dict[str, str]:
    """What an arm's process gets beside the caller's environment: offline, a fixed number of threads, this package on its path."""
    env = dict(os.environ)
    env["HF_HUB_OFFLINE"] = "1"
    if loaded.recipe.trainer.num_threads:
        env["OMP_NUM_THREADS"] = str(loaded.recipe.trainer.num_threads)
    home = str(Path(__file__).resolve().parent.parent.parent)
    if home not in site.getsitepackages():
        env["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [env.get("PYTHONPATH")])])
    return env


@contextmanager
def _progress(plan: Sequence[tuple[int, str]], steps: int, show: bool) -> Iterator[Callable[[int, str], Callable[[int, int], None]]]:
    """One bar over all arms and rounds; off a terminal one line per arm, so that a log shows how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    rounds = max(index for index, _ in plan) + 1
    if not show or not console.is_terminal:
        started = time.monotonic()
        count = 0

        def line(index: int, arm: str) -> Callable[[int, int], None]:
            nonlocal count
            count += 1
            if show:
                print(
                    f"[{count}/{len(plan)}] round {index + 1} of {rounds}: {arm} ({time.monotonic() - started:.0f} s so far)",
                    file=sys.stderr,
                    flush=True,
                )
            return lambda done, total: None

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[where]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("compare", total=len(plan) * steps, where="")
        count = -1

        def tick(index: int, arm: str) -> Callable[[int, int], None]:
            nonlocal count
            count += 1
            number = count
            bar.update(task, completed=number * steps, description=f"round {index + 1}/{rounds}", where=f"{arm}: starting")
            return lambda done, total: bar.update(task, completed=number * steps + done, where=f"{arm}: step {done}/{total}")

        yield tick
