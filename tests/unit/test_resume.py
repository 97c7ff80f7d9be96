"""H15: six steps equal three, a new process, and three, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_gdn import GDNRecomputeStrategy
from tests.lightning_models import QUIET, ResumableModule, loader, same_run, same_tensors

DROPOUTS = (0.0, 0.1)
ARMS = ("gdn_in_proj_conv", "gdn_front+gdn_norm_out+layernorm+mlp", "full:uniform:2")
STEPS = 3

_SECOND_HALF = """
import sys
import torch
from lightning.pytorch import Trainer
from lightning_gdn import GDNRecomputeStrategy
from tests.lightning_models import QUIET, ResumableModule, loader
from tests.unit.test_resume import ARMS, DROPOUTS, STEPS, checkpoint_of

folder = sys.argv[1]
torch.manual_seed(12345)  # nothing may depend on where this process starts
for arm in ARMS:
    for dropout in DROPOUTS:
        module = ResumableModule(dropout=dropout, lora=True)
        trainer = Trainer(strategy=GDNRecomputeStrategy(arm), max_epochs=2, **QUIET)
        path = checkpoint_of(folder, arm, dropout)
        trainer.fit(module, loader(STEPS), ckpt_path=path)
        torch.save({"step": trainer.global_step, "weights": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict(),
                    "losses": module.losses, "rng": module.rng}, str(path) + ".end")
"""


def checkpoint_of(folder: str | Path, arm: str, dropout: float) -> Path:
    """Where the first half of one run is saved."""
    return Path(folder) / f"{ARMS.index(arm)}-{dropout}.ckpt"


def _run(strategy: Any, dropout: float, epochs: int) -> tuple[ResumableModule, Trainer]:
    module = ResumableModule(dropout=dropout, lora=True)
    trainer = Trainer(strategy=strategy, max_epochs=epochs, **QUIET)
    torch.manual_seed(5)
    trainer.fit(module, loader(STEPS))
    return module, trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """First halves of all runs here, second halves of all in one new process."""
    path: Path = tmp_path_factory.mktemp("resume")
    for arm in ARMS:
        for dropout in DROPOUTS:
            _, trainer = _run(GDNRecomputeStrategy(arm), dropout, 1)
            assert trainer.global_step == STEPS
            trainer.save_checkpoint(checkpoint_of(path, arm, dropout))
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", _SECOND_HALF, str(path)], capture_output=True, text=True, timeout=240, cwd=path)
    assert ended.returncode == 0, ended.stderr
    return path


_CONTINUOUS: dict[float, tuple[ResumableModule, Trainer]] = {}


def _plain(dropout: float) -> tuple[ResumableModule, Trainer]:
    if dropout not in _CONTINUOUS:
        _CONTINUOUS[dropout] = _run("auto", dropout, 2)
    return _CONTINUOUS[dropout]


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("arm", ARMS)
def test_h15_six_steps_equal_three_a_new_process_and_three(arm: str, dropout: float, folder: Path) -> None:
    module, trainer = _run(GDNRecomputeStrategy(arm), dropout, 2)
    assert trainer.global_step == 2 * STEPS
    same_run(_plain(dropout), (module, trainer))  # the untouched model, never interrupted

    end = torch.load(f"{checkpoint_of(folder, arm, dropout)}.end", weights_only=True)
    assert end["step"] == 2 * STEPS
    assert same_tensors(end["losses"], module.losses[STEPS:])
    assert list(end["weights"]) == list(module.state_dict())
    assert same_tensors(list(end["weights"].values()), list(module.state_dict().values()))
    expected = trainer.optimizers[0].state_dict()
    assert end["optimizer"]["param_groups"] == expected["param_groups"]
    for index, state in expected["state"].items():
        assert same_tensors(list(end["optimizer"]["state"][index].values()), list(state.values()))
    assert torch.equal(end["rng"], module.rng)  # replays leave the random stream where an unreplayed run leaves it


def test_h15_dropout_matters_here() -> None:
    still, drawing = _plain(0.0)[0], _plain(0.1)[0]
    assert not same_tensors(still.losses, drawing.losses)
    assert not torch.equal(still.rng, drawing.rng)  # type: ignore[arg-type]


def test_h15_resuming_under_other_labels_and_with_the_strategy_off(folder: Path) -> None:
    end = torch.load(f"{checkpoint_of(folder, ARMS[0], 0.1)}.end", weights_only=True)
    for strategy in ("auto", GDNRecomputeStrategy(ARMS[2])):
        module, trainer = ResumableModule(dropout=0.1, lora=True), Trainer(strategy=strategy, max_epochs=2, **QUIET)
        trainer.fit(module, loader(STEPS), ckpt_path=checkpoint_of(folder, ARMS[0], 0.1))
        assert same_tensors(module.losses, end["losses"])
        assert same_tensors(list(module.state_dict().values()), list(end["weights"].values()))
