"""Plans: for every block, the mode of every region. Imports no torch.

A `Plan` is frozen, equal by value, printable and serialisable. `Plan.from_labels` is the only place where labels become modes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .labels import LABELS, FullRecompute, Selection
from .regions import BlockLayout, Mode, stronger

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

    def mode(self, region: str) -> Mode:
        """Mode of `region`; `KeyError` if the block has none of that name."""
        return dict(self.modes)[region]

    @property
    def is_keep(self) -> bool:
        """True if the block retains exactly what the untouched one does."""
        return all(mode is Mode.KEEP for _, mode in self.modes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The modes of every block of one model."""

    source: str
    """The labels the plan came from, in arm grammar."""
    blocks: tuple[BlockPlan, ...]

    @property
    def is_control(self) -> bool:
        """True if nothing is recomputed or moved: then nothing is installed either."""
        return all(block.is_keep for block in self.blocks)

    @classmethod
    def from_labels(cls, selection: Selection, layouts: Sequence[BlockLayout]) -> Plan:
        """Resolve labels against the blocks of a model.

        `full` supersedes labels on the blocks it covers; the other blocks follow the labels.

        Raises:
            ValueError: a label of which no block has a region, or `full:block:n` with more layers than the model has.
        """
        present = {region for layout in layouts for region in layout.regions}
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
            if index in covered:
                modes = dict.fromkeys(layout.regions, Mode.RECOMPUTE)
            else:
                for name in selection.labels:
                    for region, mode in LABELS[name].modes:
                        if region in modes:
                            modes[region] = stronger(modes[region], mode)
            blocks.append(BlockPlan(name=layout.name, kind=layout.kind, modes=tuple(modes.items()), carry=index in carried))
        return cls(source=str(selection), blocks=tuple(blocks))

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

    def __str__(self) -> str:
        if self.is_control:
            return f"plan {self.source}: {len(self.blocks)} blocks, every region kept"
        whole = [block for block in self.blocks if all(mode is Mode.RECOMPUTE for _, mode in block.modes)]
        rows = [f"{len(whole)} recomputed whole"] if whole else []
        rest = replace(self, blocks=tuple(block for block in self.blocks if block not in whole))
        rows += [f"{key} in {count}" for key, count in rest.counts().items()]
        return f"plan {self.source}: {len(self.blocks)} blocks; {', '.join(rows)}"

    def to_json(self) -> str:
        """Serialise; `Plan.from_json` gives an equal plan back."""
        blocks = [{"name": b.name, "kind": b.kind, "modes": {r: str(m) for r, m in b.modes}, "carry": b.carry} for b in self.blocks]
        return json.dumps({"source": self.source, "blocks": blocks})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        blocks = tuple(
            BlockPlan(name=b["name"], kind=b["kind"], modes=tuple((r, Mode(m)) for r, m in b["modes"].items()), carry=b["carry"])
            for b in data["blocks"]
        )
        return cls(source=data["source"], blocks=blocks)


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
