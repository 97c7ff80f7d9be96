"""Pinned host buffers, used again and again; bounded, whatever shapes the steps have."""

from __future__ import annotations

from collections import OrderedDict, deque

from torch import Tensor

from .copies import CopyBackend, Event

__all__ = ["Buffer", "Pool", "size_class"]

PAGE = 4096


def size_class(nbytes: int) -> int:
    """The size that a request is rounded up to: the next eighth of its power of two, in whole pages.

    Wasted are less than 12.5 % of the request (1 MiB + 1 byte takes 1.125 MiB), or less than a page below 32 KiB.
    """
    step = max(PAGE, 1 << max(0, (nbytes - 1).bit_length() - 4)) if nbytes > 1 else PAGE
    return -(-nbytes // step) * step


class Buffer:
    """One pinned buffer. `ready`: the event after which its next user may write into it."""

    __slots__ = ("memory", "kind", "cost", "ready")

    def __init__(self, memory: Tensor, kind: int, cost: int) -> None:
        self.memory, self.kind, self.cost = memory, kind, cost
        self.ready: Event | None = None


class Pool:
    """Buffers by size class. Not thread-safe: the engine holds its lock.

    A returned buffer is idle at once; the next copy into it waits, on the device, for the last copy out of it. So what the pool holds
    depends on sizes and order only, never on how far the device has got, and is the same in every step. When a new buffer does not fit
    under the limit, idle ones go back to the machine, least recently used first.

    Args:
        cap: limit in bytes. None: twice what was ever in use at one moment.
    """

    def __init__(self, backend: CopyBackend, cap: int | None) -> None:
        self._backend, self.cap = backend, cap
        self._idle: OrderedDict[Buffer, None] = OrderedDict()  # least recently used first
        self._kinds: dict[int, deque[Buffer]] = {}
        self.held = 0
        """Pinned bytes, idle and in use."""
        self.in_use = 0
        """Pinned bytes that hold a live copy."""
        self.buffers_in_use = 0
        self.peak = 0
        """Largest `in_use` so far."""
        self.step_peak = 0
        """Largest `in_use` since the engine reset it."""

    def acquire(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes`; None if the cap or the machine gives none. The copy into it must wait for its `ready`."""
        kind = size_class(nbytes)
        idle = self._kinds.get(kind)
        if idle:
            buffer = idle.popleft()
            del self._idle[buffer]
        else:
            made = self._make(kind)
            if made is None:
                return None
            buffer = made
        self.in_use += buffer.cost
        self.buffers_in_use += 1
        self.peak, self.step_peak = max(self.peak, self.in_use), max(self.step_peak, self.in_use)
        return buffer

    def release(self, buffer: Buffer, ready: Event | None) -> None:
        """Take a buffer back; `ready` is the event of the last copy into or out of it."""
        buffer.ready = ready
        self.in_use -= buffer.cost
        self.buffers_in_use -= 1
        self._backend.idle(buffer.memory, ready)
        self._kinds.setdefault(buffer.kind, deque()).append(buffer)
        self._idle[buffer] = None

    def _make(self, kind: int) -> Buffer | None:
        limit = self.cap if self.cap is not None else 2 * max(self.peak, self.in_use + kind)
        if self.in_use + kind > limit:
            return None
        while self.held + kind > limit:
            self._evict(next(iter(self._idle)))
        pinned = self._backend.pin(kind)
        while pinned is None and self._idle:
            self._evict(next(iter(self._idle)))
            pinned = self._backend.pin(kind)
        if pinned is None:
            return None
        memory, cost = pinned
        if self.held + cost > limit:  # the machine's allocator rounded up
            self._backend.unpin(memory)
            return None
        self.held += cost
        return Buffer(memory, kind, cost)

    def _evict(self, buffer: Buffer) -> None:
        del self._idle[buffer]
        self._kinds[buffer.kind].remove(buffer)
        if buffer.ready is not None:
            self._backend.synchronize(buffer.ready)  # a copy of an earlier pass, so this hardly ever waits
        self._backend.unpin(buffer.memory)
        self.held -= buffer.cost

    def close(self) -> None:
        """Give every idle buffer back to the machine."""
        while self._idle:
            self._evict(next(iter(self._idle)))
