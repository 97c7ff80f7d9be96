"""MemoryMonitor on a CUDA device: its figures against hand-made measurements of the same step."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_gdn.callbacks import MemoryMonitor
from lightning_gdn.callbacks._counters import CudaCounters
from lightning_gdn.callbacks._warmup import AutotuneWatch

try:  # a kernel finds its names in the module's globals
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

pytestmark = pytest.mark.gpu

MIB = 2**20
WIDTH, BATCH, STEPS = 2048, 4096, 12


class Stack(LightningModule):
    """A few wide layers: tens of MiB of activations, a backward peak above the forward's, AdamW state."""

    def __init__(self, in_step: Callable[[int], Any] | None = None, layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(m for _ in range(layers) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())))
        self.in_step = in_step
        self.retained: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        before = torch.cuda.memory_allocated()
        loss = self.layers(batch[0]).square().mean()
        self.retained.append(torch.cuda.memory_allocated() - before)
        if self.in_step is not None:
            self.in_step(self.trainer.global_step)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class HandMeasured(Callback):
    """Resets at the batch start, reads at the batch end; nothing else."""

    def __init__(self) -> None:
        self.peaks: list[tuple[int, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *args: Any) -> None:
        self.peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))


def fit(*callbacks: Callback, model: Stack | None = None, steps: int = STEPS, **kwargs: Any) -> Stack:
    """Train on the GPU; every call starts from the same allocator state."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = Stack() if model is None else model
    data = DataLoader(TensorDataset(torch.randn(BATCH * 4, WIDTH)), batch_size=BATCH)
    options: dict[str, Any] = {"accelerator": "gpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=list(callbacks), max_steps=steps, **(options | kwargs))
    # One long epoch: the data set is repeated, so that no step lies at a boundary.
    trainer.fit(model, _Repeated(data))
    return model


class _Repeated:
    """A loader that never ends an epoch."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        while True:
            yield from self.loader


@pytest.fixture(scope="module", autouse=True)
def _workspaces() -> None:
    """cuBLAS takes its workspace from the caching allocator at its first call and keeps it: not part of what is compared here."""
    if torch.cuda.is_available():
        fit(steps=2)


def quiet(**kwargs: Any) -> MemoryMonitor:
    return MemoryMonitor(**({"table": False, "progress_bar": False} | kwargs))


def test_peaks_equal_a_hand_measured_identical_step() -> None:
    hand, monitor = HandMeasured(), quiet()
    fit(hand)
    fit(monitor)
    steady = hand.peaks[3:]
    summary = monitor.summary
    assert summary["status"] == "ok"
    assert summary["steps"] == STEPS - 3
    assert summary["peak_allocated_mib"] * MIB == max(allocated for allocated, _ in steady)
    assert summary["peak_reserved_mib"] * MIB == pytest.approx(max(reserved for _, reserved in steady), rel=0.01)
    assert summary["peak_active_mib"] >= summary["peak_allocated_mib"]
    assert max(summary["phase_peak_mib"].values()) == summary["peak_allocated_mib"]
    assert summary["phase_peak_mib"]["backward"] > summary["phase_peak_mib"]["optimizer"] > 0
    assert summary["disturbed_steps"] == 0
    assert summary["foreign_resets"] == 0
    assert summary["device"] == torch.cuda.get_device_name()


def test_peak_is_that_of_a_plain_loop() -> None:
    monitor = quiet()
    fit(monitor)
    gc.collect()
    torch.cuda.empty_cache()
    model = Stack().cuda()
    optimizer = model.configure_optimizers()
    for _ in range(4):
        batch = torch.randn(BATCH, WIDTH).cuda()
        torch.cuda.reset_peak_memory_stats()
        loss = model.layers(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated()
        del loss, batch
    assert monitor.summary["peak_allocated_mib"] == pytest.approx(peak / MIB, rel=0.01)


def test_retained_is_what_the_forward_left() -> None:
    monitor = quiet()
    model = fit(monitor)
    assert monitor.summary["retained_source"] == "allocator"
    # Lightning scales and clones the loss after training_step: a few blocks of 512 bytes.
    assert monitor.summary["retained_mib"] * MIB == pytest.approx(max(model.retained[3:]), abs=4096)


def test_accumulation_counts_no_gradient_as_retained() -> None:
    monitor = quiet()
    model = fit(monitor, accumulate_grad_batches=3, steps=6)
    assert monitor.summary["optimizer_steps"] == 6
    # the first step also allocates what stays: cuBLAS workspaces
    assert monitor.summary["retained_mib"] * MIB == pytest.approx(max(model.retained[3:]), abs=4096)


def test_event_time_is_within_five_percent_of_the_wall_clock() -> None:
    def work(step: int) -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(10):
            a @ a

    monitor = quiet()
    fit(monitor, model=Stack(in_step=work))
    summary = monitor.summary
    assert summary["step_event_ms"]["median"] > 5
    assert summary["step_ms"] == summary["step_event_ms"]
    assert summary["step_wall_ms"]["median"] == pytest.approx(summary["step_event_ms"]["median"], rel=0.05)


class Resetter(Callback):
    """Somebody else's statistics callback."""

    def __init__(self, only_step: int | None, reset: Callable[[], Any]) -> None:
        self.only_step = only_step
        self.reset = reset

    def _reset(self, trainer: Trainer) -> None:
        if self.only_step is None or trainer.global_step == self.only_step:
            self.reset()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self._reset(trainer)

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        self._reset(trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._reset(trainer)


@pytest.mark.parametrize("only_step", [None, 7])
@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("api", ["cuda", "accelerator"])
def test_h21_a_callback_that_resets_the_peaks_changes_nothing(only_step: int | None, ours_first: bool, api: str) -> None:
    reset = torch.cuda.reset_peak_memory_stats if api == "cuda" else getattr(torch.accelerator, "reset_peak_memory_stats", None)
    if reset is None:
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.reset_peak_memory_stats")
    alone, disturbed = quiet(), quiet()
    fit(alone)
    resetter = Resetter(only_step, reset)
    fit(*((disturbed, resetter) if ours_first else (resetter, disturbed)))
    assert disturbed.summary["foreign_resets"] > 0
    assert disturbed.summary["disturbed_steps"] == 0
    for name in ("peak_allocated_mib", "peak_active_mib", "phase_peak_mib", "retained_mib"):
        assert disturbed.summary[name] == alone.summary[name]


def test_h21_a_reset_in_the_middle_of_the_largest_phase_changes_nothing() -> None:
    def spike(step: int) -> None:
        torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")

    def spike_and_reset(step: int) -> None:
        spike(step)
        torch.cuda.reset_peak_memory_stats()

    alone, disturbed = quiet(), quiet()
    fit(alone, model=Stack(in_step=spike))
    fit(disturbed, model=Stack(in_step=spike_and_reset))
    assert disturbed.summary["peak_allocated_mib"] == alone.summary["peak_allocated_mib"]
    assert disturbed.summary["phase_peak_mib"] == alone.summary["phase_peak_mib"]
    assert disturbed.summary["foreign_resets"] == disturbed.summary["steps"] + disturbed.summary["warmup_steps"]


def test_h21_a_reader_at_the_end_gets_the_last_phase_and_the_summary_the_maximum() -> None:
    class Reader(Callback):
        def on_train_end(self, *args: Any) -> None:
            self.read = torch.cuda.max_memory_allocated()

    monitor, reader = quiet(), Reader()
    fit(monitor, reader)
    assert reader.read < monitor.summary["peak_allocated_mib"] * MIB  # documented: the monitor resets the counters


def test_torch_is_as_it_was_after_the_fit() -> None:
    names = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
    assert hasattr(torch._C, names[0])  # the watch would be inert under another name
    before = [getattr(torch._C, name, None) for name in names]
    fit(quiet(), steps=5)
    assert [getattr(torch._C, name, None) for name in names] == before


def test_pinned_memory_is_counted() -> None:
    held = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    if CudaCounters(torch.device("cuda")).pinned_bytes() is None:
        pytest.skip(f"torch {torch.__version__} has no statistics of pinned host memory")
    monitor = quiet()
    fit(monitor, steps=5)
    assert monitor.summary["pinned_mib"] >= held.numel() / MIB


def test_an_out_of_memory_ends_as_a_record(tmp_path: Path) -> None:
    def explode(step: int) -> None:
        if step == 5:
            torch.empty(2**46, dtype=torch.uint8, device="cuda")

    monitor = quiet(dir=tmp_path)
    with pytest.raises(torch.OutOfMemoryError):
        fit(monitor, model=Stack(in_step=explode))
    record = json.loads((tmp_path / "memory_rank0.json").read_text())
    assert (record["status"], record["stage"], record["phase"], record["step"], record["steps"]) == ("oom", "train", "forward", 5, 2)
    assert record["at_exception"]["allocated_mib"] > 0
    assert record["peak_allocated_mib"] > 0


@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.skipif("GPU_TESTS_ONE_CONFIG" in os.environ, reason="GPU_TESTS_ONE_CONFIG: with one configuration an autotuner tunes nothing")
def test_a_real_autotuner_is_seen() -> None:
    @triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["n"])
    @triton.jit
    def double(x, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

    watch = AutotuneWatch()
    assert watch.active
    assert not watch.grew()
    for n in (1000, 1000, 2000):
        x = torch.ones(n, device="cuda")
        double[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, n)
    assert watch.grew()
    assert not watch.grew()
