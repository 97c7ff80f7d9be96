"""Nothing of a block outlives its backward, and what cannot have one is freed as well: without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.apply import apply_plan
from lightning_gdn.labels import Selection
from lightning_gdn.moving import Moved, Mover
from lightning_gdn.offload.handles import HostCopy
from lightning_gdn.replay import Region, Slot
from lightning_gdn.tape import Carry, Tape, active_tape, in_replay
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.counters import Alive
from tests.parity.steps import moving, nothing_left

Arm = str | Selection

PLANS = (
    "gdn_in_proj_conv",
    "gdn_conv+gdn_norm_out+layernorm",
    "gdn+mlp",
    "full",
    "full:uniform:2",
    moving("offload:gdn_core_attn+offload:mlp+offload:core_attn"),
    moving("offload:gdn_core_attn+offload:gdn_in_proj@0.5", resident_last_blocks=1),
    moving("gdn_conv+gdn_norm_out+mlp+offload:gdn_core_attn+offload:gdn_norm_out+offload:mlp"),
    moving("full:uniform:2+offload:block_input"),
)
pytestmark = pytest.mark.parametrize("plan", PLANS, ids=str)


def living() -> int:
    """Tapes, regions, slots, carries and tickets in existence, found among all objects and not collected."""
    return sum(type(o) in (Tape, Region, Slot, Carry, Mover, Moved, HostCopy) for o in gc.get_objects())


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Leave everything that exists now out of `gc.get_objects()` and of collections, which makes both fast."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_collector(_few_objects: None) -> Iterator[None]:
    gc.collect()
    assert living() == 0
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def model() -> nn.Module:
    return tiny_qwen3_5()


BATCHES = [tiny_batch(2, 33, seed=seed, pad=seed % 3) for seed in range(3)]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True))


def both(model: nn.Module, plan: Arm, train: Callable[[], None]) -> None:
    """Run the same training without and with the plan: equal gradients, nothing left."""
    train()
    want = gradients(model)
    model.zero_grad()
    with apply_plan(model, plan) as applied:
        train()
        assert same(gradients(model), want)
        assert living() == 0
        model.zero_grad()
        train()  # again, without the ledger's instruments
        assert same(gradients(model), want)
        assert living() == 0
        nothing_left(applied)


def test_nothing_lives_after_backward_while_outputs_are_held(model: nn.Module, plan: Arm) -> None:
    with apply_plan(model, plan):
        for use_cache in (False, True):
            out = model(**BATCHES[0], use_cache=use_cache, output_hidden_states=not use_cache)
            assert living() > 0
            out.loss.backward()
            assert living() == 0, f"use_cache={use_cache}"
            del out


def test_fifty_steps_do_not_grow(model: nn.Module, plan: Arm) -> None:
    batch = tiny_batch(1, 5)
    with apply_plan(model, plan):
        counts = []
        for _ in range(50):
            model.zero_grad()
            model(**batch).loss.backward()
            assert living() == 0
            counts.append(len(gc.get_objects()))
        assert counts[-1] <= counts[4] + 20, "objects pile up"


def test_a_forward_without_backward(model: nn.Module, plan: Arm) -> None:
    def train() -> None:
        with Alive() as alive:
            unused = model(**BATCHES[1])
        held = alive.nbytes
        del unused
        assert alive.nbytes < held / 100
        model(**BATCHES[0]).loss.backward()

    both(model, plan, train)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_two_backwards(model: nn.Module, plan: Arm, order: tuple[int, int]) -> None:
    def train() -> None:
        losses = [model(**batch).loss for batch in BATCHES[:2]]
        for index in order:
            losses[index].backward()

    both(model, plan, train)


def test_two_forwards_and_one_backward_of_their_sum(model: nn.Module, plan: Arm) -> None:
    both(model, plan, lambda: (model(**BATCHES[0]).loss * model(**BATCHES[1]).loss).backward())


def test_gradient_accumulation(model: nn.Module, plan: Arm) -> None:
    def train() -> None:
        for batch in BATCHES:
            (model(**batch).loss / 3).backward()

    both(model, plan, train)


def test_retain_graph_twice(model: nn.Module, plan: Arm) -> None:
    def train() -> None:
        loss = model(**BATCHES[0]).loss
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    both(model, plan, train)


def test_a_retained_graph_holds_no_replay(model: nn.Module, plan: Arm) -> None:
    with apply_plan(model, plan):
        model(**BATCHES[0]).loss.backward()
        with Alive() as alive:
            loss = model(**BATCHES[0]).loss
        held = alive.nbytes
        with alive:
            loss.backward(retain_graph=True)
        kept = sum(p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)
        assert alive.nbytes - held <= kept


def test_the_gradient_of_one_weight_and_then_a_full_backward(model: nn.Module, plan: Arm) -> None:
    weight = model.model.layers[1].linear_attn.in_proj_z.weight
    found = []

    def train() -> None:
        loss = model(**BATCHES[0]).loss
        found.append(torch.autograd.grad(loss, weight, retain_graph=True)[0])
        loss.backward()

    both(model, plan, train)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Trip(RuntimeError):
    pass


def trip(*_: object) -> None:
    raise Trip


def fails(model: nn.Module, run: Callable[[], object], *, in_backward: bool = False) -> None:
    """Run something that raises `Trip`; then no tape is open and nothing is left.

    After an exception in a backward PyTorch itself holds on to the graph until the next one, of the untouched model too.
    """
    state = torch.get_rng_state()
    try:
        run()
    except Trip as error:
        error.__traceback__ = None  # the frames of a caught error hold what they held
    else:
        pytest.fail("it did not raise")
    assert active_tape() is None
    assert not in_replay()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert in_backward or living() == 0
    model.zero_grad()


def test_an_exception_in_the_forward(model: nn.Module, plan: Arm) -> None:
    def train() -> None:
        for place in (model.model.layers[1].linear_attn.norm, model.model.layers[2].mlp, model.model.layers[3].self_attn.o_proj):
            handle = place.register_forward_pre_hook(trip)
            fails(model, lambda: model(**BATCHES[1]))
            handle.remove()
        model(**BATCHES[0]).loss.backward()

    both(model, plan, train)


def test_an_exception_in_the_backward(model: nn.Module, plan: Arm) -> None:
    def train() -> None:
        for weight in (model.model.layers[1].linear_attn.in_proj_qkv.weight, model.model.layers[3].mlp.down_proj.weight):
            handle = weight.register_hook(trip)
            fails(model, lambda: model(**BATCHES[1]).loss.backward(), in_backward=True)
            handle.remove()
        model(**BATCHES[0]).loss.backward()

    both(model, plan, train)


def replays_something(plan: Arm) -> None:
    if isinstance(plan, Selection) and not plan.recompute:
        pytest.skip("nothing is replayed under this plan")


def test_an_exception_in_a_replay(model: nn.Module, plan: Arm) -> None:
    """As when a replay runs out of memory; the same graph can then be tried again."""
    replays_something(plan)
    wanted = {"gdn_in_proj_conv": "in_proj_qkv", "gdn+mlp": "in_proj_z"}.get(str(plan), "norm")
    place = model.model.layers[1].linear_attn.get_submodule(wanted)
    model(**BATCHES[0]).loss.backward()
    want = gradients(model)
    model.zero_grad()
    with apply_plan(model, plan):
        broken = True
        handle = place.register_forward_hook(lambda *_: trip() if broken and in_replay() else None)
        fails(model, lambda: model(**BATCHES[1]).loss.backward(), in_backward=True)
        loss = model(**BATCHES[0]).loss
        with pytest.raises(Trip):
            loss.backward(retain_graph=True)
        broken = False
        model.zero_grad()
        loss.backward()
        handle.remove()
        assert same(gradients(model), want)
        assert living() == 0


def test_undo_between_forward_and_backward(model: nn.Module, plan: Arm) -> None:
    model(**BATCHES[0]).loss.backward()
    want = gradients(model)
    model.zero_grad()
    applied = apply_plan(model, plan)
    loss = model(**BATCHES[0]).loss
    applied.undo()
    loss.backward()
    assert same(gradients(model), want)
    assert living() == 0


def test_a_backward_that_needs_few_handles_leaves_no_replay(model: nn.Module, plan: Arm) -> None:
    """`autograd.grad` of one weight asks for some handles only; what the others would have got goes when that backward ends."""
    replays_something(plan)
    with apply_plan(model, plan):
        loss = model(**tiny_batch()).loss
        regions = [obj for obj in gc.get_objects() if type(obj) is Region]
        assert any(region.needed for region in regions)
        weight = model.model.layers[2].mlp.down_proj.weight
        torch.autograd.grad(loss, weight, retain_graph=True)
        assert all(not getattr(region, "outs", {}) and not getattr(region, "saved", {}) for region in regions)
        del regions
        loss.backward()
