"""`benchmarks/offload_model.py`: its arms, TRL's context around every micro-batch, the control beside every arm."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_gdn.bench.arms import is_rival, sweep
from lightning_gdn.takeover import foreign_hooks

ARM = "trl_offload"


class FakeOffload(saved_tensors_hooks):
    """In place of TRL's class, which needs an accelerator: clones what is saved, and tells."""

    made: ClassVar[list[FakeOffload]] = []

    def __init__(self) -> None:
        self.events: list[str] = []
        self.packed, self.unpacked = 0, list[str]()
        self.model: nn.Module | None = None
        FakeOffload.made.append(self)
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.clone()

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.unpacked.append(self.events[-1])
        return tensor

    def update_model_params(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.events.append("open")
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.events.append("closed")


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TRL that runs on a CPU."""
    for name in ("trl", "trl.models", "trl.models.activation_offloading"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["trl.models.activation_offloading"], "OffloadActivations", FakeOffload, raising=False)
    monkeypatch.setattr(FakeOffload, "made", [])


@pytest.fixture
def no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setitem(sys.modules, "trl.models.activation_offloading", None)


def small(bench: Callable[[str], Any], **more: Any) -> Any:
    return bench("offload_trainees").Qwen(device="cpu", seq=32, micro_batches=2, batches=8, restarts=True, **more)


@pytest.mark.parametrize("kernels", ["stock", "fused"])
def test_trls_context_is_open_around_forward_and_backward_of_every_micro_batch(bench: Callable[[str], Any], trl: None, kernels: str) -> None:
    models = bench("offload_trainees")
    trainee = small(bench)
    losses = {}
    for arm in ("none", ARM):
        trainee.reset()
        with models.in_force(trainee.model, arm, kernels, {}) as applied:
            rows = [models.timed_step(trainee, index, None, "cpu", models.around_of(applied)) for index in range(2)]
        losses[arm] = [row["losses"] for row in rows]
    assert losses[ARM] == losses["none"]
    (context,) = FakeOffload.made
    assert context.events == ["open", "closed"] * 4, "two steps of two micro-batches, one object"
    assert 0 < len(context.unpacked) <= context.packed
    assert set(context.unpacked) == {"open"}, "what comes back does so while the context is open"
    assert context.model is trainee.model
    assert foreign_hooks() is None


def test_what_is_around_a_micro_batch_closes_before_the_update(bench: Callable[[str], Any]) -> None:
    events: list[str] = []

    class Told:
        def __enter__(self) -> None:
            events.append("open")

        def __exit__(self, *_: object) -> None:
            events.append("closed")

    class Trainee:
        micro_batches = 2
        weight = torch.ones((), requires_grad=True)

        def forward(self, index: int) -> Tensor:
            events.append(f"forward {index}")
            loss = self.weight * 2
            loss.register_hook(lambda _: events.append("backward"))
            return loss

        def update(self) -> None:
            events.append("update")

    step = bench("offload_trainees").optimizer_step
    step(Trainee(), 3, around=Told, forwarded=lambda: events.append("forwarded"), ended=lambda: events.append("ended"))
    first = ["open", "forward 6", "forwarded", "backward", "closed"]
    assert events == [*first, "open", "forward 7", "backward", "closed", "ended", "update"]
    assert bench("offload_trainees").around_of(object())().__enter__() is None


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("a model was built")


@pytest.mark.parametrize("script", ["offload_model", "offload_pairs"])
@pytest.mark.parametrize(("device", "said"), [("cuda", "needs TRL, which cannot be imported"), ("cpu", "needs an accelerator")])
def test_without_trl_nothing_is_begun(
    bench: Callable[[str], Any], no_trl: None, monkeypatch: pytest.MonkeyPatch, script: str, device: str, said: str
) -> None:
    module = bench(script)
    for name in ("Stack", "Child"):
        monkeypatch.setattr(module, name, never, raising=False)
    monkeypatch.setattr(sys, "argv", [script, "--device", device, "--arms", f"none,{ARM}"])
    with pytest.raises(SystemExit) as caught:
        module.main()
    for part in (script, ARM, said, "leave the arm out"):
        assert part in str(caught.value)
    assert ("pip install trl" in str(caught.value)) == (device == "cuda")


def test_the_arm_is_a_default_where_it_can_run(bench: Callable[[str], Any], trl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    default, module = bench("offload_model").default_arms, bench("trl_offload")
    assert default("stack", "cuda")[-1] == ARM
    assert ARM not in default("stack", "cpu")
    monkeypatch.setattr(module, "version", lambda name: f"{name} 9")
    assert module.check("x", ["none", ARM], "cuda") == {"trl": "trl 9"}
    assert module.check("x", ["none"], "cpu") == {}
    monkeypatch.setitem(sys.modules, "trl.models.activation_offloading", None)
    assert default("stack", "cuda") == default("stack", "cpu")


def test_trls_class_is_what_the_arm_takes_it_for() -> None:
    module = pytest.importorskip("trl.models.activation_offloading", reason="TRL is not installed, and no dependency")
    assert issubclass(module.OffloadActivations, saved_tensors_hooks)
    assert callable(module.OffloadActivations.update_model_params)


@pytest.mark.parametrize("model", ["stack", "qwen3_5_0_8b"])
def test_every_default_arm_is_one_that_the_model_can_run(bench: Callable[[str], Any], model: str) -> None:
    models = bench("offload_trainees")
    trainee = models.Stack(device="cpu", layers=4, seq=32, batch=1) if model == "stack" else small(bench)
    arms = sweep(bench("offload_model").default_arms(model, "cpu"), 4)
    assert {"none", "save_on_cpu:gdn_core_attn", "checkpoint:full", "full"} < set(arms)
    assert any("mlp_act" in arm for arm in arms) == (model != "stack")
    for arm in arms:
        with models.in_force(trainee.model, arm, "stock", {"min_bytes": 0}) as applied:
            losses = models.optimizer_step(trainee, 0)
            assert len(losses) == trainee.micro_batches
            moved = None if is_rival(arm) else applied.step_statistics()
        assert (moved is not None and moved.bytes_out > 0) == ("offload:" in arm), arm


def test_with_mlp_act_recomputed_offload_of_the_mlp_moves_less(bench: Callable[[str], Any]) -> None:
    models = bench("offload_trainees")
    trainee, moved = small(bench), {}
    for arm in ("offload:mlp", "mlp_act+offload:mlp", "layernorm+mlp_act+offload:mlp"):
        with models.in_force(trainee.model, arm, "stock", {"min_bytes": 0}) as applied:
            models.optimizer_step(trainee, 0)
            moved[arm] = applied.step_statistics().bytes_out
    assert 0 < moved["layernorm+mlp_act+offload:mlp"] <= 0.6 * moved["offload:mlp"], moved


@pytest.mark.parametrize("beside", [False, True])
def test_the_script_compares_offload_with_pytorchs_own(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: bool
) -> None:
    module, out = bench("offload_model"), tmp_path / "record.json"
    measured: list[str] = []
    plain, in_turns = module.measure, module.measure_pair

    def measure(trainee: Any, text: str, args: Any) -> dict[str, Any]:
        measured.append(text)
        return plain(trainee, text, args)

    def measure_pair(trainee: Any, pair: tuple[str, str], args: Any) -> dict[str, dict[str, Any]]:
        measured.append("+".join(pair))
        return in_turns(trainee, pair, args)

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module, "measure_pair", measure_pair)
    arms = ["none", "offload:gdn_core_attn", "save_on_cpu:gdn_core_attn"]
    command = ["--device", "cpu", "--layers", "3", "--seq", "32", "--rounds", "2", "--warm", "0", "--steps", "1", "--min-bytes", "0"]
    monkeypatch.setattr(sys, "argv", ["offload_model.py", *command, "--arms", ",".join(arms), "--out", str(out), *(["--beside"] if beside else [])])
    try:
        module.main()
    finally:
        gc.unfreeze()
    first, last = (
        ([arms[0], *(f"none+{arm}" for arm in arms[1:])], [*(f"{arm}+none" for arm in arms[:0:-1]), arms[0]]) if beside else (arms, arms[::-1])
    )
    assert measured == [arms[0], *first, *last], "the control first, to compile and tune"
    record = json.loads(out.read_text(encoding="utf-8"))
    assert list(record["arms"]) == arms
    assert [entry["losses"] for entry in record["arms"].values()] == ["bit-equal", *(["not compared" if beside else "bit-equal"] * 2)]
    assert [row["ms_pct"]["median"] == 0 for row in record["arms"].values()] == [True, False, False]
    assert record["arms"][arms[1]]["offload"]["moved_mib"]["median"] > 0
    assert record["arms"][arms[2]]["offload"] == {}
    assert record["options"]["beside"] is beside
    assert "bare" not in capsys.readouterr().out, "there is no GPU"


def test_rates_are_told_alone_and_both_at_once(bench: Callable[[str], Any]) -> None:
    rates = bench("rates")
    assert rates.bare_rates("cpu") == {}
    told = rates.told_rates({"out_gb_s": 55.04, "in_gb_s": 54.0, "both_out_gb_s": 40.0, "both_in_gb_s": 41.0})
    assert told == "bare pinned copies, GB/s: out 55.0, in 54.0 alone; out 40.0, in 41.0 both at once"
