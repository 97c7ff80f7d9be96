"""What moves of one block and what must not: storages, their aliases, exact layouts, versions, and figures that add up."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gdn.apply import FreesNothingWarning, apply_plan, instrument
from lightning_gdn.labels import select
from lightning_gdn.ledger import BlockProbe, Ledger
from lightning_gdn.moving import Engines, Mover, Moving
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.simulated import SimulatedBackend
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.region_fn import RegionFn
from lightning_gdn.regions import Mode, Moves
from lightning_gdn.tape import Tape
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import moving, nothing_left

CPU = torch.device("cpu")
N = 32
CONFIG = OffloadConfig(labels=("mlp",), min_bytes=0, resident_last_blocks=0, release_blocks=0)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.register_buffer("table", torch.randn(N, N))


class Saves(torch.autograd.Function):
    """Saves what it is given, as it is, and remembers in backward what came back."""

    back: ClassVar[list[tuple[Any, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # each time they are asked for they are unpacked
        Saves.back += [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.clone()) for t in tensors]
        return grad, *[None for _ in tensors]


@pytest.fixture(autouse=True)
def _forget() -> None:
    Saves.back.clear()


def region(name: str, call: Callable[..., Any]) -> RegionFn:
    return RegionFn(name=name, call=call)


class Bench:
    """One engine, and blocks on it."""

    def __init__(self, **config: Any) -> None:
        self.config = OffloadConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}, **config})
        self.backend = SimulatedBackend()
        self.engine = Engine(self.backend, self.config)
        self.owner = Owner()
        self.ledger = Ledger(["block"])

    @contextmanager
    def block(
        self,
        *moves: tuple[str, Moves],
        x: Tensor,
        caller: tuple[Any, ...] = (),
        modes: dict[str, Mode] | None = None,
        probe: bool = False,
        weights: set[Any] | None = None,
    ) -> Iterator[tuple[Tape, Mover]]:
        made = Moving.of(moves, self.config)
        assert made is not None
        with self.engine.block(0, 1) as block:
            mover = Mover(made, block, self.owner, (x, *caller), x, weights)
            with Tape(modes or {}, CPU, BlockProbe(self.ledger, "block", self.owner) if probe else None, mover=mover) as tape:
                yield tape, mover

    def end(self) -> Any:
        statistics = self.engine.step_statistics()
        assert self.backend.faults == []
        return statistics


def leaf() -> Tensor:
    return torch.randn(N, N, requires_grad=True)


def test_a_storage_moves_once_with_every_alias_and_comes_back_with_exact_layouts() -> None:
    """Saved by the region that the label names and, as other views, by a kept region before it and one after it."""
    bench, x = Bench(), leaf()
    made: list[StorageWeakRef] = []

    def make(owner: Owner, x: Tensor) -> tuple[Tensor, Tensor]:
        base = torch.arange(N * N, dtype=torch.float32).view(N, N)
        made.append(StorageWeakRef(base.untyped_storage()))
        return Saves.apply(x, base.t()), base

    views = (lambda b: b.t(), lambda b: b[3:7, 1::2], lambda b: b[5], lambda b: b.view(torch.int32), lambda b: b.expand(2, N, N)[0].t()[4:])
    with bench.block(("act", Moves.SAVED), x=x) as (tape, mover):
        y, base = tape.run(region("gate_up", make), bench.owner, x)
        y = tape.run(region("act", lambda owner, y, b: Saves.apply(y, views[0](b), views[1](b))), bench.owner, y, base)
        y = tape.run(region("down", lambda owner, y, b: Saves.apply(y, *(view(b) for view in views[2:]))), bench.owner, y, base)
        mover.returns(y)
        del base
    assert made[0].expired(), "bytes moved are bytes freed"
    y.sum().backward()
    want = torch.arange(N * N, dtype=torch.float32).view(N, N)
    wanted = [*(view(want) for view in views[2:]), views[0](want), views[1](want), want.t()]
    assert len(Saves.back) == len(wanted)
    for (shape, stride, offset, dtype, value), exact in zip(Saves.back, wanted, strict=True):
        assert (shape, stride, offset, dtype) == (exact.shape, exact.stride(), exact.storage_offset(), exact.dtype)
        assert torch.equal(value, exact)
    del y
    statistics = bench.end()
    assert (statistics.copies_out, statistics.copies_in, statistics.bytes_out) == (1, 1, 4 * N * N)
    assert statistics.buffers_in_use == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64, torch.bool, torch.uint8], ids=str)
def test_storages_are_bytes_so_that_any_dtype_returns(dtype: torch.dtype) -> None:
    bench, x = Bench(), leaf()
    source = torch.randint(0, 2, (N, 2 * N)).to(dtype)
    want = source[:, 1::2].clone().view(torch.uint8)

    def run(owner: Owner, x: Tensor) -> Tensor:
        return Saves.apply(x, source.clone()[:, 1::2])

    with bench.block(("act", Moves.SAVED), x=x) as (tape, _):
        y = tape.run(region("act", run), bench.owner, x)
    y.sum().backward()
    assert torch.equal(Saves.back[0][4].contiguous().view(torch.uint8), want)
    assert Saves.back[0][1] == (2 * N, 2)
    assert bench.end().copies_out == 1


def test_tensors_unpacked_twice_are_reloaded_and_right() -> None:
    bench, x = Bench(), leaf()

    class Twice(Saves):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return grad * ctx.saved_tensors[0] * ctx.saved_tensors[0], None

    with bench.block(("act", Moves.SAVED), x=x) as (tape, _):
        y = tape.run(region("act", lambda owner, x: Twice.apply(x, torch.full((N, N), 3.0))), bench.owner, x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((N, N), 18.0))  # type: ignore[arg-type]
    del y
    statistics = bench.end()
    assert (statistics.copies_out, statistics.copies_in, statistics.buffers_in_use) == (1, 4, 0)


def stays(bench: Bench, reason: str, nbytes: int = 4 * N * N) -> None:
    statistics = bench.end()
    assert statistics.skipped == {reason: nbytes}
    assert (statistics.copies_out, statistics.fallbacks) == (0, 0)


def test_the_blocks_input_stays_unless_the_label_is_for_it() -> None:
    for what, moved, is_leaf in ((("act", Moves.SAVED), 0, False), (("act", Moves.INPUTS), 1, False), (("act", Moves.INPUTS), 0, True)):
        bench, x = Bench(), leaf()
        h = x if is_leaf else x * 2
        fn = region("act", lambda owner, h: h.exp())
        with bench.block(what, x=h, modes={"act": Mode.RECOMPUTE}) as (tape, mover):
            y = tape.run(fn, bench.owner, h)
            mover.returns(y)
            z = tape.run(region("down", lambda owner, y: y * y), bench.owner, y)
        (gradient,) = torch.autograd.grad(z.sum(), x)
        assert torch.equal(gradient, (2 if is_leaf else 4) * h.detach().exp() * h.detach().exp())
        statistics = bench.end()
        assert (statistics.copies_out, statistics.skipped) == (moved, {} if moved else {"held": 4 * N * N})


def test_what_the_caller_passed_and_what_it_gets_stays() -> None:
    mask = torch.rand(N, N)
    for caller in ((mask,), ((torch.ones(1), mask),), ({"attention_mask": [mask]},)):
        bench, x = Bench(), leaf()
        with bench.block(("act", Moves.SAVED), x=x, caller=caller) as (tape, _):
            tape.run(region("act", lambda owner, x: x * mask.t()), bench.owner, x).sum().backward()
            assert x.grad is not None
        bench.end()
        with bench.block(("act", Moves.SAVED), x=x, caller=caller) as (tape, _):
            y = tape.run(region("act", lambda owner, x: x * mask.t()), bench.owner, x)
        stays(bench, "held")
        y.sum().backward()
    bench, x = Bench(), leaf()
    with bench.block(("act", Moves.SAVED), x=x) as (tape, mover):
        y = tape.run(region("act", lambda owner, x: x.exp()), bench.owner, x)
        mover.returns(y)
    stays(bench, "held")
    y.sum().backward()
    assert torch.equal(x.grad, y)  # type: ignore[arg-type]


def test_parameters_buffers_and_their_aliases_never_move() -> None:
    bench, x = Bench(), leaf()

    def run(owner: Any, x: Tensor) -> Tensor:
        x = nn.functional.linear(x, owner.linear.weight.t(), owner.linear.bias)
        return Saves.apply(x * owner.table, owner.linear.weight.detach())

    h = x + 0  # nobody's
    with bench.block(("act", Moves.SAVED), x=x) as (tape, _):
        y = tape.run(region("act", run), bench.owner, h)
    statistics = bench.end()
    # The linear's input moves; the weight, its detached alias and the buffer stay.
    assert statistics.skipped == {"parameter": 2 * 4 * N * N}
    assert statistics.copies_out == 1
    y.sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_autocasts_copies_of_weights_never_move(frozen: bool) -> None:
    bench, x = Bench(), leaf()
    bench.owner.linear.weight.requires_grad_(not frozen)
    weights = {(tuple(p.shape), p.dtype) for p in bench.owner.parameters()}
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        h = x + 0
        x3 = h.unsqueeze(0)
        with bench.block(("act", Moves.SAVED), x=x, weights=weights) as (tape, _):
            y = tape.run(region("act", lambda owner, h: owner.linear(h)), bench.owner, x3)
    statistics = bench.end()
    assert statistics.skipped == {"weight_cast": 2 * N * N}
    assert statistics.bytes_out == (0 if frozen else 2 * N * N), "the input's copy in bf16, which a frozen weight does not need"
    y.float().sum().backward()


def test_an_edit_in_place_is_pytorchs_error_whenever_it_happens() -> None:
    message = "modified by an inplace operation"
    for when in ("in the block", "while the copy is under way"):
        bench, x = Bench(release_blocks=3), leaf()
        kept: list[Tensor] = []

        def run(owner: Owner, x: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(x * 3)
            return Saves.apply(x, kept[0])

        with bench.engine.block(0, 4) as block:
            made = Moving.of([("act", Moves.SAVED)], bench.config)
            assert made is not None
            with Tape({}, CPU, mover=Mover(made, block, bench.owner, (x,), x, None)) as tape:
                y = tape.run(region("act", run), bench.owner, x)
                if when == "in the block":
                    kept[0].mul_(2)
        if when != "in the block":
            kept[0].mul_(2)
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()
        kept.clear()
        del y
        assert bench.end().skipped == ({"edited": 4 * N * N} if when == "in the block" else {})


class Wrapped(Tensor):
    """A subclass, as float8 libraries save them."""


def test_tensor_subclasses_stay_and_are_counted() -> None:
    bench, x = Bench(), leaf()
    with bench.block(("act", Moves.SAVED), x=x) as (tape, _):
        y = tape.run(region("act", lambda owner, x: Saves.apply(x, torch.ones(N, N).as_subclass(Wrapped))), bench.owner, x)
    stays(bench, "ineligible")
    y.sum().backward()
    assert torch.equal(Saves.back[0][4], torch.ones(N, N))


def test_small_storages_of_other_regions_cost_nothing_and_those_of_the_label_are_counted() -> None:
    bench, x = Bench(min_bytes=4 * N * N), leaf()
    with bench.block(("act", Moves.SAVED), x=x) as (tape, _):
        y = tape.run(region("gate_up", lambda owner, x: Saves.apply(x, torch.ones(4))), bench.owner, x)
        y = tape.run(region("act", lambda owner, y: Saves.apply(y, torch.ones(8), torch.ones(N, N))), bench.owner, y)
    statistics = bench.end()
    assert (statistics.skipped, statistics.bytes_out) == ({"min_bytes": 32}, 4 * N * N)
    y.sum().backward()
    assert all(bool((value == 1).all()) for *_, value in Saves.back)


def test_a_small_output_that_a_label_names_is_counted_whoever_saves_it_and_whatever_else_moves() -> None:
    bench, x = Bench(min_bytes=4 * N * N), leaf()
    with bench.block(("in_proj", Moves.OUTPUTS), x=x) as (tape, _):
        small, large = tape.run(region("in_proj", lambda owner, x: (x.sum(1) * 2, x * 2)), bench.owner, x)
        y = tape.run(region("conv", lambda owner, small, large: Saves.apply(large, small, large, torch.ones(3))), bench.owner, small, large)
    statistics = bench.end()
    assert (statistics.skipped, statistics.bytes_out, statistics.largest_small) == ({"min_bytes": 4 * N}, 4 * N * N, 4 * N)
    y.sum().backward()
    assert torch.equal(Saves.back[0][4], x.detach().sum(1) * 2)


def test_what_a_graph_that_died_in_the_block_saved_is_not_moved() -> None:
    bench, x = Bench(), leaf()

    def run(owner: Owner, x: Tensor) -> Tensor:
        Saves.apply(x, torch.ones(N, N))  # nobody uses it
        return Saves.apply(x, torch.ones(N, 2 * N))

    for probe in (True, False):
        with bench.block(("act", Moves.SAVED), x=x, probe=probe) as (tape, _):
            y = tape.run(region("act", run), bench.owner, x)
        y.sum().backward()
        assert bench.end().bytes_out == 8 * N * N, f"instrumented: {probe}"
    rows = bench.ledger.by_region()
    assert (rows["act"].offloaded_bytes, rows["act"].kept_bytes) == (8 * N * N, 4 * N * N)


def test_outputs_move_whoever_saves_them_and_dead_ones_do_not_lend_their_address() -> None:
    bench, x = Bench(), leaf()

    def make(owner: Owner, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x * 3

    def use(owner: Owner, a: Tensor) -> Tensor:
        return a * a

    with bench.block(("in_proj", Moves.OUTPUTS), x=x) as (tape, _):
        a, b = tape.run(region("in_proj", make), bench.owner, x)
        y = tape.run(region("conv", use), bench.owner, a)
        del a, b  # b dies here
        y = tape.run(region("act", lambda owner, y: Saves.apply(y, torch.ones(N, N))), bench.owner, y)
    assert bench.end().bytes_out == 4 * N * N
    y.sum().backward()
    assert torch.equal(x.grad, 8 * x)  # type: ignore[arg-type]


def test_a_recomputed_regions_saved_tensors_are_not_moved_but_what_it_is_replayed_from_is() -> None:
    bench, x = Bench(), leaf()
    h = x + 0
    with bench.block(("norm_out", Moves.SAVED), x=x, modes={"norm_out": Mode.RECOMPUTE}, probe=True) as (tape, _):
        o = tape.run(region("delta_rule", lambda owner, h: h.clone()), bench.owner, h)
        y = tape.run(region("norm_out", lambda owner, o: (o.exp() * 2).sin()), bench.owner, o)
        del o
        y = tape.run(region("out_proj", lambda owner, y: y * y), bench.owner, y)
    rows = bench.ledger.by_region()
    assert rows["norm_out"].moved_bytes == 4 * N * N
    assert rows["norm_out"].offloaded_bytes == rows["norm_out"].replay_input_bytes == 0, "exp saves its output: the input is held for the replay only"
    assert bench.ledger.kept_bytes == 0
    y.sum().backward()
    want = x.detach().requires_grad_()
    z = (want.exp() * 2).sin()
    (z * z).sum().backward()
    assert torch.equal(x.grad, want.grad)  # type: ignore[arg-type]
    assert bench.end().copies_in == 1


def test_times_do_not_pile_up_where_nobody_asks_for_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_gdn.offload import statistics as module

    monkeypatch.setattr(module, "FOLD_SPANS", 20)
    sums = []
    for asked in (True, False):
        bench, x, total = Bench(), leaf(), 0.0
        for _ in range(30):
            with bench.block(("act", Moves.SAVED), x=x) as (tape, _):
                y = tape.run(region("act", lambda owner, x: Saves.apply(x, torch.ones(N, N))), bench.owner, x)
            y.sum().backward()
            assert len(bench.engine._recorder._spans) <= 48
            total += bench.end().copy_out_ms if asked else 0.0
        total += bench.end().copy_out_ms
        sums.append(total)
    assert sums[0] == pytest.approx(sums[1])
    assert sums[0] > 0


# A whole model


def test_the_ledger_adds_up_and_moved_bytes_are_freed_bytes() -> None:
    model, batch = tiny_qwen3_5(), tiny_batch(2, 65)
    with instrument(model) as untouched:
        model(**batch).loss.backward()
    for arm in ("offload:gdn_core_attn+offload:mlp", "gdn_conv+gdn_norm_out+offload:gdn_core_attn+offload:gdn_norm_out"):
        with apply_plan(model, moving(arm)) as applied:
            model(**batch).loss.backward()
            ledger, statistics = applied.ledger, applied.step_statistics()
            assert statistics is not None
            assert ledger.kept_bytes + ledger.discarded_bytes + ledger.offloaded_bytes == untouched.kept_bytes
            assert ledger.moved_bytes == statistics.bytes_out == sum(row.moved_bytes for row in ledger.rows()) >= ledger.offloaded_bytes > 0
            assert ledger.unfreed_bytes == 0
            assert ledger.retained_bytes == ledger.kept_bytes + ledger.replay_input_bytes
            model(**batch).loss.backward()
            again = applied.step_statistics()
            assert again is not None
            assert again.bytes_out == statistics.bytes_out, "a step without the instruments moves the same"
            told = ledger.as_dict()
            assert (told["offloaded_bytes"], told["moved_bytes"], told["unfreed_bytes"]) == (ledger.offloaded_bytes, ledger.moved_bytes, 0)


def test_with_recompute_only_what_is_left_moves() -> None:
    model, batch = tiny_qwen3_5(num_hidden_layers=1), tiny_batch(2, 65)
    moved = {}
    for arm in ("offload:gdn_core_attn", "gdn_conv+offload:gdn_core_attn"):
        with apply_plan(model, moving(arm)) as applied:
            model(**batch).loss.backward()
            moved[arm] = applied.ledger.moved_bytes
    # the torch rule saves v as it is given, a view of the convolution's output [2, 65, 128] in fp32
    assert moved["offload:gdn_core_attn"] - moved["gdn_conv+offload:gdn_core_attn"] == 2 * 65 * 128 * 4


def test_full_with_the_blocks_inputs_keeps_nothing_of_a_block() -> None:
    model, batch = tiny_qwen3_5(), tiny_batch(2, 65)
    with apply_plan(model, "full") as applied:
        model(**batch).loss.backward()
        plain = applied.ledger
    with apply_plan(model, moving("full+offload:block_input")) as applied:
        model(**batch).loss.backward()
        rows = applied.ledger
    assert rows.moved_bytes == 4 * 2 * 65 * 64 * 4, "the input of each block"
    assert plain.retained_bytes is not None
    assert rows.retained_bytes == plain.retained_bytes - rows.moved_bytes
    assert rows.unfreed_bytes == 0


def test_moved_bytes_that_somebody_else_holds_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_qwen3_5(), tiny_batch(2, 65)
    with caplog.at_level(logging.WARNING, "lightning_gdn"), apply_plan(model, moving("full+offload:block_input")) as applied:
        out = model(**batch, output_hidden_states=True)
        assert applied.ledger.unfreed_bytes is None
        out.loss.backward()
        assert applied.ledger.unfreed_bytes == applied.ledger.moved_bytes > 0
    assert "are on the device all the same, since something outside the blocks holds them" in caplog.text


def test_a_label_that_moves_nothing_is_reported_with_the_reason() -> None:
    model = tiny_qwen3_5()
    with pytest.warns(FreesNothingWarning, match=r"'gdn_core_attn' moved nothing.*min_bytes \d.*below offload.min_bytes=1048576"):
        with apply_plan(model, "offload:gdn_core_attn"):
            model(**tiny_batch()).loss.backward()


def test_labels_that_move_nothing_are_reported_together() -> None:
    model = tiny_qwen3_5()
    together = r"labels 'mlp', 'core_attn' moved nothing in the first step \(.*; .*\); stayed in the first forward, of all offload labels together"
    with pytest.warns(FreesNothingWarning, match=together) as warned, apply_plan(model, "offload:mlp+offload:core_attn"):
        model(**tiny_batch()).loss.backward()
    assert len(warned) == 1


def test_validation_and_frozen_passes_bypass_the_engine() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, moving("offload:gdn_core_attn")) as applied:
        with torch.no_grad():
            model(**tiny_batch())
        assert applied.step_statistics() is None
        model(**tiny_batch()).loss.backward()
        assert applied.step_statistics() is applied.last_step is not None


def test_undo_gives_the_host_memory_back_also_before_the_backward() -> None:
    model, batch = tiny_qwen3_5(), tiny_batch()
    model(**batch).loss.backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    applied = apply_plan(model, moving("offload:gdn_core_attn+offload:mlp"))
    model(**batch).loss.backward()
    model.zero_grad()
    assert applied.engines is not None
    (engine,) = applied.engines.by_device.values()
    loss = model(**batch).loss
    assert engine.pool.in_use > 0
    applied.undo()
    loss.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))  # type: ignore[arg-type]
    nothing_left(applied)
    applied.undo()
    assert engine.pool.held == 0


def test_copies_of_the_model_move_what_is_theirs() -> None:
    model, batch = tiny_qwen3_5(), tiny_batch()
    model(**batch).loss.backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    with apply_plan(model, moving("offload:gdn_core_attn+gdn_norm_out")) as applied:
        twin = copy.deepcopy(model)
        losses = [each(**batch).loss for each in (model, twin, model)]
        losses[1].backward()
        losses[0].backward()
        assert all(torch.equal(a.grad, b) for a, b in zip(twin.parameters(), want, strict=True))  # type: ignore[arg-type]
        assert all(torch.equal(a.grad, b) for a, b in zip(model.parameters(), want, strict=True))  # type: ignore[arg-type]
        del losses
        plain = pickle.loads(pickle.dumps(model))
        nothing_left(applied)
    plain.zero_grad()
    plain(**batch).loss.backward()
    assert all(torch.equal(a.grad, b) for a, b in zip(plain.parameters(), want, strict=True))


def test_inside_foreign_hooks_it_raises_or_lets_them_win() -> None:
    model, batch = tiny_qwen3_5(), tiny_batch()
    with apply_plan(model, moving("offload:gdn_core_attn")), torch.autograd.graph.save_on_cpu():
        with pytest.raises(RuntimeError, match=r"other saved-tensor hooks are open around it: .*save_on_cpu"):
            model(**batch)
    with apply_plan(model, moving("offload:gdn_core_attn"), on_foreign_hooks="bypass") as applied, torch.autograd.graph.save_on_cpu():
        model(**batch).loss.backward()
        statistics = applied.step_statistics()
        assert statistics is None or statistics.bytes_out == 0


def test_out_of_memory_that_is_caught_and_retried_leaves_nothing_in_use() -> None:
    model, batch = tiny_qwen3_5(), tiny_batch()
    model(**batch).loss.backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    with apply_plan(model, moving("offload:gdn_core_attn+offload:mlp")) as applied:
        model(**batch).loss.backward()
        model.zero_grad()
        assert applied.engines is not None
        (engine,) = applied.engines.by_device.values()
        backend: Any = engine._backend
        backend.room = 0
        loss = model(**batch).loss
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        backend.room = None
        model.zero_grad()
        gc.collect()
        model(**batch).loss.backward()
        assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True))  # type: ignore[arg-type]
        nothing_left(applied)


def test_offload_is_asked_for_in_one_place() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, "gdn_conv", offload=["gdn_core_attn@0.5"]) as applied:
        assert str(applied.plan.source) == "gdn_conv+offload:gdn_core_attn@0.5"
    for given in (select("gdn_conv"), applied.plan):
        with pytest.raises(ValueError, match=r"offload: a (Selection|Plan) holds its own offload, got offload=\['mlp'\] beside it"):
            apply_plan(model, given, offload=["mlp"])
    with apply_plan(model, applied.plan) as again:
        assert again.engines is not None
        assert again.engines.config == applied.plan.offload


def test_a_device_without_copies_is_an_error() -> None:
    with pytest.raises(ValueError, match="offload: the blocks run on device 'meta', expected a CUDA device or the CPU"):
        Engines(CONFIG, 1).on(torch.device("meta"))
    engines = Engines(CONFIG, 1)
    assert engines.on(CPU) is engines.on(CPU)
    assert engines.step_statistics() is not None
    engines.close()


def test_a_label_that_a_full_pool_keeps_from_moving_is_told_so() -> None:
    model = tiny_qwen3_5()
    config = OffloadConfig(labels=("mlp",), min_bytes=0, max_pinned_gib=1e-9)
    with apply_plan(model, [], offload=config), pytest.warns(FreesNothingWarning, match=r"'mlp' moved nothing.*pool full \d"):
        model(**tiny_batch(2, 33)).loss.backward()


def test_simulated_times_are_no_measurement() -> None:
    model = tiny_qwen3_5()
    with apply_plan(model, [], offload=OffloadConfig(labels=("mlp",), fraction="auto", min_bytes=0)) as applied:
        for _ in range(3):
            model(**tiny_batch(2, 33)).loss.backward()
            stats = applied.step_statistics()
            assert stats is not None
            assert stats.bytes_out > 0
            assert (stats.out_gb_s, stats.in_gb_s, stats.stall_ms, stats.forward_ms, stats.timed_bytes_out) == (None, None, 0.0, 0.0, 0)
