"""MemoryMonitor in a Trainer on the CPU, with real time and with a scripted device."""

from __future__ import annotations

import inspect
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from torchmetrics.aggregation import MaxMetric

from lightning_gdn.callbacks import MemoryMonitor, memory_monitor
from lightning_gdn.callbacks._series import LOGGED
from lightning_gdn.offload.statistics import StepStatistics
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.strategies import GDNRecomputeStrategy
from tests.lightning_models import TinyModule, loader
from tests.models import TINY_VOCAB, tiny_qwen3_5

from .memory_monitor_fakes import FakeDevice, Rows, Tiny

MIB = 2**20
FIGURES = (
    *("step_ms", "step_wall_ms", "step_event_ms", "data_wait_ms", "tokens_per_s", "model_tflops", "peak_allocated_mib"),
    *("peak_reserved_mib", "peak_active_mib", "retained_mib", "phase_peak_mib", "pinned_mib", "alloc_retries"),
)


def offload_step(**fields: Any) -> StepStatistics:
    counts = "bytes_out bytes_in copies_out copies_in late from_source eligible_bytes fallbacks fallback_bytes prefetch_oom".split()
    pool = dict.fromkeys(("pinned_held", "pinned_in_use", "pinned_peak", "buffers_in_use"), 0)
    return StepStatistics(**{"fraction": 1.0, **dict.fromkeys(counts, 0), "skipped": {"min_bytes": 2 * MIB}, **pool, **fields})


def trainer_for(monitor: MemoryMonitor, *, callbacks: tuple[Callback, ...] = (), **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
        "log_every_n_steps": 1,
    }
    return Trainer(callbacks=[monitor, *callbacks], **(defaults | kwargs))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice(allocated=100 * MIB)
    monkeypatch.setattr(memory_monitor, "counters_for", lambda _: fake)
    return fake


def quiet(**kwargs: Any) -> MemoryMonitor:
    return MemoryMonitor(**({"table": False, "progress_bar": False} | kwargs))


# H17


def test_h17_single_rank_starts_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def collective(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was started")

    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "gather", "reduce"):
        monkeypatch.setattr(torch.distributed, name, collective)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    logger, monitor = Rows(), quiet()

    def synced() -> None:
        metric = MaxMetric()
        metric.update(1.0)
        metric.compute()

    try:
        with pytest.raises(AssertionError, match="a collective was started"):
            synced()  # what a metric does that is not told to stay local
        trainer_for(monitor, max_steps=6, logger=logger).fit(Tiny())
        assert monitor.summary["status"] == "ok"
        with pytest.raises(ZeroDivisionError):
            trainer_for(monitor, max_steps=6, logger=logger).fit(Tiny(on_step=lambda step: 1 / (step - 4)))
        assert (monitor.summary["status"], monitor.summary["steps"]) == ("error", 1)
    finally:
        torch.distributed.destroy_process_group()
    for _, row in logger.ours:
        names = {key.removeprefix("gdn/") for key in row if "/rank" not in key}
        assert {f"gdn/{name}/rank0" for name in names} == {key for key in row if "/rank" in key}
        assert names <= set(LOGGED)


# H18


def test_h18_cpu_fit_measures_time_reports_no_memory_and_never_starts_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    initialized = torch.cuda.is_initialized()

    def no_cuda(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("CUDA was touched")

    for name in ("_lazy_init", "memory_stats_as_nested_dict", "reset_peak_memory_stats", "host_memory_stats", "Event", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, no_cuda)
    logger, monitor = Rows(), MemoryMonitor(dir=tmp_path / "out", progress_bar=False)
    trainer_for(monitor, max_steps=6, logger=logger).fit(Tiny())
    summary = json.loads((tmp_path / "out" / "memory_rank0.json").read_text())
    assert summary == monitor.summary
    assert summary["device"] == "cpu"
    assert summary["status"] == "ok"
    assert summary["step_ms"]["median"] > 0
    memory = ("peak_allocated_mib", "peak_reserved_mib", "peak_active_mib", "retained_mib", "phase_peak_mib", "pinned_mib", "alloc_retries")
    assert {name: summary[name] for name in memory} == dict.fromkeys(memory)
    assert summary["retained_source"] is None
    assert len(summary["notes"]) == 1
    assert "no allocator counters" in summary["notes"][0]
    assert all("mib" not in key for _, row in logger.rows for key in row)
    printed = capsys.readouterr().out
    assert re.search(r"peak allocated \(MiB\)\W+n/a", printed)
    assert not re.search(r"MiB[^\n]*\W0\.00", printed)
    assert torch.cuda.is_initialized() is initialized


def test_h18_without_counters_the_ledger_says_what_is_retained(capsys: pytest.CaptureFixture[str]) -> None:
    class Plan:
        def __str__(self) -> str:
            return "plan gdn_conv: 4 blocks"

    strategy = SingleDeviceStrategy("cpu")
    ledger = SimpleNamespace(retained_bytes=3 * MIB, as_dict=lambda: {"rows": []})
    strategy.applied = SimpleNamespace(plan=Plan(), ledger=ledger, kernels={"conv": "torch F.conv1d"})  # type: ignore[attr-defined]
    logger, monitor = Rows(), MemoryMonitor(progress_bar=False)
    trainer_for(monitor, max_steps=5, logger=logger, strategy=strategy, accelerator="auto", devices="auto").fit(Tiny())
    summary = monitor.summary
    assert summary["retained_mib"] == 3.0
    assert summary["retained_source"] == "ledger"
    assert summary["peak_allocated_mib"] is None
    assert summary["plan"] == "plan gdn_conv: 4 blocks"
    assert summary["ledger"] == {"rows": []}
    assert summary["kernels"] == {"conv": "torch F.conv1d"}
    assert logger.ours[-1][1]["gdn/retained_mib/rank0"] == 3.0
    printed = capsys.readouterr().out
    assert "by the ledger" in printed
    assert "plan gdn_conv: 4 blocks" in printed


def test_h18_a_ledger_that_has_seen_nothing_is_not_a_zero() -> None:
    strategy = SingleDeviceStrategy("cpu")
    strategy.applied = SimpleNamespace(plan=None, ledger=SimpleNamespace(retained_bytes=None, as_dict=dict), kernels=None)  # type: ignore[attr-defined]
    monitor = quiet()
    trainer_for(monitor, max_steps=5, strategy=strategy, accelerator="auto", devices="auto").fit(Tiny())
    assert monitor.summary["retained_mib"] is None
    assert monitor.summary["retained_source"] is None


# H19


@pytest.mark.parametrize(("every", "rows"), [(50, 1), (1, 8), (3, 4), (0, 1)])
def test_h19_the_log_interval_does_not_swallow_the_summary(every: int, rows: int) -> None:
    logger, monitor = Rows(), quiet(warmup_steps=5)
    trainer_for(monitor, max_steps=12, log_every_n_steps=every, logger=logger).fit(Tiny())
    assert monitor.summary["steps"] == 7
    assert monitor.summary["warmup_steps"] == 5
    assert (monitor.summary["first_step"], monitor.summary["last_step"]) == (6, 12)
    steps = [step for step, _ in logger.ours]
    assert len(steps) == rows
    assert steps == sorted(set(steps))
    assert steps[-1] == 12
    assert min(steps) >= 5  # nothing of the warm-up was logged


@pytest.mark.parametrize("max_steps", [1, 3, 5])
def test_h19_fewer_steps_than_the_warm_up_say_so_and_report_no_figure(max_steps: int, tmp_path: Path) -> None:
    logger, monitor = Rows(), quiet(warmup_steps=5, dir=tmp_path)
    trainer_for(monitor, max_steps=max_steps, logger=logger).fit(Tiny())
    summary = json.loads((tmp_path / "memory_rank0.json").read_text())
    assert summary["status"] == "no_steady_steps"
    assert f"{max_steps} optimizer steps were run and none of them is steady ({max_steps} warmup)" in summary["reason"]
    assert {name: summary[name] for name in FIGURES} == dict.fromkeys(FIGURES)
    assert summary["step_times_ms"] == []
    assert len(summary["losses"]) == max_steps
    assert logger.ours == []


def test_h19_a_fit_with_nothing_to_do_still_has_a_summary() -> None:
    monitor = quiet()
    trainer_for(monitor, max_steps=0).fit(Tiny())
    assert monitor.summary["status"] == "no_steady_steps"
    assert monitor.summary["reason"] == "no optimizer step was run"


def test_h19_short_epochs_leave_steady_steps_between_their_boundaries() -> None:
    monitor = quiet(warmup_steps=1)
    trainer_for(monitor, max_epochs=3).fit(Tiny(length=4))
    assert monitor.summary["excluded_steps"] == {"warmup": 1, "autotune": 0, "validation": 0, "checkpoint": 0, "boundary": 2}
    assert monitor.summary["steps"] == 9


# H20


class Interruptions(Callback):
    """A slow validation and a checkpoint writer that takes its time at every fifth step."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        time.sleep(0.3)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % 5 == 0:
            trainer.save_checkpoint("slow.ckpt")
            time.sleep(0.2)


def test_h20_step_time_excludes_validation_checkpoints_and_loading() -> None:
    class Slow(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if self.trainer.training:
                time.sleep(0.1)  # where a slow loader would wait
            return batch

    monitor = quiet()
    trainer = trainer_for(monitor, callbacks=(Interruptions(),), max_steps=14, val_check_interval=3, limit_val_batches=1, num_sanity_val_steps=1)
    trainer.fit(Slow(on_step=lambda _: time.sleep(0.05)))
    summary = monitor.summary
    assert summary["excluded_steps"] == {"warmup": 3, "autotune": 0, "validation": 4, "checkpoint": 2, "boundary": 0}
    assert summary["steps"] == 5
    assert summary["step_ms"]["min"] >= 50
    assert summary["step_ms"]["median"] < 100
    assert summary["step_ms"]["max"] < 150  # neither the wait nor a validation nor a save is in it
    assert 100 <= summary["data_wait_ms"]["median"] < 200
    assert summary["data_wait_ms"]["max"] < 300
    assert summary["step_wall_ms"] == summary["step_ms"]
    assert summary["step_event_ms"] is None


def test_h20_loading_between_the_micro_batches_of_a_step_is_wait_and_not_step_time() -> None:
    class Slow(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            time.sleep(0.06)
            return batch

    monitor = quiet(warmup_steps=1)
    trainer_for(monitor, max_steps=5, accumulate_grad_batches=2).fit(Slow(on_step=lambda _: time.sleep(0.01)))
    assert monitor.summary["steps"] == 4
    assert 20 <= monitor.summary["step_ms"]["median"] < 60
    assert monitor.summary["data_wait_ms"]["median"] >= 120


def test_h20_times_are_per_step_and_never_summed_again() -> None:
    monitor = quiet(warmup_steps=0)
    trainer_for(monitor, max_epochs=4).fit(Tiny(length=6, on_step=lambda _: time.sleep(0.005)))
    times = monitor.summary["step_times_ms"]
    assert len(times) == monitor.summary["steps"] == 24 - 4
    assert max(times[-5:]) < 4 * min(times[:5]) + 50
    assert monitor.summary["step_ms"]["mean"] == pytest.approx(sum(times) / len(times))


def test_h20_validation_in_the_middle_of_an_accumulated_step_spoils_that_step() -> None:
    monitor = quiet(warmup_steps=1)
    # Validation after micro-batches 8 and 16; steps are 3 micro-batches: the 3rd and 6th are cut by it.
    trainer = trainer_for(monitor, max_steps=7, accumulate_grad_batches=3, val_check_interval=8, limit_val_batches=1, num_sanity_val_steps=0)
    trainer.fit(Tiny())
    assert monitor.summary["excluded_steps"] == {"warmup": 1, "autotune": 0, "validation": 2, "checkpoint": 0, "boundary": 0}
    assert monitor.summary["steps"] == 4


def test_h20_a_save_of_weights_alone_is_noticed(tmp_path: Path) -> None:
    monitor = quiet(warmup_steps=1)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=4, save_weights_only=True, save_top_k=-1)
    trainer_for(monitor, callbacks=(saver,), max_steps=10).fit(Tiny())
    assert monitor.summary["excluded_steps"]["checkpoint"] == 2


def test_h20_validation_after_every_step_leaves_no_steady_step_and_says_why() -> None:
    monitor = quiet(warmup_steps=2)
    trainer_for(monitor, max_steps=6, val_check_interval=1, limit_val_batches=1).fit(Tiny())
    assert monitor.summary["status"] == "no_steady_steps"
    assert "(2 warmup, 4 validation)" in monitor.summary["reason"]
    assert "run these less often" in monitor.summary["reason"]


# Memory arithmetic on the scripted device


class Scripted(Tiny):
    """One micro-batch: +30 MiB retained (+50 in between), backward +20 in between, optimizer +`extra` in between; 10 ms each."""

    def __init__(self, device: FakeDevice, extra: int = 7, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scripted = device
        self.extra = extra

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.scripted.spike(50 * MIB)
        self.scripted.alloc(30 * MIB)
        self.scripted.now_ms += 10
        return loss

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.scripted.spike(20 * MIB)
        super().backward(loss, *args, **kwargs)
        self.scripted.free(30 * MIB)
        self.scripted.now_ms += 10

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.scripted.spike(self.extra * MIB)
        self.scripted.now_ms += 10


def test_peaks_phases_retained_and_times_on_a_device_with_counters(device: FakeDevice) -> None:
    device.pinned = 12 * MIB
    logger, monitor = Rows(), quiet(flops_per_token=1e9)
    trainer_for(monitor, max_steps=8, logger=logger).fit(Scripted(device))
    summary = monitor.summary
    assert summary["device"] == "fake device"
    assert summary["peak_allocated_mib"] == 150.0
    assert summary["peak_reserved_mib"] == 300.0
    assert summary["peak_active_mib"] == 150.0
    assert summary["phase_peak_mib"] == {"forward": 150.0, "backward": 150.0, "optimizer": 107.0}
    assert summary["retained_mib"] == 30.0
    assert summary["retained_source"] == "allocator"
    assert summary["pinned_mib"] == 12.0
    assert summary["alloc_retries"] == 0
    assert summary["step_ms"] == summary["step_event_ms"] == {"median": 30.0, "p95": None, "max": 30.0, "min": 30.0, "mean": 30.0}
    assert summary["tokens_per_s"] == pytest.approx(4 / 0.030)
    assert summary["model_tflops"] == pytest.approx(4 / 0.030 * 1e9 / 1e12)
    assert "1e+09 FLOPs per token / 1e12; given by the caller" in summary["flops_formula"]
    assert set(logger.ours[-1][1]) == {f"gdn/{name}{rank}" for name in LOGGED if not name.startswith("offload") for rank in ("", "/rank0")}
    assert summary["max_over_ranks"]["peak_allocated_mib"] == {"value": 150.0, "rank": 0}
    assert device.waits == 8  # one per optimizer step
    assert device.watchers == []


class WithGradients(Scripted):
    """Gradients of 40 MiB live from the first backward to the next zero_grad."""

    held = False

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if not self.held:
            self.scripted.alloc(40 * MIB)
            self.held = True

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.held:
            self.scripted.free(40 * MIB)
            self.held = False
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


def test_gradients_freed_between_forward_and_backward_do_not_lower_what_is_retained(device: FakeDevice) -> None:
    monitor = quiet()
    trainer_for(monitor, max_steps=6).fit(WithGradients(device))
    assert monitor.summary["retained_mib"] == 30.0


def test_accumulation_is_one_step_with_one_wait_and_gradients_do_not_count_as_retained(device: FakeDevice) -> None:
    model = WithGradients(device, length=8)
    monitor = quiet(warmup_steps=1, flops_per_token=1.0)
    trainer_for(monitor, max_epochs=3, accumulate_grad_batches=3).fit(model)
    summary = monitor.summary
    # per epoch 3 + 3 + 2 micro-batches: the first step of an epoch and the short last one are boundaries
    assert summary["optimizer_steps"] == 9
    assert summary["excluded_steps"] == {"warmup": 1, "autotune": 0, "validation": 0, "checkpoint": 0, "boundary": 5}
    assert summary["steps"] == 3
    assert summary["step_ms"]["median"] == 3 * 20 + 10
    assert summary["retained_mib"] == 30.0
    assert summary["peak_allocated_mib"] == 190.0  # gradients and the forward of a later micro-batch
    assert summary["step_tokens"] == [12, 12, 8] * 3
    assert device.waits == 9
    assert summary["losses"] == pytest.approx([sum(model.seen[i:j]) / 3 for e in (0, 8, 16) for i, j in ((e, e + 3), (e + 3, e + 6), (e + 6, e + 8))])


@pytest.mark.parametrize("only_step", [None, 7])
@pytest.mark.parametrize("first", [True, False])
def test_h21_somebody_resets_the_peaks_at_batch_starts(device: FakeDevice, only_step: int | None, first: bool) -> None:
    class Resetter(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            self.reset(trainer)

        def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
            self.reset(trainer)

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            self.reset(trainer)

        def reset(self, trainer: Trainer) -> None:
            if only_step is None or trainer.global_step == only_step:
                device.reset_by_somebody()

    monitor = quiet()
    trainer = trainer_for(monitor, max_steps=10)
    trainer.callbacks = [Resetter(), *trainer.callbacks] if first else [*trainer.callbacks, Resetter()]
    trainer.fit(Scripted(device))
    assert monitor.summary["peak_allocated_mib"] == 150.0
    assert monitor.summary["phase_peak_mib"] == {"forward": 150.0, "backward": 150.0, "optimizer": 107.0}
    assert monitor.summary["foreign_resets"] > 0
    assert monitor.summary["disturbed_steps"] == 0
    assert any("are right" in note for note in monitor.summary["notes"])


def test_h21_a_reset_nobody_could_see_is_flagged(device: FakeDevice) -> None:
    class Hidden(Scripted):
        def on_after_backward(self) -> None:
            self.scripted.free(60 * MIB)  # the state the backward leaves behind is below the one it began with
            self.scripted.peak = self.scripted.allocated
            self.scripted.alloc(60 * MIB)

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)
            self.scripted.peak = self.scripted.allocated

    monitor = quiet()
    trainer_for(monitor, max_steps=6).fit(Hidden(device))
    assert monitor.summary["disturbed_steps"] == 3
    assert monitor.summary["peak_allocated_mib"] == 150.0  # the forward's record stands
    assert any("lower bounds" in note for note in monitor.summary["notes"])


def test_the_peak_of_the_warm_up_is_not_the_steady_peak(device: FakeDevice) -> None:
    monitor = quiet()
    model = Scripted(device, on_step=lambda step: device.spike(900 * MIB) if step == 1 else None)
    trainer_for(monitor, max_steps=6).fit(model)
    assert monitor.summary["peak_allocated_mib"] == 150.0


def test_the_largest_step_decides_whenever_it_comes(device: FakeDevice) -> None:
    monitor = quiet()
    model = Scripted(device, on_step=lambda step: device.spike(900 * MIB) if step == 5 else None)
    trainer_for(monitor, max_steps=9).fit(model)
    assert monitor.summary["peak_allocated_mib"] == 1000.0


def test_a_kernel_tuned_late_is_left_out(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter([False] * 5 + [True] + [False] * 4)
    monkeypatch.setattr("lightning_gdn.callbacks._warmup.AutotuneWatch.grew", lambda self: next(grown))
    monitor = quiet()
    model = Scripted(device, on_step=lambda step: device.spike(900 * MIB) if step == 5 else None)
    trainer_for(monitor, max_steps=10).fit(model)
    assert monitor.summary["excluded_steps"]["autotune"] == 1
    assert monitor.summary["peak_allocated_mib"] == 150.0
    assert any("tuned kernels" in note for note in monitor.summary["notes"])


def test_a_capped_warm_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = iter([True] * 4 + [False] * 6)
    monkeypatch.setattr("lightning_gdn.callbacks._warmup.AutotuneWatch.grew", lambda self: next(grown))
    monkeypatch.setattr("lightning_gdn.callbacks._warmup.AutotuneWatch.active", True)
    monitor = quiet(autotune_cap=4)
    trainer_for(monitor, max_steps=10).fit(Tiny())
    assert monitor.summary["warmup_steps"] == 4
    assert monitor.summary["autotune_capped"] is True
    assert any("autotune_cap" in note for note in monitor.summary["notes"])


def test_behind_the_window_nothing_is_measured_any_more(device: FakeDevice) -> None:
    monitor = quiet(window_steps=2)
    resets: list[int] = []
    trainer_for(monitor, max_steps=12).fit(Scripted(device, on_step=lambda _: resets.append(device.resets)))
    assert monitor.summary["steps"] == 2
    assert monitor.summary["optimizer_steps"] == 12
    assert len(monitor.summary["losses"]) == 12
    assert device.waits == 5
    assert len(set(resets[5:])) == 1
    assert sum(monitor.summary["excluded_steps"].values()) == 3


def test_tokens_per_step_as_given_and_varying_lengths_are_flagged(device: FakeDevice) -> None:
    monitor = quiet(tokens_per_step=1000)
    trainer_for(monitor, max_steps=10, accumulate_grad_batches=2).fit(Scripted(device))
    assert monitor.summary["tokens_per_s"] == pytest.approx(1000 / 0.050)
    assert monitor.summary["step_tokens"] == [1000] * 10
    lengths = iter([4, 4, 4, 4, 8, 4])
    second = quiet()

    class Varying(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"input_ids": batch["input_ids"].repeat(next(lengths) // 4, 1)}

    trainer_for(second, max_steps=6).fit(Varying())
    assert second.summary["step_tokens"] == [4, 4, 4, 4, 8, 4]
    assert any("varies" in note for note in second.summary["notes"])


# Losses, skipped steps, optimization modes


def test_nonfinite_losses_are_counted_and_have_no_value() -> None:
    monitor = quiet()
    values = {1: float("nan"), 4: float("inf")}
    trainer_for(monitor, max_steps=7).fit(Tiny(on_step=values.get))
    assert monitor.summary["nonfinite_losses"] == 6  # nan weights from the second step on
    assert monitor.summary["losses"][0] is not None
    assert monitor.summary["losses"][1:] == [None] * 6
    json.dumps(monitor.summary, allow_nan=False)


def test_losses_are_the_training_losses_bit_for_bit() -> None:
    monitor, model = quiet(), Tiny()
    trainer_for(monitor, max_steps=8).fit(model)
    assert monitor.summary["losses"] == model.seen
    assert monitor.summary["nonfinite_losses"] == 0
    assert monitor.summary["skipped_optimizer_steps"] == 0


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_steps_without_backward_or_update_are_counted() -> None:
    class Skipping(Tiny):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx in (2, 6):
                optimizer_closure()  # what a gradient scaler does that finds infinities
            else:
                super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    monitor = quiet()
    trainer_for(monitor, max_steps=8).fit(Skipping(on_step=lambda step: "skip" if step == 4 else None))
    assert monitor.summary["skipped_optimizer_steps"] == 3
    assert monitor.summary["losses"][4] is None
    assert monitor.summary["nonfinite_losses"] == 0


def test_manual_optimization_with_two_optimizers(device: FakeDevice) -> None:
    class Manual(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            for index, optimizer in enumerate(self.optimizers()):
                optimizer.zero_grad()
                device.alloc((index + 1) * 10 * MIB)
                loss = super().training_step(batch, batch_idx)
                self.manual_backward(loss)
                device.free((index + 1) * 10 * MIB)
                device.spike(100 * MIB)  # between the backward and the update: not the backward's
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.layer.weight], lr=0.01), torch.optim.Adam([self.layer.bias], lr=0.01)], []

    monitor, model = quiet(), Manual()
    trainer_for(monitor, max_steps=16).fit(model)
    summary = monitor.summary
    assert summary["optimizer_steps"] == 8  # windows; Lightning counts two steps in each
    assert summary["steps"] == 5
    assert summary["last_step"] == 16
    assert summary["losses"] == model.seen[1::2]
    assert summary["skipped_optimizer_steps"] == 0
    assert summary["phase_peak_mib"] == {"forward": 200.0, "backward": 120.0, "optimizer": 100.0}
    assert summary["retained_mib"] == pytest.approx(20.0, abs=0.01)  # the larger of the two forwards


def test_manual_accumulation_closes_a_step_with_the_update() -> None:
    class Manual(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            if batch_idx % 2 == 1:
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

    monitor, model = quiet(), Manual()
    trainer_for(monitor, max_steps=6).fit(model)
    assert monitor.summary["optimizer_steps"] == 6
    assert monitor.summary["step_tokens"] == [8] * 6
    assert monitor.summary["losses"] == [(a + b) / 2 for a, b in zip(model.seen[::2], model.seen[1::2], strict=True)]


def test_an_epoch_ended_by_the_module_leaves_no_half_step() -> None:
    class Ending(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    monitor = quiet(warmup_steps=1)
    trainer_for(monitor, max_epochs=3).fit(Ending())
    assert monitor.summary["optimizer_steps"] == 9
    assert monitor.summary["excluded_steps"]["boundary"] == 2
    assert monitor.summary["steps"] == 6


# Resume, repetition, other stages


def test_a_resumed_fit_has_one_warm_up_of_its_own_and_its_steps_continue(tmp_path: Path) -> None:
    logger, first = Rows(), quiet()
    trainer = trainer_for(first, max_epochs=1, logger=logger)
    trainer.fit(Tiny(length=6))
    trainer.save_checkpoint(tmp_path / "six.ckpt")
    assert not any("MemoryMonitor" in key for key in torch.load(tmp_path / "six.ckpt", weights_only=True)["callbacks"])
    second, model = quiet(), Tiny(length=6)
    trainer_for(second, max_steps=16, logger=logger).fit(model, ckpt_path=tmp_path / "six.ckpt")
    summary = second.summary
    assert summary["resumed_from_step"] == 6
    assert summary["warmup_steps"] == 3
    assert summary["excluded_steps"]["boundary"] == 1
    assert (summary["first_step"], summary["last_step"], summary["step"]) == (10, 16, 16)
    assert summary["optimizer_steps"] == 10 == len(model.seen)
    assert len(summary["losses"]) == 10
    steps = [step for step, _ in logger.ours]
    assert steps == sorted(set(steps))  # no step number twice


def test_the_same_monitor_measures_a_second_fit_anew() -> None:
    monitor, model = quiet(), Tiny()
    trainer_for(monitor, max_steps=5).fit(model)
    first = monitor.summary
    trainer_for(monitor, max_steps=8).fit(model)
    assert first["steps"] == 2
    assert monitor.summary["steps"] == 5
    assert len(monitor.summary["losses"]) == 8


def test_validate_and_test_alone_report_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = MemoryMonitor(dir=tmp_path / "out")
    trainer_for(monitor, limit_val_batches=1).validate(Tiny(), verbose=False)
    assert monitor.summary == {}
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""


def test_barebones_and_fast_dev_run() -> None:
    monitor = quiet(warmup_steps=1, progress_bar=True)
    Trainer(accelerator="cpu", barebones=True, max_steps=4, callbacks=[monitor], enable_model_summary=False).fit(Tiny())
    assert monitor.summary["steps"] == 3
    Trainer(accelerator="cpu", fast_dev_run=4, callbacks=[monitor], enable_model_summary=False, enable_progress_bar=False).fit(Tiny())
    assert monitor.summary["steps"] == 3


# Loggers and progress bar


def test_rows_of_others_keep_their_number_and_steps() -> None:
    class Logging(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    def rows(*monitor: MemoryMonitor) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(1)
        logger = Rows()
        trainer = trainer_for(quiet(), max_steps=12, log_every_n_steps=4, logger=logger)
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, MemoryMonitor)] + list(monitor)
        trainer.fit(Logging())
        return [row for row in logger.rows if "loss" in row[1]], logger.ours

    without, none = rows()
    with_monitor, ours = rows(quiet())
    assert none == []
    assert with_monitor == without
    assert [step for step, _ in ours] == [3, 7, 11, 12]  # the Trainer's own steps, and one row at the end
    assert {step for step, _ in without} == {3, 7, 11}


def test_the_progress_bar_shows_it_without_any_log_call_of_the_user(device: FakeDevice) -> None:
    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            super().on_train_batch_end(trainer, *args)
            self.shown = dict(self.get_metrics(trainer, args[0]))

    bar, logger = Bar(), Rows()
    monitor = MemoryMonitor(table=False)
    trainer = trainer_for(monitor, callbacks=(bar,), max_steps=8, enable_progress_bar=True, logger=logger)
    trainer.fit(Scripted(device))
    assert bar.shown["gdn/step_ms"] == 30.0
    assert bar.shown["gdn/peak_allocated_mib"] == 150.0
    assert trainer.progress_bar_metrics["gdn/step_ms"] == 30.0
    assert [step for step, _ in logger.ours] == [3, 4, 5, 6, 7, 8]  # the bar's values went to no logger


def test_the_table_is_printed_once_and_can_be_switched_off(device: FakeDevice, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_for(MemoryMonitor(), max_steps=6).fit(Scripted(device))
    printed = capsys.readouterr().out
    assert printed.count("MemoryMonitor") == 1
    assert re.search(r"steady steps\W+3 of 6", printed)
    assert re.search(r"peak allocated \(MiB\)\W+150\.00", printed)
    trainer_for(quiet(), max_steps=6).fit(Scripted(device))
    assert "MemoryMonitor" not in capsys.readouterr().out


# Failures


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), RuntimeError("CUDA error: out of memory")]
)
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_oom_ends_as_a_record(device: FakeDevice, tmp_path: Path, error: BaseException, where: str) -> None:
    class Failing(Scripted):
        def fail(self, here: str) -> None:
            if here == where and self.trainer.global_step == 5:
                self.scripted.alloc(1000 * MIB)
                raise error

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.fail("forward")
            return loss

        def on_after_backward(self) -> None:
            self.fail("optimizer")

        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.fail("backward")
            super().backward(loss, *args, **kwargs)

    strategy = SingleDeviceStrategy("cpu")
    ledger = SimpleNamespace(retained_bytes=5, as_dict=lambda: {"kept": 5})
    strategy.applied = SimpleNamespace(plan="plan gdn_conv", ledger=ledger, kernels={})  # type: ignore[attr-defined]
    logger, monitor = Rows(), quiet(dir=tmp_path)
    trainer = trainer_for(monitor, max_steps=9, logger=logger, strategy=strategy, accelerator="auto", devices="auto")
    with pytest.raises(type(error), match="out of memory"):
        trainer.fit(Failing(device))
    record = json.loads((tmp_path / "memory_rank0.json").read_text())
    assert record["status"] == "oom"
    assert record["reason"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert (record["stage"], record["phase"], record["step"], record["rank"]) == ("train", where, 5, 0)
    assert record["plan"] == "plan gdn_conv"
    assert record["ledger"] == {"kept": 5}
    assert record["at_exception"]["allocated_mib"] >= 1100
    assert record["steps"] == 2
    assert record["peak_allocated_mib"] == 150.0  # of the steps that were finished
    assert len(record["losses"]) == 5
    assert logger.ours[-1][1]["gdn/peak_allocated_mib"] == 150.0
    assert device.watchers == []


def test_an_oom_in_the_warm_up_is_an_oom_and_no_warm_up_figure(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monitor = quiet(dir=tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        trainer_for(monitor, max_steps=9).fit(Tiny(on_step=fail))
    assert monitor.summary["status"] == "oom"
    assert {name: monitor.summary[name] for name in FIGURES} == dict.fromkeys(FIGURES)


def test_an_oom_before_training_and_in_validation_have_their_stage(tmp_path: Path) -> None:
    class Early(Tiny):
        def configure_optimizers(self) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    class InValidation(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monitor = quiet(dir=tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        trainer_for(monitor, max_steps=9).fit(Early())
    assert (monitor.summary["status"], monitor.summary["device"], monitor.summary["steps"]) == ("oom", None, 0)
    assert (tmp_path / "memory_rank0.json").exists()
    with pytest.raises(torch.OutOfMemoryError):
        trainer_for(monitor, max_steps=9, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=0).fit(InValidation())
    assert (monitor.summary["stage"], monitor.summary["phase"], monitor.summary["step"]) == ("validate", None, 2)


def test_other_exceptions_are_errors_and_leave_no_hook_behind(device: FakeDevice, tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise ValueError("a label out of range")

    monitor, model = quiet(dir=tmp_path), Scripted(device, on_step=fail)
    with pytest.raises(ValueError, match="a label out of range"):
        trainer_for(monitor, max_steps=9).fit(model)
    assert monitor.summary["status"] == "error"
    assert monitor.summary["reason"] == "ValueError: a label out of range"
    assert monitor.summary["steps"] == 1
    assert device.watchers == []


def test_a_record_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (tmp_path / "file").write_text("")
    monitor = quiet(dir=tmp_path / "file")
    with pytest.warns(UserWarning, match="could not be written"), pytest.raises(torch.OutOfMemoryError):
        trainer_for(monitor, max_steps=9).fit(Tiny(on_step=fail))
    assert monitor.summary["status"] == "oom"


def test_optimizer_hooks_are_removed_after_the_fit() -> None:
    monitor = quiet()
    trainer = trainer_for(monitor, max_steps=5)
    trainer.fit(Tiny())
    assert [len(optimizer._optimizer_step_post_hooks) for optimizer in trainer.optimizers] == [0]


# With the real strategy


class TinyHybrid(LightningModule):
    """The small hybrid model under Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_qwen3_5()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(0, TINY_VOCAB, (12, 16)), batch_size=2)


def test_under_the_strategy_plan_kernels_and_ledger_are_in_the_record(tmp_path: Path) -> None:
    retained = []
    for labels in (["gdn_conv"], ["gdn_conv", "gdn_norm_out", "layernorm"]):
        torch.manual_seed(0)
        monitor = quiet(warmup_steps=1, dir=tmp_path)
        strategy = GDNRecomputeStrategy(labels)
        trainer_for(monitor, max_steps=4, strategy=strategy).fit(TinyHybrid())
        summary = json.loads((tmp_path / "memory_rank0.json").read_text())
        assert summary["status"] == "ok"
        assert summary["plan"] == str(strategy.last_applied.plan)
        assert summary["kernels"] == strategy.last_applied.kernels
        assert summary["kernels"]
        assert summary["retained_source"] == "ledger"
        assert summary["retained_mib"] == strategy.last_applied.ledger.retained_bytes / MIB > 0
        assert summary["ledger"]["discarded_bytes"] > 0
        assert summary["step_tokens"] == [32] * 4
        assert summary["model_tflops"] > 0
        retained.append((summary["retained_mib"], summary["losses"]))
    assert retained[0][0] > retained[1][0]
    assert retained[0][1] == retained[1][1]


# Arguments and documentation


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be an integer >= 0, got -1"),
        ({"warmup_steps": None}, TypeError, "warmup_steps must be an integer >= 0, got None of type NoneType"),
        ({"warmup_steps": True}, TypeError, "got True of type bool"),
        ({"window_steps": 0}, ValueError, "window_steps must be an integer >= 1 or None, got 0"),
        ({"window_steps": 2.0}, TypeError, "window_steps must be an integer >= 1 or None, got 2.0"),
        ({"tokens_per_step": 0}, ValueError, "tokens_per_step must be an integer >= 1 or None"),
        ({"autotune_cap": 0}, ValueError, "autotune_cap must be an integer >= 1, got 0"),
        ({"flops_per_token": -1.0}, ValueError, "flops_per_token must be a positive number or None, got -1.0"),
        ({"flops_per_token": "6N"}, ValueError, "flops_per_token must be a positive number or None, got '6N'"),
        ({"flops_per_token": float("nan")}, ValueError, "flops_per_token must be a positive number"),
        ({"dir": 3}, TypeError, "dir must be a path or None, got 3"),
        ({"table": "no"}, TypeError, "table must be True or False, got 'no'"),
        ({"progress_bar": 1}, TypeError, "progress_bar must be True or False, got 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        MemoryMonitor(**arguments)


def test_offload_is_told_per_step_and_only_where_something_may_move(capsys: pytest.CaptureFixture[str]) -> None:
    config = OffloadConfig(labels=("gdn_core_attn",), min_bytes=0)
    logger, monitor = Rows(), quiet(table=True)
    strategy = GDNRecomputeStrategy([], offload=config)
    trainer_for(monitor, max_steps=6, logger=logger, strategy=strategy, accumulate_grad_batches=2).fit(TinyModule(), loader(12))
    found = monitor.summary["offload"]
    moved = 2 * strategy.last_applied.ledger.moved_bytes / MIB
    assert found["steps"] == monitor.summary["steps"] == 3
    assert found["out_mib"]["median"] == found["in_mib"]["median"] == moved > 0
    assert (found["pinned_in_use_mib"], found["fallbacks"], found["fraction"]) == (0.0, 0, 1.0)
    assert found["pinned_peak_mib"] >= moved / 2
    assert found["pinned_held_mib"] >= found["pinned_peak_mib"]
    assert (found["out_gb_s"], found["stall_ms"], found["hidden_share"]) == (None, None, None), "the copies were simulated"
    assert logger.ours[-1][1]["gdn/offload_out_mib/rank0"] == moved
    assert not any("stall" in key for _, row in logger.ours for key in row)
    printed = capsys.readouterr().out
    assert re.search(r"moved to the host per step \(MiB; median, max\)\W+\d", printed)
    assert re.search(r"host buffers held, peak, in use after a step \(MiB\)\W+[\d.]+, [\d.]+, 0.00", printed)
    assert json.loads(json.dumps(monitor.summary, allow_nan=False)) == monitor.summary
    trainer_for(monitor, max_steps=5, strategy=GDNRecomputeStrategy("gdn_conv")).fit(TinyModule(), loader(12))
    assert monitor.summary["offload"] is None
    assert "moved to the host" not in capsys.readouterr().out


def test_pinned_memory_counts_the_pool_of_offload(device: FakeDevice) -> None:
    device.pinned = 12 * MIB
    strategy = SingleDeviceStrategy("cpu")
    step = offload_step(pinned_held=3 * MIB, copy_out_ms=2.0, copy_in_ms=2.0, timed_bytes_out=10**7, stall_in_ms=1.0, exposed_host_out_ms=3.0)
    strategy.applied = SimpleNamespace(plan=None, ledger=None, kernels=None, last_step=step)  # type: ignore[attr-defined]
    logger, monitor = Rows(), quiet()
    trainer_for(monitor, max_steps=5, logger=logger, strategy=strategy, accelerator="auto", devices="auto").fit(Tiny())
    assert monitor.summary["pinned_mib"] == 15.0
    found = monitor.summary["offload"]
    assert (found["out_gb_s"], found["hidden_share"], found["stall_ms"]["median"]) == (5.0, 0.75, 1.0)
    assert found["in_gb_s"] == 0.0
    assert found["exposed_host_ms"]["median"] == 3.0
    assert logger.ours[-1][1]["gdn/offload_stall_ms"] == 1.0
    assert logger.ours[-1][1]["gdn/offload_exposed_host_ms"] == 3.0
    assert found["stayed_mib"] == {"min_bytes": 2.0}


def test_every_key_and_field_is_documented() -> None:
    monitor = quiet()
    trainer_for(monitor, max_steps=5).fit(Tiny())
    first_cells = [line.split("|")[1] for line in (inspect.getdoc(memory_monitor) or "").splitlines() if line.startswith("|")]
    documented = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    assert documented == set(monitor.summary) | {f"gdn/{name}" for name in LOGGED}
