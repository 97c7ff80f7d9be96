"""What the monitor reads from Lightning and from the module, and where it writes metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from ._series import metric_row

__all__ = ["batches_that_stepped", "gradient_bytes", "log_rows", "loss_of", "row_is_due", "saves", "should_log"]


def loss_of(outputs: Any) -> torch.Tensor | None:
    """The loss among what a training step returned, on its device; None if there is none or it is no single number."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def gradient_bytes(pl_module: LightningModule) -> int:
    """Bytes of all gradients that are alive."""
    return sum(p.grad.untyped_storage().nbytes() for p in pl_module.parameters() if p.grad is not None)


def saves(trainer: Trainer) -> list[int]:
    """Step of the last save per checkpoint callback. A save of weights alone calls no hook of other callbacks."""
    return [getattr(callback, "_last_global_step_saved", 0) for callback in trainer.checkpoint_callbacks]


def should_log(trainer: Trainer) -> bool:
    """The Trainer's own rule for logging a step, asked after an optimizer step."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # public, but set from outside the class
    if not trainer.loggers or not every:
        return False
    return (batches_that_stepped(trainer) + 1) % every == 0 or trainer.should_stop


def row_is_due(trainer: Trainer) -> bool:
    """The same rule without what may differ between ranks: loggers, and a stop that only this rank asked for."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(every) and (batches_that_stepped(trainer) + 1) % every == 0


def log_rows(trainer: Trainer, rows: Sequence[Mapping[str, float | None]]) -> None:
    """Give the figures of all ranks, one mapping per rank, to every logger of this one; nothing if nothing was measured."""
    row = metric_row(rows)
    if row:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=batches_that_stepped(trainer))


def batches_that_stepped(trainer: Trainer) -> int:
    """The step axis of all of Lightning's own logging; there is no public name for it."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
