"""`lightning-gdn profile` as a whole, on a CPU: complete, exact where arithmetic allows, and without a trace in the training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_gdn.apply import apply_plan, instrument
from lightning_gdn.bench.arm import run_arm
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.labels_table import predict
from lightning_gdn.bench.module import BenchModule, make_module, meta_model
from lightning_gdn.bench.profile import Options, default_arms, describe, profile
from lightning_gdn.bench.profile_kernels import Kernel, KernelReport
from lightning_gdn.bench.profile_report import arm_table, caption, draw_profile, kernel_table, region_table, tensor_tables
from lightning_gdn.bench.profile_session import Measured
from lightning_gdn.bench.recipes import Loaded, load
from lightning_gdn.bench.records import read_json
from lightning_gdn.cli import main
from lightning_gdn.inspection import inspect_model
from lightning_gdn.ledger import LedgerRow
from tests.unit.bench_support import FAMILIES, tiny_recipe

ARMS = ["gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "gdn_gated_delta_rule", "full:block:2", "full"]
MIB = 2**20


@pytest.fixture(scope="module", params=list(FAMILIES))
def profiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp(request.param)
    more = ["trainer.accumulate_grad_batches=2"] if request.param == "qwen3_5" else []
    loaded = load(str(tiny_recipe(folder, FAMILIES[request.param])), more)
    return loaded, profile(loaded, ARMS, folder, Options(steps=2, rounds=1, tensors=True)), folder


def test_the_record_is_whole_and_on_disk(profiled: tuple[Loaded, dict[str, Any], Path]) -> None:
    loaded, record, folder = profiled
    assert record["status"] == "ok", record["error"]
    assert read_json(folder / "profile.json") == json.loads(json.dumps(record))
    layouts = inspect_model(meta_model(loaded.recipe)).layouts
    blocks = {name: sum(name in layout.regions for layout in layouts) for layout in layouts for name in layout.regions}
    experts = sum("gate_up" not in layout.regions for layout in layouts) if "gate_up" in blocks else 0
    blocks |= {"moe": experts} if experts else {}  # a step of the block that no label names
    assert {row["region"]: row["blocks"] for row in record["regions"]} == blocks
    for row in record["regions"]:
        assert row["forward_ms"] > 0
        assert row["backward_ms"] > 0
        assert row["kernels"], "operators of every region are named"
        assert sum(kernel["share"] for kernel in row["kernels"]) <= 1 + 1e-9
        assert (row["replay_ms"] is None) == (row["replayed_blocks"] == 0)
        assert row["replay_peak_bytes"] is None
    assert record["outside"]["forward_ms"] > 0
    assert record["outside"]["backward_ms"] > 0
    assert record["control"]["peak_held_by"] is None
    assert all(ms > 0 for ms in record["control"]["phases_ms"].values())
    assert sum(record["control"]["phases_ms"].values()) <= 1.5 * record["control"]["step_ms"]["max"]


def test_a_profiled_training_computes_what_an_unwatched_one_does(profiled: tuple[Loaded, dict[str, Any], Path]) -> None:
    loaded, record, _ = profiled
    micro = loaded.recipe.trainer.accumulate_grad_batches
    steps = len(record["losses_hex"]) // micro
    assert steps > 20
    recipe = replace(loaded.recipe, trainer=replace(loaded.recipe.trainer, max_steps=steps))
    plain = run_arm(recipe, loaded.saved, "none")
    assert plain["losses_hex"] == record["losses_hex"]


def test_freed_bytes_are_the_difference_of_the_arms(profiled: tuple[Loaded, dict[str, Any], Path]) -> None:
    loaded, record, _ = profiled
    arms = [entry["arm"] for entry in record["arms"]]
    assert arms == ARMS
    predicted = predict(loaded, ["none", *ARMS]).retained_bytes
    assert record["control"]["retained_bytes"] == predicted["none"] == sum(row["retained_bytes"] for row in record["regions"])
    assert {entry["arm"]: entry["freed_bytes"] for entry in record["arms"]} == {arm: predicted["none"] - predicted[arm] for arm in ARMS}


def test_costs_are_the_arm_s_own_replays(profiled: tuple[Loaded, dict[str, Any], Path]) -> None:
    loaded, record, _ = profiled
    regions = {row["region"]: row for row in record["regions"]}
    gdn = regions["conv"]["blocks"]
    micro = loaded.recipe.trainer.accumulate_grad_batches
    for entry in record["arms"]:
        assert entry["replays"], entry["arm"]
        assert entry["measured"]["rounds"] == 1
        assert set(entry["replay_ms"]) == set(entry["replays"])
        assert all(ms > 0 for ms in entry["replay_ms"].values())
        assert entry["cost_ms"] == pytest.approx(micro * sum(entry["replay_ms"].values()))
    costs = {entry["arm"]: entry for entry in record["arms"]}
    assert costs["gdn_gated_delta_rule"]["replays"] == {"delta_rule": gdn}
    assert costs["gdn_in_proj_conv"]["replays"] == {"in_proj": gdn, "conv": gdn}
    assert costs["full"]["replays"] == {name: row["replayed_blocks"] for name, row in regions.items() if row["replayed_blocks"]}
    assert sum(costs["full:block:2"]["replays"].values()) < sum(costs["full"]["replays"].values())


def test_saved_tensors_add_up_to_the_ledger(profiled: tuple[Loaded, dict[str, Any], Path]) -> None:
    loaded, record, _ = profiled
    module = make_module(loaded.recipe)
    module.configure_model()
    layouts = inspect_model(module).layouts
    ids = torch.zeros((loaded.recipe.data.batch_size, loaded.recipe.data.seq_len), dtype=torch.long)
    with instrument(module) as ledger:
        module(ids).backward()
    with apply_plan(module, "full") as applied:
        module(ids).backward()
    assert sum(row["brought_back_bytes"] for row in record["regions"]) == applied.ledger.discarded_bytes
    assert {kind["block"] for kind in record["tensors"]} == {
        next(b.name for b in layouts if b.regions == regions) for regions in {b.regions for b in layouts}
    }
    assert sum(kind["blocks"] for kind in record["tensors"]) == len(layouts)
    for kind in record["tensors"]:
        wanted = {row.region: row.kept_bytes for row in ledger.rows() if row.block == kind["block"] and row.kept_bytes}
        got: dict[str, int] = {}
        for row in kind["storages"]:
            got[row["region"]] = got.get(row["region"], 0) + row["nbytes"]
            assert row["nodes"], row
        assert got == wanted


def test_tables_fit_a_hundred_columns_and_the_picture_is_drawn(profiled: tuple[Loaded, dict[str, Any], Path], tmp_path: Path) -> None:
    _, record, _ = profiled
    console = Console(width=100, record=True, file=(tmp_path / "out.txt").open("w", encoding="utf-8"))
    for table in (region_table(record), kernel_table(record), arm_table(record), *tensor_tables(record)):
        console.print(table)
    console.file.close()
    text = console.export_text()
    assert "…" not in text, "nothing is cut off"
    for row in record["regions"]:
        assert f" {row['retained_bytes'] / MIB:,.2f} " in text
    for entry in record["arms"]:
        assert f"{entry['cost_pct']:+.2f} %" in text
    assert "not replayed" in text
    assert any("peak n/a" in line for line in caption(record))
    assert any(line.startswith("offload labels and the section offload have no part here") for line in caption(record))
    draw_profile(record, tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 10_000


def measured() -> Measured:
    """Made-up figures of a GPU: one block, two regions."""
    kept = [LedgerRow(block="b", region="conv", kept_bytes=80 * MIB, calls=1), LedgerRow(block="b", region="norm_out", kept_bytes=20 * MIB, calls=1)]
    conv = [LedgerRow(block="b", region="conv", discarded_bytes=80 * MIB, freed_bytes=80 * MIB, calls=1, replays=2), replace(kept[1])]
    norm = [replace(kept[0]), LedgerRow(block="b", region="norm_out", discarded_bytes=20 * MIB, calls=1, replays=1)]

    def phases(blocks: int, loss: int, optimizer: int, allocated: int) -> dict[str, Any]:
        peaks = {"forward": blocks, "loss backward": loss, "backward": blocks, "optimizer": optimizer}
        return {
            "step_ms": [100.0, 98.0, 110.0],
            "phases": {"forward": 40.0, "optimizer": 7.0},
            "peaks": {phase: peak * MIB for phase, peak in peaks.items()},
            "requested_after_forward": allocated * MIB,
        }

    key = ("b", "conv")
    return Measured(
        control=phases(900, 1000, 500, 950),
        kept=kept,
        kernels={"conv": "fla.causal_conv1d"},
        samples={
            "forward": {key: [2.0] * 3, ("b", "norm_out"): [3.0] * 3},
            "backward": {key: [4.0] * 3},
            "replay": {key: [2.5] * 3},
            "forward_full": {key: [2.25] * 3, ("b", "norm_out"): [3.0] * 3},
            "backward_full": {key: [7.0] * 3},
        },
        trace=KernelReport(regions={"conv": (Kernel(name="k" * 300, ms=1.0, share=1.0, launches=2),)}, on_gpu=True, busy_ms=50.0),
        full=conv,
        replay_peak_bytes={"conv": 3 * MIB},
        ledgers={"gdn_conv": conv, "gdn_norm_out": norm},
        replays={"gdn_conv": {key: 5.0}, "gdn_norm_out": {("b", "norm_out"): 3.0}},
        recomputed={"gdn_conv": frozenset({key}), "gdn_norm_out": frozenset({("b", "norm_out")})},
        phases={"gdn_conv": phases(700, 1000, 500, 870), "gdn_norm_out": phases(850, 900, 950, 930)},
        rounds={},
        done=True,
    )


def test_what_is_said_of_peaks_and_costs() -> None:
    record = describe(measured(), 2, ["gdn_conv", "gdn_norm_out"])
    assert (record["control"]["peak_held_by"], record["control"]["peak_bytes"]) == ("loss backward", 1000 * MIB)
    conv, norm = record["arms"]
    assert (conv["freed_bytes"], conv["allocator_freed_bytes"], conv["peak_delta_bytes"]) == (80 * MIB, 80 * MIB, 0)
    assert (conv["cost_ms"], conv["cost_pct"]) == (2 * 2.5 * 2, 10.0)
    assert conv["bookkeeping_ms"] == pytest.approx(2 * (0.25 + 0.5)), "recording 0.25, and 7 - 4 - 2.5 beyond the replays in backward"
    assert norm["cost_ms"] == 6.0
    assert (norm["peak_held_by"], norm["peak_delta_bytes"]) == ("optimizer", -50 * MIB)
    assert record["regions"][0]["replay_peak_bytes"] == 3 * MIB
    whole = {**record, "labels_left_out": ["moe"]}
    lines = caption(whole)
    assert "gdn_conv: frees 80.00 MiB, the peak changes by +0.00 MiB: it is held by: loss, backward" in lines
    assert not any(line.startswith("gdn_norm_out:") for line in lines), "its peak falls"
    assert "do not apply to this model: moe" in lines
    assert any("the GPU waits for the host" in line for line in lines)
    assert any("gdn_conv 1.5 ms (+1.5 %)" in line for line in lines)
    assert record["control"]["by_region_delta_ms"] == 2 * (2 + 3 + 4) - 40, "the optimizer's time aside"
    assert any("takes -22.0 ms" in line for line in lines)
    console = Console(width=100, record=True)
    with console.capture() as shown:
        console.print(kernel_table(whole))
        console.print(arm_table(whole))
    text = shown.get()
    assert "bound: fla.causal_conv1d" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "loss, backward" in text
    assert "optimizer" in text


@pytest.mark.parametrize(
    ("forward_full", "backward_full", "books"),
    [
        ([2.3, 2.2, 2.25], [7.1, 7.0, 6.9], 0.7),
        ([2.3, 1.7, 2.25], [7.1, 7.0, 6.9], 0.65),  # longer all the same, together with its backward
        ([2.3, 1.2, 2.25], [7.1, 6.5, 6.9], None),  # one step is no longer than one of the control's
        ([1.5, 1.4, 1.3], [6.0, 6.1, 6.2], None),  # shorter: no cost is negative
        ([2.0, 2.0, 2.0], [6.5, 6.5, 6.5], None),  # nothing at all
        ([9.0, 1.0, 9.0], [70.0, 6.0, 70.0], None),  # a noisy host
        ([2.3, 2.2], [7.1, 7.0], None),  # too few to tell
    ],
)
def test_time_beside_replays_is_said_only_where_it_stands_clear_of_the_steps(
    forward_full: list[float], backward_full: list[float], books: float | None, bench: Callable[[str], Any]
) -> None:
    found, key, count = measured(), ("b", "conv"), len(forward_full)
    found.samples = {
        "forward": {key: [2.0, 2.1, 1.9][:count]},
        "backward": {key: [4.0, 4.0, 4.05][:count]},
        "replay": {key: [2.5] * count},
        "forward_full": {key: forward_full},
        "backward_full": {key: backward_full},
    }
    record = {**describe(found, 2, ["gdn_conv", "gdn_norm_out"]), "labels_left_out": []}
    conv, _ = record["arms"]
    lines = [line for line in caption(record) if line.startswith("beside replays")]
    if books is None:
        assert conv["bookkeeping_ms"] is conv["bookkeeping_pct"] is None
        assert "n/a for" in lines[0]
        assert "gdn_conv" in lines[0] or "every arm" in lines[0]
        assert "three --steps" in lines[0]
        assert not any("gdn_conv " in line for line in lines[1:])
    else:
        assert conv["bookkeeping_ms"] == pytest.approx(2 * books)
        assert conv["bookkeeping_pct"] == pytest.approx(conv["bookkeeping_ms"])
        assert any(f"gdn_conv {conv['bookkeeping_ms']:.1f} ms" in line for line in lines)
    json.dumps(bench("profile_check").compact({**record, "environment": {}, "recipe": {}, "options": {}}, ""), allow_nan=False)


def test_an_arm_that_recomputes_nothing_has_nothing_beside_replays() -> None:
    found = measured()
    found.ledgers["gdn_conv"], found.recomputed["gdn_conv"] = [replace(row, replays=0) for row in found.full], frozenset()
    found.samples["forward_full"] = {key: [99.0, 0.0, 1.0] for key in found.samples["forward_full"]}
    (entry,) = describe(found, 2, ["gdn_conv"])["arms"]
    assert entry["bookkeeping_ms"] == entry["bookkeeping_pct"] == 0.0


def test_the_check_of_predictions_judges_both_gaps(bench: Callable[[str], Any]) -> None:
    check = bench("profile_check")
    found = measured()
    slow = {**found.phases["gdn_conv"], "step_ms": [111.0] * 3}
    far = {**found.phases["gdn_norm_out"], "step_ms": [105.0] * 3, "requested_after_forward": 929 * MIB}
    found.rounds = {"none": [dict(found.control)], "gdn_conv": [slow], "gdn_norm_out": [far]}
    found.control = {**found.control, "step_ms": [200.0] * 3}  # another state of the machine than in the rounds
    record = describe(found, 2, ["gdn_conv", "gdn_norm_out"])
    conv, norm = (check.verdict(entry) for entry in record["arms"])
    assert (conv["predicted_pct"], norm["predicted_pct"]) == (10.0, 6.0), "of the control's step in the rounds"
    assert (conv["gap_points"], conv["cost_met"], conv["apart_pct"], conv["bytes_met"]) == (1.0, True, 0.0, True)
    assert (norm["gap_points"], norm["cost_met"], norm["apart_pct"], norm["bytes_met"]) == (-1.0, True, 5.0, False)
    small = check.compact({**record, "environment": {}, "recipe": {}, "options": {}}, "command")
    assert len(json.dumps(small)) < check.RECORD_BYTES


def test_a_gpu_trace_without_kernels_is_said() -> None:
    found = measured()
    found.trace = KernelReport(regions={}, on_gpu=False, busy_ms=None)
    record = describe(found, 1, ["gdn_conv"])
    assert any("saw no GPU kernels" in remark for remark in record["remarks"])
    assert record["regions"][0]["bound_kernel"] == "fla.causal_conv1d"


def test_default_arms_are_the_labels_that_apply(tmp_path: Path) -> None:
    arms, left_out = default_arms(load(str(tiny_recipe(tmp_path, FAMILIES["gdn_stack"]))))
    assert arms[-1] == "full"
    assert "layernorm" in arms
    assert "none" not in arms
    assert {"mlp", "core_attn", "moe"} <= set(left_out)
    own = load(str(tiny_recipe(tmp_path)), ["compare.arms=[none,layernorm+mlp,offload:gdn_core_attn,save_on_cpu]"])
    assert default_arms(own)[0][-1] == "layernorm+mlp", "what moves and rivals are left to a comparison"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(tiny_recipe(tmp_path, FAMILIES["gdn_stack"]))
    out = tmp_path / "out"
    assert main(["profile", recipe, "--arms", "gdn_norm_out", "--steps", "1", "--tensors", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for text in ("delta_rule", "aten::", "gdn_norm_out", "control: step", "saved by model.", f"written to {out}"):
        assert text in shown
    assert sorted(path.name for path in out.iterdir()) == ["profile.json", "profile.png", "recipe.yaml"]
    assert [entry["arm"] for entry in read_json(out / "profile.json")["arms"]] == ["gdn_norm_out"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.yaml"], "no file nowhere.yaml"),
        (["demo_cpu", "--arms", "gdn_cnv"], "did you mean 'gdn_conv'"),
        (["demo_cpu", "--arms", "gdn_conv,gdn_conv+offload:mlp"], "got 'gdn_conv+offload:mlp', which moves tensors to the host"),
        (["demo_cpu", "--arms", "moe"], "none of the model's 8 blocks"),
        (["demo_cpu", "--steps", "0"], "--steps: expected a whole number of at least 1, got 0"),
        (["demo_cpu", "--rounds", "x"], "--rounds"),
        (["demo_cpu", "trainer.devices=2"], "write trainer.devices=1"),
        (["demo_cpu", "model.vocab_size=100"], "at least 256"),
        (["demo_cpu", "data.path=nowhere.txt"], "no such file or folder"),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_nothing(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1
    assert list(Path.cwd().iterdir()) == []


def test_a_profile_that_fails_is_a_record_and_takes_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, modules = 0, []
    forward = BenchModule.forward

    def failing(self: BenchModule, ids: Any) -> Any:
        nonlocal calls
        calls += 1
        modules[:] = [self]
        if calls == 12:  # with regions under watch
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return forward(self, ids)

    monkeypatch.setattr(BenchModule, "forward", failing)
    recipe = str(tiny_recipe(tmp_path))
    assert main(["profile", recipe, "--steps", "2", "--out", str(tmp_path / "out")]) == 1
    assert "must fit" in capsys.readouterr().err
    record = read_json(tmp_path / "out" / "profile.json")
    assert (record["status"], "regions" in record) == ("oom", False)
    for module in modules[0].modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_several_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.devices: profile looks at one device, got 2"):
        profile(load(str(tiny_recipe(tmp_path)), ["trainer.devices=2"]), None, tmp_path, Options())
