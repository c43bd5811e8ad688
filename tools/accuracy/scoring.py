"""Splits measured rows into train and test rows, and scores predictions for the test rows.

The scores are relative errors, coverage (the fraction of times inside their intervals), and recall
and precision of cliffs (jumps of the time between m and m + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.units import percent

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: smallest relative rise from m to m + 1 that counts as a cliff
_STEP = 0.10


@dataclass(frozen=True)
class Split:
    """Indices of train rows and of test rows, which have no row in common."""

    train: IntArray
    test: IntArray


def random_split(rows: int, train: int, seed: int) -> Split:
    """Draws train rows at random; all other rows are test rows.

    rows: number of all rows.
    train: number of train rows.
    Raises InputError unless 1 <= train < rows.

    >>> random_split(5, 3, seed=0).train
    array([2, 4, 3])
    """
    _require_train(train, rows)
    order = np.random.default_rng(seed).permutation(rows)
    return Split(order[:train], order[train:])


def held_out(group: IntArray, train: int | None, seed: int, group_seed: int = 0) -> Split:
    """Takes all rows of half of the groups as test rows, and train rows from the other groups.

    group: (rows,) index of each row's group.
    train: number of train rows; None for all rows of the other groups.
    seed: seed that draws the train rows.
    group_seed: seed that draws the groups of the test.
    """
    groups = group.max() + 1
    order = np.random.default_rng(group_seed).permutation(groups)
    is_test = np.isin(group, order[: groups // 2])
    chosen = np.random.default_rng(seed).permutation(np.flatnonzero(~is_test))
    if train is not None:
        _require_train(train, len(chosen) + 1)
        chosen = chosen[:train]
    return Split(chosen, np.flatnonzero(is_test))


def _require_train(train: int, rows: int) -> None:
    if not 1 <= train < rows:
        raise InputError(
            "split", f"train = {train!r} of {rows} rows", f"an integer from 1 to {rows - 1}"
        )


@dataclass(frozen=True)
class ErrorSummary:
    """Statistics of |predicted / measured - 1| over `rows` rows, in percent."""

    rows: int
    median_pct: float
    mean_pct: float
    p95_pct: float

    def __str__(self) -> str:
        return f"{self.median_pct:.2f} / {self.mean_pct:.1f} / {self.p95_pct:.1f}"

    def rounded(self) -> dict[str, float]:
        """Returns the fields by name, rounded to two decimals."""
        return {name: round(value, 2) for name, value in vars(self).items()}


def summarize(
    predicted_us: FloatArray, measured_us: FloatArray, rows: BoolArray | None = None
) -> ErrorSummary:
    """Computes the median, mean and 95th percentile of the relative error.

    predicted_us, measured_us: (rows,) times.
    rows: mask of the rows to use, (rows,); None for all.
    Raises InputError if there are no rows, or the shapes differ.
    """
    predicted_us = np.asarray(predicted_us, dtype=float)
    measured_us = np.asarray(measured_us, dtype=float)
    if predicted_us.shape != measured_us.shape:
        what = f"{predicted_us.shape} predictions for {measured_us.shape} rows"
        raise InputError("summarize", what, "one each")
    error = 100.0 * np.abs(predicted_us / measured_us - 1.0)
    if rows is not None:
        error = error[rows]
    if error.size == 0:
        raise InputError("summarize", "no rows", "at least one row")
    figures = np.median(error), error.mean(), np.percentile(error, 95.0)
    return ErrorSummary(int(error.size), *map(float, figures))


def compute_rows(m: IntArray, n: IntArray, k: IntArray) -> BoolArray:
    """Returns the mask of large GEMMs, (rows,): m >= 256, n >= 512 and k >= 512."""
    return np.asarray((m >= 256) & (n >= 512) & (k >= 512))


def coverage(measured_us: FloatArray, low_us: FloatArray, high_us: FloatArray) -> float:
    """Returns the share of measurements inside their intervals [low_us, high_us], 0 to 1."""
    return float(np.mean((measured_us >= low_us) & (measured_us <= high_us)))


def cliff_pairs(m: IntArray, n: IntArray, k: IntArray) -> tuple[IntArray, IntArray]:
    """Finds the pairs of rows with m and m + 1 at the same n and k; returns (low, high) indices.

    Only rows with m >= 128, n >= 1024 and k >= 1024 count. Both arrays are (pairs,).
    """
    rows = np.flatnonzero((m >= 128) & (n >= 1024) & (k >= 1024)).tolist()
    shapes = zip(m[rows].tolist(), n[rows].tolist(), k[rows].tolist(), strict=True)
    at = dict(zip(shapes, rows, strict=True))
    found = []
    for (size, n_of, k_of), row in at.items():
        if (size + 1, n_of, k_of) in at:
            found.append((row, at[size + 1, n_of, k_of]))
    low, high = np.array(found, dtype=np.int64).reshape(-1, 2).T
    return low, high


def rises(latency_us: FloatArray, pairs: tuple[IntArray, IntArray]) -> BoolArray:
    """Returns whether the time rises by more than 10 % within each pair of rows, (pairs,).

    latency_us: (rows,) times.
    pairs: indices of the rows with m and with m + 1, from `cliff_pairs`.
    """
    low, high = pairs
    return np.asarray(latency_us[high] / latency_us[low] > 1 + _STEP)


def recall_and_precision(forecast: BoolArray, measured: BoolArray) -> tuple[float, float]:
    """Returns the recall and the precision of forecast cliffs, 0 to 1.

    Recall is nan without measured cliffs, precision without forecast cliffs.

    forecast, measured: (pairs,) whether a pair of rows is a cliff.
    """
    hits = int((measured & forecast).sum())
    recall = hits / int(measured.sum()) if measured.any() else nan
    precision = hits / int(forecast.sum()) if forecast.any() else nan
    return recall, precision


@dataclass(frozen=True)
class Line:
    """Scores of one predictor, for one seed or averaged over several (`over_seeds`).

    gpu: slug of the GPU.
    protocol: name of the way in which test rows are held out.
    train_rows: number of rows that the predictor was fitted to; None if it is not fitted.
    seeds: number of seeds.
    compute: errors on large GEMMs (`compute_rows`).
    unanswered: share of test rows without a prediction.
    coverage: share of measurements inside the 90 % interval; None without intervals.
    cliff_recall, cliff_precision: recall and precision of the cliffs in the predicted times.
    fit_s: CPU seconds of the fit.
    shapes_per_s: predictions per CPU second.
    """

    gpu: str
    protocol: str
    model: str
    train_rows: int | None
    seeds: int
    errors: ErrorSummary
    compute: ErrorSummary | None = None
    unanswered: float = 0.0
    coverage: float | None = None
    cliff_recall: float | None = None
    cliff_precision: float | None = None
    fit_s: float | None = None
    shapes_per_s: float | None = None


_AVERAGED = ("unanswered", "coverage", "cliff_recall", "cliff_precision")


def over_seeds(lines: Sequence[Line]) -> Line:
    """Averages the scores of several seeds.

    fit_s and shapes_per_s are medians, which the load of the machine changes less.
    """
    found: dict[str, Any] = {}
    for names, average in ((_AVERAGED, np.mean), (("fit_s", "shapes_per_s"), np.median)):
        for name in names:
            values = map(attrgetter(name), lines)
            known = [value for value in values if value is not None and not np.isnan(value)]
            found[name] = float(average(known)) if known else None
    compute = [one.compute for one in lines if one.compute is not None]
    return replace(
        lines[0],
        seeds=len(lines),
        errors=_mean_errors([one.errors for one in lines]),
        compute=_mean_errors(compute) if compute else None,
        **found,
    )


def _mean_errors(parts: Sequence[ErrorSummary]) -> ErrorSummary:
    percents = map(attrgetter("median_pct", "mean_pct", "p95_pct"), parts)
    means = np.mean(list(percents), axis=0).tolist()
    return ErrorSummary(sum(part.rows for part in parts), *means)


#: headings of an accuracy table
COLUMNS = (
    "model",
    "rows learned from",
    "all rows",
    "compute rows",
    "90 % interval covers",
    "cliffs found / true",
    "fit, s",
    "shapes/s",
)


def cells(entry: Line) -> tuple[str, ...]:
    """Formats scores as table cells, in the order of COLUMNS.

    Errors are median / mean / 95th percentile in percent.
    """
    errors = str(entry.errors)
    if entry.unanswered:
        errors += f" (no answer to {percent(entry.unanswered)})"
    rate = entry.shapes_per_s
    return (
        entry.model,
        row_count(entry.train_rows),
        errors,
        str(entry.compute or "–"),
        "–" if entry.coverage is None else percent(entry.coverage),
        shares(entry.cliff_recall, entry.cliff_precision),
        "–" if (entry.fit_s or 0.0) < 5e-4 else f"{entry.fit_s:.2g}",
        "–" if rate is None else f"{round(rate, -max(0, len(str(int(rate))) - 2)):,.0f}",
    )


def row_count(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def shares(found: float | None, true: float | None) -> str:
    if found is None:
        return "–"
    return f"{found:.2f} / {'–' if true is None else f'{true:.2f}'}"
