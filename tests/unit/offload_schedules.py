"""Random schedules for the offload engine on the simulated device, and what must hold after each.

A schedule is a seed. It draws a configuration, a few models (blocks, storages, views), and a sequence of forwards, backwards (whole, partial,
repeated, two at a time), abandoned and failing passes, out-of-memory phases and step ends. Every value that backward sees is compared on the
simulated device, at the moment when the device runs the comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from lightning_gdn.offload import copies, engine
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.handles import Block, HostCopy
from lightning_gdn.offload.simulated import SimulatedBackend, SimulatedStream
from lightning_gdn.offload_config import OffloadConfig

DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.uint8, torch.float64, torch.bool)
SIZES = (64, 96, 256, 1000, 4096, 4104, 12288)
"""Bytes; multiples of 8."""
Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


class Injected(RuntimeError):
    """A failure that the schedule planted."""


def draw_view(rng: random.Random, nbytes: int) -> Geometry:
    """Whole, sliced, transposed, expanded, stepped or overlapping view of a storage."""
    dtype = rng.choice(DTYPES)
    total = nbytes // dtype.itemsize
    rows = rng.choice([n for n in (1, 2, 3, 4, 6, 8) if n <= total])
    columns = total // rows
    start = rng.randrange(0, max(1, total // 4))
    return rng.choice(
        (
            ((total,), (1,), 0, dtype),
            ((rows, columns), (columns, 1), 0, dtype),
            ((columns, rows), (1, columns), 0, dtype),
            ((total - start,), (1,), start, dtype),
            ((3, rows), (0, columns), 0, dtype),
            (((total + 1) // 2,), (2,), 0, dtype),
            ((max(1, columns - 1), rows), (1, columns), min(1, columns - 1), dtype),
            ((), (), start, dtype),
        )
    )


def bytes_of_view(content: np.ndarray[Any, Any], geometry: Geometry) -> bytes:
    """What a view of these bytes holds, without torch's own views."""
    size, stride, offset, dtype = geometry
    width = dtype.itemsize
    raw = content[: len(content) // width * width].view(f"V{width}")[offset:]
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(raw, size, [s * width for s in stride])).tobytes()


class Saved:
    """One storage that a block saved: its ticket or, if it stayed, the tensor; the views on it; what it held."""

    def __init__(self, ticket: HostCopy | None, kept: torch.Tensor | None, views: list[Geometry], content: np.ndarray[Any, Any]) -> None:
        self.ticket, self.kept, self.views, self.content = ticket, kept, views, content


class Graph:
    """What one forward pass leaves for backward: blocks with the stream they ran on and what they saved."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Block, SimulatedStream, list[Saved]]] = []
        self.eligible = self.moved = 0


class Schedule:
    """One seeded run. `run` raises AssertionError, or returns the statistics of its steps."""

    def __init__(self, seed: int, backend: type[SimulatedBackend] = SimulatedBackend) -> None:
        self.rng = rng = random.Random(seed)
        self.sim = backend(rng.choice((None, seed)), lazy=True)
        self.config = OffloadConfig(
            labels=("gdn_core_attn",),
            fraction=rng.choice((1.0, 1.0, 1.0, 0.5, 0.3, 0.0)),
            min_bytes=rng.choice((0, 0, 100)),
            max_pinned_gib=rng.choice((None, None, 40960 / 2**30, 8192 / 2**30, 0)),
            resident_last_blocks=rng.choice((0, 1, 1, 2)),
            prefetch_blocks=rng.choice((1, 1, 2, 9)),
            release_blocks=rng.choice((0, 1, 1, 3)),
        )
        self.engine = Engine(self.sim, self.config, timing=rng.random() < 0.5)
        self.streams = [self.sim.compute, self.sim.stream("side")] if rng.random() < 0.3 else [self.sim.compute]
        self.graphs: list[Graph] = []
        self.wrong: list[str] = []
        self.compared = 0
        self.task = 0
        self.ends: dict[int, list[Callable[[], None]]] = {}
        self.fail_in = -1  # copies until one fails
        self._copy = self.sim._copy_one
        self.sim._copy_one = self._maybe_failing  # type: ignore[method-assign]

    def run(self) -> None:
        """Draw and run the schedule; check what must hold throughout and at the end."""
        rng, old = self.rng, (engine._graph_task, engine._at_end_of_backward)
        engine._graph_task = lambda: self.task
        engine._at_end_of_backward = lambda call: self.ends[self.task].append(call)
        try:
            for _ in range(rng.randint(2, 4)):
                self._step(count=rng.randint(1, 5), base=rng.choice(SIZES))
            self.graphs.clear()
            self.sim.room, self.fail_in = None, -1
            self._check()
            self.sim.finish()
        finally:
            engine._graph_task, engine._at_end_of_backward = old
        assert not self.wrong, self.wrong
        assert not self.sim.faults, self.sim.faults
        live = len(self.sim._memory) - len(self.engine.pool._idle)
        assert live == 0, f"{live} device tensors are still alive"
        self.engine.close()
        assert self.engine.pool.held == 0
        assert not self.sim._memory

    def _step(self, count: int, base: int) -> None:
        """One optimizer step: a few forwards and backwards in some order."""
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            act = rng.random()
            if act < 0.05:
                self.sim.room = rng.choice((0, 5000, 20000))
            elif act < 0.15:
                self.fail_in = rng.randint(0, 8)
            with suppress(Injected, torch.OutOfMemoryError):
                self._forward(count, base)
                if rng.random() < 0.25:
                    self._forward(count, base)
                if rng.random() < 0.1:
                    self.graphs.pop(rng.randrange(len(self.graphs)))
                if act > 0.85:
                    self.sim.room = rng.choice((0, 200, 5000, 9000))
                if self.graphs and rng.random() < 0.9:
                    self._backward()
            self.sim.room, self.fail_in = None, -1
            while self.graphs and rng.random() < 0.8:
                with suppress(Injected):
                    self._backward()
            self._check()
        statistics = self.engine.step_statistics()
        assert statistics.bytes_out <= statistics.eligible_bytes
        assert self.config.fraction or not statistics.bytes_out

    def _forward(self, count: int, base: int) -> None:
        rng, sim, graph = self.rng, self.sim, Graph()
        stop = rng.randrange(count) if rng.random() < 0.1 else None
        untaken = rng.random() < 0.2  # more blocks follow that are not the engine's, or never run
        self.task = -1
        for index in range(count):
            stream = rng.choice(self.streams)
            items: list[Saved] = []
            with sim.on(stream), self.engine.block(index, count + 2 * untaken) as block:
                for count_together in rng.choice(((), (1,), (1, 1), (2,), (1, 2), (4,))):
                    sizes = [base if rng.random() < 0.6 else rng.choice(SIZES) for _ in range(count_together)]
                    items += self._save(graph, block, sizes)
                if stop == index:
                    raise Injected("forward")
            graph.blocks.append((block, stream, items))
        self.graphs.append(graph)

    def _save(self, graph: Graph, block: Block, sizes: list[int]) -> list[Saved]:
        """Storages of these sizes, offered one by one or together, each once or once per view."""
        rng, sim = self.rng, self.sim
        drawn: list[tuple[torch.Tensor, list[Geometry], np.ndarray[Any, Any]]] = []
        offers: list[tuple[torch.Tensor, int]] = []
        owners: list[int] = []
        for number, nbytes in enumerate(sizes):
            tensor = sim.empty(nbytes, sim.current())
            content = np.frombuffer(rng.randbytes(nbytes), dtype=np.uint8)
            sim.launch(lambda memory, content=content: np.copyto(memory, content), tensor)
            views = [draw_view(rng, nbytes) for _ in range(rng.randint(1, 3))]
            drawn.append((tensor, views, content))
            if rng.random() < 0.5:
                mine = [(tensor, len(views))]
            else:
                mine = [(copies.view_of(tensor.untyped_storage(), *view), 1) for view in views]
            offers += mine
            owners += [number] * len(mine)
        answers = block.offer_all(offers) if len(sizes) > 1 else [block.offer(source, handles) for source, handles in offers]
        offers.clear()
        made: list[Saved] = []
        for number, (tensor, views, content) in enumerate(drawn):
            ticket, *others = (answer for answer, owner in zip(answers, owners, strict=True) if owner == number)
            assert all(other is ticket for other in others), "one storage, several answers"
            nbytes = len(content)
            if nbytes >= self.config.min_bytes and block.index < block._count - self.config.resident_last_blocks:
                graph.eligible += nbytes
                graph.moved += nbytes if ticket is not None else 0
                assert graph.moved <= self.config.fraction * graph.eligible + 1e-6
            else:
                assert ticket is None
            made.append(Saved(ticket, tensor if ticket is None else None, views, content))
        return made

    def _backward(self) -> None:
        rng = self.rng
        running = [self._walk(graph) for graph in rng.sample(self.graphs, min(len(self.graphs), rng.choice((1, 1, 1, 2))))]
        while running:
            walk = rng.choice(running)
            if next(walk, None) is None:
                running.remove(walk)

    def _walk(self, graph: Graph) -> Iterator[int]:
        """One backward of one graph, block by block."""
        rng = self.rng
        task = max([0, *self.ends]) + 1
        self.ends[task] = []
        retain, until = rng.random() < 0.25, rng.randrange(len(graph.blocks)) if rng.random() < 0.15 else 0
        fails_at = rng.randrange(len(graph.blocks)) if rng.random() < 0.1 else None
        for block, stream, items in reversed(graph.blocks[until:]):
            self.task = task
            with self.sim.on(rng.choice(self.streams) if rng.random() < 0.1 else stream):
                if self.sim.current() is not stream:  # as autograd does before it runs a node on another stream
                    self.sim.wait(self.sim.current(), self.sim.record(stream))
                if rng.random() < 0.7:
                    block.backward()
                for item in rng.sample(items, len(items)):
                    self._use(item, stream, retain)
                if fails_at == block.index:
                    if not retain:
                        self._forget(graph)
                    raise Injected("backward")
            yield block.index
        self.task = task
        for call in self.ends[task]:
            call()
        if not retain:
            self._forget(graph)

    def _use(self, item: Saved, home: SimulatedStream, retain: bool) -> None:
        rng, sim, content = self.rng, self.sim, item.content
        for geometry in rng.sample(item.views, len(item.views)):
            if rng.random() < 0.05:
                continue  # nobody needs this one in this backward
            storage = item.ticket.fetch() if item.ticket is not None else item.kept.untyped_storage()  # type: ignore[union-attr]
            size, stride, offset, dtype = geometry
            tensor = copies.view_of(storage, size, stride, offset, dtype)
            assert tensor.dtype == dtype
            found: Geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)

            def compare(memory: np.ndarray[Any, Any], found: Geometry = found, geometry: Geometry = geometry) -> None:
                self.compared += 1
                if bytes_of_view(memory, found) != bytes_of_view(content, geometry):
                    self.wrong.append(f"{geometry} of {len(content)} bytes came back wrong")

            sim.launch(compare, tensor)
            del storage
            if sim.current() is not home:  # what backward read on another stream must not be freed under its hands
                sim.wait(home, sim.record(sim.current()))
            del tensor
        if not retain and rng.random() < 0.7:
            item.ticket = item.kept = None  # as autograd drops what a node saved once it ran
            item.views = []

    def _forget(self, graph: Graph) -> None:
        if graph in self.graphs:
            self.graphs.remove(graph)

    def _maybe_failing(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        self.fail_in -= 1
        if self.fail_in == -1:
            raise Injected("copy")
        self._copy(stream, target, source)

    def _check(self) -> None:
        """The pool holds exactly what live tickets need, under its cap."""
        self.engine.collect()
        pool = self.engine.pool
        live = sum(item.ticket is not None for graph in self.graphs for _, _, items in graph.blocks for item in items)
        assert pool.buffers_in_use == live, f"{pool.buffers_in_use} buffers in use by {live} tickets"
        assert pool.held <= (pool.cap if pool.cap is not None else 2 * pool.peak)
        assert (pool.in_use == 0) == (live == 0)
