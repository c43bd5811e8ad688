"""Defines the tables of a profile, and checks their rows.

A table has the measured times of one kind of workload, as columns, with rows sorted by unique keys.
`check_table` refuses rows with an invalid workload and with a time that the device cannot reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import CACHE_OVER_MEMORY, PEAK_MARGIN, DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.libraries import library_of
from quantbench.measurement import GRADES
from quantbench.store.record import ORIGINS
from quantbench.workload import Attention, Collective, Gemm, MoE, Softmax, Workload

Array = npt.NDArray[Any]


class TableLayout(NamedTuple):
    """Columns of one kind of table.

    workload: class of the workloads. Its fields are the key columns without the provider.
    columns: type of the values (int, float, bool or str) by column name, in order.
    keys: columns that identify a row, in sort order; the last is the provider.
    """

    workload: type[Workload]
    columns: Mapping[str, type]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)


TIMES = ("latency_us", "low_us", "high_us")
# Types of the columns that are not integers. low_us and high_us are the 95 % interval of the
# median latency_us; for a single sample, both equal latency_us. grade is the measurement's quality,
# A to D. origin is measured, imported or simulated. kernel is "" if it is unknown.
_TYPES: dict[str, type] = {
    **dict.fromkeys(TIMES, float),
    **dict.fromkeys(("dtype", "layout", "provider", "mask", "direction", "distribution"), str),
    **dict.fromkeys(("op", "kernel", "grade", "origin"), str),
    **dict.fromkeys(("causal", "gated"), bool),
}


def _layout(workload: type[Workload], keys: str, more: str = "") -> TableLayout:
    """Returns the layout of one kind of table.

    keys: names of the key columns before the provider, separated by spaces.
    more: names of the columns between the provider and the times, separated by spaces.
    """
    names = f"{keys} provider {more} latency_us low_us high_us grade origin".split()
    types = {name: _TYPES.get(name, int) for name in names}
    return TableLayout(workload, types, (*keys.split(), "provider"))


LAYOUTS: dict[str, TableLayout] = {
    # block_m, block_n and split_k are 0 if they are unknown.
    "gemm": _layout(Gemm, "m n k batch dtype layout", "kernel block_m block_n split_k"),
    "softmax": _layout(Softmax, "batch rows cols dtype mask direction"),
    "attention": _layout(
        Attention, "batch heads kv_heads seq_q seq_k head_dim dtype causal direction"
    ),
    "moe": _layout(
        MoE, "tokens hidden expert_ffn num_experts top_k dtype tp ep gated distribution"
    ),
    "collective": _layout(Collective, "op message_bytes num_gpus dtype num_nodes"),
}


# Grades of rows. Points with the grade `rejected` never become rows.
_ROW_GRADES = tuple(letter for letter in GRADES if letter != "rejected")


@dataclass(frozen=True)
class Table:
    """Measured times of one kind of workload, sorted by the key columns, with unique keys.

    kind: gemm, softmax, attention, moe or collective.
    columns: (rows,) arrays of int64, float64, bool or text by name, in the order of `LAYOUTS`.

    >>> table = Table.empty("softmax")
    >>> len(table), table["latency_us"].dtype
    (0, dtype('float64'))
    """

    kind: str
    columns: Mapping[str, Array]

    def __post_init__(self) -> None:
        typed = _typed(self.kind, self.columns)
        _check_intervals(f"profile table {self.kind}", typed)
        _check_order(self.kind, typed)
        for values in typed.values():
            values.flags.writeable = False
        object.__setattr__(self, "columns", typed)

    @classmethod
    def empty(cls, kind: str) -> Table:
        return cls.of(kind, dict.fromkeys(LAYOUTS[kind].columns, ()))

    @classmethod
    def of(cls, kind: str, columns: Mapping[str, Sequence[Any] | Array]) -> Table:
        """Builds a table from columns whose rows may be in any order."""
        typed = _typed(kind, columns)
        order = np.lexsort([typed[name] for name in reversed(LAYOUTS[kind].keys)])
        return cls(kind, {name: values[order] for name, values in typed.items()})

    def __len__(self) -> int:
        return len(self.columns["latency_us"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def where(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Table:
        return Table(self.kind, {name: values[rows] for name, values in self.columns.items()})

    def matching(self, **values: Any) -> Table:
        """Returns the rows with these values in the named columns."""
        rows = np.ones(len(self), dtype=bool)
        for name, value in values.items():
            rows &= self.columns[name] == value
        return self.where(rows)

    def most_frequent(self, column: str, rows: npt.NDArray[np.bool_] | None = None) -> str | None:
        """Returns the most frequent text in a column, or None if there are no rows.

        In a tie, the alphabetically first text is returned.

        rows: mask of the rows to count; None for all.
        """
        values = self.columns[column] if rows is None else self.columns[column][rows]
        if not len(values):
            return None
        names, counts = np.unique(values, return_counts=True)
        return str(names[int(np.argmax(counts))])

    def by_library(self, library: str) -> npt.NDArray[np.bool_]:
        """Returns whether each row's provider belongs to the library, (rows,)."""
        owners = [library_of(name) == library for name in self.columns["provider"].tolist()]
        return np.array(owners, dtype=bool)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterates over the rows as dictionaries of Python values."""
        names = list(self.columns)
        lists = [values.tolist() for values in self.columns.values()]
        return (dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True))

    def workloads(self) -> list[Workload]:
        """Returns the workload of every row.

        Raises InputError for an invalid workload and for an empty provider.
        """
        of, _, keys = LAYOUTS[self.kind]
        columns = [self.columns[name].tolist() for name in keys]
        made = []
        for row, (*values, provider) in enumerate(zip(*columns, strict=True)):
            try:
                made.append(of(**dict(zip(keys, values, strict=False))))
                if not provider:
                    raise InputError("workload", "provider ''", "a provider")
            except InputError as error:
                raise InputError(
                    f"profile table {self.kind}", f"row {row}: {error.value}", error.expected
                ) from None
        return made


def _typed(kind: str, columns: Mapping[str, Sequence[Any] | Array]) -> dict[str, Array]:
    """Returns the columns as arrays of their declared types.

    Raises InputError for an unknown kind, for missing or unknown columns, for values of other
    types, and for columns of different lengths.
    """
    layout = LAYOUTS[require_choice("profile table", "kind", kind, tuple(LAYOUTS))]
    who = f"profile table {kind}"
    for odd in sorted(columns.keys() ^ layout.columns.keys()):
        raise InputError(who, f"columns: {odd}", ", ".join(layout.columns))
    typed = {name: _column(who, name, of, columns[name]) for name, of in layout.columns.items()}
    if len({len(values) for values in typed.values()}) > 1:
        raise InputError(who, "columns of different lengths", "one value per row in each")
    return typed


# Kinds of numpy dtypes (`dtype.kind`) that are accepted for the values of a type.
_ARRAYS = {int: "iu", float: "fiu", bool: "b", str: "U"}


def _column(who: str, name: str, of: type, values: Sequence[Any] | Array) -> Array:
    """Returns a column as an array of the type `of`.

    Raises InputError for values of another type, and for integers below 0 or from 2**62 on.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in _ARRAYS[of]):
        shown = f"{name} of {array.ndim} dimensions and type {array.dtype}"
        raise InputError(who, shown, f"a list of {of.__name__} values")
    if of is int and array.size and (array.min() < 0 or array.max() >= 2**62):
        raise InputError(
            who, f"{name} from {array.min()} to {array.max()}", "integers from 0 to 2**62"
        )
    return np.array(array, dtype=of)


def _check_intervals(who: str, typed: Mapping[str, Array]) -> None:
    """Raises InputError for an invalid time, interval, grade or origin."""
    low = typed["low_us"]
    middle = typed["latency_us"]
    high = typed["high_us"]
    with np.errstate(invalid="ignore"):
        bad = ~((low > 0) & (low <= middle) & (middle <= high) & (high < np.inf))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        shown = f"row {row}: {low[row]:g} to {high[row]:g} around {middle[row]:g} µs"
        raise InputError(who, shown, "finite times above 0 with low_us <= latency_us <= high_us")
    for name, allowed in (("grade", _ROW_GRADES), ("origin", ORIGINS)):
        odd = sorted(set(np.unique(typed[name]).tolist()) - set(allowed))
        if odd:
            raise InputError(who, f"{name} {odd[0]!r}"[:100], "one of " + ", ".join(allowed))


def _check_order(kind: str, typed: Mapping[str, Array]) -> None:
    """Raises InputError unless the rows ascend strictly by their keys."""
    names = LAYOUTS[kind].keys
    keys = zip(*(typed[name].tolist() for name in names), strict=True)
    for row, (before, after) in enumerate(pairwise(keys), start=1):
        if before >= after:
            shown = ", ".join(f"{name} {value}" for name, value in zip(names, after, strict=True))
            raise InputError(
                f"profile table {kind}",
                f"row {row} ({shown}) out of order, or there twice",
                "rows sorted by key, each once",
            )


# Shortest time, in µs, that is accepted as possible. An empty kernel takes about a microsecond.
_SHORTEST_US = 0.05


def check_table(table: Table, device: DeviceSpec) -> None:
    """Raises InputError for a row with an invalid workload or a time the device cannot reach."""
    for row, (work, us) in enumerate(
        zip(table.workloads(), table["latency_us"].tolist(), strict=True)
    ):
        expected = _impossible(work, us, device)
        if expected:
            shown = f"row {row} ({work})"[:160]
            raise InputError(f"profile table {table.kind}", f"{shown}: latency_us {us}", expected)


def _impossible(work: Workload, us: float, device: DeviceSpec) -> str:
    """Returns the expected time in words if the device cannot be as fast as `us`, else "".

    The message asks whether the times are in milliseconds, the usual mistake in imported tables.
    """
    if us < _SHORTEST_US:
        return f"at least {_SHORTEST_US} µs (is it in milliseconds?)"
    if isinstance(work, Collective):
        return ""
    # The ceiling is the peak at the highest SM clock; None if it is unknown. Softmax has none here,
    # because it does not use tensor cores.
    peak = None if isinstance(work, Softmax) else device.ceiling(work.dtype)
    if peak is not None and work.flops / us / 1e6 > peak * PEAK_MARGIN:
        return f"a time at the peak of {device.name} at the least (are they milliseconds?)"
    if work.min_bytes / us / 1e3 > CACHE_OVER_MEMORY * device.memory_gb_per_s:
        return (
            f"no more than {CACHE_OVER_MEMORY} times the memory's {device.memory_gb_per_s:g} GB/s"
        )
    return ""
