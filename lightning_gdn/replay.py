"""Regions as they are replayed: what one call of a recomputed region needs to run again, and the handles it serves.

A `Slot` stands for a saved tensor: the tensor itself, or a handle *(region, which tensor, size, stride, offset)*. The first handle
that backward asks for replays its region once; each tensor of the replay is dropped when its last handle was served. A later
backward over the same graph (`retain_graph=True`) replays again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Region", "RegionFn", "RngState", "Slot", "in_replay", "is_parameter", "modified", "thread_state"]

_EDITED = "one of the variables needed for gradient computation has been modified by an inplace operation"
_MODIFIED = _EDITED + ": {what} is at version {now}; expected version {then} instead (lightning_gdn tape). {hint}"
thread_state = threading.local()
"""`tape`: the tape of the running block; `replays`: depth of running replays. Backward runs in threads of its own on CUDA."""
_current_graph_task_id = torch._C._current_graph_task_id
# What `torch.autograd.graph.saved_tensors_hooks` and `torch.set_grad_enabled` call: a region opens both twice per step, and their
# Python objects cost more host time than everything else that a cheap region needs.
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_set_grad_enabled = torch._C._set_grad_enabled


def in_replay() -> bool:
    """True while a region is being replayed in backward. Module hooks inside a replayed region fire again; ask here to tell."""
    return getattr(thread_state, "replays", 0) > 0


class ReplayCounter(Protocol):
    """What the ledger offers in an instrumented step."""

    def replayed(self, region: str) -> None:
        """A region was replayed."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RegionFn:
    """One region of one model family.

    `call(owner, *args)` is a top-level function that takes **every** tensor as an argument: a closure over a tensor would keep the
    graph alive when a backward never comes. It returns a tensor or a flat tuple.
    """

    name: str
    call: Callable[..., Any]
    modules: tuple[str, ...] = ()
    """Attributes of the owner: submodules the region calls."""
    params: tuple[str, ...] = ()
    """Attributes of the owner: parameters the region reads itself."""
    pure: frozenset[type] = field(default=frozenset({nn.Linear, nn.Conv1d, nn.SiLU}))
    """Module classes known to draw no random numbers. Any other class makes the region snapshot the random state."""
    draws: Callable[[nn.Module], bool] | None = None
    """Further condition under which the region can draw random numbers (attention dropout)."""

    def can_draw(self, owner: nn.Module) -> bool:
        """Whether a call can draw random numbers, so that a replay needs the random state of the forward."""
        if self.draws is not None and self.draws(owner):
            return True
        for name in self.modules:
            module = owner._modules[name]
            assert module is not None
            if type(module) not in self.pure or module._forward_hooks or module._forward_pre_hooks:
                return True
        return False

    def versions(self, owner: nn.Module) -> int:
        """Sum of the version counters of every parameter and buffer a replay reads, and of the hooks of modules that have some.

        A module that edits a buffer in its forward (spectral norm, batch norm) would do so again in a replay, from a later state: the sum,
        taken before the forward, has then changed, and the replay is refused.
        """
        total = 0
        for name in self.params:
            parameter = owner._parameters.get(name)
            total += parameter._version if parameter is not None else _all_versions(owner)  # a parametrized one is no parameter
        for name in self.modules:
            module = owner._modules[name]
            assert module is not None
            if module._modules or module._buffers or module._forward_hooks or module._forward_pre_hooks:
                total += _all_versions(module)
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    total += parameter._version
        return total


def _all_versions(module: nn.Module) -> int:
    """Of every tensor, and which forward hooks there are: one that comes or goes changes what a replay computes. Hook ids never repeat."""
    tensors = sum(tensor._version for found in (module.parameters(), module.buffers()) for tensor in found)
    hooks = tuple(number for part in module.modules() for found in (part._forward_hooks, part._forward_pre_hooks) for number in found)
    return tensors + hash(hooks) if hooks else tensors


class Slot:
    """A saved tensor, or a region's input: the tensor, or a handle into a replay."""

    __slots__ = ("tensor", "version", "region", "inside", "index", "size", "stride", "offset")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()  # never the raw tensor: it would keep its own graph alive
        self.version = tensor._version
        self.region: Region | None = None

    def point_inside(self, region: Region, position: int) -> None:
        """Become a handle to the tensor that the region saves at this position."""
        self.region, self.inside, self.index, self.tensor = region, True, position, None

    def point_to_output(self, region: Region, index: int) -> None:
        """Become a handle to a view of the region's output."""
        tensor = self.tensor
        assert tensor is not None
        self.region, self.inside, self.index, self.tensor = region, False, index, None
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def resolve(self) -> Tensor:
        """The tensor, replayed if need be."""
        region = self.region
        if region is not None:
            return region.serve(self)
        tensor = self.tensor
        assert tensor is not None
        if tensor._version != self.version:
            raise modified(tensor, self.version)
        return tensor


def modified(tensor: Tensor, then: int) -> RuntimeError:
    """PyTorch's error for a tensor edited in place, which saved-tensor hooks switch off."""
    what, hint = f"[{tensor.dtype} {list(tensor.shape)}]", "A tensor that backward needs was edited in place after the forward."
    return RuntimeError(_MODIFIED.format(what=what, now=tensor._version, then=then, hint=hint))


class Region:
    """One call of a recomputed region: what a replay needs, and its results while handles are being served."""

    __slots__ = (
        "fn",
        "owner",
        "autocast",  # (device type, enabled, dtype) of the forward, and the default dtype
        "probe",
        "args",  # slots and constants; None once it is known that nothing will be replayed
        "grads",  # requires_grad per argument
        "expect",  # per saved position: shape and dtype, None for a parameter
        "versions",  # of the parameters, summed
        "rng",
        "inside_need",  # saved positions that handles point to
        "out_need",  # output -> number of handles
        "outs",
        "saved",
        "out_left",
        "task",  # the backward that the results belong to
        "__weakref__",
    )

    def __init__(self, fn: RegionFn, owner: nn.Module, autocast: tuple[str, bool, torch.dtype, torch.dtype], probe: ReplayCounter | None) -> None:
        self.fn, self.owner, self.autocast, self.probe = fn, owner, autocast, probe
        self.args: list[Any] | None = None
        self.grads: list[bool] = []
        self.expect: list[tuple[torch.Size, torch.dtype] | None] = []
        self.versions = 0
        self.rng: RngState | None = None
        self.inside_need: set[int] = set()
        self.out_need: dict[int, int] = {}
        self.task = -2

    @property
    def needed(self) -> bool:
        """Whether any handle points here."""
        return bool(self.inside_need or self.out_need)

    def count(self, slot: Slot) -> None:
        """A handle into this region exists and will be served."""
        if slot.inside:
            self.inside_need.add(slot.index)
        else:
            self.out_need[slot.index] = self.out_need.get(slot.index, 0) + 1

    def serve(self, slot: Slot) -> Tensor:
        """What a handle stands for. The first handle of a backward replays the region; a tensor goes with its last handle."""
        task, index = _current_graph_task_id(), slot.index
        if self.task != task or index not in (self.saved if slot.inside else self.outs):
            self._replay()
            self.task = task
            _drop_at_end(self, task)
        if slot.inside:
            return self.saved.pop(index)
        base = self.outs[index]
        left = self.out_left[index] = self.out_left[index] - 1
        if left <= 0:
            del self.outs[index]
        if base.shape == slot.size and base.stride() == slot.stride and base.storage_offset() == slot.offset:
            return base
        return base.as_strided(slot.size, slot.stride, slot.offset)

    def _replay(self) -> None:
        """Run the region again from its inputs and keep what handles point to."""
        args = self.args
        if args is None:
            raise RuntimeError(f"region {self.fn.name!r}: nothing is left to replay from (lightning_gdn tape; please report this)")
        now = self.fn.versions(self.owner)
        if now != self.versions:
            hint = (
                f"A parameter or buffer of region {self.fn.name!r} was edited in place in or after the forward, or swapped "
                "(torch.func.functional_call), or a forward hook of its modules came or went; the region cannot be replayed."
            )
            raise RuntimeError(f"{_EDITED} (lightning_gdn tape). {hint}")
        inputs = []
        for arg, requires in zip(args, self.grads, strict=True):
            if type(arg) is Slot:
                value = arg.resolve().detach()
                inputs.append(value.requires_grad_(True) if requires else value)
            else:
                inputs.append(arg)
        wanted = self.inside_need
        got: list[tuple[torch.Size, torch.dtype] | None] = []
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> None:
            if is_parameter(tensor):
                got.append(None)
                return
            position = len(got)
            got.append((tensor.shape, tensor.dtype))
            if position in wanted:
                saved[position] = tensor.detach()

        if self.probe is not None:
            self.probe.replayed(self.fn.name)
        result = self._run(inputs, pack)
        if got != self.expect:
            raise _replay_mismatch(self.fn.name, self.expect, got)
        outs = result if isinstance(result, tuple) else (result,)
        self.outs = {index: outs[index].detach() for index in self.out_need}
        self.out_left = dict(self.out_need)
        self.saved = saved

    def _run(self, inputs: list[Any], pack: Callable[[Tensor], None]) -> Any:
        """Call the region in the state of the forward: grad on, autocast as it was, its random state, no tape. All put back afterwards."""
        device_type, enabled, dtype, default = self.autocast
        default_now = torch.get_default_dtype()
        state, rng = thread_state, self.rng
        tape, depth = getattr(state, "tape", None), getattr(state, "replays", 0)
        before = RngState(rng.device) if rng is not None else None
        grad = torch.is_grad_enabled()
        try:
            state.tape, state.replays = None, depth + 1
            _set_grad_enabled(True)
            if default != default_now:  # Lightning's bf16-true sets it around the training step only
                torch.set_default_dtype(default)
            if rng is not None:
                rng.restore()
            if not enabled and not torch.is_autocast_enabled(device_type):
                return self._hooked(inputs, pack)
            # No cache: a cast made here must not outlive the replay, nor be one that another step filled.
            with torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=False):
                return self._hooked(inputs, pack)
        finally:
            _set_grad_enabled(grad)
            if default != default_now:
                torch.set_default_dtype(default_now)
            if before is not None:
                before.restore()
            state.tape, state.replays = tape, depth

    def _hooked(self, inputs: list[Any], pack: Callable[[Tensor], None]) -> Any:
        push_hooks(pack, _never_unpacked)
        try:
            return self.fn.call(self.owner, *inputs)
        finally:
            pop_hooks()


class _Ending:
    """Drops what is left of replays when a backward ends: one that did not need every handle (`autograd.grad` of one weight) leaves some."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.regions: list[weakref.ref[Region]] = []

    def __call__(self) -> None:
        for reference in self.regions:
            region = reference()
            if region is not None:
                region.outs, region.saved = {}, {}
        if getattr(thread_state, "ending", None) is self:
            thread_state.ending = None


def _drop_at_end(region: Region, task: int) -> None:
    if task < 0:  # unpacked outside a backward
        return
    ending = getattr(thread_state, "ending", None)
    if ending is None or ending.task != task:
        ending = thread_state.ending = _Ending(task)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
    ending.regions.append(weakref.ref(region))


def _never_unpacked(packed: None) -> Tensor:
    raise RuntimeError("the graph of a replay is never differentiated (lightning_gdn tape; please report this)")


def _replay_mismatch(name: str, expect: list[Any], got: list[Any]) -> RuntimeError:
    if len(expect) != len(got):
        what = f"it saved {len(got)} tensors for backward, the forward had saved {len(expect)}"
    else:
        position = next(i for i, (a, b) in enumerate(zip(expect, got, strict=True)) if a != b)
        what = f"saved tensor {position} is {got[position] or 'a parameter'}, in the forward it was {expect[position] or 'a parameter'}"
    return RuntimeError(
        f"region {name!r}: the replay did not do what the forward did: {what}. Something the region depends on changed between forward and "
        "backward: a module swapped or switched between train and eval, a forward hook removed (some adapters set one for the forward only), "
        "requires_grad, autocast, or code that depends on global state."
    )


class RngState:
    """Random state of the CPU generator and, for a CUDA block, of its device's generator."""

    __slots__ = ("cpu", "cuda", "device")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def is_parameter(tensor: Tensor) -> bool:
    """A parameter or a view of one (`weight.t()`, `conv1d.weight.squeeze(1)`)."""
    kind = type(tensor)  # exact types first: isinstance against Parameter runs a Python-level metaclass
    if kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter)):
        return True
    base = tensor._base
    if base is None:
        return False
    kind = type(base)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(base, nn.Parameter))
