"""What the engine needs of a device, and the identity of what it moves: storages, and views rebuilt from them.

A backend is deliberately dumb: streams in order, events, one asynchronous copy. Every wait that makes the engine right stands in `engine.py`, once,
so that the simulated backend tests the same waits that run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CopyBackend", "Event", "Stream", "bytes_of", "storage_of", "view_of"]

Stream = Any
"""A stream of the backend; comparable. Work on one stream runs in order, work on two in any order that events allow."""
Event = Any
"""A position in a stream."""


class CopyBackend(Protocol):
    """A device with streams, as the engine sees it."""

    device: torch.device
    d2h: Stream
    """Copies to the host."""
    h2d: Stream
    """Copies back; a stream of its own, so that a reload does not queue behind copies out."""

    def current(self) -> Stream:
        """The stream that work of this thread goes to now."""

    def record(self, stream: Stream, *, timing: bool = False) -> Event:
        """An event at the end of what the stream has been given so far."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What the stream is given from now on runs after the event."""

    def copy(self, stream: Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Enqueue copies between device and host (target and source, uint8, `[bytes]`) and return. The caller keeps all alive until they are done."""

    def empty(self, nbytes: int, stream: Stream) -> Tensor:
        """Device memory (uint8, `[nbytes]`) that belongs to `stream`: what frees it hands it to that stream's next work.

        Raises:
            torch.OutOfMemoryError: the device has no such room.
        """

    def done(self, event: Event) -> bool:
        """Whether the event was reached; does not wait."""

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event was reached."""

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Milliseconds between two reached timing events."""

    def pin(self, nbytes: int) -> tuple[Tensor, int] | None:
        """A host buffer (uint8, at least `[nbytes]`) and the bytes it really takes; None where the machine gives no more."""

    def unpin(self, buffer: Tensor) -> None:
        """Give a host buffer of `pin` back to the machine. No copy may be under way."""

    def idle(self, buffer: Tensor, ready: Event | None) -> None:
        """Told when a host buffer returns to the pool, free for others after `ready`. Only the simulation does something then."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""


def storage_of(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The storage that would move for this tensor; None if it cannot.

    Only plain strided tensors with memory of their own on the engine's device move. Not: parameters and other subclasses, sparse, quantized,
    nested and meta tensors, conjugated or negated views (their bits are not their values), empty ones.
    """
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    if tensor.device != device or tensor.is_conj() or tensor.is_neg():
        return None
    try:
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() and storage.data_ptr() else None
    except (NotImplementedError, RuntimeError):
        return None


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The whole storage as one tensor (uint8, `[bytes]`), without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def view_of(storage: torch.UntypedStorage, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> Tensor:
    """The view of a storage with exactly this size, stride and offset (both in elements of `dtype`). Shares memory, has no graph."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
