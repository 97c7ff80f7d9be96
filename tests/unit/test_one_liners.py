"""What a newcomer tries first: each ends in the message that says what to do, or simply works, before any optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_gdn import GDNRecomputeStrategy, apply_plan
from tests.lightning_models import QUIET, TinyModule, count_calls, loader, same_run, same_tensors, train
from tests.models import tiny_qwen3_5

PLAN = ["gdn_conv", "gdn_norm_out", "layernorm"]


def refused(module: Any, strategy: GDNRecomputeStrategy, error: type[Exception]) -> str:
    """Fit, expect the error, and see that nothing was trained and nothing is left behind. Returns the message."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = Trainer(strategy=strategy, max_steps=2, **QUIET)
    with pytest.raises(error) as caught:
        trainer.fit(module, loader())
    assert type(caught.value) is error
    assert trainer.global_step == 0
    assert list(module.state_dict()) == list(before)
    assert same_tensors(list(module.state_dict().values()), list(before.values()))
    assert strategy.applied is None
    assert not any("forward" in part.__dict__ for part in module.modules())
    return str(caught.value)


@pytest.mark.parametrize(
    ("label", "nearest"),
    [
        ("gdn_inproj_conv", "gdn_in_proj_conv"),
        ("GDN_CONV", "gdn_conv"),
        ("gdn-norm-out", "gdn_norm_out"),
        ("layer_norm", "layernorm"),
        ("fulll", "full"),
    ],
)
def test_h02_a_misspelt_label_names_the_nearest_and_all_valid_ones(label: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"unknown label '{label}'") as caught:
        GDNRecomputeStrategy([label])
    assert f"did you mean '{nearest}'" in str(caught.value)
    for name in ("gdn_in_proj_conv", "gdn_conv", "gdn_norm_out", "layernorm", "mlp", "full", "none"):
        assert name in str(caught.value)


def test_h02_an_empty_list_is_the_control_and_a_bare_string_is_one_label() -> None:
    assert GDNRecomputeStrategy([]).selection.is_control
    assert GDNRecomputeStrategy("gdn_conv").selection.labels == ("gdn_conv",)
    assert GDNRecomputeStrategy(["gdn_conv", "gdn_conv"]).selection.labels == ("gdn_conv",)
    with pytest.raises(ValueError, match="expected a label or a list of labels, got None"):
        GDNRecomputeStrategy(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is an offload label"):
        GDNRecomputeStrategy(["gdn_core_attn"])
    with pytest.raises(ValueError, match="cannot be combined"):
        GDNRecomputeStrategy(["none", "gdn_conv"])


class _NoGdn(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(24, 4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"].float()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_h01_a_model_without_gated_deltanet_is_an_error_and_the_control_trains_it() -> None:
    message = refused(_NoGdn(), GDNRecomputeStrategy(PLAN), ValueError)
    assert "0 blocks were found" in message
    assert "Qwen3_5DecoderLayer" in message
    assert "GDNStack" in message
    assert "recompute=[]" in message
    _, trainer = train(GDNRecomputeStrategy([]), _NoGdn)
    assert trainer.global_step == 2


def test_h01_a_model_with_attention_blocks_only_is_an_error() -> None:
    module = TinyModule(num_hidden_layers=2, layer_types=["full_attention", "full_attention"])
    assert "0 blocks" in refused(module, GDNRecomputeStrategy(["layernorm"]), ValueError)


def test_a_label_that_no_block_has_a_region_for_names_those_it_has() -> None:
    message = refused(TinyModule(), GDNRecomputeStrategy(["moe_act"]), ValueError)
    assert "label 'moe_act'" in message
    assert "gdn_in_proj_conv" in message
    assert "at most the number of blocks, got 9, the model has 4" in refused(TinyModule(), GDNRecomputeStrategy("full:block:9"), ValueError)


def test_the_registered_name_stands_for_norm_out_and_layernorm() -> None:
    ours = train("gdn")
    assert isinstance(ours[1].strategy, GDNRecomputeStrategy)
    assert ours[1].strategy.last_applied.plan.source == "gdn_norm_out+layernorm"
    assert ours[1].strategy.last_applied.ledger.discarded_bytes > 0
    same_run(train("auto"), ours)
    assert isinstance(Trainer(strategy="GDN", **QUIET).strategy, GDNRecomputeStrategy)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arm", ["gdn_in_proj_conv", "full"])
def test_h26_gradient_checkpointing_that_is_on_is_refused_with_the_way_out(arm: str, reentrant: bool) -> None:
    module = TinyModule()
    module.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    message = refused(module, GDNRecomputeStrategy(arm), ValueError)
    assert "already has Hugging Face gradient checkpointing on" in message
    assert "gradient_checkpointing_disable()" in message


def test_h26_gradient_checkpointing_switched_on_later_is_refused_at_the_first_block() -> None:
    class Late(TinyModule):
        def on_train_start(self) -> None:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    message = refused(Late(), GDNRecomputeStrategy(PLAN), RuntimeError)
    assert "block 'model.model.layers.0'" in message
    assert "gradient_checkpointing_disable()" in message


class _Inside(TinyModule):
    """The forward inside somebody else's saved-tensor hooks."""

    def __init__(self, how: Callable[[nn.Module, dict[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.how(self.model, batch)
        self.losses.append(loss.detach().clone())
        return loss


def _save_on_cpu(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(**batch).loss


def _checkpointed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return checkpoint(lambda: model(**batch).loss, use_reentrant=False)


@pytest.mark.parametrize(("how", "name"), [(_save_on_cpu, "save_on_cpu"), (_checkpointed, "torch.utils.checkpoint")])
def test_a_forward_inside_other_hooks_raises_and_names_them(how: Callable[..., Tensor], name: str) -> None:
    message = refused(_Inside(how), GDNRecomputeStrategy(PLAN), RuntimeError)
    assert "block 'model.model.layers.0'" in message
    assert name in message.partition("Only the innermost")[0]
    assert 'on_foreign_hooks="bypass"' in message


@pytest.mark.parametrize("how", [_save_on_cpu, _checkpointed])
def test_bypass_lets_the_other_hooks_win(how: Callable[..., Tensor]) -> None:
    ours = train(GDNRecomputeStrategy(PLAN, on_foreign_hooks="bypass"), lambda: _Inside(how))
    same_run(train("auto", lambda: _Inside(how)), ours)
    assert ours[1].strategy.last_applied.ledger.retained_bytes is None


class _Distils(TinyModule):
    """A student with a frozen teacher, outside the LightningModule or inside."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        teacher = tiny_qwen3_5(seed=5).requires_grad_(False)
        self.inside = inside
        self.outside = [teacher]
        if inside:
            self.teacher = teacher

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.outside[0](**batch).logits
        out = self.model(**batch)
        loss = out.loss + F.mse_loss(out.logits, target)
        self.losses.append(loss.detach().clone())
        return loss


@pytest.mark.parametrize("inside", [False, True])
def test_two_models_of_which_one_learns(inside: bool) -> None:
    module = _Distils(inside)
    student, teacher = count_calls(module.model, "in_proj_qkv"), count_calls(module.outside[0], "in_proj_qkv")
    ours = train(GDNRecomputeStrategy("gdn_in_proj_conv"), lambda: module)
    assert student["in_proj_qkv"] == 2 * 3 * 2  # steps, blocks, forward and replay
    assert teacher["in_proj_qkv"] == 2 * 3  # under no_grad nothing is replayed
    assert len(ours[1].strategy.last_applied.blocks) == (8 if inside else 4)
    rows = ours[1].strategy.last_applied.ledger.rows()
    assert {row.block.partition(".layers")[0] for row in rows} == {"model.model"}
    same_run(train("auto", lambda: _Distils(inside)), ours)


def test_a_frozen_teacher_without_no_grad_and_a_second_trained_model_outside_are_right() -> None:
    class Both(_Distils):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            out = self.model(**batch)
            loss = out.loss + F.mse_loss(out.logits, self.outside[0](**batch).logits)
            self.losses.append(loss.detach().clone())
            return loss

    for inside in (False, True):
        same_run(train("auto", lambda i=inside: Both(i)), train(GDNRecomputeStrategy(PLAN), lambda i=inside: Both(i)))


def test_use_cache_trains_as_before_and_keeps_the_users_cache() -> None:
    class Cached(TinyModule):
        def __init__(self) -> None:
            super().__init__(use_cache=True)
            self.caches: list[bool] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            out = self.model(**batch)
            self.caches.append(out.past_key_values is not None)
            self.losses.append(out.loss.detach().clone())
            return out.loss

    control = train("auto", Cached)
    for arm in ("gdn_in_proj_conv", "gdn_front", "full"):
        ours = train(GDNRecomputeStrategy(arm), Cached)
        same_run(control, ours)
        assert ours[0].caches == control[0].caches == [True, True]
        assert ours[1].strategy.last_applied.ledger.discarded_bytes > 0


def test_a_model_that_is_under_a_plan_already_is_refused_and_that_plan_stays() -> None:
    module = TinyModule()
    trainer = Trainer(strategy=GDNRecomputeStrategy(PLAN), max_steps=1, **QUIET)
    with apply_plan(module, ["gdn_conv"]) as applied:
        with pytest.raises(RuntimeError, match="under another plan already; call undo"):
            trainer.fit(module, loader())
        assert applied.installed
        assert trainer.global_step == 0
    trainer.fit(module, loader())
    assert trainer.global_step == 1


def test_a_plain_call_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(GDNRecomputeStrategy(["gdn_conv", "gdn_norm_out", "layernorm"]), max_steps=1)
    assert not [str(w.message) for w in caught if "gdn" in str(w.message).lower()]
