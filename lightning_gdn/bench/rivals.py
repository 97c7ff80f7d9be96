"""Rivals on a model: each by its own public call, for a time, beside what the control runs. See docs/rivals.md.

`install` puts a rival into force and `Installed.undo` takes it back. The kernels are the control's: under `kernels="fused"` the blocks run
the fused functions inside the rival's checkpoints, as the control runs them without. Nothing here recomputes by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..apply import apply_plan
from ..inspection import FoundBlock, ModelReport, inspect_model
from ..replay import is_parameter
from ..takeover import PartTakeover, Takeover
from .arms import HF, SAVE_ON_CPU, SELECTIVE, Rival, check_rival
from .segments import OnCpuTape, SegmentTape

__all__ = ["Installed", "RivalCallback", "install", "selective_contexts", "without_a_trace"]


class HeldBytes:
    """Bytes of the unique storages that one block holds from forward to backward, parameters and views of them aside: what the ledger counts."""

    def __init__(self) -> None:
        self._pins: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(size for _, size in self._pins.values())

    def add(self, value: Any) -> None:
        """Count what a checkpoint takes as input, or autograd saves."""
        if isinstance(value, Tensor) and not is_parameter(value):
            storage = value.untyped_storage()
            self._pins.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))

    def pack(self, tensor: Tensor) -> Tensor:
        """The pack hook."""
        self.add(tensor)
        return tensor.detach()


class _Count:
    """What takeovers share while held bytes are counted: the counter of the running block."""

    def __init__(self) -> None:
        self.block: HeldBytes | None = None
        self.total = 0

    def hold(self, value: Any) -> None:
        """A checkpoint of the running block takes this as input."""
        if self.block is not None:
            self.block.add(value)


def _not_by_regions(*args: Any) -> Any:
    raise TypeError("this forward is not run by regions")


class _CountedBlock(Takeover):
    """A block, rival included, with counting hooks around it: inside a checkpoint only the checkpoint's own hooks fire."""

    def __init__(self, module: nn.Module, count: _Count) -> None:
        super().__init__(module, _not_by_regions)
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = self._count
        block = count.block = HeldBytes()
        try:
            with saved_tensors_hooks(block.pack, _same):
                return self.untouched(self.module, *args, **kwargs)
        finally:
            count.block = None
            count.total += block.total


def _same(packed: Tensor) -> Tensor:
    return packed


class _WholeBlock(Takeover):
    """A block inside `torch.utils.checkpoint`."""

    def __init__(self, module: nn.Module, count: _Count, options: dict[str, Any]) -> None:
        super().__init__(module, _not_by_regions)
        self._count, self._options = count, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.untouched(self.module, *args, **kwargs)
        if self._count.block is not None:
            for value in tree_leaves((args, kwargs)):
                self._count.hold(value)
        return checkpoint(self.untouched, self.module, *args, use_reentrant=False, **self._options, **kwargs)


class _SegmentedBlock(Takeover):
    """A block with `torch.utils.checkpoint` around groups of its regions."""

    def __init__(self, found: FoundBlock, groups: Sequence[tuple[str, ...]], kernels: str, count: _Count) -> None:
        super().__init__(found.module, found.adapter.block_forward)
        self._groups, self._kernels, self._count = groups, kernels, count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not torch.is_grad_enabled():
            return self.untouched(module, *args, **kwargs)
        with SegmentTape(self._groups, self._kernels, self._count.hold if self._count.block is not None else None) as tape:
            return self._run(module, tape, *args, **kwargs)


class _OnCpuBlock(Takeover):
    """A block with `save_on_cpu` around single regions."""

    def __init__(self, found: FoundBlock, regions: Sequence[str], kernels: str) -> None:
        super().__init__(found.module, found.adapter.block_forward)
        self._regions, self._kernels = regions, kernels

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not torch.is_grad_enabled():
            return self.untouched(module, *args, **kwargs)
        with OnCpuTape(self._regions, self._kernels, pin_memory=_on_gpu(module)) as tape:
            return self._run(module, tape, *args, **kwargs)


class _OnCpu(Takeover):
    """A model whose saved tensors wait in host memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        with save_on_cpu(pin_memory=_on_gpu(module)) if torch.is_grad_enabled() else nullcontext():
            return self.untouched(module, *args, **kwargs)


def _on_gpu(module: nn.Module) -> bool:
    return next(module.parameters()).device.type == "cuda"


def _attention_ops() -> frozenset[Any]:
    names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    found = (getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None) for name in names)
    return frozenset(packet.default for packet in found if packet is not None)


def selective_contexts() -> Any:
    """Contexts for one checkpoint: attention and every second matmul are saved, everything else is recomputed (torchtitan's selective "op" mode).

    The matmuls are counted per checkpoint, in the forward and in the recompute on their own, so that both count alike.
    """
    matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    saved, counts = _attention_ops(), defaultdict[bool, int](int)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in matmuls:
            counts[context.is_recompute] += 1
        if op in saved or (op in matmuls and counts[context.is_recompute] % 2):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Installed:
    """A rival in force on a model; ends with `undo()`."""

    def __init__(self, report: ModelReport, rival: Rival, undo: Sequence[Callable[[], None]], count: _Count) -> None:
        self.blocks = len(report.blocks)
        """Blocks of the model."""
        self.rival = rival
        self._undo, self._count, self._modules = list(undo), count, [found.module for found in report.blocks]
        self._groups = tuple(rival.groups(found.layout.regions) for found in report.blocks)

    def describe(self) -> str:
        """What is in force."""
        rival, blocks = self.rival, self.blocks
        if rival.names:
            found = Counter("-".join(group) for groups in self._groups for group in groups)
            where = ", ".join(f"{name} in {number}" for name, number in found.items())
            if rival.checkpoints_regions:
                what = f"torch.utils.checkpoint over {where}"
            else:
                what = f"save_on_cpu(pin_memory=True) around {found.total()} regions in {sum(map(bool, self._groups))} of them: {where}"
        elif rival.whole_blocks:
            what = f"torch.utils.checkpoint around {rival.num_blocks or blocks} whole blocks"
        else:
            what = {
                HF: "gradient_checkpointing_enable()",
                SELECTIVE: "torch.utils.checkpoint around every whole block, attention and every second matmul saved",
                SAVE_ON_CPU: "save_on_cpu(pin_memory=True) around the forward",
            }[rival.kind]
        return f"rival {rival}: {blocks} blocks; {what}"

    @property
    def can_count(self) -> bool:
        """Whether held bytes can be counted exactly: not where tensors are kept by means that no hook around a block sees."""
        return self.rival.whole_blocks or self.rival.checkpoints_regions

    def held_bytes(self, forward: Callable[[], Tensor]) -> int | None:
        """Bytes that the blocks hold between forward and backward, by the ledger's definition; None where that cannot be counted.

        Args:
            forward: one forward of the model with gradients; its graph is dropped.
        """
        if not self.can_count:
            return None
        counters = [_CountedBlock(module, self._count) for module in self._modules]
        self._count.total = 0
        for counter in counters:
            counter.install()
        try:
            forward()
        finally:
            for counter in counters:
                counter.remove()
        return self._count.total

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Take the rival back. Calling it again does nothing."""
        while self._undo:
            self._undo.pop()()


def install(model: nn.Module, rival: Rival, *, kernels: str = "stock") -> Installed:
    """Put a rival into force on a model until `undo()`.

    Args:
        model: any module that contains the blocks, at any depth.
        kernels: as for `apply_plan`; the control's.

    Raises:
        ValueError: no block was found, or another plan is in force.
        UserError: the model cannot run the rival.
    """
    applied = apply_plan(model, [], kernels=kernels)  # under fused kernels this is what the control runs; under stock ones it installs nothing
    report = inspect_model(model)
    owner = next((module for module in model.modules() if hasattr(module, "gradient_checkpointing_enable")), None)
    undo: list[Callable[[], None]] = [applied.undo]
    count = _Count()
    try:
        check_rival(rival, report.layouts, hugging_face=owner is not None)
        takeovers = _takeovers(model, rival, report, kernels, count)
        for takeover in takeovers:
            takeover.install()
            undo.append(takeover.remove)
        if rival.kind == HF:
            undo.append(_enable_hugging_face(owner))
    except BaseException:
        while undo:
            undo.pop()()
        raise
    return Installed(report, rival, undo, count)


def _takeovers(model: nn.Module, rival: Rival, report: ModelReport, kernels: str, count: _Count) -> list[Takeover]:
    if rival.whole_blocks:
        return [_WholeBlock(found.module, count, {}) for found in report.blocks[: rival.num_blocks]]
    if rival.kind == SELECTIVE:
        return [_WholeBlock(found.module, count, {"context_fn": selective_contexts}) for found in report.blocks]
    if rival.kind == SAVE_ON_CPU and not rival.names:
        return [_OnCpu(model, _not_by_regions)]
    takeovers: list[Takeover] = []
    for found in report.blocks:
        groups = rival.groups(found.layout.regions)
        if not groups:
            continue
        block: Takeover
        if rival.checkpoints_regions:
            block = _SegmentedBlock(found, groups, kernels, count)
        else:
            block = _OnCpuBlock(found, [region for (region,) in groups], kernels)
        takeovers += [block, *(PartTakeover(module, run) for module, run in found.adapter.parts(found.module))]
    return takeovers


def _enable_hugging_face(model: Any) -> Callable[[], None]:
    """Switch gradient checkpointing on, and the model into training mode where it is not: in eval mode transformers ignores the switch."""
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    model.gradient_checkpointing_enable()
    return partial(_disable_hugging_face, model, modes)


def _disable_hugging_face(model: Any, modes: Sequence[tuple[nn.Module, bool]]) -> None:
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    for module, training in modes:
        module.training = training


@contextmanager
def without_a_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts the random stream and all buffers back, and drops gradients: the training after it is that of a model nobody looked at."""
    gpus = [device.index or 0] if device.type == "cuda" else []
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=gpus):
        yield
    for parameter in module.parameters():
        parameter.grad = None
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    if device.type == "cuda":
        torch.cuda.empty_cache()


class RivalCallback(L.Callback):
    """Runs a fit under a rival, and counts what its blocks hold before the first step.

    Args:
        rival: which one.
        kernels: the option `kernels`.
        batch: ids [B, T] of one micro-batch, for the count.
    """

    def __init__(self, rival: Rival, kernels: str, batch: Tensor) -> None:
        self.rival, self.kernel_option, self.batch = rival, kernels, batch
        self.installed: Installed | None = None
        self.plan: str | None = None
        self.blocks: int | None = None
        self.kernels: dict[str, str] = {}
        self.retained_bytes: int | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the model was built in configure_model, moved, and wrapped by the strategy
        self.installed = install(pl_module, self.rival, kernels=self.kernel_option)
        self.plan, self.blocks = self.installed.describe(), self.installed.blocks
        for found in inspect_model(pl_module).blocks:
            self.kernels |= found.adapter.kernels(found.module, pl_module.device, self.kernel_option)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert self.installed is not None
        if self.installed.can_count:
            batch = self.batch.to(pl_module.device)
            with without_a_trace(pl_module, pl_module.device), trainer.precision_plugin.train_step_context():
                self.retained_bytes = self.installed.held_bytes(lambda: pl_module(batch))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.undo()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.undo()

    def undo(self) -> None:
        """Take the rival back, if it is in force."""
        if self.installed is not None:
            self.installed.undo()
            self.installed = None
