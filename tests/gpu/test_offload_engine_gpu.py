"""The offload engine on one GPU: exact round trips under real concurrency, the PCIe rate, constant memory, nothing left in use."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.offload.copies import storage_of, view_of
from lightning_gdn.offload.cuda import CudaBackend
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.replay import is_parameter

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_record_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory handed to `record_stream` is reused at an unknown time: the engine must do without."""

    def refuse(self: Tensor, stream: Any) -> None:
        raise AssertionError("record_stream was called")

    monkeypatch.setattr(Tensor, "record_stream", refuse)


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes engines; afterwards nothing is in use and every page is given back."""
    made: list[Engine] = []

    def engine(**fields: Any) -> Engine:
        config = OffloadConfig(**{"labels": ("mlp",), "min_bytes": 0, "resident_last_blocks": 0, **fields})
        made.append(Engine(CudaBackend(torch.device("cuda")), config))
        return made[-1]

    yield engine
    gc.collect()
    for each in made:
        statistics = each.step_statistics()
        assert (statistics.buffers_in_use, statistics.pinned_in_use) == (0, 0)
        torch.cuda.synchronize()
        each.close()
        assert each.pool.held == 0
        assert each._backend._registered == {}  # type: ignore[attr-defined]


def test_buffers_are_registered_pages_and_no_power_of_two() -> None:
    backend = CudaBackend(torch.device("cuda"))
    before = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else None
    made = backend.pin(5 * MIB)
    assert made is not None
    memory, cost = made
    assert (memory.numel(), cost) == (5 * MIB, 5 * MIB)
    assert memory.is_pinned()
    if before is not None:
        assert torch.cuda.host_memory_stats() == before, "torch's own pinned allocator was asked"
    backend.unpin(memory)
    assert not memory.is_pinned()
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_views_come_back_exactly(dtype: torch.dtype, make: Any) -> None:
    engine = make()
    base = torch.randint(0, 100, (6 * 5 * 4096,), device="cuda").float().to(dtype)
    host = base.view(torch.uint8).cpu()
    shapes = [v[1:] for v in _views(base)]
    with engine.block(0, 1) as block:
        assert storage_of(base, engine._backend.device) is not None
        ticket = block.offer(base, handles=len(shapes))
    assert ticket is not None
    del base
    for _ in range(20):  # the allocator hands the source's memory out again
        torch.full((6 * 5 * 4096 * dtype.itemsize,), 0xFF, dtype=torch.uint8, device="cuda")
    for size, stride, offset in shapes:
        found = view_of(ticket.fetch(), size, stride, offset, dtype)
        wanted = view_of(host.untyped_storage(), size, stride, offset, dtype)
        assert (found.shape, found.stride(), found.storage_offset(), found.device.type) == (wanted.shape, wanted.stride(), offset, "cuda")
        assert torch.equal(found.cpu().contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def _views(base: Tensor) -> list[tuple[Tensor, Any, Any, int]]:
    views = [
        base,
        base.view(60, -1).t(),
        base.view(60, -1)[1:, ::3],
        base[7:8].expand(4, 5),
        base.view(6, 5, -1).permute(2, 0, 1),
        base.view(60, -1)[5],
    ]
    return [(view, view.size(), view.stride(), view.storage_offset()) for view in views]


def test_values_survive_memory_that_is_reused_at_once(make: Any) -> None:
    """Slow copies (a large one in front), sources overwritten as soon as they are free, reloads into memory that was just in use."""
    engine = make(prefetch_blocks=2)
    plug = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    plug_host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    for step in range(6):
        graph = []
        elements = (4 + step) * MIB // 4
        for index in range(8):
            with torch.cuda.stream(engine._backend.d2h):
                plug_host.copy_(plug, non_blocking=True)
            with engine.block(index, 8) as block:
                tickets = [block.offer(torch.full((elements,), 100.0 * index + i, device="cuda")) for i in range(3)]
            graph.append((block, tickets))
            for _ in range(3):
                torch.full((elements,), float("nan"), device="cuda")
        wrong = torch.zeros((), device="cuda")
        for block, tickets in reversed(graph):
            with torch.cuda.stream(engine._backend.h2d):
                plug.copy_(plug_host, non_blocking=True)
            block.backward()
            for i, ticket in enumerate(tickets):
                assert ticket is not None
                value = view_of(ticket.fetch(), (elements,), (1,), 0, torch.float32)
                wrong += (value != 100.0 * block.index + i).sum()
                del value
            torch.full((elements,), float("nan"), device="cuda")
        assert wrong.item() == 0
        del graph, tickets, ticket
        assert engine.step_statistics().buffers_in_use == 0


def test_a_backward_on_another_stream_gets_its_own_reload(make: Any) -> None:
    engine = make()
    with engine.block(0, 2) as block:
        ticket = block.offer(torch.arange(MIB, device="cuda"))
    with engine.block(1, 2) as last:
        pass
    last.backward()
    assert ticket is not None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value = view_of(ticket.fetch(), (MIB,), (1,), 0, torch.int64)
        found = value.sum().item()
        del value
    assert found == MIB * (MIB - 1) // 2


def test_capture_is_refused(make: Any) -> None:
    engine = make()
    x = torch.zeros(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="being captured into a CUDA graph"):
        with torch.cuda.graph(graph):
            x.add_(1)
            with engine.block(0, 1):
                pass


class Layer(nn.Module):
    """Two products and an activation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)).transpose(0, 1)).transpose(0, 1)


def run(layers: nn.ModuleList, x: Tensor, engine: Engine | None) -> list[Tensor]:
    """Gradients of the input and of every weight."""
    out = x = x.detach().requires_grad_(True)
    for index, layer in enumerate(layers):
        if engine is None:
            out = layer(out)
            continue
        with engine.block(index, len(layers)) as block:

            def pack(tensor: Tensor, block: Any = block) -> Any:
                ticket = None if is_parameter(tensor) else block.offer(tensor.detach())
                return tensor.detach() if ticket is None else (ticket, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

            with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
                out = layer(out)
        out.register_hook(block.backward)
    return list(torch.autograd.grad(out.float().square().mean(), [x, *layers.parameters()]))


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    ticket, *geometry = packed
    return view_of(ticket.fetch(), *geometry)


def test_gradients_are_bit_equal_memory_falls_and_stays_constant(make: Any) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(1024) for _ in range(12)).cuda().to(torch.bfloat16)
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16)
    wanted = run(layers, x, None)
    again = run(layers, x, None)
    assert all(torch.equal(a, b) for a, b in zip(wanted, again, strict=True)), "two control runs differ: the comparison says nothing"
    torch.cuda.reset_peak_memory_stats()
    run(layers, x, None)
    control = torch.cuda.max_memory_allocated()
    engine = make(resident_last_blocks=1)
    figures = set()
    for step in range(30):
        torch.cuda.reset_peak_memory_stats()
        found = run(layers, x, engine)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        statistics = engine.step_statistics()
        assert statistics.buffers_in_use == 0
        assert statistics.late == 0
        if step >= 3:
            figures.add((torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), statistics.pinned_held, statistics.bytes_out))
    assert len(figures) == 1, f"memory is not constant: {figures}"
    peak, _, _, moved = figures.pop()
    assert peak < control - moved / 2


def test_out_of_memory_in_a_step_leaves_nothing(make: Any) -> None:
    engine = make()
    layers = nn.ModuleList(Layer(256) for _ in range(4)).cuda()
    x = torch.randn(2, 1024, 256, device="cuda")
    wanted = run(layers, x, None)
    large = x.repeat(64, 1, 1)  # a block saves 1.1 GiB of it and takes 1.5 GiB while it runs: the second does not fit
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2 * 2**30
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            run(layers, large, engine)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    statistics = engine.step_statistics()
    assert statistics.copies_out > 0, "the failure came before anything moved"
    assert statistics.pinned_in_use == 0
    assert all(torch.equal(a, b) for a, b in zip(run(layers, x, engine), wanted, strict=True))


def bare_rate(to_host: bool, nbytes: int, count: int) -> float:
    """10⁹ bytes per second of plain copies between pinned and device memory on a stream of their own."""
    device, host = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        start.record(stream)
        for _ in range(count):
            if to_host:
                host.copy_(device, non_blocking=True)
            else:
                device.copy_(host, non_blocking=True)
        end.record(stream)
    torch.cuda.synchronize()
    return count * nbytes / start.elapsed_time(end) / 1e6


@pytest.mark.parametrize("nbytes", [16 * MIB, 64 * MIB])
def test_copies_run_at_the_rate_of_plain_ones(nbytes: int, make: Any) -> None:
    engine = make()
    count = 16
    rates: dict[str, list[float]] = {"out": [], "in": [], "bare out": [], "bare in": []}
    for turn in range(5):
        graph = []
        for index in range(count):
            with engine.block(index, count) as block:
                graph.append((block, block.offer(torch.zeros(nbytes, dtype=torch.uint8, device="cuda"))))
        torch.cuda.synchronize()
        for block, ticket in reversed(graph):
            block.backward()
            assert ticket is not None
            ticket.fetch()
        del graph, ticket
        torch.cuda.synchronize()
        statistics = engine.step_statistics()
        bare = bare_rate(True, nbytes, count), bare_rate(False, nbytes, count)
        assert statistics.timed_bytes_out == statistics.timed_bytes_in == count * nbytes
        if turn:  # the first turn pins
            assert statistics.out_gb_s is not None
            assert statistics.in_gb_s is not None
            for name, rate in zip(rates, (statistics.out_gb_s, statistics.in_gb_s, *bare), strict=True):
                rates[name].append(rate)
    best = {name: max(values) for name, values in rates.items()}
    assert best["out"] >= 0.9 * best["bare out"], best
    assert best["in"] >= 0.9 * best["bare in"], best


def test_a_forked_child_can_come_and_go(make: Any) -> None:
    """As a data loader's worker does: pinned pages are not inherited, and what the parent copies after the fork is right."""
    engine = make()
    for value in range(3):
        with engine.block(0, 1) as block:
            ticket = block.offer(torch.full((4 * MIB,), value, dtype=torch.uint8, device="cuda"))
        if value == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of forking with threads; loaders do it, and this child runs no Python code to speak of
                child = os.fork()
            if child == 0:
                time.sleep(0.2)
                os._exit(0)
        assert ticket is not None
        assert int(view_of(ticket.fetch(), (4 * MIB,), (1,), 0, torch.uint8).float().mean().item()) == value
        del ticket, block
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("behind", [True, False])
def test_host_time_is_exposed_where_the_device_waits_for_it(behind: bool, make: Any) -> None:
    """Not yet run on a GPU when it was written. Storages are small, so that no copy stalls; a device that is milliseconds behind hides all."""
    engine, blocks = make(), 24

    def compute() -> None:
        if behind:
            torch.cuda._sleep(4_000_000)  # cycles: some 2 ms

    def step() -> tuple[float, Any]:
        graph = []
        for index in range(blocks):
            with engine.block(index, blocks) as block:
                compute()
                sources = [torch.ones(4096, device="cuda") for _ in range(4)]
                graph.append((block, block.offer_all([(source, 1) for source in sources])))
                del sources
        for block, tickets in reversed(graph):
            block.backward()
            compute()
            for ticket in tickets:
                ticket.fetch()
        torch.cuda.synchronize()
        host_ms = sum(engine._recorder._host_ns.values()) / 1e6
        return host_ms, engine.step_statistics()

    for _ in range(3):
        step()
    host_ms, found = step()
    assert host_ms > 0
    assert found.copies_out == 4 * blocks
    if behind:
        assert found.exposed_host_ms < 0.1 * host_ms
    else:
        assert found.exposed_host_ms > 0.5 * host_ms
