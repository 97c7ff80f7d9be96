"""Offload under whole models: control, offload labels, recompute with offload, `save_on_cpu` and TRL's offload, in alternating rounds of one process.

    python benchmarks/offload_model.py --model stack --out record.json               # 20-layer GDN stack, 8192 tokens, batch 2
    python benchmarks/offload_model.py --model qwen3_5_0_8b --seq 4096 --out record.json     # AdamW, FLA's fused linear cross entropy
    python benchmarks/offload_model.py --model stack --layers 3 --seq 256 --device cpu --rounds 1    # runs anywhere; its times mean nothing
    python benchmarks/offload_model.py --model qwen3_5_0_8b --seq 4096 --beside --arms none,offload:gdn_core_attn,trl_offload --out record.json

Per arm and round: `--warm` steps, then `--steps` measured ones; deltas are paired with `none` of the same round, with `--beside` with `none` in
turns of one step on a twin of the model, which trains the same weights (`--steps` turns). `act` is what is allocated after the forward beyond
what was before it, `peak` the allocated peak of a step, weights included (on a CPU the process's). `moved` is copied out per step, `stall` the
time for which compute waited for copies, `hidden` the share of the copy time that it did not wait for, `lead` the fewest blocks between
enqueueing a reload and its use (in one further step, which no time is taken of; not in turns).
`bare` are plain pinned copies of 256 MiB in the same process: each way alone, which is the rate that offload's is a share of, and both ways at
once. `trl_offload` is TRL's `OffloadActivations` around each forward and backward (`pip install trl`; among the default arms where it can be
imported). Losses are compared with the control's bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from offload_trainees import Qwen, Stack, around_of, in_force, lead_blocks, ledger_sums, medians, timed_step
from rates import bare_rates, told_rates
from rounds import CONTROL, MIB, MOVED, alternate, arms_of, figures, header, in_turns, judge, print_table, spread, twin, write
from trl_offload import ARM as TRL
from trl_offload import check, importable

UNION = "gdn_conv+gdn_norm_out+layernorm"
MOVING = ("offload:gdn_core_attn", "offload:gdn_core_attn@0.5", "offload:gdn_core_attn@auto", "offload:gdn_core_attn+offload:gdn_norm_out")
RECOMPUTING = {
    "stack": (UNION, f"{UNION}+offload:gdn_core_attn"),
    "qwen3_5_0_8b": (
        f"{UNION}+mlp_act",
        f"{UNION}+mlp_act+offload:gdn_core_attn",
        f"{UNION}+mlp_act+offload:gdn_core_attn+offload:mlp",
        f"{UNION}+mlp_act+offload:gdn_core_attn+offload:mlp@auto",
    ),
}
"""Recompute, and offload of what it leaves: with `mlp_act` recomputed `offload:mlp` moves what is held for its replay, and half of what it moves
without. The stack has no MLP."""
OTHERS = ("full", "full+offload:block_input", "save_on_cpu", "save_on_cpu:gdn_core_attn", "checkpoint:sweep")


def default_arms(model: str, device: str) -> tuple[str, ...]:
    """What runs without `--arms`: TRL's offload only where it can."""
    return (CONTROL, *MOVING, *RECOMPUTING[model], *OTHERS, *([TRL] if device == "cuda" and importable() else []))


def warm_steps(text: str, args: argparse.Namespace) -> int:
    """Steps before the measured ones; `auto` needs more to settle: three windows and what it ignores."""
    return args.warm + (16 if text.endswith("@auto") else 0)


def arm_in_force(trainee: Any, text: str, args: argparse.Namespace) -> AbstractContextManager[Any]:
    """The arm with the options of the command line."""
    options = {"min_bytes": args.min_bytes, "max_pinned_gib": args.max_pinned_gib, "release_blocks": args.release_blocks}
    return in_force(trainee.model, text, args.kernels, {**options, "prefetch_blocks": args.prefetch_blocks})


def measure(trainee: Any, text: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one round of one arm."""
    if hasattr(trainee, "reset"):
        trainee.reset()
    moves, warm = "offload:" in text, warm_steps(text, args)
    with arm_in_force(trainee, text, args) as applied:
        around = around_of(applied)
        rows = [timed_step(trainee, index, applied if moves else None, args.device, around) for index in range(warm + args.steps)]
        ledger = ledger_sums(applied) if moves else None
        lead = lead_blocks(trainee, applied, len(rows)) if moves else None
    return {**medians(rows[warm:]), "losses": [loss for row in rows for loss in row["losses"]], "ledger": ledger, "lead_blocks": lead}


def measure_pair(trainee: Any, pair: tuple[str, str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Control and arm in turns of one step; both train the same weights, so their losses are no comparison.

    `auto` settles in the warm-up. In turns a step of its clock is one of each, so it tolerates twice as much there and hardly goes down further.
    """
    if hasattr(trainee, "reset"):
        trainee.reset()
    arm = pair[0] if pair[1] == CONTROL else pair[1]
    other, moves = copy.copy(trainee), "offload:" in arm
    other.model = twin(trainee.model)
    with arm_in_force(trainee, CONTROL, args), arm_in_force(other, arm, args) as applied:
        around, steps = around_of(applied), itertools.count()
        for _ in range(warm_steps(arm, args)):
            timed_step(other, next(steps), applied if moves else None, args.device, around)

        def step(which: str) -> dict[str, Any]:
            told, context = (applied if moves else None, around) if which == arm else (None, nullcontext)
            row = timed_step(other if which == arm else trainee, next(steps), told, args.device, context)
            return {name: value for name, value in row.items() if name != "losses"}

        found = in_turns(pair, step, args.steps)
        found[arm]["ledger"] = ledger_sums(applied) if moves else None
    return {which: {"ledger": None, **row, "losses": []} for which, row in found.items()}


def print_moved(arms: dict[str, Any]) -> None:
    """One line per arm that moves something."""
    names = {
        "moved_mib": "moved MiB",
        "out_gb_s": "GB/s out",
        "in_gb_s": "GB/s in",
        "stall_ms": "stall ms",
        "exposed_host_ms": "host ms",
        "hidden_share": "hidden",
    }
    names |= {"pinned_mib": "pinned MiB", "fallbacks": "stayed", "fraction": "share", "lead_blocks": "lead"}
    width = max(map(len, arms))
    print(f"{'arm':{width}s}" + "".join(f"{title:>12s}" for title in names.values()) + "  losses")
    for arm, entry in arms.items():
        cells = [f"{entry['offload'][name]['median']:12.2f}" if name in entry["offload"] else f"{'':12s}" for name in names]
        print(f"{arm:{width}s}{''.join(cells)}  {entry['losses']}")


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("stack", "qwen3_5_0_8b"), default="stack")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=20, help="of the stack")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, help="default: 2 for the stack, 1 for the model")
    parser.add_argument("--micro-batches", type=int, default=1, help="per step, of the model")
    parser.add_argument("--kernels", choices=("stock", "fused"), default="stock")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--arms", help="default: what the model can run, see the script")
    parser.add_argument("--min-bytes", type=int, default=MIB)
    parser.add_argument("--max-pinned-gib", type=float)
    parser.add_argument("--release-blocks", type=int, default=1)
    parser.add_argument("--prefetch-blocks", type=int, default=1)
    parser.add_argument("--beside", action="store_true", help="control and arm in turns of one step: where the host decides")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.batch = args.batch or (2 if args.model == "stack" else 1)
    wanted = ",".join(default_arms(args.model, args.device)) if args.arms is None else args.arms
    versions = check("offload_model.py", wanted.split(","), args.device)
    trainee: Any
    if args.model == "stack":
        trainee = Stack(device=args.device, layers=args.layers, seq=args.seq, batch=args.batch)
    else:
        trainee = Qwen(device=args.device, seq=args.seq, batch=args.batch, micro_batches=args.micro_batches, restarts=True)
    blocks = args.layers if args.model == "stack" else trainee.recipe.model.num_hidden_layers
    arms = list(dict.fromkeys([CONTROL, *arms_of(wanted, blocks)]))
    measure(trainee, CONTROL, args)  # compiles and tunes
    bare = [bare_rates(args.device)]
    beside: dict[str, Any] = {}
    if args.beside:
        beside = {"control_of": lambda arm: CONTROL, "side_by_side": lambda pair, index: measure_pair(trainee, pair, args)}
    rounds = alternate(arms, args.rounds, lambda arm, index: measure(trainee, arm, args), seconds=args.seconds, **beside)
    bare.append(bare_rates(args.device))
    judged = judge(rounds, blocks, args.kernels)
    want = rounds[CONTROL][0]["losses"]
    for arm, entry in judged["arms"].items():
        rows = rounds[arm]
        equal = all(mine == theirs for row in rows for mine, theirs in zip(row["losses"], want, strict=False))
        compared = all(row["losses"] for row in rows)
        entry |= {"offload": figures(rows, MOVED), "losses": ("bit-equal" if equal else "differ") if compared else "not compared"}
        entry["ledger"] = rows[-1]["ledger"]
    print_table(judged)
    print_moved(judged["arms"])
    rates = {name: spread([each[name] for each in bare]) for name in bare[0]}
    if rates:
        print(told_rates({name: rate["median"] for name, rate in rates.items()}))
    options = {key: value for key, value in vars(args).items() if key not in ("out", "arms")}
    head: dict[str, Any] = header("offload_model.py") if args.device == "cuda" else {"device": "cpu", "versions": {}}
    head["versions"] |= versions
    write({**head, "options": options, "bare": rates, **judged}, args.out)


if __name__ == "__main__":
    main()
