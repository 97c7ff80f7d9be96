"""Offload under a whole model on one GPU: bits, bytes, constant memory, reloads ahead of their use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn import apply_plan
from lightning_gdn.apply import AppliedPlan
from lightning_gdn.bench.data import make_loaders, read_text
from lightning_gdn.bench.module import build_model
from lightning_gdn.bench.recipes import load
from lightning_gdn.labels import Selection, parse_arm
from lightning_gdn.models import GDNStack
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.statistics import StepStatistics

pytestmark = pytest.mark.gpu

BLOCKS = 8
SEQ = 2048
ARMS = (
    "offload:gdn_core_attn",
    "offload:gdn_in_proj+offload:gdn_norm_out",
    "offload:core_attn+offload:mlp",
    "gdn_conv+gdn_norm_out+layernorm+offload:gdn_core_attn",
    "gdn_norm_out+mlp+offload:gdn_core_attn+offload:gdn_norm_out+offload:mlp",
    "full+offload:block_input",
    "full:uniform:2+offload:block_input",
)


def arm(text: str, **fields: Any) -> Selection:
    selection = parse_arm(text)
    assert selection.offload is not None
    return replace(selection, offload=replace(selection.offload, **fields))


@pytest.fixture(scope="module")
def data() -> list[Tensor]:
    recipe = load("qwen3_5_0_8b", [f"data.seq_len={SEQ}"]).recipe
    train, _ = make_loaders(read_text(recipe.data), recipe)
    return [batch.cuda() for _, batch in zip(range(4), train, strict=False)]


@pytest.fixture(scope="module")
def model() -> Iterator[nn.Module]:
    """A third of Qwen3.5-0.8B (6 GDN and 2 attention blocks), eager attention: every kernel of its step is deterministic."""
    overrides = [f"model.num_hidden_layers={BLOCKS}", "model.vocab_size=256", "model.attn_implementation=eager", f"data.seq_len={SEQ}"]
    with torch.device("cuda"):
        made = build_model(load("qwen3_5_0_8b", overrides).recipe)
    yield made
    del made
    gc.collect()
    torch.cuda.empty_cache()


def requested() -> int:
    """Bytes asked for, without the allocator's rounding."""
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def forward(model: Any, ids: Tensor) -> Tensor:
    return model.model(input_ids=ids).last_hidden_state.float().square().mean()


def gradients(model: nn.Module, ids: Tensor) -> tuple[float, int, list[Tensor | None]]:
    """Loss, bytes held after the forward, gradients."""
    model.zero_grad(set_to_none=True)
    before = requested()
    loss = forward(model, ids)
    held = requested() - before
    loss.backward()
    return loss.item(), held, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(left, right, strict=True))


def engine_of(applied: AppliedPlan) -> Engine:
    assert applied.engines is not None
    (engine,) = applied.engines.by_device.values()
    return engine


def statistics_of(applied: AppliedPlan) -> StepStatistics:
    found = applied.step_statistics()
    assert found is not None
    assert (found.buffers_in_use, found.pinned_in_use) == (0, 0)
    return found


@pytest.mark.parametrize("text", ARMS)
def test_gradients_are_bit_equal_and_bytes_moved_are_bytes_freed(model: nn.Module, data: list[Tensor], text: str) -> None:
    """Against the arm's own recompute labels, by what the allocator was asked for."""
    selection = arm(text)
    for _ in range(2):  # tuned
        gradients(model, data[0])
    want = gradients(model, data[0])
    again = gradients(model, data[0])
    assert want[0] == again[0]
    assert equal(want[2], again[2]), "the control does not repeat: bits cannot be compared"
    with apply_plan(model, replace(selection, offload=None)):
        gradients(model, data[0])
        recompute = gradients(model, data[0])[1]
    with apply_plan(model, selection) as applied:
        for _ in range(3):
            loss, held, found = gradients(model, data[0])
            assert loss == want[0]
            assert equal(found, want[2])
            statistics = statistics_of(applied)
        ledger = applied.ledger
        assert ledger.unfreed_bytes == 0
        assert ledger.moved_bytes == statistics.bytes_out == statistics.bytes_in > 0
        assert abs(recompute - held - ledger.moved_bytes) <= 0.01 * ledger.moved_bytes, (recompute, held, ledger.moved_bytes)
        assert statistics.late == 0
        assert statistics.fallbacks == 0
        assert statistics.out_gb_s is not None
    torch.cuda.synchronize()
    assert engine_of(applied).pool.held == 0, "pages go back at the end of the plan"


def train(model: nn.Module, start: dict[str, Tensor], data: list[Tensor], plan: Any, steps: int, each: Any = None) -> list[Any]:
    """Losses, gradient sums and weights of `steps` optimizer steps from the same weights, two micro-batches of other lengths each."""
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    told: list[Any] = []
    with apply_plan(model, plan) as applied:
        for index in range(steps):
            for part in range(2):
                tokens = SEQ - 64 * ((index + part) % 3)
                loss = forward(model, data[(index + part) % len(data)][:, :tokens])
                loss.backward()
                told.append(loss.item())
            told.append(float(sum(p.grad.double().sum() for p in model.parameters() if p.grad is not None)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if each is not None:
                each(applied, index)
    return [*told, *(p.detach().clone() for p in model.parameters())]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(left, right, strict=True))


def test_twenty_steps_of_changing_lengths_train_the_same_weights_in_constant_memory(model: nn.Module, data: list[Tensor]) -> None:
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model, start, data, [], 3)  # tuned, at every length
    control = train(model, start, data, [], 20)
    assert same(control, train(model, start, data, [], 20)), "the control does not repeat: bits cannot be compared"
    figures: list[tuple[int, int, int]] = []

    def each(applied: AppliedPlan, index: int) -> None:
        statistics = statistics_of(applied)
        assert statistics.bytes_out == statistics.bytes_in > 0
        if index >= 6:
            figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), statistics.pinned_held))

    assert same(control, train(model, start, data, arm("offload:gdn_core_attn"), 20, each))
    assert [(allocated, pinned) for allocated, _, pinned in figures[3:]] == [(allocated, pinned) for allocated, _, pinned in figures[:-3]], figures
    assert len({reserved for _, reserved, _ in figures[-6:]}) == 1, figures
    cap = arm("offload:gdn_core_attn+offload:mlp", max_pinned_gib=0.05)
    fallbacks: list[int] = []
    bounded = train(model, start, data, cap, 3, lambda applied, _: fallbacks.append(statistics_of(applied).fallbacks))
    assert same(bounded, train(model, start, data, [], 3))
    assert all(fallbacks)
    model.load_state_dict(start)


def test_reloads_are_enqueued_at_least_one_block_before_their_use(model: nn.Module, data: list[Tensor]) -> None:
    with apply_plan(model, arm("offload:gdn_core_attn")) as applied:
        for _ in range(2):
            forward(model, data[0]).backward()
        engine = engine_of(applied)
        engine.timeline = timeline = []
        forward(model, data[0]).backward()
        leads = [entry.during - entry.block for entry in timeline if entry.kind == "in"]
        assert leads
        assert min(leads) >= 1
        uses = {entry.ticket: number for number, entry in enumerate(timeline) if entry.kind == "use"}
        assert all(number < uses[entry.ticket] for number, entry in enumerate(timeline) if entry.kind == "in")
        assert statistics_of(applied).late == 0
    model.zero_grad(set_to_none=True)


def test_evaluation_first_and_abandoned_forwards(model: nn.Module, data: list[Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    want = gradients(model, data[1])
    with apply_plan(model, arm("offload:gdn_core_attn+offload:mlp")) as applied:
        with torch.no_grad():
            forward(model, data[0])
        abandoned = forward(model, data[0][:, :512])
        assert engine_of(applied).pool.in_use > 0
        del abandoned
        loss, _, found = gradients(model, data[1])
        assert loss == want[0]
        assert equal(found, want[2])
        statistics_of(applied)


def test_an_out_of_memory_error_that_is_caught_leaves_no_buffer_in_use(model: nn.Module, data: list[Tensor]) -> None:
    want = gradients(model, data[0])
    with apply_plan(model, arm("offload:gdn_core_attn+offload:mlp")) as applied:
        gradients(model, data[0])
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                forward(model, data[0].repeat(4, 1)).backward()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        model.zero_grad(set_to_none=True)
        engine_of(applied).collect()
        loss, _, found = gradients(model, data[0])
        assert loss == want[0]
        assert equal(found, want[2])
        statistics_of(applied)


def test_retained_of_the_last_step_follows_the_allocator(model: nn.Module, data: list[Tensor]) -> None:
    """The share goes down after the first forward: what is held more by the allocator is what `retained_bytes` says more."""
    gradients(model, data[0])
    with apply_plan(model, arm("offload:gdn_core_attn+offload:mlp")) as applied:
        gradients(model, data[0])
        statistics_of(applied)
        engine = engine_of(applied)
        told, held = list[int](), list[int]()
        for share in (1.0, 0.5, 0.0):
            engine.fraction = share
            for _ in range(2):
                _, now, _ = gradients(model, data[0])
                statistics_of(applied)
            assert applied.retained_of == "last step"
            told.append(applied.retained_bytes or 0)
            held.append(now)
    assert told[0] < told[1] < told[2]
    for one, other in ((0, 1), (1, 2)):
        assert abs((held[other] - held[one]) - (told[other] - told[one])) <= 0.01 * told[2]


def test_the_stack_with_its_fused_kernels() -> None:
    torch.manual_seed(0)
    stack = GDNStack(num_layers=6).cuda().to(torch.bfloat16)
    for name, parameter in stack.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float()
    x = torch.randn(1, 4096, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[int, list[Tensor | None]]:
        stack.zero_grad(set_to_none=True)
        before = requested()
        loss = stack(x.clone().requires_grad_(True)).float().square().mean()
        held = requested() - before
        loss.backward()
        return held, [None if p.grad is None else p.grad.clone() for p in stack.parameters()]

    for _ in range(3):
        held, want = step()
    assert equal(step()[1], want), "the control does not repeat: bits cannot be compared"
    for text in ("offload:gdn_core_attn", "offload:gdn_in_proj+offload:gdn_norm_out", "gdn_conv+gdn_norm_out+layernorm+offload:gdn_core_attn"):
        selection = arm(text)
        with apply_plan(stack, replace(selection, offload=None)):
            step()
            recompute = step()[0]
        with apply_plan(stack, selection) as applied:
            step()
            moved_to, found = step()
            assert equal(found, want), text
            moved = applied.ledger.moved_bytes
            assert abs(recompute - moved_to - moved) <= 0.01 * moved, (text, recompute, moved_to, moved)
            assert statistics_of(applied).bytes_out == 2 * moved
    assert held > 0
