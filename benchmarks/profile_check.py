"""Whether a profile explains what is measured: predicted cost and freed bytes of each arm against whole steps, in alternating rounds.

    python benchmarks/profile_check.py gdn_stack_20 --out record.json
    python benchmarks/profile_check.py qwen3_5_0_8b data.seq_len=16384 trainer.accumulate_grad_batches=1 \
        trainer.loss=fused_linear_cross_entropy --steps 2 --out record.json

One process: `lightning-gdn profile` with rounds. Cost: the sum of replay times of the regions that an arm replays, in percent of the
control's step, against the step time measured under the arm (paired with the control of the same round, median over rounds). Bytes: what
the ledger says an arm frees against what the CUDA allocator holds less between forward and backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_gdn.bench.profile import Options, profile
from lightning_gdn.bench.profile_report import caption
from lightning_gdn.bench.recipes import load

ARMS = "gdn_in_proj_conv,gdn_norm_out,gdn_conv,gdn_conv+gdn_norm_out+layernorm,gdn_front,full"
COST_POINTS = 1.5
"""Percentage points of the control's step by which predicted and measured overhead may differ."""
BYTES_PCT = 1.0
"""Percent of the freed bytes by which ledger and allocator may differ."""
RECORD_BYTES = 50 * 1024


def verdict(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One arm of a profile with rounds: the two gaps, and whether each is within its target; None where nothing was measured."""
    measured, freed, allocator = entry["measured"], entry["freed_bytes"], entry["allocator_freed_bytes"]
    gap = None if measured is None else measured["median_pct"] - entry["cost_pct"]
    apart = None if allocator is None or not freed else 100 * (allocator / freed - 1)
    return {
        "arm": entry["arm"],
        "predicted_pct": round(entry["cost_pct"], 3),
        "bookkeeping_pct": None if entry["bookkeeping_pct"] is None else round(entry["bookkeeping_pct"], 3),
        "measured_pct": measured and {key: round(measured[f"{key}_pct"], 3) for key in ("median", "min", "max")},
        "gap_points": gap and round(gap, 3),
        "cost_met": None if gap is None else abs(gap) <= COST_POINTS,
        "freed_bytes": freed,
        "allocator_freed_bytes": allocator,
        "apart_pct": apart and round(apart, 3),
        "bytes_met": None if apart is None else abs(apart) <= BYTES_PCT,
        "peak_delta_bytes": entry["peak_delta_bytes"],
        "peak_held_by": entry["peak_held_by"],
        "replays": entry["replays"],
    }


def compact(record: Mapping[str, Any], command: str) -> dict[str, Any]:
    """What is worth keeping of a profile: the verdicts, and the figures that they come from."""
    keep = ("region", "blocks", "forward_ms", "backward_ms", "replay_ms", "retained_bytes", "replay_peak_bytes")
    regions = []
    for row in record["regions"]:
        named = {key: round(row[key], 4) if isinstance(row[key], float) else row[key] for key in keep}
        regions.append({**named, "kernel": row["kernels"][0]["name"][:80] if row["kernels"] else row["bound_kernel"]})
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "environment": record["environment"],
        "recipe": record["recipe"],
        "options": record["options"],
        "targets": {"cost_points": COST_POINTS, "bytes_pct": BYTES_PCT},
        "control": record["control"],
        "outside": record["outside"],
        "regions": regions,
        "arms": [verdict(entry) for entry in record["arms"]],
        "remarks": record["remarks"],
    }


def main() -> int:
    """Profile, judge, print, write the record; the exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = Options(steps=args.steps, rounds=max(1, args.rounds))
        record = profile(load(args.recipe, args.overrides), args.arms.split(","), Path(folder), options)
    if record["status"] != "ok":
        print(f"{record['status']}: {record['error']}", file=sys.stderr)
        return 1
    small = compact(record, "python benchmarks/profile_check.py " + " ".join(sys.argv[1:]))
    print(f"targets: cost within {COST_POINTS} points, bytes within {BYTES_PCT} %")
    print(f"{'arm':34s} {'predicted':>9s} {'measured':>9s} {'gap':>7s} {'':8s} {'freed MiB':>10s} {'allocator':>10s} {'apart':>8s}")
    for row in small["arms"]:
        cost = f"{row['predicted_pct']:+8.2f}% {row['measured_pct']['median']:+8.2f}% {row['gap_points']:+7.2f} {_met(row['cost_met']):8s}"
        there = (
            "n/a" if row["apart_pct"] is None else f"{row['allocator_freed_bytes'] / 2**20:10.1f} {row['apart_pct']:+7.2f}% {_met(row['bytes_met'])}"
        )
        print(f"{row['arm']:34s} {cost} {row['freed_bytes'] / 2**20:10.1f} {there}")
    print("\n".join(caption(record)))
    print(f"{time.perf_counter() - started:.0f} s")
    text = json.dumps(small, indent=1) + "\n"
    if len(text) > RECORD_BYTES:
        print(f"the record has {len(text)} bytes, more than {RECORD_BYTES}: fewer arms", file=sys.stderr)
        return 1
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    return 0 if all(row[key] is not False for row in small["arms"] for key in ("cost_met", "bytes_met")) else 1


def _met(met: bool | None) -> str:
    return "n/a" if met is None else "met" if met else "NOT MET"


if __name__ == "__main__":
    sys.exit(main())
