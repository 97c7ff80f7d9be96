"""The ledger: what each block and region keeps and gives up between forward and backward, counted storage by storage.

It fills itself in one instrumented step (the first forward of every taken-over block, and again after `arm()`); other steps run
without it. All figures are bytes of *unique storages per block*; parameters and views of them are never counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .replay import Region, Slot

if TYPE_CHECKING:
    from .moving import Moved
    from .tape import Probe

__all__ = ["BETWEEN", "Ledger", "LedgerRow", "is_weight_cast"]

BETWEEN = "between_regions"
"""Row for tensors saved outside every region."""


@dataclass(kw_only=True)
class LedgerRow:
    """Bytes and counts of one region of one block (or of all blocks, from `Ledger.by_region`)."""

    block: str
    region: str
    kept_bytes: int = 0
    """Storages that autograd saved here first and that stay until backward."""
    discarded_bytes: int = 0
    """Storages that autograd saved here first and whose memory went after the forward."""
    offloaded_bytes: int = 0
    """Storages that autograd saved here first and that moved to the host."""
    weight_cast_bytes: int = 0
    """Of kept and discarded: copies of weights that autocast made."""
    replay_input_bytes: int = 0
    """Storages that the untouched model would have let go, held so that this region can be replayed."""
    freed_bytes: int = 0
    """Storages that a replay of *this* region brings back, whoever saved them."""
    moved_bytes: int = 0
    """Storages that *this* region's offload label moved to the host, whoever saved them or holds them for a replay."""
    calls: int = 0
    replays: int = 0

    def add(self, other: LedgerRow) -> None:
        """Add the figures of another row."""
        for item in fields(self):
            if item.name not in ("block", "region"):
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Ledger:
    """Rows per block and region; see the module docstring."""

    def __init__(self, blocks: Iterable[str]) -> None:
        self.blocks = tuple(blocks)
        self._rows: dict[tuple[str, str], LedgerRow] = {}
        self.pending: set[str] = set(self.blocks)
        self.kernels: dict[str, str] = {}
        """Region -> kernel that really ran in the instrumented step."""
        self._make: Callable[[str, nn.Module], Probe | None] | None = None
        self._sources: dict[str, list[tuple[int, StorageWeakRef]]] = {}
        self.unfreed_bytes: int | None = None
        """Of the moved bytes those that are on the device all the same when the backward begins, since something else holds them; None before
        it. Moved bytes are freed bytes where this is 0."""

    def arm(self) -> None:
        """Clear the rows and instrument the next forward of every block."""
        self._rows.clear()
        self._sources.clear()
        self.unfreed_bytes = None
        self.pending = set(self.blocks)

    @property
    def settled(self) -> bool:
        """True where no block waits to be counted and no source to be looked for."""
        return not self.pending and not self._sources

    def settle(self) -> int | None:
        """The forward is over and the first backward begins: see which sources of moved storages are still there. Returns their bytes, once."""
        if not self._sources:
            return None
        self.unfreed_bytes = sum(nbytes for sources in self._sources.values() for nbytes, source in sources if not source.expired())
        self._sources.clear()
        return self.unfreed_bytes

    def counts_next(self, block: str) -> bool:
        """Whether the next call of a block is the one that is counted."""
        return self._make is None and block in self.pending

    def watch(self, make: Callable[[str, nn.Module], Probe | None] | None) -> None:
        """Hand every further call of a block to a probe that `make(block's name, block)` gives; the rows stay. None ends it."""
        self._make = make
        self.pending = set() if make is None else set(self.blocks)

    @property
    def complete(self) -> bool:
        """True once every block was instrumented."""
        return not self.pending and bool(self.blocks)

    def rows(self) -> list[LedgerRow]:
        """One row per block and region, in the order of the forward."""
        return list(self._rows.values())

    def by_region(self) -> dict[str, LedgerRow]:
        """Rows summed over blocks."""
        total: dict[str, LedgerRow] = {}
        for row in self._rows.values():
            total.setdefault(row.region, LedgerRow(block="*", region=row.region)).add(row)
        return total

    def _sum(self, name: str) -> int:
        return sum(getattr(row, name) for row in self._rows.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes that autograd saved and that stay; `kept + discarded + offloaded` is what the untouched blocks retain."""
        return self._sum("kept_bytes")

    @property
    def discarded_bytes(self) -> int:
        """Bytes that autograd saved and whose memory went after the forward."""
        return self._sum("discarded_bytes")

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that autograd saved and that moved to the host."""
        return self._sum("offloaded_bytes")

    @property
    def moved_bytes(self) -> int:
        """All bytes that moved to the host: those that autograd saved, and those held for a replay only."""
        return self._sum("moved_bytes")

    @property
    def replay_input_bytes(self) -> int:
        """Bytes held on the device only so that a replay can run."""
        return self._sum("replay_input_bytes")

    @property
    def retained_bytes(self) -> int | None:
        """Bytes that the blocks hold on the device between forward and backward (`kept + replay_input`); None before the first forward."""
        return self.kept_bytes + self.replay_input_bytes if self._rows else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: totals and rows summed over blocks."""
        return {
            "blocks": len(self.blocks) - len(self.pending),
            "retained_bytes": self.retained_bytes,
            "kept_bytes": self.kept_bytes,
            "discarded_bytes": self.discarded_bytes,
            "replay_input_bytes": self.replay_input_bytes,
            "offloaded_bytes": self.offloaded_bytes,
            "moved_bytes": self.moved_bytes,
            "unfreed_bytes": self.unfreed_bytes,
            "by_region": {name: {k: v for k, v in asdict(row).items() if k not in ("block", "region")} for name, row in self.by_region().items()},
        }

    def probe(self, block: str, module: nn.Module) -> Probe | None:
        """The probe for this call of a block, or None if it was instrumented already."""
        if self._make is not None:
            return self._make(block, module)
        if block not in self.pending:
            return None
        return BlockProbe(self, block, module)

    def row(self, block: str, region: str) -> LedgerRow:
        """The row of a block's region, made if needed."""
        key = (block, region)
        found = self._rows.get(key)
        if found is None:
            found = self._rows[key] = LedgerRow(block=block, region=region)
        return found


@dataclass(slots=True)
class _Storage:
    region: str
    nbytes: int
    cast: bool
    packed: list[object]
    pin: StorageWeakRef
    """Pins the address: storages die inside a block, and their addresses are used again."""


class BlockProbe:
    """Counts one call of one block."""

    counts_saved = True

    def __init__(self, ledger: Ledger, block: str, module: nn.Module) -> None:
        self._ledger, self._block = ledger, block
        self._storages: dict[int, _Storage] = {}
        self._weights = {(tuple(p.shape), p.dtype) for p in module.parameters()}

    def called(self, region: str) -> None:
        """A region ran in the forward."""
        self._ledger.row(self._block, region).calls += 1

    def ended(self, region: str, result: object) -> None:
        """Nothing to count."""

    def replayed(self, region: str) -> None:
        """A region of this call was replayed."""
        self._ledger.row(self._block, region).replays += 1

    def replay_ended(self, region: str) -> None:
        """Nothing to count."""

    def saved(self, region: str, tensor: Tensor, packed: object) -> None:
        """Autograd saved a tensor that is no parameter."""
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage._cdata)
        if entry is None:
            cast = is_weight_cast(tensor, self._weights)
            entry = self._storages[storage._cdata] = _Storage(region or BETWEEN, storage.nbytes(), cast, [], StorageWeakRef(storage))
        entry.packed.append(packed)

    def abandon(self) -> None:
        """The block's forward raised: hold nothing of it (probe -> slot -> region -> probe is a cycle), and count the next call."""
        self._storages.clear()
        self._ledger._sources.pop(self._block, None)
        for key in [key for key in self._ledger._rows if key[0] == self._block]:
            del self._ledger._rows[key]

    def closing(self) -> None:
        """Hold no tensor that may move, and none of a graph that died in the block: handles are counted as they are."""
        for entry in self._storages.values():
            entry.packed = [weakref.ref(p) if type(p) is Slot and p.region is None else p for p in entry.packed]

    def finish(self, regions: Sequence[Region], moved: Sequence[Moved] = ()) -> None:
        """The block's forward ended: decide what stays."""
        held: dict[int, tuple[str, int]] = {}
        for region in regions:
            for arg in region.args or ():
                tensors = [arg.tensor] if type(arg) is Slot else arg.values() if isinstance(arg, dict) else ()
                for tensor in tensors:  # an attention function's options can hold position ids, packing offsets and the like
                    if isinstance(tensor, Tensor):
                        storage = tensor.untyped_storage()
                        held.setdefault(storage._cdata, (region.fn.name, storage.nbytes()))
        for key, entry in self._storages.items():
            handles = [p.region for p in entry.packed if type(p) is Slot and p.region is not None]
            row = self._ledger.row(self._block, entry.region)
            if entry.cast:
                row.weight_cast_bytes += entry.nbytes
            if key not in held and any(_has_moved(p) for p in entry.packed):
                row.offloaded_bytes += entry.nbytes
            elif len(handles) < len(entry.packed) or key in held:
                row.kept_bytes += entry.nbytes
            else:
                row.discarded_bytes += entry.nbytes
                self._ledger.row(self._block, handles[0].fn.name).freed_bytes += entry.nbytes
            held.pop(key, None)
        for name, nbytes in held.values():
            self._ledger.row(self._block, name).replay_input_bytes += nbytes
        for each in moved:
            self._ledger.row(self._block, each.region).moved_bytes += each.ticket.nbytes
            self._ledger._sources.setdefault(self._block, []).append((each.ticket.nbytes, each.source))
        self._storages.clear()
        self._ledger.pending.discard(self._block)


def _has_moved(packed: object) -> bool:
    slot = packed() if isinstance(packed, weakref.ref) else None
    return type(slot) is Slot and slot.moved is not None


_LAYOUT_NODES = (
    "TBackward",
    "TransposeBackward",
    "ViewBackward",
    "UnsqueezeBackward",
    "SqueezeBackward",
    "PermuteBackward",
    "UnsafeViewBackward",
    "ReshapeAliasBackward",
)


def is_weight_cast(tensor: Tensor, weights: set[tuple[tuple[int, ...], Any]]) -> bool:
    """A copy in another dtype that autocast made of a parameter, or a view of such a copy."""
    node, copied = tensor.grad_fn, False
    if node is None:  # a frozen weight's cast has no graph; then only its shape tells
        shapes = {tuple(tensor.shape), tuple(tensor.shape[::-1])}
        same = any(shape in shapes and dtype != tensor.dtype for shape, dtype in weights)
        return same and tensor.dim() >= 2 and tensor.is_floating_point()  # a square boolean mask can have a weight's shape
    for _ in range(5):
        name = node.name()
        if name.startswith("ToCopyBackward"):
            copied = True
        elif not name.startswith(_LAYOUT_NODES):
            break
        node = node.next_functions[0][0]
        if node is None:
            return False
    variable = getattr(node, "variable", None)
    return copied and isinstance(variable, nn.Parameter)
