"""Judges fits on the published tables of NeuSight, DeepBench and aiter, one line per GPU, dtype,
library and op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.softmax import SoftmaxModel
from quantbench.units import percent
from tools.accuracy.scoring import Split, coverage, held_out_sites, random_split, summarize
from tools.guide.markers import table as markdown
from tools.published_tables import (
    PUBLISHED,
    SOFTMAX_GPUS,
    PublishedTable,
    SoftmaxTable,
    read_published,
    read_softmax,
)

FloatArray = npt.NDArray[np.float64]

#: NeuSight's shorter times are not judged: launches from Python are a third of them and more
_LEAST_US = 200.0
_MOST_TESTED = 2500
#: median, mean and p95 error in percent, and coverage
Judged = tuple[float, float, float, float]


@dataclass(frozen=True)
class Case:
    """Part of a table and its protocol. train_rows: number of rows to learn from."""

    table: PublishedTable
    what: str
    train_rows: int
    sites: bool = False

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
            yield Case(table.where(long & (table.batch > 1)), "batched, above 200 µs", 400)
        elif table.provenance["framework"] == "aiter":
            yield Case(table, "held-out (n, k)", 200, sites=True)
            half = held_out_sites(table.n, table.k, None, 0).train.size
            yield Case(table, "held-out (n, k)", half, sites=True)
        else:
            yield Case(table, "all", 100)


def published_table(seeds: Sequence[int], progress: Callable[[str], None]) -> str:
    """Returns the Markdown table: median / mean / p95 error in percent and coverage, averaged over
    seeds.
    """
    head = [
        "GPU",
        "format",
        "library",
        "rows",
        "rows learned from",
        "unfitted",
        "fitted",
        "90 % interval covers",
    ]
    lines: list[tuple[str, ...]] = []

    def add(
        table: PublishedTable | SoftmaxTable,
        dtype: str,
        what: str,
        rows: int,
        unfitted_pct: float,
        found: list[Judged],
    ) -> None:
        of = table.provenance
        library = f"{of['framework']} {of['framework_version']}"
        *errors, covered = np.mean(found, axis=0)
        words = " / ".join(f"{error:.1f}" for error in errors)
        unfitted = f"{unfitted_pct:.0f}"
        covers = percent(float(covered))
        cells = (of["measured_on"], dtype, library, what, f"{rows:,}", unfitted, words, covers)
        lines.append(cells)
        progress(" | ".join(cells))

    sources = {}
    for case in cases():
        table = case.table
        rows = case.split(0).test[:_MOST_TESTED]
        prior = GemmModel.prior(table.gpu, dtype=table.dtype, family_out=True)
        predicted_us = prior.predict(**table.take(rows)).latency_us
        unfitted = summarize(predicted_us, table.latency_us[rows]).median_pct
        found = [_judge(case, seed) for seed in seeds]
        add(table, table.dtype, case.what, case.train_rows, unfitted, found)
        of = table.provenance
        sources[of["table"]] = f"- {of['table']}: {of['package']}, sha256 {of['sha256'][:12]}."
    for gpu in SOFTMAX_GPUS:
        softmax = read_softmax(gpu)
        bare = SoftmaxModel.prior(lookup(gpu), library="torch")
        for what, least_us in (("softmax", 0.0), (f"softmax, above {_LEAST_US:.0f} µs", _LEAST_US)):
            kept = softmax.take(np.flatnonzero(softmax.latency_us > least_us))
            unfitted = summarize(bare.predict(kept.works).latency_us, kept.latency_us).median_pct
            found = [_judge_softmax(softmax, gpu, least_us, seed) for seed in seeds]
            add(softmax, "fp32", what, 200, unfitted, found)
    drawn = f"Seeds: {', '.join(map(str, seeds))}."
    return "\n".join([markdown(head, lines, words=4), drawn, "", *sources.values(), ""])


def _judge_softmax(table: SoftmaxTable, gpu: str, least_us: float, seed: int) -> Judged:
    """Fits 200 rows of any length, and judges the others above `least_us`."""
    split = random_split(len(table), 200, seed)
    train = table.take(split.train)
    test = table.take(split.test[table.latency_us[split.test] > least_us])
    model = SoftmaxModel.fit(lookup(gpu), train.works, train.latency_us, library="torch")
    found = model.predict(test.works)
    return _scored(found.latency_us, found.low_us, found.high_us, test.latency_us)


def _scored(
    latency_us: FloatArray, low_us: FloatArray, high_us: FloatArray, measured_us: FloatArray
) -> Judged:
    errors = summarize(latency_us, measured_us)
    covered = coverage(measured_us, low_us, high_us)
    return errors.median_pct, errors.mean_pct, errors.p95_pct, covered


def _judge(case: Case, seed: int) -> Judged:
    table = case.table
    split = case.split(seed)
    test = split.test[np.random.default_rng(seed).permutation(len(split.test))[:_MOST_TESTED]]

    model = GemmModel.fit(
        table.gpu,
        **table.take(split.train),
        latency_us=table.latency_us[split.train],
        dtype=table.dtype,
        prior="family-out",
        seed=seed,
    )
    found = model.predict(**table.take(test))
    return _scored(found.latency_us, found.low_us, found.high_us, table.latency_us[test])
