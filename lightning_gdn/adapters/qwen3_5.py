"""Hugging Face `qwen3_5`, dense text models, transformers 5.17 to 5.24.

Every function repeats the operations of transformers' forward in their order (the order of operations decides bits); what differs
between the versions is read off the installed classes: the name of the cache argument, and whether the layer repeats q/k heads
itself. Shapes: B batch, T tokens, H hidden, K = key heads x key head dim, V = value heads x value head dim, C = 2K + V.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from ..kernels import bound_function, describe, flash_l2norm, is_flash_linear_attention, stock_function, torch_function
from ..regions import ATTENTION, GDN, BlockLayout
from ..tape import RegionFn, Tape
from .base import Adapter

__all__ = ["ADAPTER"]

_MIXER_FORWARD = inspect.unwrap(modeling.Qwen3_5GatedDeltaNet.forward)
_BLOCK_FORWARD = inspect.unwrap(modeling.Qwen3_5DecoderLayer.forward)
_ATTENTION_FORWARD = inspect.unwrap(modeling.Qwen3_5Attention.forward)
_MLP_FORWARD = inspect.unwrap(modeling.Qwen3_5MLP.forward)
_NEW_CACHE_NAME = "cache" in inspect.signature(_MIXER_FORWARD).parameters
_MIXER_CACHE = "cache" if _NEW_CACHE_NAME else "cache_params"
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_LAYER_REPEATS_HEADS = "repeat_interleave" in _MIXER_FORWARD.__code__.co_names
_CONV, _RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
_REFERENCE: dict[str, Callable[..., Any]] = {name: torch_function(getattr(modeling, name)) or getattr(modeling, name) for name in (_CONV, _RULE)}
_PURE = frozenset({nn.Linear, nn.Conv1d, nn.SiLU, SiLUActivation, modeling.Qwen3_5RMSNorm, modeling.Qwen3_5RMSNormGated})


def _kernel(name: str, device: torch.device) -> Callable[..., Any]:
    return stock_function(modeling, name, device, _REFERENCE[name])


def _norm_before_rule(device: torch.device) -> bool:
    """flash-linear-attention l2-normalises inside its kernel, after making contiguous copies: done in `prep` instead, with the same
    kernels, the tensors it saves are `prep`'s outputs. The torch rule normalises in fp32 inside, so there `prep` ends before."""
    return device.type != "cpu" and is_flash_linear_attention(_kernel(_RULE, device))


# Gated DeltaNet


def _in_proj(mixer: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """x [B, T, H] -> q|k|v [B, C, T] (a transposed view), z [B, T, value heads, value dim], b and a [B, T, value heads]."""
    x = modeling.apply_mask_to_padding_states(x, mask)
    batch, tokens, _ = x.shape
    mixed = mixer.in_proj_qkv(x).transpose(1, 2)
    z = mixer.in_proj_z(x).reshape(batch, tokens, -1, mixer.head_v_dim)
    return mixed, z, mixer.in_proj_b(x), mixer.in_proj_a(x)


def _conv(mixer: Any, mixed: Tensor, drop_to: int | None, options: dict[str, Any]) -> Tensor:
    """q|k|v [B, C, T] -> [B, T, C] (a transposed view) after convolution and SiLU; with a cache only the last `drop_to` tokens."""
    run = _kernel(_CONV, mixed.device)
    out = run(mixed, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, activation=mixer.activation, **options)
    if drop_to is not None:
        out = out[:, :, -drop_to:]
    return out.transpose(1, 2)


def _prep(mixer: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, C] -> q, k [B, T, heads, key dim] and v [B, T, value heads, value dim], as the delta rule saves them."""
    batch, tokens, _ = mixed.shape
    q, k, v = torch.split(mixed, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
    q = q.reshape(batch, tokens, -1, mixer.head_k_dim)
    k = k.reshape(batch, tokens, -1, mixer.head_k_dim)
    v = v.reshape(batch, tokens, -1, mixer.head_v_dim)
    repeats = mixer.num_v_heads // mixer.num_k_heads
    if _LAYER_REPEATS_HEADS and repeats > 1:
        q = q.repeat_interleave(repeats, dim=2)
        k = k.repeat_interleave(repeats, dim=2)
    if _norm_before_rule(mixed.device):
        return flash_l2norm(q.contiguous()), flash_l2norm(k.contiguous()), v.contiguous()
    return q, k, v


def _gates(mixer: Any, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """b, a [B, T, value heads] -> g (log decay, fp32, <= 0) and beta (after the sigmoid), same shape."""
    beta = b.sigmoid()
    g = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias)
    return g, beta


def _delta_rule(mixer: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, want_state: bool, options: dict[str, Any]) -> Any:
    """-> output [B, T, value heads, value dim] and, for a cache, the last state."""
    run = _kernel(_RULE, q.device)
    inside = not _norm_before_rule(q.device)
    return run(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=want_state, use_qk_l2norm_in_kernel=inside, **options)


def _norm_out(mixer: Any, o: Tensor, z: Tensor) -> Tensor:
    """o, z [B, T, value heads, value dim] -> [B, T, V]."""
    batch, tokens = o.shape[:2]
    return mixer.norm(o.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim)).reshape(batch, tokens, -1)


def _out_proj(mixer: Any, x: Tensor) -> Tensor:
    return mixer.out_proj(x)


_IN_PROJ = RegionFn(name="in_proj", call=_in_proj, modules=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), pure=_PURE)
_CONV_REGION = RegionFn(name="conv", call=_conv, modules=("conv1d",), pure=_PURE)
_PREP = RegionFn(name="prep", call=_prep, pure=_PURE)
_GATES = RegionFn(name="gates", call=_gates, params=("A_log", "dt_bias"), pure=_PURE)
_DELTA_RULE = RegionFn(name="delta_rule", call=_delta_rule, pure=_PURE)
_NORM_OUT = RegionFn(name="norm_out", call=_norm_out, modules=("norm",), pure=_PURE)
_OUT_PROJ = RegionFn(name="out_proj", call=_out_proj, modules=("out_proj",), pure=_PURE)


def _has_previous_state(cache: Any, layer: int) -> bool:
    if _NEW_CACHE_NAME:
        return cache.get_conv_state(layer, state_idx=0) is not None
    return cache.has_previous_state(layer, state_idx=0)


def _mixer_forward(mixer: Any, tape: Tape, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mask: Tensor | None = kwargs.pop("attention_mask", None)
    cache = None
    for name in _CACHE_NAMES:
        cache = kwargs.pop(name, cache)
    if args:  # positional in transformers' order: cache, attention_mask
        cache, mask = args[0], args[1] if len(args) > 1 else mask
    if cache is not None and _has_previous_state(cache, mixer.layer_idx):
        # Continuing from a cached state is decoding, not training: the class's own forward knows its kernels for that.
        return type(mixer).forward(mixer, hidden_states, **{_MIXER_CACHE: cache}, attention_mask=mask, **kwargs)
    tokens = hidden_states.shape[1]
    mixed, z, b, a = tape.run(_IN_PROJ, mixer, hidden_states, mask)
    if cache is not None:  # written once, between regions: a replay must not write it again
        mixed = cache.update_conv_state(mixed, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    mixed = tape.run(_CONV_REGION, mixer, mixed, tokens if cache is not None else None, dict(kwargs))
    q, k, v = tape.run(_PREP, mixer, mixed)
    g, beta = tape.run(_GATES, mixer, b, a)
    options = {"cu_seqlens": kwargs.pop("cu_seq_lens_q", None), **kwargs}
    o, state = tape.run(_DELTA_RULE, mixer, q, k, v, g, beta, cache is not None, options)
    del mixed, b, a, q, k, v, g, beta  # a local would hold what the tape lets go
    if cache is not None:  # detached: the branch is never differentiated, and its graph would hold the block's slots
        cache.update_recurrent_state(state.detach(), mixer.layer_idx)
    x = tape.run(_NORM_OUT, mixer, o, z)
    del o, z
    return tape.run(_OUT_PROJ, mixer, x)


# Attention


def _qkv(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """x [B, T, H] -> q [B, heads, T, dim], k and v [B, kv heads, T, dim] with rotary applied, output gate [B, T, heads x dim]."""
    shape = x.shape[:-1]
    hidden_shape = (*shape, -1, attention.head_dim)
    q, gate = torch.chunk(attention.q_proj(x).view(*shape, -1, attention.head_dim * 2), 2, dim=-1)
    gate = gate.reshape(*shape, -1)
    q = attention.q_norm(q.view(hidden_shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(hidden_shape)).transpose(1, 2)
    v = attention.v_proj(x).view(hidden_shape).transpose(1, 2)
    q, k = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    return q, k, v, gate


def _attention_interface(attention: Any) -> Callable[..., Any]:
    return modeling.ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, modeling.eager_attention_forward)


def _core_attn(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Any:
    """-> output [B, T, heads, dim] and the attention weights, if the implementation returns them."""
    dropout = 0.0 if not attention.training else attention.attention_dropout
    return _attention_interface(attention)(attention, q, k, v, mask, dropout=dropout, scaling=attention.scaling, **options)


def _attn_out(attention: Any, o: Tensor, gate: Tensor) -> Tensor:
    o = o.reshape(*gate.shape[:-1], -1).contiguous()
    return attention.o_proj(o * torch.sigmoid(gate))


def _attention_draws(attention: Any) -> bool:
    return attention.training and attention.attention_dropout > 0


_QKV = RegionFn(name="qkv", call=_qkv, modules=("q_proj", "k_proj", "v_proj", "q_norm", "k_norm"), pure=_PURE)
_CORE_ATTN = RegionFn(name="core_attn", call=_core_attn, draws=_attention_draws, pure=_PURE)
_ATTN_OUT = RegionFn(name="attn_out", call=_attn_out, modules=("o_proj",), pure=_PURE)


def _attention_forward(attention: Any, tape: Tape, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    cache = None
    for name in _CACHE_NAMES:
        cache = kwargs.pop(name, cache)
    cos, sin = position_embeddings
    q, k, v, gate = tape.run(_QKV, attention, hidden_states, cos, sin)
    if cache is not None:
        extra = {"kwargs": kwargs} if _NEW_CACHE_NAME else {}
        k, v = cache.update(k, v, attention.layer_idx, **extra)
    o, weights = tape.run(_CORE_ATTN, attention, q, k, v, attention_mask, kwargs)
    del q, k, v
    return tape.run(_ATTN_OUT, attention, o, gate), weights


# MLP and block


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


_GATE_UP = RegionFn(name="gate_up", call=_gate_up, modules=("gate_proj", "up_proj"), pure=_PURE)
_ACT = RegionFn(name="act", call=_act, modules=("act_fn",), pure=_PURE)
_DOWN = RegionFn(name="down", call=_down, modules=("down_proj",), pure=_PURE)
_INPUT_NORM = RegionFn(name="input_norm", call=_input_norm, modules=("input_layernorm",), pure=_PURE)
_POST_NORM = RegionFn(name="post_norm", call=_post_norm, modules=("post_attention_layernorm",), pure=_PURE)
_MIXER_RESIDUAL = RegionFn(name="mixer_residual", call=_residual, pure=_PURE)
_FFN_RESIDUAL = RegionFn(name="ffn_residual", call=_residual, pure=_PURE)


def _mlp_forward(mlp: Any, tape: Tape, x: Tensor) -> Tensor:
    gate, up = tape.run(_GATE_UP, mlp, x)
    x = tape.run(_ACT, mlp, gate, up)
    del gate, up
    return tape.run(_DOWN, mlp, x)


_GDN_MIXER = ("in_proj", "conv", "prep", "gates", "delta_rule", "norm_out", "out_proj")
_ATTENTION_MIXER = ("qkv", "core_attn", "attn_out")
_FFN = ("mixer_residual", "post_norm", "gate_up", "act", "down", "ffn_residual")


class Qwen3_5Adapter(Adapter):
    """Blocks of `Qwen3_5TextModel`, wherever it is nested."""

    name = "qwen3_5"
    block_class = "Qwen3_5DecoderLayer"

    def matches(self, module: nn.Module) -> bool:
        """A decoder layer with transformers' own forward, mixer and dense MLP (a subclass with a forward of its own is not taken)."""
        if not isinstance(module, modeling.Qwen3_5DecoderLayer) or inspect.unwrap(type(module).forward) is not _BLOCK_FORWARD:
            return False
        mixer = getattr(module, "linear_attn", None) or getattr(module, "self_attn", None)
        known = {modeling.Qwen3_5GatedDeltaNet: _MIXER_FORWARD, modeling.Qwen3_5Attention: _ATTENTION_FORWARD}
        same_mixer = any(isinstance(mixer, cls) and inspect.unwrap(type(mixer).forward) is forward for cls, forward in known.items())
        mlp = module.mlp
        return same_mixer and isinstance(mlp, modeling.Qwen3_5MLP) and inspect.unwrap(type(mlp).forward) is _MLP_FORWARD

    def layout(self, name: str, block: Any) -> BlockLayout:
        """See `Adapter.layout`."""
        is_gdn = hasattr(block, "linear_attn")
        mixer = _GDN_MIXER if is_gdn else _ATTENTION_MIXER
        return BlockLayout(name=name, kind=GDN if is_gdn else ATTENTION, regions=("input_norm", *mixer, *_FFN))

    def block_forward(self, block: Any, tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
        """See `Adapter.block_forward`."""
        return _block_forward(block, tape, *args, **kwargs)

    def parts(self, block: Any) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """See `Adapter.parts`."""
        mixer = (block.linear_attn, _mixer_forward) if hasattr(block, "linear_attn") else (block.self_attn, _attention_forward)
        return [mixer, (block.mlp, _mlp_forward)]

    def kernels(self, block: Any, device: torch.device) -> dict[str, str]:
        """See `Adapter.kernels`."""
        if not hasattr(block, "linear_attn"):
            return {"core_attn": describe(_attention_interface(block.self_attn))}
        norm = type(block.linear_attn.norm)
        return {
            "conv": describe(_kernel(_CONV, device)),
            "delta_rule": describe(_kernel(_RULE, device)),
            "norm_out": f"{'torch' if norm is modeling.Qwen3_5RMSNormGated else norm.__module__}.{norm.__name__}",
        }

    def own_forward_runs(self, block: Any, device: torch.device) -> bool:
        """See `Adapter.own_forward_runs`: on CPU only if the layer's functions are not bound to a GPU package's."""
        if device.type != "cpu" or not hasattr(block, "linear_attn"):
            return True
        return all(bound_function(getattr(modeling, name)) is _kernel(name, device) for name in (_CONV, _RULE))


def _block_forward(
    block: Any,
    tape: Tape,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    cache = args[0] if args else None
    for name in _CACHE_NAMES:
        cache = kwargs.pop(name, cache)
    residual = hidden_states
    x = tape.run(_INPUT_NORM, block, hidden_states)
    if block.block_type == "linear_attention":
        x = block.linear_attn(hidden_states=x, **{_MIXER_CACHE: cache}, attention_mask=attention_mask, **kwargs)
    else:
        name = "cache" if _NEW_CACHE_NAME else "past_key_values"
        x, _ = block.self_attn(
            hidden_states=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{name: cache},
            position_embeddings=position_embeddings,
            **kwargs,
        )
    hidden_states = tape.run(_MIXER_RESIDUAL, block, residual, x)
    residual = hidden_states
    x = tape.run(_POST_NORM, block, hidden_states)
    del hidden_states
    x = block.mlp(x)
    return tape.run(_FFN_RESIDUAL, block, residual, x)


ADAPTER = Qwen3_5Adapter()
