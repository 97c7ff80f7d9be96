"""What the benchmark scripts compute from what they measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_gdn.models import GDNStack


def test_a_run_is_judged_by_how_far_runs_of_its_kind_are_apart(bench: Callable[[str], Any]) -> None:
    against = bench("rounds").against_own_spread
    own = [[1.0, 2.0, 3.0], [1.0, 2.2, 3.1], [1.0, 2.1, 3.4]]
    found = against(own, [1.1, 2.1, 3.5])
    assert found["outside"] == {"steps": 2, "at_most": 0.1}
    assert found["left_out"] == [{"steps": 2, "at_most": 0.1}, {"steps": 1, "at_most": 0.1}, {"steps": 1, "at_most": 0.3}]
    assert found["other_left_out"] == [{"steps": 2, "at_most": 0.1}, {"steps": 2, "at_most": 0.1}, {"steps": 2, "at_most": 0.4}]
    assert found["own_distance"] == {"largest": 0.4, "mean": pytest.approx(0.5 / 3, abs=1e-6)}
    assert found["distance"] == {"largest": 0.5, "mean": pytest.approx(0.7 / 3, abs=1e-6)}
    same = against(own, own[1])
    assert same["outside"] == {"steps": 0, "at_most": 0.0}


def test_the_control_beside_an_arm_is_what_it_is_paired_with(bench: Callable[[str], Any]) -> None:
    """A host that gets slower all the time: pairs of one round drift apart with their distance, neighbours hardly."""
    rounds = bench("rounds")
    calls: list[str] = []

    def measure(arm: str, index: int) -> dict[str, Any]:
        calls.append(arm)
        cost = {"none": 1.0, "gdn_norm_out": 1.1, "full": 1.3}[arm]
        return {"ms": 100 * cost * (1 + 0.01 * len(calls)), "peak_mib": 1000 / cost}

    arms = ["none", "gdn_norm_out", "full"]
    found = rounds.alternate(arms, 2, measure, control_of=lambda arm: "none")
    assert calls == ["none", "none", "gdn_norm_out", "none", "full", "full", "none", "gdn_norm_out", "none", "none"]
    judged = rounds.judge(found, 4, "stock")
    assert (judged["rounds"], judged["arms"]["none"]["ms_pct"]) == (2, {"median": 0.0, "min": 0.0, "max": 0.0})
    assert judged["arms"]["full"]["ms_pct"]["median"] == pytest.approx(30, abs=0.1)
    plain = rounds.judge(rounds.alternate(arms, 2, measure), 4, "stock")
    assert "beside" not in str(plain)
    assert plain["arms"]["full"]["ms_pct"]["max"] - plain["arms"]["full"]["ms_pct"]["min"] > 2


def test_a_pair_side_by_side_takes_turns(bench: Callable[[str], Any]) -> None:
    """A host that gets slower: the arm and the control of a pair see the same host."""
    rounds = bench("rounds")
    calls: list[str] = []

    def step(arm: str) -> dict[str, Any]:
        calls.append(arm)
        return {"ms": {"none": 100.0, "full": 130.0}[arm] * 1.05 ** len(calls), "peak_mib": 10.0 + len(calls)}

    pair = rounds.in_turns(("none", "full"), step, 3)
    assert calls == ["none", "full", "full", "none", "none", "full", "full", "none"]
    assert pair["full"]["ms"] / pair["none"]["ms"] == pytest.approx(1.3 * 1.05)
    assert (pair["none"]["peak_mib"], pair["full"]["peak_mib"]) == (18, 17)
    found = rounds.alternate(
        ["none", "full"],
        2,
        lambda arm, index: step(arm),
        control_of=lambda arm: "none",
        side_by_side=lambda pair, index: rounds.in_turns(pair, step, 3),
    )
    judged = rounds.judge(found, 4, "stock")
    assert judged["arms"]["full"]["ms_pct"]["median"] == pytest.approx(30, abs=2)


def test_a_twin_is_under_an_arm_while_the_model_runs_untouched(bench: Callable[[str], Any]) -> None:
    """Same parameters, so both hold what one holds; gradients of either are the other's."""
    rounds = bench("rounds")
    model = GDNStack(num_layers=2, hidden_size=32, num_k_heads=2, num_v_heads=2, head_k_dim=8, head_v_dim=8)
    other = rounds.twin(model)
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    x = torch.randn(1, 64, 32)
    with rounds.under(other, "full") as applied:
        grads = []
        for which in (model, other, model, other):
            which.zero_grad()
            which(x).square().mean().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(torch.equal(a, b) for found in grads[1:] for a, b in zip(grads[0], found, strict=True))
        assert applied.ledger.complete
        assert "forward" in other.layers[0].__dict__
        assert "forward" not in model.layers[0].__dict__
