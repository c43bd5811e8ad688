"""A console on which no column of a table is lost: rich cuts what does not fit, words and whole columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

# Columns of sentences may be folded down to this, or to their longest word where that is shorter.
_NARROWEST_SENTENCE = 20


class WholeTablesConsole(Console):
    """Tables that are wider than the terminal are folded by it, as any long line is."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's, with every column of a table at least as wide as its text."""
        needed = max((narrowest(self, table) for table in objects if isinstance(table, Table)), default=0)
        usual = self.width
        if needed <= usual:
            super().print(*objects, **options)
            return
        self.width = needed
        try:
            super().print(*objects, crop=False, **options)
        finally:
            self.width = usual


def narrowest(console: Console, table: Table) -> int:
    """The least characters in a line with which no text of `table` is cut."""
    unlimited = console.options.update(width=2**16)
    total = 2 * (len(table.columns) - 1) if table.box is None else 3 * len(table.columns) + 1
    for column in table.columns:
        widths = [Measurement.get(console, unlimited, cell) for cell in (column.header, *column.cells)]
        if column.no_wrap:
            total += max(width.maximum for width in widths)
        else:
            total += max(column.min_width or 0, min(_NARROWEST_SENTENCE, max(width.minimum for width in widths)))
    return total
