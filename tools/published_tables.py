"""Reads the published tables of NeuSight, DeepBench and aiter, to which shipped models are fitted.

The files are not in the repository. They are expected beside the checkout (`DATA`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.importers.parquet import read_parquet
from quantbench.importers.runs import Origin, Row, Rows, digest, file_origin
from quantbench.latency.libraries import default_library
from quantbench.latency.softmax import SoftmaxModel
from quantbench.launch import Launch
from quantbench.providers import kernel_names
from quantbench.providers.identity import KernelEvent, launch_of
from quantbench.store.record import GridPosition
from quantbench.workload import Gemm, Softmax
from tools.accuracy.scoring import IntArray
from tools.accuracy.tables import GemmTable, WorkTable

#: folder of the published files
DATA = Path(__file__).parents[2] / "shared" / "data"

Cells = Mapping[str, Any]


def read_neusight(rows: Iterable[Cells], spec: DeviceSpec) -> Iterator[Row]:
    """Yields NeuSight's rows: GEMMs and softmax of PyTorch in fp32.

    The op `linear` is torch.nn.Linear with bias, `bmm` is torch.bmm. A time is the mean of the
    fastest 5 of 25 calls between CUDA events on an idle GPU, and includes the launch.
    Source: https://github.com/sitar-lab/NeuSight, neusight/Dataset/collect.py.
    """
    for row in rows:
        op = row["op"]
        work: Gemm | Softmax
        sizes = ["m", "n", "k", "batch"]
        if op == "softmax":
            work = Softmax(1, row["rows"], row["cols"], dtype="fp32", mask="none")
            sizes = ["batch", "rows", "cols"]
        elif op == "linear":
            work = Gemm(row["batch"] * row["m"], row["n"], row["k"], dtype="fp32", layout="nt")
        else:
            work = Gemm(row["m"], row["n"], row["k"], batch=row["batch"], dtype="fp32")
        launch = _neusight_launch(row, work, spec)
        place = _place(work, op, *sizes)
        yield Row(work, row["latency_ms"] * 1e3, "torch", place, launch=launch)


def _neusight_launch(row: Cells, work: Gemm | Softmax, spec: DeviceSpec) -> Launch | None:
    if not row["kernel"]:
        return None
    grid = (row["grid_x"], row["grid_y"], row["grid_z"])
    launch = Launch(row["kernel"], grid, (row["block_x"], row["block_y"], 1))
    events = [KernelEvent(launch, 1.0)]
    if "splitkreduce" in row["kernels"].lower():
        events.append(KernelEvent(Launch("splitKreduce_kernel"), 0.0))
    return launch_of(events, work, spec)


def read_deepbench(rows: Iterable[Cells], spec: DeviceSpec) -> Iterator[Row]:
    """Yields DeepBench's rows: GEMMs of cuBLAS.

    A time is the mean of 400 calls in a row by the host's clock. Each call adds its product to C.

    cuBLAS is column-major. DeepBench's C = op(A)·op(B) is the row-major Cᵀ = op(B)ᵀ·op(A)ᵀ, so that
    its N is our m and its M is our n.
    Source: https://github.com/baidu-research/DeepBench, code/nvidia/gemm_bench.cu.
    """
    for row in rows:
        layout = (row["b_transposed"] + row["a_transposed"]).lower()
        work = Gemm(int(row["N"]), int(row["M"]), int(row["K"]), dtype=row["dtype"], layout=layout)
        yield Row(work, float(row["time_ms"]) * 1e3, "cublas", _place(work, "gemm", "m", "n", "k"))


# Texts in aiter's tables that replace a kernel's name where another library chose the kernel.
_NOT_KERNELS = {"", "native", "auto", "triton", "sol2", "nan"}


def read_aiter(rows: Iterable[Cells], spec: DeviceSpec) -> Iterator[Row]:
    """Yields aiter's rows: tuned GEMMs y = x·Wᵀ.

    A time is the best of a search over the kernels of several libraries. mxfp4 GEMMs whose kernel's
    name says fp8 are left out.
    Source: https://github.com/ROCm/aiter, aiter/configs.
    """
    for row in rows:
        kernel = row["kernel"]
        if row["dtype"] == "mxfp4" and re.search(r"a8w8|_F8_F8_", kernel):
            continue
        work = Gemm(row["m"], row["n"], row["k"], dtype=row["dtype"], layout="nt")
        launch = None if kernel in _NOT_KERNELS else _aiter_launch(kernel, row["split_k"])
        place = _place(work, "gemm", "m", "n", "k")
        yield Row(work, row["latency_us"], "aiter", place, launch=launch)


def _aiter_launch(kernel: str, split: int) -> Launch:
    """Returns the launch of a kernel, with its tile if the name states one.

    split: the column split_k. Kernels of assembly, FlyDSL and opus give the number of parts there.
        Composable Kernel gives its base-2 logarithm (KBatch = pow(2, splitK) in csrc).
    """
    name = kernel_names.parse(kernel)
    if name.tile is None:
        return Launch(kernel)
    parts = split if name.family == "aiter" else 2**split
    return Launch(kernel, tile=replace(name.tile, split_k=max(1, parts)))


def _place(work: Gemm | Softmax, op: str, *sizes: str) -> GridPosition:
    return GridPosition({size: getattr(work, size) for size in sizes}, op)


@dataclass(frozen=True)
class Published:
    """Published file of one project.

    name: name of the project.
    library: provider of the rows.
    file: name of the file in DATA.
    read: function from the cells of the rows and the GPU to the rows.
    framework, version: software that ran the GEMMs.
    source: repository and license.
    caveat: how a time was measured, and what is not recorded.
    mode: timing mode of the rows.
    least_us: `read_published` leaves out GEMMs that take no longer than this, microseconds.
    """

    name: str
    library: str
    file: str
    read: Callable[[Iterable[Cells], DeviceSpec], Iterator[Row]]
    framework: str
    version: str
    source: str
    caveat: str
    mode: str = "unknown"
    least_us: float = 0.0

    @property
    def path(self) -> Path:
        return DATA / self.file

    def rows(self, gpu: str) -> Rows:
        """Reads the rows of one GPU.

        gpu: slug of the GPU.
        """
        spec = lookup(gpu)
        if self.path.suffix == ".parquet":
            cells = read_parquet(self.name, self.path).to_pylist()
        else:
            with self.path.open(encoding="utf-8") as stream:
                cells = list(csv.DictReader(stream))
        is_own = cache(lambda name: lookup(name) == spec)
        return Rows(list(self.read((row for row in cells if is_own(row["gpu"])), spec)))

    def origin(self, gpu: str) -> Origin:
        """Returns the origin that a run of one GPU's rows states."""
        return file_origin(
            self.path,
            self.name.lower(),
            gpu,
            None,
            f"{self.name}, {gpu}, ",
            mode=self.mode,
            software={self.library: "not stated"},
            caveats=(f"imported: {self.caveat}",),
        )

    def provenance(self, gpu: str) -> dict[str, Any]:
        """Returns the origin of one GPU's rows as a model stores it."""
        return {
            "table": self.file,
            "sha256": digest(self.path),
            "package": self.source,
            "framework": self.framework,
            "framework_version": self.version,
            "measured_on": gpu,
        }


NEUSIGHT = Published(
    name="NeuSight",
    library="torch",
    file="neusight_fp32.parquet",
    read=read_neusight,
    framework="PyTorch",
    version="2.1",
    source="sitar-lab/NeuSight, MIT",
    caveat="the mean of the fastest 5 of 25 calls with the launch from Python; clock not recorded",
    mode="events",
    least_us=100.0,  # most of a shorter time is the launch from Python
)
DEEPBENCH = Published(
    name="DeepBench",
    library="cublas",
    file="deepbench_v100.csv",
    read=read_deepbench,
    framework="cuBLAS",
    version="10.1",
    source="baidu-research/DeepBench, Apache-2.0",
    caveat="the mean of 400 calls in a row, C added to; spread, clock and cache state not recorded",
)
AITER = Published(
    name="aiter",
    library="aiter",
    file="amd_tuned_gemms.parquet",
    read=read_aiter,
    framework="aiter",
    version="(best of a search)",
    source="ROCm/aiter, MIT",
    caveat="the best time of a search over kernels; spread, clock and cache state not recorded",
)
#: (slug of the GPU, dtype) → the table that has its GEMMs
PUBLISHED = {
    ("v100-pcie-32gb", "fp32"): NEUSIGHT,
    ("t4-16gb", "fp32"): NEUSIGHT,
    ("p100-pcie-16gb", "fp32"): NEUSIGHT,
    ("a100-pcie-40gb", "fp32"): NEUSIGHT,
    ("v100-sxm2-16gb", "fp16"): DEEPBENCH,
    ("v100-sxm2-16gb", "fp32"): DEEPBENCH,
    ("mi300x-192gb", "fp8_block"): AITER,
    ("mi355x-288gb", "fp8_block"): AITER,
}
#: slugs of the GPUs whose softmax was measured
SOFTMAX_GPUS = tuple(gpu for (gpu, _), table in PUBLISHED.items() if table is NEUSIGHT)


_KEYS = ("m", "n", "k", "batch", "layout")


def read_published(gpu: str, dtype: str) -> GemmTable:
    """Reads the published GEMMs of a GPU and dtype in PUBLISHED, sorted by size.

    A shape measured repeatedly in one layout has its shortest time.
    """
    table = PUBLISHED[gpu, dtype]
    best: dict[tuple[Any, ...], float] = {}
    for row in table.rows(gpu).rows:
        work = row.workload
        if not isinstance(work, Gemm) or work.dtype != dtype:
            continue
        if row.has_time and row.latency_us > table.least_us:
            key = attrgetter(*_KEYS)(work)
            best[key] = min(row.latency_us, best.get(key, inf))
    keys, times_us = zip(*sorted(best.items()), strict=True)
    columns = map(np.array, zip(*keys, strict=True))
    sizes = dict(zip(_KEYS, columns, strict=True))
    latency_us = np.array(times_us)
    library = default_library(gpu, dtype)
    return GemmTable(gpu, dtype, sizes, latency_us, library, table.provenance(gpu))


@dataclass(frozen=True)
class SoftmaxTable(WorkTable):
    """Measured times of PyTorch's fp32 softmax on one GPU."""

    @property
    def groups(self) -> IntArray:
        """Index of each row's group, (rows,). Every row is a group of its own."""
        return np.arange(len(self))

    def fit(self, prior: Any = None, seed: int = 0) -> SoftmaxModel:
        """Fits a model to all rows.

        The model has only one prior and its fit is deterministic, so that both arguments are
        ignored.
        """
        return SoftmaxModel.fit(lookup(self.gpu), self.works, self.latency_us, library="torch")

    def prior(self) -> SoftmaxModel:
        """Returns the unfitted model."""
        return SoftmaxModel.prior(lookup(self.gpu), library="torch")


def read_softmax(gpu: str) -> SoftmaxTable:
    """Reads the times of PyTorch's fp32 softmax on a GPU in SOFTMAX_GPUS."""
    rows = NEUSIGHT.rows(gpu).rows
    timed = [row for row in rows if isinstance(row.workload, Softmax) and row.has_time]
    works = [row.workload for row in timed]
    times_us = np.array([row.latency_us for row in timed])
    return SoftmaxTable(gpu, "torch", works, times_us, NEUSIGHT.provenance(gpu))
