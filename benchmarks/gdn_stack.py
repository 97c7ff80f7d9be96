"""The GDN stack: labels and rivals (`torch.utils.checkpoint` over the same regions and over K whole blocks) in alternating rounds of one process.

    python benchmarks/gdn_stack.py --out record.json            # one CUDA GPU with flash-linear-attention; 20 layers, 8192 tokens, batch 2
    python benchmarks/gdn_stack.py --seq 2048 --batch 1 --out record.json
    python benchmarks/gdn_stack.py --layers 1 --arms segments --out record.json      # upstream's W1 to W4 and single segments, per layer

Per arm and round: `--warm` steps, then `--steps` measured ones. A step is forward, mean square of the output as the loss, backward; no
optimizer. `act` is what is allocated after the forward beyond what was before it, `peak` the allocated peak of the step, weights included.
`regions` times each region's forward alone: the replay times that an overhead is made of, and `overhead_gap_points` says by how much an
arm's measured overhead is above their sum. Every arm's gradients are compared with the control's by a fingerprint of their bits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fingerprints import Fingerprint
from rounds import CONTROL, MIB, alternate, arms_of, header, in_turns, judge, print_table, twin, under, write
from torch import Tensor

from lightning_gdn.bench.arms import Rival, parse
from lightning_gdn.models import GDNStack
from lightning_gdn.models import gdn_stack as steps
from lightning_gdn.plan import Plan
from lightning_gdn.regions import Mode

ARMS = (
    "none,gdn_norm_out,gdn_conv,gdn_conv+gdn_norm_out+layernorm,gdn_in_proj_conv,gdn_front,full,checkpoint:gdn_norm_out,checkpoint:gdn_conv,"
    "checkpoint:gdn_in_proj_conv,checkpoint:gdn_front,checkpoint:sweep"
)
SEGMENTS = (
    "none,checkpoint:gdn_in_proj,checkpoint:gdn_in_proj_split,checkpoint:gdn_in_proj_conv,checkpoint:gdn_in_proj_conv_prep,checkpoint:conv,"
    "checkpoint:prep,checkpoint:delta_rule,checkpoint:norm_out,checkpoint:out_proj,checkpoint:full,gdn_in_proj_conv,gdn_norm_out,full"
)


def one_step(stack: GDNStack, x0: Tensor) -> dict[str, float]:
    """Milliseconds, MiB retained after the forward, MiB of the peak."""
    for parameter in stack.parameters():
        parameter.grad = None
    x = x0.clone().requires_grad_(True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    out = stack(x)
    loss = out.float().pow(2).mean()
    act = torch.cuda.memory_allocated() - before
    del out
    loss.backward()
    torch.cuda.synchronize()
    return {"ms": (time.perf_counter() - start) * 1e3, "act_mib": act / MIB, "peak_mib": torch.cuda.max_memory_allocated() / MIB}


@torch.no_grad()
def region_times(stack: GDNStack, x: Tensor, repeats: int = 60) -> dict[str, float]:
    """Forward milliseconds of each region of one block, by CUDA events, on a busy device."""
    block, mixer = stack.layers[0], stack.layers[0].mixer
    h = steps.input_norm(block, x)
    mixed, z, b, a = steps.in_proj(mixer, h)
    y = steps.conv(mixer, mixed)
    q, k, v = steps.prep(mixer, y)
    g, beta = steps.gates(mixer, b, a)
    o = steps.delta_rule(mixer, q, k, v, g, beta)
    n = steps.norm_out(mixer, o, z)
    calls: dict[str, Callable[[], Any]] = {
        "input_norm": lambda: steps.input_norm(block, x),
        "in_proj": lambda: steps.in_proj(mixer, h),
        "conv": lambda: steps.conv(mixer, mixed),
        "prep": lambda: steps.prep(mixer, y),
        "gates": lambda: steps.gates(mixer, b, a),
        "delta_rule": lambda: steps.delta_rule(mixer, q, k, v, g, beta),
        "norm_out": lambda: steps.norm_out(mixer, o, z),
        "out_proj": lambda: steps.out_proj(mixer, n),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(repeats):
            # Matmuls first: in a step the GPU is busy, with the clocks that its power allows then, and the host is ahead of it.
            steps.in_proj(mixer, h)
            steps.in_proj(mixer, h)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        found[name] = statistics.median(start.elapsed_time(end) for start, end in times)
    return found


def replay_pct(stack: GDNStack, arm: str, regions: dict[str, float], step_ms: float) -> float | None:
    """Sum of the forward times of what a label replays, in percent of the control's step; None for a rival."""
    chosen = parse(arm)
    if isinstance(chosen, Rival):
        return None
    with under(stack, arm) as applied:
        plan: Plan = applied.plan
    replayed = [region for block in plan.blocks for region, mode in block.modes if mode in (Mode.RECOMPUTE, Mode.RECOMPUTE_INSIDE)]
    return 100 * sum(regions.get(region, 0.0) for region in replayed) / step_ms


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--arms", default=ARMS, help="arms separated by commas, or `segments`")
    parser.add_argument("--beside", action="store_true", help="the control once more beside every arm, in turns of one step: where the host decides")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda"):
        stack = GDNStack(num_layers=args.layers).to(torch.bfloat16)
    for name, parameter in stack.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    x0 = torch.randn(args.batch, args.seq, 2048, device="cuda", dtype=torch.bfloat16)
    arms = arms_of(SEGMENTS if args.arms == "segments" else args.arms, args.layers)
    for _ in range(3):  # compiles and tunes
        one_step(stack, x0)
    regions = region_times(stack, x0)
    bits = dict[str, str]()

    def fingerprint(arm: str) -> None:
        if arm not in bits:  # made anew each time: on the GPU it would be part of every peak
            bits[arm] = Fingerprint("cuda").of(p.grad for p in stack.parameters() if p.grad is not None)

    def measure(arm: str, _: int) -> dict[str, Any]:
        with under(stack, arm):
            rows = [one_step(stack, x0) for _ in range(args.warm + args.steps)][args.warm :]
            fingerprint(arm)
        return {"ms": statistics.median(row["ms"] for row in rows), "act_mib": rows[-1]["act_mib"], "peak_mib": max(row["peak_mib"] for row in rows)}

    def measure_pair(pair: tuple[str, str], _: int) -> dict[str, dict[str, Any]]:
        arm = pair[0] if pair[1] == CONTROL else pair[1]
        other = twin(stack)
        with under(other, arm):
            found = in_turns(pair, lambda which: one_step(stack if which == CONTROL else other, x0), args.steps, args.warm)
            one_step(other, x0)
            fingerprint(arm)
        return found

    beside: dict[str, Any] = {"control_of": lambda arm: CONTROL, "side_by_side": measure_pair} if args.beside else {}
    rounds = alternate(arms, args.rounds, measure, seconds=args.seconds, **beside)
    equal = {arm: bits[arm] == bits[CONTROL] for arm in arms}
    judged = judge(rounds, args.layers, "fused")
    for arm, entry in judged["arms"].items():
        entry["gradients_bit_equal"] = equal[arm]
        predicted = replay_pct(stack, arm, regions, judged["arms"][CONTROL]["ms"]["median"])
        if predicted is not None:
            entry |= {"replay_pct": round(predicted, 2), "overhead_gap_points": round(entry["ms_pct"]["median"] - predicted, 2)}
    print_table(judged)
    print("gradients that are not the control's, bit for bit:", ", ".join(arm for arm in arms if not equal[arm]) or "none")
    print("region forward ms:", ", ".join(f"{name} {ms:.3f}" for name, ms in regions.items()))
    above = {arm: entry["overhead_gap_points"] for arm, entry in judged["arms"].items() if "overhead_gap_points" in entry and arm != CONTROL}
    print("overhead above the sum of replay times, in points:", ", ".join(f"{arm} {points:+.2f}" for arm, points in above.items()))
    write({**header("gdn_stack.py"), "region_ms": {name: round(ms, 4) for name, ms in regions.items()}, **judged}, args.out)


if __name__ == "__main__":
    main()
