"""Predicts unmeasured rows for planners' tables, scaled to match the measured rows.

`GemmTimes` predicts GEMMs, including the rows on both sides of tile edges (sizes m after which a
GEMM needs another row of tiles) that a planner with linear interpolation needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import shipped_model
from quantbench.latency.model_times import best_gemm_model
from quantbench.profile.linear_interpolation import (
    FloatArray,
    IntArray,
    Site,
    places_between,
    through_rows,
)
from quantbench.profile.models import interval_words
from quantbench.profile.profile import Profile
from quantbench.profile.table import Table
from quantbench.workload import Attention

#: Sizes n and k in a modelled table, taken from aiconfigurator's own tables.
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
#: Pairs (n, k) in a modelled table if no model is named.
MODEL_SITES = tuple((n, k) for n in SITE_SIZES for k in SITE_SIZES)
#: Sizes m in a modelled table, before rows at tile edges are added.
M_GRID = tuple(2**power for power in range(16))
#: kernel_source of modelled rows.
MODEL = "quantbench_model"


class GemmTimes:
    """Predicts times of linear layers in one dtype.

    The model is the profile's, or the model that `best_gemm_model` finds if the profile has none
    for the dtype.

    model: the model that predicts.
    source: kernel_source of modelled rows.
    fitted_to_profile: whether the model was fitted to rows of the profile.
    note: origin and accuracy of the model.
    """

    def __init__(self, profile: Profile, dtype: str, library: str = "") -> None:
        """library: library whose GEMMs are preferred; "" for any."""
        device = profile.device
        self.dtype = dtype
        shipped = library if shipped_model(device.name, dtype, library) else ""
        self.model, _ = best_gemm_model(
            device, dtype, shipped, partial(profile.models.product, library=library)
        )
        model = self.model
        self.source = MODEL
        fitted = "from what other GPUs taught, nothing measured"
        self.fitted_to_profile = False
        if model.rows and model is not shipped_model(device.name, model.dtype, model.library):
            self.fitted_to_profile = True
            rows = profile.tables["gemm"].matching(dtype=model.dtype)
            provider = rows.most_frequent("provider", rows.by_library(model.library))
            fitted = f"fitted to {model.rows:,} rows of this profile"
            if provider:
                fitted += f", of provider {provider}"
            fitted += f"; {interval_words(model)}"
        elif model.rows:
            fitted = f"fitted to {model.rows:,} shapes of {model.library}"
            if library not in ("", model.library):
                self.source += f"_of_{model.library}"
                fitted += f", as no model of {library}'s is shipped"
            fitted += accuracy_words(model.provenance)
        self.note = f"{dtype} products that were not measured are modelled ({fitted})"

    def latency_us(
        self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike, *, batch: int = 1
    ) -> FloatArray:
        """Returns predicted times of linear layers (layout nt) in µs, (rows,)."""
        return self.model.predict(m, n, k, layout="nt", batch=batch).latency_us

    def spread(self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> list[float]:
        """Returns the upper limit of each time's 90 % interval, divided by the time, (rows,)."""
        found = self.model.predict(m, n, k, layout="nt")
        return (found.high_us / found.latency_us).tolist()  # type: ignore[no-any-return]

    def through(self, m: IntArray, n: int, k: int, rows: Table) -> FloatArray:
        """Returns the times at sizes m of one (n, k) in µs, (places,).

        A size with a row gets the row's measured time. Other times are predicted, and scaled to
        match the rows (`linear_interpolation.through_rows`).

        m: (places,), ascending sizes.
        rows: measured rows of this (n, k).
        """
        if not len(rows):
            return self.latency_us(m, n, k)
        every = np.union1d(m, rows["m"]).astype(np.int64)
        moved = through_rows(
            every, self.latency_us(every, n, k), np.isin(every, rows["m"]), rows["latency_us"]
        )
        return np.asarray(moved[np.isin(every, m)], dtype=np.float64)

    def site(self, n: int, k: int, grid: IntArray, rows: Table) -> Site:
        """Returns one (n, k)'s sizes m: the planner's rows, and candidates for further rows.

        The candidates are the sizes on both sides of each tile edge between the planner's rows.

        grid: sizes m that are rows in the planner's table, ascending.
        rows: measured rows of this (n, k).
        """
        m = places_between(grid)
        return Site(n, k, m, self.through(m, n, k, rows), np.isin(m, grid))

    def sites_between(self, table: Table) -> list[Site]:
        """Returns a site for each (n, k) that has two or more rows in `table`.

        table: GEMMs of one dtype, layout and provider.
        """
        pairs, pair = np.unique(np.stack([table["n"], table["k"]]), axis=1, return_inverse=True)
        sites = []
        for i, (n, k) in enumerate(pairs.T.tolist()):
            rows = table.where(pair.reshape(-1) == i)
            if len(rows) > 1:
                sites.append(self.site(n, k, rows["m"], rows))
        return sites


def accuracy_words(provenance: Mapping[str, Any], rows: str = "held_out") -> str:
    """Describes a model's errors on held-out rows, which were not used in the fit, in words.

    rows: name of the held-out rows in the provenance.
    """
    held = provenance.get(rows, {})
    if "p95_pct" not in held:
        return "; its error on others is not known"
    median = f"{held['median_pct']:.1f} % off (median)"
    return f"; {median}, {held['p95_pct']:.1f} % (95th percentile) on others"


def attention_model(profile: Profile) -> AttentionModel:
    """Returns the profile's attention model, or else the best model for the device."""
    return profile.models.attention or AttentionModel.best(profile.device)


def attention_times(
    profile: Profile, table: Table, modelled: list[Attention]
) -> tuple[list[Any], list[float], list[str]]:
    """Returns attention shapes, their times in µs and the source of each time.

    The shapes are the rows of `table`, or the shapes in `modelled` if the table has no rows.
    """
    if len(table):
        return table.workloads(), table["latency_us"].tolist(), table["provider"].tolist()
    return (
        modelled,
        attention_model(profile).predict(modelled).latency_us.tolist(),
        [MODEL] * len(modelled),
    )
