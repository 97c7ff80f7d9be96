"""Averaged, copied and pickled models made while a plan is in force: the same numbers as without one, on their own weights."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.apply import apply_plan
from lightning_gdn.takeover import Takeover
from tests.lightning_models import QUIET, TinyModule, ValidatingModule, loader, same_run, same_tensors, train
from tests.models import tiny_batch, tiny_qwen3_5

PLANS = ("gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm+mlp", "full", "full:uniform:2")
BATCH = tiny_batch(2, 33)


def gradients(model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    model(**BATCH).loss.backward()
    return [p.grad for p in model.parameters()]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def averages() -> dict[str, Callable[[nn.Module], AveragedModel]]:
    return {
        "mean": AveragedModel,
        "mean-with-buffers": lambda model: AveragedModel(model, use_buffers=True),
        "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    }


@pytest.mark.parametrize("kind", averages())
def test_an_averaged_model_follows_and_runs_on_its_average(kind: str) -> None:
    """Trained for three steps with an average kept, evaluated between, then a gradient of the average itself (a Polyak teacher does that)."""

    def run(model: nn.Module) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        average = averages()[kind](model)
        seen: list[Any] = []
        for _ in range(3):
            gradients(model)
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                seen.append(average(**BATCH).logits)
        return [*seen, *average.state_dict().values(), *gradients(average), *gradients(model)]

    want = run(tiny_qwen3_5())
    assert not torch.equal(want[0], want[1])
    for plan in PLANS:
        model = tiny_qwen3_5()
        with apply_plan(model, plan) as applied:
            assert same(run(model), want), plan
            assert applied.ledger.complete


def test_an_average_made_before_the_plan_and_one_that_outlives_it() -> None:
    model = tiny_qwen3_5()
    before = AveragedModel(model)
    want = gradients(model)
    with apply_plan(model, "full"):
        during = AveragedModel(model)
        assert same(gradients(before), want)
        assert same(gradients(during), want)
        assert same(gradients(model), want)
        for average in (before, during):
            average.update_parameters(model)
    for average in (before, during):
        assert same(gradients(average), want)
        average.update_parameters(model)
    state = tiny_qwen3_5()
    state.load_state_dict(during.module.state_dict())
    assert same(gradients(state), want)


def test_a_teacher_that_is_a_copy_in_one_step() -> None:
    """Student and its averaged copy in the same graph, the copy once without and once with gradients."""

    def run(student: nn.Module, grad: bool) -> list[Any]:
        teacher = copy.deepcopy(student)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.1)
        with torch.set_grad_enabled(grad):
            target = teacher(**BATCH).logits
        (student(**BATCH).logits - target).square().mean().backward()
        found = [p.grad for model in (student, teacher) for p in model.parameters()]
        student.zero_grad()
        return found

    for grad in (False, True):
        want = run(tiny_qwen3_5(), grad)
        for plan in PLANS:
            model = tiny_qwen3_5()
            with apply_plan(model, plan):
                assert same(run(model, grad), want), plan


@pytest.mark.parametrize("depth", ["model", "text-model", "layers", "block", "mixer"])
def test_a_copy_of_a_part(depth: str) -> None:
    """What is copied decides which takeovers come along; each runs on the copy's weights, also with the original's zeroed."""
    paths = {"model": "", "text-model": "model", "layers": "model.layers", "block": "model.layers.1", "mixer": "model.layers.1.linear_attn"}
    model, other = tiny_qwen3_5(), tiny_qwen3_5()
    want = gradients(other)
    with apply_plan(model, "full"):
        part = copy.deepcopy(model.get_submodule(paths[depth]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if depth == "model":
            other = part
        else:
            other.set_submodule(paths[depth], part)
        assert same(gradients(other), want)
    assert same(gradients(other), want)


def test_two_pickles_of_a_pickle() -> None:
    model = tiny_qwen3_5()
    want = gradients(model)
    model.zero_grad()
    with apply_plan(model, "full"):
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))
        block = pickle.loads(pickle.dumps(model.model.layers[1]))
    assert not any(isinstance(value, Takeover) for module in [*again.modules(), *block.modules()] for value in module.__dict__.values())
    assert same(gradients(again), want)
    with apply_plan(again, "gdn") as applied:
        assert same(gradients(again), want)
        assert applied.ledger.discarded_bytes > 0


def gradient_sum(payload: bytes, queue: Any) -> None:
    torch.set_num_threads(1)
    model = pickle.loads(payload)
    queue.put([g.double().sum().item() for g in gradients(model)])


@pytest.mark.slow
def test_a_model_sent_to_a_spawned_process() -> None:
    model = tiny_qwen3_5()
    want = [g.double().sum().item() for g in gradients(model)]
    model.zero_grad()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with apply_plan(model, "full"):
        process = context.Process(target=gradient_sum, args=(pickle.dumps(model), queue))
        process.start()
        got = queue.get(timeout=200)
        process.join(60)
    assert process.exitcode == 0
    assert got == want


# Lightning's callbacks


class EveryStep(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None


AVERAGING: dict[str, Callable[[], Callback]] = {
    "mean-of-steps": EveryStep,
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1),
}


@pytest.mark.parametrize("kind", AVERAGING)
@pytest.mark.filterwarnings("ignore:Swapping scheduler:UserWarning")
def test_callbacks_that_average_weights(kind: str) -> None:
    """Validation runs on the average (Lightning swaps it in), and the fit ends with the averaged weights in the module."""

    class Module(ValidatingModule):
        def train_dataloader(self) -> Any:
            return loader(2)

        def val_dataloader(self) -> Any:
            return loader(1, seed=4)

    def fit(strategy: Any) -> tuple[Any, Trainer]:
        module = Module()
        trainer = Trainer(strategy=strategy, **QUIET, max_epochs=3, callbacks=[AVERAGING[kind]()])
        torch.manual_seed(7)
        trainer.fit(module)
        return module, trainer

    want = fit("auto")
    for arm in PLANS:
        got = fit(GDNRecomputeStrategy(arm))
        same_run(want, got)
        assert same_tensors(want[0].seen["validation"], got[0].seen["validation"])
        assert not any("forward" in module.__dict__ for module in got[0].modules())


def test_a_whole_module_saved_under_a_plan() -> None:
    """`torch.save(trainer.lightning_module.model)` from a callback."""
    saved = io.BytesIO()

    class Saver(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            saved.seek(0)
            torch.save(pl_module.model, saved)

    module, _ = train(GDNRecomputeStrategy("full"), TinyModule, callbacks=[Saver()])
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert same(list(loaded.state_dict().values()), list(module.model.state_dict().values()))
    assert same(gradients(loaded), gradients(module.model))
