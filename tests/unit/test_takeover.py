"""Taking over a model: other people's hooks and checkpoints, copies, pickles, compilation, and putting everything back."""

from __future__ import annotations

import copy
import functools
import gc
import io
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from lightning_gdn.apply import apply_plan, instrument
from lightning_gdn.takeover import Takeover, foreign_hooks
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import moving

BATCH = tiny_batch(2, 33)


@pytest.fixture
def model() -> nn.Module:
    return tiny_qwen3_5()


def gradients(model: nn.Module, run: Callable[[], Tensor] | None = None) -> dict[str, Tensor | None]:
    model.zero_grad()
    (run() if run is not None else model(**BATCH).loss).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(a[n] is b[n] is None or torch.equal(a[n], b[n]) for n in a)


# Other saved-tensor hooks


@contextmanager
def save_on_cpu() -> Iterator[None]:
    with torch.autograd.graph.save_on_cpu():
        yield


@pytest.mark.parametrize("label", ["gdn_conv", "full"])
def test_save_on_cpu_around_a_block_is_refused_or_wins(model: nn.Module, label: str) -> None:
    want = gradients(model)
    with apply_plan(model, label), save_on_cpu(), pytest.raises(RuntimeError, match=r"save_on_cpu.*on_foreign_hooks=\"bypass\""):
        model(**BATCH)
    with apply_plan(model, label, on_foreign_hooks="bypass") as applied:
        with save_on_cpu():
            loss = model(**BATCH).loss
        assert applied.ledger.retained_bytes is None
        assert same(gradients(model, lambda: loss), want)
        assert same(gradients(model), want)
        assert applied.ledger.complete


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_users_checkpoint_around_the_model(model: nn.Module, reentrant: bool) -> None:
    """Non-reentrant checkpoints work by hooks of their own. Reentrant ones have none: their first pass runs without gradients, so nothing is
    taped there, and their second pass, inside backward, is a step of its own."""

    def run() -> Tensor:
        embeddings = model.get_input_embeddings()(BATCH["input_ids"])
        return checkpoint(lambda x: model(inputs_embeds=x, labels=BATCH["labels"]).loss, embeddings, use_reentrant=reentrant)

    want = gradients(model, run)
    if reentrant:
        with apply_plan(model, "full"):
            assert same(gradients(model, run), want)
        return
    with apply_plan(model, "full"), pytest.raises(RuntimeError, match="checkpoint"):
        run()
    with apply_plan(model, "full", on_foreign_hooks="bypass"):
        assert same(gradients(model, run), want)


def test_hooks_around_loss_and_backward_are_no_business_of_ours(model: nn.Module) -> None:
    want = gradients(model)
    with apply_plan(model, "full"):
        loss = model(**BATCH).loss
        with save_on_cpu():
            loss.backward()
    assert same({name: p.grad for name, p in model.named_parameters()}, want)
    assert foreign_hooks() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_h26_hf_gradient_checkpointing_already_on(model: nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\).*recompute=\['full'\]"):
        apply_plan(model, "gdn_conv")
    model.gradient_checkpointing_disable()
    with apply_plan(model, "gdn_conv"):
        gradients(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_h26_hf_gradient_checkpointing_switched_on_later(model: nn.Module, reentrant: bool) -> None:
    want = gradients(model)
    with apply_plan(model, "gdn_conv"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with pytest.raises(RuntimeError, match="gradient checkpointing was switched on after"):
            gradients(model)
    assert same(gradients(model), want), "without the plan the checkpointing works"


# Dynamo looks at `.grad` of every tensor it traces, and hides the warning that follows only where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compile_with_eager_backend(model: nn.Module) -> None:
    want = gradients(model)
    torch._dynamo.reset()
    with apply_plan(model, "gdn_in_proj_conv+layernorm") as applied:
        compiled = torch.compile(model, backend="eager")
        got = gradients(model, lambda: compiled(**BATCH).loss)
        assert applied.ledger.complete
    torch._dynamo.reset()
    assert all(want[n] is None or torch.allclose(got[n], want[n], rtol=1e-4, atol=1e-7) for n in want)


# Copies


def copied(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"lightning_gdn" not in buffer.getvalue(), "it loads where the package is not installed"
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_runs_on_its_own_weights(model: nn.Module, how: str) -> None:
    with apply_plan(model, "full"):
        gradients(model)
        other = copied(model, how)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        plain = tiny_qwen3_5()
        plain.load_state_dict(other.state_dict())
        assert same(gradients(other), gradients(plain))
        under_plan = isinstance(other.model.layers[0].__dict__["forward"], Takeover)
        assert under_plan == (how == "deepcopy"), "a deep copy (EMA) is under the plan as well, a pickled one is a plain model"
        with torch.no_grad():
            assert torch.equal(other(**BATCH).logits, plain(**BATCH).logits)
        del model
        assert same(gradients(other), gradients(plain))


def test_a_copy_survives_its_original() -> None:
    model = tiny_qwen3_5()
    applied = apply_plan(model, "full")
    other = copy.deepcopy(model)
    want = gradients(model)
    applied.undo()
    del model, applied
    gc.collect()
    assert same(gradients(other), want)


def test_a_copy_of_a_model_with_an_instance_forward_runs_the_copys(model: nn.Module) -> None:
    layer = model.model.layers[1]
    layer.forward = types.MethodType(type(layer).forward, layer)
    with apply_plan(model, "full"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
            plain = tiny_qwen3_5()
            plain.load_state_dict(other.state_dict())
            assert torch.equal(other(**BATCH).logits, plain(**BATCH).logits)


@pytest.mark.parametrize("ending", ["dropped too", "kept", "undone"])
@pytest.mark.parametrize("labels", ["full", "gdn_norm_out", "offload:gdn_core_attn", ""])
def test_a_dropped_model_is_freed_at_once(labels: str, ending: str) -> None:
    gc.collect()
    gc.disable()
    try:
        model = tiny_qwen3_5()
        applied: Any = apply_plan(model, moving(labels, min_bytes=0) if "offload" in labels else labels.split())
        gradients(model)
        watched = [weakref.ref(module) for module in model.modules()]
        if ending == "undone":
            applied.undo()
        if ending == "dropped too":
            applied = None
        del model
        assert not any(reference() is not None for reference in watched)
        assert applied is None or applied.kernel_problems(torch.device("cuda")) == []
    finally:
        gc.enable()


# What was there before


def test_undo_puts_everything_back_and_may_be_called_again(model: nn.Module) -> None:
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    applied = apply_plan(model, "full")
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == list(before)
    applied.undo()
    applied.undo()
    assert not applied.installed
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_second_plan_is_refused(model: nn.Module) -> None:
    with apply_plan(model, "gdn_conv"):
        with pytest.raises(RuntimeError, match=r"under another plan already; call undo\(\)"):
            apply_plan(model, "layernorm")
        with pytest.raises(RuntimeError, match="under another plan"):
            with instrument(model):
                pass
    with apply_plan(model, "layernorm"):
        gradients(model)


def test_two_models_of_which_one_is_taken_over(model: nn.Module) -> None:
    other = tiny_qwen3_5(seed=5)
    want = [gradients(model), gradients(other)]

    def run() -> Tensor:
        return model(**BATCH).loss * other(**BATCH).loss.detach() / other(**BATCH).loss.detach()

    want_run = gradients(model, run)
    with apply_plan(model, "full"):
        assert "forward" not in other.model.layers[0].__dict__
        assert same(gradients(model, run), want_run)
        assert same(gradients(other), want[1])
    assert same(gradients(model), want[0])


def test_an_instance_forward_is_respected(model: nn.Module) -> None:
    """accelerate keeps the real forward as `_old_forward` and puts its hook's in its place: the plan goes inside the hook."""
    seen = []
    layer = model.model.layers[1]
    layer._hf_hook = object()
    layer._old_forward = layer.forward

    def hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append("before")
        return module._old_forward(*args, **kwargs)

    layer.forward = functools.update_wrapper(functools.partial(hooked, layer), layer._old_forward)
    replaced = layer.forward
    want = gradients(model)
    with apply_plan(model, "full") as applied:
        assert same(gradients(model), want)
        assert applied.ledger.complete
        with torch.no_grad():
            model(**BATCH)
    assert seen == ["before"] * 3
    assert layer.forward is replaced
    assert isinstance(layer._old_forward, types.MethodType)
    assert same(gradients(model), want)


# A rotary embedding and a mask among a block's arguments need no gradient, which PyTorch's own full backward hook remarks.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_forward_hooks_of_blocks_and_mixers_still_fire(model: nn.Module) -> None:
    seen: list[str] = []
    for name in ("model.layers.0", "model.layers.0.linear_attn", "model.layers.3.self_attn", "model.layers.2.mlp"):
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        module.register_full_backward_hook(lambda *_, name=name: seen.append(f"back {name}"))
    gradients(model)
    want = list(seen)
    seen.clear()
    with apply_plan(model, "full"):
        gradients(model)
    assert seen == want


@pytest.mark.parametrize("change", [lambda out: out.clone(), lambda out: out.mul_(1.5), lambda out: out + 1], ids=["clone", "in-place", "new"])
@pytest.mark.parametrize("plan", ["full", "full:uniform:2", "full:uniform:4", "gdn_conv+layernorm+mlp"])
def test_a_hook_that_changes_a_blocks_output(model: nn.Module, plan: str, change: Callable[[Tensor], Tensor]) -> None:
    """Between two blocks of a chunk anything may happen to the hidden states: the chunk ends there, or the replay gets what was there."""
    for layer in (model.model.layers[0], model.model.layers[2]):
        layer.register_forward_hook(lambda module, args, out: change(out))
    want = gradients(model)
    with apply_plan(model, plan):
        assert same(gradients(model), want)
        assert same(gradients(model), want)


@pytest.mark.parametrize("plan", ["full", "full:uniform:2", "gdn_conv+layernorm"])
def test_one_block_at_two_places(model: nn.Module, plan: str) -> None:
    model.model.layers[1] = model.model.layers[0]
    want = gradients(model)
    with apply_plan(model, plan) as applied:
        assert len(applied.blocks) == 3
        assert same(gradients(model), want)
        assert same(gradients(model), want)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_two_threads_train_two_models() -> None:
    models = [tiny_qwen3_5(seed=seed) for seed in range(2)]
    want = [gradients(model) for model in models]
    got: dict[int, dict[str, Tensor | None]] = {}
    for model in models:
        apply_plan(model, "full")

    def train(index: int) -> None:
        for _ in range(3):
            got[index] = gradients(models[index])

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(got[0], want[0])
    assert same(got[1], want[1])


def test_hidden_states_and_attentions_are_those_of_the_plain_model() -> None:
    model = tiny_qwen3_5(attn_implementation="eager")
    want = model(**BATCH, output_hidden_states=True, output_attentions=True)
    with apply_plan(model, "full:uniform:2"):
        got = model(**BATCH, output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == len(want.hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(got.hidden_states, want.hidden_states, strict=True))
    assert len(got.attentions) == len(want.attentions)
    assert all(torch.equal(a, b) for a, b in zip(got.attentions, want.attentions, strict=True))


def test_generate_under_a_plan(model: nn.Module) -> None:
    model.eval()
    ids = BATCH["input_ids"][:, :5]
    want = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
    with apply_plan(model, "full"):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True), want)


def test_a_subclass_without_a_forward_of_its_own_is_taken_over(model: nn.Module) -> None:
    class Renamed(Qwen3_5DecoderLayer):
        pass

    model.model.layers[0].__class__ = Renamed
    want = gradients(model)
    with apply_plan(model, "full") as applied:
        assert len(applied.blocks) == 4
        assert same(gradients(model), want)


def test_functional_call_with_other_weights_is_right_or_raises(model: nn.Module) -> None:
    """A replay runs after the borrowed weights were given back: it must not quietly use the module's own."""
    weights = {name: (p * 1.1).detach().requires_grad_() for name, p in model.named_parameters()}
    with apply_plan(model, "gdn_in_proj_conv"):
        loss = torch.func.functional_call(model, weights, (), BATCH).loss
        with pytest.raises(RuntimeError, match="region"):
            loss.backward()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_made_under_a_plan_can_be_trained_on_its_own(model: nn.Module, how: str) -> None:
    plain = gradients(model)
    with apply_plan(model, "full"):
        gradients(model)
        other = copied(model, how)
    assert same(gradients(other), plain), "untouched once the plan has ended"
    with apply_plan(other, "gdn") as applied:
        assert same(gradients(other), plain)
        assert applied.ledger.discarded_bytes > 0
    assert same(gradients(other), plain)


def test_the_control_is_refused_on_a_model_under_a_plan(model: nn.Module) -> None:
    with apply_plan(model, "layernorm"), pytest.raises(RuntimeError, match="under another plan"):
        apply_plan(model, [])


def test_fused_kernels_alone_go_with_gradient_checkpointing_and_other_hooks(model: nn.Module) -> None:
    """The control with fused kernels replaces functions and recomputes nothing, so it may run inside somebody else's recompute."""
    plain = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        with apply_plan(model, [], kernels="fused") as applied:
            assert applied.installed
            assert same(gradients(model), plain)
        with pytest.raises(ValueError, match="gradient checkpointing"):
            apply_plan(model, "layernorm", kernels="fused")
    finally:
        model.gradient_checkpointing_disable()
    with apply_plan(model, [], kernels="fused"), torch.autograd.graph.save_on_cpu():
        assert same(gradients(model), plain)
