"""Hugging Face `qwen3_5`, dense text models: four separate input projections."""

from __future__ import annotations

from typing import Any

import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from torch import Tensor

from .hf_hybrid import HybridAdapter
from .hf_regions import Family

__all__ = ["ADAPTER", "FAMILY"]


def _in_proj(mixer: Any, family: Family, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    x = family.modeling.apply_mask_to_padding_states(x, mask)
    batch, tokens, _ = x.shape
    mixed = mixer.in_proj_qkv(x).transpose(1, 2)
    z = mixer.in_proj_z(x).reshape(batch, tokens, -1, mixer.head_v_dim)
    return mixed, z, mixer.in_proj_b(x), mixer.in_proj_a(x)


FAMILY = Family(modeling, "Qwen3_5", _in_proj, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
ADAPTER = HybridAdapter("qwen3_5", FAMILY)
