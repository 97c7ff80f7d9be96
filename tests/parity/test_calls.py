"""What is replayed and what is not, counted by forward hooks and wrapped kernels: the ledger has no say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gdn.adapters.hf_regions import CONV, Family
from lightning_gdn.apply import apply_plan
from lightning_gdn.tape import in_replay
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.counters import calls

MODULES = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"),  # GDN blocks (the model's last norm counts too: 3 + 1)
    *("q_proj", "o_proj"),
    *("input_layernorm", "post_attention_layernorm", "gate_proj", "up_proj", "act_fn", "down_proj"),
)
IN_PROJ = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
ONCE = {
    **dict.fromkeys((*IN_PROJ, "out_proj", "conv", "delta_rule"), 3),
    "norm": 4,
    "q_proj": 1,
    "o_proj": 1,
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "gate_proj", "up_proj", "act_fn", "down_proj"), 4),
}
"""Calls of an untouched step: three GDN blocks and one attention block."""
REPLAYED: dict[str, tuple[str, ...]] = {
    "gdn_in_proj": (),  # in fp32 a linear saves its input only, so nothing of the region goes and nothing is replayed
    "gdn_in_proj_split": (),
    "gdn_in_proj_conv": (*IN_PROJ, "conv"),
    "gdn_in_proj_conv_prep": (*IN_PROJ, "conv"),
    "gdn_conv": ("conv",),
    "gdn_front": (*IN_PROJ, "conv"),
    "gdn_norm_out": ("norm",),
    "gdn_gated_delta_rule": ("delta_rule",),
    "gdn": (*IN_PROJ, "conv", "delta_rule", "norm"),
    "layernorm": ("input_layernorm", "post_attention_layernorm"),
    "mlp": ("gate_proj", "up_proj", "act_fn"),
    "mlp_act": ("act_fn",),
    "gdn_conv+gdn_norm_out+layernorm": ("conv", "norm", "input_layernorm", "post_attention_layernorm"),
}
"""Label -> what runs twice. The convolution's output is saved by nobody under the torch rule, so `conv` runs for its own inside only."""


class CountedStep:
    """Counts the calls of one forward and backward."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.kernels = {"conv": 0, "delta_rule": 0}
        original = Family.kernel

        def counted(family: Family, name: str, device: torch.device) -> Any:
            run = original(family, name, device)

            def kernel(*args: Any, **kwargs: Any) -> Any:
                self.kernels["conv" if name == CONV else "delta_rule"] += 1
                return run(*args, **kwargs)

            return kernel

        monkeypatch.setattr(Family, "kernel", counted)

    def __call__(self, backward: bool = True) -> dict[str, int]:
        self.kernels.update(conv=0, delta_rule=0)
        with calls(self.model, MODULES) as counts:
            loss = self.model(**tiny_batch(2, 65)).loss
            if backward:
                loss.backward()
        return {**counts, **self.kernels}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStep]:
    return CountedStep(tiny_qwen3_5(), monkeypatch)


@pytest.mark.parametrize("label", REPLAYED)
def test_a_label_replays_its_regions_and_no_other(counted: CountedStep, label: str) -> None:
    with apply_plan(counted.model, label):
        counted()  # the ledger's step
        got = counted()
    assert got == {name: count + (ran_again(name) if name in REPLAYED[label] else 0) for name, count in ONCE.items()}


def ran_again(name: str) -> int:
    return {"norm": 3}.get(name, ONCE[name])


def test_full_replays_each_region_once_and_no_last_projection(counted: CountedStep) -> None:
    with apply_plan(counted.model, "full"):
        counted()
        got = counted()
    twice = {name: count * 2 for name, count in ONCE.items()} | {"norm": 3 * 2 + 1}
    # The last projection's output only goes into the residual sum, which saves nothing, and its input comes from elsewhere.
    assert got == twice | {"down_proj": 4}


def test_chunks_replay_across_block_borders(counted: CountedStep) -> None:
    """In a chunk of two only the first block's input stays, so the second block's input comes from a replay of the first one's last regions."""
    with apply_plan(counted.model, "full:uniform:2"):
        counted()
        got = counted()
    assert got["down_proj"] == 4 + 2, "blocks 0 and 2 make the inputs of blocks 1 and 3 again"


def test_h05_no_grad_passes_replay_nothing(counted: CountedStep) -> None:
    with apply_plan(counted.model, "full") as applied:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert counted(backward=False) == ONCE
        assert applied.ledger.retained_bytes is None, "a pass without gradients must not use up the ledger's step"


def test_h04_frozen_blocks_replay_nothing(counted: CountedStep) -> None:
    """Everything below the last block is frozen: its regions run once, and its gradients are right."""
    counted.model.requires_grad_(False)
    counted.model.model.layers[3].requires_grad_()
    counted()
    want = {name: p.grad for name, p in counted.model.named_parameters() if p.requires_grad}
    counted.model.zero_grad()
    with apply_plan(counted.model, "full") as applied:
        got = counted()
    assert all(torch.equal(p.grad, want[name]) for name, p in counted.model.named_parameters() if p.requires_grad)
    for name in (*IN_PROJ, "out_proj", "conv", "delta_rule"):
        assert got[name] == ONCE[name], name
    assert got["input_layernorm"] == 4 + 1
    assert {row.replays for row in applied.ledger.rows() if not row.block.endswith("3")} == {0}


def test_ledger_counts_calls_and_replays(counted: CountedStep) -> None:
    with apply_plan(counted.model, "gdn_conv+layernorm") as applied:
        counted()
    rows = applied.ledger.by_region()
    # `prep` is replayed only where the layer repeats heads (transformers < 5.23): the copies it makes are saved by the rule.
    assert {name: (row.calls, row.replays) for name, row in rows.items() if row.replays and name != "prep"} == {
        "conv": (3, 3),
        "input_norm": (4, 4),
        "post_norm": (4, 4),
    }
    assert rows["in_proj"].calls == 3


def test_module_hooks_fire_again_in_a_replay_and_in_replay_tells() -> None:
    model = tiny_qwen3_5()
    seen: list[bool] = []
    model.model.layers[0].linear_attn.norm.register_forward_hook(lambda *_: seen.append(in_replay()))
    with apply_plan(model, "gdn_norm_out"):
        model(**tiny_batch(2, 65)).loss.backward()
    assert seen == [False, True]
    assert not in_replay()
