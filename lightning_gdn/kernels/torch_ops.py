"""The operations of `fused` in plain PyTorch, with the same signatures: what the GDN stack runs on a CPU, and the specification in code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["conv", "delta_rule", "gated_rms_norm", "l2norm", "naive_delta_rule", "rms_norm"]


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, options: Mapping[str, Any]) -> Tensor:
    """Causal depthwise convolution. x [B, T, C], weight [C, kernel] -> [B, T, C]; no packed sequences."""
    if options.get("cu_seq_lens_q") is not None or options.get("seq_idx") is not None:
        raise ValueError("packed sequences: the torch convolution mixes neighbours; run on CUDA with flash-linear-attention")
    channels, width = weight.shape
    out = F.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=channels)[:, :, : x.shape[1]]
    return (F.silu(out) if activation == "silu" else out).transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in fp32 inside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * silu(gate), in fp32 inside; x and gate [N, V], weight [V]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * F.silu(gate.float())).to(x.dtype)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in fp32 inside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in chunks of 64 tokens: transformers' torch function.

    Args:
        q, k: [B, T, key heads, key dim], l2-normalised; v: [B, T, value heads, value dim]; g: log decay [B, T, value heads], fp32, <= 0;
            beta: [B, T, value heads], after the sigmoid.

    Returns:
        [B, T, value heads, value dim]. q is scaled by key dim ** -0.5 inside.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from .stock import torch_function

    function = modeling_qwen3_5.torch_chunk_gated_delta_rule
    rule = torch_function(function) or function
    repeats = v.shape[2] // q.shape[2]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, dim=2), k.repeat_interleave(repeats, dim=2)
    return rule(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False)[0]


def naive_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same as a loop over tokens, straight from the definition (Yang et al. 2024, Gated Delta Networks, equation 10):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,  o_t = S_t^T q_t / sqrt(key dim)
    """
    repeats = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (q, k))
    batch, tokens, heads, key_dim = k.shape
    state = v.new_zeros(batch, heads, key_dim, v.shape[-1], dtype=torch.float32)
    out = []
    for t in range(tokens):
        state = state * g[:, t, :, None, None].exp()
        read = (state * k[:, t, :, :, None].float()).sum(-2)
        state = state + k[:, t, :, :, None].float() * (beta[:, t, :, None].float() * (v[:, t].float() - read))[:, :, None, :]
        out.append((state * q[:, t, :, :, None].float()).sum(-2) * key_dim**-0.5)
    return torch.stack(out, dim=1).to(v.dtype)
