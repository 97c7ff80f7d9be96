"""One model that runs the same training step again and again: what it computed, and how far that is from the first time."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from ..apply import FreesNothingWarning
from .data import Text, make_loaders
from .module import make_module
from .parity_judge import EQUAL, LOSSES, WEIGHT, Gap
from .schema import Recipe

__all__ = ["CUBLAS", "CUBLAS_VALUES", "KernelSetting", "Rig", "cublas_is_deterministic", "kernel_setting"]

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES = (":4096:8", ":16:8")
"""What PyTorch takes as deterministic; read once, when cuBLAS starts."""
CHUNK = 2**24
"""Elements compared at a time: 128 MiB in float64, and as much for each step of the arithmetic."""
_NO_KERNEL = "does not have a deterministic implementation"
_WARNED = rf".*({_NO_KERNEL}|non-deterministic algorithm|[Dd]eterministic behavior was enabled)"


def cublas_is_deterministic() -> bool:
    """Whether the environment makes cuBLAS sum in a fixed order, if it has not started yet."""
    return os.environ.get(CUBLAS) in CUBLAS_VALUES


class KernelSetting:
    """Which kernels PyTorch chooses. `mode`: `error` (deterministic ones, an operation without one raises), `warn`, or `default`."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.operations: dict[str, None] = {}
        """What has no deterministic kernel, or was not made to use it."""

    def relax(self, error: RuntimeError) -> bool:
        """Go on with warnings after an operation without a deterministic kernel raised. False if the error is another one."""
        if self.mode != "error" or _NO_KERNEL not in str(error):
            return False
        self.operations[str(error).split(_NO_KERNEL)[0].strip()] = None
        self.mode = "warn"
        torch.set_deterministic_debug_mode("warn")
        return True

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return {
            "deterministic_algorithms": self.mode,
            "operations_without_a_deterministic_kernel": list(self.operations),
            CUBLAS: os.environ.get(CUBLAS),
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }


@contextmanager
def kernel_setting(*, deterministic: bool, cuda: bool) -> Iterator[KernelSetting]:
    """Deterministic kernels (or those of training) inside; put back afterwards.

    The mode is `error` and not `warn`: with `warn` PyTorch's fused attention only says that its backward sums in varying order.
    Memory is not filled: a kernel that reads what it never wrote then shows as a difference, instead of reading NaN.
    """
    setting = KernelSetting("error" if deterministic else "default")
    cudnn, mode, workspace = torch.backends.cudnn, torch.get_deterministic_debug_mode(), os.environ.get(CUBLAS)
    memory: Any = torch.utils.deterministic  # mypy takes this module of properties for an empty one
    before = (cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory)
    with warnings.catch_warnings():
        plain = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: str | None = None) -> None:
            if _NO_KERNEL in str(message) or "eterministic" in str(message):
                setting.operations[str(message).split(_NO_KERNEL)[0].split(". ")[0].strip()] = None
            else:
                plain(message, category, filename, lineno, file, line)

        warnings.simplefilter("ignore", FreesNothingWarning)  # the table says what moved; of replays bytes are not looked at
        if deterministic:
            warnings.filterwarnings("always", message=_WARNED)
            warnings.showwarning = show
            if cuda and not cublas_is_deterministic():
                os.environ[CUBLAS] = CUBLAS_VALUES[0]
            cudnn.deterministic, cudnn.benchmark = True, False
            memory.fill_uninitialized_memory = False
            torch.set_deterministic_debug_mode("error")
        try:
            yield setting
        finally:
            torch.set_deterministic_debug_mode(mode)
            cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = before
            if workspace is None:
                os.environ.pop(CUBLAS, None)
            else:
                os.environ[CUBLAS] = workspace


def _plugin(precision: str, device: torch.device) -> Precision:
    """What Lightning's Trainer uses for this precision."""
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device.type)
    return HalfPrecision("bf16-true") if precision == "bf16-true" else Precision()


class Rig:
    """A recipe's model on one device, and its batches. Every run starts from the same bits: weights, buffers, random state, batches.

    Args:
        steps: optimizer steps of a run; 0 is forward and backward without an optimizer.
        micro_batches: per step; gradients accumulate as under `accumulate_grad_batches`.
    """

    def __init__(self, recipe: Recipe, device: torch.device, text: Text, *, steps: int, micro_batches: int) -> None:
        self.recipe, self.device, self.steps = recipe, device, steps
        self._plugin = _plugin(recipe.trainer.precision, device)
        self._module = make_module(recipe)
        with device, self._plugin.module_init_context():
            self._module.configure_model()
        self._module = self._plugin.convert_module(self._module).to(device)  # type: ignore[assignment]
        assert self._module.model is not None
        self.model: nn.Module = self._module.model
        loader, _ = make_loaders(text, recipe)
        batches = [batch.to(device) for batch in loader]
        self._batches = [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]
        self._weights = {name: p.detach().clone() for name, p in self.model.named_parameters()} if steps else {}
        self._buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._reference: dict[str, Tensor] = {}

    def run(self) -> dict[str, Tensor]:
        """One run. Returns losses [micro-batches], the last step's gradients by parameter name, buffers that changed, and after optimizer
        steps the weights: the model's own tensors, good until the next run.

        Raises:
            RuntimeError: a forward or backward changed a parameter.
        """
        self._put_back()
        torch.manual_seed(self.recipe.trainer.seed)
        versions = [p._version for p in self.model.parameters()]
        optimizer: Any = self._module.configure_optimizers() if self.steps else None
        losses = []
        for batches in self._batches:
            self._drop_gradients()
            for batch in batches:
                with self._plugin.train_step_context():
                    loss = self._module(batch)
                losses.append(loss.detach())
                (loss / len(batches)).backward()  # outside the precision's context, as Lightning does
                del loss
            if optimizer is not None:
                if self.recipe.trainer.grad_clip is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.trainer.grad_clip)
                optimizer.step()
        if optimizer is None and versions != [p._version for p in self.model.parameters()]:
            raise RuntimeError("a parameter was edited in place by forward or backward: runs cannot be compared")
        found = {LOSSES: torch.stack(losses)}
        found |= {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        found |= {f"{name} (buffer)": b for name, b in self.model.named_buffers() if not _same_bits(b, self._buffers[name])}
        if self.steps:
            found |= {f"{name}{WEIGHT}": p.detach() for name, p in self.model.named_parameters()}
        return found

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters() if self.steps else ():
                parameter.copy_(self._weights[name])
            for name, buffer in self.model.named_buffers():
                if not _same_bits(buffer, self._buffers[name]):
                    buffer.copy_(self._buffers[name])

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def release(self) -> None:
        """Let go of what a run that failed has left behind."""
        self._drop_gradients()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def keep(self, found: Mapping[str, Tensor]) -> None:
        """Make this run the reference: copied on the device, or to host memory where the device has no room beside the peak so far."""
        home = self.device
        if home.type == "cuda":
            need = sum(tensor.nbytes for tensor in found.values()) + 64 * CHUNK
            if need > 0.95 * torch.cuda.get_device_properties(home).total_memory - torch.cuda.max_memory_reserved(home):
                home = torch.device("cpu")
        self._reference = {name: tensor.detach().to(home, copy=True) for name, tensor in found.items()}

    def gaps(self, found: Mapping[str, Tensor]) -> dict[str, Gap]:
        """Distance of every tensor to the reference's; a tensor that only one of them has is infinitely far."""
        names = dict.fromkeys((*self._reference, *found))
        return {name: gap(found.get(name), self._reference.get(name)) for name in names}

    def describe(self) -> dict[str, tuple[int, float, bool, str]]:
        """Of every tensor of the reference: number of elements, norm, whether it is finite, SHA-256 of its bytes."""
        rows = {}
        for name, tensor in self._reference.items():
            norm = math.sqrt(sum(chunk.double().square().sum().item() for chunk in tensor.flatten().split(CHUNK)))
            rows[name] = (tensor.numel(), norm, bool(torch.isfinite(tensor).all()), _digest(tensor))
        return rows

    def losses_hex(self) -> list[str]:
        """The reference's losses, exact."""
        return [float(loss).hex() for loss in self._reference[LOSSES]]


def _digest(tensor: Tensor) -> str:
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(content).hexdigest()  # no copy: the array is a buffer


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size())
    return torch.equal(a, b) if whole is None else torch.equal(a.detach().view(whole), b.detach().view(whole))


def gap(a: Tensor | None, b: Tensor | None) -> Gap:
    """Distance of two tensors, computed on the first one's device."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return Gap(False, math.inf, math.inf)
    a, b = a.detach(), b.detach().to(a.device)
    if _same_bits(a, b):
        return EQUAL
    total = peak = 0.0
    for one, other in zip(a.flatten().split(CHUNK), b.flatten().split(CHUNK), strict=True):
        difference = one.double() - other.double()
        total += difference.square().sum().item()
        peak = max(peak, difference.abs().max().item())
    return Gap(False, math.sqrt(total), peak) if math.isfinite(total) else Gap(False, math.inf, math.inf)
