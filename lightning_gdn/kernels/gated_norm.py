"""FLA's gated RMS norm in blocks under a plan: its kernel without most of the Python around it.

A call of `rms_norm_gated` is one small kernel behind a guard of its inputs, a choice of backends, heuristics, an autotuner and Triton's own
dispatch. At few tokens a step is bound by the host, and that is most of what the norm costs, in the forward and in a replay. So the first call of
a kind is FLA's; then the compiled kernel that FLA's autotuner chose is launched, and compared; where all bits are equal, later calls launch only.
Where they are not, or anything here is not as in the version that is known, FLA's function is called. The gradient is always FLA's.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from . import fused

__all__ = ["gated_rms_norm", "gated_rms_norm_again"]

_log = logging.getLogger(__name__)
_ARGUMENTS = "ctx x g weight bias activation residual eps prenorm residual_in_fp32 is_rms_norm".split()
_WIDEST = 512
"""FLA has another kernel for rows that are wider."""
_BUCKET = 2048 * 32
"""Rows per step of `NB`, by which FLA tunes."""
_TENSORS = "x g y w b residual residual_out mean rstd eps T".split()
"""What the kernel takes before its constants."""
_ALIGNED = 16
"""Bytes. Triton compiles for pointers that are multiples of it, and again for those that are not."""

_Result = tuple[Tensor, list[Tensor]]
_Kind = tuple[Any, ...]


class _Context:
    """In the place of autograd's context: takes what a function leaves for its backward."""

    saved: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved = tensors


@dataclass(frozen=True, slots=True)
class _Launch:
    """The compiled kernel, launched as Triton documents it for kernels that were compiled ahead: all arguments in order, constants too."""

    kernel: Any
    rows_per_program: int
    constants: tuple[Any, ...]

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> _Result:
        return self.into(torch.empty_like(x), torch.empty((x.shape[0],), dtype=torch.float32, device=x.device), x, gate, weight, eps)

    def into(self, y: Tensor, rstd: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> _Result:
        """The result in memory that is given."""
        rows = x.shape[0]
        grid = (-(-rows // self.rows_per_program), 1, 1)
        self.kernel[grid](x, gate, y, weight, None, None, None, None, rstd, eps, rows, *self.constants)
        return y, [x, gate, weight, rstd]


_launches: dict[_Kind, _Launch | None] = {}
"""By what FLA's autotuner and Triton's compiler look at; None where FLA has to be called."""


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`fused.gated_rms_norm`: the same bits and gradients, the same tensors saved in the same order, for less host time.

    Args:
        x: [N, V]; gate: [N, V]; weight: [V]; eps: added to the mean square.
    """
    launch = _launch_of(x, gate, weight, eps)
    if launch is None:
        return fused.gated_rms_norm(x, gate, weight, eps)
    result: Tensor = _Launched.apply(x, gate, weight, eps, launch)
    return result


def gated_rms_norm_again(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> _Result | None:
    """`fused.gated_rms_norm` without autograd, for a replay.

    Args:
        x: [N, V]; gate: [N, V]; weight: [V]; eps: added to the mean square.

    Returns:
        The result and what autograd saves, in its order; None if FLA's function is not one that is known here, or the weight is made in the call.
    """
    if not isinstance(weight, nn.Parameter):
        return None
    launch = _launch_of(x, gate, weight, eps)
    if launch is not None:
        return launch(x, gate, weight, eps)
    try:
        y, context = _called(x, gate, weight, eps)
    except AttributeError:  # there is no such function, or it asks its context for more than that
        return None
    return y, [tensor for tensor in context.saved if tensor is not None]


class _Launched(torch.autograd.Function):
    """FLA's function with the kernel launched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, launch: _Launch) -> Tensor:
        y, saved = launch(x, gate, weight, eps)
        _leave(ctx, x, gate, weight, eps, saved[-1])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        function = _function()
        assert function is not None
        found: Any = function.backward(ctx, *gradients)
        return *found[:3], None, None


def _leave(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, rstd: Tensor) -> Any:
    """What FLA's function leaves for its backward."""
    ctx.save_for_backward(x, gate, weight, None, None, rstd)
    ctx.x_shape_og, ctx.g_shape_og, ctx.x_dtype = x.shape, gate.shape, x.dtype
    ctx.activation, ctx.eps, ctx.is_rms_norm, ctx.has_residual, ctx.prenorm = "swish", eps, True, False, False
    return ctx


def _left(context: _Context) -> dict[str, Any]:
    """The attributes of a context, tensors by shape and dtype."""
    saved = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in context.saved]
    return vars(context) | {"saved": saved}


def _launch_of(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> _Launch | None:
    """The launch for tensors that FLA and Triton would take as they are, to the kernel of their kind. The first of a kind is the one compared."""
    if not (type(x) is type(gate) is Tensor and type(weight) is nn.Parameter):
        return None
    if not (x.is_contiguous() and gate.is_contiguous() and weight.is_contiguous()):
        return None
    if (x.data_ptr() | gate.data_ptr() | weight.data_ptr()) % _ALIGNED or torch.cuda.current_device() != x.device.index:
        return None
    kind = x.shape[1], -(-x.shape[0] // _BUCKET), x.dtype, gate.dtype, weight.dtype, eps, x.device
    if kind not in _launches:
        if torch.cuda.is_current_stream_capturing():
            return None
        with torch.no_grad():
            try:
                _launches[kind] = _proven(x, gate, weight, eps)
            except Exception as error:  # noqa: BLE001  another FLA or Triton, or no memory to compare in
                _launches[kind] = None
                _log.info("gated norm of %s: FLA's function is called, its kernel could not be launched alone: %r", kind, error)
    return _launches[kind]


def _called(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, _Context]:
    """FLA's function without autograd. AttributeError: it is none that is known here."""
    function, context = _function(), _Context()
    if function is None:
        raise AttributeError("no such function")
    return function.forward(context, x, gate, weight, None, "swish", None, eps, False, False, True), context


@cache
def _function() -> type[torch.autograd.Function] | None:
    """FLA's autograd function behind `rms_norm_gated`; None in a version where its forward takes other arguments."""
    try:
        from fla.modules.norm.fused_norm_gate import LayerNormGatedFunction as function
    except ImportError:
        return None
    return function if list(inspect.signature(function.forward).parameters) == _ARGUMENTS else None


def _proven(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> _Launch | None:
    """A launch of what FLA's function runs; None if it does not make all of that, bit for bit, and all that its backward needs."""
    y, context = _called(x, gate, weight, eps)
    rows, width = x.shape
    rstd = context.saved[-1]
    if rstd is None or width > _WIDEST or _left(context) != _left(_leave(_Context(), x, gate, weight, eps, rstd)):
        return None
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd_kernel

    tuner = layer_norm_gated_fwd_kernel.fn
    config, names = tuner.best_config, tuner.fn.arg_names
    if config.pre_hook is not None or list(names[: len(_TENSORS)]) != _TENSORS:
        return None
    flags = {"IS_RMS_NORM": True, "STORE_RESIDUAL_OUT": False, "HAS_RESIDUAL": False, "HAS_WEIGHT": True, "HAS_BIAS": False}
    shapes = {"D": width, "BD": 1 << (width - 1).bit_length(), "NB": -(-rows // _BUCKET), "ACTIVATION": "swish"}
    options, rows_per_program = flags | shapes | config.all_kwargs(), config.kwargs["BT"]
    # Full of NaN: memory that is given back may hold the result of the forward.
    y_again, rstd_again = torch.full_like(y, torch.nan), torch.full_like(rstd, torch.nan)
    grid = (-(-rows // rows_per_program),)
    compiled = tuner.fn[grid](x, gate, y_again, weight, None, None, None, None, rstd_again, eps, rows, **options)
    launch = _Launch(compiled, rows_per_program, tuple(options[name] for name in names[len(_TENSORS) :]))
    again, made = launch.into(y_again.fill_(torch.nan), rstd_again.fill_(torch.nan), x, gate, weight, eps)
    kept = [tensor for tensor in context.saved if tensor is not None]
    return launch if all(torch.equal(a, b) for a, b in zip((again, *made), (y, *kept), strict=True)) else None
