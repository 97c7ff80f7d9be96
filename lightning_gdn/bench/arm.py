"""One arm: train a recipe once with one plan and write one JSON record.

    python -m lightning_gdn.bench.arm --recipe resolved.yaml --arm gdn_conv --round 0 --out record.json

`compare` starts this in a fresh process per arm and round; `run` calls `run_arm` in its own. A failure is a record too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn

from ..apply import AppliedPlan, instrument
from ..callbacks import MemoryMonitor
from ..callbacks._report import is_oom
from ..strategies import GDNRecomputeStrategy
from .arms import Rival, configured, parse
from .data import Text, make_loaders, read_text
from .ending import TerminatedError, exit_code, terminated_cleanly
from .environment import collect
from .errors import UserError
from .flops import FLOPS_FORMULA, flops_per_token
from .garbage import frozen_garbage
from .module import BenchModule, fused_loss_problem, make_module, meta_model
from .ranks import RankNotes, merge, started_rank
from .recipes import load
from .records import SCHEMA, write_json
from .rivals import RivalCallback, without_a_trace
from .schema import Recipe

__all__ = ["ControlProbe", "check_device", "failure", "main", "make_trainer", "run_arm"]

PROGRESS = "@step"
"""First word of a progress line on stdout: `@step DONE TOTAL`."""


def check_device(recipe: Recipe) -> str:
    """`"cpu"` or `"gpu"`, as Lightning will choose.

    Raises:
        UserError: a GPU was asked for and torch sees none, or fewer than `trainer.devices`, or `trainer.loss` cannot run there.
    """
    wanted = recipe.trainer.accelerator
    there = torch.cuda.is_available()
    if wanted == "gpu" and not there:
        built = torch.version.cuda
        why = f"torch {torch.__version__} is a CPU build" if built is None else f"torch {torch.__version__} (CUDA {built}) sees no device"
        raise UserError(f"trainer.accelerator: gpu was asked for, but {why}; write trainer.accelerator=cpu, or use recipes/demo_cpu.yaml")
    device = "gpu" if there and wanted != "cpu" else "cpu"
    if device == "gpu" and recipe.trainer.devices > max(1, torch.cuda.device_count()):
        raise UserError(f"trainer.devices: got {recipe.trainer.devices}, torch sees {torch.cuda.device_count()} GPUs")
    if recipe.trainer.loss == "fused_linear_cross_entropy":
        problem = fused_loss_problem("cuda" if device == "gpu" else device)
        if problem:
            raise UserError(problem)
    return device


class ControlProbe(L.Callback):
    """Before training starts, count what the untouched model retains: one forward and backward that leaves no trace.

    The random stream is put back and gradients are dropped, so the training after it is that of a model that was never looked at.
    """

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch
        self.ledger: dict[str, Any] | None = None
        self.kernels: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batch = self.batch.to(pl_module.device)
        with without_a_trace(pl_module, pl_module.device):
            with instrument(pl_module) as ledger, trainer.precision_plugin.train_step_context():
                loss = pl_module(batch)
            loss.backward()
            del loss
        self.ledger, self.kernels = ledger.as_dict(), dict(ledger.kernels)


class _Progress(L.Callback):
    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self.report, self.total, self.done = report, total, 0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self.done and trainer.is_global_zero:
            self.done = trainer.global_step
            self.report(self.done, self.total)


def run_arm(
    recipe: Recipe,
    saved: Mapping[str, Any],
    arm: str,
    *,
    round_index: int = 0,
    folder: Path | None = None,
    text: Text | None = None,
    progress: Callable[[int, int], None] | None = None,
    interactive: bool = False,
    logger: Any = False,
) -> dict[str, Any]:
    """Train `recipe` once with `arm`, and describe the run.

    Args:
        saved: the resolved recipe as it goes into the record (without values of environment variables).
        folder: where MemoryMonitor writes its file per rank; nowhere if None.
        progress: called after each optimizer step with (done, total).
        interactive: show progress bar and MemoryMonitor's table.
        logger: a Lightning logger, or False.

    Returns:
        The record. `status` is `ok`, `oom` or `failed`; then `error` is the last line of the error. `losses_hex` holds every
        micro-batch's loss in training order, as exact hexadecimal floats; `retained_bytes` is what the model's blocks hold between the
        forward and the backward of one micro-batch, of an arm that moves something in the last step (`ledger` is of the first forward), and
        `offload` says of which share of the bytes that is. With several devices it is rank 0's record, with the parts of all ranks in `ranks`;
        the record that another rank returns is its own and goes nowhere.
    """
    if recipe.trainer.num_threads:
        torch.set_num_threads(recipe.trainer.num_threads)
    device = check_device(recipe)
    started = time.perf_counter()
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "arm": arm,
        "round": round_index,
        "status": "failed",
        "error": None,
        "environment": collect(device),
        "recipe": {**saved, "plan": {**saved["plan"], "arm": arm}},
    }
    module = make_module(recipe)
    monitor = probe = strategy = notes = rival = None
    with terminated_cleanly() as ending:
        try:
            text = text or read_text(recipe.data)
            record["text"] = text.as_dict()
            train, validation = make_loaders(text, recipe)
            monitor = _monitor(recipe, folder, interactive)
            notes = RankNotes(recipe, monitor)
            callbacks: list[L.Callback] = [notes, monitor]
            chosen = parse(arm)
            control = not isinstance(chosen, Rival) and chosen.is_control
            if isinstance(chosen, Rival):
                rival = RivalCallback(chosen, recipe.plan.kernels, next(iter(train)))  # under Lightning's own strategy, as the control
                callbacks.append(rival)
            elif control and recipe.plan.kernels == "stock":
                probe = ControlProbe(next(iter(train)))
                callbacks.append(probe)
            else:
                # the control of fused kernels is installed too: every region kept, the same kernels as in the other arms
                chosen = configured(chosen, recipe.offload)
                strategy = GDNRecomputeStrategy(chosen.recompute, offload=chosen.offload or (), kernels=recipe.plan.kernels)
            if progress is not None:
                callbacks.append(_Progress(progress, recipe.trainer.max_steps))
            trainer = make_trainer(recipe, device, strategy, callbacks, interactive, logger)
            with frozen_garbage():
                ending.fit(trainer, module, train, validation)
            record["status"] = "ok"
        except TerminatedError as stop:
            record["error"] = str(stop)
        except Exception as error:  # noqa: BLE001  an arm that fails is a row of the table, whatever failed it
            record["status"], record["error"] = failure(error)
            traceback.print_exc()
        finally:
            if rival is not None:
                rival.undo()
    _describe(record, module, monitor, rival or probe, strategy)
    parts = notes.gather(record) if notes else None
    if parts is not None:
        merge(record, parts)
    record["wall_s"] = time.perf_counter() - started
    return record


def _monitor(recipe: Recipe, folder: Path | None, interactive: bool) -> MemoryMonitor:
    tokens = recipe.data.batch_size * recipe.data.seq_len * recipe.trainer.accumulate_grad_batches
    return MemoryMonitor(
        warmup_steps=recipe.monitor.warmup_steps,
        dir=None if folder is None else str(folder),
        tokens_per_step=tokens,
        flops_per_token=flops_per_token(meta_model(recipe), recipe.data.seq_len),
        table=interactive,
        progress_bar=interactive,
    )


def make_trainer(recipe: Recipe, device: str, strategy: Any, callbacks: list[L.Callback], interactive: bool, logger: Any) -> L.Trainer:
    """Lightning's Trainer for a recipe; `strategy` None is Lightning's own."""
    config = recipe.trainer
    validates = bool(config.val_every)
    return L.Trainer(
        accelerator=device,
        devices=config.devices,
        strategy=strategy or "auto",
        precision=config.precision,  # type: ignore[arg-type]
        max_steps=config.max_steps,
        max_epochs=1,
        accumulate_grad_batches=config.accumulate_grad_batches,
        gradient_clip_val=config.grad_clip,
        val_check_interval=config.val_every * config.accumulate_grad_batches if validates else None,
        check_val_every_n_epoch=None if validates else 1,
        limit_val_batches=config.val_batches if validates else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_model_summary=interactive,
        enable_progress_bar=interactive,
    )


def _describe(record: dict[str, Any], module: BenchModule, monitor: Any, probe: ControlProbe | RivalCallback | None, strategy: Any) -> None:
    """Fill in what was measured, as far as the run came."""
    applied = getattr(strategy, "last_applied", None)
    rival = probe if isinstance(probe, RivalCallback) else None
    ledger = probe.ledger if isinstance(probe, ControlProbe) else (applied.ledger.as_dict() if applied else None)
    retained = rival.retained_bytes if rival else (applied.retained_bytes if applied else ledger["retained_bytes"] if ledger else None)
    losses = [float(loss) for loss in module.losses] if record["status"] == "ok" else []
    on_cpu = record["environment"]["device"] == "cpu"
    record |= {
        "plan": rival.plan if rival else "none" if probe else (str(applied.plan) if applied else None),
        "blocks": rival.blocks if rival else None,
        "kernels": dict(probe.kernels if probe else (applied.kernels if applied else {})),
        "retained_bytes": retained,
        "ledger": ledger,
        "offload": _share(applied),
        "losses_hex": [loss.hex() for loss in losses],
        "loss_first": _finite(losses[0]) if losses else None,
        "loss_last": _finite(losses[-1]) if losses else None,
        "val_losses_hex": [float(loss).hex() for loss in module.val_losses] if record["status"] == "ok" else [],
        "weights_sha256": _weights_hash(module) if on_cpu and record["status"] == "ok" else None,
        "flops_formula": FLOPS_FORMULA,
        "monitor": getattr(monitor, "summary", None) or None,
    }


def _share(applied: AppliedPlan | None) -> dict[str, Any] | None:
    """The share of the bytes that was asked for and that the last step had, whether it is to stay, and what `retained_bytes` is of."""
    if applied is None or applied.engines is None:
        return None
    step = applied.last_step
    return {
        "asked": applied.engines.config.fraction,
        "fraction": None if step is None else step.fraction,
        "settled": step is not None and applied.engines.settled(step.fraction),
        "retained_of": applied.retained_of,
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _weights_hash(module: nn.Module) -> str:
    """One number for all weights after training: on a CPU equal plans must end at equal weights."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def failure(error: BaseException) -> tuple[str, str]:
    """Status (`oom` or `failed`) and last line of an error, as a record holds them."""
    return "oom" if is_oom(error) else "failed", _last_line(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the arm's own process; the exit code is that of `ending.exit_code`, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m lightning_gdn.bench.arm", description="Train one arm of a comparison.")
    parser.add_argument("--recipe", required=True, type=Path)
    parser.add_argument("--arm", required=True)
    parser.add_argument("--round", required=True, type=int)
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args(argv)
    loaded = load(str(given.recipe))
    steps = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    # whatever libraries print goes to the log with stderr; stdout carries progress alone
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def progress(done: int, total: int) -> None:
        try:
            print(PROGRESS, done, total, file=steps)
        except BrokenPipeError:  # nobody waits for this arm any more: it ends, and leaves no record that would blame it
            raise SystemExit("the comparison that started this arm is gone") from None

    try:
        record = run_arm(loaded.recipe, loaded.saved, given.arm, round_index=given.round, folder=given.out.parent, progress=progress)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if loaded.recipe.trainer.devices == 1 or started_rank() == 0:
        write_json(given.out, record)
    return exit_code(record)


if __name__ == "__main__":
    sys.exit(main())
