"""One arm in this process: what its record holds, and that the control is trained as if nobody had looked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_gdn.bench import arm as arm_module
from lightning_gdn.bench.arm import run_arm
from lightning_gdn.bench.data import make_loaders, read_text
from lightning_gdn.bench.module import BenchModule
from lightning_gdn.bench.recipes import Loaded, load
from lightning_gdn.bench.records import read_json, write_json
from tests.unit.bench_support import tiny_recipe


def loaded_of(tmp_path: Path, *overrides: str) -> Loaded:
    return load(str(tiny_recipe(tmp_path)), overrides)


@pytest.mark.parametrize("overrides", [(), ("trainer.val_every=1", "trainer.accumulate_grad_batches=2", "trainer.grad_clip=1.0")])
def test_the_control_is_plain_lightning_to_the_bit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    loaded = loaded_of(tmp_path, *overrides)
    recipe = loaded.recipe
    record = run_arm(recipe, loaded.saved, "none")
    module = BenchModule(recipe)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=3, max_epochs=1, accumulate_grad_batches=recipe.trainer.accumulate_grad_batches,
        gradient_clip_val=recipe.trainer.grad_clip, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, make_loaders(read_text(recipe.data), recipe)[0])
    assert record["losses_hex"] == [float(loss).hex() for loss in module.losses]
    assert record["weights_sha256"] == arm_module._weights_hash(module)
    assert record["retained_bytes"] > 0
    assert record["kernels"]
    assert bool(record["val_losses_hex"]) is bool(recipe.trainer.val_every)


def test_an_arm_that_moves_trains_the_same_losses_and_tells_what_it_moved(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, "offload.min_bytes=0", "offload.resident_last_blocks=0")
    control = run_arm(loaded.recipe, loaded.saved, "none")
    record = run_arm(loaded.recipe, loaded.saved, "gdn_norm_out+offload:gdn_core_attn")
    assert record["status"] == "ok", record["error"]
    assert record["losses_hex"] == control["losses_hex"]
    assert record["weights_sha256"] == control["weights_sha256"]
    ledger = record["ledger"]
    assert ledger["kept_bytes"] + ledger["discarded_bytes"] + ledger["offloaded_bytes"] == control["ledger"]["kept_bytes"]
    assert record["retained_bytes"] == ledger["retained_bytes"] < control["retained_bytes"] - ledger["moved_bytes"] / 2
    assert record["monitor"]["offload"]["out_mib"]["median"] == ledger["moved_bytes"] / 2**20 > 0
    assert record["monitor"]["offload"]["pinned_in_use_mib"] == 0
    assert "delta_rule: offload in 3" in record["plan"]


def test_a_record_holds_what_a_comparison_needs(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path)
    steps: list[tuple[int, int]] = []
    record = run_arm(loaded.recipe, loaded.saved, "gdn_conv", round_index=3, folder=tmp_path / "out", progress=lambda *step: steps.append(step))
    assert (record["status"], record["error"], record["arm"], record["round"]) == ("ok", None, "gdn_conv", 3)
    assert record["recipe"]["plan"]["arm"] == "gdn_conv"
    assert record["recipe"]["model"]["hidden_size"] == 32
    assert len(record["losses_hex"]) == 3
    assert float.fromhex(record["losses_hex"][-1]) == record["loss_last"]
    assert record["ledger"]["discarded_bytes"] > 0
    assert record["retained_bytes"] == record["ledger"]["retained_bytes"]
    assert record["monitor"]["step_ms"]["median"] > 0
    assert record["text"]["bytes"] > 10**6
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert (tmp_path / "out" / "memory_rank0.json").exists()
    write_json(tmp_path / "record.json", record)
    assert read_json(tmp_path / "record.json")["losses_hex"] == record["losses_hex"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), "oom"),
        (torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "oom"),
        (RuntimeError("first line\n  last line\n"), "failed"),
    ],
)
def test_a_failure_is_a_record(
    error: Exception, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = loaded_of(tmp_path)

    def broken(*_: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(arm_module.BenchModule, "forward", broken)
    record = run_arm(loaded.recipe, loaded.saved, "full")
    assert record["status"] == status
    assert record["error"].startswith(type(error).__name__)
    assert "\n" not in record["error"]
    if status == "failed":
        assert record["error"].endswith("last line")
    assert record["environment"]["device"] == "cpu"
    assert record["losses_hex"] == []
    assert "Traceback" in capsys.readouterr().err
