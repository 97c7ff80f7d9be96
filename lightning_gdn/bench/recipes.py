"""Read a recipe: YAML and `key=value` overrides into the typed schema, or one clear error. Imports no torch.

The file and the overrides are merged by OmegaConf, interpolations are resolved, then every key and every value is checked against
the schema. What is saved with a run is the resolved recipe, except that `${oc.env:NAME}` stays as written: an environment variable
may hold a secret, and its value must not end in a record.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .checks import check_given, check_types, check_values
from .data import saved_family
from .errors import UserError, nearest, one_line
from .schema import FAMILY_FIELDS, SAVED_FIELDS, SECTIONS, TOP, Recipe

__all__ = ["Loaded", "load", "shipped", "to_yaml", "write_yaml"]

_ENV = re.compile(r"\$\{oc\.env:[^{}]*\}")
ALIASES = dict.fromkeys(("label", "labels", "recompute", "recompute_module", "recompute_modules", "activation_checkpointing"), "plan.arm")
"""Keys that other tools use for what this schema calls otherwise."""
OFFLOADED = ("label", "labels", "fraction", "share", "offload", "offload_module", "offload_modules")
"""Keys that would say what moves, and how much of it: the arm says that."""
SAID_BY_THE_ARM = "what moves, and which share of it, is said by the arm: write plan.arm=offload:gdn_core_attn@0.5, or an arm of compare.arms"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A recipe that passed every check that needs no torch."""

    name: str
    """File name without suffix; names the run folder."""
    source: Path
    recipe: Recipe
    saved: dict[str, Any]
    """What is written to disk and to loggers: resolved, with `${oc.env:...}` as written."""


def shipped() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    folder = Path(__file__).resolve().parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(name: str, overrides: Sequence[str] = ()) -> Loaded:
    """Read the recipe `name` (a path, or the bare name of a shipped recipe) with dotted `key=value` overrides.

    Raises:
        UserError: no such recipe, a parse error (with line and column), an unknown key (with section and nearest key), a wrong type,
            a value out of range or outside its closed list, a field that the model's family or the saved model does not have, an arm that does
            not exist.
    """
    path = _find(name)
    written, overriding = _parse(path), _overrides(overrides)
    config = OmegaConf.merge(written, overriding)
    assert isinstance(config, DictConfig)
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    _check_keys(raw, path)
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(Recipe))
    for section, values in raw.items():
        if section in SECTIONS and values is None:
            raw[section] = {}
    merged: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(defaults), OmegaConf.create(raw)), resolve=False)
    plain = _resolve(merged, path)
    check_types(plain)
    in_file, overridden, folder = _model_keys(written), _model_keys(overriding), plain["model"]["path"]
    check_given(in_file, overridden, plain["model"], path.name)
    if folder is not None:  # whose sizes are its own: those of a recipe for random weights are no part of this run, nor is their family
        merged["model"] |= {key: value for key, value in defaults["model"].items() if key not in SAVED_FIELDS}
        if "family" not in [*(in_file if "path" in in_file else ()), *overridden]:
            merged["model"]["family"] = saved_family(folder) or merged["model"]["family"]
        plain = _resolve(merged, path)
    try:
        recipe = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(plain)))
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {error.full_key}: {one_line(error)}") from None
    assert isinstance(recipe, Recipe)
    check_values(recipe)
    saved = _saved(merged, path)
    fields = FAMILY_FIELDS[recipe.model.family] if recipe.model.path is None else SAVED_FIELDS
    saved["model"] = {key: value for key, value in saved["model"].items() if key in fields}  # so that it can be read again
    return Loaded(name=path.stem, source=path, recipe=recipe, saved=saved)


def _model_keys(config: DictConfig) -> list[str]:
    """Fields of the model that are given here; a `path` of null is none."""
    section = OmegaConf.to_container(config, resolve=False).get("model")  # type: ignore[union-attr]
    return [str(key) for key, value in section.items() if key != "path" or value is not None] if isinstance(section, dict) else []


def write_yaml(saved: Mapping[str, Any], path: Path, header: str) -> None:
    """Write a resolved recipe; `header` becomes its first comment lines."""
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    path.write_text(comment + to_yaml(saved), encoding="utf-8")


def to_yaml(saved: Mapping[str, Any]) -> str:
    """A resolved recipe as YAML that `load` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(saved)))


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    known = shipped()
    if name in known:
        return known[name]
    listed = f"Shipped recipes: {', '.join(known) or 'none'}"
    if path.is_dir():
        raise UserError(f"recipe: {name} is a folder; give one YAML file. {listed}")
    if path.stem in known:
        raise UserError(f"recipe: no file {name}; a recipe of that name is shipped: write {path.stem}. {listed}")
    close = nearest(path.stem, known)
    hint = f"; did you mean {close}?" if close else "."
    raise UserError(f"recipe: no file {name} and no shipped recipe of that name{hint} {listed}")


def _parse(path: Path) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    try:
        config = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        at = text.splitlines()[mark.line : mark.line + 1] if mark else []
        tab = " (a tab: YAML indents with spaces, not tabs)" if at and at[0][mark.column : mark.column + 1] == "\t" else ""
        raise UserError(f"{path}{where}: {error.problem or error.context}{tab}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    except AssertionError:
        raise UserError(f"{path}: expected sections ({', '.join(SECTIONS)}) at the top, got a single value") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    if not isinstance(config, DictConfig):
        raise UserError(f"{path}: expected sections ({', '.join(SECTIONS)}) at the top, got a list")
    if not config:
        raise UserError(f"{path}: the file is empty; expected at least one of the sections {', '.join(SECTIONS)}")
    return config


def _overrides(overrides: Sequence[str]) -> DictConfig:
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override {text!r}: expected key=value, for instance trainer.max_steps=10")
        if re.search(r"\.\d+(\.|$)", key):
            raise UserError(f"override {text!r}: a list is replaced as a whole, for instance compare.arms=[none,full]")
        try:
            _check_keys(_nested(key.strip(), text.partition("=")[2]), None)
            OmegaConf.from_dotlist([text])
        except yaml.YAMLError as error:
            raise UserError(f"override {text!r}: the value is no YAML: {getattr(error, 'problem', None) or one_line(error)}") from None
        except OmegaConfBaseException as error:
            raise UserError(f"override {text!r}: {one_line(error)}") from None
    return OmegaConf.from_dotlist(list(overrides))


def _nested(key: str, value: object) -> dict[str, Any]:
    head, dot, rest = key.partition(".")
    return {head: _nested(rest, value) if dot else value}


def _check_keys(raw: Mapping[Any, Any], path: Path | None) -> None:
    """Every key must be in the schema, in its section."""
    where = f"{path}: " if path else ""
    problems = []
    for name, values in raw.items():
        if name in TOP:
            continue
        if name not in SECTIONS:
            problems.append(_explain(str(name), None, values))
        elif isinstance(values, Mapping):
            problems += [_explain(str(key), name, value) for key, value in values.items() if key not in SECTIONS[name]]
        elif values is not None:
            hint = f"; {SAID_BY_THE_ARM}" if name == "offload" else ""
            raise UserError(f"{where}{name} is a section with keys {', '.join(SECTIONS[name])}; expected {name}.KEY=value, got {values!r}{hint}")
    if problems:
        raise UserError(where + "; ".join(problems))


def _explain(key: str, section: str | None, value: object) -> str:
    """One unknown key: where it stands, where it belongs, or which key is nearest."""
    homes = [name for name, keys in SECTIONS.items() if key in keys]
    place = f"key {key!r} in section {section!r}" if section else f"key {key!r} at the top"
    if section and key in OFFLOADED and (section == "offload" or key.startswith("offload")):
        return f"unknown {place}, got {value!r}: {SAID_BY_THE_ARM}. Keys of {section}: {', '.join(SECTIONS[section])}"
    if homes:
        return f"unknown {place}: {key!r} belongs in section {' or '.join(repr(h) for h in homes)}, write {' or '.join(f'{h}.{key}' for h in homes)}"
    if key.lower().replace("-", "_") in ALIASES:
        return f"unknown {place}: did you mean {ALIASES[key.lower().replace('-', '_')]}? Sections: {', '.join(SECTIONS)}"
    if section and key in TOP:
        return f"unknown {place}: {key!r} stands at the top, write {key}=..."
    if section:
        close = nearest(key, SECTIONS[section])
        if close:
            return f"unknown {place}: did you mean {section}.{close}? Keys of {section}: {', '.join(SECTIONS[section])}"
    else:
        close = nearest(key, [*SECTIONS, *TOP])
        if close in SECTIONS and isinstance(value, Mapping):
            inner = [_home(str(k), close) for k in value] or [close]
            return f"unknown section {key!r}: did you mean {', '.join(inner)}? Sections: {', '.join(SECTIONS)}"
        if close:
            return f"unknown {place}: did you mean {close}? Keys at the top: {', '.join([*SECTIONS, *TOP])}"
    dotted = {k: s for s, keys in SECTIONS.items() for k in keys}
    anywhere = nearest(key, dotted, cutoff=0.6)
    hint = f": did you mean {dotted[anywhere]}.{anywhere}?" if anywhere else "."
    listed = f"Keys of {section}: {', '.join(SECTIONS[section])}" if section else f"Keys at the top: {', '.join([*SECTIONS, *TOP])}"
    return f"unknown {place}{hint} {listed}"


def _home(key: str, section: str) -> str:
    """The dotted key that `key`, written in a misspelt `section`, most likely means."""
    if key not in SECTIONS[section]:
        for name, keys in SECTIONS.items():
            if key in keys:
                return f"{name}.{key}"
    return f"{section}.{key if key in SECTIONS[section] else nearest(key, SECTIONS[section]) or 'KEY'}"


def _resolve(merged: Any, path: Path) -> dict[str, Any]:
    config = OmegaConf.create(merged)
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {error.full_key or 'interpolation'}: {one_line(error)}") from None
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def _saved(merged: Any, path: Path) -> dict[str, Any]:
    """Resolve everything but the environment, also where one key takes its value from another that reads the environment."""
    found: list[str] = []

    def keep(match: re.Match[str]) -> str:
        found.append(match.group())
        return f"\x00{len(found) - 1}\x00"

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hide(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [hide(inner) for inner in value]
        if isinstance(value, str):
            return _ENV.sub(keep, value)
        return value

    def show(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: show(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [show(inner) for inner in value]
        return re.sub("\x00(\\d+)\x00", lambda match: found[int(match.group(1))], value) if isinstance(value, str) else value

    return typing.cast(dict[str, Any], show(_resolve(hide(merged), path)))
