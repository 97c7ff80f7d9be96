"""Bits and memory of every optimizer step of one arm, for comparison with the same steps of another process."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fingerprints import Fingerprint, sha256_of, state_of
from offload_trainees import allocated, hexes, in_force, optimizer_step, settled, synchronize
from torch import Tensor, nn

from lightning_gdn.bench.parity_rig import KernelSetting


def probe(trainee: Any, setting: KernelSetting | None) -> None:
    """One forward and backward whose gradients are dropped: operations without a deterministic kernel show here, and not in the first step."""
    while True:
        try:
            trainee.forward(0).backward()
        except RuntimeError as error:
            if setting is None or not setting.relax(error):
                raise
            trainee.model.zero_grad(set_to_none=True)
            continue
        break
    trainee.model.zero_grad(set_to_none=True)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def grad_norm(model: nn.Module) -> Tensor:
    """Of all gradients together, in float32."""
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in model.parameters() if p.grad is not None])
    )


class Trace:
    """Bits and memory after every step, one line of JSON each."""

    def __init__(self, trainee: Any, spec: Mapping[str, Any]) -> None:
        self.trainee, self.spec = trainee, spec
        self.fingerprint = Fingerprint(spec["device"])

    def bits(self, step: int, *, whole: bool) -> dict[str, Any]:
        """Fingerprints of weights and optimizer state; with `whole` their SHA-256 too."""
        model, optimizer = self.trainee.model, self.trainee.optimizer
        row = {"step": step, "weights": self.fingerprint.of(model.parameters()), "optimizer": self.fingerprint.of(state_of(model, optimizer))}
        if whole:
            row |= {"weights_sha256": sha256_of(model.parameters()), "optimizer_sha256": sha256_of(state_of(model, optimizer))}
        return row

    def step(self, step: int, applied: Any) -> dict[str, Any]:
        """Optimizer step `step`, counted from 1."""
        device, norm = self.spec["device"], list[Tensor]()
        synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        losses = hexes(optimizer_step(self.trainee, step - 1, ended=lambda: norm.append(grad_norm(self.trainee.model))))
        row: dict[str, Any] = {"losses": losses, "grad_norm": hexes(norm)[0]}
        norm.clear()
        synchronize(device)
        if device == "cuda":
            now, peak = allocated(device)
            row |= {"allocated": now, "peak": peak, "reserved": torch.cuda.memory_reserved()}
        told = applied.step_statistics()
        if told is not None:
            row |= {"pinned": told.pinned_held, "buffers_in_use": told.buffers_in_use + bool(told.pinned_in_use), "settled": settled(applied)}
            row |= {name: getattr(told, name) for name in ("bytes_out", "bytes_in", "late", "fallbacks", "fraction")}
        return {**self.bits(step, whole=step in self.spec["whole"]), **row}

    def run(self, lines: Any) -> dict[str, Any]:
        """Steps from where the weights come from to `steps`, or until the deadline; weights and optimizer are saved if asked for."""
        spec, first, took = self.spec, 0, 0.0
        if spec.get("load"):
            first = self._load(Path(spec["load"]))
        write_line(lines, self.bits(first, whole=True))
        done = first
        with in_force(self.trainee.model, spec["arm"], spec["kernels"], spec["options"]) as applied:
            for step in range(first + 1, spec["steps"] + 1):
                start = time.time()
                if start + took > spec["deadline"]:
                    break
                write_line(lines, self.step(step, applied))
                done, took = step, time.time() - start
        if spec.get("save"):
            torch.save({"model": self.trainee.model.state_dict(), "optimizer": self.trainee.optimizer.state_dict(), "next": done}, spec["save"])
        return {"steps_done": done, "stopped": done < spec["steps"], "plan": str(applied.plan), "kernels": dict(applied.kernels)}

    def _load(self, path: Path) -> int:
        saved = torch.load(path, map_location=self.spec["device"], weights_only=True)
        self.trainee.model.load_state_dict(saved["model"])
        self.trainee.optimizer.load_state_dict(saved["optimizer"])
        return int(saved["next"])


def write_line(lines: Any, row: Mapping[str, Any]) -> None:
    """At once: a process that is killed leaves what it had."""
    lines.write(json.dumps(row) + "\n")
    lines.flush()
