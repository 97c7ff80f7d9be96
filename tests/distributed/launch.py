"""Starts scripts that run on several processes, and ends all of them if they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Done", "launch", "session_members", "torchrun"]


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    seconds: float
    pid: int
    """Of the first process, which names the session of all of them."""


def launch(*words: str | Path, cwd: Path, timeout: float = 120.0) -> Done:
    """Run `python WORDS` in a process group of its own; a run that takes longer is killed with its children and fails the test."""
    clean = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT")}
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
    seconds = time.monotonic() - started
    return Done(code, (cwd / "output.txt").read_text(errors="replace"), seconds, process.pid)


def torchrun(*words: str | Path, cwd: Path, timeout: float = 120.0) -> Done:
    """As `launch`, with torchrun starting two processes; `words` begin with `-m MODULE` or a script."""
    return launch("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words, cwd=cwd, timeout=timeout)


def session_members(pid: int) -> list[int]:
    """Processes that are still in the session of `pid`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found
