"""Does a plan change what a model computes? The control several times, then every arm against it, tensor by tensor.

One process, one model, the same bits at the start of every run. Where the control repeats bit for bit, an arm must be bit-equal; where
it does not, an arm must be as near as the control is to itself (`parity_judge`, docs/parity.md).
"""

from __future__ import annotations

import gc
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..apply import apply_plan, unmoved_labels
from ..callbacks._warmup import AutotuneWatch
from ..inspection import inspect_model
from ..labels import LABELS, parse_arm
from ..regions import BlockLayout
from ..stayed import why_stayed
from .arm import check_device, failure
from .arms import Rival, configured, parse
from .compare import child_environment
from .data import Text, read_text
from .ending import TerminatedError, terminated_cleanly
from .environment import collect
from .errors import UserError
from .judge import CONTROL
from .module import meta_model
from .parity_judge import ARM_RUNS, FACTOR, NOISY_RUNS, Gap, judge_arm, noise_of, repeats_exactly
from .parity_record import ArmRuns, Moved, describe, write_csv
from .parity_rig import CUBLAS, CUBLAS_VALUES, KernelSetting, Rig, cublas_is_deterministic, kernel_setting
from .plant import Plant, parse_plant, planted, replayed_by
from .recipes import Loaded, write_yaml
from .records import SCHEMA, write_json
from .rivals import install
from .schema import OffloadSection, Recipe

__all__ = [
    "OpenArm",
    "ParityCheck",
    "ParityOptions",
    "check",
    "default_arms",
    "in_fresh_process",
    "model_layouts",
    "needs_fresh_process",
    "open_arm",
    "parity",
]

OpenArm = Callable[[nn.Module, str, str], AbstractContextManager[Any]]
"""(model, arm, option `kernels`) -> the arm in force while it is open. What it yields may have `ledger`, `plan` and `kernels`."""
WARM_CAP = 6
"""Runs after which the wait for autotuners ends."""


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """How a parity check runs."""

    repeats: int = 2
    """Runs of the control at least, the reference included."""
    steps: int = 0
    """Optimizer steps of a run; 0: one forward and backward without an optimizer."""
    micro_batches: int = 1
    """Micro-batches per step, their gradients accumulated."""
    deterministic: bool = True
    """Deterministic kernels where PyTorch has them; else those of training."""
    plant: str | None = None
    """`REGION` or `REGION@BLOCK`: an error in its replay, which the check must find."""


def open_arm(model: nn.Module, arm: str, kernels: str, offload: OffloadSection | None = None) -> AbstractContextManager[Any]:
    """An arm that is a plan, or a rival; the control too, which installs nothing under stock kernels. The share `auto` is 1 here, where it
    starts: that moves most, and nobody's clock decides what is compared."""
    chosen = parse(arm)
    if isinstance(chosen, Rival):
        return install(model, chosen, kernels=kernels)
    chosen = configured(chosen, offload or OffloadSection())
    if chosen.offload is not None and chosen.offload.fraction == "auto":
        chosen = replace(chosen, offload=replace(chosen.offload, fraction=1.0))
    return apply_plan(model, chosen, kernels=kernels)


def _opener(recipe: Recipe) -> OpenArm:
    return partial(open_arm, offload=recipe.offload)


def model_layouts(recipe: Recipe) -> tuple[BlockLayout, ...]:
    """Blocks of the recipe's model, without building its weights."""
    return inspect_model(meta_model(recipe)).layouts


def default_arms(layouts: Sequence[BlockLayout], arms: Sequence[str]) -> list[str]:
    """Every label that the model has, one by one, `full`, and those of `arms` that are none of these; the control first."""
    present = {region for layout in layouts for region in layout.regions}
    labels = [name for name, label in LABELS.items() if present.intersection(region for region, _ in label.modes)]
    found: dict[Any, str] = {}
    for arm in (CONTROL, *labels, "full", *arms):
        try:
            selection = parse_arm(arm)
            found.setdefault((frozenset(selection.labels), selection.full, selection.offload), arm)
        except ValueError:  # a rival; what it means is checked by `check_runnable`
            found.setdefault(arm, arm)
    return list(found.values())


def check(loaded: Loaded, arms: Sequence[str], options: ParityOptions, layouts: Sequence[BlockLayout]) -> Plant | None:
    """Everything about options that can be wrong before a run, beside `compare.check_runnable`.

    Raises:
        UserError: the first problem found.
    """
    for name, value, least in (("--repeats", options.repeats, 2), ("--steps", options.steps, 0), ("--micro-batches", options.micro_batches, 1)):
        if value < least:
            raise UserError(f"{name}: expected at least {least}, got {value}")
    if loaded.recipe.trainer.devices > 1:
        raise UserError(f"trainer.devices: parity compares within one process, got {loaded.recipe.trainer.devices}; write trainer.devices=1")
    others = [arm for arm in arms if arm != CONTROL]
    if not others:
        raise UserError("--arms: expected at least one arm beside the control, got none; for instance --arms gdn_conv,full")
    if options.plant is None:
        return None
    plant = parse_plant(options.plant, layouts)
    if not any(replayed_by(plant, arm, layouts) for arm in others):
        raise UserError(f"--plant: none of the arms replays {plant}: {', '.join(others)}; full:uniform:2 replays almost every region")
    return plant


def needs_fresh_process(recipe: Recipe, options: ParityOptions) -> bool:
    """Whether CUDA runs in this process already without what makes cuBLAS deterministic."""
    on_gpu = check_device(recipe) == "gpu"
    return options.deterministic and on_gpu and torch.cuda.is_initialized() and not cublas_is_deterministic()


def in_fresh_process(loaded: Loaded, argv: Sequence[str]) -> int:
    """Run `lightning-gdn parity` with `argv` in a process of its own and return its exit code. SIGTERM goes on to it: its record says so."""
    environment = {**child_environment(loaded), CUBLAS: CUBLAS_VALUES[0]}
    command = [sys.executable, "-m", "lightning_gdn", "parity", *argv]
    with terminated_cleanly(), subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except TerminatedError:
            process.terminate()
            return process.wait()
        except BaseException:
            process.kill()
            raise


class ParityCheck:
    """The runs of one parity check, in order."""

    def __init__(self, rig: Rig, kernels: str, setting: KernelSetting, open_arm: OpenArm, plant: Plant | None) -> None:
        self.rig, self.kernels, self.setting, self.open_arm, self.plant = rig, kernels, setting, open_arm, plant
        self.controls: list[dict[str, Gap]] = []
        self.notes: list[str] = []
        self.kernel_names: dict[str, str] = {}
        self.at = CONTROL
        """The arm whose runs these are."""
        self._watch = AutotuneWatch()

    def control(self, repeats: int) -> None:
        """The reference, and as many repeats; `NOISY_RUNS` if any differs."""
        with self._control_open():
            self.rig.keep(self.rig.run())
            self.controls += [self.rig.gaps(self.rig.run()) for _ in range(repeats - 1)]
        if not repeats_exactly(self.controls):
            self.more_control()

    def more_control(self, least: int = NOISY_RUNS) -> None:
        """Repeat the control until there are `least` repeats."""
        missing = least - len(self.controls)
        if missing > 0:
            with self._control_open():
                self.controls += [self.rig.gaps(self.rig.run()) for _ in range(missing)]

    @contextmanager
    def _control_open(self) -> Iterator[None]:
        self.at = CONTROL
        with self.open_arm(self.rig.model, CONTROL, self.kernels):
            self._warm(CONTROL)
            yield

    def close(self) -> None:
        """The control once more after all arms: what drifted meanwhile is no fault of an arm."""
        exact, runs = repeats_exactly(self.controls), len(self.controls)
        self.more_control(runs + 1)
        if exact and not repeats_exactly(self.controls):
            self.notes.append(f"{CONTROL}: repeated bit for bit {runs} times, and not in its last run, after the arms")

    def arm(self, name: str) -> ArmRuns:
        """Run an arm once; if it is outside, and that could be chance, the control more often and the arm again.

        Raises:
            Exception: whatever failed the control. What fails the arm itself ends in its `status`.
        """
        arm = ArmRuns(name)
        self._attempt(arm, 1)
        if arm.status == "ok" and self._outside(arm) and (self.rig.device.type != "cpu" or not repeats_exactly(self.controls)):
            self.more_control()
            if self._outside(arm):
                self._attempt(arm, ARM_RUNS - 1)
        return arm

    def _attempt(self, arm: ArmRuns, count: int) -> None:
        try:
            self._runs(arm, count)
        except Exception as error:  # noqa: BLE001  an arm that fails is a row of the table, whatever failed it
            arm.status, arm.error = failure(error)
            traceback.print_exc()
        if arm.status != "ok":
            gc.collect()
            self.rig.release()

    def _outside(self, arm: ArmRuns) -> bool:
        rows = judge_arm(arm.runs, noise_of(self.controls))
        return bool(rows) and rows[0].outside

    def _runs(self, arm: ArmRuns, count: int) -> None:
        self.at = arm.name
        with planted(self.rig.model, self.plant) as served, self.open_arm(self.rig.model, arm.name, self.kernels) as applied:
            self._warm(arm.name)
            _moved(applied)  # in the warm-up: left out
            arm.runs += [self.rig.gaps(self.rig.run()) for _ in range(count)]
            arm.moved = _moved(applied, steps=count * max(1, self.rig.steps))
            ledger = getattr(applied, "ledger", None)
            rows = ledger.by_region().values() if ledger is not None else ()
            arm.replayed = {row.region: row.replays for row in rows if row.replays}
            arm.plan = str(applied.plan) if hasattr(applied, "plan") else None
            self.kernel_names |= getattr(applied, "kernels", {})
        arm.served += served.count

    def _warm(self, arm: str) -> None:
        """At least one run that is not judged (a plan's first one is instrumented), until no autotuner gains an entry."""
        for _ in range(WARM_CAP):
            try:
                self.rig.run()
            except RuntimeError as error:
                if not self.setting.relax(error):
                    raise
                continue
            if not self._watch.grew():
                return
        self.notes.append(f"{arm}: kernels were still being tuned after {WARM_CAP} runs")


def _moved(applied: Any, steps: int = 1) -> Moved | None:
    """What an open arm has moved since it was asked last, per step; None of one without offload labels."""
    config = getattr(getattr(applied, "plan", None), "offload", None)
    if config is None:
        return None
    found = applied.step_statistics()
    stayed = {reason: nbytes // steps for reason, nbytes in found.stayed.items()} if found is not None else {}
    largest = found.largest_small if found is not None else None
    return Moved(
        nbytes=found.bytes_out // steps if found is not None else 0,
        share=config.fraction,
        stayed=stayed,
        unmoved=tuple(unmoved_labels(applied.ledger, config)),
        why=why_stayed(stayed, config, recomputes=applied.plan.recomputes, largest_small=largest),
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parity(
    loaded: Loaded,
    arms: Sequence[str],
    folder: Path,
    options: ParityOptions,
    *,
    text: Text | None = None,
    open_arm: OpenArm | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Compare every arm with the control and write parity.json, tensors.csv and recipe.yaml into `folder`.

    Args:
        arms: as `compare.prepare` returns them; the control among them is what the others are compared with.
        progress: called with one line before every arm.

    Returns:
        The record, as parity.json holds it. `status` is `ok`; or `oom` or `failed` if the control failed, `failed` if SIGTERM came: then
        `error` says during which arm, and the figures are missing. `problems` is empty if every arm is inside and every arm with offload
        labels moved something.

    Raises:
        UserError: as `check`, or the model cannot be built.
    """
    plant = check(loaded, arms, options, model_layouts(loaded.recipe))
    device = check_device(loaded.recipe)
    text = text or read_text(loaded.recipe.data)
    trainer = replace(loaded.recipe.trainer, max_steps=max(1, options.steps), accumulate_grad_batches=options.micro_batches, val_every=0)
    recipe = replace(loaded.recipe, trainer=trainer)
    write_yaml(loaded.saved, folder / "recipe.yaml", f"lightning-gdn parity {folder / 'recipe.yaml'}\nresolved from {loaded.source.name}")
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "parity",
        "name": folder.name,
        "date": datetime.now(UTC).date().isoformat(),
        "status": "failed",
        "error": None,
        "environment": collect(device),
        "recipe": loaded.saved,
        "text": text.as_dict(),
        "options": {**_shape(options), "repeats": options.repeats, "plant": str(plant) if plant else None},
    }
    run = None
    try:
        with terminated_cleanly(), ExitStack() as stack:
            place = torch.device("cuda", 0) if device == "gpu" else torch.device("cpu")
            setting = stack.enter_context(kernel_setting(deterministic=options.deterministic, cuda=device == "gpu"))
            stack.enter_context(_threads(trainer.num_threads))
            stack.enter_context(torch.random.fork_rng(devices=[0] if device == "gpu" else []))
            progress(f"{CONTROL}: building the model, tuning kernels")
            rig = Rig(recipe, place, text, **_shape(options))
            run = ParityCheck(rig, recipe.plan.kernels, setting, open_arm or _opener(recipe), plant)
            run.control(options.repeats)
            found = []
            others = [arm for arm in arms if arm != CONTROL]
            for number, name in enumerate(others):
                run.at = name
                progress(f"[{number + 1}/{len(others)}] {name}")
                found.append(run.arm(name))
            run.close()
            noise = noise_of(run.controls)
            for arm in found:
                arm.rows = judge_arm(arm.runs, noise)
            blocks = [layout.name for layout in inspect_model(rig.model).layouts]
            result = describe(found, rig.describe(), noise, blocks, repeats=len(run.controls), plant=plant, located=_located(options, recipe))
            result["notes"] = [*run.notes, *result["notes"]]
            result["control"]["losses_hex"] = rig.losses_hex()
            record |= {
                "status": "ok",
                "kernel_setting": setting.as_dict(),
                "kernels": run.kernel_names,
                "bounds": {"factor": FACTOR, "noisy_runs": NOISY_RUNS, "arm_runs": ARM_RUNS},
                **result,
            }
            write_csv(folder / "tensors.csv", noise, found)
    except TerminatedError as stop:
        record["error"] = f"{stop} during {run.at if run else CONTROL}"
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  without its control nothing is compared, but what failed is a record too
        record["status"], line = failure(error)
        record["error"] = f"{line} during {run.at if run else CONTROL}"
        traceback.print_exc()
    write_json(folder / "parity.json", record)
    return record


def _located(options: ParityOptions, recipe: Recipe) -> bool:
    """Whether the compared gradients tell where in backward a difference begins: later steps, and clipping, spread it over all of them."""
    return options.steps == 0 or (options.steps == 1 and recipe.trainer.grad_clip is None)


def _shape(options: ParityOptions) -> dict[str, int]:
    return {"steps": options.steps, "micro_batches": options.micro_batches}
