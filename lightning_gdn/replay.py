"""Regions as they are replayed: what one call of a recomputed region needs to run again, and the handles it serves.

A `Slot` stands for a saved tensor: the tensor itself, or a handle *(region, which tensor, size, stride, offset)*. The first handle
that backward asks for replays its region once; each tensor of the replay is dropped when its last handle was served. A later
backward over the same graph (`retain_graph=True`) replays again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .region_fn import TRAINED, RegionFn

__all__ = ["Region", "RngState", "Slot", "in_replay", "is_parameter", "modified", "storage_key", "thread_state"]

_EDITED = "one of the variables needed for gradient computation has been modified by an inplace operation"
_MODIFIED = _EDITED + ": {what} is at version {now}; expected version {then} instead (lightning_gdn tape). {hint}"


def storage_key(tensor: Tensor) -> int | None:
    """Identity of the tensor's storage while it is alive; None for a tensor without one (sparse and the like)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class _ThreadState(threading.local):
    """What belongs to one thread. Backward runs in threads of its own on CUDA."""

    tape: Any = None
    """The tape of the running block."""
    replays: int = 0
    """Depth of running replays."""
    ending: _Ending | None = None
    """What the running backward drops at its end."""


thread_state = _ThreadState()
_current_graph_task_id = torch._C._current_graph_task_id
# What `torch.autograd.graph.saved_tensors_hooks` and `torch.set_grad_enabled` call: a region opens both twice per step, and their
# Python objects cost more host time than everything else that a cheap region needs.
push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_set_grad_enabled = torch._C._set_grad_enabled
Meta = tuple[torch.Size, torch.dtype]
"""What a replay has to bring back: shape and dtype."""


def in_replay() -> bool:
    """True while a region is being replayed in backward. Module hooks inside a replayed region fire again; ask here to tell."""
    return thread_state.replays > 0


class ReplayCounter(Protocol):
    """What the ledger (or the profiler) offers in an instrumented step."""

    def replayed(self, region: str) -> None:
        """A replay begins; its inputs are there, also those that replays of other regions had to bring back."""

    def replay_ended(self, region: str) -> None:
        """The replay ended; what it saved and its outputs are still held."""


class Ticket(Protocol):
    """One storage that moved to the host (`offload.handles.HostCopy`)."""

    def view(self, size: Sequence[int], stride: Sequence[int], offset: Any, dtype: torch.dtype) -> Tensor:
        """A view of the storage, back on the device."""


class Slot:
    """A saved tensor, or a region's input: the tensor, a handle into a replay, or a view of a storage on the host.

    While its region runs, the slot of a saved tensor holds the tensor as it is; `stay` or one of the `point_` methods must follow, since
    the raw tensor would keep its own graph alive.
    """

    __slots__ = ("tensor", "version", "region", "inside", "index", "size", "stride", "offset", "dtype", "ticket", "__weakref__")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.region: Region | None = None

    def meta(self) -> Meta:
        """Shape and dtype."""
        if self.tensor is not None:
            return self.tensor.shape, self.tensor.dtype
        assert self.region is not None  # a handle to an output: of that output's dtype
        return self.size, self.region.made[self.index][1]

    def stay(self) -> Slot:
        """Hold the tensor until backward."""
        tensor = self.tensor
        assert tensor is not None
        self.tensor = tensor.detach()
        return self

    def point_inside(self, region: Region, position: int) -> None:
        """Become a handle to the tensor that the region saves at this position."""
        self.region, self.inside, self.index, self.tensor = region, True, position, None

    def point_to_output(self, region: Region, index: int) -> Slot:
        """Become a handle to a view of the region's output."""
        tensor = self.tensor
        assert tensor is not None
        self.region, self.inside, self.index, self.tensor = region, False, index, None
        self.size, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return self

    def move(self, ticket: Ticket) -> None:
        """The storage moved to the host: let it go here."""
        tensor = self.tensor
        assert tensor is not None
        self.size, self.stride, self.offset, self.dtype = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        self.ticket: Ticket = ticket
        self.tensor = None

    @property
    def moved(self) -> Ticket | None:
        """The ticket, if the storage moved to the host."""
        return self.ticket if self.tensor is None and self.region is None else None

    def resolve(self) -> Tensor:
        """The tensor, replayed or brought back if need be."""
        region = self.region
        if region is not None:
            return region.serve(self)
        tensor = self.tensor
        if tensor is None:
            return self.ticket.view(self.size, self.stride, self.offset, self.dtype)
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
        "expect",  # per saved position: shape and dtype, None for a parameter; empty if no handle points inside
        "made",  # output -> shape and dtype, of those that handles may point to
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

    def __init__(
        self,
        fn: RegionFn,
        owner: nn.Module,
        autocast: tuple[str, bool, torch.dtype, torch.dtype],
        probe: ReplayCounter | None,
        args: list[Any],
        grads: list[bool],
    ) -> None:
        self.fn, self.owner, self.autocast, self.probe = fn, owner, autocast, probe
        self.args: list[Any] | None = args
        self.grads = grads
        self.expect: list[Meta | None] = []
        self.made: dict[int, Meta] = {}
        self.versions = fn.versions(owner)
        self.rng: RngState | None = None
        self.inside_need: set[int] = set()
        self.out_need: dict[int, int] = {}
        self.task = -2

    @property
    def needed(self) -> bool:
        """Whether any handle points here."""
        return bool(self.inside_need or self.out_need)

    def count(self, index: int) -> None:
        """One more handle to this output exists and will be served."""
        need = self.out_need
        need[index] = need.get(index, 0) + 1

    def watch(self, expect: list[Meta | None], inside: Iterable[int]) -> None:
        """A replay is to compare what it saves, position by position; handles point to the positions `inside`."""
        self.expect = expect
        self.inside_need.update(inside)

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
        fn, args = self.fn, self.args
        if args is None:
            raise RuntimeError(f"region {fn.name!r}: nothing is left to replay from (lightning_gdn tape; please report this)")
        now = fn.versions(self.owner)
        if now != self.versions:
            if now // TRAINED != self.versions // TRAINED:
                raise _replay_mismatch(fn.name, "other parameters of it require gradients than did in the forward")
            hint = (
                f"A parameter or buffer of region {fn.name!r} was edited in place in or after the forward, or swapped "
                "(torch.func.functional_call), or a forward hook of its modules came or went; the region cannot be replayed."
            )
            raise RuntimeError(f"{_EDITED} (lightning_gdn tape). {hint}")
        inputs = [arg.resolve().detach() if type(arg) is Slot else arg for arg in args]
        if self.probe is not None:
            self.probe.replayed(fn.name)
        again = fn.again(self.owner, *inputs) if fn.again is not None and self.rng is None else None
        if again is not None:
            result, saved = again
            self._take(saved)
        else:
            for value, arg, requires in zip(inputs, args, self.grads, strict=True):
                if requires and type(arg) is Slot:
                    value.requires_grad_()
            # Where no handle points inside and every module is a known one, which outputs come out is all there is to check.
            watched = bool(self.inside_need) or self.rng is not None
            result = self._in_forward_state(self._watched if watched else self._plain, inputs)
        if self.probe is not None:
            self.probe.replay_ended(fn.name)
        outs = result if isinstance(result, tuple) else (result,)
        found: dict[int, Tensor] = {}
        for index in self.out_need:
            out = found[index] = outs[index].detach()
            if (out.shape, out.dtype) != self.made[index]:
                raise _replay_mismatch(fn.name, f"output {index} is {_meta(out)}, in the forward it was {self.made[index]}")
        self.outs, self.out_left = found, dict(self.out_need)

    def _take(self, saved: list[Tensor]) -> None:
        """What a replay without autograd saved: the comparison of `_watched`."""
        if self.expect:
            got = [None if is_parameter(tensor) else _meta(tensor) for tensor in saved]
            if got != self.expect:
                raise _replay_mismatch(self.fn.name, _first_difference(self.expect, got))
        self.saved: dict[int, Tensor] = {position: saved[position] for position in self.inside_need}

    def _plain(self, inputs: list[Any]) -> Any:
        self.saved = {}
        return self.fn.call(self.owner, *inputs)

    def _watched(self, inputs: list[Any]) -> Any:
        """Compare what the replay saves with what the forward saved, position by position, and keep what handles point to."""
        wanted, expect = self.inside_need, self.expect
        got: list[Meta | None] = []
        saved = self.saved = {}

        def pack(tensor: Tensor) -> None:
            if is_parameter(tensor):
                got.append(None)
                return
            position = len(got)
            got.append((tensor.shape, tensor.dtype))
            if position in wanted:
                saved[position] = tensor.detach()

        push_hooks(pack, _never_unpacked)
        try:
            result = self.fn.call(self.owner, *inputs)
        finally:
            pop_hooks()
        if got != expect:
            raise _replay_mismatch(self.fn.name, _first_difference(expect, got))
        return result

    def _in_forward_state(self, run: Callable[[list[Any]], Any], inputs: list[Any]) -> Any:
        """Grad on, autocast as it was, the region's random state, no tape. All put back afterwards."""
        device_type, enabled, dtype, default = self.autocast
        default_now = torch.get_default_dtype()
        state, rng = thread_state, self.rng
        tape, depth = state.tape, state.replays
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
                return run(inputs)
            # No cache: a cast made here must not outlive the replay, nor be one that another step filled.
            with torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=False):
                return run(inputs)
        finally:
            _set_grad_enabled(grad)
            if default != default_now:
                torch.set_default_dtype(default_now)
            if before is not None:
                before.restore()
            state.tape, state.replays = tape, depth


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
        if thread_state.ending is self:
            thread_state.ending = None


def _drop_at_end(region: Region, task: int) -> None:
    if task < 0:  # unpacked outside a backward
        return
    ending = thread_state.ending
    if ending is None or ending.task != task:
        ending = thread_state.ending = _Ending(task)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
    ending.regions.append(weakref.ref(region))


def _never_unpacked(packed: None) -> Tensor:
    raise RuntimeError("the graph of a replay is never differentiated (lightning_gdn tape; please report this)")


def _meta(tensor: Tensor) -> Meta:
    return tensor.shape, tensor.dtype


def _first_difference(expect: list[Meta | None], got: list[Meta | None]) -> str:
    if len(expect) != len(got):
        return f"it saved {len(got)} tensors for backward, the forward had saved {len(expect)}"
    position = next(i for i, (a, b) in enumerate(zip(expect, got, strict=True)) if a != b)
    return f"saved tensor {position} is {got[position] or 'a parameter'}, in the forward it was {expect[position] or 'a parameter'}"


def _replay_mismatch(name: str, what: str) -> RuntimeError:
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
    if kind is Tensor:
        base = tensor._base
        return base is not None and is_parameter(base)
    return kind is nn.Parameter or isinstance(tensor, nn.Parameter) or (tensor._base is not None and is_parameter(tensor._base))
