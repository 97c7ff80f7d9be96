"""The profiler on one GPU: events and allocator figures where a CPU has none, and the names of the kernels that ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.bench.profile import Options, profile
from lightning_gdn.bench.recipes import load

pytestmark = pytest.mark.gpu

SMALL = (
    "model.hidden_size=512 model.num_hidden_layers=4 model.linear_num_key_heads=4 model.linear_num_value_heads=8 data.seq_len=2048 "
    "trainer.max_steps=4 monitor.warmup_steps=3"
).split()
LARGE_VOCABULARY = 65536
ARMS = ["gdn_norm_out", "gdn_conv", "gdn_conv+gdn_norm_out+layernorm", "full"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return profile(load("gdn_stack_20", SMALL), ARMS, tmp_path_factory.mktemp("profile"), Options(steps=3))


def test_times_and_transient_bytes_are_there(record: dict[str, Any]) -> None:
    assert record["status"] == "ok", record["error"]
    for row in record["regions"]:
        assert row["forward_ms"] > 0
        assert row["backward_ms"] > 0
        if row["replay_ms"] is not None:
            assert row["replay_ms"] > 0
            assert row["replay_peak_bytes"] >= row["replay_left_bytes"] > 0
    assert record["control"]["peak_bytes"] > record["control"]["retained_bytes"] > 0
    assert set(record["control"]["phase_peak_bytes"]) == {"forward", "loss forward", "loss backward", "backward", "optimizer"}


def test_the_kernels_of_every_region_are_named(record: dict[str, Any]) -> None:
    named = {row["region"]: " ".join(kernel["name"] for kernel in row["kernels"]) for row in record["regions"]}
    assert all(row["kernels_on_gpu"] for row in record["regions"]), record["remarks"]
    assert "conv1d" in named["conv"]
    assert "gated_delta_rule" in named["delta_rule"] or "delta" in named["delta_rule"]
    assert all(named[region] for region in ("input_norm", "in_proj", "prep", "gates", "norm_out", "out_proj", "mixer_residual"))
    assert record["control"]["gpu_busy_ms"] > 0


def test_the_allocator_agrees_with_what_labels_free(record: dict[str, Any]) -> None:
    for entry in record["arms"]:
        assert entry["allocator_freed_bytes"] == pytest.approx(entry["freed_bytes"], rel=0.01), entry["arm"]
        assert entry["cost_ms"] > 0


def test_a_peak_in_the_loss_is_not_lowered_by_a_label_and_said(tmp_path: Path) -> None:
    overrides = [*SMALL, f"model.vocab_size={LARGE_VOCABULARY}", "model.num_hidden_layers=2"]
    record = profile(load("gdn_stack_20", overrides), ["full"], tmp_path, Options(steps=1))
    assert record["status"] == "ok", record["error"]
    # logits in bfloat16, their float32 copy and its gradient: far more than two blocks hold
    assert record["control"]["peak_held_by"] in ("loss forward", "loss backward")
    assert record["arms"][0]["peak_held_by"] == record["control"]["peak_held_by"]
