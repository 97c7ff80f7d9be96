"""Why bytes that offload labels name stayed on the device, in words, and what to write about it. Imports no torch.

The first step's warning, parity and a comparison say it in these words.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .offload_config import OffloadConfig

__all__ = ["meaning", "share_found", "size", "why_stayed"]

_NOT_SAVED = (
    "frozen weights and passes without gradients save nothing, and a later step can save copies instead (of another dtype under autocast, of "
    "another layout)"
)
_REPLAYED = "what a recompute label replays is not there to be moved: leave that label out of the arm or plan"
_AT_REST = (
    "a share of 0 moves nothing, and nothing is looked at any more: its steps are those without offload. For less memory at a slower step write a "
    "share after @, for instance @1"
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


def why_stayed(
    stayed: Mapping[str, float],
    config: OffloadConfig | None,
    *,
    recomputes: bool = False,
    largest_small: int | None = None,
    when: str = "per step",
    share: float | None = None,
) -> str:
    """Why nothing moved, and what to do about it, as the end of a sentence.

    Args:
        stayed: reason -> bytes, as `StepStatistics.stayed`: sums over all offload labels, and said to be that where there are several.
        config: None if it is not known; then no values are named.
        recomputes: recompute labels are in force as well.
        largest_small: as `StepStatistics.largest_small`; None if it is not known.
        when: what the bytes are of.
        share: the share of the bytes that moved, where `auto` chose it.
    """
    found = {reason: nbytes for reason, nbytes in stayed.items() if nbytes}
    if not found and (share == 0 or (config is not None and config.fraction == 0)):
        return _AT_REST
    if not found:
        reasons = f"{_REPLAYED}; or, as without it, {_NOT_SAVED}" if recomputes else f"{_NOT_SAVED}; leave the offload label out"
        return f"nothing that its offload labels name was saved: {reasons}"
    small_and_last = found.get("min_bytes", 0) > 0 and largest_small == 0
    told = []
    for reason, nbytes in found.items():
        words = meaning(reason, config)
        if reason == "min_bytes" and largest_small:
            words += f", the largest {size(largest_small)}"
        elif reason == "min_bytes" and small_and_last:
            words += f", and all {meaning('resident', config)}"
        told.append(f"{reason} {size(nbytes)}" + (f" ({words})" if words else ""))
    several = config is not None and len(config.labels) > 1
    of_all, for_them = (", of all offload labels together (one by itself has its own figures)", "for these ") if several else ("", "")
    return f"stayed {when}{of_all}: {', '.join(told)}; {for_them}{_remedy(found, config, last=small_and_last)}"


def share_found(
    *,
    fraction: float,
    before: float,
    copies_alone: float,
    host_ms: float,
    stall_ms: float,
    copy_ms: float,
    step_ms: float,
    elsewhere: bool,
    by_host: bool,
) -> str:
    """What `auto` found and what to do about it, in one sentence; the arguments are the fields of `Finding`, and its `by_host`."""
    head = f"offload: fraction=auto settled on {fraction:.2g}" + ("" if before == 1 else f", down from {before:.2g}")
    times = f"of {step_ms:.1f} ms of a step"
    if elsewhere:
        return f"{head}: another rank can move no more behind its compute"
    if by_host:
        less = " and moves nothing any more" if fraction == 0 else f" (the copies alone would allow {copies_alone:.2g})"
        return (
            f"{head}{less}: the host, not the GPU, decides the step time here ({host_ms:.1f} ms of host work for copies had nothing to hide behind, "
            f"{times}). Take larger micro-batches; or give fraction=1.0 (@1) if memory matters more than the step time"
            + (f", which is about {100 * (host_ms + stall_ms) / step_ms:.1f} % longer at a share of {before:.2g}" if step_ms > 0 else "")
        )
    if fraction == 0:
        return f"{head} and moves nothing any more: too little compute for the copies to hide behind ({stall_ms:.1f} ms of stalls {times})"
    return (
        f"{head}: what hides behind compute (before, {stall_ms:.1f} ms of stalls and {host_ms:.1f} ms of host work were exposed, and "
        f"{copy_ms:.1f} ms of copies slowed down what ran beside them, {times})"
    )


def _remedy(found: Collection[str], config: OffloadConfig | None, *, last: bool) -> str:
    capped = config is None or config.max_pinned_gib is not None
    written = {"min_bytes": "offload.min_bytes=0", "resident": "offload.resident_last_blocks=0"}
    if capped:
        written["pool full"] = "offload.max_pinned_gib=null"
    overrides = " ".join(override for reason, override in written.items() if reason in found or (last and reason == "resident"))
    share = "a larger share after @" if "budget" in found else ""
    remedies = []
    if overrides or share:
        remedies.append(f"write {' and '.join(filter(None, [overrides, share]))}")
    if "min_bytes" in found and not last:
        remedies.append("take larger sizes")
    if "pool full" in found and not capped:
        remedies.append("free host memory (of all processes of the machine, and what `ulimit -l` allows)")
    return ", or ".join(remedies) or "no option moves that: leave the label out"
