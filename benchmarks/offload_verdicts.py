"""Verdicts over the traces of `offload_matrix.py`: equal bits, constant memory, one set of tuning results. No torch, no processes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["Row", "bits", "configs", "digests", "finite", "memory", "moves", "one_value", "rollup", "steady_from", "verdict"]

Row = Mapping[str, Any]
WHAT = {
    "losses": "loss of micro-batch",
    "grad_norm": "gradient norm",
    "weights": "weights",
    "optimizer": "optimizer state",
    "weights_sha256": "SHA-256 of the weights",
    "optimizer_sha256": "SHA-256 of the optimizer state",
}
"""What is compared, in the order in which a step makes it."""
EVERY = ("losses", "grad_norm", "weights", "optimizer")
"""What a row of a step has."""
BYTES = ("allocated", "peak", "reserved", "pinned")


def verdict(what: str, ok: bool | None, note: str, **more: Any) -> dict[str, Any]:
    """One line of the judgement; `ok` None: could not be judged."""
    return {"what": what, "ok": ok, "note": note, **more}


def first_difference(rows: Sequence[Row], control: Sequence[Row]) -> dict[str, Any] | None:
    """Earliest step, and what in it, of which the bits differ; what only one side has is not compared."""
    wanted = {row["step"]: row for row in control}
    for row in rows:
        other = wanted.get(row["step"])
        for key, name in WHAT.items() if other is not None else ():
            if key not in row or key not in other or row[key] == other[key]:
                continue
            if key == "losses":
                at = next((i for i, pair in enumerate(zip(row[key], other[key], strict=False)) if pair[0] != pair[1]), None)
                if at is None:
                    return {"step": row["step"], "what": "number of losses", "got": len(row[key]), "expected": len(other[key])}
                return {"step": row["step"], "what": f"{name} {at + 1}", "got": row[key][at], "expected": other[key][at]}
            return {"step": row["step"], "what": name, "got": row[key], "expected": other[key]}
    return None


def _whole(rows: Sequence[Row]) -> set[int]:
    return {row["step"] for row in rows if all(key in row for key in EVERY)}


def bits(what: str, rows: Sequence[Row], control: Sequence[Row], expected: int) -> dict[str, Any]:
    """Equal bit for bit on all of `expected` steps? Not judged if fewer steps could be compared and all of these are equal."""
    shared = len(_whole(rows) & _whole(control))
    found = first_difference(rows, control)
    if found is not None:
        note = f"differs first at step {found['step']}: {found['what']} {found['got']} instead of {found['expected']}"
        return verdict(what, False, note, steps=shared, difference=found)
    if shared < expected:
        return verdict(what, None, f"no difference, but only {shared} of {expected} steps could be compared", steps=shared)
    hashed = sum("weights_sha256" in row and row["step"] > 0 for row in rows)
    note = f"losses, gradient norms, weights and optimizer state equal bit for bit on {shared} steps, {hashed} of them by SHA-256"
    return verdict(what, True, note, steps=shared)


def steady_from(rows: Sequence[Row], warm: int) -> int | None:
    """First step of the steady state: after `warm` steps, and for `auto` one step after its share last changed. None: `auto` never settled."""
    steps = [row for row in rows if "losses" in row]
    first = warm + 1
    if any(row.get("settled") is not None for row in steps):
        if not steps[-1]["settled"]:
            return None
        for before, row in pairwise(steps):
            if row["fraction"] != before["fraction"]:
                first = max(first, row["step"] + 1)
        first = max(first, next(row["step"] for row in steps if row["settled"]) + 2)
    return first


def rollup(rows: Sequence[Row], first: int) -> dict[str, Any]:
    """Of every memory figure from step `first` on: first and last, least and most, how many values; bytes."""
    steady = [row for row in rows if "losses" in row and row["step"] >= first]
    found: dict[str, Any] = {"from_step": first, "steps": len(steady)}
    for key in BYTES:
        values = [row[key] for row in steady if key in row]
        if values:
            found[key] = {"first": values[0], "last": values[-1], "min": min(values), "max": max(values), "distinct": len(set(values))}
    # None may be in use after any step, steady or not
    in_use = [row["buffers_in_use"] for row in rows if "buffers_in_use" in row]
    return found | ({"buffers_in_use_max": max(in_use)} if in_use else {})


def memory(what: str, found: Mapping[str, Any], control: Mapping[str, Any] | None, expected: int) -> dict[str, Any]:
    """Constant figures over `expected` steps, or varying no more than the untouched model's own; no buffer in use after any step."""
    problems, notes = [], []
    for key in BYTES:
        values = found.get(key)
        if values is None:
            continue
        base = (control or {}).get(key)
        if values["distinct"] == 1:
            notes.append(f"{key} constant at {values['first']}")
        elif base is not None and base["distinct"] > 1 and values["max"] - values["min"] <= base["max"] - base["min"]:
            notes.append(f"{key} {values['min']} to {values['max']}, which is no more than in the control")
        else:
            problems.append(f"{key} has {values['distinct']} values from {values['min']} to {values['max']}, last {values['last']}")
    if found.get("buffers_in_use_max"):
        problems.append(f"up to {found['buffers_in_use_max']} buffers in use after a step")
    if problems:
        return verdict(what, False, "; ".join(problems))
    if found["steps"] < expected:
        return verdict(what, None, f"only {found['steps']} of {expected} steady steps; {'; '.join(notes)}")
    return verdict(what, True, f"{found['steps']} steps from step {found['from_step']}: {'; '.join(notes)}; no buffer in use after any step")


def moves(what: str, rows: Sequence[Row], *, first_only: bool) -> dict[str, Any]:
    """Whether the arm moved anything at all, and all of it back; with `first_only` in the first step (`auto` may settle on nothing)."""
    steps = [row for row in rows if "losses" in row]
    if not steps:
        return verdict(what, None, "no step")
    idle = [row["step"] for row in (steps[:1] if first_only else steps) if not row.get("bytes_out")]
    lost = [row["step"] for row in steps if row.get("bytes_out") != row.get("bytes_in")]
    if idle or lost:
        return verdict(what, False, f"nothing moved in step {idle[0]}" if idle else f"bytes out and back differ in step {lost[0]}")
    sizes = sorted({row["bytes_out"] for row in steps})
    return verdict(what, True, f"{sizes[0]} to {sizes[-1]} bytes per step out, and as many back; late reloads {sum(row['late'] for row in steps)}")


def one_value(what: str, values: Mapping[str, Any], *, required: bool) -> dict[str, Any]:
    """The same in all processes. `required`: None is no value."""
    if not values:
        return verdict(what, None, "no process told")
    first, base = next(iter(values.items()))
    odd = next((name for name, value in values.items() if value != base), None)
    if odd is not None:
        return verdict(what, False, f"{odd}: {values[odd]}, {first}: {base}")
    return verdict(what, base is not None or not required, f"{len(values)} readings: {base}")


def configs(what: str, found: Mapping[str, Mapping[str, str]], control: str) -> dict[str, Any]:
    """Every kernel configuration that an arm ran is the one that the control ran for the same key."""
    base = found.get(control)
    if base is None:
        return verdict(what, None, "the control told none")
    for name, own in found.items():
        for key, config in own.items():
            if key in base and base[key] != config:
                return verdict(what, False, f"{name} ran {key} as {config}, {control} as {base[key]}")
    more = {name: len(own.keys() - base.keys()) for name, own in found.items() if own.keys() - base.keys()}
    return verdict(what, True, f"{len(base)} kernels and keys" + (f"; the control has no {more}" if more else ""))


def finite(what: str, traces: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    """Losses and gradient norms of all arms."""
    values = [
        (name, row["step"], float.fromhex(x))
        for name, rows in traces.items()
        for row in rows
        for x in (*row.get("losses", ()), row.get("grad_norm", "0x0p+0"))
    ]
    bad = next(((name, step) for name, step, value in values if not math.isfinite(value)), None)
    if bad is not None:
        return verdict(what, False, f"{bad[0]}, step {bad[1]}")
    return verdict(what, bool(values) or None, f"{len(values)} losses and gradient norms")


def digests(rows: Sequence[Row]) -> str:
    """Eight hexadecimal digits per step over losses, gradient norm and fingerprints: small enough to keep for every step."""
    return " ".join(
        hashlib.sha256(json.dumps([row[key] for key in EVERY]).encode()).hexdigest()[:8] for row in rows if all(key in row for key in EVERY)
    )
