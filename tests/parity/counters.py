"""Counters that know nothing of the tape or the ledger: what autograd saves, what is alive, what is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Alive", "calls", "saved_bytes"]


@contextmanager
def saved_bytes(model: nn.Module, blocks: dict[str, nn.Module], weak: bool = False, at_least: int = 0) -> Iterator[dict[str, int]]:
    """Block name -> bytes of the storages that autograd saves in its forward: each storage once, parameters' storages left out.

    With `weak` only those that are still alive when the block returns: a graph that nothing uses dies inside it. Storages
    below `at_least` bytes are left out.
    """
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[str, dict[int, Any]] = {name: {} for name in blocks}
    total: dict[str, int] = {}
    handles, open_hooks = [], {}

    def before(name: str) -> Callable[..., None]:
        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                # Held, or pinned by a weak reference, so that no address is used twice.
                storages[name].setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), None if weak else storage))
            return tensor.detach()  # the raw tensor of an output would keep its own graph alive

        def hook(*_: Any) -> None:
            open_hooks[name] = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            open_hooks[name].__enter__()

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_hooks.pop(name).__exit__()
            total[name] = sum(nbytes for reference, nbytes, _ in storages[name].values() if nbytes >= at_least and not reference.expired())
            storages[name].clear()

        return hook

    for name, block in blocks.items():
        handles += [block.register_forward_pre_hook(before(name)), block.register_forward_hook(after(name))]
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


class Alive(TorchDispatchMode):
    """Weak references to every storage that an operation made while the mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}  # a view makes no storage
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                if storage._cdata not in given:
                    self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return result

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that are alive now."""
        return sum(size for reference, size in self._made.values() if not reference.expired())


@contextmanager
def calls(model: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """How often the submodules with these last names run, summed over the model."""
    counts = dict.fromkeys(names, 0)

    def counter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] += 1

        return hook

    handles = []
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if last in counts:
            handles.append(module.register_forward_hook(counter(last)))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
