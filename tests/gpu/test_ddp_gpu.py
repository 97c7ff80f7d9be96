"""DDP on two GPUs with NCCL: bits, DDP's options, one record of both ranks, an exception on one of them.

All processes are started at once and share the two GPUs: two for every case, two each for `run` and for torchrun, two each for the fits
that one rank leaves. NCCL's environment variables reach them as they are set.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gdn.callbacks._series import LOGGED
from tests.distributed.gpu_cases import ARMS
from tests.distributed.launch import Done, launch, left_behind, torchrun
from tests.gpu_kernels import ONE_CONFIG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"NCCL needs two CUDA devices, torch sees {torch.cuda.device_count()}: make test-gpu"),
]

ACCELERATOR = "gpu"
LIMIT_S = 240.0
COMMAND = "tests.distributed.command" if ONE_CONFIG in os.environ else "lightning_gdn"
"""The first is the second with fewer kernels to compile."""
STEPS = 8
RECIPE = (
    "gdn_stack_20 trainer.devices=2 model.hidden_size=256 model.num_hidden_layers=3 model.linear_num_key_heads=2 model.linear_num_value_heads=4 "
    f"data.seq_len=512 trainer.max_steps={STEPS} monitor.warmup_steps=2"
).split()
RUN_ARM, TORCHRUN_ARM = "gdn_norm_out", "gdn_conv+gdn_norm_out+layernorm"


@dataclass(frozen=True)
class Started:
    """One start, that may not have ended yet."""

    folder: Path
    future: Future[Done]

    def done(self) -> Done:
        return self.future.result()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    made: dict[str, Started] = {}
    with ThreadPoolExecutor(max_workers=5) as pool:

        def start(name: str, how: Callable[..., Done], *words: str | Path) -> None:
            folder = tmp_path_factory.mktemp(name)
            given = [folder if word == "FOLDER" else word for word in words]
            made[name] = Started(folder, pool.submit(how, "-m", *given, cwd=folder, timeout=LIMIT_S, accelerator=ACCELERATOR))

        start("cases", launch, "tests.distributed.worker", "tests.distributed.gpu_cases", "FOLDER")
        start("run", launch, COMMAND, "run", *RECIPE, f"plan.arm={RUN_ARM}", "--out", "out")
        start("torchrun", torchrun, COMMAND, "run", *RECIPE, f"plan.arm={TORCHRUN_ARM}", "logger=csv", "--out", "out")
        for rank in (0, 1):
            start(f"fails{rank}", launch, "tests.distributed.failing", str(rank), "error", "FOLDER")
        yield made


def both(started: dict[str, Started], name: str) -> tuple[Any, Any]:
    """What a case returned on both ranks; a case that failed on one of them fails the test with its traceback."""
    start = started["cases"]
    done = start.done()
    found = []
    for rank in (0, 1):
        file = start.folder / f"cases_rank{rank}.json"
        results = json.loads(file.read_text()) if file.exists() else {}
        assert name in results, f"rank {rank} ended before this case, exit code {done.code}:\n{done.output[-4000:]}"
        assert "failed" not in results[name], f"rank {rank}: {results[name]['failed']}"
        found.append(results[name]["value"])
    assert done.code == 0, done.output[-4000:]
    return found[0], found[1]


def test_it_is_ddp_on_two_gpus_with_nccl(started: dict[str, Started]) -> None:
    for rank, found in enumerate(both(started, "what it is")):
        assert (found["type"], found["backend"], found["world"]) == ("GDNRecomputeDDP", "nccl", [2, rank, 2, 1])
        assert found["taken_over"] > 0
        assert (found["wrapped"], found["applied"], found["left"], found["applied_after"]) == (True, True, 0, False)


@pytest.mark.parametrize("arm", ARMS)
def test_gradients_are_those_of_the_same_ddp_run_without_a_plan_bit_for_bit(started: dict[str, Started], arm: str) -> None:
    both(started, "control repeats")
    zero, one = both(started, arm)
    assert zero["plan"] == one["plan"] == arm
    assert zero["weights"] == one["weights"]
    assert zero["discarded"] == one["discarded"]
    assert zero["moved"] == one["moved"]
    assert (zero["moved"] > 0) == ("offload:" in arm)
    assert (zero["discarded"] > 0) == (not arm.startswith("offload:"))
    assert zero["unfreed"] == one["unfreed"] == (0 if "offload:" in arm else None)
    assert zero["kernels"]["delta_rule"].startswith("fla.")
    assert not set(zero["ids"]) & set(one["ids"]), "both ranks saw the same data"


def test_offload_under_accumulation_is_bit_equal_and_ranks_agree_on_the_share(started: dict[str, Started]) -> None:
    zero, one = both(started, "offload")
    for found in (zero, one):
        for share in ("1.0", "auto"):
            assert found[share]["moved"] > 0 == found[share]["unfreed"]
            last = found[share]["last"]
            assert last["bytes_out"] == last["bytes_in"] > 0
            assert (last["buffers_in_use"], last["pinned_in_use"], last["fallbacks"]) == (0, 0, 0)
        assert "min_bytes=0" in found["other"]
        assert "min_bytes=1" in found["other"]
    assert (zero["asked"], one["asked"]) == (0.25, 0.75)
    assert zero["settled"] == one["settled"] == 0.25


def test_an_unused_tower_with_find_unused_parameters_stays_bit_equal(started: dict[str, Started]) -> None:
    both(started, "unused tower")


def test_a_static_graph_with_accumulation_stays_bit_equal(started: dict[str, Started]) -> None:
    assert both(started, "static graph") == (4, 4), "two optimizer steps of two micro-batches"


def test_plans_that_differ_between_ranks_end_the_fit_on_both_with_rank_and_difference(started: dict[str, Started]) -> None:
    zero, one = both(started, "other plan on rank 1")
    assert zero == one
    assert "labels 'gdn_conv' on rank 0, 'layernorm' on rank 1" in zero["labels"]
    assert "4 blocks on rank 0, 8 on rank 1" in zero["blocks"]


def largest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every logged figure the largest value and its rank, as `max_over_ranks` has it."""
    measured = {name: [(entry[name], entry["rank"]) for entry in ranks if entry[name] is not None] for name in LOGGED}
    best = {name: max(pairs, key=lambda pair: pair[0]) if pairs else None for name, pairs in measured.items()}
    return {name: None if pair is None else {"value": pair[0], "rank": pair[1]} for name, pair in best.items()}


ALWAYS = ("step_ms", "tokens_per_s", "peak_allocated_mib", "peak_reserved_mib", "retained_mib")
"""Figures that a GPU gives under every plan."""


def test_every_rank_reports_the_figures_of_all_and_uneven_ranks_show(started: dict[str, Started]) -> None:
    zero, one = both(started, "uneven ranks")
    for rank, found in enumerate((zero, one)):
        summary = found["summary"]
        assert (summary["rank"], summary["world_size"], summary["status"]) == (rank, 2, "ok")
        assert summary["retained_source"] == "allocator"
        assert json.loads((started["cases"].folder / "uneven" / f"memory_rank{rank}.json").read_text()) == summary
    ranks = zero["summary"]["ranks"]
    assert ranks == one["summary"]["ranks"]
    assert [entry["rank"] for entry in ranks] == [0, 1]
    assert all(entry[name] is not None for entry in ranks for name in ALWAYS)
    assert 1.2 * ranks[0]["retained_mib"] < ranks[1]["retained_mib"]
    assert zero["summary"]["max_over_ranks"] == one["summary"]["max_over_ranks"] == largest(ranks)
    row = zero["rows"][-1]
    assert row["gdn/retained_mib"] == row["gdn/retained_mib/rank1"] == ranks[1]["retained_mib"]
    assert row["gdn/retained_mib/rank0"] == ranks[0]["retained_mib"]
    printed = started["cases"].done().output
    table = printed[printed.index("over ranks (memory in MiB)") :]
    assert f"{ranks[0]['retained_mib']:,.2f}" in table
    assert f"{ranks[1]['retained_mib']:,.2f}" in table


@pytest.mark.parametrize(("name", "arm"), [("run", RUN_ARM), ("torchrun", TORCHRUN_ARM)])
def test_a_recipe_writes_one_record_of_both_ranks(started: dict[str, Started], name: str, arm: str) -> None:
    done = started[name].done()
    assert done.code == 0, done.output[-4000:]
    folder = started[name].folder / "out"
    record = json.loads((folder / "record.json").read_text())
    assert record["status"] == "ok", record["error"]
    assert [(part["rank"], part["status"], len(part["losses_hex"])) for part in record["ranks"]] == [(0, "ok", STEPS), (1, "ok", STEPS)]
    assert all(math.isfinite(float.fromhex(loss)) for part in record["ranks"] for loss in part["losses_hex"])
    assert not set(record["ranks"][0]["losses_hex"]) & set(record["ranks"][1]["losses_hex"]), "both ranks saw the same data"
    assert record["retained_bytes"] == max(part["retained_bytes"] for part in record["ranks"]) > 0
    assert record["kernels"]["norm_out"] == "fla.rms_norm_gated"
    monitor = record["monitor"]
    assert [(entry["rank"], entry["status"]) for entry in monitor["ranks"]] == [(0, "ok"), (1, "ok")]
    assert all(entry[figure] is not None for entry in monitor["ranks"] for figure in ALWAYS)
    assert monitor["max_over_ranks"] == largest(monitor["ranks"])
    files = [json.loads((folder / f"memory_rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [found["ranks"] for found in files] == [monitor["ranks"]] * 2
    assert f"{arm} on each of 2 ranks" in done.output
    assert done.output.count("written to ") == 1
    if name == "torchrun":
        assert "gdn/retained_mib/rank1" in (folder / "metrics.csv").read_text()


def test_both_launchers_train_the_same_model_on_the_same_data(started: dict[str, Started]) -> None:
    """Two plans, and kernels tuned twice: within bfloat16, not bit for bit."""
    records = []
    for name in ("run", "torchrun"):
        started[name].done()
        records.append(json.loads((started[name].folder / "out" / "record.json").read_text()))
    for one, other in zip(*(record["ranks"] for record in records), strict=True):
        assert [float.fromhex(loss) for loss in one["losses_hex"]] == pytest.approx([float.fromhex(loss) for loss in other["losses_hex"]], rel=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_one_rank_ends_both_within_a_minute_with_a_message(started: dict[str, Started], rank: int) -> None:
    start = started[f"fails{rank}"]
    done = start.done()
    assert done.code != 0
    assert "ValueError: a bad sample on one rank" in done.output, done.output[-4000:]
    assert left_behind(done.pid, 5.0) == []
    assert done.ended - float((start.folder / "raised.txt").read_text()) < 60
    summary = json.loads((start.folder / f"memory_rank{rank}.json").read_text())
    assert (summary["status"], summary["reason"]) == ("error", "ValueError: a bad sample on one rank")
    assert summary["ranks"][rank]["reason"] == summary["reason"]
