"""Host time of offload that nothing hides: found by the device's clock between two marks, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gdn.offload import engine as engine_module
from lightning_gdn.offload.copies import Stream
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.simulated import SimulatedBackend, SimulatedEvent
from lightning_gdn.offload.statistics import HOST_SAMPLE, StepStatistics, merged
from lightning_gdn.offload_config import OffloadConfig

SIZE, BLOCKS, COST = 4000, 30, 0.5
"""Bytes of a storage; blocks of a pass; host ms of enqueueing one batch of copies."""


class WithHost(SimulatedBackend):
    """A host with a clock: enqueueing copies takes it `COST` ms, and the compute stream starts nothing before it was enqueued."""

    def __init__(self) -> None:
        super().__init__(gb_s=1e6)
        self.host_ms = 0.0

    def _enqueued(self, stream: Any) -> None:
        if stream is self.compute:
            stream.clock_ms = max(stream.clock_ms, self.host_ms)

    def record(self, stream: Stream, *, timing: bool = False) -> SimulatedEvent:
        self._enqueued(stream)
        return super().record(stream, timing=timing)

    def launch(self, kernel: Any, *tensors: Tensor, ms: float = 0.0) -> None:
        self._enqueued(self.compute)
        super().launch(kernel, *tensors, ms=ms)

    def copy(self, stream: Stream, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.host_ms += COST
        super().copy(stream, pairs)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> WithHost:
    made = WithHost()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: round(made.host_ms * 1e6))
    return made


def engine_on(backend: WithHost, **fields: Any) -> Engine:
    return Engine(backend, OffloadConfig(labels=("mlp",), min_bytes=0, resident_last_blocks=0, **fields))


class Tasks:
    """Stands in for autograd's backward numbers."""

    now = 0


@pytest.fixture(autouse=True)
def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_graph_task", lambda: Tasks.now)
    monkeypatch.setattr(engine_module, "_at_end_of_backward", lambda call: None)


def step(engine: Engine, ms: float, blocks: int = BLOCKS) -> StepStatistics:
    """Forward and backward of blocks whose compute takes the device `ms` each."""
    Tasks.now += 1
    graph, backend = [], engine._backend
    for index in range(blocks):
        with engine.block(index, blocks) as block:
            graph.append((block, block.offer(torch.full((SIZE,), index, dtype=torch.uint8))))
            backend.launch(lambda: None, ms=ms)  # type: ignore[attr-defined]
    for block, ticket in reversed(graph):
        block.backward()
        if ticket is not None:
            ticket.fetch()
        backend.launch(lambda: None, ms=ms)  # type: ignore[attr-defined]
    graph.clear()
    del block, ticket
    return engine.step_statistics()


@pytest.mark.parametrize(("ms", "exposed"), [(0.0, COST), (0.1, COST - 0.1), (0.4, COST - 0.4), (5.0, 0.0)])
def test_what_the_device_waits_for_the_host_is_exposed_and_the_rest_is_hidden(ms: float, exposed: float, backend: WithHost) -> None:
    found = step(engine_on(backend), ms)
    assert found.exposed_host_out_ms == pytest.approx(BLOCKS * exposed)
    assert found.exposed_host_in_ms == pytest.approx(BLOCKS * exposed, abs=3 * COST), "the first of three looks at two reloads at once"
    assert found.stall_ms == pytest.approx(0.0, abs=0.1 * COST)
    assert found.exposed_host_ms == found.as_dict()["exposed_host_ms"] == found.exposed_host_out_ms + found.exposed_host_in_ms
    assert (found.exposed_host_ms > 0) is (exposed > 0)
    again = merged([found, found])
    assert again is not None
    assert again.exposed_host_in_ms == 2 * found.exposed_host_in_ms
    assert found.without_times().exposed_host_ms == 0.0


def test_compute_between_an_offer_and_the_blocks_end_is_no_host_time(backend: WithHost) -> None:
    """Nothing of it is between the marks, though the device is far behind."""
    engine = engine_on(backend)
    for number in range(HOST_SAMPLE):
        found = step(engine, 100.0, blocks=2 + number)
        assert found.exposed_host_ms == 0.0


def test_hooks_before_the_work_count_as_exposed_as_the_work(backend: WithHost) -> None:
    engine = engine_on(backend)
    for index in range(HOST_SAMPLE):
        with engine.block(index, HOST_SAMPLE) as block:
            block.begin_work(spent_ns=2_000_000)
            block.offer(torch.zeros(SIZE, dtype=torch.uint8))
            block.end_work()
    assert engine.step_statistics().exposed_host_out_ms == pytest.approx(HOST_SAMPLE * (COST + 2.0))


def test_a_step_in_which_no_block_was_looked_at_has_the_share_of_the_one_before(backend: WithHost) -> None:
    engine = engine_on(backend)
    found = [step(engine, 0.0, blocks=1).exposed_host_out_ms for _ in range(2 * HOST_SAMPLE)]
    looked = next(index for index, value in enumerate(found) if value)
    assert looked < HOST_SAMPLE
    assert found[looked:] == pytest.approx([COST] * (len(found) - looked))


def test_without_timing_nothing_is_looked_at(backend: WithHost) -> None:
    found = step(Engine(backend, OffloadConfig(labels=("mlp",), min_bytes=0, resident_last_blocks=0), timing=False), 0.0)
    assert found.exposed_host_ms == 0.0
    assert found.copies_out == BLOCKS


@pytest.mark.parametrize(("ms", "share"), [(0.1, 0.0), (20.0, 1.0), (1000.0, 1.0)])
def test_auto_rests_where_the_host_decides_and_moves_all_where_it_does_not(ms: float, share: float, backend: WithHost) -> None:
    engine = engine_on(backend, fraction="auto")
    assert not engine.at_rest
    history = [step(engine, ms) for _ in range(20)]
    assert [each.fraction for each in history[:5]] == [1.0] * 5
    assert (engine.fraction, engine.at_rest) == (share, share == 0)
    assert engine.auto is not None
    found = engine.auto.take_finding()
    assert found is not None
    assert (found.fraction, found.by_host, found.copies_alone) == (share, share == 0, 1.0)
    if share == 0:
        assert history[-1].pinned_held == 0, "the machine's again"
