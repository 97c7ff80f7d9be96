"""An arm on several processes: which of them this is, and one record of what all of them saw.

Every process runs the whole arm. Rank 0 makes folder and record; the others leave their part of it on a board, also when they failed, so
that a rank 0 which only saw its peer vanish can say why.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as L
import torch

from ..board import ANSWER_S, DEAD_S, Board
from ..callbacks import MemoryMonitor
from .errors import UserError
from .schema import Recipe

__all__ = ["PART", "RankNotes", "check_processes", "merge", "started_rank"]

PART = ("status", "error", "losses_hex", "val_losses_hex", "weights_sha256", "retained_bytes")
"""Fields of the record that each rank has of its own."""
_PEER_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "nccl", "sigterm")
"""Signs of an error that only says that another rank is gone."""


def started_rank() -> int:
    """Rank of this process as its launcher (torchrun, Lightning, SLURM) tells it, before there is a process group; 0 if none did."""
    return next((int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), 0)


def check_processes(recipe: Recipe) -> None:
    """Under torchrun the recipe must ask for as many devices as there are processes.

    Raises:
        UserError: it does not.
    """
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is not None and int(started) != recipe.trainer.devices:
        raise UserError(f"trainer.devices: torchrun started {started} processes, got {recipe.trainer.devices}; write trainer.devices={started}")


class RankNotes(L.Callback):
    """Tells every process what rank 0 decided, and holds the board on which they leave their parts."""

    def __init__(self, recipe: Recipe, monitor: MemoryMonitor) -> None:
        self.recipe, self.monitor = recipe, monitor
        self.board = Board("record")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.world_size == 1:
            return
        self.board = Board("record", trainer.global_rank, trainer.world_size)
        self.monitor.dir = trainer.strategy.broadcast(self.monitor.dir)
        if self.recipe.trainer.num_threads:
            torch.set_num_threads(self.recipe.trainer.num_threads)  # Lightning's launcher divided the cores among the processes

    def gather(self, record: Mapping[str, Any]) -> list[Any] | None:
        """Leave this rank's part; on rank 0 of several also return the parts of all, None for a rank that left none."""
        board = self.board
        if board.world_size == 1:
            return None
        part = {name: record[name] for name in PART}
        board.post("part", part)
        if board.rank:
            return None
        parts = board.read("part", wait_s=ANSWER_S if record["status"] == "ok" else DEAD_S)
        parts[0] = part
        return parts


def merge(record: dict[str, Any], parts: Sequence[Mapping[str, Any] | None]) -> None:
    """Put the parts of all ranks into rank 0's record: it failed if one of them did, for the first reason that is one."""
    record["ranks"] = [None if part is None else {"rank": rank, **part} for rank, part in enumerate(parts)]
    held = [part["retained_bytes"] for part in parts if part is not None and part["retained_bytes"] is not None]
    record["retained_bytes"] = max(held, default=None)
    failed = [(rank, part["status"], part["error"]) for rank, part in enumerate(parts) if part is not None and part["status"] != "ok"]
    failed += [(rank, "failed", "its process ended without a word") for rank, part in enumerate(parts) if part is None]
    if failed:
        own_reason = [each for each in failed if not any(sign in str(each[2]).lower() for sign in _PEER_GONE)]
        rank, record["status"], error = next((each for each in failed if each[1] == "oom"), (own_reason or failed)[0])
        record["error"] = f"rank {rank}: {error}"
