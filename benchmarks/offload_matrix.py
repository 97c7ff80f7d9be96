"""Offload against the untouched model over a whole training, bit for bit, and its memory: every arm in a fresh process.

    python benchmarks/offload_matrix.py --out record.json                     # one GPU; Qwen3.5-0.8B, 4096 tokens, four micro-batches
    python benchmarks/offload_matrix.py --parallel 2 --out record.json        # two processes at a time, over all visible GPUs in turn
    python benchmarks/offload_matrix.py --device cpu --steps 12 --short 12    # a small model with simulated copies: runs anywhere

bf16 weights with float32 `A_log` and `dt_bias`, fused AdamW, fused linear cross entropy, deterministic kernels chosen as `lightning-gdn
parity` does. One process tunes first; all others use the results it left in TRITON_CACHE_DIR, and the record shows that they did. After
every step: losses, global gradient norm, a fingerprint of every bit of weights and optimizer state (SHA-256 at some steps), allocated,
peak, reserved and pinned bytes. Exit code 1 if a verdict fails or could not be reached within `--seconds`. Times mean nothing here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import offload_verdicts as judge
from processes import GRACE, Child, environment, kill_all, tune, visible_gpus

from lightning_gdn.bench.ending import terminated_cleanly
from lightning_gdn.bench.records import SCHEMA, write_json

CONTROL, AGAIN, FULL = "none", "none again", "offload:gdn_core_attn"
SHORT = ("offload:gdn_core_attn@auto", "gdn_norm_out+offload:gdn_core_attn")
SAVED, RESUMED = "three steps, saved", "three steps, resumed"
RESTART_AT, RESTART_STEPS = 3, 6
WARM = 3
AUTO_STEADY = 6
"""Steps that `auto` must show after its share has settled."""
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Read once, when cuBLAS starts."""


@dataclass(frozen=True)
class Run:
    """One process of the matrix."""

    name: str
    arm: str
    steps: int
    more: Mapping[str, Any]
    after: str | None = None
    """Begins only when this one has succeeded."""


def plan(steps: int, short: int, weights: Path) -> list[Run]:
    """All processes after the tuning one, the longest first."""
    runs = [Run(CONTROL, CONTROL, steps, {}), Run(FULL, FULL, steps, {}), Run(AGAIN, CONTROL, short, {})]
    runs += [Run(SAVED, FULL, RESTART_AT, {"save": str(weights)}), Run(RESUMED, FULL, RESTART_STEPS, {"load": str(weights)}, after=SAVED)]
    return runs + [Run(arm, arm, short, {}) for arm in SHORT]


def schedule(
    runs: Sequence[Run], spec: Mapping[str, Any], folder: Path, gpus: Sequence[str | None], parallel: int, deadline: float
) -> dict[str, Child]:
    """Run them, `parallel` at a time; a place keeps its GPU. What did not begin in time has no entry."""
    pending, places, started = list(runs), dict[int, Child](), dict[str, Child]()
    try:
        while pending or places:
            for place, child in list(places.items()):
                if child.done():
                    child.wait(None)
                    print(f"  {child.name}: {child.result()['status']}, {child.ended - child.started:.0f} s", file=sys.stderr, flush=True)
                    del places[place]
            for place in range(parallel):
                ready = next((run for run in pending if run.after is None or (run.after in started and started[run.after].done())), None)
                if place in places or ready is None or time.time() > deadline:
                    continue
                pending.remove(ready)
                if ready.after is not None and started[ready.after].result()["status"] != "ok":
                    continue
                own = {**spec, "job": "trace", "arm": ready.arm, "steps": ready.steps, **ready.more}
                places[place] = started[ready.name] = Child(ready.name, own, folder, {**environment(gpus[place % len(gpus)]), **CUBLAS})
            if time.time() > deadline and not places:
                break
            if time.time() > deadline + GRACE:
                kill_all(list(places.values()))
            time.sleep(0.1)
    finally:
        kill_all(list(started.values()))
    return started


def missing(runs: Sequence[Run], results: Mapping[str, Mapping[str, Any]], traces: Mapping[str, Sequence[judge.Row]]) -> list[str]:
    """What was asked for and did not finish, one line each."""
    lines = []
    for run in runs:
        result, done = results.get(run.name), sum("losses" in row for row in traces.get(run.name, ()))
        wanted = run.steps - (RESTART_AT if run.after else 0)
        if result is None:
            lines.append(f"{run.name}: not started")
        elif result["status"] != "ok":
            lines.append(f"{run.name}: {result['status']} after {done} of {wanted} steps: {result['error']}")
        elif done < wanted:
            lines.append(f"{run.name}: out of time after {done} of {wanted} steps")
    return lines


def verdicts(
    runs: Sequence[Run], tuned: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]], traces: Mapping[str, Sequence[judge.Row]], *, gpu: bool
) -> list[dict[str, Any]]:
    """All of them; a pure function of what the processes told."""
    steps = {run.name: run.steps for run in runs}
    control, found = traces.get(CONTROL, ()), []
    ok = {name: result for name, result in results.items() if result["status"] == "ok"}
    for name in (AGAIN, FULL, *SHORT):
        found.append(judge.bits(f"{name} equals {CONTROL}", traces.get(name, ()), control, min(steps[name], steps[CONTROL])))
    restarted = [*traces.get(SAVED, ()), *traces.get(RESUMED, ())]
    found.append(judge.bits("three steps, a new process and three more equal six", restarted, traces.get(FULL, ()), RESTART_STEPS))
    base = judge.rollup(control, WARM + 1) if control else None
    for name in (FULL, *SHORT):
        rows = traces.get(name, ())
        first = judge.steady_from(rows, WARM) if any("losses" in row for row in rows) else None
        if first is None:
            found.append(judge.verdict(f"{name}: memory", None, "no steady step"))
        else:
            wanted = AUTO_STEADY if name.endswith("@auto") else steps[name] - WARM
            found.append(judge.memory(f"{name}: memory", judge.rollup(rows, first), base, wanted))
        found.append(judge.moves(f"{name}: bytes", rows, first_only=name.endswith("@auto")))
    hashes = {"tuning process, after": tuned.get("autotune_after")}
    hashes |= {f"{name}, {when}": result[f"autotune_{when}"] for name, result in ok.items() for when in ("before", "after")}
    found.append(judge.one_value("one set of tuning results on disk", hashes, required=gpu))
    found.append(judge.configs("one set of kernel configurations in use", {name: result["configs"] for name, result in ok.items()}, CONTROL))
    settings = {name: json.dumps(result["kernel_setting"], sort_keys=True) for name, result in ok.items()}
    found.append(judge.one_value("one setting of kernels", settings, required=True))
    found.append(judge.finite("every loss is finite", traces))
    return found


def compact(run: Run, result: Mapping[str, Any] | None, rows: Sequence[judge.Row]) -> dict[str, Any]:
    """What the record keeps of one process."""
    if result is None:
        return {"arm": run.arm, "status": "not started"}
    steps = [row for row in rows if "losses" in row]
    kept = {key: result[key] for key in ("status", "error", "plan", "kernels", "seconds", "autotune_before", "autotune_after") if key in result}
    found = {"arm": run.arm, "steps_wanted": run.steps, "steps_done": len(steps), **kept, "configs": hash_of(result.get("configs", {}))}
    keys = ("step", "losses", "grad_norm", "weights", "optimizer", "weights_sha256", "optimizer_sha256")
    found["hashed_steps"] = [{key: row[key] for key in keys if key in row} for row in rows if "weights_sha256" in row]
    found["step_digests"] = judge.digests(rows)
    first = judge.steady_from(rows, WARM) if steps else None
    found["memory_bytes"] = judge.rollup(rows, first) if first is not None else None
    if any("fraction" in row for row in steps):
        found["fractions"] = {
            str(step["step"]): step["fraction"]
            for before, step in zip([{}, *steps], steps, strict=False)
            if before.get("fraction") != step["fraction"]
        }
        found["bytes_out"] = sorted({row["bytes_out"] for row in steps})[:8]
        found |= {key: sum(row[key] for row in steps) for key in ("late", "fallbacks")}
    return found


def hash_of(data: Any) -> dict[str, Any]:
    """Number of entries and SHA-256."""
    return {"count": len(data), "sha256": hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()}


def main() -> int:
    """Run, judge, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=203, help=f"of the control and of the whole share; {WARM} of them warm-up")
    parser.add_argument("--short", type=int, default=30, help="of the other arms")
    parser.add_argument("--seq", type=int, help="default: 4096, on a CPU 64")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--kernels", choices=("stock", "fused"), default="stock")
    parser.add_argument("--parallel", type=int, default=1, help="processes at a time, over the visible GPUs in turn")
    parser.add_argument("--seconds", type=float, default=math.inf, help="processes end after the step in which this is over")
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="of the recipe's model, for instance model.attn_implementation=eager")
    args = parser.parse_intermixed_args()
    if args.steps < RESTART_STEPS or not WARM < args.short <= args.steps:
        parser.error(
            f"--steps, --short: expected --steps of at least {RESTART_STEPS} and --short from {WARM + 1} to --steps, got {args.steps}, {args.short}"
        )
    deadline, gpu = time.time() + args.seconds, args.device == "cuda"
    model = {"seq": args.seq or (4096 if gpu else 64), "micro_batches": args.micro_batches, "batches": args.steps * args.micro_batches}
    spec = {"stack": False, "device": args.device, "kernels": args.kernels, "deterministic": True, "model": {**model, "overrides": args.overrides}}
    spec |= {
        "options": {} if gpu else {"min_bytes": 0},
        "deadline": deadline,
        "whole": sorted({1, RESTART_AT, RESTART_STEPS, args.short, args.steps}),
    }
    gpus = visible_gpus(args.device)
    with tempfile.TemporaryDirectory(prefix="offload_matrix_") as made, terminated_cleanly():
        folder = Path(made)
        runs = plan(args.steps, args.short, folder / "weights.pt")
        tuned = tune(spec, [FULL, *SHORT], folder, {**environment(gpus[0]), **CUBLAS}, args.seconds)
        children = schedule(runs, spec, folder, gpus, args.parallel, deadline) if tuned["status"] == "ok" else {}
        results, traces = ({name: read(child) for name, child in children.items()} for read in (Child.result, Child.rows))
    found = verdicts(runs, tuned, results, traces, gpu=gpu)
    unfinished = missing(runs, results, traces)
    if tuned["status"] != "ok":
        unfinished.insert(0, f"tuning: {tuned['status']}: {tuned['error']}")
    passed = not unfinished and all(entry["ok"] for entry in found)
    for entry in found:
        print(f"{ {True: 'ok', False: 'FAILED', None: 'not judged'}[entry['ok']]:10s} {entry['what']}: {entry['note']}")
    for line in unfinished:
        print(f"unfinished {line}")
    setting = next((result["kernel_setting"] for result in results.values() if "kernel_setting" in result), None)
    record = {
        "schema": SCHEMA,
        "kind": "offload_matrix",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/offload_matrix.py " + " ".join(sys.argv[1:]),
        "passed": passed,
        "environment": tuned.get("environment"),
        "model": {
            "recipe": "qwen3_5_0_8b" if gpu else "qwen3_5_0_8b at a size for a CPU",
            "optimizer": "AdamW(lr=1e-4, fused=True)",
            **spec["model"],
        },
        "kernel_setting": setting,
        "kernels": args.kernels,
        "gpus": len(gpus),
        "parallel": args.parallel,
        "verdicts": found,
        "unfinished": unfinished,
        "arms": {run.name: compact(run, results.get(run.name), traces.get(run.name, ())) for run in runs},
    }
    if args.out is not None:
        write_json(args.out, record)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
