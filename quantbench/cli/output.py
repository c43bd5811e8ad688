"""Prints lines, tables, JSON and progress, and checks that output files can be written.

A command returns a `Result`, and `print_result` prints it. Printed text is never interpreted as
markup, and its control characters are shown as escapes.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from quantbench.errors import InputError, StoreError, one_line
from quantbench.report.terminal import plain_table as plain_table

#: a text, or (text, style)
StyledText = str | tuple[str, str]
#: one line: a text, or several styled texts that are printed one after the other
StyledLine = str | tuple[StyledText, ...]
#: output of a command: lines and tables, in order
Lines = Iterable[StyledLine | Table]

# Line width for a pipe, in characters. The width is large, because programs that read the output
# cannot use folded lines.
_PIPE_WIDTH = 180
# Narrowest width in characters to which a column of sentences may be folded. If the column's
# longest word is shorter, the column may be as narrow as that word.
_NARROWEST_SENTENCE = 20
# Minimum time between two lines of progress if the output is not a terminal, in s.
_PLAIN_PROGRESS_EVERY_S = 15.0


@dataclass(frozen=True)
class Result:
    """The result of a command.

    answer: value that `--json` prints, converted by `encoded`.
    lines: lines and tables that a terminal shows.
    exit_code: 1 if a check found something, 2 if nothing could be judged, else 0.
    """

    answer: Any
    lines: Lines
    exit_code: int = 0


class SafeConsole(Console):
    """A rich console that prints text without interpreting it, and tables without cutting columns.

    A plain rich console would read `[/v2]` in a name as markup and pass a name's escape sequences
    to the terminal. It would also cut words and columns that do not fit. Here, styles come only
    from `Text` objects or from the table. The terminal folds a table that is too wide, like any
    long line.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Renders a string with control characters escaped; keeps line breaks."""
        return super().render_str(_visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Renders like rich, with control characters escaped in every text."""
        for segment in super().render(renderable, options):
            if segment.control is None and not segment.text.isprintable():
                yield Segment(_visible(segment.text), segment.style)
            else:
                yield segment

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints like rich, with every column of a table at least as wide as its text."""
        usual = self.width
        needed = [narrowest(self, table) for table in objects if isinstance(table, Table)]
        self.width = max(usual, *needed, 0)
        try:
            super().print(*objects, crop=self.width == usual, **options)
        finally:
            self.width = usual


def _visible(text: str) -> str:
    """Escapes the control characters of a text, except line breaks."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def narrowest(console: Console, table: Table) -> int:
    """Returns the smallest width, in characters, at which no text of `table` is cut."""
    # Without a frame, rich puts 2 spaces between columns. A frame takes 3 characters per column,
    # and 1 more at the end of the line.
    unlimited = console.options.update(width=2**16)
    total = 2 * (len(table.columns) - 1) if table.box is None else 3 * len(table.columns) + 1
    for column in table.columns:
        widths = [
            Measurement.get(console, unlimited, cell) for cell in (column.header, *column.cells)
        ]
        if column.no_wrap:
            total += max(width.maximum for width in widths)
        else:
            total += max(
                column.min_width or 0,
                min(_NARROWEST_SENTENCE, max(width.minimum for width in widths)),
            )
    return total


def output(*, stderr: bool = False) -> Console:
    """Returns a console on standard output, or on standard error.

    On a terminal, the console has the terminal's width and colours. If the output is a pipe or a
    file, the console writes plain text with long lines.
    """
    stream = sys.stderr if stderr else sys.stdout
    return SafeConsole(stderr=stderr, width=None if stream.isatty() else _PIPE_WIDTH)


def show(console: Console, items: Lines) -> None:
    """Prints lines and tables in their order."""
    for item in items:
        if isinstance(item, Table):
            console.print(item)
        elif isinstance(item, str):
            say(console, item)
        else:
            say(console, *item)


def warning(text: str) -> StyledLine:
    """Returns a line that begins with "warning:" in yellow."""
    return ("warning:", "yellow"), f" {text}"


def say(console: Console, *parts: StyledText) -> None:
    """Prints one line without folding it, and without colouring numbers and paths.

    parts: styled texts that are printed one after the other. If the first text begins with a line
        break, an empty line is printed first.
    """
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    if pairs[0][0].startswith("\n"):
        console.print()
        pairs[0] = (pairs[0][0][1:], pairs[0][1])
    console.print(
        Text.assemble(*((one_line(text), style) for text, style in pairs)),
        soft_wrap=True,
        highlight=False,
    )


def print_result(as_json: bool, answer: Callable[[], Any], items: Lines) -> None:
    """Prints the result of a command to stdout, as JSON or as text.

    answer: function that returns the value to print as JSON. The function is called only for JSON.
    items: lines and tables to print as text.
    """
    if as_json:
        print(json.dumps(encoded(answer()), indent=1, allow_nan=False))
    else:
        show(output(), items)


def encoded(value: Any) -> Any:
    """Converts a value to one that `json` can write.

    A dataclass becomes an object with the dataclass's fields. Fields declared with `repr=False` are
    left out. NaN and infinities become null, paths become text, and sequences become arrays.
    """
    match value:
        case float():
            return value if isfinite(value) else None
        case dict():
            return {str(name): encoded(one) for name, one in value.items()}
        case list() | tuple() | frozenset() | Iterator():
            return [encoded(one) for one in value]
        case Path():
            return str(value)
        case _ if is_dataclass(value):
            return {
                field.name: encoded(getattr(value, field.name))
                for field in fields(value)
                if field.repr
            }
    return value


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[..., None]]:
    """Yields a function `show(done, total, text, now="")` that displays progress.

    On a terminal, the function updates a bar. Otherwise it prints `text` as a line, at most once
    every 15 s.

    Arguments of `show`:

    done, total: amount of work that is done, and total amount, in the same unit.
    text: progress in words.
    now: current work in words; shown only on a terminal.
    """
    if not console.is_terminal:
        last_s = [time.monotonic()]

        def line(done: float, total: float, text: str, now: str = "") -> None:
            if time.monotonic() - last_s[0] >= _PLAIN_PROGRESS_EVERY_S:
                last_s[0] = time.monotonic()
                say(console, text)

        yield line
        return
    columns = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(done: float, total: float, text: str, now: str = "") -> None:
            bar.update(task, total=total, completed=done, description=f"{text} {now}".rstrip())

        yield update


def check_file(operation: str, path: Path, *, suffix: str = "") -> None:
    """Checks that a file can be written, and leaves nothing behind.

    operation: name of the operation, for error messages.
    Raises StoreError if the file or a folder above it cannot be created, and InputError if the
    file's name does not end in `suffix`.
    """
    if not path.name.endswith(suffix):
        raise InputError(operation, str(path), f"a name that ends in {suffix}")
    if os.path.isdir(path):
        raise StoreError(operation, f"{path} (Is a directory)", "a file that can be written")
    _try(operation, path.parent, str(path), "a file that can be written")


def check_folder(operation: str, folder: Path) -> None:
    """Checks that a folder can be written, and leaves nothing behind.

    operation: name of the operation, for error messages.
    Raises StoreError if the folder, or a file in it, cannot be created.
    """
    _try(operation, folder, str(folder), "a folder that can be written")


def _try(operation: str, folder: Path, wanted: str, expected: str) -> None:
    """Creates a folder with a file, to test that both can be created, and removes what it created.

    operation, wanted, expected: texts for the StoreError that is raised if the test fails.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StoreError(operation, f"{wanted} ({error.strerror})", expected) from None
    finally:
        for path in missing:
            with suppress(OSError):  # another process may have written to the folder by now
                path.rmdir()
