"""Starts scripts that run on several processes, and ends all of them if they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ACCELERATOR_VARIABLE", "Done", "launch", "left_behind", "torchrun"]

ACCELERATOR_VARIABLE = "DDP_TESTS_ACCELERATOR"
"""Tells the started processes what `launch` was told: `cpu` (gloo connects them) or `gpu` (NCCL)."""


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    seconds: float
    ended: float
    """By `time.monotonic()`, which is one clock for all processes."""
    pid: int
    """Of the first process, which names the session of all of them."""


def launch(*words: str | Path, cwd: Path, timeout: float = 120.0, accelerator: str = "cpu") -> Done:
    """Run `python WORDS` in a process group of its own; a run that takes longer is killed with its children and fails the test.

    The environment is passed on, without what names a rank. On a GPU cuBLAS sums in a fixed order, and tables, which have more columns
    there, are not wrapped.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT")}
    clean[ACCELERATOR_VARIABLE] = accelerator
    if accelerator == "gpu":
        clean |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "COLUMNS": "200"}
    started = time.monotonic()
    with (cwd / "output.txt").open("w+b") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=cwd, env=clean, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(f"no end within {timeout} s:\n{(cwd / 'output.txt').read_text(errors='replace')[-6000:]}") from None
    ended = time.monotonic()
    return Done(code, (cwd / "output.txt").read_text(errors="replace"), ended - started, ended, process.pid)


def torchrun(*words: str | Path, **options: Any) -> Done:
    """As `launch`, with torchrun starting two processes; `words` begin with `-m MODULE` or a script."""
    return launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words, **options)


def left_behind(pid: int, wait_s: float = 15.0) -> list[int]:
    """Processes that are still in the session of `pid` after up to `wait_s`."""
    deadline = time.monotonic() + wait_s
    while (found := _session_members(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _session_members(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"  # only waits to be collected, by nobody perhaps
            if not ended and os.getsid(int(entry.name)) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found
