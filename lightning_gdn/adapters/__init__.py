"""Adapters: one per model implementation. An adapter exposes a block as regions and runs its forward through the tape."""

from .base import Adapter, imported_adapters

__all__ = ["Adapter", "imported_adapters"]
