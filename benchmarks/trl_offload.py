"""TRL's activation offloading as an arm: its context around forward and backward of every micro-batch, as its SFTTrainer opens it.

The class is `trl.models.activation_offloading.OffloadActivations` with everything as it has it by default. It moves every tensor of at least
1 KiB that autograd saves, the loss's own included, and no parameter. TRL is no dependency of this package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from torch import nn

from lightning_gdn import apply_plan

ARM = "trl_offload"


def offload_activations() -> Any:
    """TRL's context class.

    Raises:
        ImportError: TRL, or something that it needs, cannot be imported.
    """
    try:
        from trl.models.activation_offloading import OffloadActivations
    except RuntimeError as error:  # what lazy imports make of an ImportError
        raise ImportError(str(error)) from error
    return OffloadActivations


def importable() -> bool:
    """Whether the arm can run where there is a GPU."""
    try:
        offload_activations()
    except ImportError:
        return False
    return True


def check(script: str, arms: Sequence[str], device: str) -> dict[str, str]:
    """TRL's version, if the arm is among these; to be called before any model is built.

    Raises:
        SystemExit: the arm is there and cannot run.
    """
    if ARM not in arms:
        return {}
    if device != "cuda":
        raise SystemExit(f"{script}: the arm {ARM} needs an accelerator, got --device {device}; leave the arm out of --arms")
    try:
        offload_activations()
    except ImportError as error:
        raise SystemExit(
            f"{script}: the arm {ARM} needs TRL, which cannot be imported ({error}); pip install trl, or leave the arm out of --arms"
        ) from error
    return {"trl": version("trl")}


@contextmanager
def under_trl(model: nn.Module, kernels: str) -> Iterator[Any]:
    """What the control runs, and TRL's context for it, which is the caller's to open around each micro-batch."""
    with apply_plan(model, [], kernels=kernels):
        context = offload_activations()()
        context.update_model_params(model)
        yield context
