"""Predicts the rows of a planner's table that were not measured. A planner that interpolates
linearly also needs rows on both sides of cliffs and edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.model_times import best_gemm_model
from quantbench.profile.linear_interpolation import (
    FloatArray,
    IntArray,
    Site,
    places_between,
    through_rows,
)
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention

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


class GemmTimes:
    """Predictor of GEMM times of one dtype, by the profile's model or what stands in for it
    (`best_gemm_model`).
    """

    def __init__(self, profile: Profile, dtype: str, library: str = "") -> None:
        """library: whose products are preferred, "" for any."""

        def known(name: str) -> GemmModel | None:
            return profile.models.product(name, library) or profile.models.product(name)

        device = profile.device
        self.dtype = dtype
        shipped = library if shipped_model(device.name, dtype, library) else ""
        self._model, _ = best_gemm_model(device, dtype, shipped, preferred=known)
        rows = self._model.rows
        fitted = (
            f"fitted to {rows:,} shapes of {self._model.library}"
            if rows
            else "from what other GPUs taught, nothing measured"
        )
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


def attention_model(profile: Profile) -> AttentionModel:
    """Returns the profile's model of attention, or the best one for its device."""
    return profile.models.attention or AttentionModel.best(profile.device)


def attention_times(
    profile: Profile, table: Table, modelled: list[Attention]
) -> tuple[list[Any], list[float], list[str]]:
    """Returns (shapes, times in µs, their sources): the table's rows, or `modelled` shapes if it
    has none."""
    if len(table):
        return table.workloads(), table["latency_us"].tolist(), table["provider"].tolist()
    return (
        modelled,
        attention_model(profile).predict(modelled).latency_us.tolist(),
        [MODEL] * len(modelled),
    )
