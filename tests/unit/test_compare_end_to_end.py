"""`lightning-gdn compare` as a user types it: fresh processes, records, table, Markdown, picture, equal losses, predicted bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_gdn.bench.labels_table import predict
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.records import read_json
from lightning_gdn.cli import main
from tests.unit.bench_support import tiny_recipe


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb")
def test_compare_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = str(tiny_recipe(tmp_path))
    out = tmp_path / "cmp"
    assert main(["compare", recipe, "--arms", "gdn_conv,full", "--out", str(out), "logger=wandb"]) == 0
    printed = capsys.readouterr().out
    result = read_json(out / "comparison.json")
    assert [entry["arm"] for entry in result["arms"]] == ["none", "gdn_conv", "full"], "the control was added"
    assert [entry["status"] for entry in result["arms"]] == ["ok"] * 3
    assert [entry["losses"]["verdict"] for entry in result["arms"]] == ["control", "bit-equal", "bit-equal"]
    assert [entry["weights_equal"] for entry in result["arms"]] == [True] * 3
    assert result["problems"] == []

    retained = [entry["retained_bytes"] for entry in result["arms"]]
    assert retained[0] > retained[1] > retained[2] > 0
    assert retained == [predict(load(recipe), ["none", "gdn_conv", "full"]).retained_bytes[arm] for arm in ("none", "gdn_conv", "full")]

    for kernel in result["arms"][0]["kernels"].values():
        assert kernel in printed.replace("\n", " ")
    assert "bit-equal" in (out / "comparison.md").read_text(encoding="utf-8")
    assert (out / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    records = [read_json(path) for path in out.glob("arms/*/record.json")]
    assert len(records) == 3
    assert len({json.dumps(r["losses_hex"]) for r in records}) == 1
    assert all((out / "arms" / f"{r['arm']}-round0" / "memory_rank0.json").exists() for r in records)

    tables = list((out / "wandb").glob("offline-run-*/files/media/table/*.table.json"))
    assert len(tables) == 1
    written = json.loads(tables[0].read_text(encoding="utf-8"))
    assert written["columns"] == result["table"]["columns"]
    assert written["data"] == result["table"]["rows"]
    assert len(list((out / "wandb").glob("offline-run-*"))) == 4
