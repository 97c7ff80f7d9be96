"""The vocabulary: blocks, regions and modes. Pure data; imports nothing but the standard library.

A *block* is one decoder layer, its *mixer* the Gated DeltaNet or attention part. A *region* is a named step of a block, in
pipeline order. A *mode* says what autograd may retain from a region. Which tensor belongs to which region is decided by the
adapter of a model; this file only fixes the names and their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["GDN", "ATTENTION", "BlockLayout", "Mode", "Moves", "REGIONS", "stronger"]

GDN = "gdn"
"""Block kind: the mixer is a Gated DeltaNet layer."""
ATTENTION = "attention"
"""Block kind: the mixer is a softmax attention layer."""


class Mode(StrEnum):
    """What is retained of a region between forward and backward."""

    KEEP = "keep"
    """Everything autograd saves stays: what the untouched model does."""
    RECOMPUTE_INSIDE = "recompute_inside"
    """What the region saves inside goes and is replayed; its outputs stay (a plain checkpoint)."""
    OFFLOAD = "offload"
    """What the region saves moves to pinned host memory, with every alias of it in the block."""
    RECOMPUTE = "recompute"
    """The inside and the outputs go, whoever saved them; the region is replayed in backward."""


class Moves(StrEnum):
    """Which storages around a region move to the host. Everything in the block that aliases one follows, whatever its region's mode."""

    SAVED = "saved"
    """What the region saves; where it is recomputed, what is held for its replay instead."""
    OUTPUTS = "outputs"
    """The region's outputs, whoever saves them."""
    INPUTS = "inputs"
    """What is held for the region's replay; for the first region of a block that is recomputed whole, that is the block's input."""


_STRENGTH = {Mode.KEEP: 0, Mode.RECOMPUTE_INSIDE: 1, Mode.OFFLOAD: 2, Mode.RECOMPUTE: 3}


def stronger(a: Mode, b: Mode) -> Mode:
    """Union of two modes asked for one region: recompute > offload > recompute_inside > keep."""
    return a if _STRENGTH[a] >= _STRENGTH[b] else b


REGIONS: dict[str, str] = {
    "input_norm": "norm before the mixer",
    "in_proj": "GDN projections: hidden states to q|k|v before the convolution, z, b and a (padding mask applied first)",
    "conv": "causal depthwise convolution and its activation over q|k|v",
    "prep": "split into q, k, v; head repeat, l2-norm and contiguous copies where the installed model does them",
    "gates": "log decay g and write strength beta from a and b",
    "delta_rule": "the gated delta rule (chunked recurrence)",
    "norm_out": "RMS norm of the recurrence output, gated by z",
    "out_proj": "GDN output projection",
    "qkv": "attention projections, q/k norm and rotary embedding",
    "core_attn": "softmax attention",
    "attn_out": "output gate and output projection of attention",
    "mixer_residual": "residual addition after the mixer",
    "post_norm": "norm before the feed-forward part",
    "gate_up": "gate and up projections of the dense MLP",
    "act": "activation and product of the dense MLP",
    "down": "down projection of the dense MLP",
    "moe": "mixture-of-experts part as one step; always kept, so that routing decisions are never replayed",
    "router": "expert routing (its decisions are kept, never replayed)",
    "experts": "routed experts",
    "moe_act": "activation inside the experts",
    "shared_experts": "shared experts",
    "ffn_residual": "residual addition after the feed-forward part",
}
"""Every region name in pipeline order, with what it computes. A block has the subset that its adapter declares."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One block as an adapter found it: enough to make a plan without a model."""

    name: str
    """Fully qualified module name of the block inside the model it was found in."""
    kind: str
    """`"gdn"` or `"attention"`."""
    regions: tuple[str, ...]
    """Region names in pipeline order."""

    def __post_init__(self) -> None:
        unknown = [r for r in self.regions if r not in REGIONS]
        if unknown:
            raise ValueError(f"BlockLayout {self.name!r}: unknown regions {unknown}; known: {', '.join(REGIONS)}")
