"""FLA's gated RMS norm again, for a replay: its kernel without most of the Python around it.

A call of `rms_norm_gated` is one small kernel under autograd, a guard of its inputs, a choice of backends, heuristics, an autotuner and Triton's own
dispatch. At few tokens a step is bound by the host, and that is most of what a replay costs. So the first replay of a kind calls FLA, launches the
compiled kernel that FLA's autotuner chose, and compares; where all bits are equal, later ones launch only. Where they are not, or anything here is
not as in the version that is known, FLA's function is called, without autograd.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["gated_rms_norm_again"]

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


class _Saved:
    """In the place of autograd's context: takes what a function saves for its backward."""

    tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.tensors = tensors


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


_launches: dict[tuple[Any, ...], _Launch | None] = {}
"""By what FLA's autotuner and Triton's compiler look at; None where FLA has to be called."""


def gated_rms_norm_again(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> _Result | None:
    """`fused.gated_rms_norm` without autograd: the same bits for less host time.

    Args:
        x: [N, V]; gate: [N, V]; weight: [V]; eps: added to the mean square.

    Returns:
        The result and what autograd saves, in its order; None if FLA's function is not one that is known here, or the weight is made in the call.
    """
    function = _function()
    if function is None or not isinstance(weight, nn.Parameter):
        return None
    kind = (x.shape[1], -(-x.shape[0] // _BUCKET), x.dtype, gate.dtype, weight.dtype, eps, x.device)
    plain = _is_plain(x, gate, weight)
    if plain and (launch := _launches.get(kind)) is not None:
        return launch(x, gate, weight, eps)
    saved = _Saved()
    try:
        y = function.forward(saved, x, gate, weight, None, "swish", None, eps, False, False, True)
    except AttributeError:  # it asks its context for more than that
        return None
    found = y, [tensor for tensor in saved.tensors if tensor is not None]
    if plain and kind not in _launches and not torch.cuda.is_current_stream_capturing():
        _launches[kind] = _proven(found, eps, kind[1])
    return found


def _is_plain(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether FLA and Triton would take these tensors as they are, to the kernel of their kind."""
    if not (x.is_contiguous() and gate.is_contiguous() and weight.is_contiguous()):
        return False
    return not (x.data_ptr() | gate.data_ptr() | weight.data_ptr()) % _ALIGNED and torch.cuda.current_device() == x.device.index


@cache
def _function() -> type[torch.autograd.Function] | None:
    """FLA's autograd function behind `rms_norm_gated`; None in a version where its forward takes other arguments."""
    try:
        from fla.modules.norm.fused_norm_gate import LayerNormGatedFunction as function
    except ImportError:
        return None
    return function if list(inspect.signature(function.forward).parameters) == _ARGUMENTS else None


def _proven(called: _Result, eps: float, bucket: int) -> _Launch | None:
    """A launch of what FLA just ran; None if it does not make all of it again, bit for bit."""
    y, saved = called
    if len(saved) != 4 or saved[0].shape[1] > _WIDEST:
        return None
    x, gate, weight, rstd = saved
    width = x.shape[1]
    try:
        from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd_kernel

        tuner = layer_norm_gated_fwd_kernel.fn
        config = tuner.best_config
        if config.pre_hook is not None:
            return None
        rows_per_program, names = config.kwargs["BT"], tuner.fn.arg_names
        flags = {"IS_RMS_NORM": True, "STORE_RESIDUAL_OUT": False, "HAS_RESIDUAL": False, "HAS_WEIGHT": True, "HAS_BIAS": False}
        options = flags | {"D": width, "BD": 1 << (width - 1).bit_length(), "NB": bucket, "ACTIVATION": "swish"} | config.all_kwargs()
        if list(names[: len(_TENSORS)]) != _TENSORS:
            return None
        # Full of NaN: memory that is given back may hold the result of the forward.
        y_again, rstd_again = torch.full_like(y, torch.nan), torch.full_like(rstd, torch.nan)
        grid = (-(-x.shape[0] // rows_per_program),)
        compiled = tuner.fn[grid](x, gate, y_again, weight, None, None, None, None, rstd_again, eps, x.shape[0], **options)
        launch = _Launch(compiled, rows_per_program, tuple(options[name] for name in names[len(_TENSORS) :]))
        again, made = launch.into(y_again.fill_(torch.nan), rstd_again.fill_(torch.nan), x, gate, weight, eps)
    except Exception:  # noqa: BLE001  another FLA or Triton, or no memory to compare in: FLA's function ran, and will again
        return None
    return launch if all(torch.equal(a, b) for a, b in zip((again, *made), (y, *saved), strict=True)) else None
