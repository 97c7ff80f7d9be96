"""Who imports whom: by the syntax trees and, for what a walk cannot see, by importing in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.import_rules import FORBIDDEN_EVERYWHERE, breaches, imports, module_files

LIGHT = ("torch", "transformers", "fla", "lightning", "wandb", "matplotlib", "numpy")
LOADS_NOT: dict[str, tuple[str, ...]] = {
    "lightning_gdn": LIGHT,
    "lightning_gdn.regions": LIGHT,
    "lightning_gdn.labels": LIGHT,
    "lightning_gdn.plan": LIGHT,
    "lightning_gdn.tape": ("transformers", "fla", "lightning", "wandb"),
    "lightning_gdn.replay": ("transformers", "fla", "lightning", "wandb"),
    "lightning_gdn.ledger": ("transformers", "fla", "lightning", "wandb"),
    "lightning_gdn.apply": ("lightning", "wandb", "lightning_gdn.strategies", "lightning_gdn.callbacks"),
    "lightning_gdn.strategies": ("wandb", "lightning_gdn.callbacks", "lightning_gdn.bench"),
    "lightning_gdn.callbacks": ("wandb", "lightning_gdn.bench"),  # not strategies: loading Lightning registers the strategy names
    "lightning_gdn.cli": ("wandb",),
}
"""Module -> packages that importing it must not load. (Lightning itself loads transformers through torchmetrics, never wandb.)"""


def loaded_by(statement: str, candidates: tuple[str, ...], cwd: Path) -> set[str]:
    """Those of `candidates` that a fresh interpreter has in `sys.modules` after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([name for name in {candidates!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"`{statement}` failed:\n{done.stderr}"
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_no_module_breaks_the_direction_of_imports(repo_root: Path) -> None:
    assert breaches(repo_root) == []


def test_the_walk_sees_the_symlinked_folders(repo_root: Path) -> None:
    names = module_files(repo_root)
    assert {"lightning_gdn.labels", "lightning_gdn.callbacks", "lightning_gdn.recipes"} <= set(names)


@pytest.mark.parametrize("module", LOADS_NOT)
def test_importing_a_module_does_not_load(module: str, tmp_path: Path) -> None:
    assert loaded_by(f"import {module}", LOADS_NOT[module], tmp_path) == set()


def test_tests_and_notebooks_keep_to_the_names(repo_root: Path) -> None:
    found = []
    sources = {path: path.read_text(encoding="utf-8") for path in (repo_root / "tests").rglob("*.py")}
    for path in (repo_root / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        sources[path] = "\n".join(line for cell in code for line in cell.splitlines() if not line.lstrip().startswith(("%", "!")))
    assert repo_root / "tests" / "models.py" in sources
    for path, source in sources.items():
        for item in imports(source, "tests.x"):
            if item.target.split(".")[0] in FORBIDDEN_EVERYWHERE:
                found.append(f"{path.relative_to(repo_root)}:{item.line}: {item.target}")
    assert found == []


BREACHES: dict[str, tuple[str, str, str]] = {
    "upwards": ("labels.py", "from .apply import apply_plan", "labels imports apply, which stands above it"),
    "upwards in a function": ("tape.py", "def f():\n    from lightning_gdn import adapters", "tape imports adapters, which stands above it"),
    "upwards for types only": (
        "plan.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightning_gdn.tape import Tape",
        "plan imports tape, which stands above it",
    ),
    "upwards by import_module": ("ledger.py", "import importlib\nimportlib.import_module('.apply', __package__)", "ledger imports apply"),
    "strangers": ("strategies.py", "from .callbacks import MemoryMonitor", "strategies imports callbacks; these two do not know each other"),
    "strangers, from the other side": ("callbacks/monitor.py", "from ..strategies import X", "callbacks imports strategies; these two"),
    "facade": ("bench/runner.py", "from lightning_gdn import apply_plan", "from the facade"),
    "facade as a whole": ("bench/runner.py", "import lightning_gdn", "from the facade"),
    "torch": ("plan.py", "import torch.nn as nn", "imports torch; allowed in"),
    "torch in the facade": ("__init__.py", "import torch", "imports torch; allowed in"),
    "transformers": ("apply.py", "from transformers import AutoConfig", "imports transformers; allowed in"),
    "fla": ("tape.py", "import fla.ops", "imports fla; allowed in"),
    "lightning below the strategy": ("apply.py", "import lightning.pytorch as pl", "imports lightning; allowed in"),
    "wandb": ("bench/runner.py", "def f():\n    import wandb", "imports wandb; allowed in: bench.wandb_sink"),
    "wandb by import_module": ("bench/runner.py", "import importlib\nimportlib.import_module('wandb')", "imports wandb"),
    "pytorch_lightning": ("strategies.py", "from pytorch_lightning import Trainer", "imports pytorch_lightning; allowed in: no module"),
    "bare callbacks": ("bench/runner.py", "from callbacks import MemoryMonitor", "imports callbacks; allowed in: no module"),
    "bare recipes": ("cli.py", "import recipes", "imports recipes; allowed in: no module"),
    "a unit without a level": ("helpers.py", "", "lightning_gdn.helpers: not in LEVELS"),
}
"""What must be found: file, its content, a part of the message."""

CLEAN = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .apply import apply_plan\n__version__ = '0'",
    "regions.py": "import enum",
    "labels.py": "from .regions import Mode",
    "plan.py": "from lightning_gdn.labels import LABELS",
    "tape.py": "import torch\nfrom . import regions",
    "ledger.py": "from .tape import Tape",
    "adapters/__init__.py": "from .qwen import Q\nfrom ..tape import Tape",
    "adapters/qwen.py": "import transformers, fla\nfrom . import Base",
    "apply.py": "from .adapters import Q\nfrom lightning_gdn import __version__",
    "strategies.py": "import lightning.pytorch as pl\nfrom .apply import apply_plan",
    "callbacks/__init__.py": "from .monitor import MemoryMonitor",
    "callbacks/monitor.py": "import torchmetrics\nfrom ..ledger import Ledger",
    "bench/__init__.py": "from ..strategies import S\nfrom lightning_gdn.callbacks import MemoryMonitor",
    "bench/wandb_sink.py": "import wandb",
    "bench/module.py": "import transformers",
    "bench/runner.py": "from importlib import resources\nresources.files('lightning_gdn.recipes')",
    "cli.py": "from .bench import run",
}


def _package(root: Path, extra: dict[str, str]) -> Path:
    for name, source in {**CLEAN, **extra}.items():
        path = root / "lightning_gdn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


def test_meta_a_clean_package_has_no_breach(tmp_path: Path) -> None:
    assert breaches(_package(tmp_path, {})) == []


@pytest.mark.parametrize("case", BREACHES)
def test_meta_each_breach_is_found(case: str, tmp_path: Path) -> None:
    name, source, message = BREACHES[case]
    found = breaches(_package(tmp_path, {name: source}))
    assert len(found) == 1, found
    assert message in found[0]
    assert found[0].startswith("lightning_gdn")


def test_meta_the_subprocess_check_can_fail(tmp_path: Path) -> None:
    assert loaded_by("import lightning_gdn.labels, wave", ("wave", "torch"), tmp_path) == {"wave"}
    assert "torch" in loaded_by("import torch", LIGHT, tmp_path)
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        loaded_by("import lightning_gdn.no_such_module", LIGHT, tmp_path)
