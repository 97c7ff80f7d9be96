"""Makes the strategy name `gdn` known to Lightning without importing Lightning.

Lightning has no entry point for strategies: a name exists once somebody registered it. If Lightning is loaded already it is
registered at once; else a finder waits for the import of `lightning.pytorch` to end and steps aside.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["register_when_lightning_is_imported"]

_TARGET = "lightning.pytorch"


def _register() -> None:
    # It registers itself at its end. When `lightning_gdn.strategies` is what imports Lightning, it is only half there now.
    import_module(".strategies", __package__)


class _Loader(Loader):
    def __init__(self, wrapped: Loader) -> None:
        self._wrapped = wrapped

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped
        module.__loader__ = self._wrapped
        self._wrapped.exec_module(module)
        _register()


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def register_when_lightning_is_imported() -> None:
    """Register the strategy names now, or right after Lightning's strategies are imported."""
    if _TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
