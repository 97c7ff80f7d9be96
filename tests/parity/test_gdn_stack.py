"""The reference stack, on CPU: every label bit-equal; its rule and steps against the definition."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn.apply import apply_plan, instrument
from lightning_gdn.inspection import inspect_model
from lightning_gdn.kernels import torch_ops
from lightning_gdn.models import GDNStack
from tests.models import tiny_qwen3_5
from tests.parity.steps import PLANS

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")

STACK_PLANS = [plan for plan in PLANS if not {"mlp", "mlp_act", "core_attn"} & set(plan.split("+"))]
SMALL: dict[str, Any] = {"num_layers": 3, "hidden_size": 64, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16}


def small_stack(**overrides: Any) -> GDNStack:
    torch.manual_seed(0)
    stack = GDNStack(**{**SMALL, **overrides})
    with torch.no_grad():
        for parameter in stack.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return stack


def step(model: nn.Module, tokens: int, precision: str) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens)).requires_grad_(True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if precision == "bf16" else nullcontext():
        loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_labels_are_bit_equal(tokens: int, precision: str, training: bool) -> None:
    model = small_stack().train(training)
    want = step(model, tokens, precision)
    for plan in STACK_PLANS:
        with apply_plan(model, plan) as applied:
            got = step(model, tokens, precision)
            assert applied.ledger.complete
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), plan


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (2, 6), (1, 4)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (16, 32), (32, 16), (256, 16)], ids=str)
def test_head_layouts(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    model = small_stack(num_k_heads=heads[0], num_v_heads=heads[1], head_k_dim=dims[0], head_v_dim=dims[1], num_layers=2)
    want = step(model, 65, "fp32")
    for plan in STACK_PLANS:
        with apply_plan(model, plan):
            assert all(torch.equal(a, b) for a, b in zip(want, step(model, 65, "fp32"), strict=True)), plan


def test_layout_and_bytes() -> None:
    model = small_stack()
    report = inspect_model(model)
    assert report.describe(taken_over=True) == "GDN blocks: 3 of 3 layers, 3 taken over"
    with instrument(model) as ledger:
        step(model, 128, "fp32")
    rows, blocks, heads, k, v = 2 * 128, 3, 4, 32, 64
    saved = ledger.by_region()
    projection = 2 * k + 2 * v + 2 * heads
    assert saved["in_proj"].kept_bytes == blocks * rows * 64 * 4, "its input"
    # the convolution saves its input, which is a view of the fused projection, and what goes into SiLU, padded by kernel - 1 tokens
    assert saved["conv"].kept_bytes == blocks * (rows * projection + 2 * (128 + 3) * (2 * k + v)) * 4
    assert saved["out_proj"].kept_bytes == blocks * rows * v * 4
    with apply_plan(model, "gdn_in_proj_conv") as applied:
        step(model, 128, "fp32")
    assert applied.ledger.kept_bytes + applied.ledger.discarded_bytes == ledger.kept_bytes
    assert applied.ledger.discarded_bytes >= saved["conv"].kept_bytes


@pytest.mark.parametrize("tokens", [1, 63, 64, 100])
def test_the_chunked_rule_is_the_definition(tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k = (torch_ops.l2norm(torch.randn(2, tokens, 2, 16, dtype=torch.float64)).double() for _ in range(2))
    v = torch.randn(2, tokens, 4, 8, dtype=torch.float64)
    g, beta = -torch.rand(2, tokens, 4, dtype=torch.float64), torch.rand(2, tokens, 4, dtype=torch.float64)
    inputs = [x.float().requires_grad_(True) for x in (q, k, v, g, beta)]
    results = []
    for rule in (torch_ops.delta_rule, torch_ops.naive_delta_rule):
        out = rule(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        # both compute in fp32; the sums run in different orders over at most 100 terms of order one
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_value_heads_that_do_not_group() -> None:
    with pytest.raises(ValueError, match="num_v_heads: expected a multiple of num_k_heads=2, got 3"):
        GDNStack(**{**SMALL, "num_v_heads": 3})


def test_transformers_mixer_computes_what_the_stack_specifies() -> None:
    """The Qwen3.5 mixer with its four projections laid side by side."""
    torch.manual_seed(0)
    theirs = tiny_qwen3_5().model.layers[1].linear_attn
    ours = small_stack(num_layers=1).layers[0].mixer
    with torch.no_grad():
        ours.in_proj.weight.copy_(torch.cat([getattr(theirs, f"in_proj_{part}").weight for part in ("qkv", "z", "b", "a")]))
        ours.conv_weight.copy_(theirs.conv1d.weight.squeeze(1))
        ours.norm_weight.copy_(theirs.norm.weight)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
        for name in ("A_log", "dt_bias"):
            getattr(ours, name).copy_(getattr(theirs, name))
    x = torch.randn(2, 100, 64)
    want, got = theirs(hidden_states=x), ours(x)
    assert want.abs().max() > 0.01
    # the same formula in fp32; the stack normalises q and k before the rule, transformers inside it
    assert torch.allclose(want, got, rtol=1e-5, atol=1e-6)
