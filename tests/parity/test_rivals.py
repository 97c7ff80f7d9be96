"""Rivals compute what the control computes, bit for bit, recompute by torch.utils.checkpoint alone, and leave nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gdn.apply import apply_plan, instrument
from lightning_gdn.bench import rivals as module
from lightning_gdn.bench.arms import PARTS, Rival, parse
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.rivals import install
from lightning_gdn.bench.segments import CONSUMERS
from lightning_gdn.inspection import inspect_model
from lightning_gdn.kernels import torch_ops
from lightning_gdn.models import GDNStack
from lightning_gdn.replay import thread_state
from lightning_gdn.takeover import foreign_hooks
from tests.models import tiny_batch, tiny_qwen3_5, tiny_qwen3_next
from tests.parity.steps import differences, step

W1_TO_W4 = ["checkpoint:gdn_in_proj", "checkpoint:gdn_in_proj_split", "checkpoint:gdn_in_proj_conv", "checkpoint:gdn_in_proj_conv_prep"]
WHOLE = ["checkpoint:full", "checkpoint:block:1", "selective_checkpoint", "save_on_cpu"]
ON_CPU = ["save_on_cpu:gdn_core_attn", "save_on_cpu:in_proj+gdn_norm_out"]
JOINED = [
    "checkpoint:gdn_front",
    "checkpoint:gdn",
    "checkpoint:gdn_conv+gdn_norm_out+layernorm",
    "checkpoint:mlp+core_attn+qkv+mixer_residual+post_norm",
]


def tiny_stack(**overrides: Any) -> GDNStack:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GDNStack(**{"num_layers": 3, "hidden_size": 32, "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 16, "head_v_dim": 16, **overrides})


def stack_step(stack: nn.Module) -> dict[str, Tensor]:
    stack.zero_grad(set_to_none=True)
    x = torch.randn(2, 65, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    loss = stack(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return {"loss": loss.detach(), "input": x.grad, **{name: p.grad for name, p in stack.named_parameters() if p.grad is not None}}


def single_regions(model: nn.Module) -> list[str]:
    return [f"checkpoint:{region}" for region in dict.fromkeys(r for layout in inspect_model(model).layouts for r in layout.regions)]


def on_cpu(model: nn.Module) -> list[str]:
    """`save_on_cpu` around single regions: two kinds of names, and every region that the model has."""
    return [*ON_CPU, "save_on_cpu:" + "+".join(arm.partition(":")[2] for arm in single_regions(model))]


@contextmanager
def under(model: nn.Module, arm: str, **options: Any) -> Iterator[module.Installed]:
    rival = parse(arm)
    assert isinstance(rival, Rival)
    installed = install(model, rival, **options)
    try:
        yield installed
    finally:
        installed.undo()


HF_MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_5": tiny_qwen3_5,
    "qwen3_next": lambda: tiny_qwen3_next(mlp_only_layers=[1]),
    "qwen3_next, z a view of the projection": lambda: tiny_qwen3_next(linear_num_value_heads=2, mlp_only_layers=[1]),
}


@pytest.mark.parametrize("name", list(HF_MODELS))
def test_every_rival_equals_the_control_to_the_bit(name: str) -> None:
    model = HF_MODELS[name]()
    want = step(model)
    unequal = {}
    for arm in [*W1_TO_W4, *WHOLE, *JOINED, *on_cpu(model), "hf_gradient_checkpointing", *single_regions(model)]:
        with under(model, arm):
            if found := differences(step(model), want):
                unequal[arm] = found
    assert unequal == {}
    assert differences(step(model), want) == []


@pytest.mark.parametrize("precision", ["bf16", "bf16_cached"])
def test_autocast_is_the_forwards_in_a_recompute(precision: str) -> None:
    model = tiny_qwen3_5()
    want = step(model, precision=precision, mask="left")
    for arm in [*W1_TO_W4[2:], *WHOLE, JOINED[2], *on_cpu(model)[-1:], "hf_gradient_checkpointing"]:
        with under(model, arm):
            assert differences(step(model, precision=precision, mask="left"), want) == [], arm


def test_dropout_draws_the_same_numbers_again() -> None:
    model = tiny_qwen3_5(attention_dropout=0.3)
    want = step(model)
    for arm in ["checkpoint:core_attn", "save_on_cpu:core_attn", "checkpoint:full", "selective_checkpoint", "hf_gradient_checkpointing"]:
        with under(model, arm):
            assert differences(step(model), want) == [], arm


@pytest.mark.parametrize("value_heads", [2, 4])
def test_every_rival_of_the_stack_equals_the_control_to_the_bit(value_heads: int) -> None:
    stack = tiny_stack(num_v_heads=value_heads)
    want = stack_step(stack)
    for arm in [*W1_TO_W4, *WHOLE, *JOINED[:3], *on_cpu(stack), *single_regions(stack)]:
        with under(stack, arm):
            got = stack_step(stack)
        assert [key for key in want if not torch.equal(got[key], want[key])] == [], arm


@pytest.mark.parametrize("part", [part for part in PARTS if len(part) > 1], ids="-".join)
def test_any_row_of_neighbours_can_be_one_checkpoint(part: tuple[str, ...]) -> None:
    """Which outputs a group has to hand out is declared in `CONSUMERS`; a wrong entry is an error or another gradient."""
    models: list[tuple[nn.Module, Callable[[nn.Module], Any]]] = [(tiny_qwen3_5(num_hidden_layers=4), lambda m: step(m, tokens=33).tensors)]
    if part[0] == "in_proj":
        models.append((tiny_stack(num_layers=2), stack_step))
    for model, run in models:
        want = run(model)
        for start in range(len(part)):
            for end in range(start + 2, len(part) + 1):
                with under(model, "checkpoint:" + "+".join(part[start:end])) as installed:
                    assert "-".join(part[start:end]) in installed.describe()
                    got = run(model)
                assert all(want[key] is None or torch.equal(got[key], want[key]) for key in want), part[start:end]
    assert all(region in CONSUMERS for region in part[:-1])


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[Counter[str]]:
    """Calls of a function, apart by whether a backward is running."""
    calls: Counter[str] = Counter()
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls["forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


@pytest.mark.parametrize(
    ("arm", "convs", "projections"),
    [
        ("checkpoint:gdn_in_proj", 0, 3),
        ("checkpoint:gdn_in_proj_conv", 3, 3),
        ("checkpoint:conv", 3, 0),
        ("checkpoint:gdn_conv", 3, 0),
        ("checkpoint:gdn_norm_out", 0, 0),
        ("checkpoint:block:1", 1, 1),
        ("checkpoint:full", 3, 3),
        ("hf_gradient_checkpointing", 3, 3),
        ("selective_checkpoint", 3, 3),
        ("save_on_cpu", 0, 0),
        ("save_on_cpu:conv+in_proj", 0, 0),
    ],
)
def test_the_backward_recomputes_what_the_arm_says(arm: str, convs: int, projections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3_5()
    calls: Counter[str] = Counter()
    for block in model.model.layers[:3]:
        linear = block.linear_attn.in_proj_z
        linear.register_forward_hook(lambda *_: calls.update(["forward" if torch._C._current_graph_task_id() == -1 else "backward"]))
    with under(model, arm), counted(monkeypatch, F, "conv1d") as conv_calls:
        step(model)
    assert conv_calls["forward"] == 3
    assert conv_calls["backward"] == convs
    assert (calls["forward"], calls["backward"]) == (3, projections)


def test_the_stacks_steps_are_recomputed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = tiny_stack()
    for arm, again in [("checkpoint:gdn_in_proj_conv", 3), ("checkpoint:block:2", 2), ("checkpoint:norm_out", 0)]:
        with under(stack, arm), counted(monkeypatch, torch_ops, "conv") as calls:
            stack_step(stack)
        assert (calls["forward"], calls["backward"]) == (3, again), arm


def test_save_on_cpu_copies_what_the_named_regions_save_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts by region, unpinned here; what each packs is what the region's own operations save."""
    packed: Counter[bool] = Counter()

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            def pack(tensor: Tensor) -> Tensor:
                packed[pin_memory] += 1
                return tensor.clone()

            opened[pin_memory] += 1
            super().__init__(pack, lambda tensor: tensor)

    opened: Counter[bool] = Counter()
    stack = tiny_stack()
    want = stack_step(stack)
    monkeypatch.setattr("lightning_gdn.bench.segments.save_on_cpu", Counted)
    per_region = {}
    for names, contexts in [("gdn_core_attn", 3), ("delta_rule", 3), ("norm_out", 3), ("gdn_norm_out+gdn_core_attn", 6), ("gdn_conv", 6)]:
        opened.clear()
        packed.clear()
        with under(stack, f"save_on_cpu:{names}") as installed:
            got = stack_step(stack)
        assert [key for key in want if not torch.equal(got[key], want[key])] == []
        assert opened == {False: contexts}
        assert f"save_on_cpu(pin_memory=True) around {contexts} regions in 3 of them: " in installed.describe()
        per_region[names] = packed[False]
    assert per_region["gdn_core_attn"] == per_region["delta_rule"] > 0
    assert per_region["gdn_norm_out+gdn_core_attn"] == per_region["delta_rule"] + per_region["norm_out"]
    with under(stack, "save_on_cpu:gdn_core_attn"), torch.no_grad():
        opened.clear()
        stack(torch.randn(1, 4, 32))
        assert not opened


def test_a_selective_checkpoint_saves_every_second_matmul() -> None:
    """The recompute runs the other half, and no attention."""
    counts: Counter[str] = Counter()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(5)]

    def chain(x: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).sin()
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).sin()

    out = torch.utils.checkpoint.checkpoint(chain, torch.randn(4, 8), use_reentrant=False, context_fn=module.selective_contexts)
    leaf = out.sum()
    with Counting():
        leaf.backward()
    # five matmuls have two products each in their backward (the first one only the weight's); two of the five ran again
    assert counts["aten.mm.default"] == 9 + 2
    assert not any("scaled_dot_product" in name and "backward" not in name for name in counts)


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {
        name: set(part.__dict__) - {"gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hooks"}
        for name, part in model.named_modules()
    }


@pytest.mark.parametrize("kernels", ["stock", "fused"])
@pytest.mark.parametrize(
    "arm", ["checkpoint:gdn_in_proj_conv", "checkpoint:full", "hf_gradient_checkpointing", "selective_checkpoint", "save_on_cpu", *ON_CPU]
)
def test_nothing_is_left_installed(arm: str, kernels: str) -> None:
    model = tiny_qwen3_5().eval()
    before, keys, want = attributes(model), list(model.state_dict()), step(model)
    with under(model, arm, kernels=kernels) as installed:
        assert list(model.state_dict()) == keys
        assert differences(step(model), want) == []
        assert foreign_hooks() is None
        with torch.no_grad():
            assert torch.equal(model(**tiny_batch()).logits, model(**tiny_batch()).logits)
        installed.undo()
        installed.undo()
    assert attributes(model) == before
    assert not any(getattr(part, "gradient_checkpointing", False) or part._forward_hooks or part.training for part in model.modules())
    assert getattr(thread_state, "tape", None) is None
    assert differences(step(model), want) == []
    apply_plan(model, "full").undo()


@pytest.mark.parametrize("arm", ["checkpoint:block:9", "checkpoint:moe_act", "save_on_cpu:moe_act"])
def test_a_refused_rival_leaves_nothing_either(arm: str) -> None:
    model = tiny_qwen3_5()
    before = attributes(model)
    with pytest.raises(UserError, match=arm), under(model, arm, kernels="fused"):
        pass
    assert attributes(model) == before


@pytest.mark.parametrize("arm", ["checkpoint:gdn_in_proj_conv", "save_on_cpu:gdn_norm_out"])
def test_after_an_exception_in_the_forward_the_next_step_is_right(arm: str) -> None:
    model = tiny_qwen3_5()
    want = step(model)
    with under(model, arm):
        norm = model.model.layers[1].linear_attn.norm
        handle = norm.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("planted")))
        with pytest.raises(ValueError, match="planted"):
            step(model)
        handle.remove()
        assert getattr(thread_state, "tape", None) is None
        assert differences(step(model), want) == []


def forward_of(model: nn.Module) -> Callable[[], Tensor]:
    if isinstance(model, GDNStack):
        x = torch.randn(2, 65, 32)
        return lambda: model(x).sum()
    return lambda: model(**tiny_batch()).loss


@pytest.mark.parametrize("name", [*HF_MODELS, "gdn_stack"])
def test_held_bytes_are_the_ledgers(name: str) -> None:
    """A rival that covers nothing of a block holds what the ledger counts for the control, one around whole blocks their inputs."""
    model = tiny_stack() if name == "gdn_stack" else HF_MODELS[name]()
    forward = forward_of(model)
    with instrument(model) as ledger:
        forward()
    kept: dict[str, int] = {}
    for row in ledger.rows():
        kept[row.block] = kept.get(row.block, 0) + row.kept_bytes
    blocks = list(kept)
    with under(model, "checkpoint:gdn_in_proj") as installed:
        assert installed.held_bytes(forward) == ledger.retained_bytes, "W1 frees nothing: its output holds the projection"
    with under(model, "checkpoint:block:1") as installed:
        one = installed.held_bytes(forward)
    with under(model, "checkpoint:full") as installed:
        full = installed.held_bytes(forward)
        assert installed.held_bytes(forward) == full, "counting can be repeated"
    assert one is not None
    assert full is not None
    first = one - sum(kept[block] for block in blocks[1:])
    assert 0 < first < kept[blocks[0]] / 10
    assert full == first * len(blocks)
    with under(model, "checkpoint:gdn_in_proj_conv") as installed:
        assert full < installed.held_bytes(forward) < ledger.retained_bytes
    for arm in ["selective_checkpoint", ON_CPU[0]]:
        with under(model, arm) as installed:
            assert installed.held_bytes(forward) is None


def test_no_rival_uses_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a tape was made")

    model = tiny_qwen3_5()
    monkeypatch.setattr("lightning_gdn.takeover.Tape", refuse)
    monkeypatch.setattr("lightning_gdn.tape.Tape.run", refuse)
    for arm in [*W1_TO_W4, *WHOLE, *JOINED, *ON_CPU, "hf_gradient_checkpointing"]:
        with under(model, arm):
            step(model)
    with pytest.raises(AssertionError, match="a tape was made"), apply_plan(model, "gdn_conv"):
        step(model)
