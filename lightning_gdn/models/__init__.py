"""Reference models that ship with the package."""

from .gdn_stack import GDNBlock, GDNMixer, GDNStack

__all__ = ["GDNBlock", "GDNMixer", "GDNStack"]
