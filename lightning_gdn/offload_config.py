"""What a user may ask of the offload engine: labels, and how much may move at which price. Imports no torch."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

__all__ = ["MIB", "OFFLOAD_LABELS", "OffloadConfig", "parse_offload"]

MIB = 1024 * 1024

OFFLOAD_LABELS: dict[str, str] = {
    "gdn_core_attn": "what the delta rule retains",
    "gdn_in_proj": "outputs of the GDN projections, whoever retains them",
    "gdn_norm_out": "what the gated output norm retains",
    "core_attn": "what the attention core retains",
    "mlp": "what the dense MLP retains",
    "moe_act": "activations inside the routed experts",
    "block_input": "the block's input, with whole-block recompute",
}
"""Offload labels by name (Megatron Core's `offload_modules` where they exist), and what each moves to the host."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Which activations move to the host, how much of them, and what that may cost.

    Raises:
        ValueError: a field of the wrong type or out of its range; the message says what it got, what is expected and what to do.
    """

    labels: tuple[str, ...]
    """Offload labels, see `lightning-gdn labels`. A list is taken too."""
    fraction: float | str = 1.0
    """Share **of the bytes** that the labels make eligible, from the first step on. 0 moves nothing. `"auto"` starts at 1, measures the copies
    and the compute of a few steps, and settles on the largest share that stays hidden behind compute."""
    min_bytes: int = MIB
    """Storages below this size stay on the GPU: a copy costs tens of microseconds of host time whatever its size."""
    max_pinned_gib: float | None = None
    """Most pinned host memory the pool may hold, per process, in GiB; what does not fit stays on the GPU and is counted. None: at most twice
    what was ever in use at one moment."""
    resident_last_blocks: int = 1
    """The last blocks of the model keep their activations on the GPU: their backward comes at once, and the copies could not hide."""
    prefetch_blocks: int = 1
    """How many blocks before its use a reload is enqueued. Each costs the moved bytes of one block on the GPU during backward."""
    release_blocks: int = 1
    """How many further blocks may run in forward before a block's sources must be free. More of them let slow copies hide behind more
    compute; each costs the moved bytes of one block on the GPU during forward."""

    def __post_init__(self) -> None:
        labels: Any = self.labels
        if isinstance(labels, str) or not isinstance(labels, tuple | list) or not labels or not all(isinstance(x, str) for x in labels):
            raise ValueError(f"offload.labels: expected a list of at least one label, got {labels!r}. Valid labels: {', '.join(OFFLOAD_LABELS)}")
        for name in labels:
            if name not in OFFLOAD_LABELS:
                if not name:
                    raise ValueError(f"offload.labels: expected a label, got an empty one. Valid labels: {', '.join(OFFLOAD_LABELS)}")
                close = difflib.get_close_matches(name.lower().replace("-", "_"), list(OFFLOAD_LABELS), n=1, cutoff=0.5)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"offload.labels: unknown label {name!r}{hint}. Valid labels: {', '.join(OFFLOAD_LABELS)}")
        object.__setattr__(self, "labels", tuple(dict.fromkeys(labels)))
        if self.fraction != "auto":
            if not _number(self.fraction) or not 0 <= float(self.fraction) <= 1:
                raise ValueError(
                    f"offload.fraction: expected a number from 0 to 1 (a share of the bytes) or 'auto', got {self.fraction!r}. "
                    "Write 1 to move everything the labels cover, 0 to move nothing"
                )
            object.__setattr__(self, "fraction", float(self.fraction))
        for name, least, advice in (
            ("min_bytes", 0, "a size in bytes, for instance 1048576"),
            ("resident_last_blocks", 0, "how many of the last blocks stay on the GPU, for instance 1"),
            ("prefetch_blocks", 1, "a reload needs at least one block of lead; 1 is the least memory"),
            ("release_blocks", 0, "how many blocks a copy may take in forward, for instance 1"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"offload.{name}: expected an integer of at least {least}, got {value!r}: {advice}")
        if self.max_pinned_gib is not None and (not _number(self.max_pinned_gib) or self.max_pinned_gib < 0):
            raise ValueError(
                f"offload.max_pinned_gib: expected a number of GiB of at least 0, or nothing for no cap, got {self.max_pinned_gib!r}. "
                "Host memory is shared by all processes of a machine: divide what may be pinned by their number"
            )

    @property
    def max_pinned_bytes(self) -> int | None:
        """The cap of the pool in bytes."""
        return None if self.max_pinned_gib is None else int(self.max_pinned_gib * 1024**3)

    def __str__(self) -> str:
        share = self.fraction if isinstance(self.fraction, str) else f"{self.fraction:g}"
        return ",".join(self.labels) + ("" if self.fraction == 1 else f"@{share}")


def parse_offload(text: str, **fields: Any) -> OffloadConfig:
    """Read the text of an arm after `offload:`, for instance `gdn_core_attn@0.5` or `gdn_core_attn,mlp@auto`.

    Labels are joined by `,` or `+`, each with or without the word `offload:` before it. One share of the bytes may follow one of them, and
    holds for all. `fields` are passed to `OffloadConfig`.

    Raises:
        ValueError: as `OffloadConfig`, and for a share that is no number, or a second one that differs.
    """
    labels, shares = [], list[str]()
    for part in text.replace("+", ",").split(","):
        name, at, share = part.strip().removeprefix("offload:").partition("@")
        labels.append(name.strip())
        if at:
            shares.append(share.strip())
    if len(set(shares)) > 1:
        raise ValueError(
            f"offload {text!r}: expected one share of the bytes for all labels, got {' and '.join(dict.fromkeys(shares))}; "
            "write it once, for instance offload:gdn_core_attn+offload:mlp@0.5"
        )
    if shares:
        try:
            fields["fraction"] = shares[0] if shares[0] == "auto" else float(shares[0])
        except ValueError:
            raise ValueError(
                f"offload {text!r}: expected one share of the bytes from 0 to 1, or auto, after a label, got {shares[0]!r}. "
                "It holds for all labels: write for instance offload:gdn_core_attn+offload:mlp@0.5"
            ) from None
    return OffloadConfig(labels=tuple(labels), **fields)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
