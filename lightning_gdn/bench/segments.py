"""`torch.utils.checkpoint` and `save_on_cpu` over regions of a block, with the adapters' forwards as they are.

Two stand-ins for the tape: `run` is what an adapter calls for each region. `OnCpuTape` opens `save_on_cpu` around each named region.
`SegmentTape` puts off the regions of a group until the last one is reached and then runs the whole group in one public `checkpoint` call;
what the adapter holds meanwhile are `Pending` outputs. Nothing of this package's own recompute and offload takes part: no saved-tensor
hooks of its own, no tape, no replay, no engine.

**Outputs of a group.** The last region's outputs leave the checkpoint as they are, views included: a checkpoint that ends at the
projection frees almost nothing, since its output holds the projection (source document, W1 and W2). Outputs of earlier regions that are
needed after the group leave it as contiguous tensors: in W3 and W4 z, b and a are views of the projection, and as views they would hold
all of it, while the source document counts it as freed ("becomes an internal activation and is freed").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ..region_fn import RegionFn
from ..replay import thread_state

__all__ = ["CONSUMERS", "OnCpuTape", "Pending", "SegmentTape"]

CONSUMERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "in_proj": (("conv",), ("norm_out",), ("gates",), ("gates",)),
    "conv": (("prep",),),
    "prep": (("delta_rule",), ("delta_rule",), ("delta_rule",)),
    "gates": (("delta_rule",), ("delta_rule",)),
    "delta_rule": (("norm_out",), ()),
    "norm_out": (("out_proj",),),
    "qkv": (("core_attn",), ("core_attn",), ("core_attn",), ("attn_out",)),
    "core_attn": (("attn_out",), ()),
    "mixer_residual": (("post_norm", "ffn_residual"),),
    "gate_up": (("act",), ("act",)),
    "act": (("down",),),
}
"""Region -> for each of its outputs the regions that read it: which outputs of a group are needed after it. `()`: none (the recurrent state
and the attention weights, which training asks for only with a cache)."""


class Pending:
    """An output of a region that has not run yet; unpacks into as many as the region has."""

    __slots__ = ("step", "index", "value")

    def __init__(self, step: _Step, index: int = 0) -> None:
        self.step: _Step | None = step
        self.index = index
        self.value: Any = None
        step.outputs.append(self)

    def __iter__(self) -> Iterator[Pending]:
        assert self.step is not None, "unpacked after its group ran"
        return iter([Pending(self.step, index) for index in range(len(CONSUMERS[self.step.fn.name]))])


class _Step:
    """One region of a group that waits for the last one."""

    __slots__ = ("fn", "owner", "args", "outputs")

    def __init__(self, fn: RegionFn, owner: nn.Module, args: tuple[Any, ...]) -> None:
        self.fn, self.owner, self.args = fn, owner, args
        self.outputs: list[Pending] = []


@dataclass(frozen=True, slots=True)
class _From:
    """An argument that is output `index` of step `step` of the same group."""

    step: int
    index: int


@dataclass(frozen=True, slots=True)
class _Input:
    """An argument that is input `index` of the checkpoint."""

    index: int


class _StandIn:
    """In the place of the running block's tape while its context is open."""

    def __init__(self, kernels: str) -> None:
        self.kernels = kernels

    def __enter__(self) -> Self:
        self._outer, thread_state.tape = getattr(thread_state, "tape", None), self
        return self

    def __exit__(self, *exc: object) -> None:
        thread_state.tape, self._outer = self._outer, None


class OnCpuTape(_StandIn):
    """What an adapter sees as its tape while tensors that single regions of a block save are copied to host memory.

    Args:
        regions: names of the regions.
        kernels: the option `kernels`, for the adapter to read.
        pin_memory: whether the host memory is pinned.
    """

    def __init__(self, regions: Sequence[str], kernels: str, *, pin_memory: bool) -> None:
        super().__init__(kernels)
        self._regions, self._pin_memory = frozenset(regions), pin_memory

    def run(self, fn: RegionFn, owner: nn.Module, *args: Any) -> Any:
        """Run one region."""
        if fn.name not in self._regions:
            return fn.call(owner, *args)
        with save_on_cpu(pin_memory=self._pin_memory):
            return fn.call(owner, *args)


class SegmentTape(_StandIn):
    """What an adapter sees as its tape while a block runs with checkpoints around groups of its regions.

    Args:
        groups: rows of region names, each row one checkpoint (`Rival.groups`).
        kernels: the option `kernels`, for the adapter to read.
        hold: called with every tensor that a checkpoint takes as input, to count what it holds.
    """

    def __init__(self, groups: Sequence[tuple[str, ...]], kernels: str, hold: Callable[[Any], None] | None = None) -> None:
        super().__init__(kernels)
        self._last = {region: group[-1] for group in groups for region in group}
        self._hold = hold
        self._steps: list[_Step] = []

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        waiting, self._steps = [step.fn.name for step in self._steps], []
        if waiting and exc[0] is None:
            raise RuntimeError(
                f"checkpoint over regions: {', '.join(waiting)} waited for {self._last[waiting[0]]!r}, which this forward did not reach"
            )

    def run(self, fn: RegionFn, owner: nn.Module, *args: Any) -> Any:
        """Run one region, or let it wait for the last one of its group."""
        last = self._last.get(fn.name)
        if last is None:
            return fn.call(owner, *map(_resolved, args))
        step = _Step(fn, owner, args)
        self._steps.append(step)
        if fn.name != last:
            return Pending(step)
        steps, self._steps = self._steps, []
        return self._checkpoint(steps)

    def _checkpoint(self, steps: Sequence[_Step]) -> Any:
        position = {id(step): number for number, step in enumerate(steps)}
        inputs: list[Tensor] = []
        wired = []
        for step in steps:
            row: list[Any] = []
            for arg in step.args:
                if isinstance(arg, Pending) and arg.step is not None:
                    row.append(_From(position[id(arg.step)], arg.index))
                elif isinstance(arg := _resolved(arg), Tensor):
                    row.append(_Input(len(inputs)))
                    inputs.append(arg)
                else:
                    row.append(arg)
            wired.append((step.fn.call, step.owner, tuple(row)))
            if self._hold is not None:
                for arg in (*inputs, *(value for item in row if isinstance(item, dict) for value in item.values())):
                    self._hold(arg)
        inside = {step.fn.name for step in steps}
        needed = [
            _From(number, index)
            for number, step in enumerate(steps[:-1])
            for index, consumers in enumerate(CONSUMERS[step.fn.name])
            if not inside.issuperset(consumers)
        ]
        result, *rest = checkpoint(_Group(wired, needed), *inputs, use_reentrant=False)
        values = dict(zip(needed, rest, strict=True))
        for number, step in enumerate(steps):
            for pending in step.outputs:
                pending.step, pending.value = None, values.get(_From(number, pending.index))
        return result


class _Group:
    """The function that is checkpointed. It takes every tensor as an argument and holds none."""

    def __init__(self, wired: Sequence[tuple[Callable[..., Any], nn.Module, tuple[Any, ...]]], needed: Sequence[_From]) -> None:
        self._wired, self._needed = wired, needed

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        made: list[tuple[Any, ...]] = []
        result: Any = None
        for call, owner, row in self._wired:
            args = []
            for arg in row:
                if isinstance(arg, _From):
                    arg = made[arg.step][arg.index]
                elif isinstance(arg, _Input):
                    arg = inputs[arg.index]
                args.append(arg)
            result = call(owner, *args)
            made.append(result if isinstance(result, tuple) else (result,))
        return (result, *(_on_its_own(made[item.step][item.index]) for item in self._needed))


def _on_its_own(output: Tensor) -> Tensor:
    """A tensor that holds no larger one: what `contiguous()` is for. On a CPU its rows stay apart, as in the view: vectorised elementwise
    functions take another path over contiguous memory and differ in the last bit, and a rival must compute what the control computes."""
    if output.is_contiguous() or output.device.type != "cpu":
        return output.contiguous()
    return nn.functional.pad(output, (0, 1))[..., :-1]


def _resolved(arg: Any) -> Any:
    if not isinstance(arg, Pending):
        return arg
    if arg.value is None:
        raise RuntimeError("checkpoint over regions: an output is read after its group that CONSUMERS says is not")
    return arg.value
