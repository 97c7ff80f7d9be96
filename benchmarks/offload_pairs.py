"""Offload against the untouched model in fresh processes: paired step time, peaks, rates. Every round runs control and arms, in turned order.

    python benchmarks/offload_pairs.py --case stack --out record.json             # 20 GDN layers, 8192 tokens, batch 2
    python benchmarks/offload_pairs.py --case qwen:4096x4 --out record.json       # Qwen3.5-0.8B, four micro-batches per step, AdamW
    python benchmarks/offload_pairs.py --case qwen:16384 --seconds 400 --out record.json
    python benchmarks/offload_pairs.py --case qwen:64x2 --device cpu --rounds 1   # small models with simulated copies: times mean nothing

Per process `--warm` optimizer steps (with `auto` until its share has settled), then `--steps` measured ones; its time is their median, its
peaks are their largest. A step change is the arm's time over that of the control of its round; shown are median and range over the rounds.
`bare` are plain pinned copies in the same process, right after the steps: each way alone, which is what shares are of, and both at once.
Processes import some at a time, and wait for their turns before they touch the GPU, which CUDA_VISIBLE_DEVICES chooses; beside measured
steps nothing of this script runs. Losses are compared bit for bit; kernels are those of training, and fused attention sums in varying
order there: what must be equal is judged by `offload_matrix.py`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from processes import GRACE, Child, environment, kill_all, tune
from rates import told_rates
from rounds import CONTROL, MIB, MOVED, arms_of, figures, spread
from trl_offload import check

from lightning_gdn.bench.ending import terminated_cleanly
from lightning_gdn.bench.records import SCHEMA, write_json

ARMS = "offload:gdn_core_attn,offload:gdn_core_attn@auto"
AHEAD = 9
"""Processes that import at one time: each holds some 2 GiB of the host's memory while it waits."""
READY_SECONDS, HANG = 300.0, 1800.0
"""How long imports, and a process's warm-up or measured steps, may take."""
RATE_SHARE, AUTO_PCT, LEAD = 0.9, 1.0, 1
"""What an arm should reach: of the bare rate; of the control's time, with `auto`; blocks between a reload and its use."""
Row = Mapping[str, Any]


def model_of(case: str, device: str, layers: int) -> tuple[bool, dict[str, Any]]:
    """Whether it is the stack, and how it is built.

    Raises:
        ValueError: no such case.
    """
    if case == "stack":
        sizes = {"layers": layers, "seq": 8192, "batch": 2} if device == "cuda" else {"layers": min(layers, 4), "seq": 64, "batch": 1}
        return True, sizes
    found = re.fullmatch(r"qwen:([1-9]\d*)(?:x([1-9]\d*))?", case)
    if found is None:
        raise ValueError(f"--case: expected stack, qwen:TOKENS or qwen:TOKENSxMICRO_BATCHES, got {case!r}; for instance qwen:4096x4")
    return False, {"seq": int(found[1]), "micro_batches": int(found[2] or 1)}


def order(arms: Sequence[str], index: int) -> list[str]:
    """The arms of a round, turned so that each comes first in its time."""
    first = index % len(arms)
    return [*arms[first:], *arms[:first]]


class Ahead:
    """Processes that were started before their turn, some at a time: they import, and wait before they touch the GPU."""

    def __init__(self, turns: Sequence[tuple[int, str]], start: Callable[[str, int], Child]) -> None:
        self._turns, self._start = list(turns), start
        self._waiting: deque[Child] = deque()
        self.children: list[Child] = []
        self._more()

    def _more(self) -> None:
        batch, self._turns = self._turns[:AHEAD], self._turns[AHEAD:]
        self._waiting.extend(self._start(arm, index) for index, arm in batch)
        self.children.extend(self._waiting)

    def take(self) -> Child:
        """The process of the next turn."""
        if not self._waiting:
            self._more()
        return self._waiting.popleft()

    def settle(self) -> None:
        """Wait until those that are left have imported."""
        for child in self._waiting:
            child.said("READY", READY_SECONDS)


def turns_of(arms: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """(round, arm) in order of measurement."""
    return [(index, arm) for index in range(rounds) for arm in order(arms, index)]


def measure(
    arms: Sequence[str], rounds: int, ahead: Ahead, seconds: float, tell: Callable[[str], None]
) -> tuple[list[dict[str, dict[str, Any]]], str | None]:
    """Whole rounds of every arm: results by arm, and why there are fewer than `rounds`."""
    begin, found = time.monotonic(), list[dict[str, dict[str, Any]]]()
    for number, (index, arm) in enumerate(turns_of(arms, rounds)):
        elapsed = time.monotonic() - begin
        if index == len(found):  # a round begins only if it is likely to end in time
            if number and elapsed * (1 + len(arms) / number) > seconds:
                return found, f"{index} of {rounds} rounds, for lack of time"
            found.append({})
        child = ahead.take()
        if child.said("READY", READY_SECONDS):
            limit = max(GRACE, 2 * seconds - elapsed) if math.isfinite(seconds) else HANG
            child.go()
            if child.said("WARM", limit):
                ahead.settle()  # nothing else runs while steps are measured
                child.go()
                child.wait(limit)
        found[index][arm] = child.result()
        tell(f"round {index + 1}: {arm} {told(found[index][arm])}, {time.monotonic() - begin:.0f} s")
    return found, None


def told(row: Row) -> str:
    """A word on one result."""
    return f"{row['ms']:.1f} ms" if row["status"] == "ok" else f"{row['status']}: {row['error']}"


def judge_arm(arm: str, pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Figures of one arm from its (control, arm) pairs.

    Saving, MiB and percent, is of the allocated and the reserved peak; `of_bare` the share of the rate of bare copies this way alone;
    `targets` what was reached.
    """
    rows = [row for _, row in pairs]
    found: dict[str, Any] = {"pairs": len(pairs), **figures(rows, ("ms", "act_mib", "peak_mib", "reserved_mib"))}
    found["step_pct"] = spread([100 * (row["ms"] / base["ms"] - 1) for base, row in pairs])
    for name in ("act_mib", "peak_mib", "reserved_mib"):
        if name in found:
            found[f"{name[:-4]}_saved_mib"] = spread([base[name] - row[name] for base, row in pairs])
            found[f"{name[:-4]}_saved_pct"] = spread([100 * (1 - row[name] / base[name]) for base, row in pairs])
    found |= figures(rows, MOVED)
    bare = [row["bare"] for row in rows if row.get("bare")]
    found |= {f"bare_{name}": spread([rates[name] for rates in bare]) for name in (bare[0] if bare else ())}
    for way in ("out_gb_s", "in_gb_s"):
        known = [row[way] / row["bare"][way] for row in rows if row.get(way) and row.get("bare")]
        if known:
            found[f"{way[:-5]}_of_bare"] = spread(known)
    equal = sum(mine == theirs for base, row in pairs for mine, theirs in zip(row["losses"], base["losses"], strict=False))
    count = sum(min(len(row["losses"]), len(base["losses"])) for base, row in pairs)
    found["losses"] = f"{equal} of {count} equal"
    if arm.endswith("@auto"):  # whether each process settled, and the shares that it went through
        found["settled"] = [row.get("settled") for row in rows]
        found["shares"] = [[share for share, _ in groupby(row.get("shares", ()))] for row in rows]
    found["unfreed_bytes"] = max((row["ledger"].get("unfreed_bytes", 0) for row in rows if row.get("ledger")), default=None)
    return {**found, "targets": targets(arm, found)}


def targets(arm: str, found: Mapping[str, Any]) -> dict[str, bool]:
    """Which figures reach what is asked of them; those that do not apply, or were not measured, are left out."""
    met = {f"{way}_rate": found[f"{way}_of_bare"]["median"] >= RATE_SHARE for way in ("out", "in") if f"{way}_of_bare" in found}
    if "lead_blocks" in found:
        met["lead"] = found["lead_blocks"]["min"] >= LEAD
    if arm.endswith("@auto"):
        met["step"] = found["step_pct"]["median"] <= AUTO_PCT
    return met


def judge(arms: Sequence[str], rounds: Sequence[Mapping[str, Row]]) -> tuple[dict[str, Any], list[str]]:
    """Figures by arm over the rounds in which it and the control succeeded; and what failed."""
    failed = [f"round {index + 1}: {arm}: {told(row)}" for index, rows in enumerate(rounds) for arm, row in rows.items() if row["status"] != "ok"]
    ok = [{arm: row for arm, row in rows.items() if row["status"] == "ok"} for rows in rounds]
    found: dict[str, Any] = {}
    control = [rows[CONTROL] for rows in ok if CONTROL in rows]
    if control:
        found[CONTROL] = {"pairs": len(control), **figures(control, ("ms", "act_mib", "peak_mib", "reserved_mib"))}
    for arm in arms:
        pairs = [(rows[CONTROL], rows[arm]) for rows in ok if arm in rows and CONTROL in rows]
        if arm != CONTROL and pairs:
            found[arm] = judge_arm(arm, pairs)
    return found, failed


def print_table(found: Mapping[str, Any]) -> None:
    """The source document's columns, and those of the copies."""
    base = found.get(CONTROL, {})
    for arm, entry in found.items():
        print(f"{arm}: {entry['ms']['median']:.1f} ms" + ("" if arm == CONTROL else f", {entry['pairs']} pairs"))
        if arm == CONTROL:
            continue
        step = entry["step_pct"]
        print(f"  step change {step['median']:+.2f} % [{step['min']:+.2f}, {step['max']:+.2f}]")
        for name, title in (("peak_mib", "allocated peak"), ("reserved_mib", "reserved peak"), ("act_mib", "retained after forward")):
            if name in entry and name in base:
                print(
                    f"  {title} {base[name]['median']:.2f} -> {entry[name]['median']:.2f} MiB ({-entry[f'{name[:-4]}_saved_pct']['median']:+.2f} %)"
                )
        shown = [
            f"{name} {entry[name]['median']:g}"
            for name in ("moved_mib", "pinned_mib", "out_gb_s", "in_gb_s", "out_of_bare", "in_of_bare")
            if name in entry
        ]
        shown += [
            f"{name} {entry[name]['median']:g}"
            for name in ("stall_ms", "exposed_host_ms", "hidden_share", "late", "lead_blocks", "fraction")
            if name in entry
        ]
        print("  " + ", ".join(shown))
        if "bare_out_gb_s" in entry:
            print("  " + told_rates({name[5:]: rate["median"] for name, rate in entry.items() if name.startswith("bare_")}))
        print(
            f"  losses {entry['losses']}; targets: "
            + (", ".join(f"{name} {'met' if met else 'MISSED'}" for name, met in entry["targets"].items()) or "none")
        )


def main() -> int:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="stack", help="stack, qwen:TOKENS or qwen:TOKENSxMICRO_BATCHES")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--kernels", choices=("stock", "fused"), default="stock")
    parser.add_argument("--rounds", type=int, default=3, help="fresh-process pairs of each arm")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=20, help="of the stack")
    parser.add_argument("--min-bytes", type=int, help="default: 1 MiB, on a CPU 0")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        stack, model = model_of(args.case, args.device, args.layers)
    except ValueError as error:
        parser.error(str(error))
    arms = list(dict.fromkeys([CONTROL, *arms_of(args.arms, args.layers if stack else 24)]))
    versions = check("offload_pairs.py", arms, args.device)
    least = (MIB if args.device == "cuda" else 0) if args.min_bytes is None else args.min_bytes
    spec = {"device": args.device, "stack": stack, "model": model, "kernels": args.kernels, "deterministic": False, "options": {"min_bytes": least}}
    with tempfile.TemporaryDirectory(prefix="offload_pairs_") as made, terminated_cleanly():
        folder, begin = Path(made), time.monotonic()

        def start(arm: str, index: int) -> Child:
            own = {**spec, "job": "time", "arm": arm, "warm": args.warm, "steps": args.steps, "wait": True}
            return Child(f"{arm}-round{index}", own, folder, environment())

        ahead = Ahead(turns_of(arms, args.rounds), start)
        try:
            tuned = tune(spec, [arm for arm in arms if arm != CONTROL], folder, environment(), args.seconds)
            rounds, why = list[dict[str, dict[str, Any]]](), f"tuning: {tuned['status']}: {tuned.get('error')}"
            if tuned["status"] == "ok":
                left = args.seconds - (time.monotonic() - begin)
                rounds, why = measure(arms, args.rounds, ahead, left, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        finally:
            kill_all(ahead.children)
    found, failed = judge(arms, rounds)
    print_table(found)
    for line in [*([why] if why else []), *failed]:
        print(line)
    record = {
        "schema": SCHEMA,
        "kind": "offload_pairs",
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/offload_pairs.py " + " ".join(sys.argv[1:]),
        "environment": tuned.get("environment"),
        **versions,
        "case": args.case,
        "model": model,
        "options": {"kernels": args.kernels, "warm": args.warm, "steps": args.steps, "rounds": args.rounds, "min_bytes": least},
        "rounds_done": len(rounds),
        "stopped": why,
        "failed": failed,
        "order": [list(rows) for rows in rounds],
        "arms": found,
        "steps_ms": {arm: [[round(ms, 2) for ms in rows[arm].get("steps_ms", ())] for rows in rounds] for arm in arms},
        "tuned_alike": sorted({str(row["autotune_after"]) for rows in rounds for row in rows.values() if row["status"] == "ok"}),
        "tuned_by_itself": [f"round {i + 1}: {arm}" for i, rows in enumerate(rounds) for arm, row in rows.items() if not same_tuning(row)],
    }
    if args.out is not None:
        write_json(args.out, record)
    return 0 if rounds and not failed else 1


def same_tuning(row: Row) -> bool:
    """Whether a process found all tuning results on disk."""
    return row["status"] != "ok" or row["autotune_before"] == row["autotune_after"]


if __name__ == "__main__":
    sys.exit(main())
