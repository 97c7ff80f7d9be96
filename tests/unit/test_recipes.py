"""Recipes: every way to write one wrong gives one clear error that names key, section and remedy (case H24)."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.recipes import load, shipped, to_yaml, write_yaml
from lightning_gdn.bench.schema import AT_MOST, CHOICES, FAMILY_FIELDS, POSITIVE, SAVED_FIELDS, SECTIONS, TOP, ModelConfig, Recipe
from lightning_gdn.cli import main
from tests.unit.bench_support import FAMILIES, tiny_recipe


def complain(*overrides: str, recipe: str = "demo_cpu") -> str:
    """The message for a recipe with overrides that cannot work."""
    with pytest.raises(UserError) as caught:
        load(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message, "one line"
    return message


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_h24_misspelt_section_names_the_right_key() -> None:
    message = complain("modle.path=x")
    assert "'modle'" in message
    assert "model.path" in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.preciscion=x", ("'preciscion'", "section 'trainer'", "trainer.precision")),
        ("data.seq-len=3", ("'seq-len'", "section 'data'", "data.seq_len")),
        ("lr=1", ("'lr'", "at the top", "trainer.lr")),
        ("model.lr=1", ("'lr'", "section 'model'", "belongs in section 'trainer'", "trainer.lr")),
        ("modle.lr=1", ("'modle'", "trainer.lr")),
        ("trainer.logger=csv", ("'logger'", "stands at the top")),
        ("seed=1", ("data.seed", "trainer.seed")),
        ("loger=csv", ("'loger'", "logger")),
        ("plan.recompute_module=x", ("'recompute_module'", "section 'plan'", "plan.arm")),
        ("recompute=x", ("plan.arm",)),
        ("zzz=1", ("'zzz'", "Keys at the top: model")),
        ("plan.zzz=1", ("'zzz'", "Keys of plan: arm, kernels")),
    ],
)
def test_h24_unknown_keys(override: str, parts: tuple[str, ...]) -> None:
    message = complain(override)
    for part in parts:
        assert part in message, message


def test_h24_an_unknown_key_in_the_file_is_found_like_one_in_an_override(tmp_path: Path) -> None:
    message = complain(recipe=write(tmp_path, "trainer:\n  max_step: 3\nmodel:\n  max_steps: 3\n"))
    assert "trainer.max_steps" in message
    assert "'max_steps' belongs in section 'trainer'" in message
    assert "mine.yaml" in message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.max_steps=abc", ("trainer.max_steps", "whole number", "'abc'")),
        ("trainer.max_steps=2.5", ("trainer.max_steps", "whole number", "2.5")),
        ("trainer.max_steps='20'", ("trainer.max_steps", "'20'", "without quotes")),
        ("trainer.max_steps=true", ("trainer.max_steps", "True")),
        ("trainer.lr='2e-5'", ("trainer.lr", "a number", "without quotes")),
        ("trainer.lr=.nan", ("trainer.lr", "nan")),
        ("trainer.lr.x=3", ("trainer.lr", "{'x': 3}")),
        ("plan.arm=no", ("plan.arm", "False", "quotes")),
        ("model.tie_word_embeddings=maybe", ("model.tie_word_embeddings", "true or false", "'maybe'")),
        ("compare.arms=full", ("compare.arms", "a list", "'full'")),
        ("compare.arms=[1]", ("compare.arms", "text", "1")),
        ("trainer.num_threads=x", ("trainer.num_threads", "or null")),
        ("trainer=3", ("trainer is a section", "'3'")),
    ],
)
def test_h24_wrong_types(override: str, parts: tuple[str, ...]) -> None:
    message = complain(override)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.precision=16-mixed", ("trainer.precision", "bf16-mixed", "'16-mixed'")),
        ("logger=wandbb", ("logger", "did you mean 'wandb'")),
        ("plan.kernels=fast", ("plan.kernels", "stock, fused", "'fast'")),
        ("trainer.loss=fused_linear_cross_entropy", ("trainer.loss", "GPU only", "trainer.accelerator is cpu", "trainer.loss=cross_entropy")),
        ("trainer.loss=fused_cross_entropy", ("trainer.loss", "did you mean 'fused_linear_cross_entropy'")),
        ("model.family=qwen3_nxt", ("model.family", "gdn_stack", "did you mean 'qwen3_next'")),
        ("data.seq_len=1", ("data.seq_len", "at least 2", "1")),
        ("trainer.max_steps=0", ("trainer.max_steps", "at least 1")),
        ("trainer.max_steps=2", ("monitor.warmup_steps", "trainer.max_steps=2")),
        ("trainer.seed=99999999999999999999", ("trainer.seed", f"at most {2**63 - 1}", "99999999999999999999")),
        ("data.seed=9223372036854775808", ("data.seed", f"at most {2**63 - 1}")),
        ("data.seed=-1", ("data.seed", "at least 0")),
        ("trainer.num_threads=100000", ("trainer.num_threads", f"at most {AT_MOST['trainer.num_threads']}", "cores here", "100000")),
        ("trainer.max_steps=99999999999999999999", ("trainer.max_steps", f"at most {2**31 - 1}")),
        ("model.hidden_size=99999999999999999999", ("model.hidden_size", f"at most {2**31 - 1}")),
        ("data.batch_size=99999999999", ("data.batch_size", f"at most {2**31 - 1}")),
        ("trainer.devices=0", ("trainer.devices", "at least 1", "0")),
        ("model.num_key_value_heads=3", ("model.num_key_value_heads", "divisor")),
        ("model.linear_num_value_heads=6", ("model.linear_num_value_heads", "multiple")),
        ("plan.arm=gdn_cnv", ("plan.arm", "'gdn_cnv'", "'gdn_conv'")),
        ("offload.prefetch_blocks=0", ("offload.prefetch_blocks", "at least 1", "0")),
        ("offload.min_byte=0", ("offload.min_bytes",)),
        ("compare.arms=[none,fulll]", ("compare.arms", "'fulll'")),
        ("compare.arms=[]", ("compare.arms", "empty")),
        ("out_dir=", ("out_dir",)),
    ],
)
def test_values_out_of_range_or_list(override: str, parts: tuple[str, ...]) -> None:
    message = complain(override)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("model.family=qwen3_next", "model.num_experts=4"), ("model.num_experts_per_tok", "at most num_experts=4", "10")),
        (("model.family=qwen3_next", "model.mlp_only_layers=[0,8]"), ("model.mlp_only_layers", "blocks 0 to 7", "8")),
        (("model.family=qwen3_next", "model.mlp_only_layers=0"), ("model.mlp_only_layers", "a list", "[0,3]")),
        (("model.family=gdn_stack", "model.path=somewhere"), ("model.path", "random weights only", "model.family")),
    ],
)
def test_fields_of_one_family(overrides: tuple[str, ...], parts: tuple[str, ...]) -> None:
    message = complain(*overrides)
    for part in parts:
        assert part in message, message


OTHER_VALUES = {"path": "somewhere", "dtype": "bfloat16", "attn_implementation": "eager", "mlp_only_layers": [0], "tie_word_embeddings": False}
FOREIGN = [(family, name) for family, fields in FAMILY_FIELDS.items() for name in SECTIONS["model"] if name not in fields]


@pytest.mark.parametrize(("family", "name"), FOREIGN)
def test_a_field_that_the_family_does_not_have_is_an_error(family: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever its value, be it the default, and whoever gives it."""
    recipe = tiny_recipe(tmp_path, FAMILIES[family])
    default = getattr(Recipe().model, name)
    for value in (OTHER_VALUES.get(name, 4), *([] if default is None else [default])):
        told = complain(f"model.{name}={value}", recipe=str(recipe))
        assert told.startswith(f"model.{name}: {family} has "), told
        assert value == "somewhere" or f"got {name}={value!r} on the command line; take it out there" in told
        assert f"{value!r}" in told
        if name != "path":  # that one is no field of a random model at all
            assert told.endswith(f"Fields of {family}: {', '.join(key for key in SECTIONS['model'] if key in FAMILY_FIELDS[family])}")
            having = [f"model.family={other}" for other, fields in FAMILY_FIELDS.items() if name in fields]
            assert f"or write {' or '.join(having)}. " in told
            given = write(tmp_path, FAMILIES[family].replace("model:\n", f"model:\n  {name}: {value}\n"))
            assert complain(recipe=given) == told.replace("on the command line", "in mine.yaml")
        assert main(["validate", str(recipe), f"model.{name}={value}"]) == 2
        assert capsys.readouterr().err == f"lightning-gdn: {told}\n"


def test_a_file_of_another_family_than_the_command_line_says(tmp_path: Path) -> None:
    message = complain("model.family=gdn_stack", "model.num_experts=4")
    assert "model.intermediate_size, " in message
    assert "model.num_experts: gdn_stack has no such fields, got intermediate_size=384, full_attention_interval=4, " in message
    assert " in demo_cpu.yaml and num_experts=4 on the command line; take them out there, or write model.family=qwen3_next." in message
    plain = complain("model.family=gdn_stack")
    assert " in demo_cpu.yaml; take them out there, or write model.family=qwen3_5 or model.family=qwen3_next. " in plain
    assert load(write(tmp_path, "model: {path: null, family: gdn_stack}\n")).recipe.model.family == "gdn_stack", "null is what there is without it"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_saved_recipe_is_read_again_and_has_the_fields_of_its_family(family: str, tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path, FAMILIES[family])))
    assert set(loaded.saved["model"]) == FAMILY_FIELDS[family]
    write_yaml(loaded.saved, tmp_path / "saved.yaml", "again")
    again = load(str(tmp_path / "saved.yaml"))
    assert (again.recipe, again.saved) == (loaded.recipe, loaded.saved)


@pytest.mark.parametrize("recipe", ["qwen3_5_4b", "qwen3_next_tiny_cpu", "demo_cpu"])
def test_a_saved_model_takes_the_place_of_a_recipes(recipe: str, tmp_path: Path) -> None:
    """The documented way: a shipped recipe, the folder on the command line. The recipe's sizes are then nowhere, also not in what is saved."""
    loaded = load(recipe, [f"model.path={tmp_path}", "model.attn_implementation=eager"])
    assert set(loaded.saved["model"]) == SAVED_FIELDS
    family = loaded.recipe.model.family
    assert loaded.recipe.model == ModelConfig(path=str(tmp_path), attn_implementation="eager", family=family)
    write_yaml(loaded.saved, tmp_path / "saved.yaml", "again")
    again = load(str(tmp_path / "saved.yaml"))
    assert (again.recipe, again.saved) == (loaded.recipe, loaded.saved)
    assert load(str(tmp_path / "saved.yaml"), [f"model.path={tmp_path}/other"]).recipe.model.path == f"{tmp_path}/other"


@pytest.mark.parametrize("name", [name for name in SECTIONS["model"] if name not in SAVED_FIELDS])
def test_a_field_that_a_saved_model_has_of_its_own_is_an_error(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = OTHER_VALUES.get(name, 4)
    written = str(value).lower() if name == "tie_word_embeddings" else value
    told = complain("model.path=there", f"model.{name}={written}")
    wanted = (
        f"model.{name}: a saved model has its own, expected none beside model.path='there', got {name}={value!r} on the command line; "
        "take it out there, or leave out model.path for random weights. "
    )
    assert told == wanted + "Fields beside model.path: family, dtype, keep_fp32, attn_implementation"
    in_file = write(tmp_path, "model: {path: there}\n")
    assert complain(f"model.{name}={written}", recipe=in_file) == told
    assert main(["validate", in_file, f"model.{name}={written}"]) == 2
    assert capsys.readouterr().err == f"lightning-gdn: {told}\n"
    both_in_file = write(tmp_path, f"model: {{path: there, {name}: {written}}}\n")
    alone = complain(recipe=both_in_file)
    assert alone == told.replace("on the command line", "in mine.yaml", 1)
    assert complain("model.path=there", recipe=both_in_file) == alone, "an override that repeats the file changes nothing"
    over = complain(f"model.{name}={written}", recipe=both_in_file)
    assert over == told.replace("on the command line", "on the command line, over that in mine.yaml", 1)


def test_fields_of_file_and_command_line_beside_a_saved_model(tmp_path: Path) -> None:
    sizes = "model: {path: null, hidden_size: 64, vocab_size: 300}\n"
    replaced = load(write(tmp_path, sizes + "data: {seq_len: '${model.hidden_size}'}\n"), ["model.path=there"])
    assert replaced.recipe.model.hidden_size == ModelConfig().hidden_size == replaced.recipe.data.seq_len == replaced.saved["data"]["seq_len"]
    told = complain("model.path=there", "model.head_dim=32", recipe=write(tmp_path, sizes))
    assert told.startswith("model.head_dim: a saved model"), "the file's own are replaced as a whole"
    told = complain("model.head_dim=32", recipe=write(tmp_path, sizes.replace("null", "there")))
    assert told.startswith(
        "model.hidden_size, model.vocab_size, model.head_dim: a saved model has its own, expected none beside model.path='there', "
        "got hidden_size=64, vocab_size=300 in mine.yaml and head_dim=32 on the command line; take them out there, or leave out model.path"
    )
    assert load(write(tmp_path, sizes.replace("null", "there")), ["model.path=null"]).recipe.model.hidden_size == 64


@pytest.mark.parametrize(("model_type", "family"), [("qwen3_5", "qwen3_5"), ("qwen3_5_text", "qwen3_5"), ("qwen3_next", "qwen3_next")])
def test_the_family_beside_a_saved_model_is_its_own(model_type: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 256}), encoding="utf-8")
    (tmp_path / "pytorch_model.bin").touch()
    other = {"qwen3_5": "qwen3_next", "qwen3_next": "qwen3_5"}[family]
    here, wrong = f"model.path={tmp_path}", f"model.family={other}"
    told = (
        f"model.family: expected {family}, that of the model in model.path={str(tmp_path)!r}, got {other!r}; write model.family={family} or leave it "
    )
    both = write(tmp_path, f"model: {{path: {tmp_path}, family: {other}}}\n")
    for argv in (["demo_cpu", here, wrong], [both], [both, here], [both, wrong]):
        assert main(["validate", *argv]) == 2, argv
        assert capsys.readouterr().err.startswith(f"lightning-gdn: {told}")
    assert main(["run", "demo_cpu", here, wrong, f"out_dir={tmp_path}/runs"]) == 2
    assert not (tmp_path / "runs").exists()
    assert capsys.readouterr().err.startswith(f"lightning-gdn: {told}")
    for recipe in ("demo_cpu", "qwen3_next_tiny_cpu"):  # a recipe of random weights is replaced as a whole
        assert main(["validate", recipe, here]) == 0
        loaded = load(recipe, [here])
        assert loaded.recipe.model.family == loaded.saved["model"]["family"] == family
    assert main(["validate", both, f"model.family={family}"]) == 0


def test_a_recipe_offers_the_kernels_that_there_are() -> None:
    from lightning_gdn.kernels import KERNELS

    assert CHOICES["plan.kernels"] == KERNELS


def test_contradicting_types_of_weights() -> None:
    assert "model.dtype" in complain("model.dtype=float32", "trainer.precision=bf16-true")


@pytest.mark.parametrize("spelling", ["2e-5", "2.0e-5", "0.00002"])
def test_h24_scientific_notation_is_a_number(spelling: str, tmp_path: Path) -> None:
    assert load("demo_cpu", [f"trainer.lr={spelling}"]).recipe.trainer.lr == 2e-5
    assert load(write(tmp_path, f"trainer:\n  lr: {spelling}\n")).recipe.trainer.lr == 2e-5


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("trainer:\n\tlr: 1\n", ("line 2, column 1", "spaces, not tabs")),
        ("trainer: {lr: 1\nmodel: 2", ("line 2",)),
        ("trainer:\n  lr: 1\n  lr: 2\n", ("line 3", "duplicate key")),
        ("model: !!python/object:os.system x\n", ("line 1, column 8",)),
        ("", ("empty", "model")),
        ("# only a comment\n", ("empty",)),
        ("- a\n- b\n", ("got a list",)),
        ("5\n", ("single value",)),
        ("trainer: [1]\n", ("trainer is a section",)),
        ("data: {path: '${nope.x}'}\n", ("data.path", "nope")),
    ],
)
def test_h24_files_that_are_no_recipe(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    message = complain(recipe=write(tmp_path, text))
    for part in ("mine.yaml", *parts):
        assert part in message, message


def test_binary_file(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in complain(recipe=str(tmp_path / "x.yaml"))


def test_an_empty_section_has_its_defaults(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, "data:\ntrainer:\n  max_steps: 7\n"))
    assert loaded.recipe.data == Recipe().data
    assert loaded.recipe.trainer.max_steps == 7


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dmo_cpu", ("did you mean demo_cpu",)),
        ("nowhere/demo_cpu.yaml", ("no file nowhere/demo_cpu.yaml", "write demo_cpu")),
        ("zzz.yaml", ("no file zzz.yaml", "demo_cpu, gdn_stack_20")),
        (".", ("is a folder",)),
    ],
)
def test_no_such_recipe(name: str, parts: tuple[str, ...]) -> None:
    message = complain(recipe=name)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize("override", ["trainer.lr", "=3", "--lr"])
def test_an_override_is_key_equals_value(override: str) -> None:
    assert "key=value" in complain(override)


def test_overrides_of_lists_and_broken_values() -> None:
    assert "as a whole" in complain("compare.arms.0=x")
    assert "no YAML" in complain("data.path={")
    assert load("demo_cpu", ["compare.arms=[none,full]"]).recipe.compare.arms == ["none", "full"]
    assert load("demo_cpu", ["data.path=a=b"]).recipe.data.path == "a=b"


def test_interpolation_and_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HIDDEN", "swordfish")
    text = "data: {path: '${oc.env:HIDDEN}/texts', seq_len: 128, batch_size: '${trainer.max_steps}'}\n"
    text += "out_dir: ${data.path}/runs\ntrainer: {max_steps: 4}\n"
    loaded = load(write(tmp_path, text))
    assert loaded.recipe.data.path == "swordfish/texts"
    assert loaded.recipe.out_dir == "swordfish/texts/runs"
    assert loaded.recipe.data.batch_size == 4
    assert loaded.saved["data"]["batch_size"] == 4
    saved = to_yaml(loaded.saved)
    assert "swordfish" not in saved
    assert loaded.saved["out_dir"] == "${oc.env:HIDDEN}/texts/runs"
    write_yaml(loaded.saved, tmp_path / "saved.yaml", "first\nsecond")
    again = load(str(tmp_path / "saved.yaml"))
    assert again.recipe == loaded.recipe
    assert (tmp_path / "saved.yaml").read_text(encoding="utf-8").startswith("# first\n# second\n")


def test_a_missing_environment_variable_is_named(tmp_path: Path) -> None:
    assert "NO_SUCH_VARIABLE" in complain("data.path=${oc.env:NO_SUCH_VARIABLE}")


def test_the_recipe_is_frozen_and_every_rule_names_a_field() -> None:
    recipe = load("demo_cpu").recipe
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.trainer.lr = 1.0  # type: ignore[misc]
    fields = {f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys} | set(TOP)
    assert set(CHOICES) <= fields
    assert set(POSITIVE) <= fields


def test_every_field_has_its_documentation() -> None:
    source = Path(__file__).resolve().parents[2] / "lightning_gdn" / "bench" / "schema.py"
    lines = source.read_text(encoding="utf-8").splitlines()
    keys = {key for keys in SECTIONS.values() for key in keys} | set(TOP)
    documented = {line.split(":")[0].strip() for line, below in itertools.pairwise(lines) if below.startswith('    """')}
    assert keys <= documented, keys - documented


def test_shipped_recipes_have_the_public_dimensions() -> None:
    assert set(shipped()) >= {"demo_cpu", "qwen3_5_0_8b"}
    model = load("qwen3_5_0_8b").recipe.model
    assert (model.hidden_size, model.intermediate_size, model.num_hidden_layers, model.vocab_size) == (1024, 3584, 24, 248320)
    assert (model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (8, 2, 256)
    assert (model.linear_num_key_heads, model.linear_num_value_heads, model.linear_key_head_dim, model.linear_value_head_dim) == (16, 16, 128, 128)
    assert model.tie_word_embeddings
    assert model.keep_fp32


def test_every_knob_of_a_shipped_recipe_names_its_price() -> None:
    demo = shipped()["demo_cpu"].read_text(encoding="utf-8")
    for knob in ("seq_len", "batch_size", "num_hidden_layers", "max_steps", "rounds", "warmup_steps", "kernels"):
        line = next(line for line in demo.splitlines() if line.strip().startswith(f"{knob}:"))
        assert "#" in line, line


def test_the_tiny_recipe_of_the_tests_is_valid(tmp_path: Path) -> None:
    assert load(str(tiny_recipe(tmp_path))).name == "tiny"
