"""What an adapter is, and how the right ones are found without importing a model family that is not in use."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..regions import BlockLayout
from ..tape import Tape

__all__ = ["Adapter", "imported_adapters"]

_FAMILIES = {
    "transformers.models.qwen3_5.modeling_qwen3_5": "lightning_gdn.adapters.qwen3_5",
    "lightning_gdn.models.gdn_stack": "lightning_gdn.adapters.gdn_stack",
    "transformers.models.qwen3_next.modeling_qwen3_next": "lightning_gdn.adapters.qwen3_next",
}
"""Modeling module -> adapter module. A model of a family exists only after its modeling module was imported."""


class Adapter(ABC):
    """Regions of one model implementation's blocks."""

    name: str
    """Family name, as in transformers' `model_type`."""
    block_class: str
    """Class name of the blocks, for messages."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether this module is a block of the family, by class and by structure."""

    @abstractmethod
    def layout(self, name: str, block: nn.Module) -> BlockLayout:
        """Kind and regions of a block."""

    @abstractmethod
    def block_forward(self, block: nn.Module, tape: Tape, *args: Any, **kwargs: Any) -> Tensor:
        """The block's forward, region by region. Same arguments and result as the block class's own."""

    @abstractmethod
    def parts(self, block: nn.Module) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Submodules of the block whose forward is replaced too: `(module, function(module, tape, *args, **kwargs))`."""

    @abstractmethod
    def kernels(self, block: nn.Module, device: torch.device, kernels: str) -> dict[str, str]:
        """Region -> name of the kernel that runs in it on this device under the option `kernels`, where there is a choice."""

    def own_forward_runs(self, block: nn.Module, device: torch.device, kernels: str) -> bool:
        """Whether the block class's own forward would run the same kernels on this device; False too where what it calls would fail."""
        return True


def imported_adapters() -> list[Adapter]:
    """Adapters of the families whose modeling modules are imported in this process."""
    return [importlib.import_module(ours).ADAPTER for theirs, ours in _FAMILIES.items() if theirs in sys.modules]
