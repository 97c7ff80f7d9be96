"""A step's phases as the profiler sees them: how long each takes, and which one holds the memory peak.

Nothing here waits for the device inside a step. Marks are CUDA events on a GPU and the wall clock on a CPU; they are read when a stage
of the profile is over. Allocator peaks are host-side figures, read and reset at each boundary.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, final

import torch
from torch import Tensor, nn

from ..callbacks._counters import DeviceCounters

__all__ = ["PHASES", "Clock", "Moment", "Observer", "Phases", "clock_for", "first_tensor", "quiet"]


class Moment(StrEnum):
    """Boundaries of a training step, in their order; all but the last two come once per micro-batch."""

    FORWARD = "forward"
    LOSS = "loss forward"
    """The last block's forward ended: final norm, logits and loss follow."""
    BACKWARD = "loss backward"
    """The backward begins, with the loss."""
    BLOCKS = "backward"
    """The backward reached the last block."""
    DONE = "done"
    """The backward ended."""
    OPTIMIZER = "optimizer"
    """Before clipping and the optimizer's step."""
    END = "end"


PHASES = (Moment.FORWARD, Moment.LOSS, Moment.BACKWARD, Moment.BLOCKS, Moment.OPTIMIZER)
"""Phases are named after the moment at which they begin."""
Observer = Callable[[Moment], None]
"""What is told of every moment of the steps it watches."""


def quiet(moment: Moment) -> None:
    """The observer that looks away: an undisturbed step."""


class Clock(ABC):
    """Marks in the device's queue, and the time between two of them."""

    @abstractmethod
    def mark(self) -> Any:
        """A mark at this point of the queue; costs no synchronisation."""

    @abstractmethod
    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks, after `settle`."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until every mark is reached."""

    @abstractmethod
    def reuse(self) -> None:
        """All marks given out were read: they may be given out again."""


@final
class WallClock(Clock):
    """For a device that works in step with the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def ms(self, start: float, end: float) -> float:
        return (end - start) * 1e3

    def settle(self) -> None:
        return None

    def reuse(self) -> None:
        return None


@final
class EventClock(Clock):
    """CUDA events from a pool: making one costs several times as much as recording it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def mark(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def reuse(self) -> None:
        self._used = 0


def clock_for(device: torch.device) -> Clock:
    """CUDA events for a CUDA device, the wall clock for any other."""
    return EventClock(device) if device.type == "cuda" else WallClock()


def first_tensor(args: Any, kwargs: Any) -> Tensor:
    """A block's hidden states [B, T, H], from the arguments of its call."""
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


@final
class Phases:
    """Observer of undisturbed steps: the time and the allocator's peak of every phase, and the time from one step to the next."""

    def __init__(self, clock: Clock, counters: DeviceCounters) -> None:
        self._clock, self._counters = clock, counters
        self._boundaries: list[tuple[Moment, Any]] = []
        self._steps = 0
        self._inside = False
        self._retained: int | None = None
        self.peaks: dict[str, int] = {}
        """Phase -> largest number of allocated bytes; empty where the device does not count them."""

    def __call__(self, moment: Moment) -> None:
        reading = self._counters.read()
        if reading is not None:
            self._peak(reading.peak_allocated)
            if moment is Moment.BACKWARD and self._boundaries[-1][0] is Moment.LOSS and self._first_micro_batch():
                self._retained = reading.requested
            self._counters.reset_peaks()
        self._inside = moment is not Moment.END
        self._steps += moment is Moment.END
        self._boundaries.append((moment, self._clock.mark()))

    def _peak(self, peak: int) -> None:
        # what comes after END is no step's, and a moment that begins no phase of its own belongs to the one before
        phase = next((moment for moment, _ in reversed(self._boundaries) if moment in PHASES or moment is Moment.END), Moment.END)
        if phase is not Moment.END:
            self.peaks[phase] = max(self.peaks.get(phase, 0), peak)

    def _first_micro_batch(self) -> bool:
        """Later ones hold gradients as well, which are no activations."""
        since = next((i for i in range(len(self._boundaries) - 1, -1, -1) if self._boundaries[i][0] is Moment.END), -1)
        return sum(moment is Moment.FORWARD for moment, _ in self._boundaries[since + 1 :]) == 1

    @property
    def requested_after_forward(self) -> int | None:
        """Bytes asked of the allocator that live between forward and backward of a step's first micro-batch, weights and logits included."""
        return self._retained

    @contextmanager
    def watching(self, last: nn.Module) -> Iterator[Phases]:
        """Hear of the two moments that Lightning has no hook for, by hooks on the last block."""

        def ended(module: nn.Module, args: Any, output: Any) -> None:
            self(Moment.LOSS)
            out = output[0] if isinstance(output, tuple) else output
            if out.grad_fn is not None:
                out.grad_fn.register_prehook(lambda gradients: self(Moment.BLOCKS))

        handle = last.register_forward_hook(ended)
        try:
            yield self
        finally:
            handle.remove()

    def read(self) -> dict[str, Any]:
        """`step_ms`: of every step, from its start to the next one's; `phases`: median milliseconds per step of every phase."""
        self._clock.settle()
        starts: list[Any] = []
        phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        ending = None
        for (moment, mark), (after, then) in zip(self._boundaries, self._boundaries[1:], strict=False):
            if moment is Moment.END:
                continue
            if not starts or ending is not None:
                starts.append(mark)
                ending = None
                for values in phases.values():
                    values.append(0.0)
            name = Moment.BLOCKS if moment is Moment.DONE else moment
            phases[name][-1] += self._clock.ms(mark, then)
            if after is Moment.END:
                ending = then
        ends = [*starts[1:], ending]
        found = {
            "step_ms": [self._clock.ms(start, end) for start, end in zip(starts, ends, strict=True)],
            "phases": {str(phase): statistics.median(values) for phase, values in phases.items()},
        }
        self._clock.reuse()
        return found
