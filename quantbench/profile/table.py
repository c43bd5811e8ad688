"""One table of a profile: columns of equal length, rows sorted and each key once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.measurement import GRADES
from quantbench.profile.columns import FLAG, INTEGER, LAYOUTS, NUMBER, Layout, layout_of
from quantbench.workload import Attention, Collective, Gemm, Softmax, Workload

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
