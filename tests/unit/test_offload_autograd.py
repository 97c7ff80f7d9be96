"""The engine under real autograd on a CPU: saved tensors travel through the simulated device, gradients are bit for bit the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.offload.copies import storage_of, view_of
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.handles import Block, HostCopy
from lightning_gdn.offload.simulated import SimulatedBackend
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.replay import is_parameter


class Layer(nn.Module):
    """Saves plain, transposed, expanded and sliced tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        a = (x @ self.weight).sigmoid()
        b = a.transpose(-1, -2).contiguous().exp()
        c = (b.transpose(-1, -2) * a[:, :1]).tanh() @ self.weight.t()
        return x + (c * self.scale.expand_as(c)).cumsum(-2)


class Stack(nn.Module):
    """Layers, each a block of the engine if there is one. What a tape does, in its simplest form."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor, engine: Engine | None = None) -> Tensor:
        for index, layer in enumerate(self.layers):
            if engine is None:
                x = layer(x)
                continue
            block = engine.block(index, len(self.layers))
            with block, torch.autograd.graph.saved_tensors_hooks(packer(block), unpack):
                x = layer(x)
            x.register_hook(block.backward)
        return x


Packed = tuple[HostCopy, Any, Any, Any, Any]


def packer(block: Block) -> Callable[[Tensor], Packed | Tensor]:
    def pack(tensor: Tensor) -> Packed | Tensor:
        ticket = None if is_parameter(tensor) else block.offer(tensor.detach())
        return tensor.detach() if ticket is None else (ticket, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)

    return pack


def unpack(packed: Packed | Tensor) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    ticket, *geometry = packed
    return view_of(ticket.fetch(), *geometry)


def batch(tokens: int = 5) -> Tensor:
    return torch.randn(2, tokens, 6, generator=torch.Generator().manual_seed(tokens)).requires_grad_(True)


def gradients(stack: Stack, engine: Engine | None, tokens: int = 5) -> list[Tensor]:
    x = batch(tokens)
    return list(torch.autograd.grad(stack(x, engine).square().sum(), [x, *stack.parameters()]))


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(params=[None, 0, 1, 2], ids=lambda seed: f"scheduler-{seed}")
def engine(request: pytest.FixtureRequest) -> Any:
    made = Engine(SimulatedBackend(request.param), OffloadConfig(labels=("mlp",), min_bytes=0, resident_last_blocks=0))
    yield made
    statistics = made.step_statistics()
    assert (statistics.buffers_in_use, statistics.pinned_in_use) == (0, 0)
    assert made._backend.faults == []
    assert made._ending == {}


def test_gradients_are_the_same_whatever_the_length_and_with_evaluation_first(engine: Engine) -> None:
    stack = Stack()
    with torch.no_grad():
        stack(batch(3))
    for tokens in (5, 1, 40, 5):
        assert same(gradients(stack, engine, tokens), gradients(stack, None, tokens))
        statistics = engine.step_statistics()
        assert statistics.bytes_out == statistics.bytes_in > 0
        assert statistics.buffers_in_use == 0


def test_a_graph_can_be_differentiated_twice(engine: Engine) -> None:
    stack, x = Stack(), batch()
    loss, inputs = stack(x, engine).square().sum(), [x, *stack.parameters()]
    wanted = gradients(stack, None)
    for retain in (True, True, False):
        assert same(list(torch.autograd.grad(loss, inputs, retain_graph=retain)), wanted)
    assert engine.step_statistics().buffers_in_use == 0
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def test_forwards_before_backwards_in_any_order(engine: Engine) -> None:
    stack, lengths = Stack(), (5, 8, 2)
    graphs = [(x := batch(tokens), stack(x, engine).square().sum()) for tokens in lengths]
    stack(batch(9), engine)  # abandoned
    for which in (1, 2, 0):
        x, loss = graphs[which]
        assert same(list(torch.autograd.grad(loss, [x, *stack.parameters()])), gradients(stack, None, lengths[which]))


def test_a_partial_backward_leaves_no_reload_on_the_device(engine: Engine) -> None:
    stack = Stack()
    out = stack(batch(), engine)
    wanted = torch.autograd.grad(stack(batch()).sum(), stack.layers[3].scale)
    assert same(list(torch.autograd.grad(out.sum(), stack.layers[3].scale, retain_graph=True)), list(wanted))
    assert engine._ending == {}
    copies = [ticket._copy for _, shelf in engine._threads.forward.shelves for ticket in [reference() for reference in shelf] if ticket]
    assert len(copies) > 8
    assert [copy.device for copy in copies] == [None] * len(copies)


def test_an_exception_in_backward_leaves_nothing(engine: Engine) -> None:
    stack = Stack()

    def fail(gradient: Tensor) -> None:
        raise ValueError("in a hook")

    def attempt() -> None:
        x = batch()
        for index, layer in enumerate(stack.layers):
            block = engine.block(index, 4)
            with block, torch.autograd.graph.saved_tensors_hooks(packer(block), unpack):
                x = layer(x)
            if index == 1:
                x.register_hook(fail)
        x.sum().backward()

    with contextlib.suppress(ValueError):
        attempt()
    assert engine.step_statistics().buffers_in_use == 0
    assert same(gradients(stack, engine), gradients(stack, None))


def test_a_backward_inside_a_backward(engine: Engine) -> None:
    """As re-entrant checkpoints do: an inner graph is built and differentiated while the outer one is."""
    stack, found = Stack(), []
    x = batch()
    out = stack(x, engine)

    def inner(gradient: Tensor) -> None:
        with torch.enable_grad():
            found.append(gradients(stack, engine, 7))

    out.register_hook(inner)
    outer = torch.autograd.grad(out.square().sum(), [x, *stack.parameters()])
    assert same(list(outer), gradients(stack, None))
    assert same(found[0], gradients(stack, None, 7))


DTYPES = "float64 float32 bfloat16 float16 complex64 int64 bool float8_e4m3fn".split()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_views_come_back_exactly(dtype: torch.dtype) -> None:
    base = torch.arange(60).to(torch.float32).to(dtype)
    views = [base, base.view(6, 10).t(), base.view(6, 10)[1:, ::3], base[7:8].expand(4, 5), base.view(3, 4, 5).permute(2, 0, 1), base[3], base[5:5]]
    engine = Engine(SimulatedBackend(), OffloadConfig(labels=("mlp",), min_bytes=0, resident_last_blocks=0))
    with engine.block(0, 1) as block:
        ticket = block.offer(base, handles=len(views))
    assert ticket is not None
    for view in views:
        assert storage_of(view, torch.device("cpu")) is not None
        found = view_of(ticket.fetch(), view.size(), view.stride(), view.storage_offset(), view.dtype)
        assert found.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        assert (found.shape, found.stride(), found.storage_offset(), found.dtype) == (view.shape, view.stride(), view.storage_offset(), dtype)
        assert found.contiguous().view(torch.uint8).equal(view.contiguous().view(torch.uint8)) if found.dim() else found.equal(view)
