"""Pinned buffers: waste, reuse, the cap, and the pages behind them."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any

import pytest
import torch

from lightning_gdn.offload import cuda
from lightning_gdn.offload.cuda import CudaBackend
from lightning_gdn.offload.pool import PAGE, Buffer, Pool, size_class
from lightning_gdn.offload.simulated import SimulatedBackend

MIB = 1 << 20


def test_waste_is_under_an_eighth() -> None:
    rng = random.Random(0)
    sizes = [1, 2, PAGE, PAGE + 1, *(2**k + d for k in range(12, 36) for d in (-1, 0, 1)), *(rng.randint(1, 2**34) for _ in range(2000))]
    for size in sizes:
        kind = size_class(size)
        assert kind >= size
        assert kind % PAGE == 0
        assert kind - size < (PAGE if size <= 32768 else size / 8)
    assert (size_class(MIB), size_class(MIB + 1), size_class(24 * MIB)) == (MIB, MIB + MIB // 8, 24 * MIB)
    assert len({size_class(s) for s in range(MIB, 2 * MIB, 1000)}) <= 9


def take(pool: Pool, nbytes: int) -> Buffer:
    buffer = pool.acquire(nbytes)
    assert buffer is not None
    return buffer


def test_a_returned_buffer_serves_its_class_again() -> None:
    sim = SimulatedBackend()
    pool = Pool(sim, None)
    first = take(pool, MIB)
    assert (pool.held, pool.in_use, pool.buffers_in_use) == (MIB, MIB, 1)
    event = sim.record(sim.d2h)
    pool.release(first, event)
    assert (pool.held, pool.in_use, pool.buffers_in_use) == (MIB, 0, 0)
    assert take(pool, MIB // 2) is not first, "another class"
    assert take(pool, MIB - 5000) is first
    assert first.ready is event
    assert pool.peak == pool.step_peak == MIB + MIB // 2


def test_at_the_cap_idle_buffers_of_other_classes_go_least_recently_used_first() -> None:
    sim = SimulatedBackend()
    pool = Pool(sim, 10 * MIB)
    old, young = take(pool, 4 * MIB), take(pool, 4 * MIB + 1)
    pool.release(old, None)
    pool.release(young, None)
    take(pool, 2 * MIB)  # 2 + 4.5 stay
    assert pool.held == 2 * MIB + size_class(4 * MIB + 1)
    assert take(pool, 4 * MIB + 1) is young
    assert pool.acquire(4 * MIB) is None, "all that is left is in use"
    assert pool.held <= 10 * MIB


def test_eviction_waits_for_the_last_copy_out_of_the_buffer() -> None:
    sim = SimulatedBackend()
    pool = Pool(sim, 2 * MIB)
    buffer, target = take(pool, 2 * MIB), sim.empty(2 * MIB, sim.current())
    sim.copy(sim.h2d, [(target, buffer.memory)])
    event = sim.record(sim.h2d)
    pool.release(buffer, event)
    assert not sim.done(event)
    take(pool, MIB)
    assert sim.done(event)
    assert sim.faults == []


def test_where_the_machine_gives_no_more_idle_buffers_are_given_back_first() -> None:
    pool = Pool(SimulatedBackend(host_room=3 * MIB), None)
    pool.release(take(pool, 2 * MIB), None)
    held = take(pool, 3 * MIB)
    assert pool.acquire(MIB) is None
    pool.release(held, None)
    assert pool.held == 3 * MIB


@pytest.mark.parametrize("cap", [None, MIB])
def test_changing_sizes_keep_the_pool_bounded(cap: int | None) -> None:
    rng, pool, refused = random.Random(0), Pool(SimulatedBackend(), cap), 0
    for _ in range(200):
        unit = rng.randint(MIB // 32, MIB // 8)
        buffers = [pool.acquire(unit * rng.randint(1, 3)) for _ in range(8)]
        refused += buffers.count(None)
        for buffer in buffers:
            if buffer is not None:
                pool.release(buffer, None)
        assert pool.in_use == 0
        assert pool.held <= (2 * pool.peak if cap is None else cap)
    assert (refused > 0) == (cap is not None)
    pool.close()
    assert pool.held == 0


class FakeRuntime:
    """`cudaHostRegister` and `cudaHostUnregister`, with a status to return."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        if not self.status:
            self.pinned[address] = length
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.pinned.pop(address, None) else 1


def host_side_of_a_cuda_backend(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> CudaBackend:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    backend = CudaBackend.__new__(CudaBackend)
    backend.device, backend._registered = torch.device("cpu"), {}
    return backend


def test_pages_are_registered_exactly_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    backend = host_side_of_a_cuda_backend(monkeypatch, runtime)
    made = backend.pin(3 * MIB + 10)
    assert made is not None
    memory, cost = made
    assert (memory.numel(), cost) == (3 * MIB + 10, 3 * MIB + PAGE)
    assert runtime.pinned == {memory.data_ptr(): cost}
    assert memory.data_ptr() % PAGE == 0
    memory.fill_(7)
    backend.unpin(memory)
    assert runtime.pinned == {}
    assert int(memory[-1]) == 7, "the mapping lives as long as a tensor on it"
    backend.pin(MIB)
    cuda._unregister_all(backend._registered, backend.device, owner=-1)
    assert len(runtime.pinned) == 1, "a forked child gives nothing back"
    cuda._unregister_all(backend._registered, backend.device, owner=os.getpid())
    assert runtime.pinned == {}


def test_a_failed_registration_falls_back_with_its_waste_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = host_side_of_a_cuda_backend(monkeypatch, FakeRuntime(status=2))
    asked: list[Any] = []

    def empty(size: int, **options: Any) -> torch.Tensor:
        asked.append((size, options["pin_memory"]))
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(torch, "empty", empty)
    made = backend.pin(3 * MIB)
    assert made is not None
    assert (made[1], asked) == (4 * MIB, [(3 * MIB, True)])
    backend.unpin(made[0])

    def refused(size: int, **options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refused)
    assert backend.pin(3 * MIB) is None


def test_a_cuda_backend_needs_a_cuda_device() -> None:
    with pytest.raises(ValueError, match=r"must be a CUDA device, got 'cpu'; on a CPU use SimulatedBackend"):
        CudaBackend(torch.device("cpu"))
