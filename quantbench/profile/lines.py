"""Neighbours of a shape along lines: the measured shapes just below and just above it, all else in proportion.

Sizes that move together keep their ratio: a sweep over hidden moves n and k, one over the micro-batch m alone. A shape
lies between two measured ones where some line goes through it and both, and they are at most a factor of two apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd, log

import numpy as np
import numpy.typing as npt

from quantbench.profile.lookup import RowIndex

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: two measured shapes further apart than this say little about what is between them
WIDEST_GAP = 2.0


@dataclass(frozen=True)
class _Family:
    """Lines along which the sizes at `moving` grow in proportion and the others are held.

    lines: what names each line; first: where its rows begin, with one end more than lines; scale: position of each row
    on its line, ascending; value: what is interpolated.
    """

    moving: tuple[int, ...]
    lines: RowIndex
    first: npt.NDArray[np.intp]
    scale: FloatArray
    value: FloatArray

    def bracket(self, sizes: tuple[IntArray, ...]) -> tuple[npt.NDArray[np.bool_], FloatArray]:
        """(whether a shape lies between two rows, what is interpolated there), (shapes,) each."""
        names, scale = line_of(sizes, self.moving)
        line = self.lines.find(names)
        value = np.zeros(len(line))
        found = np.flatnonzero(line >= 0)
        if not found.size:
            return line >= 0, value
        line, at = line[found], scale[found].astype(np.float64)
        # Scales begin anew on each line; shifted by the line's number they ascend over all of them.
        above = np.searchsorted(self._shifted, line * self._span + at)
        inside = (above > self.first[line]) & (above < self.first[line + 1])
        found, above, at = found[inside], above[inside], at[inside]
        low, high = self.scale[above - 1], self.scale[above]
        near = high <= WIDEST_GAP * low
        found, above, at, low, high = found[near], above[near], at[near], low[near], high[near]
        share = np.log(at / low) / np.log(high / low)
        value[found] = self.value[above - 1] * (1.0 - share) + self.value[above] * share
        between = np.zeros(len(value), dtype=bool)
        between[found] = True
        return between, value

    @cached_property
    def _span(self) -> float:
        return float(self.scale.max()) + 1.0

    @cached_property
    def _shifted(self) -> FloatArray:
        lines = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        return np.asarray(self.scale + lines * self._span)

    @cached_property
    def by_name(self) -> dict[tuple[int, ...], tuple[list[float], list[float]]]:
        """(scales, values) of each line, for one shape at a time."""
        names = zip(*(size.tolist() for size in self.lines.sizes), strict=True)
        ends = self.first.tolist()
        scale, value = self.scale.tolist(), self.value.tolist()
        return {name: (scale[ends[i] : ends[i + 1]], value[ends[i] : ends[i + 1]]) for i, name in enumerate(names)}


def line_of(sizes: tuple[IntArray, ...], moving: tuple[int, ...]) -> tuple[tuple[IntArray, ...], IntArray]:
    """(what names the line of each shape, its position on it): moving sizes over their common divisor."""
    if len(moving) == 1:
        (at,) = moving
        return tuple(size for i, size in enumerate(sizes) if i != at), sizes[at]
    common = sizes[moving[0]]
    for i in moving[1:]:
        common = np.gcd(common, sizes[i])
    return tuple(size // common if i in moving else size for i, size in enumerate(sizes)), common


@dataclass(frozen=True)
class Lines:
    """sizes: of the measured rows; value: of each row, to be interpolated; families: which sizes move together, in the
    order in which they are tried. All (rows,)."""

    sizes: tuple[IntArray, ...]
    value: FloatArray
    families: tuple[tuple[int, ...], ...]

    def between(self, asked: tuple[IntArray, ...]) -> tuple[npt.NDArray[np.bool_], FloatArray]:
        """(whether a shape lies between two measured ones, the interpolated value there), (shapes,) each."""
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

    def one(self, *asked: int) -> float | None:
        """The interpolated value of one shape, None where it is not between two."""
        return self.single(*asked)

    @cached_property
    def single(self) -> Callable[..., float | None]:
        """A function of one shape, with every line in a dictionary."""
        values = [(1 << i, frozenset(size.tolist())) for i, size in enumerate(self.sizes)]
        every = (1 << len(self.sizes)) - 1
        # No line goes through a shape that has another value of a size that its family holds.
        families = [
            (every & ~sum(1 << i for i in family.moving), family.moving, len(family.moving) == 1, family.by_name)
            for family in self._built
        ]

        def one(*asked: int) -> float | None:
            new = 0
            for size, (bit, measured) in zip(asked, values, strict=True):
                if size not in measured:
                    new |= bit
            for held, moving, alone, by_name in families:
                if new & held:
                    continue
                if alone:
                    (at,) = moving
                    scale, name = asked[at], asked[:at] + asked[at + 1 :]
                else:
                    scale = gcd(*[asked[i] for i in moving])
                    name = tuple([size // scale if i in moving else size for i, size in enumerate(asked)])
                line = by_name.get(name)
                if line is None:
                    continue
                scales, ratios = line
                above = bisect_left(scales, scale)
                if 0 < above < len(scales) and scales[above] <= WIDEST_GAP * scales[above - 1]:
                    low = scales[above - 1]
                    share = log(scale / low) / log(scales[above] / low)
                    return ratios[above - 1] * (1.0 - share) + ratios[above] * share
            return None

        return one

    def left_out(self) -> tuple[npt.NDArray[np.bool_], FloatArray]:
        """As `between`, for each row itself from its neighbours: what would be said of it, had it not been measured."""
        known, value = np.zeros(len(self.value), dtype=bool), np.zeros(len(self.value))
        for moving in self.families:
            order, first, scale = _sorted(self.sizes, moving)
            inner = np.ones(len(order), dtype=bool)
            inner[first[:-1]] = inner[first[1:] - 1] = False
            at = np.flatnonzero(inner)
            low, high = scale[at - 1], scale[at + 1]
            kept = (high <= WIDEST_GAP * low) & ~known[order[at]]
            at, low, high = at[kept], low[kept], high[kept]
            share = np.log(scale[at] / low) / np.log(high / low)
            rows = order[at]
            value[rows] = self.value[order[at - 1]] * (1.0 - share) + self.value[order[at + 1]] * share
            known[rows] = True
        return known, value

    @cached_property
    def _built(self) -> tuple[_Family, ...]:
        found = []
        for moving in self.families:
            order, first, scale = _sorted(self.sizes, moving)
            long = np.diff(first) > 1
            if not long.any():
                continue
            kept = np.repeat(long, np.diff(first))
            order, scale, ends = order[kept], scale[kept], np.concatenate([[0], np.cumsum(np.diff(first)[long])])
            names, _ = line_of(tuple(size[order[ends[:-1]]] for size in self.sizes), moving)
            found.append(_Family(moving, RowIndex(names), ends, scale, self.value[order]))
        return tuple(found)


def _sorted(
    sizes: tuple[IntArray, ...], moving: tuple[int, ...]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], FloatArray]:
    """(rows line by line and ascending on each, where each line begins and the end, position of each row)."""
    names, scale = line_of(sizes, moving)
    order = np.lexsort([scale, *reversed(names)])
    new = np.ones(len(order), dtype=bool)
    if len(order) > 1:
        new[1:] = np.logical_or.reduce([name[order][1:] != name[order][:-1] for name in names])
    first = np.concatenate([np.flatnonzero(new), [len(order)]])
    return order, first, scale[order].astype(np.float64)
