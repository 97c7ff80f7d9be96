"""What offload did over steady steps, from the statistics that the strategy takes at the end of each optimizer step."""

from __future__ import annotations

from typing import Any, final

from ..offload.statistics import StepStatistics
from ._series import MIB, Series

__all__ = ["OffloadTotals", "offload_of"]


def offload_of(trainer: Any) -> StepStatistics | None:
    """Statistics of the optimizer step that just ended, or None without a plan that moves something."""
    found = getattr(getattr(trainer.strategy, "applied", None), "last_step", None)
    return found if isinstance(found, StepStatistics) else None


@final
class OffloadTotals:
    """Sums and spreads over the steps taken in, of bytes and times over those since the share of the bytes last changed: `auto` settles on one,
    and a mean of before and after would be of neither. What went wrong (pool full, no room, too late) counts over all, as do the peaks."""

    def __init__(self) -> None:
        self._restart()
        self._counts: dict[str, int] = {}
        self._last: StepStatistics | None = None
        self._peaks = {"pinned_held": 0, "pinned_peak": 0, "pinned_in_use": 0}

    def _restart(self) -> None:
        self._out, self._in, self._stall, self._host = Series(), Series(), Series(), Series()
        self._sums: dict[str, float] = {}
        self._stayed: dict[str, int] = {}
        self._largest_small = 0

    def add(self, step: StepStatistics) -> None:
        """Take one step in."""
        if self._last is not None and self._last.fraction != step.fraction:
            self._restart()
        self._last = step
        self._out.add(step.bytes_out / MIB)
        self._in.add(step.bytes_in / MIB)
        self._stall.add(step.stall_ms)
        self._host.add(step.exposed_host_ms)
        for name in ("copy_out_ms", "copy_in_ms", "timed_bytes_out", "timed_bytes_in"):
            self._sums[name] = self._sums.get(name, 0) + getattr(step, name)
        for name in ("fallbacks", "fallback_bytes", "late", "prefetch_oom"):
            self._counts[name] = self._counts.get(name, 0) + getattr(step, name)
        for name in self._peaks:
            self._peaks[name] = max(self._peaks[name], getattr(step, name))
        for reason, nbytes in step.stayed.items():
            self._stayed[reason] = self._stayed.get(reason, 0) + nbytes
        self._largest_small = max(self._largest_small, step.largest_small)

    def figures(self) -> dict[str, float | None]:
        """Medians for the loggers; empty if nothing was taken in. Times are None where the copies are simulated."""
        out = self._out.spread()
        if out is None:
            return {}
        found = {"offload_out_mib": out["median"]}
        for name, series in (("offload_stall_ms", self._stall), ("offload_exposed_host_ms", self._host)):
            spread = series.spread() if self._timed else None
            found[name] = None if spread is None else spread["median"]
        return found

    @property
    def _timed(self) -> bool:
        return self._sums.get("copy_out_ms", 0) > 0

    def summary(self) -> dict[str, Any] | None:
        """For the summary; None if nothing was taken in."""
        if self._last is None:
            return None
        sums, counts, copies = self._sums, self._counts, self._sums["copy_out_ms"] + self._sums["copy_in_ms"]
        steps = len(self._out)
        return {
            "steps": steps,
            "fraction": self._last.fraction,
            "out_mib": self._out.spread(),
            "in_mib": self._in.spread(),
            "out_gb_s": sums["timed_bytes_out"] / sums["copy_out_ms"] / 1e6 if sums["copy_out_ms"] > 0 else None,
            "in_gb_s": sums["timed_bytes_in"] / sums["copy_in_ms"] / 1e6 if sums["copy_in_ms"] > 0 else None,
            "stall_ms": self._stall.spread() if self._timed else None,
            "exposed_host_ms": self._host.spread() if self._timed else None,
            "hidden_share": max(0.0, 1 - self._stall.total() / copies) if copies > 0 else None,
            "pinned_held_mib": self._peaks["pinned_held"] / MIB,
            "pinned_peak_mib": self._peaks["pinned_peak"] / MIB,
            "pinned_in_use_mib": self._peaks["pinned_in_use"] / MIB,
            "late_copies": counts["late"],
            "prefetch_oom": counts["prefetch_oom"],
            "fallbacks": counts["fallbacks"],
            "fallback_mib": counts["fallback_bytes"] / MIB,
            "stayed_mib": {reason: nbytes / MIB / steps for reason, nbytes in self._stayed.items()},
            "largest_small_mib": self._largest_small / MIB,
        }
