"""The Lightning strategy: applies a plan in `setup`, takes it back in `teardown`. Everything else is the base strategy's.

On one device it is a `SingleDeviceStrategy`: no process group, no gradient buckets, runs in notebooks. Lightning's connector tells
its devices only to strategies that have `parallel_devices`; this one has it, so that it lands on the Trainer's device and can
refuse several (a plain `SingleDeviceStrategy` stays on the CPU and ignores `devices=2`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from .apply import KERNELS, AppliedPlan, apply_plan, inspect_model
from .labels import Selection, UnavailableLabelError, advice, select
from .takeover import ON_FOREIGN_HOOKS

__all__ = ["GDNRecomputeStrategy", "register_strategies"]

DEFAULT_LABELS = ("gdn_norm_out", "layernorm")
"""What the registered name `gdn` stands for."""


class _PlanMixin:
    """Applies and undoes the plan around the base strategy's own setup and teardown."""

    selection: Selection
    kernels: str
    on_foreign_hooks: str
    applied: AppliedPlan | None
    last_applied: AppliedPlan | None

    def setup(self, trainer: Trainer) -> None:
        """Take the model over after `configure_model` and before the base strategy moves or wraps it; only for `fit`."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._undo()  # Lightning never reaches `teardown` when an `on_exception` hook raises; that plan is another model's, perhaps
            self._apply(trainer.lightning_module)
        super().setup(trainer)  # type: ignore[misc]

    def _apply(self, module: LightningModule) -> None:
        applied = apply_plan(module, self.selection, kernels=self.kernels, on_foreign_hooks=self.on_foreign_hooks)
        self.applied = self.last_applied = applied
        rank_zero_info(applied.describe())
        if applied.installed:
            rank_zero_info(_kernels_line(module, self.root_device))  # type: ignore[attr-defined]
        for line in advice(self.selection):
            rank_zero_info(line)
        for problem in applied.kernel_problems(self.root_device):  # type: ignore[attr-defined]
            rank_zero_warn(problem)

    def teardown(self) -> None:
        """Put every forward back, also after an exception."""
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self._undo()

    def _undo(self) -> None:
        if self.applied is not None:
            self.applied.undo()
            self.applied = None


class GDNRecomputeStrategy(_PlanMixin, SingleDeviceStrategy):
    """Recompute selected regions of every Gated DeltaNet block instead of retaining them.

        Trainer(strategy=GDNRecomputeStrategy(["gdn_conv", "gdn_norm_out", "layernorm"]))

    Args:
        recompute: labels, see `lightning-gdn labels`. A bare string is one label or an arm (`"gdn_conv+layernorm"`, `"full:block:6"`).
            `[]` is the control: nothing is installed.
        offload: offload labels. They need the offload engine, which this version does not have.
        method: with `full`: `"uniform"` (every block, in chunks of `num_layers`) or `"block"` (the first `num_layers` blocks).
        num_layers: with `full`: see `method`.
        memory_budget: budget for `recompute="auto"`. Needs the planner, which this version does not have.
        kernels: `"stock"` runs what the model itself would run; CPU tensors always take the model's torch functions.
        on_foreign_hooks: when a block is called inside other saved-tensor hooks (`save_on_cpu`, `torch.utils.checkpoint`): `"raise"`, or
            `"bypass"` to run it untouched.
        base_options: options of `DDPStrategy` and `DistributedDataParallel`; on one device only `accelerator`, `checkpoint_io` and
            `precision_plugin` have an effect.

    Raises:
        ValueError: unknown label (with the nearest and all valid ones), option or value.
        RuntimeError: several devices, which this version does not support.

    Attributes:
        applied: the plan in force while fitting, else None. `last_applied` stays readable after the fit.
    """

    strategy_name = "gdn"

    def __init__(
        self,
        recompute: str | Sequence[str] = DEFAULT_LABELS,
        *,
        offload: str | Sequence[str] = (),
        method: str | None = None,
        num_layers: int | None = None,
        memory_budget: str | int | None = None,
        kernels: str = "stock",
        on_foreign_hooks: str = "raise",
        **base_options: Any,
    ) -> None:
        self.selection = select(recompute, offload=offload, method=method, num_layers=num_layers)
        if memory_budget is not None:
            raise UnavailableLabelError(f"memory_budget={memory_budget!r} needs the planner, which is not part of this version of lightning-gdn")
        for name, value, valid in (("kernels", kernels, KERNELS), ("on_foreign_hooks", on_foreign_hooks, ON_FOREIGN_HOOKS)):
            if value not in valid:
                raise ValueError(f"{name}: expected one of {', '.join(valid)}, got {value!r}")
        _check_base_options(base_options)
        single = {name: base_options[name] for name in ("accelerator", "checkpoint_io", "precision_plugin") if name in base_options}
        super().__init__(**single)
        self.num_nodes = 1
        self._offered: list[torch.device] = []
        self.kernels, self.on_foreign_hooks = kernels, on_foreign_hooks
        self.applied = self.last_applied = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """None, so that the connector of every Trainer hands over the devices it chose."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._offered = list(devices)

    def _configure_launcher(self) -> None:
        # The last thing the connector calls: devices and nodes are known, nothing is launched yet.
        if len(self._offered) * self.num_nodes > 1:
            raise RuntimeError(_several_devices(len(self._offered), self.num_nodes))
        if self._offered:
            self._root_device = self._offered[0]


def _kernels_line(module: LightningModule, device: torch.device) -> str:
    """What will run on this device; `applied.kernels` says after the first forward what did."""
    kernels: dict[str, str] = {}
    for block in inspect_model(module).blocks:
        kernels.update(block.adapter.kernels(block.module, device))
    return f"kernels on {device}: " + ", ".join(f"{region} {name}" for region, name in kernels.items())


def _several_devices(devices: int, nodes: int) -> str:
    return (
        f"GDNRecomputeStrategy: several devices are not supported yet, got devices={devices}, num_nodes={nodes}. "
        "Use Trainer(devices=1, num_nodes=1), or apply_plan(model, labels) inside your own distributed set-up."
    )


def _check_base_options(options: dict[str, Any]) -> None:
    known = {*inspect.signature(DDPStrategy.__init__).parameters, *inspect.signature(DistributedDataParallel.__init__).parameters} - {
        "self",
        "kwargs",
        "module",
    }
    unknown = sorted(set(options) - known)
    if unknown:
        mine = [name for name in inspect.signature(GDNRecomputeStrategy.__init__).parameters if name not in ("self", "base_options")]
        raise ValueError(
            f"GDNRecomputeStrategy: unknown options {unknown}. Its own: {', '.join(mine)}; options of DDPStrategy and DistributedDataParallel "
            "pass through"
        )


def register_strategies() -> None:
    """Make `Trainer(strategy="gdn")` known to Lightning."""
    if "gdn" not in StrategyRegistry:
        StrategyRegistry.register("gdn", GDNRecomputeStrategy, description=f"recompute {' + '.join(DEFAULT_LABELS)}")


register_strategies()
