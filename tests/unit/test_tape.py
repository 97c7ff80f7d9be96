"""The tape by itself, on regions small enough to see through: what goes, what stays, what comes back, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from lightning_gdn.regions import Mode
from lightning_gdn.tape import MIN_INTERNAL_BYTES, RegionFn, Tape, in_replay

CPU = torch.device("cpu")
N = 32
"""N x N floats are 4096 bytes: above the threshold."""


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(N, N)
        self.second = nn.Linear(N, N)
        self.dropout = nn.Dropout(0.5)


def region(call: Callable[..., Any], name: str = "conv", **fields: Any) -> RegionFn:
    return RegionFn(name=name, call=call, **fields)


def gradients(run: Callable[[Tensor, Owner], Tensor], autocast: bool = False, **tape: Mode) -> tuple[list[Tensor], Tensor]:
    """Gradients of the input and of every parameter after `run(x, owner)`; under a tape with these modes if any are given."""
    torch.manual_seed(0)
    owner = Owner()
    x = torch.randn(N, N, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
        if tape:
            with Tape(tape, CPU) as open_tape:
                out = run_with(open_tape, run, x, owner)
        else:
            out = run_with(None, run, x, owner)
    out.float().square().sum().backward()
    return [x.grad, *(p.grad for p in owner.parameters() if p.grad is not None)], torch.get_rng_state()


def run_with(tape: Tape | None, run: Callable[..., Tensor], x: Tensor, owner: Owner) -> Tensor:
    def call(fn: RegionFn, *args: Any) -> Any:
        return fn.call(owner, *args) if tape is None else tape.run(fn, owner, *args)

    return run(x, call)


def equal(run: Callable[..., Tensor], autocast: bool = False, **modes: Mode) -> None:
    want, want_rng = gradients(run, autocast)
    got, got_rng = gradients(run, autocast, **modes)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(got_rng, want_rng), "the random stream is not where an unreplayed step leaves it"


LINEAR = region(lambda owner, x: owner.first(x), "in_proj", modules=("first",))
SECOND = region(lambda owner, x: owner.second(x), "out_proj", modules=("second",))
GELU = region(lambda owner, x: F.gelu(x) * x.exp().sigmoid())
EVERY = (Mode.RECOMPUTE, Mode.RECOMPUTE_INSIDE)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("first", EVERY)
@pytest.mark.parametrize("second", [Mode.KEEP, *EVERY])
@pytest.mark.parametrize("third", [Mode.KEEP, *EVERY])
def test_chains_of_modes(first: Mode, second: Mode, third: Mode, autocast: bool) -> None:
    equal(lambda x, call: call(SECOND, call(GELU, call(LINEAR, x))), autocast, in_proj=first, conv=second, out_proj=third)


def test_a_square_transpose_is_not_the_tensor_itself() -> None:
    """Address, shape and dtype of both are the same; only the strides differ."""
    both = region(lambda owner, x: (x @ x.t()) * x.t())
    equal(lambda x, call: call(both, call(GELU, x).t()) + call(both, call(LINEAR, x)), conv=Mode.RECOMPUTE, in_proj=Mode.RECOMPUTE)


def test_views_of_outputs_with_offsets_and_strides() -> None:
    def slices(owner: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return y, y[3:7], y.t()[:, 5:], y.unfold(0, 4, 2), y.expand(2, N, N)

    def use(owner: nn.Module, *parts: Tensor) -> Tensor:
        return sum((part * part).sum() * part.sum() for part in parts).reshape(1, 1).expand(N, N) / 1e9

    cut, later = region(slices, "prep"), region(use, "gates")
    for mode in (Mode.KEEP, *EVERY):
        equal(lambda x, call: call(later, *call(cut, x)), prep=Mode.RECOMPUTE, gates=mode)


def test_addresses_are_used_again_inside_a_block() -> None:
    """An output that nobody saves dies at once, and the next tensor gets its address (DESIGN: 18 wrong results in 96 runs)."""
    shift = region(lambda owner, x: x + 1, "prep")
    seen: set[int] = set()
    again = []

    def many(x: Tensor, call: Callable[..., Any]) -> Tensor:
        for _ in range(30):
            y = call(shift, x)
            again.append(y.data_ptr() in seen)
            seen.add(y.data_ptr())
            x = y * 2
            del y
            x = x.sin() * 1.5
        return x

    equal(many, prep=Mode.RECOMPUTE)
    assert any(again), "no address was reused: the test shows nothing"


def test_an_output_edited_in_place_before_it_is_saved() -> None:
    """A replay would bring back the unedited values, so the edited tensor stays."""

    def edit(x: Tensor, call: Callable[..., Any]) -> Tensor:
        y = call(LINEAR, x)
        y.mul_(2)
        return call(GELU, y)

    for mode in (Mode.KEEP, *EVERY):
        equal(edit, in_proj=Mode.RECOMPUTE, conv=mode)


def test_a_region_that_returns_its_input_or_a_view_of_it() -> None:
    same = region(lambda owner, x: (x, x.view(N // 2, -1), x * 2), "prep")

    def use(x: Tensor, call: Callable[..., Any]) -> Tensor:
        a, b, c = call(same, call(GELU, x))
        return (a.exp() * c.sin()) + (b * b).view(N, N)

    equal(use, prep=Mode.RECOMPUTE)
    equal(use, prep=Mode.RECOMPUTE, conv=Mode.RECOMPUTE)


def test_a_constant_input_and_an_integer_input() -> None:
    pick = region(lambda owner, x, index, scale: x.gather(1, index) * scale * x)

    def use(x: Tensor, call: Callable[..., Any]) -> Tensor:
        index = torch.arange(N).flip(0).repeat(N, 1)
        return call(pick, call(LINEAR, x), index, 3.0)

    equal(use, conv=Mode.RECOMPUTE, in_proj=Mode.RECOMPUTE)


def test_dropout_draws_the_same_numbers_and_leaves_the_stream_alone() -> None:
    drop = region(lambda owner, x: owner.dropout(owner.first(x)).exp(), modules=("dropout", "first"))

    def use(x: Tensor, call: Callable[..., Any]) -> Tensor:
        return call(drop, F.dropout(call(drop, x), 0.1))

    for mode in EVERY:
        equal(use, conv=mode)


def test_a_nested_region_runs_inline_in_one_that_is_recomputed() -> None:
    """Getting this wrong stays bit-equal and silently keeps memory: count what stays."""

    def alive(modes: dict[str, Mode]) -> int:
        made: list[StorageWeakRef] = []

        def inner(owner: nn.Module, x: Tensor) -> Tensor:
            y = x.exp()
            made.append(StorageWeakRef(y.untyped_storage()))
            return y * y.sin()

        with Tape(modes, CPU) as tape:
            outer = region(lambda owner, x: tape.run(region(inner, "moe_act"), owner, x * 2).cos(), "experts")
            out = tape.run(outer, Owner(), torch.ones(N, N, requires_grad=True))
        assert out.requires_grad
        return sum(not reference.expired() for reference in made)

    gc.disable()
    try:
        assert alive({"experts": Mode.RECOMPUTE}) == 0
        assert alive({"experts": Mode.RECOMPUTE, "moe_act": Mode.RECOMPUTE}) == 0
        assert alive({"moe_act": Mode.RECOMPUTE}) == 0, "the inner mode applies where the outer region is kept"
        assert alive({"conv": Mode.RECOMPUTE}) == 1
    finally:
        gc.enable()


@pytest.mark.parametrize(("numbers", "stays"), [(MIN_INTERNAL_BYTES // 4 - 1, True), (MIN_INTERNAL_BYTES // 4, False)])
def test_small_internal_tensors_stay_and_small_outputs_go(numbers: int, stays: bool) -> None:
    made: list[StorageWeakRef] = []

    def small(owner: nn.Module, x: Tensor) -> Tensor:
        y = x.exp()
        out = (y * 2).sin()
        made.extend(StorageWeakRef(t.untyped_storage()) for t in (y, out))
        return out

    gc.disable()
    try:
        x = torch.ones(numbers, requires_grad=True)
        with Tape({"conv": Mode.RECOMPUTE}, CPU) as tape:
            out = tape.run(region(lambda owner, x: x * x, "prep"), Owner(), tape.run(region(small), Owner(), x))
        assert made[0].expired() != stays
        assert made[1].expired(), "a saved output goes whatever its size"
        out.sum().backward()
        expected = torch.ones(numbers, requires_grad=True)
        (expected.exp() * 2).sin().square().sum().backward()
        assert torch.equal(x.grad, expected.grad)
    finally:
        gc.enable()


# In-place edits between forward and backward: PyTorch's usual error, which saved-tensor hooks switch off.


def open_step(**modes: Mode) -> tuple[Owner, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    owner, x = Owner(), torch.randn(N, N, requires_grad=True)
    with Tape(modes, CPU) as tape:
        hidden = x * 1
        middle = tape.run(GELU, owner, tape.run(LINEAR, owner, hidden))
        out = tape.run(SECOND, owner, middle)
    return owner, hidden, middle, out


@pytest.mark.parametrize("regions", [(), ("in_proj",), ("in_proj", "conv"), ("out_proj",)])
def test_in_place_edits_raise_pytorchs_error(regions: tuple[str, ...]) -> None:
    modes = dict.fromkeys(regions, Mode.RECOMPUTE)
    usual = "modified by an inplace operation"
    owner, hidden, _, out = open_step(**modes)
    with torch.no_grad():
        hidden.add_(1)  # a region's input, which the linear saves
    with pytest.raises(RuntimeError, match=usual):
        out.sum().backward()
    owner, _, _, out = open_step(**modes)
    with torch.no_grad():
        owner.second.weight.add_(1)
    with pytest.raises(RuntimeError, match=usual):
        out.sum().backward()
    owner, _, _, out = open_step(**modes)
    out.sum().backward()  # and without an edit there is none


def edits_an_internal(owner: Any, x: Tensor) -> Tensor:
    y = x.sigmoid()
    z = y * 3
    y.mul_(2)
    return z


def edits_its_output(owner: Any, x: Tensor) -> Tensor:
    return x.exp().mul_(2).add_(1)


def edits_a_view_of_its_output(owner: Any, x: Tensor) -> Tensor:
    y = x.exp()
    y[0].zero_()
    return y


def edits_before_it_saves(owner: Any, x: Tensor) -> Tensor:
    return (x * 2).mul_(3).sigmoid()


@pytest.mark.parametrize("mode", [None, Mode.KEEP, Mode.RECOMPUTE, Mode.RECOMPUTE_INSIDE])
@pytest.mark.parametrize("call", [edits_an_internal, edits_its_output, edits_a_view_of_its_output, edits_before_it_saves])
def test_a_region_that_edits_what_it_saved_is_refused_as_without_a_tape(call: Callable[..., Tensor], mode: Mode | None) -> None:
    """A replay makes the same edit, after the same save: what it saved is not what the forward computed with."""
    hidden = torch.randn(N, N, requires_grad=True)
    with Tape({} if mode is None else {"conv": mode}, CPU) as tape:
        out = call(None, hidden * 1) if mode is None else tape.run(region(call), Owner(), hidden * 1)
    if call is edits_before_it_saves:
        out.sum().backward()
        want = torch.autograd.grad(call(None, hidden * 1).sum(), hidden)[0]
        assert hidden.grad is not None
        assert torch.equal(hidden.grad, want)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_kept_tensor_edited_in_place_raises() -> None:
    _, _, middle, out = open_step(in_proj=Mode.RECOMPUTE)
    with torch.no_grad():
        middle.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_parameter_of_a_replayed_region_edited_in_place_raises_even_if_nothing_saved_it() -> None:
    """The replay would use the new bias: PyTorch itself would not notice, because it does not save a bias."""
    owner, _, _, out = open_step(in_proj=Mode.RECOMPUTE)
    with torch.no_grad():
        owner.first.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"(?s)modified by an inplace operation.*in_proj"):
        out.sum().backward()


@pytest.mark.parametrize(
    "swap",
    [
        lambda owner: setattr(owner, "first", nn.Sequential(nn.Linear(N, N), nn.GELU())),
        lambda owner: setattr(owner, "first", nn.Linear(N, N).requires_grad_(False)),
        lambda owner: setattr(owner, "first", nn.Identity()),
    ],
    ids=["more", "frozen", "fewer"],
)
def test_a_replay_that_does_something_else_raises_with_the_regions_name(swap: Callable[[nn.Module], None]) -> None:
    fn = region(lambda owner, x: owner.first(x).exp().sin(), "in_proj", modules=("first",))
    owner, x = Owner(), torch.randn(N, N, requires_grad=True)
    with Tape({"in_proj": Mode.RECOMPUTE}, CPU) as tape:
        out = tape.run(fn, owner, x)
    swap(owner)
    with pytest.raises(RuntimeError, match="'in_proj'"):
        out.sum().backward()
    assert not in_replay()


def test_switching_dropout_off_between_forward_and_backward_raises() -> None:
    fn = region(lambda owner, x: owner.dropout(x).exp(), "in_proj", modules=("dropout",))
    owner = Owner()
    with Tape({"in_proj": Mode.RECOMPUTE}, CPU) as tape:
        out = tape.run(fn, owner, torch.randn(N, N, requires_grad=True))
    owner.eval()
    with pytest.raises(RuntimeError, match=r"'in_proj'.*train and eval"):
        out.sum().backward()


def test_autocast_is_restored_in_a_backward_under_another_autocast() -> None:
    def grads(modes: dict[str, Mode], inside: bool, outside: bool) -> Tensor:
        torch.manual_seed(0)
        owner, x = Owner(), torch.randn(N, N, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside), Tape(modes, CPU) as tape:
            out = tape.run(GELU, owner, tape.run(LINEAR, owner, x))
        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            out.float().sum().backward()
            assert torch.is_autocast_enabled("cpu") == outside
        return x.grad

    for inside in (True, False):
        for outside in (True, False):
            modes = {"in_proj": Mode.RECOMPUTE, "conv": Mode.RECOMPUTE}
            assert torch.equal(grads(modes, inside, outside), grads({}, inside, outside)), (inside, outside)


def test_saved_tensors_read_from_python() -> None:
    """A debugger or a graph printer asks for `grad_fn._saved_self` outside any backward."""
    x = torch.randn(N, N, requires_grad=True)
    with Tape({"conv": Mode.RECOMPUTE}, CPU) as tape:
        out = tape.run(region(lambda owner, x: x.exp().sin()), Owner(), x)
    for _ in range(2):
        assert torch.equal(out.grad_fn._saved_self, x.exp())
    out.sum().backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())


def test_a_backward_in_another_thread() -> None:
    """As on CUDA, where backward runs in a thread of its own."""
    import threading

    want, _ = gradients(lambda x, call: call(SECOND, call(GELU, call(LINEAR, x))))
    torch.manual_seed(0)
    owner = Owner()
    x = torch.randn(N, N, requires_grad=True)
    with Tape({"in_proj": Mode.RECOMPUTE, "conv": Mode.RECOMPUTE, "out_proj": Mode.RECOMPUTE}, CPU) as tape:
        out = tape.run(SECOND, owner, tape.run(GELU, owner, tape.run(LINEAR, owner, x)))
    thread = threading.Thread(target=lambda: out.square().sum().backward())
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip([x.grad, *(p.grad for p in owner.parameters() if p.grad is not None)], want, strict=True))


def test_a_checkpoint_inside_a_region() -> None:
    """A user's module inside a region may checkpoint itself: its hooks are the inner ones there."""
    from torch.utils.checkpoint import checkpoint

    fn = region(lambda owner, x: checkpoint(lambda y: owner.first(y).exp().sin(), x, use_reentrant=False).sin(), modules=("first",))
    for mode in EVERY:
        equal(lambda x, call: call(GELU_IN_PROJ, call(fn, x)), conv=mode, in_proj=Mode.RECOMPUTE)


GELU_IN_PROJ = region(lambda owner, x: F.gelu(x) * x, "in_proj")
