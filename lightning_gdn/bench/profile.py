"""`lightning-gdn profile`: one steady training step region by region, and what each label would free and cost.

`profile` runs the session and writes `profile.json`; `describe` turns what was measured into that record.
"""

from __future__ import annotations

import statistics
import traceback
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..apply import FreesNothingWarning
from ..inspection import inspect_model
from ..labels import LABELS, parse_arm
from ..ledger import LedgerRow
from ..regions import REGIONS
from .arm import check_device, failure, make_trainer
from .arms import is_rival
from .compare import check_runnable
from .data import Text, check_vocabulary, make_loaders
from .ending import TerminatedError, terminated_cleanly
from .environment import collect
from .errors import UserError
from .garbage import frozen_garbage
from .judge import CONTROL
from .module import make_module, meta_model
from .profile_phases import Moment
from .profile_probes import OUTSIDE, Key
from .profile_session import Measured, Options, ProfileSession
from .recipes import Loaded
from .records import SCHEMA, write_json
from .schema import Recipe

__all__ = ["Options", "default_arms", "describe", "profile", "refuse"]

BOOKS_STEPS = 3
"""Fewest steps on each side of a difference that is believed: by chance alone all of three are above all of three once in twenty times."""
BUSY = 0.9
"""A GPU that is busy for less of the step waits for the host: then times between marks hold waits as well."""


def default_arms(loaded: Loaded) -> tuple[list[str], list[str]]:
    """(labels that apply to the recipe's model, `full` and the recipe's own arms; labels that do not apply)."""
    present = {region for layout in inspect_model(meta_model(loaded.recipe)).layouts for region in layout.regions}
    fits = [name for name, label in LABELS.items() if present.intersection(region for region, _ in label.modes)]
    arms = dict.fromkeys([*fits, "full", *(arm for arm in loaded.recipe.compare.arms if not is_rival(arm) and not _moves(arm))])
    return [arm for arm in arms if arm != CONTROL], [name for name in LABELS if name not in fits]


def profile(
    loaded: Loaded,
    arms: Sequence[str] | None,
    folder: Path,
    options: Options,
    *,
    text: Text | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Profile the recipe and write `profile.json` into `folder`.

    Args:
        arms: whose memory and cost to measure; by default every label that applies, `full`, and the labels of the recipe's `compare.arms`.
        text: what `refuse` returned, if it was called already.
        progress: show Lightning's progress bar.

    Returns:
        The record. `status` is `ok`, `oom` or `failed`; then `error` says why and the figures are missing.

    Raises:
        UserError: an arm that the model has no regions for, several devices, or anything else that `run` would refuse.
    """
    text = text or refuse(loaded, arms)
    recipe = _single_run(loaded.recipe)
    left_out: list[str] = []
    if arms is None:
        arms, left_out = default_arms(loaded)
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device = check_device(recipe)
    session = ProfileSession(recipe, arms, options)
    recipe = replace(recipe, trainer=replace(recipe.trainer, max_steps=session.max_steps))
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "name": loaded.name,
        "status": "failed",
        "error": None,
        "environment": collect(device),
        "recipe": loaded.saved,
        "text": text.as_dict(),
        "options": asdict(options),
        "labels_left_out": left_out,
    }
    module = make_module(recipe)
    try:
        train, _ = make_loaders(text, recipe)
        trainer = make_trainer(recipe, device, None, [session], progress, False)
        with terminated_cleanly() as ending, warnings.catch_warnings():
            warnings.simplefilter("ignore", FreesNothingWarning)  # the table says it
            with frozen_garbage():
                ending.fit(trainer, module, train)
        if not session.measured.done:
            raise RuntimeError(f"the training ended after {trainer.global_step} steps, before the profile was complete")
        record |= {"status": "ok", "losses_hex": [float(loss).hex() for loss in module.losses]}
        record |= describe(session.measured, recipe.trainer.accumulate_grad_batches, arms)
    except TerminatedError as stop:
        record["error"] = str(stop)
    except Exception as error:  # noqa: BLE001  as in a comparison, a profile that fails is a record too
        record["status"], record["error"] = failure(error)
        traceback.print_exc()
    write_json(folder / "profile.json", record)
    return record


def refuse(loaded: Loaded, arms: Sequence[str] | None) -> Text:
    """Everything that can be wrong with a profile and be known before anything is written.

    Raises:
        UserError: the first problem found.
    """
    check_vocabulary(loaded.recipe)
    for arm in arms or ():
        if is_rival(arm):
            raise UserError(f"--arms: a profile measures labels region by region, got the rival {arm!r}; compare it with lightning-gdn compare")
        if _moves(arm):
            raise UserError(
                f"--arms: a profile measures what replays cost, got {arm!r}, which moves tensors to the host; lightning-gdn compare measures that"
            )
    single = replace(loaded, recipe=_single_run(loaded.recipe))
    return check_runnable(single, default_arms(loaded)[0] if arms is None else arms, default=arms is None)


def _moves(arm: str) -> bool:
    return parse_arm(arm).offload is not None


def _single_run(recipe: Recipe) -> Recipe:
    if recipe.trainer.devices != 1:
        raise UserError(f"trainer.devices: profile looks at one device, got {recipe.trainer.devices}; write trainer.devices=1")
    return replace(recipe, trainer=replace(recipe.trainer, val_every=0), logger="none")


def describe(found: Measured, micro_batches: int, arms: Sequence[str]) -> dict[str, Any]:
    """What was measured as JSON-able figures: bytes per micro-batch, milliseconds per micro-batch for regions and per step elsewhere."""
    step_ms = statistics.median(found.control["step_ms"])
    retained = _retained(found.kept)
    trace = found.trace
    busy = trace.busy_ms if trace is not None else None
    remarks = list(found.remarks)
    if busy is not None and busy < BUSY * step_ms:
        remarks.append(
            f"a kernel runs for {busy:.1f} of {step_ms:.1f} ms of a step: the GPU waits for the host, and times of regions hold such waits as well"
        )
    if found.control["peaks"] and trace is not None and not trace.on_gpu:
        remarks.append(
            "torch.profiler saw no GPU kernels (CUPTI not available here?): kernels are named as the adapter binds them, where it has a choice"
        )
    return {
        "micro_batches": micro_batches,
        "warm_up_steps": found.warm_up_steps,
        "control": {
            "step_ms": {"median": step_ms, "min": min(found.control["step_ms"]), "max": max(found.control["step_ms"])},
            "phases_ms": found.control["phases"],
            **_peak(found.control),
            "retained_bytes": retained,
            "gpu_busy_ms": busy,
            "by_region_delta_ms": _by_region(found, micro_batches),
        },
        "regions": _regions(found),
        "outside": {f"{kind}_ms": found.times[kind].get(OUTSIDE, 0.0) for kind in ("forward", "backward")},
        "arms": [_arm(arm, found, micro_batches, step_ms, retained) for arm in arms if arm in found.ledgers],
        "kernels": found.kernels,
        "tensors": found.tensors,
        "remarks": remarks,
    }


def _by_region(found: Measured, micro_batches: int) -> float:
    """Milliseconds per step by which forward and backward take longer when blocks run region by region with nothing recomputed.

    With stock kernels a block under a plan normalises q and k outside the delta rule's kernel, an untouched one inside; the difference is
    in every arm's step time and in none of its replays.
    """
    untouched = sum(ms for phase, ms in found.control["phases"].items() if phase != Moment.OPTIMIZER)
    return micro_batches * sum(sum(found.times[kind].values()) for kind in ("forward", "backward")) - untouched


def _retained(rows: Sequence[LedgerRow]) -> int:
    return sum(row.kept_bytes + row.replay_input_bytes for row in rows)


def _peak(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Peak bytes by phase, and which phase holds the largest; None where the device does not count."""
    peaks: dict[str, int] = {str(phase): peak for phase, peak in measured["peaks"].items()}
    if not peaks:
        return {"peak_bytes": None, "peak_held_by": None, "phase_peak_bytes": None}
    held_by = max(peaks, key=lambda phase: peaks[phase])
    return {"peak_bytes": peaks[held_by], "peak_held_by": held_by, "phase_peak_bytes": peaks}


def _regions(found: Measured) -> list[dict[str, Any]]:
    """One entry per region in pipeline order, all blocks together."""
    rows: dict[str, dict[str, Any]] = {}
    for name in [*REGIONS, *dict.fromkeys(row.region for row in found.kept)]:
        kept = [row for row in found.kept if row.region == name]
        if name in rows or not kept:
            continue
        full = [row for row in found.full if row.region == name]
        replays = _of(found.times["replay"], name)
        kernels = found.trace.regions.get(name, ()) if found.trace is not None else ()
        rows[name] = {
            "region": name,
            "blocks": sum(row.calls > 0 for row in kept),
            "forward_ms": sum(_of(found.times["forward"], name).values()),
            "backward_ms": sum(_of(found.times["backward"], name).values()),
            "replay_ms": sum(replays.values()) if replays else None,
            "replayed_blocks": len(replays),
            "retained_bytes": sum(row.kept_bytes for row in kept),
            "weight_cast_bytes": sum(row.weight_cast_bytes for row in kept),
            "brought_back_bytes": sum(row.freed_bytes for row in full),
            "replay_peak_bytes": found.replay_peak_bytes.get(name),
            "replay_left_bytes": found.replay_left_bytes.get(name),
            "bound_kernel": found.kernels.get(name),
            "kernels_on_gpu": found.trace is not None and found.trace.on_gpu,
            "kernels": [asdict(kernel) for kernel in kernels],
        }
    return list(rows.values())


def _of(times: Mapping[Key, float], region: str) -> dict[str, float]:
    return {block: ms for (block, name), ms in times.items() if name == region}


def _arm(arm: str, found: Measured, micro_batches: int, step_ms: float, retained: int) -> dict[str, Any]:
    """What the arm frees (ledger against ledger, and the allocator's word) and costs (its replays, timed in steps of its own).

    Percentages are of the control's step: in the rounds, where there are some, since those are what the measured overhead is paired with.
    """
    if arm in found.rounds:
        step_ms = statistics.median(statistics.median(base["step_ms"]) for base in found.rounds[CONTROL])
    rows, replays, replay_ms = found.ledgers[arm], dict[str, int](), dict[str, float]()
    for row in rows:
        if row.replays:
            replays[row.region] = replays.get(row.region, 0) + row.replays
    for (_, region), ms in found.replays[arm].items():
        replay_ms[region] = replay_ms.get(region, 0.0) + ms
    cost = sum(replay_ms.values()) * micro_batches
    books = _books(found, found.recomputed[arm], sum(replays.values()))
    kept = _retained(rows)
    # within rounds the control ran in the same state of the machine
    own, base = (found.rounds[arm][-1], found.rounds[CONTROL][-1]) if arm in found.rounds else (found.phases.get(arm), found.control)
    peak = _peak(own) if own else _peak({"peaks": {}})
    entry: dict[str, Any] = {
        "arm": arm,
        "retained_bytes": kept,
        "freed_bytes": retained - kept,
        "freed_pct": 100 * (retained - kept) / retained if retained else None,
        "replays": replays,
        "replay_ms": replay_ms,
        "cost_ms": cost,
        "cost_pct": 100 * cost / step_ms,
        "bookkeeping_ms": None if books is None else books * micro_batches,
        "bookkeeping_pct": None if books is None else 100 * books * micro_batches / step_ms,
        "measured": _overhead(found, arm),
        **peak,
        "peak_delta_bytes": _less(peak["peak_bytes"], _peak(base)["peak_bytes"]),
        "allocator_freed_bytes": _less(base["requested_after_forward"], own["requested_after_forward"] if own else None),
    }
    return entry


def _less(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _books(found: Measured, recomputed: Collection[Key], replays: int) -> float | None:
    """Milliseconds per micro-batch that the tape itself costs where the device waits for the host, from the plan that recomputes everything.

    Forward: how much longer a region takes when it is recorded for a replay. Backward: what is longer beyond the replays, in equal parts
    for each of them. About nothing where the device is busy all the time.

    It is a small difference of large numbers: None unless each of at least `BOOKS_STEPS` steps took longer than each without the plan.
    """
    if not recomputed and not replays:
        return 0.0
    samples, all_replays = found.samples, sum(row.replays for row in found.full)
    part = replays / all_replays if all_replays else 0.0

    def in_step(step: int, kind: str, regions: Collection[Key]) -> float:
        return sum(samples[kind][key][step] for key in regions if key in samples[kind])

    def times(forward: str, backward: str, replay: str | None) -> list[float]:
        steps = range(min(len(values) for values in samples[backward].values()))
        own = [in_step(step, replay, samples[replay]) if replay else 0.0 for step in steps]
        return [in_step(step, forward, recomputed) + part * (in_step(step, backward, samples[backward]) - own[step]) for step in steps]

    under_plan, without = times("forward_full", "backward_full", "replay"), times("forward", "backward", None)
    if min(len(under_plan), len(without)) < BOOKS_STEPS or min(under_plan) <= max(without):
        return None
    return statistics.median(under_plan) - statistics.median(without)


def _overhead(found: Measured, arm: str) -> dict[str, Any] | None:
    """Step time against the control's of the same round, in percent; None without rounds."""
    if arm not in found.rounds:
        return None
    pairs = zip(found.rounds[arm], found.rounds[CONTROL], strict=True)
    values = [100 * (statistics.median(one["step_ms"]) / statistics.median(base["step_ms"]) - 1) for one, base in pairs]
    return {"median_pct": statistics.median(values), "min_pct": min(values), "max_pct": max(values), "rounds": len(values)}
