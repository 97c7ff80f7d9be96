"""A training that a signal ends, or that diverges, says so: exit code, one line, and a record that nobody takes for a whole one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gdn.bench import compare as compare_module
from lightning_gdn.bench.ending import TerminatedError, exit_code, terminated_cleanly
from lightning_gdn.bench.judge import judge
from lightning_gdn.bench.module import BenchModule
from lightning_gdn.bench.records import not_finite, read_json, write_json
from lightning_gdn.bench.report import cells, markdown
from lightning_gdn.cli import main
from tests.unit.bench_support import record, tiny_recipe


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


@pytest.mark.parametrize(("call", "during"), [(2, "none"), (4, "full"), (5, "full"), (7, "gdn_conv"), (9, "none")])
def test_sigterm_ends_a_parity_check_with_a_failed_record(
    call: int, during: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the control, in each arm, in the control after them."""
    signalled(monkeypatch, signal.SIGTERM, call)
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    out = tmp_path / "out"
    assert main(["parity", str(tiny_recipe(tmp_path)), "--arms", "full,gdn_conv", "--out", str(out)]) == 143
    record = read_json(out / "parity.json")
    assert (record["status"], record["error"]) == ("failed", f"ended by SIGTERM during {during}")
    assert record["kind"] == "parity"
    assert "arms" not in record
    assert {path.name for path in out.iterdir()} == {"recipe.yaml", "parity.json"}
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-gdn: ")]
    assert said == [f"lightning-gdn: parity: failed: ended by SIGTERM during {during}. Written to {out / 'parity.json'}"]
    assert (signal.getsignal(signal.SIGTERM), torch.get_num_threads()) == (before, threads)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("verb", ["run", "profile", "parity"])
def test_ctrl_c_is_130_and_a_line(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    signalled(monkeypatch, signal.SIGINT, 4)
    before = signal.getsignal(signal.SIGINT)
    assert main([verb, str(tiny_recipe(tmp_path)), "trainer.max_steps=50", "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "lightning-gdn: interrupted", "there is no record that could stay"
    assert not [path for name in ("record", "profile", "parity") for path in (tmp_path / "out").glob(f"{name}.json")]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("finished", [0, 1, 2])
@pytest.mark.parametrize(("stop", "code", "said"), [(TerminatedError, 143, "ended by SIGTERM"), (KeyboardInterrupt, 130, "interrupted")])
def test_a_comparison_says_that_records_stay_where_there_are_some(
    stop: type[BaseException],
    code: int,
    said: str,
    finished: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(recipe: Path, arm: str, index: int, out: Path, progress: Any) -> int:
        if len(list(tmp_path.glob("cmp/arms/*/record.json"))) == finished:
            raise stop
        write_json(out, record(arm, index))
        return 0

    monkeypatch.setattr(compare_module, "_launch", lambda loaded: launch)
    assert main(["compare", str(tiny_recipe(tmp_path)), "--out", str(tmp_path / "cmp")]) == code
    stay = f"; records written so far stay in {tmp_path / 'cmp'}" if finished else ""
    assert capsys.readouterr().err.splitlines()[-1] == f"lightning-gdn: {said}{stay}"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_arms_own_process(number: signal.Signals, code: int, tmp_path: Path) -> None:
    script = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
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


@pytest.mark.parametrize("arm", ["none", "full", "checkpoint:full"])
def test_a_run_that_diverges_says_so(arm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["run", str(tiny_recipe(tmp_path)), "trainer.lr=1e30", f"plan.arm={arm}", "--out", str(out)]) == 1
    record = read_json(out / "record.json")
    assert (record["status"], record["loss_last"]) == ("ok", None)
    captured = capsys.readouterr()
    assert f"{arm}: loss 5.5" in captured.out
    assert "-> nan, blocks retain" in captured.out
    assert [line for line in captured.err.splitlines() if line.startswith("lightning-gdn: ")] == [
        f"lightning-gdn: arm {arm}: 2 of 3 losses are not finite"
    ]


def test_losses_that_are_not_finite_are_counted_over_all_ranks_and_rounds() -> None:
    assert not_finite([record("a")]) is None
    assert not_finite([record("a", losses_hex=[])]) is None
    several = record("a", ranks=[{"losses_hex": [(1.0).hex(), "nan"]}, None, {"losses_hex": ["inf", "-inf"]}])
    assert not_finite([several, record("a", 1)]) == "3 of 7 losses are not finite"


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
def test_equal_losses_that_are_not_finite_prove_nothing(device: str) -> None:
    environment = {**record("a")["environment"], "device": device}
    diverged = [(5.0).hex(), "nan", "nan"]
    records = [record(arm, environment=environment, losses_hex=diverged, loss_last=None) for arm in ("none", "a")]
    result = judge(records, name="x", arms=["none", "a"])
    assert result["problems"] == [f"{arm}: 2 of 3 losses are not finite: their comparison proves nothing" for arm in ("none", "a")]
    assert [cells(entry)[-1] for entry in result["arms"]] == ["control, not finite", "bit-equal, not finite"]
    assert "PROBLEM: none: 2 of 3 losses are not finite" in markdown(result)
    assert judge([record("none"), record("a")], name="x", arms=["none", "a"])["problems"] == []


def test_a_comparison_that_diverges_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(recipe_file: Path, arm: str, index: int, out: Path, progress: object) -> int:
        write_json(out, record(arm, index, losses_hex=["nan"] * 3, loss_first=None, loss_last=None))
        return 0

    monkeypatch.setattr(compare_module, "_launch", lambda loaded: launch)
    assert main(["compare", str(tiny_recipe(tmp_path)), "--arms", "full", "--out", str(tmp_path / "cmp")]) == 1
    assert "PROBLEM: full: 3 of 3 losses are not finite: their comparison proves nothing" in capsys.readouterr().out


def test_a_profile_of_a_training_that_diverges_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trainer.lr=1e30", "--steps", "1", "--arms", "full", "--out", str(tmp_path / "out")]
    assert main(["profile", str(tiny_recipe(tmp_path)), *words]) == 0
    assert "losses are not finite: the training diverged" in capsys.readouterr().out
