"""Regions of Hugging Face hybrid blocks (Qwen3.5, Qwen3-Next), transformers 5.17 to 5.24: what the families share.

Every function repeats the operations of transformers' forward in their order (the order of operations decides bits). The families differ
in their input projections and their feed-forward part; the versions in the name of the cache argument and in whether the layer repeats
q/k heads itself, which is read off the installed classes. Shapes: B batch, T tokens, H hidden, K = key heads x key head dim,
V = value heads x value head dim, C = 2K + V.

A region function gets its `Family` and the option `kernels` as constants, and every tensor as an argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from ..kernels import bound_function, fused, is_flash_linear_attention, stock_function, torch_function, use_fused
from ..kernels.gated_norm import gated_rms_norm, gated_rms_norm_again
from ..tape import RegionFn

__all__ = ["CONV", "RULE", "Family"]

CONV, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


class Family:
    """One modeling module of transformers, and what its installed version does.

    Args:
        modeling: the modeling module.
        prefix: of its class names, for instance `Qwen3_5`.
        in_proj: the region of the input projections; its function gets (mixer, family, x [B, T, H], mask) and returns
            q|k|v [B, C, T], z [B, T, value heads, value dim], b and a [B, T, value heads].
        in_proj_modules: the submodules of the mixer that it calls.
    """

    def __init__(self, modeling: ModuleType, prefix: str, in_proj: Callable[..., Any], in_proj_modules: tuple[str, ...]) -> None:
        self.modeling, self.prefix = modeling, prefix
        self.block, self.mixer, self.attention, self.mlp = (self.cls(name) for name in ("DecoderLayer", "GatedDeltaNet", "Attention", "MLP"))
        self.plain_norm = self.cls("RMSNormGated")
        forward = inspect.unwrap(self.mixer.forward)
        self.new_cache_name = "cache" in inspect.signature(forward).parameters
        self.mixer_cache = "cache" if self.new_cache_name else "cache_params"
        self.attention_cache = "cache" if self.new_cache_name else "past_key_values"
        self.repeats_heads = "repeat_interleave" in forward.__code__.co_names
        self._reference = {name: torch_function(getattr(modeling, name)) or getattr(modeling, name) for name in (CONV, RULE)}
        self.regions = _make_regions(self, in_proj, in_proj_modules)

    def cls(self, name: str) -> Any:
        """A class of the modeling module by its name without the prefix."""
        return getattr(self.modeling, self.prefix + name)

    def kernel(self, name: str, device: torch.device) -> Callable[..., Any]:
        """What the layer calls under `name` for tensors on `device`."""
        return stock_function(self.modeling, name, device, self._reference[name])

    def norm_before_rule(self, device: torch.device) -> bool:
        """flash-linear-attention l2-normalises inside its kernel, after making contiguous copies: done in `prep` instead, with the same
        kernels, the tensors it saves are `prep`'s outputs. The torch rule normalises in fp32 inside, so there `prep` ends before."""
        return device.type != "cpu" and is_flash_linear_attention(self.kernel(RULE, device))

    def binds_torch(self) -> bool:
        """Whether the layer's functions are the torch ones, so that its own forward runs on CPU tensors."""
        return all(bound_function(getattr(self.modeling, name)) is self.kernel(name, torch.device("cpu")) for name in (CONV, RULE))

    def attention_interface(self, attention: Any) -> Callable[..., Any]:
        """The attention function that the configuration names."""
        return self.modeling.ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, self.modeling.eager_attention_forward)

    def has_previous_state(self, cache: Any, layer: int) -> bool:
        """Whether the cache continues an earlier call."""
        if self.new_cache_name:
            return cache.get_conv_state(layer, state_idx=0) is not None
        return cache.has_previous_state(layer)


# Gated DeltaNet


def _conv(mixer: Any, family: Family, kernels: str, mixed: Tensor, drop_to: int | None, options: dict[str, Any]) -> Tensor:
    """q|k|v [B, C, T] -> [B, T, C] after convolution and SiLU; with a cache only the last `drop_to` tokens."""
    weight = mixer.conv1d.weight.squeeze(1)
    if use_fused(kernels, mixed.device):
        out = fused.conv(mixed.transpose(1, 2), weight, mixer.conv1d.bias, mixer.activation, options)
        return out if drop_to is None else out[:, -drop_to:]
    out = family.kernel(CONV, mixed.device)(mixed, weight, mixer.conv1d.bias, activation=mixer.activation, **options)
    if drop_to is not None:
        out = out[:, :, -drop_to:]
    return out.transpose(1, 2)


def _prep(mixer: Any, family: Family, kernels: str, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, C] -> q, k [B, T, heads, key dim] and v [B, T, value heads, value dim], as the delta rule saves them."""
    batch, tokens, _ = mixed.shape
    q, k, v = torch.split(mixed, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    q = q.reshape(batch, tokens, -1, mixer.head_k_dim)
    k = k.reshape(batch, tokens, -1, mixer.head_k_dim)
    v = v.reshape(batch, tokens, -1, mixer.head_v_dim)
    outside = family.norm_before_rule(mixed.device)
    repeats = mixer.num_v_heads // mixer.num_k_heads
    if family.repeats_heads and repeats > 1 and not (outside and use_fused(kernels, mixed.device)):  # FLA groups value heads itself
        q = q.repeat_interleave(repeats, dim=2)
        k = k.repeat_interleave(repeats, dim=2)
    if outside:
        return fused.l2norm(q.contiguous()), fused.l2norm(k.contiguous()), v.contiguous()
    return q, k, v


def _gates(mixer: Any, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """b, a [B, T, value heads] -> g (log decay, fp32, <= 0) and beta (after the sigmoid), same shape."""
    beta = b.sigmoid()
    g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
    return g, beta


def _delta_rule(
    mixer: Any, family: Family, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, want_state: bool, options: dict[str, Any]
) -> Any:
    """-> output [B, T, value heads, value dim] and, for a cache, the last state."""
    run = family.kernel(RULE, q.device)
    inside = not family.norm_before_rule(q.device)
    return run(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=want_state, use_qk_l2norm_in_kernel=inside, **options)


def _norm_out(mixer: Any, family: Family, kernels: str, o: Tensor, z: Tensor) -> Tensor:
    """o, z [B, T, value heads, value dim] -> [B, T, V]."""
    batch, tokens = o.shape[:2]
    o, z = o.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim)
    if use_fused(kernels, o.device) and isinstance(mixer.norm, family.plain_norm):
        x = gated_rms_norm(o, z, mixer.norm.weight, mixer.norm.variance_epsilon)
    else:
        x = mixer.norm(o, z)
    return x.reshape(batch, tokens, -1)


def _norm_out_again(mixer: Any, family: Family, kernels: str, o: Tensor, z: Tensor) -> tuple[Tensor, list[Tensor]] | None:
    """See `RegionFn.again`."""
    if not (use_fused(kernels, o.device) and isinstance(mixer.norm, family.plain_norm)):
        return None
    batch, tokens, width = *o.shape[:2], mixer.head_v_dim
    found = gated_rms_norm_again(o.reshape(-1, width), z.reshape(-1, width), mixer.norm.weight, mixer.norm.variance_epsilon)
    return None if found is None else (found[0].reshape(batch, tokens, -1), found[1])


def _out_proj(mixer: Any, x: Tensor) -> Tensor:
    return mixer.out_proj(x)


# Attention


def _qkv(attention: Any, family: Family, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """x [B, T, H] -> q [B, heads, T, dim], k and v [B, kv heads, T, dim] with rotary applied, output gate [B, T, heads x dim]."""
    shape = x.shape[:-1]
    hidden_shape = (*shape, -1, attention.head_dim)
    q, gate = torch.chunk(attention.q_proj(x).view(*shape, -1, attention.head_dim * 2), 2, dim=-1)
    gate = gate.reshape(*shape, -1)
    q = attention.q_norm(q.view(hidden_shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(hidden_shape)).transpose(1, 2)
    v = attention.v_proj(x).view(hidden_shape).transpose(1, 2)
    q, k = family.modeling.apply_rotary_pos_emb(q, k, cos, sin)
    return q, k, v, gate


def _core_attn(attention: Any, family: Family, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Any:
    """-> output [B, T, heads, dim] and the attention weights, if the implementation returns them."""
    dropout = 0.0 if not attention.training else attention.attention_dropout
    return family.attention_interface(attention)(attention, q, k, v, mask, dropout=dropout, scaling=attention.scaling, **options)


def _attn_out(attention: Any, o: Tensor, gate: Tensor) -> Tensor:
    o = o.reshape(*gate.shape[:-1], -1).contiguous()
    return attention.o_proj(o * torch.sigmoid(gate))


def _attention_draws(attention: Any) -> bool:
    return attention.training and attention.attention_dropout > 0


# Feed-forward part and block


def _gate_up(mlp: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return mlp.gate_proj(x), mlp.up_proj(x)


def _act(mlp: Any, gate: Tensor, up: Tensor) -> Tensor:
    return mlp.act_fn(gate) * up


def _down(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(x)


def _input_norm(block: Any, x: Tensor) -> Tensor:
    return block.input_layernorm(x)


def _post_norm(block: Any, x: Tensor) -> Tensor:
    return block.post_attention_layernorm(x)


def _residual(block: Any, residual: Tensor, x: Tensor) -> Tensor:
    return residual + x


def _moe(block: Any, x: Tensor) -> Tensor:
    """Router and experts as the model runs them; never replayed."""
    return block.mlp(x)


@dataclass(frozen=True, kw_only=True)
class _Regions:
    in_proj: RegionFn
    conv: RegionFn
    prep: RegionFn
    gates: RegionFn
    delta_rule: RegionFn
    norm_out: RegionFn
    out_proj: RegionFn
    qkv: RegionFn
    core_attn: RegionFn
    attn_out: RegionFn
    gate_up: RegionFn
    act: RegionFn
    down: RegionFn
    moe: RegionFn
    input_norm: RegionFn
    post_norm: RegionFn
    mixer_residual: RegionFn
    ffn_residual: RegionFn


def _make_regions(family: Family, in_proj: Callable[..., Any], in_proj_modules: tuple[str, ...]) -> _Regions:
    pure = frozenset({nn.Linear, nn.Conv1d, nn.SiLU, SiLUActivation, family.cls("RMSNorm"), family.plain_norm})

    def region(name: str, call: Callable[..., Any], *modules: str, **more: Any) -> RegionFn:
        return RegionFn(name=name, call=call, modules=modules, pure=pure, **more)

    return _Regions(
        in_proj=region("in_proj", in_proj, *in_proj_modules),
        conv=region("conv", _conv, "conv1d"),
        prep=region("prep", _prep),
        gates=region("gates", _gates, params=("A_log", "dt_bias")),
        delta_rule=region("delta_rule", _delta_rule),
        norm_out=region("norm_out", _norm_out, "norm", again=_norm_out_again),
        out_proj=region("out_proj", _out_proj, "out_proj"),
        qkv=region("qkv", _qkv, "q_proj", "k_proj", "v_proj", "q_norm", "k_norm"),
        core_attn=region("core_attn", _core_attn, draws=_attention_draws),
        attn_out=region("attn_out", _attn_out, "o_proj"),
        gate_up=region("gate_up", _gate_up, "gate_proj", "up_proj"),
        act=region("act", _act, "act_fn"),
        down=region("down", _down, "down_proj"),
        moe=region("moe", _moe, "mlp"),
        input_norm=region("input_norm", _input_norm, "input_layernorm"),
        post_norm=region("post_norm", _post_norm, "post_attention_layernorm"),
        mixer_residual=region("mixer_residual", _residual),
        ffn_residual=region("ffn_residual", _residual),
    )
