"""Apply a plan to a model: the functional core. Strategies, the Hugging Face Trainer, Fabric and plain loops use the same function.

with apply_plan(model, ["gdn_conv", "gdn_norm_out", "layernorm"]) as applied:
    ...
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

import torch
from torch import nn

from .inspection import ModelReport, inspect_model
from .kernels import KERNELS, runtime_problem
from .labels import FIRST, LABELS, OFFLOAD_LABELS, OFFLOAD_MOVES, Selection, read_offload, select
from .ledger import Ledger
from .moving import Engines
from .offload.statistics import StepStatistics
from .offload_config import MIB, OffloadConfig
from .plan import Plan
from .regions import GDN
from .stayed import share_found, why_stayed
from .takeover import ON_FOREIGN_HOOKS, BlockTakeover, PartTakeover, Session, Takeover

__all__ = ["AppliedPlan", "FreesNothingWarning", "apply_plan", "instrument", "unmoved_labels"]

_log = logging.getLogger("lightning_gdn")


class FreesNothingWarning(UserWarning):
    """A label freed no memory in the first step although it should."""


class AppliedPlan:
    """A plan in force on a model. Ends with `undo()`, or at the end of a `with` block."""

    def __init__(self, report: ModelReport, plan: Plan, selection: Selection | None, session: Session, takeovers: Sequence[Takeover]) -> None:
        self.plan = plan
        """The plan in force."""
        self.blocks = report.layouts
        """Layouts of the blocks that were found."""
        self._found = report.describe(taken_over=bool(takeovers))
        found = next((block for block in report.blocks if block.layout.kind == GDN), None)
        self._example = (weakref.ref(found.module), found.adapter) if found is not None else None  # a model that is dropped goes at once
        self._labels = selection.labels if selection is not None else ()
        self._session = session
        self._takeovers = list(takeovers)
        self.last_step: StepStatistics | None = None
        """What offload did in the step that the last `step_statistics` ended; None without offload."""
        self._alike = True  # whether the forwards of that step were like those that the ledger counted

    def step_statistics(self, device: torch.device | None = None) -> StepStatistics | None:
        """What offload did since the last call: bytes out and in, rates, stalls, pinned host memory, what stayed and why.

        Call it once per optimizer step, on every rank: `offload` with the share `auto` decides there, together with the other ranks. The
        strategy does it. `device`: where the blocks run, so that a rank on which none ran yet takes part as well.

        Returns:
            None without offload, or before a block ran.
        """
        engines = self._session.engines
        if engines is not None:
            if device is not None:
                engines.on(device)
            self.last_step = engines.step_statistics()
            for found in engines.findings():
                _log.log(logging.WARNING if found.by_host else logging.INFO, "%s", share_found(**asdict(found), by_host=found.by_host))
        self._alike, self._session.alike = self._session.alike, True
        return self.last_step

    @property
    def engines(self) -> Engines | None:
        """The offload engines, by device; None if nothing moves."""
        return self._session.engines

    @property
    def ledger(self) -> Ledger:
        """What blocks and regions keep and discard; filled by the first forward of every block."""
        return self._session.ledger

    @property
    def retained_bytes(self) -> int | None:
        """Bytes that the blocks hold on the device between forward and backward of one micro-batch; `retained_of` says when. None before one."""
        return self._retained()[0]

    @property
    def retained_of(self) -> str:
        """`every step` without offload, where all forwards of the last step (all so far, where `step_statistics` is not called) had the shapes,
        dtypes and modes of those that the ledger counted, and the same weights are frozen now. With offload what moves can change: the share
        `auto` settles, the pool is full. So `last step` once `step_statistics` was called: the mean over that step's forward passes.
        `first forward` before that, and where that step's forwards had other shapes, dtypes, arguments, modes or frozen weights than those that
        were counted, or named other bytes."""
        return self._retained()[1]

    def _retained(self) -> tuple[int | None, str]:
        counted, engines, step = self.ledger.retained_bytes, self._session.engines, self.last_step
        if engines is None:
            return counted, "every step" if self._alike and self._session.alike and self._same_weights() else "first forward"
        if counted is None or engines.offered_bytes is None or step is None or not self._alike or not (step.forwards or engines.at_rest):
            return counted, "first forward"
        if engines.at_rest and not step.forwards:  # nobody looks any more: all stays
            return (counted + self.ledger.moved_bytes, "last step") if self._same_weights() else (counted, "first forward")
        if step.offered_bytes != engines.offered_bytes * step.forwards:
            return counted, "first forward"
        # Bytes moved are bytes freed, in the ledger storage by storage: what did not move this time is held again.
        return counted + self.ledger.moved_bytes - round(step.bytes_out / step.forwards), "last step"

    def _same_weights(self) -> bool:
        return all(takeover.same_weights() for takeover in self._takeovers if isinstance(takeover, BlockTakeover))

    @property
    def kernels(self) -> dict[str, str]:
        """Region -> kernel that really ran; filled by the first forward."""
        return self.ledger.kernels

    @property
    def installed(self) -> bool:
        """True while the model's forwards are replaced."""
        return bool(self._takeovers)

    def describe(self) -> str:
        """Blocks, plan and kernels, a line each."""
        lines = [self._found, str(self.plan)]
        if self.plan.is_control and self._session.kernels == "stock":
            lines.append("nothing is installed: the model runs untouched")
        if self.kernels:
            lines.append("kernels: " + ", ".join(f"{region} {name}" for region, name in self.kernels.items()))
        return "\n".join(lines)

    def kernel_problems(self, device: torch.device) -> list[str]:
        """What is wrong with the kernels that will run on `device`: a slow fallback, or a backward that will be refused."""
        block = self._example[0]() if self._example is not None else None
        if self._example is None or block is None or device.type != "cuda":
            return []
        rule = self._example[1].kernels(block, device, self._session.kernels).get("delta_rule", "")
        if rule.startswith("torch."):
            return [
                f"the gated delta rule will run as {rule} on {device}: flash-linear-attention is not bound (not installed, or its import failed when "
                "transformers was imported). It is correct, several times slower and needs more memory: pip install 'lightning-gdn[cuda]'"
            ]
        problem = runtime_problem(device) if rule.startswith("fla.") else None
        return [problem] if problem else []

    def undo(self) -> None:
        """Put every forward back. Calling it again does nothing."""
        self._alike = self._alike and self._same_weights()
        self._session.end()  # also for copies of the model made meanwhile, which this cannot reach
        while self._takeovers:
            self._takeovers.pop().remove()

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def _check_labels(ledger: Ledger, labels: tuple[str, ...], engines: Engines | None = None, *, recomputes: bool = False) -> None:
    """After the first forward: a label whose regions saved something and that freed nothing is a fault."""
    rows = ledger.by_region()
    if engines is not None:
        _check_offload(ledger, engines.config, engines, recomputes)
    for name in labels:
        label = LABELS[name]
        regions = [rows[region] for region, _ in label.modes if region in rows]
        net = sum(row.freed_bytes - row.replay_input_bytes for row in regions)
        saved = sum(row.kept_bytes + row.discarded_bytes for row in regions)
        if net <= 0 and saved > 0:
            if label.frees_little:
                _log.info("label %s frees nothing on this model: %s", name, label.remark)
            else:
                warnings.warn(
                    f"label {name!r} freed no memory in the first step ({label.remark}); `ledger.rows()` shows where",
                    FreesNothingWarning,
                    stacklevel=2,
                )


def _check_offload(ledger: Ledger, config: OffloadConfig, engines: Engines, recomputes: bool) -> None:
    found = engines.stayed
    engines.offered_bytes = ledger.moved_bytes + sum(found.values())
    stayed = ", ".join(f"{reason} {nbytes / MIB:.1f} MiB" for reason, nbytes in found.items()) or "nothing"
    _log.info("offload %s: %.1f MiB moved in the first forward; stayed on the device: %s", config, ledger.moved_bytes / MIB, stayed)
    if config.fraction == 0 or config.max_pinned_gib == 0:
        return
    unmoved = unmoved_labels(ledger, config)
    if unmoved:
        why = why_stayed(found, config, recomputes=recomputes, largest_small=engines.largest_small, when="in the first forward")
        names, what = ", ".join(map(repr, unmoved)), "; ".join(OFFLOAD_LABELS[name] for name in unmoved)
        message = f"offload label{'s' if len(unmoved) > 1 else ''} {names} moved nothing in the first step ({what}); {why}"
        warnings.warn(message, FreesNothingWarning, stacklevel=2)


def unmoved_labels(ledger: Ledger, config: OffloadConfig) -> list[str]:
    """Offload labels of which nothing moved in the first forward."""
    moved = {row.region for row in ledger.rows() if row.moved_bytes}
    found = []
    for name in config.labels:
        regions = {region for region, _ in OFFLOAD_MOVES[name]}
        if not (moved if regions == {FIRST} else moved & regions):
            found.append(name)
    return found


def _say_unfreed(unfreed: int) -> None:
    if unfreed:
        _log.warning(
            "offload: %.1f MiB were moved to the host in the first step and are on the device all the same, since something outside the blocks "
            "holds them (output_hidden_states, a cache, a hook, the input of the first block)",
            unfreed / MIB,
        )


def _refuse_other_recompute(model: nn.Module, report: ModelReport) -> None:
    for found in report.blocks:
        if getattr(found.module, "gradient_checkpointing", False):
            raise ValueError(
                f"block {found.layout.name!r} already has Hugging Face gradient checkpointing on; regions would be replayed inside its recompute. "
                "Call model.gradient_checkpointing_disable() first, or use recompute=['full'] instead of it."
            )
    for name, module in model.named_modules():
        if type(module).__name__ == "CheckpointWrapper" and any(found.layout.name.startswith(f"{name}.") for found in report.blocks):
            raise ValueError(
                f"module {name!r} is a CheckpointWrapper around blocks that the plan takes over (an FSDP activation checkpointing policy?). "
                "Remove the policy, or use recompute=['full'] instead of it."
            )


def _refuse_second_plan(report: ModelReport) -> None:
    for found in report.blocks:
        own = next((value for value in found.module.__dict__.values() if isinstance(value, BlockTakeover)), None)
        if own is not None and own.session.ended:  # a copy made while a plan was in force, which undo() could not reach
            for module in found.module.modules():
                for value in [v for v in module.__dict__.values() if isinstance(v, Takeover)]:
                    value.remove()
        elif own is not None:
            raise RuntimeError(f"block {found.layout.name!r} is under another plan already; call undo() on what apply_plan returned first")


def _is_compiled(model: nn.Module) -> bool:
    if getattr(model, "_compiler_ctx", None) is not None:  # a LightningModule from torch.compile
        return True
    return any(type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in model.modules())


def _no_blocks(model: nn.Module, report: ModelReport) -> ValueError:
    known = "Hugging Face qwen3_5 (class Qwen3_5DecoderLayer), qwen3_next (class Qwen3NextDecoderLayer) and GDNStack (class GDNBlock)"
    seen = f" Modules that look like Gated DeltaNet but are of no known family: {', '.join(report.unknown[:5])}." if report.unknown else ""
    return ValueError(
        f"model {type(model).__name__}: 0 blocks were found to take over. Looked for decoder layers with a Gated DeltaNet mixer of {known} in every "
        f"submodule.{seen} Use recompute=[] to train this model without a plan."
    )


def apply_plan(
    model: nn.Module,
    plan_or_labels: Plan | Selection | str | Sequence[str],
    *,
    offload: str | Sequence[str] | OffloadConfig = (),
    kernels: str = "stock",
    on_foreign_hooks: str = "raise",
    reduce_min: Callable[[float], float] | None = None,
) -> AppliedPlan:
    """Put a plan into force on a model until `undo()`.

    Args:
        model: any module that contains the blocks, at any depth. Parameters, names and `state_dict` do not change.
        plan_or_labels: labels (`["gdn_conv", "layernorm"]`, `"full:block:6"`, `[]` for the control), or a `Plan` made for this model.
        offload: offload labels or an `OffloadConfig`, `[]` for none; with labels (not with a `Selection` or a `Plan`, which hold their own).
        kernels: `"stock"` runs what the model itself would run; `"fused"` flash-linear-attention's convolution and gated norm on CUDA
            (less memory, faster, not bit-equal to the eager ones), also with the control.
        on_foreign_hooks: what to do when a block is called inside other saved-tensor hooks: `"raise"`, or `"bypass"` (run untouched).
        reduce_min: on several ranks, with the offload share `auto`: the smallest of a number over the ranks, so that all of them settle on one.

    Returns:
        The plan in force. With the control nothing is installed.

    Raises:
        ValueError: unknown label, no block found, a label no block has a region for, a plan of another model, or gradient
            checkpointing that is already on.
        TypeError: `model` is no module.
        RuntimeError: the model is under a plan already.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels: expected one of {', '.join(KERNELS)}, got {kernels!r}")
    if on_foreign_hooks not in ON_FOREIGN_HOOKS:
        raise ValueError(f"on_foreign_hooks: expected one of {', '.join(ON_FOREIGN_HOOKS)}, got {on_foreign_hooks!r}")
    selection = None
    if not isinstance(plan_or_labels, Plan):
        given = isinstance(plan_or_labels, Selection)
        selection = plan_or_labels if isinstance(plan_or_labels, Selection) else select(plan_or_labels, offload=offload)
    if (selection is None or given) and read_offload(offload) is not None:
        raise ValueError(f"offload: a {type(plan_or_labels).__name__} holds its own offload, got offload={offload!r} beside it; give labels instead")
    report = inspect_model(model)
    control = selection.is_control if selection is not None else plan_or_labels.is_control  # type: ignore[union-attr]
    if not (control and kernels == "stock") and not any(layout.kind == GDN for layout in report.layouts):
        raise _no_blocks(model, report)
    plan = Plan.from_labels(selection, report.layouts) if selection is not None else _checked(plan_or_labels, report)  # type: ignore[arg-type]
    engines = Engines(plan.offload, len(plan.blocks), reduce_min) if plan.offload is not None and not plan.is_control else None
    session = Session(Ledger(block.name for block in plan.blocks), kernels, on_foreign_hooks, engines)
    _refuse_second_plan(report)  # the control too: a model under a plan is no control
    if plan.is_control and kernels == "stock":
        return AppliedPlan(report, plan, selection, session, ())
    if not plan.is_control:
        _refuse_other_recompute(model, report)
    if report.unknown:
        _log.warning("%s", report.describe(taken_over=True))
    if _is_compiled(model):
        _log.info("torch.compile: taken-over blocks run eagerly, one graph break per block; the rest stays compiled")
    applied = AppliedPlan(report, plan, selection, session, _install(report, plan, session))
    # Not a method of `applied`: session -> applied -> session would keep a dropped model until the garbage collector runs.
    named = selection.labels if selection is not None else ()
    session.on_complete = partial(_check_labels, session.ledger, named, engines, recomputes=plan.recomputes)
    session.on_settled = _say_unfreed
    return applied


def _checked(plan: Plan, report: ModelReport) -> Plan:
    expected = [(layout.name, layout.regions) for layout in report.layouts]
    got = [(block.name, tuple(region for region, _ in block.modes)) for block in plan.blocks]
    if expected != got:
        first = next((pair for pair in zip(got, expected, strict=False) if pair[0] != pair[1]), (len(got), len(expected)))
        raise ValueError(
            f"plan: made for another model: got {first[0]}, the model has {first[1]}. Make it with Plan.from_labels on inspect_model(model).layouts"
        )
    return plan


def _install(report: ModelReport, plan: Plan, session: Session) -> list[Takeover]:
    takeovers: list[Takeover] = []
    continues, last = False, len(plan.blocks) - (plan.offload.resident_last_blocks if plan.offload is not None else 0)
    for index, (found, block) in enumerate(zip(report.blocks, plan.blocks, strict=True)):
        remaining = sum(bool(later.moves) for later in plan.blocks[index : max(index, last)])
        takeovers.append(BlockTakeover(found.module, found.adapter, block, index, continues, session, remaining))
        continues = block.carry
        takeovers += [PartTakeover(module, run) for module, run in found.adapter.parts(found.module)]
    for takeover in takeovers:
        takeover.install()
    return takeovers


@contextmanager
def instrument(model: nn.Module, *, kernels: str = "stock") -> Iterator[Ledger]:
    """Count what the untouched model retains: every region in `keep`, the ledger on for the first forward of each block.

        with instrument(model) as ledger:
            model(input_ids=ids, labels=ids).loss.backward()
        print(ledger.retained_bytes)

    Raises:
        ValueError, RuntimeError: as `apply_plan`.
    """
    report = inspect_model(model)
    if not report.blocks:
        raise _no_blocks(model, report)
    _refuse_second_plan(report)
    plan = Plan.keep(report.layouts)
    session = Session(Ledger(block.name for block in plan.blocks), kernels, "raise")
    applied = AppliedPlan(report, plan, None, session, _install(report, plan, session))
    with applied:
        yield applied.ledger
