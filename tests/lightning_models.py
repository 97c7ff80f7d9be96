"""LightningModules and runs shared by the Lightning tests. Imports no lightning_gdn: a checkpoint must load where it is not installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .models import tiny_batch, tiny_qwen3_5

__all__ = [
    "LoraLike", "QUIET", "ResumableModule", "TinyModule", "ValidatingModule", "add_lora_like", "count_calls", "logged", "loader",
    "same_run", "same_tensors", "train",
]  # fmt: skip

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Trainer options of nearly every test."""


class TinyModule(LightningModule):
    """Trains a tiny hybrid model with AdamW and remembers every loss."""

    def __init__(self, dropout: float = 0.0, lora: bool = False, model: nn.Module | None = None, **config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["model"])
        self.model = tiny_qwen3_5(attention_dropout=dropout, **config) if model is None else model
        if lora:
            add_lora_like(self.model, dropout)
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ValidatingModule(TinyModule):
    """With evaluation loops; the outputs of all of them are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, list[Tensor]] = {"validation": [], "test": [], "predict": []}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen["validation"].append(self.model(**batch).logits.clone())

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen["test"].append(self.model(**batch).logits.clone())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(**batch).logits
        self.seen["predict"].append(logits.clone())
        return logits


class ResumableModule(TinyModule):
    """Carries the random state from epoch to epoch and through a checkpoint (Lightning does not)."""

    rng: Tensor | None = None

    def on_train_epoch_start(self) -> None:
        if self.rng is not None:
            torch.set_rng_state(self.rng)

    def on_train_epoch_end(self) -> None:
        self.rng = torch.get_rng_state()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rng"] = self.rng

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.rng = checkpoint["rng"]


class LoraLike(nn.Module):
    """A linear layer with a low-rank branch behind a dropout: a module inside a region that draws random numbers."""

    def __init__(self, base: nn.Linear, dropout: float, seed: int) -> None:
        super().__init__()
        self.base = base
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.a = nn.Linear(base.in_features, 4, bias=False)
            self.b = nn.Linear(4, base.out_features, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.drop(x)))


def add_lora_like(model: Any, dropout: float) -> None:
    """Put `LoraLike` in place of a projection in front of the rule, behind it, and in the MLP, of every GDN block."""
    for index, block in enumerate(model.model.layers):
        if hasattr(block, "linear_attn"):
            block.linear_attn.in_proj_qkv = LoraLike(block.linear_attn.in_proj_qkv, dropout, 3 * index)
            block.linear_attn.out_proj = LoraLike(block.linear_attn.out_proj, dropout, 3 * index + 1)
        block.mlp.gate_proj = LoraLike(block.mlp.gate_proj, dropout, 3 * index + 2)


def loader(batches: int = 4, *, rows: int = 2, tokens: int = 24, seed: int = 1) -> DataLoader:
    """The same sequences in the same order every time. Draws nothing from the global generator."""
    data = tiny_batch(batches * rows, tokens, seed=seed)
    rows_of = [{name: value[i] for name, value in data.items()} for i in range(batches * rows)]
    return DataLoader(rows_of, batch_size=rows, generator=torch.Generator())


def train(
    strategy: Any, build: Callable[[], LightningModule] = TinyModule, *, seed: int = 7, data: Any = None, **options: Any
) -> tuple[Any, Trainer]:
    """Fit a fresh module; `strategy="auto"` is the plain Trainer."""
    module = build()
    trainer = Trainer(strategy=strategy, **{**QUIET, "max_steps": 2, **options})
    torch.manual_seed(seed)
    trainer.fit(module, loader() if data is None else data)
    return module, trainer


def same_tensors(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Equal in number, dtype and every bit."""
    return len(left) == len(right) and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


def same_run(left: tuple[Any, Trainer], right: tuple[Any, Trainer]) -> None:
    """Assert that losses, weights and optimizer states of two runs are equal bit for bit, by name and by position."""
    (a, trainer_a), (b, trainer_b) = left, right
    assert trainer_a.global_step == trainer_b.global_step > 0
    assert all(bool(torch.isfinite(loss)) for loss in a.losses)
    assert same_tensors(a.losses, b.losses)
    assert list(a.state_dict()) == list(b.state_dict())
    assert same_tensors(list(a.state_dict().values()), list(b.state_dict().values()))
    for one, other in zip(trainer_a.optimizers, trainer_b.optimizers, strict=True):
        one_state, other_state = one.state_dict(), other.state_dict()
        assert one_state["param_groups"] == other_state["param_groups"]
        assert list(one_state["state"]) == list(other_state["state"])
        for index, state in one_state["state"].items():
            assert list(state) == list(other_state["state"][index])
            assert same_tensors(list(state.values()), list(other_state["state"][index].values()))


def count_calls(model: nn.Module, *suffixes: str) -> dict[str, int]:
    """Live counts of the forwards of every submodule whose name ends so, summed over blocks. A replay counts: hooks fire again."""
    counts = dict.fromkeys(suffixes, 0)
    for name, module in model.named_modules():
        for suffix in suffixes:
            if name.endswith(suffix):

                def counted(*_: Any, suffix: str = suffix) -> None:
                    counts[suffix] += 1

                module.register_forward_hook(counted)
    return counts


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that `rank_zero_info` logs; Lightning's loggers do not always propagate to where pytest listens."""
    handler = _Lines()
    rank_zero.log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        rank_zero.log.removeHandler(handler)
