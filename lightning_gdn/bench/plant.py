"""A planted error, to check a check: what the replay of one region in one block hands to backward is slightly off.

Every tensor that the replay serves (outputs, and what the region saves inside) is scaled, so the error shows whatever mode the region is
in. Tensors that were kept, and the forward, stay as they are: only a comparison of gradients can see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from ..labels import parse_arm
from ..plan import Plan
from ..regions import REGIONS, BlockLayout, Mode
from ..replay import Region, Slot
from .errors import UserError, nearest

__all__ = ["SCALE", "Plant", "parse_plant", "planted", "replayed_by"]

SCALE = 1.0 + 2.0**-7
"""One unit in the last place of bfloat16 at 1: the smallest error that every element of a bfloat16 tensor can show."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Where the error is."""

    region: str
    index: int
    """The block's number, from 0."""
    block: str
    """The block's module name."""

    def __str__(self) -> str:
        return f"{self.region}@{self.index}"


def parse_plant(text: str, layouts: Sequence[BlockLayout]) -> Plant:
    """Read `REGION` or `REGION@BLOCK` (the block by number or by name; by default the middle one of those that have the region).

    Raises:
        UserError: no such region, no such block, or a block without that region.
    """
    region, at, where = text.partition("@")
    if region not in REGIONS:
        close = nearest(region, REGIONS)
        raise UserError(f"--plant: unknown region {region!r}" + (f" (did you mean {close!r}?)" if close else "") + f". Regions: {', '.join(REGIONS)}")
    having = [index for index, layout in enumerate(layouts) if region in layout.regions]
    if not having:
        known = dict.fromkeys(name for layout in layouts for name in layout.regions)
        raise UserError(f"--plant: no block of this model replays a region {region!r}; regions it has: {', '.join(known)}")
    if not at:
        index = having[len(having) // 2]
    else:
        names = [layout.name for layout in layouts]
        if where not in names and not (where.isascii() and where.isdigit() and int(where) < len(names)):
            raise UserError(f"--plant: expected REGION@BLOCK with a block from 0 to {len(names) - 1} or its name, got {text!r}")
        index = names.index(where) if where in names else int(where)
        if index not in having:
            raise UserError(f"--plant: block {index} has no region {region!r}; blocks that have it: {', '.join(map(str, having))}")
    return Plant(region=region, index=index, block=layouts[index].name)


def replayed_by(plant: Plant, arm: str, layouts: Sequence[BlockLayout]) -> bool:
    """Whether the arm's plan lets that region be replayed there. False for an arm that is no plan."""
    try:
        plan = Plan.from_labels(parse_arm(arm), layouts)
    except ValueError:
        return False
    return plan.blocks[plant.index].mode(plant.region) in (Mode.RECOMPUTE, Mode.RECOMPUTE_INSIDE)


class Served:
    """How many tensors the planted error has changed."""

    count = 0


@contextmanager
def planted(model: nn.Module, plant: Plant | None) -> Iterator[Served]:
    """While it is open, replays of that region in that block of `model` hand out tensors scaled by `SCALE`. Nothing if `plant` is None."""
    served = Served()
    if plant is None:
        yield served
        return
    owners = {id(module) for module in model.get_submodule(plant.block).modules()}
    plain = Region.serve

    def serve(self: Region, slot: Slot) -> Tensor:
        value = plain(self, slot)
        if self.fn.name != plant.region or id(self.owner) not in owners or not value.is_floating_point():
            return value
        served.count += 1
        return value * SCALE

    Region.serve = serve  # type: ignore[method-assign]
    try:
        yield served
    finally:
        Region.serve = plain  # type: ignore[method-assign]
