"""Compares the latency model of attention with simple baselines on held-out sites.

A site is a combination of heads, key/value heads, head_dim and mask. Attention over prompts and
decoding are judged separately. `attention_contests` and `decode_table` are the entry points.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantbench.device import lookup
from quantbench.importers import aiconfigurator
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes, peak_tflops
from quantbench.latency.estimate import Estimates
from quantbench.latency.libraries import SYSTEMS, TABLES
from quantbench.units import percent
from quantbench.workload import Attention
from tools.accuracy.contests import (
    Answer,
    Contest,
    Contestant,
    Plan,
    gaussian_process,
    ours,
    roofline,
    run_contests,
    unfitted,
)
from tools.accuracy.scoring import BoolArray, FloatArray, IntArray, Split
from tools.guide.markers import table as markdown


@dataclass(frozen=True)
class AttentionTable:
    """Measured attention on one GPU; each shape has one row.

    gpu: slug of the GPU.
    latency_us: (rows,) measured times.
    cache_write: (rows,) whether the time includes the writing of keys and values into a cache.
    provenance: provider, number of rows and sha256 of each table, by name of the table.
    """

    gpu: str
    shapes: AttentionShapes
    latency_us: FloatArray
    cache_write: BoolArray
    provenance: Mapping[str, Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.latency_us)

    @property
    def groups(self) -> IntArray:
        return self.shapes.sites

    def take(self, rows: IntArray) -> AttentionTable:
        """Returns a table of the rows with these indices."""
        return replace(
            self,
            shapes=self.shapes[rows],
            latency_us=self.latency_us[rows],
            cache_write=self.cache_write[rows],
        )

    def fit(self, prior: str, seed: int = 0) -> AttentionModel:
        """Fits a model to all rows. The arguments are those of `AttentionModel.fit`."""
        return AttentionModel.fit(
            lookup(self.gpu),
            self.shapes,
            self.latency_us,
            cache_write=self.cache_write,
            prior=prior,
            seed=seed,
        )

    def prior(self) -> AttentionModel:
        """Returns the unfitted model, which knows other GPU generations only."""
        return AttentionModel.prior(lookup(self.gpu), prior="family-out")

    def ask(self, model: AttentionModel) -> Estimates:
        """Returns a model's predictions for all rows."""
        return model.predict(self.shapes, cache_write=self.cache_write)

    def ideal_us(self) -> FloatArray:
        """Returns the roofline times, (rows,), microseconds."""
        device = lookup(self.gpu)
        compute_us = self.shapes.flops / (peak_tflops(device, self.shapes.dtype) * 1e6)
        return np.maximum(compute_us, self.shapes.min_bytes / (device.memory_gb_per_s * 1e3))

    def logs(self) -> FloatArray:
        """Returns what baselines learn from, (rows, 6): log sizes, and whether causal."""
        of = self.shapes
        sizes = map(np.log, (of.batch, of.heads, of.kv_heads, of.seq_q, of.head_dim))
        return np.column_stack([*sizes, of.causal])


def read_attention(device: str) -> AttentionTable:
    """Reads the default tables of attention over prompts, and of encoders, for a GPU.

    device: slug of the GPU.
    """
    tables, _ = aiconfigurator.find_tables(device, kinds=["context_attention"])
    more, _ = aiconfigurator.find_tables(device, kinds=["gemm", "encoder_attention"])
    return _read(device, [*tables, *(table for table in more if table.kind == "encoder_attention")])


def _read(gpu: str, tables: Sequence[aiconfigurator.TableFile]) -> AttentionTable:
    """Reads the bf16 rows of tables, and joins the tables.

    Each table contributes the rows of the provider with the most rows. A shape measured repeatedly
    has its median time.
    """
    times: dict[tuple[Attention, bool], list[float]] = defaultdict(list)
    sources: dict[str, dict[str, object]] = {}
    for table in tables:
        rows = aiconfigurator.read_rows(table, dtypes=["bf16"]).rows
        if not rows:
            continue
        provider = Counter(row.provider for row in rows).most_common(1)[0][0]
        kept = [row for row in rows if row.provider == provider]
        writes_cache = table.kind == "context_attention"
        for row in kept:
            if isinstance(row.workload, Attention):
                times[row.workload, writes_cache].append(row.latency_us)
        origin = aiconfigurator.origin_of(table)
        sources[origin.source] = {
            "provider": provider,
            "rows": len(kept),
            "sha256": origin.options["sha256"],
        }
    works, cache_write = zip(*times, strict=True)
    return AttentionTable(
        gpu,
        AttentionShapes.of(works),
        np.array(list(map(np.median, times.values()))),
        np.array(cache_write),
        sources,
    )


def read_decode(device: str, library: str | None = None) -> AttentionTable:
    """Reads the newest table of decoding for a GPU and library.

    device: slug of the GPU.
    library: library whose kernels ran; None for that of the GPU's default table.
    """
    tables, _ = aiconfigurator.find_tables(device, backend=library, kinds=["generation_attention"])
    return _read(device, tables)


def new_sites_and_batches(table: AttentionTable, train_rows: int | None, seed: int) -> Split:
    """Splits decoding so that no test row shares its site or its batch size with a train row.

    Half of the sites at half of the batch sizes are the test. Train rows are drawn from the other
    sites at the other batch sizes.

    train_rows: number of train rows; None for all.
    """
    rng = np.random.default_rng(0)
    site = table.groups
    batch = table.shapes.batch
    sites = rng.permutation(site.max() + 1)
    batches = rng.permutation(np.unique(batch))
    of_test_site = np.isin(site, sites[: len(sites) // 2])
    of_test_batch = np.isin(batch, batches[: len(batches) // 2])
    pool = np.flatnonzero(~of_test_site & ~of_test_batch)
    train = np.random.default_rng(seed).permutation(pool)[:train_rows]
    return Split(train, np.flatnonzero(of_test_site & of_test_batch))


def fitted_roofline(train_rows: int) -> Contestant:
    """Returns the roofline as a contestant, with a launch time and an efficiency that are fitted to
    the train rows.
    """

    def answer(train: AttentionTable, test: AttentionTable, seed: int) -> Answer:
        from scipy.optimize import least_squares

        ideal_us = train.ideal_us()

        def residuals(x: FloatArray) -> FloatArray:
            return np.asarray(np.log((np.exp(x[0]) + ideal_us * np.exp(x[1])) / train.latency_us))

        found = least_squares(residuals, np.array([2.0, 0.3]), loss="soft_l1", f_scale=0.05)
        launch_us, stretch = np.exp(found.x)
        return Answer(launch_us + stretch * test.ideal_us())

    return Contestant("roofline with fitted launch and efficiency", train_rows, answer)


def attention_contests(gpus: Sequence[str], rows: int) -> Plan:
    """Plans the comparison on each GPU's tables.

    gpus: slugs of the GPUs.
    rows: number of train rows.
    """
    contestants = [ours(rows), unfitted(), roofline(), fitted_roofline(rows)]
    contestants.append(gaussian_process(rows))
    return [(Contest(read_attention(gpu), "heads"), contestants) for gpu in gpus]


_DECODE_COLUMNS = (
    "GPU",
    "library",
    "200 rows",
    "interval covers",
    "all rows",
    "number",
    "interval covers",
)


def decode_table(seeds: Sequence[int], progress: Callable[[str], None]) -> str:
    """Formats the errors on every table of decoding as a Markdown table.

    The fits have 200 train rows, and all rows of the training half.

    progress: function that is called with a text before each fit.
    """
    rows = []
    for gpu, system in SYSTEMS.items():
        for library in TABLES.get(system, ()):
            contest = Contest(read_decode(gpu, library), library, new_sites_and_batches)
            few, every = run_contests([(contest, (ours(200), ours(None)))], seeds, progress)
            cells = [str(few.errors), percent(few.coverage or 0.0), str(every.errors)]
            cells += [f"{every.train_rows:,}", percent(every.coverage or 0.0)]
            rows.append((gpu, library, *cells))
    return markdown(_DECODE_COLUMNS, rows, words=2)
