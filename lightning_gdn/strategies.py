"""The Lightning strategy: applies a plan in `setup`, takes it back in `teardown`. Everything else is the base strategy's.

On one device it is a `SingleDeviceStrategy`: no process group, no gradient buckets, runs in notebooks. On several devices or nodes it
is a `DDPStrategy`. Which of them is known when Lightning's connector calls `_configure_launcher`, after it has told its devices to a
strategy that has `parallel_devices` (a plain `SingleDeviceStrategy` stays on the CPU and ignores `devices=2`): there the instance
changes its class to the sibling.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import subprocess
from abc import ABCMeta
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn.parallel import DistributedDataParallel

from .apply import AppliedPlan, apply_plan
from .inspection import inspect_model
from .kernels import KERNELS
from .labels import Selection, UnavailableLabelError, advice, select
from .offload_config import OffloadConfig
from .plan import Plan
from .rank_exit import GRACE_S, bounded_exit, end
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
        applied = None
        try:
            applied = apply_plan(
                module, self.selection, kernels=self.kernels, on_foreign_hooks=self.on_foreign_hooks, reduce_min=self._smallest_over_ranks
            )
            self.applied = self.last_applied = applied
            if applied.engines is not None:
                applied.engines.on(self.root_device)  # type: ignore[attr-defined]  # a device it cannot serve is an error now, not in a step
            self._agree(applied.plan, None)
        except Exception as error:
            if applied is None:
                self._agree(None, error)  # the other ranks wait to hear of this one
            self._undo()
            raise
        rank_zero_info(applied.describe())
        if applied.installed:
            rank_zero_info(_kernels_line(module, self.root_device, self.kernels))  # type: ignore[attr-defined]
        for line in advice(self.selection, self.kernels):
            rank_zero_info(line)
        for problem in applied.kernel_problems(self.root_device):  # type: ignore[attr-defined]
            rank_zero_warn(problem)

    def _agree(self, plan: Plan | None, error: Exception | None) -> None:
        """Find out whether every rank has the same plan."""

    def _smallest_over_ranks(self, value: float) -> float:
        """The smallest of a number over the ranks."""
        return value

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The base strategy's; then what offload did in the step is read, and the share `auto` decided, on every rank."""
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        if self.applied is not None and self.applied.engines is not None:
            self.applied.step_statistics(self.root_device)  # type: ignore[attr-defined]
        return result

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


class GDNRecomputeDDP(_PlanMixin, DDPStrategy):
    """What a `GDNRecomputeStrategy` becomes on several devices or nodes: Lightning's DDP, each rank under the same plan."""

    strategy_name = "gdn"
    _graph_is_known = False

    def setup_distributed(self) -> None:
        """As DDP; see `on_exception`."""
        with bounded_exit.surrounding():
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        """See `_PlanMixin.setup`."""
        self._graph_is_known = False  # the model is wrapped anew
        bounded_exit.failed = False  # an exception that somebody caught
        super().setup(trainer)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """As DDP, except that `static_graph=True` works with gradient accumulation.

        PyTorch's reducer fails an internal assertion if its first iteration is under `no_sync()`, so the first micro-batch of a static
        graph is reduced at once: one all-reduce more, the same mean.
        """
        if self._ddp_kwargs.get("static_graph") and not self._graph_is_known:
            self._graph_is_known = True
            yield
            return
        with super().block_backward_sync():
            yield

    def _agree(self, plan: Plan | None, error: Exception | None) -> None:
        """Compare the plans of all ranks, after which all of them go on or all of them raise.

        Raises:
            RuntimeError: names the rank that could not make its plan, or the first one whose plan differs from rank 0's, and in what.
        """
        digest = None if plan is None else hashlib.sha256(f"{self.kernels} {plan.to_json()}".encode()).hexdigest()
        told: list[tuple[str | None, str | None]] = _all_gather((digest, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            return
        for rank, (_, problem) in enumerate(told):
            if problem is not None:
                raise RuntimeError(f"GDNRecomputeStrategy: rank {rank} of {len(told)} could not apply its plan: {problem}")
        other = next((rank for rank, (theirs, _) in enumerate(told) if theirs != told[0][0]), None)
        if other is not None:
            assert plan is not None
            plans = _all_gather((self.kernels, plan.to_json()))  # only now: it may be large, and there may be many ranks
            raise RuntimeError(
                f"GDNRecomputeStrategy: every rank needs the same plan, and rank {other} has another one than rank 0: "
                f"{_difference(plans[0], plans[other], other)}. Give every rank the same labels, kernels and model"
            )

    def _smallest_over_ranks(self, value: float) -> float:
        """See `_PlanMixin`. A collective: `step_statistics` calls it in the same steps on every rank."""
        told = torch.tensor(value, dtype=torch.float64, device=self.root_device)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN)
        return float(told)

    def on_exception(self, exception: BaseException) -> None:
        """This rank failed: see that neither the others nor this one wait for ever.

        Gloo tells the others, since its connections close when this process ends. On NCCL they would hang in a kernel until its timeout:
        those that this process started are ended `GRACE_S` after it is done. A rank that started none is ended itself if destroying the
        process group, which Lightning does at exit, takes `GRACE_S`: in NCCL it waits for the other ranks of the node, and they hang. Once
        it is gone the others are ended by who started it: by Lightning in rank 0, or by torchrun.
        """
        super().on_exception(exception)
        if self._process_group_backend == "gloo":
            return
        # Spawned and forked processes, the other kind that Lightning starts, have a parent that only waits for them.
        processes = [process for process in getattr(self.launcher, "procs", []) if isinstance(process, subprocess.Popen)]
        if processes:
            atexit.register(end, processes, GRACE_S)
        else:
            bounded_exit.failed = True


class _SameNameOnSeveralDevices(ABCMeta):
    """`isinstance(trainer.strategy, GDNRecomputeStrategy)` holds on several devices too.

    The instance check alone: `issubclass`, and with it what Lightning finds out about `DDPStrategy` and `SingleDeviceStrategy`, stays
    what the base classes say.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or issubclass(type(instance), cls.__dict__.get("ddp_class", ()))


class GDNRecomputeStrategy(_PlanMixin, SingleDeviceStrategy, metaclass=_SameNameOnSeveralDevices):
    """Recompute selected regions of every Gated DeltaNet block instead of retaining them, or move what they retain to the host.

        Trainer(strategy=GDNRecomputeStrategy(["gdn_conv", "gdn_norm_out", "layernorm"]))
        Trainer(strategy=GDNRecomputeStrategy(["gdn_conv", "gdn_norm_out"], offload=["gdn_core_attn"]))

    Args:
        recompute: labels, see `lightning-gdn labels`. A bare string is one label or an arm (`"gdn_conv+layernorm"`, `"full:block:6"`).
            `[]` is the control: nothing is installed.
        offload: offload labels (`["gdn_core_attn"]`, `"gdn_core_attn@0.5"`) or an `OffloadConfig`: what moves to pinned host memory between
            forward and backward; `[]` moves nothing. In an arm they are written `offload:gdn_core_attn`.
        method: with `full`: `"uniform"` (every block, in chunks of `num_layers`) or `"block"` (the first `num_layers` blocks).
        num_layers: with `full`: see `method`.
        memory_budget: budget for `recompute="auto"`. Needs the planner, which this version does not have.
        kernels: `"stock"` runs what the model itself would run; `"fused"` flash-linear-attention's convolution and gated norm on CUDA (less
            memory, faster, not bit-equal to the eager ones). CPU tensors always take the model's torch functions.
        on_foreign_hooks: when a block is called inside other saved-tensor hooks (`save_on_cpu`, `torch.utils.checkpoint`): `"raise"`, or
            `"bypass"` to run it untouched.
        base_options: options of `DDPStrategy` and `DistributedDataParallel` (`find_unused_parameters`, `static_graph`, `timeout`, ...);
            on one device only `accelerator`, `checkpoint_io` and `precision_plugin` have an effect.

    Raises:
        ValueError: unknown label (with the nearest and all valid ones), option or value.
        RuntimeError: at setup on several devices, on every rank: the plans of two ranks differ.

    Attributes:
        applied: the plan in force while fitting, else None. `last_applied` stays readable after the fit.
    """

    strategy_name = "gdn"
    ddp_class: ClassVar[type[GDNRecomputeDDP]] = GDNRecomputeDDP
    """What it becomes on several devices. A subclass names one of its own, since nothing else of it would be left there."""

    def __init__(
        self,
        recompute: str | Sequence[str] = DEFAULT_LABELS,
        *,
        offload: str | Sequence[str] | OffloadConfig = (),
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
        # Lightning's connector fills these in, for it finds them here.
        self.num_nodes = 1
        self.cluster_environment: ClusterEnvironment | None = base_options.get("cluster_environment")
        self._layer_sync: Any = None
        self._offered: list[torch.device] = list(base_options.get("parallel_devices") or [])
        self._base_options = base_options
        self.kernels, self.on_foreign_hooks = kernels, on_foreign_hooks
        self.applied = self.last_applied = None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """What the caller fixed; else None, so that the connector of every Trainer hands over the devices it chose."""
        return self._base_options.get("parallel_devices")

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        self._offered = list(devices)

    def _configure_launcher(self) -> None:
        # The last thing the connector calls: devices and nodes are known, nothing is launched yet.
        if len(self._offered) * self.num_nodes > 1:
            self._become_ddp()
        elif self._offered:
            self._root_device = self._offered[0]

    def _become_ddp(self) -> None:
        if "ddp_class" not in type(self).__dict__:
            raise TypeError(
                f"{type(self).__name__}: on several devices a subclass of GDNRecomputeStrategy needs a class attribute ddp_class, a subclass of "
                f"GDNRecomputeDDP with what it adds; got devices={len(self._offered)}, num_nodes={self.num_nodes} and none"
            )
        options = {
            **self._base_options,
            "accelerator": self._accelerator,
            "parallel_devices": self._offered,
            "cluster_environment": self.cluster_environment,
            "checkpoint_io": self._checkpoint_io,
            "precision_plugin": self._precision_plugin,
        }
        nodes, layer_sync = self.num_nodes, self._layer_sync
        for name in (*vars(SingleDeviceStrategy()), "num_nodes", "_offered", "_base_options"):
            vars(self).pop(name, None)
        self.__class__ = type(self).ddp_class  # type: ignore[assignment]
        DDPStrategy.__init__(self, **options)  # type: ignore[arg-type]
        self.num_nodes, self._layer_sync = nodes, layer_sync
        DDPStrategy.set_world_ranks(self)  # type: ignore[arg-type]
        self._configure_launcher()


def _kernels_line(module: LightningModule, device: torch.device, kernels: str) -> str:
    """What will run on this device; `applied.kernels` says after the first forward what did."""
    names: dict[str, str] = {}
    for block in inspect_model(module).blocks:
        names.update(block.adapter.kernels(block.module, device, kernels))
    return f"kernels on {device}: " + ", ".join(f"{region} {name}" for region, name in names.items())


def _all_gather(mine: Any) -> list[Any]:
    """What every rank gives, in rank order. A collective."""
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, mine)
    return told


def _difference(zero: tuple[str, str], other: tuple[str, str], rank: int) -> str:
    """The first thing in which (kernels, plan as JSON) of `rank` is not that of rank 0."""
    if zero[0] != other[0]:
        return f"kernels={zero[0]!r} on rank 0, kernels={other[0]!r} on rank {rank}"
    a, b = Plan.from_json(zero[1]), Plan.from_json(other[1])
    if a.source != b.source:
        return f"labels {a.source!r} on rank 0, {b.source!r} on rank {rank}"
    if a.offload != b.offload:
        return f"{a.offload!r} on rank 0, {b.offload!r} on rank {rank}"
    if len(a.blocks) != len(b.blocks):
        return f"{len(a.blocks)} blocks on rank 0, {len(b.blocks)} on rank {rank}"
    one, two = next((x, y) for x, y in zip(a.blocks, b.blocks, strict=True) if x != y)
    if (one.name, one.kind) != (two.name, two.kind):
        return f"block {one.name!r} ({one.kind}) on rank 0, {two.name!r} ({two.kind}) on rank {rank}"
    return f"block {one.name!r}: {one.modes} on rank 0, {two.modes} on rank {rank}"


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
