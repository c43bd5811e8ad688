"""Counts of arithmetic and bytes of many workloads at once, as the workload types count them one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.workload.dtypes import DTYPES

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
