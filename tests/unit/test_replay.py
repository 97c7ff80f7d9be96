"""Replays: how many, from what, in which state, and how long their results live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gdn.apply import apply_plan
from lightning_gdn.region_fn import RegionFn
from lightning_gdn.regions import Mode
from lightning_gdn.replay import RngState, in_replay, is_parameter
from lightning_gdn.tape import Tape
from tests.models import tiny_batch, tiny_qwen3_5

CPU = torch.device("cpu")
N = 32


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.dropout = nn.Dropout(0.5)


class Recorder:
    """Makes regions that write down their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.made: list[StorageWeakRef] = []

    def region(self, name: str, **fields: Any) -> RegionFn:
        def call(owner: nn.Module, x: Tensor) -> Tensor:
            self.calls.append(f"{name}{' again' if in_replay() else ''}")
            y = x.exp()
            self.made.append(StorageWeakRef(y.untyped_storage()))
            return (y * y.sin()).tanh()

        return RegionFn(name=name, call=call, **fields)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def chain(recorder: Recorder, **modes: Mode) -> tuple[Tensor, Tensor]:
    x = torch.randn(N, N, requires_grad=True)
    y = x
    with Tape(modes, CPU) as tape:
        for name in ("in_proj", "conv", "prep"):
            y = tape.run(recorder.region(name), Owner(), y)
    return x, y


def test_each_region_is_replayed_once_and_in_the_order_of_need(recorder: Recorder) -> None:
    _, y = chain(recorder, in_proj=Mode.RECOMPUTE, conv=Mode.RECOMPUTE, prep=Mode.RECOMPUTE)
    y.sum().backward()
    assert recorder.calls == ["in_proj", "conv", "prep", "in_proj again", "conv again", "prep again"]


def test_a_kept_region_between_two_replayed_ones_is_a_source(recorder: Recorder) -> None:
    _, y = chain(recorder, in_proj=Mode.RECOMPUTE, prep=Mode.RECOMPUTE)
    y.sum().backward()
    assert recorder.calls[3:] == ["prep again", "in_proj again"], "conv's output is prep's input: it stays, and conv is not replayed"


def test_a_checkpoint_like_mode_stops_the_chain(recorder: Recorder) -> None:
    _, y = chain(recorder, in_proj=Mode.RECOMPUTE_INSIDE, conv=Mode.RECOMPUTE_INSIDE)
    y.sum().backward()
    assert recorder.calls[3:] == ["conv again", "in_proj again"]


def test_a_backward_that_does_not_reach_a_region_does_not_replay_it(recorder: Recorder) -> None:
    first, second, third = (recorder.region(name) for name in ("in_proj", "conv", "prep"))
    x = torch.randn(N, N, requires_grad=True)
    with Tape({"in_proj": Mode.RECOMPUTE, "conv": Mode.RECOMPUTE_INSIDE, "prep": Mode.RECOMPUTE_INSIDE}, CPU) as tape:
        h = tape.run(first, Owner(), x)
        a, b = tape.run(second, Owner(), h.detach().requires_grad_()), tape.run(third, Owner(), x)
    recorder.calls.clear()
    b.sum().backward()
    assert recorder.calls == ["prep again"]
    a.sum().backward()
    assert recorder.calls == ["prep again", "in_proj again", "conv again"], "a detached output is the same memory, so it was let go too"


@pytest.mark.usefixtures("no_collector")
def test_what_a_replay_made_is_gone_after_backward(recorder: Recorder) -> None:
    x, y = chain(recorder, in_proj=Mode.RECOMPUTE, conv=Mode.RECOMPUTE, prep=Mode.RECOMPUTE)
    assert all(reference.expired() for reference in recorder.made)
    y.sum().backward(retain_graph=True)
    assert len(recorder.made) == 6
    assert all(reference.expired() for reference in recorder.made)
    first = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, first * 2)
    assert len(recorder.made) == 9


def test_frozen_regions_take_nothing_and_are_not_replayed(recorder: Recorder) -> None:
    x = torch.randn(N, N)
    with Tape({"in_proj": Mode.RECOMPUTE, "conv": Mode.RECOMPUTE}, CPU) as tape:
        y = tape.run(recorder.region("in_proj"), Owner(), x)
        held = StorageWeakRef(y.untyped_storage())
        z = tape.run(recorder.region("conv"), Owner(), y)
        del y
    assert held.expired(), "inputs are not held for a replay that cannot come"
    assert not z.requires_grad
    assert recorder.calls == ["in_proj", "conv"]


def test_a_module_that_may_draw_makes_the_region_remember_the_random_state() -> None:
    owner = Owner()
    drops = RegionFn(name="act", call=lambda owner, x: owner.dropout(x), modules=("dropout",))
    pure = RegionFn(name="down", call=lambda owner, x: owner.linear(x), modules=("linear",))
    assert drops.can_draw(owner)
    assert not pure.can_draw(owner)
    owner.linear.register_forward_hook(lambda module, args, out: torch.rand_like(out))
    assert pure.can_draw(owner), "a hook may draw"
    asked = RegionFn(name="core_attn", call=lambda owner, x: x, draws=lambda owner: owner.training)
    assert asked.can_draw(owner)
    assert not asked.can_draw(owner.eval())


def test_random_state_goes_back_and_forth() -> None:
    state = RngState(CPU)
    first = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), first)


def test_parameters_and_their_views_are_told_from_activations() -> None:
    linear, conv = nn.Linear(N, N), nn.Conv1d(4, 4, 3, groups=4)
    for tensor in (linear.weight, linear.weight.t(), conv.weight.squeeze(1), linear.weight[:3].t(), linear.bias.view(4, -1)):
        assert is_parameter(tensor)
    with torch.no_grad():
        assert is_parameter(linear.weight.t())
    linear.requires_grad_(False)
    assert is_parameter(linear.weight.t())
    for tensor in (torch.ones(3), linear.weight * 1, linear.weight.bfloat16(), linear.weight.detach().clone(), torch.ones(3, requires_grad=True)):
        assert not is_parameter(tensor)


def test_versions_see_every_parameter_a_region_reads() -> None:
    owner = Owner()
    owner.linear = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    fn = RegionFn(name="in_proj", call=lambda owner, x: owner.linear(x), modules=("linear",))
    before = fn.versions(owner)
    with torch.no_grad():
        owner.linear[1][0].bias.add_(1)
    assert fn.versions(owner) != before


def test_a_module_that_edits_a_buffer_in_its_forward_is_refused() -> None:
    """A replay would edit it again, and compute from a later state: spectral norm, batch norm."""
    for module in (nn.utils.parametrizations.spectral_norm(nn.Linear(N, N)), nn.BatchNorm1d(N)):
        owner = Owner()
        owner.linear = module
        fn = RegionFn(name="gate_up", call=lambda owner, x: owner.linear(x).exp().sin(), modules=("linear",))
        with Tape({"gate_up": Mode.RECOMPUTE}, CPU) as tape:
            out = tape.run(fn, owner, torch.randn(N, N, requires_grad=True))
        with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*'gate_up'"):
            out.sum().backward()
        owner.eval()  # then it edits nothing
        x = torch.randn(N, N, requires_grad=True)
        with Tape({"gate_up": Mode.RECOMPUTE}, CPU) as tape:
            out = tape.run(fn, owner, x)
        out.sum().backward()
        again = x.detach().clone().requires_grad_()
        owner.linear(again).exp().sin().sum().backward()
        assert torch.equal(x.grad, again.grad)


def test_a_parametrized_parameter() -> None:
    """Then the owner has an attribute of that name, and no parameter."""
    owner = Owner()
    owner.scale = nn.Parameter(torch.ones(N))
    nn.utils.parametrize.register_parametrization(owner, "scale", nn.Tanh())
    fn = RegionFn(name="gates", call=lambda owner, x: (x * owner.scale).exp().sin(), params=("scale",))
    x = torch.randn(N, N, requires_grad=True)
    with Tape({"gates": Mode.RECOMPUTE}, CPU) as tape:
        out = tape.run(fn, owner, x)
    out.sum().backward()
    got = [x.grad, owner.parametrizations.scale.original.grad]
    x.grad = owner.parametrizations.scale.original.grad = None
    fn.call(owner, x).sum().backward()
    assert torch.equal(got[0], x.grad)
    assert torch.equal(got[1], owner.parametrizations.scale.original.grad)
    with Tape({"gates": Mode.RECOMPUTE}, CPU) as tape:
        out = tape.run(fn, owner, x)
    with torch.no_grad():
        owner.parametrizations.scale.original.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_hook_that_comes_or_goes_between_forward_and_backward_refuses_the_replay(when: str) -> None:
    model = tiny_qwen3_5()
    projection = model.model.layers[1].linear_attn.in_proj_qkv

    def scaled(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return out * 1.5

    with apply_plan(model, "gdn"):
        if when == "before":
            handle = projection.register_forward_hook(scaled)
            loss = model(**tiny_batch(2, 33)).loss
            handle.remove()
        else:
            loss = model(**tiny_batch(2, 33)).loss
            handle = projection.register_forward_hook(scaled)
        with pytest.raises(RuntimeError, match=r"'in_proj'.*a forward hook of its modules came or went"):
            loss.backward()
        handle.remove()
        handle = projection.register_forward_hook(scaled)  # one that stays is replayed as it ran
        model.zero_grad()
        model(**tiny_batch(2, 33)).loss.backward()
        got = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(**tiny_batch(2, 33)).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(got, model.parameters(), strict=True) if a is not None and p.grad is not None)


def test_the_first_hook_of_a_process_counts_too() -> None:
    """Hook ids start at 0, and sums of ids collide: which hooks there are is compared, not a sum."""
    owner = Owner()
    fn = RegionFn(name="r", call=lambda owner, x: x, modules=("linear",))
    seen = {fn.versions(owner)}
    for hooks in ({0: print}, {3: print, 4: print}, {7: print}, {0: print, 7: print}):
        owner.linear._forward_hooks.clear()
        owner.linear._forward_hooks.update(hooks)
        seen.add(fn.versions(owner))
    assert len(seen) == 5


class Scaled(torch.autograd.Function):
    """Saves its input, an internal tensor and a weight, as a kernel's autograd function does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        inner = x.sigmoid()
        ctx.save_for_backward(x, inner, weight)
        return inner * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        _, inner, weight = ctx.saved_tensors
        return grad * weight * inner * (1 - inner), (grad * inner).sum()


@pytest.mark.parametrize("where", ["right", "not for these arguments", "one tensor less", "another shape", "another result", "dropout in the region"])
def test_a_replay_without_autograd(where: str) -> None:
    """It takes the place of the call where it can, and is held to what the forward did; where the region draws random numbers `call` replays."""
    ran: list[str] = []

    def call(owner: nn.Module, x: Tensor) -> Tensor:
        ran.append("call")
        return Scaled.apply(x, owner.weight)

    def again(owner: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]] | None:
        ran.append("again")
        assert not x.requires_grad
        if where == "not for these arguments":
            return None
        inner = x.sigmoid()
        if where == "one tensor less":
            return inner * owner.weight, [inner, owner.weight]
        result = (inner * owner.weight)[:1] if where == "another result" else inner * owner.weight
        return result, [x, inner[:1] if where == "another shape" else inner, owner.weight]

    def step(**modes: Mode) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        owner = nn.Module()
        owner.weight = nn.Parameter(torch.rand(()))
        owner.dropout = nn.Dropout(0.0)
        x = torch.rand(32, 32, requires_grad=True)
        modules = ("dropout",) if where == "dropout in the region" else ()
        with Tape(modes, torch.device("cpu")) as tape:
            y = tape.run(RegionFn(name="norm_out", call=call, params=("weight",), modules=modules, again=again), owner, x)
            out = tape.run(RegionFn(name="out_proj", call=lambda owner, x: x * x), owner, y)
        out.sum().backward()
        assert x.grad is not None
        assert owner.weight.grad is not None
        return x.grad, owner.weight.grad

    want = step()
    ran.clear()
    if where in ("one tensor less", "another shape", "another result"):
        with pytest.raises(RuntimeError, match="region 'norm_out': the replay did not do what the forward did"):
            step(norm_out=Mode.RECOMPUTE)
        return
    got = step(norm_out=Mode.RECOMPUTE)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert ran == {"right": ["call", "again"], "not for these arguments": ["call", "again", "call"]}.get(where, ["call", "call"])
