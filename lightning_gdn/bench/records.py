"""JSON records of arms: written whole or not at all, and compared only with their like. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UnlikeRecordsError

__all__ = ["SCHEMA", "check_alike", "flatten", "losses_of", "not_finite", "read_json", "slug", "write_json"]

SCHEMA = 1
"""Version of the record and comparison files."""
OWN_FIELDS = ("recipe.plan.arm", "environment.autotune_cache", "environment.git_dirty")
"""May differ between arms: the arm itself; the tuning cache, which grows as arms run; edits of tracked files."""


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` so that a reader sees the old file or the new one, never half of it. NaN and infinity, no JSON, become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as handle:
            json.dump(_finite(data), handle, indent=1, allow_nan=False)
            handle.write("\n")
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def slug(arm: str) -> str:
    """An arm as a file name: `offload:gdn_core_attn@0.5` becomes `offload-gdn_core_attn-0.5`."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", arm)


def losses_of(record: Mapping[str, Any]) -> list[list[str]]:
    """The losses of every rank, as hexadecimal floats; of the one process if there was one."""
    return [part.get("losses_hex") or [] for part in (record.get("ranks") or [record]) if part is not None]


def not_finite(records: Iterable[Mapping[str, Any]]) -> str | None:
    """`3 of 20 losses are not finite`, over all ranks of all records; None if all are finite."""
    values = [float.fromhex(loss) for record in records for losses in losses_of(record) for loss in losses]
    bad = sum(not math.isfinite(value) for value in values)
    return f"{bad} of {len(values)} losses are not finite" if bad else None


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_alike(records: Sequence[Mapping[str, Any]]) -> None:
    """Records may be compared if environment, recipe and text are equal, the arm aside.

    A record without environment (its process died before it could look) is left out: it holds no measurement.

    Raises:
        UnlikeRecordsError: names every differing field with its values.
    """
    described = [
        (f"{r['arm']} round {r['round']}", flatten({"environment": r["environment"], "recipe": r["recipe"], "text": r.get("text") or {}}))
        for r in records
        if r.get("environment")
    ]
    if not described:
        return
    _, first = described[0]
    keys = dict.fromkeys(key for _, flat in described for key in flat)
    problems = []
    for key in keys:
        if key in OWN_FIELDS:
            continue
        odd = next(((name, flat) for name, flat in described if flat.get(key) != first.get(key)), None)
        if odd:
            problems.append(f"{key} ({described[0][0]}: {first.get(key)!r}, {odd[0]}: {odd[1].get(key)!r})")
    if problems:
        raise UnlikeRecordsError("these records differ in more than the arm and cannot be compared: " + "; ".join(problems))
