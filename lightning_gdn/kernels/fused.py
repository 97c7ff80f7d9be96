"""`kernels="fused"`: flash-linear-attention's convolution and gated norm in the place of the eager ones, on CUDA.

Less memory and faster, not bit-equal to the eager functions: the gated norm keeps its two inputs instead of four fp32 intermediates
and does not round between norm, weight and gate; the convolution keeps its input and not what goes into SiLU, and accumulates in
fp32. CPU tensors take the model's torch functions as with `stock`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNELS", "conv", "delta_rule", "gated_rms_norm", "l2norm", "rms_norm", "use_fused"]

KERNELS = ("stock", "fused")
"""Values of the option `kernels`."""


def use_fused(kernels: str, device: torch.device) -> bool:
    """Whether regions on this device run the fused kernels."""
    return kernels == "fused" and device.type == "cuda"


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, options: Mapping[str, Any]) -> Tensor:
    """Causal depthwise convolution with its activation.

    Args:
        x: [B, T, C]; weight: [C, kernel]; bias: [C] or None; activation: `"silu"` or None.
        options: keyword arguments of the layer; `cu_seq_lens_q` marks packed sequences.

    Returns:
        [B, T, C].

    Raises:
        ValueError: `seq_idx` without `cu_seq_lens_q`: this kernel takes boundaries by cumulative lengths only.
    """
    boundaries = options.get("cu_seq_lens_q")
    if boundaries is None and options.get("seq_idx") is not None:
        raise ValueError('kernels="fused": packed sequences need cu_seq_lens_q beside seq_idx; pass both, or use kernels="stock"')
    from fla.modules.causal_conv1d.ops import causal_conv1d

    return causal_conv1d(x, weight, bias, activation=activation, cu_seqlens=boundaries)[0]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm(x) * weight * silu(gate)` over the last dimension; x and gate [N, V], weight [V]."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, weight, None, activation="swish", eps=eps)


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dimension: the kernel that FLA's delta rule runs inside."""
    from fla.modules.norm.l2norm import l2norm as kernel

    return kernel(x)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule; as `torch_ops.delta_rule`, value heads grouped inside the kernel."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False)[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, weight [H]."""
    from fla.modules.norm.layernorm import rms_norm as kernel

    return kernel(x, weight, None, eps=eps)
