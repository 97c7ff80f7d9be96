"""Notes that the ranks of one run leave for each other, in the key-value store behind their process group.

A collective hangs or fails as soon as one rank skips it, and records matter most when a rank has died. A note is there or it is not:
reading waits for a bounded time and then does without. Notes are JSON; nothing touches a device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, final

import torch.distributed as dist

__all__ = ["ANSWER_S", "DEAD_S", "Board"]

ANSWER_S = 30.0
"""Seconds to wait for the notes of ranks that are expected to arrive: they end the same fit, and may write a file before."""
DEAD_S = 2.0
"""Seconds to wait when this rank failed: long enough to hear that another one had failed before it."""


@final
class Board:
    """The notes of one run under one name.

    Args:
        name: whose notes. Opening a name again, for a second fit, starts with an empty board.
        rank, world_size: of this process. With one process nothing is stored anywhere.
    """

    def __init__(self, name: str, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = _default_store() if world_size > 1 else None
        self._prefix = f"lightning_gdn/{name}"
        opened = self._try(lambda store: store.add(f"{self._prefix}/opened/{rank}", 1))
        self._prefix += f"/{opened}"

    @property
    def connected(self) -> bool:
        """False for one process, without torch.distributed, and once the store could not be reached (its host, rank 0, is gone)."""
        return self._store is not None

    def post(self, note: str, content: Any) -> None:
        """Leave a note of this rank; a later one of the same name replaces it."""
        self._try(lambda store: store.set(self._key(note, self.rank), json.dumps(content)))

    def read(self, note: str, *, wait_s: float, fits: Callable[[Any], bool] = lambda content: True) -> list[Any]:
        """The notes of all ranks in rank order, None for a rank that left none in time.

        Args:
            wait_s: seconds to wait for those that are not there.
            fits: whether a note is the one that is waited for.
        """
        found: list[Any] = [None] * self.world_size
        missing = set(range(self.world_size))
        deadline, pause = time.monotonic() + wait_s, 0.001
        while self.connected:
            for rank in sorted(missing):
                content = self._get(note, rank)
                if content is not None and fits(content):
                    found[rank] = content
                    missing.discard(rank)
            if not missing or time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return found

    def exchange(self, note: str, content: Mapping[str, Any], *, wait_s: float) -> list[Any]:
        """Leave a note and get those of all ranks, the same list on every rank that is alive.

        Rank 0 collects and tells the others, so that the store is asked once per rank and not once per pair.
        """
        self.post(note, content)
        if self.rank == 0:
            found = self.read(note, wait_s=wait_s)
            found[0] = content
            self.post(f"{note}/all", found)
            self._await_readers(note, {rank for rank, theirs in enumerate(found) if rank and theirs is not None and not theirs.get("leaves")}, wait_s)
            return found
        deadline = time.monotonic() + wait_s + 5.0  # rank 0 itself may wait for `wait_s`
        told = None
        while self.connected and told is None:
            told = self._get(f"{note}/all", 0)
            if told is None:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
        self.post(f"{note}/read", True)
        return told or [content if rank == self.rank else None for rank in range(self.world_size)]

    def _await_readers(self, note: str, readers: set[int], wait_s: float) -> None:
        """The store lives in rank 0's process: it must not end before the others have read."""
        deadline = time.monotonic() + min(wait_s, 5.0)
        while self.connected and time.monotonic() < deadline and any(self._get(f"{note}/read", rank) is None for rank in readers):
            time.sleep(0.005)

    def _key(self, note: str, rank: int) -> str:
        return f"{self._prefix}/{note}/{rank}"

    def _get(self, note: str, rank: int) -> Any:
        key = self._key(note, rank)
        text = self._try(lambda store: store.get(key) if store.check([key]) else None)
        return None if text is None else json.loads(text)

    def _try(self, ask: Callable[[Any], Any]) -> Any:
        if self._store is None:
            return None
        try:
            return ask(self._store)
        except RuntimeError:  # every error of a store is one; whatever it was, the others cannot be asked any more
            self._store = None
            return None


def _default_store() -> Any:
    """The store of the default process group; None without one. torch has no public name for it."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
