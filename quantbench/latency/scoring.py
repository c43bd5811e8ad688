"""Scores of predictions: splits of a table, errors, coverage, cliffs found and true, averaged over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.units import percent

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SEEDS = (0, 1, 2)
#: the (n, k) pairs are divided once, with this seed, whatever the seed of the training rows
_SITE_SEED = 0


@dataclass(frozen=True)
class Split:
    """Row indices: `train` may be fitted, `test` is judged; they share no row (held-out sites: no (n, k) pair)."""

    train: IntArray
    test: IntArray


def random_split(rows: int, train: int, seed: int) -> Split:
    """`train` rows at random out of `rows`; all the others are the test.

    >>> random_split(5, 3, seed=0).train
    array([2, 4, 3])
    """
    _require_train(train, rows)
    order = np.random.default_rng(seed).permutation(rows)
    return Split(order[:train], order[train:])


def held_out_sites(n: IntArray, k: IntArray, train: int | None, seed: int) -> Split:
    """Half of the (n, k) pairs are the test, with all their rows; `train` rows (None: all) come from the other half.

    The division of the pairs is the same for every seed; the seed chooses the training rows. n, k: (rows,).
    """
    pairs, site = np.unique(np.stack([n, k]), axis=1, return_inverse=True)
    order = np.random.default_rng(_SITE_SEED).permutation(pairs.shape[1])
    is_test = np.isin(site.ravel(), order[: pairs.shape[1] // 2])
    pool = np.flatnonzero(~is_test)
    chosen = np.random.default_rng(seed).permutation(pool)
    if train is not None:
        _require_train(train, len(pool) + 1)
        chosen = chosen[:train]
    return Split(chosen, np.flatnonzero(is_test))


def _require_train(train: int, rows: int) -> None:
    if not 1 <= train < rows:
        raise InputError("split", f"train = {train!r} of {rows} rows", f"an integer from 1 to {rows - 1}")


@dataclass(frozen=True)
class ErrorSummary:
    """|predicted / measured - 1| over `rows` rows, in percent."""

    rows: int
    median_pct: float
    mean_pct: float
    p95_pct: float

    def __str__(self) -> str:
        return f"{self.median_pct:.2f}/{self.mean_pct:.2f}/{self.p95_pct:.1f}"


def summarize(predicted_us: FloatArray, measured_us: FloatArray, rows: BoolArray | None = None) -> ErrorSummary:
    """Median, mean and 95th percentile of the relative error, over all rows or those marked."""
    predicted_us, measured_us = np.asarray(predicted_us, dtype=float), np.asarray(measured_us, dtype=float)
    if predicted_us.shape != measured_us.shape:
        raise InputError("summarize", f"{predicted_us.shape} predictions for {measured_us.shape} rows", "one each")
    error = 100.0 * np.abs(predicted_us / measured_us - 1.0)
    if rows is not None:
        error = error[rows]
    if error.size == 0:
        raise InputError("summarize", "no rows", "at least one row")
    return ErrorSummary(
        int(error.size), float(np.median(error)), float(error.mean()), float(np.percentile(error, 95.0))
    )


def mean_summary(parts: list[ErrorSummary]) -> ErrorSummary:
    """Each figure averaged over several seeds; rows are added up."""
    if not parts:
        raise InputError("mean_summary", "no summaries", "at least one")
    return ErrorSummary(
        rows=sum(p.rows for p in parts),
        median_pct=float(np.mean([p.median_pct for p in parts])),
        mean_pct=float(np.mean([p.mean_pct for p in parts])),
        p95_pct=float(np.mean([p.p95_pct for p in parts])),
    )


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """The mean of those that are figures; None where none is."""
    known = [value for value in values if value is not None and not np.isnan(value)]
    return float(np.mean(known)) if known else None


def compute_rows(m: IntArray, n: IntArray, k: IntArray) -> BoolArray:
    """Large products: m >= 256 and n, k >= 512."""
    return np.asarray((m >= 256) & (n >= 512) & (k >= 512))


def memory_rows(m: IntArray, n: IntArray, k: IntArray) -> BoolArray:
    """Thin products, where reading the weights takes the time: m <= 64."""
    return np.asarray((m <= 64) & (n > 0) & (k > 0))


def coverage(measured_us: FloatArray, low_us: FloatArray, high_us: FloatArray) -> float:
    """Share of the measurements inside [low_us, high_us], 0 to 1."""
    return float(np.mean((measured_us >= low_us) & (measured_us <= high_us)))


@dataclass(frozen=True)
class CliffScore:
    """How well cliffs are forecast. pairs: neighbours (m, m + 1) compared; cliffs: those measured above the step.

    recall: share of the measured cliffs that were forecast. precision: share of the forecast ones that are real
    (nan where nothing was forecast).
    """

    pairs: int
    cliffs: int
    recall: float
    precision: float


def cliff_pairs(
    m: IntArray, n: IntArray, k: IntArray, *, min_m: int = 128, min_n: int = 1024, min_k: int = 1024
) -> tuple[IntArray, IntArray]:
    """Indices (low, high) of rows that share n and k and whose m differ by one, with m, n and k at least as given."""
    rows = np.flatnonzero((m >= min_m) & (n >= min_n) & (k >= min_k))
    at = {(int(m[i]), int(n[i]), int(k[i])): int(i) for i in rows}
    found = [(i, at[key]) for (a, b, c), i in at.items() if (key := (a + 1, b, c)) in at]
    pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def score_cliffs(
    predicted_us: FloatArray, measured_us: FloatArray, pairs: tuple[IntArray, IntArray], *, step: float = 0.10
) -> CliffScore:
    """A cliff is t(m + 1) / t(m) > 1 + step, predicted as measured."""
    low, high = pairs
    return score_forecast(predicted_us[high] / predicted_us[low] > 1 + step, measured_us, pairs, step=step)


def score_forecast(
    forecast: BoolArray, measured_us: FloatArray, pairs: tuple[IntArray, IntArray], *, step: float = 0.10
) -> CliffScore:
    """Forecasts, (pairs,), against measured rises above the step."""
    low, high = pairs
    measured = measured_us[high] / measured_us[low] > 1 + step
    hits = int((measured & forecast).sum())
    return CliffScore(
        pairs=len(low),
        cliffs=int(measured.sum()),
        recall=hits / int(measured.sum()) if measured.any() else float("nan"),
        precision=hits / int(forecast.sum()) if forecast.any() else float("nan"),
    )


#: probabilities from which on a cliff is forecast, for the table
LEVELS = (0.10, 0.15, 0.20, 0.25, 0.30, 0.40, 0.50)


@dataclass(frozen=True)
class CliffLevels:
    """expected, measured: the share of pairs (m, m + 1) that are cliffs, as the probabilities say and as it is.
    found, true: recall and precision of forecasts from each of LEVELS on; true is None where nothing is that likely."""

    pairs: int
    expected: float
    measured: float
    found: tuple[float, ...]
    true: tuple[float | None, ...]


def cliff_levels(
    probability: FloatArray, measured_us: FloatArray, pairs: tuple[IntArray, IntArray], *, step: float = 0.10
) -> CliffLevels:
    """probability: of each pair, (pairs,). measured_us: of all rows that the pairs point into."""
    scores = [score_forecast(probability >= level, measured_us, pairs, step=step) for level in LEVELS]
    return CliffLevels(
        pairs=scores[0].pairs,
        expected=float(probability.mean()),
        measured=scores[0].cliffs / scores[0].pairs,
        found=tuple(score.recall for score in scores),
        true=tuple(None if np.isnan(score.precision) else score.precision for score in scores),
    )


def mean_levels(parts: Sequence[CliffLevels]) -> CliffLevels:
    """The mean over several seeds."""
    return CliffLevels(
        pairs=sum(part.pairs for part in parts),
        expected=float(np.mean([part.expected for part in parts])),
        measured=float(np.mean([part.measured for part in parts])),
        found=tuple(float(x) for x in np.mean([part.found for part in parts], axis=0)),
        true=tuple(mean_of_known(column) for column in zip(*(part.true for part in parts), strict=True)),
    )


PROTOCOLS = {
    "sites": "held-out sites: half of the (n, k) pairs are the test, training rows come from the other half",
    "random": "random split: training rows at random, all others are the test",
    "heads": "held-out heads: half of the combinations of heads, key heads, head_dim and mask are the test",
}


@dataclass(frozen=True)
class Answer:
    """Predictions of one contestant for the test rows, (rows,) in µs; nan where it has none.

    low_us, high_us: its 90 % interval, where it gives one. fit_s, predict_s: seconds of one core, in both steps.
    cliff_probability: how likely it finds a cliff from m to m + 1 at shapes m, n, k, (rows,) each, where it says so.
    """

    latency_us: FloatArray
    low_us: FloatArray | None = None
    high_us: FloatArray | None = None
    fit_s: float | None = None
    predict_s: float | None = None
    note: str = ""
    cliff_probability: Callable[[IntArray, IntArray, IntArray], FloatArray] | None = None


@dataclass(frozen=True)
class Score:
    """One seed's figures. unanswered: share of the test rows that it had no prediction for. cliffs: where the
    prediction rises by the step; forecasts: where the model finds one likely;
    levels: the same from other probabilities on."""

    errors: ErrorSummary
    compute: ErrorSummary | None
    unanswered: float
    coverage: float | None
    cliffs: CliffScore | None
    forecasts: CliffScore | None
    levels: CliffLevels | None
    fit_s: float | None
    shapes_per_s: float | None
    note: str


@dataclass(frozen=True)
class Line:
    """One line of an accuracy table: means over seeds, of times the median.

    train_rows: None for what is fitted to nothing.
    """

    gpu: str
    protocol: str
    model: str
    train_rows: int | None
    seeds: int
    errors: ErrorSummary
    compute: ErrorSummary | None
    unanswered: float
    coverage: float | None
    cliff_recall: float | None
    cliff_precision: float | None
    forecast_recall: float | None
    forecast_precision: float | None
    cliff_levels: CliffLevels | None
    fit_s: float | None
    shapes_per_s: float | None
    note: str

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; names carry their units."""
        return asdict(self)


@dataclass(frozen=True)
class Absent:
    """A contestant that could not take part, and why."""

    gpu: str
    model: str
    reason: str


def line(gpu: str, protocol: str, model: str, train_rows: int | None, scores: Sequence[Score]) -> Line:
    """Several seeds' scores: means, but of times the median, which one busy moment of the machine does not move."""
    compute = [score.compute for score in scores if score.compute is not None]
    cliffs = [score.cliffs for score in scores if score.cliffs is not None]
    forecasts = [score.forecasts for score in scores if score.forecasts is not None]
    levels = [score.levels for score in scores if score.levels is not None]
    return Line(
        gpu=gpu,
        protocol=protocol,
        model=model,
        train_rows=train_rows,
        seeds=len(scores),
        errors=mean_summary([score.errors for score in scores]),
        compute=mean_summary(compute) if compute else None,
        unanswered=float(np.mean([score.unanswered for score in scores])),
        coverage=mean_of_known([score.coverage for score in scores]),
        cliff_recall=mean_of_known([c.recall for c in cliffs]),
        cliff_precision=mean_of_known([c.precision for c in cliffs]),
        forecast_recall=mean_of_known([c.recall for c in forecasts]),
        forecast_precision=mean_of_known([c.precision for c in forecasts]),
        cliff_levels=mean_levels(levels) if levels else None,
        fit_s=_median_of_known([score.fit_s for score in scores]),
        shapes_per_s=_median_of_known([score.shapes_per_s for score in scores]),
        note=next((score.note for score in scores if score.note), ""),
    )


def _median_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


#: headings of an accuracy table
COLUMNS = (
    "model", "rows learned from", "all rows", "compute rows", "90 % interval covers", "cliffs found / true",
    "forecasts found / true", "fit, s", "shapes/s",
)  # fmt: skip


def cells(entry: Line) -> tuple[str, ...]:
    """One line as text, in the order of the columns. Errors are median / mean / p95 in percent."""
    return (
        entry.model,
        row_count(entry.train_rows),
        _errors(entry.errors) + ("" if entry.unanswered == 0 else f" (no answer to {percent(entry.unanswered)})"),
        "–" if entry.compute is None else _errors(entry.compute),
        "–" if entry.coverage is None else percent(entry.coverage),
        shares(entry.cliff_recall, entry.cliff_precision),
        shares(entry.forecast_recall, entry.forecast_precision),
        "–" if not entry.fit_s or entry.fit_s < 5e-4 else f"{entry.fit_s:.2g}",
        "–" if entry.shapes_per_s is None else _two_digits(entry.shapes_per_s),
    )


def row_count(count: int | None) -> str:
    """Rows learned from, as text."""
    return "–" if count is None else f"{count:,}"


def _errors(errors: ErrorSummary) -> str:
    return f"{errors.median_pct:.2f} / {errors.mean_pct:.1f} / {errors.p95_pct:.1f}"


def shares(found: float | None, true: float | None) -> str:
    """Recall and precision, as text."""
    return "–" if found is None else f"{found:.2f} / " + ("–" if true is None else f"{true:.2f}")


def _two_digits(value: float) -> str:
    digits = max(0, len(str(int(value))) - 2)
    return f"{round(value, -digits):,.0f}"


def lines_to_json(lines: Sequence[Line], absent: Sequence[Absent]) -> dict[str, Any]:
    """Everything as plain objects."""
    return {
        "lines": [entry.to_json() for entry in lines],
        "absent": [{"gpu": a.gpu, "model": a.model, "reason": a.reason} for a in absent],
    }
