"""How the ranks of a fit hear of each other's figures: through a board of notes, never through a collective.

A rank may have no steady step in an interval, end earlier than the others, have no logger, or be dead. The others then log and report
without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from lightning.pytorch import Trainer

from ..board import ANSWER_S, DEAD_S, Board
from ._series import LOGGED, max_over_ranks

__all__ = ["FitRanks", "Row", "rank_entry"]

Row = Mapping[str, float | None]
"""Figures of one rank, by the names in `LOGGED`; empty if it measured nothing."""
STEP_S = 1.0
"""Seconds that rank 0 waits for the others' row of a step that it logs. They end the step with it, but for their own bookkeeping."""


@final
class FitRanks:
    """The ranks of one fit.

    Args:
        trainer: of the fit; None stands for one process.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        self._board = Board("memory_monitor", rank, world_size)
        self._rows = 0
        self._patient = True

    @property
    def several(self) -> bool:
        """True with more than one process."""
        return self._board.world_size > 1

    def rows(self, step: int, figures: Row, *, logs: bool) -> list[Row]:
        """Tell this rank's figures of the steps since the last row; returns those of all ranks, if this one is to log them.

        Args:
            step: what the ranks agree on: rows of another step are not mixed in.
            logs: this rank has loggers. Rank 0 logs for all; the others get nothing to log here.
        """
        if not self.several:
            return [figures]
        # Two places in turn: a rank cannot be two steps ahead of another one, but it can be one.
        note = f"row{self._rows % 2}"
        self._rows += 1
        self._board.post(note, {"step": step, "figures": figures})
        if self._board.rank or not logs:
            return []
        told = self._board.read(note, wait_s=STEP_S if self._patient else 0.0, fits=lambda row: row["step"] == step)
        # A rank that stayed away once (no monitor there, an earlier end) is not waited for at every row.
        self._patient = self._patient and None not in told
        told[0] = {"figures": figures}
        return [{} if row is None else row["figures"] for row in told]

    def finish(self, summary: dict[str, Any], entry: Mapping[str, Any], *, failed: bool) -> list[Row]:
        """Put the figures of all ranks into the summary of this one; returns them as rows.

        Args:
            entry: what `rank_entry` made of the summary.
            failed: this rank raised. It leaves its figures and goes; only rank 0 looks whether another one had failed before it.
        """
        entries: list[Any] = [entry]
        if self.several and failed and self._board.rank:
            self._board.post("summary", {**entry, "leaves": True})
            entries = [entry if rank == self._board.rank else None for rank in range(self._board.world_size)]
        elif self.several:
            entries = self._board.exchange("summary", entry, wait_s=DEAD_S if failed else ANSWER_S)
        entries = [None if given is None else {key: value for key, value in given.items() if key != "leaves"} for given in entries]
        rows: list[Row] = [{} if given is None else {name: given[name] for name in LOGGED} for given in entries]
        summary["ranks"] = entries
        summary["max_over_ranks"] = max_over_ranks(rows)
        silent = [str(rank) for rank, given in enumerate(entries) if given is None]
        if silent:
            summary["notes"].append(f"nothing was heard of rank {', '.join(silent)}: what is said over all ranks leaves it out")
        return rows


def rank_entry(summary: Mapping[str, Any], figures: Row) -> dict[str, Any]:
    """What the others get to know of a rank: how its fit ended, and its figures."""
    about = {key: summary[key] for key in ("rank", "device", "status", "reason", "steps")}
    return about | {name: figures.get(name) for name in LOGGED}
