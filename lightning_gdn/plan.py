"""Plans: for every block, the mode of every region. Imports no torch.

A `Plan` is frozen, equal by value, printable and serialisable. `Plan.from_labels` is the only place where labels become modes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from .labels import FIRST, LABELS, OFFLOAD_MOVES, FullRecompute, Selection
from .offload_config import OffloadConfig
from .regions import BlockLayout, Mode, Moves, stronger

__all__ = ["BlockPlan", "Plan"]


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The modes of one block."""

    name: str
    """Fully qualified module name of the block."""
    kind: str
    """`"gdn"` or `"attention"`."""
    modes: tuple[tuple[str, Mode], ...]
    """(region, mode) for every region of the block, in pipeline order."""
    carry: bool = False
    """Hand the last region's output on to the next block as recomputable (a chunk of `full:uniform:n` continues there)."""
    moves: tuple[tuple[str, Moves], ...] = ()
    """(region, which storages around it move to the host), in the order of the offload labels."""

    def mode(self, region: str) -> Mode:
        """Mode of `region`; `KeyError` if the block has none of that name."""
        return dict(self.modes)[region]

    @property
    def is_keep(self) -> bool:
        """True if the block retains exactly what the untouched one does."""
        return not self.moves and all(mode is Mode.KEEP for _, mode in self.modes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The modes of every block of one model."""

    source: str
    """The labels the plan came from, in arm grammar."""
    blocks: tuple[BlockPlan, ...]
    offload: OffloadConfig | None = None
    """How much of what the blocks' `moves` name goes to the host, and at which price; None if nothing moves."""

    @property
    def is_control(self) -> bool:
        """True if nothing is recomputed or moved: then nothing is installed either."""
        return all(block.is_keep for block in self.blocks)

    @property
    def recomputes(self) -> bool:
        """True if something is replayed in backward."""
        return any(mode in (Mode.RECOMPUTE, Mode.RECOMPUTE_INSIDE) for block in self.blocks for _, mode in block.modes)

    @classmethod
    def from_labels(cls, selection: Selection, layouts: Sequence[BlockLayout]) -> Plan:
        """Resolve labels against the blocks of a model.

        `full` supersedes labels on the blocks it covers; the other blocks follow the labels. Where a region has a recompute and an offload
        label, it is recomputed, and what is held for its replay moves.

        Raises:
            ValueError: a label of which no block has a region, or `full:block:n` with more layers than the model has.
        """
        present = {region for layout in layouts for region in layout.regions}
        _check_offload(selection.offload, present, len(layouts))
        for name in selection.labels:
            wanted = [region for region, _ in LABELS[name].modes]
            if not present.intersection(wanted):
                usable = [n for n, lab in LABELS.items() if present.intersection(r for r, _ in lab.modes)]
                raise ValueError(
                    f"label {name!r}: none of the model's {len(layouts)} blocks has a region it stands for "
                    f"({', '.join(wanted) or 'multi-latent attention'}). Labels this model has: {', '.join(usable)}, full"
                )
        covered, carried = _covered(selection.full, len(layouts))
        blocks = []
        for index, layout in enumerate(layouts):
            modes = dict.fromkeys(layout.regions, Mode.KEEP)
            whole = index in covered
            if whole:
                modes = dict.fromkeys(layout.regions, Mode.RECOMPUTE)
            else:
                for name in selection.labels:
                    for region, mode in LABELS[name].modes:
                        if region in modes:
                            modes[region] = stronger(modes[region], mode)
            input_stays = _ends_resident(index, carried, len(layouts), selection.offload)
            moves = _moves(selection.offload, layout.regions, modes, whole, input_stays)
            for region, what in moves:
                if what is Moves.SAVED:
                    modes[region] = stronger(modes[region], Mode.OFFLOAD)
            blocks.append(BlockPlan(name=layout.name, kind=layout.kind, modes=tuple(modes.items()), carry=index in carried, moves=moves))
        return cls(source=str(selection), blocks=tuple(blocks), offload=selection.offload)

    @classmethod
    def keep(cls, layouts: Sequence[BlockLayout]) -> Plan:
        """The control: every region in `keep`."""
        return cls.from_labels(Selection(), layouts)

    def counts(self) -> dict[str, int]:
        """Number of blocks in which each recomputed or offloaded region is not in `keep`, as `{"conv: recompute": 18, ...}`."""
        found: dict[str, int] = {}
        for block in self.blocks:
            for region, mode in block.modes:
                if mode is not Mode.KEEP:
                    key = f"{region}: {mode}"
                    found[key] = found.get(key, 0) + 1
        return found

    def moved(self) -> dict[str, int]:
        """Number of blocks in which something moves that the modes do not tell, as `{"in_proj outputs: offload": 18}`."""
        found: dict[str, int] = {}
        for block in self.blocks:
            modes = dict(block.modes)
            for region, what in block.moves:
                if what is Moves.OUTPUTS or modes[region] is Mode.RECOMPUTE:
                    whole = what is Moves.INPUTS
                    key = "block input: offload" if whole else f"{region} {'outputs' if what is Moves.OUTPUTS else 'inputs'}: offload"
                    found[key] = found.get(key, 0) + 1
        return found

    def __str__(self) -> str:
        if self.is_control:
            return f"plan {self.source}: {len(self.blocks)} blocks, every region kept"
        whole = [block for block in self.blocks if all(mode is Mode.RECOMPUTE for _, mode in block.modes)]
        rows = [f"{len(whole)} recomputed whole"] if whole else []
        rest = replace(self, blocks=tuple(block for block in self.blocks if block not in whole))
        rows += [f"{key} in {count}" for key, count in (rest.counts() | self.moved()).items()]
        return f"plan {self.source}: {len(self.blocks)} blocks; {', '.join(rows)}"

    def to_json(self) -> str:
        """Serialise; `Plan.from_json` gives an equal plan back."""
        blocks = []
        for b in self.blocks:
            moves = {"moves": [[region, str(what)] for region, what in b.moves]} if b.moves else {}
            blocks.append({"name": b.name, "kind": b.kind, "modes": {r: str(m) for r, m in b.modes}, "carry": b.carry, **moves})
        offload = {"offload": asdict(self.offload)} if self.offload is not None else {}
        return json.dumps({"source": self.source, "blocks": blocks, **offload})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        blocks = tuple(
            BlockPlan(
                name=b["name"],
                kind=b["kind"],
                modes=tuple((r, Mode(m)) for r, m in b["modes"].items()),
                carry=b["carry"],
                moves=tuple((region, Moves(what)) for region, what in b.get("moves", ())),
            )
            for b in data["blocks"]
        )
        return cls(source=data["source"], blocks=blocks, offload=OffloadConfig(**data["offload"]) if "offload" in data else None)


def _check_offload(config: OffloadConfig | None, present: set[str], count: int) -> None:
    for name in config.labels if config is not None else ():
        wanted = [region for region, _ in OFFLOAD_MOVES[name]]
        if FIRST not in wanted and not present.intersection(wanted):
            usable = [n for n, moves in OFFLOAD_MOVES.items() if present.intersection(region for region, _ in moves)]
            raise ValueError(
                f"offload label {name!r}: none of the model's {count} blocks has a region it stands for ({', '.join(wanted)}). "
                f"Offload labels this model has: {', '.join(usable)}, and block_input with full"
            )


def _moves(
    config: OffloadConfig | None, regions: Sequence[str], modes: dict[str, Mode], whole: bool, input_stays: bool
) -> tuple[tuple[str, Moves], ...]:
    """What moves in one block: of one that is recomputed whole nothing but its input is left."""
    found: list[tuple[str, Moves]] = []
    for name in config.labels if config is not None else ():
        for region, what in OFFLOAD_MOVES[name]:
            if what is Moves.INPUTS:
                if whole and not input_stays:
                    found.append((regions[0], what))
            elif not whole and region in modes and not (what is Moves.OUTPUTS and modes[region] is Mode.RECOMPUTE):
                found.append((region, what))
    return tuple(found)


def _ends_resident(index: int, carried: frozenset[int], count: int, config: OffloadConfig | None) -> bool:
    """Whether the block's chunk reaches into the resident last blocks: its input is wanted when their backward begins, so that it stays too."""
    end = index
    while end in carried:
        end += 1
    return config is not None and end > index and end >= count - config.resident_last_blocks


def _covered(full: FullRecompute | None, count: int) -> tuple[frozenset[int], frozenset[int]]:
    """Indices of the blocks that `full` covers, and of those that hand their output on inside a chunk."""
    if full is None:
        return frozenset(), frozenset()
    number = full.num_layers
    if full.method == "block":
        if number is not None and number > count:
            raise ValueError(f"{full}: num_layers must be at most the number of blocks, got {number}, the model has {count}")
        return frozenset(range(count if number is None else number)), frozenset()
    chunk = 1 if number is None else number
    return frozenset(range(count)), frozenset(i for i in range(count - 1) if (i + 1) % chunk)
