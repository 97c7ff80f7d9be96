"""What each label stands for, and, for a recipe, what it frees: counted on one block of each kind, multiplied by their number."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..labels import LABELS, OFFLOAD_LABELS
from ..regions import GDN, Mode, Moves
from ..stayed import meaning
from .arms import RIVALS, Rival, configured, parse
from .checks import check_blocks
from .data import BYTES
from .judge import CONTROL
from .recipes import Loaded

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from ..offload_config import OffloadConfig
    from ..plan import BlockPlan, Plan
    from .schema import Recipe

__all__ = ["Prediction", "Unit", "known_labels", "model_tables", "predict", "units"]

CPU_CAP = 512 * 2**20
"""On a CPU, count at a shorter sequence rather than hold more than this many bytes: each arm is one forward, and time goes with bytes."""
PROBE_TOKENS = 128
"""Sequence length of the first, small count that tells whether the recipe's own length fits."""

Unit = tuple[tuple[str, tuple[tuple[str, str], ...], bool, tuple[tuple[str, str], ...]], ...]
"""Blocks whose retained bytes depend on each other (one block, or one chunk of `full:uniform:n`): (kind, modes, carry, moves) of each."""


OFFLOAD_ARMS = {name: f"offload:{name}" if name != "block_input" else f"full+offload:{name}" for name in OFFLOAD_LABELS}
"""Offload label -> the arm that shows what it moves."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a recipe's model will retain under each arm."""

    retained_bytes: dict[str, int]
    """By arm: bytes that all blocks hold between forward and backward of one micro-batch [B, T]. Rivals are measured, not predicted."""
    inapplicable: dict[str, str]
    """Labels and arms that do not fit this model, with the reason."""
    tokens: int
    """B x T of the recipe."""
    device: str
    kernels: dict[str, str]
    conditions: dict[str, str]
    """Arms whose figure holds only under a condition, which stands beside it."""
    stays: dict[str, str]
    """Arms with offload labels of whose bytes some or all stay on the device, with the reason."""
    remarks: tuple[str, ...]
    """How the figures were obtained, where that limits them."""


def known_labels() -> tuple[Table, Table, Table]:
    """Recompute labels, offload labels and rivals, without any model."""
    from rich.table import Table

    recompute = Table(title="recompute labels", title_justify="left")
    for column in ("label", "regions", "remark"):
        recompute.add_column(column, overflow="fold")
    for label in LABELS.values():
        recompute.add_row(label.name, ", ".join(f"{region}: {mode}" for region, mode in label.modes) or "no region yet", label.remark)
    recompute.add_row("full", "every region", "whole blocks; full:block:N covers the first N, full:uniform:N keeps one input per N blocks")
    recompute.add_row(CONTROL, "no region", "the control: nothing is installed")
    offload = Table(title="offload labels (in an arm: offload:gdn_core_attn@0.5)", title_justify="left")
    for column in ("label", "what moves to host memory"):
        offload.add_column(column, overflow="fold")
    for name, remark in OFFLOAD_LABELS.items():
        offload.add_row(name, remark)
    rivals = Table(title="rivals: further arms of a comparison", title_justify="left")
    for column in ("arm", "public means"):
        rivals.add_column(column, overflow="fold")
    for form, means in RIVALS.items():
        rivals.add_row(form, means)
    return recompute, offload, rivals


def units(plan: Plan) -> list[Unit]:
    """The plan's blocks, joined where one hands its output on as recomputable. The resident last ones move nothing."""
    found: list[Unit] = []
    chunk: list[BlockPlan] = []
    stay = len(plan.blocks) - (plan.offload.resident_last_blocks if plan.offload is not None else 0)
    for index, block in enumerate(plan.blocks):
        chunk.append(block if index < stay else _resident(block))
        if not block.carry:
            found.append(_unit(chunk))
            chunk = []
    if chunk:
        found.append(_unit(chunk))
    return found


def _resident(block: BlockPlan) -> BlockPlan:
    modes = tuple((region, Mode.KEEP if mode is Mode.OFFLOAD else mode) for region, mode in block.modes)
    return replace(block, modes=modes, moves=())


def _unit(chunk: Sequence[BlockPlan]) -> Unit:
    return tuple(
        (
            block.kind,
            tuple((region, str(mode)) for region, mode in block.modes),
            block.carry,
            tuple((region, str(what)) for region, what in block.moves),
        )
        for block in chunk
    )


class _Counter:
    """Counts retained bytes of units, each on real blocks with the recipe's dimensions."""

    def __init__(self, recipe: Recipe, device: str, batch: int) -> None:
        # the embedding is no part of a block: a small one saves the time and memory of building it
        self.recipe = replace(recipe, model=replace(recipe.model, vocab_size=BYTES))
        self.device, self.batch = device, batch
        self.kernels: dict[str, str] = {}
        self.stayed: dict[str, int] = {}
        """Bytes that the offload labels of the last `count` named and that stayed, by reason."""
        self._models: dict[tuple[tuple[str, bool], ...], nn.Module] = {}

    def _model(self, kinds: tuple[tuple[str, bool], ...]) -> nn.Module:
        """A model of these blocks: (transformers' kind, whether its MLP is dense)."""
        import torch

        from .module import build_model

        if kinds not in self._models:
            self._models.clear()  # one at a time: the embedding of a large vocabulary is most of it
            with torch.random.fork_rng(), torch.device("cuda" if self.device == "gpu" else "cpu"):
                self._models[kinds] = build_model(self.recipe, [kind for kind, _ in kinds], dense=[i for i, (_, dense) in enumerate(kinds) if dense])
        return self._models[kinds]

    def count(self, wanted: Sequence[Unit], tokens: int, offload: OffloadConfig | None = None) -> dict[Unit, tuple[int, int]]:
        """Bytes that one unit of each kind in `wanted` retains at `tokens` per sequence if it moves what it may, and bytes that it moves."""
        import torch

        from ..apply import FreesNothingWarning, apply_plan, instrument
        from ..inspection import inspect_model
        from ..plan import BlockPlan, Plan

        self.stayed = {}
        flat = [block for unit in wanted for block in unit]
        model = self._model(tuple(("linear_attention" if kind == GDN else "full_attention", "gate_up" in dict(modes)) for kind, modes, _, _ in flat))
        layouts = inspect_model(model).layouts
        blocks = tuple(
            BlockPlan(
                name=layout.name,
                kind=kind,
                modes=tuple((region, Mode(mode)) for region, mode in modes),
                carry=carry,
                moves=tuple((region, Moves(what)) for region, what in moves),
            )
            for layout, (kind, modes, carry, moves) in zip(layouts, flat, strict=True)
        )
        everything = None if offload is None else replace(offload, fraction=1.0, resident_last_blocks=0, max_pinned_gib=None)
        plan = Plan(source="counted", blocks=blocks, offload=everything)
        ids = torch.zeros((self.batch, tokens), dtype=torch.long, device="cuda" if self.device == "gpu" else "cpu")
        base: Any = model.base_model  # without the output projection: the logits of a large vocabulary are no part of a block
        if plan.is_control:
            with instrument(model, kernels=self.recipe.plan.kernels) as ledger, self._precision():
                base(input_ids=ids)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FreesNothingWarning)  # the table says it
                with apply_plan(model, plan, kernels=self.recipe.plan.kernels) as applied, self._precision():
                    base(input_ids=ids)
                    self.stayed = applied.engines.stayed if applied.engines is not None else {}
            ledger = applied.ledger
        self.kernels |= ledger.kernels
        bytes_of: dict[str, tuple[int, int]] = {}
        for row in ledger.rows():
            kept, moved = bytes_of.get(row.block, (0, 0))
            bytes_of[row.block] = kept + row.kept_bytes + row.replay_input_bytes, moved + row.moved_bytes
        names = iter(block.name for block in blocks)
        found = {}
        for unit in wanted:
            rows = [bytes_of[next(names)] for _ in unit]
            found[unit] = sum(kept for kept, _ in rows), sum(moved for _, moved in rows)
        return found

    def _precision(self) -> Any:
        from contextlib import nullcontext

        from lightning.pytorch.plugins import HalfPrecision, MixedPrecision

        device = "cuda" if self.device == "gpu" else "cpu"
        if self.recipe.trainer.precision == "bf16-mixed":
            return MixedPrecision("bf16-mixed", device).forward_context()
        if self.recipe.trainer.precision == "bf16-true":
            return HalfPrecision("bf16-true").forward_context()
        return nullcontext()


def predict(loaded: Loaded, arms: Sequence[str]) -> Prediction:
    """Predict the retained bytes of each arm.

    A model with the recipe's dimensions, but only one block per kind and mode, runs one instrumented forward per arm at the recipe's
    batch and sequence length on the recipe's device; each block's bytes are multiplied by how often the model has it. On a CPU, where
    that would hold more than half a GiB, a shorter sequence is counted and scaled, and the prediction says so.

    Raises:
        UserError: the model has no Gated DeltaNet block. (Arms that do not fit the model are reported, not raised.)
    """
    import torch

    from ..inspection import inspect_model
    from ..plan import Plan
    from .module import meta_model

    recipe = loaded.recipe
    gpu = torch.cuda.is_available()
    device = "gpu" if gpu and recipe.trainer.accelerator != "cpu" else "cpu"
    remarks = []
    if recipe.trainer.accelerator == "gpu" and not gpu:
        remarks.append("no GPU here: counted on the CPU with the model's torch functions; FLA's kernels on a GPU retain less")
    layouts = inspect_model(meta_model(recipe)).layouts
    check_blocks(layouts)
    plans: dict[str, Plan] = {}
    inapplicable: dict[str, str] = {}
    known = [*LABELS, *OFFLOAD_ARMS.values()]
    for arm in dict.fromkeys([CONTROL, *known, "full", *arms]):
        chosen = parse(arm)
        if isinstance(chosen, Rival):
            continue
        try:
            plans[arm] = Plan.from_labels(configured(chosen, recipe.offload), layouts)
        except ValueError as error:
            inapplicable[arm] = str(error).partition(". Labels this model has")[0].partition(". Offload labels this model has")[0]
    data = recipe.data
    counter = _Counter(recipe, device, data.batch_size)
    length = data.seq_len
    if device == "cpu":
        wanted = list(dict.fromkeys(units(plans[CONTROL])))
        small = min(PROBE_TOKENS, length)
        per_token = sum(kept for kept, _ in counter.count(wanted, small).values()) / small
        if per_token * length > CPU_CAP:
            length = max(small, int(CPU_CAP / per_token) // 64 * 64)
            remarks.append(f"counted at {length} of {data.seq_len} tokens per sequence (more than {CPU_CAP >> 20} MiB otherwise) and scaled")
    retained, conditions, stays = {}, dict[str, str](), dict[str, str]()
    for arm, plan in plans.items():
        all_units = units(plan)
        offload = plan.offload
        if offload is not None:  # a shorter sequence has smaller storages
            offload = replace(offload, min_bytes=offload.min_bytes * length // data.seq_len)
        counted = counter.count(list(dict.fromkeys(all_units)), length, offload)
        total, moved = (sum(counted[unit][which] for unit in all_units) for which in (0, 1))
        if offload is not None and offload.fraction not in (1.0, "auto"):
            total += round(moved * (1 - float(offload.fraction)))
            if arm in arms:
                remarks.append(f"{arm}: a share of the bytes; which storages it is decides to within one of them")
        if offload is not None and offload.fraction == "auto" and arm in arms:
            conditions[arm] = "everything moved"
            remarks.append(f"{arm}: with everything moved, as it starts; what it settles on depends on the machine")
        if offload is not None and offload.max_pinned_bytes is not None and moved > offload.max_pinned_bytes and arm in arms:
            conditions[arm] = ", ".join([*([conditions[arm]] if arm in conditions else []), "without the cap"])
            remarks.append(f"{arm}: as if offload.max_pinned_gib did not bound it; {moved / 2**30:.2f} GiB would move")
        if offload is not None:
            reason = _stays(plan, counter.stayed, moved)
            if reason is not None:
                stays[arm] = reason
                if arm in arms:
                    remarks.append(f"{arm}: {reason}")
        retained[arm] = total if length == data.seq_len else round(total * data.seq_len / length)
    return Prediction(
        retained_bytes=retained,
        inapplicable=inapplicable,
        tokens=data.batch_size * data.seq_len,
        device=device,
        kernels=counter.kernels,
        conditions=conditions,
        stays=stays,
        remarks=tuple(remarks),
    )


def _stays(plan: Plan, stayed: Mapping[str, int], moved: int) -> str | None:
    """Why nothing of what the plan's offload labels name moves, or that a part of it is too small to; None if no more than is `held` stays."""
    assert plan.offload is not None
    small = f"bytes {meaning('min_bytes', plan.offload)}"
    if moved:
        return f"a part of it stays: {small}" if stayed.get("min_bytes") else None
    found = ", ".join(small if reason == "min_bytes" else reason for reason, nbytes in stayed.items() if nbytes)
    last = plan.offload.resident_last_blocks
    if not found and any(block.moves for block in plan.blocks[len(plan.blocks) - min(last, len(plan.blocks)) :]):
        found = f"no other blocks have it than those of offload.resident_last_blocks={last}"
    return f"nothing moves: {found or 'this plan keeps nothing of it'}"


def model_tables(loaded: Loaded, prediction: Prediction, arms: Sequence[str]) -> tuple[Table, Table, list[str]]:
    """Labels with what each frees on the recipe's model, the recipe's arms with what each retains, and the lines under them."""
    from rich.table import Table

    base = prediction.retained_bytes[CONTROL]
    labels = Table(title=f"labels on {loaded.name} (batch {loaded.recipe.data.batch_size}, seq {loaded.recipe.data.seq_len})", title_justify="left")
    for column in ("label", "frees per token", "of all", "remark"):
        labels.add_column(column, justify="right" if column in ("frees per token", "of all") else "left", overflow="fold")
    for name, label in LABELS.items():
        if name in prediction.inapplicable:
            labels.add_row(name, "does not apply", "", "no block of this model has its regions", style="dim")
        else:
            labels.add_row(name, *_freed(base, prediction.retained_bytes[name], prediction.tokens), label.remark)
    for name, remark in OFFLOAD_LABELS.items():
        arm = OFFLOAD_ARMS[name]
        if arm in prediction.inapplicable:
            labels.add_row(arm, "does not apply", "", "no block of this model has its regions", style="dim")
        else:
            said = f"moves {remark}" + (f"; {prediction.stays[arm]}" if arm in prediction.stays else "")
            labels.add_row(arm, *_freed(base, prediction.retained_bytes[arm], prediction.tokens), said)
    labels.add_row("full", *_freed(base, prediction.retained_bytes["full"], prediction.tokens), "every region of every block")
    table = Table(title="arms of the recipe: predicted retained bytes of one micro-batch", title_justify="left")
    for column in ("arm", "retained", "Δ"):
        table.add_column(column, justify="left" if column == "arm" else "right", overflow="fold")
    for arm in arms:
        value = prediction.retained_bytes.get(arm)
        if arm in prediction.inapplicable:
            table.add_row(arm, f"does not apply: {prediction.inapplicable[arm]}", "", style="dim")
            continue
        if value is None:
            table.add_row(arm, "a rival: measured by compare, not predicted", "")
            continue
        condition = f", {prediction.conditions[arm]}" if arm in prediction.conditions else ""
        table.add_row(arm, f"{value:,} B ({value / 2**20:.2f} MiB){condition}", f"{(value / base - 1) * 100:+.1f} %" if base else "n/a")
    kernels = ", ".join(f"{region} {kernel}" for region, kernel in prediction.kernels.items()) or "n/a"
    return labels, table, [f"kernels: {kernels}", *prediction.remarks]


def as_dict(prediction: Prediction) -> Mapping[str, Any]:
    """JSON-able form, for `labels --json`."""
    base = prediction.retained_bytes[CONTROL]
    return {
        "tokens": prediction.tokens,
        "device": prediction.device,
        "kernels": prediction.kernels,
        "conditions": prediction.conditions,
        "stays": prediction.stays,
        "remarks": list(prediction.remarks),
        "inapplicable": prediction.inapplicable,
        "retained_bytes": prediction.retained_bytes,
        "freed_bytes_per_token": {arm: (base - value) / prediction.tokens for arm, value in prediction.retained_bytes.items()},
    }


def _freed(base: int, value: int, tokens: int) -> tuple[str, str]:
    return f"{(base - value) / tokens:,.0f} B", f"{(base - value) / base * 100:.1f} %" if base else "n/a"
