"""Where a GEMM model expects the time to jump from m to m + 1.

An average of models is flatter than what it averages, for they place the edges of tiles and waves at different m. So a
cliff is forecast where the step lies within so many standard deviations of the expected rise, over all the trees of all
the members. How many is what forecasts best (the mean F1) on the public tables of other architecture families, on
(n, k) pairs that no accuracy figure is judged on; `python -m quantbench.validate.cliff_deviations` computes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm_model import GemmModel, whole_sizes
from quantbench.latency.gemm_prior import family

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: architecture family → standard deviations, chosen without the family's own tables
DEVIATIONS: Mapping[str, float] = MappingProxyType({"ampere": 0.90, "hopper": 0.70, "blackwell": 0.60, "ada": 0.90})
#: of the families that have no table
DEVIATIONS_ELSEWHERE = 0.90


def deviations_of(model: GemmModel) -> float:
    """The standard deviations that the forecasts of a model use."""
    return DEVIATIONS.get(family(model.device), DEVIATIONS_ELSEWHERE)


def forecast(rise: FloatArray, deviation: FloatArray, *, deviations: float, step: float = 0.10) -> BoolArray:
    """Whether a rise above `step` is forecast, (rows,). rise, deviation: the expected one and how unsure it is, in log
    time; deviations: how many of these it may fall short."""
    return np.asarray(rise + deviations * deviation > np.log1p(step))


def forecast_cliffs(
    model: GemmModel, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, *, step: float = 0.10
) -> BoolArray:
    """Whether the time of m×k times k×n is expected to rise by more than `step` from m to m + 1; sizes (rows,).

    >>> forecast_cliffs(GemmModel.best("a100-sxm4-80gb"), [256, 300], 8192, 4096).tolist()
    [True, False]
    """
    wide = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x)) for x in (m, n, k)))
    rows, columns, depth = whole_sizes("forecast_cliffs", *wide)
    return forecast(*model.ensemble.rise(rows, columns, depth), deviations=deviations_of(model), step=step)
