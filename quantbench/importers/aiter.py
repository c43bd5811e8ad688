"""Reads tables of tuned products of ROCm's aiter: its *_tuned_gemm.csv files, or a Parquet table of them.

Entry points: `read_rows`, `origin_of`. Used by the command `import`.

Source: https://github.com/ROCm/aiter, aiter/configs and csrc/*/README.md. Each row is the winner of a search over
kernels of several libraries, so its time is the best that they have, not what one of them chooses. splitK is the number
of parts in the rows of assembly, FlyDSL and opus, and its base-2 logarithm in those of Composable Kernel (KBatch =
pow(2, splitK) in csrc). y = x·Wᵀ: layout nt.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.importers.csv_table import CsvFile, CsvRow
from quantbench.importers.runs import Origin, Row, Rows, dtype_name, file_origin, rows_of_gpu
from quantbench.launch import Launch
from quantbench.providers import kernel_names
from quantbench.store.record import Place
from quantbench.workload import Gemm
from quantbench.workload.dtypes import GEMM_DTYPES

_WHO = "import aiter"
# Formats by a file's name, without a model's name before it. a8w8 was int8 before it had a column for its format.
_BY_NAME = {"a8w8_blockscale": "fp8_block", "a4w4_blockscale": "mxfp4", "a8w8": "int8", "bf16": "bf16"}
_BY_COLUMN = {"float8_e4m3fnuz": "fp8", "float8_e4m3fn": "fp8", "int8": "int8"}
# What aiter writes for a kernel that another library chose.
_NOT_KERNELS = {"", "native", "auto", "triton", "sol2", "nan"}


def read_rows(path: Path, spec: DeviceSpec, *, dtype: str | None = None) -> Rows:
    """Reads the rows of one GPU. dtype: that of all rows, unless columns or the file's name state it.

    A table names GPUs by LLVM target and compute units. Raises InputError if it has none of this GPU, or wrong columns.
    """
    file = CsvFile(_WHO, path)
    names = file.spelled(
        units=("cu_num", "compute_units"), m=("M", "m"), n=("N", "n"), k=("K", "k"), time=("us", "latency_us"),
        kernel=("kernelName", "kernel"), split=("splitK", "split_k"),
    )  # fmt: skip

    def gpu_of(row: CsvRow) -> str:
        gfx = row.text("gfx") if "gfx" in file.columns else spec.architecture
        return f"a {gfx} with {row.integer(names['units'])} compute units"

    found, here = Rows(), f"a {spec.architecture} with {spec.sm_count} compute units"
    for row in rows_of_gpu(_WHO, path, file.rows(), gpu_of, here, found):
        form = _dtype(file, row, dtype)
        kernel = row.text(names["kernel"])
        if form == "mxfp4" and re.search(r"a8w8|_F8_F8_", kernel):
            found.left_out["mxfp4 products whose kernel's name says fp8"] += 1
            continue
        work = row.made(Gemm, *(row.integer(names[size]) for size in "mnk"), dtype=form, layout="nt")
        launch = None if kernel in _NOT_KERNELS else _launch_of(kernel, row.integer(names["split"]))
        place = Place({"m": work.m, "n": work.n, "k": work.k}, "gemm")
        where = f"line {row.line}"
        found.rows.append(Row(work, row.number(names["time"]), "aiter", place, where=where, launch=launch))
    return found


def _dtype(file: CsvFile, row: CsvRow, given: str | None) -> str:
    stated = given
    for column in ("q_dtype_w", "dtype"):
        if stated is None and column in file.columns:
            stated = row.text(column).removeprefix("torch.")
    if stated is None:
        stem = re.sub(r"^(?!a\dw\d|bf16)[a-z0-9]+_", "", file.path.name)
        stated = next((form for name, form in _BY_NAME.items() if stem.startswith(name)), "")
    form = dtype_name(_BY_COLUMN.get(stated, stated))
    if form not in GEMM_DTYPES:
        what = f"{file.path.name}, line {row.line}: dtype {form!r}"
        raise InputError(_WHO, what, "--dtype " + ", ".join(GEMM_DTYPES))
    return form


def _launch_of(kernel: str, split: int) -> Launch:
    name = kernel_names.parse(kernel)
    if name.tile is None:
        return Launch(kernel)
    parts = split if name.family == "aiter" else 2**split
    return Launch(kernel, tile=replace(name.tile, split_k=max(1, parts)))


def origin_of(path: Path, spec: DeviceSpec, *, run_id: str | None = None) -> Origin:
    note = "a time is the best of a search over the kernels of several libraries, not the choice of one of them"
    caveats = ("imported: the best time of a search over kernels; spread, clock and cache state not recorded",)
    what = f"aiter, best of a search, {spec.name}, "
    software = {"aiter": "not stated"}
    return file_origin(path, "aiter", spec.name, run_id, what, software=software, caveats=caveats, notes=(note,))
