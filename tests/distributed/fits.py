"""Modules and runs of the cases: every rank sees other data, every run the same."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from tests.distributed.launch import ACCELERATOR_VARIABLE
from tests.lightning_models import QUIET, TinyModule, loader

__all__ = ["ON_GPU", "OPTIONS", "SIZES", "TOKENS", "DdpModule", "TowerModule", "fit", "same_gradients", "weights_hash"]

ON_GPU = os.environ.get(ACCELERATOR_VARIABLE) == "gpu"
OPTIONS: dict[str, Any] = {"accelerator": "gpu", "precision": "bf16-true"} if ON_GPU else {}
"""Trainer options of every run, unless a case has its own."""
SIZES: dict[str, Any] = (
    {"hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "attn_implementation": "eager"} if ON_GPU else {}
)
"""Of the tiny model: on a GPU head dims that kernels are made for, and attention whose backward sums in a fixed order."""
TOKENS = 200 if ON_GPU else 24
"""Length of a sequence: on a GPU several chunks of the delta rule, the last not full."""

Gradients = dict[str, Tensor | None]


class DdpModule(TinyModule):
    """Remembers every gradient as the optimizer gets it: after the average over ranks."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**{**SIZES, **config})
        self.gradients: list[Gradients] = []
        self.ids: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.ids.append(batch["input_ids"])
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()})


class TowerModule(DdpModule):
    """With a tower that text batches never touch, as a vision language model's."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.tower = nn.Linear(8, 8)
        self.tower.requires_grad_(not frozen)


def fit(strategy: Any, module: LightningModule | None = None, **options: Any) -> tuple[Any, Trainer]:
    """Train two optimizer steps on two processes; Lightning gives each rank its own share of the data."""
    module = DdpModule() if module is None else module
    data = options.pop("data", None) or loader(8, tokens=TOKENS)
    trainer = Trainer(strategy=strategy, **{**QUIET, "devices": 2, "max_steps": 2, **OPTIONS, **options})
    torch.manual_seed(7)
    trainer.fit(module, data)
    return module, trainer


def same_gradients(left: DdpModule, right: DdpModule) -> None:
    """Assert that both runs saw the same data and got the same gradients and losses, bit for bit."""
    assert len(left.ids) == len(right.ids) > 0
    assert all(torch.equal(a, b) for a, b in zip(left.ids, right.ids, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(left.losses, right.losses, strict=True))
    assert len(left.gradients) == len(right.gradients) == 2
    for one, other in zip(left.gradients, right.gradients, strict=True):
        assert list(one) == list(other)
        for name, gradient in one.items():
            theirs = other[name]
            assert (gradient is None) == (theirs is None), name
            assert gradient is None or theirs is None or torch.equal(gradient, theirs), name
    assert all(torch.equal(a, b) for a, b in zip(left.state_dict().values(), right.state_dict().values(), strict=True))


def weights_hash(module: nn.Module) -> str:
    """One number for all weights."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
