"""Every label, on CPU: loss, input gradient and every parameter gradient equal the untouched model's bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from lightning_gdn.apply import apply_plan
from tests.models import tiny_qwen3_5
from tests.parity.steps import PLANS, differences, step, unequal_plans

# One to three tokens leave some labels nothing above the size threshold to free, which the first step says.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")


@functools.cache
def shared_model(**overrides: Any) -> torch.nn.Module:
    return tiny_qwen3_5(**overrides)


@pytest.fixture
def model() -> torch.nn.Module:
    return shared_model().train()


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["none", "left"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_labels_are_bit_equal(model: torch.nn.Module, tokens: int, precision: str, mask: str, training: bool) -> None:
    # The flag and the kind of input vary together, which halves the matrix: neither is read on this path without dropout.
    model.train(training)
    assert unequal_plans(model, tokens=tokens, precision=precision, mask=mask, leaf=not training) == {}


@pytest.mark.parametrize("mask", ["right", "row", "left_bool"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_masks(model: torch.nn.Module, mask: str, precision: str) -> None:
    assert unequal_plans(model, tokens=65, precision=precision, mask=mask) == {}


@pytest.mark.parametrize("mask", ["none", "left"])
def test_one_sequence(model: torch.nn.Module, mask: str) -> None:
    assert unequal_plans(model, tokens=65, batch=1, mask=mask, precision="bf16", leaf=True) == {}


@pytest.mark.parametrize("tokens", [3, 65])
@pytest.mark.parametrize("mask", ["none", "left"])
def test_autocast_with_its_weight_cache(model: torch.nn.Module, tokens: int, mask: str) -> None:
    assert unequal_plans(model, tokens=tokens, precision="bf16_cached", mask=mask) == {}


@pytest.mark.parametrize("tokens", [1, 3, 65])
@pytest.mark.parametrize(("precision", "mask"), [("fp32", "none"), ("bf16", "left")])
def test_use_cache(model: torch.nn.Module, tokens: int, precision: str, mask: str) -> None:
    assert unequal_plans(model, tokens=tokens, precision=precision, mask=mask, use_cache=True) == {}


@pytest.mark.parametrize(
    "layout",
    [
        {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 1},
        {"linear_key_head_dim": 8, "linear_value_head_dim": 24},
        {"linear_conv_kernel_dim": 2, "num_key_value_heads": 2},
    ],
    ids=["v=k", "v=3k", "one-head", "unequal-dims", "short-conv"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_head_layouts(layout: dict[str, int], precision: str) -> None:
    assert unequal_plans(shared_model(**layout), tokens=65, mask="left", precision=precision) == {}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_attention_dropout_draws_the_same_numbers(implementation: str, training: bool) -> None:
    model = tiny_qwen3_5(attention_dropout=0.2, attn_implementation=implementation).train(training)
    assert unequal_plans(model, tokens=33, mask="left") == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_in_bf16(precision: str) -> None:
    """What a model loaded in bf16 has, without and with autocast."""
    assert unequal_plans(tiny_qwen3_5(dtype=torch.bfloat16), tokens=65, mask="left", precision=precision) == {}


def test_a_penalty_on_gradients() -> None:
    """Double backward: the graph of the first backward is differentiated again. (PyTorch's fused attention on CPU cannot; the eager one can.)"""
    model = tiny_qwen3_5(attn_implementation="eager")

    def penalty() -> list[torch.Tensor | None]:
        model.zero_grad()
        ids = torch.arange(12).view(1, 12)
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        loss = model(inputs_embeds=x, labels=ids).loss
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    want = penalty()
    unequal = []
    for plan in PLANS:
        with apply_plan(model, plan):
            got = penalty()
        if not all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            unequal.append(plan)
    assert unequal == []


def test_meta_a_wrong_gradient_is_found(model: torch.nn.Module) -> None:
    want = step(model, tokens=3)
    got = step(model, tokens=3)
    gradient = got.tensors["model.layers.0.linear_attn.A_log"]
    assert gradient is not None
    gradient.view(torch.int32)[0] ^= 1  # the last bit of one gradient
    assert differences(got, want) == ["model.layers.0.linear_attn.A_log"]
