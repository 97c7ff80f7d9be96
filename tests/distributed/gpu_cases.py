"""The cases that also run on two GPUs, with NCCL between them, in one start of two processes. On a CPU they run with gloo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.distributed import cases
from tests.distributed.fits import ON_GPU, OPTIONS, fit, same_gradients

PRECISION = OPTIONS.get("precision", "32-true")
CONTROL: dict[str, Any] = {"precision": PRECISION, "accumulate_grad_batches": 1}
ARMS = (
    "gdn_norm_out",
    "gdn_conv+gdn_norm_out+layernorm",
    "full",
    "offload:gdn_core_attn",
    "gdn_conv+gdn_norm_out+layernorm+offload:gdn_core_attn",
)

if ON_GPU:  # bits are compared: convolutions and scatters sum in a fixed order where PyTorch has such a kernel, and say so where it has none
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory: Any = torch.utils.deterministic
    memory.fill_uninitialized_memory = False  # a kernel that reads what it never wrote shows as a difference, instead of reading NaN


def control_repeats(folder: Path) -> None:
    """Without this bits prove nothing."""
    same_gradients(cases.control(f"{PRECISION}/1", **CONTROL), fit("ddp", **CONTROL)[0])


def static_graph(folder: Path) -> int:
    return len(cases.static_graph_accumulating(2).losses)


CASES: dict[str, Callable[[Path], Any]] = {
    "control repeats": control_repeats,
    **{arm: partial(cases.parity, arm=arm, precision=PRECISION, accumulate=1) for arm in ARMS},
    "offload": partial(cases.offload, precision=PRECISION),
    "unused tower": partial(cases.ddp_options, frozen=False, find_unused_parameters=True),
    "static graph": static_graph,
    "what it is": cases.what_it_is,
    "other plan on rank 1": cases.other_plan_on_rank_1,
    "uneven ranks": cases.uneven_ranks,
}
