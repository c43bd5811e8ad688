"""Scores the MoE model on the public tables: half of the model shapes are the test.

Entry points: `read_moe`, which returns `MoETable` objects; `held_out`; `score`, which fits and
predicts one table; `accuracy_table`, a section of docs/accuracy.md on `TABLES`; `questions`, pairs
of ways to lay out one layer of which the tables know the faster, and the answers of a model that
saw neither. Used by `page` and tools/ship_moe.py; `python -m tools.accuracy.moe [number]` prints
the questions.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    return {
        dtype: MoETable(
            gpu,
            library,
            list(of),
            np.array(list(of.values())),
            table.version,
            table.shown,
            table.package,
            sha256,
            len(of),
        )
        for dtype, of in best.items()
    }


def held_out(table: MoETable, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Returns the rows of half of the model shapes for training, and those of the other half as the
    test.
    """
    shapes = [(work.hidden, work.expert_ffn, work.top_k, work.num_experts) for work in table.works]
    names = sorted(set(shapes))
    tested = {
        names[i] for i in np.random.default_rng(seed).permutation(len(names))[: len(names) // 2]
    }
    is_test = np.array([shape in tested for shape in shapes])
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


@dataclass(frozen=True)
class Score:
    """Errors on one table's test rows, mean over seeds. rows: of training."""

    rows: int
    median_pct: float
    p95_pct: float
    coverage: float


def score(table: MoETable, prior: str, seeds: Sequence[int], *, rows: int | None = None) -> Score:
    """Fits and predicts one table. prior: of `MoEModel.fit`. rows: of training, drawn at random;
    None for all.
    """
    found = []
    for seed in seeds:
        train, test = held_out(table, seed)
        train = np.random.default_rng(seed).permutation(train)[:rows]
        fitted, tested = table.take(train), table.take(test)
        model = MoEModel.fit(
            table.gpu,
            fitted.works,
            fitted.latency_us,
            library=table.library,
            prior=prior,
            seed=seed,
        )
        said = model.predict(tested.works)
        errors = summarize(said.latency_us, tested.latency_us)
        covered = coverage(tested.latency_us, said.low_us, said.high_us)
        found.append((len(train), errors.median_pct, errors.p95_pct, covered))
    mean = np.mean(found, axis=0)
    return Score(round(mean[0]), *map(float, mean[1:]))


def accuracy_table(seeds: Sequence[int], report: Callable[[str], None]) -> str:
    """Returns the Markdown table of all `TABLES`, from all training rows and from few."""
    cases = [
        ("all shapes of the training half, other GPUs' models", "auto", None),
        ("300 rows of it, other GPUs' models", "auto", 300),
    ]
    lines = [
        "| table | learned from | rows | median % | p95 % | in the 90 % interval |",
        "|---|---|---:|---:|---:|---:|",
    ]
    tables = [read_moe(gpu, library)[dtype] for gpu, library, dtype in TABLES]
    for words, prior, rows in cases:
        scores = []
        for table in tables:
            scores.append(score(table, prior, seeds, rows=rows))
            dtype = table.works[0].dtype
            name = f"{table.gpu}, {table.library} {table.version}, {dtype}"
            report(line := _line(name, words, scores[-1]))
            lines.append(line)
        mean = np.mean(
            [(one.rows, one.median_pct, one.p95_pct, one.coverage) for one in scores], axis=0
        )
        lines.append(_line("mean", words, Score(round(mean[0]), *map(float, mean[1:]))))
    sources = "; ".join(
        dict.fromkeys(
            f"{table.package}: {table.file}, sha256 {table.sha256[:12]}" for table in tables
        )
    )
    return "\n".join([*lines, "", f"- Tables: {sources}. Seeds {', '.join(map(str, seeds))}.", ""])


#: smallest relative difference of two measured times that is an answer
_AN_ANSWER = 0.05


@dataclass(frozen=True)
class Question:
    """Which of two layers is faster: the same experts and tokens on as many GPUs, by another tp and
    ep. Measured and predicted times, µs."""

    works: tuple[MoE, MoE]
    measured_us: tuple[float, float]
    said_us: tuple[float, float]
    said_half_widths: tuple[float, float]

    @property
    def right(self) -> bool:
        return (self.measured_us[0] < self.measured_us[1]) == (self.said_us[0] < self.said_us[1])

    @property
    def ratio_error(self) -> float:
        """Log of the predicted over the measured ratio."""
        return float(
            np.log(self.said_us[0] / self.said_us[1])
            - np.log(self.measured_us[0] / self.measured_us[1])
        )

    def __str__(self) -> str:
        first = self.works[0]
        layer = f"{first.tokens} tokens, {first.num_experts} experts of {first.expert_ffn}, top {first.top_k}, hidden "
        us = [f"{a:.0f} / {b:.0f} µs" for a, b in (self.measured_us, self.said_us)]
        ways = " or ".join(f"tp {one.tp} ep {one.ep}" for one in self.works)
        right = "right" if self.right else "wrong"
        return f"{right}: {layer}{first.hidden}, {first.dtype}, {first.routing_words}: {ways}? {us[0]}, predicted {us[1]}"


def questions(table: MoETable, seed: int) -> list[Question]:
    """Returns all questions about the test shapes of a table, answered by a model of the other
    shapes and other GPUs, in random order."""
    train, test = held_out(table, seed)
    fitted, tested = table.take(train), table.take(test)
    model = MoEModel.fit(
        table.gpu, fitted.works, fitted.latency_us, library=table.library, seed=seed
    )
    said = model.predict(tested.works)
    half = np.log(said.high_us / said.low_us) / 2
    groups: dict[MoE, list[int]] = defaultdict(list)
    for i, work in enumerate(tested.works):
        groups[replace(work, tp=1, ep=1, seed=work.tp * work.ep)].append(i)
    pairs = [(a, b) for rows in groups.values() for n, a in enumerate(rows) for b in rows[n + 1 :]]
    found = []
    for at in np.random.default_rng(seed).permutation(len(pairs)):
        a, b = pairs[at]
        us, guess = tested.latency_us[[a, b]], said.latency_us[[a, b]]
        if us.max() / us.min() >= 1 + _AN_ANSWER:
            works = tested.works[a], tested.works[b]
            found.append(Question(works, tuple(us), tuple(guess), tuple(half[[a, b]])))
    return found


def main() -> None:
    """Prints the first questions of `TABLES` in turn, and how many of all are answered right."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    by_table = [questions(read_moe(gpu, library)[dtype], seed=0) for gpu, library, dtype in TABLES]
    shown = [own[i // len(TABLES)] for i, own in zip(range(count), by_table * count, strict=False)]
    print("\n".join(map(str, shown)))
    print(f"{sum(one.right for one in shown)} of {len(shown)} right")
    for (gpu, library, dtype), own in zip(TABLES, by_table, strict=True):
        errors = np.array([one.ratio_error for one in own])
        alone = np.hypot(*np.array([one.said_half_widths for one in own]).T)
        line = f"{gpu}, {library}, {dtype}: {np.mean([one.right for one in own]):.0%} of {len(own):,} right"
        print(
            f"{line}; 90 % of the errors within {np.quantile(np.abs(errors) / alone, 0.9):.2f} of their intervals"
        )


def _line(name: str, words: str, of: Score) -> str:
    return f"| {name} | {words} | {of.rows:,} | {of.median_pct:.1f} | {of.p95_pct:.0f} | {100 * of.coverage:.0f} % |"


if __name__ == "__main__":
    main()
