"""Labels: the names users write, and what they stand for. Imports no torch.

Names follow Megatron Core's `recompute_modules` and `offload_modules` where those exist. A label maps region names to modes; it
applies to every block that has the region. `parse_arm` reads the grammar of comparison arms:
`none`, labels joined by `+`, `full`, `full:block:6`, `full:uniform:2`, `offload:gdn_core_attn@0.5`. Several offload labels are
`gdn_conv+offload:gdn_core_attn+offload:mlp@0.5`: one share of the bytes, written once, holds for all of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .offload_config import OFFLOAD_LABELS, OffloadConfig, parse_offload
from .regions import Mode, Moves

__all__ = [
    "FullRecompute",
    "LABELS",
    "OFFLOAD_LABELS",
    "OFFLOAD_MOVES",
    "Label",
    "Selection",
    "UnavailableLabelError",
    "advice",
    "parse_arm",
    "read_offload",
    "select",
]

RESERVED = ("auto", "none", "full")
FULL_METHODS = ("uniform", "block")
FULL_FORMS = "full (full:block:N, full:uniform:N)"


class UnavailableLabelError(ValueError):
    """A label that is known by name but needs a part of lightning-gdn that this version does not have."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """One recompute label."""

    name: str
    modes: tuple[tuple[str, Mode], ...]
    """(region, mode) pairs."""
    remark: str
    """What to know before using it; shown by `lightning-gdn labels`."""
    frees_little: bool = False
    """The label is known to free almost nothing; then a measured zero is no fault."""


def _label(name: str, remark: str, *, little: bool = False, inside: str = "", both: str = "") -> Label:
    modes = [(r, Mode.RECOMPUTE) for r in both.split()] + [(r, Mode.RECOMPUTE_INSIDE) for r in inside.split()]
    return Label(name=name, modes=tuple(modes), remark=remark, frees_little=little)


LABELS: dict[str, Label] = {
    label.name: label
    for label in (
        _label("gdn_in_proj", "W1: frees almost nothing, the projection's output is saved by the convolution", little=True, inside="in_proj"),
        _label("gdn_in_proj_split", "W2: as gdn_in_proj; the split saves nothing of its own", little=True, inside="in_proj"),
        _label("gdn_in_proj_conv", "W3: projection and convolution replayed, the convolution's output stays", both="in_proj", inside="conv"),
        _label(
            "gdn_in_proj_conv_prep",
            "W4: as W3 and prep; equal to W3 where nobody saves the convolution's output",
            both="in_proj conv",
            inside="prep",
        ),
        _label("gdn_conv", "convolution and prep replayed; no GEMM and no collective is replayed", both="conv prep"),
        _label("gdn_front", "everything in front of the delta rule replayed", both="in_proj conv prep gates"),
        _label("gdn_norm_out", "gated output norm replayed; with the eager model its fp32 internals go too", both="norm_out"),
        _label("gdn_gated_delta_rule", "frees little where the kernel already recomputes inside (FLA)", inside="delta_rule"),
        _label(
            "gdn",
            "the whole GDN mixer replayed, its output stays",
            both="in_proj conv prep gates delta_rule norm_out",
            inside="out_proj",
        ),
        _label("layernorm", "both norms of every block replayed", both="input_norm post_norm"),
        _label("mlp", "dense MLP replayed, its output stays", both="gate_up act", inside="down"),
        _label("mlp_act", "activation and product of the dense MLP replayed; no GEMM is", both="act"),
        _label(
            "core_attn", "attention core replayed; frees little with fused attention, since q, k, v become inputs", little=True, inside="core_attn"
        ),
        _label("moe", "routed and shared experts replayed, routing decisions stay", both="experts shared_experts"),
        _label("moe_act", "activation inside the routed experts replayed", both="moe_act"),
        _label("shared_experts", "shared experts replayed", inside="shared_experts"),
        _label("mla_up_proj", "up projections of multi-latent attention", both=""),
    )
}
"""Recompute labels by name."""

FIRST = ""
"""In `OFFLOAD_MOVES`: the first region of a block."""
OFFLOAD_MOVES: dict[str, tuple[tuple[str, Moves], ...]] = {
    "gdn_core_attn": (("delta_rule", Moves.SAVED),),
    "gdn_in_proj": (("in_proj", Moves.OUTPUTS),),
    "gdn_norm_out": (("norm_out", Moves.SAVED),),
    "core_attn": (("core_attn", Moves.SAVED),),
    "mlp": (("gate_up", Moves.SAVED), ("act", Moves.SAVED), ("down", Moves.SAVED)),
    "moe_act": (("moe_act", Moves.SAVED),),
    "block_input": ((FIRST, Moves.INPUTS),),
}
"""Offload label -> (region, what of it moves)."""


@dataclass(frozen=True, kw_only=True)
class FullRecompute:
    """Whole-block recompute (Megatron Core's granularity `full`)."""

    method: str = "uniform"
    """`uniform`: every block, in chunks of `num_layers` that keep only the chunk's input. `block`: the first `num_layers` blocks."""
    num_layers: int | None = None
    """Chunk length for `uniform` (default 1); number of covered blocks for `block` (default all)."""

    def __post_init__(self) -> None:
        if self.method not in FULL_METHODS:
            raise ValueError(f"full: method must be one of {', '.join(FULL_METHODS)}, got {self.method!r}{_hint(self.method, FULL_METHODS)}")
        if self.num_layers is not None and (not isinstance(self.num_layers, int) or isinstance(self.num_layers, bool) or self.num_layers < 1):
            raise ValueError(f"full: num_layers must be a positive integer, got {self.num_layers!r}")

    def __str__(self) -> str:
        if self.num_layers is None:
            return "full" if self.method == "uniform" else f"full:{self.method}"
        return f"full:{self.method}:{self.num_layers}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a user asked for, before any model is known: recompute labels, whole-block recompute, and offload."""

    labels: tuple[str, ...] = ()
    full: FullRecompute | None = None
    offload: OffloadConfig | None = None

    def __post_init__(self) -> None:
        if self.offload is not None and not self.offload.labels:
            object.__setattr__(self, "offload", None)

    @property
    def is_control(self) -> bool:
        """True for the control arm: nothing is recomputed or moved, and nothing is installed."""
        return not self.labels and self.full is None and self.offload is None

    @property
    def recompute(self) -> list[str]:
        """The recompute labels and `full`, as `select` takes them."""
        return [*self.labels, *([str(self.full)] if self.full else [])]

    def __str__(self) -> str:
        moved = [f"offload:{part}" for part in str(self.offload).split(",")] if self.offload else []
        return "+".join([*self.recompute, *moved]) or "none"


def _hint(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _unknown_hint(name: str) -> str:
    bare = name.partition("@")[0]
    if bare in OFFLOAD_LABELS:
        return f" (it is an offload label: pass it as offload=[{name!r}], in an arm write offload:{name})"
    if name.lower().startswith("offload"):
        return " (an offload label is written offload:LABEL, for instance offload:gdn_core_attn)"
    if "+" in name or "," in name:
        return " (write one label per list entry, or one string with labels joined by '+')"
    return _hint(name, [*LABELS, *RESERVED])


def read_offload(argument: str | Sequence[str] | OffloadConfig) -> OffloadConfig | None:
    """What the argument `offload` asks for; None for `[]`, which moves nothing.

    Raises:
        ValueError: wrong type, an empty or unknown label, a share that is none; the message says what it got and what to write.
    """
    if isinstance(argument, OffloadConfig):
        return argument if argument.labels else None
    said = f"offload={argument!r}"
    if isinstance(argument, str):
        return parse_offload(argument, said=said, recompute=(*LABELS, "full"))
    names: Any = argument
    if isinstance(names, Sequence) and not isinstance(names, bytes) and all(isinstance(name, str) for name in names):
        return parse_offload("+".join(names), said=said, recompute=(*LABELS, "full")) if names else None
    raise ValueError(
        f"offload: expected a label, a list of labels ([] for none) or an OffloadConfig, got {argument!r}. "
        f"Offload labels: {', '.join(OFFLOAD_LABELS)}"
    )


def _offload(parts: Sequence[str], argument: str | Sequence[str] | OffloadConfig) -> OffloadConfig | None:
    """What an arm's `offload:` parts or the argument `offload` ask for."""
    given = read_offload(argument)
    if not parts:
        return given
    text = "+".join(parts)
    if given is not None:
        raise ValueError(f"offload is given twice: as {text!r} among the labels and as offload={argument!r}; write it once")
    return parse_offload(text, recompute=(*LABELS, "full"))


def _full_from_text(text: str) -> FullRecompute:
    _, *rest = text.split(":")
    if len(rest) > 2 or any(not part for part in rest):
        raise ValueError(f"{text!r}: expected full, full:METHOD or full:METHOD:NUM_LAYERS, for instance full:block:6")
    number: int | None = None
    if len(rest) == 2:
        if not (rest[1].isascii() and rest[1].isdigit()):
            raise ValueError(f"{text!r}: num_layers must be a positive integer, got {rest[1]!r}; for instance full:block:6")
        number = int(rest[1])
    return FullRecompute(method=rest[0] if rest else "uniform", num_layers=number)


def select(
    recompute: str | Sequence[str] = (),
    *,
    offload: str | Sequence[str] | OffloadConfig = (),
    method: str | None = None,
    num_layers: int | None = None,
) -> Selection:
    """Check what a user wrote and return it as a `Selection`.

    Args:
        recompute: labels; a bare string is one label (or an arm such as `"gdn_conv+layernorm"`). `[]` and `"none"` are the control.
        offload: offload labels, `"gdn_core_attn@0.5"` with a share of the bytes, or an `OffloadConfig`; `[]` moves nothing. In `recompute`
            they are written `"offload:gdn_core_attn"`.
        method, num_layers: for `full`, as in Megatron Core (`recompute_method`, `recompute_num_layers`).

    Raises:
        ValueError: unknown label (names the nearest and all valid ones), wrong type, or `method` without `full`.
        UnavailableLabelError: a known label that needs a part this version does not have.
    """
    if isinstance(recompute, str):
        recompute = [part.strip() for part in recompute.split("+")]
    if not isinstance(recompute, Sequence) or not all(isinstance(part, str) for part in recompute):
        raise ValueError(f"recompute: expected a label or a list of labels, got {recompute!r}. Valid labels: {', '.join(LABELS)}, full")
    moved = [name for name in recompute if name.startswith("offload:")]
    labels: list[str] = []
    full: FullRecompute | None = None
    for name in recompute:
        if name == "none":
            if len(recompute) > 1:
                raise ValueError(f"'none' is the control and cannot be combined with other labels, got {list(recompute)}")
            continue
        if name == "auto":
            raise UnavailableLabelError(
                "'auto' needs the planner, which is not part of this version of lightning-gdn. Name labels instead: " + ", ".join(LABELS)
            )
        if name.startswith("offload:"):
            continue
        if name == "full" or name.startswith("full:"):
            if full is not None:
                raise ValueError(f"'full' is given twice: {list(recompute)}")
            full = _full_from_text(name)
            continue
        if name not in LABELS:
            raise ValueError(f"recompute: unknown label {name!r}{_unknown_hint(name)}. Valid labels: {', '.join(LABELS)}, {FULL_FORMS}, none")
        if name not in labels:
            labels.append(name)
    if (method is not None or num_layers is not None) and full is None:
        raise ValueError(f"method={method!r} and num_layers={num_layers!r} only apply to 'full', got labels {list(recompute)}")
    if full is not None and (method is not None or num_layers is not None):
        if full != FullRecompute():
            raise ValueError(f"give method and num_layers either in the label {str(full)!r} or as arguments, not both")
        full = FullRecompute(method=method or "uniform", num_layers=num_layers)
    config = _offload(moved, offload)
    if config is not None and "block_input" in config.labels and full is None:
        raise ValueError(
            f"offload label 'block_input' needs whole-block recompute, got labels {list(recompute)}: a block that keeps some of what it saves is not "
            "replayed from its input. Add 'full' (or full:block:N, full:uniform:N) to the recompute labels, or leave block_input out"
        )
    return Selection(labels=tuple(labels), full=full, offload=config)


def parse_arm(text: str) -> Selection:
    """Read one arm of a comparison, for instance `gdn_conv+gdn_norm_out+layernorm` or `full:block:6`.

    Raises:
        ValueError: as `select`, and for an empty arm.
    """
    if not text.strip():
        raise ValueError("empty arm; write 'none' for the control")
    return select(text.strip())


_ON_THE_STACK = "20-layer GDN stack at 8192 tokens, batch 2"
_UNION = "gdn_conv+gdn_norm_out+layernorm"
_ALMOST_NOTHING = ("gdn_norm_out", "frees almost nothing; gdn_norm_out frees more")
_LITTLE = ("gdn_norm_out", "frees little with FLA's kernel; gdn_norm_out frees more")
_ADVICE: dict[tuple[str, str], tuple[str, str]] = {
    ("gdn_in_proj_conv", "stock"): ("gdn_norm_out", "gdn_norm_out saves more for less step time (Qwen3.5-0.8B at 8192 tokens)"),
    ("gdn_in_proj_conv", "fused"): (_UNION, f"{_UNION} saves more for less step time ({_ON_THE_STACK})"),
    ("gdn_conv", "fused"): ("gdn_norm_out", f"gdn_norm_out saves as much for less step time ({_ON_THE_STACK})"),
    ("gdn_front", "fused"): ("full", f"full:block:K saves as much for less step time, K about half of the blocks ({_ON_THE_STACK})"),
    **{(name, kernels): _ALMOST_NOTHING for name in ("gdn_in_proj", "gdn_in_proj_split") for kernels in ("stock", "fused")},
    **{("gdn_gated_delta_rule", kernels): _LITTLE for kernels in ("stock", "fused")},
}
"""(label, option `kernels`) -> what is known to be better, and the line that says so; each from a record under benchmarks/."""


def advice(selection: Selection, kernels: str) -> list[str]:
    """One line for every label for which something better is known under this setting, unless that is in the selection as well."""
    lines = []
    for name in selection.labels:
        better, text = _ADVICE.get((name, kernels), ("", ""))
        if better and not set(better.split("+")) <= set(selection.labels):
            lines.append(f"{name}: {text}")
    return lines
