"""The choice of rows tried on a measured table: thin it to a consumer's grid, add rows, hold it against the others.

The rows are chosen from the thin table and a model that was fitted to nothing else (and to nothing of the same
architecture family before that); only then are the measured times of the chosen rows looked up, as if they had been
measured next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quantbench.errors import InputError
from quantbench.profile.blindspots import (
    BoolArray,
    FloatArray,
    IntArray,
    Site,
    choose,
    interpolated_us,
    through_rows,
)

#: (m, n, k) of queries → µs, given rows m, n, k, latency_us
Consumer = Callable[[tuple[IntArray, IntArray, IntArray, FloatArray], tuple[IntArray, IntArray, IntArray]], FloatArray]

_WHO = "blindspots --held-out"
_FEWEST_MODEL_ROWS = 20
# A cliff as docs/accuracy.md defines it: a rise of more than 10 % from m to m + 1, in products of some size.
_CLIFF, _LARGE_M, _LARGE_NK = 1.10, 128, 1024


@dataclass(frozen=True)
class Measured:
    """A measured table. m, n, k, latency_us: (rows,), each shape once."""

    m: IntArray
    n: IntArray
    k: IntArray
    latency_us: FloatArray

    @property
    def thin(self) -> BoolArray:
        """Which rows a grid of powers of two in m has, (rows,)."""
        return np.asarray((self.m & (self.m - 1)) == 0, dtype=np.bool_)

    def sites(self) -> list[IntArray]:
        """Indices of the rows of each (n, k), of rows sorted by n, k, m."""
        ends = np.flatnonzero((np.diff(self.n) != 0) | (np.diff(self.k) != 0)) + 1
        return [part.astype(np.int64) for part in np.split(np.arange(len(self.m)), ends)]

    @property
    def large(self) -> BoolArray:
        """Rows of products large enough to be cut into tiles, (rows,)."""
        return (self.m >= _LARGE_M) & (self.n >= _LARGE_NK) & (self.k >= _LARGE_NK)

    @property
    def at_cliffs(self) -> BoolArray:
        """Rows on both sides of a measured cliff, (rows,); rows are sorted by n, k, m."""
        near = (np.diff(self.n) == 0) & (np.diff(self.k) == 0) & (np.diff(self.m) == 1)
        steps = near & (self.latency_us[1:] > _CLIFF * self.latency_us[:-1])
        both = np.zeros(len(self.m), dtype=np.bool_)
        both[1:] |= steps
        both[:-1] |= steps
        return both & self.large


@dataclass(frozen=True)
class Errors:
    """|interpolated / measured - 1| of some rows, in percent."""

    rows: int
    median_pct: float
    p95_pct: float
    max_pct: float


@dataclass(frozen=True)
class Line:
    """One table. rows: how many it has. unseen: errors in rows that none of the tables compared has; large: in those
    of them with m >= 128 and n, k >= 1024; at_cliffs: in all rows on both sides of measured cliffs that the thin table
    lacks, those that were added included."""

    name: str
    rows: int
    unseen: Errors
    large: Errors
    at_cliffs: Errors


@dataclass(frozen=True)
class Replay:
    """lines: the thin table, with rows at random, with chosen rows measured, with the same rows as the model has them.
    added: how many rows each got."""

    lines: tuple[Line, ...]
    added: int
    bound: float
    total_rows: int
    model_rows: int


def sorted_table(m: IntArray, n: IntArray, k: IntArray, latency_us: FloatArray) -> Measured:
    """Rows by n, k, m. Raises InputError for a shape that is there twice."""
    order = np.lexsort((m, k, n))
    found = Measured(m[order], n[order], k[order], latency_us[order])
    same = (np.diff(found.m) == 0) & (np.diff(found.n) == 0) & (np.diff(found.k) == 0)
    if same.any():
        raise InputError(_WHO, f"{int(same.sum())} shapes that are there twice", "one row per shape")
    return found


def replay(
    table: Measured,
    model_us: Callable[[Measured], tuple[FloatArray, int]],
    consumer: Consumer,
    bound: float,
    target: str = "max",
    seeds: tuple[int, ...] = (0, 1, 2),
) -> Replay:
    """Thin, choose, compare. model_us: from the thin table, times for all rows of `table` and how many rows it was
    fitted to. Figures of the random rows are means over the seeds; the rows that are compared lie in no table."""
    thin = table.thin
    if thin.sum() < _FEWEST_MODEL_ROWS or thin.all():
        raise InputError(_WHO, f"{int(thin.sum())} of {len(thin)} rows on powers of two in m", "some on and some off")
    expected, fitted_rows = model_us(Measured(table.m[thin], table.n[thin], table.k[thin], table.latency_us[thin]))
    chosen, modelled_us = thin.copy(), table.latency_us.copy()
    sites = _sites(table, expected)
    picked = choose([site for _, site in sites], bound, target)
    for (rows, site), added in zip(sites, picked.added, strict=True):
        chosen[rows[added]] = True
        modelled_us[rows[added]] = site.expected_us[added]
    extra = int(chosen.sum() - thin.sum())
    drawn = [_draw(thin, _answerable(table), extra, seed) for seed in seeds]
    tables = [thin, chosen, *drawn]
    unseen = ~np.logical_or.reduce(tables) & _answerable(table)
    errors = [_errors(table, rows, consumer) for rows in tables]
    errors.insert(2, _errors(table, chosen, consumer, modelled_us))
    cliffs = table.at_cliffs & ~thin & _answerable(table)
    scored = [
        (_summary(error[unseen]), _summary(error[unseen & table.large]), _summary(error[cliffs])) for error in errors
    ]
    added_to = [f"and {extra:,} rows {how}" for how in ("at random", "chosen", "chosen, modelled, not measured")]
    at_random = tuple(_mean([one[part] for one in scored[3:]]) for part in range(3))
    lines = (
        Line("powers of two in m", int(thin.sum()), *scored[0]),
        Line(added_to[0], int(drawn[0].sum()), *at_random),
        Line(added_to[1], int(chosen.sum()), *scored[1]),
        Line(added_to[2], int(chosen.sum()), *scored[2]),
    )
    return Replay(lines, extra, bound, len(thin), fitted_rows)


def _answerable(table: Measured) -> BoolArray:
    """Rows between the first and the last thin row of their (n, k)."""
    inside = np.zeros(len(table.m), dtype=np.bool_)
    for rows in table.sites():
        own = np.flatnonzero(table.thin[rows])
        if len(own) > 1:
            inside[rows[own[0] : own[-1] + 1]] = True
    return inside


def _sites(table: Measured, expected: FloatArray) -> list[tuple[IntArray, Site]]:
    """Every (n, k) with the model moved through its thin rows, and the indices of its places in the table."""
    found = []
    inside = _answerable(table)
    for rows in table.sites():
        rows = rows[inside[rows]]
        if len(rows) < 2:
            continue
        own = table.thin[rows]
        moved = through_rows(table.m[rows], expected[rows], own, table.latency_us[rows][own])
        found.append((rows, Site(int(table.n[rows[0]]), int(table.k[rows[0]]), table.m[rows], moved, own)))
    return found


def _draw(thin: BoolArray, allowed: BoolArray, count: int, seed: int) -> BoolArray:
    free = np.flatnonzero(allowed & ~thin)
    rows = thin.copy()
    rows[np.random.default_rng(seed).choice(free, count, replace=False)] = True
    return rows


def _errors(table: Measured, rows: BoolArray, consumer: Consumer, given_us: FloatArray | None = None) -> FloatArray:
    """given_us: times that the consumer gets in the place of the measured ones, (rows,)."""
    times_us = table.latency_us if given_us is None else given_us
    given = (table.m[rows], table.n[rows], table.k[rows], times_us[rows])
    return np.abs(consumer(given, (table.m, table.n, table.k)) / table.latency_us - 1.0)


def _summary(errors: FloatArray) -> Errors:
    if not len(errors):
        return Errors(0, np.nan, np.nan, np.nan)
    middle, p95 = np.percentile(errors, [50, 95])
    return Errors(len(errors), float(100 * middle), float(100 * p95), float(100 * errors.max()))


def _mean(of: list[Errors]) -> Errors:
    middle, p95, most = (float(np.mean([getattr(e, n) for e in of])) for n in ("median_pct", "p95_pct", "max_pct"))
    return Errors(of[0].rows, middle, p95, most)


def straight_lines(
    rows: tuple[IntArray, IntArray, IntArray, FloatArray], queries: tuple[IntArray, IntArray, IntArray]
) -> FloatArray:
    """`interpolated_us` for queries at many (n, k), (queries,); nan where a (n, k) is not in the rows."""
    rows_m, rows_n, rows_k, rows_us = rows
    m, n, k = queries
    out = np.full(len(m), np.nan)
    own: dict[tuple[int, int], list[int]] = {}
    for i, site in enumerate(zip(rows_n.tolist(), rows_k.tolist(), strict=True)):
        own.setdefault(site, []).append(i)
    asked: dict[tuple[int, int], list[int]] = {}
    for i, site in enumerate(zip(n.tolist(), k.tolist(), strict=True)):
        asked.setdefault(site, []).append(i)
    for site, places in asked.items():
        there = np.array(own.get(site, []), dtype=np.int64)
        if len(there):
            there = there[np.argsort(rows_m[there], kind="stable")]
            out[places] = interpolated_us(m[places], rows_m[there], rows_us[there])
    return out
