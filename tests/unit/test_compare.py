"""Comparison: only like records, paired deltas, losses bit for bit, nothing lost when an arm fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.bench.compare import child_environment, compare, new_folder, prepare, schedule, split_arms
from lightning_gdn.bench.environment import autotune_hash, collect
from lightning_gdn.bench.errors import UnlikeRecordsError, UserError
from lightning_gdn.bench.judge import COLUMNS, judge, loss_difference
from lightning_gdn.bench.plot import draw, subtitle
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.records import check_alike, read_json, slug, write_json
from lightning_gdn.bench.report import cells, kernels_line, markdown, terminal_table, write_csv
from tests.unit.bench_support import record, timed, tiny_recipe


def entry(result: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(e for e in result["arms"] if e["arm"] == arm)


def test_arms_are_checked_and_the_control_is_added() -> None:
    assert split_arms("gdn_conv, full:block:2") == ["none", "gdn_conv", "full:block:2"]
    assert split_arms("full,none") == ["full", "none"]
    for text, part in [("gdn_cnv", "'gdn_conv'"), ("none,,full", "separated by commas"), ("full,full", "twice"), ("", "separated by commas")]:
        with pytest.raises(UserError) as caught:
            split_arms(text)
        assert part in str(caught.value)
        assert "--arms" in str(caught.value)
    assert prepare(["none"]) == ["none"]


def test_arms_that_move_are_the_same_only_with_the_same_labels_and_share() -> None:
    arms = ["offload:gdn_core_attn", "offload:gdn_core_attn@0.5", "gdn_conv+offload:gdn_core_attn", "offload:mlp+offload:gdn_core_attn"]
    assert split_arms(",".join(arms)) == ["none", *arms]
    with pytest.raises(UserError, match=r"are the same plan"):
        split_arms("offload:mlp+offload:gdn_core_attn,offload:gdn_core_attn+offload:mlp")


def test_columns_of_offload_are_there_only_if_some_arm_moves_something() -> None:
    plain = judge([record("none"), record("a")], name="x", arms=["none", "a"])
    assert "moved/step" not in markdown(plain)
    spread = {"median": 12.5, "p95": None, "max": 13.0, "min": 12.0, "mean": 12.5}
    told = {"out_mib": spread, "in_mib": spread, "out_gb_s": 50.0, "in_gb_s": None, "stall_ms": None, "hidden_share": None, "pinned_held_mib": 20.0}
    rounds = [
        record(arm, index, monitor={**record(arm)["monitor"], "offload": None if arm == "none" else {**told, "fallbacks": index * 4}})
        for arm in ("none", "a")
        for index in (0, 1)
    ]
    result = judge(rounds, name="x", arms=["none", "a"])
    assert entry(result, "none")["offload"] is None
    assert entry(result, "a")["offload"]["fallbacks"] == 2
    text = markdown(result)
    head = next(line for line in text.splitlines() if line.startswith("| arm"))
    assert "| moved/step | GB/s out, in | stall | pinned |" in head
    assert "| 12.5 MiB, 2 stayed | 50.0, n/a | n/a | 20.0 MiB |" in text
    assert "| stall" not in markdown(plain)
    row = dict(zip(COLUMNS, result["table"]["rows"][1], strict=True))
    assert (row["offload_out_mib"], row["offload_stall_ms"], row["pinned_held_mib"]) == (12.5, None, 20.0)


def test_rounds_alternate() -> None:
    assert schedule(["none", "a", "b"], 3) == [
        (0, "none"), (0, "a"), (0, "b"),
        (1, "b"), (1, "a"), (1, "none"),
        (2, "none"), (2, "a"), (2, "b"),
    ]  # fmt: skip


def test_deltas_are_paired_within_a_round() -> None:
    records = [
        timed("none", 0, 100.0),
        timed("a", 0, 110.0),
        timed("a", 1, 240.0),
        timed("none", 1, 200.0),
        timed("none", 2, 50.0),
        timed("a", 2, 60.0),
    ]
    found = entry(judge(records, name="x", arms=["none", "a"]), "a")["step_delta_pct"]
    assert found["rounds"] == pytest.approx([10.0, 20.0, 20.0])
    assert (found["median"], found["min"], found["max"]) == pytest.approx((20.0, 10.0, 20.0))
    # the ratio of the medians would have said +10 %
    result = judge(records, name="x", arms=["none", "a"])
    assert entry(result, "a")["step_ms"]["median"] / entry(result, "none")["step_ms"]["median"] - 1 == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"environment": {**record("a")["environment"], "packages": {"torch": "2.12.0"}}}, "environment.packages.torch"),
        ({"environment": {**record("a")["environment"], "device": "NVIDIA H200"}}, "environment.device"),
        ({"environment": {**record("a")["environment"], "git_revision": "def"}}, "environment.git_revision"),
        ({"recipe": {**record("a")["recipe"], "data": {"seq_len": 64, "batch_size": 2}}}, "recipe.data.seq_len"),
        ({"recipe": {**record("a")["recipe"], "plan": {"arm": "a", "kernels": "fused"}}}, "recipe.plan.kernels"),
        ({"text": {**record("a")["text"], "sha256": "1" * 64}}, "text.sha256"),
    ],
)
def test_unlike_records_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    check_alike([record("none"), record("a")])
    with pytest.raises(UnlikeRecordsError) as caught:
        judge([record("none"), record("a", **change)], name="x", arms=["none", "a"])
    assert f"{field} (" in str(caught.value)
    assert "none round 0" in str(caught.value)
    assert "a round 0" in str(caught.value)


def test_a_growing_autotune_cache_is_noted_not_refused() -> None:
    other = {**record("a")["environment"], "autotune_cache": "h", "git_dirty": True}
    result = judge([record("none"), record("a", environment=other)], name="x", arms=["none", "a"])
    assert any("autotune" in note for note in result["notes"])
    assert not result["problems"]


def test_losses_are_compared_bit_by_bit() -> None:
    a = [(1.0).hex(), (0.1).hex()]
    assert loss_difference(a, a) == {"verdict": "bit-equal", "max_abs_diff": 0.0, "first_step": None}
    nudged = [(1.0).hex(), (0.1 + 2**-56).hex()]
    found = loss_difference(nudged, a)
    assert found["verdict"] == "differ"
    assert found["first_step"] == 1
    assert 0 < found["max_abs_diff"] < 1e-16
    assert loss_difference(["nan"], ["nan"])["verdict"] == "bit-equal"
    assert loss_difference(["nan"], [(1.0).hex()]) == {"verdict": "differ", "max_abs_diff": None, "first_step": 0}
    assert loss_difference(a[:1], a) == {"verdict": "differ", "max_abs_diff": None, "first_step": 1}


def test_on_a_cpu_a_differing_loss_or_weight_is_a_problem_and_elsewhere_a_figure() -> None:
    other = [(5.0).hex(), (4.0).hex(), (3.5).hex()]
    result = judge([record("none"), record("a", losses_hex=other)], name="x", arms=["none", "a"])
    assert result["problems"] == ["a: losses differ from the control's, first at micro-batch 2"]
    result = judge([record("none"), record("a", weights_sha256="v")], name="x", arms=["none", "a"])
    assert result["problems"] == ["a: weights after training differ from the control's"]
    gpu = {**record("a")["environment"], "device": "NVIDIA H200"}
    records = [record("none", environment=gpu), record("a", environment=gpu, losses_hex=other)]
    records += [record("none", 1, environment=gpu, losses_hex=[(5.0).hex(), (4.25).hex(), (3.0).hex()]), record("a", 1, environment=gpu)]
    result = judge(records, name="x", arms=["none", "a"])
    assert not result["problems"]
    assert entry(result, "a")["losses"] == {"verdict": "differ", "max_abs_diff": 0.5, "first_step": 1}
    assert result["control_repeat"] == {"verdict": "differ", "max_abs_diff": 0.25, "first_step": 1}
    assert any("control's own rounds differ by up to 0.25" in note for note in result["notes"])


def test_oom_and_dead_arms_stay_in_the_table() -> None:
    records = [
        record("none"),
        record(
            "big",
            status="oom",
            error="OutOfMemoryError: CUDA out of memory",
            monitor=None,
            losses_hex=[],
            retained_bytes=None,
            kernels={},
            weights_sha256=None,
        ),
        {
            "schema": 1,
            "arm": "dead",
            "round": 0,
            "status": "failed",
            "error": "killed by SIGKILL",
            "environment": None,
            "recipe": record("dead")["recipe"],
            "monitor": None,
        },
    ]
    result = judge(records, name="x", arms=["none", "big", "dead"])
    assert [e["status"] for e in result["arms"]] == ["ok", "oom", "failed"]
    assert len(result["problems"]) == 2
    assert [row[0] for row in result["table"]["rows"]] == ["none", "big", "dead"]
    assert all(len(row) == len(COLUMNS) for row in result["table"]["rows"])
    text = markdown(result)
    assert "| big |" in text
    assert "out of memory" in text
    assert "killed by SIGKILL" in text
    assert cells(entry(result, "dead"))[-1] == "failed"


def test_an_arm_that_failed_in_one_round_says_so() -> None:
    records = [record("none"), record("a"), record("none", 1), record("a", 1, status="oom", error="boom", losses_hex=[])]
    result = judge(records, name="x", arms=["none", "a"])
    assert entry(result, "a")["status"] == "oom"
    assert entry(result, "a")["rounds"] == 1
    assert "oom in other rounds" in cells(entry(result, "a"))[-1]
    assert result["problems"] == ["a: oom: boom"]


def test_a_failed_control_leaves_nothing_to_compare_with() -> None:
    result = judge([record("none", status="failed", error="x", losses_hex=[]), record("a")], name="x", arms=["none", "a"])
    assert entry(result, "a")["losses"]["verdict"] == "not comparable"
    assert entry(result, "a")["step_delta_pct"] is None
    assert any(problem.startswith("a: no round") for problem in result["problems"])


def test_reports_name_the_kernels(tmp_path: Path) -> None:
    result = judge([record("none"), record("a", retained_bytes=500)], name="demo", arms=["none", "a"])
    assert kernels_line(result) == "kernels: conv torch.conv, delta_rule torch.rule"
    assert kernels_line(result) in markdown(result)
    assert kernels_line(result) in subtitle(result).replace("\n", " ")
    differing = judge([record("none"), record("a", kernels={"conv": "fla.conv"})], name="demo", arms=["none", "a"])
    assert "a: conv fla.conv" in kernels_line(differing)
    assert entry(result, "a")["retained_delta_pct"]["median"] == -50.0
    assert terminal_table(result).row_count == 2
    assert "-50.0 %" in markdown(result)
    write_csv(result, tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text(encoding="utf-8").splitlines()[0] == ",".join(COLUMNS)
    draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_device_without_counters_reads_not_known_and_never_zero() -> None:
    text = cells(entry(judge([record("none"), record("a")], name="x", arms=["none", "a"]), "a"))
    assert text[3:5] == ["n/a", "n/a"]


def test_records_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"a": 1, "bad": float("nan"), "inner": [float("inf"), 2.5]})
    assert read_json(path) == {"a": 1, "bad": None, "inner": [None, 2.5]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path)["a"] == 1
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_json(path, {"a": 2})
    assert read_json(path)["a"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_slugs_are_file_names() -> None:
    assert slug("gdn_conv+layernorm") == "gdn_conv+layernorm"
    assert slug("full:block:6") == "full-block-6"
    assert slug("offload:gdn_core_attn@0.5") == "offload-gdn_core_attn-0.5"


def launcher(made: Callable[[str, int], dict[str, Any] | None], calls: list[tuple[int, str]], code: int = 0) -> Any:
    def launch(recipe_file: Path, arm: str, index: int, out: Path, progress: Callable[[int, int], None]) -> int:
        assert recipe_file.exists()
        calls.append((index, arm))
        progress(1, 3)
        found = made(arm, index)
        if found is None:
            (out.parent / "log.txt").write_text("Traceback\nRuntimeError: last line\n\n", encoding="utf-8")
            return code
        write_json(out, found)
        return 0

    return launch


def test_compare_runs_every_arm_in_every_round_and_writes_what_it_says(tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)), ["compare.rounds=2"])
    folder = tmp_path / "out"
    folder.mkdir()
    calls: list[tuple[int, str]] = []
    result = compare(loaded, ["none", "gdn_conv"], folder, show=False, launch=launcher(record, calls))
    assert calls == [(0, "none"), (0, "gdn_conv"), (1, "gdn_conv"), (1, "none")]
    assert json.loads((folder / "comparison.json").read_text(encoding="utf-8")) == result
    assert sorted(p.parent.name for p in folder.glob("arms/*/record.json")) == ["gdn_conv-round0", "gdn_conv-round1", "none-round0", "none-round1"]
    assert load(str(folder / "recipe.yaml")).recipe == loaded.recipe


@pytest.mark.parametrize(("code", "reason"), [(-9, "killed by SIGKILL"), (1, "RuntimeError: last line")])
def test_a_process_that_dies_without_a_record_gets_one(code: int, reason: str, tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)))
    calls: list[tuple[int, str]] = []
    (tmp_path / "out").mkdir()
    launch = launcher(lambda arm, index: record(arm, index) if arm == "none" else None, calls, code)
    result = compare(loaded, ["none", "full"], tmp_path / "out", show=False, launch=launch)
    assert entry(result, "full")["status"] == "failed"
    assert reason in entry(result, "full")["error"]


def test_unlike_records_stay_on_disk(tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)))
    (tmp_path / "out").mkdir()

    def made(arm: str, index: int) -> dict[str, Any]:
        return record(arm, index, text={"sha256": arm})

    with pytest.raises(UnlikeRecordsError):
        compare(loaded, ["none", "full"], tmp_path / "out", show=False, launch=launcher(made, []))
    assert len(list((tmp_path / "out").glob("arms/*/record.json"))) == 2
    assert not (tmp_path / "out" / "comparison.json").exists()


def test_run_folders(tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)), [f"out_dir={tmp_path}/runs"])
    first, second = new_folder(None, loaded), new_folder(None, loaded)
    (first / "x").touch()
    assert first.parent == tmp_path / "runs"
    assert first.name.startswith("tiny-")
    assert second.is_dir()
    with pytest.raises(UserError, match="not empty"):
        new_folder(str(first), loaded)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot make the folder"):
        new_folder(str(tmp_path / "file" / "x"), loaded)


def test_the_environment_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found = collect("cpu")
    assert found["device"] == "cpu"
    assert found["driver"] is None
    assert found["packages"]["torch"]
    assert found["git_revision"] is None, "the tests' working directory is no checkout"
    assert os.uname().nodename not in json.dumps(found) or len(os.uname().nodename) < 4
    assert autotune_hash() is None
    (tmp_path / "cache" / "k").mkdir(parents=True)
    (tmp_path / "cache" / "k" / "chunk.autotune.json").write_text("{}", encoding="utf-8")
    one = autotune_hash()
    (tmp_path / "cache" / "k" / "chunk.autotune.json").write_text("{1}", encoding="utf-8")
    assert one
    assert autotune_hash() != one


def test_an_arms_process_has_the_recipes_threads_and_this_package(tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)))
    env = child_environment(loaded)
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert str(Path(__file__).resolve().parents[2]) in env["PYTHONPATH"].split(os.pathsep)
    three = replace(loaded, recipe=replace(loaded.recipe, trainer=replace(loaded.recipe.trainer, num_threads=3)))
    assert child_environment(three)["OMP_NUM_THREADS"] == "3"


def test_two_spellings_of_one_plan_are_one_arm() -> None:
    with pytest.raises(UserError, match=r"'gdn_conv\+layernorm' and 'layernorm\+gdn_conv' are the same plan"):
        split_arms("none,gdn_conv+layernorm,layernorm+gdn_conv")
    with pytest.raises(UserError, match="num_layers must be a positive integer, got '²'"):
        split_arms("none,full:uniform:²")


def test_sigterm_ends_the_comparison_and_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system or `timeout` sends SIGTERM, whose default would leave the arm training on."""
    arm = tmp_path / "arm"
    arm.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\necho @step 1 2\nexec sleep 60\n")
    arm.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(arm))
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "run").mkdir()

    def terminated(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return lambda done, total: None

    monkeypatch.setattr("lightning_gdn.bench.compare._progress", lambda *_: nullcontext(lambda index, name: terminated))
    with pytest.raises(SystemExit) as stopped:
        compare(load(str(tiny_recipe(tmp_path))), ["none"], tmp_path / "run", show=False)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not list((tmp_path / "run").rglob("record.json"))
