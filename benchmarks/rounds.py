"""What the in-process benchmarks share: arms in alternating rounds, deltas paired with the control of the round, the Pareto view, the record."""

from __future__ import annotations

import copy
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_gdn import apply_plan
from lightning_gdn.bench.arms import Rival, parse, sweep
from lightning_gdn.bench.garbage import frozen_garbage
from lightning_gdn.bench.pareto import analyse
from lightning_gdn.bench.rivals import install

MIB = 2**20
CONTROL = "none"
FIGURES = ("ms", "act_mib", "peak_mib")
MOVED = (
    "moved_mib",
    "pinned_mib",
    "out_gb_s",
    "in_gb_s",
    "stall_ms",
    "exposed_host_ms",
    "hidden_share",
    "late",
    "fallbacks",
    "fraction",
    "lead_blocks",
)
"""Figures of a row of an arm that moves something."""


def arms_of(text: str, blocks: int) -> list[str]:
    """`--arms` as a list, with `checkpoint:sweep` written out."""
    return sweep([arm for arm in text.split(",") if arm], blocks)


def under(model: nn.Module, arm: str, kernels: str = "stock") -> AbstractContextManager[Any]:
    """The arm in force on the model: labels, or a rival by its own public means."""
    chosen = parse(arm)
    return install(model, chosen, kernels=kernels) if isinstance(chosen, Rival) else apply_plan(model, chosen, kernels=kernels)


def alternate(
    arms: Sequence[str],
    rounds: int,
    measure: Callable[[str, int], dict[str, Any]],
    *,
    seconds: float = math.inf,
    control_of: Callable[[str], str] | None = None,
    side_by_side: Callable[[tuple[str, str], int], dict[str, dict[str, Any]]] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Every arm once per round, in turns forwards and backwards; no round is begun that would likely end after `seconds`.

    With `control_of` the control of every other arm is measured once more right beside it, as `beside` of its row: where the host decides, its
    speed changes within seconds. `side_by_side` measures such a pair together; without it one follows the other.
    """
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    start = time.monotonic()
    with frozen_garbage():
        for index in range(rounds):
            if index and (time.monotonic() - start) * (index + 1) / index > seconds:
                print(f"{index} of {rounds} rounds, for lack of time", flush=True)
                break
            for arm in arms if index % 2 == 0 else arms[::-1]:
                control = control_of(arm) if control_of else arm
                pair = [arm] if arm == control else [control, arm] if index % 2 == 0 else [arm, control]
                rows = {}
                if len(pair) == 2 and side_by_side is not None:
                    torch.cuda.empty_cache()
                    rows = side_by_side((pair[0], pair[1]), index)
                else:
                    for one in pair:
                        torch.cuda.empty_cache()
                        rows[one] = measure(one, index)
                found[arm].append(rows[arm] if arm == control else {**rows[arm], "beside": rows[control]})
                print(f"  round {index + 1}: {arm} {found[arm][-1]['ms']:.1f} ms, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def in_turns(pair: tuple[str, str], step: Callable[[str], dict[str, Any]], turns: int, unseen: int = 1) -> dict[str, dict[str, Any]]:
    """Two arms in turns of one step, the first ones unseen; per arm the median of every figure that all of them have, and the largest peak."""
    rows: dict[str, list[dict[str, Any]]] = {arm: [] for arm in pair}
    for index in range(unseen + turns):
        for arm in pair if index % 2 == 0 else pair[::-1]:
            row = step(arm)
            if index >= unseen:
                rows[arm].append(row)
    known = {arm: [key for key in rows[arm][0] if all(row.get(key) is not None for row in rows[arm])] for arm in pair}
    found = {arm: {key: statistics.median(row[key] for row in rows[arm]) for key in known[arm]} for arm in pair}
    for arm in pair:
        found[arm]["peak_mib"] = max(row["peak_mib"] for row in rows[arm])
    return found


def twin(model: nn.Module) -> Any:
    """A second tree of modules over the same parameters and buffers: an arm stays in force on it while the model itself runs the control, so
    that a turn is one step, and both hold what one model holds."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def figures(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Median and range over rounds of what is known."""
    known = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: spread(values) for name, values in known.items() if values}


def judge(rounds: Mapping[str, Sequence[Mapping[str, Any]]], blocks: int, kernels: str) -> dict[str, Any]:
    """Per arm the figures of its rounds, their paired deltas in percent, and where it stands against the k-of-N line and the other arms.

    A pair is a row and the control beside it, or that of the same round.
    """
    control = rounds[CONTROL]
    entries, arms = [], {}
    for arm, rows in rounds.items():
        keys = [key for key in FIGURES if key in rows[0]]
        bases = [row.get("beside", base) for row, base in zip(rows, control, strict=True)]
        deltas = {key: [100 * (row[key] / base[key] - 1) for row, base in zip(rows, bases, strict=True)] for key in keys}
        arms[arm] = {key: spread([row[key] for row in rows]) for key in keys} | {f"{key}_pct": spread(deltas[key]) for key in keys}
        entries.append(
            {
                "arm": arm,
                "status": "ok",
                "rounds": len(rows),
                "blocks": blocks,
                "peak_allocated_mib": arms[arm]["peak_mib"]["median"],
                "peak_delta_pct": arms[arm]["peak_mib_pct"],
                "peak_rounds_mib": [row["peak_mib"] for row in rows],
                "step_delta_pct": arms[arm]["ms_pct"],
                "step_ms": {"rounds": [row["ms"] for row in rows]},
            }
        )
    pareto = analyse(entries, control=CONTROL, kernels=kernels)
    for point in pareto["points"]:
        ratio = point["ratio"]
        arms[point["arm"]] |= {"line_ratio": None if ratio is None else round(ratio, 3), "dominated_by": point["dominated_by"]}
    return {"rounds": len(control), "arms": arms, "control_spread_pct": pareto["spread"], "notes": pareto["notes"]}


def print_table(judged: Mapping[str, Any]) -> None:
    """One line per arm."""
    width = max(36, *map(len, judged["arms"]))
    print(
        f"{'arm':{width}s} {'ms':>8s} {'step':>8s} {'[range]':>17s} {'act MiB':>9s} {'':>8s} {'peak MiB':>9s} {'':>8s} {'x line':>6s}  dominated by"
    )
    for arm, entry in judged["arms"].items():
        ms, peak, act = entry["ms_pct"], entry["peak_mib_pct"], entry.get("act_mib")
        held = f"{act['median']:9.1f} {entry['act_mib_pct']['median']:+7.2f}%" if act else f"{'':18s}"
        ratio = "" if entry["line_ratio"] is None else f"{entry['line_ratio']:.2f}"
        print(
            f"{arm:{width}s} {entry['ms']['median']:8.2f} {ms['median']:+7.2f}% [{ms['min']:+7.2f},{ms['max']:+7.2f}] "
            f"{held} {entry['peak_mib']['median']:9.1f} {peak['median']:+7.2f}% {ratio:>6s}  {entry['dominated_by'] or ''}"
        )


def against_own_spread(runs: Sequence[Sequence[float]], other: Sequence[float]) -> dict[str, Any]:
    """Losses of one more run beside those of `runs`, which differ only by kernels that sum in varying order.

    The band of `runs`, from the least to the largest loss of each step, is what one more run of the same kind also leaves: `left_out` says in how
    many steps and by how much each of them is outside the band of the rest, `other_left_out` the same of `other` against these bands. The
    distances are the largest and the mean difference over steps, of any two of `runs`, and of `other` to any of them.
    """

    def outside(run: Sequence[float], band: Sequence[Sequence[float]]) -> dict[str, float]:
        by = [max(0.0, min(there) - here, here - max(there)) for here, there in zip(run, zip(*band, strict=True), strict=True)]
        return {"steps": sum(x > 0 for x in by), "at_most": round(max(by), 6)}

    def distance(one: Sequence[float], two: Sequence[float]) -> tuple[float, float]:
        apart = [abs(a - b) for a, b in zip(one, two, strict=True)]
        return max(apart), sum(apart) / len(apart)

    def worst(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
        return {"largest": round(max(most for most, _ in pairs), 6), "mean": round(max(mean for _, mean in pairs), 6)}

    rest = [[run for j, run in enumerate(runs) if j != i] for i in range(len(runs))]
    return {
        "outside": outside(other, runs),
        "left_out": [outside(run, band) for run, band in zip(runs, rest, strict=True)],
        "other_left_out": [outside(other, band) for band in rest],
        "own_distance": worst([distance(one, two) for i, one in enumerate(runs) for two in runs[:i]]),
        "distance": worst([distance(other, run) for run in runs]),
    }


def header(script: str) -> dict[str, Any]:
    """Date, command, device and the versions that decide the kernels."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python benchmarks/{script} " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **{name: version(name) for name in ("triton", "fla-core")}},
    }


def write(record: Mapping[str, Any], path: Path | None) -> None:
    """The record as JSON, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
