"""From distances to a verdict: is an arm farther from the control than the control is from itself? Imports no torch.

Every run, the control's repeats as well as an arm's, is measured against one reference: the control's first run. If a plan changes
nothing, all these distances come from one distribution, whatever it is. An arm is *outside* at a tensor when each of its `ARM_RUNS` runs
is more than `FACTOR` times as far away as the farthest of `NOISY_RUNS` control runs. docs/parity.md has the false alarm rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ARM_RUNS", "EQUAL", "FACTOR", "LOSSES", "NOISY_RUNS", "WEIGHT", "Gap", "Row", "judge_arm", "noise_of", "repeats_exactly"]

FACTOR = 1.25
"""An arm's difference may be this many times the control's largest."""
NOISY_RUNS = 12
"""Control runs, the reference aside, once any of them was seen to differ, or an arm was."""
ARM_RUNS = 5
"""Runs of an arm that was outside once, all of which must be outside."""

LOSSES = "losses"
"""Name of the tensor that holds a run's losses; the others are named after parameters and buffers."""
WEIGHT = " (weight)"
"""End of the name of a parameter's value; the bare name is its gradient."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far one tensor of one run is from the reference's."""

    equal: bool
    """Bit for bit, NaN and the sign of zero included."""
    norm: float
    """Euclidean norm of the difference; infinite where one of them is not finite or missing."""
    peak: float
    """Largest absolute difference of one element."""


EQUAL = Gap(True, 0.0, 0.0)
Run = Mapping[str, Gap]
"""Distances by tensor name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one arm."""

    name: str
    differing_runs: int
    norm: float
    """Smallest over the arm's runs, as `peak`."""
    peak: float
    ratio: float
    """`norm` or `peak` over the control's largest, whichever is more; 0 if any run is bit-equal, infinite where the control repeats exactly."""

    @property
    def outside(self) -> bool:
        """Farther than the control's own noise allows, in every run."""
        return self.ratio > FACTOR


def repeats_exactly(runs: Sequence[Run]) -> bool:
    """Whether every tensor of every run is bit-equal to the reference's."""
    return all(gap.equal for run in runs for gap in run.values())


def noise_of(controls: Sequence[Run]) -> dict[str, Gap]:
    """The control's own largest distance, tensor by tensor."""
    names = dict.fromkeys(name for run in controls for name in run)
    found = {}
    for name in names:
        gaps = [run.get(name, EQUAL) for run in controls]
        found[name] = Gap(all(gap.equal for gap in gaps), max(gap.norm for gap in gaps), max(gap.peak for gap in gaps))
    return found


def judge_arm(runs: Sequence[Run], noise: Mapping[str, Gap]) -> list[Row]:
    """A row for every tensor that differs in any run, the largest ratio first."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run):
        gaps = [run.get(name, EQUAL) for run in runs]
        differing = sum(not gap.equal for gap in gaps)
        if differing:
            norm, peak = min(gap.norm for gap in gaps), min(gap.peak for gap in gaps)
            own = noise.get(name, EQUAL)
            ratio = 0.0 if differing < len(gaps) else math.inf if own.equal else max(_ratio(norm, own.norm), _ratio(peak, own.peak))
            rows.append(Row(name, differing, norm, peak, ratio))
    return sorted(rows, key=lambda row: row.ratio, reverse=True)


def _ratio(value: float, bound: float) -> float:
    if value == 0.0:
        return 0.0
    if bound == 0.0 or not math.isfinite(value):
        return math.inf
    return value / bound
