"""Every notebook was committed executed, and still runs from an empty folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def problems(notebook: Any) -> list[str]:
    """Why a notebook does not count as executed from top to bottom without an error."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    found = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append(f"execution counts are {[cell.execution_count for cell in cells]}, not 1..{len(cells)}")
    outputs = [output for cell in cells for output in cell.outputs]
    if not outputs:
        found.append("no outputs")
    found += [f"error output: {output.ename}" for output in outputs if output.output_type == "error"]
    found += [f"shows a warning: {o.text[:200]}" for o in outputs if o.get("name") == "stderr" and "Warning" in o.text]
    return found


def execute(notebook: Any, folder: Path) -> Any:
    """Run a notebook in `folder` with the interpreter that runs the tests; a failing cell raises."""
    return NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS, "notebooks/ has no notebook"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_committed_executed(path: Path) -> None:
    assert problems(nbformat.read(path, as_version=4)) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    assert problems(execute(nbformat.read(path, as_version=4), tmp_path)) == []


def test_meta_a_broken_notebook_is_noticed(tmp_path: Path) -> None:
    v4 = nbformat.v4
    fresh = v4.new_notebook(cells=[v4.new_code_cell("import os, sys\nprint(os.getcwd(), sys.prefix)"), v4.new_code_cell("1 + 1")])
    assert problems(fresh) == ["execution counts are [None, None], not 1..2", "no outputs"]
    done = execute(fresh, tmp_path)
    assert problems(done) == []
    assert done.cells[0].outputs[0].text.split() == [str(tmp_path), sys.prefix]
    warned = v4.new_notebook(cells=[v4.new_code_cell("import warnings\nwarnings.warn('old')")])
    assert [p.partition(":")[0] for p in problems(execute(warned, tmp_path))] == ["shows a warning"]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(v4.new_notebook(cells=[v4.new_code_cell("1 / 0")]), tmp_path)
