"""Partly frozen models, LoRA with dropout (own and PEFT's), and models nested in others: bit-equal, and found."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from lightning_gdn.apply import apply_plan
from lightning_gdn.inspection import inspect_model
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import PLANS, unequal_plans

# Norms with frozen weights in front of frozen projections save next to nothing, which the first step says.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")


class Lora(nn.Module):
    """A linear with a low-rank update behind dropout, written by hand."""

    def __init__(self, base: nn.Linear, p: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(p)
        self.a = nn.Linear(base.in_features, 4, bias=False)
        self.b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x)))


def lora_everywhere(p: float = 0.3) -> nn.Module:
    model = tiny_qwen3_5()
    model.requires_grad_(False)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.in_proj_qkv = Lora(layer.linear_attn.in_proj_qkv, p)
            layer.linear_attn.out_proj = Lora(layer.linear_attn.out_proj, p)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj, p)
    return model.train()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_with_dropout(precision: str, training: bool) -> None:
    """`steps.step` also compares the random state after the step: a replay must leave it as an unreplayed step does."""
    assert unequal_plans(lora_everywhere().train(training), tokens=33, precision=precision, mask="left") == {}


def peft_model(**targets: Any) -> nn.Module:
    config = peft.LoraConfig(r=4, lora_dropout=0.2, init_lora_weights=False, task_type="CAUSAL_LM", **targets)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_qwen3_5(), config).train()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peft_lora_with_dropout(precision: str) -> None:
    model = peft_model(target_modules=["in_proj_qkv", "out_proj", "o_proj"])
    assert inspect_model(model).describe(taken_over=True).startswith("GDN blocks: 3 of 4 layers, 3 taken over")
    assert unequal_plans(model, tokens=33, precision=precision, mask="left") == {}


def test_h03_frozen_embedding() -> None:
    """The first block's input needs no gradient, the parameters inside do."""
    model = tiny_qwen3_5()
    model.model.embed_tokens.requires_grad_(False)
    assert unequal_plans(model, tokens=65, mask="left") == {}


def test_h03_one_adapter_in_the_first_block_and_nothing_else() -> None:
    model = tiny_qwen3_5()
    model.requires_grad_(False)
    mixer = model.model.layers[0].linear_attn
    mixer.in_proj_qkv = Lora(mixer.in_proj_qkv, 0.0)
    # Four tensors have gradients at most, fewer than unequal_plans asks for: compare two optimizer steps instead.
    start, batch = copy.deepcopy(model.state_dict()), tiny_batch(2, 65)

    def train() -> list[Tensor]:
        model.load_state_dict(start)
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
        return [w.detach().clone() for w in weights]

    want = train()
    assert not torch.equal(want[1], start["model.layers.0.linear_attn.in_proj_qkv.b.weight"]), "the adapter must move"
    for plan in PLANS:
        with apply_plan(model, plan):
            got = train()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), plan


def test_frozen_blocks_between_trained_ones() -> None:
    model = tiny_qwen3_5()
    model.model.layers[1].requires_grad_(False)
    model.model.layers[3].self_attn.requires_grad_(False)
    assert unequal_plans(model, tokens=65) == {}


class Holder(nn.Module):
    """As a LightningModule holds its model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"backbone": model})
        self.head = nn.Linear(4, 4)


def conditional_generation() -> nn.Module:
    vision = Qwen3_5VisionConfig(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, num_position_embeddings=16)
    text = tiny_qwen3_5().config
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text.to_dict(), vision_config=vision.to_dict()))


@pytest.mark.parametrize(
    ("build", "prefix"),
    [
        (tiny_qwen3_5, "model.layers."),
        (lambda: tiny_qwen3_5().model, "layers."),
        (lambda: Holder(tiny_qwen3_5()), "net.backbone.model.layers."),
        (lambda: AutoModelForCausalLM.from_config(tiny_qwen3_5().config), "model.layers."),
        (lambda: peft_model(target_modules=["q_proj"]), "base_model.model.model.layers."),
        (conditional_generation, "model.language_model.layers."),
    ],
    ids=["causal-lm", "text-model", "nested", "auto", "peft", "conditional-generation"],
)
def test_h01_every_nesting_is_found(build: Any, prefix: str) -> None:
    model = build()
    report = inspect_model(model)
    assert [layout.name for layout in report.layouts] == [f"{prefix}{i}" for i in range(4)]
    assert report.describe(taken_over=True) == "GDN blocks: 3 of 4 layers, 3 taken over"
    with apply_plan(model, "gdn_norm_out") as applied:
        assert applied.plan.counts() == {"norm_out: recompute": 3}
        assert "GDN blocks: 3 of 4 layers, 3 taken over" in applied.describe()


def test_the_text_tower_of_a_vision_model_is_bit_equal() -> None:
    model = conditional_generation().train()
    batch = tiny_batch(2, 33)
    model(**batch).loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for plan in ("gdn_in_proj_conv", "full", "gdn_conv+gdn_norm_out+layernorm"):
        model.zero_grad()
        with apply_plan(model, plan) as applied:
            model(**batch).loss.backward()
            assert applied.ledger.complete
        assert all(p.grad is want[n] is None or torch.equal(p.grad, want[n]) for n, p in model.named_parameters()), plan
