"""The command line: exit codes, one clear line per user error, nothing half-written, light verbs stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gdn import __version__
from lightning_gdn.cli import VERBS, main
from tests.unit.bench_support import TINY, tiny_recipe


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must end with code 2 and one line on stderr, and leave nothing behind."""
    before = sorted(Path.cwd().rglob("*"))
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("lightning-gdn: ")
    assert sorted(Path.cwd().rglob("*")) == before, "something was written"
    return lines[0]


def test_help_shows_every_verb_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for verb in VERBS:
        assert f"lightning-gdn {verb}" in overview
        assert main([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert "examples:" in text
        assert f"lightning-gdn {verb}" in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-gdn {__version__}\n"
    assert main([]) == 2


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'compare'?" in fails(capsys, "compar", "demo_cpu")
    assert f"Verbs: {', '.join(VERBS)}" in fails(capsys, "zzz")


@pytest.mark.parametrize("verb", ["run", "compare", "validate"])
def test_user_errors_are_one_line_and_leave_nothing(verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short", encoding="utf-8")
    message = fails(capsys, verb, "demo_cpu", "modle.path=x")
    assert "'modle'" in message
    assert "model.path" in message
    assert "whole number" in fails(capsys, verb, "demo_cpu", "trainer.max_steps=many")
    assert "no such file or folder" in fails(capsys, verb, "demo_cpu", "data.path=nowhere.txt")
    assert "no text files" in fails(capsys, verb, "demo_cpu", "data.path=empty")
    assert "longer than the text" in fails(capsys, verb, "demo_cpu", "data.path=short.txt")
    assert "at least 256" in fails(capsys, verb, "demo_cpu", "model.vocab_size=100")
    assert "no such folder" in fails(capsys, verb, "demo_cpu", "model.path=nowhere")
    assert "no file nowhere.yaml" in fails(capsys, verb, "nowhere.yaml")
    assert "see lightning-gdn" in fails(capsys, verb)
    assert "--frobnicate" in fails(capsys, verb, "demo_cpu", "--frobnicate")


def test_what_needs_the_model_is_checked_before_the_folder_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = str(tiny_recipe(tmp_path))
    message = fails(capsys, "run", recipe, "plan.arm=moe")
    assert "'moe'" in message
    assert "gdn_conv" in message
    assert "num_layers must be at most" in fails(capsys, "compare", recipe, "--arms", "none,full:block:9")
    assert "--arms" in fails(capsys, "compare", recipe, "--arms", "gdn_cnv")
    assert "given twice" in fails(capsys, "compare", recipe, "--arms", "full,full")
    assert "compare.rounds" in fails(capsys, "compare", recipe, "--rounds", "0")
    assert "compare.rounds" in fails(capsys, "compare", recipe, "--rounds", "x")
    assert "hold out" in fails(capsys, "run", recipe, "trainer.val_every=1", "trainer.val_batches=10000000")


@pytest.mark.parametrize("verb", ["compare", "parity", "profile"])
def test_an_arm_that_nobody_wrote_is_said_to_be_the_recipes(verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = str(tiny_recipe(tmp_path, TINY.replace("[none, gdn_conv, full]", "[none, full:block:4]")))
    message = fails(capsys, verb, recipe, "model.num_hidden_layers=2", "model.full_attention_interval=2")
    assert "'full:block:4'" in message
    assert "the model has 2" in message
    assert "comes from compare.arms of tiny.yaml; choose others by --arms A,B,... or compare.arms=[A,B]" in message
    assert "comes from" not in fails(capsys, verb, recipe, "--arms", "full:block:9")


def test_a_gpu_recipe_without_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "trainer.accelerator" in fails(capsys, "run", str(tiny_recipe(tmp_path)), "trainer.accelerator=gpu")


def test_an_occupied_folder_is_not_touched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "record.json").write_text("mine", encoding="utf-8")
    assert "--out" in fails(capsys, "run", str(tiny_recipe(tmp_path)), "--out", "old")
    assert (tmp_path / "old" / "record.json").read_text(encoding="utf-8") == "mine"


def test_validate_and_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["validate", str(tiny_recipe(tmp_path)), "data.seq_len=33"]) == 0
    assert "valid" in capsys.readouterr().out
    assert main(["validate", "demo_cpu", "--print", "data.seq_len=33"]) == 0
    assert "seq_len: 33" in capsys.readouterr().out
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "demo_cpu" in listed
    assert "qwen3_5_0_8b" in listed
    assert "lightning-gdn compare recipes/demo_cpu.yaml" in listed


def test_labels_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labels"]) == 0
    out = capsys.readouterr().out
    for part in ("gdn_in_proj_conv", "conv: recompute_inside", "full:block:N", "gdn_core_attn", "what moves to host memory"):
        assert part in out
    assert "--model" in fails(capsys, "labels", "data.seq_len=3")
    assert "--model" in fails(capsys, "labels", "--json")


def test_overrides_may_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "demo_cpu", "data.seq_len=33", "--print", "data.batch_size=5"]) == 0
    out = capsys.readouterr().out
    assert "seq_len: 33" in out
    assert "batch_size: 5" in out


@pytest.mark.parametrize("argv", [["recipes"], ["validate", "demo_cpu"], ["--help"], ["labels"], ["run", "demo_cpu", "modle.path=x"]])
def test_light_verbs_import_nothing_heavy(argv: list[str]) -> None:
    heavy = ("torch", "lightning", "transformers", "wandb", "matplotlib")
    code = f"import sys; from lightning_gdn.cli import main; main({argv!r}); print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_is_the_command(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, TINY + "extra: 1\n")
    done = subprocess.run([sys.executable, "-m", "lightning_gdn", "validate", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'extra'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("broken", [False, True])
def test_a_comparison_outlives_wandb(broken: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_gdn.bench import compare as compare_module
    from lightning_gdn.bench import wandb_sink
    from lightning_gdn.bench.records import write_json
    from tests.unit.bench_support import record

    seen: list[str] = []

    def publish(result: object, records: list[dict[str, object]], *_: object) -> list[str]:
        if broken:
            raise ConnectionError("no network")
        seen.extend(f"{r['arm']}-{r['round']}" for r in records)
        return ["id"] * (len(records) + 1)

    def launch(recipe_file: Path, arm: str, index: int, out: Path, progress: object) -> int:
        write_json(out, record(arm, index))
        return 0

    monkeypatch.setattr(wandb_sink, "publish", publish)
    monkeypatch.setattr(compare_module, "_launch", lambda loaded: launch)
    code = main(["compare", str(tiny_recipe(tmp_path)), "--arms", "full", "--rounds", "2", "--out", "cmp", "logger=wandb"])
    captured = capsys.readouterr()
    assert (tmp_path / "cmp" / "comparison.png").exists()
    if broken:
        assert code == 1
        assert "W&B did not take the comparison: ConnectionError: no network" in captured.err
    else:
        assert code == 0
        assert seen == ["none-0", "full-0", "none-1", "full-1"]
        assert "W&B: 5 runs in group cmp" in captured.out


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(
    "words",
    [
        ["run", "plan.arm=layernorm"],
        ["compare", "--arms", "layernorm,full"],
        ["compare", "--arms", "checkpoint:full"],
        ["profile", "--arms", "layernorm"],
        ["parity", "--arms", "layernorm"],
        ["labels"],
    ],
    ids=" ".join,
)
def test_a_model_without_gated_deltanet_is_refused_before_anything_starts(
    words: list[str], layers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *rest = words
    recipe = str(tiny_recipe(tmp_path))
    sizes = ["model.full_attention_interval=1", f"model.num_hidden_layers={layers}"]
    assert main([verb, *(["--model"] if verb == "labels" else []), recipe, *sizes, *rest]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"expected Gated DeltaNet blocks, got {layers} blocks with attention only" in said
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_labels_marks_an_arm_of_the_recipe_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(tiny_recipe(tmp_path))
    assert main(["labels", "--model", recipe, "compare.arms=[none,moe,full:block:9,gdn_conv]"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "does not apply: label 'moe'" in said
    assert "does not apply: full:block:9: num_layers must be at most the number of blocks" in said
