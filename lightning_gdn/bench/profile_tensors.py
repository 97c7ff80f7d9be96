"""The saved-tensor profiler: every storage that autograd saves in one block of each kind, who saved it, and who else holds it.

It looks at an undisturbed block (every region kept). A storage belongs to the region that saved it first, as in the ledger: the bytes
of a region's rows are the ledger's `kept_bytes` of that block and region, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..inspection import FoundBlock
from ..ledger import BETWEEN, is_weight_cast
from ..moving import Moved
from ..replay import Region
from .profile_phases import first_tensor
from .profile_probes import SilentProbe

__all__ = ["SavedStorage", "TensorProbe", "TensorProfile"]

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, stride, offset."""


@dataclass(kw_only=True)
class SavedStorage:
    """One storage that autograd saved in one block."""

    region: str
    """The region that saved it first."""
    shape: tuple[int, ...]
    """Of the first tensor that was saved of it."""
    stride: tuple[int, ...]
    dtype: str
    contiguous: bool
    nbytes: int
    """Of the storage: what stays allocated, also where the tensor is a small view of it."""
    view_nbytes: int
    """Of the tensor alone."""
    weight_cast: bool
    """A copy of a weight that autocast made."""
    saves: int = 1
    """How often autograd saved a tensor of this storage."""
    aliases: list[str] = field(default_factory=list)
    """Other regions that saved tensors of this storage: they hold it too."""
    nodes: list[str] = field(default_factory=list)
    """Graph nodes that hold it (`SiluBackward0`); empty where the graph does not tell."""


class TensorProbe(SilentProbe):
    """Collects the saved storages of one call of one block."""

    counts_saved = True

    def __init__(self, module: nn.Module) -> None:
        self._weights = {(tuple(p.shape), p.dtype) for p in module.parameters()}
        self._found: dict[int, SavedStorage] = {}
        self._views: dict[int, set[View]] = {}
        self._pins: list[StorageWeakRef] = []  # a storage that dies inside the block must not lend its address to another

    def saved(self, region: str, tensor: Tensor, packed: object) -> None:
        storage, name = tensor.untyped_storage(), region or BETWEEN
        key = storage._cdata
        row = self._found.get(key)
        if row is None:
            self._pins.append(StorageWeakRef(storage))
            self._found[key] = SavedStorage(
                region=name,
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                dtype=str(tensor.dtype).removeprefix("torch."),
                contiguous=tensor.is_contiguous(),
                nbytes=storage.nbytes(),
                view_nbytes=tensor.numel() * tensor.element_size(),
                weight_cast=is_weight_cast(tensor, self._weights),
            )
        else:
            row.saves += 1
            if name != row.region and name not in row.aliases:
                row.aliases.append(name)
        self._views.setdefault(key, set()).add(_view(tensor))

    def name_nodes(self, output: Tensor, until: Tensor) -> None:
        """Find the graph nodes between a block's output and its input that hold the storages; the graph must not be freed yet."""
        for node in _nodes(output.grad_fn, until.grad_fn):
            for tensor in _saved_by(node):
                key = tensor.untyped_storage()._cdata
                row = self._found.get(key)
                name = node.name()
                if row is not None and _view(tensor) in self._views[key] and name not in row.nodes:
                    row.nodes.append(name)

    def rows(self) -> list[SavedStorage]:
        """The storages in the order in which they were saved."""
        return list(self._found.values())

    def finish(self, regions: Sequence[Region], moved: Sequence[Moved]) -> None:
        """See `Probe`."""

    def abandon(self) -> None:
        """The block's forward raised."""
        self._found.clear()
        self._views.clear()


def _view(tensor: Tensor) -> View:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _nodes(start: Any, end: Any) -> Iterator[Any]:
    """Nodes of the graph from `start` back to `end`, without it."""
    seen, waiting = {end}, [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def _saved_by(node: Any) -> Iterator[Tensor]:
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for name in [*names, "saved_tensors"]:
        try:
            value = getattr(node, name, None)
        except RuntimeError:  # the node's own check, of something edited in place: it says nothing about who saved it
            continue
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                yield tensor


@final
class TensorProfile:
    """Maker of probes for the first block of each kind."""

    def __init__(self, blocks: Sequence[FoundBlock]) -> None:
        self._chosen: dict[tuple[str, ...], FoundBlock] = {}
        self._count: dict[tuple[str, ...], int] = {}
        for found in blocks:
            self._chosen.setdefault(found.layout.regions, found)
            self._count[found.layout.regions] = self._count.get(found.layout.regions, 0) + 1
        self._names = {found.layout.name for found in self._chosen.values()}
        self._probes: dict[str, TensorProbe] = {}

    def probe(self, block: str, module: nn.Module) -> TensorProbe | None:
        """A probe if the block was chosen and not looked at yet."""
        if block not in self._names or block in self._probes:
            return None
        self._probes[block] = TensorProbe(module)
        return self._probes[block]

    @contextmanager
    def watching(self) -> Iterator[TensorProfile]:
        """Look at the graph of each chosen block when its forward ends, by a hook on it."""
        handles = []
        for chosen in self._chosen.values():

            def ended(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = chosen.layout.name) -> None:
                probe = self._probes.get(name)
                out = output[0] if isinstance(output, tuple) else output
                if probe is not None and out.grad_fn is not None:
                    probe.name_nodes(out, first_tensor(args, kwargs))

            handles.append(chosen.module.register_forward_hook(ended, with_kwargs=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def as_dict(self) -> list[dict[str, Any]]:
        """JSON-able: one entry per kind of block with its storages."""
        found = []
        for regions, chosen in self._chosen.items():
            probe = self._probes.get(chosen.layout.name)
            if probe is not None:
                rows = [asdict(row) for row in probe.rows()]
                found.append({"block": chosen.layout.name, "kind": chosen.layout.kind, "blocks": self._count[regions], "storages": rows})
        return found
