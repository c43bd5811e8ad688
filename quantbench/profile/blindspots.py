"""What a consumer loses that draws straight lines between the rows of its table, and which rows would mend it.

aiconfigurator's engine answers a product m×n×k at a known (n, k) with a straight line between the two nearest rows in
m (tests hold `interpolated_us` against the engine itself). Past a tile or wave edge the time jumps, so the line is
wrong on both sides of it. What the time is expected to be between the rows comes from a latency model that is moved
through the rows that were measured.

The choice of rows: between two rows that stand, the fewest further ones that keep every place within the bound are
found exactly (a shortest path). Where only the 95th percentile is to be kept, the gaps that mend the most places per
row are taken first, which is greedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError, require_choice

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_WHO = "blindspots"
TARGETS = ("p95", "max")
#: places that are looked at between two neighbouring rows, at most; both sides of every suspected edge
_EDGES_PER_GAP = 32
#: heights that tiles have; every edge of a wave is an edge of a tile
_SMALLEST_BLOCK_M = 16
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Site:
    """One (n, k) of a table. m: places ascending (places,), those of the table among them; expected_us: what the time
    is there, (places,), measured where in_table."""

    n: int
    k: int
    m: IntArray
    expected_us: FloatArray
    in_table: BoolArray

    def __post_init__(self) -> None:
        who = f"{_WHO} n = {self.n}, k = {self.k}"
        if not len(self.m) == len(self.expected_us) == len(self.in_table):
            raise InputError(who, "arrays of different lengths", "one value per place")
        if len(self.m) < 2 or not (self.in_table[0] and self.in_table[-1]) or (np.diff(self.m) < 1).any():
            raise InputError(who, f"{len(self.m)} places", "places ascending, the first and the last in the table")
        if not (np.isfinite(self.expected_us) & (self.expected_us > 0)).all():
            raise InputError(who, "a time that is none", "finite times above 0")

    def errors(self, in_table: BoolArray | None = None) -> FloatArray:
        """interpolated / expected - 1 at every place, (places,); in_table: of another choice of rows."""
        rows = self.in_table if in_table is None else in_table
        return interpolated_us(self.m, self.m[rows], self.expected_us[rows]) / self.expected_us - 1.0


@dataclass(frozen=True)
class Choice:
    """Rows to add, by site. added: (places,) per site. before, after: |error| in the places outside the table, all
    sites together; after the choice those that were added count with 0."""

    sites: tuple[Site, ...]
    added: tuple[BoolArray, ...]
    before: FloatArray
    after: FloatArray

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """(m, n, k) to measure, by site and ascending m."""
        return [(int(m), s.n, s.k) for s, add in zip(self.sites, self.added, strict=True) for m in s.m[add]]


def interpolated_us(m: IntArray, rows_m: IntArray, rows_us: FloatArray) -> FloatArray:
    """The consumer's time at sizes m (places,) of one (n, k), from its rows, ascending in m; nan outside of them.

    >>> interpolated_us(np.array([3]), np.array([2, 4]), np.array([10.0, 20.0]))
    array([15.])
    """
    out = np.interp(m, rows_m, rows_us, left=np.nan, right=np.nan)
    return np.asarray(out, dtype=np.float64)


def places_between(rows_m: IntArray) -> IntArray:
    """The rows of one (n, k) with both sides of every size between them at which a tile may end, ascending.

    Between neighbours that are far apart only every second, fourth, … edge is looked at, 32 of them at most.
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


def through_rows(m: IntArray, model_us: FloatArray, in_table: BoolArray, rows_us: FloatArray) -> FloatArray:
    """A model's times (places,) moved so that they go through the measured ones at the rows in the table (rows,): in
    between, the ratio of measured to modelled goes straight over log m."""
    ratio = np.log(rows_us / model_us[in_table])
    moved = model_us * np.exp(np.interp(np.log(m), np.log(m[in_table]), ratio))
    moved[in_table] = rows_us
    return np.asarray(moved, dtype=np.float64)


def choose(sites: Sequence[Site], bound: float, target: str = "p95") -> Choice:
    """The rows to add until the 95th percentile (or the largest) of the expected |error| is at most `bound`, a ratio
    such as 0.05."""
    require_choice(_WHO, "target", target, TARGETS)
    if not 0.0 < bound < 1.0:
        raise InputError(_WHO, f"bound = {bound!r}", "an error between 0 and 1, as in 0.05")
    added = [np.zeros(len(site.m), dtype=np.bool_) for site in sites]
    before = _outside(sites, [site.in_table for site in sites])
    gaps = [gap for index, site in enumerate(sites) for gap in _mended_gaps(index, site, bound)]
    wrong = int((before > bound).sum())
    allowed = 0 if target == "max" else _allowed_wrong(before)
    # Most places mended per row first; equals in the order of the table.
    for gap in sorted(gaps, key=lambda gap: -gap.mends / len(gap.rows)):
        if wrong <= allowed:
            break
        added[gap.site][list(gap.rows)] = True
        wrong -= gap.mends
    after = _outside(sites, [site.in_table | add for site, add in zip(sites, added, strict=True)])
    return Choice(tuple(sites), tuple(added), before, after)


@dataclass(frozen=True)
class _Gap:
    """What it takes to keep everything between two neighbouring rows within the bound. site: its index. rows: indices
    of places to add; mends: how many places lie outside the bound without them."""

    site: int
    rows: tuple[int, ...]
    mends: int


def _allowed_wrong(errors: FloatArray) -> int:
    """How many of them may lie above the bound while their 95th percentile does not (numpy's linear percentile lies
    between two order statistics: both must be within)."""
    return max(0, int(np.ceil(0.05 * (len(errors) - 1))) - 1) if len(errors) else 0


def _mended_gaps(index: int, site: Site, bound: float) -> list[_Gap]:
    wrong = np.abs(site.errors()) > bound
    rows = np.flatnonzero(site.in_table)
    found = []
    for low, high in pairwise(rows):
        mends = int(wrong[low : high + 1].sum())
        if mends:
            part = slice(low, high + 1)
            chain = fewest_between(site.m[part], site.expected_us[part], bound)
            found.append(_Gap(index, tuple(int(low) + i for i in chain), mends))
    return found


def fewest_between(m: IntArray, expected_us: FloatArray, bound: float) -> list[int]:
    """Indices of the fewest places that, beside the first and the last, keep straight lines within `bound` of the
    expected time at every place between; ascending.

    >>> fewest_between(np.array([1, 2, 3, 4]), np.array([1.0, 1.0, 2.0, 2.0]), 0.05)
    [1, 2]
    """
    places = len(m)
    x, y = m.astype(np.float64), expected_us
    steps, came_from = np.full(places, places), np.full(places, -1)
    steps[0] = 0
    for i in range(places - 1):
        # A line from i to j is good if its slope lies in every window that the places between them leave.
        dx = x[i + 1 :] - x[i]
        slope = (y[i + 1 :] - y[i]) / dx
        lowest = np.maximum.accumulate(((1 - bound) * y[i + 1 :] - y[i]) / dx)
        highest = np.minimum.accumulate(((1 + bound) * y[i + 1 :] - y[i]) / dx)
        good = np.ones(len(dx), dtype=np.bool_)
        slack = _ROUNDING * np.abs(slope[1:])
        good[1:] = (slope[1:] >= lowest[:-1] - slack) & (slope[1:] <= highest[:-1] + slack)
        reached = np.flatnonzero(good) + i + 1
        nearer = reached[steps[i] + 1 < steps[reached]]
        steps[nearer], came_from[nearer] = steps[i] + 1, i
    chain, place = [], int(came_from[-1])
    while place > 0:
        chain.append(place)
        place = int(came_from[place])
    return chain[::-1]


def _outside(sites: Sequence[Site], in_table: Sequence[BoolArray]) -> FloatArray:
    """|error| in all places that the sites' own tables lack."""
    parts = [np.abs(site.errors(rows))[~site.in_table] for site, rows in zip(sites, in_table, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)
