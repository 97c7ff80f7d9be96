"""A recipe's model, random weights, AdamW, FLA's fused linear cross entropy: stock and fused kernels apart, labels and rivals under each.

    python benchmarks/whole_model.py --seq 16384 --out record.json       # one CUDA GPU with flash-linear-attention
    python benchmarks/whole_model.py --seq 4096 --micro-batches 4 --out record.json
    python benchmarks/whole_model.py --recipe qwen3_5_4b --seq 8192 --arms fused:none,fused:gdn_norm_out,fused:checkpoint:sweep --out record.json
    python benchmarks/whole_model.py --seq 16384 --arms "" --losses 100 --out record.json

One model in one process; arms alternate over rounds. `--losses N` also trains N steps from the same weights on the same text with stock
kernels (`--loss-runs` times: their own spread) and with fused ones.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fla.modules import FusedLinearCrossEntropyLoss
from rounds import CONTROL, MIB, against_own_spread, alternate, arms_of, header, in_turns, judge, print_table, spread, twin, under, write
from torch import Tensor

from lightning_gdn.bench.data import make_loaders, read_text
from lightning_gdn.bench.module import build_model
from lightning_gdn.bench.recipes import load
from lightning_gdn.kernels import KERNELS

ARMS = (
    "stock:none,stock:gdn_norm_out,stock:gdn_conv+gdn_norm_out+layernorm,stock:full,stock:checkpoint:full,"
    "fused:none,fused:gdn_norm_out,fused:gdn_conv+gdn_norm_out+layernorm,fused:full,fused:checkpoint:sweep,fused:hf_gradient_checkpointing"
)
"""Kernels setting and arm. Deltas are against `none` of the same setting; the settings themselves are compared in `fused_over_stock`."""


class Trainee:
    """Model, optimizer and loss."""

    def __init__(self, recipe: str, seq: int, micro_batches: int, more: Sequence[str]) -> None:
        overrides = [f"data.seq_len={seq}", f"trainer.accumulate_grad_batches={micro_batches}", *more]
        self.recipe = load(recipe, overrides).recipe
        with torch.device("cuda"):
            self.model: Any = build_model(self.recipe).train()
        self.loss = FusedLinearCrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.micro_batches = micro_batches
        train, _ = make_loaders(read_text(self.recipe.data), self.recipe)
        self.batches = [batch.cuda() for _, batch in zip(range(8), train, strict=False)]
        self._next = 0

    def step(self, model: Any = None) -> Tensor:
        """One optimizer step, of a twin if one is given; the loss of its last micro-batch."""
        model = model or self.model
        for _ in range(self.micro_batches):
            ids = self.batches[self._next % len(self.batches)]
            self._next += 1
            hidden = model.model(input_ids=ids).last_hidden_state
            loss = self.loss(hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1), model.lm_head.weight)
            del hidden
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def timed(step: Callable[[], object]) -> dict[str, float]:
    """Time and allocated peak of one step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return {"ms": (time.perf_counter() - start) * 1e3, "peak_mib": torch.cuda.max_memory_allocated() / MIB}


def measure(trainee: Trainee, kernels: str, arm: str, warm: int, count: int) -> dict[str, float]:
    """Median step time and allocated peak of one round."""
    with under(trainee.model, arm, kernels):
        for _ in range(warm):
            trainee.step()
        rows = [timed(trainee.step) for _ in range(count)]
    return {"ms": statistics.median(row["ms"] for row in rows), "peak_mib": max(row["peak_mib"] for row in rows)}


def measure_pair(trainee: Trainee, pair: tuple[str, str], arm: str, warm: int, turns: int) -> dict[str, dict[str, Any]]:
    """An arm and its control in turns of one step, in one round."""
    kernels, name = arm.split(":", 1)
    other = twin(trainee.model)
    with under(trainee.model, CONTROL, kernels), under(other, name, kernels):
        return in_turns(pair, lambda which: timed(lambda: trainee.step(other if which == arm else None)), turns, warm)


def trajectory(trainee: Trainee, kernels: str, start: dict[str, Tensor], count: int) -> list[float]:
    """Losses of `count` steps from the same weights and a fresh optimizer."""
    trainee.model.load_state_dict(start)
    trainee.optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=1e-4, fused=True)
    trainee._next = 0
    with under(trainee.model, CONTROL, kernels):
        return [float(x) for x in [trainee.step() for _ in range(count)]]


def of(arms: str, kernels: str) -> list[str]:
    """The arms of one kernels setting."""
    return [arm.split(":", 1)[1] for arm in arms.split(",") if arm.startswith(f"{kernels}:")]


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--loss-runs", type=int, default=3, help="stock runs of --losses")
    parser.add_argument("--beside", action="store_true", help="the control once more beside every arm, in turns of one step: where the host decides")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipe", default="qwen3_5_0_8b")
    parser.add_argument("overrides", nargs="*", help="of the recipe's model, for instance model.num_hidden_layers=12")
    args = parser.parse_intermixed_args()
    trainee = Trainee(args.recipe, args.seq, args.micro_batches, args.overrides)
    start = {name: tensor.clone() for name, tensor in trainee.model.state_dict().items()} if args.losses else {}
    blocks = trainee.recipe.model.num_hidden_layers
    settings = {kernels: arms_of(",".join(of(args.arms, kernels)), blocks) for kernels in KERNELS}
    arms = [f"{kernels}:{arm}" for kernels, found in settings.items() for arm in found]

    def one(arm: str, _: int) -> dict[str, Any]:
        return measure(trainee, *arm.split(":", 1), args.warm, args.steps)

    for kernels, found in settings.items():
        if found:  # compiles and tunes, which is no round's time
            measure(trainee, kernels, CONTROL, 1, 1)

    def control_of(arm: str) -> str:
        return f"{arm.split(':', 1)[0]}:{CONTROL}"

    def pair_in_turns(pair: tuple[str, str], _: int) -> dict[str, dict[str, Any]]:
        arm = next(one for one in pair if one != control_of(one))
        return measure_pair(trainee, pair, arm, args.warm, args.steps)

    beside: dict[str, Any] = {"control_of": control_of, "side_by_side": pair_in_turns} if args.beside else {}
    rounds = alternate(arms, args.rounds, one, seconds=args.seconds, **beside)
    record: dict[str, Any] = {**header("whole_model.py"), "parameters": sum(p.numel() for p in trainee.model.parameters()), "settings": {}}
    for kernels, found in settings.items():
        if CONTROL not in found:
            continue
        judged = judge({arm: rounds[f"{kernels}:{arm}"] for arm in found}, blocks, kernels)
        print(f"kernels {kernels}, seq {args.seq}, {args.micro_batches} micro-batches")
        print_table(judged)
        record["settings"][kernels] = judged
    base = rounds.get(f"stock:{CONTROL}")
    if base:
        record["against_stock_none"] = {
            arm: {
                key: spread([100 * (row[key] / other[key] - 1) for row, other in zip(rounds[arm], base, strict=True)]) for key in ("ms", "peak_mib")
            }
            for arm in arms
            if arm.startswith("fused:")
        }
        for arm, against in record["against_stock_none"].items():
            print(f"{arm} against stock:none: step {against['ms']['median']:+.2f} %, peak {against['peak_mib']['median']:+.2f} %")
    if args.losses:
        stock = [trajectory(trainee, "stock", start, args.losses) for _ in range(args.loss_runs)]
        fused = trajectory(trainee, "fused", start, args.losses)
        record["losses"] = {"stock": [[round(x, 5) for x in run] for run in stock], "fused": [round(x, 5) for x in fused]}
        found = record["loss_summary"] = against_own_spread(stock, fused)
        print(f"losses of stock: {stock[0][0]:.3f} -> {stock[0][-1]:.3f}; fused: {fused[0]:.3f} -> {fused[-1]:.3f}")
        for name, what in (("own_distance", "two stock runs"), ("distance", "fused and a stock run")):
            print(f"{what} are apart by {found[name]['largest']:.4f} at most, {found[name]['mean']:.4f} in the mean")
        print(
            f"outside the band of {len(stock)} stock runs: fused in {found['outside']['steps']} steps, by {found['outside']['at_most']:.4f} at most"
        )
        for name, what in (("left_out", "a stock run"), ("other_left_out", "fused")):
            told = ", ".join(f"{row['steps']} steps by {row['at_most']:.4f}" for row in found[name])
            print(f"outside the band of {len(stock) - 1} stock runs: {what} in {told}")
    write(record, args.out)


if __name__ == "__main__":
    main()
