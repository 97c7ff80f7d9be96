"""The 20-layer GDN stack: labels against `torch.utils.checkpoint` over the same regions, in alternating rounds of one process.

    python benchmarks/gdn_stack.py --out record.json            # one CUDA GPU with flash-linear-attention; 8192 tokens, batch 2
    python benchmarks/gdn_stack.py --seq 2048 --batch 1 --out record.json

Per arm and round: `--warm` steps, then `--steps` measured ones. A step is forward, mean square of the output as the loss, backward; no
optimizer. `act` is what is allocated after the forward beyond what was before it, `peak` the allocated peak of the step, weights included.
Deltas are paired with `none` of the same round. `regions` times each region's forward alone: the replay times that an overhead is made of.
Every arm's gradients are compared with the control's bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_gdn import apply_plan
from lightning_gdn.models import GDNBlock, GDNStack
from lightning_gdn.models import gdn_stack as steps

ARMS = (
    "none",
    "gdn_norm_out",
    "gdn_conv",
    "gdn_conv+gdn_norm_out+layernorm",
    "gdn_in_proj_conv",
    "gdn_front",
    "full",
    "checkpoint:gdn_in_proj_conv",
    "checkpoint:full",
)
MIB = 2**20


def checkpointed_w3(block: GDNBlock, x: Tensor) -> Tensor:
    """The upstream boundary W3: projection and convolution in one plain checkpoint."""

    def front(h: Tensor) -> tuple[Tensor, ...]:
        mixed, z, b, a = steps.in_proj(block.mixer, h)
        # outputs of the checkpoint must not be views that hold the whole projection
        return steps.conv(block.mixer, mixed), z.contiguous(), b.contiguous(), a.contiguous()

    mixed, z, b, a = checkpoint(front, steps.input_norm(block, x), use_reentrant=False, preserve_rng_state=False)
    q, k, v = steps.prep(block.mixer, mixed)
    g, beta = steps.gates(block.mixer, b, a)
    o = steps.delta_rule(block.mixer, q, k, v, g, beta)
    return steps.residual(block, x, steps.out_proj(block.mixer, steps.norm_out(block.mixer, o, z)))


def forward_of(stack: GDNStack, arm: str) -> Callable[[Tensor], Tensor]:
    """The stack's forward under an arm that is not a label."""

    def run(x: Tensor) -> Tensor:
        for block in stack.layers:
            if arm == "checkpoint:full":
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            elif arm == "checkpoint:gdn_in_proj_conv":
                x = checkpointed_w3(block, x)
            else:
                x = block(x)
        return x

    return run


def one_step(stack: GDNStack, run: Callable[[Tensor], Tensor], x0: Tensor) -> tuple[float, float, float]:
    """Milliseconds, MiB retained after the forward, MiB of the peak."""
    for parameter in stack.parameters():
        parameter.grad = None
    x = x0.clone().requires_grad_(True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    out = run(x)
    loss = out.float().pow(2).mean()
    act = torch.cuda.memory_allocated() - before
    del out
    loss.backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, act / MIB, torch.cuda.max_memory_allocated() / MIB


def measure(stack: GDNStack, arm: str, x0: Tensor, warm: int, count: int) -> dict[str, Any]:
    """Medians of one round of one arm, and the gradients of its last step."""
    label = arm if not arm.startswith("checkpoint:") else "none"
    with apply_plan(stack, label) as applied:
        run = forward_of(stack, arm)
        for _ in range(warm):
            one_step(stack, run, x0)
        rows = [one_step(stack, run, x0) for _ in range(count)]
        ledger = applied.ledger.as_dict() if applied.installed else None
    gradients = [p.grad.cpu() for p in stack.parameters() if p.grad is not None]  # on the GPU they would be part of the next arm's peak
    return {
        "ms": statistics.median(r[0] for r in rows),
        "act_mib": rows[-1][1],
        "peak_mib": max(r[2] for r in rows),
        "ledger": ledger,
        "gradients": gradients,
    }


@torch.no_grad()
def region_times(stack: GDNStack, x: Tensor, repeats: int = 20) -> dict[str, float]:
    """Forward milliseconds of each region of one block, by CUDA events."""
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
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        found[name] = statistics.median(times)
    return found


def spread(values: list[float]) -> dict[str, Any]:
    """Median and range."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    stack = GDNStack(num_layers=args.layers).cuda().to(torch.bfloat16)
    for name, parameter in stack.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    x0 = torch.randn(args.batch, args.seq, 2048, device="cuda", dtype=torch.bfloat16)
    arms = args.arms.split(",")
    measure(stack, "none", x0, 3, 1)  # compiles and tunes
    regions = region_times(stack, x0)
    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    control: list[Tensor] = []
    equal: dict[str, bool] = {}
    for index in range(args.rounds):
        for arm in arms if index % 2 == 0 else arms[::-1]:
            torch.cuda.empty_cache()
            row = measure(stack, arm, x0, args.warm, args.steps)
            gradients = row.pop("gradients")
            if arm == "none" and not control:
                control = gradients
            elif control:
                equal[arm] = equal.get(arm, True) and all(torch.equal(a, b) for a, b in zip(control, gradients, strict=True))
            rounds[arm].append(row)
    record: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/gdn_stack.py " + " ".join(sys.argv[1:]),
        "device": torch.cuda.get_device_name(0),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions()},
        "region_ms": {name: round(ms, 4) for name, ms in regions.items()},
        "arms": {},
    }
    base = rounds["none"]
    for arm in arms:
        rows = rounds[arm]
        entry = {key: spread([row[key] for row in rows]) for key in ("ms", "act_mib", "peak_mib")}
        for key in ("ms", "act_mib", "peak_mib"):
            entry[f"{key}_pct"] = spread([100 * (row[key] / none[key] - 1) for row, none in zip(rows, base, strict=True)])
        entry["gradients_bit_equal"] = equal.get(arm)
        entry["ledger"] = rows[0]["ledger"]
        record["arms"][arm] = entry
        ms, act, peak = entry["ms_pct"], entry["act_mib_pct"], entry["peak_mib_pct"]
        print(
            f"{arm:34s} {entry['ms']['median']:8.2f} ms {ms['median']:+7.2f} % [{ms['min']:+.2f}, {ms['max']:+.2f}]  "
            f"act {entry['act_mib']['median']:9.1f} MiB {act['median']:+7.2f} %  "
            f"peak {entry['peak_mib']['median']:9.1f} MiB {peak['median']:+7.2f} %  bit-equal {equal.get(arm)}"
        )
    print("region forward ms:", ", ".join(f"{name} {ms:.3f}" for name, ms in regions.items()))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Versions of the packages that decide the kernels."""
    from importlib.metadata import version

    return {name: version(name) for name in ("triton", "fla-core")}


if __name__ == "__main__":
    main()
