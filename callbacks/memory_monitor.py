"""MemoryMonitor: what a training step holds, how long it takes, and how sure one can be of it.

What is measured: optimizer steps in steady state. The first `warmup_steps` are passed over, and further ones until no Triton
autotuner gained an entry for two steps (at most `autotune_cap` steps in all). Of the later ones a step is left out, and counted,
if it tuned a kernel, if validation or a checkpoint fell into it or came directly before it, if it is the first of an epoch or was
cut short by the end of one. A fit without a steady step says so (`status`) and reports no figure of its warm-up.

What is touched: the device's peak counters are reset at the first micro-batch of every optimizer step and between its phases. The
monitor keeps its own running maxima, so somebody else's reset cannot lower them: it is seen before it happens and its peaks are
kept (`foreign_resets`), and one that cannot be seen is flagged (`disturbed_steps`). The other way round, code that reads
`torch.cuda.max_memory_allocated()` at the end of the run gets the last phase's peak only: read `summary` instead.

What it costs: one synchronisation per optimizer step, at its end; the losses, the wall clock and the CUDA events are read there.
None per micro-batch. Behind `window_steps` nothing is measured any more, only losses are kept.

Several processes: each rank measures itself. At the rows of the log rank 0 takes in what the others left for it and logs for all of
them; at the end every rank gets the figures of all. No collective is used, so that a rank without a steady step, without a logger,
with an earlier end or with an exception keeps nobody waiting for longer than some seconds; figures of a rank that was not heard of are
missing, and `notes` says so. With `start_method="spawn"` the calling process keeps an empty `summary`: read the files in `dir`.

Keys for every logger of the Trainer, logged at its `log_every_n_steps` over the steady steps since the last row and once at the end
over all of them, with `step` = batches that stepped, as LearningRateMonitor does. Figures that the device cannot give have no key.
Each also as `.../rank{r}` for every rank; over ranks it is the maximum, for tokens_per_s the sum.

| key | unit | meaning |
|---|---|---|
| `gdn/step_ms` | ms | median optimizer step: CUDA events on a CUDA device, else wall clock |
| `gdn/tokens_per_s` | 1/s | tokens of the steps / their summed step time; waiting for data is not in it |
| `gdn/peak_allocated_mib` | MiB | largest number of bytes in live tensors |
| `gdn/peak_reserved_mib` | MiB | largest number of bytes the caching allocator held |
| `gdn/retained_mib` | MiB | allocated after a micro-batch's forward minus before it; without allocator counters: the plan's count |
| `gdn/pinned_mib` | MiB | pinned host memory at the end of a step: of PyTorch's host allocator and of offload's pool, idle buffers included |
| `gdn/offload_out_mib` | MiB | moved to the host per optimizer step, if the plan moves something (median) |
| `gdn/offload_stall_ms` | ms | time per optimizer step for which compute waited for offload's copies, on a CUDA device (median) |
| `gdn/offload_exposed_host_ms` | ms | host time of offload per optimizer step with nothing to hide behind, on a CUDA device (median); in no stall |

`summary`, and `memory_rank{r}.json` in `dir`. None (null) is "not measured", never 0. Spreads are median, p95 (None below 20 steps),
max, min, mean.

| field | unit | meaning |
|---|---|---|
| `schema` | | 1 |
| `rank`, `world_size`, `device` | | whose figures, of how many, on what |
| `status` | | `ok`, `no_steady_steps`, `oom`, `error` |
| `reason` | | why the status is not `ok` |
| `stage`, `phase`, `step` | | Lightning's stage, phase of the step and `global_step` where the fit ended or failed |
| `at_exception` | MiB | allocated, reserved and peak when the fit failed, warm-up or not; else None |
| `plan`, `kernels`, `ledger` | | of the strategy in force, None without one |
| `warmup_steps` | steps | passed over in this fit |
| `autotune_capped` | | the warm-up ended although kernels were still being tuned |
| `steps`, `optimizer_steps` | steps | steady ones, all of this fit |
| `resumed_from_step`, `first_step`, `last_step` | step | `global_step` at the start, and after the first and last steady step |
| `step_ms`, `step_wall_ms`, `step_event_ms` | ms | spread of one optimizer step without gaps between its micro-batches; event is None off CUDA |
| `data_wait_ms` | ms | spread, per optimizer step, of the gaps before its micro-batches: loading, transfer, other callbacks' batch-end work |
| `tokens_per_s` | 1/s | as the key |
| `model_tflops`, `flops_formula` | TFLOP/s | model FLOPs (no recomputation counted) per second, and how they were counted |
| `peak_allocated_mib`, `peak_reserved_mib`, `peak_active_mib` | MiB | maximum over steady steps; active: blocks that wait for a stream included |
| `retained_mib`, `retained_source` | MiB | maximum over micro-batches; `allocator` or `ledger` |
| `phase_peak_mib` | MiB | peak allocated in `forward`, `backward`, `optimizer` |
| `pinned_mib` | MiB | as the key |
| `offload` | | what moved to the host, over steady steps (below); None if nothing may move |
| `alloc_retries` | count | allocator retries in steady steps |
| `foreign_resets`, `disturbed_steps` | count | resets by others, harmless; steps whose peaks are lower bounds |
| `nonfinite_losses` | count | micro-batches of the whole fit with a NaN or infinite loss |
| `skipped_optimizer_steps` | count | steps of the whole fit in which no backward or no optimizer update happened |
| `excluded_steps` | steps | left out, by reason: `warmup`, `autotune`, `validation`, `checkpoint`, `boundary` |
| `ranks` | as the keys | for each rank `status`, `reason`, `steps`, `device` and its logged figures; None if nothing was heard of it |
| `max_over_ranks` | as the keys | largest value of each logged figure and its rank |
| `losses`, `step_tokens` | | per optimizer step of the whole fit, warm-up included; a step with a non-finite loss has None |
| `step_times_ms` | ms | per steady step |
| `notes` | | what to know before using the figures |

`offload` holds, per optimizer step since the share of the bytes last changed (`steps` of them: `auto` settles on one), spreads of `out_mib`,
`in_mib`, `stall_ms` and `exposed_host_ms` (host work of offload with nothing to hide behind; in no stall), over all of these `out_gb_s`,
`in_gb_s` (10^9 bytes per second) and the `hidden_share` of the copy time, `stayed_mib` per step by reason, `largest_small_mib` (largest storage
below `min_bytes`, resident blocks aside), and that share, `fraction`. Over all steady steps `late_copies`, `prefetch_oom`, `fallbacks` and
`fallback_mib` (the pool was full); of the pool the largest `pinned_held_mib`, `pinned_peak_mib` and, after a step, `pinned_in_use_mib`. Without
a CUDA device the copies are simulated, and their times are None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from ._counters import counters_for
from ._offload import offload_of
from ._ranks import FitRanks, rank_entry
from ._report import RunFacts, build_summary, inferred_flops, is_oom, ledger_of, print_table, tokens_in, write_json
from ._series import MIB
from ._session import Session
from ._trainer import batches_that_stepped, gradient_bytes, log_rows, loss_of, row_is_due, saves, should_log
from ._window import OPTIMIZER, StepWindow

__all__ = ["MemoryMonitor"]


class MemoryMonitor(Callback):
    """Measure memory and time of steady optimizer steps. See the module's documentation for every key and field.

    A checkpoint stores nothing of it: after a resume kernels tune and memory settles anew in the new process, so that fit has a
    warm-up and a summary of its own, with step numbers that continue.

    Args:
        warmup_steps: optimizer steps to pass over at least, >= 0. The first ones allocate optimizer state and compile kernels.
        window_steps: measure this many steady steps and then no more, >= 1; None: all.
        dir: folder for `memory_rank{r}.json`; None writes no file.
        tokens_per_step: tokens of one optimizer step on one rank, >= 1; None: counted from `input_ids` in the batch.
        flops_per_token: model FLOPs per token, forward and backward, > 0; None: 6 per matrix element (4 if frozen) of a dense model.
        table: print a table at the end.
        progress_bar: show step time and peak (or retained) memory in the progress bar.
        autotune_cap: optimizer steps after which the warm-up ends even if kernels are still being tuned, >= 1.

    Raises:
        ValueError, TypeError: an argument out of its range or of the wrong type.
    """

    def __init__(
        self,
        warmup_steps: int = 3,
        window_steps: int | None = None,
        dir: str | os.PathLike[str] | None = None,
        tokens_per_step: int | None = None,
        flops_per_token: float | None = None,
        table: bool = True,
        progress_bar: bool = True,
        autotune_cap: int = 20,
    ) -> None:
        _check_int("warmup_steps", warmup_steps, least=0, optional=False)
        _check_int("window_steps", window_steps, least=1, optional=True)
        _check_int("tokens_per_step", tokens_per_step, least=1, optional=True)
        _check_int("autotune_cap", autotune_cap, least=1, optional=False)
        for name, value in (("table", table), ("progress_bar", progress_bar)):
            if not isinstance(value, bool):
                raise TypeError(f"MemoryMonitor: {name} must be True or False, got {value!r}")
        if dir is not None and not isinstance(dir, (str, os.PathLike)):
            raise TypeError(f"MemoryMonitor: dir must be a path or None, got {dir!r}; None writes no file")
        is_number = isinstance(flops_per_token, (int, float)) and not isinstance(flops_per_token, bool)
        if flops_per_token is not None and not (is_number and 0 < flops_per_token < float("inf")):
            raise ValueError(f"MemoryMonitor: flops_per_token must be a positive number or None, got {flops_per_token!r}")
        self.warmup_steps = warmup_steps
        self.window_steps = window_steps
        self.dir = None if dir is None else Path(dir)
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.table = table
        self.progress_bar = progress_bar
        self.autotune_cap = autotune_cap
        self.summary: dict[str, Any] = {}
        """Figures of the last fit; empty before one has ended."""
        self._forget()

    def _forget(self) -> None:
        self._session: Session | None = None
        self._ranks = FitRanks()
        self._release: list[Any] = []
        self._flops: tuple[float | None, str] = (self.flops_per_token, "given by the caller")
        self._gap_began: float | None = None
        self._step_before = 0
        self._accumulate = 1
        self._saved: list[int] = []
        self._held: Callable[[], int] | None = None
        self._countable_updates = True
        self._reported = True

    # Start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._forget()
        self._ranks = FitRanks(trainer)
        self.summary = {}
        self._reported = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        flags = set() if self._session is None else self._session.gap_flags
        self._session = session = Session(
            counters_for(trainer.strategy.root_device),
            warmup_steps=self.warmup_steps,
            autotune_cap=self.autotune_cap,
            window_steps=self.window_steps,
            first_step=trainer.global_step,
        )
        session.gap_flags |= flags
        self._saved = saves(trainer)
        if self.flops_per_token is None:
            self._flops = inferred_flops(pl_module)
        self._release.append(session.counters.watch_resets(self._before_foreign_reset))
        for optimizer in trainer.optimizers:
            register = getattr(optimizer, "register_step_post_hook", None)
            if register is None:
                self._countable_updates = False
            else:
                self._release.append(register(self._after_update).remove)

    # One micro-batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        now = perf_counter()
        session = self._session
        if session is None:
            return
        if session.window is not None and session.window.micro_open:
            session.abandon_step()  # the module's own on_train_batch_start ended the epoch by returning -1
        wait_ms = None if self._gap_began is None else (now - self._gap_began) * 1e3
        saved = saves(trainer)
        if saved != self._saved:
            self._saved = saved
            session.flag("checkpoint")
        first = session.window is None
        window = session.begin_step()
        if first:
            self._step_before = trainer.global_step
            self._accumulate = trainer.accumulate_grad_batches
            window.updates = 0 if self._countable_updates else None
        if self.tokens_per_step is None:
            tokens = tokens_in(batch)
        else:
            tokens = self.tokens_per_step if first else 0
        self._held = None if pl_module.automatic_optimization else partial(gradient_bytes, pl_module)
        window.open_micro(wait_ms, tokens, self._held)

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # In automatic optimization this comes after the forward and before the backward: gradients are freed here, so what the
        # forward left behind has to be read now.
        self._forward_done()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._forward_done()

    def _forward_done(self) -> None:
        if (window := self._open_window()) is not None:
            window.forward_done(self._held)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (window := self._open_window()) is not None:
            window.backwards += 1
            if pl_module.automatic_optimization:
                window.meter.enter(OPTIMIZER)
            else:
                window.begin_forward(self._held)  # another one may follow, or an update, of which a hook tells

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if (window := self._open_window()) is not None and window.meter.phase != OPTIMIZER:
            window.meter.enter(OPTIMIZER)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Step hook of the optimizers: an update really happened (a gradient scaler that found infinities skips it)."""
        if (window := self._open_window()) is not None and window.updates is not None:
            window.updates += 1
            if self._held is not None:
                window.begin_forward(self._held)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        session, window = self._session, self._open_window()
        if session is None or window is None:
            return
        window.close_micro(loss_of(outputs))
        if trainer.global_step != self._step_before:
            automatic = pl_module.automatic_optimization
            if automatic and window.micro_batches != self._accumulate:
                window.flags.add("boundary")
            record = session.end_step(trainer.global_step, loss_is_mean_share=automatic, offload=offload_of(trainer))
            if record is not None:
                self._show(trainer, pl_module, record.step_ms)
            # On several ranks each tells its row, be it empty: which steps are steady and who has loggers differs between them.
            if row_is_due(trainer) if self._ranks.several else record is not None and should_log(trainer):
                figures = session.take_interval().figures(ledger_of(trainer))
                log_rows(trainer, self._ranks.rows(batches_that_stepped(trainer), figures, logs=bool(trainer.loggers)))
        self._gap_began = perf_counter()

    # What is not training

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupted("boundary")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupted("validation")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._interrupted("checkpoint")

    def _interrupted(self, reason: str) -> None:
        self._gap_began = None
        if self._session is not None:
            self._session.flag(reason)

    # End

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._reported or trainer.state.fn != "fit":
            return
        session = self._session
        reading = None if session is None else session.counters.read()
        first_line = next(iter(str(exception).splitlines()), "")
        failure = {
            "status": "oom" if is_oom(exception) else "error",
            "reason": f"{type(exception).__name__}: {first_line}" if first_line else type(exception).__name__,
            "stage": None if trainer.state.stage is None else str(trainer.state.stage.value),
            "phase": None if session is None or session.window is None else session.window.meter.phase,
            "step": trainer.global_step,
            "at_exception": None
            if reading is None
            else {
                "allocated_mib": reading.allocated / MIB,
                "reserved_mib": reading.reserved / MIB,
                "phase_peak_allocated_mib": reading.peak_allocated / MIB,
            },
        }
        try:
            self._report(trainer, failure)
        except OSError as error:
            rank_zero_warn(f"MemoryMonitor: the record of the failed run could not be written to {self.dir}: {error}")
        self._print(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._report(trainer)  # a fit that had nothing to do never reaches on_train_end
            self._print(trainer)  # not earlier: at the end of training the progress bar still holds the terminal's line

    def _print(self, trainer: Trainer) -> None:
        if self.table and trainer.is_global_zero:
            print_table(self.summary)

    def _report(self, trainer: Trainer, failure: Mapping[str, Any] | None = None) -> None:
        if self._reported:
            return
        self._reported = True
        for release in self._release:
            release()
        self._release.clear()
        session, self._session = self._session, None
        flops, source = self._flops
        self.summary = summary = build_summary(session, RunFacts(trainer), flops_per_token=flops, flops_source=source, failure=failure)
        figures = {} if session is None else session.total.figures(ledger_of(trainer))
        try:
            if self._ranks.several:  # a rank that is killed while it waits for the others has its file
                self._write({**summary, "ranks": None, "max_over_ranks": None})
        finally:
            rows = self._ranks.finish(summary, rank_entry(summary, figures), failed=failure is not None)
            try:
                self._write(summary)
            finally:
                if session is not None:
                    log_rows(trainer, rows)

    # Helpers

    def _write(self, summary: Mapping[str, Any]) -> None:
        if self.dir is not None:
            write_json(summary, self.dir)

    def _open_window(self) -> StepWindow | None:
        window = None if self._session is None else self._session.window
        return window if window is not None and window.micro_open else None

    def _before_foreign_reset(self) -> None:
        if (window := self._open_window()) is not None:
            window.meter.before_foreign_reset()

    def _show(self, trainer: Trainer, pl_module: LightningModule, step_ms: float) -> None:
        if not self.progress_bar or trainer.barebones or trainer.progress_bar_callback is None or self._session is None:
            return
        figures = self._session.total.peaks(ledger_of(trainer))
        memory = "peak_allocated_mib" if figures["peak_allocated_mib"] is not None else "retained_mib"
        for name, value in (("step_ms", step_ms), (memory, figures[memory])):
            if value is not None:
                # A CPU tensor: a plain float would become a tensor on the device, in the middle of what is being measured.
                pl_module.log(f"gdn/{name}", torch.tensor(value), prog_bar=True, logger=False, on_step=True, on_epoch=False)


def _check_int(name: str, value: Any, *, least: int, optional: bool) -> None:
    if optional and value is None:
        return
    expected = f"an integer >= {least}" + (" or None" if optional else "")
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"MemoryMonitor: {name} must be {expected}, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"MemoryMonitor: {name} must be {expected}, got {value}")
