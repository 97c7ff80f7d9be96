"""Errors that a user can mend: the command line prints them as one line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UnlikeRecordsError", "UserError", "nearest", "one_line"]


class UserError(ValueError):
    """Something the user wrote cannot work; the message says what, where, and what to do instead."""


class UnlikeRecordsError(UserError):
    """Records that differ in more than the arm; the message lists the fields."""


def nearest(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The name closest to `name`, ignoring case and hyphens for underscores; `None` if nothing is close."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def one_line(error: BaseException) -> str:
    """The message of an error on one line, without the lines that OmegaConf adds for its own developers."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(("full_key", "object_type")))
