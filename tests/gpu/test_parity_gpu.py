"""`lightning-gdn parity` on one GPU: every label in the three precisions, deterministic and not; a planted error is found in both.

Small dimensions: kernels are tuned once in this process. The records at 0.8B are made by benchmarks/parity.sh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gdn.bench.parity_judge import NOISY_RUNS
from lightning_gdn.bench.parity_rig import CUBLAS
from lightning_gdn.bench.records import read_json
from lightning_gdn.cli import main

pytestmark = pytest.mark.gpu

SMALL = (
    "model.hidden_size=256 model.intermediate_size=512 model.num_hidden_layers=4 model.num_attention_heads=4 model.num_key_value_heads=2 "
    "model.head_dim=64 model.linear_num_key_heads=2 model.linear_num_value_heads=4 model.linear_key_head_dim=64 model.linear_value_head_dim=64 "
    "model.vocab_size=2048 data.seq_len=1024 data.batch_size=2"
).split()
LABELS = (
    "gdn_in_proj gdn_in_proj_split gdn_in_proj_conv gdn_in_proj_conv_prep gdn_conv gdn_front gdn_norm_out gdn_gated_delta_rule gdn layernorm mlp "
    "core_attn full"
).split()
PRECISIONS = ("bf16-true", "bf16-mixed", "32-true")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this set no fresh process is started, and kernels that an earlier test tuned stay tuned."""
    monkeypatch.setenv(CUBLAS, ":4096:8")


def run(tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["parity", "qwen3_5_0_8b", *SMALL, "--out", str(tmp_path / "out"), *argv])
    return code, read_json(tmp_path / "out" / "parity.json")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_label_is_bit_equal_with_deterministic_kernels(precision: str, tmp_path: Path) -> None:
    code, record = run(tmp_path, f"trainer.precision={precision}")
    assert code == 0, record["problems"]
    verdicts = {entry["arm"]: entry["verdict"] for entry in record["arms"]}
    assert {label: verdicts[label] for label in LABELS} == dict.fromkeys(LABELS, "bit-equal")
    assert record["kernels"]["delta_rule"] == "fla.chunk_gated_delta_rule"
    setting = record["kernel_setting"]
    assert (setting["deterministic_algorithms"], setting[CUBLAS]) == ("error", ":4096:8")
    assert record["recipe"]["model"]["keep_fp32"]
    assert (tmp_path / "out" / "parity.json").stat().st_size <= 50_000


@pytest.mark.parametrize("precision", PRECISIONS)
def test_arms_that_move_are_bit_equal_and_say_how_much_moved(precision: str, tmp_path: Path) -> None:
    arms = "offload:gdn_core_attn,gdn_conv+gdn_norm_out+offload:gdn_core_attn@auto,full+offload:block_input,offload:mlp@0.5"
    code, record = run(tmp_path, f"trainer.precision={precision}", "--arms", arms, "offload.min_bytes=65536")
    assert code == 0, record["problems"]
    assert {entry["verdict"] for entry in record["arms"]} == {"bit-equal"}
    assert all(entry["moved"]["bytes_per_step"] > 0 for entry in record["arms"])


def test_an_arm_that_moves_nothing_is_no_pass(tmp_path: Path) -> None:
    code, record = run(tmp_path, "--arms", "offload:gdn_core_attn", "offload.min_bytes=1073741824")
    assert (code, record["arms"][0]["verdict"]) == (1, "moved nothing")
    assert "write offload.min_bytes=0" in record["problems"][0]


def test_fused_kernels_and_the_fused_loss(tmp_path: Path) -> None:
    code, record = run(tmp_path, "plan.kernels=fused", "trainer.loss=fused_linear_cross_entropy")
    assert code == 0, record["problems"]
    assert record["kernels"]["norm_out"] == "fla.rms_norm_gated"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_of_training_are_within_their_own_noise(precision: str, tmp_path: Path) -> None:
    arms = "gdn_conv,gdn_norm_out,gdn,layernorm,mlp,core_attn,full"
    code, record = run(tmp_path, f"trainer.precision={precision}", "--nondeterministic", "--arms", arms)
    assert code == 0, record["problems"]
    if record["control"]["noisy_tensors"]:
        assert record["control"]["repeats"] == NOISY_RUNS + 1


@pytest.mark.parametrize("kernels", [(), ("--nondeterministic",)], ids=["deterministic", "as_in_training"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plant", ["conv@1", "norm_out@2", "core_attn@3"])
def test_a_planted_error_is_found(plant: str, precision: str, kernels: tuple[str, ...], tmp_path: Path) -> None:
    code, record = run(tmp_path, f"trainer.precision={precision}", "--arms", "full", "--plant", plant, *kernels)
    assert code == 1
    arm = record["arms"][0]
    assert arm["verdict"] == "outside"
    assert arm["enters_at"] == f"model.layers.{plant[-1]}"


def test_where_cuda_runs_already_a_fresh_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS)
    torch.zeros(1, device="cuda")
    code, record = run(tmp_path, "--arms", "gdn_norm_out", "--plant", "norm_out@1")
    assert code == 1
    assert record["kernel_setting"][CUBLAS] == ":4096:8"
    assert record["arms"][0]["enters_at"] == "model.layers.1"
