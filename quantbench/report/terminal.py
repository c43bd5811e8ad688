"""Builds tables without a frame, and their cells, for the terminal.

Every command imports this module, so the module imports nothing that is slow to load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from rich.table import Table
from rich.text import Text

from quantbench.units import axis_words, percent

if TYPE_CHECKING:
    from quantbench.analysis.jumps import Cliff
    from quantbench.profile.schema import KnownCliff
    from quantbench.report import content

# A share of peak (fraction of the device's peak rate) is red if it is below this fraction of the
# table's best share.
_STANDS_OUT = 0.8


Cell = TypeVar("Cell")
Value = TypeVar("Value")


def shown(value: Value | None, form: Callable[[Value], str] = str, unknown: str = "") -> str:
    """Formats a value with `form`. If the value is None, the result is `unknown`."""
    return unknown if value is None else form(value)


def filled(
    lines: Sequence[Mapping[str, Cell]], optional: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[tuple[Cell, ...], ...]]:
    """Returns the column names and the rows of a table.

    lines: cells of each row by column name; at least one row. All rows have the same column names.
    optional: names of columns that are left out if they are empty in every row.
    """
    names = []
    for name in lines[0]:
        if name not in optional or any(map(itemgetter(name), lines)):
            names.append(name)
    return tuple(names), tuple(map(itemgetter(*names), lines))


def plain_table(
    names: Sequence[str],
    rows: Iterable[Iterable[str | Text]] = (),
    *,
    title: str = "",
    caption: str = "",
    fold: Collection[str] = (),
    narrowest: int | None = None,
) -> Table:
    """Returns a table without a frame.

    names: column names. A column whose name begins with `>` is aligned to the right.
    rows: cells of each row.
    title, caption: texts above and below the table; "" for none.
    fold: names of columns whose text may be folded. The last column may always be folded.
    narrowest: minimum width in characters of columns that may be folded; None for no minimum.
    """
    table = Table(
        title=title or None, title_justify="left", header_style="bold", box=None, pad_edge=False
    )
    table.caption = caption or None
    for name in names:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            folds = name == names[-1] or name in fold
            table.add_column(
                name, no_wrap=not folds, overflow="fold", min_width=narrowest if folds else None
            )
    for row in rows:
        table.add_row(*row)
    return table


def drawn(table: content.Table, **options: Any) -> Table:
    """Converts a table of the HTML report to a table for the terminal.

    options: keyword arguments of `plain_table`.
    """
    return plain_table(table.head, (map(Text.assemble, row) for row in table.rows), **options)


def section_lines(section: content.Section, **options: Any) -> Iterator[str | Table]:
    """Yields the table and the texts of a section of the HTML report, for the terminal.

    options: keyword arguments of `plain_table`.
    """
    if section.table is None:
        yield section.title
    else:
        yield drawn(section.table, title=section.title, **options)
    yield from filter(None, (section.note, *section.lines))


def cliffs_table(cliffs: Iterable[tuple[Cliff | KnownCliff, str]], title: str) -> Table:
    """Builds a table of cliffs, which are jumps in time between two neighbouring sizes.

    cliffs: pairs of a cliff and a text that explains its cause.
    """
    table = plain_table((">size", ">time", "op", "why"), title=title)
    for cliff, why in cliffs:
        there = axis_words({cliff.axis: f"{cliff.at} to {cliff.next}", **cliff.held}, " = ")
        table.add_row(
            ", ".join(there),
            f"{cliff.ratio:.2f}x ({cliff.low:.2f} to {cliff.high:.2f})",
            f"{cliff.op} {cliff.provider}",
            why,
        )
    return table


def share_cell(share: float | None, best: float) -> Text:
    """Formats a share of peak as a cell, in red if it is below 80 % of the best share.

    share: fraction of the device's peak rate, 0 to 1; None for an empty cell.
    best: best share in the table, 0 to 1.
    """
    low = share is not None and share < _STANDS_OUT * best
    return Text(shown(share, percent), style="bold red" if low else "")
