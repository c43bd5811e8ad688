"""Tests the latency model of MoE layers on public tables.

Half of the model shapes are test rows. `accuracy_table` formats the errors for docs/accuracy.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from quantbench.device import lookup
from quantbench.importers.aiconfigurator import find_tables, read_rows
from quantbench.importers.runs import digest
from quantbench.latency.moe import Growth, MoEModel
from quantbench.units import percent
from quantbench.workload import MoE
from tools.accuracy.contests import Contest, fitted, run_contests
from tools.accuracy.scoring import IntArray, Split, held_out, over_seeds
from tools.accuracy.tables import WorkTable, group_index
from tools.guide.markers import table as markdown

#: tables to judge on: (slug of the GPU, library, dtype)
TABLES = (
    ("h100-sxm5-80gb", "vllm", "bf16"),
    ("h100-sxm5-80gb", "trtllm", "fp8"),
    ("h100-sxm5-80gb", "sglang", "bf16"),
    ("b200-sxm-180gb", "vllm", "nvfp4"),
)


@dataclass(frozen=True)
class MoETable(WorkTable):
    """Measured expert layers of one GPU, dtype and library, from the newest table.

    version: the library's version.
    """

    version: str = ""

    @property
    def groups(self) -> IntArray:
        """Index of each row's group, (rows,). Rows with the same model shape form a group."""
        shape = attrgetter("hidden", "expert_ffn", "top_k", "num_experts")
        return group_index(np.transpose(list(map(shape, self.works))))

    def fit(self, prior: Any, seed: int = 0, growth: Growth | None = None) -> MoEModel:
        """Fits a model to all rows. The arguments are those of `MoEModel.fit`."""
        return MoEModel.fit(
            self.gpu,
            self.works,
            self.latency_us,
            library=self.library,
            prior=prior,
            seed=seed,
            growth=growth,
        )

    def prior(self) -> MoEModel:
        """Returns the unfitted model of the table's dtype and library."""
        return MoEModel.prior(lookup(self.gpu), dtype=self.works[0].dtype, library=self.library)


def read_moe(gpu: str, library: str) -> dict[str, MoETable]:
    """Reads aiconfigurator-core's newest table of expert layers; returns one table per dtype.

    If several kernels ran the same layer, the fastest time counts.

    gpu: slug of the GPU.
    Raises InputError if there is no such table.
    """
    (table,), _ = find_tables(gpu, backend=library, kinds=["moe"])
    best: dict[str, dict[MoE, float]] = defaultdict(dict)
    for row in read_rows(table).rows:
        work = row.workload
        assert isinstance(work, MoE)
        if row.has_time:
            best[work.dtype][work] = min(row.latency_us, best[work.dtype].get(work, np.inf))
    of_file = {
        "table": table.shown,
        "package": table.package,
        "sha256": digest(table.path),
    }
    tables = {}
    for dtype, of in best.items():
        times_us = np.array(list(of.values()))
        provenance = {**of_file, "rows": len(of)}
        tables[dtype] = MoETable(gpu, library, list(of), times_us, provenance, table.version)
    return tables


def new_models(table: MoETable, train_rows: int | None, seed: int) -> Split:
    """Splits a table so that half of the model shapes, drawn with the seed, are the test."""
    return held_out(table.groups, train_rows, seed, group_seed=seed)


_COLUMNS = ("table", "learned from", "rows", "median %", "p95 %", "in the 90 % interval")


def accuracy_table(seeds: Sequence[int], progress: Callable[[str], None]) -> str:
    """Formats the errors on `TABLES` of fits to all train rows, and to few, as a Markdown table.

    progress: function that is called with a text before each fit.
    """
    cases = {
        "all shapes of the training half, other GPUs' models": None,
        "300 rows of it, other GPUs' models": 300,
    }
    tables = [read_moe(gpu, library)[dtype] for gpu, library, dtype in TABLES]
    rows = []
    for words, count in cases.items():
        one = fitted("ours", count, lambda train: "auto")
        figures: list[Sequence[Any]] = []
        for table in tables:
            plan = [(Contest(table, "experts", new_models), [one])]
            line = over_seeds([next(run_contests(plan, [seed], progress)) for seed in seeds])
            errors = line.errors
            figures.append((line.train_rows, errors.median_pct, errors.p95_pct, line.coverage))
            dtype = table.works[0].dtype
            name = f"{table.gpu}, {table.library} {table.version}, {dtype}"
            rows.append((name, words, *_cells(*figures[-1])))
        rows.append(("mean", words, *_cells(*np.mean(figures, axis=0))))
    source = "{package}: {table}, sha256 {sha256:.12}"
    sources = dict.fromkeys(source.format(**table.provenance) for table in tables)
    made = f"- Tables: {'; '.join(sources)}. Seeds {', '.join(map(str, seeds))}."
    return "\n".join([markdown(_COLUMNS, rows, words=2), made, ""])


def _cells(rows: float, median_pct: float, p95_pct: float, covered: float) -> tuple[str, ...]:
    return f"{rows:,.0f}", f"{median_pct:.1f}", f"{p95_pct:.0f}", percent(covered)
