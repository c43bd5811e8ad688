"""Finds sizes that run at a lower rate than a nearby better size, and measures the loss.

A nearby size is one that is smaller by up to 10 %, or one within a factor of two for dimensions in
powers of two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quantbench.analysis.summary import LayerRow, Point, held_of, rows_of, useful_work

#: relative distance within which a user can change a size
NEAR = 0.10
#: factor within which a user can change a size in powers of two
DOUBLE = 2
# Smallest loss that is reported. The limit is larger for single times without samples, because
# their repetitions differ by a few per cent.
_SMALLEST_LOSS = 0.03
_SMALLEST_LOSS_OF_FIGURES = 0.08
# A larger size counts as free if it takes at most this much longer, relative to the time of the
# slow size.
_FREE = 0.01


@dataclass(frozen=True)
class BadSize:
    """A size that runs at a lower rate than a better size nearby.

    The better size is smaller by up to NEAR, or within a factor of DOUBLE.

    row, better: rows of the slow size and of the better size.
    loss: throughput lost against the better size, relative to the throughput of the better size.
    low, high: bounds of the loss, from the intervals of both rows; None for times without samples.
    up_to: largest value of `axis`, up to NEAR larger than the slow size, that takes at most 1 %
        longer; None if there is none.
    culprit, culprit_at_better: the op that loses most time, at the slow size and at the better
        size.
    """

    axis: str
    row: LayerRow
    better: LayerRow
    loss: float
    low: float | None
    high: float | None
    up_to: int | None
    culprit: Point
    culprit_at_better: Point

    @property
    def size(self) -> int:
        """Axis value of the slow row."""
        return self.row.axes[self.axis]


def rows_by_dtype(points: Sequence[Point]) -> tuple[LayerRow, ...]:
    """Returns the rows of the points, separately for each dtype.

    A table may hold one shape in several dtypes.
    """
    by_dtype: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_dtype[point.workload.dtype].append(point)
    return tuple(chain.from_iterable(rows_of(by_dtype[dtype]) for dtype in sorted(by_dtype)))


def curves_of_rows(rows: Iterable[LayerRow], axis: str) -> tuple[tuple[LayerRow, ...], ...]:
    """Groups rows with the same provider, dtype and other axes into curves along `axis`.

    The rows of a curve are in ascending order of `axis`. Leaves out a row if its ops or their
    timing modes differ from those of most rows, because an op failed there.
    """
    curves: dict[tuple[object, ...], list[LayerRow]] = {}
    for row in rows:
        if axis in row.axes:
            key = (row.provider, row.points[0].workload.dtype, held_of(row.axes, axis))
            curves.setdefault(key, []).append(row)
    found = []
    for curve in curves.values():
        curve.sort(key=lambda row: row.axes[axis])
        usual, number = Counter(map(_ops_and_modes, curve)).most_common(1)[0]
        if number < len(curve):
            curve = [row for row in curve if _ops_and_modes(row) == usual]
        found.append(tuple(curve))
    return tuple(found)


def _ops_and_modes(row: LayerRow) -> tuple[tuple[str, str], ...]:
    """Returns the name and the timing mode of each op of a row."""
    return tuple([(point.op, point.mode) for point in row.points])


def bad_sizes_on(
    curves: Iterable[Sequence[LayerRow]], axis: str, *, doubles: bool = False
) -> tuple[BadSize, ...]:
    """Finds the bad sizes on the curves of `curves_of_rows`, largest loss first.

    doubles: whether to compare each size with all sizes within a factor of DOUBLE (tp = 1, 2, 4, 8)
        instead of only smaller sizes within NEAR. `up_to` is then None.
    """
    found: list[BadSize] = []
    for curve in curves:
        found += _of_curve(curve, axis, doubles=doubles)
    return tuple(sorted(found, key=lambda bad: -bad.loss))


def _of_curve(curve: Sequence[LayerRow], axis: str, *, doubles: bool) -> Iterable[BadSize]:
    """Yields the bad sizes of one curve. The arguments are those of `bad_sizes_on`."""
    sizes = [row.axes[axis] for row in curve]
    times_us = np.array([row.latency_us for row in curve])
    rates = np.array([row.work for row in curve]) / times_us
    for i, row in enumerate(curve):
        size = sizes[i]
        if doubles:
            first = bisect_left(sizes, size / DOUBLE)
            stop = bisect_right(sizes, DOUBLE * size)
        else:
            first = bisect_left(sizes, size * (1 - NEAR))
            stop = i
        others = rates[first:stop]
        if not len(others) or others.max() <= rates[i]:
            continue
        up_to = None
        if not doubles:
            above = times_us[i + 1 : bisect_right(sizes, size * (1 + NEAR))]
            free = np.flatnonzero(above <= row.latency_us * (1 + _FREE))
            up_to = sizes[i + 1 + int(free[-1])] if free.size else None
        bad = _against(row, curve[first + int(np.argmax(others))], axis, up_to)
        if bad is not None:
            yield bad


def _against(row: LayerRow, better: LayerRow, axis: str, up_to: int | None) -> BadSize | None:
    """Compares a row with a better row, and returns it as a BadSize.

    Returns None if the loss is small or not significant.
    """
    ratio = (row.work / row.latency_us) / (better.work / better.latency_us)
    loss = 1 - ratio
    low = None
    high = None
    if has_spread(row) and has_spread(better):
        width = row.half_width + better.half_width
        low = loss - ratio * width
        high = loss + ratio * width
        if low < _SMALLEST_LOSS:
            return None
    elif loss < _SMALLEST_LOSS_OF_FIGURES:
        return None
    return BadSize(axis, row, better, loss, low, high, up_to, *_culprit(row, better))


def has_spread(row: LayerRow) -> bool:
    """Returns whether all points of the row have several samples."""
    return all(point.num_samples > 1 for point in row.points)


def _culprit(row: LayerRow, better: LayerRow) -> tuple[Point, Point]:
    """Returns the op that loses most time against its rate at the better size.

    The second point is the same op at the better size.
    """
    there = {point.op: point for point in better.points}

    def excess_us(point: Point) -> float:
        """Returns the time lost against the rate of the same op at the better size, in µs."""
        other = there[point.op]
        growth = useful_work(point.workload) / useful_work(other.workload)
        return point.count * (point.latency_us - other.latency_us * growth)

    culprit = max(row.points, key=excess_us)
    return culprit, there[culprit.op]
