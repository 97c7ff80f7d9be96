"""What exists before a timed run is out of the garbage collector's sight while it lasts."""

from __future__ import annotations

import gc
import weakref

import pytest

from lightning_gdn.bench.garbage import frozen_garbage


class Node:
    other: Node


def ring() -> weakref.ref[Node]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return weakref.ref(one)


def test_only_what_is_made_later_is_collected() -> None:
    before = gc.get_freeze_count()
    gc.disable()
    try:
        held = Node()  # reachable garbage is no garbage: only its being looked at would be
        with pytest.raises(ZeroDivisionError), frozen_garbage():
            assert gc.get_freeze_count() > before
            assert not any(found is held for found in gc.get_objects())
            later = ring()
            gc.collect()
            assert later() is None
            raise ZeroDivisionError
        assert any(found is held for found in gc.get_objects())
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
