"""Exact fingerprints of many tensors: a fast one on their device for every step, SHA-256 of their bytes for a few steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Fingerprint", "sha256_of", "state_of"]

WORDS = 2**21
"""Words of eight bytes taken at a time: two temporaries of 16 MiB."""


class Fingerprint:
    """64 bits of every bit of some tensors.

    Bytes are read as integers of 64 bits and summed, each times an odd weight of its position, modulo 2^64: exact, whatever order the device
    sums in. A difference in one word always shows, as does a negative zero or another NaN. The sums of all chunks are hashed together.
    """

    def __init__(self, device: torch.device | str) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = (torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=generator) | 1).to(device)

    def of(self, tensors: Iterable[Tensor]) -> str:
        """16 hexadecimal digits. Tensors may have any dtype and shape; their order counts."""
        sums: list[Tensor] = []
        sizes: list[int] = []
        for tensor in tensors:
            flat = tensor.detach().contiguous().flatten().view(torch.uint8)
            if flat.storage_offset() % 8:
                flat = flat.clone()
            whole = flat.numel() // 8 * 8
            for words in flat[:whole].view(torch.int64).split(WORDS) if whole else ():
                sums.append((words * self._weights[: words.numel()]).sum())
            if whole < flat.numel():
                rest = flat[whole:].long()
                sums.append((rest * self._weights[: rest.numel()]).sum())
            sizes.append(flat.numel())
        told = torch.stack(sums).tolist() if sums else []
        return hashlib.sha256(repr((told, sizes)).encode()).hexdigest()[:16]


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(content)
    return digest.hexdigest()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors of the optimizer's state, by parameter in the model's order."""
    for parameter in model.parameters():
        found = optimizer.state.get(parameter, {})
        yield from (found[name] for name in sorted(found) if isinstance(found[name], Tensor))
