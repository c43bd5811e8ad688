"""Finds where linear interpolation in m between GEMM rows is wrong, and which rows to add.

At a tile or wave edge (the m after which a GEMM needs another row of tiles or another wave), the
time jumps. A straight line across the edge is wrong on both sides. `Site.rows_to_add` finds the
smallest set of added rows that keeps the error within a bound, as a shortest path.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Largest number of edges considered between two neighbouring rows. Each edge adds two sizes m: the
#: last before the edge and the first after it.
_EDGES_PER_GAP = 32
#: Smallest tile height (block_m). Its multiples include the edges of all tiles, and every wave edge
#: is also a tile edge.
_SMALLEST_BLOCK_M = 16
#: Relative tolerance in comparisons of slopes, for rounding errors.
_ROUNDING = 1e-9
#: Number of doublings of m beyond the rows after which `through_rows` halves its correction. Tested
#: by correcting one library's table with one row per (n, k) of another library's table: the median
#: error is 7.6 % with this value, 9.3 % if the correction never fades, and 9.4 % without correction
#: (aiconfigurator-core 0.12.0: A100, H100, B200 and L40S).
_HALVED_AFTER = 2.0
#: Largest relative error of linear interpolation that is accepted after rows are added.
BOUND = 0.05


@dataclass(frozen=True)
class Site:
    """Sizes m of one (n, k) with their expected times. Each size is called a place.

    m: (places,), sizes, ascending.
    expected_us: (places,), times in µs: measured for sizes with a row, predicted for the rest.
    in_table: (places,), whether the table has a row of this size. The first and the last size
        always have rows.
    """

    n: int
    k: int
    m: IntArray
    expected_us: FloatArray
    in_table: BoolArray

    def errors(self, added: BoolArray | None = None) -> FloatArray:
        """Returns the relative error of linear interpolation at each place, (places,).

        added: (places,), mask of places to interpolate from in addition to the table's rows; None
            for the table's rows alone.
        """
        rows = self.in_table if added is None else self.in_table | added
        return (
            interpolated_us(self.m, self.m[rows], self.expected_us[rows]) / self.expected_us - 1.0
        )

    def rows_to_add(self, bound: float) -> BoolArray:
        """Returns the smallest set of places to add as rows, as a mask (places,).

        With the added rows, linear interpolation errs by at most `bound` at every place.

        bound: largest relative error, such as 0.05.
        """
        added = np.zeros(len(self.m), dtype=np.bool_)
        wrong = np.abs(self.errors()) > bound
        for low, high in pairwise(np.flatnonzero(self.in_table).tolist()):
            gap = slice(low, high + 1)
            if wrong[gap].any():
                chain = fewest_between(self.m[gap], self.expected_us[gap], bound)
                added[[low + i for i in chain]] = True
        return added


def interpolated_us(m: IntArray, rows_m: IntArray, rows_us: FloatArray) -> FloatArray:
    """Interpolates the rows of one (n, k) linearly in m, as planners do; nan outside the rows.

    m: (places,), sizes at which to interpolate. The result is in µs, (places,).
    rows_m, rows_us: (rows,), sizes and times of the rows, ascending in m.

    >>> interpolated_us(np.array([3]), np.array([2, 4]), np.array([10.0, 20.0]))
    array([15.])
    """
    out = np.interp(m, rows_m, rows_us, left=np.nan, right=np.nan)
    return np.asarray(out, dtype=np.float64)


def places_between(rows_m: IntArray) -> IntArray:
    """Returns the rows' sizes m, and the sizes on both sides of each tile edge between rows.

    The result ascends. A gap with more than _EDGES_PER_GAP edges keeps only every second edge, or
    every fourth, and so on.

    rows_m: (rows,), sizes m of one (n, k), ascending.
    """
    found = [rows_m]
    for low, high in pairwise(rows_m):
        step = _SMALLEST_BLOCK_M
        while (high - low) > _EDGES_PER_GAP * step:
            step *= 2
        edges = np.arange(-(-low // step) * step, high, step)
        both = np.concatenate([edges, edges + 1])
        found.append(both[(both > low) & (both < high)])
    return np.unique(np.concatenate(found)).astype(np.int64)


def through_rows(
    m: IntArray, model_us: FloatArray, in_table: BoolArray, rows_us: FloatArray
) -> FloatArray:
    """Scales a model's times so that they pass through the table's rows, (places,).

    The model's time is multiplied by the ratio of measured to modelled time. Between rows, the log
    ratio is interpolated linearly over log m. Outside the rows, the nearest row's log ratio is
    halved with every _HALVED_AFTER doublings of m.

    m: (places,), ascending sizes.
    model_us: (places,), the model's times.
    in_table: (places,), whether a size has a row.
    rows_us: (rows,), measured times.
    """
    ratio = np.log(rows_us / model_us[in_table])
    doublings = np.log2(m)
    rows_at = doublings[in_table]
    beyond = np.abs(doublings - np.clip(doublings, rows_at[0], rows_at[-1]))
    shift = np.interp(doublings, rows_at, ratio) * 0.5 ** (beyond / _HALVED_AFTER)
    moved = model_us * np.exp(shift)
    moved[in_table] = rows_us
    return np.asarray(moved, dtype=np.float64)


def fewest_between(m: IntArray, expected_us: FloatArray, bound: float) -> list[int]:
    """Returns the smallest set of places that keeps linear interpolation within a bound.

    The result has indices in ascending order, without the first and the last place, which are rows
    already. Straight lines from the first place through the returned places to the last place err
    by at most `bound` at every place.

    m, expected_us: (places,), sizes and expected times.
    bound: largest error, relative to the expected time.

    >>> fewest_between(np.array([1, 2, 3, 4]), np.array([1.0, 1.0, 2.0, 2.0]), 0.05)
    [1, 2]
    """
    places = len(m)
    x = m.astype(np.float64)
    y = expected_us
    # steps: smallest number of lines from the first place to each place. came_from: the place where
    # the last of these lines starts.
    steps = np.full(places, places)
    steps[0] = 0
    came_from = np.full(places, -1)
    for i in range(places - 1):
        # Every place between i and j limits the slope of the line from i to j to an interval. The
        # line is within the bound if its slope lies in all these intervals.
        dx = x[i + 1 :] - x[i]
        slope = (y[i + 1 :] - y[i]) / dx
        lowest = np.maximum.accumulate(((1 - bound) * y[i + 1 :] - y[i]) / dx)
        highest = np.minimum.accumulate(((1 + bound) * y[i + 1 :] - y[i]) / dx)
        good = np.ones(len(dx), dtype=np.bool_)
        slack = _ROUNDING * np.abs(slope[1:])
        good[1:] = (slope[1:] >= lowest[:-1] - slack) & (slope[1:] <= highest[:-1] + slack)
        reached = np.flatnonzero(good) + i + 1
        nearer = reached[steps[i] + 1 < steps[reached]]
        steps[nearer] = steps[i] + 1
        came_from[nearer] = i
    chain = []
    place = int(came_from[-1])
    while place > 0:
        chain.append(place)
        place = int(came_from[place])
    return chain[::-1]
