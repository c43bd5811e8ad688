"""How a latency model is judged: which rows it may see, and how its error on the others is stated.

Rows are taken in the order of (m, n, k), as `tables.read_table` gives them, so that a seed names the same rows
everywhere. Errors are |predicted / measured - 1| in percent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError

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
