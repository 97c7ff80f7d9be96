"""Recipes on one GPU: flash-linear-attention's loss against the plain one, and the GDN stack with its predicted bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gdn.bench.arm import run_arm
from lightning_gdn.bench.labels_table import predict
from lightning_gdn.bench.module import BenchModule, make_module
from lightning_gdn.bench.recipes import load

pytestmark = pytest.mark.gpu

STACK = (
    "model.hidden_size=256 model.num_hidden_layers=3 model.linear_num_key_heads=2 model.linear_num_value_heads=4 data.seq_len=512 "
    "trainer.max_steps=2 monitor.warmup_steps=1"
).split()
VOCABULARY = 32768
ARMS = ["none", "gdn_norm_out", "gdn_conv+gdn_norm_out+layernorm", "gdn_front", "full"]


def stack(*overrides: str) -> BenchModule:
    module = make_module(load("gdn_stack_20", [*STACK, f"model.vocab_size={VOCABULARY}", *overrides]).recipe)
    with torch.device("cuda"):
        module.configure_model()
    return module


def step(module: BenchModule, ids: Tensor, *, autocast: bool) -> tuple[float, list[Tensor], int]:
    """Loss, gradients, and the peak above what was allocated before."""
    module.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = module(ids)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in module.parameters() if p.grad is not None], torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    ("precision", "bound"),
    # of the whole gradient: bfloat16 logits round by 2**-9 in both losses, their gradient once more; in float32 the losses' sums differ in
    # order, and Triton's dots round what they are given to TF32, by 2**-11
    [("32-true", 2.0**-11), ("bf16-true", 2.0**-6), ("bf16-mixed", 2.0**-6)],
)
def test_the_fused_loss_is_the_plain_one_without_logits(precision: str, bound: float) -> None:
    ids = torch.randint(0, VOCABULARY, (2, 512), device="cuda")
    plain, fused = (stack(f"trainer.precision={precision}", f"trainer.loss={loss}") for loss in ("cross_entropy", "fused_linear_cross_entropy"))
    fused.load_state_dict(plain.state_dict())
    for module in (plain, fused):
        step(module, ids, autocast=precision == "bf16-mixed")  # kernels are tuned here, which takes memory
    loss, gradients, peak = step(plain, ids, autocast=precision == "bf16-mixed")
    loss_fused, gradients_fused, peak_fused = step(fused, ids, autocast=precision == "bf16-mixed")
    assert loss_fused == pytest.approx(loss, rel=bound)
    assert len(gradients) == len(gradients_fused)
    apart = sum((a.double() - b.double()).square().sum() for a, b in zip(gradients, gradients_fused, strict=True)) ** 0.5
    assert apart <= bound * sum(a.double().square().sum() for a in gradients) ** 0.5
    assert peak_fused < peak - ids.numel() * VOCABULARY * 2, "at least the logits in bfloat16"


def test_the_stack_retains_what_is_predicted() -> None:
    loaded = load("gdn_stack_20", STACK)
    prediction = predict(loaded, ARMS)
    for arm in ARMS:
        record = run_arm(loaded.recipe, loaded.saved, arm)
        assert record["status"] == "ok", record["error"]
        assert record["retained_bytes"] == prediction.retained_bytes[arm], arm
        assert record["kernels"] == prediction.kernels
        assert record["kernels"]["norm_out"] == "fla.rms_norm_gated"
