"""What the benchmark scripts compute from what they measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rounds(repo_root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("rounds", repo_root / "benchmarks" / "rounds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_is_judged_by_how_far_runs_of_its_kind_are_apart(rounds: Any) -> None:
    own = [[1.0, 2.0, 3.0], [1.0, 2.2, 3.1], [1.0, 2.1, 3.4]]
    found = rounds.against_own_spread(own, [1.1, 2.1, 3.5])
    assert found["outside"] == {"steps": 2, "at_most": 0.1}
    assert found["left_out"] == [{"steps": 2, "at_most": 0.1}, {"steps": 1, "at_most": 0.1}, {"steps": 1, "at_most": 0.3}]
    assert found["other_left_out"] == [{"steps": 2, "at_most": 0.1}, {"steps": 2, "at_most": 0.1}, {"steps": 2, "at_most": 0.4}]
    assert found["own_distance"] == {"largest": 0.4, "mean": pytest.approx(0.5 / 3, abs=1e-6)}
    assert found["distance"] == {"largest": 0.5, "mean": pytest.approx(0.7 / 3, abs=1e-6)}
    same = rounds.against_own_spread(own, own[1])
    assert same["outside"] == {"steps": 0, "at_most": 0.0}
