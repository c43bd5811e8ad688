"""Interpolates times between measured shapes with a model that knows the tile and wave edges.

Entry points: `Surface`, whose `many` returns the times of many shapes; `Base`, the model below a surface; the types
`Sizes`, `Predicted` and `FloatArray`; the sources of a time, `MEASURED`, `INTERPOLATED` and `MODELLED`, with their
names `SOURCES`. Used by `sources`, which builds surfaces, and `answers`.

A measured shape returns its own row (found by `RowIndex`). Otherwise the model's time is multiplied by the ratio of
measured to modelled time, which is smooth across edges: interpolated between the two nearest measured shapes on a line
(`Lines`: some sizes grow in proportion, the others stay fixed), else the median ratio of all rows. Leave-one-out errors
set the fraction of the ratio that is applied and the width of the interval (`Surface.trust`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log

import numpy as np
import numpy.typing as npt

from quantbench.latency.estimate import bounded

IntArray = npt.NDArray[np.int64]
Sizes = tuple[IntArray, ...]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntpArray = npt.NDArray[np.intp]

#: sources of a time, and their codes: indices in SOURCES
SOURCES = ("measured", "interpolated", "modelled")
MEASURED, INTERPOLATED, MODELLED = range(3)

# Odd multipliers of well-mixed bits: the golden ratio, and a constant of MurmurHash3's 64-bit finaliser.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT = np.uint64(32)


def hashed(sizes: Sizes) -> npt.NDArray[np.uint64]:
    """Returns a 64-bit hash of each row of sizes, (rows,)."""
    total = np.zeros(sizes[0].shape, dtype=np.uint64)
    for size in sizes:
        total += size.astype(np.uint64)
        total *= _STEP
        total ^= total >> _SHIFT
        total *= _MIX
    return np.asarray(total, dtype=np.uint64)


@dataclass(frozen=True)
class RowIndex:
    """Hash index of rows by their sizes. sizes: one (rows,) array per size, all rows different.

    >>> index = RowIndex((np.array([1, 2, 2]), np.array([5, 5, 6])))
    >>> index.find((np.array([2, 2]), np.array([6, 7])))
    array([ 2, -1])
    """

    sizes: Sizes

    def find(self, asked: Sizes) -> IntpArray:
        """Returns the index of the row with exactly these sizes, or -1, (shapes,)."""
        if not len(self.sizes[0]):
            return np.full(asked[0].shape, -1, dtype=np.intp)
        hashes, order = self._sorted
        row = order[np.minimum(np.searchsorted(hashes, hashed(asked)), len(order) - 1)]
        same = np.logical_and.reduce([have[row] == want for have, want in zip(self.sizes, asked, strict=True)])
        return np.where(same, row, -1)

    @cached_property
    def _sorted(self) -> tuple[npt.NDArray[np.uint64], IntpArray]:
        """Hashes in ascending order, and the row of each. Different rows do not collide in 64 bits in practice."""
        hashes = hashed(self.sizes)
        order = np.argsort(hashes)
        return hashes[order], order


#: largest ratio between two measured shapes to interpolate between
WIDEST_GAP = 2.0


@dataclass(frozen=True)
class _Family:
    """Lines of several rows along which the sizes at `moving` grow in proportion while the others stay fixed.

    lines: index of lines by identifier.
    first: (lines + 1,) row offsets.
    rows: (rows,) index of each row in the order of lines and positions.
    scale: (rows,) position on the line, ascending.
    value: (rows,) interpolated quantity.
    """

    moving: tuple[int, ...]
    lines: RowIndex
    first: IntpArray
    rows: IntpArray
    scale: FloatArray
    value: FloatArray

    @classmethod
    def of(cls, sizes: Sizes, value: FloatArray, moving: tuple[int, ...]) -> _Family | None:
        """Sorts the rows by line and position; None if every line has only one row."""
        names, scale = line_of(sizes, moving)
        order = np.lexsort([scale, *reversed(names)])
        new = np.ones(len(order), dtype=bool)
        new[1:] = np.logical_or.reduce([name[order][1:] != name[order][:-1] for name in names])
        lengths = np.diff(np.flatnonzero(np.append(new, True)))
        if not (lengths > 1).any():
            return None
        rows = order[np.repeat(lengths > 1, lengths)]
        first = np.concatenate([[0], np.cumsum(lengths[lengths > 1])])
        index = RowIndex(tuple(name[rows[first[:-1]]] for name in names))
        return cls(moving, index, first, rows, scale[rows].astype(np.float64), value[rows])

    def between(self, low: IntpArray, at: FloatArray, high: IntpArray) -> tuple[FloatArray, BoolArray]:
        """Returns (value at positions `at` between the rows low and high, True if these are near), (shapes,) each."""
        near = self.scale[high] <= WIDEST_GAP * self.scale[low]
        share = np.log(at / self.scale[low]) / np.log(self.scale[high] / self.scale[low])
        return self.value[low] * (1.0 - share) + self.value[high] * share, near

    def bracket(self, sizes: Sizes) -> tuple[BoolArray, FloatArray]:
        """Returns (True if a shape lies between two rows, interpolated value), (shapes,) each."""
        names, scale = line_of(sizes, self.moving)
        line = self.lines.find(names)
        value = np.zeros(len(line))
        found = np.flatnonzero(line >= 0)
        if not found.size:
            return line >= 0, value
        line, at = line[found], scale[found].astype(np.float64)
        # Scales restart on each line; adding a multiple of the line's index makes them ascend over all lines.
        above = np.searchsorted(self._shifted, line * self._span + at)
        inside = (above > self.first[line]) & (above < self.first[line + 1])
        known = np.zeros(len(value), dtype=bool)
        found, above = found[inside], above[inside]
        value[found], known[found] = self.between(above - 1, at[inside], above)
        return known, value

    @cached_property
    def _span(self) -> float:
        return float(self.scale.max()) + 1.0

    @cached_property
    def _shifted(self) -> FloatArray:
        lines = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        return np.asarray(self.scale + lines * self._span)


def line_of(sizes: Sizes, moving: tuple[int, ...]) -> tuple[Sizes, IntArray]:
    """Returns (identifier of each shape's line, position on it); the position is the moving sizes' common divisor."""
    if len(moving) == 1:
        (at,) = moving
        return tuple(size for i, size in enumerate(sizes) if i != at), sizes[at]
    common = sizes[moving[0]]
    for i in moving[1:]:
        common = np.gcd(common, sizes[i])
    return tuple(size // common if i in moving else size for i, size in enumerate(sizes)), common


@dataclass(frozen=True)
class Lines:
    """Interpolation along lines of measured rows.

    sizes: one (rows,) array per size.
    value: (rows,) quantity to interpolate.
    families: indices of the sizes that grow together, tried in order.
    """

    sizes: Sizes
    value: FloatArray
    families: tuple[tuple[int, ...], ...]

    def between(self, asked: Sizes) -> tuple[BoolArray, FloatArray]:
        """Returns (True if a shape lies between two measured ones, interpolated value), (shapes,) each."""
        known = np.zeros(len(asked[0]), dtype=bool)
        value = np.zeros(len(known))
        left = np.arange(len(known))
        for family in self._built:
            found, of_family = family.bracket(tuple(size[left] for size in asked) if left.size < known.size else asked)
            rows = left[found]
            known[rows], value[rows] = True, of_family[found]
            left = left[~found]
            if not left.size:
                break
        return known, value

    def left_out(self) -> tuple[BoolArray, FloatArray]:
        """Interpolates each row from its neighbours, without itself; returns arrays like `between`, (rows,) each."""
        known, value = np.zeros(len(self.value), dtype=bool), np.zeros(len(self.value))
        for family in self._built:
            inner = np.ones(len(family.rows), dtype=bool)
            inner[family.first[:-1]] = inner[family.first[1:] - 1] = False
            at = np.flatnonzero(inner)
            at = at[~known[family.rows[at]]]
            of_family, near = family.between(at - 1, family.scale[at], at + 1)
            rows = family.rows[at[near]]
            known[rows], value[rows] = True, of_family[near]
        return known, value

    @cached_property
    def _built(self) -> tuple[_Family, ...]:
        made = (_Family.of(self.sizes, self.value, moving) for moving in self.families)
        return tuple(family for family in made if family is not None)


_COVERED = 0.9
# Fewest left-out rows needed to estimate `Trust.share`.
_FEWEST_LEFT_OUT = 8
# Smallest half-width of an interpolated time, log time: drift between runs.
_LEAST_HALF_WIDTH = 0.01
# Measured sizes are rounder than queried ones and easier for the model, so leave-one-out errors are too small by this
# factor (from rows of the public A100 table at m other than powers of two).
_LESS_ROUND = 1.15
# Fewest rows needed to estimate the model's bias.
_FEWEST_FOR_BIAS = 5
#: intervals outside the measured range are this much wider (log time)
OUTSIDE_WIDER = 1.5


#: latency in µs, half-widths of the 90 % interval in log time below and above, least possible µs; (shapes,) each
Predicted = tuple[FloatArray, FloatArray, FloatArray, FloatArray]
#: a model of all sizes: int64 sizes, (shapes,) each → prediction
Base = Callable[[Sizes], Predicted]


@dataclass(frozen=True)
class Trust:
    """Calibration of an interpolation. share: fraction of the interpolated log ratio that is applied. half_width:
    half-width of the resulting 90 % interval, log time."""

    share: float
    half_width: float


@dataclass(frozen=True)
class Surface:
    """Times of all shapes, from measured rows and a model.

    sizes, latency_us, low_us, high_us: (rows,) arrays of the measured rows.
    base: model of all sizes.
    families: see `Lines`.
    """

    sizes: Sizes
    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    base: Base
    families: tuple[tuple[int, ...], ...]

    def many(self, asked: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int8], BoolArray]:
        """Returns (latency_us, low_us, high_us, source code, outside), (shapes,) each. asked: int64 (shapes,) sizes."""
        row = self.index.find(asked)
        rest = np.flatnonzero(row < 0)
        if not rest.size:
            times = self.latency_us[row], self.low_us[row], self.high_us[row]
            return (*times, np.zeros(len(row), dtype=np.int8), np.zeros(len(row), dtype=bool))
        latency, low, high = (np.empty(len(row)) for _ in range(3))
        code, outside = np.full(len(row), MEASURED, dtype=np.int8), np.zeros(len(row), dtype=bool)
        known = np.flatnonzero(row >= 0)
        if known.size:
            of = row[known]
            latency[known], low[known], high[known] = self.latency_us[of], self.low_us[of], self.high_us[of]
            asked = tuple(size[rest] for size in asked)
        latency[rest], low[rest], high[rest], code[rest], outside[rest] = self._unmeasured(asked)
        return latency, low, high, code, outside

    def _unmeasured(self, asked: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int8], BoolArray]:
        model_us, below, above, floor_us = self.base(asked)
        between, ratio = self.lines.between(asked) if len(self.latency_us) else (np.zeros(len(model_us), bool), below)
        spans = zip(asked, self.range, strict=True)
        outside = np.logical_or.reduce([(size < low) | (size > high) for size, (low, high) in spans])
        shift = np.where(between, self.bias + self.trust.share * (ratio - self.bias), self.bias)
        wider = np.where(outside, OUTSIDE_WIDER, 1.0)
        half_below = np.where(between, self.trust.half_width, below * wider)
        half_above = np.where(between, self.trust.half_width, above * wider)
        code = np.where(between, INTERPOLATED, MODELLED).astype(np.int8)
        return (*bounded(model_us * np.exp(shift), half_below, half_above, floor_us), code, outside)

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex(self.sizes)

    @cached_property
    def range(self) -> tuple[tuple[int, int], ...]:
        """Smallest and largest measured value of each size; the empty range (1, 0) if nothing was measured."""
        if not len(self.latency_us):
            return tuple((1, 0) for _ in self.sizes)
        return tuple((int(size.min()), int(size.max())) for size in self.sizes)

    @cached_property
    def _log_ratio(self) -> FloatArray:
        return np.asarray(np.log(self.latency_us / self.base(self.sizes)[0]))

    @cached_property
    def lines(self) -> Lines:
        return Lines(self.sizes, self._log_ratio, self.families)

    @cached_property
    def bias(self) -> float:
        """Median log ratio of measured to modelled time over all rows; 0 with fewer than five rows."""
        if len(self.latency_us) < _FEWEST_FOR_BIAS:
            return 0.0
        return float(np.median(self._log_ratio))

    @cached_property
    def trust(self) -> Trust:
        """Calibration from leave-one-out errors of the rows."""
        if not len(self.latency_us):
            return Trust(1.0, log(2.0))
        known, ratio = self.lines.left_out()
        if known.sum() < _FEWEST_LEFT_OUT:
            _, below, above, _ = self.base(self.sizes)
            return Trust(1.0, max(_LEAST_HALF_WIDTH, float(np.median(np.maximum(below, above)))))
        predicted, true = ratio[known] - self.bias, self._log_ratio[known] - self.bias
        squares = float((predicted**2).sum())
        share = min(1.0, max(0.0, float((predicted * true).sum()) / squares)) if squares > 0 else 1.0
        error = np.abs(true - share * predicted)
        # One rank higher, because the quantile of a sample is uncertain by one rank.
        rank = min(1.0, _COVERED * (len(error) + 1) / len(error))
        return Trust(share, max(_LEAST_HALF_WIDTH, _LESS_ROUND * float(np.quantile(error, rank))))
