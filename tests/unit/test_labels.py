"""Labels and arms: what is accepted, and what is said about the rest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.labels import LABELS, OFFLOAD_LABELS, FullRecompute, Selection, UnavailableLabelError, advice, parse_arm, select
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.regions import REGIONS, BlockLayout, Mode, stronger


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("gdn_inproj_conv", "gdn_in_proj_conv"),
        ("gdn-norm-out", "gdn_norm_out"),
        ("LayerNorm", "layernorm"),
        ("layer_norm", "layernorm"),
        ("mpl", "mlp"),
        ("ful", "full"),
        ("core_attention", "core_attn"),
    ],
)
def test_h02_a_misspelt_label_names_the_nearest_and_all_others(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown label {wrong!r} (did you mean {nearest!r}?)")) as error:
        select([wrong])
    assert all(name in str(error.value) for name in (*LABELS, "full", "none"))
    assert not isinstance(error.value, UnavailableLabelError)


def test_a_label_like_no_other_gets_the_list_without_a_guess() -> None:
    with pytest.raises(ValueError, match="Valid labels") as error:
        select(["zzz"])
    assert "did you mean" not in str(error.value)


def test_h02_duplicates_collapse_and_order_is_kept() -> None:
    assert select(["layernorm", "gdn_conv", "layernorm"]).labels == ("layernorm", "gdn_conv")
    assert parse_arm("mlp+mlp") == select("mlp")


def test_h02_a_bare_string_is_one_label_or_an_arm() -> None:
    assert select("gdn_conv") == select(["gdn_conv"]) == select(("gdn_conv",))
    assert select("gdn_conv + layernorm") == select(["gdn_conv", "layernorm"])


@pytest.mark.parametrize("control", [[], (), "none", ["none"]])
def test_h02_the_control(control: Any) -> None:
    assert select(control).is_control
    assert str(select(control)) == "none"


@pytest.mark.parametrize("wrong", [["none", "mlp"], "none+mlp", "mlp+none"])
def test_the_control_stands_alone(wrong: Any) -> None:
    with pytest.raises(ValueError, match="cannot be combined"):
        select(wrong)


@pytest.mark.parametrize("wrong", [3, None, {"mlp"}, {"mlp": True}, [1], ["mlp", None], b"mlp", [["mlp"]]])
def test_a_wrong_type_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a label or a list of labels, got"):
        select(wrong)


def test_auto_says_that_it_needs_the_planner() -> None:
    with pytest.raises(UnavailableLabelError, match="planner"):
        select("auto")
    with pytest.raises(UnavailableLabelError, match="planner"):
        select(["gdn_conv", "auto"])


@pytest.mark.parametrize("name", sorted(OFFLOAD_LABELS))
def test_an_offload_label_in_every_spelling(name: str) -> None:
    recompute, arm = (["full"], "full") if name == "block_input" else (["mlp"], "mlp")
    half = OffloadConfig(labels=(name,), fraction=0.5)
    for asked in (
        {"recompute": recompute, "offload": [f"{name}@0.5"]},
        {"recompute": recompute, "offload": f"{name}@0.5"},
        {"recompute": recompute, "offload": half},
        {"recompute": f"{arm}+offload:{name}@0.5"},
        {"recompute": [f"offload:{name}@0.5", *recompute]},
    ):
        assert select(**asked).offload == half, asked  # type: ignore[arg-type]
    assert select(recompute, offload=()).offload is select(recompute, offload=[]).offload is None


def test_several_offload_labels_in_one_arm_have_one_share() -> None:
    want = Selection(labels=("gdn_conv",), offload=OffloadConfig(labels=("gdn_core_attn", "mlp"), fraction=0.5))
    for text in (
        "gdn_conv+offload:gdn_core_attn+offload:mlp@0.5",
        "offload:gdn_core_attn@0.5+gdn_conv+offload:mlp",
        "offload:gdn_core_attn@0.5+gdn_conv+offload:mlp@0.5",
    ):
        assert parse_arm(text) == want
    assert str(want) == "gdn_conv+offload:gdn_core_attn+offload:mlp@0.5"
    assert not Selection(offload=want.offload).is_control
    with pytest.raises(ValueError, match=r"expected one share of the bytes for all labels, got 0\.5 and auto; write it once"):
        parse_arm("offload:gdn_core_attn@0.5+offload:mlp@auto")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"recompute": "offload:gdn_core_attn+mlp@0.5"}, "in an arm write offload:mlp@0.5"),
        ({"recompute": "mlp", "offload": "block_input"}, "offload label 'block_input' needs whole-block recompute, got labels ['mlp']"),
        ({"recompute": "none+offload:mlp"}, "'none' is the control and cannot be combined"),
    ],
)
def test_offload_where_it_cannot_be(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        select(**asked)
    assert not isinstance(error.value, UnavailableLabelError)


def test_an_offload_label_among_the_recompute_labels_says_where_it_belongs() -> None:
    with pytest.raises(ValueError, match=r"pass it as offload=\['block_input'\]"):
        select(["block_input"])


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("full", FullRecompute()),
        ("full:uniform", FullRecompute()),
        ("full:uniform:2", FullRecompute(num_layers=2)),
        ("full:block", FullRecompute(method="block")),
        ("full:block:6", FullRecompute(method="block", num_layers=6)),
    ],
)
def test_full_in_every_spelling(text: str, full: FullRecompute) -> None:
    assert parse_arm(text).full == full
    assert parse_arm(str(full)).full == full
    assert parse_arm(f"mlp+{text}") == Selection(labels=("mlp",), full=full)


@pytest.mark.parametrize(
    "text", ["full:", "full:block:", "full:block:0", "full:block:-1", "full:block:two", "full:blok:2", "full:block:2:3", "full:2"]
)
def test_full_misspelt(text: str) -> None:
    with pytest.raises(ValueError, match="full"):
        parse_arm(text)


def test_a_misspelt_method_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean 'block'"):
        select("full", method="blok")


def test_full_by_arguments() -> None:
    assert select("full", method="block", num_layers=2) == select("full:block:2")
    assert select(["full", "mlp"], num_layers=3) == select("mlp+full:uniform:3")
    with pytest.raises(ValueError, match="only apply to 'full'"):
        select("mlp", num_layers=2)
    with pytest.raises(ValueError, match="not both"):
        select("full:block:2", num_layers=2)
    with pytest.raises(ValueError, match="twice"):
        select("full+full:block:2")
    for wrong in (0, -1, 1.5, "2", True):
        with pytest.raises(ValueError, match="positive integer"):
            select("full", num_layers=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "  ", "+", "mlp+", "+mlp", "mlp++layernorm"])
def test_an_empty_arm_or_part_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_arm(text)


def test_arms_survive_a_round_trip() -> None:
    for text in ("none", "gdn_conv+gdn_norm_out+layernorm", "mlp+full:block:2", "full+offload:block_input", "offload:mlp@auto", *LABELS):
        assert str(parse_arm(text)) == text
        assert parse_arm(str(parse_arm(text))) == parse_arm(text)


def test_every_label_stands_for_known_regions() -> None:
    for label in LABELS.values():
        assert label.remark
        assert {region for region, _ in label.modes} <= set(REGIONS)
        assert all(mode in (Mode.RECOMPUTE, Mode.RECOMPUTE_INSIDE) for _, mode in label.modes)


def test_advice_names_labels_and_depends_on_the_kernels() -> None:
    assert advice(select("gdn_conv"), "stock") == []
    for kernels in ("stock", "fused"):
        assert advice(select("gdn_norm_out+layernorm"), kernels) == []
        assert advice(select("gdn_conv+gdn_norm_out"), kernels) == [], "what is better is in it already"
        lines = advice(select("gdn_in_proj_conv+gdn_in_proj"), kernels)
        assert len(lines) == 2
        for line in lines:
            assert any(label in line.partition(": ")[2] for label in LABELS)
    stock, fused = (advice(select("gdn_in_proj_conv"), kernels)[0] for kernels in ("stock", "fused"))
    assert "gdn_norm_out saves more for less step time" in stock
    assert "gdn_conv+gdn_norm_out+layernorm saves more for less step time" in fused


def test_every_label_that_a_record_shows_dominated_gets_its_advice(repo_root: Path) -> None:
    record = json.loads(sorted((repo_root / "benchmarks" / "records").glob("gdn_stack_h200_*.json"))[-1].read_text(encoding="utf-8"))
    dominated = {arm for arm, entry in record["arms"].items() if arm in LABELS and entry["dominated_by"]}
    assert {"gdn_in_proj_conv", "gdn_front"} <= dominated
    for label in dominated:
        line = advice(select(label), "fused")
        better = record["arms"][label]["dominated_by"]
        assert len(line) == 1
        assert better in line[0] or (better.startswith("k-of-N line") and "full:block:K" in line[0]), label


def test_the_union_of_two_modes() -> None:
    order = [Mode.KEEP, Mode.RECOMPUTE_INSIDE, Mode.OFFLOAD, Mode.RECOMPUTE]
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            assert stronger(a, b) is order[max(i, j)]


def test_a_layout_with_an_unknown_region_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown regions"):
        BlockLayout(name="x", kind="gdn", regions=("conv", "convolution"))


def test_labels_need_no_torch() -> None:
    code = "import sys, lightning_gdn.labels, lightning_gdn.plan, lightning_gdn.regions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
