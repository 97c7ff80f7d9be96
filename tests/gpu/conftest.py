"""GPU tests: bind flash-linear-attention before warnings are errors."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest
import torch

ONE_CONFIG = "GPU_TESTS_ONE_CONFIG"


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


if torch.cuda.is_available():
    if ONE_CONFIG in os.environ:
        _take_the_first_config()
    # transformers binds kernels when a modeling file is imported and takes any exception, also a warning turned into one, as "not
    # installed": it would silently fall back to its torch rule. FLA warns at import about what it finds; it is not under test here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("fla.ops.gated_delta_rule")
        importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")


FIRST_RUN = "GPU_FIRST_RUN"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that were written without a GPU at hand are skipped, with this reason, until somebody has run them on one and removes the mark."""
    if FIRST_RUN not in os.environ:
        for item in items:
            if item.get_closest_marker("never_run_on_a_gpu"):
                item.add_marker(pytest.mark.skip(reason=f"written without a GPU at hand and never run on one: {FIRST_RUN}=1 make test-gpu"))
