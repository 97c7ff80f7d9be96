"""Storages go in batches: one event and one wait for all of a block, and nothing left behind where a batch fails half way."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.handles import Block, HostCopy
from lightning_gdn.offload.simulated import SimulatedBackend, SimulatedStream
from lightning_gdn.offload_config import OffloadConfig

SIZE = 4000
"""Bytes of a storage; its buffer takes a page."""


class Recording(SimulatedBackend):
    """Counts what costs host time, and fails when told to."""

    def __init__(self, seed: int | None = None, *, lazy: bool = False) -> None:
        super().__init__(seed, lazy=lazy)
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, int] = {}
        """Method -> how many of its calls work before one raises, once."""

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        left = self.fails.get(name)
        if left is not None:
            self.fails[name] = left - 1
            if left == 0:
                del self.fails[name]
                raise RuntimeError(f"the driver failed in {name}")

    def record(self, stream: Any, *, timing: bool = False) -> Any:
        self._count("record")
        return super().record(stream, timing=timing)

    def wait(self, stream: Any, event: Any) -> None:
        self._count("wait")
        super().wait(stream, event)

    def copy(self, stream: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._count("copy")
        super().copy(stream, pairs)

    def pin(self, nbytes: int) -> tuple[Tensor, int] | None:
        self._count("pin")
        return super().pin(nbytes)

    def _copy_one(self, stream: Any, target: Tensor, source: Tensor) -> None:
        self._count(f"one {stream.name}")
        super()._copy_one(stream, target, source)


def make(sim: SimulatedBackend, *, timing: bool = True, **fields: Any) -> Engine:
    return Engine(sim, OffloadConfig(**{"labels": ("mlp",), "min_bytes": 0, "resident_last_blocks": 0, **fields}), timing=timing)


def fresh(sim: SimulatedBackend, value: int, nbytes: int = SIZE) -> Tensor:
    """A source that compute still has to write."""
    source = sim.empty(nbytes, sim.current())
    sim.launch(lambda memory: memory.fill(value), source)
    return source


def offered(block: Block, sim: SimulatedBackend, values: Sequence[int]) -> list[HostCopy]:
    """A batch whose sources nobody else holds."""
    tickets = block.offer_all([(fresh(sim, value), 1) for value in values])
    assert all(ticket is not None for ticket in tickets)
    return [ticket for ticket in tickets if ticket is not None]


def value_of(sim: SimulatedBackend, ticket: HostCopy) -> int:
    """What the device reads when it uses the reload."""
    seen: list[int] = []
    tensor = ticket.view((ticket.nbytes,), (1,), 0, torch.uint8)
    sim.launch(lambda memory: seen.extend({int(byte) for byte in memory[:SIZE]}), tensor)
    del tensor
    sim.finish()
    (value,) = seen
    return value


def nothing_left(engine: Engine, sim: SimulatedBackend) -> None:
    engine.collect()
    sim.finish()
    assert sim.faults == []
    assert (engine.pool.buffers_in_use, engine.pool.in_use) == (0, 0)


def living_tickets(engine: Engine) -> list[HostCopy]:
    return [found for found in gc.get_objects() if type(found) is HostCopy and found._engine is engine]


def test_answers_come_in_order_and_one_storage_gives_one_ticket() -> None:
    sim = SimulatedBackend()
    engine = make(sim, min_bytes=SIZE)
    with engine.block(0, 1) as block:
        assert block.offer_all([]) == []
        a, b, small = torch.arange(1000.0), torch.full((1000,), 7.0), torch.zeros(3)
        views: list[tuple[Tensor, int]] = [(small, 1), (a, 1), (nn.Parameter(b), 1), (b[2:], 2), (a.view(10, 100).t(), 3), (small, 1)]
        answers = block.offer_all(views)
        again = block.offer_all([(b, 4), (small, 1), (a, 5)])
        del views, a, b
    assert [answer is not None for answer in answers] == [False, True, False, True, True, False]
    first, second = answers[1], answers[3]
    assert first is not None
    assert second is not None
    assert answers[4] is first is not second
    assert again == [second, None, first]
    for ticket, handles, value in ((first, 9, 3.0), (second, 6, 7.0)):
        for left in range(handles, 0, -1):
            assert ticket.view((1,), (1,), 3, torch.float32).item() == value
            assert (ticket._copy.device is not None) is (left > 1), "the handles of all offers were summed"
    statistics = engine.step_statistics()
    assert (statistics.copies_out, statistics.copies_in, statistics.bytes_out) == (2, 2, 2 * SIZE)
    assert (statistics.eligible_bytes, statistics.skipped["min_bytes"]) == (2 * SIZE, 12), "each storage is counted once"
    del first, second, answers, again, ticket
    nothing_left(engine, sim)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_pool_that_is_full_in_the_middle_of_a_batch(seed: int | None) -> None:
    """Three pages: what fits moves, also after what does not."""
    sim = SimulatedBackend(seed, lazy=True)
    engine = make(sim, max_pinned_gib=3 * 4096 / 2**30)
    sizes = (SIZE, 3 * SIZE, SIZE, SIZE, SIZE)
    for step in range(3):
        with engine.block(0, 1) as block:
            tickets = block.offer_all([(fresh(sim, 16 * step + i, nbytes), 1) for i, nbytes in enumerate(sizes)])
        assert [ticket is not None for ticket in tickets] == [True, False, True, True, False]
        assert [value_of(sim, ticket) for ticket in tickets if ticket is not None] == [16 * step, 16 * step + 2, 16 * step + 3]
        statistics = engine.step_statistics()
        assert (statistics.fallbacks, statistics.fallback_bytes, statistics.copies_out) == (2, 4 * SIZE, 3)
        del tickets
    nothing_left(engine, sim)


@pytest.mark.parametrize("timing", [False, True])
def test_events_and_waits_do_not_grow_with_the_number_of_storages(timing: bool) -> None:
    counts = []
    for storages in (1, 2, 9):
        sim = Recording()
        engine = make(sim, timing=timing)
        for _ in range(3):
            graph = []
            for index in range(4):
                with engine.block(index, 4) as block:
                    graph.append((block, offered(block, sim, range(storages))))
            for block, tickets in reversed(graph):
                block.backward()
                assert [value_of(sim, ticket) for ticket in reversed(tickets)] == [*reversed(range(storages))]
            del graph, tickets
            nothing_left(engine, sim)
        assert sim.calls.pop("one d2h") == sim.calls.pop("one h2d") == 3 * 4 * storages
        assert sim.calls.pop("pin") == 4 * storages
        counts.append(dict(sim.calls))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["copy"] == 3 * 4 * 2
    if not timing:
        # Each way: one event behind the work so far, one behind the batch. A buffer's last event is waited for from the second step on.
        assert counts[0]["record"] == 3 * 4 * 4
        assert counts[0]["wait"] <= 3 * 4 * 6


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("works", range(5))
def test_a_copy_out_that_fails_leaves_nothing_and_the_sources_may_die_at_once(works: int, lazy: bool) -> None:
    for seed in (None, *range(6)):
        sim = Recording(seed, lazy=lazy)
        engine = make(sim)
        with engine.block(0, 1) as block:
            before = offered(block, sim, [1, 2])
            kept = fresh(sim, 50)
            sources = [kept, *(fresh(sim, 51 + i) for i in range(4))]
            watched = [weakref.ref(source) for source in sources[1:]]
            sim.fails["one d2h"] = works
            with pytest.raises(RuntimeError, match="the driver failed") as caught:
                block.offer_all([(source, 1) for source in sources])
            assert engine.pool.buffers_in_use == 2, "only those of the batch before"
            assert [reference() for reference in block._shelf] == before
            again = block.offer(kept)  # the error, and the tickets in its traceback, still live
            assert again is not None
            assert engine.pool.buffers_in_use == 3
            del sources, caught
            assert [reference() for reference in watched] == [None] * 4
            scratch = [fresh(sim, 0xEE) for _ in range(5)]  # whoever gets the memory next writes to it
            after = offered(block, sim, [61, 62])
            del kept, scratch
        assert [value_of(sim, ticket) for ticket in (*before, again, *after)] == [1, 2, 50, 61, 62]
        assert len(living_tickets(engine)) == 5
        del before, again, after
        nothing_left(engine, sim)


@pytest.mark.parametrize("method", ["pin", "record", "wait", "copy"])
def test_whatever_fails_in_a_batch_out_leaves_nothing(method: str) -> None:
    for works in range(3):
        sim = Recording(works)
        engine = make(sim, timing=False)
        with engine.block(0, 1) as block:
            sources = [fresh(sim, value) for value in range(4)]
            sim.fails[method] = works
            failed = False
            try:
                block.offer_all([(source, 1) for source in sources])
            except RuntimeError:
                failed = True
            sim.fails.clear()
            del sources
            if failed:
                assert living_tickets(engine) == []
                nothing_left(engine, sim)
            assert failed or (method, works) in {("copy", 1), ("copy", 2), ("record", 2), ("wait", 1), ("wait", 2)}
            assert [value_of(sim, ticket) for ticket in offered(block, sim, [7, 8])] == [7, 8]
        nothing_left(engine, sim)


@pytest.mark.parametrize("works", range(4))
def test_a_reload_that_fails_in_the_middle_is_made_again(works: int) -> None:
    for seed in (None, *range(6)):
        sim = Recording(seed, lazy=True)
        engine = make(sim)
        with engine.block(0, 1) as block:
            tickets = offered(block, sim, range(4))
        sim.fails["one h2d"] = works
        with pytest.raises(RuntimeError, match="the driver failed"):
            block.backward()
        assert all(ticket._copy.device is None for ticket in tickets)
        scratch = [fresh(sim, 0xEE) for _ in range(4)]  # the targets' memory is somebody else's now
        sim.finish()
        found: list[int] = []
        for tensor in scratch:
            sim.launch(lambda memory, found=found: found.append(int(memory[0])), tensor)
        del scratch, tensor
        sim.finish()
        assert found == [0xEE] * 4, "no reload writes there any more"
        assert [value_of(sim, ticket) for ticket in tickets] == [0, 1, 2, 3]
        del tickets
        nothing_left(engine, sim)


@pytest.mark.parametrize("fits", range(5))
def test_a_batch_of_reloads_that_runs_out_of_memory(fits: int) -> None:
    for seed in (None, 0, 1, 2):
        sim = SimulatedBackend(seed)
        engine = make(sim)
        with engine.block(0, 1) as block:
            tickets = offered(block, sim, range(10, 14))
        sim.finish()
        sim.room = fits * SIZE
        block.backward()
        assert [ticket._copy.device is not None for ticket in tickets] == [i >= 4 - fits for i in range(4)], "what is used first came first"
        statistics = engine.step_statistics()
        assert (statistics.prefetch_oom, statistics.copies_in, statistics.bytes_in) == (int(fits < 4), fits, fits * SIZE)
        if fits < 4:
            with pytest.raises(torch.OutOfMemoryError):
                tickets[0].fetch()
        if fits == 0:
            sim.room = SIZE
        assert [value_of(sim, ticket) for ticket in reversed(tickets)] == [13, 12, 11, 10], "each makes room for the next"
        assert engine.step_statistics().copies_in == 4 - fits
        del tickets
        nothing_left(engine, sim)


def fetch(block: Block, tickets: list[HostCopy]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        tickets[0].fetch()


@pytest.mark.parametrize("ask", [fetch, lambda block, tickets: block.backward()], ids=["fetch", "ahead"])
@pytest.mark.parametrize("fits", [0, 2])
def test_no_ticket_lives_on_in_the_traceback_of_an_error(no_collector: None, ask: Callable[[Block, list[HostCopy]], None], fits: int) -> None:
    sim = SimulatedBackend()
    engine = make(sim)
    with engine.block(0, 1) as block:
        tickets = offered(block, sim, range(4))
    sim.room = fits * SIZE
    ask(block, tickets)
    watched = [weakref.ref(ticket) for ticket in tickets]
    del tickets
    assert [reference() for reference in watched] == [None] * 4, "without the garbage collector"
    assert sim.room == fits * SIZE or engine._dead, "reloads under way go with the next call"
    nothing_left(engine, sim)
    assert sim.room == fits * SIZE


def test_a_ticket_that_dies_returns_its_buffer_whatever_its_batch_does(no_collector: None) -> None:
    for order in itertools.permutations(range(3)):
        for reloaded in (False, True):
            sim = SimulatedBackend(len(order), lazy=True)
            engine = make(sim)
            with engine.block(0, 1) as block:
                tickets: list[HostCopy | None] = [*offered(block, sim, range(3))]
            if reloaded:
                block.backward()
            for left, index in zip((2, 1, 0), order, strict=True):
                tickets[index] = None
                engine.collect()
                assert engine.pool.buffers_in_use == left
                with engine.block(0, 1) as other:  # takes the buffer that came back
                    (ticket,) = offered(other, sim, [100 + index])
                assert value_of(sim, ticket) == 100 + index
                del ticket
                engine.collect()
                for i in range(3):
                    alive = tickets[i]
                    assert alive is None or value_of(sim, alive) == i
                del alive
            nothing_left(engine, sim)


def test_a_block_on_two_streams_has_a_batch_for_each() -> None:
    for seed in range(20):
        sim = SimulatedBackend(seed, lazy=True)
        side: SimulatedStream = sim.stream("side")
        engine = make(sim)
        with engine.block(0, 1) as block:
            tickets = offered(block, sim, [1, 2])
            with sim.on(side):
                tickets += offered(block, sim, [3, 4])
        block.backward()
        assert [ticket._copy.owner is side for ticket in tickets] == [False, False, True, True]
        assert len({id(ticket._copy.arrived) for ticket in tickets}) == 2
        with sim.on(side):
            assert [value_of(sim, ticket) for ticket in tickets[2:]] == [3, 4]
        assert [value_of(sim, ticket) for ticket in tickets[:2]] == [1, 2]
        assert engine.step_statistics().copies_in == 4
        del tickets
        nothing_left(engine, sim)
