"""What a process that runs GPU tests does before anything else imports models: bind flash-linear-attention, tune less if asked to."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch

__all__ = ["ONE_CONFIG", "bind_kernels"]

ONE_CONFIG = "GPU_TESTS_ONE_CONFIG"


def bind_kernels() -> None:
    """Import the kernels and the modeling code that looks for them. Does nothing without a CUDA device."""
    if not torch.cuda.is_available():
        return
    if ONE_CONFIG in os.environ:
        _take_the_first_config()
    # transformers binds kernels when a modeling file is imported and takes any exception, also a warning turned into one, as "not
    # installed": it would silently fall back to its torch rule. FLA warns at import about what it finds; it is not under test here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("fla.ops.gated_delta_rule")
        importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


def _take_the_first_config() -> None:
    """Triton autotuners compile the first of their configurations only.

    Compiling all of them for every head layout and type is most of the time of these tests on a machine without a kernel cache, and what
    they assert does not depend on which one runs.
    """
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    plain = autotuner.__init__

    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        del self.configs[1:]

    autotuner.__init__ = first
