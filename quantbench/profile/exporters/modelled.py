"""Predicts rows of a planner's table: shapes that were not measured, and both sides of known cliffs.

Entry points: `GemmTimes` and `attention_us` predict times; `model_sites` of `SITE_SIZES`, `known_cliff_rows` and
`rows_between` select shapes (`GemmRow`), the last two because a planner that interpolates linearly needs rows at
cliffs. Used by the exporters `aiconfigurator` and `vidur`, and by `rates`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quantbench.errors import UnsupportedError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.model_times import best_gemm_model
from quantbench.profile.blindspots import (
    FloatArray,
    IntArray,
    Site,
    choose,
    places_between,
    sites_between,
    sorted_table,
    through_rows,
)
from quantbench.profile.exporters.options import Exported
from quantbench.profile.parts import KnownCliff
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention, Gemm

#: n and k of a modelled table: the sizes in aiconfigurator's own tables
SITE_SIZES = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240,
              12288, 16384, 51200, 65536)  # fmt: skip
#: m of a modelled table, before rows at edges are added
M_GRID = tuple(2**power for power in range(16))
#: kernel_source of modelled rows
MARK, BETWEEN = "quantbench_model_at_cliff", "quantbench_model_between"

#: m, n, k, µs, dtype, kernel_source
GemmRow = tuple[int, int, int, float, str, str]


class GemmTimes:
    """Predictor of GEMM times of one dtype, by the profile's model or what stands in for it (`best_gemm_model`)."""

    def __init__(self, profile: Profile, dtype: str) -> None:
        self._model, _ = best_gemm_model(profile.device, dtype, known=profile.models.product)
        rows = self._model.rows
        fitted = f"fitted to {rows:,} shapes" if rows else "from what other GPUs taught, nothing measured"
        self.note = f"products that were not measured are modelled ({fitted})"

    def latency_us(self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> FloatArray:
        """Returns predicted times, µs, (rows,)."""
        return self._model.predict(m, n, k).latency_us

    def through(self, m: IntArray, n: int, k: int, rows: Table) -> FloatArray:
        """Returns µs at sizes m (places,) of one (n, k): measured if in `rows` (the table's rows of this (n, k)), else
        predicted and scaled to match the rows (`blindspots.through_rows`)."""
        if not len(rows):
            return self.latency_us(m, n, k)
        every = np.union1d(m, rows["m"]).astype(np.int64)
        moved = through_rows(every, self.latency_us(every, n, k), np.isin(every, rows["m"]), rows["latency_us"])
        return np.asarray(moved[np.isin(every, m)], dtype=np.float64)


def model_sites(times: GemmTimes, pairs: Sequence[tuple[int, int]], bound: float) -> list[tuple[int, int, int, float]]:
    """Returns rows (m, n, k, µs) for each (n, k): M_GRID, and edges until linear interpolation is within `bound`."""
    m = places_between(np.array(M_GRID, dtype=np.int64))
    n, k = np.array(pairs).T
    expected = times.latency_us(*(part.ravel() for part in np.broadcast_arrays(m[None, :], n[:, None], k[:, None])))
    in_grid = np.isin(m, M_GRID)
    sites = [Site(*pair, m, us, in_grid) for pair, us in zip(pairs, expected.reshape(len(pairs), len(m)), strict=True)]
    rows = []
    for site, added in zip(sites, choose(sites, bound, "max").added, strict=True):
        kept = in_grid | added
        rows += [
            (x, site.n, site.k, us) for x, us in zip(m[kept].tolist(), site.expected_us[kept].tolist(), strict=True)
        ]
    return rows


def attention_us(profile: Profile, works: Sequence[Attention]) -> FloatArray:
    """Returns predicted attention times, µs, (works,), from the profile's model or the best one for its device."""
    model = profile.models.attention or AttentionModel.best(profile.device)
    return np.asarray(model.predict(works).latency_us, dtype=np.float64)


def known_cliff_rows(profile: Profile, table: Table, out: Exported) -> list[GemmRow]:
    """Predicts the rows on both sides of known cliffs that `table` (GEMMs of one provider and layout) lacks."""
    wanted = _cliff_sides(profile.cliffs, table)
    found: list[GemmRow] = []
    for dtype in sorted({key[3] for key in wanted}):
        try:
            times = GemmTimes(profile, dtype)
        except UnsupportedError as error:
            out.notes.append(f"both sides of cliffs that were not measured are left out: {error}")
            continue
        for n, k in sorted({key[1:3] for key in wanted if key[3] == dtype}):
            site = table.where((table["n"] == n) & (table["k"] == k) & (table["dtype"] == dtype))
            m = np.array(sorted(key[0] for key in wanted if key[1:] == (n, k, dtype)), dtype=np.int64)
            times_us = times.through(m, n, k, site)
            found += [(x, n, k, us, dtype, MARK) for x, us in zip(m.tolist(), times_us.tolist(), strict=True)]
    if found:
        out.notes.append(f"{len(found):,} rows on both sides of known cliffs are modelled (kernel_source {MARK})")
    return found


def _cliff_sides(cliffs: Sequence[KnownCliff], table: Table) -> set[tuple[int, int, int, str]]:
    """Returns (m, n, k, dtype) on both sides of the cliffs of the table's provider, layout and dtypes, if not in it.

    A single-curve cliff contributes its two measured workloads. A family's cliff along m contributes both sides at
    every (n, k) with rows on both sides.
    """
    have: set[tuple[int, int, int, str]] = set()
    # (provider, variant of a cliff) → (n, k, dtype) → smallest and largest m
    reach: dict[tuple[str, str], dict[tuple[int, int, str], tuple[int, int]]] = {}
    for row in table.rows():
        m, site = row["m"], (row["n"], row["k"], row["dtype"])
        have.add((m, *site))
        sites = reach.setdefault((row["provider"], f"gemm {row['dtype']} {row['layout']}"), {})
        low, high = sites.get(site, (m, m))
        sites[site] = (min(low, m), max(high, m))

    def sides(cliff: KnownCliff) -> Iterator[tuple[int, int, int, str]]:
        sites = reach.get((cliff.provider, cliff.variant))
        if sites is None:
            return
        for work in (cliff.before, cliff.after):
            if isinstance(work, Gemm) and work.batch == 1:
                yield work.m, work.n, work.k, work.dtype
        if cliff.before is None and cliff.axis == "m":
            for site, (low, high) in sites.items():
                if low <= cliff.at and cliff.next <= high:
                    yield cliff.at, *site
                    yield cliff.next, *site

    return {key for cliff in cliffs for key in sides(cliff)} - have


def rows_between(
    profile: Profile, table: Table, bound: float, have: set[tuple[int, int, int, str]], out: Exported
) -> list[GemmRow]:
    """Predicts rows between the table's, until linear interpolation is within `bound` of the scaled model.

    have: (m, n, k, dtype) of rows that exist already."""
    found: list[GemmRow] = []
    for dtype in sorted(set(table["dtype"].tolist())):
        own = table.where(table["dtype"] == dtype)
        measured = sorted_table(own["m"], own["n"], own["k"], own["latency_us"])
        sites = sites_between(measured, GemmTimes(profile, dtype).latency_us)
        for site, added in zip(sites, choose(sites, bound, "max").added, strict=True):
            rows = zip(site.m[added].tolist(), site.expected_us[added].tolist(), strict=True)
            found += [
                (m, site.n, site.k, us, dtype, BETWEEN) for m, us in rows if (m, site.n, site.k, dtype) not in have
            ]
    out.notes.append(f"{len(found):,} rows between measured ones are modelled (kernel_source {BETWEEN})")
    return found
