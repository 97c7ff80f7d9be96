"""Where a forward pass of offload begins and ends, when blocks of it run under other hooks, in backward, or not at all."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gdn import apply_plan
from lightning_gdn.models import GDNStack
from lightning_gdn.moving import Engines
from lightning_gdn.offload.engine import Engine
from lightning_gdn.offload.simulated import SimulatedBackend
from lightning_gdn.offload_config import OffloadConfig
from tests.parity.steps import moving, nothing_left

LAYERS = 8
SHARES = (0.1, 0.3, 0.6, 1.0)
PLANS = ("offload:gdn_core_attn", "full+offload:block_input", "gdn_norm_out+offload:gdn_norm_out")


class Checkpointed(nn.Module):
    """A stack of which some groups of blocks run inside `torch.utils.checkpoint`."""

    def __init__(self, groups: list[tuple[int, bool]], reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = GDNStack(num_layers=LAYERS, hidden_size=64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)
        self.groups, self.reentrant = groups, reentrant

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self.stack.layers)
        for size, inside in self.groups:
            group, layers = nn.Sequential(*layers[:size]), layers[size:]
            x = checkpoint(group, x, use_reentrant=self.reentrant) if inside else group(x)
        return x


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss: Tensor = model(x * 1.0).square().mean()
    return loss


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def held_after_forward(applied: Any) -> int:
    """Bytes of sources that the last forward of this thread still holds."""
    (engine,) = applied.engines.by_device.values()
    return sum(copy.nbytes for _, copies in engine._threads.forward.outgoing for copy in copies if copy.source is not None)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("groups", [[(7, False), (1, True)], [(3, False), (5, True)], [(2, True), (3, False), (3, True)]], ids=str)
@pytest.mark.filterwarnings("ignore:offload label")  # the smallest share has no room for one storage of some plans
def test_a_last_block_under_a_checkpoint_ends_the_pass(groups: list[tuple[int, bool]], plan: str, share: float) -> None:
    model = Checkpointed(groups, reentrant=False)
    want = gradients(model)
    with apply_plan(model, moving(f"{plan}@{share}", resident_last_blocks=0, min_bytes=0), on_foreign_hooks="bypass") as applied:
        for _ in range(3):
            model.zero_grad()
            loss = loss_of(model)
            assert held_after_forward(applied) == 0
            loss.backward()
            statistics = applied.step_statistics()
            assert statistics is not None
            assert statistics.forwards == 1
            nothing_left(applied)
            got = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not applied.ledger.unfreed_bytes  # None where nothing moved


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.filterwarnings("ignore:offload label")  # the smallest share has no room for one storage of some plans
def test_a_reentrant_checkpoint_runs_passes_of_its_own_in_backward(size: int, plan: str, share: float) -> None:
    """Its blocks run under the plan where they run with gradients, in backward: a step's passes do not go on in the next step."""
    model = Checkpointed([(size, index % 2 == 0) for index in range(LAYERS // size)], reentrant=True)
    want, counts = gradients(model), []
    with apply_plan(model, moving(f"{plan}@{share}", resident_last_blocks=0, min_bytes=0), on_foreign_hooks="bypass") as applied:
        for _ in range(4):
            assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))
            statistics = applied.step_statistics()
            assert statistics is not None
            gc.collect()
            nothing_left(applied)
            counts.append((statistics.forwards, statistics.bytes_out, statistics.bytes_in, statistics.eligible_bytes, statistics.late))
            assert statistics.bytes_out <= share * statistics.eligible_bytes
    assert counts == counts[:1] * 4


def test_the_time_of_a_pass_ends_with_a_block_that_is_passed_by() -> None:
    """`auto` divides by it: without it, it would never settle."""
    backend = SimulatedBackend(gb_s=1e6)
    engine = Engine(backend, OffloadConfig(labels=("mlp",), resident_last_blocks=0, min_bytes=0))
    for _ in range(2):
        for index in range(3):
            with engine.block(index, 4) as block:
                block.offer(torch.zeros(4096, dtype=torch.uint8))
                backend.launch(lambda: None, ms=1.0)
        backend.launch(lambda: None, ms=2.0)
        engine.passed_by(3, 4)
        engine.passed_by(3, 4)  # as a checkpoint's recompute does
        engine.passed_by(1, 4)
        backend.launch(lambda: None, ms=7.0)
        statistics = engine.step_statistics()
        assert statistics.forwards == 1
        assert statistics.forward_ms == pytest.approx(5.0, abs=0.1)


def test_a_pass_that_goes_on_on_another_device_is_over_on_the_one_before() -> None:
    """A model over two devices: the first one's engine never sees the last block."""
    config = OffloadConfig(labels=("mlp",), resident_last_blocks=0, min_bytes=0, fraction=0.2)
    engines, devices = Engines(config, 20), [torch.device("cuda", 0), torch.device("cuda", 1)]
    for device in devices:
        engines.by_device[device] = Engine(SimulatedBackend(gb_s=1e6), config)
    kept = []
    for _ in range(2):
        for index in range(20):
            engine = engines.running_on(devices[index // 10])
            with engine.block(index, 20) as block:
                kept += [block.offer(torch.zeros(4096, dtype=torch.uint8)) for _ in range(5)]
                engine._backend.launch(lambda: None, ms=1.0)  # type: ignore[attr-defined]
        held = [len(engines.by_device[device]._threads.forward.outgoing) for device in devices]
        assert held == [0, 0]
    for device in devices:
        statistics = engines.by_device[device].step_statistics()
        assert statistics.forwards == 2
        assert statistics.forward_ms == pytest.approx(20.0, abs=0.1)
        assert 0 < statistics.bytes_out <= 0.2 * statistics.eligible_bytes
    assert sum(ticket is not None for ticket in kept) > 0
