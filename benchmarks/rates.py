"""Plain copies between pinned and device memory: the rates that offload's are a share of."""

from __future__ import annotations

from collections.abc import Mapping

import torch

MIB = 2**20


def bare_rates(device: str, nbytes: int = 256 * MIB, count: int = 8) -> dict[str, float]:
    """10⁹ bytes per second of `count` copies of `nbytes`, each direction on a stream of its own; nothing without a GPU.

    `out_gb_s` and `in_gb_s`: one way alone, as the engine moves, and what its shares refer to. `both_out_gb_s` and `both_in_gb_s`: both ways
    at once, where each slows the other down.
    """
    if device != "cuda":
        return {}
    gpu = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pairs = {"out": (host[0], gpu[0]), "in": (gpu[1], host[1])}
    for target, source in pairs.values():
        target.copy_(source)  # the first one is no copy's time
    rates = {}
    for names in (("out",), ("in",), ("out", "in")):
        marks = {}
        torch.cuda.synchronize()
        for name in names:
            stream = torch.cuda.Stream()
            target, source = pairs[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record(stream)
                for _ in range(count):
                    target.copy_(source, non_blocking=True)
                end.record(stream)
            marks[name] = start, end
        torch.cuda.synchronize()
        for name, (start, end) in marks.items():
            rates[f"{'both_' if len(names) == 2 else ''}{name}_gb_s"] = count * nbytes / start.elapsed_time(end) / 1e6
    return rates


def told_rates(rates: Mapping[str, float]) -> str:
    """Rates as a line says them."""
    alone, both = (", ".join(f"{way} {rates[f'{prefix}{way}_gb_s']:.1f}" for way in ("out", "in")) for prefix in ("", "both_"))
    return f"bare pinned copies, GB/s: {alone} alone; {both} both at once"
