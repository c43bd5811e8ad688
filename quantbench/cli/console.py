"""Where commands print."""

import sys

from rich.console import Console

# A pipe has no width of its own, and folded lines are no use to a program that reads them.
_PIPE_WIDTH = 180


def output(*, stderr: bool = False) -> Console:
    """The console: the terminal's width and colours on a terminal, wide plain text into a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else _PIPE_WIDTH)
