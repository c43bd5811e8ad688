"""Interpolates times between measured shapes, using a model for the jumps between them.

Time jumps at a tile or wave edge, the size after which a GEMM needs another tile or another wave
(set of tiles that run at once). The model has the edges, so the ratio of measured to modelled time
is smooth. `Surface` interpolates this ratio and multiplies the model's time by it. The ratio comes
from the two nearest measured shapes on a line, along which some sizes grow in proportion while the
other sizes stay fixed. Without such a line, the ratio is the median over all measured shapes. The
intervals of interpolated times come from leave-one-out errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.estimate import bounded

IntArray = npt.NDArray[np.int64]
Sizes = tuple[IntArray, ...]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]

#: Names of a time's source. The codes below are indices in SOURCES.
SOURCES = ("measured", "interpolated", "modelled")
MEASURED, INTERPOLATED, MODELLED = range(3)


class RowIndex:
    """Finds the row that has given sizes.

    sizes: one (rows,) array per size. No two rows have the same sizes.

    >>> index = RowIndex((np.array([1, 2, 2]), np.array([5, 5, 6])))
    >>> index.find((np.array([2, 2]), np.array([6, 7])))
    array([ 2, -1])
    """

    def __init__(self, sizes: Sizes) -> None:
        self._rows = {key: row for row, key in enumerate(_keys(sizes))}

    def find(self, sizes: Sizes) -> IntArray:
        """Returns for each shape the index of the row with its sizes, or -1, (shapes,)."""
        return np.array([self._rows.get(key, -1) for key in _keys(sizes)], dtype=np.int64)


def _keys(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    """Returns the sizes of each shape as a tuple of Python integers."""
    return zip(*(size.tolist() for size in sizes), strict=True)


#: Largest gap that is interpolated: ratio of the larger to the smaller of the two neighbouring
#: measured shapes, in the sizes that grow along the line.
WIDEST_GAP = 2.0


class _Family:
    """Family of lines: along each line, the same sizes grow in proportion and the rest stay fixed.

    moving: indices of the sizes that grow.
    rows: (rows,), row indices, sorted by line and then by position on the line.
    scale: (rows,), position on the line, in the order of `rows`. Positions ascend on each line.
    value: (rows,), quantity to interpolate, in the order of `rows`.
    first: (lines,), index in `rows` of each line's first row.
    ends: (lines,), index in `rows` just past each line's last row.
    """

    def __init__(self, sizes: Sizes, value: FloatArray, moving: tuple[int, ...]) -> None:
        names, scale = line_of(sizes, moving)
        self.moving = moving
        self.rows = np.lexsort([scale, *reversed(names)])
        self.scale = scale[self.rows].astype(np.float64)
        self.value = value[self.rows]
        new = np.logical_or.reduce([np.diff(name[self.rows], prepend=0) != 0 for name in names])
        self.first = np.flatnonzero(new)
        self.ends = np.append(self.first[1:], len(new))
        self._lines = RowIndex(tuple(name[self.rows[self.first]] for name in names))
        # Positions restart on each line. An offset per line makes them ascend over all lines, so
        # that one binary search serves all lines.
        self._span = float(scale.max()) + 1.0
        self._ascending = self.scale + self._span * (np.cumsum(new) - 1)

    def between(self, low: IntArray, at: Array, high: IntArray) -> tuple[FloatArray, BoolArray]:
        """Interpolates between pairs of rows, linearly in the log of the position.

        Returns the values (shapes,), and whether the positions of each pair differ by at most the
        factor WIDEST_GAP (shapes,).

        low, high: (shapes,), indices in `rows` of the two rows.
        at: (shapes,), positions between the two rows.
        """
        near = self.scale[high] <= WIDEST_GAP * self.scale[low]
        share = np.log(at / self.scale[low]) / np.log(self.scale[high] / self.scale[low])
        return self.value[low] * (1.0 - share) + self.value[high] * share, near

    def bracket(self, sizes: Sizes) -> tuple[BoolArray, FloatArray]:
        """Returns whether each shape lies between two rows on a line, and its interpolated value.

        Both arrays are (shapes,). The positions of the two rows must differ by at most the factor
        WIDEST_GAP.
        """
        names, scale = line_of(sizes, self.moving)
        line = self._lines.find(names)
        above = np.searchsorted(self._ascending, line * self._span + scale)
        at = np.flatnonzero((line >= 0) & (above > self.first[line]) & (above < self.ends[line]))
        found = np.zeros(len(line), dtype=bool)
        value = np.zeros(len(line))
        value[at], found[at] = self.between(above[at] - 1, scale[at], above[at])
        return found, value


def line_of(sizes: Sizes, moving: tuple[int, ...]) -> tuple[Sizes, IntArray]:
    """Returns the identifier of each shape's line, and the shape's position on the line.

    The position is the greatest common divisor of the moving sizes. The identifier is the shape
    with its moving sizes divided by the position.

    moving: indices of the sizes that grow along a line.
    """
    common = np.gcd.reduce([sizes[i] for i in moving])
    return tuple(size // common if i in moving else size for i, size in enumerate(sizes)), common


@dataclass(frozen=True)
class Lines:
    """Interpolates along lines of measured rows.

    sizes: one (rows,) array per size.
    value: (rows,), quantity to interpolate.
    families: families of lines, tried in order. Each is given by the indices of the sizes that grow
        along its lines.
    """

    sizes: Sizes
    value: FloatArray
    families: tuple[tuple[int, ...], ...]

    def between(self, sizes: Sizes) -> tuple[BoolArray, FloatArray]:
        """Returns whether each shape lies between two rows on a line, and its interpolated value.

        Both arrays are (shapes,). The first family with such a line is used.
        """
        found = np.zeros(len(sizes[0]), dtype=bool)
        value = np.zeros(len(found))
        for family in self._built:
            left = np.flatnonzero(~found)
            found[left], value[left] = family.bracket(tuple(size[left] for size in sizes))
        return found, value

    def left_out(self) -> tuple[BoolArray, FloatArray]:
        """Interpolates each row from its two neighbours on a line, without the row itself.

        Returns the same two arrays as `between`, here (rows,).
        """
        found = np.zeros(len(self.value), dtype=bool)
        value = np.zeros(len(self.value))
        for family in self._built:
            inner = ~found[family.rows]
            inner[family.first] = inner[family.ends - 1] = False
            at = np.flatnonzero(inner)
            rows = family.rows[at]
            value[rows], found[rows] = family.between(at - 1, family.scale[at], at + 1)
        return found, value

    @cached_property
    def _built(self) -> list[_Family]:
        return [
            _Family(self.sizes, self.value, moving) for moving in self.families if len(self.value)
        ]


# Fraction of errors that an interval covers.
_COVERED = 0.9
# Smallest number of leave-one-out errors from which `Trust` is estimated. With fewer errors, the
# share is 1 and the half-width is the model's.
_FEWEST_LEFT_OUT = 8
# Smallest half-width (log time) of the interval around an interpolated time. It covers the drift
# between runs.
_LEAST_HALF_WIDTH = 0.01
# Factor on `Trust.half_width`. Measured sizes are rounder than queried sizes, which makes them
# easier for the model, so leave-one-out errors are too small by about this factor. It was estimated
# from the public A100 table's rows at m other than powers of two.
HALF_WIDTH_FACTOR = 1.15
# The same factor for a model that was fitted to the measured rows. Individual public tables need
# 1.4 (L40S), 1.6 (A100), 1.9 (B200) and 2.2 (H100).
_LESS_ROUND_FITTED = 1.75
# Smallest number of rows from which the model's bias is estimated; with fewer rows the bias is 0.
_FEWEST_FOR_BIAS = 5
#: Factor on the half-width (log time) of modelled times outside the measured range.
OUTSIDE_WIDER = 1.5


#: A model's prediction, four arrays (shapes,): latency in µs, the 90 % interval's half-widths (log
#: time) below and above the latency, and the shortest possible time (the floor) in µs.
Predicted = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
#: Five arrays (shapes,): latency_us, low_us, high_us, source code, and whether the shape is outside
#: the measured range.
Times = tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int8], BoolArray]
#: Model that predicts any shape. The argument has one int64 array (shapes,) per size.
Base = Callable[[Sizes], Predicted]


@dataclass(frozen=True)
class Trust:
    """Calibration of an interpolation, from its leave-one-out errors.

    share: how far the correction moves from the bias (share 0) to the interpolated log ratio
        (share 1).
    half_width: half-width in log time of the 90 % interval around an interpolated time.
    """

    share: float
    half_width: float


@dataclass(frozen=True)
class Surface:
    """Estimates the time of any shape, from measured rows and a model.

    sizes: one (rows,) array per size of the measured rows.
    latency_us, low_us, high_us: (rows,), times of the measured rows and their intervals.
    base: model that predicts any shape.
    families: families of lines, as in `Lines`.
    fitted: whether `base` was fitted to these rows. The model's errors on the rows are then smaller
        than its errors on other shapes.
    """

    sizes: Sizes
    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    base: Base
    families: tuple[tuple[int, ...], ...]
    fitted: bool = False

    def many(self, sizes: Sizes) -> Times:
        """Returns the times of shapes: the row's time for a measured shape, else an estimate.

        sizes: one int64 array (shapes,) per size.
        """
        if not len(self.latency_us):
            return self._unmeasured(sizes)
        row = self.index.find(sizes)
        rest = np.flatnonzero(row < 0)
        code = np.full(len(row), MEASURED, dtype=np.int8)
        outside = np.zeros(len(row), dtype=bool)
        columns = (self.latency_us[row], self.low_us[row], self.high_us[row], code, outside)
        if rest.size:
            found = self._unmeasured(tuple(size[rest] for size in sizes))
            arrays: Sequence[Array] = columns
            for column, values in zip(arrays, found, strict=True):
                column[rest] = values
        return columns

    def _unmeasured(self, sizes: Sizes) -> Times:
        """Estimates shapes without a row: interpolated if they lie between rows, else modelled."""
        model_us, below, above, floor_us = self.base(sizes)
        between, ratio = self.lines.between(sizes)
        outside = np.zeros(len(between), dtype=bool)
        for size, (low, high) in zip(sizes, self.range, strict=True):
            outside |= (size < low) | (size > high)
        shift = np.where(between, self.bias + self.trust.share * (ratio - self.bias), self.bias)
        wider = np.where(outside, OUTSIDE_WIDER, 1.0)
        half_below = np.where(between, self.trust.half_width, below * wider)
        half_above = np.where(between, self.trust.half_width, above * wider)
        code = np.where(between, INTERPOLATED, MODELLED).astype(np.int8)
        return (*bounded(model_us * np.exp(shift), half_below, half_above, floor_us), code, outside)

    @cached_property
    def index(self) -> RowIndex:
        """Index of the measured rows by their sizes."""
        return RowIndex(self.sizes)

    @cached_property
    def range(self) -> tuple[tuple[int, int], ...]:
        """Smallest and largest measured value of each size.

        If nothing was measured, each range is the empty range (1, 0).
        """
        if not len(self.latency_us):
            return ((1, 0),) * len(self.sizes)
        return tuple((int(size.min()), int(size.max())) for size in self.sizes)

    @cached_property
    def _log_ratio(self) -> FloatArray:
        """Log ratio of measured to modelled time of each row, (rows,)."""
        if not len(self.latency_us):
            return self.latency_us
        return np.asarray(np.log(self.latency_us / self.base(self.sizes)[0]))

    @cached_property
    def lines(self) -> Lines:
        """Interpolation of the log ratio of measured to modelled time."""
        return Lines(self.sizes, self._log_ratio, self.families)

    @cached_property
    def bias(self) -> float:
        """Median log ratio of measured to modelled time over all rows; 0 with fewer than five."""
        if len(self.latency_us) < _FEWEST_FOR_BIAS:
            return 0.0
        return float(np.median(self._log_ratio))

    @cached_property
    def trust(self) -> Trust:
        """Calibration from the rows' leave-one-out errors.

        A model that was fitted to the rows has smaller errors on the rows than on other shapes, so
        the leave-one-out half-width is too small. This half-width is multiplied by the ratio of the
        model's half-width, which comes from held-out rows, to the model's error on the rows. The
        product is limited to the model's half-width.
        """
        if not len(self.latency_us):
            return Trust(1.0, log(2.0))  # not used, because nothing is interpolated without rows
        inner, ratio = self.lines.left_out()
        if inner.sum() < _FEWEST_LEFT_OUT:
            return Trust(1.0, max(_LEAST_HALF_WIDTH, self._base_half_width))
        predicted = ratio[inner] - self.bias
        true = self._log_ratio[inner] - self.bias
        squares = float((predicted**2).sum())
        # Least-squares slope of the measured log ratios over the interpolated log ratios.
        share = 1.0
        if squares > 0:
            share = min(1.0, max(0.0, float((predicted * true).sum()) / squares))
        error = np.abs(true - share * predicted)
        # A sample's quantile is uncertain by one rank, so the next higher rank is used.
        rank = min(1.0, _COVERED * (len(error) + 1) / len(error))
        half_width = float(np.quantile(error, rank))
        less_round = HALF_WIDTH_FACTOR
        if self.fitted:
            less_round = _LESS_ROUND_FITTED
            on_rows = float(np.quantile(np.abs(self._log_ratio - self.bias), _COVERED))
            held_out = self._base_half_width
            if 0.0 < on_rows < held_out:
                half_width = min(half_width * held_out / on_rows, max(half_width, held_out))
        return Trust(share, max(_LEAST_HALF_WIDTH, less_round * half_width))

    @property
    def _base_half_width(self) -> float:
        """Median over the rows of the model's half-width (log time, 90 % interval)."""
        _, below, above, _ = self.base(self.sizes)
        return float(np.median(np.maximum(below, above)))
