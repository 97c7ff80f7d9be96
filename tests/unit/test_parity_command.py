"""`lightning-gdn parity`: equal arms pass, a planted error is found wherever it is, and the control's own noise is no error."""

from __future__ import annotations

import csv
import math
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.bench import parity as parity_module
from lightning_gdn.bench import parity_rig
from lightning_gdn.bench.data import read_text
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.module import BenchModule
from lightning_gdn.bench.parity import ParityCheck, ParityOptions, default_arms, model_layouts, needs_fresh_process, open_arm, parity
from lightning_gdn.bench.parity_judge import ARM_RUNS, EQUAL, FACTOR, NOISY_RUNS, Gap, judge_arm, noise_of, repeats_exactly
from lightning_gdn.bench.parity_record import ArmRuns, describe
from lightning_gdn.bench.parity_report import markdown
from lightning_gdn.bench.parity_rig import Rig, gap, kernel_setting
from lightning_gdn.bench.plant import Plant, parse_plant, replayed_by
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.records import read_json, write_json
from lightning_gdn.bench.schema import OffloadSection
from lightning_gdn.cli import main
from lightning_gdn.replay import Region
from tests.models import tiny_qwen3_5
from tests.unit.bench_support import FAMILIES, TINY, tiny_recipe

SHORT = "data.seq_len=33"
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def run(tmp_path: Path, *argv: str, family: str = "qwen3_5") -> tuple[int, dict[str, Any]]:
    """Exit code and record of one command on a family's tiny recipe."""
    code = main(["parity", str(tiny_recipe(tmp_path, FAMILIES[family])), SHORT, "--out", str(tmp_path / "out"), *argv])
    return code, read_json(tmp_path / "out" / "parity.json")


# What a run is compared by


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_distance_is_exact(dtype: torch.dtype) -> None:
    a = torch.randn(5, 7).to(dtype)
    b = a.clone()
    assert gap(a, b) == EQUAL
    b[1, 2] += 0.5
    b[3, 3] -= 0.25
    want = (a.double() - b.double()).abs()
    assert gap(a, b) == Gap(False, want.norm().item(), want.max().item())
    assert gap(a.t(), b.t()).norm == pytest.approx(want.norm().item())
    assert gap(torch.tensor([0.0]).to(dtype), torch.tensor([-0.0]).to(dtype)) == Gap(False, 0.0, 0.0)
    nan = torch.tensor([float("nan"), 1.0]).to(dtype)
    assert gap(nan, nan.clone()) == EQUAL
    for other in (nan.nan_to_num(), nan[:1], nan.to(torch.float16), None):
        assert gap(nan, other) == Gap(False, math.inf, math.inf)


def test_a_chunked_distance_is_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(3, 11), torch.randn(3, 11)
    whole = gap(a, b)
    monkeypatch.setattr(parity_rig, "CHUNK", 4)
    assert gap(a, b).norm == pytest.approx(whole.norm, rel=1e-12)
    assert gap(a, b).peak == whole.peak


def test_the_verdict_by_hand() -> None:
    noise = noise_of([{"a": Gap(False, 1.0, 0.5), "b": EQUAL}, {"a": Gap(False, 2.0, 0.4), "b": EQUAL}])
    assert noise == {"a": Gap(False, 2.0, 0.5), "b": EQUAL}
    inside = judge_arm([{"a": Gap(False, 2.0 * FACTOR, 0.1), "b": EQUAL}], noise)
    assert [(row.name, row.ratio, row.outside) for row in inside] == [("a", FACTOR, False)]
    assert judge_arm([{"a": Gap(False, 2.6, 0.1)}], noise)[0].outside, "by norm"
    assert judge_arm([{"a": Gap(False, 0.1, 0.7)}], noise)[0].outside, "by one element"
    assert not judge_arm([{"a": Gap(False, 2.6, 0.1)}, {"a": Gap(False, 1.0, 0.1)}], noise)[0].outside, "not in every run"
    exact = judge_arm([{"b": Gap(False, 0.0, 0.0)}], noise)[0]
    assert exact.outside, "the control repeats bit for bit there: so must the arm"
    assert exact.ratio == math.inf
    assert not judge_arm([{"b": Gap(False, 1.0, 1.0)}, {"b": EQUAL}], noise)[0].outside
    assert judge_arm([{"a": Gap(False, math.inf, math.inf)}], noise)[0].ratio == math.inf
    assert judge_arm([{"a": EQUAL, "b": EQUAL}], noise) == []
    assert repeats_exactly([{"a": EQUAL}])
    assert not repeats_exactly([{"a": EQUAL}, {"a": Gap(False, 0.0, 0.0)}])


def noisy_run(draw: random.Random, tensors: int, numbers: int, bias: float = 0.0) -> dict[str, Gap]:
    """Distances of tensors whose every number has a normal error of size 1 (and of size 1 in the reference)."""
    found = {}
    for index in range(tensors):
        differences = [draw.gauss(bias, math.sqrt(2.0)) for _ in range(numbers)]
        found[str(index)] = Gap(False, math.sqrt(sum(d * d for d in differences)), max(map(abs, differences)))
    return found


@pytest.mark.parametrize("numbers", [1, 4, 16])
def test_noise_alone_is_inside_and_a_bias_is_not(numbers: int) -> None:
    """300 tensors of a few numbers each: the hardest ones, since a norm over few numbers varies most."""
    draw = random.Random(numbers)
    noise = noise_of([noisy_run(draw, 300, numbers) for _ in range(NOISY_RUNS)])
    arm = judge_arm([noisy_run(draw, 300, numbers) for _ in range(ARM_RUNS)], noise)
    assert not any(row.outside for row in arm)
    assert all(row.outside for row in judge_arm([noisy_run(draw, 300, numbers, bias=20.0) for _ in range(ARM_RUNS)], noise))


# Green where nothing is wrong


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_label_is_bit_equal(family: str, precision: str, tmp_path: Path) -> None:
    code, record = run(tmp_path, f"trainer.precision={precision}", family=family)
    assert code == 0, record["problems"]
    arms = {entry["arm"]: entry for entry in record["arms"]}
    assert {"gdn_conv", "gdn", "full"} <= arms.keys()
    assert ("mlp" in arms, "core_attn" in arms) == ((False, False) if family == "gdn_stack" else (True, True))
    assert {entry["verdict"] for entry in arms.values()} == {"bit-equal"}
    assert {entry["equal"] for entry in arms.values()} == {record["control"]["tensors"]}
    assert arms["full"]["replayed"]["norm_out"] >= 3
    # a linear layer saves its input, which stays, and its weight: only autocast's copy of that has to be made again
    assert arms["gdn_in_proj"]["replayed"].keys() == ({"in_proj"} if precision == "bf16-mixed" else set())
    assert record["control"]["repeats"] == 2, "one repeat, and one after the arms"
    assert len(record["control"]["sha256_of_blocks"].split()) == 4
    assert record["kernel_setting"]["deterministic_algorithms"] == "error"
    assert torch.get_deterministic_debug_mode() == 0


MOVING = "offload.min_bytes=0"
SMALL = "min_bytes 0.00 (below offload.min_bytes=1048576, the largest 0.00); write offload.min_bytes=0, or take larger sizes"
LAST = "of the last blocks, offload.resident_last_blocks"


def test_arms_that_move_are_bit_equal_and_move_by_the_recipes_section(tmp_path: Path) -> None:
    arms = ["offload:gdn_core_attn+offload:mlp", "gdn_conv+offload:gdn_norm_out@0.5", "full+offload:block_input", "gdn_conv", "save_on_cpu"]
    code, record = run(tmp_path, "--arms", ",".join(arms), MOVING)
    assert code == 0, record["problems"]
    assert [(entry["arm"], entry["verdict"]) for entry in record["arms"]] == [(arm, "bit-equal") for arm in arms]
    model = torch.nn.ModuleList([tiny_qwen3_5(num_hidden_layers=1)])
    with open_arm(model, "offload:mlp", "stock", OffloadSection(min_bytes=77, max_pinned_gib=2.0)) as applied:
        assert (applied.engines.config.min_bytes, applied.engines.config.max_pinned_gib, applied.engines.config.labels) == (77, 2.0, ("mlp",))
    both, half, inputs, plain, rival = (entry["moved"] for entry in record["arms"])
    assert plain is rival is None
    hidden = 2 * 33 * 32 * 4  # a block's input [2, 33, 32] in fp32
    assert inputs == {"bytes_per_step": 3 * hidden, "share": 1.0, "stayed_bytes_per_step": {"resident": hidden}, "unmoved_labels": []}
    assert 0 < half["bytes_per_step"] <= half["stayed_bytes_per_step"]["budget"], "half of the bytes, or what of it whole storages can be"
    assert both["bytes_per_step"] > half["bytes_per_step"]
    text = (tmp_path / "out" / "parity.md").read_text(encoding="utf-8")
    assert text == markdown(record)
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")}
    assert rows["arm"][-4:-1] == ["replayed", "moved/step", "stayed/step"]
    assert rows["full+offload:block_input"][-3:-1] == ["24.8 KiB", "resident 8.2 KiB"]
    assert rows["gdn_conv"][-4:-1] == ["conv 3, prep 3", "-", "-"]
    assert rows["save_on_cpu"][-4:-1] == ["-", "-", "-"]
    assert "moved/step" not in markdown({**record, "arms": [{**entry, "moved": None} for entry in record["arms"]]})


@pytest.mark.parametrize(
    ("arm", "overrides", "why"),
    [
        *((f"offload:{label}", (), SMALL) for label in ("gdn_core_attn", "gdn_in_proj", "gdn_norm_out", "mlp")),
        ("offload:core_attn", (), f"and all {LAST}=1); write offload.min_bytes=0 offload.resident_last_blocks=0"),
        ("full+offload:block_input", (), SMALL),
        ("gdn_conv+offload:mlp@auto", (), "write offload.min_bytes=0"),
        ("offload:core_attn", (MOVING,), f"stayed per step: resident 0.00 ({LAST}=1); write offload.resident_last_blocks=0"),
        ("offload:gdn_core_attn+offload:core_attn", ("offload.resident_last_blocks=4", MOVING), "write offload.resident_last_blocks=0"),
        (
            "offload:gdn_core_attn",
            (MOVING, "offload.max_pinned_gib=0"),
            "pool full 0.00 (beyond offload.max_pinned_gib=0); write offload.max_pinned_gib=null",
        ),
        (
            "offload:mlp@0.000001",
            (MOVING,),
            f"budget 0.00 (beyond the share @1e-06), resident 0.00 ({LAST}=1); write offload.resident_last_blocks=0 and a larger share after @",
        ),
        ("full+offload:gdn_core_attn", (MOVING,), "nothing that its offload labels name was saved: what a recompute label replays is not there"),
        (
            "offload:gdn_in_proj",
            (MOVING, "trainer.precision=bf16-mixed"),
            "was saved: frozen weights and passes without gradients save nothing, and a later step can save copies",
        ),
        ("offload:mlp", ("offload.resident_last_blocks=99",), "write offload.min_bytes=0 offload.resident_last_blocks=0"),
    ],
)
def test_an_arm_that_was_to_move_something_and_moved_nothing_is_no_pass(
    arm: str, overrides: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(tmp_path, "--arms", f"gdn_conv,{arm}", *overrides)
    assert code == 1
    other, entry = record["arms"]
    assert (other["verdict"], entry["verdict"]) == ("bit-equal", "moved nothing")
    assert (entry["moved"]["bytes_per_step"], entry["outside"], entry["differing"]) == (0, 0, 0)
    assert len(record["problems"]) == 1
    problem = re.sub(r"[\d.]+ (B|KiB|MiB)", "0.00", record["problems"][0])
    assert problem.startswith(f"{arm}: moved nothing to the host, so that it proves nothing about moving; ")
    assert why in problem
    out = capsys.readouterr().out
    assert "MOVED NOTHING" in out
    assert f"PROBLEM: {arm}: moved nothing" in " ".join(out.split())
    assert f"| {arm} | MOVED NOTHING |" in (tmp_path / "out" / "parity.md").read_text(encoding="utf-8")


def test_a_share_of_zero_and_a_label_without_bytes_are_noted(tmp_path: Path) -> None:
    code, record = run(tmp_path, "--arms", "offload:mlp@0,offload:gdn_core_attn+offload:core_attn", MOVING)
    assert code == 0
    assert [entry["verdict"] for entry in record["arms"]] == ["bit-equal", "bit-equal"]
    assert record["notes"][0] == "offload:mlp@0: moves nothing by its share of 0, as the control"
    assert record["notes"][1].startswith(
        "offload:gdn_core_attn+offload:core_attn: nothing of core_attn moved, of which it proves nothing; stayed per step, of all offload labels"
    )
    assert record["arms"][1]["moved"]["unmoved_labels"] == ["core_attn"]


def test_what_moved_is_per_step_and_of_the_compared_runs(tmp_path: Path) -> None:
    found = {}
    for name, argv in {
        "one": (),
        "steps": ("--steps", "2"),
        "micro": ("--micro-batches", "3"),
        "both": ("--steps", "2", "--micro-batches", "2"),
    }.items():
        (tmp_path / name).mkdir()
        code, record = run(tmp_path / name, "--arms", "offload:mlp@auto", MOVING, *argv)
        assert code == 0, record["problems"]
        found[name] = record["arms"][0]["moved"]
        assert found[name]["share"] == 1.0, "auto is compared where it starts, which moves most, and not as a clock decides"
    assert [each["bytes_per_step"] / found["one"]["bytes_per_step"] for each in found.values()] == [1, 1, 3, 2]
    assert [each["stayed_bytes_per_step"]["resident"] / found["one"]["stayed_bytes_per_step"]["resident"] for each in found.values()] == [1, 1, 3, 2]


def test_an_error_in_an_arm_that_moved_nothing_is_outside_first(tmp_path: Path) -> None:
    code, record = run(tmp_path, "--arms", "gdn_conv+offload:mlp", "--plant", "conv@1")
    assert code == 1
    assert record["arms"][0]["verdict"] == "outside"
    outside, nothing = record["problems"]
    assert "tensors are outside; first in backward: model.layers.1" in outside
    assert "gdn_conv+offload:mlp: moved nothing to the host" in nothing


def test_optimizer_steps_and_micro_batches(tmp_path: Path) -> None:
    argv = ("--arms", "gdn_conv,full", "--steps", "2", "--micro-batches", "2", "trainer.grad_clip=0.5", "trainer.val_every=1")
    code, record = run(tmp_path, *argv)
    assert code == 0, record["problems"]
    assert len(record["control"]["losses_hex"]) == 4
    assert len(set(record["control"]["losses_hex"])) == 4
    single = run(tmp_path / "single", "--arms", "full") if (tmp_path / "single").mkdir() is None else None
    assert single is not None
    assert record["control"]["tensors"] == 2 * single[1]["control"]["tensors"] - 1, "weights as well as gradients"
    assert record["control"]["sha256"] != single[1]["control"]["sha256"]


def test_the_record_tells_two_machines_apart_only_by_bits(tmp_path: Path) -> None:
    found = []
    for name, override in (("a", "trainer.seed=0"), ("b", "trainer.seed=0"), ("c", "trainer.seed=1")):
        (tmp_path / name).mkdir()
        found.append(run(tmp_path / name, "--arms", "gdn_conv", override)[1]["control"])
    assert found[0] == found[1]
    assert found[0]["sha256"] != found[2]["sha256"]


def test_default_arms_are_labels_full_and_the_recipes_own(tmp_path: Path) -> None:
    layouts = model_layouts(load(str(tiny_recipe(tmp_path))).recipe)
    arms = default_arms(layouts, ["none", "layernorm+gdn_conv", "gdn_conv", "full:uniform", "full:block:2", "some:rival"])
    assert arms[0] == "none"
    assert arms[-4:] == ["full", "layernorm+gdn_conv", "full:block:2", "some:rival"]
    assert "moe" not in arms
    assert len(set(arms)) == len(arms)


# A planted error is found


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ParityCheck]:
    """One model and one control of each family."""
    found = {}
    with kernel_setting(deterministic=True, cuda=False) as setting:
        for family, text in FAMILIES.items():
            folder = tmp_path_factory.mktemp(family)
            overrides = [SHORT, "trainer.max_steps=2", "model.mlp_only_layers=[1,3]"][: 3 if family == "qwen3_next" else 2]
            recipe = load(str(tiny_recipe(folder, text)), overrides).recipe
            rig = Rig(recipe, torch.device("cpu"), read_text(recipe.data), steps=0, micro_batches=2)
            found[family] = ParityCheck(rig, "stock", setting, open_arm, None)
            found[family].control(2)
    return found  # with the setting closed: it is the process's


STACK = "input_norm in_proj conv prep gates delta_rule norm_out out_proj mixer_residual".split()
DENSE = "post_norm gate_up act down ffn_residual".split()
ATTENTION = "input_norm qkv core_attn attn_out mixer_residual post_norm".split()
PLANTS = [
    *[("gdn_stack", region, 0) for region in STACK],
    *[("qwen3_5", region, 0) for region in [*STACK, *DENSE]],
    *[("qwen3_5", region, 3) for region in [*ATTENTION, *DENSE[1:3]]],
    *[("qwen3_next", region, 2) for region in [*STACK, "post_norm"]],
    *[("qwen3_next", region, 1) for region in DENSE[1:3]],
]
"""(family, region, block): every region of every kind of block that can be replayed. A chunk of two blocks replays the first one's last."""


@pytest.mark.parametrize(("family", "region", "block"), PLANTS)
def test_an_error_in_any_region_is_found_in_its_block(family: str, region: str, block: int, checks: dict[str, ParityCheck]) -> None:
    check = checks[family]
    rig = check.rig
    names = [layout.name for layout in model_layouts(rig.recipe)]
    check.plant = Plant(region=region, index=block, block=names[block])
    at_the_end = region in (("down", "ffn_residual") if family != "gdn_stack" else ("out_proj", "mixer_residual"))
    arm = check.arm("full:uniform:2" if at_the_end else "full")
    assert (arm.status, arm.error) == ("ok", None)
    arm.rows = judge_arm(arm.runs, noise_of(check.controls))
    result = describe([arm], rig.describe(), noise_of(check.controls), names, repeats=1, plant=check.plant)
    entry = result["arms"][0]
    assert entry["verdict"] == "outside"
    assert entry["planted"] > 0
    # what ends a block is used by the next one: there the error enters
    assert entry["enters_at"] == names[block + at_the_end]
    assert result["problems"] == [f"{arm.name}: {entry['outside']} tensors are outside; first in backward: {entry['enters_at']}"]
    later = [row.name for row in arm.rows if any(row.name.startswith(f"{name}.") for name in names[block + at_the_end + 1 :])]
    assert later == [], "backward had passed these blocks before"
    check.plant = None
    assert judge_arm(check.arm(arm.name).runs, noise_of(check.controls)) == [], "and nothing is left of it"


def test_every_region_that_a_plan_can_replay_was_planted(checks: dict[str, ParityCheck]) -> None:
    for family, check in checks.items():
        regions = {region for layout in model_layouts(check.rig.recipe) for region in layout.regions}
        planted = {region for name, region, _ in PLANTS if name == family}
        shared_with_qwen3_5 = {"qkv", "core_attn", "attn_out", "down", "ffn_residual"}  # the same functions, see adapters/hf_regions.py
        assert regions - planted <= (shared_with_qwen3_5 if family == "qwen3_next" else set())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_command_ends_with_one_and_says_where(precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, "--arms", "gdn_conv,layernorm", "--plant", "conv@1", f"trainer.precision={precision}")
    assert code == 1
    conv, norms = record["arms"]
    assert (conv["verdict"], norms["verdict"]) == ("outside", "bit-equal")
    assert conv["enters_at"] == "model.layers.1"
    assert norms["planted"] == 0
    assert record["options"]["plant"] == "conv@1"
    out = capsys.readouterr().out
    assert "PROBLEM: gdn_conv:" in out
    assert "first in backward: model.layers.1" in out
    assert "note: layernorm: uses nothing that a replay of conv@1 makes" in out
    text = (tmp_path / "out" / "parity.md").read_text(encoding="utf-8")
    assert "| gdn_conv | OUTSIDE |" in text
    with (tmp_path / "out" / "tensors.csv").open(encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == conv["differing"]
    assert {row["arm"] for row in rows} == {"gdn_conv"}
    assert Region.serve.__qualname__ == "Region.serve", "the seam is closed again"


def test_an_error_grows_through_optimizer_steps(tmp_path: Path) -> None:
    code, record = run(tmp_path, "--arms", "gdn_conv", "--steps", "2", "--plant", "conv@1")
    assert code == 1
    assert record["arms"][0]["enters_at"] is None, "the second step's losses and gradients come from other weights"
    assert record["problems"][0].endswith("leave out --steps to see where in backward it begins")
    with (tmp_path / "out" / "tensors.csv").open(encoding="utf-8") as handle:
        names = {row["tensor"] for row in csv.DictReader(handle)}
    assert {"model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight (weight)"} <= names


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (["--micro-batches", "2"], "model.layers.1"),
        (["--steps", "1", "--micro-batches", "2"], "model.layers.1"),
        (["--steps", "1", "trainer.grad_clip=1e-3"], None),
        (["--steps", "2"], None),
        (["--steps", "2", "--micro-batches", "2"], None),
    ],
)
def test_where_an_error_enters_is_said_only_where_the_gradients_tell(argv: list[str], where: str | None, tmp_path: Path) -> None:
    code, record = run(tmp_path, "--arms", "gdn_norm_out", "--plant", "norm_out@1", *argv)
    assert code == 1
    assert record["arms"][0]["enters_at"] == where
    assert ("first in backward: model.layers.1" in record["problems"][0]) is (where is not None)
    assert "model.layers.3" not in record["problems"][0]


def test_where_a_plant_goes(tmp_path: Path) -> None:
    layouts = model_layouts(load(str(tiny_recipe(tmp_path))).recipe)
    assert str(parse_plant("conv", layouts)) == "conv@1"
    assert parse_plant("qkv", layouts).block == "model.layers.3"
    assert parse_plant("conv@model.layers.2", layouts) == Plant(region="conv", index=2, block="model.layers.2")
    plant = parse_plant("conv@2", layouts)
    assert [replayed_by(plant, arm, layouts) for arm in ("gdn_conv", "gdn_in_proj_conv", "full:block:2", "layernorm", "no:plan")] == [
        True, True, False, False, False,
    ]  # fmt: skip


# A control that does not repeat


class _VaryingSum(torch.autograd.Function):
    """A kernel that adds up its gradient in another order each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (1 + 1e-4 * torch.randn(gradient.shape, generator=ctx.generator)), None


class _NoisyModule(BenchModule):
    def configure_model(self) -> None:
        super().configure_model()
        generator = torch.Generator().manual_seed(5)  # its own: runs start from the same global random state
        for module in self.model.modules():  # type: ignore[union-attr]
            if hasattr(module, "self_attn"):
                module.register_forward_hook(lambda _, args, out: _VaryingSum.apply(out, generator))


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_rig, "make_module", _NoisyModule)


def test_noise_is_measured_and_does_not_hide_an_error(noisy: None, tmp_path: Path) -> None:
    argv = ("--arms", "gdn_conv,gdn_norm_out,layernorm,full", "--plant", "norm_out@2")
    code, record = run(tmp_path, *argv)
    assert code == 1
    assert record["control"]["repeats"] == NOISY_RUNS + 1
    assert record["control"]["noisy_tensors"] > 20
    verdicts = {entry["arm"]: entry["verdict"] for entry in record["arms"]}
    assert verdicts == {"gdn_conv": "within noise", "gdn_norm_out": "outside", "layernorm": "within noise", "full": "outside"}
    for entry in record["arms"]:
        wrong = entry["verdict"] == "outside"
        assert entry["runs"] >= (ARM_RUNS if wrong else 1)
        assert entry["enters_at"] == ("model.layers.2" if wrong else None)
        assert entry["differing"] > 20
    assert "are outside" in markdown(record)


def test_an_arm_that_differs_where_the_control_repeats_is_outside_on_a_noisy_model_too(noisy: None, tmp_path: Path) -> None:
    code, record = run(tmp_path, "--arms", "full", "--plant", "core_attn@3")
    assert code == 1
    assert record["arms"][0]["enters_at"] == "model.layers.3"


class _Drifting(BenchModule):
    """Repeats for a while, then does not: as after a kernel was tuned again."""

    runs = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(ids) * (1.0 if self.runs < 7 else 1.0 + 2.0**-20)


def test_a_control_that_drifts_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_rig, "make_module", _Drifting)
    code, record = run(tmp_path, "--arms", "gdn_conv")  # 3 control runs, 2 of the arm, and the warm-up of the last control is the seventh
    assert code == 0
    assert record["arms"][0]["verdict"] == "bit-equal"
    assert any("not in its last run" in note for note in record["notes"])


# Kernel setting


class _WithoutDeterministicKernel(BenchModule):
    def forward(self, ids: Tensor) -> Tensor:
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
        return super().forward(ids)


def test_an_operation_without_a_deterministic_kernel_is_named_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_rig, "make_module", _WithoutDeterministicKernel)
    code, record = run(tmp_path, "--arms", "gdn_conv")
    assert code == 0
    assert record["kernel_setting"]["deterministic_algorithms"] == "warn"
    assert record["kernel_setting"]["operations_without_a_deterministic_kernel"] == ["put_"]
    assert "without a deterministic kernel: put_" in markdown(record)


def test_kernels_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_rig, "make_module", _WithoutDeterministicKernel)
    code, record = run(tmp_path, "--arms", "gdn_conv", "--nondeterministic")
    assert code == 0
    assert record["kernel_setting"]["deterministic_algorithms"] == "default"
    assert record["kernel_setting"]["operations_without_a_deterministic_kernel"] == []


def test_the_setting_is_put_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(parity_rig.CUBLAS, raising=False)
    with pytest.raises(KeyError):
        with kernel_setting(deterministic=True, cuda=True) as setting:
            assert setting.as_dict()[parity_rig.CUBLAS] == ":4096:8"
            assert torch.backends.cudnn.deterministic
            raise KeyError
    assert torch.get_deterministic_debug_mode() == 0
    assert not torch.backends.cudnn.deterministic
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert not parity_rig.cublas_is_deterministic()


def test_a_process_in_which_cuda_runs_already_starts_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(str(tiny_recipe(tmp_path))).recipe
    assert not needs_fresh_process(recipe, ParityOptions())
    monkeypatch.setattr(parity_module, "check_device", lambda recipe: "gpu")
    monkeypatch.delenv(parity_rig.CUBLAS, raising=False)
    for started, chosen, wanted in ((False, True, False), (True, True, True), (True, False, False)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda started=started: started)
        assert needs_fresh_process(recipe, ParityOptions(deterministic=chosen)) is wanted
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv(parity_rig.CUBLAS, ":16:8")
    assert not needs_fresh_process(recipe, ParityOptions())


def fake_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(parity_module.sys, "executable", str(path))


def test_a_fresh_process_gets_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(monkeypatch, tmp_path, f'echo "${parity_rig.CUBLAS}" "$@" > {tmp_path}/seen; exit 7')
    loaded = load(str(tiny_recipe(tmp_path)))
    assert parity_module.in_fresh_process(loaded, ["a.yaml", "--arms", "full"]) == 7
    assert (tmp_path / "seen").read_text(encoding="utf-8").split() == [":4096:8", *"-m lightning_gdn parity a.yaml --arms full".split()]


def test_sigterm_goes_on_to_the_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = tmp_path / "ended"
    fake_python(monkeypatch, tmp_path, f"trap 'touch {ended}; exit 143' TERM; sleep 0.3; kill -TERM $PPID; while :; do sleep 0.02; done")
    before = signal.getsignal(signal.SIGTERM)
    assert parity_module.in_fresh_process(load(str(tiny_recipe(tmp_path))), ["a.yaml"]) == 143
    assert ended.exists()
    assert signal.getsignal(signal.SIGTERM) is before


# Failures, bad arguments, sizes


def test_an_arm_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def opener(model: nn.Module, arm: str, kernels: str) -> Any:
        if arm == "gdn":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return open_arm(model, arm, kernels)

    loaded = load(str(tiny_recipe(tmp_path)), [SHORT])
    (tmp_path / "out").mkdir()
    record = parity(loaded, ["none", "gdn", "full"], tmp_path / "out", ParityOptions(), open_arm=opener)
    assert [entry["verdict"] for entry in record["arms"]] == ["oom", "bit-equal"]
    assert record["problems"] == ["gdn: oom: OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB"]
    assert "| gdn | oom |" in markdown(record)
    assert "Traceback" in capsys.readouterr().err


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
ERRORS = [
    (OOM, "oom"),
    (torch.AcceleratorError("CUDA error: out of memory"), "oom"),
    (MemoryError("no room"), "oom"),
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "failed"),
    (RuntimeError("first line\nlast line"), "failed"),
]


@pytest.mark.parametrize(("error", "status"), ERRORS)
@pytest.mark.parametrize("when", ["built", "first run", "last run"])
def test_a_control_that_fails_is_a_record(
    error: Exception, status: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    def arm(check: ParityCheck, name: str) -> ArmRuns:
        monkeypatch.setattr(Rig, "run", fail)  # from here on
        return ArmRuns(name)

    monkeypatch.setattr(ParityCheck, "arm", arm)
    if when != "last run":
        monkeypatch.setattr(*((BenchModule, "configure_model", fail) if when == "built" else (Rig, "run", fail)))
    code, record = run(tmp_path, "--arms", "gdn_conv")
    assert (code, record["status"]) == (1, status)
    last = str(error).splitlines()[-1]
    assert record["error"] == f"{type(error).__name__}: {last} during none"
    assert record["environment"]["device"] == "cpu"
    assert "arms" not in record
    told = capsys.readouterr().err
    assert "Traceback" in told
    message = told.splitlines()[-1]
    assert message.startswith(f"lightning-gdn: parity: {status}: {record['error']}")
    assert ("must fit: a smaller data.seq_len or data.batch_size" in message) is (status == "oom")
    assert message.endswith(str(tmp_path / "out" / "parity.json"))


def test_a_control_that_fails_between_the_runs_of_an_arm_is_not_the_arms_fault(tmp_path: Path, noisy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that looks outside sends the control to run more often; what fails then is the control."""
    ran: list[str] = []

    def opener(model: nn.Module, arm: str, kernels: str) -> Any:
        ran.append(arm)
        if ran[-2:] == ["gdn_conv", "none"]:
            raise OOM
        return open_arm(model, arm, kernels)

    monkeypatch.setattr(ParityCheck, "_outside", lambda check, arm: bool(arm.runs))
    monkeypatch.setattr(parity_module, "NOISY_RUNS", 2)
    monkeypatch.setattr(ParityCheck.more_control, "__defaults__", (3,))
    (tmp_path / "out").mkdir()
    record = parity(load(str(tiny_recipe(tmp_path)), [SHORT]), ["none", "gdn_conv"], tmp_path / "out", ParityOptions(), open_arm=opener)
    assert (record["status"], record["error"]) == ("oom", f"OutOfMemoryError: {OOM} during none")
    assert read_json(tmp_path / "out" / "parity.json")["status"] == "oom"


def test_a_control_of_nan_or_zeros_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for factor, problem in ((float("nan"), "not finite"), (0.0, "every gradient is zero")):

        class Broken(BenchModule):
            def forward(self, ids: Tensor, factor: float = factor) -> Tensor:
                return super().forward(ids) * factor

        monkeypatch.setattr(parity_rig, "make_module", Broken)
        folder = tmp_path / str(factor)
        folder.mkdir()
        code, record = run(folder, "--arms", "gdn_conv")
        assert code == 1
        assert problem in record["problems"][0]


def test_buffers_are_compared_and_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(BenchModule):
        def configure_model(self) -> None:
            super().configure_model()
            assert self.model is not None
            self.model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

        def forward(self, ids: Tensor) -> Tensor:
            self.model.seen.add_(1)  # type: ignore[union-attr, operator]
            return super().forward(ids)

    monkeypatch.setattr(parity_rig, "make_module", Counting)
    recipe = load(str(tiny_recipe(tmp_path)), [SHORT, "trainer.max_steps=2"]).recipe
    rig = Rig(recipe, torch.device("cpu"), read_text(recipe.data), steps=0, micro_batches=2)
    rig.keep(rig.run())
    again = rig.run()
    assert again["seen (buffer)"].tolist() == [2, 2]
    assert repeats_exactly([rig.gaps(again)])
    again["seen (buffer)"].add_(1)
    assert rig.gaps(again)["seen (buffer)"] == Gap(False, math.sqrt(2), 1.0)


def test_a_step_that_edits_a_parameter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Editing(BenchModule):
        def forward(self, ids: Tensor) -> Tensor:
            with torch.no_grad():
                next(self.parameters()).mul_(1.0)
            return super().forward(ids)

    monkeypatch.setattr(parity_rig, "make_module", Editing)
    code, record = run(tmp_path, "--arms", "gdn_conv")
    assert (code, record["status"]) == (1, "failed")
    assert "edited in place" in record["error"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--arms", "gdn_cnv"), "did you mean 'gdn_conv'"),
        (("--arms", "none"), "at least one arm beside the control"),
        (("--arms", "moe"), "none of the model's 4 blocks"),
        (("--repeats", "1"), "--repeats: expected at least 2, got 1"),
        (("--repeats", "x"), "see lightning-gdn parity --help"),
        (("--steps", "-1"), "--steps: expected at least 0"),
        (("--micro-batches", "0"), "--micro-batches: expected at least 1"),
        (("--plant", "cnv"), "did you mean 'conv'"),
        (("--plant", "moe"), "no block of this model replays"),
        (("--plant", "conv@9"), "a block from 0 to 3"),
        (("--plant", "conv@3"), "block 3 has no region 'conv'; blocks that have it: 0, 1, 2"),
        (("--arms", "layernorm", "--plant", "conv@1"), "none of the arms replays conv@1: layernorm; full:uniform:2"),
        (("trainer.devices=2",), "trainer.devices=1"),
        (("--out", "occupied"), "is not empty"),
    ],
)
def test_bad_arguments(argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "x").touch()
    recipe = str(tiny_recipe(tmp_path, TINY))
    before = sorted(tmp_path.rglob("*"))
    assert main(["parity", recipe, *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert message in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_options_are_checked_without_the_command_line_too(tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path)))
    with pytest.raises(UserError, match="at least one arm"):
        parity(loaded, ["none"], tmp_path / "out", ParityOptions())


def test_a_record_of_many_noisy_arms_is_small(tmp_path: Path) -> None:
    """24 blocks, 15 arms, every tensor of every arm outside: the most that there can be."""
    blocks = [f"model.layers.{index}" for index in range(24)]
    names = ["losses", *[f"{block}.linear_attn.a_parameter_with_a_long_name_{i}.weight" for block in blocks for i in range(14)]]
    tensors = dict.fromkeys(names, (10, 1.23456789, True, "0" * 64))
    runs = [{name: Gap(False, 0.123456789e-3 * (i + 1), 0.123456789e-5) for i, name in enumerate(names)}]
    noise = {name: Gap(False, 1.23456789e-5, 1.23456789e-7) for name in names}
    arms = [ArmRuns(f"gdn_conv+gdn_norm_out+layernorm+{i}", runs=runs, rows=judge_arm(runs, noise), plan="x" * 120) for i in range(15)]
    result = describe(arms, tensors, noise, blocks, repeats=13, plant=None)
    head = run(tmp_path, "--arms", "full")[1]
    record = {**head, **result, "kernels": {f"region_{i}": "fla.chunk_gated_delta_rule" for i in range(6)}}
    write_json(tmp_path / "large.json", record)
    assert (tmp_path / "large.json").stat().st_size <= 50_000
    assert all(len(entry["rows"]) >= 3 for entry in record["arms"])
    assert all(entry["outside"] == len(names) for entry in record["arms"])
