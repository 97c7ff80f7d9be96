"""`make wheel-check` builds and installs, which is too slow to do twice; here its judgement of a wheel is shown to be able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.wheel_check import CheckError, call, expected_files, require, wrong_with_names

LICENCE = "lightning_gdn-0.1.0.dist-info/licenses/LICENSE"


def test_the_package_in_the_tree_has_what_a_user_needs(repo_root: Path) -> None:
    files = expected_files(repo_root)
    wanted = {"lightning_gdn/__init__.py", "lightning_gdn/cli.py", "lightning_gdn/py.typed", "lightning_gdn/callbacks/__init__.py"}
    wanted |= {f"lightning_gdn/recipes/{name}" for name in ("__init__.py", "demo_cpu.yaml", "qwen3_5_0_8b.yaml")}
    assert wanted <= files


def test_a_complete_wheel_passes(repo_root: Path) -> None:
    expected = expected_files(repo_root)
    assert wrong_with_names({*expected, LICENCE, "lightning_gdn-0.1.0.dist-info/METADATA"}, expected) == []


@pytest.mark.parametrize("name", ["callbacks/__init__.py", "recipes/demo_cpu.yaml", "tests/models.py", "notebooks/a.ipynb", "lightning_gdn/junk.txt"])
def test_a_file_that_does_not_belong_is_named(name: str) -> None:
    assert wrong_with_names({"lightning_gdn/__init__.py", LICENCE, name}, {"lightning_gdn/__init__.py"}) == [f"not of the package: {name}"]


def test_missing_files_are_named() -> None:
    assert wrong_with_names(set(), {"lightning_gdn/py.typed"}) == ["missing: lightning_gdn/py.typed", "missing: the licence text"]


def test_a_failing_command_shows_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"ended with 3:\nout\n\nerr"):
        call("bash", "-c", "echo out; echo err >&2; exit 3", cwd=tmp_path)
    with pytest.raises(CheckError, match="reason"):
        require(False, "reason")
