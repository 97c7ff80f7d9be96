"""Rates of the offload engine against bare pinned copies, and what pinning and the host cost, on one GPU.

    python benchmarks/offload_engine.py [--out record.json]

Per storage size: bare `copy_` between pinned and device memory on a stream of its own, each direction alone and both at once; the engine's
copies by its own statistics; host microseconds per storage for offering and fetching; milliseconds to pin a buffer (once per buffer).
Bare copies and the engine alternate within one process; figures are medians over rounds with the range beside them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rates import MIB, bare_rates

from lightning_gdn.bench.environment import collect
from lightning_gdn.bench.records import SCHEMA, write_json
from lightning_gdn.offload.cuda import CudaBackend
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload_config import OffloadConfig


def engine_step(engine: Engine, nbytes: int, count: int, together: int) -> dict[str, float]:
    """One forward and backward of blocks that move `together` storages each, `count` in all."""
    blocks = -(-count // together)
    sources = [[torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(together)] for _ in range(blocks)]
    torch.cuda.synchronize()
    graph = []
    offering = time.perf_counter()
    for index in range(blocks):
        with engine.block(index, blocks) as block:
            graph.append((block, block.offer_all([(source, 1) for source in sources.pop()])))
    offering = time.perf_counter() - offering
    torch.cuda.synchronize()
    fetching = time.perf_counter()
    for block, tickets in reversed(graph):
        block.backward()
        for ticket in tickets:
            assert ticket is not None
            ticket.fetch()
    fetching = time.perf_counter() - fetching
    del graph, tickets, ticket
    torch.cuda.synchronize()
    step = engine.step_statistics()
    assert step.out_gb_s is not None
    assert step.in_gb_s is not None
    return {
        "engine_out_gb_s": step.out_gb_s,
        "engine_in_gb_s": step.in_gb_s,
        "offer_us": offering / (blocks * together) * 1e6,
        "fetch_us": fetching / (blocks * together) * 1e6,
    }


def measure(nbytes: int, rounds: int, together: int) -> dict[str, Any]:
    """Every figure of one storage size."""
    count = max(4, min(64, 1024 * MIB // nbytes))
    backend = CudaBackend(torch.device("cuda"))
    engine = Engine(backend, OffloadConfig(labels=("mlp",), min_bytes=0, resident_last_blocks=0))
    start = time.perf_counter()
    made = backend.pin(nbytes)
    pin_ms = (time.perf_counter() - start) * 1e3
    assert made is not None
    backend.unpin(made[0])
    engine_step(engine, nbytes, count, together)  # pins
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        plain = bare_rates("cuda", nbytes, count)
        rates = {f"bare_{way}_gb_s": plain[f"{way}_gb_s"] for way in ("out", "in")}
        rates |= {f"bare_{way}_both_gb_s": plain[f"both_{way}_gb_s"] for way in ("out", "in")}
        for name, value in {**rates, **engine_step(engine, nbytes, count, together)}.items():
            figures.setdefault(name, []).append(value)
    row = {name: {"median": statistics.median(values), "min": min(values), "max": max(values)} for name, values in figures.items()}
    pinned = engine.pool.held
    engine.close()
    shares = {way: row[f"engine_{way}_gb_s"]["median"] / row[f"bare_{way}_gb_s"]["median"] for way in ("out", "in")}
    return {"nbytes": nbytes, "storages": -(-count // together) * together, "pin_ms": pin_ms, "pinned_bytes": pinned, "share_of_bare": shares, **row}


def main() -> None:
    """Measure every size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 4, 16, 24.5, 64, 256])
    parser.add_argument("--together", type=int, default=6, help="storages per block: a block's copies are one batch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("offload_engine: needs a CUDA device, torch sees none")
    rows = [measure(int(size * MIB), args.rounds, args.together) for size in args.mib]
    for row in rows:
        cells = [f"{row['nbytes'] / MIB:8.1f} MiB"]
        for way in ("out", "in"):
            engine, plain = row[f"engine_{way}_gb_s"]["median"], row[f"bare_{way}_gb_s"]["median"]
            cells.append(f"{way} {engine:6.2f} GB/s, bare {plain:6.2f} ({row['share_of_bare'][way]:.1%})")
        cells.append(f"offer {row['offer_us']['median']:.0f} us, fetch {row['fetch_us']['median']:.0f} us, pin {row['pin_ms']:.1f} ms")
        print("  ".join(cells))
    if args.out:
        write_json(
            args.out,
            {
                "schema": SCHEMA,
                "benchmark": "offload_engine",
                "environment": collect("gpu"),
                "rounds": args.rounds,
                "together": args.together,
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
