"""Reads DeepBench's times of matrix products: the text that gemm_bench prints, or a sheet of its results as a CSV file.

Entry points: `read_rows`, `origin_of`. Used by the command `import` and tools.

Source: https://github.com/baidu-research/DeepBench, code/nvidia/gemm_bench.cu: 400 calls of cublasGemmEx in a row by
the host's clock. cuBLAS is column-major: their C = op(A)·op(B) with M×K and K×N is the row-major Cᵀ = op(B)ᵀ·op(A)ᵀ, so
their N is our m and their M our n, and b_t is the first letter of our layout. The calls add to C (beta = 1), which is
read once more than a product needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError
from quantbench.files import open_text, reason
from quantbench.importers.csv_table import CsvFile, CsvRow
from quantbench.importers.runs import UNITS_US, Origin, Row, Rows, dtype_name, file_origin, rows_of_gpu, slug_of
from quantbench.store.record import Place
from quantbench.workload import Gemm

_WHO = "import deepbench"
_PRINTED = re.compile(r"^\s*m\s+n\s+k\s+a_t\s+b_t\b.*time \((?P<unit>[um])sec\)")
_EXAMPLE = "m, n, k, a_t, b_t, time (usec)"
_SPELLED = {
    ours: re.compile(spelled, re.IGNORECASE)
    for ours, spelled in {
        "m": "m", "n": "n", "k": "k", "a_t": "a[_ ]t(ransposed?)?", "b_t": "b[_ ]t(ransposed?)?",
        "time": r"time[_ ]\(?[um]s(ec)?\)?", "gpu": "gpu", "dtype": "dtype|precision",
    }.items()
}  # fmt: skip
_TRANSPOSED = {"t": "t", "1": "t", "n": "n", "0": "n"}


def read_rows(path: Path, spec: DeviceSpec, *, dtype: str | None = None) -> Rows:
    """Reads the rows, of `spec` alone if the file names GPUs. dtype: that of all rows, if the file states none.

    Raises InputError for a file of another layout, or without a row of this GPU.
    """

    def gpu_of(row: CsvRow) -> str:
        gpu = _names(path.name, tuple(row.cells)).get("gpu")
        return spec.name if gpu is None else slug_of(row.text(gpu))

    found = Rows()
    for row in rows_of_gpu(_WHO, path, _rows(path), gpu_of, spec.name, found):
        names = _names(path.name, tuple(row.cells))
        form = row.text(names["dtype"]) if "dtype" in names else dtype
        if not form:
            raise InputError(_WHO, f"{path.name} states no dtype", "--dtype fp32, or a column precision")
        layout = _letter(row, names["b_t"]) + _letter(row, names["a_t"])
        their_m, their_n, k = (row.integer(names[size]) for size in "mnk")
        work = row.made(Gemm, their_n, their_m, k, dtype=dtype_name(form), layout=layout)
        unit = "ms" if "m" in names["time"].lower().removeprefix("time") else "us"
        latency_us = row.number(names["time"]) * UNITS_US[unit]
        place = Place({"m": work.m, "n": work.n, "k": work.k}, "gemm")
        found.rows.append(Row(work, latency_us, "cublas", place, where=f"line {row.line}"))
    return found


@cache
def _names(file: str, header: tuple[str, ...]) -> dict[str, str]:
    """Returns the names of a table's columns by ours. Raises InputError for the first that is missing."""
    names = {ours: name for name in header for ours, spelled in _SPELLED.items() if spelled.fullmatch(name.strip())}
    missing = next((ours for ours in _SPELLED if ours not in (*names, "gpu", "dtype")), None)
    if missing is not None:
        raise InputError(_WHO, f"{file} has no column {missing}: {', '.join(header)[:80]}", _EXAMPLE)
    return names


def _letter(row: CsvRow, column: str) -> str:
    """Returns t for an operand that is transposed, else n."""
    letter = _TRANSPOSED.get(row.text(column).lower())
    if letter is None:
        raise row.error(column, "t or n")
    return letter


def _rows(path: Path) -> Iterator[CsvRow]:
    """Yields the rows of a printed table or of a CSV file."""
    try:
        with open_text(path, encoding="utf-8-sig") as stream:
            lines = stream.read().splitlines()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise StoreError(_WHO, f"{path} ({reason(error)})", "a text or CSV file in UTF-8") from None
    start = next((number for number, line in enumerate(lines) if _PRINTED.match(line)), None)
    if start is None:
        yield from CsvFile(_WHO, path).rows()
        return
    unit = _PRINTED.match(lines[start])
    assert unit is not None
    names = ("m", "n", "k", "a_t", "b_t", "precision", f"time_{unit['unit']}s")
    for number, line in enumerate(lines[start + 1 :], start=start + 2):
        cells = line.split()
        if len(cells) >= len(names) and cells[0].isdigit():
            time = "" if cells[6] == "Not" else cells[6]  # Not Supported
            yield CsvRow(_WHO, path.name, number, dict(zip(names, (*cells[:6], time), strict=True)))


def origin_of(path: Path, spec: DeviceSpec, *, run_id: str | None = None) -> Origin:
    """Describes the origin of a table and how it was timed."""
    caveats = ("imported: the mean of 400 calls in a row, C added to; spread, clock and cache state not recorded",)
    note = "a time is the mean of 400 calls of cublasGemmEx in a row by the host's clock; C is read too (beta = 1)"
    what, software = f"DeepBench, {spec.name}, ", {"cublas": "not stated"}
    return file_origin(path, "deepbench", spec.name, run_id, what, software=software, caveats=caveats, notes=(note,))
