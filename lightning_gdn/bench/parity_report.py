"""A parity check as a table on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

from ..stayed import size
from .arms import is_rival

__all__ = ["caption", "cells", "markdown", "terminal_table"]

HEAD = ("arm", "verdict", "bit-equal", "worst tensor", "difference", "control's own", "× own", "replayed", "moved/step", "stayed/step")
OFFLOAD = ("moved/step", "stayed/step")
"""Columns that are left out where no arm has offload labels."""
NOTHING = "-"


def title(record: Mapping[str, Any]) -> str:
    """What was compared, on what."""
    data, trainer, plan = (record["recipe"][name] for name in ("data", "trainer", "plan"))
    environment, options = record["environment"], record["options"]
    device = environment["device"]
    if device == "cpu":
        device = f"{environment['cpu'] or 'cpu'}, {environment['threads']} thread(s)"
    what = f"{options['steps']} optimizer steps" if options["steps"] else "forward and backward"
    shape = f"seq {data['seq_len']}, batch {data['batch_size']} x {options['micro_batches']}, {trainer['precision']}, {plan['kernels']} kernels"
    return f"{record['name']}: {what}, {shape}, {device}"


def cells(entry: Mapping[str, Any], tensors: int) -> list[str]:
    """One arm as text, in the order of `HEAD`."""
    if entry["status"] != "ok":
        return [entry["arm"], entry["verdict"], *[NOTHING] * (len(HEAD) - 2)]
    replayed = ", ".join(f"{region} {count}" for region, count in entry["replayed"].items()) or ("-" if is_rival(entry["arm"]) else "nothing")
    verdict = entry["verdict"].upper() if _bad(entry) else entry["verdict"]
    worst = entry["rows"][0] if entry["rows"] else None
    shown = [NOTHING] * 4 if worst is None else [worst[0], _percent(worst[1]), _percent(worst[2]), _ratio(worst[4])]
    return [entry["arm"], verdict, f"{entry['equal']} of {tensors}", *shown, replayed, *_moved(entry.get("moved"))]


def _bad(entry: Mapping[str, Any]) -> bool:
    return bool(entry["outside"] or entry["status"] != "ok" or entry["verdict"] == "moved nothing")


def _moved(moved: Mapping[str, Any] | None) -> list[str]:
    """The columns of an arm with offload labels."""
    if moved is None:
        return [NOTHING, NOTHING]
    stayed = ", ".join(f"{reason} {size(nbytes)}" for reason, nbytes in moved["stayed_bytes_per_step"].items() if nbytes)
    return [size(moved["bytes_per_step"]) if moved["bytes_per_step"] else "nothing", stayed or "nothing"]


def _table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, those of offload only where some arm has its labels."""
    shown = [i for i, name in enumerate(HEAD) if name not in OFFLOAD or any(entry.get("moved") for entry in record["arms"])]
    rows = [cells(entry, record["control"]["tensors"]) for entry in record["arms"]]
    return [HEAD[i] for i in shown], [[row[i] for i in shown] for row in rows]


def caption(record: Mapping[str, Any]) -> list[str]:
    """Lines under the table: the control, kernels, notes, problems."""
    control, setting = record["control"], record["kernel_setting"]
    repeats = f"{control['repeats']} repeats of the control"
    if control["noisy_tensors"]:
        noise = f"{control['noisiest_relative_norm'] * 100:.3g} % in {control['noisiest']}"
        lines = [f"{repeats}: {control['noisy_tensors']} of {control['tensors']} tensors differ from its first run, by up to {noise}"]
        bounds = record["bounds"]
        lines.append(f"outside: each of {bounds['arm_runs']} runs is more than {bounds['factor']} times as far from it as any repeat")
    else:
        lines = [f"{repeats}: all {control['tensors']} tensors bit-equal; an arm must be, too. SHA-256 {control['sha256'][:16]}"]
    chosen = {"error": "deterministic ones", "warn": "deterministic ones where there are any", "default": "those of training"}
    lines.append(f"kernels: {chosen[setting['deterministic_algorithms']]}; " + ", ".join(f"{k} {v}" for k, v in record["kernels"].items()))
    without = setting["operations_without_a_deterministic_kernel"]
    if without:
        lines.append(f"without a deterministic kernel: {', '.join(without)}; fused attention then sums in varying order, as in training")
    if any(entry.get("moved") for entry in record["arms"]):
        what = "optimizer step" if record["options"]["steps"] else "forward and backward"
        lines.append(f"moved, stayed: of what its offload labels name, to the host and on the device, per {what}; auto at a share of 1")
    if record["options"]["plant"]:
        lines.append(f"planted error: what the replay of {record['options']['plant']} makes is off by one part in 128")
    lines += [f"note: {note}" for note in record["notes"]]
    return [*lines, *(f"PROBLEM: {problem}" for problem in record["problems"])]


def terminal_table(record: Mapping[str, Any]) -> Table:
    """The table for rich's console."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title(record), title_justify="left")
    head, rows = _table(record)
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index in (2, 4, 5, 6) else "left", overflow="fold")
    for entry, row in zip(record["arms"], rows, strict=True):
        table.add_row(*[Text(cell) for cell in row], style="red" if _bad(entry) else None)
    return table


def markdown(record: Mapping[str, Any]) -> str:
    """The same table as Markdown, with the environment."""
    head, body = _table(record)
    rows = [head, ["---"] * len(head), *body]
    lines = [f"# {record['name']}", "", title(record), ""]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines += ["", *[f"- {line}" for line in caption(record)]]
    environment = record["environment"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items() if version)
    lines += ["", f"Environment: Python {environment['python']}, {packages}, {environment['platform']}, {environment['cpu']}"]
    if environment.get("driver"):
        lines[-1] += f", driver {environment['driver']}, CUDA {environment['cuda']}"
    lines[-1] += f", git {environment['git_revision'] or 'n/a'}{' (with edits)' if environment['git_dirty'] else ''}"
    return "\n".join(lines) + "\n"


def _percent(value: float) -> str:
    return f"{value * 100:.3g} %"


def _ratio(value: float) -> str:
    return "∞" if value == float("inf") else f"{value:.2f}"
