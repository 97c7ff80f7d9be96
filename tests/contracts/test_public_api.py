"""The names that users import. Adding one is a decision; losing one breaks someone."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PUBLIC = {"GDNRecomputeStrategy", "apply_plan", "instrument", "OffloadConfig", "Plan", "in_replay", "__version__"}


def test_the_public_names_are_these() -> None:
    import lightning_gdn

    assert sorted(lightning_gdn.__all__) == sorted(PUBLIC)
    assert set(dir(lightning_gdn)) >= PUBLIC


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("GDNRecomputeStrategy", "lightning_gdn.strategies"),
        ("apply_plan", "lightning_gdn.apply"),
        ("instrument", "lightning_gdn.apply"),
        ("Plan", "lightning_gdn.plan"),
        ("OffloadConfig", "lightning_gdn.offload_config"),
    ],
)
def test_a_lazy_name_is_the_object_of_its_home(name: str, home: str) -> None:
    import lightning_gdn

    assert getattr(lightning_gdn, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import lightning_gdn

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lightning_gdn.no_such_name
    with pytest.raises(ImportError, match="apply_plans"):
        exec("from lightning_gdn import apply_plans")


def test_star_import_gives_the_public_names() -> None:
    space: dict[str, object] = {}
    exec("from lightning_gdn import *", space)
    assert set(space) - {"__builtins__"} == PUBLIC


def test_the_version_is_that_of_the_project_file(repo_root: Path) -> None:
    import lightning_gdn

    assert lightning_gdn.__version__ == tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_callbacks_are_these() -> None:
    callbacks = importlib.import_module("lightning_gdn.callbacks")
    assert callbacks.__all__ == ["MemoryMonitor"]
    assert callbacks.MemoryMonitor.__module__.startswith("lightning_gdn.callbacks")


def test_the_registered_strategy_name_needs_only_the_import(tmp_path: Path) -> None:
    code = (
        "import lightning_gdn\n"
        "from lightning.pytorch import Trainer\n"
        "trainer = Trainer(strategy='gdn', accelerator='cpu', devices=1, logger=False, enable_checkpointing=False)\n"
        "print(type(trainer.strategy).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "GDNRecomputeStrategy"
