"""Python's garbage collector out of the way of what is timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_garbage"]


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """What exists now is out of the collector's sight until the context ends. The collector goes on, over what is made later.

    A full collection goes through every object that the imported libraries made, some 200 ms each time, and it comes sooner the more
    objects a step makes: it would fall on some arms' steps and not on others'.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
