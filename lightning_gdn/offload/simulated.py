"""A device that is none: streams are queues, copies run as late as they may, and memory is poisoned once it is let go.

It runs the engine on a CPU. A copy happens only when something waits for it, or when a seeded scheduler feels like it, in any order that the
engine's waits allow. Host buffers are filled with 0xFF bytes (NaN in every float type) when they come back to the pool, device memory when
it is allocated and when it is freed. So a wait that the engine forgot shows as wrong numbers, and `faults` names it.

Ordinary CPU tensors can be sources: their memory cannot be watched, so a copy out that runs after its source died copies poison. Compute on
ordinary tensors runs at once. With `lazy`, compute is a queue too: a test allocates with `empty` and enqueues its kernels with `launch`.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .copies import Event, Stream

__all__ = ["POISON", "SimulatedBackend", "SimulatedEvent", "SimulatedStream"]

POISON = 0xFF
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SimulatedStream:
    """Work in order, and simulated time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], None]] = deque()
        self.clock_ms = 0.0


class SimulatedEvent:
    """A position in a stream, with the time at which it was reached and what is to happen then."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.reached_ms: float | None = None
        self.then: list[Callable[[], None]] = []


class _Memory:
    """Memory that outlives the storage on it, so that late reads and writes can be seen."""

    __slots__ = ("bytes", "freed")

    def __init__(self, content: Bytes) -> None:
        self.bytes = content
        self.freed = False

    def free(self) -> None:
        """Somebody else may write here now."""
        self.freed = True
        self.bytes.fill(POISON)


class SimulatedBackend:
    """See the module docstring.

    Args:
        seed: of the scheduler; None leaves every copy until something waits for it.
        lazy: compute is a queue as well.
        gb_s: simulated rate of a copy, 10⁹ bytes per second.
        room: bytes of device memory that `empty` hands out at one time; None for no limit.
        host_room: bytes that can be pinned at one time.
    """

    def __init__(
        self, seed: int | None = None, *, lazy: bool = False, gb_s: float = 50.0, room: int | None = None, host_room: int | None = None
    ) -> None:
        self.device = torch.device("cpu")
        self.d2h, self.h2d, self.compute = SimulatedStream("d2h"), SimulatedStream("h2d"), SimulatedStream("compute")
        self.faults: list[str] = []
        """What went wrong, as the device would have seen it."""
        self.room, self.host_room = room, host_room
        self._random = random.Random(seed) if seed is not None else None
        self._lazy, self._gb_s = lazy, gb_s
        self._streams = [self.d2h, self.h2d, self.compute]
        self._current = self.compute
        self._memory: dict[int, _Memory] = {}  # by address, while the storage on it lives
        self._cached: dict[tuple[int, int], list[Bytes]] = {}  # (stream, size) -> freed memory, for that stream to use again at once

    def stream(self, name: str) -> SimulatedStream:
        """Another compute stream."""
        made = SimulatedStream(name)
        self._streams.append(made)
        return made

    @contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Make a compute stream the current one."""
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    def launch(self, kernel: Callable[..., None], *tensors: Tensor, ms: float = 0.0) -> None:
        """Enqueue compute on the current stream. `kernel` gets the bytes under each tensor when it runs, and must not hold the tensors."""
        stream, memories = self._current, [self._under(tensor).bytes for tensor in tensors]

        def run() -> None:
            stream.clock_ms += ms
            kernel(*memories)

        self._give(stream, run)

    def finish(self) -> None:
        """Run everything that is queued, in some allowed order."""
        while waiting := [stream for stream in self._streams if stream.queue]:
            self._step(self._random.choice(waiting) if self._random else waiting[0])

    def current(self) -> SimulatedStream:
        return self._current

    def record(self, stream: Stream, *, timing: bool = False) -> SimulatedEvent:
        event = SimulatedEvent(stream)

        def reach() -> None:
            event.reached_ms = stream.clock_ms
            for call in event.then:
                call()

        self._give(stream, reach)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        def run() -> None:
            self.synchronize(event)
            assert event.reached_ms is not None
            stream.clock_ms = max(stream.clock_ms, event.reached_ms)

        self._give(stream, run)

    def copy(self, stream: Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            self._copy_one(stream, target, source)

    def _copy_one(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        memory, read, nbytes = self._under(target), self._reader(source), source.numel()

        def run() -> None:
            if memory.freed:
                self.faults.append(f"{stream.name}: a copy of {nbytes} bytes wrote to memory that had been freed")
            memory.bytes[:nbytes] = read()
            stream.clock_ms += nbytes / self._gb_s / 1e6

        self._give(stream, run)

    def empty(self, nbytes: int, stream: Stream) -> Tensor:
        if self.room is not None:
            if nbytes > self.room:
                raise torch.OutOfMemoryError(f"simulated device: {nbytes} bytes asked for, {self.room} left")
            self.room -= nbytes
        cached = self._cached.get((id(stream), nbytes))
        content = cached.pop() if cached else np.full(nbytes, POISON, dtype=np.uint8)
        return self._allocate(content, lambda memory: self._free(memory, stream))

    def done(self, event: Event) -> bool:
        self._progress()
        return event.reached_ms is not None

    def synchronize(self, event: Event) -> None:
        while event.reached_ms is None:
            self._step(event.stream)

    def elapsed_ms(self, start: Event, end: Event) -> float:
        return float(end.reached_ms - start.reached_ms)

    def pin(self, nbytes: int) -> tuple[Tensor, int] | None:
        if self.host_room is not None:
            if nbytes > self.host_room:
                return None
            self.host_room -= nbytes
        return self._allocate(np.full(nbytes, POISON, dtype=np.uint8), lambda memory: None), nbytes

    def unpin(self, buffer: Tensor) -> None:
        memory = self._under(buffer)
        memory.free()
        if self.host_room is not None:
            self.host_room += memory.bytes.nbytes

    def idle(self, buffer: Tensor, ready: Event | None) -> None:
        memory = self._under(buffer).bytes
        if ready is None or ready.reached_ms is not None:
            memory.fill(POISON)
        else:
            ready.then.append(lambda: memory.fill(POISON))

    def capturing(self) -> bool:
        return False

    def _give(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        stream.queue.append(work)
        if not self._lazy and stream not in (self.d2h, self.h2d):
            while stream.queue:
                self._step(stream)
        else:
            self._progress()

    def _step(self, stream: SimulatedStream) -> None:
        stream.queue.popleft()()

    def _progress(self) -> None:
        """What the device may have done by now."""
        while self._random is not None and self._random.random() < 0.3:
            stream = self._random.choice(self._streams)
            if stream.queue:
                self._step(stream)

    def _under(self, tensor: Tensor) -> _Memory:
        return self._memory[tensor.untyped_storage().data_ptr()]

    def _allocate(self, content: Bytes, freed: Callable[[_Memory], None]) -> Tensor:
        memory = _Memory(content)
        window = memory.bytes[:]  # what the storage owns: when that dies, the memory is free
        address = window.ctypes.data

        def gone() -> None:
            del self._memory[address]
            freed(memory)

        weakref.finalize(window, gone).atexit = False
        self._memory[address] = memory
        return torch.from_numpy(window)

    def _free(self, memory: _Memory, stream: SimulatedStream) -> None:
        """Device memory came back: whatever its stream does from here on may write there."""
        stream.queue.append(memory.free)  # no progress: this runs wherever the last reference happens to die
        self._cached.setdefault((id(stream), memory.bytes.nbytes), []).append(memory.bytes)
        if self.room is not None:
            self.room += memory.bytes.nbytes

    def _reader(self, source: Tensor) -> Callable[[], Bytes]:
        nbytes, storage = source.numel(), source.untyped_storage()
        memory, watched = self._memory.get(storage.data_ptr()), StorageWeakRef(storage)

        def read() -> Bytes:
            if memory.freed if memory is not None else watched.expired():
                self.faults.append(f"a copy of {nbytes} bytes read memory that had been freed")
                return np.full(nbytes, POISON, dtype=np.uint8)
            if memory is not None:
                return memory.bytes[:nbytes]
            alive = torch.UntypedStorage._new_with_weak_ptr(watched.cdata)
            return torch.empty(0, dtype=torch.uint8).set_(alive).numpy()

        return read
