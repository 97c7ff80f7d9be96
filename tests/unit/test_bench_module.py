"""The model of a recipe: dimensions, determinism, types of the decay parameters, saved folders, the FLOPs formula."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision

from lightning_gdn.bench.arm import check_device
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.flops import flops_per_token
from lightning_gdn.bench.module import (
    BenchModule,
    ValidatedModule,
    block_kinds,
    build_model,
    make_module,
    meta_model,
    parameter_dtype,
)
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.schema import Recipe
from tests.unit.bench_support import tiny_recipe

DECAY = ("A_log", "dt_bias")


def recipe_of(tmp_path: Path, *overrides: str) -> Recipe:
    return load(str(tiny_recipe(tmp_path)), overrides).recipe


def dtypes(model: torch.nn.Module, *, decay: bool) -> set[torch.dtype]:
    return {p.dtype for name, p in model.named_parameters() if (name.rpartition(".")[2] in DECAY) == decay}


def test_the_model_has_the_recipes_dimensions_and_no_cache(tmp_path: Path) -> None:
    model = build_model(recipe_of(tmp_path))
    assert model.config.use_cache is False
    assert [type(layer.linear_attn).__name__ if hasattr(layer, "linear_attn") else "attention" for layer in model.model.layers] == [
        "Qwen3_5GatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5GatedDeltaNet", "attention",
    ]  # fmt: skip
    assert model.model.embed_tokens.weight.shape == (256, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    mixer = model.model.layers[0].linear_attn
    assert mixer.in_proj_qkv.weight.shape == (2 * 2 * 8 + 4 * 8, 32)


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    torch.rand(3)
    one = build_model(recipe_of(tmp_path)).state_dict()
    torch.rand(5)
    two = build_model(recipe_of(tmp_path)).state_dict()
    other = build_model(recipe_of(tmp_path, "trainer.seed=1")).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("keep", [True, False])
def test_h07_bf16_true_keeps_the_decay_parameters_if_asked(tmp_path: Path, keep: bool) -> None:
    recipe = recipe_of(tmp_path, "trainer.precision=bf16-true", f"model.keep_fp32={str(keep).lower()}")
    module = make_module(recipe)
    module.configure_model()
    HalfPrecision("bf16-true").convert_module(module)
    module.to("cpu")
    assert dtypes(module, decay=False) == {torch.bfloat16}
    assert dtypes(module, decay=True) == {torch.float32 if keep else torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32 if keep else torch.bfloat16}, "rotary frequencies"
    exact = build_model(recipe_of(tmp_path)).model.layers[0].linear_attn.A_log
    assert module.model is not None
    assert torch.equal(module.model.model.layers[0].linear_attn.A_log, exact) is keep, "kept means never rounded"


def test_the_default_type_of_the_process_does_not_decide(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = build_model(recipe_of(tmp_path))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert parameter_dtype(recipe_of(tmp_path, "model.dtype=bfloat16")) == torch.bfloat16
    assert dtypes(build_model(recipe_of(tmp_path, "model.dtype=bfloat16")), decay=True) == {torch.float32}


def test_a_saved_folder_is_loaded_with_its_weights(tmp_path: Path) -> None:
    saved = build_model(recipe_of(tmp_path, "trainer.seed=7"))
    saved.save_pretrained(tmp_path / "model")
    recipe = recipe_of(tmp_path, f"model.path={tmp_path}/model")
    model = build_model(recipe)
    assert model.config.use_cache is False
    assert not model.training, "transformers leaves a loaded model in eval mode"
    assert all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), model.state_dict().values(), strict=True))
    assert block_kinds(recipe) == ["linear_attention"] * 3 + ["full_attention"]
    assert build_model(recipe, ["full_attention"]).model.layers[0].self_attn is not None
    bf16 = build_model(recipe_of(tmp_path, f"model.path={tmp_path}/model", "trainer.precision=bf16-true"))
    assert dtypes(bf16, decay=True) == {torch.float32}
    assert dtypes(bf16, decay=False) == {torch.bfloat16}


def test_an_unreadable_folder_is_one_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "no_such_model", "vocab_size": 256}', encoding="utf-8")
    with pytest.raises(UserError, match=r"model\.path: .*model is no model that transformers can read"):
        block_kinds(recipe_of(tmp_path, f"model.path={folder}"))
    build_model(recipe_of(tmp_path)).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"model\.path: .*cannot be loaded"):
        build_model(recipe_of(tmp_path, f"model.path={folder}"))


def test_the_meta_model_costs_no_memory_and_no_random_numbers(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    model = meta_model(load("qwen3_5_0_8b").recipe)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(752e6, rel=0.01), "parameters of the 0.8B text model"


def test_flops_per_token_by_hand(tmp_path: Path) -> None:
    h, inter, conv = 32, 64, 2 * 2 * 8 + 4 * 8
    gdn = h * (conv + 4 * 8 + 4 + 4) + 4 * 8 * h + conv * 4
    attention = h * (2 * 16 * 2 + 16 + 16) + 2 * 16 * h
    weights = 3 * gdn + attention + 4 * 3 * h * inter + 256 * h
    rule = 3 * 4 * (2 * 64 * (3 * 8 + 2 * 8) + 6 * 8 * 8)
    assert flops_per_token(build_model(recipe_of(tmp_path)), 65) == 6 * weights + 6 * 65 * 2 * 16 + 3 * rule


def test_loss_is_the_models_own_next_byte_cross_entropy(tmp_path: Path) -> None:
    module = make_module(recipe_of(tmp_path))
    module.configure_model()
    ids = torch.randint(0, 256, (2, 17))
    assert module.model is not None
    logits = module.model(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 256).float(), ids[:, 1:].reshape(-1))
    torch.testing.assert_close(module(ids), expected)


def test_validation_is_a_class_of_its_own(tmp_path: Path) -> None:
    assert type(make_module(recipe_of(tmp_path))) is BenchModule
    assert type(make_module(recipe_of(tmp_path, "trainer.val_every=1"))) is ValidatedModule


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device(recipe_of(tmp_path, "trainer.accelerator=auto")) == "cpu"
    with pytest.raises(UserError, match=r"trainer\.accelerator: gpu was asked for, but torch .*write trainer\.accelerator=cpu"):
        check_device(recipe_of(tmp_path, "trainer.accelerator=gpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check_device(recipe_of(tmp_path, "trainer.accelerator=auto")) == "gpu"
    assert check_device(recipe_of(tmp_path)) == "cpu"
