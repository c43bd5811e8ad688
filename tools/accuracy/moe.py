"""Scores the MoE model on the public tables: half of the model shapes are the test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from quantbench.importers.aiconfigurator import find_tables, origin_of, read_rows
from quantbench.latency.moe import MoEModel
from quantbench.workload import MoE
from tools.accuracy.scoring import coverage, summarize

#: (device, library, dtype)
TABLES = (
    ("h100-sxm5-80gb", "vllm", "bf16"),
    ("h100-sxm5-80gb", "trtllm", "fp8"),
    ("h100-sxm5-80gb", "sglang", "bf16"),
    ("b200-sxm-180gb", "vllm", "nvfp4"),
)


@dataclass(frozen=True)
class MoETable:
    """Measured layers of one GPU, dtype and library: the newest table's. works, latency_us:
    (rows,), each work once. rows: as many as the file has of the dtype."""

    gpu: str
    library: str
    works: list[MoE]
    latency_us: npt.NDArray[np.float64]
    version: str
    file: str
    package: str
    sha256: str
    rows: int

    def take(self, rows: npt.NDArray[np.intp]) -> MoETable:
        """Returns the table of some rows."""
        return replace(self, works=[self.works[i] for i in rows], latency_us=self.latency_us[rows])


def read_moe(gpu: str, library: str) -> dict[str, MoETable]:
    """Reads the newest table of a GPU and library, by dtype. Where several kernels ran one layer,
    the fastest counts.

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
    tables = {}
    for dtype, of in best.items():
        tables[dtype] = MoETable(
            gpu,
            library,
            list(of),
            np.array(list(of.values())),
            version=table.version,
            file=table.shown,
            package=table.package,
            sha256=sha256,
            rows=len(of),
        )
    return tables


def held_out(table: MoETable, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns the rows of half of the model shapes for training, and those of the other half as the
    test.
    """
    shape = attrgetter("hidden", "expert_ffn", "top_k", "num_experts")
    names, of_row = np.unique(list(map(shape, table.works)), axis=0, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    is_test = np.isin(of_row.ravel(), order[: len(names) // 2])
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


@dataclass(frozen=True)
class Score:
    """Errors on one table's test rows, mean over seeds. rows: of training."""

    rows: int
    median_pct: float
    p95_pct: float
    coverage: float


def score(table: MoETable, seeds: Sequence[int], rows: int | None) -> Score:
    """Fits and predicts one table. rows: of training, drawn at random; None for all."""
    found = []
    for seed in seeds:
        train, test = held_out(table, seed)
        train = np.random.default_rng(seed).permutation(train)[:rows]
        tested = table.take(test)
        fitted = table.take(train)
        model = MoEModel.fit(
            table.gpu, fitted.works, fitted.latency_us, library=table.library, seed=seed
        )
        predicted = model.predict(tested.works)
        errors = summarize(predicted.latency_us, tested.latency_us)
        covered = coverage(tested.latency_us, predicted.low_us, predicted.high_us)
        found.append(Score(len(train), errors.median_pct, errors.p95_pct, covered))
    return _mean_score(found)


def _mean_score(scores: Sequence[Score]) -> Score:
    rows, *mean = np.mean(list(map(astuple, scores)), axis=0).tolist()
    return Score(round(rows), *mean)


def accuracy_table(seeds: Sequence[int], report: Callable[[str], None]) -> str:
    """Returns the Markdown table of all `TABLES`, from all training rows and from few."""
    cases = {
        "all shapes of the training half, other GPUs' models": None,
        "300 rows of it, other GPUs' models": 300,
    }
    lines = [
        "| table | learned from | rows | median % | p95 % | in the 90 % interval |",
        "|---|---|---:|---:|---:|---:|",
    ]
    tables = [read_moe(gpu, library)[dtype] for gpu, library, dtype in TABLES]
    sources: dict[str, None] = {}
    for words, rows in cases.items():
        scores = []
        for table in tables:
            scores.append(score(table, seeds, rows))
            dtype = table.works[0].dtype
            name = f"{table.gpu}, {table.library} {table.version}, {dtype}"
            lines.append(_line(name, words, scores[-1]))
            report(lines[-1])
            sources[f"{table.package}: {table.file}, sha256 {table.sha256[:12]}"] = None
        lines.append(_line("mean", words, _mean_score(scores)))
    made = f"- Tables: {'; '.join(sources)}. Seeds {', '.join(map(str, seeds))}."
    return "\n".join([*lines, "", made, ""])


def _line(name: str, words: str, of: Score) -> str:
    errors = f"{of.median_pct:.1f} | {of.p95_pct:.0f}"
    return f"| {name} | {words} | {of.rows:,} | {errors} | {100 * of.coverage:.0f} % |"
