"""What `benchmarks/offload_model.py` measures offload against on a GPU: bare copies, and TRL's context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


def test_bare_copies_are_timed_one_way_alone_and_both_at_once(bench: Callable[[str], Any]) -> None:
    rates = bench("rates").bare_rates("cuda", 64 * 2**20, 8)
    assert sorted(rates) == ["both_in_gb_s", "both_out_gb_s", "in_gb_s", "out_gb_s"]
    assert all(rate > 0.5 for rate in rates.values())
    for way in ("out", "in"):
        assert rates[f"both_{way}_gb_s"] <= 1.2 * rates[f"{way}_gb_s"], "the other way does not help"


@pytest.mark.parametrize("kernels", ["stock", "fused"])
def test_trls_offload_gives_the_controls_loss_and_gradients_and_holds_less(bench: Callable[[str], Any], kernels: str) -> None:
    pytest.importorskip("trl.models.activation_offloading", reason="TRL is not installed, and no dependency")
    models = bench("offload_trainees")
    trainee = models.Stack(device="cuda", layers=4, seq=2048, batch=1)
    found: dict[str, tuple[dict[str, Any], list[Tensor]]] = {}
    for arm in ("none", "trl_offload"):
        with models.in_force(trainee.model, arm, kernels, {}) as applied:
            around, gradients = models.around_of(applied), list[Tensor]()
            for index in range(2):
                row = models.timed_step(trainee, index, None, "cuda", around)
            models.optimizer_step(
                trainee, 2, around=around, ended=lambda kept=gradients: kept.extend(p.grad.clone() for p in trainee.model.parameters())
            )
            found[arm] = row, gradients
    (base, want), (row, got) = found["none"], found["trl_offload"]
    assert row["losses"] == base["losses"]
    assert all((a - b).float().norm() <= 0.02 * b.float().norm() for a, b in zip(got, want, strict=True))
    assert row["act_mib"] < 0.7 * base["act_mib"]
    assert torch.cuda.memory_allocated() > 0
