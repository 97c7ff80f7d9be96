"""Head layouts of public models and beyond them: value heads one to four times the key heads, unequal widths, width 256."""

from __future__ import annotations

import pytest
import torch

from lightning_gdn.apply import apply_plan
from tests.models import tiny_batch, tiny_qwen3_5, tiny_qwen3_next
from tests.parity.steps import unequal_plans

PLANS = ("gdn_in_proj_conv", "gdn_in_proj_conv_prep", "gdn_conv+gdn_norm_out+layernorm", "gdn", "core_attn+mlp", "full", "full:uniform:2")


def gdn(key_heads: int, value_heads: int, key_dim: int = 16, value_dim: int = 16) -> dict[str, int]:
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


LAYOUTS = {
    "v=k": gdn(2, 2),
    "v=2k": gdn(2, 4),
    "v=3k": gdn(2, 6),
    "v=4k": gdn(2, 8),
    "wider-values": gdn(2, 2, 16, 32),
    "narrower-values": gdn(2, 4, 32, 16),
    "unequal-and-repeated": gdn(1, 3, 24, 40),
    "gdn-width-256": gdn(1, 2, 256, 256),
    "gdn-values-of-width-256": gdn(1, 1, 128, 256),
}
ATTENTION_LAYOUTS = {
    "width-256": {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
    "as-many-key-heads": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 4},
    "one-key-head-for-four": {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1},
    "one-head": {"head_dim": 64, "num_attention_heads": 1, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_h11_gdn_layouts(layout: str, precision: str) -> None:
    fields = LAYOUTS[layout]
    model = tiny_qwen3_5(**fields)
    mixer = model.model.layers[0].linear_attn
    keys, values = (fields[f"linear_num_{kind}_heads"] * fields[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
    assert (mixer.key_dim, mixer.value_dim) == (keys, values)
    assert unequal_plans(model, PLANS, tokens=65, mask="left", precision=precision) == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ATTENTION_LAYOUTS)
def test_h11_attention_layouts(layout: str, precision: str) -> None:
    assert unequal_plans(tiny_qwen3_5(**ATTENTION_LAYOUTS[layout]), PLANS, tokens=33, mask="left", precision=precision) == {}


@pytest.mark.parametrize("layout", ["v=4k", "unequal-and-repeated", "gdn-width-256"])
def test_h11_layouts_of_qwen3_next(layout: str) -> None:
    """Its projections are fused per key head, so the split follows the layout. (The others are in `test_qwen3_next.py`.)"""
    model = tiny_qwen3_next(**LAYOUTS[layout], head_dim=256)
    plans = [plan for plan in PLANS if "mlp" not in plan]
    assert unequal_plans(model, plans, tokens=65, mask="left", precision="bf16") == {}


@pytest.mark.parametrize("layout", ["v=k", "v=4k", "unequal-and-repeated"])
def test_what_the_projections_and_the_convolution_free_follows_from_the_widths(layout: str) -> None:
    """The convolution saves its input and what SiLU takes, both as wide as q, k and v together, for every layout."""
    model = tiny_qwen3_5(**LAYOUTS[layout])
    width = model.model.layers[0].linear_attn.conv_dim
    tokens, rows, blocks, fp32 = 65, 2, 3, 4
    with apply_plan(model, "gdn_conv") as applied:
        model(**tiny_batch(rows, tokens)).loss.backward()
        conv = applied.ledger.by_region()["conv"]
    assert conv.discarded_bytes % width == 0
    assert conv.discarded_bytes >= blocks * rows * tokens * width * fp32


def test_two_widths_in_one_process() -> None:
    """Nothing about a layout is remembered from the first model."""
    models = [tiny_qwen3_5(**LAYOUTS[name]) for name in ("v=3k", "narrower-values")]
    batch = tiny_batch(2, 33)
    want = []
    for model in models:
        model(**batch).loss.backward()
        want.append([p.grad for p in model.parameters()])
        model.zero_grad()
    applied = [apply_plan(model, "full") for model in models]
    for model, gradients in zip(reversed(models), reversed(want), strict=True):
        model(**batch).loss.backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    for plan in applied:
        plan.undo()
