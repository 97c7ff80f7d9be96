"""`labels --model` predicts to the byte what a training run of the whole model then retains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_gdn.bench import labels_table
from lightning_gdn.bench.arm import run_arm
from lightning_gdn.bench.labels_table import OFFLOAD_ARMS, predict, units
from lightning_gdn.bench.recipes import load
from lightning_gdn.cli import main
from lightning_gdn.labels import OFFLOAD_LABELS, parse_arm
from lightning_gdn.plan import Plan
from lightning_gdn.regions import BlockLayout
from tests.unit.bench_support import FAMILIES, tiny_recipe

ARMS = [
    "none",
    "gdn_conv+gdn_norm_out+layernorm",
    "full:block:2+mlp",
    "full:uniform:3",
    "offload:gdn_core_attn+offload:mlp",
    "gdn_norm_out+offload:gdn_norm_out",
    "full:uniform:3+offload:block_input",
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_predictions_equal_what_a_run_measures(precision: str, tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)), [f"trainer.precision={precision}", "trainer.max_steps=2", "offload.min_bytes=4096"])
    prediction = predict(loaded, ARMS)
    for arm in ARMS:
        record = run_arm(loaded.recipe, loaded.saved, arm)
        assert record["status"] == "ok", record["error"]
        assert record["retained_bytes"] == prediction.retained_bytes[arm], arm
        assert record["kernels"] == prediction.kernels


def test_units_keep_chunks_together() -> None:
    layouts = [BlockLayout(name=f"b{i}", kind="gdn" if (i + 1) % 4 else "attention", regions=("input_norm",)) for i in range(8)]

    def sizes(arm: str) -> list[int]:
        return [len(unit) for unit in units(Plan.from_labels(parse_arm(arm), layouts))]

    assert sizes("none") == [1] * 8
    assert sizes("full") == [1] * 8
    assert sizes("full:uniform:3") == [3, 3, 2]
    assert len(set(units(Plan.from_labels(parse_arm("full:block:2"), layouts)))) == 3


def test_a_long_sequence_is_counted_shorter_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(tiny_recipe(tmp_path)), ["data.seq_len=1024", "data.batch_size=1"])
    whole = predict(loaded, ["none"])
    assert not whole.remarks
    monkeypatch.setattr(labels_table, "CPU_CAP", 5 * 2**20)
    scaled = predict(loaded, ["none"])
    assert any("of 1024 tokens" in remark for remark in scaled.remarks)
    assert scaled.retained_bytes["none"] == pytest.approx(whole.retained_bytes["none"], rel=0.05)
    assert scaled.retained_bytes["none"] != whole.retained_bytes["none"]


def test_the_table_says_which_labels_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(tiny_recipe(tmp_path))
    assert main(["labels", "--model", recipe]) == 0
    out = capsys.readouterr().out
    moe = next(line for line in out.splitlines() if "│ moe " in line)
    assert "does not apply" in moe
    assert "kernels: conv torch." in out
    assert main(["labels", "--model", recipe, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    none, full = data["retained_bytes"]["none"], data["retained_bytes"]["full"]
    assert 0 < full < data["retained_bytes"]["gdn_conv"] < none
    assert data["freed_bytes_per_token"]["full"] == (none - full) / (2 * 65)
    assert "moe" in data["inapplicable"]
    assert f"{none:,} B" in out


@pytest.mark.parametrize("family", FAMILIES)
def test_offload_labels_that_move_nothing_say_why(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(tiny_recipe(tmp_path, FAMILIES[family]))
    small = predict(load(recipe), ["none", "offload:gdn_core_attn"])
    assert small.remarks == ("offload:gdn_core_attn: nothing moves: bytes below offload.min_bytes=1048576",)
    for name in OFFLOAD_LABELS:
        arm = OFFLOAD_ARMS[name]
        if arm in small.inapplicable:
            continue
        only_last = "nothing moves: no other blocks have it than those of offload.resident_last_blocks=1"
        told = only_last if name == "core_attn" else "nothing moves: bytes below offload.min_bytes=1048576"
        assert small.stays[arm] == told, arm
    assert small.stays["offload:gdn_in_proj"] in _table(capsys, recipe)
    everything = predict(load(recipe, ["offload.min_bytes=0", "offload.resident_last_blocks=0"]), ["none"])
    assert everything.stays == {}
    resident = predict(load(recipe, ["offload.min_bytes=0", "offload.resident_last_blocks=4"]), ["none"])
    assert resident.stays.keys() == small.stays.keys()
    assert {why.partition(": ")[2] for why in resident.stays.values()} == {"no other blocks have it than those of offload.resident_last_blocks=4"}
    part = predict(load(recipe, ["offload.min_bytes=8000"]), ["none"])
    assert part.retained_bytes["offload:gdn_core_attn"] < part.retained_bytes["none"]
    assert part.stays["offload:gdn_core_attn"] == "a part of it stays: bytes below offload.min_bytes=8000"
    nothing = predict(load(recipe, ["offload.min_bytes=0"]), ["none", "full+offload:gdn_core_attn"])
    assert nothing.stays["full+offload:gdn_core_attn"] == "nothing moves: this plan keeps nothing of it"


def _table(capsys: pytest.CaptureFixture[str], recipe: str) -> str:
    assert main(["labels", "--model", recipe]) == 0
    return capsys.readouterr().out
