"""A region as an adapter declares it: the function that runs it, and what a replay of it depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["RegionFn"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RegionFn:
    """One region of one model family.

    `call(owner, *args)` is a top-level function that takes **every** tensor as an argument: a closure over a tensor would keep the
    graph alive when a backward never comes. It returns a tensor or a flat tuple.
    """

    name: str
    call: Callable[..., Any]
    modules: tuple[str, ...] = ()
    """Attributes of the owner: submodules the region calls."""
    params: tuple[str, ...] = ()
    """Attributes of the owner: parameters the region reads itself."""
    pure: frozenset[type] = field(default=frozenset({nn.Linear, nn.Conv1d, nn.SiLU}))
    """Module classes known to draw no random numbers. Any other class makes the region snapshot the random state."""
    draws: Callable[[nn.Module], bool] | None = None
    """Further condition under which the region can draw random numbers (attention dropout)."""

    def can_draw(self, owner: nn.Module) -> bool:
        """Whether a call can draw random numbers, so that a replay needs the random state of the forward."""
        if self.draws is not None and self.draws(owner):
            return True
        for name in self.modules:
            module = owner._modules[name]
            assert module is not None
            if type(module) not in self.pure or module._forward_hooks or module._forward_pre_hooks:
                return True
        return False

    def versions(self, owner: nn.Module) -> int:
        """Sum of the version counters of every parameter and buffer a replay reads, and of the hooks of modules that have some.

        A module that edits a buffer in its forward (spectral norm, batch norm) would do so again in a replay, from a later state: the sum,
        taken before the forward, has then changed, and the replay is refused.
        """
        total = 0
        for name in self.params:
            parameter = owner._parameters.get(name)
            total += parameter._version if parameter is not None else _all_versions(owner)  # a parametrized one is no parameter
        for name in self.modules:
            module = owner._modules[name]
            assert module is not None
            if module._modules or module._buffers or module._forward_hooks or module._forward_pre_hooks:
                total += _all_versions(module)
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    total += parameter._version
        return total


def _all_versions(module: nn.Module) -> int:
    """Of every tensor, and which forward hooks there are: one that comes or goes changes what a replay computes. Hook ids never repeat."""
    tensors = sum(tensor._version for found in (module.parameters(), module.buffers()) for tensor in found)
    hooks = tuple(number for part in module.modules() for found in (part._forward_hooks, part._forward_pre_hooks) for number in found)
    return tensors + hash(hooks) if hooks else tensors
