"""What a device can tell about memory and time, behind one small interface.

`counters_for` picks the implementation by the device the Trainer runs on. Nothing here touches CUDA unless that device is a CUDA
device: a CPU run on a machine with a GPU creates no CUDA context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

__all__ = ["CudaCounters", "DeviceCounters", "MemoryReading", "NoCounters", "counters_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Allocator state of one device at one moment, in bytes."""

    allocated: int
    """Bytes in live tensors now, as the allocator rounded them: a request of some MiB can hold up to one MiB more than it asked for."""
    requested: int
    """Bytes in live tensors now, as they were asked for."""
    reserved: int
    """Bytes the caching allocator holds from the driver now."""
    peak_allocated: int
    """Largest `allocated` since the last reset of the peaks."""
    peak_reserved: int
    """Largest `reserved` since the last reset of the peaks."""
    peak_active: int
    """Largest number of bytes in live blocks, blocks that wait for another stream included, since the last reset."""
    alloc_retries: int
    """Times the allocator gave its cache back to the driver and tried again, since the process started."""


class DeviceCounters(ABC):
    """Memory counters and clock marks of one device. Everything is host-side except `wait`."""

    name: str
    """What the report calls the device."""

    @abstractmethod
    def read(self) -> MemoryReading | None:
        """State of the allocator, or None where the device has no such counters. Does not synchronise."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Set every peak to the current value."""

    @abstractmethod
    def pinned_bytes(self) -> int | None:
        """Bytes of pinned host memory that PyTorch's host allocator owns, or None where that is not known."""

    @abstractmethod
    def mark(self) -> Any:
        """Put a time mark into the device's current queue, or None where the device has no such marks."""

    @abstractmethod
    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds of device time between two marks that have both been reached."""

    @abstractmethod
    def wait(self, mark: Any) -> None:
        """Block the host until `mark` is reached. The only synchronisation the monitor does: once per optimizer step."""

    @abstractmethod
    def watch_resets(self, before: Callable[[], None]) -> Callable[[], None]:
        """Call `before` each time somebody else is about to reset this device's peaks. Returns the function that ends the watch."""


@final
class NoCounters(DeviceCounters):
    """A device without allocator counters: the CPU, and accelerators whose backend has none."""

    def __init__(self, device: torch.device) -> None:
        self.name = device.type
        self._device = device

    def read(self) -> MemoryReading | None:
        return None

    def reset_peaks(self) -> None:
        return None

    def pinned_bytes(self) -> int | None:
        return None

    def mark(self) -> Any:
        return None

    def elapsed_ms(self, start: Any, end: Any) -> float:
        raise RuntimeError(f"elapsed_ms: a device of type {self.name!r} gives no time marks; use the wall clock")

    def wait(self, mark: Any) -> None:
        if self._device.type == "mps":
            torch.mps.synchronize()

    def watch_resets(self, before: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


# Every Python way to reset the peaks ends in one of these two functions, also for callers who imported the public name earlier.
_RESET_ENTRY_POINTS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


@final
class CudaCounters(DeviceCounters):
    """The caching allocator's statistics and CUDA events of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        self.name = torch.cuda.get_device_name(self._device)
        self._own_reset = False

    def read(self) -> MemoryReading | None:
        # The nested form: torch.cuda.memory_stats flattens and sorts some 130 entries, which costs several times as much.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not stats:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return MemoryReading(
            allocated=allocated["current"],
            requested=stats["requested_bytes"]["all"]["current"],
            reserved=reserved["current"],
            peak_allocated=allocated["peak"],
            peak_reserved=reserved["peak"],
            peak_active=stats["active_bytes"]["all"]["peak"],
            alloc_retries=stats["num_alloc_retries"],
        )

    def reset_peaks(self) -> None:
        self._own_reset = True
        try:
            torch.cuda.reset_peak_memory_stats(self._device)
        finally:
            self._own_reset = False

    def pinned_bytes(self) -> int | None:
        read = getattr(torch.cuda, "host_memory_stats", None)
        stats = {} if read is None else read()
        # Blocks in use and cached ones: a cached block is still pinned and still missing on the host.
        return stats.get("allocated_bytes.current")

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def watch_resets(self, before: Callable[[], None]) -> Callable[[], None]:
        """See the base class. For the time of the fit the two entry points in `torch._C` are wrapped, and put back afterwards.

        The peak counter belongs to the process. Reading it just before it is lost is the only way to keep a figure right that
        somebody else resets in the middle of a step: afterwards no trace of the lost peak is left.
        """
        undo = []
        for name in _RESET_ENTRY_POINTS:
            original = getattr(torch._C, name, None)
            if original is not None:
                wrapper = _WatchedReset(original, self, before)
                setattr(torch._C, name, wrapper)
                undo.append((name, wrapper))

        def end() -> None:
            for name, wrapper in undo:
                wrapper.before = None  # inert even if somebody wrapped the wrapper and keeps it
                if getattr(torch._C, name) is wrapper:
                    setattr(torch._C, name, wrapper.original)

        return end

    def is_foreign(self, args: tuple[Any, ...]) -> bool:
        """True if a reset with these arguments concerns this device and is not our own."""
        return not self._own_reset and (not args or args[0] in (self._index, -1))


@final
class _WatchedReset:
    """A reset function that lets the monitor read the peaks first."""

    def __init__(self, original: Callable[..., Any], counters: CudaCounters, before: Callable[[], None]) -> None:
        self.original = original
        self.before: Callable[[], None] | None = before
        self._counters = counters

    def __call__(self, *args: Any) -> Any:
        if self.before is not None and self._counters.is_foreign(args):
            self.before()
        return self.original(*args)


def counters_for(device: torch.device) -> DeviceCounters:
    """The counters of `device`: CUDA's for a CUDA device, none for every other type."""
    return CudaCounters(device) if device.type == "cuda" else NoCounters(device)
