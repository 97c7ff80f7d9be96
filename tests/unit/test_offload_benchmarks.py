"""The offload benchmarks' own logic: fingerprints see every bit, planted differences are found, what did not finish is said."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Rows = list[dict[str, Any]]
FULL, AUTO, BOTH = "offload:gdn_core_attn", "offload:gdn_core_attn@auto", "gdn_norm_out+offload:gdn_core_attn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64, 33)], ids=str)
def test_a_fingerprint_sees_every_bit_and_the_order(bench: Callable[[str], Any], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    of = bench("fingerprints").Fingerprint("cpu").of
    whole = bench("fingerprints").sha256_of
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(shape, generator=generator) * 100).to(dtype)
    other = torch.arange(7.0)
    base = of([tensor, other])
    assert base == of([tensor.clone(), other]) != of([other, tensor])
    assert whole([tensor, other]) != whole([other, tensor])
    raw = tensor.flatten().view(torch.uint8)
    seen = {base}
    for byte in {0, raw.numel() // 2, raw.numel() - 1}:
        changed = tensor.clone()
        bit = 1 if dtype == torch.bool else 128
        changed.flatten().view(torch.uint8)[byte] ^= bit
        assert whole([changed, other]) != whole([tensor, other])
        seen.add(of([changed, other]))
    assert len(seen) == 1 + len({0, raw.numel() // 2, raw.numel() - 1})
    if len(shape) == 2:
        swapped = tensor.clone()
        swapped[[0, 1]] = tensor[[1, 0]]
        assert (of([swapped, other]) == base) == torch.equal(swapped, tensor)
        assert of([tensor.t().contiguous().t(), other]) == base, "values in logical order, whatever the layout"


def test_a_fingerprint_is_of_bits_and_of_more_than_one_chunk(bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = bench("fingerprints")
    monkeypatch.setattr(fingerprints, "WORDS", 16)
    of = fingerprints.Fingerprint("cpu").of
    zero, minus = torch.zeros(100), torch.zeros(100)
    minus[99] = -0.0
    assert torch.equal(zero, minus)
    assert of([zero]) != of([minus])
    nans = [torch.tensor([0x7FC00000 + payload], dtype=torch.int32).view(torch.float32) for payload in (0, 0, 1)]
    assert of([nans[0]]) == of([nans[1]]) != of([nans[2]]), "NaN equals itself here, and no other NaN"
    blocks = torch.randn(100)
    moved = torch.cat([blocks[32:64], blocks[:32], blocks[64:]])
    assert of([blocks]) != of([moved]), "whole chunks exchanged"
    assert of([blocks[:50], blocks[50:]]) != of([blocks]), "where a tensor ends counts"
    assert of([blocks[1:]]) == of([blocks[1:].clone()]), "also at an odd offset"
    assert of([]) == of([])


def test_the_optimizer_state_is_all_of_it(bench: Callable[[str], Any]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    assert list(bench("fingerprints").state_of(model, optimizer)) == []
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = list(bench("fingerprints").state_of(model, optimizer))
    assert [tuple(tensor.shape) for tensor in found] == [(2, 3), (2, 3), (), (2,), (2,), ()]


def trace(steps: int, *, moved: int = 0, first: int = 0, hashed: tuple[int, ...] = (1, 3, 6)) -> Rows:
    """Made-up rows, the same for every arm; with `moved` what the engine told."""
    rows: Rows = [{"step": first, "weights": f"w{first}", "optimizer": f"o{first}", "weights_sha256": f"W{first}", "optimizer_sha256": f"O{first}"}]
    for step in range(first + 1, steps + 1):
        row = {"step": step, "losses": [float(step + part).hex() for part in range(4)], "grad_norm": (0.5 * step).hex()}
        row |= {"weights": f"w{step}", "optimizer": f"o{step}", "allocated": 100, "peak": 300, "reserved": 400}
        if step in hashed:
            row |= {"weights_sha256": f"W{step}", "optimizer_sha256": f"O{step}"}
        if moved:
            row |= {
                "pinned": 50,
                "buffers_in_use": 0,
                "bytes_out": moved,
                "bytes_in": moved,
                "late": 0,
                "fallbacks": 0,
                "fraction": 1.0,
                "settled": None,
            }
        rows.append(row)
    return rows


def auto_trace(steps: int, *, settles: int = 5) -> Rows:
    rows = trace(steps, moved=80)
    for row in rows[1:]:
        row["settled"] = row["step"] >= settles
        if row["step"] > settles:
            row |= {"fraction": 0.5, "bytes_out": 40, "bytes_in": 40, "allocated": 120, "peak": 320}
    return rows


def result(**more: Any) -> dict[str, Any]:
    base = {"status": "ok", "autotune_before": "A", "autotune_after": "A", "configs": {"k 1": "c"}, "kernel_setting": {"mode": "error"}}
    return {**base, "plan": "p", "kernels": {}, "seconds": 1.0, **more}


def matrix(bench: Callable[[str], Any]) -> tuple[Any, list[Any], dict[str, Any], dict[str, Rows]]:
    """A matrix in which everything is as it should be."""
    module = bench("offload_matrix")
    runs = module.plan(20, 15, Path("weights.pt"))
    traces = {"none": trace(20), "none again": trace(20), FULL: trace(20, moved=80), AUTO: auto_trace(15), BOTH: trace(15, moved=80)}
    traces |= {module.SAVED: trace(3, moved=80), module.RESUMED: trace(6, moved=80, first=3)}
    return module, runs, {run.name: result() for run in runs}, traces


def judged(bench: Callable[[str], Any], change: Callable[[dict[str, Any], dict[str, Rows]], None]) -> dict[str, tuple[bool | None, str]]:
    """Verdicts that are not met, after a change."""
    module, runs, results, traces = matrix(bench)
    results, traces = copy.deepcopy(results), copy.deepcopy(traces)
    change(results, traces)
    found = module.verdicts(runs, {"autotune_after": "A"}, results, traces, gpu=True)
    return {entry["what"]: (entry["ok"], entry["note"]) for entry in found if not entry["ok"]}


def test_a_matrix_as_it_should_be(bench: Callable[[str], Any]) -> None:
    assert judged(bench, lambda results, traces: None) == {}
    module, runs, results, traces = matrix(bench)
    assert module.missing(runs, results, traces) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("losses", ["0x0p+0"] * 4, "step 7: loss of micro-batch 1 0x0p+0"),
        ("grad_norm", "0x1p+9", "step 7: gradient norm 0x1p+9"),
        ("weights", "other", "step 7: weights other instead of w7"),
        ("optimizer", "other", "step 7: optimizer state other instead of o7"),
    ],
)
@pytest.mark.parametrize("name", ["none again", FULL, AUTO, BOTH])
def test_a_planted_difference_is_found_and_named(bench: Callable[[str], Any], name: str, key: str, value: Any, said: str) -> None:
    def change(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[name][7][key] = value
        traces[name][9]["weights"] = "later"

    found = judged(bench, change)
    assert list(found) == [f"{name} equals none"], "and nothing else"
    assert found[f"{name} equals none"][0] is False
    assert said in found[f"{name} equals none"][1]


def test_a_difference_in_one_micro_batch_in_a_hash_and_before_the_first_step(bench: Callable[[str], Any]) -> None:
    first = bench("offload_verdicts").first_difference
    control = trace(6)
    for step, key, said in (
        (5, "losses", "loss of micro-batch 3"),
        (3, "optimizer_sha256", "SHA-256 of the optimizer state"),
        (0, "weights", "weights"),
    ):
        rows = copy.deepcopy(control)
        if key == "losses":
            rows[step][key][2] = (1.5).hex()
        else:
            rows[step][key] = "other"
        found = first(rows, control)
        assert (found["step"], found["what"]) == (step, said)
    shorter = copy.deepcopy(control)
    shorter[2]["losses"].pop()
    assert first(shorter, control)["what"] == "number of losses"
    assert first(control, control) is None


@pytest.mark.parametrize("half", [0, 1])
def test_a_restart_that_differs_is_found(bench: Callable[[str], Any], half: int) -> None:
    module = bench("offload_matrix")
    name = (module.SAVED, module.RESUMED)[half]

    def change(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[name][-1]["optimizer"] = "other"

    assert list(judged(bench, change)) == ["three steps, a new process and three more equal six"]

    def reloaded(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[module.RESUMED][0]["weights_sha256"] = "other"

    assert "step 3: SHA-256 of the weights" in judged(bench, reloaded)["three steps, a new process and three more equal six"][1]


@pytest.mark.parametrize(("key", "value"), [("allocated", 101), ("peak", 301), ("reserved", 500), ("pinned", 60), ("buffers_in_use", 1)])
def test_memory_that_moves_is_found(bench: Callable[[str], Any], key: str, value: int) -> None:
    def late(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[FULL][-1][key] = value

    assert list(judged(bench, late)) == [f"{FULL}: memory"]

    def in_warm_up(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[FULL][2][key] = value

    assert list(judged(bench, in_warm_up)) == ([f"{FULL}: memory"] if key == "buffers_in_use" else [])


def test_memory_may_vary_as_in_the_control_and_no_more(bench: Callable[[str], Any]) -> None:
    def change(spread: int) -> Callable[[dict[str, Any], dict[str, Rows]], None]:
        def both(results: dict[str, Any], traces: dict[str, Rows]) -> None:
            traces["none"][-1]["peak"] = 310
            traces[FULL][-1]["peak"] = 300 + spread

        return both

    assert judged(bench, change(10)) == {}
    assert list(judged(bench, change(11))) == [f"{FULL}: memory"]


def test_auto_is_judged_after_it_has_settled(bench: Callable[[str], Any]) -> None:
    module = bench("offload_verdicts")
    assert module.steady_from(auto_trace(15), 3) == 7
    assert module.steady_from(trace(15, moved=80), 3) == 4
    lower = auto_trace(15)
    for row in lower[10:]:
        row |= {"fraction": 0.4, "allocated": 125, "bytes_out": 30, "bytes_in": 30}
    assert module.steady_from(lower, 3) == 11

    def never(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[AUTO] = auto_trace(15, settles=99)

    assert judged(bench, never) == {f"{AUTO}: memory": (None, "no steady step")}

    def too_late(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        traces[AUTO] = lower

    assert judged(bench, too_late)[f"{AUTO}: memory"][0] is None


def test_an_arm_that_moves_nothing_or_loses_bytes_is_no_arm(bench: Callable[[str], Any]) -> None:
    for step, key in ((4, "bytes_out"), (4, "bytes_in")):

        def change(results: dict[str, Any], traces: dict[str, Rows], step: int = step, key: str = key) -> None:
            traces[BOTH][step][key] = 0

        assert list(judged(bench, change)) == [f"{BOTH}: bytes"]

    def auto_stops(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        for row in traces[AUTO][6:]:
            row |= {"bytes_out": 0, "bytes_in": 0, "fraction": 0.0}

    assert judged(bench, auto_stops) == {}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"autotune_after": "B"}, "one set of tuning results on disk"),
        ({"autotune_before": None}, "one set of tuning results on disk"),
        ({"configs": {"k 1": "d"}}, "one set of kernel configurations in use"),
        ({"kernel_setting": {"mode": "warn"}}, "one setting of kernels"),
    ],
)
def test_another_tuning_or_setting_is_found(bench: Callable[[str], Any], change: dict[str, Any], what: str) -> None:
    def apply(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        results[BOTH] |= change

    assert list(judged(bench, apply)) == [what]


def test_a_loss_that_is_not_finite_is_found(bench: Callable[[str], Any]) -> None:
    def change(results: dict[str, Any], traces: dict[str, Rows]) -> None:
        for rows in traces.values():
            for row in rows:
                if row["step"] == 2 and "losses" in row:
                    row["losses"][1] = "nan"

    assert list(judged(bench, change)) == ["every loss is finite"]


def test_what_did_not_finish_is_said_and_not_judged_as_equal(bench: Callable[[str], Any]) -> None:
    module, runs, results, traces = matrix(bench)
    del results[BOTH], traces[BOTH]
    results[FULL] = {"status": "out of time", "error": "ended at the deadline"}
    traces[FULL] = traces[FULL][:9]
    traces[AUTO] = traces[AUTO][:13]
    assert module.missing(runs, results, traces) == [
        f"{FULL}: out of time after 8 of 20 steps: ended at the deadline",
        f"{AUTO}: out of time after 12 of 15 steps",
        f"{BOTH}: not started",
    ]
    found = {entry["what"]: entry["ok"] for entry in module.verdicts(runs, {"autotune_after": "A"}, results, traces, gpu=True)}
    assert found[f"{FULL} equals none"] is None
    assert found[f"{AUTO} equals none"] is None
    assert found[f"{BOTH} equals none"] is None
    assert found[f"{FULL}: memory"] is None
    assert found["none again equals none"] is True
    nothing = {entry["what"]: entry["ok"] for entry in module.verdicts(runs, {}, {}, {}, gpu=True)}
    assert not any(nothing.values())
    assert module.compact(runs[-1], None, ()) == {"arm": BOTH, "status": "not started"}


def test_the_record_of_a_whole_matrix_is_small(bench: Callable[[str], Any]) -> None:
    module, _, _, _ = matrix(bench)
    runs = module.plan(203, 30, Path("weights.pt"))
    digits = {"weights": "0" * 16, "optimizer": "0" * 16}
    hashes = {"weights_sha256": "0" * 64, "optimizer_sha256": "0" * 64}
    entries = {}
    for run in runs:
        rows = trace(run.steps, moved=80, hashed=(1, 3, 6, 30, 203))
        rows = [row | digits | (hashes if "weights_sha256" in row else {}) for row in rows]
        entries[run.name] = module.compact(run, result(autotune_before="0" * 64, autotune_after="0" * 64), rows)
    assert len(entries["none"]["step_digests"].split()) == 203
    assert len(json.dumps(entries, indent=1)) < 40_000


def small(job: str, arm: str, folder: Path, **more: Any) -> dict[str, Any]:
    spec = {"job": job, "arm": arm, "device": "cpu", "stack": False, "kernels": "stock", "deterministic": True, "deadline": time.time() + 600}
    spec |= {"model": {"seq": 32, "micro_batches": 2, "batches": 8, "overrides": []}, "options": {"min_bytes": 0}, "whole": [1, 2], "steps": 4}
    return {**spec, "out": str(folder / "out.json"), "rows": str(folder / "rows.jsonl"), **more}


def traced(bench: Callable[[str], Any], spec: dict[str, Any]) -> Rows:
    bench("offload_worker").run(spec)
    return [json.loads(line) for line in Path(spec["rows"]).read_text(encoding="utf-8").splitlines()]


def test_real_traces_of_a_small_model_are_equal_and_a_restart_goes_on(bench: Callable[[str], Any], tmp_path: Path) -> None:
    first = bench("offload_verdicts").first_difference
    control = traced(bench, small("trace", "none", tmp_path))
    assert [row["step"] for row in control] == [0, 1, 2, 3, 4]
    assert len({row["weights"] for row in control}) == 5, "training changes weights"
    for arm in (FULL, BOTH):
        rows = traced(bench, small("trace", arm, tmp_path))
        assert first(rows, control) is None
        assert all(row["bytes_out"] == row["bytes_in"] > 0 and row["buffers_in_use"] == 0 for row in rows[1:])
    weights = tmp_path / "weights.pt"
    saved = traced(bench, small("trace", FULL, tmp_path, steps=2, save=str(weights)))
    resumed = traced(bench, small("trace", FULL, tmp_path, load=str(weights)))
    assert [row["step"] for row in (*saved, *resumed)] == [0, 1, 2, 2, 3, 4]
    assert first([*saved, *resumed], control) is None
    assert resumed[0]["weights_sha256"] == control[2]["weights_sha256"]
    out_of_time = small("trace", "none", tmp_path, deadline=0.0)
    assert len(traced(bench, out_of_time)) == 1
    assert json.loads(Path(out_of_time["out"]).read_text(encoding="utf-8"))["stopped"] is True


def test_a_timed_run_tells_what_a_pair_needs(bench: Callable[[str], Any], tmp_path: Path) -> None:
    words: list[str] = []
    runs = {}
    for arm in ("none", FULL, AUTO):
        spec = small("time", arm, tmp_path, deterministic=False, warm=1, steps=2)
        runs[arm] = bench("offload_worker").run(spec, words.append)
    assert words == ["WARM"] * 3
    assert (runs["none"]["warm"], runs[FULL]["warm"], runs[AUTO]["warm"]) == (2, 2, 18)
    assert runs[FULL]["lead_blocks"] == 1
    assert runs[FULL]["moved_mib"] > 0
    assert runs[AUTO]["settled"] is True
    found, failed = bench("offload_pairs").judge(["none", FULL, AUTO], [runs])
    assert failed == []
    assert found[FULL]["losses"] == "8 of 8 equal"
    assert found[FULL]["targets"] == {"lead": True}
    assert found[AUTO]["shares"] == [[1.0, 0.0]]


BARE = {"out_gb_s": 55.0, "in_gb_s": 54.0, "both_out_gb_s": 40.0, "both_in_gb_s": 41.0}


def row(ms: float, peak: float, **more: Any) -> dict[str, Any]:
    return {"status": "ok", "ms": ms, "peak_mib": peak, "reserved_mib": peak + 10, "losses": ["a", "b"], "warm": 4, **more}


def test_pairs_are_judged_within_their_round(bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    pairs = bench("offload_pairs")
    moved = {"out_gb_s": 50.0, "in_gb_s": 45.0, "bare": dict(BARE), "lead_blocks": 1, "moved_mib": 7.0}
    bad = {"status": "oom", "error": "exit code 1: no room"}
    rounds = [
        {"none": row(100.0, 1000.0), FULL: row(110.0, 900.0, **moved), AUTO: row(100.5, 950.0, **moved, settled=True)},
        {AUTO: row(204.0, 950.0, **moved, settled=True), "none": row(200.0, 1000.0), FULL: row(210.0, 900.0, **{**moved, "lead_blocks": 0})},
        {"none": row(100.0, 1000.0), FULL: bad, AUTO: row(100.0, 950.0, **moved, settled=True)},
    ]
    found, failed = pairs.judge(["none", FULL, AUTO], rounds)
    assert failed == [f"round 3: {FULL}: oom: exit code 1: no room"]
    assert (found["none"]["pairs"], found[FULL]["pairs"], found[AUTO]["pairs"]) == (3, 2, 3)
    assert found[FULL]["step_pct"] == {"median": 7.5, "min": 5.0, "max": 10.0}
    assert found[FULL]["peak_saved_mib"]["median"] == 100.0
    assert found[FULL]["peak_saved_pct"]["median"] == 10.0
    assert found[FULL]["in_of_bare"]["median"] == 0.833, "of the rate this way alone"
    assert {name: found[FULL][f"bare_{name}"]["median"] for name in BARE} == BARE
    pairs.print_table(found)
    assert "bare pinned copies, GB/s: out 55.0, in 54.0 alone; out 40.0, in 41.0 both at once" in capsys.readouterr().out
    assert found[FULL]["targets"] == {"out_rate": True, "in_rate": False, "lead": False}
    assert found[AUTO]["step_pct"]["median"] == 0.5
    assert found[AUTO]["targets"]["step"] is True
    assert pairs.judge(["none", FULL], []) == ({}, [])
    without_control = [{"none": bad, FULL: row(1.0, 1.0)}]
    assert FULL not in pairs.judge(["none", FULL], without_control)[0]
    assert pairs.targets(AUTO, {"step_pct": {"median": 1.01}}) == {"step": False}


def test_orders_and_cases(bench: Callable[[str], Any]) -> None:
    pairs = bench("offload_pairs")
    assert [pairs.order(["c", "a", "b"], index) for index in range(4)] == [["c", "a", "b"], ["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert pairs.model_of("stack", "cuda", 20) == (True, {"layers": 20, "seq": 8192, "batch": 2})
    assert pairs.model_of("qwen:4096x4", "cuda", 20) == (False, {"seq": 4096, "micro_batches": 4})
    assert pairs.model_of("qwen:16384", "cuda", 20) == (False, {"seq": 16384, "micro_batches": 1})
    for case in ("qwen", "qwen:", "qwen:0", "qwen:4096x", "qwen:4096x0", "stack2", ""):
        with pytest.raises(ValueError, match=r"--case: expected stack, qwen:TOKENS .* got"):
            pairs.model_of(case, "cuda", 20)


STUB = """
import json, sys, time
spec = json.load(open(sys.argv[1]))
note = open(spec["notes"], "a")
def say(word):
    note.write(f"{spec['arm']} {word}\\n"); note.flush()
def gate(word):
    say(word)
    print(word, flush=True)
    assert sys.stdin.readline()
if spec["arm"] == "dies":
    sys.exit("no import")
time.sleep(0.1)
gate("READY")
if spec["arm"] == "fails":
    print("x" * 100, flush=True)
    raise RuntimeError("OutOfMemoryError: no room")
gate("WARM")
say("measures")
time.sleep(0.2)
say("done")
json.dump({"status": "ok", "ms": 1.0}, open(spec["out"], "w"))
"""


def stub(bench: Callable[[str], Any], folder: Path, arm: str, name: str) -> Any:
    script = folder / "stub.py"
    if not script.exists():  # others may be reading it
        script.write_text(STUB, encoding="utf-8")
    spec = {"arm": arm, "wait": True, "notes": str(folder / "notes")}
    return bench("processes").Child(name, spec, folder, dict(os.environ), command=(sys.executable, str(script)))


def test_nothing_runs_beside_measured_steps_and_failures_are_rows(
    bench: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = ["none", "fails", "dies"]
    started: list[tuple[str, int]] = []

    def start(arm: str, index: int) -> Any:
        started.append((arm, index))
        return stub(bench, tmp_path, arm, f"{arm}-{index}")

    pairs = bench("offload_pairs")
    monkeypatch.setattr(pairs, "AHEAD", 4)  # so that a batch is started in the middle of a round
    ahead = pairs.Ahead(pairs.turns_of(arms, 3), start)
    assert len(started) == 4
    found, why = pairs.measure(arms, 3, ahead, 600.0, lambda line: None)
    assert why is None
    assert started == [(arm, index) for index in range(3) for arm in pairs.order(arms, index)]
    assert len(ahead.children) == 9
    assert [{arm: result["status"] for arm, result in rows.items()} for rows in found] == [{"none": "ok", "fails": "oom", "dies": "failed"}] * 3
    assert "OutOfMemoryError: no room" in found[0]["fails"]["error"]
    assert "no import" in found[0]["dies"]["error"]
    notes = (tmp_path / "notes").read_text(encoding="utf-8").split("\n")
    measured = [number for number, line in enumerate(notes) if line == "none measures"]
    assert len(measured) == 3
    assert all(notes[number + 1] == "none done" for number in measured), notes


def test_no_round_is_begun_that_would_end_too_late(bench: Callable[[str], Any], tmp_path: Path) -> None:
    pairs, arms = bench("offload_pairs"), ["none", "a"]
    ahead = pairs.Ahead(pairs.turns_of(arms, 3), lambda arm, i: stub(bench, tmp_path, arm, f"{arm}-{i}"))
    found, why = pairs.measure(arms, 3, ahead, 0.1, lambda line: None)
    bench("processes").kill_all(ahead.children)
    assert [list(rows) for rows in found] == [["none", "a"]], "a whole one all the same"
    assert why == "1 of 3 rounds, for lack of time"


def test_a_process_that_says_nothing_is_ended(bench: Callable[[str], Any], tmp_path: Path) -> None:
    child = stub(bench, tmp_path, "none", "x")
    assert child.said("READY", 30.0)
    assert child.said("READY", 0.0), "remembered"
    assert not child.said("WARM", 0.2)
    assert child.result() == {"status": "out of time", "error": "ended at the deadline"}
    assert not child.said("WARM", 1.0)


def test_gpus_are_those_that_the_caller_may_see(bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    visible = bench("processes").visible_gpus
    assert visible("cpu") == [None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    assert visible("cuda") == ["3", "GPU-abc"]
    environment = bench("processes").environment("3")
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["TRITON_CACHE_AUTOTUNING"] == "1"


def test_the_matrix_script_without_time_says_what_is_missing(repo_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(repo_root / "benchmarks" / "offload_matrix.py"), "--device", "cpu", "--seconds", "0", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["passed"] is False
    assert "tuning: out of time: ended at the deadline" in record["unfinished"]
    assert sum(line.endswith("not started") for line in record["unfinished"]) == 7
