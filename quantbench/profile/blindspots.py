"""Finds where linear interpolation between a profile's GEMMs is wrong, and which points to measure.

`find` returns the size with the largest error in each gap between two rows, and the minimum set of
new points that keeps the error within a bound. Between rows, the expected time comes from the
profile's model, scaled to match the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quantbench.errors import InputError
from quantbench.profile.exporters.modelled import GemmTimes
from quantbench.profile.exporters.options import Exported, ExportOptions, dtype_of, products
from quantbench.profile.linear_interpolation import BOUND, FloatArray, Site
from quantbench.profile.profile import Profile

_WHO = "profile blindspots"


@dataclass(frozen=True)
class Spot:
    """Size m with the largest interpolation error between two neighbouring rows of one (n, k).

    low, high: m of the two rows.
    interpolated_us: time at m, interpolated linearly between the two rows.
    expected_us: time at m that the model predicts, scaled to match the rows.
    """

    n: int
    k: int
    low: int
    m: int
    high: int
    interpolated_us: float
    expected_us: float

    @property
    def error(self) -> float:
        """Relative error of the interpolated time."""
        return self.interpolated_us / self.expected_us - 1.0


@dataclass(frozen=True)
class Blindspots:
    """Blind spots of a table of GEMMs of one dtype.

    num_rows: number of rows in the table.
    spots: one spot per gap between two rows, largest error first. Gaps without a size to consider
        have no spot.
    add: shapes (m, n, k) to measure, ordered by n, k and ascending m.
    before, after: absolute relative error of the interpolated time at each considered size m
        (`Site.m`) without a row, before and after the shapes in `add` are measured. At the shapes
        in `add`, `after` is 0.
    note: origin of the expected times.
    """

    num_rows: int
    dtype: str
    spots: tuple[Spot, ...]
    add: tuple[tuple[int, int, int], ...]
    before: FloatArray
    after: FloatArray
    note: str


def find(profile: Profile) -> Blindspots:
    """Finds the blind spots between a profile's GEMMs of the most frequent dtype.

    The points in `Blindspots.add` keep the error of linear interpolation within BOUND.

    Raises InputError if no (n, k) has two sizes m.
    """
    dtype = dtype_of(profile, ExportOptions())
    table = products(profile, ExportOptions(dtype=dtype), Exported())
    times = GemmTimes(profile, dtype)
    sites = times.sites_between(table)
    if not sites:
        raise InputError(
            _WHO, "no (n, k) with two sizes of m", "measured products with m swept (--dim m)"
        )
    added = [site.rows_to_add(BOUND) for site in sites]
    pairs = list(zip(sites, added, strict=True))
    spots = [spot for site in sites for spot in _spots(site)]
    return Blindspots(
        num_rows=len(table),
        dtype=dtype,
        spots=tuple(sorted(spots, key=lambda spot: -abs(spot.error))),
        add=tuple((int(m), site.n, site.k) for site, rows in pairs for m in site.m[rows]),
        before=np.concatenate([np.abs(site.errors())[~site.in_table] for site in sites]),
        after=np.concatenate([np.abs(site.errors(rows))[~site.in_table] for site, rows in pairs]),
        note=times.note,
    )


def _spots(site: Site) -> Iterator[Spot]:
    """Yields one spot for each gap between neighbouring rows; gaps without a size m are skipped."""
    errors = site.errors()
    for low, high in pairwise(np.flatnonzero(site.in_table).tolist()):
        if high - low < 2:
            continue
        at = low + int(np.argmax(np.abs(errors[low : high + 1])))
        m_low, m, m_high = site.m[[low, at, high]].tolist()
        expected_us = float(site.expected_us[at])
        interpolated_us = expected_us * (1.0 + float(errors[at]))
        yield Spot(site.n, site.k, m_low, m, m_high, interpolated_us, expected_us)
