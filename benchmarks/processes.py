"""Processes of `offload_worker.py`: started with a specification, told when the GPU is theirs, their result read back."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_gdn.bench.records import slug

WORKER = Path(__file__).resolve().parent / "offload_worker.py"
GRACE = 90.0
"""Seconds that a process may run past the deadline: it ends by itself after a step, but starting and hashing take a while."""

__all__ = ["Child", "environment", "kill_all", "tune", "visible_gpus"]


def environment(gpu: str | None = None) -> dict[str, str]:
    """The caller's, offline, with every autotuner's results cached on disk (in TRITON_CACHE_DIR), this package on the path, and this GPU."""
    home = str(WORKER.parent.parent)
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1"}
    found["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    return found if gpu is None else {**found, "CUDA_VISIBLE_DEVICES": gpu}


def visible_gpus(device: str) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES may be set to, one each; `[None]` on a CPU."""
    if device != "cuda":
        return [None]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())] or [None]


class Child:
    """One process.

    Args:
        name: of its files in `folder`.
        spec: what `offload_worker.run` takes; `out` and `rows` are added. With `wait` it says READY and touches the GPU only after `go`; a
            timed run says WARM before what is measured and waits for `go` again.
        command: what is run in place of the worker, for tests.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], folder: Path, env: Mapping[str, str], *, command: Sequence[str] | None = None) -> None:
        self.name, stem = name, slug(name)
        self.out, self.rows_path, self.log = (folder / f"{stem}{suffix}" for suffix in (".json", ".jsonl", ".log"))
        self.spec = {**spec, "out": str(self.out), "rows": str(self.rows_path)}
        spec_path = folder / f"{stem}.spec.json"
        spec_path.write_text(json.dumps(self.spec), encoding="utf-8")
        self.started = time.monotonic()
        self.ended: float | None = None
        self.killed, self._heard = False, b""
        waits = bool(spec.get("wait"))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*(command or (sys.executable, str(WORKER))), str(spec_path)],
                stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
                stdout=subprocess.PIPE if waits else log,
                stderr=log,
                env=dict(env),
            )

    def said(self, word: str, timeout: float) -> bool:
        """Wait until it has said this, on a line of its own. False: it ended, or did not say it for so long and was ended."""
        out, until, line = self.process.stdout, time.monotonic() + timeout, f"{word}\n".encode()
        assert out is not None
        while line not in self._heard:
            if out.closed:
                return False
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                self.kill()
                return False
            got = os.read(out.fileno(), 4096)
            if not got:
                self.wait(5)
                return False
            self._heard += got
        return True

    def go(self) -> None:
        """What it waits for may begin."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; its result says so
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()

    def done(self) -> bool:
        """Whether it has ended."""
        if self.process.poll() is None:
            return False
        self.ended = self.ended or time.monotonic()
        return True

    def wait(self, timeout: float | None) -> None:
        """Until it ends; after `timeout` seconds it is ended."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.killed = True
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._close()

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what `go` wrote to a process that has died
                    pipe.close()

    def result(self) -> dict[str, Any]:
        """What it wrote; else `status` and `error`."""
        if self.process.returncode == 0 and self.out.exists():
            return json.loads(self.out.read_text(encoding="utf-8"))
        if self.killed:
            return {"status": "out of time", "error": "ended at the deadline"}
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        out_of_memory = any("OutOfMemoryError" in line for line in lines[-40:])
        return {"status": "oom" if out_of_memory else "failed", "error": f"exit code {self.process.returncode}: {last[:300]}"}

    def rows(self) -> list[dict[str, Any]]:
        """Lines of a trace, as far as they are whole."""
        if not self.rows_path.exists():
            return []
        return [json.loads(line) for line in self.rows_path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]


def tune(spec: Mapping[str, Any], arms: Sequence[str], folder: Path, env: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """A process that leaves the tuning results of the control and these arms on disk, ended after `seconds` (infinity: never). Its result."""
    child = Child("tune", {**spec, "job": "tune", "arms": list(arms)}, folder, env)
    try:
        child.wait(None if math.isinf(seconds) else seconds)
    finally:
        child.kill()
    result = child.result()
    print(f"  tuning: {result['status']}, {time.monotonic() - child.started:.0f} s", file=sys.stderr, flush=True)
    return result


def kill_all(children: Sequence[Child]) -> None:
    """No process outlives its parent."""
    for child in children:
        child.kill()
