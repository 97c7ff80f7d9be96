"""PEFT adapters on every projection of a hybrid model, trained under a plan: bit-equal to the same model without one."""

from __future__ import annotations

import copy
import logging
from typing import Any

import peft
import pytest
import torch
from torch import nn

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.apply import apply_plan
from lightning_gdn.inspection import inspect_model
from tests.lightning_models import TinyModule, same_run, train
from tests.models import tiny_batch, tiny_qwen3_5, tiny_qwen3_next
from tests.parity.steps import PLANS, differences, step, unequal_plans

# Norms with frozen weights in front of frozen projections save next to nothing, which the first step says.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")

GDN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EVERY = (*GDN, *ATTENTION, *MLP)
FEW = ("gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm+mlp", "full", "full:uniform:2")
CASE: dict[str, Any] = {"tokens": 33, "mask": "left"}


def wrapped(config: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    """The tiny model with adapters whose every matrix is random (LoRA's B is zero otherwise, and a forgotten adapter would not show)."""
    settings = {"r": 4, "lora_alpha": 16, "lora_dropout": 0.2, "init_lora_weights": False, "task_type": "CAUSAL_LM", **options}
    model = tiny_qwen3_5() if model is None else model
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings) if config is None else config).train()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    return adapted


def trainable(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


# LoRA


@pytest.mark.parametrize("target", EVERY)
def test_one_projection_in_every_block(target: str) -> None:
    model = wrapped(model=tiny_qwen3_5(layer_types=["linear_attention", "full_attention"] * 2), target_modules=[target])
    assert len(trainable(model)) == 2 * (4 if target in MLP else 2)
    for precision in ("fp32", "bf16"):
        assert unequal_plans(model, FEW, precision=precision, leaf=True, **CASE) == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_cached"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_all_projections(precision: str, training: bool) -> None:
    model = wrapped(target_modules="all-linear").train(training)
    assert {name.split(".")[-4] for name in trainable(model)} == set(EVERY)
    assert unequal_plans(model, PLANS if training else FEW, precision=precision, **CASE) == {}


VARIANTS: dict[str, dict[str, Any]] = {
    "rank-stabilised": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora-without-dropout": {"use_dora": True, "lora_dropout": 0.0},
    "ranks-by-module": {"rank_pattern": {"in_proj_qkv": 8, "o_proj": 2}, "alpha_pattern": {"out_proj": 3}},
    "some-layers": {"layers_to_transform": [1, 3], "layers_pattern": "layers"},
    "trained-norms": {"modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    "trained-gated-norm": {"modules_to_save": ["linear_attn.norm"]},
    "trained-convolution": {"modules_to_save": ["conv1d"]},
    "a-projection-trained-whole": {"target_modules": ["out_proj", "down_proj"], "modules_to_save": ["in_proj_qkv"]},
    "orthogonal-start": {"init_lora_weights": "orthogonal"},
    "on-the-convolution-too": {"target_modules": ["conv1d", "in_proj_qkv", "out_proj"], "rank_pattern": {"conv1d": 128}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups > 1:UserWarning")
def test_variants(variant: str) -> None:
    model = wrapped(**{"target_modules": list(EVERY), **VARIANTS[variant]})
    for precision in ("fp32", "bf16"):
        assert unequal_plans(model, FEW, precision=precision, **CASE) == {}


def test_a_model_in_bf16_with_adapters_in_fp32() -> None:
    """What PEFT makes of a model loaded in bf16: the adapters stay fp32, and every projection casts its input."""
    model = wrapped(model=tiny_qwen3_5(dtype=torch.bfloat16), target_modules=list(EVERY))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    for precision in ("fp32", "bf16"):
        assert unequal_plans(model, FEW, precision=precision, **CASE) == {}


OTHER_METHODS: dict[str, Any] = {
    "ia3": lambda: peft.IA3Config(target_modules=[*EVERY], feedforward_modules=["down_proj"], init_ia3_weights=False),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=[*EVERY], init_weights=False, module_dropout=0.3),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=[*EVERY], init_weights=False, rank_dropout=0.3),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=2, target_modules=[*EVERY], init_weights=False, module_dropout=0.3),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["out_proj", "o_proj"], vera_dropout=0.2),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=[*EVERY], total_step=10, lora_dropout=0.2, init_r=4, target_r=2),
}


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_other_methods_that_replace_projections(method: str) -> None:
    config = OTHER_METHODS[method]()
    config.task_type = "CAUSAL_LM"
    model = wrapped(config)
    for precision in ("fp32", "bf16"):
        assert unequal_plans(model, FEW, precision=precision, **CASE) == {}


def test_dropout_is_drawn_again_in_a_replay() -> None:
    """Meta: with adapters' dropout the seed decides the loss, so equality above is no accident of dropout being off."""
    model = wrapped(target_modules=list(EVERY))
    assert "loss" in differences(step(model, seed=3, **CASE), step(model.eval(), seed=3, **CASE))


# Qwen3-Next


NEXT = ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION)
NEXT_PLANS = ("gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "gdn+core_attn", "full", "full:uniform:2")
NEXT_VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rank-stabilised": {"use_rslora": True},
    "dora": {"use_dora": True},
    "trained-norms": {"modules_to_save": ["input_layernorm", "linear_attn.norm"]},
    "routed-experts": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "lora_dropout": 0.0},
    "shared-gate": {"modules_to_save": ["shared_expert_gate"]},
}


@pytest.mark.parametrize("target", NEXT)
def test_qwen3_next_one_projection_in_every_block(target: str) -> None:
    model = wrapped(model=tiny_qwen3_next(layer_types=["linear_attention", "full_attention"] * 2), target_modules=[target])
    assert len(trainable(model)) == 4
    assert unequal_plans(model, NEXT_PLANS, precision="bf16", leaf=True, **CASE) == {}


@pytest.mark.parametrize("variant", NEXT_VARIANTS)
def test_qwen3_next_variants(variant: str) -> None:
    model = wrapped(model=tiny_qwen3_next(), **{"target_modules": list(NEXT), **NEXT_VARIANTS[variant]})
    for precision in ("fp32", "bf16"):
        assert unequal_plans(model, NEXT_PLANS, precision=precision, **CASE) == {}


@pytest.mark.parametrize("dense", [False, True], ids=["shared-expert", "dense-mlp"])
def test_qwen3_next_adapters_in_the_mlp(dense: bool) -> None:
    """Put in MLP by MLP, past their config: in a Qwen3-Next model PEFT takes these names for the routed experts."""
    model = tiny_qwen3_next(mlp_only_layers=[0, 1, 2, 3] if dense else []).requires_grad_(False)
    torch.manual_seed(0)
    for layer in model.model.layers:
        config = peft.LoraConfig(r=4, lora_dropout=0.2, use_rslora=True, init_lora_weights=False, target_modules=list(MLP))
        mlp = layer.mlp if dense else layer.mlp.shared_expert
        adapted = peft.inject_adapter_in_model(config, nn.ModuleDict({name: getattr(mlp, name) for name in MLP}))
        for name in MLP:
            setattr(mlp, name, adapted[name])
    assert {name.split(".")[-4] for name in trainable(model)} == set(MLP)
    assert unequal_plans(model, FEW if dense else NEXT_PLANS, precision="bf16", **CASE) == {}


# Embeddings


def test_tied_embeddings() -> None:
    model = tiny_qwen3_5(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert unequal_plans(model, precision="fp32", **CASE) == {}
    assert unequal_plans(model, FEW, precision="bf16", **CASE) == {}


def test_tied_embeddings_frozen() -> None:
    model = tiny_qwen3_5(tie_word_embeddings=True)
    model.get_input_embeddings().requires_grad_(False)
    assert not model.lm_head.weight.requires_grad
    assert unequal_plans(model, precision="bf16", **CASE) == {}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "in_proj_qkv", "o_proj"]},
        {"target_modules": ["in_proj_qkv", "o_proj"], "trainable_token_indices": [1, 5, 200]},
        {"target_modules": ["in_proj_qkv", "o_proj"], "modules_to_save": ["embed_tokens"]},
    ],
    ids=["adapted", "some-rows", "trained-whole"],
)
@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|weight tying|tied).*:UserWarning")  # PEFT's advice about saving such a model
def test_embeddings_under_peft(options: dict[str, Any], tied: bool) -> None:
    model = wrapped(model=tiny_qwen3_5(tie_word_embeddings=tied), **options)
    for precision in ("fp32", "bf16"):
        assert unequal_plans(model, FEW, precision=precision, **CASE) == {}


# Adapters that come, go and change while a plan is in force


def steps_of(model: nn.Module, changes: list[Any]) -> list[Any]:
    """A step after each change."""
    found = []
    for change in changes:
        change(model)
        found.append(step(model, **CASE))
    return found


def unequal_after(build: Any, changes: list[Any], plans: Any = FEW) -> list[tuple[str, int, list[str]]]:
    want = steps_of(build(), changes)
    found = []
    for plan in plans:
        model = build()
        with apply_plan(model, plan):
            got = steps_of(model, changes)
        found += [(plan, index, names) for index, (a, b) in enumerate(zip(got, want, strict=True)) if (names := differences(a, b))]
    return found


def nothing(model: Any) -> None:
    pass


def test_merged_and_unmerged() -> None:
    """A merged adapter edits the base weights and is skipped in the forward; what still learns are the norms."""

    def build() -> Any:
        model = wrapped(target_modules=list(EVERY))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" in name or parameter.requires_grad)
        return model

    changes = [nothing, lambda m: m.merge_adapter(), nothing, lambda m: m.unmerge_adapter(), nothing]
    assert unequal_after(build, changes) == []


def test_two_adapters_switched_between_steps() -> None:
    def build() -> Any:
        model = wrapped(target_modules=list(EVERY))
        torch.manual_seed(5)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["in_proj_z", "out_proj", "down_proj"], init_lora_weights=False))
        return model

    changes = [nothing, lambda m: m.set_adapter("other"), nothing, lambda m: m.base_model.set_adapter(["default", "other"]), nothing]
    assert unequal_after(build, changes) == []


def test_adapters_added_and_merged_for_good_under_a_plan() -> None:
    """The plan sits on blocks, mixers and MLPs; projections are looked up at every call."""
    for plan in FEW:
        model, plain = tiny_qwen3_5(), tiny_qwen3_5()
        with apply_plan(model, plan) as applied:
            ours, theirs = wrapped(model=model, target_modules=list(EVERY)), wrapped(model=plain, target_modules=list(EVERY))
            assert differences(step(ours, **CASE), step(theirs, **CASE)) == []
            assert applied.ledger.complete
            ours, theirs = ours.merge_and_unload(), theirs.merge_and_unload()
            assert ours is model
            for merged in (ours, theirs):
                merged.requires_grad_(True)
            assert differences(step(ours, **CASE), step(theirs, **CASE)) == [], plan


def test_merging_between_forward_and_backward_is_refused() -> None:
    """A replay would run on the merged weights."""
    model = wrapped(target_modules=list(EVERY))
    with apply_plan(model, "gdn_in_proj_conv"):
        loss = model(**tiny_batch(2, 33)).loss
        model.merge_adapter()
        with pytest.raises(RuntimeError, match="region 'in_proj': the replay did not do what the forward did"):
            loss.backward()


def test_switching_adapters_between_forward_and_backward_is_refused() -> None:
    model = wrapped(target_modules=list(EVERY), lora_dropout=0.0)
    with apply_plan(model, "gdn_in_proj_conv+mlp"):
        loss = model(**tiny_batch(2, 33)).loss
        with model.disable_adapter(), pytest.raises(RuntimeError, match="the replay did not do what the forward did"):
            loss.backward()


def test_activated_lora_is_right_or_refused() -> None:
    """PEFT's activated LoRA puts hooks on the projections for the forward alone, so a replay in backward runs without them."""
    model = wrapped(target_modules=list(EVERY), alora_invocation_tokens=[7], lora_dropout=0.0)
    batch = tiny_batch(2, 33)
    batch["input_ids"][:, 10] = 7

    def gradients() -> list[Any]:
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    want = gradients()
    with apply_plan(model, "gdn_conv+gdn_norm_out+layernorm"):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), want, strict=True)), "no region of these calls an adapter"
    with apply_plan(model, "gdn_in_proj_conv"), pytest.raises(RuntimeError, match=r"region 'in_proj'.*a forward hook of its modules came or went"):
        gradients()


def test_adapters_on_parameters_are_right_or_refused() -> None:
    """PEFT parametrizes such a weight for each forward, which counts as an edit of the weight: the region that calls it cannot be replayed."""
    model = wrapped(target_modules=[], target_parameters=["in_proj_qkv.weight", "o_proj.weight", "down_proj.weight"], lora_dropout=0.0)
    assert unequal_plans(model, ["gdn_conv+gdn_norm_out+layernorm", "core_attn+gdn_gated_delta_rule"], precision="bf16", **CASE) == {}
    with apply_plan(model, "gdn_in_proj_conv"), pytest.raises(RuntimeError, match="region 'in_proj' was edited in place"):
        model(**tiny_batch(2, 33)).loss.backward()


def test_a_step_with_the_adapters_switched_off_has_the_base_models_gradients() -> None:
    def off(model: Any) -> Any:
        with model.disable_adapter():
            return step(model, **CASE)

    model = wrapped(target_modules=list(EVERY))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name or parameter.requires_grad)
    want = off(model)
    for plan in FEW:
        with apply_plan(model, plan):
            assert differences(off(model), want) == [], plan


# Lightning


class Adapted(TinyModule):
    """LoRA everywhere; the model is built and wrapped in `configure_model`, as for large models."""

    def __init__(self) -> None:
        super().__init__(model=nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.model, nn.Identity):
            rng = torch.get_rng_state()
            self.model = wrapped(target_modules="all-linear", use_rslora=True, lora_dropout=0.1)
            torch.set_rng_state(rng)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lora_built_in_configure_model_trains_equal_under_the_strategy(precision: str) -> None:
    want = train("auto", Adapted, precision=precision)
    for arm in ("gdn_in_proj_conv+mlp", "full"):
        got = train(GDNRecomputeStrategy(arm), Adapted, precision=precision)
        assert got[1].strategy.last_applied.ledger.discarded_bytes > 0
        same_run(want, got)


def test_frozen_base_weights_stay_and_adapters_move(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        module, _ = train(GDNRecomputeStrategy("full"), Adapted)
    start = wrapped(target_modules="all-linear", use_rslora=True, lora_dropout=0.1).state_dict()
    moved = {name for name, value in module.model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == set(trainable(module.model))
    assert "requires_grad" not in caplog.text


def test_the_blocks_of_an_adapted_model_are_found_and_a_copy_is_its_own() -> None:
    model = wrapped(target_modules=list(EVERY))
    assert inspect_model(model).describe(taken_over=True) == "GDN blocks: 3 of 4 layers, 3 taken over"
    want = step(model, **CASE)
    with apply_plan(model, "full"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert differences(step(other, **CASE), want) == []


def test_every_plan_on_the_largest_mix() -> None:
    """DoRA, dropout, ranks by module, trained norms and embeddings, tied head, left padding, autocast: all plans."""
    model = wrapped(
        model=tiny_qwen3_5(tie_word_embeddings=True, attention_dropout=0.1),
        target_modules=list(EVERY),
        use_dora=True,
        use_rslora=True,
        rank_pattern={"in_proj_qkv": 8},
        modules_to_save=["input_layernorm"],
    )
    assert unequal_plans(model, PLANS, precision="bf16", **CASE) == {}
