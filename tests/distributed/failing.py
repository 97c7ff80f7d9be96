"""A fit that one rank leaves with an exception: `python -m tests.distributed.failing RANK KIND FOLDER`.

`FOLDER/raised.txt` says when, by `time.monotonic()`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.callbacks import MemoryMonitor
from tests.distributed.fits import SIZES, TOKENS, fit
from tests.lightning_models import TinyModule, loader

torch.set_num_threads(1)
ERRORS: dict[str, Any] = {
    "error": ValueError("a bad sample on one rank"),
    "oom": RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
}


class Fails(TinyModule):
    def __init__(self, rank: int, kind: str, folder: Path) -> None:
        super().__init__(**SIZES)
        self.rank, self.kind, self.folder = rank, kind, folder

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == self.rank:
            (self.folder / "raised.txt").write_text(str(time.monotonic()))
            raise ERRORS[self.kind]
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    rank, kind, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    monitor = MemoryMonitor(warmup_steps=1, dir=folder, progress_bar=False)
    fit(GDNRecomputeStrategy("gdn_conv"), Fails(rank, kind, folder), callbacks=[monitor], max_steps=8, data=loader(32, tokens=TOKENS))
