"""Reads the measured GEMM tables that the shipped models were fitted to.

Entry points: `read_packaged` (aiconfigurator-core, extra `tables`), `read_published` (files of NeuSight, DeepBench and
aiter), `read_softmax` (NeuSight). Used by `formats`, `gemm`, `published`, `cliff_calibration`, `page`, tools/shelf.py,
tools/ship_gemm.py and tools/ship_softmax.py.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.files import read_bytes
from quantbench.importers import aiter, deepbench, neusight
from quantbench.importers.aiconfigurator import find_tables
from quantbench.latency.libraries import default_library, libraries_of, slug_of, system_of
from quantbench.latency.tables import GemmTable, read_columns, read_table
from quantbench.launch import Launch
from quantbench.workload import Gemm, Softmax

#: devices whose default tables the shipped models were fitted to and docs/accuracy.md evaluates. No other bf16 table
#: influenced a design choice, so the others are unseen test data.
SHIPPED_GPUS = ("a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s-48gb")
# Spelling in tables → the framework's own.
_SPELLED = {"VLLM": "vLLM"}


@dataclass(frozen=True, kw_only=True)
class PackagedTable(GemmTable):
    """Table with its origin. file: path below the package's data folder. sha256: digest of the file. device: GPU name
    in the table."""

    file: str
    sha256: str
    package: str
    system: str
    framework: str
    version: str
    device: str


def read_packaged(system: str, *, dtype: str = "bf16", library: str = "") -> PackagedTable:
    """Reads the newest table of a system (aiconfigurator's name or device slug) and library ("": `default_library`).

    Raises UnsupportedError without the package, InputError for a system, library or dtype without a table.
    """
    slug = slug_of(system_of(system)) or system
    library = library or (default_library(slug, dtype) if libraries_of(slug, dtype) else "")
    (found,), _ = find_tables(system, backend=library or None, kinds=["gemm"])
    table = read_table(found.path, slug, dtype=dtype, library=found.backend)
    columns = read_columns(found.path, dtype)

    def text(name: str) -> str:
        names = sorted(set(columns[name].astype(str)))
        return ", ".join(_SPELLED.get(name, name) for name in names)

    return PackagedTable(
        **vars(table), file=found.shown, sha256=hashlib.sha256(read_bytes(found.path)).hexdigest(),
        package=found.package, system=found.system, framework=text("framework"), version=text("version"),
        device=text("device"),
    )  # fmt: skip


#: folder of the published files, beside the checkout
DATA = Path(__file__).parents[3] / "shared" / "data"
_NEUSIGHT, _DEEPBENCH, _AITER = "neusight_fp32.parquet", "deepbench_v100.csv", "amd_tuned_gemms.parquet"
#: (device, dtype) → file of its table
PUBLISHED = {
    ("v100-pcie-32gb", "fp32"): _NEUSIGHT,
    ("t4-16gb", "fp32"): _NEUSIGHT,
    ("p100-pcie-16gb", "fp32"): _NEUSIGHT,
    ("a100-pcie-40gb", "fp32"): _NEUSIGHT,
    ("v100-sxm2-16gb", "fp16"): _DEEPBENCH,
    ("v100-sxm2-16gb", "fp32"): _DEEPBENCH,
    ("mi300x-192gb", "fp8_block"): _AITER,
    ("mi355x-288gb", "fp8_block"): _AITER,
}
#: importer of each file
IMPORTERS: dict[str, Any] = {_NEUSIGHT: neusight, _DEEPBENCH: deepbench, _AITER: aiter}
#: what ran each file's products, for `GemmModel.provenance`, and its source
RAN = {
    _NEUSIGHT: ("PyTorch", "2.1", "sitar-lab/NeuSight, MIT"),
    _DEEPBENCH: ("cuBLAS", "10.1", "baidu-research/DeepBench, Apache-2.0"),
    _AITER: ("aiter", "(best of a search)", "ROCm/aiter, MIT"),
}
# Shorter times of NeuSight's hold more of the launch from Python than of the kernel.
_LEAST_US = {_NEUSIGHT: 100.0}


@dataclass(frozen=True)
class PublishedTable:
    """Measured products of one GPU and dtype, sorted by (m, n, k, batch). provenance: as stored in a model."""

    gpu: str
    dtype: str
    m: npt.NDArray[np.int64]
    n: npt.NDArray[np.int64]
    k: npt.NDArray[np.int64]
    batch: npt.NDArray[np.int64]
    layout: npt.NDArray[np.str_]
    latency_us: npt.NDArray[np.float64]
    launches: tuple[Launch | None, ...]
    provenance: dict[str, Any]

    def __len__(self) -> int:
        return len(self.m)

    def take(self, rows: npt.NDArray[np.intp]) -> dict[str, Any]:
        """Returns these rows as the arguments that `GemmModel.fit` and `.predict` share."""
        return {
            "m": self.m[rows], "n": self.n[rows], "k": self.k[rows], "batch": self.batch[rows],
            "layout": self.layout[rows].tolist(),
        }  # fmt: skip

    def where(self, kept: npt.NDArray[np.bool_]) -> PublishedTable:
        """Returns the table of the rows where `kept`, (rows,), is true."""
        arrays = {name: getattr(self, name)[kept] for name in ("m", "n", "k", "batch", "layout", "latency_us")}
        launches = tuple(self.launches[i] for i in np.flatnonzero(kept))
        return replace(self, launches=launches, **arrays)


def read_published(gpu: str, dtype: str, folder: Path = DATA) -> PublishedTable:
    """Reads the table of a pair in PUBLISHED. A shape measured twice in one layout keeps its shorter time."""
    name, spec = PUBLISHED[gpu, dtype], lookup(gpu)
    path = folder / name
    best: dict[tuple[int, int, int, int, str], tuple[float, Launch | None]] = {}
    for row in IMPORTERS[name].read_rows(path, spec).rows:
        work = row.workload
        if isinstance(work, Gemm) and work.dtype == dtype and row.has_time and row.latency_us > _LEAST_US.get(name, 0):
            key = (work.m, work.n, work.k, work.batch, work.layout)
            if key not in best or row.latency_us < best[key][0]:
                best[key] = (row.latency_us, row.launch)
    keys = sorted(best)
    m, n, k, batch = (np.array([key[i] for key in keys], dtype=np.int64) for i in range(4))
    return PublishedTable(
        gpu, dtype, m, n, k, batch, np.array([key[4] for key in keys]), np.array([best[key][0] for key in keys]),
        tuple(best[key][1] for key in keys), _provenance(path, gpu),
    )  # fmt: skip


def _provenance(path: Path, gpu: str) -> dict[str, Any]:
    framework, version, source = RAN[path.name]
    return {
        "table": path.name, "sha256": hashlib.sha256(read_bytes(path)).hexdigest(), "package": source,
        "framework": framework, "framework_version": version, "measured_on": gpu,
    }  # fmt: skip


#: GPUs whose softmax was measured
SOFTMAX_GPUS = tuple(gpu for (gpu, _), file in PUBLISHED.items() if file == _NEUSIGHT)


@dataclass(frozen=True)
class SoftmaxTable:
    """Measured shapes of PyTorch's softmax on one GPU, fp32, and their times. provenance: as stored in a model."""

    works: tuple[Softmax, ...]
    latency_us: npt.NDArray[np.float64]
    provenance: dict[str, Any]

    def __len__(self) -> int:
        return len(self.works)

    def take(self, rows: npt.NDArray[np.intp]) -> SoftmaxTable:
        """Returns the table of these rows."""
        return replace(self, works=tuple(self.works[i] for i in rows), latency_us=self.latency_us[rows])


def read_softmax(gpu: str, folder: Path = DATA) -> SoftmaxTable:
    """Reads a GPU of SOFTMAX_GPUS."""
    path = folder / _NEUSIGHT
    rows = [
        (row.workload, row.latency_us)
        for row in neusight.read_rows(path, lookup(gpu)).rows
        if isinstance(row.workload, Softmax) and row.has_time
    ]
    works, latency_us = zip(*rows, strict=True)
    return SoftmaxTable(works, np.array(latency_us), _provenance(path, gpu))
