"""Qwen3-Next, on CPU: every label bit-equal; a fused projection, and a mixture-of-experts part that is always kept."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from lightning_gdn.apply import apply_plan, instrument
from lightning_gdn.inspection import inspect_model
from tests.models import tiny_batch, tiny_qwen3_next
from tests.parity.steps import PLANS, unequal_plans

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")

NO_DENSE_MLP = tuple(plan for plan in PLANS if not {"mlp", "mlp_act"} & set(plan.split("+")))


@functools.cache
def shared_model(**overrides: Any) -> torch.nn.Module:
    return tiny_qwen3_next(**overrides)


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_labels_are_bit_equal(tokens: int, precision: str, mask: str, training: bool) -> None:
    model = shared_model().train(training)
    assert unequal_plans(model, plans=NO_DENSE_MLP, tokens=tokens, precision=precision, mask=mask, leaf=not training) == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_blocks_with_a_dense_mlp(precision: str) -> None:
    assert unequal_plans(tiny_qwen3_next(mlp_only_layers=[1, 3]), tokens=65, precision=precision) == {}


@pytest.mark.parametrize("tokens", [3, 65])
def test_use_cache(tokens: int) -> None:
    assert unequal_plans(shared_model().train(), plans=NO_DENSE_MLP, tokens=tokens, use_cache=True) == {}


@pytest.mark.parametrize("heads", [(2, 2), (2, 6), (1, 3)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (16, 32), (32, 16)], ids=str)
def test_head_layouts(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    layout = {"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1], "linear_key_head_dim": dims[0], "linear_value_head_dim": dims[1]}
    assert unequal_plans(tiny_qwen3_next(**layout), plans=NO_DENSE_MLP, tokens=65) == {}


def test_the_experts_are_kept_and_the_dense_label_is_refused() -> None:
    model = shared_model().train()
    assert all("gate_up" not in layout.regions for layout in inspect_model(model).layouts)
    with pytest.raises(ValueError, match="none of the model's 4 blocks has a region"):
        apply_plan(model, "mlp")
    with instrument(model) as ledger:
        model(**tiny_batch(2, 65)).loss.backward()
    untouched = ledger.by_region()["moe"].kept_bytes
    assert untouched > 0
    with apply_plan(model, "full") as applied:
        model(**tiny_batch(2, 65)).loss.backward()
    moe = applied.ledger.by_region()["moe"]
    assert moe.replays == 0
    assert moe.freed_bytes == 0
    # what it saves of the norm's output is the norm's to bring back; everything else stays
    assert moe.kept_bytes + moe.discarded_bytes == untouched
    assert moe.discarded_bytes == 4 * 2 * 65 * model.config.hidden_size * 4


@pytest.mark.parametrize(("value_heads", "held"), [(2, True), (4, False)])
def test_z_is_accounted_by_storage(value_heads: int, held: bool) -> None:
    """With one value head per key head z is a view of the fused projection, and the eager norm in fp32 saves z as it is: the whole
    projection stays, and counts as that. With more, transformers copies z, and the projection goes."""
    model = tiny_qwen3_next(linear_num_value_heads=value_heads, num_hidden_layers=1, layer_types=["linear_attention"])
    config, rows = model.config, 2 * 65
    key, value = config.linear_num_key_heads * config.linear_key_head_dim, value_heads * config.linear_value_head_dim
    projection = rows * (2 * key + 2 * value) * 4
    sizes: dict[int, int] = {}
    kept = []  # keeps the storages alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**tiny_batch(2, 65)).loss.backward()
    assert (projection in sizes.values()) == held
    with instrument(model) as ledger:
        model(**tiny_batch(2, 65)).loss.backward()
    norm = ledger.by_region()["norm_out"].kept_bytes
    with apply_plan(model, "gdn_in_proj_conv") as applied:
        model(**tiny_batch(2, 65)).loss.backward()
    z = projection if held else rows * value * 4
    assert applied.ledger.by_region()["norm_out"].discarded_bytes == z, "W3 replays the projection, so z goes with its storage"
    assert applied.ledger.by_region()["norm_out"].kept_bytes == norm - z
