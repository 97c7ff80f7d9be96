"""A profile as tables on the terminal, and as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

from .records import not_finite

__all__ = ["arm_table", "caption", "draw_profile", "kernel_table", "region_table", "tensor_tables", "title"]

NOT_KNOWN = "n/a"
MIB = 2**20
NO_EFFECT = 0.1
"""A peak that falls by less than this part of what is freed is held by something else, and the caption says by what."""
BOOKS_PCT = 1.0
"""Percent of the step from which time beside replays is worth a line."""
NAME_WIDTH = 64
HELD_BY = {"forward": "blocks, forward", "loss forward": "loss, forward", "loss backward": "loss, backward", "backward": "blocks, backward"}


def title(record: Mapping[str, Any]) -> str:
    """What was profiled, on what."""
    data, trainer, environment = record["recipe"]["data"], record["recipe"]["trainer"], record["environment"]
    device = f"{environment['cpu']}, {environment['threads']} thread(s)" if environment["device"] == "cpu" else environment["device"]
    shape = f"seq {data['seq_len']}, batch {data['batch_size']} x {trainer['accumulate_grad_batches']}, {trainer['precision']}"
    return f"{record['name']}: {shape}, kernels {record['recipe']['plan']['kernels']}, {device}"


def _mib(count: int | None, *, sign: bool = False) -> str:
    return NOT_KNOWN if count is None else f"{count / MIB:{'+' if sign else ''},.2f}"


def _ms(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.3f}"


def _table(heading: str, columns: Mapping[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=heading, title_justify="left", box=box.SIMPLE, padding=(0, 1))
    for name, justify in columns.items():
        table.add_column(name, justify=justify, overflow="fold", no_wrap=justify == "right")  # type: ignore[arg-type]
    return table


def region_table(record: Mapping[str, Any]) -> Table:
    """Regions: forward, backward and replay time, retained bytes, what a replay allocates."""
    right = dict.fromkeys(("blocks", "forward ms", "backward ms", "replay ms", "retained MiB", "replay peak MiB"), "right")
    table = _table("regions, all blocks together, per micro-batch", {"region": "left", **right})
    for row in record["regions"]:
        table.add_row(
            row["region"],
            str(row["blocks"]),
            _ms(row["forward_ms"]),
            _ms(row["backward_ms"]),
            "not replayed" if row["replay_ms"] is None else _ms(row["replay_ms"]),
            _mib(row["retained_bytes"]),
            "" if row["replay_ms"] is None else _mib(row["replay_peak_bytes"]),
        )
    outside = record["outside"]
    table.add_row("outside regions", "", _ms(outside["forward_ms"]), _ms(outside["backward_ms"]), "", "", "", style="dim")
    return table


def kernel_table(record: Mapping[str, Any]) -> Table:
    """The kernels of most time in each region's forward, with their part of it."""
    on_gpu = any(row["kernels_on_gpu"] for row in record["regions"])
    table = _table("kernels that ran" if on_gpu else "operators that ran", {"region": "left", "of its time": "left"})
    for row in record["regions"]:
        named = [f"{kernel['share'] * 100:.0f} % {_short(kernel['name'])}" for kernel in row["kernels"]]
        if row["bound_kernel"]:
            named.insert(0, f"bound: {row['bound_kernel']}")
        table.add_row(row["region"], "\n".join(named) or NOT_KNOWN)
    return table


def _short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def arm_table(record: Mapping[str, Any]) -> Table:
    """Arms: what each frees and costs, what becomes of the peak, and who holds it."""
    measured = any(entry["measured"] for entry in record["arms"])
    right = ["frees MiB", "of all", "costs ms", "of step", *(["measured"] if measured else []), "peak MiB"]
    table = _table("what each arm frees and costs", {"arm": "left", **dict.fromkeys(right, "right"), "peak held by": "left"})
    for entry in record["arms"]:
        share = entry["freed_pct"]
        table.add_row(
            entry["arm"].replace("+", "\n+"),
            _mib(entry["freed_bytes"]),
            NOT_KNOWN if share is None else f"{share:.1f} %",
            _ms(entry["cost_ms"]),
            f"{entry['cost_pct']:+.2f} %",
            *([f"{entry['measured']['median_pct']:+.2f} %" if entry["measured"] else NOT_KNOWN] if measured else []),
            _mib(entry["peak_delta_bytes"], sign=True),
            _held_by(entry["peak_held_by"]),
        )
    return table


def _held_by(phase: str | None) -> str:
    return NOT_KNOWN if phase is None else HELD_BY.get(phase, phase)


def caption(record: Mapping[str, Any]) -> list[str]:
    """Lines under the tables: the control, what the columns mean, where a peak does not follow, remarks."""
    control = record["control"]
    step, phases = control["step_ms"], control["phases_ms"]
    lines = [
        f"control: step {step['median']:.1f} ms [{step['min']:.1f}, {step['max']:.1f}]: " + ", ".join(f"{n} {ms:.1f}" for n, ms in phases.items()),
        f"retained {_mib(control['retained_bytes'])} MiB per micro-batch; "
        + (
            f"peak {_mib(control['peak_bytes'])} MiB, held by: {_held_by(control['peak_held_by'])}"
            if control["peak_bytes"] is not None
            else "peak n/a: this device does not count what is allocated"
        ),
        "costs: the arm's replays, timed in steps of its own, for all micro-batches of a step",
        "offload labels and the section offload have no part here: what moves is measured by lightning-gdn compare and checked by parity",
    ]
    if abs(control["by_region_delta_ms"]) >= BOOKS_PCT / 100 * step["median"]:
        lines.append(f"run region by region, nothing recomputed, a step takes {control['by_region_delta_ms']:+.1f} ms: in every arm, in no replay")
    unknown = [entry["arm"] for entry in record["arms"] if entry["bookkeeping_pct"] is None]
    if unknown:
        whom = "every arm" if len(unknown) == len(record["arms"]) else ", ".join(unknown)
        lines.append(
            f"beside replays, what recording regions and finding their tensors cost is n/a for {whom}: below how much steps differ from each "
            "other, or fewer than three --steps"
        )
    books = [entry for entry in record["arms"] if (entry["bookkeeping_pct"] or 0.0) >= BOOKS_PCT]
    if books:
        told = ", ".join(f"{entry['arm']} {entry['bookkeeping_ms']:.1f} ms ({entry['bookkeeping_pct']:+.1f} %)" for entry in books)
        lines.append(f"beside replays, recording regions and finding their tensors cost about: {told}")
    lines += [line for entry in record["arms"] if (line := _no_effect(entry, control))]
    diverged = not_finite([record])
    if diverged:
        lines.append(f"{diverged}: the training diverged; times and bytes are those of a model that computes nothing of use")
    if record["labels_left_out"]:
        lines.append(f"do not apply to this model: {', '.join(record['labels_left_out'])}")
    return lines + [f"note: {remark}" for remark in record["remarks"]]


def _no_effect(entry: Mapping[str, Any], control: Mapping[str, Any]) -> str | None:
    """Said of an arm that frees something worth having and does not lower the peak by it."""
    freed, delta = entry["freed_bytes"], entry["peak_delta_bytes"]
    if delta is None or freed < 0.01 * control["retained_bytes"] or -delta >= NO_EFFECT * freed:
        return None
    return (
        f"{entry['arm']}: frees {_mib(freed)} MiB, the peak changes by {_mib(delta, sign=True)} MiB: it is held by: {_held_by(entry['peak_held_by'])}"
    )


def tensor_tables(record: Mapping[str, Any]) -> list[Table]:
    """One table per kind of block: its saved storages, the largest first within each region."""
    tables = []
    for kind in record["tensors"]:
        heading = f"saved by {kind['block']} ({kind['kind']}; {kind['blocks']} like it), every region kept"
        table = _table(heading, {"region": "left", "shape": "left", "type": "left", "KiB": "right", "held by": "left", "also saved in": "left"})
        last = None
        for row in kind["storages"]:
            shape = " x ".join(map(str, row["shape"])) or "scalar"
            if not row["contiguous"]:
                shape += f" strided {list(row['stride'])}"
            if row["view_nbytes"] < row["nbytes"]:
                shape += f", {row['view_nbytes'] / row['nbytes'] * 100:.0f} % of its storage"
            what = row["dtype"] + (" (weight cast)" if row["weight_cast"] else "")
            nodes, aliases = ", ".join(row["nodes"]) or NOT_KNOWN, ", ".join(row["aliases"])
            table.add_row(row["region"] if row["region"] != last else "", shape, what, f"{row['nbytes'] / 1024:,.1f}", nodes, aliases)
            last = row["region"]
        total = sum(row["nbytes"] for row in kind["storages"])
        table.add_row("all", f"{len(kind['storages'])} storages", "", f"{total / 1024:,.1f}", "", "", style="bold")
        tables.append(table)
    return tables


def draw_profile(record: Mapping[str, Any], path: Path) -> None:
    """Write the regions as PNG: forward, backward and replay ms stacked, retained MiB beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(reversed(record["regions"]))
    figure = Figure(figsize=(11, 2.2 + 0.36 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(textwrap.wrap(title(record), 110)), fontsize=9)
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_yticks(range(len(rows)), [row["region"] for row in rows], fontsize=8)
    ends = [0.0] * len(rows)
    for kind, colour in (("forward", "tab:blue"), ("backward", "tab:gray"), ("replay", "tab:orange")):
        values = [max(0.0, row[f"{kind}_ms"] or 0.0) for row in rows]
        left.barh(range(len(rows)), values, left=ends, color=colour, height=0.6, label=kind)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    right.barh(range(len(rows)), [row["retained_bytes"] / MIB for row in rows], color="tab:green", height=0.6)
    for index, row in enumerate(rows):
        left.text(ends[index], index, f" {ends[index]:.2f}", va="center", fontsize=7)
        right.text(row["retained_bytes"] / MIB, index, f" {row['retained_bytes'] / MIB:.2f}", va="center", fontsize=7)
    left.set_xlabel("ms per micro-batch, all blocks")
    right.set_xlabel("retained from forward to backward, MiB, all blocks")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.16)
    figure.savefig(path, dpi=130, metadata={"Software": "lightning-gdn"})
