"""The tape: keep or recompute what autograd saves, region by region, around one block's forward.

`torch.autograd.graph.saved_tensors_hooks` is opened lexically around a block. Inside, the block runs as a sequence of regions
(`Tape.run`). After a region that is recomputed its saved tensors are swept: one that aliases the region's *input* stays, an
internal one becomes a *handle* (region, which tensor, size, stride, offset) and its memory goes, and in mode `recompute` so
does one that aliases an *output*. Outputs are registered by storage, so a later region that saves a view of one gets a handle
too: that is how memory is freed without replaying a projection. In backward the first handle of a region replays it once; every
handle gets its exact view; each tensor of the replay is dropped when its last handle was served.

Identity is storage, offset, size, stride and dtype. A registered output holds a `StorageWeakRef`, so its address cannot be
reused while the block runs. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .regions import Mode
from .replay import Region, RegionFn, ReplayCounter, RngState, Slot, in_replay, is_parameter, modified, thread_state

__all__ = ["MIN_INTERNAL_BYTES", "Carry", "RegionFn", "Tape", "active_tape", "in_replay"]

MIN_INTERNAL_BYTES = 512
"""An internal tensor below this size stays: the CUDA allocator hands out 512 bytes at least, and a handle costs host time."""


def active_tape() -> Tape | None:
    """The tape of the block whose forward is running in this thread, or None."""
    return getattr(thread_state, "tape", None)


class Probe(ReplayCounter, Protocol):
    """What the ledger offers the tape in an instrumented step."""

    def saved(self, region: str, tensor: Tensor, packed: object) -> None:
        """Autograd saved a tensor that is no parameter."""

    def called(self, region: str) -> None:
        """A region ran in the forward."""

    def finish(self, regions: Sequence[Region]) -> None:
        """The block's forward ended."""


def _storage_key(tensor: Tensor) -> int | None:
    """Identity of the tensor's storage while it is alive; None for a tensor without one (sparse and the like)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class _Output:
    """A registered output. The weak reference pins the storage's address, not its memory."""

    __slots__ = ("region", "index", "dtype", "version", "pin")

    def __init__(self, region: Region, index: int, tensor: Tensor) -> None:
        self.region, self.index, self.dtype, self.version = region, index, tensor.dtype, tensor._version
        self.pin = StorageWeakRef(tensor.untyped_storage())


class Carry:
    """A block's output that the next block of a chunk may treat as recomputable."""

    __slots__ = ("key", "output")

    def __init__(self, key: int, output: _Output) -> None:
        self.key, self.output = key, output


class Tape:
    """One call of one block. `with Tape(...) as tape: ... tape.run(region, owner, *args)`.

    Args:
        modes: mode of every region that is not in `keep`.
        device: the block's device (autocast and random state are taken from it).
        probe: the ledger's probe in an instrumented step.
        carry: the block's input, if the block before handed it on.
    """

    def __init__(self, modes: Mapping[str, Mode], device: torch.device, probe: Probe | None = None, carry: Carry | None = None) -> None:
        self._modes = modes
        self._device = device
        self._autocast = (device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
        self._probe = probe
        self._registry: dict[int, _Output] = {}
        if carry is not None:
            self._registry[carry.key] = carry.output
        self._regions: list[Region] = []
        self._current: Region | None = None
        self._name = ""
        self._hold: Region | None = None

    def __enter__(self) -> Tape:
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        self._outer, thread_state.tape = active_tape(), self
        return self

    def __exit__(self, *exc: object) -> None:
        thread_state.tape = self._outer
        hooks, self._hooks = self._hooks, None  # tape -> hooks -> bound pack -> tape would be a cycle
        assert hooks is not None
        hooks.__exit__(*exc)
        for region in reversed(self._regions):
            region.slots = None  # region -> slot -> region would be one too
            if exc[0] is None and (region.needed or region is self._hold):
                for arg in region.args or ():
                    if type(arg) is Slot and arg.region is not None:
                        arg.region.count(arg)
            else:
                region.args = None
        if self._probe is not None and exc[0] is None:
            self._probe.finish(self._regions)
        self._registry.clear()
        self._regions = []
        self._current = self._hold = self._outer = self._probe = None

    def run(self, fn: RegionFn, owner: nn.Module, *args: Any) -> Any:
        """Run one region. `args` are tensors, or constants a replay may use again as they are."""
        if self._current is not None:  # inside a region that is recomputed, inner regions run inline
            return fn.call(owner, *args)
        mode = self._modes.get(fn.name, Mode.KEEP)
        if self._probe is not None:
            self._probe.called(fn.name)
            self._name = fn.name
        if mode is Mode.KEEP:
            result = fn.call(owner, *args)
            self._name = ""
            return result
        region = Region(fn, owner, self._autocast, self._probe)
        self._regions.append(region)
        inputs = self._take_inputs(region, args)
        region.versions = fn.versions(owner)
        if fn.can_draw(owner):
            region.rng = RngState(self._device)
        self._current = region
        try:
            result = fn.call(owner, *args)
        finally:
            self._current = None
            self._name = ""
        self._sweep(region, mode, inputs, result if isinstance(result, tuple) else (result,))
        return result

    def carry(self, output: Tensor) -> Carry | None:
        """For the block's output, if a recomputed region made it: lets the next block of a chunk recompute it."""
        entry = self._registry.get(output.untyped_storage()._cdata)
        if entry is None or entry.version != output._version:
            return None
        self._hold = entry.region
        return Carry(output.untyped_storage()._cdata, entry)

    def _take_inputs(self, region: Region, args: tuple[Any, ...]) -> set[int | None]:
        keys: set[int | None] = set()
        assert region.args is not None
        for arg in args:
            if isinstance(arg, Tensor) and not isinstance(arg, nn.Parameter):
                key = _storage_key(arg)
                keys.add(key)
                slot = Slot(arg)
                self._link(slot, arg, key)
                region.args.append(slot)
                region.grads.append(arg.requires_grad)
            else:
                region.args.append(arg)
                region.grads.append(False)
        return keys

    def _link(self, slot: Slot, tensor: Tensor, key: int | None) -> bool:
        """Make the slot a handle if it aliases a registered output that is still as its region left it."""
        entry = self._registry.get(key) if key is not None else None
        if entry is None or entry.dtype != tensor.dtype or entry.version != tensor._version:
            return False
        slot.become_handle(entry.region, False, entry.index)
        return True

    def _pack(self, tensor: Tensor) -> object:
        region = self._current
        if is_parameter(tensor):
            if region is not None:
                region.expect.append(None)
            return (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)
        if region is None and not self._registry:
            packed: object = (tensor.detach(), tensor._version)
        else:
            slot = Slot(tensor)
            packed = slot
            if self._link(slot, tensor, _storage_key(tensor)):
                assert slot.region is not None
                slot.region.count(slot)
            elif region is None:
                packed = (slot.tensor, slot.version)
            if region is not None:
                assert region.slots is not None
                region.slots.append((len(region.expect), slot))
                region.expect.append((tensor.shape, tensor.dtype))
        if self._probe is not None:
            self._probe.saved(self._name, tensor, packed)
        return packed

    def _sweep(self, region: Region, mode: Mode, inputs: set[int | None], outs: tuple[Any, ...]) -> None:
        registered: dict[int, _Output] = {}
        for index, out in enumerate(outs):
            if isinstance(out, Tensor):
                key = _storage_key(out)
                if key is not None and key not in inputs:
                    registered.setdefault(key, _Output(region, index, out))
        assert region.slots is not None
        for position, slot in region.slots:
            tensor = slot.tensor
            if tensor is None:
                continue
            key = _storage_key(tensor)
            if key is None or key in inputs:
                continue
            entry = registered.get(key)
            if entry is None:
                if tensor.untyped_storage().nbytes() >= MIN_INTERNAL_BYTES:
                    slot.become_handle(region, True, position)
                    region.count(slot)
            elif mode is Mode.RECOMPUTE and entry.dtype == tensor.dtype and entry.version == tensor._version:
                slot.become_handle(region, False, entry.index)
                region.count(slot)
        if mode is Mode.RECOMPUTE:
            self._registry.update(registered)


def _unpack(packed: object) -> Tensor:
    if type(packed) is Slot:
        return packed.resolve()
    tensor, version = packed  # type: ignore[misc]
    if tensor._version != version:
        raise modified(tensor, version)
    return tensor
