"""What an arm that moves something retains is told of its last step: the share settles, and the pool fills, after the first forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gdn.apply import AppliedPlan, apply_plan, instrument
from lightning_gdn.bench.arm import run_arm
from lightning_gdn.bench.judge import COLUMNS, judge
from lightning_gdn.bench.labels_table import model_tables, predict
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.report import markdown, retained_remark
from lightning_gdn.callbacks._offload import OffloadTotals
from lightning_gdn.callbacks._report import RunFacts, ledger_of
from lightning_gdn.offload.statistics import StepStatistics, merged
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import moving
from tests.unit.bench_support import record, tiny_recipe

ARMS = (
    "offload:gdn_core_attn",
    "offload:gdn_in_proj+offload:gdn_norm_out+offload:mlp+offload:core_attn",
    "gdn_conv+gdn_norm_out+offload:gdn_core_attn",
    "gdn_norm_out+mlp+offload:gdn_core_attn+offload:gdn_norm_out+offload:mlp",
    "full+offload:block_input",
    "full:uniform:2+offload:block_input",
)


def step(model: torch.nn.Module, applied: AppliedPlan, micro_batches: int = 1, tokens: int = 65) -> StepStatistics:
    for _ in range(micro_batches):
        model(**tiny_batch(2, tokens)).loss.backward()
    found = applied.step_statistics()
    assert found is not None
    assert found.forwards == micro_batches
    return found


def counted_anew(model: torch.nn.Module, applied: AppliedPlan) -> int:
    """What the ledger finds if it looks again."""
    applied.ledger.arm()
    step(model, applied)
    found = applied.ledger.retained_bytes
    assert found is not None
    return found


@pytest.mark.parametrize("arm", ARMS)
def test_it_is_to_the_byte_what_the_ledger_would_count_in_the_last_step(arm: str) -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, replace(moving(arm), offload=None)) as applied, instrument(model) if not applied.installed else nullcontext() as control:
        model(**tiny_batch(2, 65)).loss.backward()
        plain = (control or applied.ledger).retained_bytes
        assert (applied.retained_bytes, applied.retained_of) == (applied.ledger.retained_bytes, "every step")
    with apply_plan(model, moving(arm)) as applied:
        assert (applied.retained_bytes, applied.retained_of) == (None, "first forward")
        assert applied.engines is not None
        step(model, applied)
        first = applied.ledger.retained_bytes
        assert (applied.retained_bytes, applied.retained_of) == (first, "last step")
        (engine,) = applied.engines.by_device.values()
        seen = [first]
        for share in (0.75, 0.4, 0.0):
            engine.fraction = share
            for micro_batches in (1, 3):
                step(model, applied, micro_batches)
                told = applied.retained_bytes
                assert applied.retained_of == "last step"
            assert applied.ledger.retained_bytes == first, "which is of the first forward"
            seen.append(told)
        assert seen == sorted(seen, key=lambda each: each or 0)
        assert seen[-1] == plain, "nothing moved"
        engine.fraction = 0.4
        assert counted_anew(model, applied) == applied.retained_bytes == seen[2] > first
        assert RunFacts(_Trainer(applied)).ledger_bytes == seen[2]  # type: ignore[arg-type]
        assert ledger_of(_Trainer(applied)) == seen[2] / 2**20


class _Trainer:
    global_rank, world_size = 0, 1

    def __init__(self, applied: AppliedPlan) -> None:
        self.strategy = type("S", (), {"applied": applied})()


def test_a_pool_that_is_full_only_after_the_first_forward() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving("offload:gdn_core_attn+offload:mlp")) as applied:
        first = step(model, applied)
        (engine,) = applied.engines.by_device.values()  # type: ignore[union-attr]
        engine.pool.close()
        engine.pool.cap = first.bytes_out // 3
        full = step(model, applied, 2)
        assert full.stayed["pool full"] == full.fallback_bytes > 0
        assert full.offered_bytes == 2 * first.offered_bytes
        told = applied.retained_bytes
        assert told == applied.ledger.retained_bytes + first.bytes_out - full.bytes_out // 2  # type: ignore[operator]
        assert counted_anew(model, applied) == told


def test_other_shapes_than_the_first_forwards_are_not_guessed_at() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving("offload:gdn_core_attn")) as applied:
        step(model, applied)
        step(model, applied, tokens=33)
        assert (applied.retained_bytes, applied.retained_of) == (applied.ledger.retained_bytes, "first forward")
        step(model, applied)
        assert applied.retained_of == "last step"


@pytest.mark.parametrize(
    ("lengths", "of"), [((65, 65), "last step"), ((33, 97), "first forward"), ((33, 33), "first forward"), ((65, 97), "first forward")]
)
def test_a_step_of_other_lengths_is_not_guessed_at(lengths: tuple[int, ...], of: str) -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving("offload:mlp@0")) as applied:
        step(model, applied)
        for tokens in lengths:
            model(**tiny_batch(2, tokens)).loss.backward()
        applied.step_statistics()
        assert applied.retained_of == of
        assert applied.retained_bytes == applied.ledger.retained_bytes, "the first forward's"


CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "frozen": lambda model: model.get_input_embeddings().requires_grad_(False),  # type: ignore[operator]
    "weights frozen": lambda model: [p.requires_grad_(False) for p in model.model.layers[0].parameters()],  # type: ignore[union-attr]
    "mode": lambda model: model.eval(),
    "dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", ["offload:gdn_core_attn", "offload:gdn_core_attn@0", "offload:gdn_core_attn@auto", "mlp"])
def test_another_state_of_the_model_is_not_guessed_at(plan: str, change: str) -> None:
    model = tiny_qwen3_5()

    def one_step() -> None:
        model(**tiny_batch(2, 65)).loss.backward()
        applied.step_statistics()

    with apply_plan(model, moving(plan) if "offload" in plan else plan) as applied:
        for _ in range(6 if "auto" in plan else 2):  # on a CPU auto rests after five steps
            one_step()
            assert applied.retained_of == ("last step" if "offload" in plan else "every step")
        CHANGES[change](model)
        one_step()
        assert (applied.retained_bytes, applied.retained_of) == (applied.ledger.retained_bytes, "first forward")
    assert (applied.retained_bytes, applied.retained_of) == (applied.ledger.retained_bytes, "first forward"), "after undo as well"


def test_without_offload_other_shapes_are_the_first_forwards() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, ["mlp"]) as applied:
        for tokens, of in ((65, "every step"), (65, "every step"), (33, "first forward"), (65, "every step")):
            model(**tiny_batch(2, tokens)).loss.backward()
            applied.step_statistics()
            assert applied.retained_of == of


def test_engines_of_one_step_count_its_passes_once() -> None:
    with apply_plan(tiny_qwen3_5(), moving("offload:mlp")) as applied:
        applied.engines.on(torch.device("cpu"))  # type: ignore[union-attr]
        one = applied.step_statistics()
    assert one is not None
    both = merged([replace(one, forwards=2, bytes_out=5, largest_small=3), replace(one, forwards=2, bytes_out=7, largest_small=2)])
    assert both is not None
    assert (both.forwards, both.bytes_out, both.largest_small) == (2, 12, 3)


@pytest.mark.parametrize(("steps", "settled"), [(4, False), (8, True)])
def test_the_record_of_an_auto_arm(steps: int, settled: bool, tmp_path: Path) -> None:
    """On a CPU compute takes no time: auto settles on 0 after five steps, and then the arm retains what the control does."""
    overrides = ["data.seq_len=33", f"trainer.max_steps={steps}", "offload.min_bytes=0", "trainer.accumulate_grad_batches=2"]
    loaded = load(str(tiny_recipe(tmp_path)), overrides)
    control, auto = (run_arm(loaded.recipe, loaded.saved, arm) for arm in ("none", "offload:gdn_core_attn@auto"))
    assert control["offload"] is None
    share = 0.0 if settled else 1.0
    assert auto["offload"] == {"asked": "auto", "fraction": share, "settled": settled, "retained_of": "last step"}
    assert (auto["retained_bytes"] == control["retained_bytes"]) is settled
    assert auto["ledger"]["retained_bytes"] < control["retained_bytes"]
    assert auto["monitor"]["retained_mib"] == auto["retained_bytes"] / 2**20
    told = auto["monitor"]["offload"]
    assert (told["fraction"], told["out_mib"]["min"] == told["out_mib"]["max"]) == (share, True), "of the steps at one share"
    result = judge([control, auto], name="x", arms=["none", "offload:gdn_core_attn@auto"])
    text = markdown(result)
    row = next(line for line in text.splitlines() if line.startswith("| offload:gdn_core_attn@auto"))
    entry = result["arms"][1]
    assert entry["retained_bytes"] == auto["retained_bytes"]
    assert f"({auto['retained_bytes']:,} B){'' if settled else ', share not settled'} |" in row
    assert f"MiB @{share:g} |" in row
    assert ("+0.0 %" in row) is settled
    unmoved = "moved nothing to the host in its steady steps at the share of 0 that auto settled on; a share of 0 moves nothing"
    assert (unmoved in text) is settled
    assert ("the share had not settled when the run ended" in text) is not settled
    assert ("half or more of its steady steps were before auto settled, and its step time is mostly theirs" in text) is settled
    auto["monitor"]["offload"]["steps"] = auto["monitor"]["steps"]
    assert "mostly theirs" not in markdown(judge([control, auto], name="x", arms=["none", "offload:gdn_core_attn@auto"]))


def test_columns_and_remarks_of_a_comparison() -> None:
    spread = {"median": 12.5, "p95": None, "max": 13.0, "min": 12.0, "mean": 12.5}
    names = ("out_gb_s", "in_gb_s", "stall_ms", "hidden_share", "pinned_held_mib", "fallbacks")
    told = {"out_mib": spread, "in_mib": spread, **dict.fromkeys(names, 1.0), "stayed_mib": {"resident": 3.0}}

    def made(arm: str, index: int, share: float, **changes: Any) -> dict[str, Any]:
        offload = {"asked": "auto", "fraction": share, "settled": True, "retained_of": "last step", **changes}
        return record(arm, index, offload=offload, monitor={**record(arm)["monitor"], "offload": told})

    rounds = [
        record("none"),
        record("none", 1),
        made("a", 0, 0.4),
        made("a", 1, 0.45),
        made("b", 0, 0.5),
        made("b", 1, 0.5, retained_of="first forward"),
    ]
    for each in rounds[-2:]:
        each["monitor"]["offload"] = {**told, "exposed_host_ms": {**spread, "median": 2.5}}
    rounds += [made("c", index, 0.5, asked=0.5) for index in (0, 1)]
    result = judge(rounds, name="x", arms=["none", "a", "b", "c"])
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in result["table"]["rows"]}
    assert [rows[arm]["retained_of"] for arm in ("none", "a", "b", "c")] == [None, "last step", "first forward", "last step"]
    assert [rows[arm]["offload_share"] for arm in ("none", "a", "b")] == [None, pytest.approx(0.425), 0.5]
    assert [retained_remark(entry) for entry in result["arms"]] == ["", "", ", first forward", ""]
    text = markdown(result)
    assert "| 12.5 MiB @0.4 to 0.45, 1 stayed |" in text
    assert "| 12.5 MiB @0.5, 1 stayed |" in text
    assert "| 1.0 ms |" in text, "records of before know no exposed host time"
    assert "| 1.0 ms + 2.5 ms host |" in text
    assert [rows[arm]["offload_exposed_host_ms"] for arm in ("none", "a", "b")] == [None, None, 2.5]
    assert "| 12.5 MiB, 1 stayed |" in text, "a share that was given stands in the arm's name"
    assert result["notes"] == []


def test_a_given_share_that_moves_nothing_is_noted() -> None:
    spread = dict.fromkeys(("median", "p95", "max", "min", "mean"), 0.0)
    names = ("out_gb_s", "in_gb_s", "stall_ms", "hidden_share", "pinned_held_mib", "fallbacks")
    told = {"out_mib": spread, "in_mib": spread, **dict.fromkeys(names, 0.0), "stayed_mib": {"min_bytes": 3.0, "resident": 0.0}}
    name = "gdn_conv+offload:mlp"

    def notes(**changes: Any) -> list[str]:
        arm = record(name, monitor={**record(name)["monitor"], "offload": told | changes})
        return judge([record("none"), arm], name="x", arms=["none", name])["notes"]

    head = f"{name}: moved nothing to the host in its steady steps; "
    small, or_larger = "stayed per step: min_bytes 3.0 MiB (below offload.min_bytes", "); write offload.min_bytes=0, or take larger sizes"
    assert notes() == [f"{head}{small}{or_larger}"]
    assert notes(largest_small_mib=0.5) == [f"{head}{small}, the largest 512.0 KiB{or_larger}"]
    assert notes(stayed_mib={})[0].startswith(f"{head}nothing that its offload labels name was saved: what a recompute label replays")
    result = judge([record("none"), record(name, monitor={**record(name)["monitor"], "offload": told})], name="x", arms=["none", name])
    assert not result["problems"], "a comparison measures; what it proves of bits is parity's"


def test_totals_begin_anew_where_the_share_changes() -> None:
    counts = "bytes_in copies_out copies_in late from_source eligible_bytes fallback_bytes prefetch_oom pinned_held pinned_in_use pinned_peak"
    plain = StepStatistics(
        fraction=1.0, bytes_out=2**20, skipped={"min_bytes": 2**20}, fallbacks=1, buffers_in_use=0, **dict.fromkeys(counts.split(), 0)
    )
    plain = replace(plain, fallback_bytes=2**19, largest_small=2**18)
    totals = OffloadTotals()
    for each in (plain, plain, replace(plain, fraction=0.5, bytes_out=2**19, pinned_held=7), replace(plain, fraction=0.5, bytes_out=2**19)):
        totals.add(each)
    found = totals.summary()
    assert found is not None
    assert (found["steps"], found["fraction"], found["out_mib"]["max"], found["largest_small_mib"]) == (2, 0.5, 0.5, 0.25)
    assert found["stayed_mib"] == {"min_bytes": 1.0, "pool full": 0.5}
    assert (found["fallbacks"], found["pinned_held_mib"]) == (4, 7 / 2**20), "of all steps"


def test_a_prediction_says_under_which_condition_it_holds(tmp_path: Path) -> None:
    arms = ["none", "offload:mlp", "offload:mlp@auto"]
    loaded = load(str(tiny_recipe(tmp_path)), ["offload.min_bytes=0", "offload.max_pinned_gib=0.000001"])
    prediction = predict(loaded, arms)
    assert prediction.conditions == {"offload:mlp": "without the cap", "offload:mlp@auto": "everything moved, without the cap"}
    _, table, _ = model_tables(loaded, prediction, arms)
    cells = list(table.columns[1].cells)
    assert [str(cell).rpartition("MiB)")[2] for cell in cells] == ["", ", without the cap", ", everything moved, without the cap"]
