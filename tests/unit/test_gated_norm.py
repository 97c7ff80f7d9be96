"""`gated_rms_norm_again` with a kernel of its own in FLA's place: when the launch alone is trusted, and when FLA is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.kernels import gated_norm


class Kernel:
    """Counts launches; `wrong` spoils the last bit of one value."""

    def __init__(self) -> None:
        self.launches, self.wrong = 0, False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*, x: Tensor, g: Tensor, y: Tensor, w: Tensor, rstd: Tensor, eps: float, T: int, BT: int, **flags: Any) -> None:
            assert grid == (-(-T // BT),)
            assert flags.pop("num_warps") == 4
            assert flags.pop("ACTIVATION") == "swish"
            assert not any(flags.pop(name) for name in ("STORE_RESIDUAL_OUT", "HAS_RESIDUAL", "HAS_BIAS", "b", "residual", "residual_out", "mean"))
            assert flags.pop("HAS_WEIGHT")
            assert flags.pop("IS_RMS_NORM")
            assert (flags.pop("D"), flags.pop("BD"), flags.pop("NB")) == (24, 32, 1)
            assert not flags
            self.launches += 1
            rstd.copy_((x.pow(2).mean(-1) + eps).rsqrt())
            y.copy_(x * rstd[:, None] * w * torch.nn.functional.silu(g))
            if self.wrong:
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
            flags = dict.fromkeys(("STORE_RESIDUAL_OUT", "HAS_RESIDUAL", "HAS_BIAS", "b", "residual", "residual_out", "mean"), None)
            known = {"D": 24, "BD": 32, "NB": 1, "HAS_WEIGHT": True, "IS_RMS_NORM": is_rms_norm, "ACTIVATION": activation}
            arithmetic[(-(-len(x) // 16),)](x=x, g=g, y=y, w=weight, rstd=rstd, eps=eps, T=len(x), BT=16, num_warps=4, **known, **flags)
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


def again(rows: int = 40, strided: str = "", dtype: torch.dtype = torch.float32, eps: float = 1e-6) -> None:
    """One replay, checked against the formula; `strided` names what is not contiguous."""
    x, gate = (torch.randn(rows, 48, dtype=dtype)[:, :24] for _ in range(2))
    x, gate = (value if strided == name else value.contiguous() for value, name in ((x, "x"), (gate, "gate")))
    weight = nn.Parameter(torch.randn(48, dtype=dtype)[::2] if strided == "weight" else torch.randn(24, dtype=dtype))
    found = gated_norm.gated_rms_norm_again(x, gate, weight, eps)
    assert found is not None
    y, saved = found
    rstd = (x.pow(2).mean(-1) + eps).rsqrt()
    torch.testing.assert_close(y, (x * rstd[:, None] * weight * torch.nn.functional.silu(gate)).detach())
    assert [tuple(tensor.shape) for tensor in saved] == [(rows, 24), (rows, 24), (24,), (rows,)]
    assert saved[2] is weight


def test_the_first_compares_and_the_others_launch(tuner: Any) -> None:
    again()
    assert (tuner.function.calls, tuner.fn.launches) == (1, 1)
    again()
    again(rows=8, eps=1e-2)
    assert (tuner.function.calls, tuner.fn.launches) == (1, 3)
    for count, name in enumerate(("x", "gate", "weight"), start=2):
        again(strided=name)
        assert (tuner.function.calls, tuner.fn.launches) == (count, 3), "FLA makes a strided input contiguous, and saves that"
    again(dtype=torch.float64)
    assert (tuner.function.calls, tuner.fn.launches) == (5, 4), "another dtype is another kind"


def test_a_launch_that_differs_in_one_bit_is_never_trusted(tuner: Any) -> None:
    tuner.fn.wrong = True
    again()
    tuner.fn.wrong = False
    again()
    assert (tuner.function.calls, tuner.fn.launches) == (2, 1)


class Raising:
    """A kernel whose launch raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise self.error


CHANGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "another device is current": lambda tuner, patch: patch.setattr(torch.cuda, "current_device", lambda: 3),
    "a graph is captured": lambda tuner, patch: patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True),
    "no configuration": lambda tuner, patch: delattr(tuner, "best_config"),
    "a hook before the kernel": lambda tuner, patch: setattr(tuner.best_config, "pre_hook", print),
    "no rows per program": lambda tuner, patch: tuner.best_config.kwargs.clear(),
    "no memory to compare in": lambda tuner, patch: setattr(tuner, "fn", Raising(torch.OutOfMemoryError("planted"))),
    "another argument": lambda tuner, patch: setattr(tuner, "fn", {(3,): lambda *, x: None}),
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
