"""Reading a CSV file (plain, .gz or .xz) with errors that name the file, the line and the column."""

import csv
import lzma
import math
import zlib
from collections.abc import Iterator
from pathlib import Path

from quantbench.errors import InputError, StoreError
from quantbench.files import open_text, reason


class CsvRow:
    """One row: its line in the file and its cells by column name."""

    def __init__(self, operation: str, file: str, line: int, cells: dict[str, str]) -> None:
        self._operation, self._file, self.line, self._cells = operation, file, line, cells

    def text(self, column: str) -> str:
        """The cell as it stands."""
        return self._cells[column].strip()

    def integer(self, column: str) -> int:
        """A whole number; `64.0`, as pandas writes it where a column has gaps, is one."""
        value = self.number(column)
        if not value.is_integer():  # neither are nan and inf
            raise self.error(column, "a whole number")
        return int(value)

    def number(self, column: str) -> float:
        """A number; an empty cell is nan."""
        text = self.text(column)
        try:
            return float(text) if text else math.nan
        except ValueError:
            raise self.error(column, "a number") from None

    def flag(self, column: str) -> bool:
        """True or False, however it is spelled."""
        text = self.text(column).lower()
        if text not in ("true", "false", "1", "0"):
            raise self.error(column, "True or False")
        return text in ("true", "1")

    def error(self, column: str, expected: str) -> InputError:
        """An error about one cell."""
        where = f"{self._file}, line {self.line}, column {column}"
        return InputError(self._operation, f"{where} = {self.text(column)!r}", expected)

    def reason(self, problem: InputError) -> InputError:
        """An error about the row as a whole."""
        what = f"{self._file}, line {self.line}: {problem.operation}: {problem.value}"
        return InputError(self._operation, what, problem.expected)


class CsvFile:
    """A CSV file with a header line."""

    def __init__(self, operation: str, path: Path) -> None:
        self._operation, self.path = operation, path
        self.columns: tuple[str, ...] = ()
        for line, cells in self._lines():
            self.columns = tuple(cells)
            if line == 1 and not any(self.columns):
                raise self._broken("it is empty")
            break
        repeated = next((c for c in self.columns if self.columns.count(c) > 1), None)
        if repeated is not None:
            raise self._broken(f"column {repeated!r} stands twice")

    def require(self, columns: tuple[str, ...]) -> None:
        """Raise InputError for the first of `columns` that is not there, naming those that are."""
        for column in columns:
            if column not in self.columns:
                there = ", ".join(c for c in self.columns if c)
                expected = f"one of {there}" if there else "a CSV file with a header line"
                raise InputError(self._operation, f"{self.path.name} has no column {column!r}", expected)

    def rows(self) -> Iterator[CsvRow]:
        """Every row after the header."""
        lines = self._lines()
        next(lines, None)
        for line, cells in lines:
            if not cells:
                continue
            if len(cells) != len(self.columns):
                raise self._broken(f"line {line} has {len(cells)} cells for {len(self.columns)} columns")
            yield CsvRow(self._operation, self.path.name, line, dict(zip(self.columns, cells, strict=True)))

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        try:
            with open_text(self.path, encoding="utf-8-sig") as stream:
                reader = csv.reader(stream, strict=True)
                for cells in reader:
                    yield reader.line_num, cells
        except (OSError, UnicodeDecodeError, csv.Error, lzma.LZMAError, zlib.error, EOFError) as error:
            what = f"{self.path} ({reason(error)})"
            raise StoreError(self._operation, what, "a readable CSV file in UTF-8") from None

    def _broken(self, problem: str) -> InputError:
        return InputError(self._operation, f"{self.path.name}: {problem}", "a header line and one cell per column")
