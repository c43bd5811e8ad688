"""Scores predictions against measured times: splits into train and test rows, errors, interval
coverage, cliffs.
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
    """Disjoint indices of train and test rows; with held-out groups they share none
    either.
    """

    train: IntArray
    test: IntArray


def random_split(rows: int, train: int, seed: int) -> Split:
    """Draws `train` of `rows` rows at random as train rows; the other rows are test rows.

    >>> random_split(5, 3, seed=0).train
    array([2, 4, 3])
    """
    _require_train(train, rows)
    order = np.random.default_rng(seed).permutation(rows)
    return Split(order[:train], order[train:])


def held_out(group: IntArray, train: int | None, seed: int, group_seed: int = 0) -> Split:
    """Takes all rows of half of the groups as test rows, and `train` rows (None: all) of the other
    half.

    group: (rows,) index of each row's group.
    seed, group_seed: select the train rows, and the groups of the test.
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
        """Returns the fields as a model's provenance has them."""
        return {name: round(value, 2) for name, value in vars(self).items()}


def summarize(
    predicted_us: FloatArray, measured_us: FloatArray, rows: BoolArray | None = None
) -> ErrorSummary:
    """Computes median, mean and 95th percentile of the relative error. rows: mask of the rows to
    use, default all.
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
    """Returns a mask of large GEMMs: m >= 256 and n, k >= 512."""
    return np.asarray((m >= 256) & (n >= 512) & (k >= 512))


def coverage(measured_us: FloatArray, low_us: FloatArray, high_us: FloatArray) -> float:
    """Returns the share of the measurements inside [low_us, high_us], 0 to 1."""
    return float(np.mean((measured_us >= low_us) & (measured_us <= high_us)))


def cliff_pairs(m: IntArray, n: IntArray, k: IntArray) -> tuple[IntArray, IntArray]:
    """Returns indices (low, high) of rows with equal n and k and adjacent m, for m >= 128 and n, k
    >= 1024.
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
    """Returns True where the time rises by over 10 %, (pairs,).

    latency_us: times of all rows.
    pairs: lower and higher rows, from `cliff_pairs`.
    """
    low, high = pairs
    return np.asarray(latency_us[high] / latency_us[low] > 1 + _STEP)


def recall_and_precision(forecast: BoolArray, measured: BoolArray) -> tuple[float, float]:
    """Returns recall and precision of forecast cliffs; nan without measured or forecast cliffs.
    Masks are (pairs,).
    """
    hits = int((measured & forecast).sum())
    recall = hits / int(measured.sum()) if measured.any() else nan
    precision = hits / int(forecast.sum()) if forecast.any() else nan
    return recall, precision


@dataclass(frozen=True)
class Line:
    """Line of an accuracy table: metrics of one predictor for one seed or averaged over several
    (`over_seeds`).

    train_rows: None for a predictor without fit.
    unanswered: share of test rows without a prediction.
    cliff_recall, cliff_precision: of cliffs in the predicted times.
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
    """Averages lines of several seeds; for fit_s and shapes_per_s takes the median, which is robust
    to machine load.
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
    """Formats a line as table cells, in the order of COLUMNS. Errors are median / mean / p95 in
    percent.
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
