"""A comparison as a table on the terminal and as Markdown."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["caption", "kernels_line", "markdown", "retained_remark", "terminal_table", "title", "write_csv"]

HEAD = (
    *("arm", "retained", "Δ", "peak allocated", "Δ", "step", "Δ paired [min, max]", "moved/step", "GB/s out, in", "stall", "pinned"),
    *("x line", "dominated by", "losses"),
)
OPTIONAL = ("moved/step", "GB/s out, in", "stall", "pinned", "x line", "dominated by")
"""Columns that are left out where no arm has an entry."""
TEXT = ("arm", "dominated by", "losses")
NOT_KNOWN = "n/a"


def title(result: Mapping[str, Any]) -> str:
    """What was compared, on what."""
    environment = result["environment"] or {}
    recipe = result["recipe"] or {}
    data, trainer = recipe.get("data", {}), recipe.get("trainer", {})
    shape = f"seq {data.get('seq_len')}, batch {data.get('batch_size')} x {trainer.get('accumulate_grad_batches')}, {trainer.get('precision')}"
    device = environment.get("device") or "unknown device"
    if device == "cpu":
        device = f"{environment.get('cpu') or 'cpu'}, {environment.get('threads')} thread(s)"
    return f"{result['name']}: {shape}, {result['rounds']} round(s), {device}"


def kernels_line(result: Mapping[str, Any]) -> str:
    """Which kernels ran: once if every arm ran the same, else per arm."""
    named = {entry["arm"]: ", ".join(f"{region} {kernel}" for region, kernel in entry["kernels"].items()) for entry in result["arms"]}
    known = {arm: text for arm, text in named.items() if text}
    if not known:
        return f"kernels: {NOT_KNOWN}"
    if len(set(known.values())) == 1:
        return f"kernels: {next(iter(known.values()))}" + (
            "" if len(known) == len(named) else f" ({NOT_KNOWN} for {', '.join(set(named) - set(known))})"
        )
    return "kernels: " + "; ".join(f"{arm}: {text or NOT_KNOWN}" for arm, text in named.items())


def caption(result: Mapping[str, Any]) -> list[str]:
    """Lines under the table: kernels, what the columns mean, notes, problems."""
    lines = [
        kernels_line(result),
        "retained: bytes that the blocks hold from forward to backward of one micro-batch; step: median after warm-up; "
        "Δ: percent against none in the same round, median over rounds",
    ]
    if result["environment"] and result["environment"]["device"] == "cpu":
        lines.append("step times of a CPU say nothing about a GPU, and on a busy machine little about each other; bytes and losses are exact")
    control = next((e for e in result["arms"] if e["arm"] == result["control"]), None)
    if control and control["loss_first"] is not None and control["loss_last"] is not None:
        lines.append(f"loss of {result['control']}: {control['loss_first']:.3f} -> {control['loss_last']:.3f} nats per byte")
    rivals = [entry for entry in result["arms"] if entry["retained_bytes"] is None and entry["retained_mib"] is not None]
    if rivals:
        lines.append("(allocator): what the whole model holds after a forward; the blocks' own share cannot be counted for these arms")
    if any(entry.get("offload") for entry in result["arms"]):
        lines.append("moved: to the host per optimizer step, of rank 0; stall: compute waited for copies; pinned: what the pool holds")
        lines.append("retained of an arm that moves something: of its last step; @ after moved: the share of the bytes that auto settled on")
    lines += result["pareto"]["notes"]
    lines += [f"dominated, kernels {each['kernels']}: {each['label']}: {each['text']}" for each in result["pareto"]["advice"]]
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"PROBLEM: {problem}" for problem in result["problems"]]
    return lines


def cells(entry: Mapping[str, Any]) -> list[str]:
    """One arm as text, in the order of `HEAD`."""
    if entry["status"] != "ok" and not entry["rounds"]:
        return [entry["arm"], *["" if name in OPTIONAL else NOT_KNOWN for name in HEAD[1:-1]], entry["status"]]
    control = entry["losses"]["verdict"] == "control"
    status = "" if entry["status"] == "ok" else f", {entry['status']} in other rounds"
    counted = entry["retained_bytes"] is not None or entry["retained_mib"] is None
    return [
        entry["arm"],
        _bytes(entry["retained_bytes"]) + retained_remark(entry) if counted else f"{entry['retained_mib']:.2f} MiB (allocator)",
        "" if control else _delta(entry["retained_delta_pct"] if counted else entry["retained_mib_delta_pct"]),
        NOT_KNOWN if entry["peak_allocated_mib"] is None else f"{entry['peak_allocated_mib']:.1f} MiB",
        "" if control else _delta(entry["peak_delta_pct"]),
        NOT_KNOWN if entry["step_ms"] is None else f"{entry['step_ms']['median']:.1f} ms",
        "" if control else _paired(entry["step_delta_pct"]),
        *_offload(entry.get("offload")),
        "" if entry["line_ratio"] is None else f"{entry['line_ratio']:.2f}",
        entry["dominated_by"] or "",
        _losses(entry) + (", not finite" if entry.get("not_finite") else "") + status,
    ]


def retained_remark(entry: Mapping[str, Any]) -> str:
    """What to know of `retained_bytes` of an arm (or of its record) that moves something; empty if nothing."""
    moved = entry.get("offload") or {}
    if entry.get("retained_of", moved.get("retained_of")) == "first forward":
        return ", first forward"
    return ", share not settled" if moved.get("asked") == "auto" and not moved["settled"] else ""


def _share(figures: Mapping[str, Any]) -> str:
    """The share of the bytes where `auto` chose it, over the rounds."""
    share = figures.get("share")
    if figures.get("asked") != "auto" or not share:
        return ""
    return f" @{share['min']:.2g}" + (f" to {share['max']:.2g}" if share["max"] != share["min"] else "")


def _offload(figures: Mapping[str, Any] | None) -> list[str]:
    """The columns of an arm that moves something; empty for one that does not."""
    if figures is None:
        return ["", "", "", ""]
    full = f", {figures['fallbacks']:g} stayed" if figures["fallbacks"] else ""
    rates = ", ".join(NOT_KNOWN if figures[way] is None else f"{figures[way]:.1f}" for way in ("out_gb_s", "in_gb_s"))
    host = figures.get("exposed_host_ms") or 0.0
    stall = NOT_KNOWN if figures["stall_ms"] is None else f"{figures['stall_ms']:.1f} ms" + (f" + {host:.1f} ms host" if host >= 0.05 else "")
    return [f"{figures['out_mib']:.1f} MiB{_share(figures)}{full}", rates, stall, f"{figures['pinned_held_mib']:.1f} MiB"]


def _table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, without the optional columns that would be empty."""
    rows = [cells(entry) for entry in result["arms"]]
    kept = [index for index, name in enumerate(HEAD) if name not in OPTIONAL or any(row[index] for row in rows)]
    return [HEAD[index] for index in kept], [[row[index] for index in kept] for row in rows]


def terminal_table(result: Mapping[str, Any]) -> Table:
    """The table for rich's console."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title(result), title_justify="left")
    head, rows = _table(result)
    for name in head:
        table.add_column(name, justify="left" if name in TEXT else "right", overflow="fold")
    for entry, row in zip(result["arms"], rows, strict=True):
        bad = entry["status"] != "ok" or any(problem.startswith(f"{entry['arm']}:") for problem in result["problems"])
        table.add_row(*[Text(cell) for cell in row], style="red" if bad else None)
    return table


def markdown(result: Mapping[str, Any]) -> str:
    """The same table as Markdown, with the environment it was measured in."""
    head, body = _table(result)
    rows = [head, ["---" if name in TEXT else "---:" for name in head], *body]
    lines = [f"# {result['name']}", "", title(result), ""]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines += ["", *[f"- {line}" for line in caption(result)]]
    failed = [f"- {e['arm']}: {e['status']}: {e['error']}" for e in result["arms"] if e["status"] != "ok"]
    if failed:
        lines += ["", "Arms that did not finish:", "", *failed]
    environment = result["environment"]
    if environment:
        packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
        lines += ["", f"Environment: Python {environment['python']}, {packages}, {environment['platform']}, {environment['cpu']}"]
        if environment.get("driver"):
            lines[-1] += f", driver {environment['driver']}, CUDA {environment['cuda']}"
        lines[-1] += f", git {environment['git_revision'] or NOT_KNOWN}{' (with edits)' if environment['git_dirty'] else ''}"
    if result["text"]:
        text = result["text"]
        lines += ["", f"Text: {text['source']}, {text['files']} files, {text['bytes']} bytes, SHA-256 {text['sha256'][:16]}"]
    return "\n".join(lines) + "\n"


def write_csv(result: Mapping[str, Any], path: Path) -> None:
    """The table of `comparison.json` as CSV."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(result["table"]["columns"])
        writer.writerows(result["table"]["rows"])


def _bytes(count: int | None) -> str:
    return NOT_KNOWN if count is None else f"{count / 2**20:.2f} MiB ({count:,} B)"


def _delta(spread: Mapping[str, Any] | None) -> str:
    return NOT_KNOWN if spread is None else f"{spread['median']:+.1f} %"


def _paired(spread: Mapping[str, Any] | None) -> str:
    return NOT_KNOWN if spread is None else f"{spread['median']:+.1f} % [{spread['min']:+.1f}, {spread['max']:+.1f}]"


def _losses(entry: Mapping[str, Any]) -> str:
    losses = entry["losses"]
    if losses["verdict"] != "differ":
        return str(losses["verdict"])
    gap = losses["max_abs_diff"]
    return f"differ by up to {NOT_KNOWN if gap is None else format(gap, '.3g')} from micro-batch {losses['first_step']}"
