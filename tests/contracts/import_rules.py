"""The rules about who imports whom, as data, and the walk over the syntax trees that finds breaches.

A unit is what stands directly under `lightning_gdn`: a module (`tape`) or a package (`adapters`). The walk sees imports at any depth
of a file, in functions and under `if TYPE_CHECKING`, relative ones resolved, and `importlib.import_module("...")` with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = "lightning_gdn"

LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"regions", "offload_config", "stayed", "labels", "plan"}),
    frozenset({"region_fn", "replay"}),
    frozenset({"offload"}),
    frozenset({"moving", "tape", "ledger"}),
    frozenset({"kernels", "models", "adapters"}),
    frozenset({"takeover", "inspection", "apply", "board", "rank_exit"}),
    frozenset({"strategies", "_registration", "callbacks"}),
    frozenset({"bench", "recipes"}),
    frozenset({"cli", "measuring", "verb_support", "__main__"}),
)
"""Units from the bottom up. A unit imports from its own level and from those below."""

STRANGERS = (frozenset({"strategies", "callbacks"}),)
"""Units of one level that must not import each other."""

EXTERNAL: dict[str, tuple[str, ...]] = {
    "wandb": ("bench.wandb_sink",),
    "transformers": ("adapters", "adapters.*", "kernels", "kernels.*", "bench.module"),
    "fla": ("adapters", "adapters.*", "kernels", "kernels.*", "bench.module"),
    "lightning": ("strategies", "strategies.*", "callbacks", "callbacks.*", "bench", "bench.*", "cli", "measuring"),
    "torch": tuple(p for level in LEVELS[1:] for unit in sorted(level) for p in (unit, f"{unit}.*")),
    "pytorch_lightning": (),
    "callbacks": (),
    "recipes": (),
}
"""Top-level package -> modules (under `lightning_gdn.`, shell patterns) that may import it."""

FORBIDDEN_EVERYWHERE = frozenset(name for name, allowed in EXTERNAL.items() if not allowed)
"""Names that tests and notebooks must not import either."""

FACADE_NAMES = frozenset({"__version__"})
"""What modules of the package may take from `lightning_gdn` itself. Its lazy attributes are for users: used inside, they hide a direction."""


@dataclass(frozen=True)
class Import:
    """One import of one name."""

    line: int
    target: str
    """Absolute dotted name; for `from a import b` it is `a.b`, whether b is a module or an attribute."""


def module_files(root: Path) -> dict[str, Path]:
    """Every module of the package at `root`/lightning_gdn by dotted name, through the symlinked folders."""
    files: dict[str, Path] = {}

    def walk(folder: Path, dotted: str) -> None:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and entry.name.isidentifier() and entry.name != "__pycache__":
                walk(entry, f"{dotted}.{entry.name}")
            elif entry.suffix == ".py":
                files[dotted if entry.stem == "__init__" else f"{dotted}.{entry.stem}"] = entry

    walk(root / PACKAGE, PACKAGE)
    return files


def imports(source: str, module: str = "", *, is_package: bool = False) -> Iterator[Import]:
    """Every import in `source`; relative ones resolved against `module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package)
            for alias in node.names:
                yield Import(node.lineno, f"{base}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(node.lineno, _absolute(first.value, module, is_package))


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    return _absolute("." * node.level + (node.module or ""), module, is_package)


def _absolute(name: str, module: str, is_package: bool) -> str:
    """`name` with its leading dots resolved against `module`."""
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parts = module.split(".") if is_package else module.split(".")[:-1]
    parents = parts[: len(parts) - (level - 1)]
    return ".".join([*parents, *filter(None, [name[level:]])])


def breaches(root: Path) -> list[str]:
    """Every breach of the rules in the package under `root`, as `module:line: what, and what is allowed`."""
    files = module_files(root)
    units = {name.split(".")[1] for name in files if name != PACKAGE}
    known = frozenset().union(*LEVELS)
    found = [f"{PACKAGE}.{unit}: not in LEVELS of tests/contracts/import_rules.py: give it a level" for unit in sorted(units - known)]
    for module, path in files.items():
        is_package = path.name == "__init__.py"
        for item in imports(path.read_text(encoding="utf-8"), module, is_package=is_package):
            problem = _breach(module, item.target, units)
            if problem:
                found.append(f"{module}:{item.line}: {problem}")
    return list(dict.fromkeys(found))  # `from a import b, c` is one breach, not two


def _breach(module: str, target: str, units: set[str]) -> str | None:
    """What is wrong with `module` importing `target`, or None."""
    top, _, rest = target.partition(".")
    inner = module.partition(".")[2]
    if top != PACKAGE:
        allowed = EXTERNAL.get(top)
        if allowed is None or any(fnmatchcase(inner, pattern) for pattern in allowed):
            return None
        return f"imports {top}; allowed in: {', '.join(allowed) or 'no module'}"
    if not inner:
        return None  # the facade re-exports from every level
    unit, other = inner.split(".")[0], rest.split(".")[0]
    if other not in units:
        if other in FACADE_NAMES:
            return None
        return f"imports {other or PACKAGE!r} from the facade {PACKAGE}; import it from the module that defines it"
    if unit == other:
        return None
    if any({unit, other} <= pair for pair in STRANGERS):
        return f"{unit} imports {other}; these two do not know each other"
    if _level(other) > _level(unit):
        return f"{unit} imports {other}, which stands above it"
    return None


def _level(unit: str) -> int:
    return next((i for i, level in enumerate(LEVELS) if unit in level), len(LEVELS))
