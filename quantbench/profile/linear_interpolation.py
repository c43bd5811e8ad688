"""Finds where linear interpolation in m between GEMM rows is wrong, and which rows to add.

Time jumps at a tile or wave edge, so a line across the edge is wrong on both sides of the edge. The
minimum number of added rows that keep the error within a bound is found as a shortest path.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Largest number of edges considered between two neighbouring rows. Each edge adds two places: the
#: last size before the edge and the first size after it.
_EDGES_PER_GAP = 32
#: Smallest height of a tile. Its multiples include the edges of all tiles, and every wave edge is
#: also a tile edge.
_SMALLEST_BLOCK_M = 16
#: Relative slack in comparisons of slopes, which covers rounding errors.
_ROUNDING = 1e-9
#: Tables of one library, corrected by one row of each (n, k) of another library's table, err by
#: 7.6 % in the median with this value, by 9.3 % without an end of the correction, and by 9.4 %
#: without a correction (aiconfigurator-core 0.12.0: A100, H100, B200 and L40S).
_HALVED_AFTER = 2.0
#: largest relative error of linear interpolation that added rows may leave
BOUND = 0.05


@dataclass(frozen=True)
class Site:
    """Sizes m of one (n, k) with their expected times. A "place" is one such size.

    m: (places,), sizes, ascending.
    expected_us: (places,), expected times in µs: measured where in_table is True, predicted where
        it is False.
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

        added: (places,), mask of the places that count as rows in addition to the table's rows;
            None for none.
        """
        rows = self.in_table if added is None else self.in_table | added
        return (
            interpolated_us(self.m, self.m[rows], self.expected_us[rows]) / self.expected_us - 1.0
        )

    def rows_to_add(self, bound: float) -> BoolArray:
        """Returns the minimum number of places to add as rows, as a mask (places,).

        With these rows, linear interpolation is within `bound` of the expected time at every place.

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
    """Returns the planner's times in µs at sizes m (places,) of one (n, k); nan outside the rows.

    rows_m, rows_us: (rows,), sizes and times of the rows, ascending in m.

    >>> interpolated_us(np.array([3]), np.array([2, 4]), np.array([10.0, 20.0]))
    array([15.])
    """
    out = np.interp(m, rows_m, rows_us, left=np.nan, right=np.nan)
    return np.asarray(out, dtype=np.float64)


def places_between(rows_m: IntArray) -> IntArray:
    """Returns the sizes of the rows and both sides of every tile edge between them, ascending.

    If there are more than 32 edges between two rows, only every second, fourth, … edge is kept.

    rows_m: (rows,), ascending sizes m of the rows of one (n, k).
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
    """Returns a model's times, scaled to match the measured times of the table's rows, (places,).

    Between rows, the log ratio of measured to modelled time is interpolated linearly over log m.
    Outside the rows, the log ratio of the nearest row halves every _HALVED_AFTER doublings of m.

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
    """Returns the smallest set of rows, as indices, that keep linear interpolation within a bound.

    Lines from the first place through these places to the last place, ascending, err by at most
    `bound`, relative to the expected time, at every place. The result does not contain the first
    and the last place, which are rows already.

    m, expected_us: (places,), sizes and expected times.

    >>> fewest_between(np.array([1, 2, 3, 4]), np.array([1.0, 1.0, 2.0, 2.0]), 0.05)
    [1, 2]
    """
    places = len(m)
    x = m.astype(np.float64)
    y = expected_us
    # Smallest number of lines from the first place to each place, and the place before it on them.
    steps = np.full(places, places)
    steps[0] = 0
    came_from = np.full(places, -1)
    for i in range(places - 1):
        # A line from i to j is within the bound if its slope lies in the interval that each place
        # between i and j allows.
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
