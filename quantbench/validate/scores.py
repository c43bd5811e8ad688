"""What one contestant reached in one protocol: errors, coverage, cliffs and speed, averaged over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.protocol import CliffScore, ErrorSummary, mean_of_known, mean_summary
from quantbench.validate.cliff_levels import CliffLevels, mean_levels

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

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
