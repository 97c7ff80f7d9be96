"""An exception on one rank: no process is left waiting, and what happened is on the terminal and in the rank's file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.rank_exit import end
from tests.distributed.launch import Done, launch, left_behind, torchrun


def run(tmp_path: Path, rank: int, kind: str, start: Any) -> tuple[Done, dict[str, Any]]:
    done = start("-m", "tests.distributed.failing", str(rank), kind, tmp_path, cwd=tmp_path)
    assert done.code != 0
    assert done.seconds < 60
    assert left_behind(done.pid) == []
    return done, json.loads((tmp_path / f"memory_rank{rank}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_the_training_step_of_one_rank_ends_both(tmp_path: Path, rank: int) -> None:
    done, summary = run(tmp_path, rank, "error", launch)
    assert "ValueError: a bad sample on one rank" in done.output
    assert (summary["status"], summary["reason"], summary["steps"]) == ("error", "ValueError: a bad sample on one rank", 2)
    if rank == 1:
        other = json.loads((tmp_path / "memory_rank0.json").read_text())
        assert other["status"] == "error"
        assert other["ranks"][1]["reason"] == "ValueError: a bad sample on one rank"
        assert "rank 1: error: ValueError: a bad sample on one rank" in done.output.replace("\n", " "), "rank 0's table shows why"


@pytest.mark.slow
def test_h17_an_allocation_that_fails_on_one_rank_under_torchrun_ends_both_and_is_an_oom_record(tmp_path: Path) -> None:
    done, summary = run(tmp_path, 1, "oom", torchrun)
    assert "not enough memory" in done.output
    assert (summary["status"], summary["rank"], summary["phase"]) == ("oom", 1, "forward")
    assert summary["ranks"][1]["status"] == "oom"


def test_processes_that_hang_without_rank_0_are_ended_and_those_that_end_are_not_waited_for() -> None:
    """What NCCL needs: the hanging one ignores SIGTERM, as a process in a collective does."""
    hangs = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code in ("pass", hangs)]
    began = time.monotonic()
    end(processes[:1], 20.0)
    assert time.monotonic() - began < 10
    end(processes, 0.5)
    assert [process.wait(timeout=10) for process in processes] == [0, -9]


def test_an_exit_that_hangs_is_ended_and_says_what_was_printed() -> None:
    """What NCCL needs: destroying the process group, the next exit handler, waits for ranks that wait for this one (NVIDIA/nccl#1777)."""
    done = leave("with bound.surrounding(): atexit.register(time.sleep, 60)")
    assert done.returncode == -signal.SIGALRM
    assert done.stdout == "said\n"
    assert "ValueError: a bad sample" in done.stderr


@pytest.mark.parametrize("first", [True, False])
def test_other_exit_handlers_take_their_time(first: bool) -> None:
    """A logger that uploads, whether it began before the process group was made or after."""
    slow, group = "atexit.register(lambda: (time.sleep(2), print('uploaded')))", "with bound.surrounding(): atexit.register(print, 'destroyed')"
    done = leave("\n".join((slow, group) if first else (group, slow)))
    assert done.returncode == 1
    assert set(done.stdout.split()) == {"said", "destroyed", "uploaded"}


@pytest.mark.parametrize(
    "before",
    [
        "try:\n    with bound.surrounding(): raise OSError('no rendezvous')\nexcept OSError: pass",  # the next attempt succeeds
        "import sys; print('said'); sys.stdout.close(); print = lambda *_: None",
        "import sys; sys.stdout = None; print = lambda *_: None",
    ],
    ids=["retried", "stdout-closed", "no-stdout"],
)
def test_the_bound_holds_whatever_happened_before(before: str) -> None:
    done = leave(f"{before}\nwith bound.surrounding(): atexit.register(time.sleep, 60)")
    assert done.returncode == -signal.SIGALRM


def test_an_exit_without_a_failure_is_not_bounded() -> None:
    done = leave("with bound.surrounding(): atexit.register(time.sleep, 1.5)\nbound.failed = False")
    assert done.returncode == 1


def leave(handlers: str) -> subprocess.CompletedProcess[str]:
    code = "import atexit, time\nfrom lightning_gdn.rank_exit import BoundedExit\nbound = BoundedExit(0.5)\nbound.failed = True\n"
    code += f"{handlers}\nprint('said')\nraise ValueError('a bad sample')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
