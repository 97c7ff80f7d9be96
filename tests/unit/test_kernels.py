"""CPU tensors take torch functions whatever is bound: stand-ins raise as flash-linear-attention does on a CPU box with triton."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as modeling

from lightning_gdn.apply import apply_plan
from lightning_gdn.kernels import bound_function, describe, fused, is_flash_linear_attention, runtime_problem, stock_function, torch_function
from tests.models import tiny_batch, tiny_qwen3_5
from tests.parity.steps import LABELS

NAMES = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn", "torch_recurrent_gated_delta_rule", "causal_conv1d_update")
CPU = torch.device("cpu")


def dies(*_: Any, **__: Any) -> Any:
    raise RuntimeError("0 active drivers ([]). There should only be one.")


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args, **kwargs: dies())


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: dies()


def set_cell(function: Any, name: str, value: Any) -> Any:
    """Replace what a closure variable of the function holds; returns what it held."""
    cell = function.__closure__[function.__code__.co_freevars.index(name)]
    old, cell.cell_contents = cell.cell_contents, value
    return old


@pytest.fixture(params=["wraps", "bare", "cell"])
def dead_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FLA's and causal-conv1d's functions bound in the modeling module, and dead, in three ways a wrapper may be built."""
    if request.param != "cell":
        make = wrapped if request.param == "wraps" else bare
        for name in NAMES:
            monkeypatch.setattr(modeling, name, make(getattr(modeling, name)))
        yield
        return
    functions = [getattr(modeling, name) for name in NAMES]
    old = [set_cell(function, "implementation", dies) for function in functions]
    yield
    for function, implementation in zip(functions, old, strict=True):
        set_cell(function, "implementation", implementation)


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(**tiny_batch(2, 33, pad=3)).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def untouched() -> list[torch.Tensor | None]:
    return gradients(tiny_qwen3_5())


@pytest.mark.parametrize("label", [*LABELS, "full", "full:block:2"])
def test_every_label_trains_on_cpu_with_dead_kernels_bound(untouched: list[torch.Tensor | None], dead_kernels: None, label: str) -> None:
    model = tiny_qwen3_5()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(**tiny_batch(2, 33))  # the untouched model dies, so the stand-in stands in
    with apply_plan(model, label) as applied:
        for _ in range(2):
            got = gradients(model)
            assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(got, untouched, strict=True))
        assert applied.kernels["delta_rule"] == "torch.chunk_gated_delta_rule"
        assert applied.kernels["conv"] == "torch.causal_conv1d_fn"


def test_other_devices_get_what_is_bound(dead_kernels: None) -> None:
    for name in NAMES[:2]:
        assert stock_function(modeling, name, torch.device("cuda"), dies) is getattr(modeling, name)


def test_the_torch_function_of_a_plain_function_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(x: int) -> int:
        return x

    monkeypatch.setattr(modeling, NAMES[0], dies)
    assert torch_function(dies) is None
    assert stock_function(modeling, NAMES[0], CPU, reference) is reference


def test_kernels_are_named_after_what_runs() -> None:
    def kernel() -> None: ...

    kernel.__module__, kernel.__name__ = "fla.ops.gated_delta_rule.chunk", "chunk_gated_delta_rule"
    function = getattr(modeling, NAMES[0])
    assert describe(function) == "torch.chunk_gated_delta_rule"
    assert not is_flash_linear_attention(function)
    old = set_cell(function, "implementation", kernel)
    try:
        assert bound_function(function) is kernel
        assert is_flash_linear_attention(function)
        assert describe(function) == "fla.chunk_gated_delta_rule"
    finally:
        set_cell(function, "implementation", old)


@pytest.mark.parametrize(
    ("triton", "said"), [("3.3.1", False), ("3.4.0", True), ("3.6.0", True), ("3.7.0", True), ("3.7.1", False), ("3.8.0+git1", False), (None, True)]
)
def test_a_triton_that_fla_refuses_on_hopper_is_said(monkeypatch: pytest.MonkeyPatch, triton: str | None, said: bool) -> None:
    import sys
    import types

    fake: Any = None if triton is None else types.SimpleNamespace(__version__=triton)
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    message = runtime_problem(torch.device("cuda"))
    assert (message is not None) == said
    if message is not None:
        assert "lightning-gdn[cuda]" in message if triton is None else "3.7.1" in message and triton in message
    assert runtime_problem(CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert runtime_problem(torch.device("cuda")) is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_on_cpu_with_dead_kernels_bound(dead_kernels: None, context: Callable[[], Any]) -> None:
    """A fit begins with Lightning's sanity check: passes without gradients must not die either."""
    model = tiny_qwen3_5()
    with apply_plan(model, "gdn_conv"), context():
        assert model(**tiny_batch(2, 33)).loss.isfinite()


@pytest.mark.parametrize("label", ["none", "gdn_conv+gdn_norm_out", "full"])
def test_fused_kernels_on_cpu_tensors_are_the_torch_functions(label: str) -> None:
    """The device of the tensors decides: bit-equal to stock, with the control as well, and nothing of FLA is imported."""
    model = tiny_qwen3_5()
    plain = gradients(model)
    with apply_plan(model, label, kernels="fused") as applied:
        assert applied.installed
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
    assert not applied.installed


def test_fused_convolution_refuses_boundaries_it_cannot_honour() -> None:
    with pytest.raises(ValueError, match="cu_seq_lens_q beside seq_idx"):
        fused.conv(torch.zeros(1, 8, 4), torch.zeros(4, 4), None, "silu", {"seq_idx": torch.zeros(1, 8)})
