"""Which shapes to measure next: where a model is least sure, and both sides of edges that it suspects.

On replayed public tables this is compared with choosing at random (`python -m tools.accuracy.page --adaptive`);
docs/accuracy.md has the result.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, require_int

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# A time that rises by this much from one m to the next candidate's is worth both of its sides.
_SUSPECTED_STEP = 0.05
# Neighbours further apart than this are two sizes, not two sides of an edge.
_NEIGHBOUR_RATIO = 1.02
# A model that is sure of a shape (it may be wrong) still leaves it a small chance.
_LEAST_WIDTH = 0.01


class _Predicted(Protocol):
    @property
    def latency_us(self) -> FloatArray: ...
    @property
    def low_us(self) -> FloatArray: ...
    @property
    def high_us(self) -> FloatArray: ...


class Model(Protocol):
    """Anything that predicts products with an interval."""

    def predict(self, m: IntArray, n: IntArray, k: IntArray) -> _Predicted: ...


def next_points(
    model: Model, candidates: tuple[IntArray, IntArray, IntArray], count: int, *, edge_share: float = 0.3, seed: int = 0
) -> IntArray:
    """Indices of `count` of the candidates (m, n, k), each (rows,), in the order they should be measured.

    A share `edge_share` goes to both sides of the steepest suspected edges. The rest is drawn with odds of the squared
    width of the interval: always taking the widest would crowd into the few corners that no model gets right.
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
    """Pairs of neighbours in m with the same n and k between which the predicted time rises, the most doubtful
    steps first (the rise times the width of the interval)."""
    order = np.lexsort((m, k, n))
    low, high = order[:-1], order[1:]
    near = (n[low] == n[high]) & (k[low] == k[high]) & (m[low] < m[high]) & (m[high] <= m[low] * _NEIGHBOUR_RATIO + 1)
    rise = np.log(latency_us[high] / latency_us[low])
    found = np.flatnonzero(near & (rise > _SUSPECTED_STEP))
    doubt = rise[found] * (width[low[found]] + width[high[found]])
    return [(int(low[i]), int(high[i])) for i in found[np.argsort(-doubt, kind="stable")]]
