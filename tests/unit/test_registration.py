"""`Trainer(strategy="gdn")` after `import lightning_gdn`, in every order of imports, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_gdn
from lightning_gdn import _registration
from lightning_gdn.strategies import GDNRecomputeStrategy, register_strategies

_ORDERS = {
    "ours first": """
import sys
import lightning_gdn
assert "torch" not in sys.modules and "lightning" not in sys.modules, "importing lightning_gdn must be cheap"
import lightning as L
Trainer = L.Trainer
""",
    "lightning first": """
import lightning as L
import lightning_gdn
from lightning.pytorch import Trainer
""",
    "the strategy itself before lightning": """
from lightning_gdn import GDNRecomputeStrategy
from lightning.pytorch import Trainer
""",
}
_CHECK = """
import sys
import lightning.pytorch
strategy = Trainer(accelerator="cpu", devices=1, strategy="gdn", logger=False, enable_checkpointing=False).strategy
from lightning_gdn import GDNRecomputeStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy
assert type(strategy) is GDNRecomputeStrategy and isinstance(strategy, SingleDeviceStrategy)
assert strategy.selection.labels == ("gdn_norm_out", "layernorm")
assert not [finder for finder in sys.meta_path if "lightning_gdn" in type(finder).__module__], "the finder has stepped aside"
assert "lightning_gdn" not in type(lightning.pytorch.__spec__.loader).__module__, "the module has its own loader back"
print("registered")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """All orders at once, since most of their time is importing torch."""
    folder: Path = tmp_path_factory.mktemp("orders")
    started = {
        name: subprocess.Popen([sys.executable, "-c", code + _CHECK], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, code in _ORDERS.items()
    }
    ended = {}
    for name, process in started.items():
        output, _ = process.communicate(timeout=240)
        ended[name] = (process.returncode, output)
    return ended


@pytest.mark.parametrize("order", list(_ORDERS))
def test_the_name_is_known_in_every_order_of_imports(order: str, runs: dict[str, tuple[int, str]]) -> None:
    code, output = runs[order]
    assert code == 0, output
    assert output.splitlines()[-1] == "registered", output


def test_the_name_is_listed_with_what_it_stands_for_and_registering_again_changes_nothing() -> None:
    assert "gdn" in StrategyRegistry.available_strategies()
    before = StrategyRegistry["gdn"]
    register_strategies()
    _registration.register_when_lightning_is_imported()
    assert StrategyRegistry["gdn"] is before
    assert before["strategy"] is GDNRecomputeStrategy
    assert before["description"] == "recompute gdn_norm_out + layernorm"


def test_only_one_finder_waits_and_only_for_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    path = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", path)
    for _ in range(2):
        _registration.register_when_lightning_is_imported()
    waiting = [finder for finder in path if type(finder).__module__ == lightning_gdn._registration.__name__]
    assert len(waiting) == 1
    assert waiting[0].find_spec("json", None) is None
    assert waiting[0].find_spec("lightning", None) is None
    assert waiting[0] in path
