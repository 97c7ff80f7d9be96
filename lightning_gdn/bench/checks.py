"""The checks of a recipe that need no torch: types without silent conversion, closed lists, ranges, and what must fit together."""

from __future__ import annotations

import math
import os
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..offload_config import field_problem
from ..regions import GDN, BlockLayout
from .arms import SWEEP, parse
from .errors import UserError, nearest, one_line
from .schema import AT_MOST, CHOICES, FAMILY_FIELDS, POSITIVE, SAVED_FIELDS, SECTIONS, TOP, Recipe

__all__ = ["check_arm", "check_blocks", "check_given", "check_types", "check_values"]

_TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def check_types(plain: Mapping[str, Any]) -> None:
    """Raise `UserError` at the first value of another type than the schema's; of `offload` also out of its range."""
    for name, value in plain.items():
        if name in TOP:
            _check_type(name, value, TOP[name])
        elif name == "offload":
            problem = next(filter(None, (field_problem(key, inner) for key, inner in value.items())), None)
            if problem is not None:
                raise UserError(problem)
        else:
            for key, inner in value.items():
                _check_type(f"{name}.{key}", inner, SECTIONS[name][key])


def _check_type(key: str, value: object, wanted: Any) -> None:
    """Stricter than a conversion: `no` is not text, "20" is no number, 2.0 is no whole number."""
    optional = typing.get_origin(wanted) in (typing.Union, types.UnionType)
    if optional:
        if value is None:
            return
        wanted = next(kind for kind in typing.get_args(wanted) if kind is not type(None))
    if typing.get_origin(wanted) is list:
        if not isinstance(value, list):
            raise UserError(
                f"{key}: expected a list, got {value!r}; for instance {key}={'[0,3]' if typing.get_args(wanted) == (int,) else '[none,full]'}"
            )
        for item in value:
            _check_type(key, item, typing.get_args(wanted)[0])
        return
    good = isinstance(value, (int, float) if wanted is float else wanted) and (wanted is bool or not isinstance(value, bool))
    if good and isinstance(value, float) and not math.isfinite(value):
        good = False
    if not good:
        hint = ""
        if isinstance(value, bool) and wanted is str:
            hint = "; YAML reads yes, no, on and off as true or false: put the word in quotes"
        elif isinstance(value, list) and key in ("plan.arm", "compare.arms"):
            hint = f"; the labels of one arm are joined by '+': write {'+'.join(map(str, value))}"
        elif isinstance(value, Mapping) and key in ("plan.arm", "compare.arms"):
            word = f"{next(iter(value), '')}:"
            hint = f"; YAML reads {word!r} as a section: write a name right after the colon, without a space, for instance offload:gdn_core_attn"
        elif isinstance(value, str) and wanted in (int, float):
            hint = "; write it as a plain number, without quotes"
        raise UserError(f"{key}: expected {_TYPE_NAMES[wanted]}{' or null' if optional else ''}, got {value!r}{hint}")


def check_given(in_file: Collection[str], overriding: Collection[str], model: Mapping[str, Any], source: str) -> None:
    """Whether every field that was given has a meaning for the model: that of the family, or the one saved in `path`.

    Args:
        in_file: fields of `model` that the file gives.
        overriding: those that the command line gives.
        model: the whole section, types checked.
        source: name of the recipe's file.

    Raises:
        UserError: a field that `FAMILY_FIELDS` has for other families only; or, with `path`, one that is not in `SAVED_FIELDS` and that the same
            hand wrote. A file of random weights may be given a `path` on the command line: its model is then replaced as a whole.
    """
    family, path = model["family"], model["path"]
    if family not in FAMILY_FIELDS:
        return  # `check_values` says it
    if path is not None:
        if "path" not in FAMILY_FIELDS[family]:
            raise UserError(f"model.path: {family} has random weights only, got {path!r}; leave out model.path, or take another model.family")
        beside = in_file if "path" in in_file else ()
        fixed = [name for name in dict.fromkeys([*beside, *overriding]) if name not in SAVED_FIELDS]
        if fixed:
            raise UserError(
                f"{_named(fixed)}: a saved model has its own, expected none beside model.path={path!r}, "
                f"{_got(fixed, beside, overriding, model, source)}, or leave out model.path for random weights. "
                f"Fields beside model.path: {_fields(SAVED_FIELDS - {'path'})}"
            )
        return
    foreign = [name for name in dict.fromkeys([*in_file, *overriding]) if name not in FAMILY_FIELDS[family] and name != "path"]
    if not foreign:
        return
    having = [other for other, fields in FAMILY_FIELDS.items() if fields.issuperset(foreign)]
    others = " or ".join(f"model.family={other}" for other in having)
    raise UserError(
        f"{_named(foreign)}: {family} has no such field{'s' if len(foreign) > 1 else ''}, {_got(foreign, in_file, overriding, model, source)}"
        f"{f', or write {others}' if having else ''}. "
        f"Fields of {family}: {_fields(FAMILY_FIELDS[family])}"
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(f"model.{name}" for name in names)


def _fields(names: Collection[str]) -> str:
    return ", ".join(name for name in SECTIONS["model"] if name in names)


def _got(names: Sequence[str], in_file: Collection[str], overriding: Collection[str], model: Mapping[str, Any], source: str) -> str:
    """Each field with its value and who gave it, and where to take it out."""
    hands: dict[str, list[str]] = {}
    for name in names:
        over = f", over that in {source}," if name in in_file else ""
        hands.setdefault(f"on the command line{over}" if name in overriding else f"in {source}", []).append(f"{name}={model[name]!r}")
    told = " and ".join(f"{', '.join(pairs)} {where}" for where, pairs in hands.items())
    return f"got {told.removesuffix(',')}; take {'them' if len(names) > 1 else 'it'} out there"


def check_values(recipe: Recipe) -> None:
    """Raise `UserError` at the first value outside its list or range, or that contradicts another."""
    values = {f"{s}.{k}": getattr(getattr(recipe, s), k) for s, keys in SECTIONS.items() for k in keys} | {k: getattr(recipe, k) for k in TOP}
    for key, names in CHOICES.items():
        if values[key] not in names:
            close = nearest(values[key], names)
            raise UserError(f"{key}: expected one of {', '.join(names)}, got {values[key]!r}" + (f" (did you mean {close!r}?)" if close else ""))
    for key, least in POSITIVE.items():
        if values[key] is not None and values[key] < least:
            raise UserError(f"{key}: expected at least {least:g}, got {values[key]!r}")
    for key, most in AT_MOST.items():
        if values[key] is not None and values[key] > most:
            what = f" (4 x the {os.cpu_count()} cores here, at least 256)" if key == "trainer.num_threads" else ""
            raise UserError(f"{key}: expected at most {most}{what}, got {values[key]!r}; write a smaller number")
    model, trainer = recipe.model, recipe.trainer
    if model.num_attention_heads % model.num_key_value_heads:
        raise UserError(
            f"model.num_key_value_heads: expected a divisor of num_attention_heads={model.num_attention_heads}, got {model.num_key_value_heads}"
        )
    if model.linear_num_value_heads % model.linear_num_key_heads:
        raise UserError(
            f"model.linear_num_value_heads: expected a multiple of linear_num_key_heads={model.linear_num_key_heads}, "
            f"got {model.linear_num_value_heads}"
        )
    _check_family(recipe)
    if trainer.loss == "fused_linear_cross_entropy" and trainer.accelerator == "cpu":
        raise UserError(
            "trainer.loss: fused_linear_cross_entropy runs on a GPU only and trainer.accelerator is cpu; write trainer.loss=cross_entropy"
        )
    if trainer.precision == "bf16-true" and model.dtype == "float32":
        raise UserError("model.dtype: float32 contradicts trainer.precision=bf16-true; use dtype auto, or precision 32-true or bf16-mixed")
    if recipe.monitor.warmup_steps >= trainer.max_steps:
        raise UserError(
            f"monitor.warmup_steps: expected fewer than trainer.max_steps={trainer.max_steps}, got {recipe.monitor.warmup_steps}; "
            "no step would be measured"
        )
    if not recipe.out_dir:
        raise UserError("out_dir: expected a folder, got ''")
    for key, arms in (("plan.arm", [recipe.plan.arm]), ("compare.arms", recipe.compare.arms)):
        if not arms:
            raise UserError(f"{key}: expected at least one arm, got an empty list")
        for arm in arms:
            check_arm(arm, key)


def _check_family(recipe: Recipe) -> None:
    model = recipe.model
    if model.path is not None or model.family != "qwen3_next":
        return
    if model.num_experts_per_tok > model.num_experts:
        raise UserError(f"model.num_experts_per_tok: expected at most num_experts={model.num_experts}, got {model.num_experts_per_tok}")
    outside = [layer for layer in model.mlp_only_layers if not 0 <= layer < model.num_hidden_layers]
    if outside:
        raise UserError(f"model.mlp_only_layers: expected blocks 0 to {model.num_hidden_layers - 1}, got {outside[0]}")


def check_arm(arm: str, key: str) -> None:
    """Raise `UserError` unless `arm` follows the arm grammar and this version has its labels."""
    try:
        parse(arm)
    except ValueError as error:
        raise UserError(f"{key}: {one_line(error)}") from None
    if arm.strip() == SWEEP and key == "plan.arm":
        raise UserError(f"{key}: {SWEEP} stands for several arms of a comparison; write one of them, for instance checkpoint:full")


def check_blocks(layouts: Sequence[BlockLayout]) -> None:
    """Whether labels and rivals can do anything for this model.

    Raises:
        UserError: none of its blocks has a Gated DeltaNet mixer.
    """
    if not any(layout.kind == GDN for layout in layouts):
        raise UserError(
            f"model: expected Gated DeltaNet blocks, got {len(layouts)} blocks with attention only; labels and rivals are for hybrid models. "
            "Raise model.full_attention_interval, or train without a plan: lightning-gdn run RECIPE plan.arm=none"
        )
