"""Data: real bytes, the same batches for every arm, and one clear error for everything that cannot be read."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch

from lightning_gdn.bench.data import Text, Windows, check_vocabulary, make_loaders, read_text
from lightning_gdn.bench.errors import UserError
from lightning_gdn.bench.recipes import load
from lightning_gdn.bench.schema import DataConfig


def config(path: Path | str | None = None, **values: int) -> DataConfig:
    return DataConfig(path=None if path is None else str(path), **{"seq_len": 8, **values})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three text files in two levels, a binary one, and one in a hidden folder."""
    place = tmp_path / "texts"
    (place / "sub").mkdir(parents=True)
    (place / ".git").mkdir()
    (place / "b.txt").write_text("bbbb", encoding="utf-8")
    (place / "a.md").write_text("aaaa", encoding="utf-8")
    (place / "sub" / "c.py").write_text("cccccccc", encoding="utf-8")
    (place / "image.png").write_bytes(b"\x89PNG")
    (place / ".git" / "d.txt").write_text("dddd", encoding="utf-8")
    return place


def test_the_default_is_the_standard_library() -> None:
    text = read_text(config(seq_len=512))
    assert text.files > 100
    assert len(text.data) > 10**6
    assert b"def " in text.data
    assert "standard library" in text.source
    assert text.sha256 == hashlib.sha256(text.data).hexdigest()
    assert read_text(config(seq_len=512)).sha256 == text.sha256


def test_folder_file_and_glob(folder: Path) -> None:
    assert read_text(config(folder)).data == b"aaaabbbbcccccccc"
    assert read_text(config(folder / "sub" / "c.py")).data == b"cccccccc"
    assert read_text(config(f"{folder}/*.txt", seq_len=4)).data == b"bbbb"
    assert read_text(config(f"{folder}/**/*.py")).data == b"cccccccc"
    assert read_text(config(f"{folder}/*.png", seq_len=2)).data == b"\x89PNG"


def test_reading_stops_at_max_mib(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 2**20)
    (tmp_path / "b.txt").write_bytes(b"b" * 2**20)
    text = read_text(config(tmp_path, max_mib=1))
    assert text.data == b"a" * 2**20
    assert text.files == 1


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda p: p / "nowhere", ("data.path", "no such file or folder", "nowhere")),
        (lambda p: p, ("data.path", "no text files", ".txt", "glob")),
        (lambda p: f"{p}/*.rs", ("data.path", "no file matches")),
    ],
)
def test_nothing_to_read(make: object, parts: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1234")
    with pytest.raises(UserError) as caught:
        read_text(config(make(tmp_path)))  # type: ignore[operator]
    for part in parts:
        assert part in str(caught.value), caught.value


def test_empty_files_and_too_little_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"")
    with pytest.raises(UserError, match=r"data\.path: .*all empty"):
        read_text(config(file))
    file.write_bytes(b"1234567")
    with pytest.raises(UserError, match=r"data\.seq_len: 8 is longer than the text.*7 bytes.*data\.seq_len=7"):
        read_text(config(file))
    assert len(Windows(read_text(config(file, seq_len=7)), seq_len=7, count=3, seed=0)) == 3


def test_windows_cover_the_text_once_per_pass_and_depend_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(40)) + b"tail")
    text = read_text(config(tmp_path))

    def order(seed: int) -> list[int]:
        windows = Windows(text, seq_len=8, count=10, seed=seed)
        return [int(windows[i][0]) for i in range(10)]

    first = order(0)
    assert sorted(first[:5]) == [0, 8, 16, 24, 32]
    assert sorted(first[5:]) == [0, 8, 16, 24, 32]
    assert first[:5] != first[5:], "every pass has an order of its own"
    assert order(0) == first
    assert order(1) != first
    windows = Windows(text, seq_len=8, count=1, seed=0)
    assert windows[0].dtype == torch.int64
    assert windows[0].tolist() == list(range(first[0], first[0] + 8))


def test_loaders_are_equal_for_every_arm_and_leave_the_random_stream_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)) * 4)
    recipe = load(
        "demo_cpu", [f"data.path={tmp_path}", "data.seq_len=16", "data.batch_size=3", "trainer.max_steps=4", "trainer.accumulate_grad_batches=2"]
    ).recipe
    text = read_text(recipe.data)
    before = torch.random.get_rng_state()
    one = list(make_loaders(text, recipe)[0])
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    two = list(make_loaders(text, recipe)[0])
    assert len(one) == 4 * 2
    assert one[0].shape == (3, 16)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_validation_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(160)))
    overrides = [
        f"data.path={tmp_path}",
        "data.seq_len=16",
        "data.batch_size=1",
        "trainer.max_steps=20",
        "trainer.val_every=2",
        "trainer.val_batches=3",
    ]
    recipe = load("demo_cpu", overrides).recipe
    train, validation = make_loaders(read_text(recipe.data), recipe)
    assert validation is not None
    seen = {int(batch[0, 0]) for batch in train}
    held = {int(batch[0, 0]) for batch in validation}
    assert held == {112, 128, 144}
    assert seen == {0, 16, 32, 48, 64, 80, 96}
    recipe = load("demo_cpu", [*overrides, "trainer.val_batches=10"]).recipe
    with pytest.raises(UserError, match=r"trainer\.val_batches: 10 batches hold out 10 sequences"):
        make_loaders(read_text(recipe.data), recipe)


def test_the_vocabulary_has_room_for_every_byte() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size: expected at least 256.*got 255"):
        check_vocabulary(load("demo_cpu", ["model.vocab_size=255"]).recipe)
    check_vocabulary(load("demo_cpu", ["model.vocab_size=256"]).recipe)
    check_vocabulary(load("qwen3_5_0_8b").recipe)


def test_model_folders_that_are_none(tmp_path: Path) -> None:
    def check(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            check_vocabulary(load("demo_cpu", [f"model.path={path}"]).recipe)
        return str(caught.value)

    assert "no such folder" in check(tmp_path / "nope")
    assert "no config.json" in check(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "cannot be read" in check(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert "cannot be read: expected an object, got list" in check(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 100}}', encoding="utf-8")
    assert "no weights" in check(tmp_path)
    weights = tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    for broken in (b"", b"broken", len(header).to_bytes(8, "little") + header + b"\0\0", (5).to_bytes(8, "little") + b"[1,2]"):
        weights.write_bytes(broken)
        assert "no complete safetensors file" in check(tmp_path)
    weights.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    assert "at least 256" in check(tmp_path)


def test_the_cap_of_the_text_is_no_size_of_a_buffer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    text = read_text(DataConfig(path=str(tmp_path / "a.txt"), seq_len=10, max_mib=2**31 - 1))
    assert len(text.data) == 100
    (tmp_path / "b.txt").write_bytes(bytes(9 * 2**20))
    assert len(read_text(DataConfig(path=str(tmp_path), seq_len=10, max_mib=6)).data) == 6 * 2**20, "in pieces, to the byte"


def test_the_order_costs_nothing_for_steps_that_are_far_away() -> None:
    text = Text(data=bytes(range(100)), files=1, source="x", sha256="")
    windows = Windows(text, seq_len=10, count=2**40, seed=3)
    assert len(windows) == 2**40
    assert int(windows[2**40 - 1][0]) % 10 == 0
    for turn in (0, 5, 1):
        order = list(range(10))
        random.Random(3 + turn).shuffle(order)
        assert [int(windows[10 * turn + at][0]) // 10 for at in range(10)] == order
    with pytest.raises(IndexError):
        windows[2**40]
    with pytest.raises(UserError, match="write fewer"):
        Windows(text, seq_len=10, count=2**63, seed=0)
