"""Where a measurement was taken: enough to tell whether two records may be compared. The host's name is not recorded."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__

__all__ = ["autotune_hash", "collect", "git_state"]

PACKAGES = ("torch", "lightning", "transformers", "flash-linear-attention", "fla-core", "causal-conv1d", "triton", "torchmetrics")
SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "FLA_TILELANG",
    "TRITON_CACHE_AUTOTUNING",
)
"""Environment variables that change memory or kernels; none of them is a secret."""


def collect(device: str) -> dict[str, Any]:
    """Describe the machine and the software; `device` is `"cpu"` or `"gpu"`."""
    import torch

    gpu = device == "gpu"
    revision, dirty = git_state()
    return {
        "python": platform.python_version(),
        "packages": {"lightning-gdn": __version__, **{name: _version(name) for name in PACKAGES}},
        "cuda": torch.version.cuda if gpu else None,
        "device": torch.cuda.get_device_name(0) if gpu else "cpu",
        "driver": _driver() if gpu else None,
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "platform": f"{platform.system()} {platform.machine()}",
        "git_revision": revision,
        "git_dirty": dirty,
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "autotune_cache": autotune_hash(),
    }


def git_state() -> tuple[str | None, bool | None]:
    """Revision of the checkout in the current folder and whether tracked files were changed.

    Outside a checkout (a container, a copied tree) the variable `GIT_REVISION` tells the revision, and nothing tells changes.
    """
    revision = _output("git", "rev-parse", "HEAD")
    if revision is None:
        return os.environ.get("GIT_REVISION") or None, None
    return revision, bool(_output("git", "status", "--porcelain", "--untracked-files=no"))


def autotune_hash() -> str | None:
    """SHA-256 over Triton's saved tuning results, so that two runs can be seen to use equal kernel configurations.

    `None` if there are none (then every process tunes for itself).
    """
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    files = sorted(folder.rglob("*.autotune.json")) if folder.is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or None)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
