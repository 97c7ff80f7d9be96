"""A training that a signal ends says so: exit code, one line, and a record that nobody takes for a whole one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_gdn.bench.ending import TerminatedError, exit_code, terminated_cleanly
from lightning_gdn.bench.module import BenchModule
from lightning_gdn.bench.records import read_json
from lightning_gdn.cli import main
from tests.unit.bench_support import tiny_recipe


def signalled(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, call: int) -> None:
    """This process gets the signal during that forward."""
    calls, forward = 0, BenchModule.forward

    def counted(self: BenchModule, ids: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return forward(self, ids)

    monkeypatch.setattr(BenchModule, "forward", counted)


@pytest.mark.parametrize(
    ("verb", "arm"), [("run", "plan.arm=none"), ("run", "plan.arm=gdn_conv"), ("run", "plan.arm=checkpoint:full"), ("profile", "")]
)
def test_sigterm_is_a_failed_record_and_143(
    verb: str, arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled(monkeypatch, signal.SIGTERM, 5)
    before = signal.getsignal(signal.SIGTERM)
    words = ["--steps", "50", "--arms", "full"] if verb == "profile" else ["trainer.max_steps=50", arm]
    assert main([verb, str(tiny_recipe(tmp_path)), "--out", str(tmp_path / "out"), *words]) == 143
    record = read_json(tmp_path / "out" / ("record.json" if verb == "run" else "profile.json"))
    steps = 4 if arm in ("plan.arm=none", "plan.arm=checkpoint:full") else 5  # their first forward is a probe's
    assert (record["status"], record["error"]) == ("failed", f"ended by SIGTERM after step {steps}")
    assert record.get("losses_hex", []) == []
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-gdn: ")]
    assert len(said) == 1
    assert f"ended by SIGTERM after step {steps}" in said[0]
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_in_the_last_step_is_no_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signalled(monkeypatch, signal.SIGTERM, 3)
    assert main(["run", str(tiny_recipe(tmp_path)), "plan.arm=full", "--out", str(tmp_path / "out")]) == 143
    assert read_json(tmp_path / "out" / "record.json")["error"] == "ended by SIGTERM after step 3"


@pytest.mark.parametrize("verb", ["run", "profile"])
def test_ctrl_c_is_130_and_a_line(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    signalled(monkeypatch, signal.SIGINT, 4)
    before = signal.getsignal(signal.SIGINT)
    assert main([verb, str(tiny_recipe(tmp_path)), "trainer.max_steps=50", "--out", str(tmp_path / "out")]) == 130
    assert "lightning-gdn: interrupted" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*record.json"))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_arms_own_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = f"""
import os
from lightning_gdn.bench import arm, module
forward = module.BenchModule.forward
def signalled(self, ids):
    if len(self.losses) == 1:
        os.kill(os.getpid(), {int(number)})
    return forward(self, ids)
module.BenchModule.forward = signalled
raise SystemExit(arm.main(["--recipe", {str(tiny_recipe(tmp_path))!r}, "--arm", "full", "--round", "0", "--out", {str(tmp_path / "record.json")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    if number == signal.SIGTERM:
        assert read_json(tmp_path / "record.json")["error"] == "ended by SIGTERM after step 2"
    else:
        assert not (tmp_path / "record.json").exists()
        assert done.stderr.splitlines()[-1] == "interrupted"


def test_sigterm_outside_of_training_ends_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TerminatedError, match=r"^ended by SIGTERM$") as caught, terminated_cleanly():
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_exit_codes_of_records() -> None:
    ends = [("ok", None), ("oom", "x"), ("failed", None), ("failed", "rank 0: ended by SIGTERM after step 2")]
    assert [exit_code({"status": status, "error": error}) for status, error in ends] == [0, 1, 1, 143]
