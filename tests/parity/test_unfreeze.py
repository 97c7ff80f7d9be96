"""Layers frozen and unfrozen while a plan is in force: by a Lightning callback, by hand between steps, and at the wrong moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import Tensor, nn

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.apply import apply_plan
from tests.lightning_models import TinyModule, count_calls, loader, same_run, train
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import Step, differences, step

# Norms with frozen weights in front of frozen projections save next to nothing, which the first step says.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")

ARMS = ("gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm+mlp", "full", "full:uniform:2")
CASE: dict[str, Any] = {"tokens": 33, "mask": "left"}


# By a callback


class Gradual(BaseFinetuning):
    """Trains the head, from epoch 1 on also the last two blocks, from epoch 2 on everything, each with a learning rate of its own."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.model.model)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        layers = pl_module.model.model.layers
        if epoch == 1:
            self.unfreeze_and_add_param_group(layers[2:], optimizer, lr=1e-3)
        if epoch == 2:
            self.unfreeze_and_add_param_group([layers[:2], pl_module.model.model.embed_tokens], optimizer, lr=1e-3)


class HeadFirst(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def three_epochs(strategy: Any, **options: Any) -> Any:
    return train(strategy, HeadFirst, data=loader(2), max_steps=-1, max_epochs=3, callbacks=[Gradual()], **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.filterwarnings("ignore:The parameters.*are frozen:UserWarning")
def test_a_callback_that_unfreezes_block_by_block(precision: str) -> None:
    want = three_epochs("auto", precision=precision)
    for arm in ARMS:
        got = three_epochs(GDNRecomputeStrategy(arm), precision=precision)
        same_run(want, got)
        assert len(got[1].optimizers[0].param_groups) == 3


class Alternating(Callback):
    """Freezes and unfreezes one mixer from step to step, which changes what its regions save."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.model.model.layers[1].linear_attn.requires_grad_(batch_idx % 2 == 0)


def test_a_callback_that_freezes_and_unfreezes_every_step() -> None:
    want = train("auto", TinyModule, max_steps=4, callbacks=[Alternating()])
    for arm in ARMS:
        same_run(want, train(GDNRecomputeStrategy(arm), TinyModule, max_steps=4, callbacks=[Alternating()]))


def test_h04_a_frozen_start_costs_nothing_and_unfreezing_starts_the_replays() -> None:
    class Counting(HeadFirst):
        def __init__(self) -> None:
            super().__init__()
            self.calls = count_calls(self, "in_proj_qkv")
            self.per_step: list[int] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.per_step.append(self.calls["in_proj_qkv"])
            self.calls["in_proj_qkv"] = 0

    module, _ = train(GDNRecomputeStrategy("full"), Counting, data=loader(2), max_steps=-1, max_epochs=3, callbacks=[Gradual()])
    assert module.per_step == [3, 3, 4, 4, 6, 6], "blocks 0, 1, 2 are GDN; block 2 learns from epoch 1 on"


# By hand


def mixer(model: Any) -> nn.Module:
    return model.model.layers[1].linear_attn


FLIPS: dict[str, Callable[[Any], Any]] = {
    "one-mixer": lambda m: mixer(m).parameters(),
    "gated-norm": lambda m: mixer(m).norm.parameters(),
    "convolution": lambda m: mixer(m).conv1d.parameters(),
    "decay": lambda m: [mixer(m).A_log, mixer(m).dt_bias],
    "one-projection": lambda m: mixer(m).in_proj_qkv.parameters(),
    "norms": lambda m: [p for layer in m.model.layers for p in layer.input_layernorm.parameters()],
    "attention": lambda m: m.model.layers[3].self_attn.parameters(),
    "embedding": lambda m: m.model.embed_tokens.parameters(),
    "below": lambda m: [*m.model.embed_tokens.parameters(), *m.model.layers[:2].parameters()],
    "all-blocks": lambda m: m.model.layers.parameters(),
}


def flip(model: Any, what: str, requires: bool) -> None:
    for parameter in FLIPS[what](model):
        parameter.requires_grad_(requires)


@pytest.mark.parametrize("what", FLIPS)
def test_flips_between_steps(what: str) -> None:
    """Trained, frozen, trained again under one plan: every step equals that of the untouched model in the same state."""

    def run(model: Any) -> list[Step]:
        found = []
        for requires in (True, False, True):
            flip(model, what, requires)
            found.append(step(model, precision="bf16" if what == "norms" else "fp32", **CASE))
        return found

    model = tiny_qwen3_5()
    want = run(model)
    for plan in ARMS:
        with apply_plan(model, plan):
            got = run(model)
        assert [differences(a, b) for a, b in zip(got, want, strict=True)] == [[], [], []], plan


@pytest.mark.parametrize("first", [True, False], ids=["freeze", "unfreeze"])
@pytest.mark.parametrize("what", FLIPS)
def test_a_flip_between_forward_and_backward_is_right_or_refused(what: str, first: bool) -> None:
    """The graph was made with the old flags: whatever is not refused has the untouched model's gradients, and the next step is right."""
    model = tiny_qwen3_5()
    batch = tiny_batch(2, 33)

    def gradients(then: bool) -> dict[str, Tensor | None]:
        model.zero_grad()
        flip(model, what, first)
        loss = model(**batch).loss
        flip(model, what, then)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
        return all(a[n] is b[n] is None or torch.equal(a[n], b[n]) for n in a)

    want, want_steady = gradients(not first), gradients(first)
    refused = []
    for plan in (*ARMS, "gdn_norm_out"):
        with apply_plan(model, plan):
            try:
                assert same(gradients(not first), want), plan
            except RuntimeError as error:
                refused.append(plan)
                assert "did not do what the forward did" in str(error)  # noqa: PT017
                assert "requires_grad" in str(error)  # noqa: PT017
            assert same(gradients(first), want_steady), f"{plan}: the step after"
    if what in ("one-projection", "one-mixer"):
        assert "gdn_in_proj_conv" in refused, "a frozen projection saves no input, a trained one does"
    if what == "gated-norm":
        assert "gdn_norm_out" in refused
