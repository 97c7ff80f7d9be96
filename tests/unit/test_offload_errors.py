"""One mistake, one text: what is said of a wrong offload label, share or field is the same through every entry point."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.apply import apply_plan
from lightning_gdn.bench.arms import parse
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.recipes import load
from lightning_gdn.cli import main
from lightning_gdn.inspection import inspect_model
from lightning_gdn.labels import Selection, parse_arm, select
from lightning_gdn.offload_config import OffloadConfig, parse_offload
from lightning_gdn.plan import Plan
from lightning_gdn.strategies import GDNRecomputeStrategy
from tests.models import tiny_qwen3_5
from tests.unit.bench_support import tiny_recipe

EMPTY = "expected an offload label, got ''; write one, for instance gdn_core_attn, or leave offload out. Offload labels: gdn_core_attn, gdn_in_proj"
SHARE = "expected a share of the bytes from 0 to 1, or auto, after @, got {}. Write for instance @0.5 after the label"
TEXTS = {
    "": EMPTY,
    "mlp+offload:": EMPTY,
    "gdn_core_attn@": SHARE.format("''"),
    **{
        f"gdn_core_attn@{share}": SHARE.format(repr(share))
        for share in ("1.5", "-0", "-0.5", "nan", "inf", "1e999", "1_0", "50%", "0.5@1", "half", "٠.٥")
    },
    "gdn_core_attn@Auto": SHARE.format("'Auto' (did you mean 'auto'?)"),
    "mlp@0.5+offload:gdn_core_attn@0.25": "expected one share of the bytes for all labels, got 0.5 and 0.25; write it once",
    "gdn_coreattn": "unknown offload label 'gdn_coreattn' (did you mean 'gdn_core_attn'?). Offload labels: gdn_core_attn",
    "gdn-core-attn@0.5": "unknown offload label 'gdn-core-attn' (did you mean 'gdn_core_attn'?)",
    "GDN_CORE_ATTN": "unknown offload label 'GDN_CORE_ATTN' (did you mean 'gdn_core_attn'?)",
    "layernorm": "unknown offload label 'layernorm' (it is a recompute label: write it without offload)",
    "full": "unknown offload label 'full' (it is a recompute label: write it without offload)",
    "full:block:3": "unknown offload label 'full:block:3' (it is a recompute label: write it without offload)",
    "zzz": "unknown offload label 'zzz'. Offload labels",
}
"""What stands after `offload:` -> what is said of it."""

MODEL = tiny_qwen3_5(num_hidden_layers=1)
PYTHON: dict[str, tuple[str, Callable[[str], Any]]] = {
    "strategy, text": ("offload=", lambda text: GDNRecomputeStrategy("layernorm", offload=text)),
    "strategy, list": ("offload=[", lambda text: GDNRecomputeStrategy("layernorm", offload=[text])),
    "strategy, arm": ("'offload:", lambda text: GDNRecomputeStrategy(f"layernorm+offload:{text}")),
    "apply_plan, text": ("offload=", lambda text: apply_plan(MODEL, "layernorm", offload=text)),
    "apply_plan, list": ("offload=[", lambda text: apply_plan(MODEL, "layernorm", offload=[text])),
    "apply_plan, label": ("'offload:", lambda text: apply_plan(MODEL, ["layernorm", *f"offload:{text}".split("+")])),
    "select": ("offload=", lambda text: select("layernorm", offload=text)),
    "parse_arm": ("'offload:", lambda text: parse_arm(f"offload:{text}")),
    "arm of a comparison": ("'offload:", lambda text: parse(f"offload:{text}")),
}


@pytest.mark.parametrize("entry", PYTHON)
@pytest.mark.parametrize(("text", "message"), TEXTS.items())
def test_a_wrong_label_or_share_is_told_in_the_same_words(text: str, message: str, entry: str) -> None:
    start, call = PYTHON[entry]
    with pytest.raises(ValueError) as caught:
        call(text)
    assert str(caught.value).startswith(start)
    assert message in str(caught.value)
    assert text in str(caught.value), "what was written"


@pytest.mark.parametrize("blank", ["", "  ", [""], [" "], ["mlp", ""], [" ", "mlp"], ("",)])
def test_blank_is_an_error_and_an_empty_list_is_none(blank: Any) -> None:
    for call in (
        lambda: GDNRecomputeStrategy("layernorm", offload=blank),
        lambda: apply_plan(MODEL, "layernorm", offload=blank),
        lambda: apply_plan(MODEL, Selection(labels=("layernorm",)), offload=blank),
    ):
        with pytest.raises(ValueError, match="expected an offload label, got ''"):
            call()


@pytest.mark.parametrize("nothing", [[], (), OffloadConfig(labels=()), OffloadConfig(labels=[], min_bytes=5)])  # type: ignore[arg-type]
def test_no_labels_move_nothing(nothing: Any) -> None:
    assert GDNRecomputeStrategy([], offload=nothing).selection.is_control
    assert select("layernorm", offload=nothing) == select("layernorm") == Selection(labels=("layernorm",), offload=OffloadConfig(labels=()))
    assert select("offload:mlp", offload=nothing) == select("offload:mlp"), "and is nothing given twice"
    plan = Plan.from_labels(select("layernorm"), inspect_model(MODEL).layouts)
    for chosen in ("layernorm", plan, select("layernorm")):
        with apply_plan(MODEL, chosen, offload=nothing) as applied:
            assert applied.engines is None
            assert applied.plan == plan


@pytest.mark.parametrize("wrong", [None, 3, [3], ["mlp", None], b"", b"mlp", {"mlp"}, {"mlp": 0.5}, 0.5, True])
def test_a_wrong_type_is_named(wrong: Any) -> None:
    for call in (lambda: GDNRecomputeStrategy([], offload=wrong), lambda: apply_plan(MODEL, [], offload=wrong)):
        with pytest.raises(ValueError) as caught:
            call()
        want = f"offload: expected a label, a list of labels ([] for none) or an OffloadConfig, got {wrong!r}. Offload labels: gdn_core_attn"
        assert want in str(caught.value)


def test_a_label_given_twice_counts_once_as_among_recompute_labels() -> None:
    once = OffloadConfig(labels=("mlp",), fraction=0.5)
    for asked in (["mlp@0.5", "mlp"], "mlp@0.5,mlp@0.5", OffloadConfig(labels=("mlp", "mlp"), fraction=0.5)):
        assert select([], offload=asked).offload == once
    assert parse_arm("offload:mlp@0.5+offload:mlp").offload == once
    with pytest.raises(ValueError, match=r"offload is given twice: as 'offload:mlp' among the labels and as offload=\['mlp'\]; write it once"):
        select("offload:mlp", offload=["mlp"])


def test_a_share_is_no_minus_zero_and_takes_every_plain_number() -> None:
    assert str(OffloadConfig(labels=("mlp",), fraction=-0.0)) == "mlp@0"
    shares = {"0": 0.0, "1": 1.0, ".5": 0.5, "1.": 1.0, "5e-1": 0.5, "0.25": 0.25, "auto": "auto"}
    assert {text: parse_offload(f"mlp@{text}").fraction for text in shares} == shares


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("gdn_core_attn", "expected a list of offload labels, got 'gdn_core_attn'; write ['gdn_core_attn']"),
        ("offload:mlp@0.5", "got 'offload:mlp@0.5'; write ['mlp']"),
        ("", "got ''; write ['gdn_core_attn'], or [] for none"),
        (None, "got None; write ['gdn_core_attn'], or [] for none"),
        ([3], "got [3]"),
        (("mlp", ""), "expected an offload label, got ''"),
        (("mlp@0.5",), "unknown offload label 'mlp@0.5' (write 'mlp'; the share of the bytes is `fraction`)"),
        (("gdn_coreattn",), "unknown offload label 'gdn_coreattn' (did you mean 'gdn_core_attn'?)"),
    ],
)
def test_labels_of_a_config(labels: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OffloadConfig(labels=labels)
    assert str(caught.value).startswith("offload.labels: ")
    assert message in str(caught.value)
    assert "Offload labels: gdn_core_attn" in str(caught.value)


@pytest.mark.parametrize("value", [1.5, -0.5, True, False, float("nan"), float("inf"), 10**400, "half", "0.5", "Auto", None, [1]])
def test_a_fraction_of_a_config(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        OffloadConfig(labels=("mlp",), fraction=value)
    assert "offload.fraction: expected a number from 0 to 1 (a share of the bytes) or 'auto', got " in str(caught.value)
    assert repr(value)[:57] in str(caught.value)
    assert ("did you mean 'auto'" in str(caught.value)) is (value == "Auto")


WHOLE = {"min_bytes": 0, "resident_last_blocks": 0, "prefetch_blocks": 1, "release_blocks": 0}
WRONG = [True, False, "1", "x", -1, 1.5, 2.0, float("inf"), float("-inf"), float("nan"), 10**30, 10**400, [], {}]
FIELDS = [
    *[(name, value) for name, least in WHOLE.items() for value in [*WRONG, None, least - 1]],
    *[("max_pinned_gib", value) for value in WRONG if value not in (1.5, 2.0)],
]


def said_of(name: str, value: Any) -> str:
    with pytest.raises(ValueError) as caught:
        OffloadConfig(labels=("mlp",), **{name: value})
    return str(caught.value)


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_field_is_told_in_the_same_words_by_config_recipe_and_command_line(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_of(name, value)
    assert said.startswith(f"offload.{name}: expected ")
    assert f"got {repr(value)[:57]}" in said
    assert any(advice in said for advice in ("for instance", "least memory", "divide what may be pinned")), "what to do"
    written = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(str(value), json.dumps(value))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"offload:\n  {name}: {written}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(str(recipe))
    assert str(caught.value) == said
    quoted = f"'{value}'" if isinstance(value, str) else written
    assert main(["validate", "demo_cpu", f"offload.{name}={quoted}"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"lightning-gdn: {said}\n")


def test_fields_in_words() -> None:
    assert said_of("min_bytes", 1e6).endswith("got 1000000.0 (write 1000000): a size in bytes, for instance 1048576")
    assert "got '1' (write it as a plain number, without quotes): " in said_of("prefetch_blocks", "1")
    assert "at least 1, got 0: a reload needs at least one block of lead" in said_of("prefetch_blocks", 0)
    assert f"at most {2**63 - 1}, got " in said_of("min_bytes", 10**30)
    assert "or null (None) for no cap, got inf. " in said_of("max_pinned_gib", float("inf"))
    assert "got a number of thousands of digits" in said_of("min_bytes", 10**5000)
    assert OffloadConfig(labels=("mlp",), max_pinned_gib=2**33).max_pinned_bytes == 2**63


@pytest.mark.parametrize(("text", "message"), TEXTS.items())
def test_the_command_line_says_one_line_and_starts_nothing(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tiny_recipe(tmp_path)
    own = tmp_path / "own.yaml"
    own.write_text(recipe.read_text(encoding="utf-8") + f"plan: {{arm: {json.dumps('offload:' + text)}}}\n", encoding="utf-8")
    before = sorted(tmp_path.iterdir())
    quoted = json.dumps(f"offload:{text}", ensure_ascii=False)
    for key, argv in (
        ("plan.arm", ["run", str(recipe), f"plan.arm={quoted}"]),
        ("plan.arm", ["validate", str(own)]),
        ("compare.arms", ["validate", str(recipe), f"compare.arms=[none,{quoted}]"]),
        ("--arms", ["compare", str(recipe), "--arms", f"none,offload:{text}"]),
        ("--arms", ["parity", str(recipe), "--arms", f"offload:{text}"]),
        ("--arms", ["profile", str(recipe), "--arms", f"offload:{text}"]),
    ):
        assert main(argv) == 2, argv
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert printed.err.startswith(f"lightning-gdn: {key}: 'offload:"), printed.err
        assert message in printed.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "offload.labels=[mlp]",
            ("'labels' in section 'offload', got '[mlp]'", "write plan.arm=offload:gdn_core_attn@0.5", "Keys of offload: min"),
        ),
        ("offload.label=mlp", ("'label'", "said by the arm")),
        ("offload.fraction=0.5", ("'fraction'", "got '0.5'", "said by the arm")),
        ("offload.offload_modules=[core_attn]", ("said by the arm",)),
        ("offload=mlp", ("offload is a section", "got 'mlp'", "said by the arm")),
        ("offload=[]", ("offload is a section", "got '[]'", "said by the arm")),
        ("offload=", ("offload is a section", "got ''", "said by the arm")),
        ("plan.offload=mlp", ("'offload' in section 'plan'", "got 'mlp'", "said by the arm")),
        ("offload.min_byte=0", ("offload.min_bytes",)),
        ("min_bytes=0", ("write offload.min_bytes",)),
        ("plan.arm=offload", ("unknown label 'offload'", "written offload:LABEL, for instance offload:gdn_core_attn")),
        ("plan.arm=offload=mlp", ("written offload:LABEL",)),
        ("plan.arm=Offload:mlp", ("written offload:LABEL",)),
        ("plan.arm=offload:", ("plan.arm: expected text, got {'offload': None}", "YAML reads 'offload:' as a section", "right after the colon")),
        ("plan.arm=offload: mlp", ("got {'offload': 'mlp'}", "without a space, for instance offload:gdn_core_attn")),
        ("plan.arm=[gdn_conv,offload:mlp]", ("plan.arm: expected text, got [", "joined by '+': write gdn_conv+offload:mlp")),
        ("compare.arms=[none,[gdn_conv,offload:mlp]]", ("joined by '+': write gdn_conv+offload:mlp",)),
        ("plan.arm=full:", ("YAML reads 'full:' as a section",)),
        ("plan.arm=mlp+offload:mlp@0.5+mlp_act@0.5", ("unknown label 'mlp_act@0.5'",)),
        ("plan.arm=mlp+offload:block_input", ("offload label 'block_input' needs whole-block recompute",)),
    ],
)
def test_what_is_written_in_the_wrong_place_says_where_it_belongs(
    override: str, parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(tiny_recipe(tmp_path)), override]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    for part in parts:
        assert part in printed


@pytest.mark.parametrize("section", ["offload: [mlp]", "offload: mlp", "offload: {labels: [mlp]}", "offload:\n  labels: mlp\n"])
def test_labels_in_the_section_of_a_file(section: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(section, encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.yaml: .*said by the arm: write plan\.arm=offload:gdn_core_attn@0\.5"):
        load(str(path))
