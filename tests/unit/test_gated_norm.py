"""The gated norm with a kernel of the test's own in FLA's place: when the launch alone is trusted, and when FLA is called."""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn import OffloadConfig, apply_plan
from lightning_gdn.adapters import gdn_stack as adapter
from lightning_gdn.kernels import gated_norm
from lightning_gdn.models import GDNStack
from lightning_gdn.tape import RegionFn


class Kernel:
    """Counts launches through Triton's dispatch, and those of what it compiled; `wrong` spoils the last bit of one value, `idle` does nothing."""

    arg_names = "x g y w b residual residual_out mean rstd eps T D BT BD NB ACTIVATION IS_RMS_NORM HAS_WEIGHT".split()

    def __init__(self) -> None:
        self.dispatched, self.launches, self.wrong, self.idle = 0, 0, False, False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*tensors: Any, D: int, BT: int, BD: int, NB: int, ACTIVATION: str, IS_RMS_NORM: bool, HAS_WEIGHT: bool, **flags: Any) -> Compiled:
            assert flags == {"num_warps": 4, "STORE_RESIDUAL_OUT": False, "HAS_RESIDUAL": False, "HAS_BIAS": False}
            self.dispatched += 1
            compiled = Compiled(self)
            compiled[(*grid, 1, 1)](*tensors, D, BT, BD, NB, ACTIVATION, IS_RMS_NORM, HAS_WEIGHT)
            self.launches -= 1
            return compiled

        return run


class Compiled:
    """A kernel in one configuration: all arguments, in order."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            x, g, y, w, b, residual, residual_out, mean, rstd, eps, rows, *constants = arguments
            assert constants == [24, 16, 32, 1, "swish", True, True]
            assert grid == (-(-rows // 16), 1, 1)
            assert (b, residual, residual_out, mean) == (None, None, None, None)
            assert rows == len(x)
            self.kernel.launches += 1
            if self.kernel.idle:
                return
            rstd.copy_((x.pow(2).mean(-1) + eps).rsqrt())
            y.copy_(x * rstd[:, None] * w * torch.nn.functional.silu(g))
            if self.kernel.wrong:
                y[0, 0] = torch.nextafter(y[0, 0], y.new_tensor(torch.inf))

        return run


class Tuner:
    def __init__(self) -> None:
        self.fn, self.best_config = Kernel(), SimpleNamespace(kwargs={"BT": 16}, pre_hook=None, all_kwargs=lambda: {"BT": 16, "num_warps": 4})


def formula(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight * torch.nn.functional.silu(gate)


def as_fla(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In the place of `fused.gated_rms_norm`: under autograd by `Called`, which counts as FLA's function does."""
    result: Tensor = Called.apply(x, gate, weight, eps)
    return result


class Called(torch.autograd.Function):
    """The stand-in for FLA's function, under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor = sys.modules["fla.modules.norm.fused_norm_gate"].LayerNormGatedFunction.forward(
            ctx, x, gate, weight, None, "swish", None, eps, False, False, True
        )
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *sys.modules["fla.modules.norm.fused_norm_gate"].LayerNormGatedFunction.backward(ctx, *gradients)[:3], None


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    """In the place of FLA's module: a function that launches the same arithmetic, and counts its calls."""
    tuner, module, arithmetic = Tuner(), ModuleType("fla.modules.norm.fused_norm_gate"), Kernel()

    class Function:
        calls = 0
        gradients = 0

        @staticmethod
        def forward(
            ctx: Any,
            x: Any,
            g: Any,
            weight: Any,
            bias: Any,
            activation: Any,
            residual: Any,
            eps: Any,
            prenorm: Any,
            residual_in_fp32: Any,
            is_rms_norm: Any,
        ) -> Tensor:
            Function.calls += 1
            x, g, y, rstd = x.contiguous(), g.contiguous(), torch.empty_like(x), torch.empty(len(x))
            Compiled(arithmetic)[(-(-len(x) // 16), 1, 1)](
                x, g, y, weight, None, None, None, None, rstd, eps, len(x), 24, 16, 32, 1, activation, is_rms_norm, True
            )
            ctx.save_for_backward(x, g, weight, bias, None, rstd)
            ctx.x_shape_og, ctx.g_shape_og, ctx.x_dtype, ctx.activation, ctx.eps = x.shape, g.shape, x.dtype, activation, eps
            ctx.is_rms_norm, ctx.has_residual, ctx.prenorm = is_rms_norm, residual is not None, prenorm
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            assert (ctx.activation, ctx.is_rms_norm, ctx.has_residual, ctx.prenorm, ctx.x_dtype) == ("swish", True, False, False, dy.dtype)
            assert ctx.x_shape_og == ctx.g_shape_og == dy.shape
            Function.gradients += 1
            x, g, weight, bias, mean, rstd = ctx.saved_tensors
            assert bias is None
            assert mean is None
            torch.testing.assert_close(rstd, (x.pow(2).mean(-1) + ctx.eps).rsqrt().float())
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (x, g, weight)]
                return *torch.autograd.grad(formula(*leaves, ctx.eps), leaves, dy), *[None] * 7

    module.LayerNormGatedFunction, module.layer_norm_gated_fwd_kernel = Function, SimpleNamespace(fn=tuner)  # type: ignore[attr-defined]
    for name in ("fla", "fla.modules", "fla.modules.norm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gated_norm, "_launches", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gated_norm.fused, "gated_rms_norm", as_fla)
    gated_norm._function.cache_clear()
    tuner.function = Function  # type: ignore[attr-defined]
    yield tuner
    gated_norm._function.cache_clear()


def tensor(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> Tensor:
    """Random numbers: contiguous and aligned, or one of them not."""
    if how == "strided":
        return torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]
    flat = torch.randn(math.prod(shape) + 1, dtype=dtype)
    return (flat[1:] if how == "unaligned" else flat[:-1]).view(shape)


def inputs(rows: int, odd: str, how: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, nn.Parameter]:
    """x, gate and weight; `odd` names the one that is not plain."""
    shapes = {"x": (rows, 24), "gate": (rows, 24), "weight": (24,)}
    x, gate, weight = (tensor(shape, dtype, how if name == odd else "") for name, shape in shapes.items())
    return x, gate, nn.Parameter(weight)


def again(rows: int = 40, odd: str = "", how: str = "strided", dtype: torch.dtype = torch.float32, eps: float = 1e-6) -> None:
    """One replay, checked against the formula."""
    x, gate, weight = inputs(rows, odd, how, dtype)
    found = gated_norm.gated_rms_norm_again(x, gate, weight, eps)
    assert found is not None
    y, saved = found
    torch.testing.assert_close(y, formula(x, gate, weight, eps).detach())
    assert [tuple(tensor.shape) for tensor in saved] == [(rows, 24), (rows, 24), (24,), (rows,)]
    assert saved[2] is weight


def forward(rows: int = 40, odd: str = "", how: str = "strided", dtype: torch.dtype = torch.float32, eps: float = 1e-6) -> None:
    """One call under autograd: result, gradients and what is saved are those of FLA's function."""
    leaves = inputs(rows, odd, how, dtype)
    found: list[list[Tensor]] = []
    counts = as_fla_counts()
    for function in (as_fla, gated_norm.gated_rms_norm):
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, saved=saved: (saved.append(tensor), tensor)[1], lambda tensor: tensor):  # type: ignore[misc]
            y = function(*(leaf.requires_grad_() for leaf in leaves), eps)
        assert saved[2] is leaves[2]
        found.append([y, *torch.autograd.grad(y.sin().sum(), leaves), *saved])
        if function is as_fla:
            as_fla_counts(counts)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def as_fla_counts(back: int | None = None) -> int:
    """Calls of the stand-in; `back` sets them."""
    function = sys.modules["fla.modules.norm.fused_norm_gate"].LayerNormGatedFunction
    if back is not None:
        function.calls = back
    calls: int = function.calls
    return calls


CALLS = pytest.mark.parametrize("call", [again, forward])


@CALLS
def test_the_first_compares_and_the_others_launch(tuner: Any, call: Callable[..., None]) -> None:
    call()
    assert (tuner.function.calls, tuner.fn.dispatched, tuner.fn.launches) == (1, 1, 2), "compared, and launched"
    call()
    call(rows=8)
    assert (tuner.function.calls, tuner.fn.dispatched, tuner.fn.launches) == (1, 1, 4)
    call(dtype=torch.float64)
    call(eps=1e-2)
    assert tuner.function.calls == 3, "other kinds"


@pytest.mark.parametrize("trained", ["x", "gate", "weight", "x gate", "none"])
def test_what_needs_no_gradient_gets_none(tuner: Any, trained: str) -> None:
    """A frozen norm, or frozen layers before it."""
    x, gate, weight = inputs(40, "", "", torch.float32)
    weight.requires_grad_("weight" in trained)
    leaves = [tensor.requires_grad_() for tensor, name in ((x, "x"), (gate, "gate")) if name in trained] + [weight] * weight.requires_grad
    results = []
    for function in (as_fla, gated_norm.gated_rms_norm, gated_norm.gated_rms_norm):
        y = function(x, gate, weight, 1e-6)
        assert y.requires_grad == bool(leaves)
        results.append([y.detach(), *(torch.autograd.grad(y.sin().sum(), leaves) if leaves else ())])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    assert tuner.fn.launches == 3, "compared, and launched twice"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_edit_of_an_input_after_the_forward_raises(tuner: Any, which: int) -> None:
    for _ in range(2):
        leaves = [tensor.requires_grad_() for tensor in inputs(40, "", "", torch.float32)]
        y = gated_norm.gated_rms_norm(*leaves, 1e-6)
        with torch.no_grad():
            leaves[which].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    assert tuner.fn.launches == 3


@pytest.mark.parametrize("backwards", [0, 2])
def test_a_graph_is_freed_with_its_output_and_serves_twice_while_kept(tuner: Any, backwards: int) -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs(40, "", "", torch.float32)]
    for _ in range(2):
        held = leaves[0] * 1
        reference = weakref.ref(held)
        y = gated_norm.gated_rms_norm(held, leaves[1], leaves[2], 1e-6)
        found = [torch.autograd.grad(y.sin().sum(), leaves, retain_graph=True) for _ in range(backwards)]
        assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))
        del held, y
        assert reference() is None
    assert tuner.fn.launches == 3


def test_forward_and_replay_know_the_same_kinds(tuner: Any) -> None:
    forward()
    again()
    again(eps=1e-2)
    forward(eps=1e-2)
    assert tuner.function.calls == 2


@CALLS
@pytest.mark.parametrize("how", ["strided", "unaligned"])
@pytest.mark.parametrize("odd", ["x", "gate", "weight"])
def test_tensors_that_another_kernel_would_take_go_to_fla(tuner: Any, odd: str, how: str, call: Callable[..., None]) -> None:
    for _ in range(2):
        call(odd=odd, how=how)
    assert (tuner.function.calls, tuner.fn.launches) == (2, 0), "not compared with them either"
    call()
    call(odd=odd, how=how)
    assert (tuner.function.calls, tuner.fn.launches) == (4, 2)


@CALLS
@pytest.mark.parametrize("fault", ["wrong", "idle"])
def test_a_launch_that_differs_is_never_trusted(tuner: Any, fault: str, call: Callable[..., None]) -> None:
    setattr(tuner.fn, fault, True)
    call()
    setattr(tuner.fn, fault, False)
    call()
    assert (tuner.function.calls, tuner.fn.launches) == (3, 1), "the comparison, and every call"


class Raising:
    """A kernel whose launch raises."""

    def __init__(self, error: Exception) -> None:
        self.error, self.arg_names = error, Kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise self.error


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "another device is current": lambda tuner, patch: patch.setattr(torch.cuda, "current_device", lambda: 3),
    "a graph is captured": lambda tuner, patch: patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
    "no configuration": lambda tuner, patch: delattr(tuner, "best_config"),
    "a hook before the kernel": lambda tuner, patch: setattr(tuner.best_config, "pre_hook", print),
    "no rows per program": lambda tuner, patch: tuner.best_config.kwargs.clear(),
    "no memory to compare in": lambda tuner, patch: setattr(tuner, "fn", Raising(torch.OutOfMemoryError("planted"))),
    "another argument": lambda tuner, patch: patch.setattr(Kernel, "arg_names", ["x", "extra", *Kernel.arg_names[1:]]),
    "another constant": lambda tuner, patch: patch.setattr(Kernel, "arg_names", [*Kernel.arg_names, "EXTRA"]),
    "no compiled kernel": lambda tuner, patch: patch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *args, **options: None),
}


@CALLS
@pytest.mark.parametrize("change", CHANGES)
def test_where_anything_is_not_as_known_fla_is_called(tuner: Any, change: str, monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]) -> None:
    CHANGES[change](tuner, monkeypatch)
    call()
    call()
    assert tuner.function.calls in (2, 3), "every call, and the comparison if it came to that"
    call()
    assert tuner.function.calls in (3, 4), "which is not made again"


LEFT: dict[str, Callable[[Any], None]] = {
    "another attribute": lambda ctx: setattr(ctx, "chunk", 3),
    "another value": lambda ctx: setattr(ctx, "activation", "silu"),
    "another tensor saved": lambda ctx: ctx.save_for_backward(*ctx.saved, torch.zeros(1)),
    "another place": lambda ctx: ctx.save_for_backward(*ctx.saved[:3], *ctx.saved[5:], None, None),
    "another input saved": lambda ctx: ctx.save_for_backward(ctx.saved[0] + 1, *ctx.saved[1:]),
}


@pytest.mark.parametrize("change", LEFT)
def test_an_fla_whose_backward_needs_something_else_is_called(tuner: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version may change what it leaves for its backward: the forward must not leave what this module knows then."""
    called = gated_norm._called

    def other(*args: Any) -> Any:
        y, context = called(*args)
        LEFT[change](context)
        return y, context

    monkeypatch.setattr(gated_norm, "_called", other)
    for _ in range(3):
        forward()
    assert (tuner.function.calls, list(gated_norm._launches.values())) == (4, [None])


def test_a_weight_that_is_made_in_the_call_or_another_fla(tuner: Any) -> None:
    x = torch.randn(4, 24)
    assert gated_norm.gated_rms_norm_again(x, x, torch.ones(24), 1e-6) is None
    tuner.function.forward = staticmethod(lambda ctx, x, weight: x)
    gated_norm._function.cache_clear()
    assert gated_norm.gated_rms_norm_again(x, x, nn.Parameter(torch.ones(24)), 1e-6) is None


def test_a_function_that_asks_its_context_for_more_is_replayed_by_the_call(tuner: Any) -> None:
    forward, x = tuner.function.forward, torch.randn(4, 24)

    def asks(
        ctx: Any,
        x: Any,
        g: Any,
        weight: Any,
        bias: Any,
        activation: Any,
        residual: Any,
        eps: Any,
        prenorm: Any,
        residual_in_fp32: Any,
        is_rms_norm: Any,
    ) -> Tensor:
        y: Tensor = forward(ctx, x, g, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, is_rms_norm)
        ctx.mark_non_differentiable(y)
        return y

    tuner.function.forward = staticmethod(asks)
    for _ in range(2):
        assert gated_norm.gated_rms_norm_again(x, x, nn.Parameter(torch.ones(24)), 1e-6) is None
    assert tuner.fn.launches == 0


LAUNCHED_PLANS: dict[str, dict[str, Any]] = {
    "gdn_norm_out": {"recompute": ["gdn_norm_out"]},
    "gdn": {"recompute": ["gdn"]},
    "full": {"recompute": ["full"]},
    "offloaded": {"recompute": [], "offload": OffloadConfig(labels=("gdn_norm_out",), min_bytes=0, resident_last_blocks=0)},
    "offloaded and recomputed": {"recompute": ["gdn_norm_out"], "offload": OffloadConfig(labels=("gdn_core_attn",), min_bytes=0)},
}


@pytest.mark.parametrize("plan", LAUNCHED_PLANS)
def test_gradients_under_a_plan_are_those_of_fla(tuner: Any, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The region in a block: launched in the forward and in the replay, with FLA's function in the reference."""

    def norm(run: Callable[..., Any], mixer: Any, o: Tensor, z: Tensor) -> Any:
        return run(o.reshape(-1, 24), z.reshape(-1, 24), mixer.norm_weight, mixer.eps)

    def again(mixer: Any, o: Tensor, z: Tensor) -> Any:
        y, saved = norm(gated_norm.gated_rms_norm_again, mixer, o, z)
        return y.reshape(z.shape), saved

    def replaced(run: Callable[..., Any], **more: Any) -> RegionFn:
        return dataclasses.replace(adapter._NORM_OUT, call=lambda mixer, o, z: norm(run, mixer, o, z).reshape(z.shape), **more)

    torch.manual_seed(0)
    stack = GDNStack(num_layers=2, hidden_size=16, num_k_heads=2, num_v_heads=2, head_k_dim=8, head_v_dim=24)
    x = torch.randn(1, 70, 16)

    def gradients() -> list[Tensor]:
        stack.zero_grad()
        out = stack(x.clone().requires_grad_())
        out.sin().sum().backward()
        return [out.detach(), *(parameter.grad.clone() for parameter in stack.parameters() if parameter.grad is not None)]

    with monkeypatch.context() as patch, apply_plan(stack, ["layernorm"]):
        patch.setattr(adapter, "_NORM_OUT", replaced(as_fla, again=None))
        want = gradients()
    assert tuner.function.calls == 2
    monkeypatch.setattr(adapter, "_NORM_OUT", replaced(gated_norm.gated_rms_norm, again=again))
    asked = dict(LAUNCHED_PLANS[plan])
    with apply_plan(stack, asked.pop("recompute"), **asked):
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(want, gradients(), strict=True))
    assert tuner.function.calls == 3, "one comparison"
    replays = 0 if plan == "offloaded" else 2
    assert tuner.fn.launches == 1 + 3 * (2 + replays)
