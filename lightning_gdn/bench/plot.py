"""A comparison as pictures: what each arm retains and how long its steps take, and saving against overhead."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .report import kernels_line, title

__all__ = ["draw", "draw_pareto", "subtitle"]


def subtitle(result: Mapping[str, Any]) -> str:
    """The kernels that ran; wrapped to the picture's width."""
    return "\n".join(textwrap.wrap(kernels_line(result), 130))


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write `result` as PNG: retained MiB and step time per arm, the range over rounds as a line; arms without a figure keep their row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # a figure with its own canvas: no pyplot, so neither a display nor global state is touched
    arms = list(reversed(result["arms"]))
    figure = Figure(figsize=(11, 2.4 + 0.55 * len(arms)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join([*textwrap.wrap(title(result), 110), subtitle(result)]), fontsize=9)
    left, right = figure.subplots(1, 2, sharey=True)
    names = ["\n".join(textwrap.wrap(entry["arm"].replace("+", " + "), 26)) for entry in arms]
    left.set_yticks(range(len(arms)), names, fontsize=8)
    base = next((entry for entry in arms if entry["arm"] == result["control"]), None)
    for row, entry in enumerate(arms):
        colour = "tab:gray" if entry is base else "tab:blue"
        _bar(left, row, _mib(entry), None, entry["retained_delta_pct"], entry, colour, "MiB")
        step = entry["step_ms"]
        _bar(right, row, step and step["median"], step, entry["step_delta_pct"], entry, colour, "ms")
    left.set_xlabel("retained from forward to backward, MiB")
    right.set_xlabel("step time, ms (median; line: range over rounds)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.22)
    figure.savefig(path, dpi=130, metadata={"Software": "lightning-gdn"})


def _mib(entry: Mapping[str, Any]) -> float | None:
    return None if entry["retained_bytes"] is None else entry["retained_bytes"] / 2**20


def _bar(axes: Any, row: int, value: float | None, spread: Any, delta: Any, entry: Mapping[str, Any], colour: str, unit: str) -> None:
    if value is None:
        axes.text(0, row, f" {entry['status'] if entry['status'] != 'ok' else 'n/a'}", va="center", fontsize=8, color="tab:red")
        return
    axes.barh(row, value, color=colour, height=0.6)
    end = value
    if spread and spread["max"] > spread["min"]:
        axes.plot([spread["min"], spread["max"]], [row, row], color="black", linewidth=1.2)
        end = max(value, spread["max"])
    change = "" if delta is None or colour == "tab:gray" else f" ({delta['median']:+.1f} %)"
    axes.text(end, row, f" {value:.1f} {unit}{change}", va="center", fontsize=8)


MARKERS = {"control": "D", "label": "o", "rival": "s"}
"""Shape by kind: to be told apart without colour."""


def draw_pareto(result: Mapping[str, Any], path: Path) -> bool:
    """Write saving against step-time overhead as PNG: labels round, rivals square, dominated ones hollow, the k-of-N line dashed.

    Returns:
        False, and writes nothing, if no arm beside the control has both figures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pareto = result["pareto"]
    points = [point for point in pareto["points"] if point["saving_pct"] is not None]
    if not any(point["kind"] != "control" for point in points):
        return False
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes, names = figure.subplots(1, 2, width_ratios=(2, 1))
    figure.suptitle("\n".join([*textwrap.wrap(title(result), 110), subtitle(result)]), fontsize=8)
    if pareto["line"]:
        xs, ys = ([point[key] for point in pareto["line"]] for key in ("saving_pct", "overhead_pct"))
        axes.plot(xs, ys, color="black", linewidth=1.0, linestyle="--", label="torch.utils.checkpoint around k of N blocks", zorder=1)
    seen: set[str] = set()
    listed = []
    for number, point in enumerate(points, start=1):
        kind, hollow = point["kind"], point["dominated_by"] is not None
        name = f"{kind}, dominated" if hollow else kind
        colour = "black" if kind == "control" else "tab:blue" if kind == "label" else "tab:orange"
        face = "white" if hollow else colour
        at = ([point["saving_pct"]], [point["overhead_pct"]])
        axes.scatter(*at, marker=MARKERS[kind], s=48, facecolor=face, edgecolor=colour, label=None if name in seen else name, zorder=2)
        seen.add(name)
        axes.annotate(str(number), (at[0][0], at[1][0]), xytext=(5, 4), textcoords="offset points", fontsize=7)
        listed += textwrap.wrap(f"{number}  {point['arm'].replace('+', ' + ')}", 46, subsequent_indent="    ")
    what = "allocated peak" if pareto["axis"] == "peak" else "retained bytes (no peak is measured on this device)"
    axes.set_xlabel(f"saved, percent of the control's {what}")
    axes.set_ylabel("step-time overhead, percent of the control")
    axes.axhline(0.0, color="lightgray", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1, y=0.1)
    axes.legend(fontsize=7, frameon=False)
    names.text(0, 1, "\n".join(listed), va="top", fontsize=8, transform=names.transAxes)
    names.set_axis_off()
    figure.savefig(path, dpi=130, metadata={"Software": "lightning-gdn"})
    return True
