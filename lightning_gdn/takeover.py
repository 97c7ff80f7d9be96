"""Takes over `forward` on module instances, for a time, and puts it back.

No wrapper modules: names, `state_dict`, optimizers and checkpoints stay as they are. The replacement is a callable object that holds
its module weakly, so a dropped model is freed at once; a pickled or deep-copied model gets replacements that run on its own weights.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .adapters.base import Adapter
from .ledger import Ledger
from .moving import Engines, Mover, Moving, layout_of, state_of
from .offload.handles import Block, Nothing
from .plan import BlockPlan
from .regions import Mode
from .tape import Carry, Tape, active_tape

__all__ = ["BlockTakeover", "PartTakeover", "Session", "Takeover", "foreign_hooks"]

ON_FOREIGN_HOOKS = ("raise", "bypass")
_runs_eagerly = torch.compiler.disable(reason="lightning_gdn: a block under a plan runs eagerly, because its tape cannot be traced")
_CARRY = "_lightning_gdn_carry"
RELEARN = 64
"""Calls of a block in one state after which it looks at every region's saved tensors again, where something moves."""
STATES = 256
"""States of which a block remembers what it learned, such as lengths."""


class Session:
    """What the takeovers of one model share."""

    def __init__(self, ledger: Ledger, kernels: str, on_foreign_hooks: str, engines: Engines | None = None) -> None:
        self.ledger, self.kernels, self.engines = ledger, kernels, engines
        self.on_foreign_hooks = on_foreign_hooks
        self.ended = False
        """True after undo: copies of the model made meanwhile (EMA, a saved best model) run untouched from then on."""
        self.on_complete: Callable[[], None] | None = None
        """Called once: when every block was instrumented, or at the end for those that were."""
        self.alike = True
        """Since this was set, every forward had the shapes and states of those that the ledger counted, as far as that is looked at."""
        self.on_settled: Callable[[int], None] | None = None
        """Called with the bytes that moved and were not freed, when the backward of the instrumented step begins."""

    def settle(self, _: object = None) -> None:
        """A backward begins. (A hook on gradients.)"""
        unfreed = self.ledger.settle()
        if unfreed is not None and self.on_settled is not None:
            self.on_settled(unfreed)

    def complete(self) -> None:
        """The instrumented step is over."""
        callback, self.on_complete = self.on_complete, None
        if callback is not None:
            callback()

    def end(self) -> None:
        """The plan is taken back. A block that never ran with gradients (a frozen teacher) does not hide what the others showed."""
        self.ended = True
        if self.ledger.rows():
            self.complete()
        if self.engines is not None:
            self.engines.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        return self  # a copied model (EMA, a target network) reports where the original does


def foreign_hooks() -> str | None:
    """Name of the saved-tensor hooks that are open in this thread, or None."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)  # stubs say it is never None
    if hooks is None:
        return None
    pack = hooks[0]
    return f"{getattr(pack, '__module__', '?')}.{getattr(pack, '__qualname__', repr(pack))}"


def _checkpoints(module: nn.Module) -> bool:
    """Whether a Hugging Face layer checkpoints itself. (A failing `getattr` of a module costs the host 8 µs: not where it has no such switch.)"""
    name = "gradient_checkpointing"
    return (name in module.__dict__ or hasattr(type(module), name)) and bool(getattr(module, name)) and module.training


class Takeover:
    """The callable that stands in for one instance's `forward`."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._run = run
        self._attribute = "forward"
        self._replaced: Any = None

    def install(self) -> None:
        """Put this object in the place of the module's forward (inside an accelerate hook, if there is one)."""
        module = self.module
        self._attribute = "_old_forward" if "_old_forward" in module.__dict__ and hasattr(module, "_hf_hook") else "forward"
        self._replaced = module.__dict__.get(self._attribute)
        module.__dict__[self._attribute] = self

    def remove(self) -> None:
        """Put back what was there."""
        module = self._module()
        if module is None or module.__dict__.get(self._attribute) is not self:
            return
        if self._replaced is None:
            del module.__dict__[self._attribute]
        else:
            module.__dict__[self._attribute] = self._replaced

    @property
    def module(self) -> nn.Module:
        """The module whose forward is replaced."""
        module = self._module()
        if module is None:
            raise RuntimeError("the module of this forward is gone; call the module, not a saved reference to its forward")
        return module

    def untouched(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The forward that was replaced."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _rebound(self, module: nn.Module) -> Takeover:
        clone = type(self).__new__(type(self))
        clone.__dict__.update(self.__dict__)
        clone._module = weakref.ref(module)
        return clone

    def __deepcopy__(self, memo: dict[int, Any]) -> Takeover:
        # While a module is being copied its copy is in the memo already; a takeover copied on its own stays on its module.
        clone = self._rebound(memo.get(id(self.module), self.module))
        clone._replaced = copy.deepcopy(self._replaced, memo)  # bound to the module: the copy's must be bound to the copy
        return clone

    def __reduce__(self) -> Any:
        # A pickled model is an untouched one: it loads where lightning_gdn is not installed. (Class attribute: `module` is half built then.)
        return getattr, (self.module, "forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{type(self).__name__} is abstract")


class _Known:
    """What a block has learned of calls in one state."""

    __slots__ = ("watch", "calls", "nothing")

    def __init__(self, watch: frozenset[str]) -> None:
        self.watch, self.calls = watch, 0  # the regions whose saved tensors matter, and the calls that this has served
        self.nothing: Nothing | None = None  # of the last call whose offers were seen, if nothing of it moved


class PartTakeover(Takeover):
    """Mixer or MLP of a taken-over block: runs region by region if its block's tape is open, else as the class does."""

    @_runs_eagerly  # also here: a compiled part (`layer.mlp.compile()`) is compiled on its own, though its block is not
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, tape = self.module, active_tape()
        if tape is None:
            return self.untouched(module, *args, **kwargs)
        return self._run(module, tape, *args, **kwargs)


class BlockTakeover(Takeover):
    """A block: opens the tape around the adapter's forward."""

    def __init__(self, module: nn.Module, adapter: Adapter, plan: BlockPlan, index: int, continues: bool, session: Session, remaining: int) -> None:
        super().__init__(module, adapter.block_forward)
        self.name, self.session = plan.name, session
        self._adapter, self._index = adapter, index
        self._remaining = remaining  # blocks from this one on that may move something
        self._modes = {region: mode for region, mode in plan.modes if mode not in (Mode.KEEP, Mode.OFFLOAD)}
        self._continues, self._carry = continues, plan.carry  # whether the block before hands its output on, whether this one does
        self._moving = Moving.of(plan.moves, session.engines.config) if session.engines is not None else None
        self._weights: set[tuple[tuple[int, ...], torch.dtype]] | None = None
        self._known: dict[tuple[Any, ...], _Known] = {}  # by state
        self._counted: tuple[Any, ...] | None = None  # the state of the call that the ledger counted
        self._counted_weights: tuple[Any, ...] | None = None

    def _rebound(self, module: nn.Module) -> Takeover:
        clone = super()._rebound(module)
        assert isinstance(clone, BlockTakeover)
        clone._known = {}
        return clone

    @_runs_eagerly
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, session = self.module, self.session
        x: Tensor = args[0] if args else kwargs["hidden_states"]
        if session.ended or not torch.is_grad_enabled():
            return self._as_it_is(module, x.device, args, kwargs)
        if session.engines is None:
            return self._with_grad(module, x, None, args, kwargs)
        engine = session.engines.running_on(x.device)
        if engine.at_rest and not session.ledger.counts_next(self.name):  # nothing moves any more: as without offload
            if self._counted is not None and self._counted[:4] != (x.shape, x.dtype, module.training, x.requires_grad):
                session.alike = False
            return self._with_grad(module, x, None, args, kwargs)
        if self._moving is not None and not self._may_run(module):
            out = self._as_it_is(module, x.device, args, kwargs)
            engine.passed_by(self._index, session.engines.count)
            return out
        with engine.block(self._index, session.engines.count, self._remaining) as block:
            out = self._with_grad(module, x, block, args, kwargs)
        if out.requires_grad:
            out.register_hook(block.backward)
            if not session.ledger.settled:
                out.register_hook(session.settle)
        return out

    def _with_grad(self, module: nn.Module, x: Tensor, block: Block | None, args: Any, kwargs: Any) -> Any:
        session = self.session
        moving = self._moving if block is not None else None
        probe = session.ledger.probe(self.name, module) if session.ledger.pending else None
        if not self._modes and moving is None and (probe is None or self._other_recompute(module) is not None):
            return self._as_it_is(module, x.device, args, kwargs)
        if not self._may_run(module):
            return self._as_it_is(module, x.device, args, kwargs)
        handed_on: Carry | None = x.__dict__.pop(_CARRY, None) if self._continues else None
        if probe is not None:
            session.ledger.kernels.update(self._adapter.kernels(module, x.device, session.kernels))
        mover, known, state = None, None, (x.shape, x.dtype, module.training, x.requires_grad)
        if moving is not None and block is not None:
            state = self._state(module, x, moving.min_bytes, args, kwargs)
            known = self._recall(state)
            nothing = known.nothing if known is not None and probe is None else None
            if nothing is None or not block.repeats(nothing):
                watch = known.watch if known is not None else None
                mover = Mover(moving, block, module, (args, kwargs), x, self._casts(module, x.device), watch)
        if probe is not None:
            self._counted, self._counted_weights = state, state_of(module)
        elif self._counted is None or state != self._counted[: len(state)]:
            session.alike = False
        if mover is None and probe is None and not self._modes:  # it would move nothing
            return self._as_it_is(module, x.device, args, kwargs)
        with Tape(self._modes, x.device, probe, handed_on, session.kernels, mover) as tape:
            out = self._run(module, tape, *args, **kwargs)
            carry = tape.carry(out) if self._carry else None
            if mover is not None:
                mover.returns(out)
        if mover is not None and block is not None:
            if mover.learned is not None:
                known = self._known[state] = _Known(mover.learned)
            if known is not None:
                known.nothing = block.nothing
        if carry is not None:
            setattr(out, _CARRY, carry)
        if probe is not None and session.ledger.complete:
            session.complete()
        return out

    def _state(self, module: nn.Module, x: Tensor, least: int, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """What decides which tensors a call of this block saves, as far as it is cheap to see."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        given = layout_of(args, least), tuple((name, layout_of(value, least)) for name, value in kwargs.items() if value is not None)
        return x.shape, x.dtype, module.training, x.requires_grad, x.stride(), x.grad_fn is None, autocast, state_of(module), given

    def same_weights(self) -> bool:
        """Whether the weights that train, and their dtypes, are those of the call that the ledger counted. Where nothing moves no call looks at
        them, since that would cost each one a walk through the block."""
        module = self._module()
        return module is None or self._counted_weights is None or self._counted_weights == state_of(module)

    def _recall(self, state: tuple[Any, ...]) -> _Known | None:
        """What this block knows of the state. None: to be learned from a call whose hooks see every region, as in a state that is new, and now
        and then in every one. What a state does not show (an attribute that a forward reads) may be overlooked in between: an alias costs memory
        then, and a block that moves nothing counts what it did before. No gradient depends on it."""
        known = self._known.get(state)
        if known is None or known.calls >= RELEARN:
            if len(self._known) >= STATES:
                self._known.clear()
            return None
        known.calls += 1
        return known

    def _casts(self, module: nn.Module, device: torch.device) -> set[tuple[tuple[int, ...], torch.dtype]] | None:
        """Shapes and dtypes of weights, where autocast may copy them."""
        if not torch.is_autocast_enabled(device.type):
            return None
        if self._weights is None:
            self._weights = {(tuple(weight.shape), weight.dtype) for weight in module.parameters()}
        return self._weights

    def _as_it_is(self, module: nn.Module, device: torch.device, args: Any, kwargs: Any) -> Any:
        if self._adapter.own_forward_runs(module, device, self.session.kernels):
            return self.untouched(module, *args, **kwargs)
        with Tape({}, device, kernels=self.session.kernels) as tape:  # nothing in it opens hooks
            return self._run(module, tape, *args, **kwargs)

    def _other_recompute(self, module: nn.Module) -> str | None:
        """What else recomputes or moves this block's saved tensors, or None."""
        if _checkpoints(module):
            return "Hugging Face gradient checkpointing"
        return foreign_hooks()

    def _may_run(self, module: nn.Module) -> bool:
        other = self._other_recompute(module)
        if other is None:
            return True
        if _checkpoints(module):
            raise RuntimeError(
                f"block {self.name!r}: {other} was switched on after the plan was applied; every region would be replayed inside its recompute. "
                "Call model.gradient_checkpointing_disable(), or use recompute=['full'] instead of it."
            )
        if self.session.on_foreign_hooks == "bypass":
            return False
        raise RuntimeError(
            f"block {self.name!r}: other saved-tensor hooks are open around it: {other}. Only the innermost hooks of PyTorch fire, so the plan "
            "would defeat them. Leave that context (torch.utils.checkpoint, save_on_cpu, ...) around taken-over blocks, or pass "
            'on_foreign_hooks="bypass" to let it win: blocks called inside it then run untouched.'
        )
