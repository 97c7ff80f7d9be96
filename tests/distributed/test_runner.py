"""`lightning-gdn run` and `compare` on several devices, started by themselves and by torchrun; the record of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gdn.bench.arm import check_device
from lightning_gdn.bench.compare import _dead
from lightning_gdn.bench.data import make_loaders, read_text
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.judge import judge
from lightning_gdn.bench.ranks import merge
from lightning_gdn.bench.recipes import load
from lightning_gdn.cli import main
from tests.distributed.launch import launch, torchrun
from tests.unit.bench_support import record, tiny_recipe

TWO = ("trainer.devices=2", "trainer.accumulate_grad_batches=2")


@pytest.mark.slow
def test_compare_trains_every_arm_on_two_devices_on_the_same_data_bit_for_bit(tmp_path: Path) -> None:
    words = ("compare", tiny_recipe(tmp_path), "--arms", "none,gdn_conv", "--rounds", "1", "--out", "out", "trainer.val_every=2", *TWO)
    done = launch("-m", "lightning_gdn", *words, cwd=tmp_path, timeout=250)
    assert done.code == 0, done.output[-4000:]
    result = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert result["problems"] == []
    control, arm = result["arms"]
    assert (control["arm"], arm["losses"]["verdict"], arm["weights_equal"], arm["ranks_agree"]) == ("none", "bit-equal", True, True)
    assert 0 < arm["retained_bytes"] < control["retained_bytes"]
    assert any(note.startswith("2 ranks: memory and step time are those of the worst rank") for note in result["notes"])
    records = [json.loads((tmp_path / "out" / "arms" / f"{name}-round0" / "record.json").read_text()) for name in ("none", "gdn_conv")]
    for found in records:
        assert [part["rank"] for part in found["ranks"]] == [0, 1]
        assert [len(part["losses_hex"]) for part in found["ranks"]] == [6, 6]
        assert [len(part["val_losses_hex"]) for part in found["ranks"]] == [2, 2]
        assert not set(found["ranks"][0]["losses_hex"]) & set(found["ranks"][1]["losses_hex"]), "both ranks saw the same data"
        assert [entry["status"] for entry in found["monitor"]["ranks"]] == ["ok", "ok"]
    assert [part["losses_hex"] for part in records[0]["ranks"]] == [part["losses_hex"] for part in records[1]["ranks"]]
    files = sorted(path.name for path in (tmp_path / "out" / "arms" / "gdn_conv-round0").iterdir())
    assert files == ["log.txt", "memory_rank0.json", "memory_rank1.json", "record.json"]
    assert result["table"]["rows"][1][result["table"]["columns"].index("tokens_per_s")] == pytest.approx(
        sum(entry["tokens_per_s"] for entry in records[1]["monitor"]["ranks"])
    )


@pytest.mark.slow
def test_run_under_torchrun_makes_one_folder_with_the_files_of_both_ranks(tmp_path: Path) -> None:
    done = torchrun("-m", "lightning_gdn", "run", tiny_recipe(tmp_path), "plan.arm=gdn_conv", "out_dir=runs", "logger=csv", *TWO, cwd=tmp_path)
    assert done.code == 0, done.output[-4000:]
    (folder,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names >= {"recipe.yaml", "record.json", "memory_rank0.json", "memory_rank1.json", "metrics.csv"}
    found = json.loads((folder / "record.json").read_text())
    assert (found["status"], [part["status"] for part in found["ranks"]]) == ("ok", ["ok", "ok"])
    assert found["ranks"][0]["weights_sha256"] == found["ranks"][1]["weights_sha256"] is not None
    assert done.output.count("written to ") == 1
    assert "gdn_conv on each of 2 ranks; rank 0's loss" in done.output
    assert "gdn/retained_mib/rank1" in (folder / "metrics.csv").read_text()


def test_torchrun_and_recipe_must_agree_and_compare_refuses_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = str(tiny_recipe(tmp_path))
    assert main(["run", recipe, "trainer.devices=2"]) == 2
    assert "trainer.devices: torchrun started 4 processes, got 2; write trainer.devices=4" in capsys.readouterr().err
    assert main(["compare", recipe]) == 2
    assert "run it without torchrun" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_more_gpus_than_there_are_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"trainer\.devices: got 2, torch sees 1 GPUs"):
        check_device(load(str(tiny_recipe(tmp_path)), ["trainer.devices=2", "trainer.accelerator=gpu"]).recipe)


def test_the_text_is_cut_for_all_devices(tmp_path: Path) -> None:
    path = str(tiny_recipe(tmp_path))
    one, two = (load(path, [f"trainer.devices={n}", "trainer.val_every=1"]).recipe for n in (1, 2))
    text = read_text(one.data)
    (train_one, val_one), (train_two, val_two) = (make_loaders(text, recipe) for recipe in (one, two))
    assert val_one is not None
    assert val_two is not None
    assert (len(train_two), len(val_two)) == (2 * len(train_one), 2 * len(val_one))


# One record of all ranks


def part(status: str = "ok", error: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "status": status, "error": error, "losses_hex": ["0x1p+0"], "val_losses_hex": [], "weights_sha256": "a", "retained_bytes": 10, **changes
    }  # fmt: skip


GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4005"


@pytest.mark.parametrize(
    ("parts", "status", "error"),
    [
        ([part(), part()], "ok", None),
        ([part("failed", GONE), part("failed", "ValueError: bad sample")], "failed", "rank 1: ValueError: bad sample"),
        ([part("failed", GONE), part("oom", "OutOfMemoryError: CUDA out of memory")], "oom", "rank 1: OutOfMemoryError: CUDA out of memory"),
        ([part("failed", "KeyError: 'x'"), part("failed", GONE)], "failed", "rank 0: KeyError: 'x'"),
        ([part("failed", GONE), None], "failed", "rank 1: its process ended without a word"),
        ([part(), None], "failed", "rank 1: its process ended without a word"),
    ],
)
def test_a_record_fails_for_the_first_reason_that_is_one(parts: list[Any], status: str, error: str | None) -> None:
    made: dict[str, Any] = {"status": parts[0]["status"], "error": parts[0]["error"], "retained_bytes": 10}
    merge(made, parts)
    assert (made["status"], made["error"]) == (status, error)


def test_retained_bytes_are_those_of_the_worst_rank() -> None:
    made: dict[str, Any] = {"status": "ok", "error": None, "retained_bytes": 10}
    merge(made, [part(), part(retained_bytes=30)])
    assert made["retained_bytes"] == 30
    assert [one["rank"] for one in made["ranks"]] == [0, 1]


def with_ranks(arm: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return record(arm, ranks=[{"rank": rank, **each} for rank, each in enumerate(parts)])


def test_losses_and_weights_are_judged_on_every_rank() -> None:
    def verdict(*parts: dict[str, Any]) -> dict[str, Any]:
        return judge([with_ranks("none", part(), part()), with_ranks("full", *parts)], name="x", arms=["none", "full"])

    assert verdict(part(), part())["problems"] == []
    assert "losses differ" in verdict(part(), part(losses_hex=["0x1p+1"]))["problems"][0]
    assert "the ranks ended with different weights" in verdict(part(), part(weights_sha256="b"))["problems"][0]
    assert "weights after training differ" in verdict(part(weights_sha256="b"), part(weights_sha256="b"))["problems"][0]


def test_h17_the_record_of_a_killed_arm_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    for rank, status, reason in ((0, "ok", None), (1, "oom", "OutOfMemoryError: CUDA out of memory")):
        (tmp_path / f"memory_rank{rank}.json").write_text(json.dumps({"rank": rank, "status": status, "reason": reason}))
    made = _dead(load(str(tiny_recipe(tmp_path))), "full", 0, -9, tmp_path / "log.txt")
    assert (made["status"], made["error"]) == ("oom", "rank 1: OutOfMemoryError: CUDA out of memory")
