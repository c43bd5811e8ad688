"""The times of one kind of work in one format by one provider, over all sizes.

Where a size was measured, its row answers. Elsewhere a model does, times what was measured over what it says at the
two measured sizes on both sides, where there are two near enough: the model has the edges of tiles and waves, and the
ratio is smooth across them. How much of that ratio to believe, and how far off the answers are, is found by leaving
each measured row out in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quantbench.profile.estimate import INTERPOLATED, MEASURED, MODELLED
from quantbench.profile.lines import Lines
from quantbench.profile.lookup import RowIndex

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Sizes = tuple[IntArray, ...]

#: (latency, low, high, source code, outside) of one shape
Answer = tuple[float, float, float, int, bool]

_COVERED = 0.9
# With fewer rows left out, what is believed of a ratio is assumed, not found.
_FEWEST_LEFT_OUT = 8
# A figure of the model's interval, below which no interpolation claims to be better: drift between runs.
_LEAST_HALF_WIDTH = 0.01
# Rows are rounder numbers than what is asked for between them, and kinder to the model: its errors past an edge are
# this much larger (held-out rows of the public A100 table at other m than its powers of two).
_LESS_ROUND = 1.15
# From so many rows on, their middle ratio to the model says that the model as a whole is off.
_FEWEST_FOR_BIAS = 5
#: beyond the range of what was measured, intervals are this much wider (in log time)
OUTSIDE_WIDER = 1.5


class Base(Protocol):
    """A model of all sizes."""

    def times(self, sizes: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """(latency µs, half-width of the 90 % interval in log time below and above, µs that no time can be below),
        (shapes,) each."""

    def single(self) -> tuple[Callable[..., tuple[float, float]], Callable[[float], tuple[float, float]]]:
        """The same for one shape at a time: a function of its sizes that gives (latency, floor), and one of that
        latency, asked next, that gives the half-widths."""


@dataclass(frozen=True)
class Trust:
    """share: of the interpolated ratio that is believed. half_width: of the 90 % interval then, in log time."""

    share: float
    half_width: float


@dataclass(frozen=True)
class Surface:
    """sizes: of the measured rows, (rows,) each; latency_us, low_us, high_us: theirs. families: see `Lines`."""

    sizes: Sizes
    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    base: Base
    families: tuple[tuple[int, ...], ...]

    def many(
        self, asked: Sizes
    ) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
        """(latency, low, high, source code, outside) of each shape, (shapes,) each; asked: int64, one-dimensional."""
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

    def _unmeasured(
        self, asked: Sizes
    ) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
        model_us, below, above, floor_us = self.base.times(asked)
        between, ratio = self.lines.between(asked) if len(self.latency_us) else (np.zeros(len(model_us), bool), below)
        outside = self._outside(asked)
        shift = np.where(between, self.bias + self.trust.share * (ratio - self.bias), self.bias)
        wider = np.where(outside, OUTSIDE_WIDER, 1.0)
        half_below = np.where(between, self.trust.half_width, below * wider)
        half_above = np.where(between, self.trust.half_width, above * wider)
        latency = np.maximum(model_us * np.exp(shift), floor_us)
        low = np.maximum(latency * np.exp(-half_below), floor_us)
        code = np.where(between, INTERPOLATED, MODELLED).astype(np.int8)
        return latency, low, latency * np.exp(half_above), code, outside

    def one(self, *asked: int) -> Answer:
        """`many` of one shape."""
        return self._one_unmeasured(*asked) if (found := self.rows.get(asked)) is None else (*found, MEASURED, False)

    @cached_property
    def _one_unmeasured(self) -> Callable[..., Answer]:
        """`_unmeasured` of one shape, with all that does not depend on it worked out before."""
        base, halves = self.base.single()
        between, span = self.lines.single if self.rows else None, self.range
        bias, share, half = self.bias, self.trust.share, self.trust.half_width
        lower, higher, moved = exp(-half), exp(half), exp(bias)

        def one(*asked: int) -> Answer:
            latency_us, floor_us = base(*asked)
            ratio = None if between is None else between(*asked)
            if ratio is not None:
                latency_us = max(latency_us * exp(bias + share * (ratio - bias)), floor_us)
                return latency_us, max(latency_us * lower, floor_us), latency_us * higher, INTERPOLATED, False
            below, above = halves(latency_us)
            latency_us *= moved
            if latency_us < floor_us:
                latency_us = floor_us
            outside = False
            for size, (least, most) in zip(asked, span, strict=True):
                if size < least or size > most:
                    outside, below, above = True, OUTSIDE_WIDER * below, OUTSIDE_WIDER * above
                    break
            low_us = latency_us * exp(-below)
            if low_us < floor_us:
                low_us = floor_us
            return latency_us, low_us, latency_us * exp(above), MODELLED, outside

        return one

    @cached_property
    def index(self) -> RowIndex:
        """Finds measured rows."""
        return RowIndex(self.sizes)

    @cached_property
    def rows(self) -> dict[tuple[int, ...], tuple[float, float, float]]:
        """(latency, low, high) of each measured shape, by its sizes."""
        keys = zip(*(size.tolist() for size in self.sizes), strict=True)
        times = zip(self.latency_us.tolist(), self.low_us.tolist(), self.high_us.tolist(), strict=True)
        return dict(zip(keys, times, strict=True))

    @cached_property
    def range(self) -> tuple[tuple[int, int], ...]:
        """Smallest and largest measured value of each size; nothing lies within where nothing was measured."""
        if not len(self.latency_us):
            return tuple((1, 0) for _ in self.sizes)
        return tuple((int(size.min()), int(size.max())) for size in self.sizes)

    def _outside(self, asked: Sizes) -> npt.NDArray[np.bool_]:
        out = np.zeros(len(asked[0]), dtype=bool)
        for size, (low, high) in zip(asked, self.range, strict=True):
            out |= (size < low) | (size > high)
        return out

    @cached_property
    def _log_ratio(self) -> FloatArray:
        """Log of measured over modelled, by row."""
        return np.asarray(np.log(self.latency_us / self.base.times(self.sizes)[0]))

    @cached_property
    def lines(self) -> Lines:
        """Measured over modelled along lines between measured shapes."""
        return Lines(self.sizes, self._log_ratio, self.families)

    @cached_property
    def bias(self) -> float:
        """How far the model is off in the middle of all rows, in log time."""
        if len(self.latency_us) < _FEWEST_FOR_BIAS:
            return 0.0
        return float(np.median(self._log_ratio))

    @cached_property
    def trust(self) -> Trust:
        """From leaving each row out in turn."""
        if not len(self.latency_us):
            return Trust(1.0, log(2.0))
        known, ratio = self.lines.left_out()
        if known.sum() < _FEWEST_LEFT_OUT:
            _, below, above, _ = self.base.times(self.sizes)
            return Trust(1.0, max(_LEAST_HALF_WIDTH, float(np.median(np.maximum(below, above)))))
        said, true = ratio[known] - self.bias, self._log_ratio[known] - self.bias
        squares = float((said**2).sum())
        share = min(1.0, max(0.0, float((said * true).sum()) / squares)) if squares > 0 else 1.0
        error = np.abs(true - share * said)
        # The error's own quantile is known to a row more or less.
        rank = min(1.0, _COVERED * (len(error) + 1) / len(error))
        return Trust(share, max(_LEAST_HALF_WIDTH, _LESS_ROUND * float(np.quantile(error, rank))))
