"""The way of storages to the host and back: every wait that makes it safe. Nothing here knows blocks.

Storages go in batches, those of one block at once: a wait, an event and a change of stream cost the host as much as a copy, and a batch
needs them once.

The rules, each of which a planted fault in the tests breaks:
- a copy out starts when its source is written and the copy out of its host buffer is done;
- the source is let go only after the stream that may reuse its memory waits for the copy out;
- a reload starts when its own copy out is done and its target's memory is free, and is used only after a wait for it;
- a host buffer goes back with the event of the last copy into or out of it.
Waits are made on the device, at fixed places of the program, so memory does not depend on how far the device has got.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..replay import modified
from .copies import CopyBackend, Event, Stream, bytes_of
from .pool import Buffer, Pool
from .statistics import Recorder

__all__ = ["Copy", "Transfers"]


class _Arrival:
    """When a batch of reloads is done, and whether the stream that they belong to waits for it by now."""

    __slots__ = ("event", "awaited")

    def __init__(self, event: Event) -> None:
        self.event, self.awaited = event, False


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
        "arrival",  # of the reload
        "handles",
        "left",  # of the handles, to be served in backward `task`
        "task",
    )

    def __init__(self, nbytes: int, buffer: Buffer, stream: Stream, source: Tensor, handles: int) -> None:
        self.nbytes, self.stream, self.handles = nbytes, stream, handles
        self.buffer: Buffer | None = buffer  # None once it is back in the pool
        self.source: Tensor | None = source
        self.version = None if source.is_inference() else source._version
        self.edited = False
        self.out: Event = None
        self.ready: Event = None
        self.device: Tensor | None = None
        self.owner: Stream = None
        self.arrival: _Arrival | None = None
        self.left, self.task = 0, -2

    @property
    def arrived(self) -> Event:
        """Event: the last reload is done; None before the first one."""
        return self.arrival.event if self.arrival is not None else None


class Transfers:
    """Copies of one engine. Not thread-safe: the engine holds its lock."""

    def __init__(self, backend: CopyBackend, pool: Pool, recorder: Recorder) -> None:
        self._backend, self._pool, self._recorder = backend, pool, recorder

    def take(self, source: Tensor, storage: torch.UntypedStorage, handles: int) -> Copy | None:
        """A host buffer for the storage under `source`; None if the pool gives none. Nothing is copied before `out`."""
        buffer = self._pool.acquire(storage.nbytes())
        return None if buffer is None else Copy(storage.nbytes(), buffer, self._backend.current(), source, handles)

    def out(self, copies: Sequence[Copy]) -> None:
        """Enqueue the copies to the host, all from one stream, behind what it has been given. After an exception `cancel` them."""
        backend, recorder, stream = self._backend, self._recorder, copies[0].stream
        pairs = []
        for copy in copies:
            assert copy.buffer is not None
            assert copy.source is not None
            pairs.append((copy.buffer.memory[: copy.nbytes], bytes_of(copy.source.untyped_storage())))
        backend.wait(backend.d2h, backend.record(stream))
        self._after(backend.d2h, (copy.buffer.ready for copy in copies if copy.buffer is not None))
        start = recorder.mark(backend.d2h)
        try:
            backend.copy(backend.d2h, pairs)
            done = backend.record(backend.d2h, timing=recorder.timing)
        except BaseException:
            done = backend.record(backend.d2h)
            backend.wait(stream, done)  # some may be under way, and read what the caller is about to drop
            for copy in copies:
                copy.ready = done
            raise
        for copy in copies:
            copy.out = copy.ready = done
        nbytes = sum(copy.nbytes for copy in copies)
        recorder.span("copy_out", start, done, nbytes)
        recorder.add("bytes_out", nbytes)
        recorder.add("copies_out", len(copies))

    def cancel(self, copies: Iterable[Copy]) -> None:
        """They were taken and are not under way: buffers go back."""
        for copy in copies:
            if copy.buffer is not None:
                self._pool.release(copy.buffer, copy.ready if copy.ready is not None else copy.buffer.ready)
            copy.source = copy.buffer = None

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

    def back(self, copies: Sequence[Copy], stream: Stream, *, late: bool) -> None:
        """Enqueue the reloads into memory of `stream`. `OutOfMemoryError`: those before the first that found no room are under way."""
        started = list[Copy]()
        try:
            for copy in copies:
                copy.device = self._backend.empty(copy.nbytes, stream)
                started.append(copy)
        finally:
            if started:
                self._reload(started, stream, late)

    def _reload(self, copies: Sequence[Copy], stream: Stream, late: bool) -> None:
        """Fill the memory that they have on the device by now."""
        backend, recorder = self._backend, self._recorder
        pairs = []
        for copy in copies:
            assert copy.buffer is not None
            assert copy.device is not None
            pairs.append((copy.device, copy.buffer.memory[: copy.nbytes]))
        backend.wait(backend.h2d, backend.record(stream))
        self._after(backend.h2d, (copy.out for copy in copies))
        start = recorder.mark(backend.h2d)
        try:
            backend.copy(backend.h2d, pairs)
            self._arriving(copies, stream, backend.record(backend.h2d, timing=recorder.timing))
        except BaseException:
            self._arriving(copies, stream, backend.record(backend.h2d))
            for copy in copies:
                self.drop(copy)
            raise
        nbytes = sum(copy.nbytes for copy in copies)
        recorder.span("copy_in", start, copies[0].arrived, nbytes)
        recorder.add("bytes_in", nbytes)
        recorder.add("copies_in", len(copies))
        recorder.add("late", len(copies) if late else 0)

    @staticmethod
    def _arriving(copies: Sequence[Copy], stream: Stream, event: Event) -> None:
        arrival = _Arrival(event)
        for copy in copies:
            copy.owner, copy.arrival, copy.ready = stream, arrival, event

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
                self.back([copy], stream, late=True)
            self._await(copy, "stall_in")
            assert copy.device is not None
            found = copy.device
        copy.left -= 1
        if copy.left <= 0:
            copy.source = copy.device = None
        return found.untyped_storage()

    def drop(self, copy: Copy) -> None:
        """Let the device's copy go, also one under way that nobody waited for."""
        if copy.device is not None:
            self._await(copy)
            copy.device = None

    def retire(self, copy: Copy) -> None:
        """The ticket is dead: let everything go, in order."""
        if copy.buffer is not None:
            self.let_go([copy])
            self.drop(copy)
            self._pool.release(copy.buffer, copy.ready)
            copy.buffer = None

    def _await(self, copy: Copy, stall: str | None = None) -> None:
        """The stream that a reload belongs to waits for its batch, once."""
        arrival = copy.arrival
        assert arrival is not None
        if not arrival.awaited:
            if stall is not None:
                self._wait(copy.owner, arrival.event, stall)
            else:
                self._backend.wait(copy.owner, arrival.event)
            arrival.awaited = True

    def _after(self, stream: Stream, events: Iterable[Event | None]) -> None:
        """`stream` goes on after each of these events; what one batch returned has one event."""
        for event in {id(event): event for event in events if event is not None}.values():
            self._backend.wait(stream, event)

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
