"""How much moves: a share of the bytes, and the policy that finds the largest share that stays hidden. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .statistics import StepStatistics

__all__ = ["AutoFraction", "Budget", "Finding"]


class Budget:
    """Decides what moves, storage by storage: never more than `fraction` of the bytes offered so far, so the share spreads over the forward.

    Where the share is a half or less, block by block (`enter`): one takes all that its block offers, with room for its copies in those
    after it, and several take nothing, so that nothing of offload has to run in them. What fills no whole block any more moves storage by storage.

    It starts anew with every forward pass and depends on nothing but the sizes offered: the same shapes give the same choice, from the first
    step on, and 0 never moves anything.
    """

    __slots__ = ("offered", "moved", "_share", "_usual", "_entered", "_room")

    def __init__(self, fraction: float) -> None:
        self._share = Fraction(fraction).limit_denominator(1_000_000)  # exact: a third of three equal storages is one of them
        self.offered = 0
        self.moved = 0
        self._usual = 0  # what the last block that offered something offered, bytes
        self._entered = 0  # `offered` when this block was entered
        self._room: int | None = None  # what this block may take if it is taken as a whole, 0 if it is left out; None: storage by storage

    @property
    def blocks_per_copy(self) -> int:
        """The blocks in which this one's copies have the bus for themselves: several where it moves as a whole and those after it do not."""
        return self._share.denominator // self._share.numerator if self._room else 1

    @property
    def _by_block(self) -> bool:
        return 0 < 2 * self._share.numerator <= self._share.denominator

    def enter(self, remaining: int) -> tuple[int, ...]:
        """A block begins; `remaining` blocks of the pass may offer something that moves, this one included.

        Returns:
            What the choice in this block depends on, beside what it offers. Two equal ones: the same offers get the same answers.
        """
        size = self.offered - self._entered
        self._usual, self._entered, self._room = size or self._usual, self.offered, None
        if self._by_block and self._usual:
            if self._within(self.moved + self._usual, self.offered + self._usual):
                self._room = self._usual
            elif self._within(self.moved + self._usual, self.offered + self._usual * remaining):
                self._room = 0  # a later one is taken
        return self.offered, self.moved, self._usual, -1 if self._room is None else self._room

    def _within(self, moved: int, offered: int) -> bool:
        return moved * self._share.denominator <= offered * self._share.numerator

    def admit(self, nbytes: int) -> bool:
        """Whether a storage of this size moves. Every eligible storage must be offered once, whatever the answer."""
        self.offered += nbytes
        if self._room == 0:
            return False
        offered = self.offered if self._room is None else max(self.offered, self._entered + self._room)
        fits = self._within(self.moved + nbytes, offered)
        if fits:
            self.moved += nbytes
        return fits

    def leave_out(self, nbytes: int) -> None:
        """As `admit` of storages that it would refuse."""
        self.offered += nbytes


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why `auto` changed the share, or settled on it; times are of one step at the share `before`, on this rank."""

    fraction: float
    before: float
    copies_alone: float
    """The share whose copies hide, whatever the host's part."""
    host_ms: float
    """Host time of offload that was hidden behind nothing."""
    stall_ms: float
    copy_ms: float
    """Time of the copies, out and back."""
    step_ms: float
    """The whole step, without what was lost."""
    elsewhere: bool
    """Another rank has a clearly smaller share: not for what was found here."""

    @property
    def by_host(self) -> bool:
        """The host's time, not the copies, keeps the share well below what could hide."""
        copies = self.stall_ms + CONTENTION * self.copy_ms
        return not self.elsewhere and self.host_ms > copies and self.fraction < 0.9 * self.copies_alone


CONTENTION = 0.02
"""How much longer compute takes beside a copy: both use the device's memory. On an H200 what steps cost beyond stalls and host time was
between -0.01 and 0.04 of the time of their copies."""
SMALLEST, SMALLEST_BY_HOST = 0.01, 0.05
"""Smaller shares are 0. Where the host decides, sooner: hooks and contexts around the blocks cost it the same whatever the share."""
LONGEST = 31
"""Most steps of a window. The share never goes up again, so in thousands of windows of three some would be mistaken and take it to nothing."""


def _alone(value: float) -> float:
    return value


class AutoFraction:
    """Finds the largest fraction whose copies stay hidden behind compute; once settled it only goes down.

    It starts at 1, where the GPU needs the least memory. After `skip` steps (kernels are tuned and buffers pinned in them) it looks at a
    window of `measure` steps: the rate of each direction as it was in training, all ranks at once, times the compute of that pass gives the
    bytes that fit; the smaller of both shares, times `margin`, is the answer. Afterwards it looks at the stalls of every window: a block's
    own copies can be more than its neighbour's compute covers, though all of them together fit. The first step down follows the share of
    the copy time that was lost, each further one the line through the last two, to where it loses `margin * tolerance` of the step.

    Of a window every figure is the median: one slow step (a garbage collection, a checkpoint being written) says nothing. While the share that
    it settled on stays, each window is one step more than twice the one before, up to `LONGEST`; after a change it is `measure` again.

    Host time of offload that nothing hid is lost as well, from the first answer on: where launches decide the step, the GPU waits for the host
    and never for a copy. So is what copies take from the compute beside them (`CONTENTION`). Both are proportional to the share at most, so the
    share that loses `margin * tolerance` is taken at once; a part that does not shrink with the share shows in the next steps, as a line that
    ends below it. Then the share is 0, and offload rests. After every change `skip` steps are ignored again: in them buffers are pinned anew.

    Call `observe` once per optimizer step on every rank: `reduce_min` is a collective when there are several, and is called in the
    same steps on all of them.

    Args:
        reduce_min: smallest of a value over the ranks.
        skip: steps to ignore.
        measure: steps of the first window, of the second, and of the first one after a change.
        margin: share of the compute that copies may fill.
        tolerance: share of the step that may be lost, all in all, before the fraction goes down.
    """

    def __init__(
        self, reduce_min: Callable[[float], float] = _alone, *, skip: int = 2, measure: int = 3, margin: float = 0.8, tolerance: float = 0.008
    ) -> None:
        self.fraction = 1.0
        self.settled = False
        self._reduce, self._skip, self._measure, self._margin, self._tolerance = reduce_min, skip, measure, margin, tolerance
        self._ignored, self._length = skip, measure
        self._window: list[StepStatistics] = []
        self._before: tuple[float, float] | None = None
        """A larger share, and what of the step it lost."""
        self._copies_alone = 1.0
        self._finding: Finding | None = None

    def observe(self, sample: StepStatistics) -> float:
        """Take the statistics of one step; returns the fraction for the next one."""
        if self._skip > 0:
            self._skip -= 1
            return self.fraction
        self._window.append(sample)
        if len(self._window) < self._length:
            return self.fraction
        found = self._first_answer() if not self.settled else self._without_loss()
        # Unsettled ranks (nothing timed yet) answer -1, so that all of them go on measuring: agreement comes before speed.
        agreed = self._reduce(-1.0 if found is None else found)
        if agreed >= 0:
            before, settled = self.fraction, self.settled
            self.fraction, self.settled = min(before, agreed), True
            if not settled or self.fraction < before:
                self._tell(before, elsewhere=found is not None and agreed < 0.9 * found)
            if self.fraction < before:
                self._skip, self._length = self._ignored, self._measure
            elif settled:
                self._length = min(2 * self._length + 1, LONGEST)
        self._window.clear()
        return self.fraction

    def take_finding(self) -> Finding | None:
        """What was found since this was asked last, if the share settled or changed."""
        found, self._finding = self._finding, None
        return found

    def _tell(self, before: float, *, elsewhere: bool) -> None:
        host, stall, copies, step = self._losses()
        self._finding = Finding(
            fraction=self.fraction,
            before=before,
            copies_alone=self._copies_alone,
            host_ms=host,
            stall_ms=stall,
            copy_ms=copies,
            step_ms=step,
            elsewhere=elsewhere,
        )

    def _usual(self, name: str) -> float:
        """The median over steps in which that direction was timed, if there were any: statistics may be taken more often than once per step."""
        phase = "backward_ms" if "_in" in name or name == "backward_ms" else "forward_ms"
        timed = [sample for sample in self._window if getattr(sample, phase) > 0]
        return float(median(getattr(sample, name) for sample in timed or self._window))

    def _losses(self) -> tuple[float, float, float, float]:
        """Milliseconds per step of exposed host time, of stalls, of copies, and of the step without what was lost."""
        host = self._usual("exposed_host_out_ms") + self._usual("exposed_host_in_ms")
        stall = self._usual("stall_out_ms") + self._usual("stall_in_ms")
        copies = self._usual("copy_out_ms") + self._usual("copy_in_ms")
        blocks = self._usual("forward_ms") + self._usual("backward_ms")
        return host, stall, copies, max(0.0, max(blocks, self._usual("wall_ms")) - stall - host)

    def _first_answer(self) -> float | None:
        share = self._hidden_share()
        if share is None:
            return None
        self._copies_alone = share
        host, stall, copies, step = self._losses()
        proportional, smallest = host + CONTENTION * copies, SMALLEST
        if proportional > self._tolerance * step:
            self._before = self.fraction, (proportional + stall) / step if step > 0 else 1.0
            bound = self._bearable(proportional, step)
            if bound < share:
                share, smallest = bound, SMALLEST_BY_HOST if host > CONTENTION * copies else SMALLEST
        return share if share >= smallest else 0.0

    def _bearable(self, lost: float, step: float) -> float:
        """The share that loses less than is tolerated, if all that was lost is proportional to it."""
        return self.fraction * self._margin * self._tolerance * step / lost

    def _hidden_share(self) -> float | None:
        shares = [1.0]
        for way, phase in (("out", "forward_ms"), ("in", "backward_ms")):
            ms, eligible, whole = self._usual(f"copy_{way}_ms"), self._usual("timed_eligible_bytes"), self._usual(phase)
            if whole <= 0:
                return None
            if ms > 0 and eligible > 0:  # else this rank copies nothing, and sets no bound
                compute = max(0.0, whole - self._usual(f"stall_{way}_ms"))
                shares.append(self._margin * self._usual(f"timed_bytes_{way}") / ms * compute / eligible)
        return min(shares)

    def _without_loss(self) -> float:
        host, stall, copies, step = self._losses()
        proportional = host + CONTENTION * copies
        if proportional + stall <= self._tolerance * step:
            return self.fraction
        lost, before = (proportional + stall) / step if step > 0 else 1.0, self._before
        self._before = self.fraction, lost
        by_stalls = copies > 0 and stall > proportional
        lower = self.fraction * (1 - (proportional + stall) / copies) if by_stalls else self._bearable(lost, 1.0)
        if before is not None and before[0] > self.fraction and before[1] > lost:
            line = self.fraction - (lost - self._margin * self._tolerance) * (before[0] - self.fraction) / (before[1] - lost)
            # Two noisy points make a steep line. A share that is too small for the host costs memory, one too large every step.
            lower = max(line, 0.75 * self.fraction) if by_stalls else min(lower, max(line, 0.5 * lower))
        lower = max(0.0, min(0.95 * self.fraction, lower))
        return lower if lower >= (SMALLEST_BY_HOST if host > stall + CONTENTION * copies else SMALLEST) else 0.0
