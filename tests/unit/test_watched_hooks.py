"""Where something moves, a block learns in one call which regions save what moves; later calls look at those alone and move the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gdn import takeover as takeover_module
from lightning_gdn.apply import AppliedPlan, apply_plan
from lightning_gdn.labels import Selection
from lightning_gdn.models import GDNStack
from lightning_gdn.moving import Moved, Mover
from lightning_gdn.offload_config import OFFLOAD_LABELS
from lightning_gdn.tape import Tape
from tests.models import tiny_batch, tiny_qwen3_5, tiny_qwen3_next
from tests.parity.steps import OFFLOAD_PLANS, moving, nothing_left

# A label may have nothing to move in a block of another kind or at a short length; the first step says so.
pytestmark = pytest.mark.filterwarnings("ignore::lightning_gdn.apply.FreesNothingWarning")

GDN = "offload:gdn_core_attn+offload:gdn_in_proj+offload:gdn_norm_out+offload:mlp"
ALL = f"{GDN}+offload:core_attn"


@dataclass
class Call:
    """What one forward of a model did."""

    learns: list[bool] = field(default_factory=list)
    """Per block: whether its hooks saw all regions."""
    moved: list[list[tuple[str, int, int]]] = field(default_factory=list)
    """Per block: region, bytes and handles of each storage that moved."""
    unfreed: int = 0
    """Bytes of moved storages that were on the device when the forward had ended."""
    packs: int = 0
    """Saved tensors that hooks looked at, outside recomputed regions."""
    bytes_out: int = 0
    grads: list[Tensor | None] = field(default_factory=list)


class Watch:
    """Writes down what blocks do while it is open."""

    def __init__(self) -> None:
        self.call = Call()
        self._moved: list[Moved] = []

    @contextmanager
    def open(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
        finish, pack = Mover.finish, Tape._pack_kept

        def finishing(mover: Mover, regions: Any) -> list[Moved]:
            moved = finish(mover, regions)
            self.call.learns.append(mover.watch is None)
            if moved:  # a block that moved nothing for its sizes is not asked again
                self.call.moved.append([(each.region, each.ticket.nbytes, each.ticket._copy.handles) for each in moved])
            self._moved += moved
            return moved

        def packing(tape: Tape, tensor: Tensor) -> object:
            self.call.packs += 1
            return pack(tape, tensor)

        with monkeypatch.context() as patch:
            patch.setattr(Mover, "finish", finishing)
            patch.setattr(Tape, "_pack_kept", packing)
            yield self

    def run(self, model: nn.Module, forward: Callable[[], Tensor], applied: AppliedPlan | None = None) -> Call:
        """A step: forward, backward, and what of it can be seen."""
        self.call = call = Call()
        model.zero_grad()
        torch.manual_seed(0)
        loss = forward()
        call.unfreed = sum(each.ticket.nbytes for each in self._moved if not each.source.expired())
        self._moved.clear()
        loss.backward()
        call.grads = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        del loss
        if applied is not None:
            statistics = applied.step_statistics()
            call.bytes_out = statistics.bytes_out if statistics is not None else 0
            nothing_left(applied)
        return call


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with Watch().open(monkeypatch) as opened:
        yield opened


def hf(model: nn.Module, tokens: int = 33, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """The loss of a model of transformers; with a dtype under autocast."""

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype, cache_enabled=False) if dtype is not None else nullcontext():
            loss: Tensor = model(**tiny_batch(2, tokens)).loss
        return loss

    return forward


def stack_loss(model: nn.Module, tokens: int = 33) -> Tensor:
    x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens)).requires_grad_()
    loss: Tensor = model(x).square().mean()
    return loss


@functools.cache
def dense() -> nn.Module:
    return tiny_qwen3_5()


@functools.cache
def experts() -> nn.Module:
    return tiny_qwen3_next()


@functools.cache
def stack() -> nn.Module:
    torch.manual_seed(0)
    return GDNStack(num_layers=3, hidden_size=64, num_k_heads=2, num_v_heads=4, head_k_dim=16, head_v_dim=16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Callable[[], Tensor]], set[str]]] = {
    "qwen3_5": (dense, hf, set()),
    "qwen3_5 bf16": (dense, lambda model: hf(model, dtype=torch.bfloat16), set()),
    "qwen3_next": (experts, hf, {"mlp"}),
    "stack": (stack, lambda model: functools.partial(stack_loss, model), {"mlp", "core_attn"}),
}
"""Name -> model, its loss, and labels that it cannot have."""


def plans(lacking: set[str]) -> list[Selection]:
    return [plan for plan in OFFLOAD_PLANS if plan.offload is not None and not lacking & {*plan.labels, *plan.offload.labels}]


def same(got: Call, want: Call) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got.grads, want.grads, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_later_calls_move_what_the_first_moved_and_look_at_less(name: str, watch: Watch) -> None:
    make, loss, lacking = MODELS[name]
    model = make()
    forward, chosen = loss(model), plans(lacking)
    assert {label for plan in chosen if plan.offload for label in plan.offload.labels} >= set(OFFLOAD_LABELS) - lacking - {"moe_act"}
    want = watch.run(model, forward)
    moving_plans = 0
    for plan in chosen:
        with apply_plan(model, plan) as applied:
            calls = [watch.run(model, forward, applied) for _ in range(5)]
            assert applied.ledger.unfreed_bytes in ((0, None) if not calls[0].bytes_out else (0,))
        first, later = calls[0], calls[1:]
        assert all(first.learns), str(plan)
        assert first.unfreed == 0, str(plan)
        moving_plans += first.bytes_out > 0
        for call in calls:
            assert same(call, want), str(plan)
            assert (call.bytes_out, call.moved, call.unfreed) == (first.bytes_out, first.moved, 0), str(plan)
        for call in later:
            assert not any(call.learns), str(plan)
            assert call.packs == later[0].packs
            assert call.packs < first.packs or (plan.full is not None and call.packs == first.packs), str(plan)
    assert moving_plans >= len(chosen) - (name == "qwen3_5 bf16")


@pytest.mark.parametrize(
    ("label", "regions"),
    [("gdn_core_attn", {"delta_rule"}), ("gdn_in_proj", {"conv", "norm_out"}), ("gdn_norm_out", {"norm_out"}), ("core_attn", {"core_attn"})],
)
def test_only_the_regions_that_share_what_moves_are_watched(label: str, regions: set[str], watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = dense(), set[str]()
    saved = Mover.saved

    def saving(mover: Mover, region: str, tensor: Tensor) -> object:
        seen.add(region)
        return saved(mover, region, tensor)

    monkeypatch.setattr(Mover, "saved", saving)
    with apply_plan(model, moving(f"offload:{label}")) as applied:
        first, unwatched = watch.run(model, hf(model), applied), set(seen)
        seen.clear()
        second = watch.run(model, hf(model), applied)
    assert seen == regions
    assert unwatched >= regions | {"gate_up", "act", "down", "post_norm"}
    assert second.packs < first.packs / 2


@pytest.mark.parametrize("name", ["qwen3_5", "stack"])
@pytest.mark.parametrize("arm", [ALL, "gdn_conv+gdn_norm_out+layernorm+offload:gdn_core_attn"])
def test_lengths_may_change_in_any_order(name: str, arm: str, watch: Watch) -> None:
    """Below `min_bytes` and above it, and at lengths where the rule pads and where it does not."""
    make, _, lacking = MODELS[name]
    model = make()
    arm = "+".join(part for part in arm.split("+") if part.removeprefix("offload:") not in lacking)

    def forward(tokens: int) -> Callable[[], Tensor]:
        return hf(model, tokens) if name == "qwen3_5" else functools.partial(stack_loss, model, tokens)

    lengths = (130, 64, 65, 3, 2)
    for min_bytes in (0, 20_000):
        plan = moving(arm, min_bytes=min_bytes)
        control, alone = {}, {}
        for tokens in lengths:
            control[tokens] = watch.run(model, forward(tokens))
            with apply_plan(model, plan) as applied:
                alone[tokens] = watch.run(model, forward(tokens), applied)
        if min_bytes:
            assert alone[2].bytes_out < alone[130].bytes_out
        for order in (lengths, lengths[::-1]):
            with apply_plan(model, plan) as applied:
                for index, tokens in enumerate((*order, *order)):
                    call = watch.run(model, forward(tokens), applied)
                    assert all(learns is (index < len(order)) for learns in call.learns), "each length once"
                    assert same(call, control[tokens])
                    assert (call.bytes_out, call.moved, call.unfreed) == (alone[tokens].bytes_out, alone[tokens].moved, 0), (order, tokens)


def test_another_mode_or_autocast_state_is_learned_anew(watch: Watch) -> None:
    model = tiny_qwen3_5(num_hidden_layers=2)
    plain, low, half = (hf(model, dtype=dtype) for dtype in (None, torch.bfloat16, torch.float16))
    embedding = model.get_input_embeddings().weight
    steps: list[tuple[Callable[[], Any] | None, Callable[[], Tensor], list[bool]]] = [
        (None, plain, [True, True]),
        (None, plain, [False, False]),
        (None, low, [True, True]),
        (None, low, [False, False]),
        (None, half, [True, True]),
        (None, plain, [False, False]),
        (model.eval, plain, [True, True]),
        (None, plain, [False, False]),
        (model.train, plain, [False, False]),
        (lambda: embedding.requires_grad_(False), plain, [True, False]),
        (None, plain, [False, False]),
        (lambda: embedding.requires_grad_(True), plain, [False, False]),
        (lambda: model.model.layers[1].mlp.down_proj.requires_grad_(False), plain, [False, True]),
        (None, plain, [False, False]),
        (model.double, plain, [True, True]),
    ]
    with apply_plan(model, moving(GDN)) as applied:
        for index, (change, forward, learns) in enumerate(steps):
            if change is not None:
                change()
            call = watch.run(model, forward, applied)
            assert (call.learns, call.unfreed) == (learns, 0), index
            with torch.no_grad():
                model(**tiny_batch(1, 5))  # validation in between changes nothing


def test_it_learns_anew_now_and_then(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    assert takeover_module.RELEARN >= 16
    monkeypatch.setattr(takeover_module, "RELEARN", 3)
    model = tiny_qwen3_5(num_hidden_layers=1)
    with apply_plan(model, moving("offload:gdn_core_attn")) as applied:
        learns = [watch.run(model, hf(model), applied).learns for _ in range(10)]
    assert learns == [[index % 4 == 0] for index in range(10)]


def test_a_call_that_fails_teaches_nothing(watch: Watch) -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    want = watch.run(model, hf(model))
    down = model.model.layers[0].mlp.down_proj
    with apply_plan(model, moving("offload:gdn_core_attn")) as applied:
        weight = down.weight
        down.weight = nn.Parameter(torch.zeros(3, 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            hf(model)()
        down.weight = weight
        calls = [watch.run(model, hf(model), applied) for _ in range(2)]
    assert [call.learns for call in calls] == [[True], [False]]
    assert all(same(call, want) and call.unfreed == 0 and call.bytes_out for call in calls)


def test_an_alias_that_appears_later_is_right_at_once_and_freed_after_it_was_learned(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm whose output its own region begins to save: the same storage that the MLP saves as its input, and that the label moves."""
    monkeypatch.setattr(takeover_module, "RELEARN", 4)
    model = tiny_qwen3_5(num_hidden_layers=1)
    saves = False
    handle = model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, args, out: out.sigmoid() if saves else out)
    control = {}
    for saves in (False, True):
        control[saves] = watch.run(model, hf(model))
    with apply_plan(model, moving("offload:mlp")) as applied:
        unfreed = []
        for index in range(12):
            saves = index >= 2
            call = watch.run(model, hf(model), applied)
            assert same(call, control[saves])
            assert call.learns == [index % 5 == 0]
            unfreed.append(call.unfreed)
    handle.remove()
    assert unfreed == [0, 0, *[2 * 33 * 64 * 4] * 3, *[0] * 7], "it costs memory until the block looks at every region again"


def test_a_parameter_that_is_unfrozen_moves_its_input_at_once(watch: Watch) -> None:
    """In front of everything that is trained a convolution saves nothing; behind a trained projection it saves that one's output."""
    model = tiny_qwen3_5(num_hidden_layers=1)
    mixer = model.model.layers[0].linear_attn
    for part in (model.get_input_embeddings(), model.model.layers[0].input_layernorm, mixer):
        part.requires_grad_(False)
    mixer.out_proj.requires_grad_(True)
    control, alone = {}, {}
    for trained in (False, True):
        mixer.in_proj_qkv.requires_grad_(trained)
        control[trained] = watch.run(model, hf(model))
        with apply_plan(model, moving("offload:gdn_in_proj")) as applied:
            alone[trained] = watch.run(model, hf(model), applied)
    assert (alone[False].bytes_out, alone[True].bytes_out) == (0, 2 * 33 * 128 * 4)
    with apply_plan(model, moving("offload:gdn_in_proj")) as applied:
        for index in range(8):
            mixer.in_proj_qkv.requires_grad_(index >= 2)
            call = watch.run(model, hf(model), applied)
            assert same(call, control[index >= 2])
            assert (call.unfreed, call.moved) == (0, alone[index >= 2].moved)


def test_what_is_saved_between_regions_keeps_the_hooks_open_around_the_whole_block(watch: Watch) -> None:
    """A hook on a module runs between regions; here it saves the storage that the MLP's label moves."""
    model = tiny_qwen3_5(num_hidden_layers=2)
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0].sigmoid(),))
    want = watch.run(model, hf(model))
    for arm in ("offload:mlp", "gdn_norm_out+offload:mlp+offload:gdn_core_attn"):
        with apply_plan(model, moving(arm)) as applied:
            for index in range(4):
                call = watch.run(model, hf(model), applied)
                assert same(call, want)
                assert call.unfreed == 0
                assert call.learns == [True, index == 0], "the other block has no such hook"
    handle.remove()


def test_copies_of_a_model_learn_on_their_own(watch: Watch) -> None:
    model = tiny_qwen3_5(num_hidden_layers=1)
    with apply_plan(model, moving(GDN)) as applied:
        watch.run(model, hf(model), applied)
        twin = copy.deepcopy(model)
        twin.eval()
        assert [watch.run(each, hf(each), applied).learns for each in (twin, model, twin, model)] == [[True], [False], [False], [False]]
