"""One storage's way to the host and back: every wait that makes it safe. Nothing here knows blocks.

The rules, each of which a planted fault in the tests breaks:
- a copy out starts when its source is written and the copy out of its host buffer is done;
- the source is let go only after the stream that may reuse its memory waits for the copy out;
- a reload starts when its own copy out is done and its target's memory is free, and is used only after a wait for it;
- a host buffer goes back with the event of the last copy into or out of it.
Waits are made on the device, at fixed places of the program, so memory does not depend on how far the device has got.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..replay import modified
from .copies import CopyBackend, Event, Stream, bytes_of
from .pool import Buffer, Pool
from .statistics import Recorder

__all__ = ["Copy", "Transfers"]


class Copy:
    """State of one storage that moved. It owns the host buffer; it does not know its ticket."""

    __slots__ = (
        "nbytes",
        "buffer",
        "stream",  # that the source was offered on: its memory goes back to this stream's work
        "source",  # until it is let go
        "version",
        "edited",  # in place, while it was being copied
        "out",  # event: the copy out is done
        "ready",  # event: the last copy into or out of the buffer is done
        "device",  # the reload, while handles of this backward are still to be served
        "owner",  # the stream whose memory `device` is
        "arrived",  # event: the reload is done
        "pending",  # nobody has waited for `arrived` yet
        "handles",
        "left",  # of the handles, to be served in backward `task`
        "task",
    )

    def __init__(self, nbytes: int, buffer: Buffer, stream: Stream, source: Tensor, handles: int) -> None:
        self.nbytes, self.stream, self.handles = nbytes, stream, handles
        self.buffer: Buffer | None = buffer
        self.source: Tensor | None = source
        self.version = None if source.is_inference() else source._version
        self.edited = False
        self.out: Event = None
        self.ready: Event = None
        self.device: Tensor | None = None
        self.owner: Stream = None
        self.arrived: Event = None
        self.pending = False
        self.left, self.task = 0, -2


class Transfers:
    """Copies of one engine. Not thread-safe: the engine holds its lock."""

    def __init__(self, backend: CopyBackend, pool: Pool, recorder: Recorder) -> None:
        self._backend, self._pool, self._recorder = backend, pool, recorder

    def out(self, source: Tensor, storage: torch.UntypedStorage, handles: int) -> Copy | None:
        """Enqueue the copy to the host. None if the pool gives no buffer."""
        backend, recorder = self._backend, self._recorder
        buffer = self._pool.acquire(storage.nbytes())
        if buffer is None:
            return None
        copy = Copy(storage.nbytes(), buffer, backend.current(), source, handles)
        try:
            backend.wait(backend.d2h, backend.record(copy.stream))
            if buffer.ready is not None:
                backend.wait(backend.d2h, buffer.ready)
            start = recorder.mark(backend.d2h)
            backend.copy(backend.d2h, buffer.memory[: copy.nbytes], bytes_of(storage))
            copy.out = copy.ready = backend.record(backend.d2h, timing=recorder.timing)
        except BaseException:
            self._pool.release(buffer, backend.record(backend.d2h))
            raise
        recorder.span("copy_out", start, copy.out, copy.nbytes)
        recorder.add("bytes_out", copy.nbytes)
        recorder.add("copies_out")
        return copy

    def let_go(self, copies: Sequence[Copy]) -> None:
        """Let the sources go, in the order of their copies out. Their streams wait for the copies; the host does not."""
        held = [copy for copy in copies if copy.source is not None]
        streams: list[tuple[Stream, Event]] = []
        for copy in reversed(held):  # one wait per stream is enough: copies out run in order
            if not any(copy.stream == stream for stream, _ in streams):
                streams.append((copy.stream, copy.out))
        for stream, event in streams:
            self._wait(stream, event, "stall_out")
        for copy in held:
            copy.edited = _edited(copy)
            copy.source = None

    def back(self, copy: Copy, stream: Stream, *, late: bool) -> None:
        """Enqueue the reload into memory of `stream`; `OutOfMemoryError` leaves everything as it was."""
        backend, recorder = self._backend, self._recorder
        assert copy.buffer is not None
        target = backend.empty(copy.nbytes, stream)
        backend.wait(backend.h2d, backend.record(stream))
        backend.wait(backend.h2d, copy.out)
        start = recorder.mark(backend.h2d)
        copy.device, copy.owner, copy.pending = target, stream, True
        try:
            backend.copy(backend.h2d, target, copy.buffer.memory[: copy.nbytes])
            copy.arrived = copy.ready = backend.record(backend.h2d, timing=recorder.timing)
        except BaseException:
            copy.arrived = copy.ready = backend.record(backend.h2d)
            self.drop(copy)
            raise
        recorder.span("copy_in", start, copy.arrived, copy.nbytes)
        recorder.add("bytes_in", copy.nbytes)
        recorder.add("copies_in")
        recorder.add("late", int(late))

    def serve(self, copy: Copy) -> torch.UntypedStorage:
        """The storage for one handle, safe to use on the current stream. The last handle of a backward lets the device's copy go."""
        backend = self._backend
        if copy.edited or (copy.source is not None and _edited(copy)):
            raise _modified_while_copied(copy)
        if copy.source is not None:
            self._wait(copy.stream, copy.out, "stall_in")  # whoever frees it next must not be ahead of the copy that reads it
            self._recorder.add("from_source")
            found = copy.source
        else:
            stream = backend.current()
            if copy.device is None or copy.owner != stream:  # memory of another stream could be taken back while this one reads it
                self.drop(copy)
                self.back(copy, stream, late=True)
            if copy.pending:
                self._wait(stream, copy.arrived, "stall_in")
                copy.pending = False
            assert copy.device is not None
            found = copy.device
        copy.left -= 1
        if copy.left <= 0:
            copy.source = copy.device = None
        return found.untyped_storage()

    def drop(self, copy: Copy) -> None:
        """Let the device's copy go, also one under way that nobody waited for."""
        if copy.device is not None and copy.pending:
            self._backend.wait(copy.owner, copy.arrived)
        copy.device, copy.pending = None, False

    def retire(self, copy: Copy) -> None:
        """The ticket is dead: let everything go, in order."""
        self.let_go([copy])
        self.drop(copy)
        assert copy.buffer is not None
        self._pool.release(copy.buffer, copy.ready)
        copy.buffer = None

    def _wait(self, stream: Stream, event: Event, name: str) -> None:
        before = self._recorder.mark(stream)
        self._backend.wait(stream, event)
        self._recorder.span(name, before, self._recorder.mark(stream))


def _edited(copy: Copy) -> bool:
    return copy.version is not None and copy.source is not None and copy.source._version != copy.version


def _modified_while_copied(copy: Copy) -> RuntimeError:
    if copy.source is not None and copy.version is not None:
        return modified(copy.source, copy.version)
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation while it was copied to the host "
        f"({copy.nbytes} bytes, lightning_gdn offload). A tensor that backward needs was edited in place after the forward."
    )
