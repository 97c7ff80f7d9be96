"""Hugging Face hybrid blocks, region by region: mixer, attention, MLP, decoder layer, and the adapter made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import describe, use_fused
from ..regions import ATTENTION, GDN, BlockLayout
from ..tape import Tape
from .base import Adapter
from .hf_regions import CONV, RULE, Family

__all__ = ["HybridAdapter"]

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def mixer_forward(mixer: Any, tape: Tape, family: Family, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The Gated DeltaNet mixer, region by region."""
    regions, kernels = family.regions, tape.kernels
    mask: Tensor | None = kwargs.pop("attention_mask", None)
    cache = None
    for name in _CACHE_NAMES:
        cache = kwargs.pop(name, cache)
    if args:  # positional in transformers' order: cache, attention_mask
        cache, mask = args[0], args[1] if len(args) > 1 else mask
    if cache is not None and family.has_previous_state(cache, mixer.layer_idx):
        # Continuing from a cached state is decoding, not training: the class's own forward knows its kernels for that.
        return type(mixer).forward(mixer, hidden_states, **{family.mixer_cache: cache}, attention_mask=mask, **kwargs)
    tokens = hidden_states.shape[1]
    mixed, z, b, a = tape.run(regions.in_proj, mixer, family, hidden_states, mask)
    if cache is not None:  # written once, between regions: a replay must not write it again
        mixed = cache.update_conv_state(mixed, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    mixed = tape.run(regions.conv, mixer, family, kernels, mixed, tokens if cache is not None else None, dict(kwargs))
    q, k, v = tape.run(regions.prep, mixer, family, kernels, mixed)
    g, beta = tape.run(regions.gates, mixer, b, a)
    options = {"cu_seqlens": kwargs.pop("cu_seq_lens_q", None), **kwargs}
    o, state = tape.run(regions.delta_rule, mixer, family, q, k, v, g, beta, cache is not None, options)
    del mixed, b, a, q, k, v, g, beta  # a local would hold what the tape lets go
    if cache is not None:  # detached: the branch is never differentiated, and its graph would hold the block's slots
        cache.update_recurrent_state(state.detach(), mixer.layer_idx)
    x = tape.run(regions.norm_out, mixer, family, kernels, o, z)
    del o, z
    return tape.run(regions.out_proj, mixer, x)


def attention_forward(
    attention: Any, tape: Tape, family: Family, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
) -> Any:
    """The attention mixer, region by region."""
    regions = family.regions
    cache = None
    for name in _CACHE_NAMES:
        cache = kwargs.pop(name, cache)
    cos, sin = position_embeddings
    q, k, v, gate = tape.run(regions.qkv, attention, family, hidden_states, cos, sin)
    if cache is not None:
        extra = {"kwargs": kwargs} if family.new_cache_name else {}
        k, v = cache.update(k, v, attention.layer_idx, **extra)
    o, weights = tape.run(regions.core_attn, attention, family, q, k, v, attention_mask, kwargs)
    del q, k, v
    return tape.run(regions.attn_out, attention, o, gate), weights


def mlp_forward(mlp: Any, tape: Tape, family: Family, x: Tensor) -> Tensor:
    """The dense MLP, region by region."""
    regions = family.regions
    gate, up = tape.run(regions.gate_up, mlp, x)
    x = tape.run(regions.act, mlp, gate, up)
    del gate, up
    return tape.run(regions.down, mlp, x)


def block_forward(
    block: Any,
    tape: Tape,
    family: Family,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """A decoder layer, region by region."""
    regions = family.regions
    cache = args[0] if args else None
    for name in _CACHE_NAMES:
        cache = kwargs.pop(name, cache)
    residual = hidden_states
    x = tape.run(regions.input_norm, block, hidden_states)
    if block.block_type == "linear_attention":
        x = block.linear_attn(hidden_states=x, **{family.mixer_cache: cache}, attention_mask=attention_mask, **kwargs)
    else:
        x, _ = block.self_attn(
            hidden_states=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{family.attention_cache: cache},
            position_embeddings=position_embeddings,
            **kwargs,
        )
    hidden_states = tape.run(regions.mixer_residual, block, residual, x)
    residual = hidden_states
    x = tape.run(regions.post_norm, block, hidden_states)
    del hidden_states
    x = block.mlp(x) if isinstance(block.mlp, family.mlp) else tape.run(regions.moe, block, x)
    return tape.run(regions.ffn_residual, block, residual, x)


_GDN_MIXER = ("in_proj", "conv", "prep", "gates", "delta_rule", "norm_out", "out_proj")
_ATTENTION_MIXER = ("qkv", "core_attn", "attn_out")
_DENSE = ("gate_up", "act", "down")


class HybridAdapter(Adapter):
    """Blocks of one family, wherever they are nested."""

    def __init__(self, name: str, family: Family) -> None:
        self.name, self._family = name, family
        self.block_class = family.block.__name__
        self._forwards = {cls: inspect.unwrap(cls.forward) for cls in (family.block, family.mixer, family.attention, family.mlp)}

    def _is(self, module: Any, cls: Any) -> bool:
        """An instance with transformers' own forward; a subclass with a forward of its own may do anything."""
        return isinstance(module, cls) and inspect.unwrap(type(module).forward) is self._forwards[cls]

    def matches(self, module: nn.Module) -> bool:
        """See `Adapter.matches`. A mixture-of-experts part runs as it is and is always kept."""
        family = self._family
        if not self._is(module, family.block):
            return False
        mixer = getattr(module, "linear_attn", None) or getattr(module, "self_attn", None)
        mlp = module.mlp
        dense = self._is(mlp, family.mlp)
        return (self._is(mixer, family.mixer) or self._is(mixer, family.attention)) and (dense or not isinstance(mlp, family.mlp))

    def layout(self, name: str, block: Any) -> BlockLayout:
        """See `Adapter.layout`."""
        is_gdn = hasattr(block, "linear_attn")
        mixer = _GDN_MIXER if is_gdn else _ATTENTION_MIXER
        ffn = _DENSE if isinstance(block.mlp, self._family.mlp) else ()
        regions = ("input_norm", *mixer, "mixer_residual", "post_norm", *ffn, "ffn_residual")
        return BlockLayout(name=name, kind=GDN if is_gdn else ATTENTION, regions=regions)

    def block_forward(self, block: Any, tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
        """See `Adapter.block_forward`."""
        return block_forward(block, tape, self._family, *args, **kwargs)

    def parts(self, block: Any) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """See `Adapter.parts`."""
        found: list[tuple[nn.Module, Callable[..., Any]]] = [
            (block.linear_attn, self._mixer) if hasattr(block, "linear_attn") else (block.self_attn, self._attention)
        ]
        if isinstance(block.mlp, self._family.mlp):
            found.append((block.mlp, self._mlp))
        return found

    def _mixer(self, mixer: Any, tape: Tape, *args: Any, **kwargs: Any) -> Any:
        return mixer_forward(mixer, tape, self._family, *args, **kwargs)

    def _attention(self, attention: Any, tape: Tape, *args: Any, **kwargs: Any) -> Any:
        return attention_forward(attention, tape, self._family, *args, **kwargs)

    def _mlp(self, mlp: Any, tape: Tape, *args: Any, **kwargs: Any) -> Any:
        return mlp_forward(mlp, tape, self._family, *args, **kwargs)

    def kernels(self, block: Any, device: torch.device, kernels: str) -> dict[str, str]:
        """See `Adapter.kernels`."""
        family = self._family
        if not hasattr(block, "linear_attn"):
            return {"core_attn": describe(family.attention_interface(block.self_attn))}
        norm = type(block.linear_attn.norm)
        plain = norm is family.plain_norm
        faster = use_fused(kernels, device)
        return {
            "conv": "fla.causal_conv1d" if faster else describe(family.kernel(CONV, device)),
            "delta_rule": describe(family.kernel(RULE, device)),
            "norm_out": "fla.rms_norm_gated" if faster and plain else f"{'torch' if plain else norm.__module__}.{norm.__name__}",
        }

    def own_forward_runs(self, block: Any, device: torch.device, kernels: str) -> bool:
        """See `Adapter.own_forward_runs`."""
        if not hasattr(block, "linear_attn"):
            return True
        if device.type == "cpu":
            return self._family.binds_torch()
        return not use_fused(kernels, device)
