"""Qwen3.5-0.8B, random weights, AdamW, FLA's fused linear cross entropy: stock and fused kernels as separate rows, labels under each.

    python benchmarks/whole_model.py --seq 16384 --out record.json       # one CUDA GPU with flash-linear-attention
    python benchmarks/whole_model.py --seq 16384 --arms "" --losses 100 --out record.json

One model in one process; arms alternate over rounds. `--losses N` also trains N steps from the same weights on the same text with stock
kernels (three times: its own run-to-run band) and with fused ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from fla.modules import FusedLinearCrossEntropyLoss
from gdn_stack import MIB, spread, versions
from torch import Tensor, nn

from lightning_gdn import apply_plan
from lightning_gdn.bench.data import make_loaders, read_text
from lightning_gdn.bench.module import build_model
from lightning_gdn.bench.recipes import load

ARMS = "stock:none,fused:none,fused:hf_gradient_checkpointing,fused:gdn_norm_out,fused:gdn_conv+gdn_norm_out+layernorm,fused:full"


class Trainee:
    """Model, optimizer and loss."""

    def __init__(self, seq: int) -> None:
        self.recipe = load("qwen3_5_0_8b", [f"data.seq_len={seq}", "trainer.accumulate_grad_batches=1"]).recipe
        with torch.device("cuda"):
            self.model: Any = build_model(self.recipe).train()
        self.loss = FusedLinearCrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        train, _ = make_loaders(read_text(self.recipe.data), self.recipe)
        self.batches = [batch.cuda() for _, batch in zip(range(8), train, strict=False)]

    def step(self, index: int) -> Tensor:
        """One optimizer step on one sequence."""
        ids = self.batches[index % len(self.batches)]
        hidden = self.model.model(input_ids=ids).last_hidden_state
        loss = self.loss(hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1), self.model.lm_head.weight)
        del hidden
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure(trainee: Trainee, arm: str, warm: int, count: int) -> dict[str, float]:
    """Median step time and allocated peak of one round."""
    kernels, _, label = arm.partition(":")
    hf = label == "hf_gradient_checkpointing"
    if hf:
        trainee.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with apply_plan(trainee.model, "none" if hf else label, kernels=kernels):
        for index in range(warm):
            trainee.step(index)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for index in range(count):
            start = time.perf_counter()
            trainee.step(index)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    if hf:
        trainee.model.gradient_checkpointing_disable()
    return {"ms": statistics.median(times), "peak_mib": torch.cuda.max_memory_allocated() / MIB}


def trajectory(trainee: Trainee, kernels: str, start: dict[str, Tensor], count: int) -> list[float]:
    """Losses of `count` steps from the same weights and a fresh optimizer."""
    trainee.model.load_state_dict(start)
    trainee.optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=1e-4, fused=True)
    with apply_plan(trainee.model, [], kernels=kernels):
        return [float(x) for x in [trainee.step(index) for index in range(count)]]


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trainee = Trainee(args.seq)
    start = {name: tensor.clone() for name, tensor in trainee.model.state_dict().items()} if args.losses else {}
    arms = [arm for arm in args.arms.split(",") if arm]
    rounds: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for index in range(args.rounds):
        for arm in arms if index % 2 == 0 else arms[::-1]:
            torch.cuda.empty_cache()
            rounds[arm].append(measure(trainee, arm, args.warm, args.steps))
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/whole_model.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions()},
        "parameters": sum(p.numel() for p in trainee.model.parameters() if isinstance(p, nn.Parameter)),
        "arms": {},
    }
    for arm in arms:
        entry = {key: spread([row[key] for row in rounds[arm]]) for key in ("ms", "peak_mib")}
        record["arms"][arm] = entry
        ms, peak = entry["ms"], entry["peak_mib"]
        print(f"{arm:44s} {ms['median']:8.1f} ms [{ms['min']:.1f}, {ms['max']:.1f}]  peak {peak['median']:9.1f} MiB")
    if args.losses:
        stock = [trajectory(trainee, "stock", start, args.losses) for _ in range(3)]
        fused = trajectory(trainee, "fused", start, args.losses)
        band = [max(row) - min(row) for row in zip(*stock, strict=True)]
        off = [max(0.0, min(row) - x, x - max(row)) for row, x in zip(zip(*stock, strict=True), fused, strict=True)]
        record["losses"] = {"stock": [[round(x, 5) for x in run] for run in stock], "fused": [round(x, 5) for x in fused]}
        record["loss_summary"] = {"widest_stock_band": max(band), "fused_outside_by_at_most": max(off), "steps_outside": sum(x > 0 for x in off)}
        print(f"losses of stock: {stock[0][0]:.3f} -> {stock[0][-1]:.3f}; fused: {fused[0]:.3f} -> {fused[-1]:.3f}")
        outside = record["loss_summary"]["steps_outside"]
        print(f"stock's own band up to {max(band):.4f}; fused outside it by at most {max(off):.4f}, in {outside} steps")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
