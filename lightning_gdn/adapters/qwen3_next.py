"""Hugging Face `qwen3_next`: one fused projection for q, k, v, z and one for b, a, regrouped per key head.

q, k and v are concatenated into a tensor of their own. z stays a view of the fused projection where every key head has one value head,
and then whoever saves z keeps the whole projection; elsewhere transformers copies it. The ledger counts storages, so both show.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.models.qwen3_next.modeling_qwen3_next as modeling
from torch import Tensor

from .hf_hybrid import HybridAdapter
from .hf_regions import Family

__all__ = ["ADAPTER", "FAMILY"]


def _in_proj(mixer: Any, family: Family, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    x = family.modeling.apply_mask_to_padding_states(x, mask)
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
    q, k, v = (part.reshape(part.shape[0], part.shape[1], -1) for part in (q, k, v))
    return torch.cat((q, k, v), dim=-1).transpose(1, 2), z, b, a


FAMILY = Family(modeling, "Qwen3Next", _in_proj, ("in_proj_qkvz", "in_proj_ba"))
ADAPTER = HybridAdapter("qwen3_next", FAMILY)
