"""One optimizer step as it is measured: phases, peaks, times, losses.

A `StepWindow` opens at the first micro-batch of an optimizer step and is finished at its last. `PhaseMeter` keeps the peaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, final

import torch

from ..offload.statistics import StepStatistics
from ._counters import DeviceCounters, MemoryReading

__all__ = ["BACKWARD", "EXCLUSIONS", "FORWARD", "OPTIMIZER", "PhaseMeter", "StepRecord", "StepWindow", "is_finite"]

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

EXCLUSIONS = ("warmup", "autotune", "validation", "checkpoint", "boundary")
"""Why a step is not in the steady window. A step that has several reasons counts under the first of them."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What was measured of one optimizer step. Memory in bytes; None means that the device cannot tell."""

    micro_batches: int
    wall_ms: float
    event_ms: float | None
    data_wait_ms: float | None
    tokens: int | None
    losses: list[float | None]
    peak_allocated: int | None
    peak_reserved: int | None
    peak_active: int | None
    retained: int | None
    phase_peaks: dict[str, int]
    pinned: int | None
    alloc_retries: int
    foreign_resets: int
    disturbed: bool
    skipped: bool
    flags: frozenset[str] = field(default_factory=frozenset)
    offload: StepStatistics | None = None

    @property
    def step_ms(self) -> float:
        """The step time that counts: device time where there is one."""
        return self.wall_ms if self.event_ms is None else self.event_ms


@final
class PhaseMeter:
    """Own running maxima of a device's peaks, in total and by phase.

    The counter of the device is reset at each phase boundary, after its value has been folded into the maxima here. The maxima
    only grow, so nobody else's reset can lower them.
    """

    def __init__(self, counters: DeviceCounters) -> None:
        self._counters = counters
        self._floor = 0
        self._first_retries: int | None = None
        self.phase: str | None = None
        self.peaks: dict[str, int] = {}
        self.peak_allocated: int | None = None
        self.peak_reserved: int | None = None
        self.peak_active: int | None = None
        self.alloc_retries = 0
        self.foreign_resets = 0
        self.disturbed = False

    def enter(self, phase: str | None) -> int | None:
        """End the running phase, begin `phase` (None: between micro-batches). Returns the allocated bytes at this moment."""
        reading = self.fold()
        self.phase = phase
        if reading is None:
            return None
        if phase is not None:
            self._counters.reset_peaks()
            self._floor = reading.allocated
        return reading.allocated

    def fold(self) -> MemoryReading | None:
        """Take the counter's present peaks into the running maxima."""
        reading = self._counters.read()
        if reading is None:
            return None
        if self._first_retries is None:
            self._first_retries = reading.alloc_retries
        # A process may reset the accumulated statistics too; then the difference says nothing.
        self.alloc_retries = max(self.alloc_retries, reading.alloc_retries - self._first_retries)
        if self.phase is None:
            return reading
        # A peak below what was allocated at our own last look: somebody reset it in a way that could not be watched.
        self.disturbed |= reading.peak_allocated < self._floor
        peak = max(reading.peak_allocated, reading.allocated, self._floor)
        self._floor = max(self._floor, reading.allocated)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), peak)
        self.peak_allocated = max(self.peak_allocated or 0, peak)
        self.peak_reserved = max(self.peak_reserved or 0, reading.peak_reserved, reading.reserved)
        self.peak_active = max(self.peak_active or 0, reading.peak_active)
        return reading

    def before_foreign_reset(self) -> None:
        """Somebody is about to reset the peaks: read them while they are there. Their effect afterwards is no disturbance."""
        self.foreign_resets += 1
        reading = self.fold()
        if reading is not None:
            self._floor = reading.allocated


@final
class StepWindow:
    """An optimizer step in progress.

    Time is taken from the first micro-batch's start to the last one's end, without the gaps between micro-batches (loading,
    transfer and whatever callbacks do there): by the host's clock, and by marks in the device's queue where there are such.
    """

    def __init__(self, counters: DeviceCounters) -> None:
        self._counters = counters
        self.meter = PhaseMeter(counters)
        self.micro_open = False
        self.flags: set[str] = set()
        self.backwards = 0
        self.updates: int | None = 0
        """Optimizer updates that really ran, None if that cannot be told."""
        self.micro_batches = 0
        self._marks: list[tuple[Any, Any]] = []
        self._start_mark: Any = None
        self._began = 0.0
        self._closed = 0.0
        self._gap_ms = 0.0
        self._wait_ms: float | None = 0.0
        self._tokens: int | None = 0
        self._losses: list[torch.Tensor | None] = []
        self._base: int | None = None
        self._retained: int | None = None

    def open_micro(self, wait_ms: float | None, tokens: int | None, held: Callable[[], int] | None = None) -> None:
        """A micro-batch begins.

        Args:
            wait_ms: time since the previous micro-batch ended, None if something else than loading happened in it.
            tokens: tokens of this micro-batch, None if unknown.
            held: gives the bytes of gradients alive now, if the user may free them before the backward.
        """
        self._wait_ms = None if wait_ms is None or self._wait_ms is None else self._wait_ms + wait_ms
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens
        self.begin_forward(held)
        self.micro_open = True
        self._start_mark = self._counters.mark()
        now = perf_counter()
        if self.micro_batches == 0:
            self._began = now
        else:
            self._gap_ms += (now - self._closed) * 1e3

    def begin_forward(self, held: Callable[[], int] | None) -> None:
        """A forward begins; `held` as for `open_micro`. With manual optimization a micro-batch may have several."""
        allocated = self.meter.enter(FORWARD)
        self._base = None if allocated is None else allocated - (0 if held is None else held())

    def forward_done(self, held: Callable[[], int] | None = None) -> None:
        """A forward is over; what is allocated now and was not at its beginning is retained. Further calls do nothing.

        Args:
            held: as for `open_micro`.
        """
        if self.meter.phase != FORWARD:
            return
        allocated = self.meter.enter(BACKWARD)
        if allocated is not None and self._base is not None:
            retained = allocated - (0 if held is None else held()) - self._base
            self._retained = retained if self._retained is None else max(self._retained, retained)
            self._base = None

    def close_micro(self, loss: torch.Tensor | None) -> None:
        """A micro-batch ends. Does not synchronise; `loss` stays on its device until `finish`."""
        mark = self._counters.mark()
        self._closed = perf_counter()
        self._marks.append((self._start_mark, mark))
        self.meter.enter(None)
        self._losses.append(loss)
        self.micro_batches += 1
        self.micro_open = False

    def finish(self) -> StepRecord:
        """The optimizer step is over: wait for the device (the one synchronisation), then read clocks, marks and losses."""
        first, last = self._marks[0], self._marks[-1]
        self._counters.wait(last[1])
        event_ms: float | None = None
        if first[0] is None:
            wall_ms = (self._closed - self._began) * 1e3 - self._gap_ms
        else:
            # The host runs ahead: a gap on the host is hidden while the device still works. What counts is its idle time.
            gaps = sum(self._counters.elapsed_ms(a[1], b[0]) for a, b in zip(self._marks, self._marks[1:], strict=False))
            wall_ms = (perf_counter() - self._began) * 1e3 - gaps
            event_ms = sum(self._counters.elapsed_ms(start, end) for start, end in self._marks)
        return StepRecord(
            micro_batches=self.micro_batches,
            wall_ms=wall_ms,
            event_ms=event_ms,
            data_wait_ms=self._wait_ms,
            tokens=self._tokens,
            losses=[_as_float(loss) for loss in self._losses],
            peak_allocated=self.meter.peak_allocated,
            peak_reserved=self.meter.peak_reserved,
            peak_active=self.meter.peak_active,
            retained=self._retained,
            phase_peaks=dict(self.meter.peaks),
            pinned=self._counters.pinned_bytes(),
            alloc_retries=self.meter.alloc_retries,
            foreign_resets=self.meter.foreign_resets,
            disturbed=self.meter.disturbed,
            skipped=self.updates == 0 or self.backwards == 0,
            flags=frozenset(self.flags),
        )


def _as_float(loss: torch.Tensor | None) -> float | None:
    return None if loss is None else float(loss)


def is_finite(loss: float | None) -> bool:
    """False for NaN and infinities; a step without a loss is not a non-finite one."""
    return loss is None or math.isfinite(loss)
