"""Estimates a planner's interpolation error between the rows of its table, and selects the rows to add that fix it.

Entry points: `choose`, which returns a `Choice` for a list of `Site`s; `replay`, which returns a `Replay` of
`ReplayLine`s, one per table, from `MeasuredProducts`; `Errors`, `TARGETS`; `sites_between`, `places_between`,
`sorted_table`, `through_rows`. Types: `Consumer`, how a planner interpolates (`straight_lines`); `Ask`, a latency
model; `FloatArray`, `IntArray`. Used by `blindspots_report`, the command `profile` and the exporters
`exporters.modelled`, `exporters.rates` and `exporters.vidur`.

aiconfigurator's engine interpolates the time of a GEMM m×n×k at a known (n, k) linearly between the two nearest rows in
m (tests compare `interpolated_us` with the engine). The time jumps at a tile or wave edge, so the line is wrong on both
sides of it. The expected time between rows is a latency model's, scaled to match the measured rows.

`choose` adds the fewest rows between two rows that keep the error within the bound (a shortest path); if only the 95th
percentile is bounded, first where a row fixes most places. `replay` tests it on a measured table, of which `choose`
sees only the rows at powers of two in m.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

TARGETS = ("p95", "max")
#: most edges considered between two neighbouring rows; each adds a place on both sides
_EDGES_PER_GAP = 32
#: smallest tile height; every wave edge is also a tile edge
_SMALLEST_BLOCK_M = 16
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Site:
    """Sizes m of one (n, k) in a table, with their expected times. A "place" is one such size.

    m: (places,) sizes, ascending.
    expected_us: (places,) expected times; measured if in_table, else predicted.
    in_table: (places,) True if the table has a row of this size, as of the first and the last.
    """

    n: int
    k: int
    m: IntArray
    expected_us: FloatArray
    in_table: BoolArray

    def errors(self, in_table: BoolArray | None = None) -> FloatArray:
        """Returns interpolated / expected - 1, (places,). in_table: rows to interpolate from, if not the table's."""
        rows = self.in_table if in_table is None else in_table
        return interpolated_us(self.m, self.m[rows], self.expected_us[rows]) / self.expected_us - 1.0


@dataclass(frozen=True)
class Choice:
    """Rows to add to a table, the result of `choose`. (`sources.Chosen` is the selection for a query.)

    added: one (places,) mask per site.
    before, after: |error| at all places of all sites that have no row in the table; `after` is 0 at added rows.
    """

    sites: tuple[Site, ...]
    added: tuple[BoolArray, ...]
    before: FloatArray
    after: FloatArray

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """Shapes (m, n, k) to measure, by site and ascending m."""
        return [(int(m), s.n, s.k) for s, add in zip(self.sites, self.added, strict=True) for m in s.m[add]]


def interpolated_us(m: IntArray, rows_m: IntArray, rows_us: FloatArray) -> FloatArray:
    """Returns the planner's times at sizes m (places,) of one (n, k), from rows ascending in m; nan outside the rows.

    >>> interpolated_us(np.array([3]), np.array([2, 4]), np.array([10.0, 20.0]))
    array([15.])
    """
    out = np.interp(m, rows_m, rows_us, left=np.nan, right=np.nan)
    return np.asarray(out, dtype=np.float64)


def places_between(rows_m: IntArray) -> IntArray:
    """Returns the row sizes m of one (n, k) and both sides of every tile edge between them, ascending.

    At most 32 edges between two rows: only every second, fourth, … edge if there are more.
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
    """Scales a model's times (places,) to match the measured times at the table's rows (rows,). Between rows, the log
    ratio of measured to modelled time is interpolated linearly over log m."""
    ratio = np.log(rows_us / model_us[in_table])
    moved = model_us * np.exp(np.interp(np.log(m), np.log(m[in_table]), ratio))
    moved[in_table] = rows_us
    return np.asarray(moved, dtype=np.float64)


def choose(sites: Sequence[Site], bound: float, target: str = "p95") -> Choice:
    """Selects rows to add until the 95th percentile ("p95") or the maximum ("max") of the expected |error| is at most
    `bound`, a ratio such as 0.05."""

    def errors(tables: Sequence[BoolArray]) -> FloatArray:
        """Returns |error| at all places without a row, interpolated from the rows in `tables` (one mask per site)."""
        parts = [np.abs(site.errors(rows))[~site.in_table] for site, rows in zip(sites, tables, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0)

    before = errors([site.in_table for site in sites])
    # For each gap between neighbouring rows: (places outside the bound, site index, places to add)
    gaps: list[tuple[int, int, list[int]]] = []
    for index, site in enumerate(sites):
        wrong = np.abs(site.errors()) > bound
        for low, high in pairwise(np.flatnonzero(site.in_table).tolist()):
            part = slice(low, high + 1)
            if wrong[part].any():
                chain = fewest_between(site.m[part], site.expected_us[part], bound)
                gaps.append((int(wrong[part].sum()), index, [low + i for i in chain]))
    left = int((before > bound).sum())
    allowed = 0
    if target == "p95" and len(before):
        # numpy's percentile interpolates between two order statistics, and both must be within the bound
        allowed = max(0, int(np.ceil(0.05 * (len(before) - 1))) - 1)
    added = [np.zeros(len(site.m), dtype=np.bool_) for site in sites]
    # Most places fixed per row first; ties in the order of the table.
    for fixed, index, rows in sorted(gaps, key=lambda gap: -gap[0] / len(gap[2])):
        if left <= allowed:
            break
        added[index][rows] = True
        left -= fixed
    after = errors([site.in_table | add for site, add in zip(sites, added, strict=True)])
    return Choice(tuple(sites), tuple(added), before, after)


def fewest_between(m: IntArray, expected_us: FloatArray, bound: float) -> list[int]:
    """Returns ascending indices of the fewest places that, with the first and the last, keep linear interpolation
    within `bound` of the expected time at every place.

    >>> fewest_between(np.array([1, 2, 3, 4]), np.array([1.0, 1.0, 2.0, 2.0]), 0.05)
    [1, 2]
    """
    places = len(m)
    x, y = m.astype(np.float64), expected_us
    steps, came_from = np.full(places, places), np.full(places, -1)
    steps[0] = 0
    for i in range(places - 1):
        # A line from i to j is within the bound if its slope is in the interval that each place between them allows.
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


#: the planner's interpolation: (rows m, n, k, latency_us), (queries m, n, k) → µs of the queries
Consumer = Callable[[tuple[IntArray, IntArray, IntArray, FloatArray], tuple[IntArray, IntArray, IntArray]], FloatArray]

_WHO_REPLAY = "blindspots --held-out"
_FEWEST_MODEL_ROWS = 20
# Cliff as defined in docs/accuracy.md: a rise of more than 10 % from m to m + 1, in GEMMs at least this large.
_CLIFF, _LARGE_M, _LARGE_NK = 1.10, 128, 1024


@dataclass(frozen=True)
class MeasuredProducts:
    """Measured GEMM times. m, n, k, latency_us: (rows,) each, sorted by n, k, m, each shape once."""

    m: IntArray
    n: IntArray
    k: IntArray
    latency_us: FloatArray

    def where(self, rows: BoolArray) -> MeasuredProducts:
        return MeasuredProducts(self.m[rows], self.n[rows], self.k[rows], self.latency_us[rows])

    @property
    def thin(self) -> BoolArray:
        """Rows at powers of two in m, (rows,)."""
        return np.asarray((self.m & (self.m - 1)) == 0, dtype=np.bool_)

    def sites(self) -> list[IntArray]:
        """Returns the row indices of each (n, k)."""
        ends = np.flatnonzero((np.diff(self.n) != 0) | (np.diff(self.k) != 0)) + 1
        return [part.astype(np.int64) for part in np.split(np.arange(len(self.m)), ends)]


@dataclass(frozen=True)
class Errors:
    """Summary of |interpolated / measured - 1| over `rows` rows, in percent."""

    rows: int
    median_pct: float
    p95_pct: float
    max_pct: float


@dataclass(frozen=True)
class ReplayLine:
    """Errors of one of the compared tables.

    unseen: errors at rows that no compared table has.
    large: errors at unseen rows with m >= 128 and n, k >= 1024.
    at_cliffs: errors at large rows on both sides of measured cliffs that the thin table lacks, including added rows.
    """

    name: str
    rows: int
    unseen: Errors
    large: Errors
    at_cliffs: Errors


@dataclass(frozen=True)
class Replay:
    """Result of `replay`.

    lines: errors of the thin table; with random rows added; with chosen rows, measured; with chosen rows, modelled.
    added: number of rows added to the thin table.
    model_rows: number of rows that the model was fitted to.
    """

    lines: tuple[ReplayLine, ...]
    added: int
    model_rows: int


def sorted_table(m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray) -> MeasuredProducts:
    """Returns the rows sorted by n, k, m. Raises InputError for duplicate shapes."""
    order = np.lexsort((m, k, n))
    found = MeasuredProducts(m[order], n[order], k[order], latency_us[order])
    same = (np.diff(found.m) == 0) & (np.diff(found.n) == 0) & (np.diff(found.k) == 0)
    if same.any():
        raise InputError(_WHO_REPLAY, f"{int(same.sum())} shapes that are there twice", "one row per shape")
    return found


def replay(
    table: MeasuredProducts,
    model_us: Callable[[MeasuredProducts], tuple[FloatArray, int]],
    consumer: Consumer,
    bound: float,
    target: str = "max",
    seeds: tuple[int, ...] = (0, 1, 2),
) -> Replay:
    """Compares the interpolation errors of tables with chosen and with random rows added.

    model_us: function that fits a model to the thin table and returns its times of all rows of `table`, (rows,), and
        the number of rows it was fitted to.
    consumer: the planner's interpolation.
    seeds: seeds of the random draws, whose errors are averaged.
    """
    thin = table.thin
    if thin.sum() < _FEWEST_MODEL_ROWS or thin.all():
        raise InputError(
            _WHO_REPLAY, f"{int(thin.sum())} of {len(thin)} rows on powers of two in m", "some on and some off"
        )
    m, n, k, latency_us = table.m, table.n, table.k, table.latency_us
    expected, fitted_rows = model_us(table.where(thin))
    inside = np.zeros(len(m), dtype=np.bool_)  # between the first and the last thin row of their (n, k)
    sites: list[Site] = []
    rows_of: list[IntArray] = []
    for site_rows in table.sites():
        own = np.flatnonzero(thin[site_rows])
        if len(own) > 1:
            rows = site_rows[own[0] : own[-1] + 1]
            inside[rows] = True
            moved = through_rows(m[rows], expected[rows], thin[rows], latency_us[rows][thin[rows]])
            sites.append(Site(int(n[rows[0]]), int(k[rows[0]]), m[rows], moved, thin[rows]))
            rows_of.append(rows)
    chosen, modelled_us = thin.copy(), latency_us.copy()
    for rows, site, added in zip(rows_of, sites, choose(sites, bound, target).added, strict=True):
        chosen[rows[added]] = True
        modelled_us[rows[added]] = site.expected_us[added]
    extra = int(chosen.sum() - thin.sum())
    drawn = [thin.copy() for _ in seeds]
    for random_rows, seed in zip(drawn, seeds, strict=True):
        random_rows[np.random.default_rng(seed).choice(np.flatnonzero(inside & ~thin), extra, replace=False)] = True

    unseen = ~np.logical_or.reduce([thin, chosen, *drawn]) & inside
    large = (m >= _LARGE_M) & (n >= _LARGE_NK) & (k >= _LARGE_NK)
    steps = (np.diff(n) == 0) & (np.diff(k) == 0) & (np.diff(m) == 1) & (latency_us[1:] > _CLIFF * latency_us[:-1])
    at_cliffs = (np.append(False, steps) | np.append(steps, False)) & large & ~thin & inside

    def line(name: str, tables: Sequence[BoolArray], times_us: FloatArray = latency_us) -> ReplayLine:
        """Returns the mean errors of tables with these rows and times."""
        parts = []
        for rows in tables:
            error = np.abs(consumer((m[rows], n[rows], k[rows], times_us[rows]), (m, n, k)) / latency_us - 1.0)
            parts.append([_summary(error[part]) for part in (unseen, unseen & large, at_cliffs)])
        mean = np.mean(parts, axis=0).tolist()
        return ReplayLine(name, int(tables[0].sum()), *(Errors(int(count), *percent) for count, *percent in mean))

    name = f"and {extra:,} rows"
    lines = (
        line("powers of two in m", [thin]),
        line(f"{name} at random", drawn),
        line(f"{name} chosen", [chosen]),
        line(f"{name} chosen, modelled, not measured", [chosen], modelled_us),
    )
    return Replay(lines, extra, fitted_rows)


def _summary(errors: FloatArray) -> FloatArray:
    """Returns the number, median, 95th percentile and maximum of errors, the last three in percent; nan of none."""
    found = np.percentile(errors, [50, 95, 100]) if len(errors) else np.full(3, np.nan)
    return np.array([len(errors), *(100 * found)])


def straight_lines(
    rows: tuple[IntArray, IntArray, IntArray, FloatArray], queries: tuple[IntArray, IntArray, IntArray]
) -> FloatArray:
    """Applies `interpolated_us` to queries at many (n, k), (queries,); nan if no row has the (n, k)."""
    rows_m, rows_n, rows_k, rows_us = rows
    m, n, k = queries
    out = np.full(len(m), np.nan)
    for site_n, site_k in sorted(set(zip(rows_n.tolist(), rows_k.tolist(), strict=True))):
        own = np.flatnonzero((rows_n == site_n) & (rows_k == site_k))
        own = own[np.argsort(rows_m[own], kind="stable")]
        asked = (n == site_n) & (k == site_k)
        out[asked] = interpolated_us(m[asked], rows_m[own], rows_us[own])
    return out


#: sizes m, n, k (places,) → µs
Ask = Callable[[IntArray, IntArray, IntArray], FloatArray]


def sites_between(table: MeasuredProducts, ask: Ask) -> list[Site]:
    """Builds a site for each (n, k) with two rows or more, from its rows and both sides of the edges between them.
    ask: model whose times are scaled to match the rows; called once."""
    places = [(rows, places_between(table.m[rows])) for rows in table.sites() if len(rows) > 1]
    if not places:
        return []
    expected = ask(
        np.concatenate([m for _, m in places]),
        np.concatenate([np.full(len(m), table.n[rows[0]]) for rows, m in places]),
        np.concatenate([np.full(len(m), table.k[rows[0]]) for rows, m in places]),
    )
    sites, start = [], 0
    for rows, m in places:
        in_table = np.isin(m, table.m[rows])
        moved = through_rows(m, expected[start : start + len(m)], in_table, table.latency_us[rows])
        sites.append(Site(int(table.n[rows[0]]), int(table.k[rows[0]]), m, moved, in_table))
        start += len(m)
    return sites
