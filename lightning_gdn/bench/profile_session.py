"""The training run in which the profiler looks: the recipe's own, every step a whole one, watched now in this way, now in that.

No step is repeated, skipped or computed differently for being watched, so on a CPU the losses are bit for bit those of an arm that
trains as many steps. Regions are timed where they run, between marks in the device's queue, and not one by one in a loop: caches,
clocks and the allocator are as in training.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import lightning.pytorch as L
import torch
from torch import nn

from ..apply import apply_plan, instrument
from ..callbacks._counters import counters_for
from ..callbacks._warmup import AutotuneWatch, WarmUp
from ..inspection import inspect_model
from ..labels import parse_arm
from ..ledger import LedgerRow
from ..plan import BlockPlan, Plan
from ..regions import Mode
from .judge import CONTROL
from .profile_kernels import KernelReport, read_trace, traced
from .profile_phases import Moment, Observer, Phases, clock_for, quiet
from .profile_probes import Key, Ranges, RegionTimes, ReplayMemory, Samples, medians
from .profile_tensors import TensorProfile
from .schema import Recipe

__all__ = ["Measured", "Options", "ProfileSession"]

SETTLE = 2
"""Steps under a new plan before timing: the first one is the ledger's."""
WARM_UP_CAP = 25
"""Steps after which the wait for kernel autotuners ends."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure beyond the least."""

    steps: int = 5
    """Steps per timed stage; medians are taken over them."""
    rounds: int = 0
    """Also time whole steps of every arm, in this many alternating rounds, against the control of the same round."""
    tensors: bool = False
    """Also list the saved tensors of one block of each kind."""


@dataclass(kw_only=True)
class Measured:
    """What the session saw; see `profile.describe` for what becomes of it."""

    control: dict[str, Any] = field(default_factory=dict)
    """`step_ms`, `phases`, `peaks`, `requested_after_forward` of undisturbed steps."""
    kept: list[LedgerRow] = field(default_factory=list)
    """What the untouched blocks retain."""
    kernels: dict[str, str] = field(default_factory=dict)
    """Region -> kernel by the adapter's word."""
    samples: dict[str, Samples] = field(default_factory=dict)
    """`forward`, `backward` (every region kept), `replay`, `forward_full`, `backward_full` (every region recomputed): ms per micro-batch by
    (block, region), of every step."""
    trace: KernelReport | None = None
    tensors: list[dict[str, Any]] = field(default_factory=list)
    full: list[LedgerRow] = field(default_factory=list)
    """The ledger with every region recomputed."""
    replay_peak_bytes: dict[str, int] = field(default_factory=dict)
    """Region -> the most that one replay of it allocates; empty where the device does not count."""
    replay_left_bytes: dict[str, int] = field(default_factory=dict)
    """Region -> of that, what is still allocated when the replay ends."""
    ledgers: dict[str, list[LedgerRow]] = field(default_factory=dict)
    """By arm."""
    replays: dict[str, dict[Key, float]] = field(default_factory=dict)
    """By arm: ms per micro-batch of its own replays, in its own steps."""
    recomputed: dict[str, frozenset[Key]] = field(default_factory=dict)
    """By arm: the regions that its plan does not keep."""
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By arm: as `control`, of one step; only on a device with allocator counters."""
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By arm, control included, one entry per round: as `control`."""
    warm_up_steps: int = 0
    remarks: list[str] = field(default_factory=list)
    done: bool = False

    @property
    def times(self) -> dict[str, dict[Key, float]]:
        """Medians of `samples`."""
        return {kind: medians(samples) for kind, samples in self.samples.items()}


@final
class ProfileSession(L.Callback):
    """Drives the measurement from Lightning's hooks: `_schedule` yields, for every optimizer step, who watches it.

    Args:
        arms: recompute arms whose memory and cost are wanted; the control is part of every session.
    """

    def __init__(self, recipe: Recipe, arms: Sequence[str], options: Options) -> None:
        self._recipe, self._arms, self._options = recipe, [arm for arm in arms if not parse_arm(arm).is_control], options
        self.measured = Measured()
        self._observer: Observer = quiet
        self._steps: Generator[Observer, None, None] | None = None

    @property
    def max_steps(self) -> int:
        """Optimizer steps that the session takes at most."""
        options, count = self._options, len(self._arms)
        rounds = options.rounds * (count + 1) * (SETTLE + options.steps)
        return max(WARM_UP_CAP, self._recipe.monitor.warmup_steps) + (3 + count) * options.steps + 10 + 3 * count + rounds

    # what Lightning calls

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = self._schedule(pl_module, pl_module.device)
        self._observer = next(self._steps)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._observer(Moment.FORWARD)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        self._observer(Moment.BACKWARD)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._observer(Moment.DONE)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self._observer(Moment.OPTIMIZER)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self._recipe.trainer.accumulate_grad_batches:
            return
        self._observer(Moment.END)
        assert self._steps is not None
        following = next(self._steps, None)
        if following is None:
            trainer.should_stop = True
        self._observer = following or quiet

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._steps is not None:
            self._steps.close()  # takes back the plan and the hooks of the stage that failed

    # the measurement, in order

    def _schedule(self, model: nn.Module, device: torch.device) -> Generator[Observer, None, None]:
        found, options, kernels = self.measured, self._options, self._recipe.plan.kernels
        blocks = inspect_model(model).blocks
        self._clock, self._counters, self._last = clock_for(device), counters_for(device), blocks[-1].module
        counts = self._counters.read() is not None
        with apply_plan(model, [], kernels=kernels):
            yield from self._warm_up()
            found.control = yield from self._undisturbed(options.steps)
        times = RegionTimes(self._clock)
        with instrument(model, kernels=kernels) as ledger:
            yield quiet
            found.kept, found.kernels = ledger.rows(), dict(ledger.kernels)
            with times.watching(blocks[0].module):
                ledger.watch(times.probe)
                found.samples |= yield from self._timed(times)
            if options.tensors:
                collector = TensorProfile(blocks)
                with collector.watching():
                    ledger.watch(collector.probe)
                    yield quiet
                found.tensors = collector.as_dict()
            ledger.watch(Ranges().probe)
            with traced(device) as trace:
                yield quiet
            found.trace = read_trace(trace)
            del trace
        with apply_plan(model, "full", kernels=kernels) as applied:
            yield quiet
            found.full = applied.ledger.rows()
            applied.ledger.watch(times.probe)
            recomputed = yield from self._timed(times)
            found.samples |= {"replay": recomputed["replay"], "forward_full": recomputed["forward"], "backward_full": recomputed["backward"]}
            if counts:
                memory = ReplayMemory(self._counters)
                applied.ledger.watch(memory.probe)
                yield quiet
                found.replay_peak_bytes, found.replay_left_bytes = memory.peak_bytes, memory.left_bytes
        seen: dict[tuple[BlockPlan, ...], str] = {}
        for arm in self._arms:
            plan = Plan.from_labels(parse_arm(arm), [block.layout for block in blocks])
            found.recomputed[arm] = frozenset((block.name, name) for block in plan.blocks for name, mode in block.modes if mode is not Mode.KEEP)
            same = seen.setdefault(plan.blocks, arm)
            if same is arm:
                with apply_plan(model, arm, kernels=kernels) as applied:
                    yield quiet
                    found.ledgers[arm] = applied.ledger.rows()
                    # Not from the steps of `full`: how fast a projection runs depends on what the GPU does beside it.
                    applied.ledger.watch(times.probe)
                    found.replays[arm] = medians((yield from self._timed(times))["replay"])
                    applied.ledger.watch(None)
                    if counts:
                        found.phases[arm] = yield from self._undisturbed(1)
            else:
                found.ledgers[arm], found.replays[arm] = found.ledgers[same], found.replays[same]
                if counts:
                    found.phases[arm] = found.phases[same]
        yield from self._rounds(model)
        found.done = True

    def _warm_up(self) -> Iterator[Observer]:
        watch = AutotuneWatch()
        warm = WarmUp(max(1, self._recipe.monitor.warmup_steps), WARM_UP_CAP, watch)
        while not warm.done:
            yield quiet
            warm.step(watch.grew())
        self.measured.warm_up_steps = warm.seen
        if warm.capped:
            self.measured.remarks.append(f"kernels were still being tuned after {warm.seen} warm-up steps: times may hold some of it")

    def _undisturbed(self, count: int) -> Generator[Observer, None, dict[str, Any]]:
        phases = Phases(self._clock, self._counters)
        with phases.watching(self._last):
            for _ in range(count):
                yield phases
        return {**phases.read(), "peaks": phases.peaks, "requested_after_forward": phases.requested_after_forward}

    def _timed(self, times: RegionTimes) -> Generator[Observer, None, dict[str, Samples]]:
        yield times
        times.forget()  # the first step makes the events, and is the first without the ledger
        for _ in range(self._options.steps):
            yield times
        return times.read(self._recipe.trainer.accumulate_grad_batches)

    def _rounds(self, model: nn.Module) -> Iterator[Observer]:
        arms = [CONTROL, *self._arms]
        for index in range(self._options.rounds):
            for arm in arms if index % 2 == 0 else reversed(arms):
                with apply_plan(model, arm, kernels=self._recipe.plan.kernels):
                    for _ in range(SETTLE):
                        yield quiet
                    measured = yield from self._undisturbed(self._options.steps)
                self.measured.rounds.setdefault(arm, []).append(measured)
