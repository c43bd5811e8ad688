"""Defines the tables of a profile (columns, rows sorted by unique keys) and checks their rows.

Entry points: `Table`; `LAYOUTS`, the columns of each kind of table (`TableLayout`), whose types are `INTEGER`,
`NUMBER`, `FLAG` and `TEXT`; `check_table`, which rejects invalid workloads and impossible times; `flops` and
`min_bytes` of rows; `LARGEST`, `ROW_GRADES`. Used by the other modules of `profile` and by the command `profile`.

Checks are vectorised: tens of thousands of rows take milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import CACHE_OVER_MEMORY, PEAK_MARGIN, DeviceSpec
from quantbench.errors import InputError
from quantbench.measurement import GRADES
from quantbench.store.record import ORIGINS
from quantbench.workload import Attention, Collective, Gemm, MoE, Softmax, Workload
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES, VECTOR_DTYPES
from quantbench.workload.moe import require_distribution
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS, DIRECTIONS, LARGEST_MESSAGE_BYTES, MASKS
from quantbench.workload.ops import LAYOUTS as GEMM_LAYOUTS

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, Array]

#: largest size in a workload
LARGEST = 2**31 - 1

INTEGER, TEXT, NUMBER, FLAG = "integer", "text", "number", "flag"


class TableLayout(NamedTuple):
    """Columns of one kind of table.

    columns: kind (integer, text, number or flag) by name, which ends in the unit, if any; in order.
    keys: the columns that identify a row, in sort order.
    """

    columns: Mapping[str, str]
    keys: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.columns)


# Columns that are not integers. low_us, high_us: 95 % interval of the median, both equal to latency_us for a single
# sample. grade: A to D. origin: measured, imported or simulated. kernel: "" if unknown.
_KINDS = {
    **dict.fromkeys(("latency_us", "low_us", "high_us"), NUMBER),
    **dict.fromkeys(("dtype", "layout", "provider", "mask", "direction", "op", "kernel", "grade", "origin"), TEXT),
    "distribution": TEXT,
    **dict.fromkeys(("causal", "gated"), FLAG),
}


def _layout(keys: str, more: str = "") -> TableLayout:
    names = f"{keys} {more} latency_us low_us high_us grade origin".split()
    return TableLayout({name: _KINDS.get(name, INTEGER) for name in names}, tuple(keys.split()))


LAYOUTS: dict[str, TableLayout] = {
    # block_m, block_n, split_k: 0 if unknown.
    "gemm": _layout("m n k batch dtype layout provider", "kernel block_m block_n split_k"),
    "softmax": _layout("batch rows cols dtype mask direction provider"),
    "attention": _layout("batch heads kv_heads seq_q seq_k head_dim dtype causal direction provider"),
    "moe": _layout("tokens hidden expert_ffn num_experts top_k dtype tp ep gated distribution provider"),
    "collective": _layout("op message_bytes num_gpus dtype num_nodes provider"),
}


def layout_of(kind: str) -> TableLayout:
    """Returns the layout of a kind of table. Raises InputError for an unknown kind."""
    if kind not in LAYOUTS:
        raise InputError("profile table", repr(kind)[:80], "one of " + ", ".join(LAYOUTS))
    return LAYOUTS[kind]


#: grades that a row may have
ROW_GRADES = tuple(letter for letter in GRADES if letter != "rejected")
_WORKLOADS: dict[str, type[Workload]] = {
    "gemm": Gemm, "softmax": Softmax, "attention": Attention, "moe": MoE, "collective": Collective,
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Measured times of one kind of workload, sorted by the key columns, with unique keys.

    kind: gemm, softmax, attention, moe or collective.
    columns: (rows,) arrays by name, in the order of `LAYOUTS`: int64, float64, bool or text.

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
        typed = _typed(who, layout, self.columns)
        _check_intervals(who, typed)
        _check_order(who, layout, typed)
        for values in typed.values():
            values.flags.writeable = False
        object.__setattr__(self, "columns", typed)

    @classmethod
    def empty(cls, kind: str) -> Table:
        return cls.of(kind, dict.fromkeys(layout_of(kind).names, ()))

    @classmethod
    def of(cls, kind: str, columns: Mapping[str, Sequence[Any] | Array]) -> Table:
        layout = layout_of(kind)
        who = f"profile table {kind}"
        missing = [name for name in layout.names if name not in columns]
        if missing:
            raise InputError(who, f"no column {missing[0]}", ", ".join(layout.names))
        typed = _typed(who, layout, columns)
        order = np.lexsort([typed[name] for name in reversed(layout.keys)])
        return cls(kind, {name: values[order] for name, values in typed.items()})

    def __len__(self) -> int:
        return len(self.columns["latency_us"])

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def where(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Table:
        return Table(self.kind, {name: values[rows] for name, values in self.columns.items()})

    def most(self, column: str, rows: npt.NDArray[np.bool_] | None = None) -> str | None:
        """Returns the most frequent text in a column, the alphabetically first in a tie; None if there are no rows."""
        values = self.columns[column] if rows is None else self.columns[column][rows]
        if not len(values):
            return None
        names, counts = np.unique(values, return_counts=True)
        return str(names[int(np.argmax(counts))])

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterates over the rows as dictionaries of Python values."""
        names = list(self.columns)
        lists = [values.tolist() for values in self.columns.values()]
        return (dict(zip(names, row, strict=True)) for row in zip(*lists, strict=True))

    def workloads(self) -> list[Workload]:
        """Returns the workload of every row. Raises InputError for an invalid one."""
        made = _WORKLOADS[self.kind]
        keys = [name for name in LAYOUTS[self.kind].keys if name != "provider"]
        lists = [self.columns[name].tolist() for name in keys]
        return [made(**dict(zip(keys, row, strict=True))) for row in zip(*lists, strict=True)]


def _typed(who: str, layout: TableLayout, columns: Mapping[str, Sequence[Any] | Array]) -> dict[str, Array]:
    """Copies the columns to arrays of their declared types. Raises InputError for values of other types."""
    typed = {name: _column(who, name, kind, columns[name]) for name, kind in layout.columns.items()}
    if len({len(values) for values in typed.values()}) > 1:
        raise InputError(who, "columns of different lengths", "one value per row in each")
    return typed


def _column(who: str, name: str, kind: str, values: Sequence[Any] | Array) -> Array:
    array = np.asarray(values)
    dtype, wanted = {
        INTEGER: (np.int64, "iu"), NUMBER: (np.float64, "fiu"), FLAG: (np.bool_, "b"), TEXT: (np.str_, "U"),
    }[kind]  # fmt: skip
    if array.ndim != 1 or (array.size and array.dtype.kind not in wanted):
        raise InputError(who, f"{name} of {array.ndim} dimensions and type {array.dtype}", f"a list of {kind} values")
    if kind == INTEGER and array.size and (array.min() < 0 or array.max() >= 2**62):
        raise InputError(who, f"{name} from {array.min()} to {array.max()}", "integers from 0 to 2**62")
    return np.array(array, dtype=dtype)


def _check_intervals(who: str, typed: Mapping[str, Array]) -> None:
    low, middle, high = (typed[name] for name in ("low_us", "latency_us", "high_us"))
    with np.errstate(invalid="ignore"):
        bad = ~((low > 0) & (low <= middle) & (middle <= high) & (high < np.inf))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        shown = f"row {row}: {low[row]:g} to {high[row]:g} around {middle[row]:g} µs"
        raise InputError(who, shown, "finite times above 0 with low_us <= latency_us <= high_us")
    for name, allowed in (("grade", ROW_GRADES), ("origin", ORIGINS)):
        odd = sorted(set(np.unique(typed[name]).tolist()) - set(allowed))
        if odd:
            raise InputError(who, f"{name} {odd[0]!r}"[:100], "one of " + ", ".join(allowed))


def _check_order(who: str, layout: TableLayout, typed: Mapping[str, Array]) -> None:
    """Raises InputError unless rows ascend strictly by their keys."""
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


def _element_bytes(dtype: Array) -> npt.NDArray[np.int64]:
    return _by_name(dtype, lambda name: DTYPES[name].element_bytes).astype(np.int64)


def _by_name(names: Array, value: Callable[[str], float]) -> FloatArray:
    found, inverse = np.unique(names, return_inverse=True)
    return np.array([value(str(name)) for name in found], dtype=np.float64)[inverse.reshape(-1)]


def flops(kind: str, columns: Columns) -> FloatArray:
    """Returns `Workload.flops` for each row, (rows,); for experts, those of the mean rank, which are fewer."""
    c = _numbers(columns)
    if kind == "moe":
        products = np.where(columns["gated"], 3.0, 2.0)
        return 2.0 * products * c["tokens"] * c["top_k"] / c["ep"] * c["hidden"] * c["expert_ffn"] / c["tp"]
    if kind == "gemm":
        return 2.0 * c["m"] * c["n"] * c["k"] * c["batch"]
    if kind == "attention":
        pairs = np.where(columns["causal"], c["seq_q"] * (c["seq_q"] + 1) / 2, c["seq_q"] * c["seq_k"])
        products = np.where(columns["direction"] == "forward", 2.0, 5.0)
        return 2.0 * products * c["batch"] * c["heads"] * pairs * c["head_dim"]
    if kind == "softmax":
        per_element = np.where(columns["direction"] == "forward", 6.0, 5.0)
        return per_element * _live_elements(columns, c)
    return np.zeros(len(c["message_bytes"]))


def min_bytes(kind: str, columns: Columns) -> FloatArray:
    """Returns `Workload.min_bytes` for each row, (rows,), without softmax masks; for a collective, its message; for
    experts, their rows alone, because the experts that have rows are not known."""
    c = _numbers(columns)
    if kind == "moe":
        return 2.0 * c["tokens"] * c["top_k"] / c["ep"] * c["hidden"]
    if kind == "collective":
        return c["message_bytes"]
    width = _element_bytes(columns["dtype"]).astype(np.float64)
    if kind == "gemm":
        a = _by_name(columns["dtype"], lambda name: DTYPES[name].a_bytes)
        b = _by_name(columns["dtype"], lambda name: DTYPES[name].b_bytes)
        out = _by_name(columns["dtype"], lambda name: DTYPES[DTYPES[name].output].element_bytes)
        return c["batch"] * (np.round(c["m"] * c["k"] * a + c["k"] * c["n"] * b) + c["m"] * c["n"] * out)
    if kind == "attention":
        q = c["batch"] * c["heads"] * c["seq_q"] * c["head_dim"] * width
        kv = 2.0 * c["batch"] * c["kv_heads"] * c["seq_k"] * c["head_dim"] * width
        stats = 4.0 * c["batch"] * c["heads"] * c["seq_q"]
        return np.where(columns["direction"] == "forward", 2.0 * q + kv + stats, 4.0 * q + 2.0 * kv + stats)
    reads = np.where(columns["direction"] == "forward", 1.0, 2.0)
    return width * (reads * _live_elements(columns, c) + c["batch"] * c["rows"] * c["cols"])


def _numbers(columns: Columns) -> dict[str, FloatArray]:
    return {name: values.astype(np.float64) for name, values in columns.items() if values.dtype.kind == "i"}


def _live_elements(columns: Columns, c: dict[str, FloatArray]) -> FloatArray:
    per_batch = np.where(columns["mask"] == "causal", c["rows"] * (c["rows"] + 1) / 2, c["rows"] * c["cols"])
    return np.asarray(c["batch"] * per_batch)


# An empty kernel takes about a microsecond.
_SHORTEST_US = 0.05

_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "gemm": {"dtype": GEMM_DTYPES, "layout": GEMM_LAYOUTS},
    "softmax": {"dtype": VECTOR_DTYPES, "mask": MASKS, "direction": DIRECTIONS},
    "attention": {"dtype": VECTOR_DTYPES, "direction": DIRECTIONS},
    "moe": {"dtype": GEMM_DTYPES},
    "collective": {"dtype": COLLECTIVE_DTYPES, "op": COLLECTIVE_OPS},
}


def check_table(table: Table, device: DeviceSpec) -> None:
    """Raises InputError for the first row with an invalid workload or an impossible time."""
    if not len(table):
        return
    _check_workloads(table)
    _check_times(table, device)


def _check_workloads(table: Table) -> None:
    layout = LAYOUTS[table.kind]
    for name in layout.keys:
        if layout.columns[name] == INTEGER:
            most = LARGEST_MESSAGE_BYTES if name == "message_bytes" else LARGEST
            _refuse(table, (table[name] < 1) | (table[name] > most), f"{name} from 1 to {most}", name)
        elif layout.columns[name] != FLAG and name in _CHOICES[table.kind]:
            allowed = _CHOICES[table.kind][name]
            _refuse(table, ~np.isin(table[name], allowed), f"{name} one of " + ", ".join(allowed), name)
    _refuse(table, table["provider"] == "", "a provider", "provider")
    if table.kind == "softmax":
        _refuse(table, (table["mask"] == "causal") & (table["rows"] != table["cols"]), "rows equal to cols", "mask")
    elif table.kind == "attention":
        _refuse(table, table["heads"] % table["kv_heads"] != 0, "kv_heads a divisor of heads", "kv_heads")
        _refuse(table, table["causal"] & (table["seq_q"] != table["seq_k"]), "seq_q equal to seq_k", "causal")
    elif table.kind == "moe":
        _refuse(table, table["top_k"] > table["num_experts"], "top_k of at most num_experts", "top_k")
        _refuse(table, table["expert_ffn"] % table["tp"] != 0, "tp a divisor of expert_ffn", "tp")
        _refuse(table, table["num_experts"] % table["ep"] != 0, "ep a divisor of num_experts", "ep")
        for name in np.unique(table["distribution"]).tolist():
            require_distribution(name, 1)
    elif table.kind == "collective":
        _refuse(table, table["num_gpus"] < 2, "num_gpus of at least 2", "num_gpus")
        _refuse(table, table["num_gpus"] % table["num_nodes"] != 0, "num_nodes a divisor of num_gpus", "num_nodes")
        width = _element_bytes(table["dtype"])
        _refuse(table, table["message_bytes"] % width != 0, "message_bytes whole elements", "message_bytes")


def _check_times(table: Table, device: DeviceSpec) -> None:
    """Raises InputError for a time that the device cannot reach; imports check the unit by the roofline as well."""
    times_us = table["latency_us"]
    _refuse(table, times_us < _SHORTEST_US, f"at least {_SHORTEST_US} µs (is it in milliseconds?)", "latency_us")
    if table.kind == "collective":
        return
    # The peak at the highest clock; infinite if unknown, and for softmax, which does not use tensor cores.
    softmax = table.kind == "softmax"
    peak = _by_name(table["dtype"], lambda name: np.inf if softmax else device.ceiling(name) or np.inf)
    with np.errstate(invalid="ignore"):
        beyond = flops(table.kind, table.columns) / times_us / 1e6 > peak * PEAK_MARGIN
    _refuse(table, beyond, f"a time at the peak of {device.name} at the least (are they milliseconds?)", "latency_us")
    gb_per_s = min_bytes(table.kind, table.columns) / times_us / 1e3
    most = f"no more than {CACHE_OVER_MEMORY} times the memory's {device.memory_gb_per_s:g} GB/s"
    _refuse(table, gb_per_s > CACHE_OVER_MEMORY * device.memory_gb_per_s, most, "latency_us")


def _refuse(table: Table, bad: npt.NDArray[np.bool_], expected: str, column: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        value = table[column][row]
        text = repr(str(value)) if isinstance(value, np.str_) else str(value)
        keys = ", ".join(f"{name} {table[name][row]}" for name in LAYOUTS[table.kind].keys if name != "provider")
        shown = f"row {row} ({keys})"[:160]
        raise InputError(f"profile table {table.kind}", f"{shown}: {column} {text}"[:200], expected)
