"""Interpolates times between measured shapes with a model that knows the tile and wave edges.

The model's time is multiplied by the ratio of measured to modelled time, which is smooth across
edges. The ratio is interpolated between the two nearest measured shapes on a line, along which some
sizes grow in proportion while the others stay fixed; without such a line, the ratio is the median
over all measured shapes. The intervals come from leave-one-out errors of the measured shapes.
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

#: Sources of a time, and their codes, which are indices in SOURCES.
SOURCES = ("measured", "interpolated", "modelled")
MEASURED, INTERPOLATED, MODELLED = range(3)


class RowIndex:
    """Index of rows by their sizes.

    sizes: one (rows,) array per size. No two rows are equal.

    >>> index = RowIndex((np.array([1, 2, 2]), np.array([5, 5, 6])))
    >>> index.find((np.array([2, 2]), np.array([6, 7])))
    array([ 2, -1])
    """

    def __init__(self, sizes: Sizes) -> None:
        self._rows = {key: row for row, key in enumerate(_keys(sizes))}

    def find(self, sizes: Sizes) -> IntArray:
        """Returns the index of the row that has exactly these sizes, or -1, (shapes,)."""
        return np.array([self._rows.get(key, -1) for key in _keys(sizes)], dtype=np.int64)


def _keys(sizes: Sizes) -> Iterator[tuple[int, ...]]:
    return zip(*(size.tolist() for size in sizes), strict=True)


#: Times are interpolated between two measured shapes on a line only if the sizes that grow along
#: the line differ by at most this ratio.
WIDEST_GAP = 2.0


class _Family:
    """Lines of rows along which some sizes grow in proportion while the other sizes stay fixed.

    moving: indices of the sizes that grow.
    rows: (rows,), index of each row, ordered by line and by position on the line.
    scale, value: (rows,), position on the line and interpolated quantity, in the order of `rows`.
        Positions ascend on each line.
    first, ends: (lines,), indices in `rows` of the first row of each line, and one past its last
        row.
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
        # Positions restart on each line. Adding a multiple of the line's index makes them ascend
        # over all lines.
        self._span = float(scale.max()) + 1.0
        self._ascending = self.scale + self._span * (np.cumsum(new) - 1)

    def between(self, low: IntArray, at: Array, high: IntArray) -> tuple[FloatArray, BoolArray]:
        """Interpolates between pairs of rows.

        Returns the values, and whether the positions of the two rows differ by at most WIDEST_GAP.
        Both are (shapes,).

        low, high: (shapes,), indices in `rows` of the two rows.
        at: (shapes,), positions between the two rows.
        """
        near = self.scale[high] <= WIDEST_GAP * self.scale[low]
        share = np.log(at / self.scale[low]) / np.log(self.scale[high] / self.scale[low])
        return self.value[low] * (1.0 - share) + self.value[high] * share, near

    def bracket(self, sizes: Sizes) -> tuple[BoolArray, FloatArray]:
        """Returns whether each shape lies between two near rows, and its interpolated value.

        Both are (shapes,).
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
    """Interpolation along lines of measured rows.

    sizes: one (rows,) array per size.
    value: (rows,), quantity to interpolate.
    families: kinds of lines, tried in order. Each names the indices of the sizes that grow
        together.
    """

    sizes: Sizes
    value: FloatArray
    families: tuple[tuple[int, ...], ...]

    def between(self, sizes: Sizes) -> tuple[BoolArray, FloatArray]:
        """Returns whether each shape lies between two measured ones, and its interpolated value.

        Both are (shapes,).
        """
        found = np.zeros(len(sizes[0]), dtype=bool)
        value = np.zeros(len(found))
        for family in self._built:
            left = np.flatnonzero(~found)
            found[left], value[left] = family.bracket(tuple(size[left] for size in sizes))
        return found, value

    def left_out(self) -> tuple[BoolArray, FloatArray]:
        """Interpolates each row from its neighbours on a line, as if the row were not there.

        Returns the same arrays as `between`, (rows,) each.
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
# Smallest number of leave-one-out errors from which `Trust` is estimated. With fewer, the whole
# ratio is applied, with the half-width of the model.
_FEWEST_LEFT_OUT = 8
# Smallest half-width (log time) of an interpolated time, which covers the drift between runs.
_LEAST_HALF_WIDTH = 0.01
# Measured sizes are rounder than queried ones and easier for the model, so leave-one-out errors are
# too small by this factor, by which `Trust.half_width` is multiplied (estimated from rows of the
# public A100 table at m other than powers of two).
_LESS_ROUND = 1.15
# The same factor for a model that was fitted to the measured rows. Single public tables need 1.4
# (L40S), 1.6 (A100), 1.9 (B200) and 2.2 (H100).
_LESS_ROUND_FITTED = 1.75
# Smallest number of rows from which the model's bias is estimated; with fewer rows the bias is 0.
_FEWEST_FOR_BIAS = 5
#: Half-widths (log time) of modelled times are multiplied by this factor outside the measured
#: range.
OUTSIDE_WIDER = 1.5


#: latency in µs, half-widths of the 90 % interval below and above the latency in log time, and the
#: shortest possible time in µs, (shapes,) each
Predicted = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
#: latency_us, low_us, high_us, source code and whether the shape is outside, (shapes,) each
Times = tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int8], BoolArray]
#: model of all sizes: a function from int64 sizes, (shapes,) each, to a prediction
Base = Callable[[Sizes], Predicted]


@dataclass(frozen=True)
class Trust:
    """Calibration of an interpolation.

    share: fraction that is applied of the difference between the interpolated log ratio and the
        bias.
    half_width: half-width in log time of the 90 % interval of an interpolated time.
    """

    share: float
    half_width: float


@dataclass(frozen=True)
class Surface:
    """Times of all shapes, from measured rows and a model.

    sizes, latency_us, low_us, high_us: (rows,) arrays of the measured rows.
    base: model that predicts all sizes.
    families: kinds of lines, as in `Lines`.
    fitted: whether `base` was fitted to these rows, so that its errors on them are too small.
    """

    sizes: Sizes
    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    base: Base
    families: tuple[tuple[int, ...], ...]
    fitted: bool = False

    def many(self, sizes: Sizes) -> Times:
        """Returns the times of shapes.

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
        """Returns the times of shapes without a row, interpolated between rows or else modelled."""
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
        """Median log ratio of measured to modelled time over all rows.

        The bias is 0 with fewer than five rows.
        """
        if len(self.latency_us) < _FEWEST_FOR_BIAS:
            return 0.0
        return float(np.median(self._log_ratio))

    @cached_property
    def trust(self) -> Trust:
        """Calibration from the leave-one-out errors of the rows.

        A model that was fitted to the rows is closer to the rows than to other shapes. The
        half-width is then scaled up by the ratio of the model's own half-width, which comes from
        held-out rows, to the model's errors on the rows, but not beyond the model's own half-width.
        """
        if not len(self.latency_us):
            return Trust(1.0, log(2.0))  # not used, because nothing is interpolated without rows
        inner, ratio = self.lines.left_out()
        if inner.sum() < _FEWEST_LEFT_OUT:
            return Trust(1.0, max(_LEAST_HALF_WIDTH, self._base_half_width))
        predicted = ratio[inner] - self.bias
        true = self._log_ratio[inner] - self.bias
        squares = float((predicted**2).sum())
        # Least-squares slope of the rows' own log ratios over the interpolated ones.
        share = 1.0
        if squares > 0:
            share = min(1.0, max(0.0, float((predicted * true).sum()) / squares))
        error = np.abs(true - share * predicted)
        # The quantile of a sample is uncertain by one rank, so the next higher rank is used.
        rank = min(1.0, _COVERED * (len(error) + 1) / len(error))
        half_width = float(np.quantile(error, rank))
        less_round = _LESS_ROUND
        if self.fitted:
            less_round = _LESS_ROUND_FITTED
            on_rows = float(np.quantile(np.abs(self._log_ratio - self.bias), _COVERED))
            held_out = self._base_half_width
            if 0.0 < on_rows < held_out:
                half_width = min(half_width * held_out / on_rows, max(half_width, held_out))
        return Trust(share, max(_LEAST_HALF_WIDTH, less_round * half_width))

    @property
    def _base_half_width(self) -> float:
        """Typical half-width in log time of the model's own 90 % interval, over the rows."""
        _, below, above, _ = self.base(self.sizes)
        return float(np.median(np.maximum(below, above)))
