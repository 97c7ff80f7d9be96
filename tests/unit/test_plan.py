"""Plans: labels against the blocks of a model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lightning_gdn.labels import LABELS, select
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.plan import BlockPlan, Plan
from lightning_gdn.regions import ATTENTION, GDN, BlockLayout, Mode, Moves

GDN_REGIONS = ("input_norm", "in_proj", "conv", "prep", "gates", "delta_rule", "norm_out", "out_proj", "mixer_residual", "post_norm")
ATTENTION_REGIONS = ("input_norm", "qkv", "core_attn", "attn_out", "mixer_residual", "post_norm")
DENSE = ("gate_up", "act", "down", "ffn_residual")
LAYOUTS = [
    BlockLayout(name=f"layers.{i}", kind=ATTENTION if i == 3 else GDN, regions=(*(ATTENTION_REGIONS if i == 3 else GDN_REGIONS), *DENSE))
    for i in range(5)
]


def plan(*labels: str) -> Plan:
    return Plan.from_labels(select(list(labels)), LAYOUTS)


def modes(block: BlockPlan) -> dict[str, str]:
    return {region: str(mode) for region, mode in block.modes if mode is not Mode.KEEP}


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("gdn_in_proj", "in_proj: inside"),
        ("gdn_in_proj_split", "in_proj: inside"),
        ("gdn_in_proj_conv", "in_proj: both, conv: inside"),
        ("gdn_in_proj_conv_prep", "in_proj: both, conv: both, prep: inside"),
        ("gdn_conv", "conv: both, prep: both"),
        ("gdn_front", "in_proj: both, conv: both, prep: both, gates: both"),
        ("gdn_norm_out", "norm_out: both"),
        ("gdn_gated_delta_rule", "delta_rule: inside"),
        ("gdn", "in_proj: both, conv: both, prep: both, gates: both, delta_rule: both, norm_out: both, out_proj: inside"),
        ("layernorm", "input_norm: both, post_norm: both"),
        ("mlp", "gate_up: both, act: both, down: inside"),
    ],
)
def test_what_labels_stand_for(label: str, expected: str) -> None:
    """The table of the design, on a GDN block."""
    words = {"both": "recompute", "inside": "recompute_inside"}
    wanted = dict(part.split(": ") for part in expected.split(", "))
    assert modes(plan(label).blocks[0]) == {region: words[word] for region, word in wanted.items()}


def test_labels_apply_where_a_block_has_the_region() -> None:
    made = plan("gdn_conv", "core_attn", "layernorm")
    assert made.counts() == {
        "input_norm: recompute": 5,
        "conv: recompute": 4,
        "prep: recompute": 4,
        "post_norm: recompute": 5,
        "core_attn: recompute_inside": 1,
    }
    assert modes(made.blocks[3]) == {"input_norm": "recompute", "core_attn": "recompute_inside", "post_norm": "recompute"}


@pytest.mark.parametrize("label", ["moe", "moe_act", "shared_experts", "mla_up_proj"])
def test_a_label_that_no_block_has_is_an_error_with_those_that_are_there(label: str) -> None:
    with pytest.raises(ValueError, match=f"label '{label}': none of the model's 5 blocks") as error:
        plan(label)
    assert "gdn_in_proj_conv" in str(error.value)
    assert "moe_act" not in str(error.value).partition("Labels this model has")[2]


def test_h02_the_union_takes_the_stronger_mode() -> None:
    assert plan("gdn_in_proj", "gdn_front").blocks[0].mode("in_proj") is Mode.RECOMPUTE
    assert plan("gdn_in_proj_conv", "gdn_conv").blocks[0].mode("conv") is Mode.RECOMPUTE
    assert plan("gdn_conv", "gdn_in_proj_conv").blocks == plan("gdn_in_proj_conv", "gdn_conv").blocks
    assert plan("gdn_gated_delta_rule", "gdn").blocks == plan("gdn").blocks, "a part of the whole mixer adds nothing"


def test_full_supersedes_labels_on_the_blocks_it_covers() -> None:
    made = plan("mlp", "full:block:2")
    assert all(mode is Mode.RECOMPUTE for block in made.blocks[:2] for _, mode in block.modes)
    assert [modes(block) for block in made.blocks[2:]] == [{"gate_up": "recompute", "act": "recompute", "down": "recompute_inside"}] * 3


def test_full_by_chunks() -> None:
    assert [block.carry for block in plan("full").blocks] == [False] * 5
    assert [block.carry for block in plan("full:uniform:2").blocks] == [True, False, True, False, False]
    assert [block.carry for block in plan("full:uniform:3").blocks] == [True, True, False, True, False]
    assert [block.carry for block in plan("full:uniform:99").blocks] == [True] * 4 + [False]
    assert [block.is_keep for block in plan("full:block:2").blocks] == [False] * 2 + [True] * 3
    assert plan("full:block").blocks == plan("full").blocks
    with pytest.raises(ValueError, match="at most the number of blocks, got 6, the model has 5"):
        plan("full:block:6")


def test_the_control_keeps_everything() -> None:
    assert plan() == Plan.keep(LAYOUTS)
    assert plan().is_control
    assert not plan("mlp").is_control
    assert "every region kept" in str(plan())


@pytest.mark.parametrize("labels", [(), ("gdn_conv",), ("mlp", "full:block:2"), ("full:uniform:2",), ("gdn", "layernorm")])
def test_json_and_equality(labels: tuple[str, ...]) -> None:
    made = plan(*labels)
    assert Plan.from_json(made.to_json()) == made == plan(*labels)
    assert hash(Plan.from_json(made.to_json())) == hash(made)
    assert Plan.from_json(json.dumps(json.loads(made.to_json()))) == made
    assert made.source in str(made)


def test_plans_differ_by_value_and_cannot_be_edited() -> None:
    assert len({plan(name) for name in LABELS if name not in ("moe", "moe_act", "shared_experts", "mla_up_proj")}) == 13
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().source = "x"  # type: ignore[misc]
    with pytest.raises(KeyError):
        plan().blocks[3].mode("conv")


def moved(*labels: str, at: int = 0, **more: Any) -> dict[str, str]:
    return {region: str(what) for region, what in Plan.from_labels(select(list(labels), **more), LAYOUTS).blocks[at].moves}


@pytest.mark.parametrize(
    ("label", "moves", "offloaded"),
    [
        ("gdn_core_attn", {"delta_rule": "saved"}, ["delta_rule"]),
        ("gdn_in_proj", {"in_proj": "outputs"}, []),
        ("gdn_norm_out", {"norm_out": "saved"}, ["norm_out"]),
        ("mlp", {"gate_up": "saved", "act": "saved", "down": "saved"}, ["gate_up", "act", "down"]),
        ("core_attn", {}, []),
    ],
)
def test_what_offload_labels_stand_for(label: str, moves: dict[str, str], offloaded: list[str]) -> None:
    assert moved(offload=label) == moves
    made = Plan.from_labels(select([], offload=label), LAYOUTS)
    assert modes(made.blocks[0]) == dict.fromkeys(offloaded, "offload")
    assert not made.is_control
    assert made.offload is not None
    assert made.blocks[0].is_keep is (not moves)
    assert moved(offload=label, at=3) == {"core_attn": {"core_attn": "saved"}, "mlp": moves}.get(label, {})


def test_a_region_with_both_labels_is_recomputed_and_what_it_is_replayed_from_moves() -> None:
    made = Plan.from_labels(select("gdn_norm_out+gdn_gated_delta_rule+offload:gdn_norm_out+offload:gdn_core_attn+offload:gdn_in_proj"), LAYOUTS)
    assert modes(made.blocks[0]) == {"norm_out": "recompute", "delta_rule": "offload"}
    assert made.moved() == {"norm_out inputs: offload": 4, "in_proj outputs: offload": 4}
    told = "delta_rule: offload in 4, norm_out: recompute in 4, norm_out inputs: offload in 4, in_proj outputs: offload in 4"
    assert str(made).endswith(f"5 blocks; {told}")
    assert moved("gdn_front", offload="gdn_in_proj") == {}, "outputs that are recomputed are not there to be moved"


def test_of_a_block_that_is_recomputed_whole_only_the_input_moves() -> None:
    selection = select("full:block:2+offload:block_input+offload:mlp")
    made = Plan.from_labels(selection, LAYOUTS)
    assert [dict(block.moves) for block in made.blocks[1:3]] == [
        {"input_norm": Moves.INPUTS},
        {"gate_up": Moves.SAVED, "act": Moves.SAVED, "down": Moves.SAVED},
    ]
    assert str(made).startswith("plan full:block:2+offload:block_input+offload:mlp: 5 blocks; 2 recomputed whole, gate_up: offload in 3")
    assert str(made).endswith("block input: offload in 2")
    assert Plan.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["offload"]["labels"] == ["block_input", "mlp"]
    assert "offload" not in json.loads(plan("mlp").to_json())


def test_the_input_of_a_chunk_that_ends_in_a_resident_block_stays() -> None:
    def moving_blocks(arm: str, resident: int) -> list[int]:
        config = OffloadConfig(labels=("block_input",), resident_last_blocks=resident)
        return [index for index, block in enumerate(Plan.from_labels(select(arm, offload=config), LAYOUTS).blocks) if block.moves]

    assert moving_blocks("full:uniform:2", 0) == [0, 1, 2, 3, 4], "whose input is handed on has none to move"
    assert moving_blocks("full:uniform:2", 2) == [0, 1, 3, 4], "the engine keeps the last two themselves"
    assert moving_blocks("full:uniform:3", 1) == [0, 1, 2, 4]
    assert moving_blocks("full", 1) == [0, 1, 2, 3, 4]


def test_an_offload_label_that_no_block_has_a_region_for() -> None:
    with pytest.raises(
        ValueError, match=r"offload label 'moe_act': none of the model's 5 blocks .*\(moe_act\)\. Offload labels this model has: gdn_core"
    ):
        Plan.from_labels(select([], offload="moe_act"), LAYOUTS)
