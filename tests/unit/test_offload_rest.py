"""A share of 0, given or settled on: nothing of offload runs any more, and the training goes on bit for bit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gdn import takeover as takeover_module
from lightning_gdn import tape as tape_module
from lightning_gdn.apply import AppliedPlan, apply_plan
from lightning_gdn.ledger import BlockProbe
from lightning_gdn.moving import Mover
from lightning_gdn.offload.engine import Engine
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import moving, nothing_left

LABELS = "offload:gdn_core_attn+offload:gdn_norm_out+offload:mlp"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What offload does around blocks, counted."""
    seen: Counter[str] = Counter()

    def counting(owner: Any, name: str, said: str) -> None:
        proper = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[said] += 1
            return proper(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counting(takeover_module, "Mover", "movers")
    counting(takeover_module, "Tape", "tapes")
    counting(tape_module, "push_hooks", "hooks")
    counting(Engine, "block", "contexts")
    counting(Engine, "_turn", "turns")
    counting(Tensor, "register_hook", "gradient hooks")
    return seen


def trained(plan: Any, calls: Counter[str], steps: int = 9, tokens: int = 33, micro_batches: int = 2) -> tuple[list[Any], list[Counter[str]], Any]:
    """Losses and weights, what was called in each step, and the plan that was in force."""
    model = tiny_qwen3_5()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[Any] = []
    counts: list[Counter[str]] = []
    with apply_plan(model, plan) as applied:
        for index in range(steps):
            calls.clear()
            for part in range(micro_batches):
                loss = model(**tiny_batch(2, tokens, seed=2 * index + part)).loss
                loss.backward()
                losses.append(loss.detach())
            counts.append(calls.copy())
            optimizer.step()
            optimizer.zero_grad()
            applied.step_statistics()
            nothing_left(applied)
    return [*losses, *model.state_dict().values()], counts, applied


@pytest.mark.parametrize("recompute", ["", "gdn_norm_out+layernorm+", "full+"])
@pytest.mark.parametrize("share", ["@auto", "@0"])
def test_nothing_of_offload_runs_at_rest_and_the_bits_are_the_controls(share: str, recompute: str, calls: Counter[str]) -> None:
    labels = "offload:block_input" if recompute == "full+" else LABELS
    plan = moving(f"{recompute}{labels}{share}")
    want, _, _ = trained([], calls)
    _, alone, _ = trained(replace(plan, offload=None), calls)
    got, counts, applied = trained(plan, calls)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    moves = 5 if share == "@auto" else 1  # on a CPU compute takes no time: auto settles on 0 after five steps
    assert counts[0]["movers"] > 0
    assert all(each["contexts"] for each in counts[:moves])
    for each, without in zip(counts[moves:], alone[moves:], strict=True):
        assert each == without, "what the recompute labels alone do, or nothing"
    if not recompute:
        assert counts[-1]["movers"] + counts[-1]["hooks"] + counts[-1]["contexts"] + counts[-1]["turns"] + counts[-1]["gradient hooks"] == 0
    assert applied.ledger.complete
    assert applied.last_step is not None
    assert (applied.last_step.fraction, applied.last_step.bytes_out, applied.last_step.pinned_held) == (0.0, 0, 0)


@pytest.mark.parametrize("share", ["@auto", "@0"])
def test_retained_is_the_controls_at_rest_and_other_shapes_are_not_guessed_at(share: str, calls: Counter[str]) -> None:
    _, _, applied = trained(moving(LABELS + share), calls)
    assert applied.retained_of == "last step"
    assert applied.retained_bytes == applied.ledger.retained_bytes + applied.ledger.moved_bytes
    model = tiny_qwen3_5()
    with apply_plan(model, moving(LABELS + share)) as applied:
        for tokens, of in [(33, "last step")] * 7 + [(17, "first forward"), (33, "last step")]:
            model(**tiny_batch(2, tokens)).loss.backward()
            applied.step_statistics()
            assert applied.retained_of == of
        model.eval()
        model(**tiny_batch(2, 33)).loss.backward()
        applied.step_statistics()
        assert applied.retained_of == "first forward"


def test_a_graph_of_before_is_differentiated_after_the_share_settled(calls: Counter[str]) -> None:
    model = tiny_qwen3_5()
    model(**tiny_batch(2, 33)).loss.backward()
    want = [weight.grad.clone() if weight.grad is not None else None for weight in model.parameters()]
    model.zero_grad()
    with apply_plan(model, moving(LABELS + "@auto")) as applied:
        loss = model(**tiny_batch(2, 33)).loss
        for _ in range(5):
            model(**tiny_batch(2, 33)).loss.backward()
            applied.step_statistics()
        assert applied.engines is not None
        assert applied.engines.at_rest
        model.zero_grad()
        loss.backward()
        assert all(a is None if b is None else torch.equal(a, b) for a, b in zip((w.grad for w in model.parameters()), want, strict=True))  # type: ignore[arg-type]
        del loss
        applied.step_statistics()
        nothing_left(applied)
        (engine,) = applied.engines.by_device.values()
        assert engine.pool.held == 0, "buffers that came back later are the machine's as well"


def test_a_ledger_that_is_armed_again_at_rest_counts_and_a_watch_sees_no_mover(calls: Counter[str]) -> None:
    model = tiny_qwen3_5()

    def run(applied: AppliedPlan) -> None:
        calls.clear()
        model(**tiny_batch(2, 33)).loss.backward()
        applied.step_statistics()

    with apply_plan(model, moving(LABELS + "@0")) as applied:
        run(applied)
        first = applied.ledger.retained_bytes
        applied.ledger.arm()
        run(applied)
        assert (applied.ledger.retained_bytes, applied.ledger.complete) == (first, True)
        applied.ledger.watch(lambda name, block: BlockProbe(applied.ledger, name, block))
        run(applied)
        assert (calls["movers"], calls["contexts"]) == (0, 0)
        assert calls["tapes"] == 4
        applied.ledger.watch(None)
        run(applied)
        assert calls["tapes"] == 0


def test_what_auto_found_is_logged_once(calls: Counter[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_gdn"):
        trained(moving(LABELS + "@auto"), calls)
    told = [line for line in caplog.messages if "fraction=auto" in line]
    assert len(told) == 1
    assert told[0].startswith("offload: fraction=auto settled on 0 and moves nothing any more: too little compute for the copies to hide behind")


def test_a_mover_reports_the_time_of_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[int] = []
    proper = Engine._begin_work
    monkeypatch.setattr(Engine, "_begin_work", lambda engine, block, ns: (spent.append(ns), proper(engine, block, ns))[1])
    packs: Counter[str] = Counter()
    pack = Mover._pack
    monkeypatch.setattr(Mover, "_pack", lambda mover, region, tensor: (packs.update([region]), pack(mover, region, tensor))[1])
    model = tiny_qwen3_5()
    with apply_plan(model, moving(LABELS)):
        model(**tiny_batch(2, 33)).loss.backward()
    assert len(spent) == 4
    assert all(ns > 0 for ns in spent)
    assert packs["delta_rule"] > 0
