"""`gated_rms_norm_again` with a kernel of its own in FLA's place: when the launch alone is trusted, and when FLA is called."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.kernels import gated_norm


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


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuner]:
    """In the place of FLA's module: a function that launches the same arithmetic, and counts its calls."""
    tuner, module, arithmetic = Tuner(), ModuleType("fla.modules.norm.fused_norm_gate"), Kernel()

    class Function:
        calls = 0

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
            return y

    module.LayerNormGatedFunction, module.layer_norm_gated_fwd_kernel = Function, SimpleNamespace(fn=tuner)  # type: ignore[attr-defined]
    for name in ("fla", "fla.modules", "fla.modules.norm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(gated_norm, "_launches", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
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


def again(rows: int = 40, odd: str = "", how: str = "strided", dtype: torch.dtype = torch.float32, eps: float = 1e-6) -> None:
    """One replay, checked against the formula; `odd` names the tensor that is not plain."""
    shapes = {"x": (rows, 24), "gate": (rows, 24), "weight": (24,)}
    x, gate, weight = (tensor(shape, dtype, how if name == odd else "") for name, shape in shapes.items())
    weight = nn.Parameter(weight)
    found = gated_norm.gated_rms_norm_again(x, gate, weight, eps)
    assert found is not None
    y, saved = found
    rstd = (x.pow(2).mean(-1) + eps).rsqrt()
    torch.testing.assert_close(y, (x * rstd[:, None] * weight * torch.nn.functional.silu(gate)).detach())
    assert [tuple(tensor.shape) for tensor in saved] == [(rows, 24), (rows, 24), (24,), (rows,)]
    assert saved[2] is weight


def test_the_first_compares_and_the_others_launch(tuner: Any) -> None:
    again()
    assert (tuner.function.calls, tuner.fn.dispatched, tuner.fn.launches) == (1, 1, 1)
    again()
    again(rows=8)
    assert (tuner.function.calls, tuner.fn.dispatched, tuner.fn.launches) == (1, 1, 3)
    again(dtype=torch.float64)
    again(eps=1e-2)
    assert tuner.function.calls == 3, "other kinds"


@pytest.mark.parametrize("how", ["strided", "unaligned"])
@pytest.mark.parametrize("odd", ["x", "gate", "weight"])
def test_tensors_that_another_kernel_would_take_go_to_fla(tuner: Any, odd: str, how: str) -> None:
    for _ in range(2):
        again(odd=odd, how=how)
    assert (tuner.function.calls, tuner.fn.launches) == (2, 0), "not compared with them either"
    again()
    again(odd=odd, how=how)
    assert (tuner.function.calls, tuner.fn.launches) == (4, 1)


@pytest.mark.parametrize("fault", ["wrong", "idle"])
def test_a_launch_that_differs_is_never_trusted(tuner: Any, fault: str) -> None:
    setattr(tuner.fn, fault, True)
    again()
    setattr(tuner.fn, fault, False)
    again()
    assert (tuner.function.calls, tuner.fn.launches) == (2, 1)


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


@pytest.mark.parametrize("change", CHANGES)
def test_where_anything_is_not_as_known_fla_is_called(tuner: Any, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CHANGES[change](tuner, monkeypatch)
    again()
    again()
    assert tuner.function.calls == 2


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
