"""Compares the attention model with simple baselines on held-out sites of the public tables, and
judges decoding.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.importers import aiconfigurator
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes, peak_tflops
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.latency.libraries import SYSTEMS, TABLES
from quantbench.units import percent
from quantbench.workload import Attention
from tools.accuracy.contests import Answer, Step
from tools.accuracy.scoring import Line, over_seeds, summarize
from tools.guide.markers import table as markdown

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_SITE_SEED = 0
# Kind of table whose times include writing keys and values into a cache.
_WRITES_CACHE = "context_attention"


@dataclass(frozen=True)
class AttentionTable:
    """Measured attention on one device. sources: table → provider, number of rows and sha256, for
    provenance.
    """

    shapes: AttentionShapes
    latency_us: FloatArray
    cache_write: BoolArray
    sources: dict[str, dict[str, object]]

    def __len__(self) -> int:
        return len(self.latency_us)


def read_attention(device: str) -> AttentionTable:
    """Reads the default tables of a device (slug or aiconfigurator system): of each, the provider
    with most rows.
    """
    tables, _ = aiconfigurator.find_tables(device, kinds=["context_attention"])
    more, _ = aiconfigurator.find_tables(device, kinds=["gemm", "encoder_attention"])
    return _read([*tables, *(table for table in more if table.kind == "encoder_attention")])


def _read(tables: Sequence[aiconfigurator.TableFile]) -> AttentionTable:
    """Reads the bf16 rows of each table's most frequent provider, each shape once, at its median
    time.
    """
    times: dict[tuple[Attention, bool], list[float]] = defaultdict(list)
    sources: dict[str, dict[str, object]] = {}
    for table in tables:
        rows = aiconfigurator.read_rows(table, dtypes=["bf16"]).rows
        if not rows:
            continue
        provider = Counter(row.provider for row in rows).most_common(1)[0][0]
        kept = [row for row in rows if row.provider == provider]
        for row in kept:
            if isinstance(row.workload, Attention):
                times[row.workload, table.kind == _WRITES_CACHE].append(row.latency_us)
        origin = aiconfigurator.origin_of(table)
        sources[origin.source] = {
            "provider": provider,
            "rows": len(kept),
            "sha256": origin.options["sha256"],
        }
    works, cache_write = zip(*times, strict=True)
    return AttentionTable(
        AttentionShapes.of(works),
        np.array(list(map(np.median, times.values()))),
        np.array(cache_write),
        sources,
    )


def read_decode(device: str, library: str | None = None) -> AttentionTable:
    """Reads the newest table of decoding of a device and library (by default, the library with the
    largest table of products): of the provider with most rows."""
    tables, _ = aiconfigurator.find_tables(device, backend=library, kinds=["generation_attention"])
    return _read(tables)


def held_out_decode(table: AttentionTable, seed: int) -> tuple[IntArray, IntArray]:
    """Returns train and test rows: of the test are half of the sites in half of the batches, and
    training rows, in the order of the seed, are of the other sites in the other batches."""
    rng = np.random.default_rng(_SITE_SEED)
    site = table.shapes.sites
    batch = table.shapes.batch
    sites = rng.permutation(site.max() + 1)
    batches = rng.permutation(np.unique(batch))
    of_test_site = np.isin(site, sites[: len(sites) // 2])
    of_test_batch = np.isin(batch, batches[: len(batches) // 2])
    pool = np.flatnonzero(~of_test_site & ~of_test_batch)
    train = np.random.default_rng(seed).permutation(pool)
    return train, np.flatnonzero(of_test_site & of_test_batch)


def held_out(shapes: AttentionShapes, train: int, seed: int) -> tuple[IntArray, IntArray]:
    """Returns train and test rows: all rows of half of the sites as test, `train` rows of the other
    half. The seed selects the train rows only. `scoring.held_out_sites` is the counterpart for
    GEMMs."""
    site = shapes.sites
    order = np.random.default_rng(_SITE_SEED).permutation(site.max() + 1)
    is_test = np.isin(site, order[: len(order) // 2])
    pool = np.random.default_rng(seed).permutation(np.flatnonzero(~is_test))
    return pool[:train], np.flatnonzero(is_test)


@dataclass(frozen=True)
class Task:
    """What a contestant learns from and predicts. train, test: row indices of the table."""

    device: DeviceSpec
    table: AttentionTable
    train: IntArray
    test: IntArray
    seed: int

    @property
    def known(self) -> AttentionShapes:
        """Shapes of the train rows."""
        return self.table.shapes[self.train]

    @property
    def known_us(self) -> FloatArray:
        """Times of the train rows, (rows,)."""
        return self.table.latency_us[self.train]

    @property
    def asked(self) -> AttentionShapes:
        """Shapes of the test rows."""
        return self.table.shapes[self.test]

    def answer_of(self, model: AttentionModel, fit_s: float | None = None) -> Answer:
        """Returns a model's predictions for the test rows. fit_s: CPU seconds that its fit took."""
        start = time.process_time()
        found = model.predict(self.asked, cache_write=self.table.cache_write[self.test])
        predict_s = None if fit_s is None else time.process_time() - start
        return Answer(found.latency_us, found.low_us, found.high_us, fit_s, predict_s)


#: function that predicts the test rows of a task
Contestant = Callable[[Task], Answer]


def _ours(task: Task) -> Answer:
    start = time.process_time()
    model = AttentionModel.fit(
        task.device,
        task.known,
        task.known_us,
        cache_write=task.table.cache_write[task.train],
        prior="family-out",
        seed=task.seed,
    )
    return task.answer_of(model, time.process_time() - start)


def _prior(task: Task) -> Answer:
    return task.answer_of(AttentionModel.prior(task.device, prior="family-out"))


def _roofline_us(device: DeviceSpec, shapes: AttentionShapes) -> FloatArray:
    compute_us = shapes.flops / (peak_tflops(device, shapes.dtype) * 1e6)
    return np.asarray(np.maximum(compute_us, shapes.min_bytes / (device.memory_gb_per_s * 1e3)))


def _roofline(task: Task) -> Answer:
    return Answer(_roofline_us(task.device, task.asked))


def _fitted_roofline(task: Task) -> Answer:
    from scipy.optimize import least_squares

    ideal_us = _roofline_us(task.device, task.known)

    def residuals(x: FloatArray) -> FloatArray:
        return np.asarray(np.log((np.exp(x[0]) + ideal_us * np.exp(x[1])) / task.known_us))

    found = least_squares(residuals, np.array([2.0, 0.3]), loss="soft_l1", f_scale=0.05)
    launch_us, stretch = np.exp(found.x)
    return Answer(launch_us + stretch * _roofline_us(task.device, task.asked))


def _logs(shapes: AttentionShapes) -> FloatArray:
    sizes = [shapes.batch, shapes.heads, shapes.kv_heads, shapes.seq_q, shapes.head_dim]
    return np.column_stack([*map(np.log, sizes), shapes.causal])


def _gaussian_process(task: Task) -> Answer:
    efficiency = _roofline_us(task.device, task.known) / task.known_us
    learner = GaussianProcess.fit(_logs(task.known), np.log(efficiency), seed=task.seed)
    predicted = np.exp(learner.predict(_logs(task.asked))[0])
    return Answer(_roofline_us(task.device, task.asked) / predicted)


CONTESTANTS: dict[str, Contestant] = {
    "ours": _ours,
    "ours, nothing measured": _prior,
    "spec-sheet roofline": _roofline,
    "roofline with fitted launch and efficiency": _fitted_roofline,
    "Gaussian process on log efficiency": _gaussian_process,
}
_UNFITTED = {"ours, nothing measured", "spec-sheet roofline"}


def attention_lines(
    gpus: Sequence[str], train_rows: int, seeds: Sequence[int], progress: Callable[[Step], None]
) -> Iterator[Line]:
    """Yields one line of metrics per device and contestant, each as soon as it is done."""
    total = float(len(gpus) * len(CONTESTANTS))
    done = 0.0
    for gpu in gpus:
        device = lookup(gpu)
        table = read_attention(gpu)
        for name, contestant in CONTESTANTS.items():
            progress(Step(f"{gpu}, attention: {name}", done, total))
            fitted = name not in _UNFITTED
            lines = []
            for seed in seeds if fitted else seeds[:1]:
                task = Task(device, table, *held_out(table.shapes, train_rows, seed), seed)
                answer = contestant(task)
                measured_us = table.latency_us[task.test]
                line = Line(
                    gpu=gpu,
                    protocol="heads",
                    model=name,
                    train_rows=train_rows if fitted else None,
                    seeds=1,
                    errors=summarize(answer.latency_us, measured_us),
                    coverage=answer.covers(measured_us),
                    fit_s=answer.fit_s,
                    shapes_per_s=answer.shapes_per_s,
                )
                lines.append(line)
            yield over_seeds(lines)
            done += 1


#: seeds of the fits from few rows; a fit to all rows has one
_DECODE_SEEDS = (0, 1, 2)
_FEW = 200


def decode_table(report: Callable[[str], None]) -> str:
    """Returns the Markdown table of decoding, on every table: from few rows, and from all of the
    training half.
    """
    header = [
        "GPU",
        "library",
        "200 rows",
        "interval covers",
        "all rows",
        "number",
        "interval covers",
    ]
    lines = []
    for gpu, system in SYSTEMS.items():
        for library in TABLES.get(system, ()):
            table = read_decode(gpu, library)
            few = np.mean([_decoded(gpu, table, _FEW, seed) for seed in _DECODE_SEEDS], axis=0)
            errors, covers = _words(_decoded(gpu, table, None, 0))
            count = len(held_out_decode(table, 0)[0])
            lines.append((gpu, library, *_words(few), errors, f"{count:,}", covers))
            report(" | ".join(lines[-1]))
    return markdown(header, lines, words=2)


def _words(found: FloatArray) -> tuple[str, str]:
    median, mean, p95, covered = found
    return f"{median:.1f} / {mean:.1f} / {p95:.0f}", percent(covered)


def _decoded(gpu: str, table: AttentionTable, rows: int | None, seed: int) -> FloatArray:
    """Returns median, mean and p95 error in percent, and coverage, of a fit to some training
    rows.
    """
    train, test = held_out_decode(table, seed)
    answer = _ours(Task(lookup(gpu), table, train[:rows], test, seed))
    measured_us = table.latency_us[test]
    errors = summarize(answer.latency_us, measured_us)
    covered = answer.covers(measured_us)
    return np.array([errors.median_pct, errors.mean_pct, errors.p95_pct, covered])
