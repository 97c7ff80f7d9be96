"""Every shipped recipe starts with the command that runs it, and is valid."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def command_in_header(text: str, name: str) -> bool:
    """True if the comment at the top of a recipe holds a `lightning-gdn run` or `compare` command for the recipe `name`."""
    header = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        header.append(line)
    return re.search(rf"lightning-gdn (run|compare) (recipes/)?{re.escape(name)}(\.yaml)?(\s|$)", "\n".join(header)) is not None


def test_the_two_recipes_of_the_readme_are_here() -> None:
    assert {"demo_cpu", "qwen3_5_0_8b"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_starts_with_its_command(path: Path) -> None:
    assert command_in_header(path.read_text(encoding="utf-8"), path.stem)


def test_meta_a_missing_or_foreign_command_is_noticed() -> None:
    assert command_in_header("# x\n#   lightning-gdn run recipes/a.yaml k=v\nmodel: {}", "a")
    assert command_in_header("# lightning-gdn compare a\n", "a")
    assert not command_in_header("model: {}\n# lightning-gdn run recipes/a.yaml", "a")
    assert not command_in_header("# lightning-gdn run recipes/ab.yaml", "a")
    assert not command_in_header("# lightning-gdn run recipes/b.yaml", "a")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_found_by_name(path: Path) -> None:
    from lightning_gdn.bench.recipes import load, shipped

    loaded = load(str(path))
    assert not loaded.saved["model"].get("use_cache", False), "shipped recipes train without a cache"
    assert load(path.stem).saved == loaded.saved
    assert shipped()[path.stem].samefile(path)


def test_recipes_are_package_resources() -> None:
    names = {entry.name for entry in resources.files("lightning_gdn.recipes").iterdir() if entry.name.endswith(".yaml")}
    assert names == {path.name for path in RECIPES}
    assert names
