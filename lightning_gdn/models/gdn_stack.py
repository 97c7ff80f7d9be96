"""A stack of Gated DeltaNet layers: norm, mixer with one fused input projection, residual; no MLP.

It is the model that selective recompute of GDN is measured on upstream (hidden 2048, 16 key and 32 value heads of width 128), and, since
every step is a function of its own, the executable specification of the regions: the adapter runs these very functions through the tape (but
launches the gated norm's kernel itself).
On CUDA the steps are flash-linear-attention's kernels, on a CPU plain PyTorch.

Shapes: B batch, T tokens, H hidden, K = key heads x key head dim, V = value heads x value head dim, C = 2K + V.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..kernels import fused, torch_ops

__all__ = ["GDNBlock", "GDNMixer", "GDNStack", "operations"]


def operations(device: torch.device) -> ModuleType:
    """The module whose functions run on this device."""
    return torch_ops if device.type == "cpu" else fused


class GDNMixer(nn.Module):
    """The Gated DeltaNet mixer: [B, T, H] -> [B, T, H]."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel: int,
        eps: float,
    ) -> None:
        super().__init__()
        if num_v_heads % num_k_heads:
            raise ValueError(f"num_v_heads: expected a multiple of num_k_heads={num_k_heads}, got {num_v_heads}")
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.eps = num_k_heads, num_v_heads, head_k_dim, head_v_dim, eps
        self.key_dim, self.value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        self.in_proj = nn.Linear(hidden_size, 2 * self.key_dim + 2 * self.value_dim + 2 * num_v_heads, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(2 * self.key_dim + self.value_dim, conv_kernel))
        self.A_log = nn.Parameter(torch.empty(num_v_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads))
        self.norm_weight = nn.Parameter(torch.empty(head_v_dim))
        self.out_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal projections (0.02), decays spread over heads as in the paper, ones elsewhere."""
        nn.init.normal_(self.in_proj.weight, std=0.02)
        nn.init.normal_(self.out_proj.weight, std=0.02)
        nn.init.normal_(self.conv_weight, std=0.3)
        self.A_log.uniform_(0.5, 16).log_()
        nn.init.ones_(self.dt_bias)
        nn.init.ones_(self.norm_weight)

    def forward(self, x: Tensor) -> Tensor:
        mixed, z, b, a = in_proj(self, x)
        q, k, v = prep(self, conv(self, mixed))
        g, beta = gates(self, b, a)
        return out_proj(self, norm_out(self, delta_rule(self, q, k, v, g, beta), z))


class GDNBlock(nn.Module):
    """Norm, mixer, residual: [B, T, H] -> [B, T, H]."""

    def __init__(self, hidden_size: int, mixer: GDNMixer, eps: float) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(hidden_size))
        self.mixer = mixer
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return residual(self, hidden_states, self.mixer(input_norm(self, hidden_states)))


class GDNStack(nn.Module):
    """`num_layers` blocks: [B, T, H] -> [B, T, H].

    Args:
        num_layers: number of blocks.
        hidden_size: H.
        num_k_heads, num_v_heads: key heads, and value heads (a multiple of them).
        head_k_dim, head_v_dim: widths of one head.
        conv_kernel: taps of the causal convolution.
        eps: of both norms.

    Raises:
        ValueError: value heads that are no multiple of the key heads.
    """

    def __init__(
        self,
        num_layers: int = 20,
        hidden_size: int = 2048,
        num_k_heads: int = 16,
        num_v_heads: int = 32,
        head_k_dim: int = 128,
        head_v_dim: int = 128,
        conv_kernel: int = 4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.num_layers, self.hidden_size, self.eps = num_layers, hidden_size, eps
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.conv_kernel = (
            num_k_heads,
            num_v_heads,
            head_k_dim,
            head_v_dim,
            conv_kernel,
        )
        layout = {
            "num_k_heads": num_k_heads,
            "num_v_heads": num_v_heads,
            "head_k_dim": head_k_dim,
            "head_v_dim": head_v_dim,
            "conv_kernel": conv_kernel,
        }
        self.layers = nn.ModuleList(GDNBlock(hidden_size, GDNMixer(hidden_size, **layout, eps=eps), eps) for _ in range(num_layers))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def input_norm(block: GDNBlock, x: Tensor) -> Tensor:
    """[B, T, H] -> [B, T, H]."""
    return operations(x.device).rms_norm(x, block.norm_weight, block.eps)


def in_proj(mixer: GDNMixer, x: Tensor) -> tuple[Tensor, ...]:
    """One projection. -> q|k|v [B, T, C], z [B, T, V], b and a [B, T, value heads]: views of it."""
    return torch.split(mixer.in_proj(x), [2 * mixer.key_dim + mixer.value_dim, mixer.value_dim, mixer.num_v_heads, mixer.num_v_heads], dim=-1)


def conv(mixer: GDNMixer, mixed: Tensor) -> Tensor:
    """[B, T, C] -> [B, T, C] after convolution and SiLU."""
    return operations(mixed.device).conv(mixed, mixer.conv_weight, None, "silu", {})


def prep(mixer: GDNMixer, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, C] -> contiguous q, k [B, T, key heads, key dim], l2-normalised, and v [B, T, value heads, value dim]."""
    batch, tokens, _ = mixed.shape
    q, k, v = torch.split(mixed, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    q, k = (part.reshape(batch, tokens, mixer.num_k_heads, mixer.head_k_dim).contiguous() for part in (q, k))
    l2norm = operations(mixed.device).l2norm
    return l2norm(q), l2norm(k), v.reshape(batch, tokens, mixer.num_v_heads, mixer.head_v_dim).contiguous()


def gates(mixer: GDNMixer, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """-> g (log decay, fp32, <= 0) and beta (after the sigmoid), [B, T, value heads]."""
    return -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias), b.sigmoid()


def delta_rule(mixer: GDNMixer, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """-> [B, T, value heads, value dim]."""
    return operations(q.device).delta_rule(q, k, v, g, beta)


def norm_out(mixer: GDNMixer, o: Tensor, z: Tensor) -> Tensor:
    """o [B, T, value heads, value dim], z [B, T, V] -> [B, T, V]."""
    width = mixer.head_v_dim
    return operations(o.device).gated_rms_norm(o.reshape(-1, width), z.reshape(-1, width), mixer.norm_weight, mixer.eps).reshape(z.shape)


def out_proj(mixer: GDNMixer, x: Tensor) -> Tensor:
    """[B, T, V] -> [B, T, H]."""
    return mixer.out_proj(x)


def residual(block: GDNBlock, x: Tensor, mixed: Tensor) -> Tensor:
    """[B, T, H] + [B, T, H]."""
    return x + mixed
