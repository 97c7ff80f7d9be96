"""What offload did and cost: counts by the host, times by events that are read only once they were reached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .copies import CopyBackend, Event, Stream
from .pool import Pool

__all__ = ["Recorder", "StepStatistics", "TimelineEntry", "merged"]

FOLD_SPANS = 8192
"""Times that may wait to be read: some hundred steps' worth would else pile up where nobody asks for statistics."""

HOST_SAMPLE = 3
"""One block in so many is looked at for whether the device ran dry while the host worked. Odd: hybrids repeat in fours."""


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
    """Offload between two calls of `Engine.step_statistics`, on one rank.

    Counts are exact for the step. Times appear once the device has reached them, at the latest a step or so later: over a run the sums
    are right, and no step waits for them.
    """

    fraction: float
    bytes_out: int
    """Copied to the host."""
    bytes_in: int
    """Copied back."""
    copies_out: int
    copies_in: int
    late: int
    """Of `copies_in`: enqueued only when they were needed, not ahead."""
    from_source: int
    """Reloads that needed no copy, since the source was still on the GPU."""
    eligible_bytes: int
    """What could have moved: large enough and in no resident block."""
    fallbacks: int
    fallback_bytes: int
    """Kept on the GPU because the pool was full."""
    skipped: dict[str, int]
    """Bytes kept on the GPU by intent: `min_bytes`, `resident`, `budget`, `ineligible`, and what the caller did not offer, by its reason."""
    prefetch_oom: int
    """Reloads ahead that found no room on the GPU and were left for the time of their use."""
    pinned_held: int
    pinned_in_use: int
    pinned_peak: int
    """Largest `pinned_in_use` in the step, bytes."""
    buffers_in_use: int
    copy_out_ms: float = 0.0
    copy_in_ms: float = 0.0
    timed_bytes_out: int = 0
    """The bytes that `copy_out_ms` is the time of."""
    timed_bytes_in: int = 0
    stall_out_ms: float = 0.0
    """Time for which compute waited in forward for a copy out, so that its source could go."""
    stall_in_ms: float = 0.0
    """Time for which compute waited in backward for a reload."""
    exposed_host_out_ms: float = 0.0
    """Host time of offload in forward during which the device had nothing else to do. It is in no stall: nothing waited for a copy."""
    exposed_host_in_ms: float = 0.0
    """The same in backward."""
    forward_ms: float = 0.0
    """From the first block's start to the last block's end, stalls included, over all forward passes timed."""
    backward_ms: float = 0.0
    """From the first block's backward to the start of the last one's."""
    wall_ms: float = 0.0
    """Since the statistics before these, by the host's clock; 0 the first time."""
    timed_eligible_bytes: int = 0
    """The eligible bytes of the passes that `forward_ms` is the time of."""
    forwards: int = 0
    """Forward passes begun: micro-batches, each with gradients."""
    largest_small: int = 0
    """Bytes of the largest storage that stayed for `min_bytes` alone: of none in a resident block, which would stay anyway."""

    def without_times(self) -> StepStatistics:
        """The counts alone."""
        return replace(
            self,
            copy_out_ms=0.0,
            copy_in_ms=0.0,
            stall_out_ms=0.0,
            stall_in_ms=0.0,
            exposed_host_out_ms=0.0,
            exposed_host_in_ms=0.0,
            forward_ms=0.0,
            backward_ms=0.0,
            wall_ms=0.0,
            timed_bytes_out=0,
            timed_bytes_in=0,
            timed_eligible_bytes=0,
        )

    @property
    def stayed(self) -> dict[str, int]:
        """Bytes that the labels named and that stayed on the device, by reason: those of `skipped`, and `pool full` (`max_pinned_gib`)."""
        return {**self.skipped, **({"pool full": self.fallback_bytes} if self.fallback_bytes else {})}

    @property
    def offered_bytes(self) -> int:
        """All that the labels named, moved or not: equal for equal shapes, whatever the share and the pool."""
        return self.bytes_out + sum(self.stayed.values())

    @property
    def out_gb_s(self) -> float | None:
        """Rate of the copies out, 10⁹ bytes per second; None where nothing was timed."""
        return self.timed_bytes_out / self.copy_out_ms / 1e6 if self.copy_out_ms > 0 else None

    @property
    def in_gb_s(self) -> float | None:
        """Rate of the copies back, 10⁹ bytes per second; None where nothing was timed."""
        return self.timed_bytes_in / self.copy_in_ms / 1e6 if self.copy_in_ms > 0 else None

    @property
    def stall_ms(self) -> float:
        """Time for which compute waited for copies."""
        return self.stall_out_ms + self.stall_in_ms

    @property
    def exposed_host_ms(self) -> float:
        """Host time of offload that was hidden behind nothing, in both directions."""
        return self.exposed_host_out_ms + self.exposed_host_in_ms

    @property
    def hidden_share(self) -> float | None:
        """Share of the copy time that compute did not wait for; None where nothing was timed."""
        copies = self.copy_out_ms + self.copy_in_ms
        return max(0.0, 1 - self.stall_ms / copies) if copies > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        names = ("out_gb_s", "in_gb_s", "stall_ms", "exposed_host_ms", "hidden_share")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def merged(parts: Sequence[StepStatistics]) -> StepStatistics | None:
    """The same step of several engines, each with blocks of the same passes: sums, and the smallest fraction. None of no engine."""
    if len(parts) < 2:
        return parts[0] if parts else None
    rows = [asdict(part) for part in parts]
    longest = ("forwards", "largest_small", "wall_ms")
    kept_apart = ("fraction", "skipped", *longest)
    total: dict[str, Any] = {name: sum(row[name] for row in rows) for name in rows[0] if name not in kept_apart}
    skipped: dict[str, int] = {}
    for row in rows:
        for reason, nbytes in row["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + nbytes
    total |= {name: max(row[name] for row in rows) for name in longest}
    return StepStatistics(fraction=min(part.fraction for part in parts), skipped=skipped, **total)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One event in a ticket's life. Entries are in the host's order of enqueueing."""

    kind: str
    """`out` (copy out enqueued), `in` (reload enqueued), `use` (fetched)."""
    forward: int
    """Number of the forward pass."""
    block: int
    """Block the ticket belongs to."""
    during: int
    """Block that was running when this was enqueued; `during - block` is the lead of a reload."""
    ticket: int
    ready: Event = field(repr=False, compare=False, default=None)
    """Event: the copy is done, or (`use`) compute may go on. `backend.elapsed_ms` of two of them once both were reached."""


class Recorder:
    """Counters of one engine since the last snapshot."""

    def __init__(self, backend: CopyBackend, *, timing: bool) -> None:
        self._backend, self.timing = backend, timing
        self.counts: dict[str, int] = {}
        self.skipped: dict[str, int] = {}
        self.largest_small = 0
        self._spans: list[tuple[str, Event, Event, int]] = []
        self._times: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._fold_at = FOLD_SPANS
        self._host_ns = {"out": 0, "in": 0}
        self._dry = {"out": 0.0, "in": 0.0}
        self._since: float | None = None

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self.counts[name] = self.counts.get(name, 0) + amount

    def skip(self, reason: str, nbytes: int) -> None:
        """Count bytes that stay by intent."""
        self.skipped[reason] = self.skipped.get(reason, 0) + nbytes

    def mark(self, stream: Stream) -> Event | None:
        """A timing event, if times are taken."""
        return self._backend.record(stream, timing=True) if self.timing else None

    def span(self, name: str, start: Event | None, end: Event | None, nbytes: int = 0) -> None:
        """A time to be read later; `name` is `copy_out`, `copy_in`, `stall_out`, `stall_in`, `host_out`, `host_in`, `forward` or `backward`."""
        if start is not None and end is not None:
            self._spans.append((name, start, end, nbytes))
            if len(self._spans) >= self._fold_at:  # nobody takes statistics: events must not pile up
                self._fold()
                self._fold_at = FOLD_SPANS + len(self._spans)

    def host(self, way: str, spent_ns: int) -> None:
        """Host time that offload took on its way `out` or `in`, hidden or not. The engine's lock may be missing: a lost microsecond is no matter."""
        self._host_ns[way] += spent_ns

    def before_work(self, number: int, stream: Stream) -> tuple[Event | None, int]:
        """Host work begins, during which nobody enqueues anything on `stream`. One in `HOST_SAMPLE` numbers is looked at."""
        return self.mark(stream) if number % HOST_SAMPLE == 0 else None, time.perf_counter_ns()

    def after_work(self, way: str, begun: tuple[Event | None, int], stream: Stream) -> int:
        """It ended: returns its nanoseconds. Between two marks with nothing in between the device's clock runs only if it had nothing to do."""
        start, since = begun
        spent = time.perf_counter_ns() - since
        if start is not None:
            self.span(f"host_{way}", start, self.mark(stream), spent)
        return spent

    def _exposed_ms(self, way: str) -> float:
        """Of all host time, the share for which the device was dry in the work that was looked at. After `_fold`; resets."""
        spent, self._host_ns[way] = self._host_ns[way] / 1e6, 0
        looked = self._sizes.get(f"host_{way}", 0) / 1e6
        if looked > 0:
            self._dry[way] = min(1.0, max(0.0, self._times[f"host_{way}"] / looked))
        return spent * self._dry[way]

    def _fold(self) -> None:
        """Read the times that were reached, without waiting for the device."""
        waiting = []
        for name, start, end, size in self._spans:
            if self._backend.done(start) and self._backend.done(end):
                self._times[name] = self._times.get(name, 0.0) + self._backend.elapsed_ms(start, end)
                self._sizes[name] = self._sizes.get(name, 0) + size
            else:
                waiting.append((name, start, end, size))
        self._spans = waiting

    def snapshot(self, pool: Pool, fraction: float) -> StepStatistics:
        """Everything since the last snapshot, without waiting for the device; resets."""
        before, self._since = self._since, time.perf_counter()
        self._fold()
        exposed_out, exposed_in = self._exposed_ms("out"), self._exposed_ms("in")
        times, nbytes, self._times, self._sizes = self._times, self._sizes, {}, {}
        counts, self.counts = self.counts, {}
        skipped, self.skipped = self.skipped, {}
        largest_small, self.largest_small = self.largest_small, 0
        peak, pool.step_peak = pool.step_peak, pool.in_use
        numbers = (
            "forwards",
            "bytes_out",
            "bytes_in",
            "copies_out",
            "copies_in",
            "late",
            "from_source",
            "eligible_bytes",
            "fallbacks",
            "fallback_bytes",
            "prefetch_oom",
        )
        return StepStatistics(
            fraction=fraction,
            **{name: counts.get(name, 0) for name in numbers},
            skipped=skipped,
            largest_small=largest_small,
            pinned_held=pool.held,
            pinned_in_use=pool.in_use,
            pinned_peak=peak,
            buffers_in_use=pool.buffers_in_use,
            copy_out_ms=times.get("copy_out", 0.0),
            copy_in_ms=times.get("copy_in", 0.0),
            stall_out_ms=times.get("stall_out", 0.0),
            stall_in_ms=times.get("stall_in", 0.0),
            exposed_host_out_ms=exposed_out,
            exposed_host_in_ms=exposed_in,
            forward_ms=times.get("forward", 0.0),
            backward_ms=times.get("backward", 0.0),
            wall_ms=(self._since - before) * 1e3 if before is not None else 0.0,
            timed_bytes_out=nbytes.get("copy_out", 0),
            timed_bytes_in=nbytes.get("copy_in", 0),
            timed_eligible_bytes=nbytes.get("forward", 0),
        )
