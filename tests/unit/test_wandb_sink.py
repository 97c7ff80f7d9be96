"""The W&B sink against a recording stand-in for wandb's run object, and once against wandb itself, offline (case H23)."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.bench import wandb_sink
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.judge import judge
from lightning_gdn.bench.schema import WandbConfig
from tests.unit.bench_support import record

ARMS = ["none", "gdn_conv", "full"]


class RecordingRun:
    """What the sink uses of wandb's run, written down."""

    open_runs = 0

    def __init__(self, run_id: str, settings: dict[str, Any]) -> None:
        assert RecordingRun.open_runs == 0, "the run before was not finished"
        RecordingRun.open_runs += 1
        self.id, self.settings = run_id, settings
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, Any] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None, **_: Any) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any], **arguments: Any) -> None:
        assert self.exit_code is None, "logged after finish"
        assert "step" not in arguments, "wandb drops rows whose step does not increase"
        self.rows.append(row)

    def finish(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        RecordingRun.open_runs -= 1


class Recorder:
    """Stands in for wandb.init and wandb.Table."""

    def __init__(self) -> None:
        RecordingRun.open_runs = 0
        self.runs: list[RecordingRun] = []
        self.ids = (f"id{n}" for n in itertools.count())

    def init(self, **settings: Any) -> RecordingRun:
        self.runs.append(RecordingRun(next(self.ids), settings))
        return self.runs[-1]

    @staticmethod
    def table(columns: list[str], data: list[list[Any]]) -> dict[str, Any]:
        return {"columns": columns, "data": data}


def published(tmp_path: Path, records: list[dict[str, Any]]) -> tuple[list[str], Recorder, dict[str, Any]]:
    result = judge(records, name="comparison-1", arms=ARMS)
    recorder = Recorder()
    config = WandbConfig(project="p", entity="team", mode="offline")
    ids = wandb_sink.publish(result, records, config, tmp_path, init=recorder.init, table=recorder.table)
    return ids, recorder, result


def test_h23_one_finished_run_per_arm_and_round_and_one_for_the_comparison(tmp_path: Path) -> None:
    records = [record(arm, index) for index in range(2) for arm in ARMS]
    ids, recorder, result = published(tmp_path, records)
    assert len(set(ids)) == len(ids) == 7
    assert [run.id for run in recorder.runs] == ids
    assert RecordingRun.open_runs == 0
    assert all(run.exit_code == 0 for run in recorder.runs)
    assert [run.settings["job_type"] for run in recorder.runs] == [*ARMS, *ARMS, "compare"]
    assert {run.settings["group"] for run in recorder.runs} == {"comparison-1"}
    assert {run.settings["project"] for run in recorder.runs} == {"p"}
    assert {run.settings["entity"] for run in recorder.runs} == {"team"}
    assert {run.settings["mode"] for run in recorder.runs} == {"offline"}
    assert recorder.runs[1].settings["name"] == "gdn_conv-round0"
    assert recorder.runs[3].settings["name"] == "none-round1"
    assert recorder.runs[-1].rows == [{"comparison": {"columns": result["table"]["columns"], "data": result["table"]["rows"]}}]


def test_a_run_has_the_resolved_recipe_its_summary_and_its_history(tmp_path: Path) -> None:
    _, recorder, _ = published(tmp_path, [record(arm) for arm in ARMS])
    run = recorder.runs[1]
    assert run.settings["config"]["plan"] == {"arm": "gdn_conv", "kernels": "stock"}
    assert run.settings["config"]["model"] == {"hidden_size": 32}
    assert run.settings["config"]["environment"]["packages"] == {"torch": "2.13.0"}
    assert run.summary["gdn/retained_bytes"] == 1000
    assert run.summary["gdn/step_ms"] == 100.0
    assert run.summary["kernels/conv"] == "torch.conv"
    assert "gdn/peak_allocated_mib" not in run.summary, "a figure the device cannot give is absent, not 0"
    assert [row["train/loss"] for row in run.rows if "train/loss" in row] == [5.0, 4.0, 3.0]
    assert [row["micro_batch"] for row in run.rows if "train/loss" in row] == [0, 1, 2]
    assert [row["gdn/step_ms"] for row in run.rows if "gdn/step_ms" in row] == [99.0, 101.0]
    assert run.axes["train/loss"] == "micro_batch"


def test_a_failed_arm_is_a_failed_run(tmp_path: Path) -> None:
    records = [record("none"), record("gdn_conv", status="oom", error="out of memory", monitor=None, losses_hex=[]), record("full")]
    _, recorder, _ = published(tmp_path, records)
    assert [run.exit_code for run in recorder.runs] == [0, 1, 0, 1]
    assert recorder.runs[1].summary["status"] == "oom"
    assert recorder.runs[1].settings["tags"] == ["oom"]
    assert recorder.runs[1].rows == []


def test_a_run_is_finished_even_if_logging_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: RecordingRun, row: dict[str, Any]) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(RecordingRun, "log", broken)
    with pytest.raises(ConnectionError):
        published(tmp_path, [record(arm) for arm in ARMS])
    assert RecordingRun.open_runs == 0


def test_offline_without_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert wandb_sink.choose_mode("auto", logged_in=lambda: False) == "offline"
    assert wandb_sink.choose_mode("auto", logged_in=lambda: True) == "online"
    assert wandb_sink.choose_mode("offline", logged_in=lambda: True) == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_sink.choose_mode("auto", logged_in=lambda: True) == "disabled"


def test_a_missing_wandb_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb is not installed; pip install wandb, or write logger=none"):
        wandb_sink.require_wandb()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb")
def test_a_real_offline_run_holds_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    records = [record(arm) for arm in ARMS]
    result = judge(records, name="comparison-2", arms=ARMS)
    ids = wandb_sink.publish(result, records, WandbConfig(), tmp_path)
    assert len(set(ids)) == 4
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert {folder.name.rsplit("-", 1)[1] for folder in folders} == set(ids)
    tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/*.table.json"))
    assert len(tables) == 1
    assert ids[-1] in str(tables[0])
    written = json.loads(tables[0].read_text(encoding="utf-8"))
    assert written["columns"] == result["table"]["columns"]
    assert written["data"] == result["table"]["rows"]
