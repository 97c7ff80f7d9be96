"""How much moves: a share of the bytes, and the policy that finds the largest share that stays hidden. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .statistics import StepStatistics

__all__ = ["AutoFraction", "Budget"]


class Budget:
    """Decides, storage by storage, what moves: never more than `fraction` of the bytes offered so far, so the share spreads over the blocks.

    It starts anew with every forward pass and depends on nothing but the sizes offered: the same shapes give the same choice, from the first
    step on, and 0 never moves anything.
    """

    __slots__ = ("offered", "moved", "_share")

    def __init__(self, fraction: float) -> None:
        self._share = Fraction(fraction).limit_denominator(1_000_000)  # exact: a third of three equal storages is one of them
        self.offered = 0
        self.moved = 0

    def admit(self, nbytes: int) -> bool:
        """Whether a storage of this size moves. Every eligible storage must be offered once, whatever the answer."""
        self.offered += nbytes
        fits = (self.moved + nbytes) * self._share.denominator <= self.offered * self._share.numerator
        if fits:
            self.moved += nbytes
        return fits


def _alone(value: float) -> float:
    return value


class AutoFraction:
    """Finds the largest fraction whose copies stay hidden behind compute; once settled it only goes down.

    It starts at 1, where the GPU needs the least memory. After `skip` steps (kernels are tuned and buffers pinned in them) it sums
    `measure` steps: the rate of each direction as it was in training, all ranks at once, times the compute of that pass gives the bytes
    that fit; the smaller of both shares, times `margin`, is the answer. Afterwards it looks at the stalls of every `measure` steps: a block's
    own copies can be more than its neighbour's compute covers, though all of them together fit. The first step down follows the share of
    the copy time that was lost, each further one the line through the last two, to where it loses nothing.

    Call `observe` once per optimizer step on every rank: `reduce_min` is a collective when there are several, and is called in the
    same steps on all of them.

    Args:
        reduce_min: smallest of a value over the ranks.
        skip: steps to ignore.
        measure: steps to sum.
        margin: share of the compute that copies may fill.
        tolerance: share of the compute that may be lost to stalls before the fraction goes down.
    """

    def __init__(
        self, reduce_min: Callable[[float], float] = _alone, *, skip: int = 2, measure: int = 3, margin: float = 0.8, tolerance: float = 0.005
    ) -> None:
        self.fraction = 1.0
        self.settled = False
        self._reduce, self._skip, self._measure, self._margin, self._tolerance = reduce_min, skip, measure, margin, tolerance
        self._window: list[StepStatistics] = []
        self._before: tuple[float, float] | None = None
        """A larger share, and what of the compute it lost to stalls."""

    def observe(self, sample: StepStatistics) -> float:
        """Take the statistics of one step; returns the fraction for the next one."""
        if self._skip > 0:
            self._skip -= 1
            return self.fraction
        self._window.append(sample)
        if len(self._window) < self._measure:
            return self.fraction
        found = self._hidden_share() if not self.settled else self._without_stalls()
        self._window.clear()
        # Unsettled ranks (nothing timed yet) answer -1, so that all of them go on measuring: agreement comes before speed.
        agreed = self._reduce(-1.0 if found is None else found)
        if agreed >= 0:
            self.fraction, self.settled = min(self.fraction, agreed), True
        return self.fraction

    def _sum(self, name: str) -> float:
        return float(sum(getattr(sample, name) for sample in self._window))

    def _hidden_share(self) -> float | None:
        shares = [1.0]
        for way, phase in (("out", "forward_ms"), ("in", "backward_ms")):
            ms, eligible, whole = self._sum(f"copy_{way}_ms"), self._sum("timed_eligible_bytes"), self._sum(phase)
            if whole <= 0:
                return None
            if ms > 0 and eligible > 0:  # else this rank copies nothing, and sets no bound
                compute = max(0.0, whole - self._sum(f"stall_{way}_ms"))
                shares.append(self._margin * self._sum(f"timed_bytes_{way}") / ms * compute / eligible)
        return min(shares)

    def _without_stalls(self) -> float:
        stall = self._sum("stall_out_ms") + self._sum("stall_in_ms")
        copies = self._sum("copy_out_ms") + self._sum("copy_in_ms")
        compute = self._sum("forward_ms") + self._sum("backward_ms") - stall
        if copies <= 0 or stall <= self._tolerance * compute:
            return self.fraction
        lost, before = stall / compute if compute > 0 else 1.0, self._before
        self._before = self.fraction, lost
        lower = self.fraction * (1 - stall / copies)
        if before is not None and before[0] > self.fraction and before[1] > lost:
            line = self.fraction - lost * (before[0] - self.fraction) / (before[1] - lost)
            lower = max(line, 0.75 * self.fraction)  # two noisy points make a steep line
        lower = max(0.0, min(0.95 * self.fraction, lower))
        return lower if lower >= 0.01 else 0.0
