"""The tree itself: module sizes, links, pins, Makefile."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.contracts.import_rules import module_files

LINE_LIMIT = 400
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "benchmarks")
MAKE_TARGETS = ("venv", "demo", "test", "test-gpu", "lint", "wheel-check", "clean")


def oversized(files: dict[str, Path]) -> dict[str, int]:
    """Modules of `LINE_LIMIT` lines or more, with their length."""
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    return {name: length for name, length in lengths.items() if length >= LINE_LIMIT}


def broken_links(document: Path) -> list[str]:
    """Relative links and images of a Markdown file that lead to nothing, and anchors that no heading of the target has."""
    text = re.sub(r"^(```|~~~).*?^\1", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    targets = re.findall(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?:\s+\"[^\"]*\")?\)", text)
    targets += re.findall(r"^\[[^\]]+\]:\s+(\S+)", text, flags=re.MULTILINE)
    targets += re.findall(r"<(?:img|a)\b[^>]*\b(?:src|href)=\"([^\"]+)\"", text)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name) if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
            broken.append(target)
    return broken


def _anchors(document: Path) -> set[str]:
    """Anchors that a Markdown viewer gives the headings."""
    headings = re.findall(r"^#+\s+(.*?)\s*#*$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_module_is_under_the_line_limit(repo_root: Path) -> None:
    assert oversized(module_files(repo_root)) == {}


def test_meta_an_oversized_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * LINE_LIMIT, encoding="utf-8")
    (tmp_path / "b.py").write_text("x = 1\n" * (LINE_LIMIT - 1), encoding="utf-8")
    assert oversized({"a": tmp_path / "a.py", "b": tmp_path / "b.py"}) == {"a": LINE_LIMIT}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name: str, repo_root: Path) -> None:
    place = repo_root / name
    assert place.exists(), f"{name} is missing"
    documents = sorted(place.rglob("*.md")) if place.is_dir() else [place]
    assert documents, f"{name} has no Markdown file"
    assert {str(d.relative_to(repo_root)): b for d in documents if (b := broken_links(d))} == {}


def test_meta_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, with `code`\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](there.md) [b](there.md#a-heading-with-code) [c](#page) [d](https://example.org/x)\n"
        '[e](gone.md) ![f](gone.png "title") [g](there.md#no) [h](#no) <img src="lost.png"> \n[ref]: lost.md\n```\n[i](in_code.md)\n```\n',
        encoding="utf-8",
    )
    assert broken_links(page) == ["gone.md", "gone.png", "there.md#no", "#no", "lost.md", "lost.png"]


def _project(repo_root: Path) -> dict[str, Any]:
    return tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _pins(repo_root: Path) -> dict[str, Version]:
    lines = (repo_root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: {line!r} is no exact pin"
            pins[canonicalize_name(name)] = Version(version)
    return pins


def test_the_tested_set_satisfies_the_floors(repo_root: Path) -> None:
    project, pins = _project(repo_root), _pins(repo_root)
    requirements = [Requirement(text) for text in project["dependencies"]]
    for extra in ("cli", "dev"):
        requirements += [r for r in map(Requirement, project["optional-dependencies"][extra]) if r.name != project["name"]]
    assert len(requirements) > 15
    for requirement in requirements:
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement.name} is not pinned in constraints.txt"
        assert pinned in requirement.specifier, f"{requirement} is not met by the pin {pinned}"


def test_the_pins_choose_no_build_of_torch_and_no_triton(repo_root: Path) -> None:
    pins = _pins(repo_root)
    assert pins["torch"].local is None
    assert pins["transformers"] == Version("5.17.0")
    assert [name for name in pins if name.startswith(("nvidia", "triton"))] == []


def test_malicious_and_vulnerable_releases_are_out_of_range(repo_root: Path) -> None:
    ranges = {r.name: r.specifier for r in map(Requirement, _project(repo_root)["dependencies"])}
    assert [v for v in ("2.6.2", "2.6.3", "2.6.5") if v in ranges["lightning"]] == []
    assert "2.9.1" not in ranges["torch"]
    assert [v for v in ("5.17.0", "5.24.0") if v not in ranges["transformers"]] == []


def test_the_console_script_leads_to_a_function(repo_root: Path) -> None:
    from lightning_gdn.cli import main

    assert _project(repo_root)["scripts"] == {"lightning-gdn": "lightning_gdn.cli:main"}
    assert callable(main)


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_the_makefile_knows(target: str, repo_root: Path) -> None:
    done = subprocess.run(["make", "-n", target], cwd=repo_root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"## {target} " in (repo_root / "Makefile").read_text(encoding="utf-8"), f"`make help` does not say what {target} does"


def test_symlinks_are_committed_as_relative_links(repo_root: Path) -> None:
    for name in ("callbacks", "recipes"):
        link = repo_root / "lightning_gdn" / name
        assert link.is_symlink(), f"{link} is a copy, not a link (a checkout without symlink support?)"
        assert link.readlink() == Path("..") / name
