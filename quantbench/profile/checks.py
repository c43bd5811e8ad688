"""Checks of a profile's rows: no impossible workload, none faster than the hardware, none in another unit.

All checks are array arithmetic: tens of thousands of rows take milliseconds whenever a profile is made or read. Entry
point: `check_table`; `flops` and `min_bytes` count many workloads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.profile.table import FLAG, INTEGER, LARGEST, LAYOUTS, Table
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES, VECTOR_DTYPES
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS, DIRECTIONS, LARGEST_MESSAGE_BYTES, MASKS
from quantbench.workload.ops import LAYOUTS as GEMM_LAYOUTS

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, Array]


def element_bytes(dtype: Array) -> npt.NDArray[np.int64]:
    """Bytes of a stored element of each row's number format."""
    return by_name(dtype, lambda name: DTYPES[name].element_bytes).astype(np.int64)


def by_name(names: Array, value: Callable[[str], float]) -> FloatArray:
    """A number for each row by its text."""
    found, inverse = np.unique(names, return_inverse=True)
    return np.array([value(str(name)) for name in found], dtype=np.float64)[inverse.reshape(-1)]


def flops(kind: str, columns: Columns) -> FloatArray:
    """Useful arithmetic of each row, as `Workload.flops`; (rows,)."""
    c = _numbers(columns)
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
    """Fewest bytes of each row, as `Workload.min_bytes` (a full mask and a collective's other ranks left out)."""
    c = _numbers(columns)
    if kind == "collective":
        return c["message_bytes"]
    width = element_bytes(columns["dtype"]).astype(np.float64)
    if kind == "gemm":
        out = by_name(columns["dtype"], lambda name: DTYPES[DTYPES[name].output].element_bytes)
        return c["batch"] * ((c["m"] * c["k"] + c["k"] * c["n"]) * width + c["m"] * c["n"] * out)
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


BoolArray = npt.NDArray[np.bool_]

# No kernel of any device here is over sooner: an empty one takes about a microsecond.
_SHORTEST_US = 0.05
# Caches are up to ten times as fast as the memory behind them; a hundred times is another unit.
_BEYOND_MEMORY = 100.0
# Nothing in a whole table comes within this factor of the roofline: the times are in another unit.
_FAR_TOO_SLOW = 300.0
# What rounding may add to a figure that reaches the peak exactly.
_ROUNDING = 1.0 + 1e-9

_CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "gemm": {"dtype": GEMM_DTYPES, "layout": GEMM_LAYOUTS},
    "softmax": {"dtype": VECTOR_DTYPES, "mask": MASKS, "direction": DIRECTIONS},
    "attention": {"dtype": VECTOR_DTYPES, "direction": DIRECTIONS},
    "collective": {"dtype": COLLECTIVE_DTYPES, "op": COLLECTIVE_OPS},
}


def check_table(table: Table, device: DeviceSpec) -> None:
    """Raise InputError, naming the first such row, where a row is no workload or its time cannot be."""
    if not len(table):
        return
    _check_workloads(table)
    _check_times(table, device)


def _check_workloads(table: Table) -> None:
    layout = LAYOUTS[table.kind]
    kinds = {column.name: column.kind for column in layout.columns}
    for name in layout.keys:
        if kinds[name] == INTEGER:
            most = LARGEST_MESSAGE_BYTES if name == "message_bytes" else LARGEST
            _refuse(table, (table[name] < 1) | (table[name] > most), f"{name} from 1 to {most}", name)
        elif kinds[name] != FLAG and name in _CHOICES[table.kind]:
            allowed = _CHOICES[table.kind][name]
            _refuse(table, ~np.isin(table[name], allowed), f"{name} one of " + ", ".join(allowed), name)
    _refuse(table, table["provider"] == "", "a provider", "provider")
    if table.kind == "softmax":
        _refuse(table, (table["mask"] == "causal") & (table["rows"] != table["cols"]), "rows equal to cols", "mask")
    elif table.kind == "attention":
        _refuse(table, table["heads"] % table["kv_heads"] != 0, "kv_heads a divisor of heads", "kv_heads")
        _refuse(table, table["causal"] & (table["seq_q"] != table["seq_k"]), "seq_q equal to seq_k", "causal")
    elif table.kind == "collective":
        _refuse(table, table["num_gpus"] < 2, "num_gpus of at least 2", "num_gpus")
        _refuse(table, table["num_gpus"] % table["num_nodes"] != 0, "num_nodes a divisor of num_gpus", "num_nodes")
        width = element_bytes(table["dtype"])
        _refuse(table, table["message_bytes"] % width != 0, "message_bytes whole elements", "message_bytes")


def _check_times(table: Table, device: DeviceSpec) -> None:
    times_us = table["latency_us"]
    _refuse(table, times_us < _SHORTEST_US, f"at least {_SHORTEST_US} µs (is it in milliseconds?)", "latency_us")
    moved, arithmetic = min_bytes(table.kind, table.columns), flops(table.kind, table.columns)
    peak = peak_tflops(table, device)
    if table.kind != "collective":
        with np.errstate(invalid="ignore"):
            tflops = arithmetic / times_us / 1e6
        beyond = tflops > peak * _ROUNDING
        if beyond.any():
            row = int(np.flatnonzero(beyond)[0])
            said = f"{shown(table, row)}: {times_us[row]:g} µs are {tflops[row]:,.0f} TFLOP/s"
            most = f"at most {peak[row]:,.0f}, the peak of {device.name} (are they milliseconds?)"
            raise InputError(f"profile table {table.kind}", said, most)
        gb_per_s = moved / times_us / 1e3
        _refuse(
            table, gb_per_s > _BEYOND_MEMORY * device.memory_gb_per_s,
            f"no more than {_BEYOND_MEMORY:g} times the memory's {device.memory_gb_per_s:g} GB/s", "latency_us",
        )  # fmt: skip
        roofline_us = 3.0 + np.maximum(
            moved / (device.memory_gb_per_s * 1e3), np.where(np.isfinite(peak), arithmetic / (peak * 1e6), 0.0)
        )
        nearest = int(np.argmin(times_us / roofline_us))
        if times_us[nearest] > _FAR_TOO_SLOW * roofline_us[nearest]:
            raise InputError(
                f"profile table {table.kind}",
                f"every row is far too slow; {shown(table, nearest)}: {times_us[nearest]:g} µs",
                f"about {roofline_us[nearest]:.3g} µs (are they nanoseconds?)",
            )


def _refuse(table: Table, bad: BoolArray, expected: str, column: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        value = table[column][row]
        text = repr(str(value)) if isinstance(value, np.str_) else str(value)
        raise InputError(f"profile table {table.kind}", f"{shown(table, row)}: {column} {text}"[:200], expected)


def shown(table: Table, row: int) -> str:
    """A row for people: its number and its key."""
    keys = ", ".join(f"{name} {table[name][row]}" for name in LAYOUTS[table.kind].keys if name != "provider")
    return f"row {row} ({keys})"[:160]


def peak_tflops(table: Table, device: DeviceSpec) -> FloatArray:
    """What cannot be exceeded at the device's highest clock, by row; infinite where it is not known, and for softmax,
    whose arithmetic is not the tensor cores'."""
    if table.kind == "softmax":
        return np.full(len(table), np.inf)
    return by_name(table["dtype"], lambda name: device.ceiling(name) or np.inf)
