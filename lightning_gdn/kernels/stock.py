"""`kernels="stock"`: call what the model itself would call, except that CPU tensors always take the model's torch functions.

transformers binds a package's kernel (flash-linear-attention, causal-conv1d) once, when the modeling file is imported, whatever
device the tensors will be on. With triton installed that kernel then dies on CPU tensors ("0 active drivers"), so CPU tensors are
given the torch function behind the binding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bound_function", "describe", "is_flash_linear_attention", "runtime_problem", "stock_function", "torch_function"]

HOPPER = (9, 0)
TRITON_FLOOR = (3, 7, 1)
"""flash-linear-attention refuses the backward of the gated delta rule on Hopper with Triton 3.4 to 3.7.0: wrong gradients there."""


def _closure(function: Callable[..., Any], name: str) -> Any:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=False)).get(name)


def bound_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation a transformers dispatching wrapper calls; the function itself if it is no such wrapper."""
    found = _closure(function, "implementation")
    return found if callable(found) else function


def torch_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The torch reference behind a transformers dispatching wrapper, or None if the function is no wrapper."""
    found = _closure(function, "torch_function")
    if callable(found):
        return found
    unwrapped = inspect.unwrap(function)
    return unwrapped if unwrapped is not function else None


def stock_function(module: Any, name: str, device: torch.device, reference: Callable[..., Any]) -> Callable[..., Any]:
    """What a model's layer calls under `name` for tensors on `device`.

    Args:
        module: the modeling module whose global `name` the layer looks up at call time.
        reference: its torch function as it was when the adapter was imported, used on CPU if the global was replaced since.
    """
    current: Callable[..., Any] = getattr(module, name)
    if device.type != "cpu":
        return current
    return torch_function(current) or reference


def is_flash_linear_attention(function: Callable[..., Any]) -> bool:
    """True if the function is flash-linear-attention's, or a transformers wrapper bound to it."""
    return str(getattr(bound_function(function), "__module__", "")).partition(".")[0] == "fla"


def describe(function: Callable[..., Any]) -> str:
    """Name of a kernel for tables, for instance `fla.chunk_gated_delta_rule` or `torch.causal_conv1d_fn`."""
    bound = bound_function(function)
    package = str(getattr(bound, "__module__", "?")).partition(".")[0]
    name = str(getattr(bound, "__name__", bound)).removeprefix("torch_")
    return f"{'torch' if package == 'transformers' else package}.{name}"


def runtime_problem(device: torch.device) -> str | None:
    """Why flash-linear-attention's backward will refuse to run on this device, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return None
    try:
        import triton
    except ImportError:
        return "flash-linear-attention needs triton on a GPU; install the extra: pip install 'lightning-gdn[cuda]'"
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if (3, 4) <= version < TRITON_FLOOR:
        return (
            f"triton {triton.__version__} on a Hopper GPU: flash-linear-attention refuses the backward of the gated delta rule there (wrong "
            "gradients); use a torch whose triton is 3.7.1 or newer"
        )
    return None
