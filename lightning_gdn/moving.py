"""What one block moves to the host: the storages that its plan names, with every alias of them in the block.

While a block runs, a `Mover` collects a weak reference to every slot that holds a tensor. When the forward has ended it groups the living
ones by storage, and offers to the engine each storage that a label names and of which no alias has to stay. So bytes moved are bytes
freed: a storage with an alias that stays is counted by reason (`skipped` of the step's statistics) and not moved:

- `held`: the block's caller has it (the block's output, a mask, position embeddings; its input, unless the label is `block_input`), or the
  graph itself (an input that is a leaf);
- `weight_cast`: autocast's copy of a weight; `parameter`: a parameter or buffer, whatever it is called here;
- `ineligible`: a tensor subclass or one without a storage;
- `edited`: it was edited in place after it was saved; it stays, so that its use raises PyTorch's error.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .ledger import is_weight_cast
from .offload.budget import Finding
from .offload.cuda import CudaBackend
from .offload.engine import Engine
from .offload.handles import Block, HostCopy
from .offload.simulated import SimulatedBackend
from .offload.statistics import StepStatistics, merged
from .offload_config import OffloadConfig
from .regions import Moves
from .replay import Region, Slot, storage_key

__all__ = ["Engines", "Moved", "Mover", "Moving", "layout_of", "state_of"]


@dataclass(frozen=True, kw_only=True)
class Moving:
    """What moves in one block, ready for use: region names by what of them moves."""

    saved: frozenset[str]
    outputs: frozenset[str]
    inputs: frozenset[str]
    min_bytes: int

    @classmethod
    def of(cls, moves: Iterable[tuple[str, Moves]], config: OffloadConfig) -> Moving | None:
        """From a block's plan; None if nothing moves there."""
        by: dict[Moves, set[str]] = {what: set() for what in Moves}
        for region, what in moves:
            by[what].add(region)
        if not any(by.values()):
            return None
        saved, outputs, inputs = (frozenset(by[what]) for what in (Moves.SAVED, Moves.OUTPUTS, Moves.INPUTS))
        return cls(saved=saved, outputs=outputs, inputs=inputs, min_bytes=config.min_bytes)


@dataclass(frozen=True, slots=True)
class Moved:
    """One storage that moved."""

    region: str
    """The region whose label named it."""
    ticket: HostCopy
    source: StorageWeakRef
    """Of the storage on the device, to see whether it really went."""


def state_of(module: nn.Module) -> tuple[Any, ...]:
    """What of a block's modules and parameters decides which tensors autograd saves, as far as it is cheap to see: classes, modes, hooks, and
    what trains, of which dtype and shape. (Not `parameters()`: its generators cost several times as much, and this runs in every call.)"""
    found: list[Any] = [type(module), module.training, *module._forward_hooks, None, *module._forward_pre_hooks]  # ids, which never repeat
    for weight in module._parameters.values():
        if weight is not None:
            found.append((type(weight), weight.requires_grad, weight.dtype, weight.shape))
    for part in module._modules.values():
        if part is not None:
            found.append(state_of(part))
    return tuple(found)


def layout_of(value: Any, least: int) -> Any:
    """What of an argument decides which storages of `least` bytes or more a call saves, and how large they are; None for what is no tensor. (The
    offsets of packed sequences are small, and as many as the sequences: a state for every number of them would never come again.)"""
    if isinstance(value, (tuple, list)):
        return tuple(layout_of(part, least) for part in value)
    if not isinstance(value, Tensor):
        return None
    try:
        nbytes = value.untyped_storage().nbytes()
        return (type(value), value.shape, value.dtype, value.requires_grad, value.stride(), nbytes) if nbytes >= least else type(value)
    except (NotImplementedError, RuntimeError):  # sparse and the like
        return type(value)


def _storages_of(module: nn.Module, found: set[int | None]) -> set[int | None]:
    """Identities of the storages of all parameters and buffers, added to `found`."""
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                found.add(storage_key(tensor))
    for part in module._modules.values():
        if part is not None:
            _storages_of(part, found)
    return found


class _Group:
    """The living slots of one storage."""

    __slots__ = ("slots", "where", "region", "cast")

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.where: set[str] = set()
        self.region: str | None = None
        self.cast = False


class Mover:
    """One call of one block.

    Args:
        moving: what moves.
        block: the engine's context of this call.
        module: the block.
        caller: what the block was called with; tensors in it belong to the caller.
        block_input: the block's first argument.
        weights: shape and dtype of the block's parameters where autocast may copy them, else nothing.
        watch: the regions whose saved tensors matter, from `learned` of an earlier call; None: not known yet, every region's are looked at.
    """

    __slots__ = (
        "watch",
        "learned",
        "_moving",
        "_block",
        "_module",
        "_held",
        "_weights",
        "_records",
        "_outputs",
        "_pins",
        "_min_bytes",
        "_saved",
        "_spent",
    )

    def __init__(
        self,
        moving: Moving,
        block: Block,
        module: nn.Module,
        caller: Iterable[Any],
        block_input: Tensor,
        weights: set[tuple[tuple[int, ...], torch.dtype]] | None,
        watch: frozenset[str] | None = None,
    ) -> None:
        self.watch = watch
        self.learned: frozenset[str] | None = None
        """After `finish`, where `watch` was None: the regions that saved something of a storage that a label names. None also where
        something of it was saved between regions (by a module's hook): only hooks around the whole block see that."""
        self._moving, self._block, self._module, self._weights = moving, block, module, weights
        self._min_bytes, self._saved = moving.min_bytes, moving.saved
        self._held = {storage_key(tensor) for tensor in _tensors(caller)}
        if moving.inputs and not (block_input.requires_grad and block_input.grad_fn is None):  # a leaf is held by its own graph node
            self._held.discard(storage_key(block_input))
        self._records: list[tuple[weakref.ref[Slot], int, str, bool]] = []
        self._outputs: dict[int, str] = {}
        self._pins: list[StorageWeakRef] = []  # of the outputs, whose addresses stand for them until the block ends
        self._spent = 0  # nanoseconds in hooks
        block.prepared()

    def saved(self, region: str, tensor: Tensor) -> Slot | tuple[Tensor, int]:
        """Autograd saves a tensor that is no parameter and no handle: what to hold in its place."""
        since = time.perf_counter_ns()
        packed = self._pack(region, tensor)
        self._spent += time.perf_counter_ns() - since
        return packed

    def _pack(self, region: str, tensor: Tensor) -> Slot | tuple[Tensor, int]:
        wanted = region in self._saved
        try:
            storage = tensor.untyped_storage() if type(tensor) is Tensor else None
        except (NotImplementedError, RuntimeError):
            storage = None
        # a small one moves nowhere; of an output that a label names it is followed all the same, so that the reason is counted
        small = storage is not None and storage.nbytes() < self._min_bytes
        if storage is None or (small and not wanted and self.watch is not None and storage._cdata not in self._outputs):
            if wanted:
                self._block.skip("ineligible", tensor.numel() * tensor.element_size())
            return tensor.detach(), tensor._version
        slot = Slot(tensor)
        cast = wanted and self._weights is not None and is_weight_cast(tensor, self._weights)
        self._records.append((weakref.ref(slot.stay()), storage._cdata, region, cast))
        return slot

    def follow(self, region: str, slots: Iterable[object]) -> None:
        """What a recomputed region saved was swept: slots that still hold their tensor."""
        for slot in slots:
            if type(slot) is Slot and slot.tensor is not None:
                key = storage_key(slot.tensor)
                if key is not None:
                    self._records.append((weakref.ref(slot), key, region, False))

    def ended(self, region: str, result: object) -> None:
        """A region ended with this result."""
        if region in self._moving.outputs:
            for out in result if isinstance(result, tuple) else (result,):
                key = storage_key(out) if type(out) is Tensor else None
                if key is not None:
                    self._outputs.setdefault(key, region)
                    self._pins.append(StorageWeakRef(out.untyped_storage()))

    def returns(self, output: object) -> None:
        """The block's forward returns this."""
        self._held.update(storage_key(tensor) for tensor in _tensors((output,)))

    def finish(self, regions: Sequence[Region]) -> list[Moved]:
        """The block's forward ended: move what moves. `regions` are those that may be replayed, with what they hold for it."""
        self._block.begin_work(self._spent)
        groups: dict[int, _Group] = {}
        for reference, key, region, cast in self._records:
            slot = reference()
            if slot is not None and slot.region is None:
                _add(groups, key, slot, region if region in self._saved else None, cast)
                groups[key].where.add(region)
        named = self._saved | self._moving.inputs
        for call in regions:
            name = call.fn.name
            for arg in call.args or ():
                if type(arg) is Slot and arg.region is None and arg.tensor is not None:
                    held = storage_key(arg.tensor)
                    if held is not None:
                        _add(groups, held, arg, name if name in named else None, False)
        seen = set(self._saved)
        named_groups: list[tuple[str, _Group, Tensor]] = []
        parameters: set[int | None] | None = None
        for key, group in groups.items():
            named_by = group.region or self._outputs.get(key)
            if named_by is None:
                continue
            seen |= group.where
            tensor = group.slots[0].tensor
            assert tensor is not None
            storage = tensor.untyped_storage()
            if parameters is None and storage.nbytes() >= self._min_bytes:
                parameters = _storages_of(self._module, set())
            reason = self._reason_to_stay(key, group, parameters or set())
            if reason is not None:
                self._block.skip(reason, storage.nbytes())
                continue
            named_groups.append((named_by, group, tensor))
        if self.watch is None and "" not in seen:
            self.learned = frozenset(seen)
        tickets = self._block.offer_all([(tensor, len(group.slots)) for _, group, tensor in named_groups])
        moved: list[Moved] = []
        for (named_by, group, tensor), ticket in zip(named_groups, tickets, strict=True):
            if ticket is not None:
                moved.append(Moved(named_by, ticket, StorageWeakRef(tensor.untyped_storage())))
                for slot in group.slots:
                    slot.move(ticket)
        self._block.end_work()
        return moved

    def _reason_to_stay(self, key: int, group: _Group, parameters: set[int | None]) -> str | None:
        if key in self._held:
            return "held"
        if group.cast:
            return "weight_cast"
        if key in parameters:
            return "parameter"
        if any(slot.tensor is not None and slot.tensor._version != slot.version for slot in group.slots):
            return "edited"
        return None


def _add(groups: dict[int, _Group], key: int, slot: Slot, region: str | None, cast: bool) -> None:
    group = groups.get(key)
    if group is None:
        group = groups[key] = _Group()
    group.slots.append(slot)
    group.cast |= cast
    if group.region is None:
        group.region = region


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())


class Engines:
    """The engines of one model: one per device, made when a block first runs there.

    Args:
        config: what the plan says.
        count: number of taken-over blocks.
        reduce_min: see `Engine`.
    """

    def __init__(self, config: OffloadConfig, count: int, reduce_min: Callable[[float], float] | None = None) -> None:
        self.config, self.count, self._reduce_min = config, count, reduce_min
        self.by_device: dict[torch.device, Engine] = {}
        self.offered_bytes: int | None = None
        """All that the labels named in the first forward, moved or not; None before its end."""
        self._lock = threading.Lock()
        self._threads = threading.local()  # `engine`: where this thread's last block ran

    def running_on(self, device: torch.device) -> Engine:
        """The engine of the device on which a block is about to run. Where the one before ran on another, its part of the pass is over."""
        engine, before = self.on(device), getattr(self._threads, "engine", None)
        if before is not engine:
            self._threads.engine = engine
            if before is not None:
                before.end_pass()
        return engine

    def on(self, device: torch.device) -> Engine:
        """The engine of a device.

        Raises:
            ValueError: a device that is neither CUDA nor the CPU.
        """
        found = self.by_device.get(device)
        if found is not None:
            return found
        if device == torch.device("cuda"):  # without an index
            device = torch.device("cuda", torch.cuda.current_device())
        if device.type not in ("cuda", "cpu"):
            raise ValueError(
                f"offload: the blocks run on device {str(device)!r}, expected a CUDA device or the CPU (which simulates one); "
                "leave offload out on this device"
            )
        with self._lock:
            if device not in self.by_device:
                backend = CudaBackend(device) if device.type == "cuda" else SimulatedBackend()
                # Times of a simulated device are no measurement; only the policy that needs some gets them.
                timing = device.type == "cuda" or self.config.fraction == "auto"
                self.by_device[device] = Engine(backend, self.config, timing=timing, reduce_min=self._reduce_min)
            return self.by_device[device]

    @property
    def stayed(self) -> dict[str, int]:
        """Bytes that stayed on the device since the last `step_statistics`, by reason, summed over devices."""
        found: dict[str, int] = {}
        for engine in self.by_device.values():
            for reason, nbytes in engine.skipped.items():
                found[reason] = found.get(reason, 0) + nbytes
        return found

    @property
    def largest_small(self) -> int:
        """As `StepStatistics.largest_small`, since the last `step_statistics`."""
        return max((engine.largest_small for engine in self.by_device.values()), default=0)

    def settled(self, fraction: float) -> bool:
        """Whether this is the share of the bytes from here on: it was given, or `auto` has found it."""
        engines = self.by_device.values()
        return bool(engines) and all((engine.auto is None or engine.auto.settled) and engine.fraction == fraction for engine in engines)

    @property
    def at_rest(self) -> bool:
        """Whether nothing moves on any device from here on."""
        return bool(self.by_device) and all(engine.at_rest for engine in self.by_device.values())

    def findings(self) -> list[Finding]:
        """What `auto` found since this was asked last, where the share changed."""
        return [found for engine in self.by_device.values() if engine.auto is not None and (found := engine.auto.take_finding()) is not None]

    def step_statistics(self) -> StepStatistics | None:
        """Snapshot and reset, summed over devices; None before a block ran. Times of a simulated device are no measurement and left out."""
        found = {device: engine.step_statistics() for device, engine in self.by_device.items()}
        return merged([stats if device.type == "cuda" else stats.without_times() for device, stats in found.items()])

    def close(self) -> None:
        """Give idle host memory back. Tickets of graphs that still live keep theirs and stay usable."""
        for engine in self.by_device.values():
            engine.close()
