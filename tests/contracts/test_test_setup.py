"""The ground the other tests stand on: the shared model, and the settings of conftest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models import TINY_LAYER_TYPES, tiny_batch, tiny_qwen3_5


def test_the_tiny_model_has_the_documented_shape() -> None:
    model = tiny_qwen3_5()
    mixer = model.model.layers[0].linear_attn
    assert (mixer.key_dim, mixer.value_dim, mixer.conv_dim) == (32, 64, 128)
    assert tuple(model.config.layer_types) == TINY_LAYER_TYPES
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.training
    assert model.config.use_cache is False
    assert tiny_qwen3_5(num_hidden_layers=6).config.layer_types[-2:] == ["linear_attention", "linear_attention"]
    assert tiny_qwen3_5(dtype=torch.bfloat16).lm_head.weight.dtype is torch.bfloat16


def test_the_seed_decides_every_weight_and_nothing_else() -> None:
    torch.manual_seed(7)
    first = tiny_qwen3_5(seed=3)
    torch.rand(5)
    again, other = tiny_qwen3_5(seed=3), tiny_qwen3_5(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    torch.manual_seed(7)
    expected = torch.rand(8)[5:]
    torch.manual_seed(7)
    tiny_qwen3_5()
    torch.rand(5)
    assert torch.equal(torch.rand(3), expected), "building the model moved the global RNG"


def test_no_vector_parameter_is_constant() -> None:
    vectors = {name: p for name, p in tiny_qwen3_5().named_parameters() if p.dim() == 1}
    assert {name.split(".")[-2] for name in vectors} >= {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"}
    assert [name for name, p in vectors.items() if p.unique().numel() < p.numel()] == []


def test_every_parameter_gets_a_gradient_also_with_padding() -> None:
    model = tiny_qwen3_5()
    batch = tiny_batch(pad=5)
    assert batch["attention_mask"].sum().item() == 2 * 96 - 5
    assert (batch["labels"] == -100).sum().item() == 5
    model(**batch).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
    with pytest.raises(ValueError, match=r"pad must lie in 0\.\.95"):
        tiny_batch(pad=96)


def test_a_test_runs_offline_in_its_own_folder_with_one_thread(tmp_path: Path, repo_root: Path) -> None:
    assert Path.cwd() == tmp_path
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["WANDB_MODE"], torch.get_num_threads()) == ("1", "offline", 1)
    code = "import lightning_gdn, torch; print(lightning_gdn.__file__, torch.get_num_threads())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split() == [str(repo_root / "lightning_gdn" / "__init__.py"), "1"]


def _collect(repo_root: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one GPU-marked and one plain test under the project's conftest, on a machine that seems to have no GPU."""
    (folder / "conftest.py").write_text("from tests.conftest import *\nfrom tests.conftest import _isolated\n", encoding="utf-8")
    (folder / "test_two.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_gpu(): assert False\ndef test_cpu(): pass\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(repo_root / "pyproject.toml"), "-p", "no:cacheprovider", "-rs", *options, str(folder)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_without_a_gpu_its_tests_are_skipped_with_the_reason(repo_root: Path, tmp_path: Path) -> None:
    done = _collect(repo_root, tmp_path)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    assert "make test-gpu" in done.stdout


def test_a_required_gpu_that_is_missing_is_an_error(repo_root: Path, tmp_path: Path) -> None:
    done = _collect(repo_root, tmp_path, "--require-gpu")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--require-gpu: no CUDA device" in done.stderr


@pytest.mark.parametrize("plugins", [(), ("-p", "no:timeout", "-p", "no:xdist")], ids=["all plugins", "pytest alone"])
def test_the_settings_hold_also_where_only_pytest_is_installed(plugins: tuple[str, ...], repo_root: Path, tmp_path: Path) -> None:
    done = _collect(repo_root, tmp_path, *plugins)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout.lower()
