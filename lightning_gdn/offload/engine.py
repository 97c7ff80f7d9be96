"""The engine: which storage moves when. Forward offers storages block by block, backward fetches them, reloads run one block ahead.

Every forward pass has a list of its own, of weak references to its live tickets; that list, not an earlier step, says what to reload
next. So shapes may change in any step, evaluation may come first, several forwards may precede a backward, and an abandoned forward
vanishes with its tickets.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..offload_config import OffloadConfig
from .budget import AutoFraction
from .copies import CopyBackend, Stream, storage_of
from .handles import Block, HostCopy, Nothing, Pass
from .pool import Pool
from .statistics import Recorder, StepStatistics, TimelineEntry
from .transfers import Copy, Transfers

__all__ = ["Engine"]

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Engine:
    """Offload of one device. All methods may be called from any thread.

    Args:
        backend: `CudaBackend(device)`, or `SimulatedBackend()` on a CPU.
        config: what to move.
        timing: take times by events (a few more of them per block and step).
        reduce_min: for `fraction="auto"` on several ranks, the smallest of a number over them; called in `step_statistics`.

    Raises:
        ValueError: `fraction="auto"` without timing.
    """

    def __init__(
        self, backend: CopyBackend, config: OffloadConfig, *, timing: bool = True, reduce_min: Callable[[float], float] | None = None
    ) -> None:
        if config.fraction == "auto" and not timing:
            raise ValueError("offload: fraction='auto' measures copies and compute, got timing=False; give a number or leave timing on")
        self.config, self._backend = config, backend
        self.auto = (AutoFraction(reduce_min) if reduce_min else AutoFraction()) if config.fraction == "auto" else None
        self.fraction = 1.0 if self.auto is not None else float(config.fraction)
        self.at_rest = self.fraction == 0
        """Nothing moves from here on: the share was given as 0, or `auto` has settled on it. Callers may leave the engine out."""
        self.pool = Pool(backend, config.max_pinned_bytes)
        self.timeline: list[TimelineEntry] | None = None
        """Set it to a list to have every enqueued copy and every use written down."""
        self._recorder = Recorder(backend, timing=timing)
        self._transfers = Transfers(backend, self.pool, self._recorder)
        self._lock = threading.Lock()
        self._dead: deque[Copy] = deque()  # of tickets that nobody holds any more
        self._threads = threading.local()  # `forward`: the pass this thread is in
        self._ending: dict[int, list[weakref.ref[HostCopy]]] = {}  # backward -> tickets that may have a reload on the device
        self._passes = self._tickets = 0

    def block(self, index: int, count: int, remaining: int | None = None) -> Block:
        """Context of one call of block `index` of `count` in forward; from it on `remaining` blocks may offer something that moves (None: all but
        the resident ones). A forward pass begins where the index does not rise, and where the backward of the pass before has begun."""
        since = time.perf_counter_ns()
        with self._lock:
            self._collect()
            forward: Pass | None = getattr(self._threads, "forward", None)
            if forward is None or index <= forward.last or forward.backward_began:
                if forward is not None:
                    self._release(forward, forward.last, all_of_them=True)  # it ended early
                self._passes += 1
                self._recorder.add("forwards")
                forward = self._threads.forward = Pass(self._passes, self.fraction)
            forward.last = index
            return Block(self, forward, index, count, remaining, since)

    def passed_by(self, index: int, count: int) -> None:
        """Block `index` of `count` ran without `block` (other hooks are open around it): its place in the pass counts all the same."""
        with self._lock:
            forward: Pass | None = getattr(self._threads, "forward", None)
            if forward is not None and index > forward.last and not forward.backward_began:
                forward.last = index
                self._advance(forward, index, last=index >= count - 1)

    def end_pass(self) -> None:
        """The blocks of this thread's pass that come next run on another device."""
        with self._lock:
            forward: Pass | None = getattr(self._threads, "forward", None)
            if forward is not None and not forward.backward_began:
                self._advance(forward, forward.last, last=True)

    def step_statistics(self) -> StepStatistics:
        """Snapshot of everything since the last call, and reset. Call it once per optimizer step, on every rank: with `fraction="auto"`
        it also decides the next step's fraction, together with the other ranks."""
        with self._lock:
            self._collect()
            for task in list(self._ending):  # left by a backward that raised
                self._end(task)
            statistics = self._recorder.snapshot(self.pool, self.fraction)
        if self.auto is not None:
            before, self.fraction = self.fraction, self.auto.observe(statistics)
            self.at_rest = self.auto.settled and self.fraction == 0
            # Pinning anew takes time: for the large step down when it settles, not for small ones. At rest buffers may come back late.
            if self.fraction < 0.9 * before or (self.at_rest and self.pool.held):
                self.close()  # the smaller share pins what it needs, once; what the larger one needed is the machine's again
        return statistics

    @property
    def skipped(self) -> dict[str, int]:
        """Bytes that stayed on the device since the last `step_statistics`, by reason; `pool full` is `max_pinned_gib`."""
        full = self._recorder.counts.get("fallback_bytes", 0)
        return {**self._recorder.skipped, **({"pool full": full} if full else {})}

    @property
    def largest_small(self) -> int:
        """As `StepStatistics.largest_small`, since the last `step_statistics`."""
        return self._recorder.largest_small

    def close(self) -> None:
        """Give idle pinned memory back to the machine. The engine stays usable; buffers of live tickets stay theirs."""
        with self._lock:
            self._collect()
            self.pool.close()

    def collect(self) -> None:
        """Take back what dead tickets held. Every other call does this first; call it before reading `pool`, or after catching an OOM."""
        with self._lock:
            self._collect()

    def _collect(self) -> None:
        while self._dead:
            self._transfers.retire(self._dead.popleft())

    def _enter(self, block: Block) -> None:
        with self._lock:
            self._refuse_capture()
            if block._pass.started is None:
                block._pass.started = self._recorder.mark(self._backend.current())

    def _leave(self, block: Block, *, failed: bool) -> None:
        since = time.perf_counter_ns()
        with self._lock:
            forward, last = block._pass, block.index >= block._count - 1
            block._seen.clear()
            if block._shelf:
                forward.shelves.append((block.index, block._shelf))
                forward.outgoing.append((block.index + self.config.release_blocks * forward.budget.blocks_per_copy, block._moving))
            block._moving = []
            if block._repeated is not None and not failed:
                self._repeat(block, block._repeated)
            self._advance(forward, block.index, last=last or failed, timed=not failed)
            self._recorder.host("out", time.perf_counter_ns() - since)

    def _advance(self, forward: Pass, ended: int, *, last: bool, timed: bool = True) -> None:
        self._release(forward, ended, all_of_them=last)
        if last and timed and not forward.ended:
            forward.ended = True
            self._recorder.span("forward", forward.started, self._recorder.mark(self._backend.current()), forward.eligible)

    def _begin_work(self, block: Block, spent_ns: int) -> None:
        with self._lock:
            self._collect()  # waits for copies of abandoned graphs are no host work
            self._recorder.host("out", spent_ns)
            block._work = self._recorder.before_work(block.index + block._pass.number, self._backend.current())

    def _end_work(self, block: Block) -> None:
        begun, block._work = block._work, None
        if begun is not None:
            with self._lock:
                self._recorder.host("out", self._recorder.after_work("out", begun, self._backend.current()))

    def _release(self, forward: Pass, ended: int, *, all_of_them: bool = False) -> None:
        """Block `ended` has: let the sources go that were held until then."""
        copies: list[Copy] = []
        while forward.outgoing and (all_of_them or forward.outgoing[0][0] <= ended):
            copies += forward.outgoing.popleft()[1]
        self._transfers.let_go(copies)

    def _offer(self, block: Block, offers: Sequence[tuple[Tensor, int]]) -> list[HostCopy | None]:
        if block._work is not None:  # the caller's work began before this, and ends after it
            return self._offered(block, offers)
        self._begin_work(block, 0)
        try:
            return self._offered(block, offers)
        finally:
            self._end_work(block)

    def _offered(self, block: Block, offers: Sequence[tuple[Tensor, int]]) -> list[HostCopy | None]:
        with self._lock:
            self._collect()
            moving = list[HostCopy]()
            try:
                answers = [self._answer(block, source, handles, moving) for source, handles in offers]
                if moving:
                    self._transfers.out([ticket._copy for ticket in moving])
            except BaseException:
                self._transfers.cancel(ticket._copy for ticket in moving)
                block._seen = {key: seen for key, seen in block._seen.items() if seen[1] is None or seen[1]() not in moving}
                raise
            for ticket in moving:
                block._shelf.append(weakref.ref(ticket))
                block._moving.append(ticket._copy)
                self._note("out", ticket, block.index)
            return answers

    def _answer(self, block: Block, source: Tensor, handles: int, moving: list[HostCopy]) -> HostCopy | None:
        """The ticket of one offer; a new one is in `moving` as well."""
        storage = storage_of(source, self._backend.device)
        if storage is None:
            self._skip(block, "ineligible", source.numel() * source.element_size() if source.layout is torch.strided else 0)
            return None
        seen = block._seen.get(storage._cdata)
        if seen is not None:
            if seen[1] is None:
                return None
            ticket = seen[1]()
            if ticket is not None:
                ticket._copy.handles += handles
                return ticket
        ticket = self._take(block, source, storage, handles) if self._admit(block, storage.nbytes()) else None
        if ticket is not None:
            moving.append(ticket)
        # The weak reference to the storage pins its identity: were it to die inside the block, its address could come back as another one.
        block._seen[storage._cdata] = StorageWeakRef(storage), None if ticket is None else weakref.ref(ticket)
        return ticket

    def _admit(self, block: Block, nbytes: int) -> bool:
        counts = block._counts
        if nbytes < self.config.min_bytes:
            self._skip(block, "min_bytes", nbytes)
            if not block._resident:
                counts.largest_small = max(counts.largest_small, nbytes)
                self._recorder.largest_small = max(self._recorder.largest_small, nbytes)
        elif block._resident:
            self._skip(block, "resident", nbytes)
        else:
            counts.eligible += nbytes
            self._recorder.add("eligible_bytes", nbytes)
            block._pass.eligible += nbytes
            if block._pass.budget.admit(nbytes):
                block._admitted = True
                return True
            self._skip(block, "budget", nbytes)
        return False

    def _skip(self, block: Block, reason: str, nbytes: int) -> None:
        self._recorder.skip(reason, nbytes)
        block._counts.skipped[reason] = block._counts.skipped.get(reason, 0) + nbytes

    def _repeat(self, block: Block, before: Nothing) -> None:
        """Count what that call counted, which moved nothing."""
        counts, recorder = before.counts, self._recorder
        recorder.add("eligible_bytes", counts.eligible)
        block._pass.eligible += counts.eligible
        block._pass.budget.leave_out(counts.eligible)
        recorder.largest_small = max(recorder.largest_small, counts.largest_small)
        for reason, nbytes in counts.skipped.items():
            recorder.skip(reason, nbytes)

    def _take(self, block: Block, source: Tensor, storage: torch.UntypedStorage, handles: int) -> HostCopy | None:
        copy = self._transfers.take(source, storage, handles)
        if copy is None:
            self._recorder.add("fallbacks")
            self._recorder.add("fallback_bytes", storage.nbytes())
            return None
        self._tickets += 1
        return HostCopy(self, block, copy, self._tickets)

    def _fetch(self, ticket: HostCopy) -> torch.UntypedStorage:
        since = time.perf_counter_ns()
        with self._lock:
            self._collect()
            self._refuse_capture()
            task, copy, index = _graph_task(), ticket._copy, ticket._block.index
            self._prefetch(ticket._block, task)
            self._begin(ticket, task)
            arrived = copy.arrived
            storage = self._transfers.serve(copy)
            if copy.arrived is not arrived:
                self._note("in", ticket, index)
            self._note("use", ticket, index)
            self._recorder.host("in", time.perf_counter_ns() - since)
            return storage

    def _turn(self, block: Block) -> None:
        since = time.perf_counter_ns()
        with self._lock:
            self._collect()
            self._prefetch(block, _graph_task())
            self._recorder.host("in", time.perf_counter_ns() - since)

    def _prefetch(self, block: Block, task: int) -> None:
        """Once per backward and block: enqueue what is left of its own reloads and those of the nearest blocks before it, last first."""
        forward = block._pass
        if forward.task == task and forward.reached <= block.index:
            return
        if forward.task == task:
            self._forget(forward, block.index, forward.reached)
        stream = self._backend.current()
        mark = self._recorder.mark(stream)
        if forward.task == task:
            self._recorder.span("backward", forward.turned, mark)
        forward.task, forward.reached, forward.turned = task, block.index, mark
        begun = self._recorder.before_work(block.index + forward.number, stream)
        if self._ahead(block, task):
            self._recorder.after_work("in", begun, stream)

    def _ahead(self, block: Block, task: int) -> bool:
        """Enqueue reloads, see `_prefetch`; whether there were any."""
        forward, found = block._pass, False
        wanted = self.config.prefetch_blocks
        for index, shelf in reversed(forward.shelves):
            live = [ticket for reference in shelf if (ticket := reference()) is not None] if index <= block.index else []
            missing = [ticket for ticket in reversed(live) if self._is_missing(ticket._copy, task)]
            for stream, group in itertools.groupby(missing, key=lambda ticket: ticket._copy.stream):
                found = True
                if not self._reload(list(group), stream, block.index, task):
                    return found
            wanted -= bool(live) and index < block.index
            if not wanted:
                break
        return found

    @staticmethod
    def _is_missing(copy: Copy, task: int) -> bool:
        return copy.source is None and copy.device is None and not (copy.task == task and copy.left <= 0)

    def _reload(self, tickets: Sequence[HostCopy], stream: Stream, during: int, task: int) -> bool:
        """Reload ahead what finds room on the device. False: not all of it did, which is no error yet."""
        try:
            self._transfers.back([ticket._copy for ticket in tickets], stream, late=tickets[0]._block.index == during)
        except torch.OutOfMemoryError:  # not needed yet; what this block's backward frees may be enough
            self._recorder.add("prefetch_oom")
        for ticket in tickets:
            if ticket._copy.device is not None:
                self._begin(ticket, task)
                self._note("in", ticket, during)
        return all(ticket._copy.device is not None for ticket in tickets)

    def _forget(self, forward: Pass, below: int, reached: int) -> None:
        """Reloads of blocks whose backward is over, where a handle was never asked for (a frozen weight's input): let them go now."""
        for index, shelf in forward.shelves:
            if below < index <= reached:
                for reference in shelf:
                    ticket = reference()
                    if ticket is not None:
                        self._transfers.drop(ticket._copy)

    def _begin(self, ticket: HostCopy, task: int) -> None:
        """First touch of a ticket in a backward: its handles are all to be served, and what is left goes when the backward ends."""
        copy = ticket._copy
        if copy.task == task:
            return
        copy.task, copy.left = task, copy.handles
        if task < 0:  # fetched outside a backward, by a debugger or a test
            return
        if task not in self._ending:
            self._ending[task] = []
            _at_end_of_backward(lambda: self._ended(task))
        self._ending[task].append(weakref.ref(ticket))

    def _ended(self, task: int) -> None:
        with self._lock:
            self._collect()
            self._end(task)

    def _end(self, task: int) -> None:
        for reference in self._ending.pop(task, ()):
            ticket = reference()
            if ticket is not None and ticket._copy.task == task:
                self._transfers.drop(ticket._copy)

    def _refuse_capture(self) -> None:
        if self._backend.capturing():
            raise RuntimeError(
                "offload: the current stream is being captured into a CUDA graph, got a training step inside torch.cuda.graph, expected an eager "
                "one: host buffers and waits differ from step to step and cannot be replayed. Take the blocks out of the graph or switch offload off"
            )

    def _note(self, kind: str, ticket: HostCopy, during: int) -> None:
        if self.timeline is not None:
            block, copy = ticket._block, ticket._copy
            event = self._recorder.mark(self._backend.current()) if kind == "use" else copy.out if kind == "out" else copy.arrived
            self.timeline.append(
                TimelineEntry(kind=kind, forward=block._pass.number, block=block.index, during=during, ticket=ticket.number, ready=event)
            )
