"""Measured GEMM tables: those inside the package `aiconfigurator-core` (extra `tables`), or a file of the same columns.

The package carries, below `systems/data/<system>/gemm/<backend>/<version>/gemm_perf.parquet`, one row per measured
shape: `gemm_dtype`, `m`, `n`, `k` and `latency` in milliseconds. A file given by path may be Parquet or CSV.

>>> table = read_table("a100_sxm")                                          # doctest: +SKIP
>>> table.provenance.framework, table.provenance.version, len(table)        # doctest: +SKIP
('SGLang', '0.5.10', 35742)
"""

import csv
import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, StoreError, UnsupportedError, require_choice
from quantbench.files import open_text, read_bytes, reason
from quantbench.workload.dtypes import GEMM_DTYPES

#: a table of measured times may have so many rows
MOST_ROWS = 5_000_000

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: device slug → name of the system in aiconfigurator-core; not every system has a table of products
SYSTEMS: dict[str, str] = {
    "a100-pcie-80gb": "a100_pcie",
    "a100-sxm4-80gb": "a100_sxm",
    "a30-24gb": "a30",
    "b200-sxm-180gb": "b200_sxm",
    "b300-sxm-270gb": "b300_sxm",
    "gb200-186gb": "gb200",
    "gb300-279gb": "gb300",
    "h100-pcie-80gb": "h100_pcie",
    "h100-sxm5-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "l4-24gb": "l4",
    "l40s-48gb": "l40s",
    "rtx-pro-6000-server-96gb": "rtx_pro_6000_server",
}
#: which of a system's tables is read when none is named: (backend, version)
DEFAULT_TABLES: dict[str, tuple[str, str]] = {
    "a100_sxm": ("sglang", "0.5.10"),
    "b200_sxm": ("vllm", "0.24.0"),
    "b300_sxm": ("vllm", "0.24.0"),
    "gb200": ("vllm", "0.24.0"),
    "gb300": ("vllm", "0.24.0"),
    "h100_sxm": ("vllm", "0.24.0"),
    "h200_sxm": ("vllm", "0.24.0"),
    "l40s": ("vllm", "0.24.0"),
    "rtx_pro_6000_server": ("vllm", "0.24.0"),
}
#: device slugs whose default tables the shipped models learned from and docs/accuracy.md judges; the others are no part
#: of anything that was chosen here, so that whoever judges a model on them judges it on what is new to it
SHIPPED_GPUS = ("a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s-48gb")
#: our name of a number format → the table's
_GEMM_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NEEDED = ("m", "n", "k", "latency")
# What tables write otherwise than the frameworks write themselves.
_SPELLED = {"VLLM": "vLLM"}


@dataclass(frozen=True)
class TableProvenance:
    """Where a table comes from. file: below the package's data folder, or the file's name. sha256: of the file.

    dropped_rows: rows of the dtype that were no measurement (a latency that is not a finite number above 0);
    merged_rows: rows that repeat a shape (the median of the repeats is kept).
    """

    file: str
    sha256: str
    package: str
    system: str
    framework: str
    version: str
    device: str
    kernel_source: tuple[str, ...]
    dropped_rows: int
    merged_rows: int


@dataclass(frozen=True)
class GemmTable:
    """Measured products m×k times k×n of one number format on one GPU, sorted by (m, n, k), each shape once.

    m, n, k: (rows,) int64. latency_us: (rows,) float64, microseconds.
    """

    m: IntArray
    n: IntArray
    k: IntArray
    latency_us: FloatArray
    dtype: str
    provenance: TableProvenance

    def __len__(self) -> int:
        return len(self.m)


def system_of(name: str) -> str:
    """aiconfigurator's name of a system, given that or a device slug.

    >>> system_of("a100-sxm4-80gb"), system_of("gb200")
    ('a100_sxm', 'gb200')
    """
    return SYSTEMS.get(name, name)


def slug_of(system: str) -> str | None:
    """The device slug of a system; None for one that we have no name for."""
    return next((slug for slug, name in SYSTEMS.items() if name == system), None)


def packaged_file(system: str, backend: str | None = None, version: str | None = None) -> Path:
    """The Parquet file of `system` (a name of aiconfigurator's, or a device slug) inside the installed package.

    Raises UnsupportedError without the package, InputError for a table that it does not have.
    """
    root = _package_root() / "systems" / "data"
    system = system_of(system)
    default_backend, default_version = DEFAULT_TABLES.get(system, (None, None))
    if backend is None and version is None:
        backend, version = default_backend, default_version
    known = sorted(root.glob(f"{system}/gemm/*/*/gemm_perf.parquet"))
    if not known:
        systems = ", ".join(sorted({p.parts[-5] for p in root.glob("*/gemm/*/*/gemm_perf.parquet")}))
        raise InputError("read_table", f"system = {system!r}", f"one of {systems}")
    matching = [p for p in known if backend in (None, p.parts[-3]) and version in (None, p.parts[-2])]
    if (backend is None and version is None) or len(matching) != 1:
        have = ", ".join(f"{p.parts[-3]} {p.parts[-2]}" for p in known)
        raise InputError("read_table", f"backend = {backend!r}, version = {version!r} for {system}", f"one of {have}")
    return matching[0]


def read_table(
    system: str,
    *,
    backend: str | None = None,
    version: str | None = None,
    path: str | Path | None = None,
    dtype: str = "bf16",
) -> GemmTable:
    """The measured rows of `dtype` on `system`.

    system: aiconfigurator's name (`a100_sxm`) or a device slug (`a100-sxm4-80gb`). backend, version: which table of
    that system; DEFAULT_TABLES otherwise. path: a Parquet or CSV file with the columns m, n, k, latency (ms) and,
    if it holds several formats, gemm_dtype; then `system` only names where it was measured.

    Raises InputError for an unknown system, table, dtype or column, StoreError for a file that cannot be read,
    UnsupportedError when the package is needed and not installed.
    """
    require_choice("read_table", "dtype", dtype, GEMM_DTYPES)
    if path is None:
        file = packaged_file(system, backend, version)
        shown = "/".join(file.parts[-5:])
        package = f"aiconfigurator-core {_package_version()}"
    else:
        file = Path(path)
        shown, package = file.name, ""
    columns = _csv_columns(file) if file.suffix == ".csv" else _parquet_columns(file)
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise InputError("read_table", f"{file.name} has no column {missing[0]!r}", "columns " + ", ".join(_NEEDED))

    rows = np.ones(len(columns["m"]), dtype=bool)
    if "gemm_dtype" in columns:
        names = columns["gemm_dtype"].astype(str)
        rows = (names == _GEMM_DTYPE.get(dtype, dtype)) | (names == dtype)
        if not rows.any():
            raise InputError("read_table", f"no row of dtype {dtype!r}", "one of " + ", ".join(sorted(set(names))))
    shape = np.stack([columns[name][rows].astype(np.int64) for name in ("m", "n", "k")])
    latency_us = columns["latency"][rows].astype(np.float64) * 1e3
    kept = np.isfinite(latency_us) & (latency_us > 0) & (shape >= 1).all(axis=0)
    if not kept.any():
        raise InputError("read_table", f"{file.name} holds no measured row", "latencies above 0 ms")
    merged, merged_us = _merge(shape[:, kept], latency_us[kept])

    def text(name: str) -> tuple[str, ...]:
        return tuple(sorted(set(columns[name][rows].astype(str)))) if name in columns else ()

    provenance = TableProvenance(
        file=shown,
        sha256=hashlib.sha256(read_bytes(file)).hexdigest(),
        package=package,
        system=system_of(system),
        framework=", ".join(_SPELLED.get(name, name) for name in text("framework")),
        version=", ".join(text("version")),
        device=", ".join(text("device")),
        kernel_source=text("kernel_source"),
        dropped_rows=int((~kept).sum()),
        merged_rows=int(kept.sum()) - merged.shape[1],
    )
    return GemmTable(merged[0], merged[1], merged[2], merged_us, dtype, provenance)


def _merge(shape: IntArray, latency_us: FloatArray) -> tuple[IntArray, FloatArray]:
    """Sorted unique shapes (3, rows) and the median latency of each."""
    unique, inverse, counts = np.unique(shape, axis=1, return_inverse=True, return_counts=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    if (counts == 1).all():
        return unique, latency_us[order]
    groups = np.split(latency_us[order], np.cumsum(counts)[:-1])
    return unique, np.array([float(np.median(group)) for group in groups])


def _package_root() -> Path:
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedError(
            "read_table", "the package aiconfigurator-core is not installed", "pip install 'quantbench[tables]'"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _package_version() -> str:
    from importlib.metadata import version

    return version("aiconfigurator-core")


def read_parquet(operation: str, file: Path) -> Any:
    """A Parquet file as a pyarrow Table of at most MOST_ROWS rows. Raises StoreError in the name of `operation`."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnsupportedError(operation, "pyarrow is not installed", "pip install 'quantbench[tables]'") from error
    try:
        found = pq.ParquetFile(pa.BufferReader(read_bytes(file)))
        if found.metadata.num_rows <= MOST_ROWS:
            return found.read()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(operation, f"{file} ({reason(error)})", "a Parquet file") from None
    raise StoreError(operation, f"{file} has {found.metadata.num_rows:,} rows", f"at most {MOST_ROWS:,}")


def _parquet_columns(file: Path) -> dict[str, npt.NDArray[Any]]:
    table = read_parquet("read_table", file)
    return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}


def _csv_columns(file: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with open_text(file) as stream:
            reader = csv.DictReader(stream)
            rows = list(reader)
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StoreError("read_table", f"{file} ({reason(error)})", "a CSV file in UTF-8") from None
    columns: dict[str, npt.NDArray[Any]] = {name: np.array([row[name] for row in rows]) for name in names}
    for name in _NEEDED:
        if name in columns:
            try:
                columns[name] = columns[name].astype(np.float64)
            except ValueError as error:
                raise InputError("read_table", f"{file.name}, column {name}: {error}", "numbers") from error
    return columns
