"""Finds sizes that are slower than a smaller size near them: `bad_sizes`, or `against_doubles` for sizes far apart.

The first screen of a report rests on it (`report.lead`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from quantbench.analysis.summary import Point, Row, rows_of

#: how far somebody who has chosen a size is ready to move it
NEAR = 0.10
#: and where sizes come in powers of two
DOUBLE = 2
# A loss below this is not worth moving for; of single figures without a spread, whose repeats differ by a few per cent,
# more is asked for.
_SMALLEST_LOSS, _SMALLEST_LOSS_OF_FIGURES = 0.03, 0.08
# Growth that costs less time than this is for nothing.
_FOR_NOTHING = 0.01


@dataclass(frozen=True)
class BadSize:
    """At `row` the device does less work per second than at `better`, a smaller value of `axis` within NEAR below.

    loss: throughput lost against the better size, as a share.
    low, high: bounds of the loss from both intervals; None for figures without samples.
    up_to: the largest value within NEAR above that takes no longer; None where growing costs time.
    culprit: the op that loses most; culprit_at_better: the same op at the better size.
    """

    axis: str
    row: Row
    better: Row
    loss: float
    low: float | None
    high: float | None
    up_to: int | None
    culprit: Point
    culprit_at_better: Point

    @property
    def size(self) -> int:
        return self.row.axes[self.axis]


def rows_by_dtype(points: Sequence[Point]) -> tuple[Row, ...]:
    """Rows as `rows_of` makes them, each of one dtype: a table may hold the same shapes in several."""
    found: list[Row] = []
    by_dtype = sorted(points, key=lambda p: p.workload.dtype)
    for _, group in groupby(by_dtype, key=lambda p: p.workload.dtype):
        found += rows_of(list(group))
    return tuple(found)


def curves_of_rows(rows: Iterable[Row], axis: str) -> tuple[tuple[Row, ...], ...]:
    """Rows that differ in `axis` alone, ascending: same provider, dtype and other axes.

    Rows that lack an op which the others have (it failed there) cannot be compared and are left out.
    """
    curves: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if axis in row.axes:
            held = tuple([item for item in row.axes.items() if item[0] != axis])
            curves.setdefault((row.provider, row.points[0].workload.dtype, held), []).append(row)
    return tuple(
        (curve[0],) if len(curve) == 1 else _of_usual_ops(sorted(curve, key=lambda row: row.axes[axis]))
        for curve in curves.values()
    )


def _of_usual_ops(curve: Sequence[Row]) -> tuple[Row, ...]:
    ops = [tuple([point.op for point in row.points]) for row in curve]
    if len(set(ops)) == 1:
        return tuple(curve)
    usual = Counter(ops).most_common(1)[0][0]
    return tuple(row for row, own in zip(curve, ops, strict=True) if own == usual)


def bad_sizes(rows: Sequence[Row], axis: str) -> tuple[BadSize, ...]:
    """Every bad size along `axis`, the worst first."""
    return bad_sizes_on(curves_of_rows(rows, axis), axis)


def bad_sizes_on(curves: Iterable[Sequence[Row]], axis: str) -> tuple[BadSize, ...]:
    """The same for curves made by `curves_of_rows`."""
    found = [bad for curve in curves for bad in _of_curve(curve, axis)]
    return tuple(sorted(found, key=lambda bad: -bad.loss))


def _of_curve(curve: Sequence[Row], axis: str) -> Iterable[BadSize]:
    sizes = [row.axes[axis] for row in curve]
    if not any(smaller >= size * (1 - NEAR) for smaller, size in pairwise(sizes)):
        return
    first_near = np.searchsorted(sizes, np.array(sizes) * (1 - NEAR))
    with_smaller = np.flatnonzero(first_near < np.arange(len(curve)))
    times_us = np.array([row.latency_us for row in curve])
    rates = np.array([row.work for row in curve]) / times_us
    for i in with_smaller.tolist():
        row, first = curve[i], first_near[i]
        best = int(first + np.argmax(rates[first:i]))
        if rates[best] <= rates[i]:
            continue
        above = times_us[i + 1 : bisect_right(sizes, sizes[i] * (1 + NEAR))]
        free = np.flatnonzero(above <= row.latency_us * (1 + _FOR_NOTHING))
        bad = _against(row, curve[best], axis, sizes[i + 1 + int(free[-1])] if free.size else None)
        if bad is not None:
            yield bad


def _against(row: Row, better: Row, axis: str, up_to: int | None) -> BadSize | None:
    """The loss of one row against another; None where it is small or not significant."""
    ratio = (row.work / row.latency_us) / (better.work / better.latency_us)
    loss, width = 1 - ratio, row.half_width + better.half_width
    measured = has_spread(row) and has_spread(better)
    smallest = loss - ratio * width
    if (smallest if measured else loss) < (_SMALLEST_LOSS if measured else _SMALLEST_LOSS_OF_FIGURES):
        return None
    culprit, counterpart = _culprit(row, better)
    return BadSize(
        axis, row, better, loss, smallest if measured else None, loss + ratio * width if measured else None, up_to,
        culprit, counterpart,
    )  # fmt: skip


def against_doubles(rows: Iterable[Row], axis: str) -> tuple[BadSize, ...]:
    """For sizes that are far apart (tp = 1, 2, 4, 8): sizes that lose against one at most DOUBLE times as large or
    small.

    The worst first. `up_to` is None in all of them.
    """
    found = []
    for curve in curves_of_rows(rows, axis):
        for row in curve:
            size = row.axes[axis]
            around = [other for other in curve if size <= DOUBLE * other.axes[axis] <= DOUBLE**2 * size]
            best = max(around, key=lambda other: other.work / other.latency_us)
            if best is not row and (bad := _against(row, best, axis, None)) is not None:
                found.append(bad)
    return tuple(sorted(found, key=lambda bad: -bad.loss))


def has_spread(row: Row) -> bool:
    """Whether all figures of the row come with samples."""
    return all(point.num_samples > 1 for point in row.points)


def _culprit(row: Row, better: Row) -> tuple[Point, Point]:
    """The op that takes most time beyond what it would take at the better size's rate, its counterpart and share."""
    there = {point.op: point for point in better.points}
    excess: list[tuple[float, Point]] = []
    for point in row.points:
        other = there[point.op]
        growth = (point.workload.flops or point.workload.min_bytes) / (other.workload.flops or other.workload.min_bytes)
        excess.append((point.count * (point.latency_us - other.latency_us * growth), point))
    _, culprit = max(excess, key=lambda pair: pair[0])
    return culprit, there[culprit.op]
