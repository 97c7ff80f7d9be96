"""How a training that a signal ends is told apart from one that is done.

Lightning ends `fit` quietly after SIGTERM (a batch system, `timeout`) and leaves with exit code 1 and no word after Ctrl-C: for a
measurement both must show, in the record and in the exit code. Imports no torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning.pytorch as L

__all__ = ["TERMINATED", "Terminated", "TerminatedError", "exit_code", "terminated_cleanly"]

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a process that SIGTERM ended, as shells report it."""
_SAID = "ended by SIGTERM"


class TerminatedError(SystemExit):
    """SIGTERM came. Where nobody records it, the process ends with `TERMINATED`."""

    def __init__(self, when: str = "") -> None:
        super().__init__(TERMINATED)
        self.message = f"{_SAID} {when}".rstrip()

    def __str__(self) -> str:
        return self.message


class Terminated:
    """The handler of SIGTERM: ends at once what is not training; a training ends between two batches, as Lightning does it."""

    def __init__(self) -> None:
        self._trainer: L.Trainer | None = None

    def __call__(self, number: int, frame: object) -> None:
        # Lightning's own handler has run before this one if fit has begun
        if self._trainer is None or not self._trainer.received_sigterm:
            raise TerminatedError(self._when())

    def _when(self) -> str:
        return "" if self._trainer is None else f"after step {self._trainer.global_step}"

    def fit(self, trainer: L.Trainer, *args: Any) -> None:
        """`trainer.fit(*args)`, except that a signal that ends it is an error.

        Raises:
            TerminatedError: SIGTERM came.
            KeyboardInterrupt: SIGINT came.
        """
        self._trainer = trainer
        try:
            trainer.fit(*args)
        except SystemExit as stop:
            if trainer.received_sigterm or isinstance(stop, TerminatedError):
                raise TerminatedError(self._when()) from None
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        if trainer.received_sigterm:
            raise TerminatedError(self._when())


@contextmanager
def terminated_cleanly() -> Iterator[Terminated]:
    """SIGTERM raises `TerminatedError` inside, so that whatever was started is ended and taken back; the handler before it comes back."""
    handler = Terminated()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_code(record: Mapping[str, Any]) -> int:
    """Exit code of a process that did what this record says: 0 if it is whole, 143 if SIGTERM ended it, else 1."""
    if record["status"] == "ok":
        return 0
    return TERMINATED if _SAID in (record["error"] or "") else 1
