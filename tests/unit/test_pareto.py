"""The Pareto view on hand-made figures: the k-of-N line, ratios, and what dominates what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.bench.judge import judge
from lightning_gdn.bench.pareto import analyse
from lightning_gdn.bench.plot import draw_pareto
from lightning_gdn.bench.report import caption, cells, markdown, terminal_table
from tests.unit.bench_support import record

GPU = {**record("none")["environment"], "device": "NVIDIA H200"}


def measured(arm: str, peak: float, ms: float, index: int = 0, **changes: Any) -> dict[str, Any]:
    """A GPU's record: allocated peak in MiB and step time in ms, both exact."""
    monitor = {"step_ms": {"median": ms}, "peak_allocated_mib": peak, "tokens_per_s": 1.0, "retained_mib": peak / 2, "retained_source": "allocator"}
    return record(arm, index, environment=GPU, **{"monitor": monitor, "blocks": 8 if arm.startswith("checkpoint") else None, **changes})


def compared(arms: dict[str, tuple[float, float]], *, spread: tuple[float, float] = (0.0, 0.0), rounds: int = 2) -> dict[str, Any]:
    """(peak, ms) per arm, the control at (1000, 100) unless given; the control's rounds differ by `spread` percent of peak and of time."""
    made = {"none": (1000.0, 100.0), **arms}
    records = []
    for index in range(rounds):
        # every arm drifts with the control, so that paired deltas stay exact
        memory, time = (1 + share / 100 * (index - (rounds - 1) / 2) for share in spread)
        records += [measured(arm, peak * memory, ms * time, index) for arm, (peak, ms) in made.items()]
    return judge(records, name="x", arms=list(made))


def point(result: dict[str, Any], arm: str) -> dict[str, Any]:
    return next(row for row in result["pareto"]["points"] if row["arm"] == arm)


LINE = {"checkpoint:block:2": (800.0, 108.0), "checkpoint:block:4": (600.0, 112.0), "checkpoint:full": (200.0, 128.0)}
"""Control, then (20 %, 8 %), (40 %, 12 %), (80 %, 28 %)."""


@pytest.mark.parametrize(
    ("saving", "overhead"),
    [(10.0, 4.0), (20.0, 8.0), (30.0, 10.0), (60.0, 20.0), (80.0, 28.0)],
)
def test_the_line_is_straight_between_neighbours_in_k(saving: float, overhead: float) -> None:
    arm = (1000.0 - 10 * saving, 100.0 + 2 * overhead)
    found = point(compared({**LINE, "gdn_conv": arm}), "gdn_conv")
    assert found["saving_pct"] == pytest.approx(saving)
    assert found["overhead_pct"] == pytest.approx(2 * overhead)
    assert found["line_overhead_pct"] == pytest.approx(overhead)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["dominated_by"] is not None


def test_the_line_dominates_where_no_arm_does() -> None:
    found = point(compared({**LINE, "gdn_conv": (700.0, 111.0)}), "gdn_conv")
    assert found["dominated_by"] == "k-of-N line at K≈3.0"
    assert found["dominated_text"] == "the k-of-N line at K≈3.0 saves as much for +10.0 %"
    below = point(compared({**LINE, "gdn_conv": (700.0, 106.0)}), "gdn_conv")
    assert below["dominated_by"] is None
    assert below["ratio"] == pytest.approx(0.6)


@pytest.mark.parametrize(("one", "other"), [("mlp", "mlp+mlp_act"), ("full+mlp_act", "full"), ("gdn_in_proj_split", "gdn_in_proj")])
def test_one_plan_does_not_dominate_itself(one: str, other: str) -> None:
    """The second is measured as faster, which is noise."""
    result = compared({one: (800.0, 110.0), other: (800.0, 107.0), "gdn_conv": (800.0, 109.0)})
    assert point(result, one)["dominated_by"] == "gdn_conv"
    assert point(compared({one: (800.0, 110.0), other: (800.0, 107.0)}), one)["dominated_by"] is None
    assert point(result, "gdn_conv")["dominated_by"] == other


def test_what_lies_beyond_the_line_has_no_ratio() -> None:
    result = compared({"checkpoint:block:4": (600.0, 112.0), "full": (100.0, 126.0), "gdn_in_proj": (1000.0, 117.0), "gdn_norm_out": (1010.0, 101.0)})
    assert point(result, "full")["ratio"] is None
    assert point(result, "full")["dominated_by"] is None
    assert point(result, "gdn_in_proj")["ratio"] is None, "nothing saved: the line has no price for it"
    assert point(result, "gdn_in_proj")["dominated_by"] == "none"
    assert point(result, "gdn_norm_out")["dominated_by"] == "none"


def test_full_is_a_point_of_the_line_with_k_of_all_blocks() -> None:
    line = compared(LINE)["pareto"]["line"]
    assert [(row["arm"], row["k"]) for row in line] == [("none", 0), ("checkpoint:block:2", 2), ("checkpoint:block:4", 4), ("checkpoint:full", 8)]
    assert all(point(compared(LINE), arm)["ratio"] is None for arm in LINE)


def test_without_checkpoints_of_whole_blocks_arms_are_judged_against_each_other() -> None:
    arms = {"gdn_norm_out": (830.0, 102.6), "gdn_conv": (830.0, 105.9), "checkpoint:gdn_in_proj_conv": (730.0, 114.0), "full": (210.0, 126.0)}
    result = compared(arms)
    assert result["pareto"]["line"] == []
    assert [row["dominated_by"] for row in result["pareto"]["points"]] == [None, None, "gdn_norm_out", None, None]
    assert result["pareto"]["advice"] == [
        {"label": "gdn_conv", "kernels": "stock", "text": "gdn_norm_out saves 17.0 % for +2.6 %; this saves 17.0 % of the peak for +5.9 % step time"}
    ]
    assert all(entry["line_ratio"] is None for entry in result["arms"])


@pytest.mark.parametrize(("ms", "dominated"), [(102.0, False), (103.9, False), (104.1, True)])
def test_differences_within_the_controls_own_spread_do_not_count(ms: float, dominated: bool) -> None:
    result = compared({"gdn_conv": (800.0, ms), "gdn_norm_out": (800.0, 102.0)}, spread=(0.0, 2.0))
    assert result["pareto"]["spread"]["overhead"] == pytest.approx(2.0)
    assert point(result, "gdn_conv")["dominated_by"] == ("gdn_norm_out" if dominated else None)
    assert point(result, "gdn_norm_out")["dominated_by"] is None


@pytest.mark.parametrize(("peak", "dominated"), [(801.0, True), (809.0, True), (811.0, False)])
def test_a_little_less_saving_is_as_much(peak: float, dominated: bool) -> None:
    """gdn_norm_out saves a little less and costs clearly less: within the spread of the peak that is a better arm."""
    result = compared({"gdn_conv": (800.0, 110.0), "gdn_norm_out": (peak, 102.0)}, spread=(1.0, 0.0))
    assert point(result, "gdn_conv")["dominated_by"] == ("gdn_norm_out" if dominated else None)


@pytest.mark.parametrize("noise", [0.0, 2.0, 10.0, 60.0])
def test_more_noise_gives_fewer_verdicts(noise: float) -> None:
    """Figures of a real run: what costs more is never what to take instead, and a third of a point of saving decides nothing."""
    arms = {
        "gdn_norm_out": (822.1, 102.9),
        "gdn_conv+gdn_norm_out+layernorm": (597.6, 108.5),
        "gdn_in_proj_conv": (719.8, 112.0),
        "full": (197.0, 131.9),
        "checkpoint:block:2": (788.6, 108.6),
        "checkpoint:block:4": (577.1, 114.2),
        "checkpoint:full": (194.0, 128.7),
    }
    result = compared(arms, spread=(0.0, noise))
    by = {row["arm"]: row["dominated_by"] for row in result["pareto"]["points"]}
    assert by["gdn_norm_out"] is None
    assert by["gdn_conv+gdn_norm_out+layernorm"] is None
    assert by["gdn_in_proj_conv"] == "gdn_conv+gdn_norm_out+layernorm", "saves more and costs less by the medians"
    assert by["full"] == ("checkpoint:full" if noise < 3.2 else None)
    dominators = {row["arm"]: row for row in result["pareto"]["points"]}
    for row in result["pareto"]["points"]:
        if row["dominated_by"] in dominators:
            assert dominators[row["dominated_by"]]["overhead_pct"] <= row["overhead_pct"]


def test_of_two_arms_at_most_one_is_dominated_by_the_other() -> None:
    steps = [float(value) for value in range(-3, 4)]
    for saving in steps:
        for cost in steps:
            result = compared({"gdn_conv": (800.0, 105.0), "gdn_norm_out": (800.0 - saving, 105.0 + cost)}, spread=(0.1, 1.5))
            pair = [point(result, arm)["dominated_by"] for arm in ("gdn_conv", "gdn_norm_out")]
            assert pair != ["gdn_norm_out", "gdn_conv"]


def test_one_round_shows_no_spread_and_dominates_nothing() -> None:
    result = compared({**LINE, "gdn_conv": (800.0, 150.0)}, rounds=1)
    assert result["pareto"]["spread"] is None
    assert point(result, "gdn_conv")["ratio"] == pytest.approx(50 / 8)
    assert all(row["dominated_by"] is None for row in result["pareto"]["points"])
    assert any("spread is unknown" in line for line in caption(result))


def test_an_arm_out_of_memory_has_no_point_and_dominates_nothing() -> None:
    records = [measured("none", 1000.0, 100.0, index) for index in (0, 1)]
    gone = {"status": "oom", "error": "CUDA out of memory", "monitor": None, "losses_hex": [], "retained_bytes": None, "weights_sha256": None}
    records += [measured("checkpoint:full", 200.0, 128.0, index, **gone) for index in (0, 1)]
    records += [measured("gdn_conv", 800.0, 120.0, index) for index in (0, 1)]
    records += [measured("gdn_norm_out", 800.0, 101.0, 0), measured("gdn_norm_out", 800.0, 101.0, 1, **gone)]
    result = judge(records, name="x", arms=["none", "checkpoint:full", "gdn_conv", "gdn_norm_out"])
    assert result["pareto"]["line"] == []
    assert point(result, "checkpoint:full")["saving_pct"] is None
    assert point(result, "gdn_norm_out")["saving_pct"] == pytest.approx(20.0), "one round finished"
    assert point(result, "gdn_conv")["dominated_by"] is None, "an arm that failed in a round is nothing to advise"
    assert cells(result["arms"][1])[-1] == "oom"
    assert "oom" in markdown(result)


def test_a_missing_control_leaves_no_figures(tmp_path: Path) -> None:
    entries = judge([measured("gdn_conv", 800.0, 105.0)], name="x", arms=["gdn_conv"])["arms"]
    found = analyse(entries, control="none")
    assert (found["line"], found["spread"], found["advice"]) == ([], None, [])
    assert found["points"][0]["saving_pct"] is None
    failed = [measured("none", 1.0, 1.0, status="failed", error="x", monitor=None, losses_hex=[]), measured("gdn_conv", 800.0, 105.0)]
    result = judge(failed, name="x", arms=["none", "gdn_conv"])
    assert all(row["saving_pct"] is None for row in result["pareto"]["points"])
    assert not draw_pareto(result, tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


def test_on_a_cpu_savings_are_of_retained_bytes_and_said() -> None:
    records = []
    for index in (0, 1):
        records += [record("none", index), record("gdn_conv", index, retained_bytes=900), record("checkpoint:full", index, retained_bytes=100)]
        records += [record("save_on_cpu", index, retained_bytes=None)]
    result = judge(records, name="x", arms=["none", "gdn_conv", "checkpoint:full", "save_on_cpu"])
    assert result["pareto"]["axis"] == "retained"
    assert [row["saving_pct"] for row in result["pareto"]["points"]] == pytest.approx([0.0, 10.0, 90.0, None])
    assert any("of retained bytes" in line for line in caption(result))
    assert cells(result["arms"][3])[1] == "n/a"


def test_table_markdown_and_picture(tmp_path: Path) -> None:
    result = compared({**LINE, "gdn_conv": (700.0, 111.0), "gdn_norm_out": (830.0, 102.0), "save_on_cpu": (300.0, 400.0)})
    result["arms"][-1]["retained_bytes"] = None
    assert terminal_table(result).columns[7].header == "x line"
    text = markdown(result)
    assert "| k-of-N line at K≈3.0 |" in text
    assert "| 1.10 |" in text
    assert "gdn_conv: the k-of-N line at K≈3.0 saves as much for +10.0 %; this saves 30.0 % of the peak for +11.0 % step time" in text
    assert "150.00 MiB (allocator) | -70.0 % |" in text
    assert draw_pareto(result, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    columns = result["table"]["columns"]
    row = dict(zip(columns, result["table"]["rows"][4], strict=True))
    assert (row["arm"], row["dominated_by"]) == ("gdn_conv", "k-of-N line at K≈3.0")
    assert (row["saving_pct"], row["line_ratio"]) == pytest.approx((30.0, 1.1))


def test_a_comparison_without_a_pareto_view_shows_no_empty_columns() -> None:
    result = compared({"gdn_norm_out": (830.0, 102.0)})
    assert [column.header for column in terminal_table(result).columns][-2:] == ["Δ paired [min, max]", "losses"]
    assert "x line" not in markdown(result)
