"""apply_plan: what it takes, what it refuses and how, and what it says."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.olmo_hybrid.configuration_olmo_hybrid import OlmoHybridConfig
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from lightning_gdn.apply import FreesNothingWarning, apply_plan, instrument
from lightning_gdn.inspection import inspect_model
from lightning_gdn.labels import parse_arm, select
from lightning_gdn.plan import Plan
from tests.models import tiny_batch, tiny_qwen3_5


def olmo_hybrid() -> nn.Module:
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
    return OlmoHybridForCausalLM(OlmoHybridConfig(**fields, **linear, layer_types=["linear_attention", "full_attention"], pad_token_id=0))


def gradients(model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    model(**tiny_batch(2, 33)).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("wanted", ["gdn_conv", "full", ["layernorm"]])
def test_h01_a_model_without_gdn_is_an_error(wanted: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2))
    with pytest.raises(ValueError, match=r"model Sequential: 0 blocks.*Qwen3_5DecoderLayer.*recompute=\[\]"):
        apply_plan(model, wanted)
    assert apply_plan(model, []).plan.is_control, "the control needs no blocks"


@pytest.mark.parametrize("other", [None, "qwen3_5", Qwen3_5DecoderLayer, [nn.Linear(4, 4)]])
def test_what_is_no_module_is_an_error(other: Any) -> None:
    for call in (
        lambda: apply_plan(other, "gdn_conv"),
        lambda: apply_plan(other, []),
        lambda: inspect_model(other),
        lambda: instrument(other).__enter__(),
    ):
        with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got .*; pass the model itself"):
            call()


def test_h01_a_model_with_attention_blocks_only_is_an_error() -> None:
    model = tiny_qwen3_5(layer_types=["full_attention"] * 4)
    with pytest.raises(ValueError, match="0 blocks"):
        apply_plan(model, "core_attn")


def test_h13_an_unknown_family_is_refused_by_name() -> None:
    model = olmo_hybrid()
    report = inspect_model(model)
    assert report.blocks == ()
    assert report.unknown == ("model.layers.0.linear_attn (OlmoHybridGatedDeltaNet)",)
    with pytest.raises(ValueError, match=r"0 blocks.*model\.layers\.0\.linear_attn \(OlmoHybridGatedDeltaNet\)"):
        apply_plan(model, "gdn_conv")
    with pytest.raises(ValueError, match="OlmoHybridGatedDeltaNet"):
        with instrument(model):
            pass


class Own(Qwen3_5DecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("part", ["", "linear_attn", "mlp"])
def test_h13_a_subclass_with_a_forward_of_its_own_is_not_taken_over_and_named(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its forward may do anything: replacing it would silently drop what it adds."""
    model = tiny_qwen3_5()
    target = model.model.layers[1].get_submodule(part)
    base = type(target)
    target.__class__ = type("Own", (base,), {"forward": lambda self, *args, **kwargs: base.forward(self, *args, **kwargs)}) if part else Own
    want = gradients(model)
    report = inspect_model(model)
    assert [layout.name for layout in report.layouts] == ["model.layers.0", "model.layers.2", "model.layers.3"]
    assert len(report.unknown) == 1
    assert report.unknown[0].startswith("model.layers.1 (")
    with caplog.at_level(logging.WARNING, "lightning_gdn"), apply_plan(model, "full") as applied:
        assert "GDN blocks: 2 of 4 layers, 2 taken over; 1 of no known family stay untouched: model.layers.1 (" in caplog.text
        assert "model.layers.1 (" in applied.describe()
        got = gradients(model)
    assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_refused_attention_layer_is_named_too() -> None:
    model = tiny_qwen3_5()
    model.model.layers[3].__class__ = Own
    assert (
        inspect_model(model).describe(taken_over=True)
        == "GDN blocks: 3 of 4 layers, 3 taken over; 1 of no known family stay untouched: model.layers.3 (Own)"
    )


@pytest.mark.parametrize("control", [[], "none", select([]), parse_arm("none")])
def test_h02_the_control_installs_nothing(control: Any) -> None:
    model = tiny_qwen3_5()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    applied = apply_plan(model, control)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert not applied.installed
    assert "nothing is installed" in applied.describe()
    gradients(model)
    assert applied.ledger.retained_bytes is None
    applied.undo()


def test_labels_selection_and_plan_do_the_same() -> None:
    model = tiny_qwen3_5()
    plans = []
    for wanted in ("gdn_conv+layernorm", ["gdn_conv", "layernorm"], select(["gdn_conv", "layernorm"]), parse_arm("gdn_conv+layernorm")):
        with apply_plan(model, wanted) as applied:
            plans.append(applied.plan)
    with apply_plan(model, Plan.from_json(plans[0].to_json())) as applied:
        plans.append(applied.plan)
        gradients(model)
        assert applied.ledger.discarded_bytes > 0
    assert len(set(plans)) == 1


def test_a_plan_of_another_model_is_refused() -> None:
    with apply_plan(tiny_qwen3_5(), "gdn_conv") as applied:
        plan = applied.plan
    for other in (tiny_qwen3_5(num_hidden_layers=5), tiny_qwen3_5().model, tiny_qwen3_5(layer_types=["linear_attention"] * 4)):
        with pytest.raises(ValueError, match="made for another model"):
            apply_plan(other, plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "fast"}, "kernels: expected one of stock, fused, got 'fast'"),
        ({"on_foreign_hooks": "ignore"}, "on_foreign_hooks: expected one of raise, bypass, got 'ignore'"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        apply_plan(tiny_qwen3_5(), "gdn_conv", **options)


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = tiny_qwen3_5()
    for wanted in ("gdn_cnv", "moe", "full:block:9", "auto"):
        with pytest.raises(ValueError):
            apply_plan(model, wanted)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_checkpoint_wrapper_around_blocks_is_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny_qwen3_5()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    with pytest.raises(ValueError, match=r"'model\.layers\.1' is a CheckpointWrapper"):
        apply_plan(model, "gdn_conv")


def test_a_label_that_frees_nothing_is_said_in_the_first_step() -> None:
    """Frozen norms in front of frozen projections save their input only, and that is what a replay would need."""
    model = tiny_qwen3_5()
    model.requires_grad_(False)
    model.model.layers[0].linear_attn.A_log.requires_grad_()
    with apply_plan(model, "layernorm"):
        with pytest.warns(FreesNothingWarning, match="label 'layernorm' freed no memory"):
            gradients(model)
        gradients(model)  # and once is enough


def test_a_label_on_blocks_that_save_nothing_is_no_fault() -> None:
    model = tiny_qwen3_5()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_()
    with apply_plan(model, "gdn_norm_out+layernorm"):
        gradients(model)


def test_a_label_known_to_free_nothing_is_said_once_and_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_qwen3_5()
    with caplog.at_level(logging.INFO, "lightning_gdn"), apply_plan(model, "gdn_in_proj"):
        gradients(model)
        gradients(model)
    assert caplog.text.count("label gdn_in_proj frees nothing on this model") == 1


def test_describe_and_kernels() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, "gdn_conv+layernorm") as applied:
        assert applied.kernels == {}
        gradients(model)
        assert applied.kernels == {
            "conv": "torch.causal_conv1d_fn",
            "delta_rule": "torch.chunk_gated_delta_rule",
            "norm_out": "torch.Qwen3_5RMSNormGated",
            "core_attn": "torch.sdpa_attention_forward",
        }
        text = applied.describe()
    assert text.splitlines()[0] == "GDN blocks: 3 of 4 layers, 3 taken over"
    assert "conv: recompute in 3" in text
    assert "input_norm: recompute in 4" in text
    assert "kernels: conv torch.causal_conv1d_fn" in text
    json.dumps(applied.ledger.as_dict())


def test_the_context_manager_undoes_also_after_an_error() -> None:
    model = tiny_qwen3_5()
    with pytest.raises(KeyError), apply_plan(model, "full"):
        raise KeyError
    assert not any("forward" in module.__dict__ for module in model.modules())
