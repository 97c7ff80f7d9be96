"""Every offload label, alone and with recompute, on CPU: bit-equal to the untouched model, no buffer in use after a step.

The copies run on the simulated device, which poisons what is let go: a byte that comes back late or from the wrong place is a NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.apply import AppliedPlan, apply_plan
from lightning_gdn.labels import Selection
from lightning_gdn.models import GDNStack
from lightning_gdn.offload_config import OFFLOAD_LABELS
from tests.models import tiny_batch, tiny_qwen3_5, tiny_qwen3_next
from tests.parity.steps import OFFLOAD_PLANS, moving, nothing_left, unequal_plans

# Under autocast nobody saves the projections' outputs themselves, and a few tokens leave little to move; the first step says so.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")


@functools.cache
def dense() -> nn.Module:
    return tiny_qwen3_5()


@functools.cache
def experts() -> nn.Module:
    return tiny_qwen3_next()


def test_every_offload_label_that_a_model_can_have_is_in_the_matrix() -> None:
    tested = {label for plan in OFFLOAD_PLANS if plan.offload for label in plan.offload.labels}
    assert tested == set(OFFLOAD_LABELS) - {"moe_act"}, "moe_act has no region yet"


@pytest.mark.parametrize("tokens", [1, 3, 65])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["none", "left"])
def test_qwen3_5(tokens: int, precision: str, mask: str) -> None:
    assert unequal_plans(dense(), OFFLOAD_PLANS, tokens=tokens, precision=precision, mask=mask, leaf=mask == "left") == {}


@pytest.mark.parametrize(
    "case", [{"precision": "bf16_cached", "mask": "right"}, {"use_cache": True, "mask": "row"}, {"batch": 1, "tokens": 130}], ids=str
)
def test_qwen3_5_more(case: dict[str, Any]) -> None:
    assert unequal_plans(dense(), OFFLOAD_PLANS, **case) == {}


def test_a_model_in_bf16_and_in_evaluation_mode() -> None:
    assert unequal_plans(tiny_qwen3_5(dtype=torch.bfloat16).eval(), OFFLOAD_PLANS, tokens=33, mask="left") == {}


def test_attention_dropout_and_the_eager_implementation() -> None:
    assert unequal_plans(tiny_qwen3_5(attention_dropout=0.2, attn_implementation="eager"), OFFLOAD_PLANS, tokens=33, mask="left") == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_qwen3_next_whose_projection_is_one_storage(precision: str) -> None:
    plans = [plan for plan in OFFLOAD_PLANS if plan.offload and "mlp" not in (*plan.labels, *plan.offload.labels)]
    assert len(plans) >= 6
    assert unequal_plans(experts(), plans, tokens=33, precision=precision) == {}


def test_a_frozen_base_with_one_trained_matrix_per_block() -> None:
    model = tiny_qwen3_5()
    model.requires_grad_(False)
    for layer in model.model.layers[1:]:
        layer.mlp.up_proj.weight.requires_grad_()
        layer.post_attention_layernorm.weight.requires_grad_()
    model.model.layers[1].linear_attn.out_proj.weight.requires_grad_()
    assert unequal_plans(model, OFFLOAD_PLANS, tokens=33, precision="bf16") == {}


def stack_step(model: nn.Module, tokens: int) -> list[Tensor | None]:
    model.zero_grad()
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("tokens", [1, 65])
def test_gdn_stack(tokens: int) -> None:
    torch.manual_seed(0)
    model = GDNStack(num_layers=3, hidden_size=64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)
    want = stack_step(model, tokens)
    plans = [plan for plan in OFFLOAD_PLANS if plan.offload and not {"mlp", "core_attn"} & {*plan.labels, *plan.offload.labels}]
    assert len(plans) >= 6
    for plan in plans:
        with apply_plan(model, plan) as applied:
            assert all(torch.equal(a, b) for a, b in zip(stack_step(model, tokens), want, strict=True)), str(plan)  # type: ignore[arg-type]
            nothing_left(applied)


def test_a_penalty_on_gradients_differentiates_the_graph_of_a_backward() -> None:
    model = tiny_qwen3_5(attn_implementation="eager")

    def penalty() -> list[Tensor | None]:
        model.zero_grad()
        ids = torch.arange(12).view(1, 12)
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=x, labels=ids).loss
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    want = penalty()
    for plan in OFFLOAD_PLANS:
        with apply_plan(model, plan) as applied:
            got = penalty()
            assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got, want, strict=True)), str(plan)
            nothing_left(applied)


ALL = "offload:gdn_core_attn+offload:gdn_in_proj+offload:gdn_norm_out+offload:core_attn+offload:mlp"


def trained(model: nn.Module, plan: Selection | list[str], lengths: list[int], check: Any = None) -> dict[str, Tensor]:
    """Weights after one optimizer step per length, some of them with two micro-batches; evaluation comes first and in between."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with apply_plan(model, plan) as applied:
        for index, tokens in enumerate(lengths):
            if index % 7 == 0:
                model.eval()
                with torch.no_grad():
                    model(**tiny_batch(1, tokens + 2))
                model.train()
            for part in range(1 + (index % 5 == 0)):
                model(**tiny_batch(1 + part, tokens + part, seed=index)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if check is not None:
                check(applied)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_200_steps_of_changing_lengths_stay_under_the_cap_and_train_the_same_weights() -> None:
    """Zero buffers in use after every step, whatever the length; the pool never holds more than the cap; a cap below the need falls back."""
    lengths = [1 + (index * 37) % 83 for index in range(200)]
    cap = 1800 * 1024
    want = trained(tiny_qwen3_5(num_hidden_layers=2), [], lengths)
    seen: list[tuple[int, int]] = []

    def check(applied: AppliedPlan) -> None:
        statistics = applied.step_statistics()
        assert statistics is not None
        assert (statistics.buffers_in_use, statistics.pinned_in_use) == (0, 0)
        assert statistics.pinned_held <= cap
        assert statistics.bytes_out == statistics.bytes_in > 0
        seen.append((statistics.fallbacks, statistics.pinned_peak))

    plan = moving("gdn_conv+offload:gdn_core_attn+offload:gdn_norm_out+offload:mlp", max_pinned_gib=cap / 2**30)
    got = trained(tiny_qwen3_5(num_hidden_layers=2), plan, lengths, check)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert any(fallbacks for fallbacks, _ in seen), "the cap was never reached"
    assert any(not fallbacks for fallbacks, _ in seen)


def test_a_share_of_zero_moves_nothing_from_the_first_step_on() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving(ALL + "@0")) as applied:
        for first in (True, False):
            model(**tiny_batch(2, 33)).loss.backward()
            statistics = applied.step_statistics()
            assert statistics is not None
            assert (statistics.bytes_out, statistics.pinned_held, statistics.copies_out) == (0, 0, 0)
            assert statistics.skipped.get("budget", 0) == statistics.eligible_bytes
            assert (statistics.eligible_bytes > 0) is first, "only the forward that the ledger counts is looked at"
    assert applied.ledger.moved_bytes == 0


def test_a_share_moves_that_share_of_the_bytes() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving(ALL + "@0.5")) as applied:
        model(**tiny_batch(2, 65)).loss.backward()
        statistics = applied.step_statistics()
    assert statistics is not None
    assert 0.45 < statistics.bytes_out / statistics.eligible_bytes <= 0.5


def test_reloads_are_enqueued_a_block_before_their_use() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving("offload:gdn_core_attn", resident_last_blocks=1)) as applied:
        for _ in range(2):
            model(**tiny_batch(2, 33)).loss.backward()
            assert applied.engines is not None
            (engine,) = applied.engines.by_device.values()
            engine.timeline = timeline = []
        model(**tiny_batch(2, 33)).loss.backward()
        # The attention block at the end moves nothing; its backward brings back what the block before it moved.
        leads = [(entry.block, entry.during - entry.block) for entry in timeline if entry.kind == "in"]
        assert leads == [(block, 1) for block in (2, 1, 0) for _ in range(len(leads) // 3)] != []
        statistics = applied.step_statistics()
        assert statistics is not None
        assert statistics.late == 0
