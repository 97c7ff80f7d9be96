"""A rival as an arm: its record, the comparison with two of them, and nothing of it left after the fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gdn.bench import rivals
from lightning_gdn.bench.arm import run_arm
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.records import read_json
from lightning_gdn.cli import main
from tests.unit.bench_support import FAMILIES, tiny_recipe

ARMS = ["checkpoint:gdn_in_proj_conv", "checkpoint:full", "selective_checkpoint", "save_on_cpu", "save_on_cpu:gdn_core_attn"]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_5", ("trainer.val_every=1", "trainer.accumulate_grad_batches=2", "trainer.grad_clip=1.0")),
        ("qwen3_5", ("plan.kernels=fused", "trainer.precision=bf16-mixed")),
        ("qwen3_next", ("trainer.precision=bf16-true",)),
        ("gdn_stack", ()),
    ],
)
def test_a_rival_trains_as_the_control_to_the_bit(family: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    loaded = load(str(tiny_recipe(tmp_path, FAMILIES[family])), [*overrides, "trainer.max_steps=2"])
    control = run_arm(loaded.recipe, loaded.saved, "none")
    arms = ARMS if family == "gdn_stack" else [*ARMS, "hf_gradient_checkpointing"]
    for arm in arms:
        record = run_arm(loaded.recipe, loaded.saved, arm)
        assert (record["status"], record["error"], record["arm"]) == ("ok", None, arm)
        for key in ("losses_hex", "weights_sha256", "val_losses_hex", "kernels"):
            assert record[key] == control[key], (arm, key)
        assert record["ledger"] is None
        assert record["blocks"] == 4
        assert record["plan"].startswith(f"rival {arm}: 4 blocks; ")
        assert record["monitor"]["retained_mib"] is None, "no ledger of the control stands in for the rival"
        if arm.startswith("checkpoint:"):
            assert 0 < record["retained_bytes"] < control["retained_bytes"]
        else:
            assert record["retained_bytes"] is None


def test_a_model_in_eval_mode_is_checkpointed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers ignores its gradient checkpointing in eval mode, in which a model loaded from a folder stays."""
    plain = rivals._enable_hugging_face
    seen: list[bool] = []

    def enable(model: object) -> object:
        model.eval()  # type: ignore[attr-defined]
        undo = plain(model)
        seen.append(all(layer.training and layer.gradient_checkpointing for layer in model.model.layers))  # type: ignore[attr-defined]
        return undo

    monkeypatch.setattr(rivals, "_enable_hugging_face", enable)
    loaded = load(str(tiny_recipe(tmp_path)), ["trainer.max_steps=2"])
    assert run_arm(loaded.recipe, loaded.saved, "hf_gradient_checkpointing")["status"] == "ok"
    assert seen == [True]


def test_a_rival_that_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(str(tiny_recipe(tmp_path)))
    made: list[rivals.Installed] = []
    install = rivals.install

    def remember(*args: object, **kwargs: object) -> rivals.Installed:
        made.append(install(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(rivals, "install", remember)
    monkeypatch.setattr("lightning_gdn.bench.segments.checkpoint", broken)
    record = run_arm(loaded.recipe, loaded.saved, "checkpoint:conv")
    assert (record["status"], record["error"]) == ("failed", "RuntimeError: planted")
    assert [installed._undo for installed in made] == [[]]


@pytest.mark.slow
def test_compare_with_two_rivals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(tiny_recipe(tmp_path)), tmp_path / "cmp"
    assert main(["compare", recipe, "--arms", "checkpoint:full,checkpoint:gdn_in_proj_conv", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    result = read_json(out / "comparison.json")
    assert [(e["arm"], e["status"], e["losses"]["verdict"], e["weights_equal"]) for e in result["arms"]] == [
        ("none", "ok", "control", True),
        ("checkpoint:full", "ok", "bit-equal", True),
        ("checkpoint:gdn_in_proj_conv", "ok", "bit-equal", True),
    ]
    assert [point["arm"] for point in result["pareto"]["line"]] == ["none", "checkpoint:full"]
    assert [point["k"] for point in result["pareto"]["line"]] == [0, 4]
    row = next(row for row in result["pareto"]["points"] if row["arm"] == "checkpoint:gdn_in_proj_conv")
    assert row["line_overhead_pct"] is not None
    assert (result["arms"][2]["line_ratio"] is None) == (row["line_overhead_pct"] <= 0)  # times on a busy CPU can make the line fall
    assert result["arms"][2]["blocks"] == 4
    assert "checkpoint:full" in printed
    assert "savings of the Pareto view are of retained bytes" in (out / "comparison.md").read_text(encoding="utf-8")
    assert (out / "pareto.png").read_bytes()[:4] == b"\x89PNG"
