"""Where commands print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# A pipe has no width of its own, and folded lines are no use to a program that reads them.
_PIPE_WIDTH = 180


def output(*, stderr: bool = False) -> Console:
    """The console: the terminal's width and colours on a terminal, wide plain text into a pipe."""
    from quantbench.cli.whole_tables import WholeTablesConsole

    stream = sys.stderr if stderr else sys.stdout
    return WholeTablesConsole(stderr=stderr, width=None if stream.isatty() else _PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """One line of plain words: folded by the terminal, not by us, and with numbers and paths left uncoloured."""
    console.print(text, soft_wrap=True, highlight=False)
