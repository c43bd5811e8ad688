"""Reads CSV and Parquet files, and imports tables of times whose columns the user maps.

`CsvFile` reads any such file. `read_rows` reads a table of times for `quantbench import csv`. CSV
files may be compressed (.gz or .xz). Errors name the file, the line, the column and the value.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from quantbench.errors import InputError, StoreError, first_repeated
from quantbench.files import UNREADABLE, open_text, reason
from quantbench.importers.parquet import read_parquet
from quantbench.importers.runs import UNITS_US, Origin, Row, Rows, dtype_name, file_origin
from quantbench.store.record import GridPosition
from quantbench.workload import Attention, Collective, Gemm, Softmax, Workload

_T = TypeVar("_T")


@dataclass(frozen=True)
class CsvRow:
    """Row of a CSV file.

    operation: command to name in error messages.
    file: name of the file, for error messages.
    line: line number, from 1.
    cells: text of each cell, by column name.
    """

    operation: str
    file: str
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """Returns the text of a cell, stripped."""
        return self.cells[column].strip()

    def integer(self, column: str) -> int:
        """Reads a whole number.

        `64.0` is accepted, because pandas writes whole numbers like this if the column has empty
        cells.
        """
        value = self.number(column)
        if not value.is_integer():  # nan and inf are no integers either
            raise self.error(column, "a whole number")
        return int(value)

    def number(self, column: str) -> float:
        """Reads a number; nan if the cell is empty."""
        text = self.text(column)
        try:
            return float(text) if text else math.nan
        except ValueError:
            raise self.error(column, "a number") from None

    def flag(self, column: str) -> bool:
        """Reads yes, no, true, false, 1 or 0, in upper or lower case."""
        text = self.text(column).lower()
        if text not in ("yes", "true", "1", "no", "false", "0"):
            raise self.error(column, "True or False")
        return text in ("yes", "true", "1")

    def made(self, make: Callable[..., _T], *args: Any, **values: Any) -> _T:
        """Calls `make(*args, **values)`. If it raises InputError, adds the file and the line."""
        try:
            return make(*args, **values)
        except InputError as error:
            raise InputError(
                self.operation,
                f"{self.file}, line {self.line}: {error.operation}: {error.value}",
                error.expected,
            ) from None

    def error(self, column: str, expected: str) -> InputError:
        """Returns the error for an invalid cell.

        expected: description of a valid cell.
        """
        where = f"{self.file}, line {self.line}, column {column}"
        return InputError(self.operation, f"{where} = {self.text(column)!r}", expected)


class CsvFile:
    """A CSV file with a header line, or a Parquet file.

    operation: command to name in error messages.
    columns: names of the columns.

    Raises InputError for an empty file and for two columns with the same name, and StoreError for a
    file that cannot be read.
    """

    def __init__(self, operation: str, path: Path) -> None:
        self._operation = operation
        self.path = path
        self.columns: tuple[str, ...] = ()
        for line, cells in self._lines():
            self.columns = tuple(cells)
            if line == 1 and not any(self.columns):
                raise self._broken("it is empty")
            break
        repeated = first_repeated(self.columns)
        if repeated is not None:
            raise self._broken(f"column {repeated!r} appears twice")

    def require(self, columns: tuple[str, ...]) -> None:
        """Raises InputError for the first of `columns` that the file lacks.

        The error lists the file's columns.
        """
        for column in columns:
            if column not in self.columns:
                there = ", ".join(filter(None, self.columns))
                raise InputError(
                    self._operation,
                    f"{self.path.name} has no column {column!r}",
                    f"one of {there}" if there else "a CSV file with a header line",
                )

    def rows(self) -> Iterator[CsvRow]:
        """Yields all rows after the header.

        Raises InputError for a row with too few or too many cells.
        """
        lines = self._lines()
        next(lines, None)
        for line, cells in lines:
            if not cells:
                continue
            if len(cells) != len(self.columns):
                problem = f"line {line} has {len(cells)} cells for {len(self.columns)} columns"
                raise self._broken(problem)
            by_column = dict(zip(self.columns, cells, strict=True))
            yield CsvRow(self._operation, self.path.name, line, by_column)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yields each line's number and cells, including those of the header."""
        if self.path.suffix == ".parquet":
            table = read_parquet(self._operation, self.path)
            yield 1, table.column_names
            columns = [column.to_pylist() for column in table.columns]
            for line, values in enumerate(zip(*columns, strict=True), start=2):
                yield line, ["" if value is None else str(value) for value in values]
            return
        try:
            with open_text(self.path, encoding="utf-8-sig") as stream:
                reader = csv.reader(stream, strict=True)
                for cells in reader:
                    yield reader.line_num, cells
        except (*UNREADABLE, UnicodeDecodeError, csv.Error) as error:
            raise StoreError(
                self._operation, f"{self.path} ({reason(error)})", "a readable CSV file in UTF-8"
            ) from None

    def _broken(self, problem: str) -> InputError:
        expected = "a header line and one cell per column"
        return InputError(self._operation, f"{self.path.name}: {problem}", expected)


_WHO = "import csv"
_EXAMPLE = "m=M,n=N,k=K,latency=time:ms"
_TIME = "latency"
_COMMON = ("dtype", "kernel", "provider", _TIME)
# Fields of a workload whose values are texts. `causal` is a flag, and all other fields are sizes.
_WORDS = ("layout", "mask", "direction", "op", "dtype")


@dataclass(frozen=True)
class _Kind:
    """A kind of workload, with the fields that a table of this kind must or may have."""

    make: type[Gemm] | type[Softmax] | type[Attention] | type[Collective]
    needed: tuple[str, ...]
    optional: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields, the required fields first."""
        return (*self.needed, *self.optional)


_KINDS = {
    "gemm": _Kind(Gemm, ("m", "n", "k"), ("batch", "layout")),
    "softmax": _Kind(Softmax, ("batch", "rows", "cols"), ("mask_batch", "mask", "direction")),
    "attention": _Kind(
        Attention,
        ("batch", "heads", "seq_q", "seq_k", "head_dim"),
        ("kv_heads", "direction", "causal"),
    ),
    "collective": _Kind(Collective, ("op", "message_bytes", "num_gpus"), ("num_nodes",)),
}


@dataclass(frozen=True)
class Mapped:
    """A parsed `--map` option.

    kind: kind of workload, a key of _KINDS.
    columns: maps each field to the name of its column.
    unit: unit of the latency column.
    """

    kind: str
    columns: Mapping[str, str]
    unit: str


def parse_map(text: str) -> Mapped:
    """Parses a mapping such as `m=M,n=N,k=K,latency=time:ms`.

    The fields determine the kind of workload.

    Raises InputError for a malformed mapping and for fields that no workload has.

    >>> parse_map("m=M,n=N,k=K,latency=time:ms").unit
    'ms'
    """
    columns: dict[str, str] = {}
    unit = ""
    for item in text.split(","):
        name, equals, column = item.partition("=")
        name = name.strip()
        column = column.strip()
        if not equals or not column:
            raise InputError(_WHO, f"--map {item!r}", f"field=column, as in {_EXAMPLE}")
        if name == _TIME:
            column, _, unit = column.rpartition(":")
            column = column.strip()
            unit = unit.strip()
            if unit not in UNITS_US or not column:
                raise InputError(
                    _WHO,
                    f"--map {item!r}",
                    f"latency=column:unit with unit one of {', '.join(UNITS_US)}",
                )
        if name in columns:
            raise InputError(_WHO, f"--map names {name} twice", "each field once")
        columns[name] = column
    if _TIME not in columns:
        raise InputError(
            _WHO, f"--map {text!r} without latency", f"latency=column:unit, as in {_EXAMPLE}"
        )
    for name, kind in _KINDS.items():
        if set(kind.needed) <= columns.keys() <= {*kind.fields, *_COMMON}:
            return Mapped(name, columns, unit)
    options = "; ".join(f"{name}: {', '.join(kind.fields)}" for name, kind in _KINDS.items())
    raise InputError(
        _WHO, f"--map with {', '.join(columns)}", f"{', '.join(_COMMON)} and the sizes of {options}"
    )


def read_rows(
    path: Path,
    mapped: Mapped,
    *,
    dtype: str | None = None,
    layout: str = "",
    provider: str = "imported",
) -> Rows:
    """Reads the rows of a table.

    dtype, layout, provider: values for all rows if `mapped` has no such column. The layout "" is
        the default one of a GEMM.

    Raises InputError for a missing column or dtype, and for an impossible value.
    """
    file = CsvFile(_WHO, path)
    columns = mapped.columns
    file.require(tuple(columns.values()))
    if dtype is None and "dtype" not in columns:
        raise InputError(_WHO, "no dtype", "--dtype bf16, or dtype=column in --map")
    kind = _KINDS[mapped.kind]
    if layout and "layout" not in kind.fields:
        raise InputError(_WHO, f"--layout {layout} for {mapped.kind}", "products only")
    sizes = [name for name in kind.fields if name not in (*_WORDS, "causal")]
    found = Rows()
    for row in file.rows():
        values: dict[str, object] = {"dtype": dtype}
        if layout:
            values["layout"] = layout
        for name, column in columns.items():
            if name == "dtype" or name not in _COMMON:
                values[name] = _value(row, name, column)
        work = cast(Workload, row.made(kind.make, **values))
        who = row.text(columns["provider"]) if "provider" in columns else provider
        kernel = row.text(columns["kernel"]) if "kernel" in columns else ""
        latency_us = row.number(columns[_TIME]) * UNITS_US[mapped.unit]
        place = GridPosition(
            {name: getattr(work, name) for name in sizes}, getattr(work, "op", work.kind)
        )
        where = f"line {row.line}"
        found.rows.append(Row(work, latency_us, who or provider, place, kernel or None, where))
    return found


def _value(row: CsvRow, name: str, column: str) -> object:
    """Reads the cell of one field as a dtype name, text, flag or whole number."""
    if name == "dtype":
        return dtype_name(row.text(column))
    if name in _WORDS:
        return row.text(column).lower()
    if name == "causal":
        return row.flag(column)
    return row.integer(column)


def origin_of(path: Path, mapped: Mapped, *, layout: str = "", run_id: str | None = None) -> Origin:
    """Returns the provenance of a table: its file and its column mapping.

    layout: as in `read_rows`.
    run_id: name of the run; None for a name made of the table's kind and the file's digest.
    """
    columns = ",".join(map("=".join, mapped.columns.items())) + f":{mapped.unit}"
    if layout:
        columns += f" --layout {layout}"
    return file_origin(path, "csv", mapped.kind, run_id, columns=columns)
