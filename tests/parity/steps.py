"""One training step of a model, and its comparison with the same step of the untouched model, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gdn.apply import AppliedPlan, apply_plan
from lightning_gdn.labels import Selection, parse_arm
from tests.models import TINY_VOCAB

__all__ = ["LABELS", "OFFLOAD_PLANS", "PLANS", "Step", "differences", "mask_of", "moving", "nothing_left", "step", "unequal_plans"]

LABELS = (
    "gdn_in_proj_conv",
    "gdn_in_proj",
    "gdn_in_proj_split",
    "gdn_in_proj_conv_prep",
    "gdn_conv",
    "gdn_front",
    "gdn_norm_out",
    "gdn_gated_delta_rule",
    "gdn",
    "layernorm",
    "mlp",
    "mlp_act",
    "core_attn",
)
"""Every label that works on a dense Qwen3.5 model."""

PLANS = (
    *LABELS,
    "full",
    "full:uniform:2",
    "full:uniform:3",
    "full:block:2",
    "gdn_conv+gdn_norm_out+layernorm",
    "gdn_norm_out+layernorm+mlp_act",
    "gdn+mlp+layernorm+core_attn",
    "gdn_in_proj_conv+full:block:1+mlp",
)
"""The labels, whole-block recompute by both methods, and unions."""


def moving(arm: str, **fields: Any) -> Selection:
    """An arm with offload labels for a tiny model: every size moves, from every block."""
    selection = parse_arm(arm)
    assert selection.offload is not None
    return replace(selection, offload=replace(selection.offload, **{"min_bytes": 0, "resident_last_blocks": 0, **fields}))


OFFLOAD_PLANS = (
    moving("offload:gdn_core_attn"),
    moving("offload:gdn_in_proj"),
    moving("offload:gdn_norm_out"),
    moving("offload:core_attn"),
    moving("offload:mlp"),
    moving("full+offload:block_input"),
    moving("full:uniform:2+offload:block_input"),
    moving("full:block:2+mlp+offload:block_input+offload:gdn_core_attn"),
    moving("gdn_conv+gdn_norm_out+layernorm+offload:gdn_core_attn"),
    moving("gdn_norm_out+mlp+core_attn+offload:gdn_norm_out+offload:mlp+offload:core_attn"),
    moving("gdn_gated_delta_rule+gdn_in_proj+offload:gdn_core_attn+offload:gdn_in_proj"),
    moving("offload:gdn_core_attn+offload:gdn_in_proj+offload:gdn_norm_out+offload:core_attn+offload:mlp", resident_last_blocks=1, prefetch_blocks=2),
    moving("offload:gdn_core_attn+offload:mlp@0.4", release_blocks=0),
    moving("gdn_in_proj_conv+offload:gdn_core_attn+offload:mlp", max_pinned_gib=2**18 / 2**30, release_blocks=3),
)
"""Each offload label alone, with recompute, all together, and with each knob off its default."""


@dataclass(frozen=True)
class Step:
    """What a step computed: the loss, the gradient of the model's input, of every parameter, and the random state afterwards."""

    tensors: dict[str, Tensor | None]


def mask_of(kind: str, batch: int, tokens: int) -> Tensor | None:
    """(B, T) padding mask: `none`, `left`, `right`, `row` (one row is padding only); with a suffix `_bool` boolean, else int64."""
    if kind == "none":
        return None
    side, _, dtype = kind.partition("_")
    mask = torch.ones(batch, tokens, dtype=torch.long)
    pad = max(1, tokens // 3) if tokens > 1 else 0
    if side == "left":
        mask[-1, :pad] = 0
    elif side == "right":
        mask[-1, tokens - pad :] = 0
    elif side == "row":
        mask[-1] = 0
    else:
        raise ValueError(kind)
    return mask.bool() if dtype == "bool" else mask


def step(
    model: nn.Module,
    *,
    tokens: int = 65,
    batch: int = 2,
    mask: str = "none",
    precision: str = "fp32",
    leaf: bool = False,
    use_cache: bool = False,
    seed: int = 3,
) -> Step:
    """Forward and backward from zeroed gradients.

    Args:
        mask: as `mask_of`.
        precision: `fp32`; `bf16` is what Lightning's `bf16-mixed` does, `bf16_cached` the same with autocast's weight cache on.
        leaf: feed embeddings that are a leaf of the graph, instead of embedding the tokens in the model.
    """
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY_VOCAB, (batch, tokens), generator=generator)
    padding = mask_of(mask, batch, tokens)
    embeddings: Tensor = model.get_input_embeddings()(ids)
    if leaf:
        embeddings = embeddings.detach().requires_grad_()
    elif embeddings.requires_grad:
        embeddings.retain_grad()
    labels = ids if padding is None else ids.masked_fill(padding == 0, -100)
    autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=precision == "bf16_cached") if precision != "fp32" else nullcontext()
    torch.manual_seed(seed)
    with autocast:
        # Transformers' own loss shifts by one token: with one token it is the mean over nothing, NaN.
        out = model(inputs_embeds=embeddings, attention_mask=padding, labels=labels if tokens > 1 else None, use_cache=use_cache)
        loss = out.loss if tokens > 1 else out.logits.float().square().mean()
    loss.backward()  # outside autocast, as Lightning does
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Step({"loss": loss.detach(), "logits": out.logits.detach(), "input gradient": embeddings.grad, "rng": torch.get_rng_state(), **grads})


def differences(got: Step, want: Step) -> list[str]:
    """Names of the tensors that are not the same bit for bit (NaN equals NaN), or of which only one is missing."""
    assert got.tensors.keys() == want.tensors.keys()
    return [name for name, wanted in want.tensors.items() if not _same(got.tensors[name], wanted)]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))


def nothing_left(applied: AppliedPlan) -> None:
    """No host buffer is in use, and the simulated device saw no copy at the wrong time."""
    for engine in applied.engines.by_device.values() if applied.engines is not None else ():
        engine.collect()
        assert (engine.pool.buffers_in_use, engine.pool.in_use) == (0, 0)
        assert engine._backend.faults == []  # type: ignore[attr-defined]


def unequal_plans(model: nn.Module, plans: Iterable[Any] = PLANS, **case: Any) -> dict[str, list[str]]:
    """Plan -> what differs from the untouched model in this case, for the plans of which something differs."""
    return dict(_unequal(model, plans, case))


def _unequal(model: nn.Module, plans: Iterable[Any], case: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    want = step(model, **case)
    moved = sum(bool(t.any()) for name, t in want.tensors.items() if t is not None and name not in ("rng", "loss", "logits"))
    assert moved > 4, "a comparison of zeros proves nothing"
    for plan in plans:
        with apply_plan(model, plan) as applied:
            got = step(model, **case)
            assert applied.ledger.complete, "a block did not run through the tape"
            nothing_left(applied)
        if found := differences(got, want):
            yield str(plan), found
