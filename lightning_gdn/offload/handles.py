"""What the engine hands out: the context of a block, the ticket of a storage, and the forward pass that they belong to."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .budget import Budget
from .copies import Event, view_of
from .transfers import Copy

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Block", "HostCopy", "Nothing", "Pass"]


class HostCopy:
    """Ticket of one storage that moved. Whoever holds it can have the storage back; when the last holder lets it go, the host buffer returns."""

    __slots__ = ("_engine", "_block", "_copy", "number", "__weakref__")

    def __init__(self, engine: Engine, block: Block, copy: Copy, number: int) -> None:
        self._engine, self._block, self._copy, self.number = engine, block, copy, number

    def __del__(self) -> None:
        self._engine._dead.append(self._copy)  # only an append: this may run anywhere, also under the engine's lock

    @property
    def nbytes(self) -> int:
        """Size of the storage."""
        return self._copy.nbytes

    def fetch(self) -> torch.UntypedStorage:
        """The storage on the device, for one handle, on the stream that is current in this thread. Rebuild views with `view_of`.

        Call it once per handle and backward; the handles of one backward share one reload. A further call, or a second backward over the same
        graph, reloads again.

        Raises:
            RuntimeError: the source was edited in place while it was being copied, or the stream is being captured into a CUDA graph.
            torch.OutOfMemoryError: no room for the reload; a later fetch can succeed.
        """
        return self._engine._fetch(self)

    def view(self, size: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> Tensor:
        """`fetch`, and a view of the storage with exactly this size, stride and offset."""
        storage = self.fetch()
        since = time.perf_counter_ns()
        view = view_of(storage, size, stride, offset, dtype)
        self._engine._recorder.host("in", time.perf_counter_ns() - since)
        return view


class Pass:
    """One forward pass: what it moved, block by block."""

    __slots__ = ("number", "shelves", "outgoing", "budget", "last", "task", "reached", "started", "ended", "turned", "eligible", "fraction")

    def __init__(self, number: int, fraction: float) -> None:
        self.fraction = fraction
        self.number, self.budget, self.last, self.eligible = number, Budget(fraction), -1, 0
        self.shelves: list[tuple[int, list[weakref.ref[HostCopy]]]] = []
        self.outgoing: deque[tuple[int, list[Copy]]] = deque()  # sources that are still held, and the block that lets them go at its end
        self.task, self.reached = -2, -1  # the backward that prefetched last, and the block it had reached
        self.started: Event | None = None
        self.ended = False
        self.turned: Event | None = None

    @property
    def backward_began(self) -> bool:
        """A block that runs now belongs to another pass: reentrant checkpoints run some in backward."""
        return self.task != -2


BY_SIZE = {"budget", "min_bytes", "resident"}
"""Reasons to stay that depend on sizes and on the place in the pass alone. (No region that moves has sizes that depend on the data.)"""


@dataclass(slots=True)
class _Counts:
    """Bytes of one call of a block that stayed on the device."""

    eligible: int = 0
    largest_small: int = 0
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Nothing:
    """A call of a block in which nothing moved: what that depended on beside its offers, and what it counted."""

    key: tuple[float, ...]
    counts: _Counts


class Block:
    """One call of one block in forward; a context manager around it. It holds no tensor, so a graph may hold it.

    Entering it raises `RuntimeError` while the current stream is being captured into a CUDA graph.
    """

    __slots__ = (
        "index",
        "_count",
        "_engine",
        "_pass",
        "_shelf",
        "_moving",
        "_seen",
        "_since",
        "_work",
        "_resident",
        "_key",
        "_counts",
        "_admitted",
        "_repeated",
    )

    def __init__(self, engine: Engine, forward: Pass, index: int, count: int, remaining: int | None, since: int) -> None:
        self.index, self._count, self._engine, self._pass = index, count, engine, forward
        self._shelf: list[weakref.ref[HostCopy]] = []
        self._moving: list[Copy] = []
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[HostCopy] | None]] = {}
        self._since = since  # when the engine was asked for it
        self._work: tuple[Event | None, int] | None = None
        last = count - engine.config.resident_last_blocks
        self._resident = index >= last
        self._key = (forward.fraction, float(self._resident), *forward.budget.enter(max(0, last - index) if remaining is None else remaining))
        self._repeated: Nothing | None = None
        self._counts = _Counts()
        self._admitted = False  # something moved, or would have if the pool had not been full

    def __enter__(self) -> Block:
        self._engine._enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine._leave(self, failed=exc[0] is not None)

    def offer(self, source: Tensor, handles: int = 1) -> HostCopy | None:
        """Move the whole storage under `source` to the host, if it may move. Call it inside the block's context.

        The copy is enqueued behind what the current stream has been given. The engine keeps `source` (detached, please: a graph would be
        kept with it) until the copy is done; the caller drops it at once. The same storage offered again gives the same ticket.

        Args:
            source: any tensor over the storage.
            handles: how many saved tensors will fetch it in one backward.

        Returns:
            The ticket; None if the storage stays on the device (counted by reason: size, resident block, budget, pool full, cannot move).
        """
        return self._engine._offer(self, [(source, handles)])[0]

    def offer_all(self, offers: Sequence[tuple[Tensor, int]]) -> list[HostCopy | None]:
        """`offer` of several sources with their handles. Their copies wait for the device together and are done together, which costs the
        host little more than one. Answers are in the order of the offers."""
        return self._engine._offer(self, offers)

    def skip(self, reason: str, nbytes: int) -> None:
        """Count a storage that the caller does not offer, so that the step's statistics say why."""
        with self._engine._lock:
            self._engine._skip(self, reason, nbytes)

    @property
    def nothing(self) -> Nothing | None:
        """After everything was offered: if nothing moved and only sizes decided that, what `repeats` needs to know in a later pass."""
        skipped = self._counts.skipped
        return Nothing(self._key, self._counts) if skipped and not self._admitted and skipped.keys() <= BY_SIZE else None

    def repeats(self, before: Nothing) -> bool:
        """Whether this call, if it offers what that one did, moves nothing either. Then offer nothing: where the
        block does not raise it counts as that one did."""
        if before.key != self._key:
            return False
        self._repeated = before
        self.prepared()
        return True

    def prepared(self) -> None:
        """All host time since this context was asked for was offload's."""
        self._engine._recorder.host("out", time.perf_counter_ns() - self._since)

    def begin_work(self, spent_ns: int = 0) -> None:
        """From here to `end_work` the host works for offload and nobody enqueues compute; `spent_ns` of such time went before, here and there."""
        self._engine._begin_work(self, spent_ns)

    def end_work(self) -> None:
        """See `begin_work`."""
        self._engine._end_work(self)

    def backward(self, _: object = None) -> None:
        """This block's backward begins: enqueue the reloads of the blocks before it. `fetch` calls it too; a hook on the gradient of the
        block's output calls it for blocks that moved nothing themselves. Calls after the first of a backward do nothing."""
        self._engine._turn(self)
