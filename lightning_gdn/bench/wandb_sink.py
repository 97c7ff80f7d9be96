"""Weights & Biases: the only module that imports wandb, and only when it is asked for.

A comparison becomes one run per arm and round (group: the comparison, job type: the arm, config: the resolved recipe) and one run of
job type `compare` with the table. Runs are written after the arms ended, from their records: W&B can neither slow an arm nor lose it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError
from .records import flatten
from .schema import WandbConfig

__all__ = ["choose_mode", "lightning_logger", "publish", "require_wandb"]

SUMMARY = ("tokens_per_s", "model_tflops", "peak_allocated_mib", "peak_reserved_mib", "peak_active_mib", "retained_mib", "pinned_mib")
"""MemoryMonitor figures that go into a run's summary under `gdn/`."""


def require_wandb() -> None:
    """Raise `UserError` if wandb cannot be imported."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError("logger: wandb is not installed; pip install wandb, or write logger=none (records, table and picture are written either way)")


def choose_mode(wanted: str, *, logged_in: Callable[[], bool] | None = None) -> str:
    """`online` or `offline` (or what WANDB_MODE says) for `auto`; offline without a login, so that a run never stops to ask for a key."""
    if wanted != "auto":
        return wanted
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if (logged_in or _logged_in)() else "offline"


def _logged_in() -> bool:
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except Exception:  # noqa: BLE001  whatever its client reports: without a working login, offline is right
        return False


def publish(
    result: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    config: WandbConfig,
    folder: Path,
    *,
    init: Callable[..., Any] | None = None,
    table: Callable[..., Any] | None = None,
) -> list[str]:
    """Write a comparison to W&B and return the run ids, `compare` last.

    Args:
        init: makes a run; `wandb.init` by default. It is called with keywords only and its run is finished before the next call.
        table: makes a table from `columns` and `data`; `wandb.Table` by default.
    """
    if init is None or table is None:
        import wandb

        # one run per arm and round: its usual farewell would bury the comparison's own table
        init = init or functools.partial(wandb.init, settings=wandb.Settings(silent=True, console="off"))
        table = table or wandb.Table
    common = {
        "project": config.project,
        "entity": config.entity,
        "group": result["name"],
        "mode": choose_mode(config.mode),
        "dir": str(folder),
        # a run that some earlier code left open would swallow these rows
        "reinit": "finish_previous",
    }
    ids = []
    for record in records:
        settings = {**record["recipe"], "environment": record["environment"], "round": record["round"], "arm": record["arm"]}
        run = init(**common, job_type=record["arm"], name=f"{record['arm']}-round{record['round']}", config=settings, tags=[record["status"]])
        try:
            _history(run, record)
            run.summary.update(_summary(record))
            ids.append(run.id)
        finally:
            run.finish(exit_code=0 if record["status"] == "ok" else 1)
    settings = {**(result["recipe"] or {}), "environment": result["environment"], "arms": [entry["arm"] for entry in result["arms"]]}
    run = init(**common, job_type="compare", name=f"{result['name']}-compare", config=settings)
    try:
        run.log({"comparison": table(columns=list(result["table"]["columns"]), data=[list(row) for row in result["table"]["rows"]])})
        run.summary.update({"problems": len(result["problems"]), "rounds": result["rounds"]})
        ids.append(run.id)
    finally:
        run.finish(exit_code=1 if result["problems"] else 0)
    return ids


def _history(run: Any, record: Mapping[str, Any]) -> None:
    # own axes instead of wandb's step: its counter drops rows that do not increase
    run.define_metric("micro_batch")
    run.define_metric("steady_step")
    run.define_metric("train/loss", step_metric="micro_batch")
    run.define_metric("gdn/step_ms", step_metric="steady_step", summary="none")
    for index, loss in enumerate(record.get("losses_hex") or []):
        run.log({"train/loss": float.fromhex(loss), "micro_batch": index})
    for index, value in enumerate((record.get("monitor") or {}).get("step_times_ms") or []):
        run.log({"gdn/step_ms": value, "steady_step": index})


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    monitor = record.get("monitor") or {}
    found: dict[str, Any] = {
        "status": record["status"],
        "error": record["error"],
        "plan": record.get("plan"),
        "gdn/retained_bytes": record.get("retained_bytes"),
        "gdn/step_ms": (monitor.get("step_ms") or {}).get("median"),
        "train/loss_last": record.get("loss_last"),
        **{f"gdn/{key}": monitor.get(key) for key in SUMMARY},
        **{f"kernels/{region}": kernel for region, kernel in (record.get("kernels") or {}).items()},
    }
    return {key: value for key, value in found.items() if value is not None}


def lightning_logger(config: WandbConfig, saved: Mapping[str, Any], folder: Path, *, arm: str) -> tuple[Any, Callable[[], None]]:
    """Lightning's own W&B logger for a single `run`, and the function that closes its run."""
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(
        name=f"{folder.name}-{arm}",
        project=config.project,
        entity=config.entity,
        group=folder.name,
        job_type=arm,
        save_dir=str(folder),
        mode=choose_mode(config.mode),
        config=flatten(saved),
    )
    return logger, wandb.finish
