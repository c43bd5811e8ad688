"""Scores the MoE model on the public tables: half of the model shapes are the test.

Entry points: `read_moe`; `score`, which fits and predicts one table; `TABLES`, those of docs/accuracy.md. Used by
`page` and tools/ship_moe.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quantbench.importers.aiconfigurator import find_tables, origin_of, read_rows
from quantbench.latency.moe import MoEModel
from quantbench.latency.scoring import coverage, summarize
from quantbench.workload import MoE

#: (device, library, dtype)
TABLES = (
    ("h100-sxm5-80gb", "vllm", "bf16"),
    ("h100-sxm5-80gb", "trtllm", "fp8"),
    ("h100-sxm5-80gb", "sglang", "bf16"),
    ("b200-sxm-180gb", "vllm", "nvfp4"),
)


@dataclass(frozen=True)
class MoETable:
    """Measured layers of one GPU, dtype and library: the newest table's. works, latency_us: (rows,), each work once."""

    gpu: str
    library: str
    works: list[MoE]
    latency_us: npt.NDArray[np.float64]
    version: str
    file: str
    package: str
    sha256: str

    def take(self, rows: npt.NDArray[np.intp]) -> MoETable:
        """Returns the table of some rows."""
        return replace(self, works=[self.works[i] for i in rows], latency_us=self.latency_us[rows])


def read_moe(gpu: str, library: str) -> dict[str, MoETable]:
    """Reads the newest table of a GPU and library, by dtype. Where several kernels ran one layer, the fastest counts.

    Raises InputError if there is no such table.
    """
    (table,), _ = find_tables(gpu, backend=library, kinds=["moe"])
    best: dict[str, dict[MoE, float]] = defaultdict(dict)
    for row in read_rows(table).rows:
        work = row.workload
        assert isinstance(work, MoE)
        if row.has_time:
            best[work.dtype][work] = min(row.latency_us, best[work.dtype].get(work, np.inf))
    sha256 = str(origin_of(table).options["sha256"])
    return {
        dtype: MoETable(
            gpu, library, list(of), np.array(list(of.values())), table.version, table.shown, table.package, sha256
        )
        for dtype, of in best.items()
    }


def held_out(table: MoETable, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns the rows of half of the model shapes for training, and those of the other half as the test."""
    shapes = [(work.hidden, work.expert_ffn, work.top_k, work.num_experts) for work in table.works]
    names = sorted(set(shapes))
    tested = {names[i] for i in np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]}
    is_test = np.array([shape in tested for shape in shapes])
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
