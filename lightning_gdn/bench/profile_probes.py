"""Probes that the profiler hands the tape in the ledger's place: time per region, memory of a replay, named ranges for a trace.

A probe belongs to one call of one block. None of them reads a tensor's values or keeps one, so a probed step computes what any step
computes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from ..callbacks._counters import DeviceCounters
from ..moving import Moved
from ..replay import Region
from .profile_phases import Clock, Moment, first_tensor

__all__ = ["OUTSIDE", "RANGE", "Key", "Ranges", "RegionTimes", "ReplayMemory", "Samples", "SilentProbe", "medians"]

Key = tuple[str, str]
"""(block, region)."""
Samples = dict[Key, list[float]]
"""Milliseconds by (block, region), one number per step."""
OUTSIDE: Key = ("", "outside")
"""Embedding, final norm, output projection and loss."""
RANGE = "lightning_gdn."
"""Prefix of the names of ranges in a trace."""


def medians(samples: Samples) -> dict[Key, float]:
    """The middle of each region's steps."""
    return {key: statistics.median(values) for key, values in samples.items()}


class SilentProbe:
    """A probe that hears everything and does nothing: what the others begin from."""

    counts_saved = False

    def called(self, region: str) -> None:
        """See `Probe`."""

    def ended(self, region: str, result: object) -> None:
        """See `Probe`."""

    def replayed(self, region: str) -> None:
        """See `Probe`."""

    def replay_ended(self, region: str) -> None:
        """See `Probe`."""

    def saved(self, region: str, tensor: Tensor, packed: object) -> None:
        """See `Probe`."""

    def closing(self) -> None:
        """See `Probe`."""

    def finish(self, regions: Sequence[Region], moved: Sequence[Moved]) -> None:
        """See `Probe`."""

    def abandon(self) -> None:
        """See `Probe`."""


class _Marks:
    """The marks of one step."""

    def __init__(self) -> None:
        self.whole: list[tuple[Any, Any]] = []  # forwards
        self.forward: list[tuple[Key, Any, Any]] = []
        self.replay: list[tuple[Key, Any, Any]] = []
        self.backward: list[tuple[Key | None, Any]] = []  # from here on the backward is in this region; None: it ended


@final
class RegionTimes:
    """Observer and maker of probes: milliseconds of every region of every block in forward, backward and replay.

    The backward has no regions of its own. Where it enters one is told by hooks on the graph nodes of the region's outputs: the engine
    runs nodes in the reverse of the order in which they were made, so what runs until the next entry belongs to the region.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now, self._steps = _Marks(), list[_Marks]()
        self._started: Any = None

    def __call__(self, moment: Moment) -> None:
        if moment is Moment.FORWARD:
            self._started = self._clock.mark()
        elif moment is Moment.BACKWARD:
            mark = self._clock.mark()
            self._now.whole.append((self._started, mark))
            self._now.backward.append((OUTSIDE, mark))
        elif moment is Moment.DONE:
            self._now.backward.append((None, self._clock.mark()))
        elif moment is Moment.END:
            self._steps.append(self._now)
            self._now = _Marks()

    def forget(self) -> None:
        """Drop the steps seen so far: the first ones of a stage settle."""
        self._clock.settle()
        self._steps.clear()
        self._clock.reuse()

    def probe(self, block: str, module: nn.Module) -> _RegionProbe:
        """A probe for one call of a block."""
        return _RegionProbe(self, block)

    @contextmanager
    def watching(self, first: nn.Module) -> Iterator[RegionTimes]:
        """Also hear where the backward leaves the first block, by a hook on it."""

        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            node = first_tensor(args, kwargs).grad_fn
            if node is not None:
                node.register_prehook(self.entry(OUTSIDE))

        handle = first.register_forward_pre_hook(begins, with_kwargs=True)
        try:
            yield self
        finally:
            handle.remove()

    def entry(self, key: Key) -> Any:
        """A hook for a graph node: the backward enters this region."""
        return lambda gradients: self._now.backward.append((key, self._clock.mark()))

    def read(self, micro_batches: int) -> dict[str, Samples]:
        """`forward`, `backward` and `replay`: milliseconds per micro-batch by (block, region), of every step.

        `OUTSIDE` holds what no region's forward or backward covers.
        """
        self._clock.settle()
        found: dict[str, Samples] = {"forward": {}, "backward": {}, "replay": {}}
        for number, marks in enumerate(self._steps):

            def add(kind: str, key: Key, ms: float, number: int = number) -> None:
                values = found[kind].setdefault(key, [0.0] * len(self._steps))
                values[number] += ms / micro_batches

            for key, start, end in marks.forward:
                ms = self._clock.ms(start, end)
                add("forward", key, ms)
                add("forward", OUTSIDE, -ms)
            for start, end in marks.whole:
                add("forward", OUTSIDE, self._clock.ms(start, end))
            for key, start, end in marks.replay:
                add("replay", key, self._clock.ms(start, end))
            for (entered, start), (_, end) in zip(marks.backward, marks.backward[1:], strict=False):
                if entered is not None:
                    add("backward", entered, self._clock.ms(start, end))
        self._clock.reuse()
        self._steps.clear()
        return found

    def ran(self, key: Key, start: Any) -> None:
        """A region's forward ends here."""
        self._now.forward.append((key, start, self._clock.mark()))

    def replayed(self, key: Key, start: Any) -> None:
        """A region's replay ends here."""
        self._now.replay.append((key, start, self._clock.mark()))

    def mark(self) -> Any:
        """A mark of the clock."""
        return self._clock.mark()


class _RegionProbe(SilentProbe):
    def __init__(self, times: RegionTimes, block: str) -> None:
        self._times, self._block = times, block
        self._open: list[Any] = []
        self._nodes: dict[int, object] = {}  # alive, so that an id is not used again

    def called(self, region: str) -> None:
        self._open.append(self._times.mark())

    def ended(self, region: str, result: object) -> None:
        key = (self._block, region)
        self._times.ran(key, self._open.pop())
        for out in result if isinstance(result, tuple) else (result,):
            node = out.grad_fn if isinstance(out, Tensor) else None
            # a region that hands its input through has no node of its own: the node stays the region's that made it
            if node is not None and id(node) not in self._nodes:
                self._nodes[id(node)] = node
                node.register_prehook(self._times.entry(key))

    def replayed(self, region: str) -> None:
        self._open.append(self._times.mark())

    def replay_ended(self, region: str) -> None:
        self._times.replayed((self._block, region), self._open.pop())

    def finish(self, regions: Sequence[Region], moved: Sequence[Moved]) -> None:
        self._nodes.clear()

    def abandon(self) -> None:
        self._nodes.clear()


@final
class ReplayMemory:
    """Maker of probes: what one replay of each region allocates beyond what was there, at its peak and when it ends; largest of all blocks."""

    def __init__(self, counters: DeviceCounters) -> None:
        self._counters = counters
        self.peak_bytes: dict[str, int] = {}
        self.left_bytes: dict[str, int] = {}

    def probe(self, block: str, module: nn.Module) -> _MemoryProbe:
        """A probe for one call of a block."""
        return _MemoryProbe(self)

    def allocated(self) -> tuple[int, int]:
        """Bytes now, and at the peak since the last reset."""
        reading = self._counters.read()
        assert reading is not None, "made for devices with counters only"
        return reading.allocated, reading.peak_allocated

    def reset(self) -> int:
        """Start a new peak; returns the bytes allocated now."""
        self._counters.reset_peaks()
        return self.allocated()[0]


class _MemoryProbe(SilentProbe):
    def __init__(self, owner: ReplayMemory) -> None:
        self._owner, self._before = owner, 0

    def replayed(self, region: str) -> None:
        self._before = self._owner.reset()

    def replay_ended(self, region: str) -> None:
        owner = self._owner
        now, peak = owner.allocated()
        owner.peak_bytes[region] = max(owner.peak_bytes.get(region, 0), peak - self._before)
        owner.left_bytes[region] = max(owner.left_bytes.get(region, 0), now - self._before)


@final
class Ranges:
    """Maker of probes: the forward of every region as a named range of torch.profiler's trace."""

    def probe(self, block: str, module: nn.Module) -> _RangeProbe:
        """A probe for one call of a block."""
        return _RangeProbe()


class _RangeProbe(SilentProbe):
    def __init__(self) -> None:
        self._open: list[Any] = []

    def called(self, region: str) -> None:
        self._open.append(torch.profiler.record_function(RANGE + region))
        self._open[-1].__enter__()

    def ended(self, region: str, result: object) -> None:
        self._open.pop().__exit__(None, None, None)
