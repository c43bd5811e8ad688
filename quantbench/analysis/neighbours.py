"""Finds bad sizes: sizes at which a layer runs at a lower rate than at a better size nearby.

The rate is that of all measured ops of a layer together. A size is compared with sizes that are
smaller by up to 10 %. A dimension in powers of two, such as tp, is compared with all sizes within a
factor of two. `bad_sizes_on` is the entry point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quantbench.analysis.summary import LayerRow, Point, held_of, rows_of, useful_work

#: largest relative change of a size that a user is expected to accept
NEAR = 0.10
#: the same as a factor, for dimensions in powers of two
DOUBLE = 2
# Smallest loss that is reported, as a fraction of the throughput. The second limit applies to times
# without several samples; it is larger because repetitions of such times differ by a few per cent.
_SMALLEST_LOSS = 0.03
_SMALLEST_LOSS_OF_FIGURES = 0.08
# A larger size counts as free if it takes at most this fraction longer than the slow size.
_FREE = 0.01


@dataclass(frozen=True)
class BadSize:
    """A size that runs at a lower rate than a better size nearby.

    The better size is smaller by up to NEAR, or within a factor of DOUBLE.

    row, better: layer rows at the slow size and at the better size.
    loss: 1 − rate at the slow size / rate at the better size.
    low, high: bounds of the loss, from the intervals of both rows; None if a row has single times.
    up_to: largest size that takes at most 1 % longer than the slow size and is larger by up to
        NEAR; None if there is none.
    culprit, culprit_at_better: op that loses most time, at the slow size and at the better size.
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
    """Sums the points to layer rows, separately for each dtype.

    A table may contain the same shape in several dtypes, which must not be summed.
    """
    by_dtype: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        by_dtype[point.workload.dtype].append(point)
    return tuple(chain.from_iterable(rows_of(by_dtype[dtype]) for dtype in sorted(by_dtype)))


def curves_of_rows(rows: Iterable[LayerRow], axis: str) -> tuple[tuple[LayerRow, ...], ...]:
    """Groups rows with the same provider, dtype and other axes into curves along `axis`.

    The rows of a curve are in ascending order of `axis`. A row is left out if its ops or their
    timing modes differ from the most frequent ones of the curve, for instance because an op failed.
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
    """Finds the bad sizes on curves, largest loss first.

    curves: result of `curves_of_rows` for `axis`.
    doubles: if True, each size is compared with all sizes within a factor of DOUBLE (tp = 1, 2, 4,
        8), and `up_to` is None. If False, it is compared with smaller sizes within NEAR.
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
    """Returns the bad size that a row shows against a better row.

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

    Returns two points: the op in `row`, and the same op in `better`.
    """
    there = {point.op: point for point in better.points}

    def excess_us(point: Point) -> float:
        """Returns the time lost against the rate of the same op at the better size, in µs."""
        other = there[point.op]
        growth = useful_work(point.workload) / useful_work(other.workload)
        return point.count * (point.latency_us - other.latency_us * growth)

    culprit = max(row.points, key=excess_us)
    return culprit, there[culprit.op]
