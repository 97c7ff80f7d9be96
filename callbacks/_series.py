"""Aggregates over steps and ranks, on torchmetrics.

Every series is local to its rank (`sync_on_compute=False`): reading a metric never starts a collective, so no rank can hang on
another one whose window is empty or that died. Ranks meet in `metric_row` and `max_over_ranks`, which take one row per rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torchmetrics.aggregation import CatMetric, MaxMetric

__all__ = ["LOGGED", "MIB", "P95_FROM", "Maximum", "Series", "max_over_ranks", "metric_row"]

MIB = 2**20
P95_FROM = 20
"""Fewest values from which a 95th percentile is given: below, it is the maximum under another name."""
_CHUNK = 256

LOGGED = (
    *("step_ms", "tokens_per_s", "peak_allocated_mib", "peak_reserved_mib", "retained_mib", "pinned_mib"),
    *("offload_out_mib", "offload_stall_ms", "offload_exposed_host_ms"),
)
"""Names of the logged figures; the keys are `gdn/<name>` and `gdn/<name>/rank<r>`."""


@final
class Series:
    """One figure per step, with its spread. Values are float64: bytes stay exact."""

    def __init__(self) -> None:
        self._metric = CatMetric(nan_strategy="error", sync_on_compute=False).set_dtype(torch.float64)
        self._buffer = array("d")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, value: float) -> None:
        """Append one value. Buffered, because a torchmetrics update per step costs far more than the number it stores."""
        self._buffer.append(value)
        self._count += 1
        if len(self._buffer) >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        if self._buffer:
            self._metric.update(torch.tensor(self._buffer.tolist(), dtype=torch.float64))
            self._buffer = array("d")

    def _tensor(self) -> torch.Tensor:
        self._flush()
        return self._metric.compute().reshape(-1)

    def values(self) -> list[float]:
        """All values in order."""
        return [] if not self._count else self._tensor().tolist()

    def total(self) -> float:
        """Sum of all values."""
        return 0.0 if not self._count else float(self._tensor().sum())

    def spread(self) -> dict[str, float | None] | None:
        """Median, p95 (None below 20 values), max, min and mean; None if there is no value."""
        if not self._count:
            return None
        values = self._tensor()
        return {
            "median": float(values.quantile(0.5)),
            "p95": float(values.quantile(0.95)) if self._count >= P95_FROM else None,
            "max": float(values.max()),
            "min": float(values.min()),
            "mean": float(values.mean()),
        }


@final
class Maximum:
    """Running maximum of a figure that a device may not have."""

    def __init__(self) -> None:
        self._metric = MaxMetric(nan_strategy="error", sync_on_compute=False).set_dtype(torch.float64)
        self._seen = False

    def add(self, value: float | None) -> None:
        """Take one value in; None (not measured) is passed over."""
        if value is not None:
            self._metric.update(value)
            self._seen = True

    def value(self) -> float | None:
        """The maximum, or None if nothing was ever measured."""
        return float(self._metric.compute()) if self._seen else None


def max_over_ranks(rows: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, Any] | None]:
    """For every logged figure the largest value over ranks and the rank that has it; None where no rank measured it.

    Args:
        rows: one mapping per rank, in rank order, with the names in `LOGGED`.
    """
    found: dict[str, dict[str, Any] | None] = {}
    for name in LOGGED:
        measured = [(value, rank) for rank, row in enumerate(rows) if (value := row.get(name)) is not None]
        best = max(measured, key=lambda pair: pair[0], default=None)
        found[name] = None if best is None else {"value": best[0], "rank": best[1]}
    return found


def metric_row(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """What goes to the loggers: `gdn/<name>` over all ranks and `gdn/<name>/rank<r>` for each.

    Over ranks a figure is its maximum (the worst rank decides whether a run fits and how long a step takes); tokens per second
    add up. A figure that was not measured has no key.
    """
    row: dict[str, float] = {}
    for name in LOGGED:
        measured = {rank: value for rank, figures in enumerate(rows) if (value := figures.get(name)) is not None}
        if measured:
            row[f"gdn/{name}"] = sum(measured.values()) if name == "tokens_per_s" else max(measured.values())
            row.update({f"gdn/{name}/rank{rank}": value for rank, value in measured.items()})
    return row
