"""Cases that end well, in one start of two processes. Each runs on both ranks and returns what the test compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.callbacks import MemoryMonitor
from lightning_gdn.labels import parse_arm
from lightning_gdn.offload_config import OffloadConfig
from lightning_gdn.strategies import GDNRecomputeDDP
from lightning_gdn.takeover import Takeover
from tests.distributed.fits import SIZES, TOKENS, DdpModule, TowerModule, fit, same_gradients, weights_hash
from tests.lightning_models import QUIET, TinyModule, loader
from tests.models import tiny_batch

PLAN = ["gdn_conv", "gdn_norm_out", "layernorm"]
ARMS = ("gdn_in_proj_conv", "gdn_conv+gdn_norm_out+layernorm", "full", "full:uniform:2")

_CONTROL: dict[str, DdpModule] = {}


def control(key: str, **options: Any) -> DdpModule:
    if key not in _CONTROL:
        _CONTROL[key] = fit("ddp", **options)[0]
    return _CONTROL[key]


def strategy_of(arm: str) -> GDNRecomputeStrategy:
    """Everything that the arm names moves, also the small storages of a tiny model."""
    chosen = parse_arm(arm)
    return GDNRecomputeStrategy(chosen.recompute, offload=replace(chosen.offload, min_bytes=0) if chosen.offload else ())


def parity(folder: Path, *, arm: str, precision: str, accumulate: int) -> dict[str, Any]:
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": accumulate}
    plain = control(f"{precision}/{accumulate}", **options)
    ours, trainer = fit(strategy_of(arm), **options)
    same_gradients(plain, ours)
    strategy: Any = trainer.strategy
    last = strategy.last_applied
    ids = [int(ids.sum()) for ids in ours.ids]
    ledger = last.ledger
    figures = {"discarded": ledger.discarded_bytes, "moved": ledger.moved_bytes, "unfreed": ledger.unfreed_bytes}
    return {"ids": ids, **figures, "plan": last.plan.source, "weights": weights_hash(ours), "kernels": dict(last.kernels)}


def offload(folder: Path, *, precision: str = "bf16-mixed") -> dict[str, Any]:
    """Bit-equal to DDP without a plan; both ranks settle on the same share, the smallest that one of them would take."""
    told: dict[str, Any] = {}
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": 2}
    plain = control(f"{precision}/2", **options)
    for fraction in (1.0, "auto"):
        config = OffloadConfig(labels=("gdn_core_attn", "mlp"), fraction=fraction, min_bytes=0)
        ours, trainer = fit(GDNRecomputeStrategy("gdn_norm_out", offload=config), **options)
        same_gradients(plain, ours)
        strategy: Any = trainer.strategy
        last = strategy.last_applied
        told[str(fraction)] = {"moved": last.ledger.moved_bytes, "unfreed": last.ledger.unfreed_bytes, "last": last.last_step.as_dict()}
    asked: list[float] = []

    class Asks(GDNRecomputeDDP):
        def _smallest_over_ranks(self, value: float) -> float:
            # What this rank measured, made different by rank.
            asked.append(value if value < 0 else 0.25 + 0.5 * dist.get_rank())
            return super()._smallest_over_ranks(asked[-1])

    class Asking(GDNRecomputeStrategy):
        ddp_class = Asks

    _, trainer = fit(Asking([], offload=config), TinyModule(**SIZES), max_steps=8, data=loader(16, tokens=TOKENS))
    told["asked"], told["settled"] = max(asked), trainer.strategy.last_applied.last_step.fraction  # type: ignore[attr-defined]
    other = GDNRecomputeStrategy([], offload=OffloadConfig(labels=("mlp",), min_bytes=dist.get_rank()))
    try:
        fit(other)
    except RuntimeError as error:
        told["other"] = str(error)
    return told


def ddp_options(folder: Path, *, frozen: bool, accumulate: int = 2, **flags: Any) -> None:
    plain = fit(DDPStrategy(**flags), TowerModule(frozen) if "find_unused_parameters" in flags else None, accumulate_grad_batches=accumulate)[0]
    for arm in ("gdn_in_proj_conv", "full"):
        module = TowerModule(frozen) if "find_unused_parameters" in flags else None
        ours, trainer = fit(GDNRecomputeStrategy(arm, **flags), module, accumulate_grad_batches=accumulate)
        same_gradients(plain, ours)
        strategy: Any = trainer.strategy
        assert strategy._ddp_kwargs == flags
        assert strategy.last_applied.ledger.discarded_bytes > 0


def static_graph_with_accumulation(folder: Path) -> list[str]:
    """Plain DDP fails an assertion of PyTorch's there, so what a plan is compared with is our strategy without one."""
    told = []
    try:
        fit(DDPStrategy(static_graph=True), accumulate_grad_batches=3)
    except RuntimeError as error:
        told.append("INTERNAL ASSERT" in str(error))
    without = fit(DDPStrategy(), accumulate_grad_batches=3)[0]
    for a, b in zip(without.parameters(), static_graph_accumulating(3).parameters(), strict=True):
        torch.testing.assert_close(a, b)
    return told


def static_graph_accumulating(batches: int) -> DdpModule:
    """Bit-equal to our strategy without a plan, which is returned."""
    plain = fit(GDNRecomputeStrategy([], static_graph=True), accumulate_grad_batches=batches)[0]
    for arm in ("gdn_in_proj_conv", "full"):
        same_gradients(plain, fit(GDNRecomputeStrategy(arm, static_graph=True), accumulate_grad_batches=batches)[0])
    return plain


def unused_without_the_flag(folder: Path) -> str:
    """The error is DDP's own, with or without a plan."""
    told = []
    for strategy in (DDPStrategy(), GDNRecomputeStrategy(PLAN)):
        try:
            fit(strategy, TowerModule())
        except RuntimeError as error:
            told.append("parameters that were not used in producing the loss" in str(error))
    assert told == [True, True]
    return "raised"


def what_it_is(folder: Path) -> dict[str, Any]:
    inside: dict[str, Any] = {}

    class Looks(DdpModule):
        def on_train_start(self) -> None:
            strategy: Any = self.trainer.strategy
            inside["wrapped"] = isinstance(strategy.model, DistributedDataParallel)
            inside["applied"] = strategy.applied is not None
            inside["taken_over"] = taken_over(self)

    module, trainer = fit(GDNRecomputeStrategy(PLAN), Looks())
    strategy: Any = trainer.strategy
    return inside | {
        "type": type(strategy).__name__,
        "isinstance": [
            isinstance(strategy, kind) for kind in (GDNRecomputeStrategy, GDNRecomputeDDP, DDPStrategy, ParallelStrategy, SingleDeviceStrategy)
        ],
        "backend": dist.get_backend(),
        "world": [trainer.world_size, trainer.global_rank, trainer.num_devices, trainer.num_nodes],
        "left": taken_over(module),
        "applied_after": strategy.applied is not None,
    }


def taken_over(module: nn.Module) -> int:
    return sum(any(isinstance(value, Takeover) for value in m.__dict__.values()) for m in module.modules())


def other_plan_on_rank_1(folder: Path) -> dict[str, str]:
    rank = dist.get_rank()
    found = {}
    for name, strategy in (
        ("labels", GDNRecomputeStrategy("layernorm" if rank else "gdn_conv")),
        ("control", GDNRecomputeStrategy("none" if rank else "gdn_conv")),
    ):
        module = DdpModule()
        try:
            fit(strategy, module)
        except RuntimeError as error:
            found[name] = str(error)
        assert taken_over(module) == 0
    module = DdpModule(num_hidden_layers=8 if rank else 4)
    try:
        fit(GDNRecomputeStrategy("full"), module)
    except RuntimeError as error:
        found["blocks"] = str(error)
    assert taken_over(module) == 0
    return found


class NoBlocks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.layer.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def no_plan_on_rank_1(folder: Path) -> str:
    try:
        fit(GDNRecomputeStrategy(PLAN), NoBlocks() if dist.get_rank() else DdpModule())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the fit went on")


def other_loops(folder: Path) -> int:
    """Fit, validate, fit on one Trainer: the second fit is under the plan too, validation is not."""

    class Module(DdpModule):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            seen.append(taken_over(self))

    seen: list[int] = []
    module = Module()
    trainer = Trainer(
        strategy=GDNRecomputeStrategy(PLAN), **{**QUIET, "devices": 2, "max_steps": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False}
    )
    trainer.fit(module, loader(2))
    first = trainer.strategy.last_applied  # type: ignore[attr-defined]
    trainer.validate(module, loader(1), verbose=False)
    assert seen == [0], seen
    assert trainer.fit_loop.max_steps == 1
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, loader(2))
    assert trainer.strategy.last_applied is not first  # type: ignore[attr-defined]
    return trainer.global_step


# MemoryMonitor


class Rows(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        row = {key: value for key, value in metrics.items() if key.startswith("gdn/")}
        if row:
            self.rows.append(row)


class RankLoader:
    """Batches whose length depends on the rank."""

    def __init__(self, tokens: dict[int, int], batches: int = 8) -> None:
        self.tokens, self.batches = tokens, batches

    def __iter__(self) -> Any:
        for index in range(self.batches):
            yield tiny_batch(2, self.tokens[dist.get_rank()], seed=index)

    def __len__(self) -> int:
        return self.batches


def monitored(folder: Path, monitor: MemoryMonitor, *, logger: Any = False, data: Any = None, **options: Any) -> MemoryMonitor:
    fit(
        GDNRecomputeStrategy(PLAN), TinyModule(**SIZES), callbacks=[monitor], logger=logger, max_steps=6, log_every_n_steps=2,
        data=data or RankLoader({0: 24, 1: 48}), **options,
    )  # fmt: skip
    return monitor


def uneven_ranks(folder: Path) -> dict[str, Any]:
    logger = Rows()
    data = RankLoader({0: TOKENS, 1: 2 * TOKENS})
    monitor = monitored(folder, MemoryMonitor(warmup_steps=2, dir=folder / "uneven", progress_bar=False), logger=logger, data=data)
    return {"summary": monitor.summary, "rows": logger.rows}


def empty_window_on_rank_1(folder: Path) -> dict[str, Any]:
    """And no logger there."""
    rank = dist.get_rank()
    logger = False if rank else Rows()
    began = time.monotonic()
    monitor = monitored(folder, MemoryMonitor(warmup_steps=2 + 90 * rank, table=False, progress_bar=False), logger=logger)
    return {"summary": monitor.summary, "rows": logger.rows if isinstance(logger, Rows) else [], "seconds": time.monotonic() - began}


def no_monitor_on_rank_1(folder: Path) -> dict[str, Any]:
    from lightning_gdn.callbacks import _ranks

    before, _ranks.ANSWER_S = _ranks.ANSWER_S, 1.0
    try:
        if dist.get_rank():
            fit(GDNRecomputeStrategy(PLAN), TinyModule(), max_steps=6, data=RankLoader({0: 24, 1: 48}))
            return {}
        return {"summary": monitored(folder, MemoryMonitor(warmup_steps=2, table=False, progress_bar=False), logger=Rows()).summary}
    finally:
        _ranks.ANSWER_S = before


def two_monitors_and_a_second_fit(folder: Path) -> list[Any]:
    """Notes of one fit are not taken for those of the next."""
    found = []
    for steps in (4, 5):
        monitors = [MemoryMonitor(warmup_steps=1, table=False, progress_bar=False), MemoryMonitor(warmup_steps=2, table=False, progress_bar=False)]
        fit(GDNRecomputeStrategy(PLAN), TinyModule(), callbacks=monitors, max_steps=steps, data=RankLoader({0: 24, 1: 24}))
        found.append([[entry["steps"] for entry in monitor.summary["ranks"]] for monitor in monitors])
    return found


CASES: dict[str, Callable[[Path], Any]] = {
    **{f"{arm} 32-true": partial(parity, arm=arm, precision="32-true", accumulate=1) for arm in ARMS},
    **{f"{arm} bf16-mixed, accumulation 2": partial(parity, arm=arm, precision="bf16-mixed", accumulate=2) for arm in ARMS},
    "offload": offload,
    "unused tower": partial(ddp_options, frozen=False, find_unused_parameters=True),
    "frozen tower": partial(ddp_options, frozen=True, find_unused_parameters=True),
    "static graph": partial(ddp_options, frozen=False, accumulate=1, static_graph=True),
    "static graph with accumulation": static_graph_with_accumulation,
    "bucket view": partial(ddp_options, frozen=False, gradient_as_bucket_view=True),
    "unused without the flag": unused_without_the_flag,
    "what it is": what_it_is,
    "other plan on rank 1": other_plan_on_rank_1,
    "no plan on rank 1": no_plan_on_rank_1,
    "other loops": other_loops,
    "uneven ranks": uneven_ranks,
    "empty window on rank 1": empty_window_on_rank_1,
    "two monitors and a second fit": two_monitors_and_a_second_fit,
    "no monitor on rank 1": no_monitor_on_rank_1,  # last: boards are counted per rank
}
