"""Models shared by the tests: small, deterministic, and shaped like the public ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM

__all__ = ["TINY_LAYER_TYPES", "TINY_VOCAB", "tiny_batch", "tiny_qwen3_5", "tiny_qwen3_next"]

TINY_LAYER_TYPES = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
TINY_VOCAB = 256
_TINY: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
    "use_cache": False,
}


def tiny_qwen3_5(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Qwen3_5ForCausalLM:
    """The smallest Qwen3.5 text model with both kinds of block, in `.train()` mode.

    Three GDN blocks and one attention block, H = 64, MLP 128; GDN with 2 key and 4 value heads of width 16 each (so k and q are repeated
    and K width 32, V width 64, conv width 128), conv kernel 4; attention with 2 heads, 1 key/value head, head width 64; vocabulary 256,
    embeddings untied, no cache.

    Every parameter with one dimension (norm weights, `A_log`, `dt_bias`) is moved off its initial value: with norm weights of exactly
    one, a replay that forgot the weight would pass a bit comparison.

    Args:
        seed: Decides every weight. The global RNG is left as it was.
        dtype: Type of the parameters; `torch.bfloat16` is what a model loaded in bf16 has.
        **overrides: Fields of `Qwen3_5TextConfig`. `num_hidden_layers` alone repeats the pattern L, L, L, F.
    """
    fields = {**_TINY, **overrides}
    return _build(Qwen3_5TextConfig, Qwen3_5ForCausalLM, fields, seed, dtype)


def tiny_qwen3_next(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Qwen3NextForCausalLM:
    """As `tiny_qwen3_5`, of the Qwen3-Next class: fused input projections, and 4 experts (top 2) with a shared one in every block.

    `mlp_only_layers=[...]` gives those blocks a dense MLP.
    """
    fields = {
        **_TINY,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "output_router_logits": False,
        **overrides,
    }
    return _build(Qwen3NextConfig, Qwen3NextForCausalLM, fields, seed, dtype)


def _build(config: Any, cls: Any, fields: dict[str, Any], seed: int, dtype: torch.dtype) -> Any:
    layers = fields["num_hidden_layers"]
    fields.setdefault("layer_types", [TINY_LAYER_TYPES[i % len(TINY_LAYER_TYPES)] for i in range(layers)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config(**fields))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).train()


def tiny_batch(batch: int = 2, tokens: int = 96, *, seed: int = 1, pad: int = 0, vocab: int = TINY_VOCAB) -> dict[str, torch.Tensor]:
    """`input_ids`, `labels` and, with `pad` > 0, an `attention_mask` whose last row has `pad` padded positions on the left.

    All tensors are (B, T) int64. Padded positions have label -100, which the loss leaves out. The global RNG is left as it was.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, tokens), generator=generator)
    if pad == 0:
        return {"input_ids": ids, "labels": ids.clone()}
    if not 0 < pad < tokens:
        raise ValueError(f"pad must lie in 0..{tokens - 1} (tokens={tokens}), got {pad}")
    mask = torch.ones_like(ids)
    mask[-1, :pad] = 0
    labels = ids.clone()
    labels[mask == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}
