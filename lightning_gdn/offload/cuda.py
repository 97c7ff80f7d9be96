"""Copies of a CUDA device: two streams of its own, events, and host memory that is pinned page by page.

`torch.empty(pin_memory=True)` rounds a buffer up to a power of two and never gives it back to the machine. Here a buffer is an anonymous
private mapping of whole pages that `cudaHostRegister` pins: the pool's size classes are all the waste there is, and an evicted buffer really goes.
A forked child (a data loader's worker) does not inherit the mapping, since copy-on-write would part the pages from their pinning. Where registering
fails, `pin_memory` is the fallback, with the rounding counted.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .copies import Event, Stream

__all__ = ["CudaBackend"]

_HIGH_PRIORITY = -1


class CudaBackend:
    """`CopyBackend` for one CUDA device.

    Memory is never handed to `record_stream`, which would delay its reuse by an unknown time: the engine keeps references and makes streams wait.

    Args:
        device: with or without an index.

    Raises:
        ValueError: not a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"CudaBackend: device must be a CUDA device, got {str(device)!r}; on a CPU use SimulatedBackend")
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.d2h = torch.cuda.Stream(self.device)
        self.h2d = torch.cuda.Stream(self.device, priority=_HIGH_PRIORITY)  # a reload is waited for sooner than a copy out
        self._registered: dict[int, mmap.mmap] = {}  # by address
        # At interpreter exit too: the driver must not find a mapping gone that it has pinned.
        weakref.finalize(self, _unregister_all, self._registered, self.device, os.getpid())

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def copy(self, stream: Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int, stream: Stream) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def done(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return float(start.elapsed_time(end))

    def pin(self, nbytes: int) -> tuple[Tensor, int] | None:
        return self._register(nbytes) or _pin_by_torch(nbytes)

    def unpin(self, buffer: Tensor) -> None:
        pages = self._registered.pop(buffer.data_ptr(), None)
        if pages is not None:  # else torch's own allocator has it, and keeps it
            _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr()))

    def idle(self, buffer: Tensor, ready: Event | None) -> None:
        """Nothing to do: the next copy into the buffer waits for `ready`."""

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def _register(self, nbytes: int) -> tuple[Tensor, int] | None:
        length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_DONTFORK"):
                pages.madvise(mmap.MADV_DONTFORK)
        except OSError:
            return None
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        with torch.cuda.device(self.device):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), length, 0)
        if int(status) != 0:
            self._clear_error()
            return None
        self._registered[memory.data_ptr()] = pages
        return memory[:nbytes], length

    def _clear_error(self) -> None:
        """The runtime keeps a failed call's status as the "last error", and the next kernel launch of anybody would report it as its own."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device).add_(1)


def _pin_by_torch(nbytes: int) -> tuple[Tensor, int] | None:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), 1 << (nbytes - 1).bit_length()
    except RuntimeError:  # no more host memory can be pinned; the caller counts it
        return None


def _check(call: str, status: Any) -> None:
    if int(status) != 0:
        raise RuntimeError(f"{call} failed with CUDA error {int(status)} ({status}) on a pinned buffer of the offload pool")


def _unregister_all(registered: dict[int, mmap.mmap], device: torch.device, owner: int) -> None:
    if not registered or os.getpid() != owner:  # a forked child has neither the mapping nor the context
        return
    with contextlib.suppress(RuntimeError):  # a device that is already broken has nothing to wait for
        torch.cuda.synchronize(device)
        for address in list(registered):
            torch.cuda.cudart().cudaHostUnregister(address)
            del registered[address]
