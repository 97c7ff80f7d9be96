"""Real text as byte sequences: found on disk, never downloaded, the same batches in the same order for every arm.

Finding and reading needs no torch, so that a recipe can be checked before anything heavy is imported or written.
"""

from __future__ import annotations

import glob
import hashlib
import json
import random
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import UserError
from .schema import DataConfig, Recipe

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["BYTES", "Text", "Windows", "check_vocabulary", "make_loaders", "read_text", "saved_family"]

BYTES = 256
"""Size of the byte vocabulary: token ids 0 to 255."""
PIECE = 2**22
"""Bytes of a file read at a time."""
TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".json",
    ".jsonl",
    ".csv",
    ".html",
    ".xml",
    ".tex",
    ".c",
    ".h",
    ".cpp",
    ".cu",
    ".rs",
    ".go",
    ".js",
    ".ts",
)
"""Files of a folder that count as text; a glob takes whatever it matches."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The text of one recipe."""

    data: bytes
    files: int
    """Number of files it came from."""
    source: str
    """What was asked for: a path, a glob, or Python's standard library with its version."""
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able description without the text itself."""
        return {"source": self.source, "files": self.files, "bytes": len(self.data), "sha256": self.sha256}


def read_text(config: DataConfig) -> Text:
    """Read the text that `data.path` names, files in sorted order, up to `data.max_mib`.

    Raises:
        UserError: no such path, no text file in the folder, a file that cannot be read, or less text than one sequence.
    """
    source, files = _find(config.path)
    cap = config.max_mib * 2**20
    parts: list[bytes] = []
    size = 0
    for file in files:
        try:
            with file.open("rb") as handle:
                part = _read(handle, cap - size)
        except OSError as error:
            raise UserError(f"data.path: {file} cannot be read: {error.strerror}") from None
        if part:
            parts.append(part)
            size += len(part)
        if size >= cap:
            break
    data = b"".join(parts)
    if not data:
        raise UserError(f"data.path: {source} has {len(files)} text file(s), all empty; give text of at least data.seq_len={config.seq_len} bytes")
    if len(data) < config.seq_len:
        raise UserError(
            f"data.seq_len: {config.seq_len} is longer than the text: {source} has {len(data)} bytes in {len(files)} file(s); "
            f"write data.seq_len={len(data)} or less, or give more text by data.path"
        )
    return Text(data=data, files=len(parts), source=source, sha256=hashlib.sha256(data).hexdigest())


def _read(handle: BinaryIO, most: int) -> bytes:
    """As `handle.read(most)`, which would make room for `most` bytes whatever the file has."""
    pieces: list[bytes] = []
    while most > 0 and (piece := handle.read(min(most, PIECE))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _find(path: str | None) -> tuple[str, list[Path]]:
    if path is None:
        version = sysconfig.get_python_version()
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        if not files:
            raise UserError(f"data.path: this Python has no library sources in {folder}; give a folder of text files by data.path=FOLDER")
        return f"Python {version} standard library", files
    place = Path(path).expanduser()
    if place.is_file():
        return path, [place]
    if place.is_dir():
        files = sorted(p for p in place.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file() and not _hidden(p.relative_to(place)))
        if not files:
            raise UserError(
                f"data.path: the folder {path} has no text files ({' '.join(TEXT_SUFFIXES)}); name other files by a glob, for instance '{path}/*'"
            )
        return path, files
    if glob.has_magic(path):
        files = sorted(p for p in map(Path, glob.glob(str(place), recursive=True)) if p.is_file())
        if not files:
            raise UserError(f"data.path: no file matches {path!r}")
        return path, files
    raise UserError(f"data.path: no such file or folder: {path}")


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def saved_family(path: str) -> str | None:
    """The family of the model in a folder; None if it is none of a recipe's, or if the folder cannot be read."""
    try:
        found = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
        return {"qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5", "qwen3_next": "qwen3_next"}.get(str(found.get("model_type")))
    except (OSError, ValueError, AttributeError):
        return None


def check_vocabulary(recipe: Recipe) -> None:
    """Raise `UserError` if the model has fewer than 256 token ids, or `model.path` is no readable model folder or of another family."""
    size: object = recipe.model.vocab_size
    where = "model.vocab_size"
    if recipe.model.path is not None:
        folder = Path(recipe.model.path).expanduser()
        if not folder.is_dir():
            raise UserError(
                f"model.path: no such folder: {recipe.model.path}; give a local folder written by save_pretrained (nothing is downloaded)"
            )
        try:
            found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"model.path: {recipe.model.path} has no config.json; give a local folder written by save_pretrained") from None
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: {folder / 'config.json'} cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"model.path: {folder / 'config.json'} cannot be read: expected an object, got {type(found).__name__}")
        family = saved_family(recipe.model.path)
        if family is not None and family != recipe.model.family:
            raise UserError(
                f"model.family: expected {family}, that of the model in model.path={recipe.model.path!r}, got {recipe.model.family!r}; "
                f"write model.family={family} or leave it out, or take another folder"
            )
        text = found.get("text_config") or {}
        size = found.get("vocab_size") or text.get("vocab_size")
        where = f"vocab_size in {folder / 'config.json'}"
        weights = sorted(folder.glob("*.safetensors"))
        if not weights and not any(folder.glob("*.bin")):
            raise UserError(f"model.path: {recipe.model.path} has no weights (*.safetensors); give a local folder written by save_pretrained")
        for file in weights:
            _check_safetensors(file)
    if not isinstance(size, int) or size < BYTES:
        raise UserError(f"{where}: expected at least {BYTES}, one token id per byte value, got {size!r}")


def _check_safetensors(file: Path) -> None:
    """A broken download shows in the header or in the length: found here, before a run folder is made and a model is built."""
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 0 < length <= file.stat().st_size - 8:
                raise ValueError("the file is shorter than its header")
            header = json.loads(handle.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != file.stat().st_size:
            raise ValueError(f"the header describes {8 + length + end} bytes, the file has {file.stat().st_size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"model.path: {file} is no complete safetensors file: {error}") from None


class Windows:
    """Sequences cut from the text, in an order fixed by the seed: a map-style dataset.

    The text is cut into aligned windows of `seq_len` bytes; each pass over them is shuffled by `random.Random(seed + pass)`, which is
    the same on every platform. Item `i` is a LongTensor [T].
    """

    def __init__(self, text: Text, *, seq_len: int, count: int, seed: int, first: int = 0, last: int | None = None) -> None:
        self.text = text
        self.seq_len = seq_len
        last = len(text.data) // seq_len if last is None else last
        if last <= first:
            raise UserError(f"data.seq_len: {seq_len} leaves no sequence for training: {text.source} has {len(text.data)} bytes")
        if count > sys.maxsize:
            raise UserError(f"trainer.max_steps: all steps together take {count} sequences, expected at most {sys.maxsize}; write fewer")
        self.count, self.seed, self.windows = count, seed, range(first, last)
        self._pass: tuple[int, list[int]] | None = None
        """Number and order of the pass that was read last: the order of all would grow with the steps."""

    def __len__(self) -> int:
        return self.count

    def _start(self, index: int) -> int:
        turn, at = divmod(index, len(self.windows))
        if self._pass is None or self._pass[0] != turn:
            order = list(self.windows)
            random.Random(self.seed + turn).shuffle(order)
            self._pass = turn, order
        return self._pass[1][at] * self.seq_len

    def __getitem__(self, index: int) -> Any:
        import torch

        if not 0 <= index < self.count:
            raise IndexError(index)
        start = self._start(index)
        return torch.frombuffer(bytearray(self.text.data[start : start + self.seq_len]), dtype=torch.uint8).long()


def make_loaders(text: Text, recipe: Recipe) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Training loader of exactly `max_steps * accumulate_grad_batches` batches [B, T], and a validation loader if asked for.

    On several devices it has that many batches for each: Lightning's distributed sampler deals the sequences out in turn, in every arm
    the same. Validation takes the last windows of the text, which training then leaves out.

    Raises:
        UserError: the text is too short to hold validation out.
    """
    import torch
    from torch.utils.data import DataLoader

    data, trainer = recipe.data, recipe.trainer
    windows = len(text.data) // data.seq_len
    held_out = trainer.val_batches * data.batch_size * trainer.devices if trainer.val_every else 0
    if held_out and windows <= held_out:
        each = f" on each of {trainer.devices} devices" if trainer.devices > 1 else ""
        raise UserError(
            f"trainer.val_batches: {trainer.val_batches} batches{each} hold out {held_out} sequences of {data.seq_len} bytes, "
            f"the text has {windows}; give more text, fewer batches or a shorter sequence"
        )

    def loader(dataset: Windows) -> DataLoader[Any]:
        # a loader without its own generator draws its base seed from the global stream, which belongs to the model
        generator = torch.Generator().manual_seed(data.seed)
        return DataLoader(dataset, batch_size=data.batch_size, shuffle=False, num_workers=0, generator=generator)  # type: ignore[arg-type]

    count = trainer.max_steps * trainer.accumulate_grad_batches * data.batch_size * trainer.devices
    train = Windows(text, seq_len=data.seq_len, count=count, seed=data.seed, last=windows - held_out)
    if not held_out:
        return loader(train), None
    return loader(train), loader(Windows(text, seq_len=data.seq_len, count=held_out, seed=data.seed, first=windows - held_out))
