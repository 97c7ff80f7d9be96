"""H05: evaluation loops replay nothing, and training does not notice that there were any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_gdn import GDNRecomputeStrategy
from tests.lightning_models import QUIET, ValidatingModule, count_calls, loader, same_run, same_tensors

ARMS = ["gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "full"]
GDN_BLOCKS = 3


class _CallsPerPhase(Callback):
    """Forwards of every GDN projection, counted separately for training and evaluation."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.phases: dict[str, list[int]] = {"train": [], "validation": []}
        self._before = 0

    def attach(self, module: LightningModule) -> None:
        self.counts = count_calls(module, "in_proj_qkv")

    def _mark(self, *_: Any) -> None:
        self._before = self.counts["in_proj_qkv"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._mark()

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self._mark()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.phases["train"].append(self.counts["in_proj_qkv"] - self._before)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.phases["validation"].append(self.counts["in_proj_qkv"] - self._before)


def _fit(strategy: Any, *, validating: bool = True, module: ValidatingModule | None = None, **options: Any) -> tuple[ValidatingModule, Trainer]:
    module = ValidatingModule() if module is None else module
    loops: dict[str, Any] = {"num_sanity_val_steps": 2, "val_check_interval": 2, "limit_val_batches": 2}
    if not validating:
        loops = {"num_sanity_val_steps": 0, "limit_val_batches": 0}
    trainer = Trainer(strategy=strategy, max_steps=4, **{**QUIET, **loops, **options})
    torch.manual_seed(3)
    trainer.fit(module, loader(), loader(2, seed=9))
    return module, trainer


@pytest.mark.parametrize("arm", ARMS)
def test_h05_sanity_check_and_validation_replay_nothing(arm: str) -> None:
    calls = _CallsPerPhase()
    module = ValidatingModule()
    calls.attach(module)
    ours = _fit(GDNRecomputeStrategy(arm), module=module, callbacks=[calls])
    replays = 0 if arm.startswith("gdn_conv") else 1
    assert calls.phases["validation"] == [GDN_BLOCKS] * 6  # two of the sanity check, twice two while training
    assert calls.phases["train"] == [GDN_BLOCKS * (1 + replays)] * 4
    control = _fit("auto")
    same_run(control, ours)
    assert same_tensors(control[0].seen["validation"], ours[0].seen["validation"])


@pytest.mark.parametrize("arm", ARMS)
def test_h05_the_first_step_after_validation_equals_a_run_that_never_validated(arm: str) -> None:
    never = _fit(GDNRecomputeStrategy(arm), validating=False)
    module = ValidatingModule()
    strategy = GDNRecomputeStrategy(arm)
    trainer = Trainer(strategy=strategy, max_steps=4, num_sanity_val_steps=2, val_check_interval=2, limit_val_batches=2, **QUIET)

    calls = count_calls(module, "in_proj_qkv")
    trainer.validate(module, loader(2, seed=9), verbose=False)
    assert calls["in_proj_qkv"] == GDN_BLOCKS * 2
    assert all(logits.is_inference() for logits in module.seen["validation"])  # Lightning's default outside fit; inside it is no_grad
    assert strategy.applied is None
    assert strategy.last_applied is None
    torch.manual_seed(3)
    trainer.fit(module, loader(), loader(2, seed=9))
    same_run(never, (module, trainer))

    before = calls["in_proj_qkv"]
    trainer.test(module, loader(2, seed=9), verbose=False)
    trainer.predict(module, loader(2, seed=9))
    assert calls["in_proj_qkv"] - before == GDN_BLOCKS * 4
    assert same_tensors(module.seen["test"], module.seen["predict"])
    assert strategy.applied is None


def test_the_ledger_sees_the_first_training_step_and_not_the_sanity_check() -> None:
    _, plain = _fit(GDNRecomputeStrategy("gdn_in_proj_conv"), validating=False)
    _, after_validation = _fit(GDNRecomputeStrategy("gdn_in_proj_conv"))
    ledger = after_validation.strategy.last_applied.ledger
    assert ledger.complete
    assert ledger.as_dict() == plain.strategy.last_applied.ledger.as_dict()
    assert ledger.by_region()["in_proj"].replays == GDN_BLOCKS


def test_a_forward_with_gradients_inside_validation_is_right() -> None:
    class Saliency(ValidatingModule):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            with torch.enable_grad():
                x = self.model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
                self.seen["validation"].append(torch.autograd.grad(self.model(inputs_embeds=x).logits.square().mean(), x)[0])

    def run(strategy: Any) -> tuple[Any, Trainer]:
        return _fit(strategy, module=Saliency())

    control = run("auto")
    for arm in ARMS:
        ours = run(GDNRecomputeStrategy(arm))
        same_run(control, ours)
        assert same_tensors(control[0].seen["validation"], ours[0].seen["validation"])


def test_evaluation_alone_works_with_any_model() -> None:
    """Only `fit` takes a model over, so a model without Gated DeltaNet can be evaluated."""

    class Other(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.linear(batch["input_ids"][:, :2].float())

    Trainer(strategy=GDNRecomputeStrategy(ARMS[0]), **QUIET).test(Other(), loader(1), verbose=False)
