"""The arms of a comparison: today's labels, and rivals, each by its own public means. Imports no torch.

| arm | what runs |
|---|---|
| `none`, `gdn_conv+layernorm`, `full:block:6`, ... | the control and labels, as `labels.parse_arm` reads them |
| `gdn_conv+offload:gdn_core_attn@0.5` | recompute and offload labels; how they move is the recipe's section `offload` |
| `checkpoint:NAME+NAME...` | `torch.utils.checkpoint` over the regions of these labels, or over these regions; neighbours share one checkpoint |
| `checkpoint:full`, `checkpoint:block:K` | `torch.utils.checkpoint` around every whole block, around the first K |
| `checkpoint:sweep` | stands for `checkpoint:block:K` at a quarter, half and three quarters of the blocks, and `checkpoint:full` |
| `hf_gradient_checkpointing` | `model.gradient_checkpointing_enable()` |
| `selective_checkpoint` | `torch.utils.checkpoint` around every whole block, with a policy that saves attention and every second matmul |
| `save_on_cpu` | `torch.autograd.graph.save_on_cpu(pin_memory=True)` around the model's forward |
| `save_on_cpu:NAME+NAME...` | the same around single regions: those of these labels (of offload labels too), or these regions |

A rival stands alone: it cannot be joined with labels.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace

from ..labels import FIRST, LABELS, OFFLOAD_MOVES, FullRecompute, Selection, parse_arm
from ..plan import Plan
from ..regions import GDN, REGIONS, BlockLayout, Moves
from .errors import UserError, nearest
from .schema import OffloadSection

__all__ = [
    "HF",
    "PARTS",
    "RIVALS",
    "SAVE_ON_CPU",
    "SELECTIVE",
    "SWEEP",
    "Rival",
    "check_rival",
    "configured",
    "is_rival",
    "meaning",
    "parse",
    "sweep",
]

HF, SELECTIVE, SAVE_ON_CPU = "hf_gradient_checkpointing", "selective_checkpoint", "save_on_cpu"
SWEEP = "checkpoint:sweep"
_PREFIX, _ON_CPU = "checkpoint:", f"{SAVE_ON_CPU}:"
_BLOCKS, _REGIONS, _SWEEP = "blocks", "regions", "sweep"

RIVALS: dict[str, str] = {
    "checkpoint:NAME+NAME...": "torch.utils.checkpoint over the regions of labels, or over named regions; regions that follow each other share one",
    "checkpoint:full": "torch.utils.checkpoint around every whole block",
    "checkpoint:block:K": "torch.utils.checkpoint around the first K whole blocks",
    SWEEP: "checkpoint:block:K at a quarter, half and three quarters of the blocks, and checkpoint:full",
    HF: "model.gradient_checkpointing_enable() of transformers",
    SELECTIVE: "torch.utils.checkpoint around every whole block; attention and every second matmul are saved",
    SAVE_ON_CPU: "torch.autograd.graph.save_on_cpu(pin_memory=True) around the model's forward",
    "save_on_cpu:NAME+NAME...": "save_on_cpu(pin_memory=True) around the regions of labels, of offload labels too, or around named regions",
}
"""Form of each rival -> the public call behind it."""

_SAVED = tuple(name for name, moves in OFFLOAD_MOVES.items() if all(what is Moves.SAVED for _, what in moves))
"""Offload labels that move what regions save: these have a rival in `save_on_cpu` around the same regions."""

PARTS: tuple[tuple[str, ...], ...] = (
    ("input_norm",),
    ("in_proj", "conv", "prep", "gates", "delta_rule", "norm_out", "out_proj"),
    ("qkv", "core_attn", "attn_out"),
    ("mixer_residual", "post_norm"),
    ("gate_up", "act", "down"),
    ("ffn_residual",),
)
"""Regions that run one after the other in the forward of one module. A checkpoint does not reach from one module into another."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One rival, before any model is known."""

    kind: str
    """`blocks`, `regions`, `sweep`, or the rival's name."""
    names: tuple[str, ...] = ()
    """With `regions` and `save_on_cpu`: labels and regions as written. None with `save_on_cpu`: the whole forward."""
    num_blocks: int | None = None
    """With `blocks`: the first so many; None for all."""

    def __str__(self) -> str:
        if self.names:
            return (_PREFIX if self.kind == _REGIONS else _ON_CPU) + "+".join(self.names)
        if self.kind == _BLOCKS:
            return _PREFIX + ("full" if self.num_blocks is None else f"block:{self.num_blocks}")
        return SWEEP if self.kind == _SWEEP else self.kind

    @property
    def whole_blocks(self) -> bool:
        """True for a point of the k-of-N line: a plain checkpoint around whole blocks."""
        return self.kind == _BLOCKS

    @property
    def checkpoints_regions(self) -> bool:
        """True for plain checkpoints around rows of regions."""
        return self.kind == _REGIONS

    def groups(self, regions: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """What is under one context in a block that has these regions: each region by itself with `save_on_cpu`, for a checkpoint a row of
        regions that follow each other in one module."""
        wanted = {region for name in self.names for region in _regions_of(name)}.intersection(regions)
        if self.kind == SAVE_ON_CPU:
            return tuple((region,) for region in regions if region in wanted)
        found: list[tuple[str, ...]] = []
        for part in PARTS:
            row: list[str] = []
            for region in (*part, ""):
                if region in wanted:
                    row.append(region)
                elif row:
                    found.append(tuple(row))
                    row = []
        return tuple(found)


def _regions_of(name: str) -> tuple[str, ...]:
    if name in REGIONS:
        return (name,)
    return tuple(region for region, _ in (LABELS[name].modes if name in LABELS else OFFLOAD_MOVES[name]))


def is_rival(arm: str) -> bool:
    """Whether a checked arm is a rival."""
    return isinstance(parse(arm), Rival)


def parse(text: str) -> Selection | Rival:
    """Read one arm of a comparison.

    Raises:
        UserError: neither a rival nor an arm of labels; names the nearest.
        ValueError: as `labels.parse_arm`.
    """
    text = text.strip()
    if text in (HF, SELECTIVE, SAVE_ON_CPU):
        return Rival(kind=text)
    if text.startswith(_PREFIX):
        return _checkpoint(text, text.removeprefix(_PREFIX))
    if text.startswith(_ON_CPU):
        return Rival(kind=SAVE_ON_CPU, names=_names(text, _ON_CPU))
    parts = [part.strip() for part in text.split("+")]
    joined = next((part for part in parts if part.startswith((_PREFIX, _ON_CPU)) or part in (HF, SELECTIVE, SAVE_ON_CPU)), None)
    if joined:
        raise UserError(f"{text!r}: the rival {joined!r} stands alone; write it as an arm of its own, separated by a comma")
    close = nearest(text.partition(":")[0], (HF, SELECTIVE, SAVE_ON_CPU, "checkpoint"), cutoff=0.8)
    if close:
        rest = text.partition(":")[2] or ("full" if close == "checkpoint" else "")
        hint = f"{close}:{rest}" if rest and close in ("checkpoint", SAVE_ON_CPU) else close
        raise UserError(f"unknown arm {text!r} (did you mean {hint!r}?). Rivals: {', '.join(RIVALS)}")
    return parse_arm(text)


def configured(selection: Selection, section: OffloadSection) -> Selection:
    """An arm of labels under the recipe's section `offload`, which says how what moves is moved."""
    if selection.offload is None:
        return selection
    return replace(selection, offload=replace(selection.offload, **asdict(section)))


def meaning(chosen: Selection | Rival) -> Hashable:
    """Equal for two arms that are one plan in every model, by the label table."""
    if isinstance(chosen, Rival):
        return chosen.kind, chosen.num_blocks, frozenset(region for name in chosen.names for region in _regions_of(name))
    full, moved = chosen.full, chosen.offload
    if full is not None and full.num_layers is None:
        full = FullRecompute(num_layers=1)  # `full:block` covers every block, one by one
    nowhere = frozenset(name for name in chosen.labels if not LABELS[name].modes)
    inputs = frozenset(name for name in (moved.labels if moved is not None else ()) if OFFLOAD_MOVES[name][0][0] == FIRST)
    rest = None
    if full is None or full.method == "block":  # blocks that `full` does not cover: one that has every region stands for them
        within = replace(moved, labels=tuple(name for name in moved.labels if name not in inputs)) if moved is not None else None
        labels = Selection(labels=tuple(name for name in chosen.labels if name not in nowhere), offload=within)
        (rest,) = Plan.from_labels(labels, [BlockLayout(name="every", kind=GDN, regions=tuple(REGIONS))]).blocks
    share = moved.fraction if moved is not None and (inputs or (rest is not None and rest.moves)) else None
    return full, nowhere, inputs, rest and (rest.modes, frozenset(rest.moves)), share


def _checkpoint(text: str, rest: str) -> Rival:
    if rest == "sweep":
        return Rival(kind=_SWEEP)
    if rest == "full":
        return Rival(kind=_BLOCKS)
    if rest == "block" or rest.startswith("block:"):
        number = rest.removeprefix("block").removeprefix(":")
        if not (number.isascii() and number.isdigit() and int(number) > 0):
            raise UserError(f"{text!r}: expected the number of blocks, a positive integer, got {number!r}; for instance checkpoint:block:6")
        return Rival(kind=_BLOCKS, num_blocks=int(number))
    return Rival(kind=_REGIONS, names=_names(text, _PREFIX))


def _names(text: str, prefix: str) -> tuple[str, ...]:
    """Labels and regions behind the prefix, each once."""
    known = list(dict.fromkeys([*LABELS, *REGIONS, *(_SAVED if prefix == _ON_CPU else ())]))
    valid = [*known, "full", "block:K", "sweep"] if prefix == _PREFIX else known
    names = [name.strip() for name in text.removeprefix(prefix).split("+")]
    for name in names:
        if name in known:
            continue
        if name.split(":")[0] in ("full", "block", "sweep"):
            write = f"{SAVE_ON_CPU}, around the whole forward" if prefix == _ON_CPU else f"{_PREFIX}full, {_PREFIX}block:K or {SWEEP}"
            raise UserError(f"{text!r}: {name!r} stands alone; write {write}")
        if prefix == _ON_CPU and name in OFFLOAD_MOVES:
            raise UserError(f"{text!r}: {_no_rival(name)}; write {SAVE_ON_CPU}, around the whole forward")
        if ":" in name or name in (HF, SELECTIVE, SAVE_ON_CPU):
            raise UserError(
                f"{text!r}: a rival stands alone, got {name!r} joined with it; its own names are joined as {prefix}gdn_conv+mlp, "
                "another arm is separated by a comma"
            )
        moved = name.partition("@")[0]
        regions = "+".join(region for region, _ in OFFLOAD_MOVES.get(moved, ())) if moved not in valid else ""
        close = regions or nearest(name, valid)
        hint = f" (did you mean {prefix}{close}?)" if close else ""
        raise UserError(f"{text!r}: {name!r} is no label and no region{hint}. Valid after {prefix} are {', '.join(valid)}")
    return tuple(dict.fromkeys(names))


def _no_rival(name: str) -> str:
    """Why no region has what this offload label moves."""
    what = "a block's input" if OFFLOAD_MOVES[name][0][0] == FIRST else "outputs, whoever saves them"
    return f"offload:{name} moves {what}, which {SAVE_ON_CPU} around regions does not"


def check_rival(rival: Rival, layouts: Sequence[BlockLayout], *, hugging_face: bool) -> None:
    """Whether this model can run the rival.

    Raises:
        UserError: more blocks than the model has, a region that none of them has, or no Hugging Face model.
    """
    if rival.num_blocks is not None and rival.num_blocks > len(layouts):
        raise UserError(
            f"{rival}: expected at most the number of blocks, got {rival.num_blocks}, the model has {len(layouts)}; write checkpoint:full"
        )
    if rival.kind == HF and not hugging_face:
        raise UserError(f"{rival}: this model is none of transformers and has no gradient_checkpointing_enable(); write checkpoint:full")
    present = dict.fromkeys(region for layout in layouts for region in layout.regions)
    for name in rival.names:
        if not present.keys() & set(_regions_of(name)):
            close = nearest(name, present)
            on_cpu = rival.kind == SAVE_ON_CPU
            hint = f" (did you mean {_ON_CPU if on_cpu else _PREFIX}{close}?)" if close else ""
            none = f"; {_no_rival(name)}" if on_cpu and name in OFFLOAD_MOVES and name not in _SAVED else ""
            raise UserError(f"{rival}: none of the model's {len(layouts)} blocks has a region of {name!r}{hint}{none}. Regions: {', '.join(present)}")


def sweep(arms: Sequence[str], blocks: int) -> list[str]:
    """`arms` with `checkpoint:sweep` written out for a model of so many blocks; what stands there already is not added again."""
    if SWEEP not in arms:
        return list(arms)
    counts = sorted({max(1, round(blocks * quarters / 4)) for quarters in (1, 2, 3)} - {blocks})
    points = [*(f"{_PREFIX}block:{count}" for count in counts), f"{_PREFIX}full"]
    at = list(arms).index(SWEEP)
    return [*arms[:at], *(point for point in points if point not in arms), *arms[at + 1 :]]
