"""Judges GEMM fits on the published tables of NeuSight, DeepBench and aiter, one line per GPU, dtype and library.

Entry point: `published_table`, written to docs/accuracy.md by `tools.accuracy.page --published`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.scoring import Split, coverage, held_out_sites, random_split, summarize
from quantbench.units import percent
from tools.accuracy.tables import PUBLISHED, PublishedTable, read_published
from tools.guide.markers import table as markdown

#: NeuSight's shorter times are not judged: launches from Python are a third of them and more
_LEAST_US = 200.0
_MOST_TESTED = 2500


@dataclass(frozen=True)
class Case:
    """Part of a table and its protocol. train_rows: number of rows to learn from. named: whether the kernels' names are
    known at fit and prediction."""

    table: PublishedTable
    what: str
    train_rows: int
    sites: bool = False
    named: bool = False

    def split(self, seed: int) -> Split:
        """Splits the rows at random, or by (n, k) pairs."""
        if self.sites:
            return held_out_sites(self.table.n, self.table.k, self.train_rows, seed)
        return random_split(len(self.table), self.train_rows, seed)


def cases() -> Iterator[Case]:
    """Yields the comparisons of every published table."""
    for gpu, dtype in PUBLISHED:
        table = read_published(gpu, dtype)
        if table.provenance["framework"] == "PyTorch":
            long = table.latency_us > _LEAST_US
            single = table.where(long & (table.batch == 1))
            yield Case(single, "linear, above 200 µs", 200)
            yield Case(single, "linear, above 200 µs, kernels named", 200, named=True)
            yield Case(table.where(long & (table.batch > 1)), "batched, above 200 µs", 400)
        elif table.provenance["framework"] == "aiter":
            yield Case(table, "held-out (n, k)", 200, sites=True)
        else:
            yield Case(table, "all", 100)


def published_table(seeds: Sequence[int], progress: Callable[[str], None]) -> str:
    """Returns the Markdown table: median / mean / p95 error in percent and coverage, averaged over seeds."""
    head = [
        "GPU", "format", "library", "products", "rows learned from", "unfitted", "fitted", "90 % interval covers"
    ]  # fmt: skip
    lines = []
    for case in cases():
        table = case.table
        found = [_judge(case, seed) for seed in seeds]
        prior = GemmModel.prior(table.gpu, dtype=table.dtype, family_out=True)
        rows = case.split(0).test[:_MOST_TESTED]
        unfitted = summarize(prior.predict(**table.take(rows)).latency_us, table.latency_us[rows]).median_pct
        errors = " / ".join(f"{x:.1f}" for x in np.mean([errors for errors, _ in found], axis=0))
        library = f"{table.provenance['framework']} {table.provenance['framework_version']}"
        lines.append((
            table.gpu, table.dtype, library, case.what, f"{case.train_rows:,}", f"{unfitted:.0f}", errors,
            percent(float(np.mean([share for _, share in found]))),
        ))  # fmt: skip
        progress(" | ".join(lines[-1]))
    of = {table.provenance["table"]: table.provenance for table in (read_published(*pair) for pair in PUBLISHED)}
    sources = [f"- {name}: {one['package']}, sha256 {one['sha256'][:12]}." for name, one in of.items()]
    return "\n".join([markdown(head, lines, words=4), f"Seeds: {', '.join(map(str, seeds))}.", "", *sources]) + "\n"


def _judge(case: Case, seed: int) -> tuple[tuple[float, float, float], float]:
    table, split = case.table, case.split(seed)
    test = split.test[np.random.default_rng(seed).permutation(len(split.test))[:_MOST_TESTED]]

    def arguments(rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        launches = [table.launches[i] for i in rows] if case.named else None
        return {**table.take(rows), "launches": launches}

    model = GemmModel.fit(
        table.gpu, **arguments(split.train), latency_us=table.latency_us[split.train], dtype=table.dtype,
        prior="family-out", seed=seed,
    )  # fmt: skip
    found = model.predict(**arguments(test))
    errors = summarize(found.latency_us, table.latency_us[test])
    covered = coverage(table.latency_us[test], found.low_us, found.high_us)
    return (errors.median_pct, errors.mean_pct, errors.p95_pct), covered
