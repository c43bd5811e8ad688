"""Predicts the probability of cliffs with a GEMM model, and selects the shapes that are most useful to measure next.

Entry points: `cliff_probability`, used by `analysis.forecast`, `contests` and, through `latency`, by users' Python
code; `LIKELY`, the probability above which a cliff is forecast, used by `contests` and `report.forecast`;
`next_points`, used by `sweep.refine` (`--adaptive`; docs/accuracy.md compares it with a random choice); `Calibration`.
The last two are used by `tools.accuracy`.

An ensemble's mean rise finds too few cliffs, because members place the edges of tiles and waves at different m, which
smooths their average. So the rises of all trees of all members are treated as a normal distribution, and the
probability of a cliff is its mass above the step. Three numbers correct for correlated trees and overestimated rises
(`Calibration`): the maximum-likelihood values for the rises measured on other architecture families, on (n, k) pairs
outside the accuracy tables' test rows. `python -m tools.accuracy.cliff_calibration` recomputes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, require_int
from quantbench.latency.families import family, generation
from quantbench.latency.gemm.inputs import whole_sizes
from quantbench.latency.gemm.model import GemmModel

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Log rise to the next candidate's m from which both sides are measured.
_SUSPECTED_STEP = 0.05
# Largest ratio of m between the two sides of an edge.
_NEIGHBOUR_RATIO = 1.02
# Rise that is a cliff, as in `scoring.rises`.
_STEP = 0.10
# Smallest interval width (log time) in the odds, so that shapes with a narrow interval may be drawn too.
_LEAST_WIDTH = 0.01
#: probability from which a cliff is forecast; optimal if a false alarm costs a third of a missed cliff
LIKELY = 0.25


@dataclass(frozen=True)
class Calibration:
    """Calibration of cliff probabilities.

    share: measured over predicted rise.
    spread: deviation of measured rises over that of the trees.
    noise: measurement noise of a rise, log time. (`planner.calibration.Calibration` differs.)
    """

    share: float
    spread: float
    noise: float

    def probability(self, rise: FloatArray, deviation: FloatArray) -> FloatArray:
        """Returns the probability that the time rises by more than 10 %, (rows,). rise, deviation: mean and standard
        deviation of the rise over the trees, log time, (rows,)."""
        from scipy.special import ndtr

        unsure = np.sqrt((self.spread * deviation) ** 2 + self.noise**2)
        return np.asarray(ndtr((self.share * rise - np.log1p(_STEP)) / unsure))


#: generation → calibration fitted on the tables of the other families
CALIBRATIONS: Mapping[str, Calibration] = MappingProxyType(
    {
        "ampere": Calibration(0.664, 0.901, 0.063),
        "hopper": Calibration(0.790, 1.011, 0.049),
        "blackwell": Calibration(0.701, 0.783, 0.056),
        "ada": Calibration(0.732, 0.931, 0.054),
    }
)
#: calibration of generations without a table, fitted on all tables
CALIBRATION_ELSEWHERE = Calibration(0.728, 0.910, 0.055)


def calibration_of(model: GemmModel) -> Calibration:
    """Returns the calibration for a model's generation."""
    return CALIBRATIONS.get(generation(family(model.device)), CALIBRATION_ELSEWHERE)


def cliff_probability(model: GemmModel, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> FloatArray:
    """Returns the probability that the time of m×k times k×n rises by more than 10 % from m to m + 1, (rows,).

    Calibrated for m of 128 and more, multiples of 32, n and k of at least 1024. Between edges it is about 0.07, because
    measured times are noisy. Without measured rows (`GemmModel.prior`) the model has one member and no trees, so its
    probabilities are too close to 0 and 1.

    >>> at_edge, behind_it = cliff_probability(GemmModel.best("a100-sxm4-80gb"), [256, 300], 12288, 4096)
    >>> bool(at_edge > 0.9 > 0.1 > behind_it)
    True
    """
    wide = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x)) for x in (m, n, k)))
    rows, columns, depth = whole_sizes("cliff_probability", *wide)
    return calibration_of(model).probability(*model.ensemble.rise(rows, columns, depth))


def next_points(
    model: GemmModel,
    candidates: tuple[IntArray, IntArray, IntArray],
    count: int,
    *,
    edge_share: float = 0.3,
    seed: int = 0,
) -> IntArray:
    """Selects `count` of the candidates (m, n, k), (rows,) each; returns their indices in measuring order.

    A share `edge_share` goes to both sides of the most uncertain suspected edges. The rest is drawn at random with odds
    of the squared interval width: the widest alone would cluster in the few regions that no model predicts well.
    """
    m, n, k = candidates
    require_int("next_points", "count", count, high=len(m))
    if not 0.0 <= edge_share <= 1.0:
        raise InputError("next_points", f"edge_share = {edge_share!r}", "a share from 0 to 1")
    predicted = model.predict(m, n, k)
    width = np.log(predicted.high_us / predicted.low_us)
    chosen: list[int] = []
    for low, high in _edges(m, n, k, predicted.latency_us, width):
        if len(chosen) + 2 > edge_share * count:
            break
        chosen += [i for i in (low, high) if i not in chosen]
    left = np.setdiff1d(np.arange(len(m)), chosen)
    odds = np.maximum(width[left], _LEAST_WIDTH) ** 2
    drawn = np.random.default_rng(seed).choice(left, count - len(chosen), replace=False, p=odds / odds.sum())
    return np.concatenate([np.array(chosen, dtype=np.int64), drawn])


def _edges(m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray, width: FloatArray) -> list[tuple[int, int]]:
    """Returns index pairs of neighbours in m (same n and k) with a predicted rise, sorted by rise · interval width."""
    order = np.lexsort((m, k, n))
    low, high = order[:-1], order[1:]
    near = (n[low] == n[high]) & (k[low] == k[high]) & (m[low] < m[high]) & (m[high] <= m[low] * _NEIGHBOUR_RATIO + 1)
    rise = np.log(latency_us[high] / latency_us[low])
    found = np.flatnonzero(near & (rise > _SUSPECTED_STEP))
    doubt = rise[found] * (width[low[found]] + width[high[found]])
    return [(int(low[i]), int(high[i])) for i in found[np.argsort(-doubt, kind="stable")]]
