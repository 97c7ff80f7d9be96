"""GPU tests: bind flash-linear-attention before warnings are errors."""

from __future__ import annotations

import importlib
import warnings

import torch

if torch.cuda.is_available():
    # transformers binds kernels when a modeling file is imported and takes any exception, also a warning turned into one, as "not
    # installed": it would silently fall back to its torch rule. FLA warns at import about what it finds; it is not under test here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("fla.ops.gated_delta_rule")
        importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
