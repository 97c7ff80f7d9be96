"""The Pareto view of a comparison: what each arm saves, what it costs, and what does both better. Imports no torch.

**Saving** is the paired change of the allocated peak against the control, its sign turned; on a device without allocator counters (a CPU)
that of the retained bytes, and the result says so. **Overhead** is the paired change of step time. Both are medians over rounds.

**The k-of-N line** is what anybody gets without any of this: `torch.utils.checkpoint` around k of the N blocks. It runs from the control
through the arms `checkpoint:block:K` to `checkpoint:full`, straight between neighbours in K. Without such an arm there is no line, and
arms are judged against each other alone.

**Dominated** is an arm if another one saves as much and costs no more, by their medians, and is clearly better in one of the two: it saves at
least one point more, or it costs less by more than what the control's own rounds differ by, (largest - smallest) / median. (Savings that
differ by less than the control's own peaks are equal.) An arm is dominated by the line if that costs less by more than this spread at the
same saving. So the noisier the machine, the fewer verdicts. With one round of the control its spread is not known, and nothing is called
dominated.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import Rival, meaning, parse

__all__ = ["LINE", "Point", "analyse"]

LINE = "k-of-N line"
CLEAR_SAVING = 1.0
"""Percentage points of saving that are worth changing a plan for."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One arm with both figures, in percent of the control."""

    arm: str
    kind: str
    """`control`, `label`, or `rival`."""
    saving: float
    overhead: float
    blocks: int | None = None
    """K, for a point of the k-of-N line; 0 for the control; None too for `checkpoint:full` of an unknown number of blocks."""
    on_line: bool = False
    finished: bool = True
    """False if a round failed: its figures stand, but nothing is dominated by it."""
    plan: Hashable = None
    """Equal for arms that are one plan (`arms.meaning`), which do not dominate each other."""


def analyse(entries: Sequence[Mapping[str, Any]], *, control: str, kernels: str | None = None) -> dict[str, Any]:
    """Judge the entries of a comparison (`judge`).

    Args:
        entries: one per arm; read are `arm`, `status`, `rounds`, `blocks`, the paired deltas of peak, retained bytes and step time, and of
            the control the rounds of `step_ms`, `peak_rounds_mib` and `retained_bytes`.
        kernels: the option `kernels` of the comparison; goes into the advice.

    Returns:
        `axis` (`peak` or `retained`), `spread` (percent, of the control's rounds; None if unknown), `line` (its points), `points` (one per arm
        in the order of `entries`, figures None where there are none), `advice` (for each dominated label what to take instead) and `notes`.
    """
    base = next((entry for entry in entries if entry["arm"] == control), None)
    axis = "peak" if base is not None and base.get("peak_allocated_mib") is not None else "retained"
    spread = _spread(base, axis)
    points = [point for entry in entries if (point := _point(entry, axis, control)) is not None]
    line = _line(points)
    rows = [_row(entry, next((point for point in points if point.arm == entry["arm"]), None), points, line, spread) for entry in entries]
    return {
        "axis": axis,
        "spread": spread,
        "line": [{"arm": point.arm, "k": point.blocks, "saving_pct": point.saving, "overhead_pct": point.overhead} for point in line],
        "points": rows,
        "advice": _advice(rows, axis, kernels),
        "notes": _notes(axis, spread, rows),
    }


def _point(entry: Mapping[str, Any], axis: str, control: str) -> Point | None:
    arm = entry["arm"]
    memory, time = entry.get(f"{axis}_delta_pct"), entry.get("step_delta_pct")
    if not entry["rounds"] or memory is None or time is None:
        return None
    kind, on_line, count = _kind(arm, control), False, None
    if kind == "rival":
        rival = parse(arm)
        assert isinstance(rival, Rival)
        on_line = rival.whole_blocks
        count = rival.num_blocks or entry.get("blocks") if on_line else None
    return Point(
        arm=arm,
        kind=kind,
        saving=0.0 if kind == "control" else -memory["median"],
        overhead=0.0 if kind == "control" else time["median"],
        blocks=0 if kind == "control" else count,
        on_line=on_line or kind == "control",
        finished=entry["status"] == "ok",
        plan=_plan(arm),
    )


def _kind(arm: str, control: str) -> str:
    if arm == control:
        return "control"
    try:
        return "rival" if isinstance(parse(arm), Rival) else "label"
    except ValueError:
        return "label"


def _plan(arm: str) -> Hashable:
    try:
        return meaning(parse(arm))
    except ValueError:
        return arm


def _spread(base: Mapping[str, Any] | None, axis: str) -> dict[str, float] | None:
    """How far the control's own rounds lie apart, in percent of their median."""
    if base is None or base["step_ms"] is None:
        return None
    times = _known(base["step_ms"]["rounds"])
    memory = _known(base.get("peak_rounds_mib") or []) if axis == "peak" else []
    if len(times) < 2:
        return None
    return {"saving": _range_pct(memory), "overhead": _range_pct(times)}


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _range_pct(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values) * 100.0 if values else 0.0


def _line(points: Sequence[Point]) -> list[Point]:
    """The points of the k-of-N line in the order of K; empty if only the control is there."""
    found = sorted((point for point in points if point.on_line), key=lambda point: float("inf") if point.blocks is None else point.blocks)
    return found if len(found) > 1 and found[0].kind == "control" else []


def at_saving(line: Sequence[Point], saving: float) -> tuple[float, float | None] | None:
    """The line's overhead at a saving, with K, or None outside of it. Where noise makes it cross a saving twice, the cheaper crossing."""
    found: list[tuple[float, float | None]] = []
    for a, b in itertools.pairwise(line):
        low, high = sorted((a.saving, b.saving))
        if low <= saving <= high and high > low:
            share = (saving - a.saving) / (b.saving - a.saving)
            count = None if a.blocks is None or b.blocks is None else a.blocks + share * (b.blocks - a.blocks)
            found.append((a.overhead + share * (b.overhead - a.overhead), count))
    return min(found, key=lambda crossing: crossing[0], default=None)


def _row(
    entry: Mapping[str, Any], point: Point | None, points: Sequence[Point], line: Sequence[Point], spread: Mapping[str, float] | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arm": entry["arm"],
        "kind": point.kind if point else None,
        "saving_pct": None,
        "overhead_pct": None,
        "line_overhead_pct": None,
        "ratio": None,
        "dominated_by": None,
        "dominated_text": None,
    }
    if point is None:
        return row
    row |= {"saving_pct": point.saving, "overhead_pct": point.overhead}
    crossing = None if point.kind == "control" or point.saving <= 0 else at_saving(line, point.saving)
    if crossing is not None:
        row["line_overhead_pct"] = crossing[0]
        row["ratio"] = point.overhead / crossing[0] if crossing[0] > 0 and not point.on_line else None
    if spread is None or point.kind == "control":
        return row
    better = [other for other in points if other.finished and other.plan != point.plan and _dominates(other, point, spread)]
    if better:
        best = min(better, key=lambda other: (other.overhead, -other.saving))
        row["dominated_by"] = best.arm
        row["dominated_text"] = f"{best.arm} saves {best.saving:.1f} % for {best.overhead:+.1f} %"
    elif crossing is not None and not point.on_line and crossing[0] < point.overhead - spread["overhead"]:
        where = "" if crossing[1] is None else f" at K≈{crossing[1]:.1f}"
        row["dominated_by"] = f"{LINE}{where}"
        row["dominated_text"] = f"the {LINE}{where} saves as much for {crossing[0]:+.1f} %"
    return row


def _dominates(a: Point, b: Point, spread: Mapping[str, float]) -> bool:
    saves, costs = a.saving - b.saving, a.overhead - b.overhead
    if saves < -spread["saving"] or costs > 0:
        return False
    return saves >= max(CLEAR_SAVING, spread["saving"]) or costs < -spread["overhead"]


def _advice(rows: Sequence[Mapping[str, Any]], axis: str, kernels: str | None) -> list[dict[str, Any]]:
    """One line per dominated arm of labels, as `labels.advice` could say it for (label, kernels)."""
    what = "of the peak" if axis == "peak" else "of retained bytes"
    return [
        {
            "label": row["arm"],
            "kernels": kernels,
            "text": f"{row['dominated_text']}; this saves {row['saving_pct']:.1f} % {what} for {row['overhead_pct']:+.1f} % step time",
        }
        for row in rows
        if row["kind"] == "label" and row["dominated_by"] is not None
    ]


def _notes(axis: str, spread: Mapping[str, float] | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    judged = [row for row in rows if row["saving_pct"] is not None and row["kind"] != "control"]
    if not judged:
        return []
    notes = []
    if axis == "retained":
        notes.append("no peak is measured on this device: savings of the Pareto view are of retained bytes")
    unknown = [row["arm"] for row in rows if row["saving_pct"] is None]
    if unknown:
        notes.append(f"not in the Pareto view, for want of a figure: {', '.join(unknown)}")
    if any(row["ratio"] is not None for row in judged):
        notes.append(f"x line: step-time overhead over that of the {LINE} (torch.utils.checkpoint around K whole blocks) at the same saving")
    if spread is None:
        notes.append("one round of the control: its spread is unknown, so no arm is called dominated")
    elif any(row["dominated_by"] is not None for row in judged):
        notes.append(
            "dominated: another arm (or the line) saves as much, costs no more, and saves a point more or costs clearly less: by more than the "
            f"control's own spread of {spread['overhead']:.2f} % of time"
        )
    return notes
