"""Bytes: the ledger against counters of the test's own, against what is really alive, and against closed formulas."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lightning_gdn.adapters.hf_regions import RULE, Family
from lightning_gdn.apply import AppliedPlan, apply_plan, instrument
from lightning_gdn.ledger import Ledger, LedgerRow
from lightning_gdn.tape import MIN_INTERNAL_BYTES
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.counters import Alive, saved_bytes
from tests.parity.steps import PLANS

pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")

CASES = [(tokens, precision) for tokens in (3, 64, 65) for precision in ("fp32", "bf16")]


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Forward:
    """The same forward of the same model again and again."""

    def __init__(self, tokens: int, precision: str) -> None:
        self.model = tiny_qwen3_5()
        self.batch = tiny_batch(2, tokens, pad=1)
        self.precision = precision
        self.blocks = {f"model.layers.{i}": layer for i, layer in enumerate(self.model.model.layers)}

    def __call__(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
            return self.model(**self.batch).loss


def per_block(ledger: Ledger) -> dict[str, int]:
    total: dict[str, int] = {}
    for row in ledger.rows():
        total[row.block] = total.get(row.block, 0) + row.kept_bytes + row.discarded_bytes
    return total


@pytest.mark.parametrize(("tokens", "precision"), CASES)
def test_kept_and_discarded_are_what_autograd_saves_on_the_untouched_block(tokens: int, precision: str) -> None:
    forward = Forward(tokens, precision)
    with saved_bytes(forward.model, forward.blocks) as independent:
        forward()
    with instrument(forward.model) as ledger:
        forward()
    assert per_block(ledger) == independent
    assert ledger.discarded_bytes == ledger.replay_input_bytes == 0
    assert ledger.retained_bytes == ledger.kept_bytes == sum(independent.values())
    wrong = {}
    for plan in PLANS:
        with apply_plan(forward.model, plan) as applied:
            forward()
        if per_block(applied.ledger) != independent:
            wrong[plan] = per_block(applied.ledger)
    assert wrong == {}


@pytest.mark.parametrize(("tokens", "precision"), CASES)
def test_discarded_bytes_are_what_really_went(tokens: int, precision: str) -> None:
    """Against weak references to every storage made in the forward. The ledger counts what autograd saved; the torch delta rule also saves
    for the last chunk's state, which nobody uses, so that this part dies in the untouched forward already."""
    forward = Forward(tokens, precision)
    with no_collector():
        unused = dead_after_forward(forward)
        with Alive() as untouched:
            loss = forward()
        before = untouched.nbytes
        del loss
        wrong = {}
        for plan in PLANS:
            with apply_plan(forward.model, plan) as applied:
                forward().backward()
                forward.model.zero_grad()
                with Alive() as alive:
                    loss = forward()  # a step without the ledger
                ledger, freed = applied.ledger, before - alive.nbytes
                del loss
            expected = ledger.discarded_bytes - ledger.replay_input_bytes - sum(unused[name] for name in blocks_without_rule(applied))
            if freed != expected:
                wrong[plan] = (freed, expected)
    assert wrong == {}


def blocks_without_rule(applied: AppliedPlan) -> list[str]:
    return [block.name for block in applied.plan.blocks if dict(block.modes).get("delta_rule", "keep") != "keep"]


def dead_after_forward(forward: Forward) -> dict[str, int]:
    """Block name -> bytes of saved storages, large enough to be discarded, that are dead when the untouched block has returned."""
    with saved_bytes(forward.model, forward.blocks, at_least=MIN_INTERNAL_BYTES) as saved:
        forward()
    with saved_bytes(forward.model, forward.blocks, weak=True, at_least=MIN_INTERNAL_BYTES) as alive:
        forward()
    return {name: saved[name] - alive[name] for name in saved}


@pytest.mark.parametrize("plan", ["gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "full", "full:uniform:2"])
def test_discarded_storages_die_in_the_forward_and_nothing_is_left_after_backward(plan: str) -> None:
    forward = Forward(65, "fp32")
    with no_collector(), apply_plan(forward.model, plan):
        forward().backward()
        forward.model.zero_grad()
        with Alive() as alive:
            loss = forward()
        held = alive.nbytes
        with alive:
            loss.backward()
        del loss
        gradients = sum(p.grad.untyped_storage().nbytes() for p in forward.model.parameters() if p.grad is not None)
        assert alive.nbytes == gradients
        assert held > gradients / 10, "nothing was measured"


# B batch, T tokens, H hidden, I MLP width, K = key heads x dim, V = value heads x dim, C = 2K + V, N value heads, s bytes per number.

SIZES = [
    {"hidden_size": 64, "intermediate_size": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    {"hidden_size": 48, "intermediate_size": 80, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 24},
]


def gdn_rows(tokens: int, precision: str, sizes: dict[str, int]) -> dict[str, LedgerRow]:
    model = tiny_qwen3_5(num_hidden_layers=1, **sizes)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False), instrument(model) as ledger:
        model(**tiny_batch(2, tokens))
    return ledger.by_region()


@pytest.mark.parametrize("sizes", SIZES, ids=["v=2k", "v=k"])
@pytest.mark.parametrize("tokens", [3, 64, 65])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_by_closed_formula(tokens: int, precision: str, sizes: dict[str, int]) -> None:
    rows = gdn_rows(tokens, precision, sizes)
    b, t, s, fp32 = 2, tokens, 4 if precision == "fp32" else 2, 4
    h, i = sizes["hidden_size"], sizes["intermediate_size"]
    n, dv = sizes["linear_num_value_heads"], sizes.get("linear_value_head_dim", 16)
    k, v = sizes["linear_num_key_heads"] * 16, n * dv
    c = 2 * k + v
    mixed = precision == "bf16"
    # A linear saves its input. Under autocast the fp32 input is cast once for each linear, and so is each weight.
    casts = {"in_proj": (c + v + 2 * n) * h, "conv": c * 4, "out_proj": v * h, "gate_up": 2 * h * i, "down": i * h}
    norm = b * t * (2 * h + 1) * fp32 + h * fp32  # block input, normed input, 1/rms per token, and 1 + weight
    expected = {
        "input_norm": norm,
        "in_proj": b * t * h * (4 * s if mixed else s),
        # Its input, and the pre-activation, of which the convolution makes 3 tokens more than it returns.
        "conv": b * t * c * s + b * (t + 3) * c * s,
        "out_proj": b * t * v * s,
        "post_norm": norm,
        "gate_up": b * t * h * (2 * s if mixed else s),
        "act": b * t * 3 * i * s,
        "down": b * t * i * s,
        # fp32 whatever the precision: o, o / rms, 1/rms per head, the weighted norm, z, silu(z).
        "norm_out": b * t * (5 * v + n) * fp32,
        "prep": 0,
        "mixer_residual": 0,
        "ffn_residual": 0,
    }
    if mixed:
        expected |= {name: expected[name] + 2 * numbers for name, numbers in casts.items()}
        expected["norm_out"] -= b * t * v * 2  # o / rms is rounded to bf16 before the weight
        expected["out_proj"] += 0
    got = {name: rows[name].kept_bytes for name in expected}
    assert got == expected
    assert {name: rows[name].weight_cast_bytes for name in rows if rows[name].weight_cast_bytes} == (
        {name: 2 * numbers for name, numbers in casts.items()} if mixed else {}
    )


def test_weight_casts_of_frozen_weights_are_weight_casts() -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    model.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_()  # so that everything after it is differentiated
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), instrument(model) as ledger:
        model(**tiny_batch(2, 65))
    rows = ledger.by_region()
    assert rows["in_proj"].weight_cast_bytes == 2 * (128 + 64 + 8) * 64
    assert rows["out_proj"].weight_cast_bytes == 2 * 64 * 64
    assert rows["gate_up"].weight_cast_bytes == 2 * 2 * 64 * 128


class _SavesAsGiven(torch.autograd.Function):
    """A delta rule in name: keeps q, k, v as it gets them, like a fused kernel that copies nothing."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, g, beta)
        return v * beta.unsqueeze(-1) * g.exp().unsqueeze(-1) + (q * k).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta = ctx.saved_tensors  # type: ignore[attr-defined]
        weight = (g.exp() * beta).unsqueeze(-1)
        both = (grad * v).sum(-1)
        total = grad.sum(-1, keepdim=True)
        return k * total, q * total, grad * weight, both * beta * g.exp(), both * g.exp()


def fake_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **_: object) -> tuple[Tensor, None]:
    repeats = v.shape[2] // q.shape[2]
    if repeats > 1:
        q, k = q.repeat_interleave(repeats, dim=2), k.repeat_interleave(repeats, dim=2)
    return _SavesAsGiven.apply(q, k, v, g, beta), None


def test_conv_and_its_output_differ_where_the_rule_saves_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' torch rule saves nothing of the convolution's output, so W3, W4 and gdn_conv cannot be told apart there. Here they can:
    W3 keeps the output (a plain checkpoint), W4 and gdn_conv free it too, though it is the rule, a region in `keep`, that saves it."""
    kernel = Family.kernel
    monkeypatch.setattr(Family, "kernel", lambda self, name, device: fake_rule if name == RULE else kernel(self, name, device))
    model = tiny_qwen3_5(num_hidden_layers=1, linear_num_key_heads=4)
    batch = tiny_batch(2, 65)
    with instrument(model) as ledger:
        loss = model(**batch).loss
    rows = ledger.by_region()
    loss.backward()
    want = [p.grad for p in model.parameters()]
    b, t, c = 2, 65, 192
    output, before_activation = b * t * c * 4, b * (t + 3) * c * 4
    projection = b * t * (c + 64) * 4  # q|k|v, and z, which norm_out saves
    # q, k and v are views of the convolution's output: one storage.
    assert rows["delta_rule"].kept_bytes + rows["prep"].kept_bytes == output + b * t * 4 * 4
    freed = {}
    for label in ("gdn_in_proj_conv", "gdn_in_proj_conv_prep", "gdn_conv", "gdn_front"):
        model.zero_grad()
        with no_collector(), apply_plan(model, label) as applied:
            model(**batch).loss.backward()
            assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want, strict=True)), label
            freed[label] = applied.ledger.discarded_bytes
    assert freed["gdn_in_proj_conv"] == projection + before_activation
    assert freed["gdn_in_proj_conv_prep"] == projection + before_activation + output
    assert freed["gdn_conv"] == before_activation + output
    assert freed["gdn_front"] > freed["gdn_in_proj_conv_prep"]
