"""How the processes of a distributed run end after one of them failed. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence

__all__ = ["GRACE_S", "BoundedExit", "bounded_exit", "end"]

GRACE_S = 10.0
"""Seconds that the processes which rank 0 started may go on after rank 0 failed: enough to write their own records, if they can. Also the
seconds for which another failed rank may destroy its process group."""


def end(processes: Sequence[subprocess.Popen], grace_s: float) -> None:
    """Wait for processes to end by themselves, and end those that do not. SIGTERM would not reach one that hangs in a collective."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    for process in processes:
        if process.poll() is None:
            process.kill()


class BoundedExit:
    """After a failure the process ends `limit_s` into the exit handlers that were registered within `surrounding`; all others take their time.

    The kernel sees to it, since Python may hang in C.
    """

    def __init__(self, limit_s: float) -> None:
        self.failed, self._limit_s, self._done = False, limit_s, False

    @contextlib.contextmanager
    def surrounding(self) -> Generator[None]:
        """Exit handlers run last in, first out: `_begin` before those that are registered here, `_end` after them. Once per process."""
        if self._done or not hasattr(signal, "SIGALRM"):  # Windows has none, and no NCCL either
            yield
            return
        atexit.register(self._end)
        yield
        atexit.register(self._begin)
        self._done = True

    def _begin(self) -> None:
        if self.failed:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._limit_s)
            for stream in (sys.stdout, sys.stderr):  # what was printed would be lost
                with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, gone, or None
                    stream.flush()

    def _end(self) -> None:
        if self.failed:
            signal.setitimer(signal.ITIMER_REAL, 0)


bounded_exit = BoundedExit(GRACE_S)
"""Of this process."""
