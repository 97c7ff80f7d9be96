"""Model FLOPs by formula: what the mathematics of a model needs per token, whatever a plan replays."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..models import GDNMixer
from .stack import StackLM

__all__ = ["FLOPS_FORMULA", "flops_per_token"]

CHUNK = 64
"""Chunk length of the gated delta rule in transformers and FLA, in tokens."""
FLOPS_FORMULA = (
    "6*N_matmul (of routed experts, the share a token is sent to) + 6*T*heads*head_dim per attention block "
    "+ 3*heads*(2*64*(3K+2V) + 6*K*V) per GDN block, per token; recompute not counted"
)
"""What `flops_per_token` computes."""


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Model FLOPs of one token's forward and backward: what the mathematics needs, replays not counted.

    Matrix products cost 2 FLOPs per weight and token forward and twice that backward: 6*N over the weights of Linear and convolution
    layers, the output projection included, the embedding look-up not (as in Kaplan et al. 2020). Of n routed experts a token passes k,
    so k/n of their weights count. Causal attention adds 6*T*heads*head_dim (half of PaLM's 12, appendix B, since half of the scores are
    masked). A Gated DeltaNet head adds, with chunks of C=64 tokens, 2*C*(3K+2V) inside a chunk and 6*K*V for its state (Yang et al. 2024,
    section 3), three times that with the backward.
    """
    if isinstance(model, StackLM):
        stack = model.model.stack
        return 6.0 * _weights(model) + stack.num_layers * _delta_rule(stack.num_v_heads, stack.head_k_dim, stack.head_v_dim)
    config: Any = model.config
    config = config.get_text_config()
    total = 6.0 * _weights(model, getattr(config, "num_experts_per_tok", 0))
    for kind in config.layer_types:
        if kind == "full_attention":
            total += 6.0 * seq_len * config.num_attention_heads * config.head_dim
        else:
            total += _delta_rule(config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return total


def _delta_rule(heads: int, k: int, v: int) -> float:
    return 3.0 * heads * (2 * CHUNK * (3 * k + 2 * v) + 6 * k * v)


def _weights(model: nn.Module, experts_per_token: int = 0) -> float:
    """Weights that multiply one token."""
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            total += module.weight.numel()
        elif isinstance(module, GDNMixer):
            total += module.conv_weight.numel()
        elif isinstance(experts := getattr(module, "experts", None), nn.Module):  # stacked weights and a router that are no Linear layers
            routed: Any = module
            total += routed.gate.weight.numel()
            total += sum(p.numel() for p in experts.parameters()) * experts_per_token / routed.gate.weight.shape[0]
    return total
