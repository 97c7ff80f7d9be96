"""Why bytes that offload labels name stayed on the device, in words, and what to write about it. Imports no torch.

The first step's warning, parity and a comparison say it in these words.
"""

from __future__ import annotations

from collections.abc import Mapping

from .offload_config import OffloadConfig

__all__ = ["meaning", "size", "why_stayed"]

NOTHING_THERE = (
    "its labels name nothing that this plan keeps: what a recompute label replays is not there to be moved; leave that label out of the arm or plan"
)
_FIXED = {
    "held": "used outside the block or held by the graph itself: moving it would free nothing",
    "weight_cast": "autocast's copies of weights",
    "parameter": "parameters and buffers",
    "edited": "edited in place after it was saved",
    "ineligible": "tensor subclasses, or no storage of their own",
}
"""Reasons that no option of offload changes."""


def size(nbytes: float) -> str:
    """Bytes for people; never a rounded zero."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:,.1f} KiB" if nbytes >= 2**10 else f"{nbytes:.0f} B"


def meaning(reason: str, config: OffloadConfig | None) -> str:
    """What a reason to stay says, with the values of this configuration if it is known; "" of a reason that is not known here."""
    if reason == "min_bytes":
        return "below offload.min_bytes" + ("" if config is None else f"={config.min_bytes}")
    if reason == "resident":
        return "of the last blocks, offload.resident_last_blocks" + ("" if config is None else f"={config.resident_last_blocks}")
    if reason == "budget":
        share = None if config is None else config.fraction
        return "beyond the share" + ("" if share is None else " that auto settled on" if share == "auto" else f" @{share:g}")
    if reason == "pool full":
        cap = None if config is None else config.max_pinned_gib
        return f"beyond offload.max_pinned_gib={cap:g}" if cap is not None else "no more pinned memory was to be had"
    return _FIXED.get(reason, "")


def why_stayed(stayed: Mapping[str, float], config: OffloadConfig | None, *, largest_small: int = 0, when: str = "per step") -> str:
    """Why nothing moved, and what to do about it, as the end of a sentence.

    Args:
        stayed: reason -> bytes, as `StepStatistics.stayed`.
        config: None if it is not known; then no values are named.
        largest_small: bytes of the largest storage below `min_bytes`; 0 if not known.
        when: what the bytes are of.
    """
    found = {reason: nbytes for reason, nbytes in stayed.items() if nbytes}
    if not found:
        return NOTHING_THERE
    told = []
    for reason, nbytes in found.items():
        words = meaning(reason, config)
        if reason == "min_bytes" and largest_small:
            words += f", the largest {size(largest_small)}"
        told.append(f"{reason} {size(nbytes)}" + (f" ({words})" if words else ""))
    return f"stayed {when}: {', '.join(told)}; {_remedy(found, config)}"


def _remedy(found: Mapping[str, float], config: OffloadConfig | None) -> str:
    capped = config is None or config.max_pinned_gib is not None
    written = {"min_bytes": "offload.min_bytes=0", "resident": "offload.resident_last_blocks=0"}
    if capped:
        written["pool full"] = "offload.max_pinned_gib=null"
    overrides = " ".join(override for reason, override in written.items() if reason in found)
    share = "a larger share after @" if "budget" in found else ""
    remedies = []
    if overrides or share:
        remedies.append(f"write {' and '.join(filter(None, [overrides, share]))}")
    if "min_bytes" in found:
        remedies.append("take larger sizes")
    if "pool full" in found and not capped:
        remedies.append("free host memory (of all processes of the machine, and what `ulimit -l` allows)")
    return ", or ".join(remedies) or "no option moves that: leave the label out"
