"""Host cost of the tape: a block of 11 regions of almost no work that save 33 tensors, forward plus backward, in microseconds.

    python benchmarks/host_overhead.py [--out record.json]

Rows: the untouched block, the tape with 0, 1, 2, 6 and 11 regions recomputed, and `torch.utils.checkpoint` over as many regions. The work
of a region is three elementwise operations on 64 numbers, so the difference to `untouched` is what the machinery costs, including running
the replayed operations again.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gdn.regions import Mode
from lightning_gdn.tape import RegionFn, Tape

REGIONS = 11


class Owner(nn.Module):
    """A module with one parameter, as the owner of every region."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))


def body(owner: nn.Module, x: Tensor) -> Tensor:
    """Three operations that save one tensor each."""
    return ((x * owner.weight).sigmoid()).exp()  # type: ignore[operator]


FUNCTIONS = [RegionFn(name=f"r{i}", call=body, params=("weight",)) for i in range(REGIONS)]


def untouched(owner: nn.Module, x: Tensor, count: int) -> Tensor:
    """No machinery."""
    for _ in range(REGIONS):
        x = body(owner, x)
    return x


def taped(owner: nn.Module, x: Tensor, count: int) -> Tensor:
    """The tape with the first `count` regions recomputed."""
    with Tape({f"r{i}": Mode.RECOMPUTE for i in range(count)}, x.device) as tape:
        for fn in FUNCTIONS:
            x = tape.run(fn, owner, x)
    return x


def checkpointed(owner: nn.Module, x: Tensor, count: int) -> Tensor:
    """`torch.utils.checkpoint` over each of the first `count` regions."""
    for i in range(REGIONS):
        x = checkpoint(body, owner, x, use_reentrant=False, preserve_rng_state=False) if i < count else body(owner, x)
    return x


def measure(run: Callable[[nn.Module, Tensor, int], Tensor], count: int, rounds: int, calls: int) -> list[float]:
    """Microseconds per forward plus backward, one figure per round."""
    owner, x = Owner(), torch.randn(64, requires_grad=True)
    grad = torch.ones(64)
    figures = []
    for index in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            run(owner, x, count).backward(grad)
        if index:  # the first round warms up
            figures.append((time.perf_counter() - start) / calls * 1e6)
    return figures


def main() -> None:
    """Measure every row in alternating rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[str, Callable[[nn.Module, Tensor, int], Tensor], int]] = [("untouched", untouched, 0)]
    rows += [(f"tape, {n} regions recomputed", taped, n) for n in (0, 1, 2, 6, 11)]
    rows += [(f"torch.utils.checkpoint, {n} regions", checkpointed, n) for n in (1, 2, 6, 11)]
    figures: dict[str, list[float]] = {name: [] for name, _, _ in rows}
    for _ in range(args.rounds):
        for name, run, count in rows:
            figures[name] += measure(run, count, 1, args.calls)
    base = statistics.median(figures["untouched"])
    record = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.processor() or platform.machine(), "rows": {}}
    for name, values in figures.items():
        median = statistics.median(values)
        record["rows"][name] = {"median_us": median, "min_us": min(values), "max_us": max(values), "over_untouched_us": median - base}
        print(f"{name:40s} {median:8.1f} us  [{min(values):.1f}, {max(values):.1f}]  over untouched {median - base:+8.1f} us")
    over = {name: row["over_untouched_us"] for name, row in record["rows"].items()}
    one = over["tape, 1 regions recomputed"]
    further = (over[f"tape, {REGIONS} regions recomputed"] - one) / (REGIONS - 1)
    plain = over[f"torch.utils.checkpoint, {REGIONS} regions"] / REGIONS
    record["summary"] = {"one_region_us": one, "each_further_us": further, "checkpoint_per_region_us": plain}
    print(f"one region {one:.1f} us, each further {further:.1f} us; torch.utils.checkpoint {plain:.1f} us per region")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
