"""Tests on several processes. The started processes import this package first: on a GPU it binds their kernels before a model is imported."""

from __future__ import annotations

import os

from tests.distributed.launch import ACCELERATOR_VARIABLE

if os.environ.get(ACCELERATOR_VARIABLE) == "gpu":
    from tests.gpu_kernels import bind_kernels

    bind_kernels()
