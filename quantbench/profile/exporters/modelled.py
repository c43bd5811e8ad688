"""Predicts the rows of a planner's table that were not measured. A planner that interpolates
linearly also needs rows on both sides of cliffs and edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import UnsupportedError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.libraries import library_of
from quantbench.latency.model_times import best_gemm_model
from quantbench.profile.exporters.options import Exported
from quantbench.profile.linear_interpolation import (
    BOUND,
    FloatArray,
    IntArray,
    Site,
    places_between,
    through_rows,
)
from quantbench.profile.profile import Profile
from quantbench.profile.schema import KnownCliff
from quantbench.profile.table import Table
from quantbench.workload import Attention, Gemm

#: n and k of a modelled table: the sizes in aiconfigurator's own tables
SITE_SIZES = (
    32,
    64,
    128,
    256,
    512,
    768,
    1024,
    1536,
    2048,
    2560,
    3072,
    3584,
    4096,
    5120,
    6144,
    7168,
    8192,
    10240,
    12288,
    16384,
    51200,
    65536,
)
#: (n, k) of a modelled table of no named model
MODEL_SITES = tuple((n, k) for n in SITE_SIZES for k in SITE_SIZES)
#: m of a modelled table, before rows at edges are added
M_GRID = tuple(2**power for power in range(16))
#: kernel_source of modelled rows
MODEL = "quantbench_model"
AT_CLIFF = "quantbench_model_at_cliff"

#: m, n, k, µs, dtype, kernel_source, upper end of the 90 % interval over the time
GemmRow = tuple[int, int, int, float, str, str, float]


class GemmTimes:
    """Predictor of GEMM times of one dtype, by the profile's model or what stands in for it
    (`best_gemm_model`).
    """

    def __init__(self, profile: Profile, dtype: str, library: str = "") -> None:
        """library: whose products are preferred, "" for any."""

        def known(name: str) -> GemmModel | None:
            return profile.models.product(name, library) or profile.models.product(name)

        device = profile.device
        shipped = library if shipped_model(device.name, dtype, library) else ""
        self._model, _ = best_gemm_model(device, dtype, shipped, preferred=known)
        model = self._model
        self.library = model.library
        self.source = MODEL
        fitted = "from what other GPUs taught, nothing measured"
        if model.rows:
            fitted = f"fitted to {model.rows:,} shapes of {model.library}"
            if library not in ("", model.library):
                self.source += f"_of_{model.library}"
                fitted += f", as no model of {library}'s is shipped"
            fitted += accuracy_words(model.provenance)
        self.note = f"{dtype} products that were not measured are modelled ({fitted})"

    def latency_us(
        self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, *, batch: int = 1
    ) -> FloatArray:
        """Returns predicted times of linear layers (layout nt), µs, (rows,)."""
        return self._model.predict(m, n, k, layout="nt", batch=batch).latency_us

    def spread(self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> list[float]:
        """Returns the upper end of the 90 % interval over the time, (rows,)."""
        found = self._model.predict(m, n, k, layout="nt")
        return [float(ratio) for ratio in found.high_us / found.latency_us]

    def through(self, m: IntArray, n: int, k: int, rows: Table) -> FloatArray:
        """Returns µs at sizes m (places,) of one (n, k): measured if in `rows` (the table's rows of
        this (n, k)), else predicted and scaled to match the rows
        (`linear_interpolation.through_rows`)."""
        if not len(rows):
            return self.latency_us(m, n, k)
        every = np.union1d(m, rows["m"]).astype(np.int64)
        moved = through_rows(
            every, self.latency_us(every, n, k), np.isin(every, rows["m"]), rows["latency_us"]
        )
        return np.asarray(moved[np.isin(every, m)], dtype=np.float64)

    def site(self, n: int, k: int, grid: IntArray, rows: Table) -> Site:
        """Returns the sizes `grid` of one (n, k), as the table to interpolate in, and both sides of
        the edges between them. rows: measured rows of this (n, k)."""
        m = places_between(grid)
        return Site(n, k, m, self.through(m, n, k, rows), np.isin(m, grid))

    def sites_between(self, table: Table) -> list[Site]:
        """Returns a site for each (n, k) of which `table` (products of one format and provider) has
        several rows.
        """
        pairs, pair = np.unique(np.stack([table["n"], table["k"]]), axis=1, return_inverse=True)
        sites = []
        for i, (n, k) in enumerate(pairs.T.tolist()):
            rows = table.where(pair.reshape(-1) == i)
            if len(rows) > 1:
                sites.append(self.site(n, k, rows["m"], rows))
        return sites


def accuracy_words(provenance: Mapping[str, Any], rows: str = "held_out") -> str:
    """Returns a model's errors on rows that it was not fitted to; "" if they are not known."""
    held = provenance.get(rows, {})
    if "p95_pct" not in held:
        return ""
    median = f"{held['median_pct']:.1f} % off (median)"
    return f"; {median}, {held['p95_pct']:.1f} % (95th percentile) on others"


def model_rows(
    times: GemmTimes, dtype: str, pairs: Iterable[tuple[int, int]], measured: Table
) -> list[GemmRow]:
    """Returns rows of each (n, k) at M_GRID, and at edges until linear interpolation is within
    BOUND, but for those in `measured`, through which they go."""
    found: list[GemmRow] = []
    for n, k in pairs:
        rows = measured.where((measured["n"] == n) & (measured["k"] == k))
        site = times.site(n, k, np.union1d(M_GRID, rows["m"]).astype(np.int64), rows)
        kept = (site.in_table | site.rows_to_add(BOUND)) & ~np.isin(site.m, rows["m"])
        if kept.any():
            m = site.m[kept]
            columns = m.tolist(), site.expected_us[kept].tolist(), times.spread(m, n, k)
            found += [
                (size, n, k, us, dtype, times.source, spread)
                for size, us, spread in zip(*columns, strict=True)
            ]
    return found


def seen(work: Attention, window: int) -> Attention:
    """Returns attention without a window of as many pairs of queries and keys as `work` has with
    one: decoding sees the window's keys, a prompt is cut into pieces of two windows."""
    if not window or work.seq_k <= 2 * window:
        return work
    if work.seq_q == 1:
        return replace(work, seq_k=window)
    pieces = -(-work.seq_k // (2 * window))
    return replace(work, batch=work.batch * pieces, seq_q=2 * window, seq_k=2 * window)


def attention_times(
    profile: Profile, table: Table, modelled: list[Attention]
) -> tuple[list[Any], list[float], list[str]]:
    """Returns (shapes, times in µs, their sources): the table's rows, or `modelled` shapes if it
    has none, by the profile's model or the best one for its device."""
    if len(table):
        return table.workloads(), table["latency_us"].tolist(), table["provider"].tolist()
    model = profile.models.attention or AttentionModel.best(profile.device)
    return modelled, model.predict(modelled).latency_us.tolist(), [MODEL] * len(modelled)


def known_cliff_rows(profile: Profile, table: Table, out: Exported) -> list[GemmRow]:
    """Predicts the rows on both sides of known cliffs that `table` (GEMMs of one provider and
    layout) lacks.
    """
    found: list[GemmRow] = []
    for dtype in np.unique(table["dtype"]).tolist():
        rows = table.where(table["dtype"] == dtype)
        wanted = _cliff_sides(profile.cliffs, rows)
        try:
            times = GemmTimes(profile, dtype, library_of(str(rows["provider"][0])))
        except UnsupportedError as error:
            out.notes.append(f"both sides of cliffs that were not measured are left out: {error}")
            continue
        for n, k in sorted(wanted):
            site = rows.where((rows["n"] == n) & (rows["k"] == k))
            m = np.setdiff1d(list(wanted[n, k]), site["m"])
            if len(m):
                columns = m.tolist(), times.through(m, n, k, site).tolist(), times.spread(m, n, k)
                found += [
                    (size, n, k, us, dtype, AT_CLIFF, spread)
                    for size, us, spread in zip(*columns, strict=True)
                ]
    if found:
        out.notes.append(
            f"{len(found):,} rows on both sides of known cliffs are modelled "
            f"(kernel_source {AT_CLIFF})"
        )
    return found


def _cliff_sides(cliffs: Sequence[KnownCliff], rows: Table) -> dict[tuple[int, int], set[int]]:
    """Returns m on both sides of the cliffs of the rows' provider, dtype and layout, by (n, k).

    A single-curve cliff contributes its two measured workloads. A family's cliff along m
    contributes both sides at every (n, k) with rows on both sides.
    """
    measured = defaultdict(list)
    for m, n, k in zip(*(rows[name].tolist() for name in "mnk"), strict=True):
        measured[n, k].append(m)
    of = [str(rows[name][0]) for name in ("provider", "dtype", "layout")]
    wanted = defaultdict(set)
    for cliff in cliffs:
        if [cliff.provider, cliff.variant] != [of[0], f"gemm {of[1]} {of[2]}"]:
            continue
        for work in (cliff.before, cliff.after):
            if isinstance(work, Gemm) and work.batch == 1:
                wanted[work.n, work.k].add(work.m)
        for pair, sizes in measured.items():
            if (
                cliff.before is None
                and cliff.axis == "m"
                and sizes[0] <= cliff.at
                and cliff.next <= sizes[-1]
            ):
                wanted[pair] |= {cliff.at, cliff.next}
    return wanted
