"""The models of the offload benchmarks, an arm in force on them, and one optimizer step with what it took."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from rounds import MIB, under
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from trl_offload import ARM as TRL
from trl_offload import under_trl

from lightning_gdn import apply_plan
from lightning_gdn.bench.arms import SAVE_ON_CPU, parse
from lightning_gdn.bench.data import make_loaders, read_text
from lightning_gdn.bench.module import build_model
from lightning_gdn.bench.recipes import load
from lightning_gdn.labels import Selection

TOLD = ("out_gb_s", "in_gb_s", "exposed_host_ms", "hidden_share", "late", "fallbacks", "fraction")
"""What a row takes from the engine's statistics by their own names."""
Around = Callable[[], AbstractContextManager[Any]]
"""Makes what is open around forward and backward of one micro-batch."""
SMALL = (
    "hidden_size=64 intermediate_size=128 num_hidden_layers=4 num_attention_heads=2 num_key_value_heads=1 head_dim=32 linear_num_key_heads=2 "
    "linear_num_value_heads=2 linear_key_head_dim=16 linear_value_head_dim=16 vocab_size=256"
).split()
"""Qwen3.5 on a CPU: the same code at a size that runs anywhere."""


class Stack:
    """GDN layers: forward, mean square of the output, backward; no optimizer."""

    micro_batches = 1

    def __init__(self, *, device: str, layers: int = 20, seq: int = 8192, batch: int = 2) -> None:
        from lightning_gdn.models import GDNStack

        torch.manual_seed(0)
        small = {} if device == "cuda" else {"hidden_size": 256, "num_k_heads": 4, "num_v_heads": 4, "head_k_dim": 32, "head_v_dim": 32}
        with torch.device(device):
            self.model: nn.Module = GDNStack(num_layers=layers, **small).to(torch.bfloat16)
        for name, parameter in self.model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.data.float()
        self.x = torch.randn(batch, seq, small.get("hidden_size", 2048), device=device, dtype=torch.bfloat16)

    def forward(self, index: int) -> Tensor:
        """The loss."""
        return self.model(self.x.clone().requires_grad_(True)).float().square().mean()

    def update(self) -> None:
        """After the backward."""
        self.model.zero_grad(set_to_none=True)


class Qwen:
    """Qwen3.5-0.8B, random weights in bf16 with float32 `A_log` and `dt_bias`, fused AdamW, FLA's fused linear cross entropy.

    On a CPU a small model with the loss of transformers. `batches` sequences are on the device from the start; they repeat after that.
    """

    def __init__(
        self,
        *,
        device: str,
        seq: int,
        batch: int = 1,
        micro_batches: int = 1,
        batches: int = 8,
        overrides: Sequence[str] = (),
        restarts: bool = False,
    ) -> None:
        self.micro_batches = micro_batches
        wanted = [f"data.seq_len={seq}", f"data.batch_size={batch}", f"trainer.max_steps={batches}", "trainer.accumulate_grad_batches=1"]
        if device == "cpu":
            wanted += ["trainer.accelerator=cpu", *(f"model.{size}" for size in SMALL)]
        self.recipe = load("qwen3_5_0_8b", [*wanted, *overrides]).recipe
        train, _ = make_loaders(read_text(self.recipe.data), self.recipe)
        with torch.device(device):
            self.model: Any = build_model(self.recipe).train()
        self.batches = [ids.to(device) for ids in train]
        self.loss: Any = None
        if device == "cuda":
            from fla.modules import FusedLinearCrossEntropyLoss

            self.loss = FusedLinearCrossEntropyLoss()
        self.start = {name: tensor.clone() for name, tensor in self.model.state_dict().items()} if restarts else {}
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def forward(self, index: int) -> Tensor:
        """The loss of sequence `index`."""
        ids = self.batches[index % len(self.batches)]
        if self.loss is None:
            return self.model(input_ids=ids, labels=ids).loss
        hidden = self.model.model(input_ids=ids).last_hidden_state
        return self.loss(hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1), self.model.lm_head.weight)

    def update(self) -> None:
        """After the backward."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """The same weights and a fresh optimizer for every arm and round; `restarts` keeps a copy of the weights for it."""
        self.model.load_state_dict(self.start)
        self.optimizer = self._optimizer()


def optimizer_step(
    trainee: Any,
    index: int,
    *,
    around: Around = nullcontext,
    forwarded: Callable[[], None] | None = None,
    ended: Callable[[], None] | None = None,
) -> list[Tensor]:
    """Forward and backward of every micro-batch (gradients of the mean accumulate), each inside a context of `around`, then the update.

    `forwarded` is called after the first forward, `ended` after the last backward. Returns the losses.
    """
    parts, losses = trainee.micro_batches, []
    for part in range(parts):
        with around():
            loss = trainee.forward(index * parts + part)
            if part == 0 and forwarded is not None:
                forwarded()
            (loss if parts == 1 else loss / parts).backward()
        losses.append(loss.detach())
        del loss
    if ended is not None:
        ended()
    trainee.update()
    return losses


def hexes(values: Sequence[Tensor]) -> list[str]:
    """Exact."""
    return [float(value).hex() for value in values]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> tuple[int, int]:
    """Bytes now and at the peak since the last reset; on a CPU nothing and the process's peak."""
    if device == "cuda":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_force(model: nn.Module, text: str, kernels: str, options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """The arm; one that moves with these fields of `OffloadConfig`. Its steps run `around_of` what this yields."""
    if text == TRL:
        return under_trl(model, kernels)
    chosen = parse(text)
    if text == SAVE_ON_CPU:  # around the forward that runs: with FLA's loss the model's own is not called
        return under(getattr(model, "model", model), text, kernels)
    if not isinstance(chosen, Selection) or chosen.offload is None:
        return under(model, text, kernels)
    return apply_plan(model, replace(chosen, offload=replace(chosen.offload, **options)), kernels=kernels)


def around_of(applied: Any) -> Around:
    """What an arm opens around each micro-batch: TRL's context, otherwise nothing."""
    return (lambda: applied) if isinstance(applied, saved_tensors_hooks) else nullcontext


def timed_step(trainee: Any, index: int, applied: Any, device: str, around: Around = nullcontext) -> dict[str, Any]:
    """One step between two waits for the device: milliseconds, MiB, losses, and what the engine told. `applied` is None unless it moves."""
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, after = allocated(device)[0], [0]

    def forwarded() -> None:
        after[0] = allocated(device)[0]

    start = time.perf_counter()
    losses = optimizer_step(trainee, index, around=around, forwarded=forwarded)
    synchronize(device)
    row: dict[str, Any] = {"ms": (time.perf_counter() - start) * 1e3, "peak_mib": allocated(device)[1] / MIB, "losses": hexes(losses)}
    if device == "cuda":
        row |= {"act_mib": (after[0] - before) / MIB, "reserved_mib": torch.cuda.max_memory_reserved() / MIB}
    told = applied.step_statistics() if applied is not None else None
    if told is not None:
        row |= {"moved_mib": told.bytes_out / MIB, "stall_ms": told.stall_ms, "pinned_mib": told.pinned_held / MIB}
        row |= {name: getattr(told, name) for name in TOLD}
    return row


def ledger_sums(applied: Any) -> dict[str, Any]:
    """The ledger of an arm that moves something, all regions together."""
    return {name: value for name, value in applied.ledger.as_dict().items() if name != "by_region"}


def lead_blocks(trainee: Any, applied: Any, index: int) -> int | None:
    """Fewest blocks between enqueueing a reload and its use, over all reloads of one further step, which no time is taken of. None: no reload."""
    engines, timeline = list(applied.engines.by_device.values()), []
    for engine in engines:
        engine.timeline = timeline
    optimizer_step(trainee, index)
    applied.step_statistics()
    for engine in engines:
        engine.timeline = None
    return min((entry.during - entry.block for entry in timeline if entry.kind == "in"), default=None)


def settled(applied: Any) -> bool | None:
    """Whether `auto` has decided; None for an arm without it."""
    autos = [engine.auto for engine in applied.engines.by_device.values()] if applied.engines is not None else []
    return all(auto.settled for auto in autos) if autos and None not in autos else None


def median(values: Sequence[Any]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every figure of the rows."""
    return {key: median([row[key] for row in rows]) for key in rows[0] if key != "losses"}
