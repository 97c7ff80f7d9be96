"""Lightning callbacks of lightning-gdn. Import as `lightning_gdn.callbacks`."""

from .memory_monitor import MemoryMonitor

__all__ = ["MemoryMonitor"]
