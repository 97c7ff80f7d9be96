"""From a finished session to a summary, a JSON file and a table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ._series import LOGGED
from ._session import Session, rate

__all__ = ["RunFacts", "build_summary", "inferred_flops", "is_oom", "ledger_of", "print_table", "tokens_in", "write_json"]

SCHEMA = 1
_OOM_TEXTS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed", "not enough memory")


class RunFacts:
    """What the Trainer knows about the run and the plan in force, read while the strategy still has it.

    Args:
        trainer: the Trainer; its strategy may have an attribute `applied` with `plan`, `ledger`, `kernels` and `retained_bytes`.
    """

    def __init__(self, trainer: Any) -> None:
        applied = getattr(trainer.strategy, "applied", None)
        plan, kernels, ledger = (getattr(applied, name, None) for name in ("plan", "kernels", "ledger"))
        self.rank: int = trainer.global_rank
        self.world_size: int = trainer.world_size
        self.plan = None if plan is None else str(plan)
        self.kernels = None if kernels is None else dict(kernels)
        self.ledger = None if ledger is None else ledger.as_dict()
        self.ledger_bytes = _counted(applied)


def _counted(applied: Any) -> int | None:
    """Of the plan in force, which knows what moved in the last step; of its ledger alone where it is another's."""
    size: int | None = getattr(applied if hasattr(applied, "retained_bytes") else getattr(applied, "ledger", None), "retained_bytes", None)
    return size


def ledger_of(trainer: Any) -> float | None:
    """MiB that the strategy's plan counted as retained, or None without a ledger or before it saw a forward."""
    size = _counted(getattr(trainer.strategy, "applied", None))
    return None if size is None else size / 2**20


def build_summary(
    session: Session | None,
    facts: RunFacts,
    *,
    flops_per_token: float | None,
    flops_source: str,
    failure: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of one rank; the callback's module documents every field.

    Args:
        session: the fit, or None if it ended before the first batch.
        flops_per_token: FLOPs per token of the model, None if unknown.
        flops_source: where that number comes from, for the formula.
        failure: `status`, `reason`, `stage`, `phase`, `step` and `at_exception` of a fit that raised.
    """
    steps = 0 if session is None else session.steps
    ledger_mib = None if facts.ledger_bytes is None else facts.ledger_bytes / 2**20
    figures = {} if session is None else session.total.figures(ledger_mib)
    tokens_per_s = None if session is None else rate(session.tokens, session.step_times.total())
    measured_retained = bool(figures) and session is not None and session.total.figures(None)["retained_mib"] is not None
    phases = {} if session is None else {phase: peak.value() for phase, peak in session.phase_peaks.items()}
    has_flops = tokens_per_s is not None and flops_per_token is not None
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "rank": facts.rank,
        "world_size": facts.world_size,
        "device": None if session is None else session.counters.name,
        "status": "ok" if steps else "no_steady_steps",
        "reason": None if steps else _why_none(session),
        "stage": "train",
        "phase": None,
        "step": None if session is None else session.first_step + session.optimizer_steps,
        "at_exception": None,
        "plan": facts.plan,
        "kernels": facts.kernels,
        "warmup_steps": 0 if session is None else session.excluded["warmup"],
        "autotune_capped": session is not None and session.warmup.capped,
        "steps": steps,
        "optimizer_steps": 0 if session is None else session.optimizer_steps,
        "resumed_from_step": None if session is None else session.first_step,
        "first_step": None if session is None else session.steady_from,
        "last_step": None if session is None else session.steady_to,
        "step_ms": None if session is None else session.step_times.spread(),
        "step_wall_ms": None if session is None else session.wall.spread(),
        "step_event_ms": None if session is None else session.event.spread(),
        "data_wait_ms": None if session is None else session.data_wait.spread(),
        "tokens_per_s": tokens_per_s,
        "model_tflops": tokens_per_s * flops_per_token / 1e12 if tokens_per_s is not None and flops_per_token is not None else None,
        "flops_formula": f"model_tflops = tokens_per_s * {flops_per_token:.6g} FLOPs per token / 1e12; {flops_source}" if has_flops else None,
        "peak_allocated_mib": figures.get("peak_allocated_mib"),
        "peak_reserved_mib": figures.get("peak_reserved_mib"),
        "peak_active_mib": None if session is None else session.peak_active.value(),
        "retained_mib": figures.get("retained_mib"),
        "retained_source": None if figures.get("retained_mib") is None else "allocator" if measured_retained else "ledger",
        "ledger": facts.ledger,
        "phase_peak_mib": phases if any(value is not None for value in phases.values()) else None,
        "pinned_mib": figures.get("pinned_mib"),
        "offload": None if session is None else session.total.offload.summary(),
        "alloc_retries": session.alloc_retries if session is not None and phases.get("forward") is not None else None,
        "foreign_resets": 0 if session is None else session.foreign_resets,
        "disturbed_steps": 0 if session is None else session.disturbed_steps,
        "nonfinite_losses": 0 if session is None else session.nonfinite_losses,
        "skipped_optimizer_steps": 0 if session is None else session.skipped,
        "excluded_steps": {} if session is None else dict(session.excluded),
        "losses": [] if session is None else list(session.losses),
        "step_tokens": [] if session is None else list(session.step_tokens),
        "step_times_ms": [] if session is None else session.step_times.values(),
        "notes": [] if session is None else _notes(session, figures),
    }
    summary.update(failure or {})
    return summary


def _why_none(session: Session | None) -> str:
    if session is None or not session.optimizer_steps:
        return "no optimizer step was run"
    left_out = ", ".join(f"{count} {reason}" for reason, count in session.excluded.items() if count)
    hint = "run more steps or lower warmup_steps"
    if session.excluded["warmup"] < session.optimizer_steps:
        hint = "every step after the warm-up followed a validation, a checkpoint or an epoch's end: run these less often"
    return f"{session.optimizer_steps} optimizer steps were run and none of them is steady ({left_out}); {hint}"


def _notes(session: Session, figures: Mapping[str, float | None]) -> list[str]:
    notes = []
    if figures and figures.get("peak_allocated_mib") is None:
        notes.append(f"a device of type {session.counters.name} has no allocator counters: memory is n/a, retained bytes come from the ledger if any")
    if session.warmup.capped:
        notes.append(f"kernels were still being tuned when the warm-up ended after {session.warmup.seen} steps (autotune_cap)")
    if session.excluded["autotune"]:
        notes.append(f"{session.excluded['autotune']} later steps tuned kernels and were left out; their workspace may still be reserved")
    if session.foreign_resets:
        notes.append(f"somebody else reset the peak counters {session.foreign_resets} times; the peaks were read before each reset and are right")
    if session.disturbed_steps:
        notes.append(f"the peak counters of {session.disturbed_steps} steps were reset unseen: peaks are lower bounds there")
    if len({tokens for tokens in session.step_tokens if tokens is not None}) > 1:
        notes.append("the number of tokens varies between steps: compare only with a run that saw the same step_tokens")
    return notes


def is_oom(error: BaseException | None) -> bool:
    """True if `error`, or what it was raised from, is an allocation that failed on a device or on the host."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OOM_TEXTS):
            return True
        error = error.__cause__
    return False


def tokens_in(batch: Any) -> int | None:
    """Tokens of a micro-batch: elements of `input_ids`, or of a batch that is itself an integer tensor (B, T); else None."""
    if isinstance(batch, Mapping):
        batch = batch.get("input_ids")
    elif isinstance(batch, (tuple, list)):
        batch = batch[0] if batch else None
    elif hasattr(batch, "input_ids"):
        batch = batch.input_ids
    is_ids = isinstance(batch, torch.Tensor) and batch.dim() >= 2 and not batch.is_floating_point() and batch.dtype is not torch.bool
    return batch.numel() if is_ids else None


def inferred_flops(module: torch.nn.Module) -> tuple[float | None, str]:
    """FLOPs per token of a dense model from its parameters, and the rule in words.

    6 per trained and 4 per frozen matrix element (2 forward, 2 for the input's gradient, 2 for the weight's own). Tables that
    are only looked up cost nothing; a table tied to an output projection counts once, as that projection.
    """
    lookups, others = set(), {}
    for name, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            if isinstance(child, torch.nn.Embedding):
                lookups.add(id(parameter))
            elif parameter.dim() >= 2:
                others[id(parameter)] = (f"{name}.{key}", parameter)
    if any(".experts" in name for name, _ in others.values()):
        return None, "a model with routed experts uses a part of its parameters per token: give flops_per_token"
    trained = sum(p.numel() for _, p in others.values() if p.requires_grad)
    frozen = sum(p.numel() for _, p in others.values() if not p.requires_grad)
    if not trained + frozen:
        return None, "the model has no matrix parameters: give flops_per_token"
    rule = f"6 * {trained} trained + 4 * {frozen} frozen matrix elements; attention scores, the delta rule and recomputation are not counted"
    return 6.0 * trained + 4.0 * frozen, rule


def write_json(summary: Mapping[str, Any], folder: Path) -> Path:
    """Write `memory_rank<r>.json` into `folder` so that a reader sees the old file or the whole new one, never a part."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"memory_rank{summary['rank']}.json"
    partial = folder / f".{target.name}.{os.getpid()}"
    try:
        partial.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def print_table(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the summary for people; what was not measured says n/a."""
    table = Table(title=f"MemoryMonitor · rank {summary['rank']} · {summary['device'] or 'no device'} · {summary['status']}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    left_out = ", ".join(f"{count} {reason}" for reason, count in summary["excluded_steps"].items() if count) or "none"
    table.add_row("steady steps", f"{summary['steps']} of {summary['optimizer_steps']}")
    table.add_row("left out", left_out)
    for key, label in (
        ("step_ms", "step"),
        ("step_wall_ms", "step, wall clock"),
        ("step_event_ms", "step, CUDA events"),
        ("data_wait_ms", "data wait"),
    ):
        table.add_row(f"{label} (ms; median, max)", _spread(summary[key]))
    for key, label in (("tokens_per_s", "tokens/s"), ("model_tflops", "model TFLOP/s")):
        table.add_row(label, _number(summary[key]))
    for name in ("allocated", "reserved", "active"):
        table.add_row(f"peak {name} (MiB)", _number(summary[f"peak_{name}_mib"]))
    for phase, value in (summary["phase_peak_mib"] or {}).items():
        table.add_row(f"  allocated in {phase} (MiB)", _number(value))
    source = f", by the {summary['retained_source']}" if summary["retained_source"] else ""
    table.add_row(f"retained after forward (MiB{source})", _number(summary["retained_mib"]))
    table.add_row("pinned host memory (MiB)", _number(summary["pinned_mib"]))
    _offload_rows(table, summary["offload"])
    table.add_row("allocator retries", _number(summary["alloc_retries"]))
    table.add_row("non-finite losses", _number(summary["nonfinite_losses"]))
    table.add_row("skipped optimizer steps", _number(summary["skipped_optimizer_steps"]))
    console = Console() if console is None else console
    console.print(table)
    if summary["world_size"] > 1:
        console.print(_ranks_table(summary))
    others = [entry for entry in summary["ranks"] if entry is not None and entry["rank"] != summary["rank"] and entry["reason"]]
    reasons = [f"rank {entry['rank']}: {entry['status']}: {entry['reason']}" for entry in others]
    for line in [summary["plan"], summary["reason"], *reasons, summary["flops_formula"], *summary["notes"]]:
        if line:
            console.print(line, markup=False, highlight=False)


def _offload_rows(table: Table, offload: Mapping[str, Any] | None) -> None:
    if offload is None:
        return
    table.add_row("moved to the host per step (MiB; median, max)", _spread(offload["out_mib"]))
    table.add_row("  share of the bytes, steps at it", f"{_number(offload['fraction'])}, {offload['steps']}")
    table.add_row("  GB/s out, in", f"{_number(offload['out_gb_s'])}, {_number(offload['in_gb_s'])}")
    table.add_row("  stall (ms; median, max)", _spread(offload["stall_ms"]))
    table.add_row("  host work hidden behind nothing (ms; median, max)", _spread(offload["exposed_host_ms"]))
    table.add_row("  hidden share of the copies", _number(offload["hidden_share"]))
    pinned = (offload[f"pinned_{name}_mib"] for name in ("held", "peak", "in_use"))
    table.add_row("  host buffers held, peak, in use after a step (MiB)", ", ".join(_number(value) for value in pinned))
    table.add_row("  kept on the device, pool full (count, MiB)", f"{offload['fallbacks']}, {_number(offload['fallback_mib'])}")
    stayed = ", ".join(f"{reason} {_number(value)}" for reason, value in offload["stayed_mib"].items() if value)
    table.add_row("  stayed by reason (MiB per step)", stayed or ("not looked at" if offload["fraction"] == 0 else "nothing"))


def _ranks_table(summary: Mapping[str, Any]) -> Table:
    """One row per rank, and the largest value of each figure with the rank that has it."""
    table = Table(title="over ranks (memory in MiB)", title_justify="left")
    table.add_column("rank")
    table.add_column("status")
    names = [name for name in LOGGED if summary["max_over_ranks"][name] is not None]
    for name in ("steady steps", *(name.removesuffix("_mib").replace("_", " ") for name in names)):
        table.add_column(name, justify="right")
    for rank, entry in enumerate(summary["ranks"]):
        if entry is None:
            table.add_row(str(rank), "unknown", *["n/a"] * (1 + len(names)))
        else:
            table.add_row(str(rank), entry["status"], str(entry["steps"]), *(_number(entry[name]) for name in names))
    best = [summary["max_over_ranks"][name] for name in names]
    table.add_section()
    table.add_row("max", "", "", *(_number(found["value"]) for found in best))
    table.add_row("of rank", "", "", *(str(found["rank"]) for found in best))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "n/a"
    return str(value) if isinstance(value, int) else f"{value:,.2f}"


def _spread(spread: Mapping[str, float | None] | None) -> str:
    return "n/a" if spread is None else f"{_number(spread['median'])}, {_number(spread['max'])}"
