"""What a user may ask of the offload engine: labels, and how much may move at which price. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

__all__ = ["MIB", "OFFLOAD_LABELS", "OffloadConfig", "field_problem", "parse_offload"]

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
    """Offload labels, see `lightning-gdn labels`. A list is taken too; one given twice counts once; none of them moves nothing."""
    fraction: float | str = 1.0
    """Share **of the bytes** that the labels make eligible, from the first step on. 0 moves nothing. `"auto"` starts at 1, measures the copies,
    the compute and the host's part of a few steps, and settles on the largest share that hides behind compute; 0 where the host is the slower one."""
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
        if not isinstance(labels, tuple | list) or not all(isinstance(name, str) for name in labels):
            bare = _bare(labels) if isinstance(labels, str) else ""
            write = f"[{bare!r}]" if bare else "['gdn_core_attn'], or [] for none"
            raise ValueError(f"offload.labels: expected a list of offload labels, got {labels!r}; write {write}. {_VALID}")
        for name in labels:
            _check_label(name, "offload.labels")
        object.__setattr__(self, "labels", tuple(dict.fromkeys(labels)))
        for name in ("fraction", *_WHOLE, "max_pinned_gib"):
            problem = field_problem(name, getattr(self, name))
            if problem is not None:
                raise ValueError(problem)
        if self.fraction != "auto":
            object.__setattr__(self, "fraction", float(self.fraction) + 0.0)  # no minus zero

    @property
    def max_pinned_bytes(self) -> int | None:
        """The cap of the pool in bytes."""
        return None if self.max_pinned_gib is None else int(self.max_pinned_gib * 1024**3)

    def __str__(self) -> str:
        share = self.fraction if isinstance(self.fraction, str) else f"{self.fraction:g}"
        return ",".join(self.labels) + ("" if self.fraction == 1 else f"@{share}")


_VALID = f"Offload labels: {', '.join(OFFLOAD_LABELS)}"
_WHOLE: dict[str, tuple[int, int, str]] = {
    "min_bytes": (0, 2**63 - 1, "a size in bytes, for instance 1048576"),
    "resident_last_blocks": (0, 2**31 - 1, "how many of the last blocks stay on the GPU, for instance 1"),
    "prefetch_blocks": (1, 2**31 - 1, "a reload needs at least one block of lead; 1 is the least memory"),
    "release_blocks": (0, 2**31 - 1, "how many blocks a copy may take in forward, for instance 1"),
}
"""Whole numbers of `OffloadConfig`: smallest and largest value, and what to write."""
_MOST_GIB = 2**33
_SHARE = re.compile(r"(\d+\.?\d*|\.\d+)([eE]-?\d+)?", re.ASCII)
"""A share as text. Not all that `float` takes: no sign, no nan, no underscores."""


def field_problem(name: str, value: Any) -> str | None:
    """What is wrong with one field of `OffloadConfig`, `labels` aside, in one line; None if nothing is. Recipes say it in the same words."""
    if name == "fraction":
        if value == "auto" or (_number(value) and 0 <= value <= 1):
            return None
        hint = _hint(value, ["auto"]) if isinstance(value, str) else ""
        return (
            f"offload.fraction: expected a number from 0 to 1 (a share of the bytes) or 'auto', got {_shown(value)}{hint}. "
            "Write 1 to move everything the labels cover, 0 to move nothing"
        )
    if name == "max_pinned_gib":
        if value is None or (_number(value) and 0 <= value <= _MOST_GIB):
            return None
        return (
            f"offload.max_pinned_gib: expected a number of GiB from 0 to {_MOST_GIB}, or null (None) for no cap, got {_shown(value)}. "
            "Host memory is shared by all processes of a machine: divide what may be pinned by their number"
        )
    least, most, advice = _WHOLE[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and least <= value <= most:
        return None
    bound = f"at most {most}" if whole and value > most else f"at least {least}"
    instead = f" (write {int(value)})" if isinstance(value, float) and value.is_integer() and least <= value <= most else ""
    return f"offload.{name}: expected a whole number of {bound}, got {_shown(value)}{instead}: {advice}"


def parse_offload(text: str, *, said: str | None = None, recompute: Collection[str] = (), **fields: Any) -> OffloadConfig:
    """Read the text of an arm after `offload:`, for instance `gdn_core_attn@0.5` or `gdn_core_attn,mlp@auto`.

    Labels are joined by `,` or `+`, each with or without the word `offload:` before it. One share of the bytes may follow one of them, and
    holds for all.

    Args:
        said: how the user wrote it, for errors; `text` in quotes if None.
        recompute: names that are recompute labels, so that an error can say so.
        fields: passed to `OffloadConfig`.

    Raises:
        ValueError: as `OffloadConfig`, an empty label, a share that is no number from 0 to 1, or a second one that differs.
    """
    said = said or repr(text)
    labels, shares = [], list[str]()
    for part in text.replace("+", ",").split(","):
        name, at, share = part.strip().removeprefix("offload:").partition("@")
        _check_label(name.strip(), said, recompute)
        labels.append(name.strip())
        if at:
            shares.append(share.strip())
    for share in shares:
        if share != "auto" and not (_SHARE.fullmatch(share) and float(share) <= 1):
            raise ValueError(
                f"{said}: expected a share of the bytes from 0 to 1, or auto, after @, got {share!r}{_hint(share, ['auto'])}. "
                "Write for instance @0.5 after the label, or no @ to move everything the labels cover"
            )
    if len(set(shares)) > 1:
        raise ValueError(
            f"{said}: expected one share of the bytes for all labels, got {' and '.join(dict.fromkeys(shares))}; "
            "write it once, for instance offload:gdn_core_attn+offload:mlp@0.5"
        )
    if shares:
        fields["fraction"] = shares[0] if shares[0] == "auto" else float(shares[0])
    return OffloadConfig(labels=tuple(labels), **fields)


def _check_label(name: str, said: str, recompute: Collection[str] = ()) -> None:
    if name in OFFLOAD_LABELS:
        return
    if not name.strip():
        raise ValueError(f"{said}: expected an offload label, got {name!r}; write one, for instance gdn_core_attn, or leave offload out. {_VALID}")
    bare = _bare(name)
    if bare in OFFLOAD_LABELS:  # only from `OffloadConfig`: text was taken apart before
        hint = f" (write {bare!r}; the share of the bytes is `fraction`)"
    elif name.partition(":")[0] in recompute:  # also full:block:6
        hint = " (it is a recompute label: write it without offload)"
    else:
        hint = _hint(name, OFFLOAD_LABELS)
    raise ValueError(f"{said}: unknown offload label {name!r}{hint}. {_VALID}")


def _bare(text: str) -> str:
    return text.strip().removeprefix("offload:").partition("@")[0].strip()


def _hint(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _shown(value: object) -> str:
    """The value as written, cut short, and what to do about a number in quotes."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "a number of thousands of digits"
    if isinstance(value, str) and _SHARE.fullmatch(value.strip()):
        return f"{text} (write it as a plain number, without quotes)"
    return text if len(text) <= 60 else f"{text[:57]}..."
