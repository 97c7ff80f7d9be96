"""From the records of one comparison to its verdict: medians, paired deltas against the control, losses bit for bit. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ..labels import Selection
from ..offload_config import OffloadConfig
from ..stayed import why_stayed
from .arms import configured, parse
from .pareto import analyse
from .records import SCHEMA, check_alike, losses_of, not_finite
from .schema import OffloadSection

__all__ = ["COLUMNS", "CONTROL", "judge", "loss_difference"]

CONTROL = "none"
COLUMNS = (
    "arm",
    "status",
    "rounds",
    "retained_bytes",
    "retained_delta_pct",
    "peak_allocated_mib",
    "peak_delta_pct",
    "step_ms",
    "step_delta_pct",
    "step_delta_pct_min",
    "step_delta_pct_max",
    "saving_pct",
    "line_ratio",
    "dominated_by",
    "tokens_per_s",
    "loss_first",
    "loss_last",
    "retained_of",
    "offload_out_mib",
    "offload_share",
    "offload_stall_ms",
    "offload_exposed_host_ms",
    "pinned_held_mib",
    "losses",
    "loss_max_abs_diff",
    "loss_first_step",
    "kernels",
    "error",
)
"""Columns of the table, the same in `comparison.json` and in W&B. Deltas are percent against the control of the same round; `saving_pct`,
`line_ratio` and `dominated_by` are those of `pareto`."""


def judge(records: Sequence[Mapping[str, Any]], *, name: str, arms: Sequence[str]) -> dict[str, Any]:
    """The comparison as it is saved: one entry per arm in the order of `arms`, and the table made of them.

    Raises:
        UnlikeRecordsError: records that differ in more than the arm.
    """
    check_alike(records)
    environment = next((r["environment"] for r in records if r.get("environment")), None)
    on_cpu = environment is not None and environment["device"] == "cpu"
    control = {r["round"]: r for r in records if r["arm"] == CONTROL}
    entries = [_arm(arm, [r for r in records if r["arm"] == arm], control) for arm in arms]
    recipe = records[0]["recipe"] if records else None
    pareto = analyse(entries, control=CONTROL, kernels=recipe["plan"]["kernels"] if recipe else None)
    for entry, point in zip(entries, pareto["points"], strict=True):
        entry |= {"saving_pct": point["saving_pct"], "line_ratio": point["ratio"], "dominated_by": point["dominated_by"]}
    notes = [line for entry in entries if (line := _unmoved(entry, recipe))]
    for entry in entries:
        if entry["offload"] and entry["offload"]["asked"] == "auto" and not entry["offload"]["settled"]:
            notes.append(f"{entry['arm']}: the share had not settled when the run ended; more steps (trainer.max_steps) let it")
        elif entry["offload"] and entry["offload"]["settled_late"]:
            notes.append(
                f"{entry['arm']}: half or more of its steady steps were before auto settled, and its step time is mostly theirs; more steps "
                "(trainer.max_steps, or monitor.warmup_steps) leave them out"
            )
    hashes = {r["environment"].get("autotune_cache") for r in records if r.get("environment")}
    problems = []
    for entry in entries:
        if entry["status"] != "ok":
            problems.append(f"{entry['arm']}: {entry['status']}: {entry['error']}")
        elif on_cpu and entry["losses"]["verdict"] == "differ":
            problems.append(f"{entry['arm']}: losses differ from the control's, first at micro-batch {entry['losses']['first_step']}")
        elif not entry["ranks_agree"]:
            problems.append(f"{entry['arm']}: the ranks ended with different weights")
        elif on_cpu and entry["weights_equal"] is False:
            problems.append(f"{entry['arm']}: weights after training differ from the control's")
        elif entry["losses"]["verdict"] == "not comparable":
            problems.append(f"{entry['arm']}: no round in which both it and the control finished")
        if entry["not_finite"]:
            problems.append(f"{entry['arm']}: {entry['not_finite']}: their comparison proves nothing")
    if len(hashes) > 1:
        notes.append("kernels were still being tuned during this comparison (the autotune cache changed); run it again for timings")
    ranks = max((len(_parts(r)) for r in records), default=1)
    if ranks > 1:
        notes.append(f"{ranks} ranks: memory and step time are those of the worst rank, tokens/s the sum; losses are compared on every rank")
    repeat = _repeat([r for r in records if r["arm"] == CONTROL and r["status"] == "ok"])
    if repeat and repeat["max_abs_diff"]:
        notes.append(f"the control's own rounds differ by up to {repeat['max_abs_diff']:.3g} in loss, first at micro-batch {repeat['first_step']}")
    return {
        "schema": SCHEMA,
        "name": name,
        "date": datetime.now(UTC).date().isoformat(),
        "control": CONTROL,
        "rounds": max((r["round"] for r in records), default=-1) + 1,
        "environment": environment,
        "recipe": recipe,
        "text": next((r["text"] for r in records if r.get("text")), None),
        "arms": entries,
        "pareto": pareto,
        "control_repeat": repeat,
        "notes": notes,
        "problems": problems,
        "table": {"columns": list(COLUMNS), "rows": [_row(entry) for entry in entries]},
    }


def loss_difference(losses: Sequence[str], control: Sequence[str]) -> dict[str, Any]:
    """Compare two trajectories given as hexadecimal floats: `{"verdict", "max_abs_diff", "first_step"}`.

    `first_step` counts micro-batches from 0; NaN equals NaN, and makes `max_abs_diff` None where only one side has it.
    """
    if list(losses) == list(control):
        return {"verdict": "bit-equal", "max_abs_diff": 0.0, "first_step": None}
    pairs = list(zip(losses, control, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    gaps = [abs(float.fromhex(a) - float.fromhex(b)) for a, b in pairs if a != b]
    finite = bool(gaps) and all(gap < float("inf") for gap in gaps)
    return {"verdict": "differ", "max_abs_diff": max(gaps) if finite else None, "first_step": first}


def _arm(arm: str, records: Sequence[Mapping[str, Any]], control: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    good = [r for r in records if r["status"] == "ok"]
    bad = next((r for r in records if r["status"] == "oom"), None) or next((r for r in records if r["status"] != "ok"), None)
    pairs = [(r, control[r["round"]]) for r in good if r["round"] in control and control[r["round"]]["status"] == "ok"]
    weights = [(_weights(a), _weights(b)) for a, b in pairs if _weights(a) and _weights(b)]
    some = good[0] if good else (records[0] if records else {})
    return {
        "arm": arm,
        "status": "ok" if good and bad is None else (bad["status"] if bad else "failed"),
        "error": bad["error"] if bad else (None if good else "no record"),
        "rounds": len(good),
        "plan": some.get("plan"),
        "kernels": some.get("kernels") or {},
        "blocks": some.get("blocks"),
        "retained_bytes": _median([r.get("retained_bytes") for r in good], whole=True),
        "retained_of": _retained_of(good),
        "retained_delta_pct": _spread([_percent(a.get("retained_bytes"), b.get("retained_bytes")) for a, b in pairs]),
        "retained_mib": _median([_allocator(r) for r in good]),
        "retained_mib_delta_pct": _spread([_percent(_allocator(a), _allocator(b)) for a, b in pairs]),
        "peak_rounds_mib": [_monitor(r, "peak_allocated_mib") for r in good],
        "peak_allocated_mib": _median([_monitor(r, "peak_allocated_mib") for r in good]),
        "peak_delta_pct": _spread([_percent(_monitor(a, "peak_allocated_mib"), _monitor(b, "peak_allocated_mib")) for a, b in pairs]),
        "step_ms": _spread([_step_ms(r) for r in good]),
        "step_delta_pct": _spread([_percent(_step_ms(a), _step_ms(b)) for a, b in pairs]),
        "tokens_per_s": _median([_monitor(r, "tokens_per_s") for r in good]),
        "offload": _offload(good),
        "losses": _losses(arm, pairs),
        "not_finite": not_finite(good),
        "loss_first": some.get("loss_first"),
        "loss_last": some.get("loss_last"),
        "weights_equal": all(a == b for a, b in weights) if weights else None,
        "ranks_agree": all(len(_weights(r)) <= 1 for r in good),
    }


OFFLOAD_FIGURES = ("out_mib", "in_mib", "out_gb_s", "in_gb_s", "stall_ms", "exposed_host_ms", "hidden_share", "pinned_held_mib", "fallbacks")


def _offload(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Medians over rounds of what moved per optimizer step on rank 0, and the share of the bytes that was; None for an arm without offload."""
    monitors = [monitor for r in records if (monitor := r.get("monitor")) and monitor.get("offload")]
    if not monitors:
        return None
    told = [monitor["offload"] for monitor in monitors]
    values = {name: [each["median"] if isinstance(each := found.get(name), Mapping) else each for found in told] for name in OFFLOAD_FIGURES}
    shares = [found for r in records if (found := r.get("offload"))]
    return {
        **{name: _median(each) for name, each in values.items()},
        "stayed_mib": told[0].get("stayed_mib") or {},
        "largest_small_mib": told[0].get("largest_small_mib"),
        "asked": shares[0]["asked"] if shares else None,
        "share": _spread([found["fraction"] for found in shares]),
        "settled": all(found["settled"] for found in shares),
        "settled_late": bool(shares)
        and shares[0]["asked"] == "auto"
        and any(2 * m["offload"].get("steps", m["steps"]) <= m["steps"] for m in monitors if m.get("steps")),
    }


def _retained_of(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Which forward passes `retained_bytes` is of, where that is not all: `last step`, or `first forward` if a round knows no better."""
    told = {found["retained_of"] for r in records if (found := r.get("offload"))}
    return "first forward" if "first forward" in told else "last step" if told else None


def _unmoved(entry: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> str | None:
    """That nothing moved, and why: equal losses are then no proof of anything."""
    moved = entry["offload"]
    if not moved or moved["out_mib"] or entry["status"] != "ok":
        return None
    chosen, largest = parse(entry["arm"]), moved["largest_small_mib"]
    assert isinstance(chosen, Selection)  # a rival moves nothing of its own
    why = why_stayed(
        {reason: mib * 2**20 for reason, mib in moved["stayed_mib"].items()},
        _offload_config(recipe, chosen),
        recomputes=bool(chosen.recompute),
        largest_small=None if largest is None else round(largest * 2**20),
        share=moved["share"]["median"] if moved["share"] else None,
    )
    settled = f" at the share of {moved['share']['median']:g} that auto settled on" if moved["asked"] == "auto" and moved["share"] else ""
    return f"{entry['arm']}: moved nothing to the host in its steady steps{settled}; {why}"


def _offload_config(recipe: Mapping[str, Any] | None, chosen: Selection) -> OffloadConfig | None:
    """How an arm was to move; None where the recipe, as saved, does not say it: of `${oc.env:...}` it has the name."""
    section = (recipe or {}).get("offload")
    if section is None or any(isinstance(value, str) for value in section.values()):
        return None
    return configured(chosen, OffloadSection(**section)).offload


def _losses(arm: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    if not pairs:
        return {"verdict": "not comparable", "max_abs_diff": None, "first_step": None}
    if arm == CONTROL:
        return {"verdict": "control", "max_abs_diff": None, "first_step": None}
    found = [loss_difference(*both) for a, b in pairs for both in zip(losses_of(a), losses_of(b), strict=True)]
    return _worst(found)


def _weights(record: Mapping[str, Any]) -> set[str]:
    """Hashes of the weights of all ranks: one element if DDP kept them equal."""
    return {part["weights_sha256"] for part in _parts(record) if part.get("weights_sha256")}


def _parts(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What each rank has of its own; the record itself if there was one process."""
    return record.get("ranks") or [record]


def _worst(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    differing = [f for f in found if f["verdict"] == "differ"]
    if not differing:
        return found[0]
    gaps = [f["max_abs_diff"] for f in differing]
    return {
        "verdict": "differ",
        "max_abs_diff": None if None in gaps else max(gaps),
        "first_step": min(f["first_step"] for f in differing),
    }


def _repeat(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How far the control's own rounds lie apart: the yardstick for an arm's difference on a GPU."""
    if len(records) < 2:
        return None
    first = losses_of(records[0])
    return _worst([loss_difference(*both) for r in records[1:] for both in zip(losses_of(r), first, strict=True)])


def _row(entry: Mapping[str, Any]) -> list[Any]:
    step, delta = entry["step_ms"] or {}, entry["step_delta_pct"] or {}
    values = {
        **{key: entry[key] for key in COLUMNS if key in entry},
        "retained_delta_pct": (entry["retained_delta_pct"] or {}).get("median"),
        "peak_delta_pct": (entry["peak_delta_pct"] or {}).get("median"),
        "step_ms": step.get("median"),
        "step_delta_pct": delta.get("median"),
        "step_delta_pct_min": delta.get("min"),
        "step_delta_pct_max": delta.get("max"),
        "offload_out_mib": (entry["offload"] or {}).get("out_mib"),
        "offload_share": ((entry["offload"] or {}).get("share") or {}).get("median"),
        "offload_stall_ms": (entry["offload"] or {}).get("stall_ms"),
        "offload_exposed_host_ms": (entry["offload"] or {}).get("exposed_host_ms"),
        "pinned_held_mib": (entry["offload"] or {}).get("pinned_held_mib"),
        "losses": entry["losses"]["verdict"],
        "loss_max_abs_diff": entry["losses"]["max_abs_diff"],
        "loss_first_step": entry["losses"]["first_step"],
        "kernels": "; ".join(f"{region}: {kernel}" for region, kernel in entry["kernels"].items()) or None,
    }
    return [values[column] for column in COLUMNS]


def _monitor(record: Mapping[str, Any], key: str) -> float | None:
    monitor = record.get("monitor") or {}
    if monitor.get("world_size", 1) > 1:
        values = [float(entry[key]) for entry in monitor["ranks"] if entry is not None and entry[key] is not None]
        return (sum(values) if key == "tokens_per_s" else max(values)) if values else None
    value = monitor.get(key)
    if isinstance(value, Mapping):
        value = value["median"]
    return None if value is None else float(value)


def _allocator(record: Mapping[str, Any]) -> float | None:
    """MiB that the whole model holds after a forward, where the allocator was asked: other arms' ledgers cannot see it on a CPU."""
    return _monitor(record, "retained_mib") if (record.get("monitor") or {}).get("retained_source") == "allocator" else None


def _step_ms(record: Mapping[str, Any]) -> float | None:
    return _monitor(record, "step_ms")


def _percent(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else (value / base - 1.0) * 100.0


def _median(values: Sequence[float | None], *, whole: bool = False) -> Any:
    known = [v for v in values if v is not None]
    if not known:
        return None
    return statistics.median_low(known) if whole else statistics.median(known)


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known), "rounds": list(values)}
