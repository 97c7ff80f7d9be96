"""What the verbs of the command share: parser and console."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .bench.errors import UserError

__all__ = ["console", "parser"]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def parser(verb: str, summary: str, examples: str, *, recipe: bool = True) -> _Parser:
    made = _Parser(
        prog=f"lightning-gdn {verb}", description=summary, epilog=f"examples:\n{examples}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if recipe:
        made.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
        made.add_argument("overrides", metavar="[key=value ...]", nargs="*", help="dotted overrides, for instance trainer.max_steps=30")
    return made


def console() -> Any:
    from rich.console import Console

    # off a terminal rich would fold tables at 80 columns, through the middle of numbers
    made = Console()
    return made if made.is_terminal else Console(width=max(made.width, 200))
