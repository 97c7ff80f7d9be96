"""The tape: keep, recompute or move what autograd saves, region by region, around one block's forward.

A block runs as a sequence of regions (`Tape.run`); saved-tensor hooks are open around those where a saved tensor can matter. After
a region that is recomputed its saved tensors are swept: one that aliases the region's *input* stays, an internal one becomes a
*handle* (region, which tensor, size, stride, offset) and its memory goes, and in mode `recompute` so does one that aliases an
*output*. Outputs are registered by storage, so a later region that saves a view of one gets a handle too: that is how memory is
freed without replaying a projection. In backward the first handle of a region replays it once; every handle gets its exact view;
each tensor of the replay is dropped when its last handle was served.

Where something moves to the host, any region may save an alias of it: hooks are open around the whole block in a call that learns which
regions do, around those regions in later calls. `moving` decides when the block has ended.

Identity is storage, offset, size, stride and dtype. A registered output holds a `StorageWeakRef`, so its address cannot be
reused while the block runs. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .moving import Moved, Mover
from .region_fn import RegionFn
from .regions import Mode
from .replay import Meta, Region, ReplayCounter, RngState, Slot, in_replay, is_parameter, modified, pop_hooks, push_hooks, storage_key, thread_state

__all__ = ["MIN_INTERNAL_BYTES", "Carry", "RegionFn", "Tape", "active_tape", "in_replay"]

MIN_INTERNAL_BYTES = 512
"""An internal tensor below this size stays: the CUDA allocator hands out 512 bytes at least, and a handle costs host time."""


def active_tape() -> Tape | None:
    """The tape of the block whose forward is running in this thread, or None."""
    tape: Tape | None = thread_state.tape
    return tape


class Probe(ReplayCounter, Protocol):
    """What the ledger (or the profiler) offers the tape in an instrumented step."""

    counts_saved: bool
    """Whether `saved` wants every saved tensor: then hooks are open around the whole block, which costs host time."""

    def saved(self, region: str, tensor: Tensor, packed: object) -> None:
        """Autograd saved a tensor that is no parameter."""

    def called(self, region: str) -> None:
        """A region begins in the forward."""

    def ended(self, region: str, result: object) -> None:
        """A region ended in the forward: a tensor or a tuple of tensors."""

    def closing(self) -> None:
        """The block's forward ended, nothing has moved yet: hold no slot that only the probe holds."""

    def finish(self, regions: Sequence[Region], moved: Sequence[Moved]) -> None:
        """The block's forward ended, and this moved to the host."""

    def abandon(self) -> None:
        """The block's forward raised."""


class _Output:
    """A registered output. Whoever holds it by its storage's address pins that address, not its memory (`_pin`)."""

    __slots__ = ("region", "index", "dtype", "version")

    def __init__(self, region: Region, index: int, tensor: Tensor) -> None:
        self.region, self.index, self.dtype, self.version = region, index, tensor.dtype, tensor._version


class Carry:
    """A block's output that the next block of a chunk may treat as recomputable."""

    __slots__ = ("key", "output", "pin")

    def __init__(self, tensor: Tensor, output: _Output) -> None:
        self.pin = StorageWeakRef(tensor.untyped_storage())
        self.key, self.output = tensor.untyped_storage()._cdata, output


class Tape:
    """One call of one block. `with Tape(...) as tape: ... tape.run(region, owner, *args)`.

    Hooks are open only where a saved tensor can matter: around a region that is recomputed, around one that is kept but gets a
    recomputed output as an argument (a region sees tensors only as arguments, so no other region can save one), and where something moves
    around the regions that `mover.watch` names.

    Args:
        modes: mode of every region that is not in `keep`.
        device: the block's device (autocast and random state are taken from it).
        probe: the ledger's probe in an instrumented step; if it counts saved tensors, hooks are open around the whole block.
        carry: the block's input, if the block before handed it on.
        kernels: the option `kernels`, for the adapter to read.
        mover: what moves to the host; None if nothing may.
    """

    def __init__(
        self,
        modes: Mapping[str, Mode],
        device: torch.device,
        probe: Probe | None = None,
        carry: Carry | None = None,
        kernels: str = "stock",
        mover: Mover | None = None,
    ) -> None:
        self.kernels = kernels
        self._modes, self._device, self._probe, self._mover = modes, device, probe, mover
        self._sees_all = (mover is not None and mover.watch is None) or (probe is not None and probe.counts_saved)
        self._watch: frozenset[str] = (mover.watch if mover is not None else None) or frozenset()
        self._simple = mover is None and probe is None
        self._autocast: tuple[str, bool, torch.dtype, torch.dtype] | None = None
        self._registry: dict[int, _Output] = {} if carry is None else {carry.key: carry.output}
        self._regions: list[Region] = []
        self._pins: list[int] = []  # weak references to the storages of registered outputs; what StorageWeakRef does, without an object each
        self._slots: list[_Saved] | None = None  # saved positions of the region that is being recomputed; None outside one
        self._inputs: set[int | None] = set()  # storages of its arguments
        self._hold: Region | None = None
        self._name = ""

    def __enter__(self) -> Tape:
        if self._sees_all:
            push_hooks(self._pack_kept, _unpack)
        self._outer, thread_state.tape = active_tape(), self
        return self

    def __exit__(self, *exc: object) -> None:
        thread_state.tape = self._outer
        if self._sees_all:
            pop_hooks()
        failed = exc[0] is not None
        try:
            for region in reversed(self._regions):
                if failed or not (region.needed or region is self._hold):
                    region.args = None
                    continue
                assert region.args is not None
                for arg in region.args:
                    if type(arg) is Slot and arg.region is not None:
                        arg.region.count(arg.index)
            if not (failed or self._simple):
                self._finish()
        except BaseException:
            failed = True
            raise
        finally:
            if failed and self._probe is not None:
                self._probe.abandon()
            self._registry.clear()
            for pin in self._pins:
                torch.UntypedStorage._free_weak_ref(pin)
            self._pins, self._regions = [], []
            self._hold = self._outer = self._probe = self._mover = None

    def _finish(self) -> None:
        probe, mover = self._probe, self._mover
        if mover is not None and probe is not None:
            probe.closing()
        moved = mover.finish(self._regions) if mover is not None else ()
        if probe is not None:
            probe.finish(self._regions, moved)

    def run(self, fn: RegionFn, owner: nn.Module, *args: Any) -> Any:
        """Run one region. `args` are tensors, or constants a replay may use again as they are."""
        if self._slots is not None:  # inside a region that is recomputed, inner regions run inline
            return fn.call(owner, *args)
        mode = self._modes.get(fn.name, Mode.KEEP)
        if self._simple:
            if mode is not Mode.KEEP:
                return self._recompute(fn, owner, args, mode)
            return self._keep(fn, owner, args) if self._registry else fn.call(owner, *args)
        probe, mover = self._probe, self._mover
        if probe is not None:
            probe.called(fn.name)
        outer, self._name = self._name, fn.name
        try:
            if mode is not Mode.KEEP:
                result = self._recompute(fn, owner, args, mode)
            else:
                result = fn.call(owner, *args) if self._sees_all else self._keep(fn, owner, args, watch=fn.name in self._watch)
        finally:
            self._name = outer
        if probe is not None:
            probe.ended(fn.name, result)
        if mover is not None:
            mover.ended(fn.name, result)
        return result

    def carry(self, output: Tensor) -> Carry | None:
        """For the block's output, if a recomputed region made it: lets the next block of a chunk recompute it."""
        key = storage_key(output)
        entry = self._registry.get(key) if key is not None else None
        if key is None or entry is None or entry.version != output._version:
            return None
        self._hold = entry.region
        return Carry(output, entry)

    def _keep(self, fn: RegionFn, owner: nn.Module, args: tuple[Any, ...], *, watch: bool = False) -> Any:
        registry = self._registry
        if not watch:
            for arg in args:
                if isinstance(arg, Tensor) and storage_key(arg) in registry:
                    break
            else:
                return fn.call(owner, *args)
        push_hooks(self._pack_kept, _unpack)
        try:
            return fn.call(owner, *args)
        finally:
            pop_hooks()

    def _recompute(self, fn: RegionFn, owner: nn.Module, args: tuple[Any, ...], mode: Mode) -> Any:
        autocast = self._autocast
        if autocast is None:
            kind = self._device.type
            autocast = self._autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.get_default_dtype())
        region = self._take_inputs(Region(fn, owner, autocast, self._probe, [], []), args)
        self._regions.append(region)
        if fn.can_draw(owner):
            region.rng = RngState(self._device)
        slots: list[_Saved] = []
        self._slots = slots
        push_hooks(self._pack_inside, _unpack)
        try:
            result = fn.call(owner, *args)
        except BaseException:
            for slot in slots:  # what they hold would hold them
                if type(slot) is Slot:
                    slot.tensor = None
            raise
        finally:
            pop_hooks()
            self._slots = None
        self._sweep(region, mode, slots, result if isinstance(result, tuple) else (result,))
        if self._mover is not None:
            self._mover.follow(fn.name, slots)
        return result

    def _take_inputs(self, region: Region, args: tuple[Any, ...]) -> Region:
        keys: set[int | None] = set()
        taken, grads, registry = region.args, region.grads, self._registry
        assert taken is not None
        for arg in args:
            if isinstance(arg, Tensor) and not is_parameter(arg):
                key = storage_key(arg)
                keys.add(key)
                slot = Slot(arg)
                taken.append(slot if key in registry and self._link(slot, arg, key, saved=False) else slot.stay())
                grads.append(arg.requires_grad)
            else:
                taken.append(arg)
                grads.append(False)
        self._inputs = keys
        return region

    def _link(self, slot: Slot, tensor: Tensor, key: int | None, *, saved: bool) -> bool:
        """Make the slot a handle if it aliases a registered output that is still as its region left it. A saved tensor's will be served."""
        entry = self._registry.get(key) if key is not None else None
        if entry is None or entry.dtype != tensor.dtype or entry.version != tensor._version:
            return False
        slot.point_to_output(entry.region, entry.index)
        if saved:
            entry.region.count(entry.index)
        return True

    def _pack_kept(self, tensor: Tensor) -> object:
        """Saved in a region that is kept, or (in an instrumented step) between regions."""
        if is_parameter(tensor):
            return _with_version(tensor)
        packed: object = None
        if self._registry and storage_key(tensor) in self._registry:
            slot = Slot(tensor)
            if self._link(slot, tensor, storage_key(tensor), saved=True):
                packed = slot
        if packed is None:
            packed = (tensor.detach(), tensor._version) if self._mover is None else self._mover.saved(self._name, tensor)
        if self._probe is not None:
            self._probe.saved(self._name, tensor, packed)
        return packed

    def _pack_inside(self, tensor: Tensor) -> object:
        """Saved in a region that is recomputed; what becomes of a slot is decided in `_sweep`."""
        slots = self._slots
        assert slots is not None
        if is_parameter(tensor):
            slots.append(None)
            return _with_version(tensor)
        key = storage_key(tensor)
        packed: Slot | tuple[Tensor, int]
        if key in self._inputs and key not in self._registry and self._mover is None:
            packed = (tensor.detach(), tensor._version)  # an input stays what it is
        else:
            packed = Slot(tensor)
        slots.append(packed)
        if self._probe is not None:
            self._probe.saved(self._name, tensor, packed)
        return packed

    def _sweep(self, region: Region, mode: Mode, slots: list[_Saved], outs: tuple[Any, ...]) -> None:
        """Turn what the region saved into handles, and register its outputs. `slots` must die here: slot -> region -> slot is a cycle."""
        registered: dict[int, _Output] = {}
        inputs, registry, gone = self._inputs, self._registry, mode is Mode.RECOMPUTE
        for index, out in enumerate(outs):
            if isinstance(out, Tensor):
                key = storage_key(out)
                if key is not None and key not in inputs and key not in registered:
                    registered[key] = _Output(region, index, out)
                    if gone:
                        region.made[index] = (out.shape, out.dtype)
                        self._pins.append(out.untyped_storage()._weak_ref())  # type: ignore[arg-type]  # an int, whatever the stub says
        inside: list[int] = []
        for position, slot in enumerate(slots):
            if type(slot) is not Slot:
                continue
            tensor = slot.tensor
            assert tensor is not None
            key = storage_key(tensor)
            if slot.version == tensor._version and key in registry and self._link(slot, tensor, key, saved=True):
                continue
            if key is None or key in inputs or slot.version != tensor._version:  # edited since it was saved: its use raises
                slot.stay()
            elif (entry := registered.get(key)) is None:
                if tensor.untyped_storage().nbytes() >= MIN_INTERNAL_BYTES:
                    inside.append(position)
                else:
                    slot.stay()
            elif gone and entry.dtype == tensor.dtype and entry.version == tensor._version:
                slot.point_to_output(region, entry.index)
                region.count(entry.index)
            else:
                slot.stay()
        if inside or region.rng is not None:
            region.watch([_meta_of(slot) for slot in slots], inside)
        for position in inside:
            slot = slots[position]
            assert type(slot) is Slot
            slot.point_inside(region, position)
        if gone:
            registry.update(registered)


_Saved = Slot | tuple[Tensor, int] | None
"""A saved position of a region under recompute: a slot, a tensor that stays with its version, or a parameter."""


def _meta_of(saved: _Saved) -> Meta | None:
    """Shape and dtype that a replay has to bring back at this position; None for a parameter."""
    if isinstance(saved, Slot):
        return saved.meta()
    return None if saved is None else (saved[0].shape, saved[0].dtype)


def _with_version(parameter: Tensor) -> tuple[Tensor, int]:
    return (parameter if parameter.grad_fn is None else parameter.detach(), parameter._version)


def _unpack(packed: Any) -> Tensor:
    """Of a slot, or of a tensor with the version it was saved at."""
    if type(packed) is Slot:
        return packed.resolve()
    tensor: Tensor = packed[0]
    version: int = packed[1]
    if tensor._version != version:
        raise modified(tensor, version)
    return tensor
