"""Offload under whole models: control, offload labels, recompute with offload, and `save_on_cpu`, in alternating rounds of one process.

    python benchmarks/offload_model.py --model stack --out record.json               # 20-layer GDN stack, 8192 tokens, batch 2
    python benchmarks/offload_model.py --model qwen3_5_0_8b --seq 4096 --out record.json     # AdamW, FLA's fused linear cross entropy
    python benchmarks/offload_model.py --model stack --layers 3 --seq 256 --device cpu --rounds 1    # runs anywhere; its times mean nothing

Per arm and round: `--warm` steps, then `--steps` measured ones; deltas are paired with `none` of the same round. `act` is what is allocated
after the forward beyond what was before it, `peak` the allocated peak of a step, weights included (on a CPU the process's). `moved` is
copied out per step, `stall` the time for which compute waited for copies, `hidden` the share of the copy time that it did not wait for.
`bare` are plain pinned copies of 256 MiB, both ways at once, in the same process: the rate that offload's is a share of. Losses are compared
with the control's bit for bit.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rounds import CONTROL, MIB, alternate, arms_of, header, judge, print_table, spread, under, write
from torch import Tensor, nn

from lightning_gdn import apply_plan
from lightning_gdn.bench.arms import parse
from lightning_gdn.labels import Selection

ARMS = (
    "none",
    "offload:gdn_core_attn",
    "offload:gdn_core_attn@0.5",
    "offload:gdn_core_attn@auto",
    "offload:gdn_core_attn+offload:gdn_norm_out",
    "gdn_conv+gdn_norm_out+layernorm",
    "gdn_conv+gdn_norm_out+layernorm+offload:gdn_core_attn",
    "full",
    "full+offload:block_input",
    "save_on_cpu",
)


class Stack:
    """Forward, mean square of the output, backward; no optimizer."""

    def __init__(self, args: argparse.Namespace) -> None:
        from lightning_gdn.models import GDNStack

        torch.manual_seed(0)
        small = {} if args.device == "cuda" else {"hidden_size": 256, "num_k_heads": 4, "num_v_heads": 4, "head_k_dim": 32, "head_v_dim": 32}
        self.model: nn.Module = GDNStack(num_layers=args.layers, **small).to(args.device, torch.bfloat16)
        for name, parameter in self.model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.data.float()
        self.x = torch.randn(args.batch, args.seq, small.get("hidden_size", 2048), device=args.device, dtype=torch.bfloat16)

    def forward(self, index: int) -> Tensor:
        """The loss."""
        return self.model(self.x.clone().requires_grad_(True)).float().square().mean()

    def update(self) -> None:
        """After the backward."""
        self.model.zero_grad(set_to_none=True)


class Qwen:
    """Qwen3.5-0.8B, random weights, AdamW, FLA's fused linear cross entropy: one optimizer step per sequence."""

    def __init__(self, args: argparse.Namespace) -> None:
        from fla.modules import FusedLinearCrossEntropyLoss

        from lightning_gdn.bench.data import make_loaders, read_text
        from lightning_gdn.bench.module import build_model
        from lightning_gdn.bench.recipes import load

        recipe = load("qwen3_5_0_8b", [f"data.seq_len={args.seq}", f"data.batch_size={args.batch}"]).recipe
        with torch.device("cuda"):
            self.model: Any = build_model(recipe).train()
        self.loss = FusedLinearCrossEntropyLoss()
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        train, _ = make_loaders(read_text(recipe.data), recipe)
        self.batches = [batch.cuda() for _, batch in zip(range(8), train, strict=False)]

    def forward(self, index: int) -> Tensor:
        """The loss."""
        ids = self.batches[index % len(self.batches)]
        hidden = self.model.model(input_ids=ids).last_hidden_state
        return self.loss(hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1), self.model.lm_head.weight)

    def update(self) -> None:
        """After the backward."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """The same weights and a fresh optimizer for every arm and round."""
        self.model.load_state_dict(self.start)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> tuple[int, int]:
    """Bytes now and at the peak since the last reset; on a CPU nothing and the process's peak."""
    if device == "cuda":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_force(model: nn.Module, text: str, args: argparse.Namespace) -> AbstractContextManager[Any]:
    """The arm; one that moves with the options of the command line."""
    chosen = parse(text)
    if not isinstance(chosen, Selection) or chosen.offload is None:
        return under(model, text, args.kernels)
    options = {"min_bytes": args.min_bytes, "max_pinned_gib": args.max_pinned_gib, "release_blocks": args.release_blocks}
    chosen = replace(chosen, offload=replace(chosen.offload, **options, prefetch_blocks=args.prefetch_blocks))
    return apply_plan(model, chosen, kernels=args.kernels)


def measure(trainee: Any, text: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one round of one arm."""
    if hasattr(trainee, "reset"):
        trainee.reset()
    moves = "offload:" in text
    warm = args.warm + (6 if text.endswith("@auto") else 0)  # what `auto` needs to settle
    rows: list[dict[str, Any]] = []
    losses: list[str] = []
    with in_force(trainee.model, text, args) as applied:
        for index in range(warm + args.steps):
            synchronize(args.device)
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before, start = allocated(args.device)[0], time.perf_counter()
            loss = trainee.forward(index)
            act = allocated(args.device)[0] - before
            loss.backward()
            trainee.update()
            synchronize(args.device)
            row: dict[str, Any] = {"ms": (time.perf_counter() - start) * 1e3, "peak_mib": allocated(args.device)[1] / MIB}
            if args.device == "cuda":
                row["act_mib"] = act / MIB
            losses.append(float(loss.detach()).hex())
            del loss
            told = applied.step_statistics() if moves else None
            if told is not None:
                row |= {"moved_mib": told.bytes_out / MIB, "stall_ms": told.stall_ms, "pinned_mib": told.pinned_held / MIB}
                row |= {name: getattr(told, name) for name in ("out_gb_s", "in_gb_s", "hidden_share", "late", "fallbacks", "fraction")}
            rows.append(row)
        ledger = applied.ledger.as_dict() if moves else None
    measured = rows[warm:]
    found = {key: median([row[key] for row in measured]) for key in measured[0]}
    return {**found, "losses": losses, "ledger": ledger}


def median(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def bare_rates(device: str) -> dict[str, float]:
    """10⁹ bytes per second of plain copies between pinned and device memory, both ways at once."""
    if device != "cuda":
        return {}
    size, count = 256 * MIB, 8
    marks: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
    buffers = [(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8, device="cuda")) for _ in range(2)]
    torch.cuda.synchronize()
    for way, (host, gpu) in zip(("out", "in"), buffers, strict=True):
        stream = torch.cuda.Stream()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record(stream)
            for _ in range(count):
                (host if way == "out" else gpu).copy_(gpu if way == "out" else host, non_blocking=True)
            end.record(stream)
        marks[way] = start, end
    torch.cuda.synchronize()
    return {f"{way}_gb_s": count * size / start.elapsed_time(end) / 1e6 for way, (start, end) in marks.items()}


def moved_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and range over rounds of what the engine told; empty for an arm that moves nothing."""
    found: dict[str, Any] = {}
    for name in ("moved_mib", "stall_ms", "hidden_share", "out_gb_s", "in_gb_s", "pinned_mib", "late", "fallbacks", "fraction"):
        known = [row[name] for row in rows if row.get(name) is not None]
        if known:
            found[name] = spread(known)
    return found


def print_moved(arms: dict[str, Any]) -> None:
    """One line per arm that moves something."""
    names = {"moved_mib": "moved MiB", "out_gb_s": "GB/s out", "in_gb_s": "GB/s in", "stall_ms": "stall ms", "hidden_share": "hidden"}
    names |= {"pinned_mib": "pinned MiB", "fallbacks": "stayed", "fraction": "share"}
    print(f"{'arm':56s}" + "".join(f"{title:>12s}" for title in names.values()) + "  losses")
    for arm, entry in arms.items():
        cells = [f"{entry['offload'][name]['median']:12.2f}" if name in entry["offload"] else f"{'':12s}" for name in names]
        print(f"{arm:56s}{''.join(cells)}  {entry['losses']}")


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("stack", "qwen3_5_0_8b"), default="stack")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=20, help="of the stack")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, help="default: 2 for the stack, 1 for the model")
    parser.add_argument("--kernels", choices=("stock", "fused"), default="stock")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--min-bytes", type=int, default=MIB)
    parser.add_argument("--max-pinned-gib", type=float)
    parser.add_argument("--release-blocks", type=int, default=1)
    parser.add_argument("--prefetch-blocks", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.batch = args.batch or (2 if args.model == "stack" else 1)
    trainee: Any = Stack(args) if args.model == "stack" else Qwen(args)
    blocks = args.layers if args.model == "stack" else 24
    arms = list(dict.fromkeys([CONTROL, *arms_of(args.arms, blocks)]))
    measure(trainee, CONTROL, args)  # compiles and tunes
    bare = [bare_rates(args.device)]
    rounds = alternate(arms, args.rounds, lambda arm, index: measure(trainee, arm, args), seconds=args.seconds)
    bare.append(bare_rates(args.device))
    judged = judge(rounds, blocks, args.kernels)
    want = rounds[CONTROL][0]["losses"]
    for arm, entry in judged["arms"].items():
        rows = rounds[arm]
        equal = all(mine == theirs for row in rows for mine, theirs in zip(row["losses"], want, strict=False))
        ledger = rows[-1]["ledger"]
        entry |= {"offload": moved_figures(rows), "losses": "bit-equal" if equal else "differ"}
        entry["ledger"] = None if ledger is None else {key: value for key, value in ledger.items() if key != "by_region"}
    print_table(judged)
    print_moved(judged["arms"])
    rates = {way: spread([each[way] for each in bare]) for way in bare[0]}
    if rates:
        print("bare pinned copies, both ways at once: " + ", ".join(f"{way} {rate['median']:.1f}" for way, rate in rates.items()))
    options = {key: value for key, value in vars(args).items() if key not in ("out", "arms")}
    head = header("offload_model.py") if args.device == "cuda" else {"device": "cpu"}
    write({**head, "options": options, "bare": rates, **judged}, args.out)


if __name__ == "__main__":
    main()
