"""Reads measured tables, to which latency models are fitted and on which they are tested.

`read_packaged` reads the GEMM tables of aiconfigurator-core (extra `tables`). `GemmTable` and
`WorkTable` hold measured rows from any source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.importers.aiconfigurator import find_tables
from quantbench.importers.parquet import read_parquet
from quantbench.importers.runs import digest, dtype_name
from quantbench.latency.estimate import Estimates
from quantbench.latency.gemm.cost_model import Machine
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import Effort
from quantbench.latency.libraries import default_library, libraries_of, slug_of, system_of
from tools.accuracy.scoring import BoolArray, FloatArray, IntArray

#: GPUs whose default tables shipped models are fitted to and docs/accuracy.md evaluates. No other
#: bf16 table influenced a design choice, so the other tables are unseen test data.
SHIPPED_GPUS = ("a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s-48gb")
# Spelling of a framework's name in the tables → its own spelling.
_SPELLED = {"VLLM": "vLLM"}


@dataclass(frozen=True)
class GemmTable:
    """Measured GEMMs of one dtype on one GPU; each shape has one row.

    gpu: slug of the GPU.
    sizes: m, n and k of each row, and batch and layout if they vary; (rows,) each.
    latency_us: (rows,) measured times.
    library: library whose kernels ran (`libraries.LIBRARIES`).
    provenance: origin of the rows, as a model stores it.
    """

    gpu: str
    dtype: str
    sizes: Mapping[str, Any]
    latency_us: FloatArray
    library: str = "torch"
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.latency_us)

    @property
    def shapes(self) -> tuple[IntArray, IntArray, IntArray]:
        """m, n and k of the rows, (rows,) each."""
        return self.sizes["m"], self.sizes["n"], self.sizes["k"]

    def take(self, rows: IntArray | BoolArray) -> GemmTable:
        """Returns a table of some of the rows.

        rows: indices, or a mask over all rows.
        """
        sizes = {name: column[rows] for name, column in self.sizes.items()}
        return replace(self, sizes=sizes, latency_us=self.latency_us[rows])

    @property
    def groups(self) -> IntArray:
        """Index of each row's group, (rows,). Rows with equal n and k form a group."""
        return group_index(self.shapes[1:])

    def fit(self, prior: Any, seed: int = 0, effort: Effort | None = None) -> GemmModel:
        """Fits a model to all rows. The arguments are those of `GemmModel.fit`."""
        return GemmModel.fit(
            self.gpu,
            **self.sizes,
            latency_us=self.latency_us,
            dtype=self.dtype,
            library=self.library,
            prior=prior,
            seed=seed,
            effort=effort,
        )

    def prior(self) -> GemmModel:
        """Returns the unfitted model, which knows other GPU generations only."""
        return GemmModel.prior(self.gpu, dtype=self.dtype, family_out=True)

    def ask(self, model: GemmModel) -> Estimates:
        """Returns a model's predictions for all rows."""
        return model.predict(**self.sizes)

    def ideal_us(self) -> Any:
        """Returns the roofline times, (rows,), microseconds.

        A time is the larger of FLOPs over peak rate and bytes over bandwidth, from the spec sheet.
        """
        machine = Machine.of(lookup(self.gpu), self.dtype)
        m, n, k = np.stack(self.shapes).astype(float)
        read = machine.element_bytes * (m + n) * k
        memory_us = (read + machine.output_bytes * m * n) / machine.bytes_per_us
        return np.maximum(2.0 * m * n * k / machine.flop_per_us, memory_us)

    def logs(self) -> Any:
        """Returns log m, log n and log k of each row, (rows, 3), from which baselines learn."""
        return np.log(np.column_stack(self.shapes).astype(float))


@dataclass(frozen=True)
class WorkTable:
    """Measured workloads of one kind on one GPU; each workload has one row.

    gpu: slug of the GPU.
    library: library whose kernels ran (`libraries.LIBRARIES`).
    works: (rows,) workloads.
    latency_us: (rows,) measured times.
    provenance: origin of the rows, as a model stores it.
    """

    gpu: str
    library: str
    works: Sequence[Any]
    latency_us: FloatArray
    provenance: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.works)

    def take(self, rows: IntArray) -> Self:
        """Returns a table of the rows with these indices."""
        works = [self.works[i] for i in rows]
        return replace(self, works=works, latency_us=self.latency_us[rows])

    def ask(self, model: Any) -> Estimates:
        """Returns a model's predictions for all rows."""
        found: Estimates = model.predict(self.works)
        return found


def group_index(columns: Any) -> IntArray:
    """Finds the distinct combinations of values; returns the index of each row's one, (rows,).

    columns: values to combine, (rows,) each.
    """
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].ravel()


def read_packaged(system: str, *, dtype: str = "bf16", library: str = "") -> GemmTable:
    """Reads aiconfigurator-core's newest GEMM table of a system and library, sorted by (m, n, k).

    A shape measured repeatedly has its median time.

    system: aiconfigurator's name of the system, or the slug of a GPU.
    library: library whose kernels ran; "" for the GPU's default one (`default_library`).
    Raises UnsupportedError if the package is not installed, and InputError for a system, library or
    dtype without a table.
    """
    slug = slug_of(system_of(system)) or system
    library = library or (default_library(slug, dtype) if libraries_of(slug, dtype) else "")
    (found,), _ = find_tables(system, backend=library or None, kinds=["gemm"])
    frame = read_parquet("read_packaged", found.path).to_pandas()
    rows = frame[(frame.gemm_dtype.map(dtype_name) == dtype) & (frame.latency > 0)]
    if rows.empty:
        raise InputError("read_packaged", f"no {dtype} in {found.shown}", "a dtype of the table")
    times = rows.assign(us=rows.latency * 1e3).groupby(["m", "n", "k"]).us.median().reset_index()

    def text(name: str) -> str:
        names = sorted(set(rows[name]))
        return ", ".join(_SPELLED.get(name, name) for name in names)

    return GemmTable(
        slug,
        dtype,
        {name: times[name].to_numpy() for name in "mnk"},
        times.us.to_numpy(),
        found.backend,
        {
            "table": found.shown,
            "sha256": digest(found.path),
            "package": found.package,
            "framework": text("framework"),
            "framework_version": text("version"),
            "measured_on": text("device"),
        },
    )
