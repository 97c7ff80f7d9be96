"""When the steady state begins: a number of steps, and no kernel autotuner at work."""

from __future__ import annotations

import gc
import sys
from typing import Any, final

__all__ = ["AutotuneWatch", "WarmUp"]

QUIET_STEPS = 2
"""Steps without a new autotuner entry after which tuning is taken to be over."""


@final
class AutotuneWatch:
    """Counts the entries of all Triton autotuners of the process, without importing Triton.

    An autotuner that gains an entry has just run its kernel in every configuration: that step is slow and holds workspace.
    """

    def __init__(self) -> None:
        self._tuners: list[Any] = []
        self._modules = -1
        self._last = self._count()

    def grew(self) -> bool:
        """True if any autotuner gained an entry since the last call."""
        count = self._count()
        grown, self._last = count > self._last, count
        return grown

    @property
    def active(self) -> bool:
        """True if the process has autotuners at all."""
        return bool(self._tuners)

    def _count(self) -> int:
        # Autotuners are made by decorators, at import. The heap is searched again only after something was imported.
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._tuners = _find_autotuners()
        return sum(len(tuner.cache) for tuner in self._tuners)


def _find_autotuners() -> list[Any]:
    module = sys.modules.get("triton.runtime.autotuner")
    cls = getattr(module, "Autotuner", None)
    if cls is None:
        return []
    # type() and not isinstance(): proxies on the heap may run code when asked for their __class__.
    return [obj for obj in gc.get_objects() if issubclass(type(obj), cls) and hasattr(obj, "cache")]


@final
class WarmUp:
    """Decides after each optimizer step whether the next one is steady.

    Args:
        steps: optimizer steps to pass over at least.
        cap: optimizer steps after which the wait for autotuners ends; `capped` then says so.
        watch: the autotuners of the process.
    """

    def __init__(self, steps: int, cap: int, watch: AutotuneWatch) -> None:
        self._steps = steps
        self._cap = max(cap, steps)
        self._watch = watch
        self._quiet = 0
        self.seen = 0
        self.capped = False
        self.done = steps == 0 and not watch.active

    def step(self, grew: bool) -> None:
        """One optimizer step of the warm-up is over; `grew` says whether an autotuner gained an entry in it."""
        self.seen += 1
        self._quiet = 0 if grew else self._quiet + 1
        tuned = not self._watch.active or self._quiet >= QUIET_STEPS
        if self.seen >= self._steps and tuned:
            self.done = True
        elif self.seen >= self._cap:
            self.done = self.capped = True
