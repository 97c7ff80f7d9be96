"""Test doubles for MemoryMonitor: a device with scripted counters, a module that drives it, a logger that remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, Dataset

from lightning_gdn.callbacks._counters import DeviceCounters, MemoryReading


class FakeDevice(DeviceCounters):
    """An allocator and a clock whose every byte and millisecond the test decides. `active` is `allocated`, `reserved` twice it."""

    name = "fake device"

    def __init__(self, allocated: int = 0) -> None:
        self.allocated = allocated
        self.peak = allocated
        self.pinned: int | None = None
        self.retries = 0
        self.now_ms = 0.0
        self.waits = 0
        self.resets = 0
        self.watchers: list[Callable[[], None]] = []

    def alloc(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def free(self, size: int) -> None:
        self.allocated -= size

    def spike(self, size: int) -> None:
        """A temporary: allocated and freed at once."""
        self.alloc(size)
        self.free(size)

    def read(self) -> MemoryReading:
        return MemoryReading(
            allocated=self.allocated,
            requested=self.allocated,
            reserved=2 * self.allocated,
            peak_allocated=self.peak,
            peak_reserved=2 * self.peak,
            peak_active=self.peak,
            alloc_retries=self.retries,
        )

    def reset_peaks(self) -> None:
        self.resets += 1
        self.peak = self.allocated

    def reset_by_somebody(self) -> None:
        for before in self.watchers:
            before()
        self.peak = self.allocated

    def pinned_bytes(self) -> int | None:
        return self.pinned

    def mark(self) -> float:
        return self.now_ms

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(end - start)

    def wait(self, mark: Any) -> None:
        self.waits += 1

    def watch_resets(self, before: Callable[[], None]) -> Callable[[], None]:
        self.watchers.append(before)
        return lambda: self.watchers.remove(before)


class Ids(Dataset):
    """`length` samples of four token ids."""

    def __init__(self, length: int = 64) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(4) + index}


class Tiny(LightningModule):
    """A linear layer on token ids. `on_step(global_step)` runs inside every training_step; its result, if any, replaces the loss."""

    def __init__(self, length: int = 64, on_step: Callable[[int], Any] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.length = length
        self.on_step = on_step
        self.seen: list[float] = []

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> Any:
        loss = self.layer(batch["input_ids"].float() / 100).square().mean()
        if self.on_step is not None and (result := self.on_step(self.trainer.global_step)) is not None:
            return None if result == "skip" else loss * result
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch["input_ids"].float()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Ids(self.length))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Ids(1))


class Rows(Logger):
    """A logger that keeps every row with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return None

    @property
    def ours(self) -> list[tuple[int | None, dict[str, float]]]:
        """Rows with a key of the monitor."""
        return [(step, row) for step, row in self.rows if any(key.startswith("gdn/") for key in row)]
