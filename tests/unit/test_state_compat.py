"""H14: names, optimizer state and checkpoints are those of the plain model, so the strategy can come and go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_gdn import GDNRecomputeStrategy
from tests.lightning_models import QUIET, TinyModule, loader, same_run, same_tensors, train

ARMS = ["none", "gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "full"]


def _structure(value: Any) -> Any:
    """Keys, types, shapes, dtypes and plain values of a checkpoint, without the numbers of its tensors."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, tuple(value.stride())
    if isinstance(value, dict):
        return [(key, _structure(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_structure(item) for item in value]
    return value


class _Saves(Callback):
    """Writes a checkpoint at the end of every epoch, while the plan is in force."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def _saved(folder: Path, strategy: Any, **options: Any) -> tuple[Path, tuple[Any, Trainer]]:
    path = folder / "mid.ckpt"
    run = train(strategy, callbacks=[_Saves(path)], data=loader(1), **{"max_steps": 2, **options})
    return path, run


class _Names(Callback):
    """What tools that look at names, classes and optimizers see while the plan is in force."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen: dict[str, Any] = {"state": list(pl_module.state_dict())}
        self.seen["parameters"] = [(name, p.shape, p.dtype, p.requires_grad) for name, p in pl_module.named_parameters()]
        self.seen["modules"] = [(name, type(module)) for name, module in pl_module.named_modules()]
        position = {id(p): name for name, p in pl_module.named_parameters()}
        self.seen["optimizer"] = [[position[id(p)] for p in group["params"]] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_h14_names_modules_and_optimizer_order_while_fitting(precision: str) -> None:
    plain, ours = _Names(), _Names()
    train("auto", callbacks=[plain], precision=precision, max_steps=1)
    train(GDNRecomputeStrategy("full"), callbacks=[ours], precision=precision, max_steps=1)
    assert ours.seen == plain.seen


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_h14_a_checkpoint_has_the_structure_of_a_plain_one(tmp_path: Path, precision: str) -> None:
    plain, _ = _saved(tmp_path / "plain", "auto", precision=precision)
    expected = torch.load(plain, weights_only=False)
    for arm in ARMS:
        path, _ = _saved(tmp_path / arm, GDNRecomputeStrategy(arm), precision=precision)
        got = torch.load(path, weights_only=False)
        assert _structure(got) == _structure(expected)
        assert same_tensors(list(got["state_dict"].values()), list(expected["state_dict"].values()))
        assert b"lightning_gdn" not in path.read_bytes()


@pytest.mark.parametrize("writer", ["auto", *ARMS[1:]])
def test_h14_it_loads_strictly_without_the_strategy_and_with_other_labels(tmp_path: Path, writer: str) -> None:
    path, run = _saved(tmp_path, writer if writer == "auto" else GDNRecomputeStrategy(writer), max_steps=1)
    weights = list(run[0].state_dict().values())
    assert same_tensors(list(TinyModule.load_from_checkpoint(path, strict=True, weights_only=True).state_dict().values()), weights)
    fresh = TinyModule()
    assert not any(fresh.load_state_dict(torch.load(path, weights_only=True)["state_dict"], strict=True))

    continued = []
    for strategy in ("auto", GDNRecomputeStrategy([]), GDNRecomputeStrategy(["gdn_front", "mlp"]), GDNRecomputeStrategy("full:uniform:2")):
        module, trainer = TinyModule(), Trainer(strategy=strategy, max_steps=3, **QUIET)
        trainer.fit(module, loader(1), ckpt_path=path)
        assert trainer.global_step == 3
        assert len(module.losses) == 2
        continued.append((module, trainer))
    for other in continued[1:]:
        same_run(continued[0], other)


def test_h14_evaluating_a_checkpoint_under_other_labels(tmp_path: Path) -> None:
    path, run = _saved(tmp_path, GDNRecomputeStrategy("gdn_front"), max_steps=1)

    class Evaluated(TinyModule):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.losses.append(self.model(**batch).loss)

    module = Evaluated()
    Trainer(strategy=GDNRecomputeStrategy("full"), **QUIET).test(module, loader(1), ckpt_path=path, verbose=False)
    assert same_tensors(list(module.state_dict().values()), list(run[0].state_dict().values()))


_WITHOUT_PLUGIN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning_gdn":
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Absent())
import torch
from lightning.pytorch import Trainer
from tests.lightning_models import QUIET, TinyModule, loader

checkpoint, target = sys.argv[1:]
module = TinyModule.load_from_checkpoint(checkpoint, strict=True)
fresh = TinyModule()
trainer = Trainer(max_steps=3, **QUIET)
trainer.fit(fresh, loader(1), ckpt_path=checkpoint)
assert not [name for name in sys.modules if name.startswith("lightning_gdn")]
torch.save({"loaded": list(module.state_dict().values()), "continued": list(fresh.state_dict().values()), "losses": fresh.losses}, target)
"""


def test_h14_load_and_resume_in_a_process_where_the_plugin_is_not_installed(tmp_path: Path) -> None:
    path, run = _saved(tmp_path, GDNRecomputeStrategy("full"), max_steps=1)
    target = tmp_path / "out.pt"
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT_PLUGIN, str(path), str(target)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    got = torch.load(target, weights_only=True)
    assert same_tensors(got["loaded"], list(run[0].state_dict().values()))

    module, trainer = TinyModule(), Trainer(strategy=GDNRecomputeStrategy("gdn_in_proj_conv"), max_steps=3, **QUIET)
    trainer.fit(module, loader(1), ckpt_path=path)
    assert same_tensors(got["losses"], module.losses)
    assert same_tensors(got["continued"], list(module.state_dict().values()))


def test_h07_no_parameter_or_buffer_changes_dtype() -> None:
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        dtypes: list[list[Any]] = []
        for strategy in ("auto", GDNRecomputeStrategy("full")):
            module, trainer = train(strategy, precision=precision, max_steps=1)
            state = trainer.optimizers[0].state_dict()["state"]
            dtypes.append([[t.dtype for t in (*module.parameters(), *module.buffers())], [[t.dtype for t in s.values()] for s in state.values()]])
        assert dtypes[0] == dtypes[1]


def test_a_module_saved_with_only_some_parameters_trained(tmp_path: Path) -> None:
    class Frozen(TinyModule):
        def __init__(self) -> None:
            super().__init__(lora=True)
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.endswith((".a.weight", ".b.weight")))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    control = train("auto", Frozen)
    for arm in ARMS:
        ours = train(GDNRecomputeStrategy(arm), Frozen)
        same_run(control, ours)
    moved = [name for name, value in ours[0].state_dict().items() if not torch.equal(value, Frozen().state_dict()[name])]
    assert moved
    assert all(name.endswith((".a.weight", ".b.weight")) for name in moved)
    assert not any(isinstance(m, nn.Module) and "forward" in m.__dict__ for m in ours[0].modules())
