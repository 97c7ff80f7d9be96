"""What the benchmark scripts compute from what they measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_a_run_is_judged_by_how_far_runs_of_its_kind_are_apart(bench: Callable[[str], Any]) -> None:
    against = bench("rounds").against_own_spread
    own = [[1.0, 2.0, 3.0], [1.0, 2.2, 3.1], [1.0, 2.1, 3.4]]
    found = against(own, [1.1, 2.1, 3.5])
    assert found["outside"] == {"steps": 2, "at_most": 0.1}
    assert found["left_out"] == [{"steps": 2, "at_most": 0.1}, {"steps": 1, "at_most": 0.1}, {"steps": 1, "at_most": 0.3}]
    assert found["other_left_out"] == [{"steps": 2, "at_most": 0.1}, {"steps": 2, "at_most": 0.1}, {"steps": 2, "at_most": 0.4}]
    assert found["own_distance"] == {"largest": 0.4, "mean": pytest.approx(0.5 / 3, abs=1e-6)}
    assert found["distance"] == {"largest": 0.5, "mean": pytest.approx(0.7 / 3, abs=1e-6)}
    same = against(own, own[1])
    assert same["outside"] == {"steps": 0, "at_most": 0.0}
