"""Which kernel runs in a region, chosen by the option `kernels` and the device of the tensors."""

from . import fused, torch_ops
from .fused import KERNELS, use_fused
from .stock import bound_function, describe, is_flash_linear_attention, runtime_problem, stock_function, torch_function

__all__ = [
    "KERNELS",
    "bound_function",
    "describe",
    "fused",
    "is_flash_linear_attention",
    "runtime_problem",
    "stock_function",
    "torch_function",
    "torch_ops",
    "use_fused",
]
