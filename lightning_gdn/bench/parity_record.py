"""The record of a parity check: what is written, and nothing that runs a model."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .judge import CONTROL
from .parity_judge import EQUAL, LOSSES, WEIGHT, Gap, Row
from .plant import Plant

__all__ = ["ArmRuns", "Moved", "describe", "write_csv"]

DETAIL_ROWS = 140
"""Rows of tensors in parity.json, over all arms, so that it stays under 50 KB; tensors.csv has all of them."""

Tensors = Mapping[str, tuple[int, float, bool, str]]
"""By tensor of the reference: number of elements, norm, whether it is finite, SHA-256 of its bytes."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What an arm with offload labels moved in the runs that were compared."""

    nbytes: int
    """To the host, per step."""
    share: float
    """Of the bytes, as asked for."""
    stayed: dict[str, int]
    """Bytes per step that its labels named and that stayed on the device, by reason."""
    unmoved: tuple[str, ...]
    """Labels of which nothing moved."""
    why: str
    """Why bytes stayed, and what to do about it."""

    @property
    def unexercised(self) -> bool:
        """It was to move something and moved nothing: then its equality is no proof that moving is right."""
        return self.nbytes == 0 and self.share > 0


@dataclass
class ArmRuns:
    """What is known of one arm."""

    name: str
    status: str = "ok"
    error: str | None = None
    runs: list[dict[str, Gap]] = field(default_factory=list)
    plan: str | None = None
    replayed: dict[str, int] = field(default_factory=dict)
    """Region -> replays of one micro-batch, over all blocks."""
    moved: Moved | None = None
    """None of an arm without offload labels."""
    served: int = 0
    """Tensors that a planted error has changed."""
    rows: list[Row] = field(default_factory=list)


def describe(
    arms: Sequence[ArmRuns],
    tensors: Tensors,
    noise: Mapping[str, Gap],
    blocks: Sequence[str],
    *,
    repeats: int,
    plant: Plant | None,
    located: bool = True,
) -> dict[str, Any]:
    """Control, arms, notes and problems of the record.

    Args:
        noise: the control's own largest distances.
        blocks: module names, in the order of the forward.
        repeats: runs of the control beside the reference.
        located: the gradients that were compared are backward's own, at the weights that all runs began with. Otherwise (after an optimizer
            step, or clipped by the norm of all) a difference is everywhere, and where it came in is not claimed.
    """
    notes, problems = [], []
    bad = [name for name, (_, _, finite, _) in tensors.items() if not finite]
    if bad:
        problems.append(f"{CONTROL}: {len(bad)} tensors are not finite ({bad[0]} first): their comparison proves nothing")
    zero = [name for name, (_, norm, finite, _) in tensors.items() if finite and norm == 0.0]
    if zero:
        notes.append(f"{CONTROL}: {len(zero)} tensors are all zero, which proves nothing about them: {', '.join(zero[:3])}")
    if not any(norm for name, (_, norm, _, _) in tensors.items() if name != LOSSES):
        problems.append(f"{CONTROL}: every gradient is zero")
    per_arm = max(3, DETAIL_ROWS // max(1, sum(bool(arm.rows) for arm in arms)))
    entries = []
    for arm in arms:
        entry = _entry(arm, tensors, noise, blocks, per_arm, located=located)
        entries.append(entry)
        if arm.status != "ok":
            problems.append(f"{arm.name}: {arm.status}: {arm.error}")
        elif entry["outside"]:
            where = f"first in backward: {entry['enters_at']}" if entry["enters_at"] else "leave out --steps to see where in backward it begins"
            problems.append(f"{arm.name}: {entry['outside']} tensors are outside; {where}")
        if arm.status == "ok" and arm.moved is not None:
            if arm.moved.unexercised:
                problems.append(f"{arm.name}: moved nothing to the host, so that it proves nothing about moving; {arm.moved.why}")
            elif arm.moved.nbytes == 0:
                notes.append(f"{arm.name}: moves nothing by its share of 0, as the control")
            elif arm.moved.unmoved:
                notes.append(f"{arm.name}: nothing of {', '.join(arm.moved.unmoved)} moved, of which it proves nothing; {arm.moved.why}")
        unsettled = sum(row.differing_runs < len(arm.runs) and noise.get(row.name, EQUAL).equal for row in arm.rows)
        if unsettled:
            notes.append(f"{arm.name}: {unsettled} tensors differed in some of its runs, in none of the control's")
        if plant is not None and arm.status == "ok" and not arm.served:
            notes.append(f"{arm.name}: uses nothing that a replay of {plant} makes, so the planted error cannot show in it")
    own = [name for name, gap in noise.items() if not gap.equal]
    noisiest = max(own, key=lambda name: _relative(noise[name].norm, tensors, name), default=None)
    control = {
        "repeats": repeats,
        "tensors": len(tensors),
        "noisy_tensors": len(own),
        "noisiest": noisiest,
        "noisiest_relative_norm": _round(_relative(noise[noisiest].norm, tensors, noisiest)) if noisiest else 0.0,
        **_digests(tensors, blocks),
    }
    return {"control": control, "arms": entries, "notes": notes, "problems": problems}


def _entry(arm: ArmRuns, tensors: Tensors, noise: Mapping[str, Gap], blocks: Sequence[str], rows: int, *, located: bool) -> dict[str, Any]:
    worst_first = sorted(arm.rows, key=lambda row: (row.outside, row.ratio, _relative(row.norm, tensors, row.name)), reverse=True)
    outside = [row for row in worst_first if row.outside]
    verdict = "bit-equal" if not arm.rows else "outside" if outside else "within noise"
    if arm.moved is not None and arm.moved.unexercised and not outside:
        verdict = "moved nothing"
    return {
        "arm": arm.name,
        "status": arm.status,
        "error": arm.error,
        "verdict": verdict if arm.status == "ok" else arm.status,
        "runs": len(arm.runs),
        "plan": arm.plan,
        "replayed": arm.replayed,
        "moved": None
        if arm.moved is None
        else {
            "bytes_per_step": arm.moved.nbytes,
            "share": arm.moved.share,
            "stayed_bytes_per_step": arm.moved.stayed,
            "unmoved_labels": list(arm.moved.unmoved),
        },
        "planted": arm.served,
        "equal": len(tensors) - len(arm.rows),
        "differing": len(arm.rows),
        "outside": len(outside),
        "enters_at": _entrance([row.name for row in outside if not row.name.endswith(WEIGHT)], blocks) if located else None,
        "columns": ["tensor", "relative_norm", "relative_noise", "max_abs", "ratio"],
        "rows": [
            [
                row.name,
                _round(_relative(row.norm, tensors, row.name)),
                _round(_relative(noise[row.name].norm if row.name in noise else 0.0, tensors, row.name)),
                _round(row.peak),
                _round(row.ratio),
            ]
            for row in worst_first[:rows]
        ],
    }


def _entrance(names: Sequence[str], blocks: Sequence[str]) -> str | None:
    """Where a difference is first in backward: the losses, the last block of the forward that has one, or what is outside the blocks."""
    if not names or LOSSES in names:
        return LOSSES if names else None
    hit = [block for block in blocks if any(name.startswith(f"{block}.") for name in names)]
    return hit[-1] if hit else names[0]


def _relative(norm: float, tensors: Tensors, name: str) -> float:
    base = tensors[name][1] if name in tensors else 0.0
    return norm / base if base else (math.inf if norm else 0.0)


def _round(value: float) -> float:
    return float(f"{value:.3g}") if math.isfinite(value) else value


def _digests(tensors: Tensors, blocks: Sequence[str]) -> dict[str, Any]:
    """SHA-256 over the bytes of every tensor of the reference, and a short one per block: two machines can be seen to compute the same."""
    whole = hashlib.sha256()
    parts = {block: hashlib.sha256() for block in blocks}
    for name, (_, _, _, digest) in tensors.items():
        for part in (whole, *(parts[block] for block in blocks if name.startswith(f"{block}."))):
            part.update(f"{name} {digest}\n".encode())
    return {"sha256": whole.hexdigest(), "sha256_of_blocks": " ".join(part.hexdigest()[:12] for part in parts.values())}


def write_csv(path: Path, noise: Mapping[str, Gap], arms: Sequence[ArmRuns]) -> None:
    """Every tensor of every arm that is not bit-equal, beside the control's own noise."""
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["arm", "tensor", "differing_runs", "runs", "norm", "max_abs", "control_norm", "control_max_abs", "ratio", "outside"])
        for arm in arms:
            for row in arm.rows:
                own = noise.get(row.name, EQUAL)
                writer.writerow(
                    [arm.name, row.name, row.differing_runs, len(arm.runs), row.norm, row.peak, own.norm, own.peak, row.ratio, row.outside]
                )
