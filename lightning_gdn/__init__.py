"""Selective activation recompute and offload for Gated DeltaNet hybrid models, as a PyTorch Lightning strategy.

    from lightning.pytorch import Trainer
    from lightning_gdn import GDNRecomputeStrategy
    trainer = Trainer(strategy=GDNRecomputeStrategy(["gdn_in_proj_conv"]))
    trainer = Trainer(strategy=GDNRecomputeStrategy(["gdn_norm_out"], offload=["gdn_core_attn"]))

Importing this package is cheap (no torch); names load on first use. It also makes `Trainer(strategy="gdn")` known to Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._registration import register_when_lightning_is_imported

if TYPE_CHECKING:
    from .apply import apply_plan, instrument
    from .offload_config import OffloadConfig
    from .plan import Plan
    from .replay import in_replay
    from .strategies import GDNRecomputeStrategy

__version__ = "0.1.0"
__all__ = ["GDNRecomputeStrategy", "OffloadConfig", "Plan", "__version__", "apply_plan", "in_replay", "instrument"]

_HOME = {
    "GDNRecomputeStrategy": ".strategies",
    "OffloadConfig": ".offload_config",
    "Plan": ".plan",
    "apply_plan": ".apply",
    "in_replay": ".replay",
    "instrument": ".apply",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


register_when_lightning_is_imported()
