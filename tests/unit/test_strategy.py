"""The strategy inside Lightning: what it installs and when, that it takes it back, and that training stays bit for bit the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.takeover import Takeover
from tests.lightning_models import QUIET, LoraLike, TinyModule, ValidatingModule, count_calls, loader, logged, same_run, train
from tests.models import tiny_qwen3_5
from tests.parity.steps import LABELS

PLAN = ["gdn_conv", "gdn_norm_out", "layernorm"]
ARMS = [*(label for label in LABELS if label != "core_attn"), "full", "full:block:2", "full:uniform:2", "gdn_conv+gdn_norm_out+layernorm+mlp"]


def taken_over(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if any(isinstance(value, Takeover) for value in module.__dict__.values())]


# Bit equality


class _Eval(TinyModule):
    def on_train_start(self) -> None:
        self.model.eval()  # a model from from_pretrained is in eval mode, and Lightning leaves it there


class _ManualSteps(TinyModule):
    def __init__(self) -> None:
        super().__init__(dropout=0.1, lora=True)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        optimizer.zero_grad()


class _KeepsFp32(TinyModule):
    def on_fit_start(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.data = parameter.data.float()


_RUNS: dict[str, Any] = {
    "train": TinyModule,
    "eval": _Eval,
    "dropout": lambda: TinyModule(dropout=0.1, lora=True),
    "manual": _ManualSteps,
    "A_log fp32": _KeepsFp32,
    "cache": lambda: TinyModule(use_cache=True),
}
_CONTROL: dict[tuple[str, str], tuple[Any, Trainer]] = {}


def _both(kind: str, precision: str, arm: str) -> tuple[tuple[Any, Trainer], tuple[Any, Trainer]]:
    options: dict[str, Any] = {"precision": precision}
    if kind != "manual":
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    if (kind, precision) not in _CONTROL:
        _CONTROL[kind, precision] = train("auto", _RUNS[kind], **options)
    return _CONTROL[kind, precision], train(GDNRecomputeStrategy(arm), _RUNS[kind], **options)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_h06_every_label_trains_bit_for_bit_like_the_plain_trainer(precision: str, arm: str) -> None:
    for kind in ("train", "eval"):
        control, ours = _both(kind, precision, arm)
        assert ours[1].strategy.last_applied.plan.source == arm
        same_run(control, ours)


@pytest.mark.parametrize(
    ("precision", "arm"),
    [("32-true", arm) for arm in ("gdn_in_proj_conv", "gdn_front", "gdn", "mlp", "full", "full:uniform:2")]
    + [(precision, arm) for precision in ("bf16-mixed", "bf16-true") for arm in ("gdn+mlp", "full")],
)
def test_dropout_in_attention_and_inside_regions_draws_the_same_numbers(precision: str, arm: str) -> None:
    same_run(*_both("dropout", precision, arm))


@pytest.mark.parametrize("arm", ["gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "full"])
@pytest.mark.parametrize("kind", ["manual", "cache"])
def test_manual_optimization_with_two_backwards_and_a_cache_in_training(kind: str, arm: str) -> None:
    control, ours = _both(kind, "32-true", arm)
    same_run(control, ours)
    assert ours[1].strategy.last_applied.ledger.discarded_bytes > 0


@pytest.mark.parametrize("arm", ["gdn_front", "gdn", "full"])
def test_h07_dtypes_are_left_alone_with_a_log_in_fp32_and_cast(arm: str) -> None:
    for kind, dtype in (("A_log fp32", torch.float32), ("train", torch.bfloat16)):
        control, ours = _both(kind, "bf16-true", arm)
        same_run(control, ours)
        assert ours[0].model.model.layers[0].linear_attn.A_log.dtype == dtype


def test_h06_a_no_grad_forward_and_an_autocast_island_in_the_training_step() -> None:
    class Module(TinyModule):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            with torch.no_grad():  # fills autocast's weight cache with casts that have no graph
                target = self.model(**batch).logits
            logits = self.model(input_ids=batch["input_ids"]).logits
            with torch.autocast("cpu", enabled=False):
                loss = (logits.float() - target.float().roll(1, 1)).square().mean()
            self.losses.append(loss.detach().clone())
            return loss

    control = train("auto", Module, precision="bf16-mixed")
    for arm in ("gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm+mlp", "full"):
        same_run(control, train(GDNRecomputeStrategy(arm), Module, precision="bf16-mixed"))


def test_anomaly_detection_and_weight_averaging_do_not_mind() -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [EMAWeightAveraging()], "detect_anomaly": True, "max_steps": 1}

    same_run(train("auto", **options()), train(GDNRecomputeStrategy(PLAN), **options()))


# When it is in force


def test_it_is_a_single_device_strategy_on_the_device_of_the_trainer() -> None:
    for devices in (1, "auto"):
        trainer = Trainer(strategy=GDNRecomputeStrategy(PLAN), **{**QUIET, "devices": devices})
        assert isinstance(trainer.strategy, GDNRecomputeStrategy)
        assert isinstance(trainer.strategy, SingleDeviceStrategy)
        assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (1, 1, 1)
        assert trainer.strategy.root_device == torch.device("cpu")


class _Looks(Callback):
    """What is in force at each hook."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, int]] = []

    def _look(self, hook: str, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append((hook, trainer.strategy.applied is not None, len(taken_over(module))))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._look("setup", trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look("on_fit_start", trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look("on_train_end", trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._look("teardown", trainer, pl_module)


def test_the_plan_is_in_force_from_strategy_setup_to_teardown_and_readable_afterwards() -> None:
    looks = _Looks()
    strategy = GDNRecomputeStrategy(PLAN)
    assert strategy.applied is None
    assert strategy.last_applied is None
    module, trainer = train(strategy, callbacks=[looks])
    replaced = 4 * 3  # block, mixer and MLP
    assert looks.seen == [("setup", False, 0), ("on_fit_start", True, replaced), ("on_train_end", True, replaced), ("teardown", False, 0)]
    assert trainer.strategy.applied is None
    assert taken_over(module) == []
    last = trainer.strategy.last_applied
    assert last.plan.source == "gdn_conv+gdn_norm_out+layernorm"
    assert last.ledger.retained_bytes > 0
    assert last.ledger.discarded_bytes > 0
    assert set(last.kernels) >= {"conv", "delta_rule", "norm_out"}
    assert not last.installed
    assert "forward" not in {name for m in module.modules() for name in m.__dict__}


def test_the_control_installs_nothing() -> None:
    looks = _Looks()
    ours = train(GDNRecomputeStrategy([]), callbacks=[looks])
    assert {count for _, _, count in looks.seen} == {0}
    assert ours[1].strategy.last_applied.plan.is_control
    same_run(train("auto"), ours)


class _Raises(TinyModule):
    def __init__(self, error: BaseException, where: str) -> None:
        super().__init__()
        self.error, self.where = error, where

    def _raise(self, here: str) -> None:
        if here == self.where:
            raise self.error

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._raise("training_step")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._raise("after_backward")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self._raise("configure_optimizers")
        return super().configure_optimizers()


@pytest.mark.parametrize("where", ["training_step", "after_backward", "configure_optimizers"])
@pytest.mark.parametrize(("error", "ends_as"), [(ValueError("boom"), ValueError), (KeyboardInterrupt(), SystemExit)])
def test_the_forwards_are_back_after_an_exception_and_an_interrupt(error: BaseException, ends_as: type[BaseException], where: str) -> None:
    module, trainer = _Raises(error, where), Trainer(strategy=GDNRecomputeStrategy(PLAN), max_steps=2, **QUIET)
    with pytest.raises(ends_as):
        trainer.fit(module, loader())
    assert trainer.strategy.applied is None
    assert taken_over(module) == []
    module.where = ""
    module.losses.clear()
    again = Trainer(strategy=GDNRecomputeStrategy(PLAN), max_steps=1, **QUIET)
    again.fit(module, loader())
    assert len(module.losses) == 1


def test_a_fit_after_an_on_exception_hook_that_raises_gets_its_plan() -> None:
    class Broken(Callback):
        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            raise LookupError("in the hook")  # Lightning then never calls the strategy's teardown

    trainer = Trainer(strategy=GDNRecomputeStrategy(PLAN), max_steps=2, callbacks=[Broken()], **QUIET)
    first = _Raises(ValueError("boom"), "training_step")
    with pytest.raises(LookupError):
        trainer.fit(first, loader())
    second = TinyModule()
    trainer.fit(second, loader())
    assert trainer.strategy.last_applied.ledger.discarded_bytes > 0
    assert taken_over(first) == taken_over(second) == []


def test_h26_fit_twice_on_one_trainer_and_one_strategy_in_two_trainers() -> None:
    def twice(strategy: Any) -> tuple[Any, Trainer]:
        module = TinyModule()
        trainer = Trainer(strategy=strategy, max_epochs=1, **QUIET)
        trainer.fit(module, loader(2))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader(2))
        assert taken_over(module) == []
        return module, trainer

    same_run(twice("auto"), twice(GDNRecomputeStrategy(PLAN)))

    strategy = GDNRecomputeStrategy(["gdn_in_proj_conv"])
    module = TinyModule()
    calls = count_calls(module, "in_proj_qkv")
    without_accelerator = {name: value for name, value in QUIET.items() if name != "accelerator"}  # Lightning wants it from one place
    for fits in (1, 2):
        Trainer(strategy=strategy, max_steps=2, **without_accelerator).fit(module, loader())
        assert calls["in_proj_qkv"] == fits * 2 * 3 * 2  # fits, steps, blocks, forward and replay: never three
        assert taken_over(module) == []


def test_a_model_built_in_configure_model_is_taken_over() -> None:
    class Late(TinyModule):
        def __init__(self) -> None:
            super().__init__(model=nn.Identity())

        def configure_model(self) -> None:
            if isinstance(self.model, nn.Identity):
                self.model = tiny_qwen3_5()

    ours = train(GDNRecomputeStrategy(PLAN), Late)
    assert len(ours[1].strategy.last_applied.blocks) == 4
    assert ours[1].strategy.last_applied.ledger.discarded_bytes > 0
    same_run(train("auto", Late), ours)


# After a graph break Dynamo looks at `.grad` of a tensor that is no leaf, and torch warns about Dynamo itself.
_DYNAMO = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@_DYNAMO
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_model_trains_and_a_graph_from_before_the_plan_is_not_reused() -> None:
    class Compiled(TinyModule):
        def __init__(self) -> None:
            super().__init__(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
            self.compiled = [torch.compile(self.model, backend="eager")]  # in a list: no second name in the state dict

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.compiled[0](**batch).loss
            self.losses.append(loss.detach().clone())
            return loss

    small = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}

    def three_fits(module: TinyModule, strategies: list[Any]) -> tuple[Any, Trainer]:
        for strategy in strategies:
            trainer = Trainer(strategy=strategy, max_steps=1, **QUIET)
            trainer.fit(module, loader(1))
        return module, trainer

    strategy = GDNRecomputeStrategy(PLAN)
    ours = three_fits(Compiled(), ["auto", strategy, "auto"])
    assert strategy.last_applied.ledger.discarded_bytes > 0
    assert taken_over(ours[0]) == []
    same_run(three_fits(TinyModule(**small), ["auto"] * 3), ours)


@_DYNAMO
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_lightning_module_trains() -> None:
    def build() -> Any:
        return TinyModule(num_hidden_layers=1, layer_types=["linear_attention"])

    module = build()
    trainer = Trainer(strategy=GDNRecomputeStrategy(PLAN), max_steps=2, **QUIET)
    trainer.fit(torch.compile(module, backend="eager"), loader(2))
    assert trainer.strategy.last_applied.ledger.discarded_bytes > 0
    same_run(train("auto", build, data=loader(2)), (module, trainer))


# What it says


def test_setup_logs_blocks_plan_kernels_and_advice_once() -> None:
    with logged() as lines:
        train(GDNRecomputeStrategy(["gdn_in_proj_conv"]))
    assert lines.count("GDN blocks: 3 of 4 layers, 3 taken over") == 1
    assert lines.count("plan gdn_in_proj_conv: 4 blocks; in_proj: recompute in 3, conv: recompute_inside in 3") == 1
    assert [line for line in lines if line.startswith("kernels on cpu: ")] == [
        "kernels on cpu: conv torch.causal_conv1d_fn, delta_rule torch.chunk_gated_delta_rule, norm_out torch.Qwen3_5RMSNormGated, "
        "core_attn torch.sdpa_attention_forward"
    ]
    assert sum(line.startswith("gdn_in_proj_conv: gdn_norm_out saves more for less step time") for line in lines) == 1


def test_the_log_names_the_kernels_that_then_run() -> None:
    with logged() as lines:
        _, trainer = train(GDNRecomputeStrategy(PLAN))
    ran = trainer.strategy.last_applied.kernels
    assert f"kernels on cpu: {', '.join(f'{region} {name}' for region, name in ran.items())}" in lines


def test_the_control_says_that_nothing_is_installed_and_names_no_kernels() -> None:
    with logged() as lines:
        train(GDNRecomputeStrategy("none"))
    assert "nothing is installed: the model runs untouched" in lines
    assert not [line for line in lines if line.startswith("kernels")]


# Options


def test_unknown_options_and_values_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"unknown options \['modulez'\].*recompute, offload, method"):
        GDNRecomputeStrategy(PLAN, modulez=["gdn_conv"])
    with pytest.raises(ValueError, match="kernels: expected one of stock, fused, got 'fast'"):
        GDNRecomputeStrategy(PLAN, kernels="fast")
    with pytest.raises(ValueError, match="on_foreign_hooks: expected one of raise, bypass, got 'ignore'"):
        GDNRecomputeStrategy(PLAN, on_foreign_hooks="ignore")
    with pytest.raises(ValueError, match="needs the planner"):
        GDNRecomputeStrategy("auto", memory_budget="70GiB")
    with pytest.raises(ValueError, match="memory_budget=5 needs the planner"):
        GDNRecomputeStrategy(PLAN, memory_budget=5)
    with pytest.raises(ValueError, match=r"offload=\['gdn_core'\]: unknown offload label 'gdn_core'"):
        GDNRecomputeStrategy(PLAN, offload=["gdn_core"])
    with pytest.raises(ValueError, match="only apply to 'full'"):
        GDNRecomputeStrategy(PLAN, num_layers=2)


def test_full_with_method_and_number_and_options_of_ddp_pass() -> None:
    strategy = GDNRecomputeStrategy("full", method="block", num_layers=2, find_unused_parameters=True, gradient_as_bucket_view=True)
    _, trainer = train(strategy)
    assert trainer.strategy.last_applied.plan.source == "full:block:2"
    assert [block.is_keep for block in trainer.strategy.last_applied.plan.blocks] == [False, False, True, True]


class _Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(2)


class _CliModule(TinyModule):
    def __init__(self) -> None:
        super().__init__()


def _cli(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    from lightning.pytorch import cli

    options = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--trainer.max_steps=2", *options, *args])
    return cli.LightningCLI(_CliModule, _Data, save_config_callback=None)


def test_lightning_cli_takes_the_class_path_with_a_list_from_yaml_and_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_gdn.GDNRecomputeStrategy\n    init_args:\n      recompute: [gdn_conv, layernorm]\n",
        encoding="utf-8",
    )
    name = "--trainer.strategy=lightning_gdn.GDNRecomputeStrategy"
    for args in (
        [f"--config={config}"],
        [name, "--trainer.strategy.recompute=[gdn_conv,layernorm]"],
        [name, "--trainer.strategy.recompute=gdn_conv+layernorm"],
    ):
        strategy = _cli(monkeypatch, *args).trainer.strategy
        assert type(strategy) is GDNRecomputeStrategy
        assert strategy.last_applied.plan.source == "gdn_conv+layernorm"
        assert strategy.last_applied.ledger.discarded_bytes > 0


def test_lightning_cli_refuses_unknown_init_args_and_labels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "--trainer.strategy=lightning_gdn.GDNRecomputeStrategy"
    with pytest.raises(SystemExit):
        _cli(monkeypatch, name, "--trainer.strategy.modulez=[gdn_conv]")
    assert "Option 'modulez' is not accepted" in capsys.readouterr().err
    with pytest.raises(ValueError, match="did you mean 'gdn_conv'"):
        _cli(monkeypatch, name, "--trainer.strategy.recompute=[gdn_con]")


def test_the_lora_like_module_of_these_tests_does_draw() -> None:
    module = LoraLike(nn.Linear(4, 4), 0.5, 0).train()
    before = torch.get_rng_state()
    module(torch.ones(2, 4))
    assert not torch.equal(before, torch.get_rng_state())


def test_a_fit_with_offload_trains_the_same_weights_and_tells_each_step() -> None:
    """With sanity check, validation in between and accumulation; the last step's figures stay readable after the fit."""
    config = OffloadConfig(labels=("gdn_core_attn", "mlp"), min_bytes=0)
    fits = []
    for strategy in ("auto", GDNRecomputeStrategy("gdn_norm_out", offload=config)):
        module = ValidatingModule()
        trainer = Trainer(strategy=strategy, max_steps=3, accumulate_grad_batches=2, val_check_interval=2, limit_val_batches=1, **QUIET)
        torch.manual_seed(3)
        trainer.fit(module, loader(6), loader(1, seed=9))
        fits.append((module, trainer))
    (plain, _), (ours, trainer) = fits
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True))
    last = trainer.strategy.last_applied  # type: ignore[attr-defined]
    assert last.last_step.bytes_out == last.last_step.bytes_in == 2 * last.ledger.moved_bytes > 0
    assert last.last_step.buffers_in_use == 0
    assert trainer.strategy.applied is None  # type: ignore[attr-defined]
    (engine,) = last.engines.by_device.values()
    engine.collect()
    engine.close()
    assert engine.pool.held == 0
