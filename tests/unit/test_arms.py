"""The arms grammar: rivals and labels, the nearest name in an error, and everything refused before a process is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.bench.arms import PARTS, RIVALS, SWEEP, Rival, check_rival, is_rival, meaning, parse, sweep
from lightning_gdn.bench.compare import check_runnable, expand, prepare, split_arms
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.labels_table import predict
from lightning_gdn.bench.recipes import load
from lightning_gdn.cli import main
from lightning_gdn.labels import LABELS, OFFLOAD_LABELS, parse_arm
from lightning_gdn.regions import ATTENTION, GDN, REGIONS, BlockLayout
from tests.unit.bench_support import FAMILIES, tiny_recipe

RIVAL_ARMS = [
    "checkpoint:full",
    "checkpoint:block:3",
    SWEEP,
    "hf_gradient_checkpointing",
    "selective_checkpoint",
    "save_on_cpu",
    "checkpoint:gdn_conv+gdn_norm_out+layernorm",
    *(f"checkpoint:{name}" for name in dict.fromkeys([*LABELS, *REGIONS])),
    *(f"save_on_cpu:{name}" for name in dict.fromkeys([*LABELS, *REGIONS, *OFFLOAD_LABELS]) if name != "block_input"),
    "save_on_cpu:gdn_core_attn+gdn_norm_out+conv",
]


@pytest.mark.parametrize("arm", RIVAL_ARMS)
def test_a_rival_is_read_and_written_back(arm: str) -> None:
    rival = parse(f" {arm} ")
    assert isinstance(rival, Rival)
    assert str(rival) == arm
    assert parse(str(rival)) == rival
    assert is_rival(arm)


@pytest.mark.parametrize("arm", ["none", "full", "full:block:3", "full:uniform:2", "gdn_conv+layernorm", *LABELS])
def test_labels_are_read_as_before(arm: str) -> None:
    assert parse(arm) == parse_arm(arm)
    assert not is_rival(arm)


@pytest.mark.parametrize(
    ("arm", "parts"),
    [
        ("checkpoint:gdn_cnv", ["'gdn_cnv'", "did you mean checkpoint:gdn_conv?"]),
        ("checkpoint:conv+prp", ["'prp'", "did you mean checkpoint:prep?"]),
        ("checkpoint:ful", ["did you mean checkpoint:full?"]),
        ("checkpoint:", ["'' is no label and no region", "block:K"]),
        ("checkpoint:block", ["positive integer", "checkpoint:block:6"]),
        ("checkpoint:block:0", ["positive integer", "'0'"]),
        ("checkpoint:block:²", ["positive integer"]),
        ("checkpoint:block:3:4", ["positive integer"]),
        ("checkpoint:conv+full", ["'full' stands alone"]),
        ("gdn_conv+checkpoint:full", ["'checkpoint:full' stands alone"]),
        ("save_on_cpu+gdn_conv", ["'save_on_cpu' stands alone"]),
        ("gdn_conv+save_on_cpu:conv", ["'save_on_cpu:conv' stands alone"]),
        ("save_on_cpu:gdn_core_atn", ["'gdn_core_atn'", "did you mean save_on_cpu:gdn_core_attn?"]),
        ("save_on_cpu:gdn_core_attn@0.5", ["did you mean save_on_cpu:gdn_core_attn?"]),
        ("save_on_cpu:conv+prp", ["'prp'", "did you mean save_on_cpu:prep?"]),
        ("save_on_cpu:", ["'' is no label and no region", "Valid after save_on_cpu: are gdn_in_proj"]),
        ("save_on_cpu:full", ["'full' stands alone", "write save_on_cpu, around the whole forward"]),
        ("save_on_cpu:block:3", ["'block:3' stands alone"]),
        ("save_on_cpu:conv+block_input", ["offload:block_input moves a block's input", "write save_on_cpu"]),
        ("checkpoint:gdn_core_attn", ["'gdn_core_attn' is no label and no region", "did you mean checkpoint:delta_rule?"]),
        ("checkpoint:gdn_core_attn@0.5", ["did you mean checkpoint:delta_rule?"]),
        ("save_on_cpu:mlp+offload:mlp", ["stands alone, got 'offload:mlp'", "joined as save_on_cpu:gdn_conv+mlp"]),
        ("save_on_cpu:conv+save_on_cpu:prep", ["stands alone, got 'save_on_cpu:prep'", "joined as save_on_cpu:gdn_conv+mlp"]),
        ("save_on_cpu:conv+hf_gradient_checkpointing", ["stands alone, got 'hf_gradient_checkpointing'"]),
        ("checkpoint:conv+checkpoint:prep", ["stands alone, got 'checkpoint:prep'", "joined as checkpoint:gdn_conv+mlp"]),
        ("save_on_cpus:conv", ["did you mean 'save_on_cpu:conv'?"]),
        ("save_on_gpu", ["did you mean 'save_on_cpu'?"]),
        ("selective_checkpont", ["did you mean 'selective_checkpoint'?", "save_on_cpu"]),
        ("hf_gradient_checkpoint", ["did you mean 'hf_gradient_checkpointing'?"]),
        ("checkpoints:block:3", ["did you mean 'checkpoint:block:3'?"]),
        ("checkpoint", ["did you mean 'checkpoint:full'?"]),
        ("gdn_cnv", ["did you mean 'gdn_conv'?"]),
    ],
)
def test_an_unknown_arm_names_the_nearest(arm: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        split_arms(arm)
    for part in ["--arms", *parts]:
        assert part in str(caught.value)


def test_a_rival_given_twice_is_one_arm() -> None:
    assert split_arms("checkpoint:full,full") == ["none", "checkpoint:full", "full"]
    assert split_arms("checkpoint:gdn_in_proj,checkpoint:gdn_in_proj_split")[1:] == ["checkpoint:gdn_in_proj", "checkpoint:gdn_in_proj_split"]
    with pytest.raises(UserError, match="are the same plan"):
        prepare(["checkpoint:conv+prep", "checkpoint:prep+conv"])
    with pytest.raises(UserError, match="given twice"):
        prepare(["save_on_cpu", "save_on_cpu"])
    with pytest.raises(UserError, match="are the same plan"):
        prepare(["save_on_cpu:conv+prep", "save_on_cpu:prep+conv"])
    assert prepare(["save_on_cpu", "save_on_cpu:conv", "checkpoint:conv"])[1:] == ["save_on_cpu", "save_on_cpu:conv", "checkpoint:conv"]


def test_groups_are_rows_of_neighbours_within_one_module() -> None:
    every = tuple(REGIONS)

    def groups(arm: str, regions: tuple[str, ...] = every) -> Any:
        rival = parse(arm)
        assert isinstance(rival, Rival)
        return rival.groups(regions)

    assert groups("checkpoint:gdn_in_proj_conv_prep") == (("in_proj", "conv", "prep"),)
    assert groups("checkpoint:gdn_conv+gdn_norm_out+layernorm") == (("input_norm",), ("conv", "prep"), ("norm_out",), ("post_norm",))
    assert groups("checkpoint:in_proj+prep") == (("in_proj",), ("prep",))
    assert groups("checkpoint:input_norm+in_proj") == (("input_norm",), ("in_proj",))
    assert groups("checkpoint:mlp", ("input_norm", "gate_up", "act", "down")) == (("gate_up", "act", "down"),)
    assert groups("checkpoint:gdn_conv", ("qkv", "core_attn")) == ()
    assert groups("checkpoint:full") == ()
    assert groups("save_on_cpu:gdn_conv+gdn_core_attn") == (("conv",), ("prep",), ("delta_rule",))
    assert groups("save_on_cpu:gdn_core_attn", ("qkv", "core_attn")) == groups("save_on_cpu") == ()
    assert len([region for part in PARTS for region in part]) == len({region for part in PARTS for region in part})


@pytest.mark.parametrize("blocks", range(1, 25))
def test_the_sweep_ends_at_every_block(blocks: int) -> None:
    points = sweep(["none", SWEEP, "full"], blocks)
    assert points[0] == "none"
    assert points[-2:] == ["checkpoint:full", "full"]
    counts = [int(point.rpartition(":")[2]) for point in points[1:-2]]
    assert counts == sorted(set(counts))
    assert all(0 < count < blocks for count in counts)
    assert len(counts) == min(3, blocks - 1)


def test_the_sweep_leaves_out_what_is_there() -> None:
    assert sweep(["none", "checkpoint:block:2", SWEEP], 4) == [
        "none",
        "checkpoint:block:2",
        "checkpoint:block:1",
        "checkpoint:block:3",
        "checkpoint:full",
    ]
    assert sweep(["none", "full"], 4) == ["none", "full"]


def no_arm(*_: Any, **__: Any) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    ("family", "arm", "parts"),
    [
        ("qwen3_5", "checkpoint:block:5", ["at most", "got 5", "has 4", "checkpoint:full"]),
        ("qwen3_5", "checkpoint:moe_act", ["none of the model's 4 blocks", "Regions: input_norm"]),
        ("gdn_stack", "checkpoint:post_norm", ["'post_norm'", "did you mean checkpoint:input_norm?"]),
        ("gdn_stack", "checkpoint:conv+mlp", ["'mlp'"]),
        ("gdn_stack", "hf_gradient_checkpointing", ["none of transformers", "checkpoint:full"]),
        ("qwen3_next", "checkpoint:mla_up_proj", ["'mla_up_proj'"]),
        ("qwen3_5", "save_on_cpu:moe_act", ["none of the model's 4 blocks", "Regions: input_norm"]),
        ("gdn_stack", "save_on_cpu:gdn_core_attn+mlp", ["'mlp'"]),
        ("gdn_stack", "save_on_cpu:core_attn", ["'core_attn'"]),
    ],
)
def test_a_rival_that_the_model_cannot_run_is_refused_before_any_process(
    family: str, arm: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.Popen", no_arm)
    assert main(["compare", str(tiny_recipe(tmp_path, FAMILIES[family])), "--arms", arm, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    for part in [arm, *parts]:
        assert part in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_recipes_rivals_are_checked_expanded_and_left_out_of_predictions(family: str, tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path, FAMILIES[family])), ["compare.arms=[none, gdn_conv, checkpoint:sweep, checkpoint:conv+prep]"])
    arms = expand(loaded, prepare(loaded.recipe.compare.arms))
    assert arms == ["none", "gdn_conv", *(f"checkpoint:block:{k}" for k in (1, 2, 3)), "checkpoint:full", "checkpoint:conv+prep"]
    check_runnable(loaded, arms)
    assert not any(is_rival(arm) for arm in predict(loaded, arms).retained_bytes)


def test_what_moves_outputs_has_no_rival_around_regions() -> None:
    """Said where the name has no region in the model."""
    rival = parse("save_on_cpu:gdn_in_proj")
    assert isinstance(rival, Rival)
    check_rival(rival, [BlockLayout(name="b", kind=GDN, regions=("in_proj", "conv"))], hugging_face=False)
    with pytest.raises(UserError, match="offload:gdn_in_proj moves outputs, whoever saves them, which save_on_cpu around regions does not"):
        check_rival(rival, [BlockLayout(name="b", kind=ATTENTION, regions=("qkv", "core_attn"))], hugging_face=False)


def test_one_run_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.arm: checkpoint:sweep stands for several arms"):
        load(str(tiny_recipe(tmp_path)), ["plan.arm=checkpoint:sweep"])
    assert load(str(tiny_recipe(tmp_path)), ["plan.arm=checkpoint:full"]).recipe.plan.arm == "checkpoint:full"


def test_labels_lists_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labels"]) == 0
    out = capsys.readouterr().out
    assert all(form in out for form in RIVALS)
    assert main(["labels", "--model", str(tiny_recipe(tmp_path)), "compare.arms=[none, checkpoint:sweep, save_on_cpu]"]) == 0
    out = capsys.readouterr().out
    assert out.count("a rival: measured by compare") == 2


def test_every_form_is_parsed() -> None:
    spell: Callable[[str], str] = lambda form: form.replace("NAME+NAME...", "conv+prep").replace(":K", ":1")  # noqa: E731
    assert all(is_rival(spell(form)) for form in RIVALS)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("mlp", "mlp+mlp_act"),
        ("gdn_front", "gdn_front+gdn_conv"),
        ("gdn+gdn_conv", "gdn_conv+gdn+gdn_gated_delta_rule+gdn_front"),
        ("gdn_in_proj", "gdn_in_proj_split"),
        ("full", "full+mlp_act"),
        ("full", "full:block"),
        ("full:uniform", "full:uniform:1+gdn"),
        ("full:uniform:2", "full:uniform:2+layernorm"),
        ("full:block:2+mlp", "full:block:2+mlp_act+mlp"),
        ("full", "full+offload:mlp@0.5"),
        ("full+offload:block_input", "full+gdn_conv+offload:block_input+offload:mlp"),
        ("gdn_front", "gdn_front+offload:gdn_in_proj"),
        ("offload:gdn_core_attn", "gdn_gated_delta_rule+offload:gdn_core_attn"),
        ("checkpoint:gdn_conv", "checkpoint:conv+prep"),
        ("save_on_cpu:gdn_core_attn", "save_on_cpu:delta_rule"),
    ],
)
def test_arms_of_other_names_can_be_one_plan(first: str, second: str) -> None:
    """A sweep over labels compares them (W1 and W2 are one plan here); only the same names twice are refused."""
    assert split_arms(f"{first},{second}") == ["none", first, second]
    assert meaning(parse(first)) == meaning(parse(second))


def test_arms_that_resolve_to_something_else_are_another_plan() -> None:
    """Every label, and pairs of which one holds most of the other."""
    labels = [name for name in LABELS if name != "gdn_in_proj_split"]
    arms = [
        *labels,
        "full",
        "full:block:2",
        "full:block:2+mlp",
        "full:uniform:2",
        *(f"offload:{name}" for name in OFFLOAD_LABELS if name != "block_input"),
    ]
    arms += [
        "full+offload:block_input",
        "full+offload:block_input@0.5",
        "mlp+offload:mlp",
        "gdn_conv+mla_up_proj",
        "gdn+gdn_in_proj_conv_prep+layernorm",
    ]
    assert len({meaning(parse(arm)) for arm in arms}) == len(arms)
