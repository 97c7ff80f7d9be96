"""One fit as the monitor sees it: which steps count, and what they add up to."""

from __future__ import annotations

from typing import final

import torch

from ..offload.statistics import StepStatistics
from ._counters import DeviceCounters, NoCounters
from ._offload import OffloadTotals
from ._series import MIB, Maximum, Series
from ._warmup import AutotuneWatch, WarmUp
from ._window import BACKWARD, EXCLUSIONS, FORWARD, OPTIMIZER, StepRecord, StepWindow, is_finite

__all__ = ["Interval", "Session", "rate"]


@final
class Interval:
    """What the loggers get: the steady steps since the last row."""

    def __init__(self) -> None:
        self._step_ms = Series()
        self._tokens: int | None = 0
        self._peaks = {name: Maximum() for name in ("peak_allocated_mib", "peak_reserved_mib", "retained_mib", "pinned_mib")}
        self.offload = OffloadTotals()

    def add(self, record: StepRecord) -> None:
        """Take a steady step in."""
        self._step_ms.add(record.step_ms)
        self._tokens = None if self._tokens is None or record.tokens is None else self._tokens + record.tokens
        self._peaks["peak_allocated_mib"].add(_mib(record.peak_allocated))
        self._peaks["peak_reserved_mib"].add(_mib(record.peak_reserved))
        self._peaks["retained_mib"].add(_mib(record.retained))
        self._peaks["pinned_mib"].add(_mib(record.pinned))
        if record.offload is not None:
            self.offload.add(record.offload)

    def figures(self, ledger_mib: float | None) -> dict[str, float | None]:
        """Median step time, tokens per second and maxima, under the names in `LOGGED`; empty if there was no steady step.

        Args:
            ledger_mib: what the ledger says is retained, for a device that cannot measure it.
        """
        spread = self._step_ms.spread()
        if spread is None:
            return {}
        figures: dict[str, float | None] = {"step_ms": spread["median"], "tokens_per_s": rate(self._tokens, self._step_ms.total())}
        figures.update(self.peaks(ledger_mib))
        figures.update(self.offload.figures())
        return figures

    def peaks(self, ledger_mib: float | None) -> dict[str, float | None]:
        """The maxima alone; see `figures`."""
        peaks = {name: peak.value() for name, peak in self._peaks.items()}
        if peaks["retained_mib"] is None:
            peaks["retained_mib"] = ledger_mib
        return peaks


@final
class Session:
    """State of one fit.

    Args:
        counters: the device's counters.
        warmup_steps, autotune_cap: see `WarmUp`.
        window_steps: steady steps after which measuring ends, None for all.
        first_step: `trainer.global_step` when the fit began; not 0 after a resume.
    """

    def __init__(self, counters: DeviceCounters, *, warmup_steps: int, autotune_cap: int, window_steps: int | None, first_step: int) -> None:
        self.counters = counters
        self.watch = AutotuneWatch()
        self.warmup = WarmUp(warmup_steps, autotune_cap, self.watch)
        self.first_step = first_step
        self.window: StepWindow | None = None
        self.gap_flags: set[str] = set()
        self.total = Interval()
        self.since_log = Interval()
        self.optimizer_steps = 0
        self.steps = 0
        self.steady_from: int | None = None
        self.steady_to: int | None = None
        self.excluded = dict.fromkeys(EXCLUSIONS, 0)
        self.losses: list[float | None] = []
        self.step_tokens: list[int | None] = []
        self.nonfinite_losses = 0
        self.skipped = 0
        self.alloc_retries = 0
        self.foreign_resets = 0
        self.disturbed_steps = 0
        self.step_times = Series()
        self.wall = Series()
        self.event = Series()
        self.data_wait = Series()
        self.tokens: int | None = 0
        self.peak_active = Maximum()
        self.phase_peaks = {phase: Maximum() for phase in (FORWARD, BACKWARD, OPTIMIZER)}
        self._window_steps = window_steps

    @property
    def full(self) -> bool:
        """True once the asked number of steady steps has been measured."""
        return self._window_steps is not None and self.steps >= self._window_steps

    def flag(self, reason: str) -> None:
        """Something that is not training happened: it spoils the step in progress, or else the next one."""
        (self.gap_flags if self.window is None else self.window.flags).add(reason)

    def begin_step(self) -> StepWindow:
        """Open the window of the next optimizer step, or return the open one."""
        if self.window is None:
            # Behind the window nothing is measured any more: no resets, no marks, no waiting.
            counters = NoCounters(torch.device("cpu")) if self.full else self.counters
            self.window = StepWindow(counters)
            self.window.flags |= self.gap_flags
            self.gap_flags.clear()
        return self.window

    def abandon_step(self) -> None:
        """Forget an optimizer step that never came to its end; the next one is not steady."""
        self.window = None
        self.gap_flags.add("boundary")

    def end_step(self, step: int, loss_is_mean_share: bool, offload: StepStatistics | None = None) -> StepRecord | None:
        """Finish the open window. Returns its record if the step counts as steady.

        Args:
            step: `trainer.global_step` after this step.
            loss_is_mean_share: the micro-batch losses are already divided by their number, so that they add up to the mean.
            offload: what offload did in this step, if anything may move.
        """
        assert self.window is not None
        was_full = self.full
        record = self.window.finish()
        self.window = None
        if offload is not None:
            record.offload = offload
            if record.pinned is not None:  # the pool's pages are not of PyTorch's host allocator
                record.pinned += offload.pinned_held
        self.optimizer_steps += 1
        self.skipped += record.skipped
        self.nonfinite_losses += sum(not is_finite(loss) for loss in record.losses)
        self.losses.append(_step_loss(record.losses, loss_is_mean_share))
        self.step_tokens.append(record.tokens)
        if was_full:
            return None
        self.foreign_resets += record.foreign_resets
        grew = self.watch.grew()
        reason = self._exclusion(record, grew)
        if reason is not None:
            self.excluded[reason] += 1
            return None
        self._take(record, step)
        return record

    def _exclusion(self, record: StepRecord, grew: bool) -> str | None:
        if not self.warmup.done:
            self.warmup.step(grew)
            return "warmup"
        if grew:
            return "autotune"
        return next((reason for reason in EXCLUSIONS if reason in record.flags), None)

    def _take(self, record: StepRecord, step: int) -> None:
        self.steps += 1
        self.steady_from = step if self.steady_from is None else self.steady_from
        self.steady_to = step
        self.total.add(record)
        self.since_log.add(record)
        self.step_times.add(record.step_ms)
        self.wall.add(record.wall_ms)
        if record.event_ms is not None:
            self.event.add(record.event_ms)
        if record.data_wait_ms is not None:
            self.data_wait.add(record.data_wait_ms)
        self.tokens = None if self.tokens is None or record.tokens is None else self.tokens + record.tokens
        self.peak_active.add(_mib(record.peak_active))
        for phase, peak in record.phase_peaks.items():
            self.phase_peaks[phase].add(_mib(peak))
        self.alloc_retries += record.alloc_retries
        self.disturbed_steps += record.disturbed

    def take_interval(self) -> Interval:
        """The steady steps since the last call."""
        interval, self.since_log = self.since_log, Interval()
        return interval


def rate(tokens: int | None, total_ms: float) -> float | None:
    """Tokens per second, or None if either is unknown."""
    return None if tokens is None or not tokens or total_ms <= 0 else tokens / (total_ms / 1e3)


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _step_loss(losses: list[float | None], is_share: bool) -> float | None:
    """The loss of an optimizer step, None unless every micro-batch had a finite one (strict JSON knows no NaN)."""
    known = [loss for loss in losses if loss is not None]
    if not known or len(known) != len(losses) or not all(is_finite(loss) for loss in known):
        return None
    return sum(known) if is_share else sum(known) / len(known)
