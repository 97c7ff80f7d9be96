"""Which kernel runs in a region, chosen by the device of the tensors."""

from .stock import bound_function, describe, flash_l2norm, is_flash_linear_attention, runtime_problem, stock_function, torch_function

__all__ = ["bound_function", "describe", "flash_l2norm", "is_flash_linear_attention", "runtime_problem", "stock_function", "torch_function"]
