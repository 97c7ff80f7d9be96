"""Which kernels really ran in each region: one step under torch.profiler, every region's forward a named range.

The trace is read in the format that Chrome's viewer reads, which has stayed the same over torch versions. A GPU kernel belongs to the
region in whose range the host launched it; on a CPU operators take the kernels' place, each with its own time without that of the
operators it calls.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .profile_probes import RANGE

__all__ = ["Kernel", "KernelReport", "read_trace", "traced"]

TOP = 3
"""Kernels that are named per region."""
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver"})


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel in one region."""

    name: str
    ms: float
    """Of all its launches in the region, all blocks together."""
    share: float
    """Of the time of all kernels in the region, 0 to 1."""
    launches: int


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What a trace told."""

    regions: dict[str, tuple[Kernel, ...]]
    """Region -> its kernels of most time, the longest first."""
    on_gpu: bool
    """False if these are CPU operators: on a CPU, or because the trace holds no GPU kernels."""
    busy_ms: float | None
    """Time in which a kernel ran on the GPU, the whole step; None without GPU kernels."""


@contextmanager
def traced(device: torch.device) -> Iterator[dict[str, Any]]:
    """Record what runs inside; after the block the dict holds the trace."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, *([activity.CUDA] if device.type == "cuda" else [])]
    trace: dict[str, Any] = {}
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:  # else it warns, at every use, that it might clear events
        yield trace
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace |= json.loads(path.read_text(encoding="utf-8", errors="replace"))


def read_trace(trace: Mapping[str, Any]) -> KernelReport:
    """Kernels per region from a trace in Chrome's format (microseconds)."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"][len(RANGE) :])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE)
    )
    starts = [start for start, _, _ in ranges]

    def region_at(time: float) -> str | None:
        """Regions do not overlap: nothing else is launched while a forward runs, and one that is nested is the last to begin."""
        for index in range(bisect_right(starts, time) - 1, max(-1, bisect_right(starts, time) - 3), -1):
            if time < ranges[index][1]:
                return ranges[index][2]
        return None

    device = [event for event in events if event.get("cat") in _DEVICE]
    if not device:
        own = ((region, name, us) for ts, name, us in _own_times(events) if (region := region_at(ts)) is not None)
        return KernelReport(regions=_top(own), on_gpu=False, busy_ms=None)
    launched = {
        event["args"]["correlation"]: event["ts"] for event in events if event.get("cat") in _LAUNCH and "correlation" in event.get("args", {})
    }
    found = []
    for event in device:
        time = launched.get(event.get("args", {}).get("correlation"))
        region = region_at(time) if time is not None else None
        if region is not None:
            found.append((region, str(event["name"]), float(event["dur"])))
    return KernelReport(regions=_top(found), on_gpu=True, busy_ms=_covered(device) / 1e3)


def _top(found: Iterable[tuple[str, str, float]]) -> dict[str, tuple[Kernel, ...]]:
    sums: dict[str, dict[str, tuple[float, int]]] = {}
    for region, name, us in found:
        rows = sums.setdefault(region, {})
        ms, launches = rows.get(name, (0.0, 0))
        rows[name] = (ms + us / 1e3, launches + 1)
    top = {}
    for region, rows in sums.items():
        total = sum(ms for ms, _ in rows.values())
        ordered = sorted(rows.items(), key=lambda row: -row[1][0])[:TOP]
        top[region] = tuple(Kernel(name=name, ms=ms, share=ms / total if total else 0.0, launches=count) for name, (ms, count) in ordered)
    return top


def _own_times(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[float, str, float]]:
    """(start, name, microseconds without those of inner operators) of every CPU operator, thread by thread."""
    threads: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault(event.get("tid"), []).append(event)
    for ops in threads.values():
        ops.sort(key=lambda op: (op["ts"], -op["dur"]))
        open_ops: list[list[Any]] = []  # [end, start, name, own time]
        for op in ops:
            while open_ops and open_ops[-1][0] <= op["ts"]:
                _, ts, name, own = open_ops.pop()
                yield ts, name, own
            if open_ops:
                open_ops[-1][3] -= op["dur"]
            open_ops.append([op["ts"] + op["dur"], op["ts"], str(op["name"]), op["dur"]])
        for _, ts, name, own in open_ops:
            yield ts, name, own


def _covered(events: Iterable[Mapping[str, Any]]) -> float:
    """Length of the union of the events' intervals, in microseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
