"""Blocks in which nothing moves, since others have taken the share: nothing of offload runs in them, and every figure is as if it did."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn import apply_plan
from lightning_gdn.models import GDNStack
from lightning_gdn.moving import Mover
from lightning_gdn.offload import handles
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import moving, nothing_left

LAYERS = 10
LABELS = "offload:gdn_core_attn"


def stack() -> nn.Module:
    torch.manual_seed(0)
    return GDNStack(num_layers=LAYERS, hidden_size=64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)


def loss_of(model: nn.Module, tokens: int = 33) -> Tensor:
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
    loss: Tensor = model(x).square().mean()
    return loss


def figures(statistics: Any) -> dict[str, Any]:
    """Every count of a step; what is pinned depends on the steps before."""
    counts: dict[str, Any] = asdict(statistics.without_times())
    return {name: value for name, value in counts.items() if not name.startswith("pinned")}


class Looks:
    """Blocks of which a `Mover` was made."""

    def __init__(self) -> None:
        self.blocks = 0

    def take(self) -> int:
        found, self.blocks = self.blocks, 0
        return found


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    found, init = Looks(), Mover.__init__

    def counted(self: Mover, *args: Any, **kwargs: Any) -> None:
        found.blocks += 1
        init(self, *args, **kwargs)

    monkeypatch.setattr(Mover, "__init__", counted)
    return found


def step(model: nn.Module, applied: Any, forward: Callable[[], Tensor]) -> tuple[list[Tensor], dict[str, Any]]:
    model.zero_grad()
    forward().backward()
    statistics = applied.step_statistics()
    nothing_left(applied)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None], figures(statistics)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("share", "looked_at"), [(0.3, 6), (0.5, 6), (0.11, 3), (0.02, LAYERS), (0.7, LAYERS), (1.0, LAYERS)], ids=str)
@pytest.mark.parametrize("recompute", ["", "gdn_norm_out+"])
def test_later_steps_look_only_where_something_moves(share: float, looked_at: int, recompute: str, looks: Looks) -> None:
    model = stack()
    loss_of(model).backward()
    want = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    seen = []
    with apply_plan(model, moving(f"{recompute}{LABELS}@{share}", resident_last_blocks=0, min_bytes=0)) as applied:
        steps = [(step(model, applied, lambda: loss_of(model)), seen.append(looks.take()))[0] for _ in range(4)]
    for grads, counts in steps:
        assert equal(grads, want)
        assert counts == steps[0][1], "the share of a step is the same whether a block was asked or known"
    assert steps[0][1]["bytes_out"] <= share * steps[0][1]["eligible_bytes"]
    assert seen[0] == LAYERS
    assert seen[1] == seen[2] == seen[3] <= looked_at


@pytest.mark.parametrize("family", ["stack", "qwen3_5"])
def test_lengths_that_come_and_go_count_as_they_do_alone(family: str, looks: Looks) -> None:
    model = stack() if family == "stack" else tiny_qwen3_5()

    def forward(tokens: int) -> Callable[[], Tensor]:
        if family == "stack":
            return lambda: loss_of(model, tokens)
        return lambda: model(**tiny_batch(2, tokens)).loss

    plan = moving(f"{LABELS}@0.4", resident_last_blocks=1, min_bytes=3000)
    alone = {}
    for tokens in (33, 65, 7):
        with apply_plan(model, plan) as applied:
            alone[tokens] = step(model, applied, forward(tokens))
    looks.take()
    with apply_plan(model, plan) as applied:
        for tokens in (33, 65, 7, 33, 33, 7, 65, 65, 7, 33):
            grads, counts = step(model, applied, forward(tokens))
            assert equal(grads, alone[tokens][0])
            assert counts == alone[tokens][1], tokens
    assert looks.take() < 10 * len(list(model.modules()))


def test_several_forwards_evaluation_and_one_that_raises(looks: Looks) -> None:
    model = stack()
    with apply_plan(model, moving(f"{LABELS}@0.3", resident_last_blocks=0, min_bytes=0)) as applied:
        _, want = step(model, applied, lambda: loss_of(model))
        looks.take()
        for _ in range(2):
            both = step(model, applied, lambda: loss_of(model) + loss_of(model))[1]
            assert both["bytes_out"] == 2 * want["bytes_out"]
            assert both["eligible_bytes"] == 2 * want["eligible_bytes"]
        with torch.no_grad():
            loss_of(model)

        def raises(*_: Any) -> None:
            raise KeyError("stop")

        hook = model.layers[5].register_forward_pre_hook(raises)
        with pytest.raises(KeyError):
            loss_of(model)
        hook.remove()
        applied.step_statistics()
        loss_of(model)  # abandoned
        applied.step_statistics()
        assert step(model, applied, lambda: loss_of(model))[1] == want


def test_another_share_and_a_full_pool_are_asked_again(looks: Looks) -> None:
    """What is known of a block holds for one share; where the pool was full, a later pass may find room."""
    model = stack()
    alone = {}
    for share in (0.5, 0.3, 0.1):
        with apply_plan(model, moving(f"{LABELS}@{share}", resident_last_blocks=0, min_bytes=0)) as applied:
            alone[share] = step(model, applied, lambda: loss_of(model))[1]
    with apply_plan(model, moving(f"{LABELS}@0.5", resident_last_blocks=0, min_bytes=0)) as applied:
        (engine,) = (step(model, applied, lambda: loss_of(model)) and applied.engines).by_device.values()
        for share in (0.5, 0.3, 0.1, 0.5, 0.1, 0.3):
            engine.fraction = share
            assert step(model, applied, lambda: loss_of(model))[1] | {"fraction": 0} == alone[share] | {"fraction": 0}
        engine.fraction, cap = 1.0, engine.pool.cap
        engine.close()
        engine.pool.cap = 8192
        for _ in range(3):
            assert step(model, applied, lambda: loss_of(model))[1]["fallbacks"] > 0
        engine.pool.cap = cap
        full = step(model, applied, lambda: loss_of(model))[1]
        assert full["fallbacks"] == 0
        assert full["bytes_out"] == full["eligible_bytes"]


def test_only_sizes_let_a_block_out(looks: Looks) -> None:
    """A storage that stayed for another reason may move in a later pass: such a block is asked every time."""
    assert {"budget", "min_bytes", "resident"} == handles.BY_SIZE
    model = stack()
    with apply_plan(model, moving("full+offload:block_input", resident_last_blocks=LAYERS - 2, min_bytes=0)) as applied:
        for _ in range(3):
            looks.take()
            counts = step(model, applied, lambda: loss_of(model))[1]
        assert set(counts["skipped"]) == {"held", "resident"}, "the first block's input is a leaf"
        assert looks.take() == 2, "that block and the one that moves"


def test_copies_of_a_model_learn_for_themselves(looks: Looks) -> None:
    model = stack()
    with apply_plan(model, moving(f"{LABELS}@0.3", resident_last_blocks=0, min_bytes=0)) as applied:
        for _ in range(2):
            want = step(model, applied, lambda: loss_of(model))
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        looks.take()
        loss_of(other).backward()
        assert looks.take() == LAYERS
        applied.step_statistics()
        assert step(model, applied, lambda: loss_of(model))[1] == want[1]


@pytest.mark.parametrize("resident", [0, 1, 3])
@pytest.mark.parametrize("family", ["stack", "qwen3_5"])
def test_a_small_share_moves_with_resident_blocks_and_others_without_the_label(family: str, resident: int) -> None:
    """A quarter of a hybrid's blocks have nothing of it, and the last ones keep theirs: neither is waited for."""
    model = stack() if family == "stack" else tiny_qwen3_5(num_hidden_layers=12)
    forward = (lambda: loss_of(model)) if family == "stack" else (lambda: model(**tiny_batch(2, 65)).loss)
    for share in (0.05, 0.1, 0.25, 0.4):
        with apply_plan(model, moving(f"{LABELS}@{share}", resident_last_blocks=resident, min_bytes=0)) as applied:
            for _ in range(3):
                counts = step(model, applied, forward)[1]
        largest = counts["eligible_bytes"] / (LAYERS - resident)
        assert share - largest / counts["eligible_bytes"] / 2 < counts["bytes_out"] / counts["eligible_bytes"] <= share, (share, counts)


def test_as_many_packed_sequences_as_there_are_is_no_new_state(looks: Looks) -> None:
    """Their number differs in every step; their offsets are small, and nothing large depends on it."""
    model = tiny_qwen3_5(num_hidden_layers=8)
    x, positions = torch.randn(1, 66, 64), torch.arange(66).expand(3, 1, 66)
    rotary = model.model.rotary_emb(x, positions)

    def forward(sequences: int) -> Tensor:
        found, offsets = x.requires_grad_() * 1.0, torch.linspace(0, 66, sequences + 1).int()
        for layer in model.model.layers:
            found = layer(found, position_embeddings=rotary, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
        return found.square().mean()

    with apply_plan(model, moving(f"{LABELS}@0.3", resident_last_blocks=0, min_bytes=1024)) as applied:
        _, want = step(model, applied, lambda: forward(1))
        seen = []
        for sequences in range(2, 12):
            looks.take()
            assert step(model, applied, lambda sequences=sequences: forward(sequences))[1] == want
            seen.append(looks.take())
    assert max(seen[1:]) < 6, "only blocks in which something moves are looked at"


def swapped_for_smaller(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = nn.Linear(64, 32), nn.Linear(64, 32)
        layer.mlp.down_proj = nn.Linear(32, 64)


class Adapter(nn.Module):
    """A projection with a low-rank path beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(inner.in_features, 4, bias=False), nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def with_adapters(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)


def with_dropout_off_in_one_part(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.eval()


@pytest.mark.parametrize("change", [swapped_for_smaller, with_adapters, with_dropout_off_in_one_part])
@pytest.mark.parametrize("share", [0.08, 0.3])
def test_modules_that_change_are_seen_at_once(change: Callable[[Any], None], share: float) -> None:
    torch.manual_seed(0)
    model = tiny_qwen3_5(num_hidden_layers=8)
    plan = moving(f"offload:gdn_core_attn+offload:mlp@{share}", resident_last_blocks=1, min_bytes=3000)

    def forward() -> Tensor:
        return model(**tiny_batch(2, 33)).loss

    with apply_plan(model, plan) as applied:
        for _ in range(3):
            step(model, applied, forward)
        change(model)
        grads, counts = step(model, applied, forward)
        assert step(model, applied, forward)[1] == counts
    model.zero_grad()
    forward().backward()
    assert equal(grads, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    with apply_plan(model, plan) as applied:
        assert step(model, applied, forward)[1] == counts


def test_an_input_that_becomes_a_leaf_is_seen_at_once() -> None:
    """A leaf is held by its own graph node: its storage stays, so other blocks take the share."""
    model, plan = stack(), moving("full+offload:block_input@0.3", resident_last_blocks=0, min_bytes=0)

    def forward(leaf: bool) -> Tensor:
        x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return model(x if leaf else x * 1.0).square().mean()

    alone = {}
    for leaf in (True, False):
        with apply_plan(model, plan) as applied:
            alone[leaf] = step(model, applied, lambda leaf=leaf: forward(leaf))[1]
    with apply_plan(model, plan) as applied:
        for leaf in (False, False, False, True, True, False):
            counts = step(model, applied, lambda leaf=leaf: forward(leaf))[1]
            assert counts == alone[leaf]
            assert counts["bytes_out"] <= 0.3 * counts["eligible_bytes"]


def wide(x: Tensor) -> Tensor:
    """The same numbers as a view of a storage that is many times larger."""
    return torch.cat([x, x.new_zeros(2, 500, 64)], 1)[:, :33]


def turned(x: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class Kind(Tensor):
    """A subclass, of which nothing moves."""


def hooked(model: Any, make: Callable[[], Callable[..., Any]]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        hooks = [layer.mlp.act_fn.register_forward_hook(make()) for layer in model.model.layers]
        try:
            return model(**tiny_batch(2, 33)).loss
        finally:
            for hook in hooks:
                hook.remove()

    return forward


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_other_hooks_and_other_kinds_of_weights_are_seen_at_once(share: float) -> None:
    """As many hooks as before, that save other tensors; weights that are made in the call."""
    model = tiny_qwen3_5(num_hidden_layers=8)
    plan = moving(f"offload:mlp@{share}", resident_last_blocks=0, min_bytes=0)

    def made() -> dict[str, Tensor]:
        return {name: parameter * 1.0 for name, parameter in model.named_parameters()}

    forwards = [
        hooked(model, lambda: lambda module, inputs, output: output * 2),
        hooked(model, lambda: lambda module, inputs, output: output.sin().cos().exp().tanh()),
        lambda: model(**tiny_batch(2, 33)).loss,
        lambda: torch.func.functional_call(model, made(), kwargs=tiny_batch(2, 33)).loss,
    ]
    alone = []
    for forward in forwards:
        with apply_plan(model, plan) as applied:
            alone.append(step(model, applied, forward))
    with apply_plan(model, plan) as applied:
        for index in (0, 0, 1, 2, 2, 3, 0, 3, 1, 2):
            grads, counts = step(model, applied, forwards[index])
            assert equal(grads, alone[index][0])
            assert counts == alone[index][1], index


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("labels", ["full+offload:block_input", LABELS, "offload:gdn_in_proj"])
@pytest.mark.filterwarnings("ignore:offload label")  # the smallest share has no room for one storage of some plans
def test_an_input_of_another_layout_or_storage_is_seen_at_once(labels: str, share: float) -> None:
    model, plan = stack(), moving(f"{labels}@{share}", resident_last_blocks=0, min_bytes=0)
    layouts: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, wide, turned, lambda x: torch.clone(x).as_subclass(Kind))

    def forward(layout: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.randn(2, 33, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return model(layout(x)).square().mean().as_subclass(Tensor)

    alone = {}
    for layout in layouts:
        with apply_plan(model, plan) as applied:
            alone[layout] = step(model, applied, lambda layout=layout: forward(layout))
    with apply_plan(model, plan) as applied:
        for layout in (*layouts, wide, torch.clone, turned, torch.clone, wide, *layouts[::-1]):
            grads, counts = step(model, applied, lambda layout=layout: forward(layout))
            assert equal(grads, alone[layout][0])
            assert counts == alone[layout][1]
            assert counts["bytes_out"] <= share * counts["eligible_bytes"]


def test_a_block_that_raises_counts_the_same_whether_it_was_known() -> None:
    model, found = stack(), []
    for known in (False, True):
        with apply_plan(model, moving(f"{LABELS}@0.3", resident_last_blocks=0, min_bytes=0)) as applied:
            if known:
                for _ in range(3):
                    step(model, applied, lambda: loss_of(model))

            def raises(*_: Any) -> None:
                raise KeyError("stop")

            for layer in model.layers:
                hook = layer.mixer.out_proj.register_forward_pre_hook(raises)
                with pytest.raises(KeyError):
                    loss_of(model)
                hook.remove()
                found.append(figures(applied.step_statistics()))
    assert found[:LAYERS] == found[LAYERS:]
