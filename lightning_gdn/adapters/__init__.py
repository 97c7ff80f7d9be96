"""Adapters: one per model implementation. An adapter exposes a block as regions and runs its forward through the tape."""

from .base import Adapter, adapters_for

__all__ = ["Adapter", "adapters_for"]
