"""DDP on two gloo processes: bit parity on both ranks, DDP's options, one plan for all ranks, figures of every rank."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_gdn import GDNRecomputeStrategy
from lightning_gdn.callbacks import MemoryMonitor
from lightning_gdn.callbacks._series import LOGGED
from lightning_gdn.strategies import GDNRecomputeDDP
from tests.distributed.cases import ARMS, PLAN
from tests.distributed.launch import launch
from tests.lightning_models import QUIET, TinyModule, train


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every case returned, by rank; all cases run in one start of two processes, once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ddp"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "printed.txt").exists():
            done = launch("-m", "tests.distributed.worker", "tests.distributed.cases", folder, cwd=folder, timeout=250)
            assert done.code == 0, done.output[-4000:]
            (folder / "printed.txt").write_text(done.output)
    printed = (folder / "printed.txt").read_text()
    ranks = [json.loads((folder / f"cases_rank{rank}.json").read_text()) for rank in (0, 1)]
    for found in ranks:
        found["printed"], found["folder"] = {"value": printed}, {"value": str(folder)}
    return ranks


def both(results: list[dict[str, Any]], name: str) -> tuple[Any, Any]:
    """The values of both ranks; a case that failed on one of them fails the test with its traceback."""
    for rank, found in enumerate(results):
        assert "failed" not in found[name], f"rank {rank}: {found[name]['failed']}"
    return results[0][name]["value"], results[1][name]["value"]


@pytest.mark.parametrize("setting", ["32-true", "bf16-mixed, accumulation 2"])
@pytest.mark.parametrize("arm", ARMS)
def test_gradients_are_those_of_the_same_ddp_run_without_a_plan_bit_for_bit(results: list[dict[str, Any]], arm: str, setting: str) -> None:
    zero, one = both(results, f"{arm} {setting}")
    assert zero["plan"] == one["plan"] == arm
    assert zero["discarded"] == one["discarded"] > 0
    assert not set(zero["ids"]) & set(one["ids"]), "both ranks saw the same data"


def test_offload_is_bit_equal_and_ranks_agree_on_the_share(results: list[dict[str, Any]]) -> None:
    zero, one = both(results, "offload")
    for found in (zero, one):
        for share in ("1.0", "auto"):
            assert found[share]["moved"] > 0 == found[share]["unfreed"]
            last = found[share]["last"]
            assert last["bytes_out"] == last["bytes_in"] > 0
            assert (last["buffers_in_use"], last["pinned_in_use"], last["fallbacks"]) == (0, 0, 0)
        assert "offload=" not in found["other"]
        assert "min_bytes=0" in found["other"]
        assert "min_bytes=1" in found["other"]
    assert (zero["asked"], one["asked"]) == (0.25, 0.75)
    assert zero["settled"] == one["settled"] == 0.25


@pytest.mark.parametrize("case", ["unused tower", "frozen tower", "static graph", "bucket view"])
def test_h16_options_of_ddp_pass_through_and_gradients_stay_bit_equal(results: list[dict[str, Any]], case: str) -> None:
    both(results, case)


def test_h16_a_static_graph_works_with_accumulation_where_plain_ddp_fails(results: list[dict[str, Any]]) -> None:
    assert both(results, "static graph with accumulation") == ([True], [True])


def test_h16_an_unused_tower_without_the_flag_is_ddps_own_error(results: list[dict[str, Any]]) -> None:
    both(results, "unused without the flag")


def test_on_two_devices_it_is_lightnings_ddp_under_a_plan_that_ends_with_the_fit(results: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(both(results, "what it is")):
        assert found["type"] == "GDNRecomputeDDP"
        # GDNRecomputeStrategy, GDNRecomputeDDP, DDPStrategy, ParallelStrategy, SingleDeviceStrategy
        assert found["isinstance"] == [True, True, True, True, False]
        assert found["wrapped"]
        assert found["applied"]
        assert found["taken_over"] > 0
        assert (found["left"], found["applied_after"]) == (0, False)
        assert found["world"] == [2, rank, 2, 1]
        assert found["backend"] == "gloo"


def test_plans_that_differ_between_ranks_end_the_fit_on_both_with_rank_and_difference(results: list[dict[str, Any]]) -> None:
    zero, one = both(results, "other plan on rank 1")
    assert zero == one
    for name, difference in (
        ("labels", "labels 'gdn_conv' on rank 0, 'layernorm' on rank 1"),
        ("control", "labels 'gdn_conv' on rank 0, 'none' on rank 1"),
        ("blocks", "4 blocks on rank 0, 8 on rank 1"),
    ):
        assert f"rank 1 has another one than rank 0: {difference}." in zero[name]


def test_a_rank_that_cannot_make_its_plan_tells_the_others(results: list[dict[str, Any]]) -> None:
    zero, one = both(results, "no plan on rank 1")
    assert zero.startswith("RuntimeError: GDNRecomputeStrategy: rank 1 of 2 could not apply its plan: ValueError: model NoBlocks: 0 blocks")
    assert one.startswith("ValueError: model NoBlocks: 0 blocks")


def test_validation_runs_untouched_and_a_second_fit_is_under_the_plan(results: list[dict[str, Any]]) -> None:
    assert both(results, "other loops") == (2, 2)


def test_spawned_processes_take_the_pickled_strategy_and_end_at_the_same_weights(results: list[dict[str, Any]], tmp_path: Path) -> None:
    done = launch("-m", "tests.distributed.spawned", tmp_path, cwd=tmp_path)
    assert done.code == 0, done.output[-4000:]
    found = json.loads((tmp_path / "spawned.json").read_text())
    assert found == {"weights": both(results, f"{ARMS[1]} 32-true")[0]["weights"], "group_here": False}
    summaries = [json.loads((tmp_path / f"memory_rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [(s["rank"], s["status"], len(s["ranks"])) for s in summaries] == [(0, "ok", 2), (1, "ok", 2)]
    assert summaries[0]["plan"] == summaries[1]["plan"] is not None


# MemoryMonitor


def test_h17_every_rank_reports_the_figures_of_all_and_uneven_ranks_show(results: list[dict[str, Any]]) -> None:
    zero, one = both(results, "uneven ranks")
    folder = Path(both(results, "folder")[0]) / "uneven"
    for rank, found in enumerate((zero, one)):
        summary = found["summary"]
        assert json.loads((folder / f"memory_rank{rank}.json").read_text()) == summary
        assert (summary["rank"], summary["world_size"], summary["status"], summary["steps"]) == (rank, 2, "ok", 4)
        assert summary["ranks"][rank]["retained_mib"] == summary["retained_mib"]
        assert summary["ranks"][rank]["step_ms"] == summary["step_ms"]["median"]
    assert zero["summary"]["ranks"] == one["summary"]["ranks"]
    assert [entry["rank"] for entry in zero["summary"]["ranks"]] == [0, 1]
    short, long = (entry["retained_mib"] for entry in zero["summary"]["ranks"])
    assert 1.2 * short < long
    assert zero["summary"]["max_over_ranks"]["retained_mib"] == {"value": long, "rank": 1}
    assert zero["summary"]["max_over_ranks"] == one["summary"]["max_over_ranks"]
    keys = {f"gdn/{name}{of}" for name in ("step_ms", "tokens_per_s", "retained_mib") for of in ("", "/rank0", "/rank1")}
    assert [set(row) for row in zero["rows"]] == [keys] * 3  # after steps 4 and 6, and at the end
    assert [row["gdn/retained_mib"] for row in zero["rows"]] == [long] * 3
    assert one["rows"] == zero["rows"][2:], "rank 0 logs for all; the last row is everybody's"
    printed = both(results, "printed")[0]
    assert printed.count("over ranks (memory in MiB)") == 1
    table = printed[printed.index("over ranks (memory in MiB)") :]
    assert f"{short:,.2f}" in table
    assert f"{long:,.2f}" in table
    assert "of rank" in table


def test_h17_a_rank_without_steady_steps_and_without_a_logger_keeps_nobody_waiting(results: list[dict[str, Any]]) -> None:
    zero, one = both(results, "empty window on rank 1")
    assert (zero["summary"]["status"], one["summary"]["status"]) == ("ok", "no_steady_steps")
    assert zero["summary"]["ranks"] == one["summary"]["ranks"]
    assert [entry["steps"] for entry in zero["summary"]["ranks"]] == [4, 0]
    assert {zero["summary"]["ranks"][1][name] for name in LOGGED} == {None}
    assert zero["rows"][-1]["gdn/step_ms"] == zero["rows"][-1]["gdn/step_ms/rank0"]
    assert max(zero["seconds"], one["seconds"]) < 15


def test_h17_a_rank_without_a_monitor_is_left_out_and_said_to_be(results: list[dict[str, Any]]) -> None:
    summary = both(results, "no monitor on rank 1")[0]["summary"]
    assert summary["status"] == "ok"
    assert summary["ranks"][1] is None
    assert "nothing was heard of rank 1: what is said over all ranks leaves it out" in summary["notes"]


def test_two_monitors_and_a_second_fit_keep_their_notes_apart(results: list[dict[str, Any]]) -> None:
    expected = [[[3, 3], [2, 2]], [[4, 4], [3, 3]]]
    assert both(results, "two monitors and a second fit") == (expected, expected)


# One device


def test_on_one_device_there_is_no_process_group_no_wrapper_and_no_bucket() -> None:
    class Looks(TinyModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.trainer.strategy.model is self
            hooks = [p._post_accumulate_grad_hooks for p in self.parameters()]  # type: ignore[attr-defined]
            assert not any(hooks)
            assert all(p.grad._base is None for p in self.parameters() if p.grad is not None), "a view into a bucket"

    _, trainer = train(GDNRecomputeStrategy(PLAN, find_unused_parameters=True, gradient_as_bucket_view=True), Looks)
    strategy: Any = trainer.strategy
    assert not dist.is_initialized()
    assert not isinstance(strategy.model, DistributedDataParallel)
    assert strategy.launcher is None
    assert (type(strategy), isinstance(strategy, SingleDeviceStrategy), isinstance(strategy, DDPStrategy)) == (GDNRecomputeStrategy, True, False)
    assert not isinstance(strategy, GDNRecomputeDDP)
    assert trainer.world_size == 1


def test_the_name_stands_for_both_and_leaks_into_no_class_of_lightning() -> None:
    single = Trainer(strategy=GDNRecomputeStrategy(PLAN), **QUIET).strategy
    plain, ddp = Trainer(strategy="auto", **QUIET).strategy, Trainer(strategy="ddp", **{**QUIET, "devices": 2}).strategy
    several = Trainer(strategy=GDNRecomputeStrategy(PLAN), **{**QUIET, "devices": 2}).strategy
    kinds = (GDNRecomputeStrategy, SingleDeviceStrategy, DDPStrategy)
    assert [isinstance(single, kind) for kind in kinds] == [True, True, False]
    assert [isinstance(several, kind) for kind in kinds] == [True, False, True]
    assert [isinstance(plain, kind) for kind in kinds] == [False, True, False]
    assert [isinstance(ddp, kind) for kind in kinds] == [False, False, True]
    assert not issubclass(GDNRecomputeDDP, GDNRecomputeStrategy)
    assert not issubclass(GDNRecomputeDDP, SingleDeviceStrategy)
    assert not issubclass(GDNRecomputeStrategy, DDPStrategy)


def test_options_and_plugins_arrive_in_ddp() -> None:
    def hook(state: object, bucket: object) -> None: ...

    strategy: Any = Trainer(
        strategy=GDNRecomputeStrategy(
            "gdn_conv", process_group_backend="gloo", start_method="spawn", ddp_comm_hook=hook, find_unused_parameters=True, bucket_cap_mb=3
        ),
        precision="bf16-mixed",
        sync_batchnorm=True,
        **{**QUIET, "devices": 2, "num_nodes": 3},
    ).strategy
    assert (strategy._process_group_backend, strategy._start_method, strategy._ddp_comm_hook) == ("gloo", "spawn", hook)
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 3}
    assert (strategy.num_nodes, strategy.num_processes, strategy.world_size, strategy.global_rank) == (3, 2, 6, 0)
    assert strategy.precision_plugin.precision == "bf16-mixed"
    assert strategy._layer_sync is not None
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 6, "rank": 0}
    assert str(strategy.selection) == "gdn_conv"
    assert not hasattr(strategy, "_offered")


def test_several_nodes_with_one_device_each_are_ddp_and_the_name_works_too() -> None:
    assert isinstance(Trainer(strategy="gdn", **{**QUIET, "num_nodes": 2}).strategy, DDPStrategy)


def test_a_subclass_says_what_it_is_on_several_devices() -> None:
    class Mine(GDNRecomputeStrategy):
        pass

    class MineDdp(GDNRecomputeDDP):
        pass

    class Both(GDNRecomputeStrategy):
        ddp_class = MineDdp

    assert type(Trainer(strategy=Mine(PLAN), **QUIET).strategy) is Mine
    with pytest.raises(TypeError, match=r"Mine: on several devices .* ddp_class, .* got devices=2, num_nodes=1"):
        Trainer(strategy=Mine(PLAN), **{**QUIET, "devices": 2})
    strategy = Trainer(strategy=Both(PLAN), **{**QUIET, "devices": 2}).strategy
    assert type(strategy) is MineDdp
    assert isinstance(strategy, Both)
    assert isinstance(strategy, GDNRecomputeStrategy)
    assert not isinstance(strategy, Mine)


@pytest.mark.parametrize("options", [{}, {"start_method": "fork"}])
def test_notebooks_run_on_one_device_and_on_several_with_fork(monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    Trainer(strategy=GDNRecomputeStrategy(PLAN, **options), **QUIET)
    if options:
        Trainer(strategy=GDNRecomputeStrategy(PLAN, **options), **{**QUIET, "devices": 2})
    else:
        with pytest.raises(Exception, match="not compatible with an interactive"):
            Trainer(strategy=GDNRecomputeStrategy(PLAN), **{**QUIET, "devices": 2})


def test_the_summary_of_one_process_has_the_same_fields() -> None:
    monitor = MemoryMonitor(warmup_steps=1, table=False, progress_bar=False)
    train(GDNRecomputeStrategy(PLAN), max_steps=3, callbacks=[monitor])
    assert [entry["rank"] for entry in monitor.summary["ranks"]] == [0]
    assert monitor.summary["max_over_ranks"]["step_ms"]["rank"] == 0
