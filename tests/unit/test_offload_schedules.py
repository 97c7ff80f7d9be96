"""Property test of the offload engine over seeded schedules, and planted faults that it must find. `OFFLOAD_SCHEDULES` sets how many run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lightning_gdn.offload import copies
from lightning_gdn.offload.pool import Pool
from lightning_gdn.offload.simulated import SimulatedBackend
from lightning_gdn.offload.transfers import Copy, Transfers
from tests.unit.offload_schedules import Schedule

SCHEDULES = int(os.environ.get("OFFLOAD_SCHEDULES", "2000"))
CHUNK = 250


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_no_schedule_breaks_the_engine(first: int) -> None:
    compared = 0
    for seed in range(first, min(first + CHUNK, SCHEDULES)):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}, {schedule.config}: {error}") from error
        compared += schedule.compared
    assert compared > 10 * CHUNK, "schedules that compare next to nothing prove nothing"


class ReloadWaitsForNothing(SimulatedBackend):
    def wait(self, stream: Any, event: Any) -> None:
        if stream is not self.h2d:
            super().wait(stream, event)


class CopyOutWaitsForNothing(SimulatedBackend):
    def wait(self, stream: Any, event: Any) -> None:
        if stream is not self.d2h:
            super().wait(stream, event)


class ReloadIntoMemoryInUse(SimulatedBackend):
    def wait(self, stream: Any, event: Any) -> None:
        if stream is not self.h2d or event.stream is self.d2h:
            super().wait(stream, event)


class UsedBeforeItArrived(SimulatedBackend):
    def wait(self, stream: Any, event: Any) -> None:
        if event.stream is not self.h2d:
            super().wait(stream, event)


def source_released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def let_go(self: Transfers, held: list[Copy]) -> None:
        for copy in held:
            copy.source = None

    monkeypatch.setattr(Transfers, "let_go", let_go)


def source_released_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proper = Transfers.out

    def out(self: Transfers, taken: Sequence[Copy]) -> None:
        proper(self, taken)
        for copy in taken:
            copy.source = None

    monkeypatch.setattr(Transfers, "out", out)


def host_buffer_reused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    proper = Pool.release
    monkeypatch.setattr(Pool, "release", lambda self, buffer, ready: proper(self, buffer, None))


def buffer_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "release", lambda self, buffer, ready: None)


def wrong_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    proper = copies.view_of

    def contiguous(storage: Any, size: Any, stride: Any, offset: Any, dtype: Any) -> torch.Tensor:
        """As a copy of the tensor itself would come back; where the storage is too small for that, right."""
        plain = torch.empty(size, device="meta")
        fits = (offset + plain.numel()) * dtype.itemsize <= storage.nbytes()
        return proper(storage, size, plain.stride() if fits else stride, offset, dtype)

    monkeypatch.setattr(copies, "view_of", contiguous)


def reload_dropped_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(self: Transfers, copy: Copy) -> None:
        copy.device = None

    monkeypatch.setattr(Transfers, "drop", drop)


FAULTS: dict[str, type[SimulatedBackend] | Callable[[pytest.MonkeyPatch], None]] = {
    "reload before its copy out is done": ReloadWaitsForNothing,
    "copy out before its source is written": CopyOutWaitsForNothing,
    "reload into memory that is still in use": ReloadIntoMemoryInUse,
    "reload used before it arrived": UsedBeforeItArrived,
    "source released early": source_released_early,
    "source released at once": source_released_at_once,
    "host buffer reused early": host_buffer_reused_early,
    "wrong stride on return": wrong_stride,
    "buffer never returned": buffer_never_returned,
    "reload dropped under way": reload_dropped_under_way,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, backend = FAULTS[name], SimulatedBackend
    if isinstance(fault, type):
        backend = fault
    else:
        fault(monkeypatch)
    found = []
    for seed in range(60):
        try:
            Schedule(seed, backend).run()
        except AssertionError as error:
            found.append(f"schedule {seed}: {error}")
    assert found, f"60 schedules passed with the fault {name!r}"
