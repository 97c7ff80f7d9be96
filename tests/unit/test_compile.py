"""`torch.compile` and a plan: taken-over blocks run eagerly, the rest stays compiled, training goes on, and the log says so once."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.apply import apply_plan
from lightning_gdn.inspection import inspect_model
from lightning_gdn.labels import Selection
from tests.lightning_models import QUIET, TinyModule, loader, same_run
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import moving

SAID = "torch.compile: taken-over blocks run eagerly"
PLAN = "gdn_in_proj_conv+layernorm+mlp"
BATCH = tiny_batch(2, 33)
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# After a graph break Dynamo looks at `.grad` of a tensor that is no leaf, and torch warns about Dynamo itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
    pytest.mark.usefixtures("_fresh_dynamo"),
]


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """The backend `eager`, with the number of graphs it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def gradients(model: nn.Module, call: Callable[..., Any]) -> list[Tensor | None]:
    model.zero_grad()
    loss = call(**BATCH).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("plan", [PLAN, "full:uniform:2", moving("gdn_norm_out+offload:gdn_core_attn+offload:mlp")], ids=str)
@pytest.mark.parametrize("first", ["compile", "plan"])
def test_a_model_compiled_before_or_after_the_plan(plan: str | Selection, first: str) -> None:
    model = tiny_qwen3_5(**SMALL)
    want = gradients(model, model)
    compiled = torch.compile(model, backend="eager") if first == "compile" else None
    with apply_plan(model, plan) as applied:
        compiled = torch.compile(model, backend="eager") if compiled is None else compiled
        for _ in range(2):
            assert same(gradients(model, compiled), want)
        assert applied.ledger.complete
        assert applied.ledger.discarded_bytes > 0
    assert same(gradients(model, compiled), want), "without the plan it compiles again"


def test_blocks_are_no_part_of_a_graph_and_the_rest_is() -> None:
    """Embedding, rotary frequencies and loss are still given to the compiler; from the third step on nothing is compiled."""
    model, backend = tiny_qwen3_5(**SMALL), Counting()
    inside: list[bool] = []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *_: inside.append(torch.compiler.is_compiling()))
    compiled = torch.compile(model, backend=backend)
    with apply_plan(model, PLAN):
        gradients(model, compiled)
        gradients(model, compiled)  # with gradients in place, of which transformers 5.24 makes another graph
        graphs = backend.graphs
        assert graphs >= 2
        gradients(model, compiled)
        assert backend.graphs == graphs
    assert inside == [False] * len(inside)


def test_one_block_compiled_in_place() -> None:
    """`layer.compile()` keeps the module and compiles its call."""
    model, backend = tiny_qwen3_5(**SMALL), Counting()
    want = gradients(model, model)
    model.model.layers[0].compile(backend=backend)
    assert same(gradients(model, model), want)
    graphs = backend.graphs
    assert graphs > 0
    with apply_plan(model, PLAN) as applied:
        assert same(gradients(model, model), want)
        assert same(gradients(model, model), want)
        assert applied.ledger.complete
        assert backend.graphs == graphs, "the block runs eagerly under the plan"
    assert same(gradients(model, model), want)


def test_one_block_wrapped_by_torch_compile() -> None:
    """`layers[0] = torch.compile(layers[0])` puts a wrapper around the block: it is found in there, and counted once."""
    model, backend = tiny_qwen3_5(**SMALL), Counting()
    want = gradients(model, model)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend=backend)
    report = inspect_model(model)
    assert [layout.name for layout in report.layouts] == ["model.layers.0._orig_mod", "model.layers.1"]
    assert report.describe(taken_over=True) == "GDN blocks: 1 of 2 layers, 1 taken over"
    with apply_plan(model, PLAN) as applied:
        assert same(gradients(model, model), want)
        assert applied.ledger.complete
        assert applied.ledger.discarded_bytes > 0
    assert same(gradients(model, model), want)


def test_parts_that_are_compiled_inside_a_block() -> None:
    """A compiled MLP (its own or a wrapper) inside a block under a plan: the tape runs the plain one."""
    model = tiny_qwen3_5(**SMALL)
    want = gradients(model, model)
    model.model.layers[1].mlp.compile(backend="eager")
    model.model.layers[0].mlp.down_proj = torch.compile(model.model.layers[0].mlp.down_proj, backend="eager")
    for plan in ("gdn_conv", PLAN, "full"):
        with apply_plan(model, plan):
            assert same(gradients(model, model), want), plan


def test_a_whole_graph_without_breaks_is_refused_with_the_reason() -> None:
    model = tiny_qwen3_5(**SMALL)
    with apply_plan(model, PLAN), pytest.raises(Exception, match=r"lightning_gdn") as raised:
        torch.compile(model, backend="eager", fullgraph=True)(**BATCH)
    assert "runs eagerly" in str(raised.value)


# Said once


def test_said_once_and_only_where_something_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def said(model: nn.Module, times: int = 1) -> int:
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning_gdn"), apply_plan(model, PLAN):
            for _ in range(times):
                gradients(model, model)
        return caplog.text.count(SAID)

    plain = tiny_qwen3_5(**SMALL)
    assert said(plain, 2) == 0
    compiled_block = tiny_qwen3_5(**SMALL)
    for layer in compiled_block.model.layers:
        layer.compile(backend="eager")
    assert said(compiled_block, 3) == 1
    assert said(torch.compile(tiny_qwen3_5(**SMALL), backend="eager"), 2) == 1


# Lightning


class Small(TinyModule):
    def __init__(self) -> None:
        super().__init__(**SMALL)


class CompiledInConfigureModel(Small):
    """Lightning's documented place for `torch.compile`."""

    def configure_model(self) -> None:
        if isinstance(self.model, Qwen3_5ForCausalLM):
            self.model = torch.compile(self.model, backend="eager")


class BlocksCompiledInPlace(Small):
    def configure_model(self) -> None:
        for layer in self.model.model.layers:
            layer.compile(backend="eager")


def fit(module: Any, strategy: Any, *, wrap: bool = False) -> tuple[Any, Trainer]:
    trainer = Trainer(strategy=strategy, max_steps=2, **QUIET)
    torch.manual_seed(7)
    trainer.fit(torch.compile(module, backend="eager") if wrap else module, loader(2))
    return module, trainer


@pytest.mark.parametrize("kind", ["lightning-module", "configure-model", "blocks-in-place"])
def test_training_under_the_strategy_equals_training_without_it(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    build = {"lightning-module": Small, "configure-model": CompiledInConfigureModel, "blocks-in-place": BlocksCompiledInPlace}[kind]
    # Compiled without a plan as well: names in the state dict differ where the compiled model is a submodule. The bits are the eager ones.
    want = fit(build() if kind == "configure-model" else Small(), "auto")
    with caplog.at_level(logging.INFO, "lightning_gdn"):
        got = fit(build(), GDNRecomputeStrategy(PLAN), wrap=kind == "lightning-module")
    same_run(want, got)
    assert got[1].strategy.last_applied.ledger.discarded_bytes > 0
    assert caplog.text.count(SAID) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's inductor imports it
@pytest.mark.parametrize("what", ["model", "block"])
def test_inductor(what: str) -> None:
    """Compiled kernels round differently from eager ones, so the untouched model that is compared with is the eager one, with a tolerance."""
    model = tiny_qwen3_5(num_hidden_layers=1, layer_types=["linear_attention"])
    want = gradients(model, model)
    call: Any = model
    with apply_plan(model, PLAN) as applied:
        if what == "model":
            call = torch.compile(model)
        else:
            model.model.layers[0].compile()
        got = gradients(model, call)
        assert applied.ledger.complete
        assert same(gradients(model, call), got), "two runs are equal"
    assert all(a is b is None or torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(got, want, strict=True))
    if what == "block":
        assert same(got, want), "the block is all that is compiled, and under the plan it runs eagerly"
