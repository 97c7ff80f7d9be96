"""Recipes of every model family: predicted bytes, equal losses, kernels settings, FLOPs by hand, the stack as a language model."""

from __future__ import annotations

import math
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_gdn.bench import module as module_of_bench
from lightning_gdn.bench.arm import check_device, run_arm
from lightning_gdn.bench.arms import is_rival
from lightning_gdn.bench.compare import check_runnable
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.flops import flops_per_token
from lightning_gdn.bench.labels_table import predict
from lightning_gdn.bench.module import build_model, fused_loss, make_module, meta_model, parameter_dtype
from lightning_gdn.bench.recipes import Loaded, load, shipped
from lightning_gdn.bench.records import read_json
from lightning_gdn.bench.schema import FAMILY_FIELDS, SECTIONS
from lightning_gdn.bench.stack import StackLM
from lightning_gdn.cli import main
from lightning_gdn.inspection import inspect_model
from tests.unit.bench_support import FAMILIES, TINY_NEXT, TINY_STACK, tiny_recipe

ARMS = ["none", "gdn_conv+gdn_norm_out+layernorm", "full:block:2+gdn_front", "full:uniform:3"]


def loaded_of(tmp_path: Path, text: str, *overrides: str) -> Loaded:
    return load(str(tiny_recipe(tmp_path, text)), overrides)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("family", ["qwen3_next", "gdn_stack"])
def test_predicted_bytes_and_equal_losses(family: str, precision: str, tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, FAMILIES[family], f"trainer.precision={precision}", "trainer.max_steps=2")
    prediction = predict(loaded, ARMS)
    records = {arm: run_arm(loaded.recipe, loaded.saved, arm) for arm in ARMS}
    assert {arm: (r["status"], r["error"]) for arm, r in records.items()} == dict.fromkeys(ARMS, ("ok", None))
    assert {arm: r["retained_bytes"] for arm, r in records.items()} == {arm: prediction.retained_bytes[arm] for arm in ARMS}
    assert all(r["kernels"] == prediction.kernels != {} for r in records.values())
    assert len({str(r["losses_hex"]) for r in records.values()}) == 1
    assert len({r["weights_sha256"] for r in records.values()}) == 1


@pytest.mark.parametrize("family", list(FAMILIES))
def test_on_a_cpu_fused_kernels_are_the_stock_ones_to_the_bit(family: str, tmp_path: Path) -> None:
    stock, fused = (loaded_of(tmp_path, FAMILIES[family], f"plan.kernels={kernels}", "trainer.max_steps=2") for kernels in ("stock", "fused"))
    prediction = predict(fused, ["none"])
    for arm in ("none", "gdn_norm_out"):
        a, b = (run_arm(loaded.recipe, loaded.saved, arm) for loaded in (stock, fused))
        assert (a["status"], b["status"]) == ("ok", "ok")
        assert b["recipe"]["plan"]["kernels"] == "fused"
        for key in ("losses_hex", "weights_sha256", "retained_bytes", "kernels"):
            assert a[key] == b[key], (arm, key)
        assert b["retained_bytes"] == prediction.retained_bytes[arm]
        assert b["kernels"] == prediction.kernels


SMALL = {
    "demo_cpu": ("model.num_hidden_layers=4", "data.seq_len=65"),
    "qwen3_next_tiny_cpu": ("data.seq_len=65",),
    "qwen3_5_0_8b": (
        "model.hidden_size=64 model.intermediate_size=128 model.num_hidden_layers=8 model.head_dim=32 model.linear_num_key_heads=2 "
        "model.linear_num_value_heads=2 model.vocab_size=1024 trainer.accumulate_grad_batches=1 data.seq_len=65"
    ).split(),
    "qwen3_5_4b": (
        "model.hidden_size=64 model.intermediate_size=128 model.num_hidden_layers=8 model.head_dim=32 model.linear_num_key_heads=2 "
        "model.linear_num_value_heads=4 model.vocab_size=1024 trainer.loss=cross_entropy data.seq_len=65"
    ).split(),
    "gdn_stack_20": (
        "model.hidden_size=64 model.num_hidden_layers=3 model.linear_num_key_heads=2 model.linear_num_value_heads=4 data.seq_len=65"
    ).split(),
}
"""Overrides that let a shipped recipe run in a second; batch, precision, kernels and arms stay its own."""


@pytest.mark.parametrize("name", list(shipped()))
def test_a_shipped_recipe_retains_what_is_predicted(name: str) -> None:
    whole = load(name)
    model = meta_model(whole.recipe)
    assert len(inspect_model(model).layouts) == whole.recipe.model.num_hidden_layers
    overrides = ["trainer.accelerator=cpu", "trainer.max_steps=1", "monitor.warmup_steps=0", *SMALL[name]]
    arms = [arm.replace("full:block:10", "full:block:2") for arm in whole.recipe.compare.arms]
    loaded = load(name, overrides)
    check_runnable(loaded, arms)
    arms = [arm for arm in arms if not is_rival(arm)]  # which are measured, not predicted
    prediction = predict(loaded, arms)
    measured = {arm: run_arm(loaded.recipe, loaded.saved, arm)["retained_bytes"] for arm in arms}
    assert measured == {arm: prediction.retained_bytes[arm] for arm in arms}


OTHER_VALUES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "linear_num_value_heads", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"), 8),
    **dict.fromkeys(("num_attention_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("full_attention_interval", "num_key_value_heads"), 2),
    **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim", "linear_key_head_dim", "linear_value_head_dim", "vocab_size"), 512),
    **dict.fromkeys(("tie_word_embeddings", "keep_fp32"), False),
    "linear_conv_kernel_dim": 3,
    "num_experts_per_tok": 1,
    "mlp_only_layers": [0],
    "dtype": "float32",
    "attn_implementation": "eager",
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_fields_of_a_family_are_those_that_change_its_model(family: str, tmp_path: Path) -> None:
    recipe = loaded_of(tmp_path, FAMILIES[family], "trainer.precision=bf16-true").recipe

    def built(**changes: Any) -> Any:
        model = meta_model(replace(recipe, model=replace(recipe.model, **changes)))
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        config: Any = getattr(model, "config", None)
        return shapes, config and config.to_dict(), config and config._attn_implementation

    plain = built()
    assert OTHER_VALUES.keys() == SECTIONS["model"].keys() - {"family", "path"}
    reacts = {name for name, value in OTHER_VALUES.items() if built(**{name: value}) != plain}
    assert reacts == FAMILY_FIELDS[family] - {"family", "path"}


def test_dense_blocks_among_experts(tmp_path: Path) -> None:
    recipe = loaded_of(tmp_path, TINY_NEXT).recipe
    layouts = inspect_model(build_model(recipe)).layouts
    assert ["gate_up" in layout.regions for layout in layouts] == [False, True, False, False]
    small = build_model(recipe, ["linear_attention", "full_attention", "linear_attention"], dense=[2])
    assert ["gate_up" in layout.regions for layout in inspect_model(small).layouts] == [False, False, True]


def test_flops_of_experts_by_hand(tmp_path: Path) -> None:
    h, inter, conv, expert = 32, 64, 2 * 2 * 8 + 4 * 8, 16
    gdn = h * (conv + 4 * 8 + 4 + 4) + 4 * 8 * h + conv * 4
    attention = h * (2 * 16 * 2 + 16 + 16) + 2 * 16 * h
    moe = 6 * h + 2 * 3 * h * expert + 3 * h * expert + h  # router, two experts of six, shared expert and its gate
    weights = 3 * gdn + attention + 3 * moe + 3 * h * inter + 256 * h
    rule = 3 * 4 * (2 * 64 * (3 * 8 + 2 * 8) + 6 * 8 * 8)
    recipe = loaded_of(tmp_path, TINY_NEXT).recipe
    assert flops_per_token(meta_model(recipe), 65) == 6 * weights + 6 * 65 * 2 * 16 + 3 * rule


def test_flops_of_the_stack_by_hand(tmp_path: Path) -> None:
    h, conv = 32, 2 * 2 * 8 + 4 * 8
    gdn = h * (conv + 4 * 8 + 4 + 4) + 4 * 8 * h + conv * 4
    rule = 3 * 4 * (2 * 64 * (3 * 8 + 2 * 8) + 6 * 8 * 8)
    assert flops_per_token(meta_model(loaded_of(tmp_path, TINY_STACK).recipe), 65) == 6 * (4 * gdn + 256 * h) + 4 * rule


def test_the_stack_is_a_language_model(tmp_path: Path) -> None:
    recipe = loaded_of(tmp_path, TINY_STACK).recipe
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(recipe)
    finally:
        torch.set_default_dtype(torch.float32)
    assert isinstance(model, StackLM)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = build_model(loaded_of(tmp_path, TINY_STACK, "model.tie_word_embeddings=false").recipe)
    assert isinstance(untied, StackLM)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    assert [layout.kind for layout in inspect_model(model).layouts] == ["gdn"] * 4
    ids = torch.randint(0, 256, (2, 17))
    logits, loss = model(ids).logits, model(ids, labels=ids).loss
    assert logits is not None
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :-1].reshape(-1, 256), ids[:, 1:].reshape(-1)))
    assert abs(loss.item() - math.log(256)) < 0.2, "an untrained model knows nothing"
    again = build_model(recipe).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_the_stack_keeps_its_decay_parameters_in_float32(tmp_path: Path) -> None:
    recipe = loaded_of(tmp_path, TINY_STACK, "trainer.precision=bf16-true").recipe
    assert parameter_dtype(recipe) == torch.bfloat16
    kept = {name.rpartition(".")[2] for name, p in build_model(recipe).named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias"}


def test_labels_that_the_stack_has_no_region_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(tiny_recipe(tmp_path, TINY_STACK))
    assert main(["run", recipe, "plan.arm=mlp"]) == 2
    assert "arm 'mlp'" in capsys.readouterr().err
    assert main(["labels", "--model", recipe, "compare.arms=[none]"]) == 0
    mlp = next(line for line in capsys.readouterr().out.splitlines() if "│ mlp " in line)
    assert "does not apply" in mlp


@pytest.mark.slow
def test_compare_the_stack_with_fused_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cmp"
    recipe = str(tiny_recipe(tmp_path, TINY_STACK))
    assert main(["compare", recipe, "--arms", "none,gdn_norm_out", "--out", str(out), "plan.kernels=fused"]) == 0
    result = read_json(out / "comparison.json")
    assert [entry["losses"]["verdict"] for entry in result["arms"]] == ["control", "bit-equal"]
    assert result["arms"][0]["plan"] == "plan none: 4 blocks, every region kept", "the control of fused kernels is installed"
    assert result["recipe"]["plan"]["kernels"] == "fused"
    assert "torch.gated_rms_norm" in capsys.readouterr().out


def test_the_fused_loss_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of(tmp_path, TINY_STACK, "trainer.accelerator=auto", "trainer.loss=fused_linear_cross_entropy")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"trainer\.loss: .* runs on a GPU only, this is cpu; write trainer\.loss=cross_entropy"):
        check_runnable(loaded, ["none"])
    module = make_module(loaded.recipe)
    module.configure_model()
    with pytest.raises(UserError, match=r"trainer\.loss: .* runs on a GPU only, this is cpu"):
        module(torch.zeros((1, 4), dtype=torch.long))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "fla.modules.fused_linear_cross_entropy", None)
    with pytest.raises(UserError, match=r"needs flash-linear-attention .*lightning-gdn\[cuda\]"):
        check_device(loaded.recipe)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_fused_loss_gets_hidden_states_and_the_following_ids(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reference(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy((hidden @ weight.T).flatten(0, 1).float(), target.flatten())

    fake: Any = types.ModuleType("fla.modules.fused_linear_cross_entropy")
    fake.FusedLinearCrossEntropyLoss = Reference
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(module_of_bench, "fused_loss_problem", lambda device: None)
    model = build_model(loaded_of(tmp_path, FAMILIES[family]).recipe)
    ids = torch.randint(0, 256, (2, 17))
    torch.testing.assert_close(fused_loss(model, ids), model(input_ids=ids, labels=ids).loss)
