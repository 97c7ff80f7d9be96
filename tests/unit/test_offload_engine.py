"""The engine on the simulated device: what moves, when it comes back, what it counts, and what it refuses."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.offload import engine as engine_module
from lightning_gdn.offload.copies import storage_of, view_of
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.handles import Block, HostCopy
from lightning_gdn.offload.simulated import SimulatedBackend
from lightning_gdn.offload_config import OffloadConfig

SIZE = 4000
"""Bytes of the test's storages."""
Saved = list[tuple[Block, list[HostCopy | None]]]
"""A graph, as far as the engine is concerned: blocks in forward order and their tickets."""


def make(sim: SimulatedBackend | None = None, **fields: Any) -> Engine:
    return Engine(sim or SimulatedBackend(), OffloadConfig(**{"labels": ("mlp",), "min_bytes": 0, "resident_last_blocks": 0, **fields}))


def forward(engine: Engine, blocks: int = 4, per_block: int = 2, count: int | None = None, ms: float = 0.0) -> Saved:
    """One pass over blocks that save `per_block` storages of `SIZE` bytes each; the storage's first byte is the block's index."""
    graph = []
    for index in range(blocks):
        with engine.block(index, count or blocks) as block:
            sources = [torch.full((SIZE,), index, dtype=torch.uint8) for _ in range(per_block)]
            graph.append((block, [block.offer(source) for source in sources]))
            del sources
            if ms:
                engine._backend.launch(lambda: None, ms=ms)  # type: ignore[attr-defined]
    return graph


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for autograd: `now` is the backward under way, `ends` its end callbacks."""
    state: dict[str, Any] = {"now": 1, "ends": []}
    monkeypatch.setattr(engine_module, "_graph_task", lambda: state["now"])
    monkeypatch.setattr(engine_module, "_at_end_of_backward", state["ends"].append)
    return state


def on_device(graph: Saved) -> list[int]:
    """Blocks with reloads on the device."""
    return [block.index for block, tickets in graph for ticket in tickets if ticket is not None and ticket._copy.device is not None]


def test_a_source_is_free_when_its_block_and_the_next_one_ran() -> None:
    engine, watched = make(), []
    for index in range(3):
        with engine.block(index, 3) as block:
            source = torch.zeros(SIZE, dtype=torch.uint8)
            watched.append(weakref.ref(source))
            ticket = block.offer(source)
            assert ticket is not None
            assert ticket.nbytes == SIZE
            del source
            assert watched[index]() is not None, "the copy is under way"
        assert [reference() is not None for reference in watched] == [False] * index + [index < 2]


@pytest.mark.parametrize(("fraction", "held_for"), [(0.25, 4), (0.3, 3), (0.5, 2), (0.6, 1), (1.0, 1)])
def test_a_block_that_moves_as_a_whole_keeps_its_sources_while_others_move_nothing(fraction: float, held_for: int) -> None:
    """Its copies have as many blocks to hide behind as the share leaves without any; at the end of the forward everything is let go."""
    engine, alive = make(fraction=fraction), list[tuple[int, weakref.ref[Tensor]]]()
    seen, graph = dict[int, int](), []
    for index in range(12):
        with engine.block(index, 12) as block:
            sources = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(4)]
            tickets = [block.offer(source) for source in sources]
            if index == 7 and fraction <= 0.5:
                assert len({ticket is None for ticket in tickets}) == 1, "all or nothing"
            alive += [(index, weakref.ref(source)) for source, ticket in zip(sources, tickets, strict=True) if ticket is not None]
            graph.append(tickets)
            del sources, tickets
        for made, reference in alive:
            if reference() is not None:
                seen[made] = index - made
    assert seen
    assert all(reference() is None for _, reference in alive), "the forward has ended"
    assert max(seen.values()) == min(held_for, 12) - 1 or fraction > 0.5


def test_reloads_are_enqueued_a_block_before_their_use_and_in_reverse(tasks: dict[str, Any]) -> None:
    engine = make()
    engine.timeline = []
    graph = forward(engine, blocks=5)
    for block, tickets in reversed(graph):
        block.backward()
        assert set(on_device(graph)) == {block.index, max(0, block.index - 1)}
        for ticket in reversed(tickets):
            assert ticket is not None
            assert ticket.fetch()[0] == block.index
    reloads = [entry for entry in engine.timeline if entry.kind == "in"]
    assert [entry.ticket for entry in reloads] == list(range(10, 0, -1))
    assert [entry.during - entry.block for entry in reloads] == [0, 0] + [1] * 8
    statistics = engine.step_statistics()
    assert (statistics.copies_in, statistics.late) == (10, 2), "only the last block's come too late: keep it resident"


def test_blocks_that_moved_nothing_trigger_the_next_reloads(tasks: dict[str, Any]) -> None:
    """A hybrid: every fourth block, and the resident last one, move nothing; their backward still starts a reload."""
    engine = make(resident_last_blocks=1)
    engine.timeline = []
    graph = []
    for index in range(9):
        with engine.block(index, 9) as block:
            graph.append((block, [block.offer(torch.full((SIZE,), index, dtype=torch.uint8))] if index % 4 != 3 else []))
    for block, tickets in reversed(graph):
        block.backward(torch.zeros(1))
        for ticket in tickets:
            if ticket is not None:
                assert ticket.fetch()[0] == block.index
    leads = {entry.block: entry.during - entry.block for entry in engine.timeline if entry.kind == "in"}
    assert leads == {6: 2, 5: 1, 4: 1, 2: 2, 1: 1, 0: 1}
    assert engine.step_statistics().late == 0


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_more_blocks_than_asked_for_are_ahead(ahead: int, tasks: dict[str, Any]) -> None:
    engine = make(prefetch_blocks=ahead)
    graph = forward(engine, blocks=6, per_block=1)
    graph[5][0].backward()
    assert on_device(graph) == list(range(5 - ahead, 6))


def test_reloads_follow_the_graph_that_is_differentiated(tasks: dict[str, Any]) -> None:
    engine = make()
    first, second, third = forward(engine), forward(engine), forward(engine)
    first[3][0].backward()
    assert on_device(first) == [2, 2, 3, 3]
    assert on_device(second) == on_device(third) == []
    tasks["now"] = 2
    third[2][0].backward()
    assert on_device(third) == [1, 1, 2, 2]
    assert on_device(second) == []
    del first, third
    tasks["now"] = 3
    second[1][0].backward()
    assert on_device(second) == [0, 0, 1, 1]
    assert engine.pool.buffers_in_use == 8, "two graphs were abandoned in the middle of a backward"


def test_one_copy_serves_every_handle_and_goes_with_the_last(tasks: dict[str, Any]) -> None:
    engine = make()
    with engine.block(0, 1) as block:
        source = torch.arange(24, dtype=torch.float32)
        tickets = [block.offer(view) for view in (source, source.view(4, 6).t(), source[5:])]
        tickets.append(block.offer(source.view(2, 12), handles=2))
        del source
    ticket = tickets[0]
    assert ticket is not None
    assert all(other is ticket for other in tickets)
    storages = [ticket.fetch() for _ in range(4)]
    assert len({storage.data_ptr() for storage in storages}) == 1
    assert ticket._copy.device is not None
    assert torch.equal(view_of(ticket.fetch(), (6, 4), (1, 6), 0, torch.float32), torch.arange(24.0).view(4, 6).t())
    assert ticket._copy.device is None, "five handles were served"
    del storages
    tasks["now"] = 2
    assert view_of(ticket.fetch(), (2,), (3,), 1, torch.float32).tolist() == [1, 4]
    for call in tasks["ends"]:
        call()
    assert (ticket._copy.task, ticket._copy.device) == (2, None), "what one backward did not use goes when it ends"
    statistics = engine.step_statistics()
    assert (statistics.copies_out, statistics.copies_in, statistics.bytes_in) == (1, 2, 192)


def test_an_answer_holds_for_every_view_of_a_storage() -> None:
    engine = make(fraction=0.5)
    with engine.block(0, 1) as block:
        first, second = torch.zeros(SIZE), torch.zeros(SIZE)
        answers = [block.offer(tensor) for tensor in (first, first[1:], second, first, second[3:])]
    assert [answer is not None for answer in answers] == [False, False, True, False, True]
    assert engine.step_statistics().skipped == {"budget": 4 * SIZE}


def test_a_handle_nobody_asked_for_goes_when_backward_has_passed_its_block(tasks: dict[str, Any]) -> None:
    engine = make()
    graph = forward(engine)
    for block, tickets in reversed(graph[1:]):
        block.backward()
        assert tickets[0] is not None
        tickets[0].fetch()
    assert on_device(graph) == [0, 0, 1]


@pytest.mark.parametrize(
    ("fields", "moved", "skipped"),
    [
        ({}, 8, {}),
        ({"fraction": 0}, 0, {"budget": 8 * SIZE}),
        ({"fraction": 0.5}, 4, {"budget": 4 * SIZE}),
        ({"min_bytes": SIZE}, 8, {}),
        ({"min_bytes": SIZE + 1}, 0, {"min_bytes": 8 * SIZE}),
        ({"resident_last_blocks": 1}, 6, {"resident": 2 * SIZE}),
        ({"resident_last_blocks": 9}, 0, {"resident": 8 * SIZE}),
        ({"fraction": "auto"}, 8, {}),
    ],
)
def test_what_moves_is_decided_the_same_from_the_first_step(fields: dict[str, Any], moved: int, skipped: dict[str, int]) -> None:
    engine = make(**fields)
    chosen = []
    for _ in range(3):
        graph = forward(engine)
        chosen.append([[ticket is not None for ticket in tickets] for _, tickets in graph])
        del graph
        statistics = engine.step_statistics()
        assert (statistics.copies_out, statistics.bytes_out, statistics.skipped) == (moved, moved * SIZE, skipped)
        assert (statistics.buffers_in_use, statistics.pinned_in_use) == (0, 0)
        assert statistics.pinned_peak == moved * 4096
    assert chosen[0] == chosen[1] == chosen[2]
    if fields.get("fraction") == 0.5:
        assert chosen[0] == [[False, True], [False, False], [True, True], [False, True]], "a whole block as soon as one fits, then what is left"


def test_a_full_pool_keeps_the_rest_on_the_device_and_counts_it() -> None:
    engine = make(max_pinned_gib=3 * 4096 / 2**30)
    graph = forward(engine)
    assert [ticket is not None for _, tickets in graph for ticket in tickets] == [True] * 3 + [False] * 5
    statistics = engine.step_statistics()
    assert (statistics.fallbacks, statistics.fallback_bytes, statistics.pinned_held) == (5, 5 * SIZE, 3 * 4096)
    assert all(ticket.fetch()[0] == block.index for block, tickets in graph for ticket in tickets if ticket)


def test_abandoned_and_failed_passes_leave_nothing() -> None:
    engine = make()
    with pytest.raises(RuntimeError, match="in the model"):
        with engine.block(0, 4) as block:
            source = torch.zeros(SIZE, dtype=torch.uint8)
            watched = weakref.ref(source)
            ticket = block.offer(source)
            del source
            raise RuntimeError("in the model")
    assert watched() is None, "the sources of a failed block are not held until the next one"
    assert ticket is not None
    del ticket
    forward(engine, blocks=2, count=4)
    engine.collect()
    assert engine.pool.buffers_in_use == 0
    held = engine.pool.held
    forward(engine)
    assert engine.step_statistics().pinned_in_use == 0
    assert held < engine.pool.held
    engine.close()
    assert engine.pool.held == 0
    gc.collect()


def test_an_edit_in_place_while_the_copy_runs_is_pytorchs_error() -> None:
    for release in (1, 0):  # the source is still held, or was let go since
        engine = make(release_blocks=release)
        with engine.block(0, 2) as block:
            source = torch.zeros(SIZE)
            ticket = block.offer(source.detach())
            source.add_(1)
        assert ticket is not None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ticket.fetch()


def test_what_has_no_plain_storage_stays() -> None:
    cpu, plain = torch.device("cpu"), torch.ones(3, 4)
    assert storage_of(plain.t(), cpu) is not None
    assert storage_of(plain.expand(2, 3, 4).to(torch.bfloat16), cpu) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, still there
        quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    stays: list[Tensor] = [
        nn.Parameter(plain),
        plain.to_sparse(),
        quantized,
        torch.empty(3, device="meta"),
        torch.empty(0),
        torch.ones(2, dtype=torch.complex64).conj(),
    ]
    engine = make()
    with engine.block(0, 1) as block:
        assert [block.offer(tensor) for tensor in stays] == [None] * len(stays)
    assert storage_of(plain, torch.device("cuda", 0)) is None
    assert engine.step_statistics().copies_out == 0


def test_graph_capture_is_refused() -> None:
    class Capturing(SimulatedBackend):
        def capturing(self) -> bool:
            return True

    engine = make(Capturing())
    with pytest.raises(RuntimeError, match=r"being captured into a CUDA graph, got .* expected an eager one"):
        with engine.block(0, 1):
            pass


def test_a_reload_waits_for_its_own_copy_out() -> None:
    """Stated on its own: where one stream does everything, other waits imply this one, so no schedule can miss it."""
    waits: list[tuple[Any, Any]] = []

    class Spy(SimulatedBackend):
        def wait(self, stream: Any, event: Any) -> None:
            waits.append((stream, event))
            super().wait(stream, event)

    sim = Spy()
    engine = make(sim)
    [(_, [ticket])] = forward(engine, blocks=1, per_block=1)
    assert ticket is not None
    ticket.fetch()
    assert (sim.h2d, ticket._copy.out) in waits


def test_a_reload_that_finds_no_room_is_left_for_its_use(tasks: dict[str, Any]) -> None:
    sim = SimulatedBackend()
    engine = make(sim)
    graph = forward(engine, blocks=2, per_block=1)
    sim.room = SIZE
    graph[1][0].backward()
    assert on_device(graph) == [1]
    first, second = graph[0][1][0], graph[1][1][0]
    assert first is not None
    assert second is not None
    held = second.fetch()
    with pytest.raises(torch.OutOfMemoryError):
        first.fetch()
    assert held[0] == 1
    del held
    assert first.fetch()[0] == 0
    assert engine.step_statistics().prefetch_oom == 2, "before block 1's backward, and at block 0's own"


def test_backward_may_run_in_another_thread() -> None:
    engine, seen = make(), []
    graph = forward(engine)

    def backward(graph: Saved) -> None:
        for _, tickets in reversed(graph):
            seen.extend(int(ticket.fetch()[0]) for ticket in tickets if ticket)

    thread = threading.Thread(target=backward, args=(graph,))
    thread.start()
    thread.join()
    assert seen == [3, 3, 2, 2, 1, 1, 0, 0]
    del graph
    assert engine.step_statistics().buffers_in_use == 0


def test_times_and_rates(tasks: dict[str, Any]) -> None:
    """Four blocks of 1 ms each; a storage takes 1.5 ms to copy. Simulated time makes every figure exact."""
    sim = SimulatedBackend(gb_s=SIZE / 1.5e6)
    engine = make(sim, resident_last_blocks=1)
    graph = forward(engine, per_block=1, ms=1.0)
    assert [tickets[0] is not None for _, tickets in graph] == [True, True, True, False]
    for block, tickets in reversed(graph):
        block.backward()
        for ticket in tickets:
            if ticket is not None:
                ticket.fetch()
        sim.launch(lambda: None, ms=1.0)
    del graph, tickets, ticket
    statistics = engine.step_statistics()
    # Copies out run at 0, 1.5 and 3 ms; block 1 ends at 2 ms, block 2 at 3 ms (its wait is for 3.0), block 3 at 4 and waits for 4.5.
    assert (statistics.copy_out_ms, statistics.copy_in_ms) == pytest.approx((4.5, 4.5))
    assert statistics.stall_out_ms == pytest.approx(0.5)
    assert statistics.forward_ms == pytest.approx(4.5)
    # Backward of block 3 starts at 4.5 and reloads block 2 until 6; 5.5 → 6 is a stall. Then 6 → 7.5 and 7.5 → 9 for blocks 1 and 0, each after 1 ms.
    assert statistics.stall_in_ms == pytest.approx(1.5)
    assert statistics.backward_ms == pytest.approx(3 + 1.0)
    assert statistics.out_gb_s == pytest.approx(SIZE / 1.5e6)
    assert statistics.in_gb_s == pytest.approx(SIZE / 1.5e6)
    assert statistics.hidden_share == pytest.approx(1 - 2.0 / 9.0)
    assert statistics.as_dict()["stall_ms"] == pytest.approx(2.0)
    again = engine.step_statistics()
    assert (again.copy_out_ms, again.bytes_out, again.hidden_share, again.out_gb_s) == (0.0, 0, None, None)


def test_times_that_are_not_known_yet_come_later() -> None:
    sim = SimulatedBackend(lazy=True)
    engine = make(sim)
    graph = forward(engine)
    early = engine.step_statistics()
    assert (early.copy_out_ms, early.copies_out) == (0.0, 8)
    sim.finish()
    late = engine.step_statistics()
    assert (late.timed_bytes_out, late.copies_out) == (8 * SIZE, 0)
    assert late.copy_out_ms > 0
    del graph


def test_auto_settles_where_the_copies_hide(tasks: dict[str, Any]) -> None:
    """40 blocks of 1 ms in each direction, whose storages take 2 ms each way: about half of the bytes can hide, and a sixth slows
    the rest down by no more than is tolerated."""
    sim = SimulatedBackend(gb_s=2 * SIZE / 4e6)
    engine = make(sim, fraction="auto", resident_last_blocks=1)
    history = []
    for step in range(20):
        tasks["now"] = step + 1
        graph = forward(engine, blocks=40, ms=1.0, per_block=2)
        for block, tickets in reversed(graph):
            block.backward()
            for ticket in tickets:
                if ticket is not None:
                    ticket.fetch()
            sim.launch(lambda: None, ms=1.0)
        del graph, tickets, ticket
        history.append(engine.step_statistics())
    assert engine.auto is not None
    assert engine.auto.settled
    assert [statistics.fraction for statistics in history[:5]] == [1.0] * 5
    assert 0.05 < engine.fraction < 0.17
    assert history[0].stall_ms > 40
    assert history[-1].stall_ms < 0.01 * (history[-1].forward_ms + history[-1].backward_ms)
    assert history[-1].bytes_out <= engine.fraction * history[-1].eligible_bytes
    assert history[4].pinned_held == 4096 * history[4].copies_out, "the whole share, a page for each"
    last = history[-1]
    assert 4096 * last.copies_out <= last.pinned_held <= 4096 * last.copies_out / 0.9 + 4096 < history[4].pinned_held, (
        "what it settled on, but for a tenth"
    )


def test_auto_needs_times() -> None:
    with pytest.raises(ValueError, match="fraction='auto' measures copies and compute, got timing=False"):
        Engine(SimulatedBackend(), OffloadConfig(labels=("mlp",), fraction="auto"), timing=False)


def test_two_hundred_steps_of_changing_lengths_stay_under_the_cap(tasks: dict[str, Any]) -> None:
    cap = 10 * 4096
    engine = make(max_pinned_gib=cap / 2**30)
    fallbacks = 0
    for step in range(200):
        tasks["now"] = step
        graph = []
        for index in range(3):
            with engine.block(index, 3) as block:
                lengths = [1000 + 37 * ((step * 7 + i) % 211) for i in range(3)]
                graph.append((block, [block.offer(torch.full((length,), step % 256, dtype=torch.uint8)) for length in lengths]))
        for block, tickets in reversed(graph):
            block.backward()
            assert all(ticket.fetch()[0] == step % 256 for ticket in tickets if ticket)
        del graph, tickets
        statistics = engine.step_statistics()
        fallbacks += statistics.fallbacks
        assert statistics.buffers_in_use == 0
        assert statistics.pinned_held <= cap
    assert fallbacks > 0
