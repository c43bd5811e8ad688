"""The tables of a profile: their columns, rows sorted by key, each key once. Entry point: `Table`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.measurement import GRADES
from quantbench.workload import Attention, Collective, Gemm, Softmax, Workload

#: the largest size of a workload
LARGEST = 2**31 - 1

INTEGER, TEXT, NUMBER, FLAG = "integer", "text", "number", "flag"


@dataclass(frozen=True)
class Column:
    """name: with its unit. kind: integer, text, number or flag."""

    name: str
    kind: str


@dataclass(frozen=True)
class Layout:
    """The columns of one kind of table, in order. keys: those that are of one row only, by which rows are sorted."""

    columns: tuple[Column, ...]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every column's name, in order."""
        return tuple(column.name for column in self.columns)


def _columns(kind: str, *names: str) -> tuple[Column, ...]:
    return tuple(Column(name, kind) for name in names)


# low_us, high_us: 95 % interval of the median; both equal to latency_us where a table gives a single figure, whose
# spread nobody knows. grade: A to D. origin: measured, imported or simulated.
_TIMES = (*_columns(NUMBER, "latency_us", "low_us", "high_us"), *_columns(TEXT, "grade", "origin"))


def _layout(keys: tuple[Column, ...], more: tuple[Column, ...] = ()) -> Layout:
    return Layout((*keys, *more, *_TIMES), tuple(column.name for column in keys))


LAYOUTS: dict[str, Layout] = {
    # kernel: its name, "" where it is not known; block_m, block_n, split_k: 0 where not known.
    "gemm": _layout(
        (*_columns(INTEGER, "m", "n", "k", "batch"), *_columns(TEXT, "dtype", "layout", "provider")),
        (*_columns(TEXT, "kernel"), *_columns(INTEGER, "block_m", "block_n", "split_k")),
    ),
    "softmax": _layout(
        (*_columns(INTEGER, "batch", "rows", "cols"), *_columns(TEXT, "dtype", "mask", "direction", "provider"))
    ),
    "attention": _layout(
        (
            *_columns(INTEGER, "batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"),
            *_columns(TEXT, "dtype"),
            *_columns(FLAG, "causal"),
            *_columns(TEXT, "direction", "provider"),
        )
    ),
    "collective": _layout(
        (
            *_columns(TEXT, "op"),
            *_columns(INTEGER, "message_bytes", "num_gpus"),
            *_columns(TEXT, "dtype"),
            *_columns(INTEGER, "num_nodes"),
            *_columns(TEXT, "provider"),
        )
    ),
}


def layout_of(kind: str) -> Layout:
    """The columns of a kind of table. Raises InputError for another kind."""
    if kind not in LAYOUTS:
        raise InputError("profile table", repr(kind)[:80], "one of " + ", ".join(LAYOUTS))
    return LAYOUTS[kind]


Array = npt.NDArray[Any]

_ORIGINS = ("measured", "imported", "simulated")
_GRADES = tuple(letter for letter in GRADES if letter != "rejected")
_WORKLOADS: dict[str, type[Workload]] = {
    "gemm": Gemm, "softmax": Softmax, "attention": Attention, "collective": Collective,
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Measured figures of one kind of workload. columns: (rows,) arrays by name, as `columns.LAYOUTS` has them:
    int64, float64, bool, or text. Rows are sorted by the key columns, and no two have the same key.

    >>> table = Table.empty("softmax")
    >>> len(table), table["latency_us"].dtype
    (0, dtype('float64'))
    """

    kind: str
    columns: Mapping[str, Array]

    def __post_init__(self) -> None:
        layout = layout_of(self.kind)
        who = f"profile table {self.kind}"
        if tuple(self.columns) != layout.names:
            odd = sorted(set(self.columns) ^ set(layout.names)) or ["in another order"]
            raise InputError(who, f"columns: {odd[0]}", ", ".join(layout.names))
        typed = {column.name: _typed(who, column.name, column.kind, self.columns[column.name])
                 for column in layout.columns}  # fmt: skip
        if len({len(values) for values in typed.values()}) > 1:
            raise InputError(who, "columns of different lengths", "one value per row in each")
        _check_times(who, typed)
        _check_order(who, layout, typed)
        for values in typed.values():
            values.flags.writeable = False
        object.__setattr__(self, "columns", typed)

    @classmethod
    def empty(cls, kind: str) -> Table:
        """A table without rows."""
        return cls.of(kind, {column.name: [] for column in layout_of(kind).columns})

    @classmethod
    def of(cls, kind: str, columns: Mapping[str, Sequence[Any] | Array]) -> Table:
        """A table of columns whose rows are in any order."""
        layout = layout_of(kind)
        who = f"profile table {kind}"
        missing = [name for name in layout.names if name not in columns]
        if missing:
            raise InputError(who, f"no column {missing[0]}", ", ".join(layout.names))
        typed = {column.name: _typed(who, column.name, column.kind, columns[column.name]) for column in layout.columns}
        if len({len(values) for values in typed.values()}) > 1:
            raise InputError(who, "columns of different lengths", "one value per row in each")
        order = _order(layout, typed)
        return cls(kind, {name: values[order] for name, values in typed.items()})

    def __len__(self) -> int:
        return len(self.columns["latency_us"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def where(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Table:
        """Some of the rows, in the table's order."""
        return Table(self.kind, {name: values[rows] for name, values in self.columns.items()})

    def most(self, column: str, rows: npt.NDArray[np.bool_] | None = None) -> str | None:
        """The most frequent text of a column (of some rows), the first in order among equals; None without rows."""
        values = self.columns[column] if rows is None else self.columns[column][rows]
        if not len(values):
            return None
        names, counts = np.unique(values, return_counts=True)
        return str(names[int(np.argmax(counts))])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as plain Python values by column."""
        names = list(self.columns)
        lists = [values.tolist() for values in self.columns.values()]
        return (dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True))

    def workloads(self) -> list[Workload]:
        """Every row's workload, in order. Raises InputError for a row that is none."""
        made = _WORKLOADS[self.kind]
        keys = [name for name in LAYOUTS[self.kind].keys if name != "provider"]
        lists = [self.columns[name].tolist() for name in keys]
        return [made(**dict(zip(keys, row, strict=True))) for row in zip(*lists, strict=True)]


def _typed(who: str, name: str, kind: str, values: Sequence[Any] | Array) -> Array:
    """The column as an array of its own type; InputError for anything that would have to be bent into it."""
    array = np.asarray(values)
    wanted = {INTEGER: "iu", NUMBER: "fiu", FLAG: "b"}.get(kind, "U")
    if array.ndim != 1 or (array.size and array.dtype.kind not in wanted):
        raise InputError(who, f"{name} of {array.ndim} dimensions and type {array.dtype}", f"a list of {kind} values")
    if kind == INTEGER:
        if array.size and (array.min() < 0 or array.max() >= 2**62):
            raise InputError(who, f"{name} from {array.min()} to {array.max()}", "integers from 0 to 2**62")
        return np.array(array, dtype=np.int64)
    if kind == NUMBER:
        return np.array(array, dtype=np.float64)
    if kind == FLAG:
        return np.array(array, dtype=np.bool_)
    return np.array(array, dtype=np.str_)


def _check_times(who: str, typed: Mapping[str, Array]) -> None:
    low, middle, high = (typed[name] for name in ("low_us", "latency_us", "high_us"))
    with np.errstate(invalid="ignore"):
        bad = ~((low > 0) & (low <= middle) & (middle <= high) & (high < np.inf))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        shown = f"row {row}: {low[row]:g} to {high[row]:g} around {middle[row]:g} µs"
        raise InputError(who, shown, "finite times above 0 with low_us <= latency_us <= high_us")
    for name, allowed in (("grade", _GRADES), ("origin", _ORIGINS)):
        odd = sorted(set(np.unique(typed[name]).tolist()) - set(allowed))
        if odd:
            raise InputError(who, f"{name} {odd[0]!r}"[:100], "one of " + ", ".join(allowed))


def _order(layout: Layout, typed: Mapping[str, Array]) -> npt.NDArray[np.intp]:
    return np.asarray(np.lexsort([typed[name] for name in reversed(layout.keys)]), dtype=np.intp)


def _check_order(who: str, layout: Layout, typed: Mapping[str, Array]) -> None:
    """Rows ascend strictly by their keys."""
    rows = len(typed["latency_us"])
    if rows < 2:
        return
    ascends, same = np.zeros(rows - 1, dtype=bool), np.ones(rows - 1, dtype=bool)
    for name in layout.keys:
        before, after = typed[name][:-1], typed[name][1:]
        ascends |= same & (before < after)
        same &= before == after
    if not ascends.all():
        row = int(np.flatnonzero(~ascends)[0])
        shown = ", ".join(f"{name} {typed[name][row + 1]}" for name in layout.keys)
        raise InputError(who, f"row {row + 1} ({shown}) out of order, or there twice", "rows sorted by key, each once")
