"""A region as an adapter declares it: the function that runs it, and what a replay of it depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

__all__ = ["TRAINED", "RegionFn"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RegionFn:
    """One region of one model family.

    `call(owner, *args)` is a top-level function that takes **every** tensor as an argument: a closure over a tensor would keep the
    graph alive when a backward never comes. It returns a tensor or a flat tuple, and edits no argument in place: a replay would need what it was.
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
    again: Callable[..., tuple[Any, list[Tensor]] | None] | None = None
    """A replay that needs no autograd: what `call` returns, and what autograd saves in it, in that order. It launches the
    kernels that `call` launches, and runs no module, nothing that autocast changes and nothing random. None: only `call` can do it."""

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
        """One number for the state of what a replay reads beside its arguments; another one means that the replay may compute something else.

        The sum of the version counters of every parameter and buffer and of the hooks of modules that have some, and above it, as multiples
        of `TRAINED`, which parameters require gradients (`matmul` chooses its kernel by that). A module that edits a buffer in its forward
        (spectral norm, batch norm) would do so again in a replay, from a later state: the number, taken before the forward, has then changed.
        """
        total = trained = 0
        for name in self.params:
            parameter = owner._parameters.get(name)
            if parameter is None:  # a parametrized one is no parameter
                more, trained = _all_versions(owner, trained)
                total += more
            else:
                total += parameter._version
                trained = 2 * trained + parameter.requires_grad
        for name in self.modules:
            module = owner._modules[name]
            assert module is not None
            if module._modules or module._buffers or module._forward_hooks or module._forward_pre_hooks:
                more, trained = _all_versions(module, trained)
                total += more
                continue
            for parameter in module._parameters.values():
                if parameter is not None:
                    total += parameter._version
                    trained = 2 * trained + parameter.requires_grad
        return total + trained * TRAINED


TRAINED = 1 << 64
"""Above every sum of version counters and hook numbers."""
_HOOKS = 1 << 48
"""What a module's hooks add is below this: thousands of modules stay below `TRAINED`."""


def _all_versions(module: nn.Module, trained: int) -> tuple[int, int]:
    """Of every tensor, and which forward hooks there are: one that comes or goes changes what a replay computes. Hook ids never repeat."""
    total = sum(buffer._version for buffer in module.buffers())
    for parameter in module.parameters():
        total += parameter._version
        trained = 2 * trained + parameter.requires_grad
    hooks = tuple(number for part in module.modules() for found in (part._forward_hooks, part._forward_pre_hooks) for number in found)
    return total + (hash(hooks) % _HOOKS if hooks else 0), trained
