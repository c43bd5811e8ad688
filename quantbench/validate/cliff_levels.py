"""What a model's probabilities of cliffs are worth: found and true at several of them, expected against measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.latency.protocol import mean_of_known, score_forecast

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

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
