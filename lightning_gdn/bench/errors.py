"""Errors that a user can mend: the command line prints them as one line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UnlikeRecordsError", "UserError", "nearest"]


class UserError(ValueError):
    """Something the user wrote cannot work; the message says what, where, and what to do instead."""


class UnlikeRecordsError(UserError):
    """Records that differ in more than the arm; the message lists the fields."""


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The name closest to `name`, ignoring case and hyphens for underscores; `None` if nothing is close."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1, cutoff=cutoff)
    return close[0] if close else None
