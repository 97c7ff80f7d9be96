"""Apply a plan to a model: the functional core. Strategies, the Hugging Face Trainer, Fabric and plain loops use the same function.

with apply_plan(model, ["gdn_conv", "gdn_norm_out", "layernorm"]) as applied:
    ...
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from .inspection import ModelReport, inspect_model
from .kernels import KERNELS, runtime_problem
from .labels import LABELS, Selection, select
from .ledger import Ledger
from .plan import Plan
from .regions import GDN, Mode
from .takeover import ON_FOREIGN_HOOKS, BlockTakeover, PartTakeover, Session, Takeover

__all__ = ["AppliedPlan", "FreesNothingWarning", "apply_plan", "instrument"]

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
        self._example = next((block for block in report.blocks if block.layout.kind == GDN), None)
        self._labels = selection.labels if selection is not None else ()
        self._session = session
        self._takeovers = list(takeovers)

    @property
    def ledger(self) -> Ledger:
        """What blocks and regions keep and discard; filled by the first forward of every block."""
        return self._session.ledger

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
        found = self._example
        if found is None or device.type != "cuda":
            return []
        rule = found.adapter.kernels(found.module, device, self._session.kernels).get("delta_rule", "")
        if rule.startswith("torch."):
            return [
                f"the gated delta rule will run as {rule} on {device}: flash-linear-attention is not bound (not installed, or its import failed when "
                "transformers was imported). It is correct, several times slower and needs more memory: pip install 'lightning-gdn[cuda]'"
            ]
        problem = runtime_problem(device) if rule.startswith("fla.") else None
        return [problem] if problem else []

    def undo(self) -> None:
        """Put every forward back. Calling it again does nothing."""
        self._session.end()  # also for copies of the model made meanwhile, which this cannot reach
        self._example = None  # what is read after a fit (plan, ledger, kernels) must not keep the model alive
        while self._takeovers:
            self._takeovers.pop().remove()

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def _check_labels(ledger: Ledger, labels: tuple[str, ...]) -> None:
    """After the first forward: a label whose regions saved something and that freed nothing is a fault."""
    rows = ledger.by_region()
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
    known = "Hugging Face qwen3_5 (class Qwen3_5DecoderLayer) and qwen3_next (class Qwen3NextDecoderLayer)"
    seen = f" Modules that look like Gated DeltaNet but are of no known family: {', '.join(report.unknown[:5])}." if report.unknown else ""
    return ValueError(
        f"model {type(model).__name__}: 0 blocks were found to take over. Looked for decoder layers with a Gated DeltaNet mixer of {known} in every "
        f"submodule.{seen} Use recompute=[] to train this model without a plan."
    )


def apply_plan(
    model: nn.Module,
    plan_or_labels: Plan | Selection | str | Sequence[str],
    *,
    kernels: str = "stock",
    on_foreign_hooks: str = "raise",
) -> AppliedPlan:
    """Put a plan into force on a model until `undo()`.

    Args:
        model: any module that contains the blocks, at any depth. Parameters, names and `state_dict` do not change.
        plan_or_labels: labels (`["gdn_conv", "layernorm"]`, `"full:block:6"`, `[]` for the control), or a `Plan` made for this model.
        kernels: `"stock"` runs what the model itself would run; `"fused"` flash-linear-attention's convolution and gated norm on CUDA
            (less memory, faster, not bit-equal to the eager ones), also with the control.
        on_foreign_hooks: what to do when a block is called inside other saved-tensor hooks: `"raise"`, or `"bypass"` (run untouched).

    Returns:
        The plan in force. With the control nothing is installed.

    Raises:
        ValueError: unknown label, no block found, a label no block has a region for, a plan of another model, or gradient
            checkpointing that is already on.
        RuntimeError: the model is under a plan already.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels: expected one of {', '.join(KERNELS)}, got {kernels!r}")
    if on_foreign_hooks not in ON_FOREIGN_HOOKS:
        raise ValueError(f"on_foreign_hooks: expected one of {', '.join(ON_FOREIGN_HOOKS)}, got {on_foreign_hooks!r}")
    selection = None
    if not isinstance(plan_or_labels, Plan):
        selection = plan_or_labels if isinstance(plan_or_labels, Selection) else select(plan_or_labels)
    report = inspect_model(model)
    control = selection.is_control if selection is not None else plan_or_labels.is_control  # type: ignore[union-attr]
    if not (control and kernels == "stock") and not any(layout.kind == GDN for layout in report.layouts):
        raise _no_blocks(model, report)
    plan = Plan.from_labels(selection, report.layouts) if selection is not None else _checked(plan_or_labels, report)  # type: ignore[arg-type]
    session = Session(Ledger(block.name for block in plan.blocks), kernels, on_foreign_hooks)
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
    session.on_complete = partial(_check_labels, session.ledger, selection.labels if selection is not None else ())
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
    continues = False
    for found, block in zip(report.blocks, plan.blocks, strict=True):
        modes: dict[str, Mode] = dict(block.modes)
        takeovers.append(BlockTakeover(found.module, found.adapter, block.name, modes, (continues, block.carry), session))
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
