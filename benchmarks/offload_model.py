"""Offload under whole models: control, offload labels, recompute with offload, and `save_on_cpu`, in alternating rounds of one process.

    python benchmarks/offload_model.py --model stack --out record.json               # 20-layer GDN stack, 8192 tokens, batch 2
    python benchmarks/offload_model.py --model qwen3_5_0_8b --seq 4096 --out record.json     # AdamW, FLA's fused linear cross entropy
    python benchmarks/offload_model.py --model stack --layers 3 --seq 512 --device cpu --rounds 1    # runs anywhere; its times mean nothing

Per arm and round: `--warm` steps, then `--steps` measured ones; deltas are paired with `none` of the same round. `act` is what is allocated
after the forward beyond what was before it, `peak` the allocated peak of a step, weights included. `moved` is copied out per step, `stall`
the time for which compute waited for copies, `hidden` the share of the copy time that it did not wait for. `bare` are plain pinned copies
of 256 MiB, both ways at once, in the same process: the rate that offload's is a share of. Losses are compared with the control's bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gdn import apply_plan
from lightning_gdn.bench.arms import parse
from lightning_gdn.bench.environment import collect
from lightning_gdn.bench.records import SCHEMA, write_json
from lightning_gdn.bench.rivals import install
from lightning_gdn.labels import Selection

MIB = 2**20
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
    """Bytes now and at the peak since the last reset; zeros on a CPU."""
    return (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) if device == "cuda" else (0, 0)


def in_force(model: nn.Module, text: str, args: argparse.Namespace) -> AbstractContextManager[Any]:
    """The arm, labels with the benchmark's options or a rival."""
    chosen = parse(text)
    if not isinstance(chosen, Selection):
        return install(model, chosen, kernels=args.kernels)
    if chosen.offload is not None:
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
            row: dict[str, Any] = {"ms": (time.perf_counter() - start) * 1e3, "act_mib": act / MIB, "peak_mib": allocated(args.device)[1] / MIB}
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


@contextlib.contextmanager
def room(device: str) -> Iterator[None]:
    """An arm that runs out of memory is a row of the table, and the next one starts clean."""
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def spread(values: list[Any]) -> dict[str, float] | None:
    """Median and range."""
    known = [value for value in values if value is not None]
    return {"median": round(statistics.median(known), 3), "min": round(min(known), 3), "max": round(max(known), 3)} if known else None


def table(arms: dict[str, Any]) -> None:
    """Print what the record holds."""
    from rich.console import Console
    from rich.table import Table

    shown: dict[str, Callable[[dict[str, Any]], Any]] = {
        "step ms": lambda entry: entry["ms"],
        "Δ ms %": lambda entry: entry["ms_delta_pct"],
        "act MiB": lambda entry: entry["act_mib"],
        "peak MiB": lambda entry: entry["peak_mib"],
        "moved MiB": lambda entry: entry.get("moved_mib"),
        "GB/s out": lambda entry: entry.get("out_gb_s"),
        "GB/s in": lambda entry: entry.get("in_gb_s"),
        "stall ms": lambda entry: entry.get("stall_ms"),
        "hidden": lambda entry: entry.get("hidden_share"),
        "pinned MiB": lambda entry: entry.get("pinned_mib"),
    }
    made = Table(title="median of the rounds", title_justify="left")
    made.add_column("arm")
    for name in (*shown, "losses"):
        made.add_column(name, justify="right")
    for name, entry in arms.items():
        if "error" in entry:
            made.add_row(name, entry["error"], *[""] * len(shown))
            continue
        values = [call(entry) for call in shown.values()]
        made.add_row(name, *("" if value is None else f"{value['median']:,.2f}" for value in values), entry["losses"])
    Console(width=200).print(made)


def main() -> None:
    """Measure, print a table, write the record."""
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
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--min-bytes", type=int, default=MIB)
    parser.add_argument("--max-pinned-gib", type=float)
    parser.add_argument("--release-blocks", type=int, default=1)
    parser.add_argument("--prefetch-blocks", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.batch = args.batch or (2 if args.model == "stack" else 1)
    arms = list(dict.fromkeys(["none", *args.arms.split(",")]))
    trainee: Any = Stack(args) if args.model == "stack" else Qwen(args)
    measure(trainee, "none", args)  # compiles and tunes
    bare = [bare_rates(args.device)]
    rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    errors: dict[str, str] = {}
    for index in range(args.rounds):
        for arm in arms if index % 2 == 0 else arms[::-1]:
            with room(args.device):
                try:
                    rounds[arm].append(measure(trainee, arm, args))
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    errors[arm] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    trainee.model.zero_grad(set_to_none=True)
        bare.append(bare_rates(args.device))
    entries: dict[str, Any] = {}
    for arm in arms:
        rows, base = rounds[arm], rounds["none"]
        if arm in errors or not rows:
            entries[arm] = {"error": errors.get(arm, "no round")}
            continue
        entry: dict[str, Any] = {key: spread([row[key] for row in rows]) for key in rows[0] if key not in ("losses", "ledger")}
        for key in ("ms", "act_mib", "peak_mib"):
            pairs = [(row[key], other[key]) for row, other in zip(rows, base, strict=False)]
            entry[f"{key}_delta_pct"] = spread([(value / other - 1) * 100 if other else None for value, other in pairs])
        count = min(len(row["losses"]) for row in (*rows, *base))
        equal = all(row["losses"][:count] == base[0]["losses"][:count] for row in rows)
        ledger = rows[-1]["ledger"]
        entry["losses"] = "bit-equal" if equal else "differ"
        entry["ledger"] = None if ledger is None else {key: value for key, value in ledger.items() if key != "by_region"}
        entries[arm] = entry
    table(entries)
    both = {way: spread([rates[way] for rates in bare]) for way in bare[0]}
    if both:
        print("bare pinned copies, both ways at once:", ", ".join(f"{way} {rate['median']:.1f}" for way, rate in both.items() if rate))
    if args.out:
        options = {key: value for key, value in vars(args).items() if key not in ("out", "arms")}
        command = "python benchmarks/offload_model.py " + " ".join(sys.argv[1:])
        record = {"schema": SCHEMA, "command": command, "environment": collect("gpu" if args.device == "cuda" else "cpu"), "options": options}
        write_json(args.out, {**record, "bare": both, "arms": entries})


if __name__ == "__main__":
    main()
