"""Find the blocks of known families in a model, and say what was found and what was not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .adapters import Adapter, imported_adapters
from .regions import GDN, BlockLayout

__all__ = ["FoundBlock", "ModelReport", "inspect_model"]


@dataclass(frozen=True)
class FoundBlock:
    """A block that an adapter knows."""

    module: nn.Module
    adapter: Adapter
    layout: BlockLayout


@dataclass(frozen=True)
class ModelReport:
    """What `inspect_model` found."""

    blocks: tuple[FoundBlock, ...]
    unknown: tuple[str, ...]
    """`name (class)` of layers beside known blocks that no adapter knows, and of other modules that look like Gated DeltaNet mixers."""

    @property
    def layouts(self) -> tuple[BlockLayout, ...]:
        """Layouts of the known blocks, in the order of the forward."""
        return tuple(block.layout for block in self.blocks)

    def describe(self, *, taken_over: bool) -> str:
        """For instance `GDN blocks: 18 of 24 layers, 18 taken over`."""
        gdn = sum(layout.kind == GDN for layout in self.layouts)
        text = f"GDN blocks: {gdn} of {len(self.blocks) + len(self.unknown)} layers, {gdn if taken_over else 0} taken over"
        if self.unknown:
            names = ", ".join(self.unknown[:3]) + (", ..." if len(self.unknown) > 3 else "")
            text += f"; {len(self.unknown)} of no known family stay untouched: {names}"
        return text


def _looks_like_gdn(module: nn.Module) -> bool:
    names = {*module._parameters, *module._modules}
    return {"A_log", "dt_bias"} <= names and bool(names & {"conv1d", "q_conv1d"})


def inspect_model(model: nn.Module) -> ModelReport:
    """Find the blocks of every known family in a model, through any nesting.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {model!r:.60} ({type(model).__name__}); pass the model itself, built already")
    adapters = imported_adapters()
    blocks: list[FoundBlock] = []
    stacks: dict[str, nn.Module] = {}
    inside: set[int] = set()
    named = dict(model.named_modules())
    for name, module in named.items():
        adapter = next((a for a in adapters if a.matches(module)), None)
        if adapter is not None:
            blocks.append(FoundBlock(module, adapter, adapter.layout(name, module)))
            inside.update(id(m) for m in module.modules())
            parent = name.rpartition(".")[0]
            if isinstance(named.get(parent), nn.ModuleList):
                stacks[parent] = named[parent]
    siblings = {f"{parent}.{child}": m for parent, stack in stacks.items() for child, m in stack.named_children()}
    # A wrapper around a known block (torch.compile) is no layer of its own.
    siblings = {name: m for name, m in siblings.items() if inside.isdisjoint(id(part) for part in m.modules())}
    inside.update(id(m) for sibling in siblings.values() for m in sibling.modules())
    lonely = {name: m for name, m in named.items() if id(m) not in inside and _looks_like_gdn(m)}
    return ModelReport(tuple(blocks), tuple(f"{name} ({type(m).__name__})" for name, m in (siblings | lonely).items()))
