"""The board of notes: what ranks hear of each other, and how long they wait for one that says nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gdn import board
from lightning_gdn.board import Board


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = dist.HashStore()
    monkeypatch.setattr(board, "_default_store", lambda: made)
    return made


def test_one_process_stores_nothing_and_hears_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_default_store", lambda: pytest.fail("the store was asked for"))
    alone = Board("x")
    assert not alone.connected
    assert alone.exchange("end", {"a": 1}, wait_s=30.0) == [{"a": 1}]


def test_ranks_exchange_and_a_second_opening_starts_empty(store: Any) -> None:
    for turn in range(2):
        ranks = [Board("x", rank, 3) for rank in range(3)]
        assert ranks[0].read("end", wait_s=0.0) == [None] * 3
        with ThreadPoolExecutor(3) as pool:
            told = list(pool.map(lambda rank, turn=turn: rank.exchange("end", {"rank": rank.rank, "turn": turn}, wait_s=10.0), ranks))
        assert told == [[{"rank": rank, "turn": turn} for rank in range(3)]] * 3


def test_a_silent_rank_is_waited_for_once_and_missing(store: Any) -> None:
    began = time.monotonic()
    assert Board("x", 0, 2).exchange("end", {"rank": 0}, wait_s=0.2) == [{"rank": 0}, None]
    assert 0.2 <= time.monotonic() - began < 3


def test_a_rank_that_leaves_is_heard_and_not_waited_for(store: Any) -> None:
    zero, one = Board("x", 0, 2), Board("x", 1, 2)
    one.post("end", {"rank": 1, "leaves": True})
    began = time.monotonic()
    assert zero.exchange("end", {"rank": 0}, wait_s=10.0)[1]["rank"] == 1
    assert time.monotonic() - began < 2


def test_a_note_of_another_step_is_not_the_one_waited_for(store: Any) -> None:
    zero, one = Board("x", 0, 2), Board("x", 1, 2)
    for rank in (zero, one):
        rank.post("row", {"step": 4 + rank.rank})
    assert zero.read("row", wait_s=0.05, fits=lambda row: row["step"] == 4) == [{"step": 4}, None]


def test_without_rank_0_and_its_store_a_rank_goes_on_alone(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def add(self, *_: Any) -> int:
            return 1

        def set(self, *_: Any) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(board, "_default_store", lambda: Gone())
    one = Board("x", 1, 2)
    assert one.connected
    assert one.exchange("end", {"rank": 1}, wait_s=30.0) == [None, {"rank": 1}]
    assert not one.connected
    monkeypatch.setattr(board, "_default_store", lambda: None)  # several processes without torch.distributed
    assert Board("x", 1, 2).exchange("end", {"rank": 1}, wait_s=30.0) == [None, {"rank": 1}]
