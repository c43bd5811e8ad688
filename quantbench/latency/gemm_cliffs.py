"""Where a GEMM model expects the time to jump from m to m + 1.

An average of models is flatter than what it averages, and trees split between neighbours at random. So a cliff is
forecast where the model or its cost model alone rises by more than the step, less a share of the interval's half-width:
a model that is unsure of a shape is unsure of the step too. The share is the one that forecasts best (the mean F1) on
the public tables of other architecture families, on (n, k) pairs that no accuracy figure is judged on;
`python -m quantbench.validate.cliff_margin` computes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm_model import GemmModel
from quantbench.latency.gemm_prior import family

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: architecture family → share of the half-width, chosen without the family's own tables
MARGIN: Mapping[str, float] = MappingProxyType({"ampere": 0.35, "hopper": 0.30, "blackwell": 0.30, "ada": 0.35})
#: of the families that have no table
MARGIN_ELSEWHERE = 0.30


def margin_of(model: GemmModel) -> float:
    """The share that the forecasts of a model use."""
    return MARGIN.get(family(model.device), MARGIN_ELSEWHERE)


def forecast(
    rise: FloatArray, alone: FloatArray, half_width: FloatArray, *, margin: float, step: float = 0.10
) -> BoolArray:
    """Whether a rise above `step` is forecast, (rows,). rise, alone: in log time, of the model and of its cost model;
    half_width: of its 90 % interval, log time."""
    return np.asarray(np.maximum(rise, alone) > np.log1p(step) - margin * half_width)


def forecast_cliffs(
    model: GemmModel, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, *, step: float = 0.10
) -> BoolArray:
    """Whether the time of m×k times k×n is expected to rise by more than `step` from m to m + 1; sizes (rows,).

    >>> forecast_cliffs(GemmModel.best("a100-sxm4-80gb"), [256, 300], 8192, 4096).tolist()
    [True, False]
    """
    wide = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x)) for x in (m, n, k)))
    low, high = model.predict(*wide), model.predict(wide[0] + 1, *wide[1:])
    rows, columns, depth = (x.astype(np.float64) for x in wide)
    physics = model.ensemble.physics
    alone = physics(rows + 1.0, columns, depth) - physics(rows, columns, depth)
    rise = np.log(high.latency_us / low.latency_us)
    half_width = 0.5 * np.log(low.high_us / low.latency_us * high.high_us / high.latency_us)
    return forecast(rise, alone, half_width, margin=margin_of(model), step=step)
