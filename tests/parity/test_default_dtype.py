"""Lightning's bf16-true sets the default dtype around the training step only; a replay in backward must see it all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn import apply_plan
from tests.models import tiny_batch, tiny_qwen3_5


class RandomMask(nn.Module):
    """Draws numbers in the default dtype: other bits in bfloat16 than in float32."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * (torch.rand(x.shape[:-1]).unsqueeze(-1) > 0.1)


@pytest.mark.parametrize("label", ["mlp", "full"])
def test_a_replay_sees_the_default_dtype_of_the_forward(label: str) -> None:
    model = tiny_qwen3_5().to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.gate_proj = RandomMask(layer.mlp.gate_proj)
    batch = tiny_batch()

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        torch.set_default_dtype(torch.bfloat16)
        try:
            loss = model(**batch).loss
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        assert torch.get_default_dtype() == torch.float32
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step()
    with apply_plan(model, label):
        assert all(torch.equal(a, b) for a, b in zip(plain, step(), strict=True))
