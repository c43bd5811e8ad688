"""Reads measured GEMM tables: Parquet or CSV files with columns `m`, `n`, `k`, `latency` (ms) and,
if they hold several dtypes, `gemm_dtype`.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, StoreError, require_choice
from quantbench.files import open_text, reason
from quantbench.importers.parquet import read_parquet
from quantbench.workload.dtypes import GEMM_DTYPES

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
#: the columns of a table by name, (rows,) each
Columns = dict[str, npt.NDArray[Any]]

#: dtype → its name in tables
_GEMM_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NEEDED = ("m", "n", "k", "latency")


@dataclass(frozen=True)
class GemmTable:
    """Measured GEMMs m×k times k×n of one dtype on one GPU, sorted by (m, n, k), each shape once.

    m, n, k: (rows,) int64.
    latency_us: (rows,) float64.
    gpu: device slug.
    library: whose kernels ran (`libraries.LIBRARIES`).
    """

    m: IntArray
    n: IntArray
    k: IntArray
    latency_us: FloatArray
    dtype: str
    gpu: str
    library: str = "torch"

    def __len__(self) -> int:
        return len(self.m)


def read_table(
    path: str | Path, gpu: str, *, dtype: str = "bf16", library: str = "torch"
) -> GemmTable:
    """Reads the rows of `dtype` from a file that `library` measured on `gpu` (device slug).

    Drops rows with a size below 1 or a latency that is not finite and positive; merges repeated
    shapes by the median.

    Raises InputError for an unknown dtype, a missing column or no measured row, StoreError for an
    unreadable file.
    """
    columns = read_columns(path, dtype)
    shape = np.stack([columns[name].astype(np.int64) for name in ("m", "n", "k")])
    latency_us = columns["latency"].astype(np.float64) * 1e3
    kept = np.isfinite(latency_us) & (latency_us > 0) & (shape >= 1).all(axis=0)
    if not kept.any():
        raise InputError(
            "read_table", f"{Path(path).name} holds no measured row", "latencies above 0 ms"
        )
    m, n, k, latency_us = _merge(shape[:, kept], latency_us[kept])
    return GemmTable(m, n, k, latency_us, dtype, gpu, library)


def read_columns(path: str | Path, dtype: str) -> Columns:
    """Reads all columns of a table, for the rows of `dtype`. Raises the errors of `read_table`."""
    require_choice("read_table", "dtype", dtype, GEMM_DTYPES)
    file = Path(path)
    columns = _csv_columns(file) if file.suffix == ".csv" else _parquet_columns(file)
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise InputError(
            "read_table",
            f"{file.name} has no column {missing[0]!r}",
            "columns " + ", ".join(_NEEDED),
        )
    if "gemm_dtype" not in columns:
        return columns
    names = columns["gemm_dtype"].astype(str)
    rows = (names == _GEMM_DTYPE.get(dtype, dtype)) | (names == dtype)
    if not rows.any():
        raise InputError(
            "read_table", f"no row of dtype {dtype!r}", "one of " + ", ".join(sorted(set(names)))
        )
    return {name: column[rows] for name, column in columns.items()}


def _merge(
    shape: IntArray, latency_us: FloatArray
) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    """Returns m, n, k of the distinct shapes, sorted, and the median latency of each. shape: (3,
    rows).
    """
    (m, n, k), inverse, counts = np.unique(shape, axis=1, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    if (counts == 1).all():
        return m, n, k, latency_us[order]
    groups = np.split(latency_us[order], np.cumsum(counts)[:-1])
    return m, n, k, np.array([float(np.median(group)) for group in groups])


def _parquet_columns(file: Path) -> Columns:
    table = read_parquet("read_table", file)
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def _csv_columns(file: Path) -> Columns:
    try:
        with open_text(file) as stream:
            reader = csv.DictReader(stream)
            rows = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError("read_table", f"{file} ({reason(error)})", "a CSV file in UTF-8") from None
    columns: Columns = {name: np.array([row[name] for row in rows]) for name in names}
    for name in _NEEDED:
        if name in columns:
            try:
                columns[name] = columns[name].astype(np.float64)
            except ValueError as error:
                raise InputError(
                    "read_table", f"{file.name}, column {name}: {error}", "numbers"
                ) from error
    return columns
