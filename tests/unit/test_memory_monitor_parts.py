"""The parts of MemoryMonitor without a Trainer: series, warm-up, phases, reports."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gdn.callbacks._counters import CudaCounters, NoCounters, counters_for
from lightning_gdn.callbacks._report import inferred_flops, is_oom, tokens_in, write_json
from lightning_gdn.callbacks._series import LOGGED, Maximum, Series, max_over_ranks, metric_row
from lightning_gdn.callbacks._warmup import AutotuneWatch, WarmUp
from lightning_gdn.callbacks._window import BACKWARD, FORWARD, OPTIMIZER, PhaseMeter, StepWindow

from .memory_monitor_fakes import FakeDevice

# Series and ranks


def test_series_keeps_bytes_exact_over_chunks() -> None:
    series = Series()
    values = [float(139 * 2**30 + 512 * i) for i in range(300)]
    for value in values:
        series.add(value)
    assert series.values() == values
    spread = series.spread()
    assert spread is not None
    assert spread["max"] == values[-1]
    assert spread["min"] == values[0]
    assert spread["median"] == (values[149] + values[150]) / 2
    assert series.total() == sum(values)


def test_p95_only_from_twenty_values_on() -> None:
    series = Series()
    for value in range(19):
        series.add(value)
    assert series.spread() == {"median": 9.0, "p95": None, "max": 18.0, "min": 0.0, "mean": 9.0}
    series.add(19)
    spread = series.spread()
    assert spread is not None
    assert spread["p95"] == pytest.approx(18.05)


def test_an_empty_series_is_none_and_not_zero() -> None:
    assert Series().spread() is None
    assert Series().values() == []
    maximum = Maximum()
    assert maximum.value() is None
    maximum.add(None)
    assert maximum.value() is None
    for value in (3.0, 7.0, 5.0):
        maximum.add(value)
    assert maximum.value() == 7.0


def test_h17_row_over_ranks_has_every_rank_and_says_which_is_worst() -> None:
    rows = [{"step_ms": 10.0, "tokens_per_s": 100.0, "peak_allocated_mib": 5.0}, {"step_ms": 12.0, "tokens_per_s": 80.0, "peak_allocated_mib": 4.0}]
    assert metric_row(rows) == {
        "gdn/step_ms": 12.0,
        "gdn/step_ms/rank0": 10.0,
        "gdn/step_ms/rank1": 12.0,
        "gdn/tokens_per_s": 180.0,
        "gdn/tokens_per_s/rank0": 100.0,
        "gdn/tokens_per_s/rank1": 80.0,
        "gdn/peak_allocated_mib": 5.0,
        "gdn/peak_allocated_mib/rank0": 5.0,
        "gdn/peak_allocated_mib/rank1": 4.0,
    }
    worst = max_over_ranks(rows)
    assert worst["step_ms"] == {"value": 12.0, "rank": 1}
    assert worst["peak_allocated_mib"] == {"value": 5.0, "rank": 0}
    assert worst["pinned_mib"] is None
    assert list(worst) == list(LOGGED)


def test_h17_a_rank_with_an_empty_window_is_left_out_and_not_a_zero() -> None:
    rows = [{}, {"step_ms": 12.0}]
    assert metric_row(rows) == {"gdn/step_ms": 12.0, "gdn/step_ms/rank1": 12.0}
    assert max_over_ranks(rows)["step_ms"] == {"value": 12.0, "rank": 1}


# Warm-up and autotuners


class Tuner:
    """Stands in for triton.runtime.autotuner.Autotuner: all that is read of one is its cache."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Tuner:
    module = types.ModuleType("triton.runtime.autotuner")
    module.Autotuner = Tuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", module)
    return Tuner()


def test_autotuners_are_found_and_their_growth_is_seen_once(tuner: Tuner) -> None:
    tuner.cache["before"] = 1
    watch = AutotuneWatch()
    assert watch.active
    assert not watch.grew()
    tuner.cache["new key"] = 1
    assert watch.grew()
    assert not watch.grew()


def test_without_triton_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.runtime.autotuner", raising=False)
    watch = AutotuneWatch()
    assert not watch.active
    assert not watch.grew()
    assert WarmUp(0, 20, watch).done


def test_looking_for_autotuners_does_not_import_triton() -> None:
    code = "import sys, lightning_gdn.callbacks._warmup as w; before = set(sys.modules)\n"
    code += "w.AutotuneWatch().grew(); print(sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_warm_up_waits_until_no_autotuner_grew_for_two_steps(tuner: Tuner) -> None:
    warmup = WarmUp(3, 20, AutotuneWatch())
    history = []
    for grew in (True, True, True, False, True, False, False):
        assert not warmup.done
        warmup.step(grew)
        history.append(warmup.done)
    assert history == [False] * 6 + [True]
    assert warmup.seen == 7
    assert not warmup.capped


def test_warm_up_is_capped_and_says_so(tuner: Tuner) -> None:
    warmup = WarmUp(3, 5, AutotuneWatch())
    for _ in range(5):
        assert not warmup.done
        warmup.step(True)
    assert warmup.done
    assert warmup.capped


def test_warm_up_longer_than_the_cap_is_what_was_asked_for(tuner: Tuner) -> None:
    warmup = WarmUp(8, 5, AutotuneWatch())
    for _ in range(8):
        assert not warmup.done
        warmup.step(False)
    assert warmup.done
    assert not warmup.capped


# Phases and peaks


def test_phase_peaks_and_total_come_from_own_records() -> None:
    device = FakeDevice(allocated=100)
    meter = PhaseMeter(device)
    meter.enter(FORWARD)
    device.spike(50)
    device.alloc(30)
    meter.enter(BACKWARD)
    device.spike(10)
    device.free(30)
    meter.enter(OPTIMIZER)
    device.spike(400)
    meter.enter(None)
    device.spike(10_000)  # between micro-batches: loading and other people's work
    assert meter.peaks == {FORWARD: 150, BACKWARD: 140, OPTIMIZER: 500}
    assert meter.peak_allocated == 500
    assert not meter.disturbed


def test_a_phase_that_comes_twice_keeps_its_larger_peak() -> None:
    device = FakeDevice(allocated=100)
    meter = PhaseMeter(device)
    for size in (70, 20):
        meter.enter(FORWARD)
        device.spike(size)
        meter.enter(BACKWARD)
    meter.enter(None)
    assert meter.peaks[FORWARD] == 170


def test_h21_a_foreign_reset_is_read_before_it_happens() -> None:
    device = FakeDevice(allocated=100)
    meter = PhaseMeter(device)
    device.watch_resets(meter.before_foreign_reset)
    meter.enter(FORWARD)
    device.spike(900)
    device.reset_by_somebody()
    device.spike(5)
    meter.enter(None)
    assert meter.peak_allocated == 1000
    assert meter.foreign_resets == 1
    assert not meter.disturbed


def test_h21_an_unseen_reset_is_flagged_and_cannot_lower_what_was_seen() -> None:
    device = FakeDevice(allocated=100)
    meter = PhaseMeter(device)
    meter.enter(BACKWARD)
    device.free(60)
    device.reset_peaks()  # below Python: nobody is told
    meter.enter(None)
    assert meter.disturbed
    assert meter.peak_allocated == 100
    assert meter.peaks == {BACKWARD: 100}


def test_alloc_retries_are_those_of_the_step() -> None:
    device = FakeDevice()
    device.retries = 5
    meter = PhaseMeter(device)
    meter.enter(FORWARD)
    device.retries = 7
    meter.enter(None)
    assert meter.alloc_retries == 2


def test_times_of_a_window_leave_out_gaps_and_wait_once() -> None:
    device = FakeDevice()
    window = StepWindow(device)
    for _ in range(3):
        window.open_micro(2.0, 10)
        device.now_ms += 40
        window.close_micro(torch.tensor(1.5))
        device.now_ms += 7  # the device idles between micro-batches
    record = window.finish()
    assert record.event_ms == 120
    assert record.step_ms == 120
    assert record.data_wait_ms == 6.0
    assert record.tokens == 30
    assert record.losses == [1.5, 1.5, 1.5]
    assert record.micro_batches == 3
    assert device.waits == 1


def test_retained_is_the_largest_of_the_micro_batches_without_gradients_the_user_frees() -> None:
    device = FakeDevice(allocated=1000)  # 400 of it gradients
    window = StepWindow(device)
    window.open_micro(0.0, None, lambda: 400)
    device.free(400)  # opt.zero_grad() in front of the forward
    device.alloc(64)
    window.forward_done(lambda: 0)
    device.alloc(5)
    window.forward_done(lambda: 0)  # a second call in the backward phase measures nothing
    window.close_micro(None)
    assert window.finish().retained == 64


def test_a_device_without_counters_gives_none() -> None:
    window = StepWindow(NoCounters(torch.device("cpu")))
    window.open_micro(None, None)
    window.forward_done()
    window.close_micro(None)
    record = window.finish()
    assert (record.peak_allocated, record.peak_reserved, record.peak_active, record.retained, record.pinned) == (None,) * 5
    assert record.event_ms is None
    assert record.data_wait_ms is None
    assert record.phase_peaks == {}
    with pytest.raises(RuntimeError, match="no time marks"):
        NoCounters(torch.device("cpu")).elapsed_ms(None, None)


# The watch on torch's reset functions


def test_cuda_reset_watch_sees_others_and_not_itself_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    names = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    originals = [lambda *args, name=name: calls.append((name, args)) for name in names]
    for name, function in zip(names, originals, strict=True):
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: torch._C._cuda_resetPeakMemoryStats(device.index))
    counters = object.__new__(CudaCounters)  # the constructor asks the driver for a name
    counters._index, counters._device, counters._own_reset = 1, torch.device("cuda", 1), False
    seen: list[int] = []
    end = counters.watch_resets(lambda: seen.append(len(calls)))
    counters.reset_peaks()
    assert seen == []  # our own
    torch._C._cuda_resetPeakMemoryStats(0)
    assert seen == []  # another device
    torch._C._cuda_resetPeakMemoryStats(1)
    torch._C._accelerator_resetPeakStats(1)
    assert seen == [2, 3]  # told before the counter was reset, and the reset still happened
    assert [name for name, _ in calls] == [names[0]] * 3 + [names[1]]
    end()
    assert [getattr(torch._C, name) for name in names] == originals


def test_cuda_reset_watch_wrapped_by_somebody_else_becomes_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda *args: None, raising=False)
    counters = object.__new__(CudaCounters)
    counters._index, counters._device, counters._own_reset = 0, torch.device("cuda", 0), False
    seen: list[str] = []
    end = counters.watch_resets(lambda: seen.append("told"))
    ours = torch._C._cuda_resetPeakMemoryStats
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", lambda *args: ours(*args))
    end()
    torch._C._cuda_resetPeakMemoryStats(0)
    assert seen == []


def test_counters_follow_the_device_type() -> None:
    assert counters_for(torch.device("cpu")).name == "cpu"
    assert isinstance(counters_for(torch.device("meta")), NoCounters)


# Report


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_oom(error) is expected


def test_out_of_memory_behind_another_exception_is_found() -> None:
    error = RuntimeError("replay of region conv failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert is_oom(error)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "labels": None}, 14),
        (types.SimpleNamespace(input_ids=torch.zeros(3, 5, dtype=torch.int32)), 15),
        (torch.zeros(2, 9, dtype=torch.long), 18),
        ((torch.zeros(2, 4, dtype=torch.long), torch.zeros(2)), 8),
        (torch.randn(2, 9), None),
        (torch.zeros(9, dtype=torch.long), None),
        ({"x": 1}, None),
        ((), None),
        (None, None),
    ],
)
def test_tokens_are_counted_from_token_ids_only(batch: Any, expected: int | None) -> None:
    assert tokens_in(batch) == expected


def test_flops_per_token_from_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 10))
    flops, rule = inferred_flops(model)
    assert flops == 6 * (24 + 60)  # the table is only looked up; biases are no matrices
    assert "recomputation" in rule
    model[1].requires_grad_(False)
    assert inferred_flops(model)[0] == 6 * 60 + 4 * 24
    tied = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
    tied[1].weight = tied[0].weight
    assert inferred_flops(tied)[0] == 6 * 40


def test_flops_of_routed_experts_and_of_nothing_are_not_guessed() -> None:
    model = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": torch.nn.Linear(4, 4)})})
    assert inferred_flops(model)[0] is None
    assert "flops_per_token" in inferred_flops(torch.nn.LayerNorm(4))[1]


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    path = write_json({"rank": 3, "value": 1.5}, folder)
    assert path.name == "memory_rank3.json"
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json({"rank": 3, "value": float("nan")}, folder)
    assert json.loads(path.read_text())["value"] == 1.5
    assert [p.name for p in folder.iterdir()] == ["memory_rank3.json"]
