"""Settings for every test: offline, one thread per worker, fixed seeds, own working directory; GPU tests skipped with the reason."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch, transformers or wandb is imported by any test module; subprocesses started by tests inherit all of it.
os.environ["OMP_NUM_THREADS"] = "1"  # workers share two cores; more threads than cores make every test slower, and times vary
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is a mistake, and should say so at once
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["MPLBACKEND"] = "Agg"
ROOT = Path(__file__).resolve().parent.parent
# Absolute, because tests run in their own directory: subprocesses find the package also where it is not installed (make test-gpu).
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)])

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """`--require-gpu`; and pytest-timeout's setting where that plugin is not installed (a GPU machine with nothing but pytest)."""
    parser.addoption("--require-gpu", action="store_true", help="a missing GPU is an error instead of a skip")
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "read by pytest-timeout; has no effect without it")


def _missing_gpu() -> str | None:
    """Why GPU tests cannot run here, or None."""
    if torch.cuda.is_available():
        return None
    return f"no CUDA device (torch {torch.__version__}, built for {torch.version.cuda or 'CPU only'}); on a GPU machine: make test-gpu"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything under tests/gpu is a GPU test; skip those with the reason, or refuse to run without a GPU if one was required."""
    gpu_folder = ROOT / "tests" / "gpu"
    for item in items:
        if gpu_folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)
    reason = _missing_gpu()
    if reason is None:
        return
    if config.getoption("--require-gpu"):
        raise pytest.UsageError(f"--require-gpu: {reason}")
    skip = pytest.mark.skip(reason=reason)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python's garbage collector is off: what dies in the test dies by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own working directory (loggers and runs write relative paths there), and the same random numbers whatever ran before."""
    monkeypatch.chdir(tmp_path)
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  (libraries under test use the global generator)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Top of the source tree."""
    return ROOT


@pytest.fixture(scope="module")
def bench(repo_root: Path) -> Iterator[Callable[[str], Any]]:
    """Imports a script of benchmarks/ by its name, as the scripts import each other."""
    folder = repo_root / "benchmarks"
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)
