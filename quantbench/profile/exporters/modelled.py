"""Times where nothing was measured, for the rows that a consumer's table needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.model import GemmModel
from quantbench.profile.blindspots import FloatArray, IntArray, Site, choose, places_between, through_rows
from quantbench.profile.profile import Profile
from quantbench.workload import Attention

#: (n, k) of products that a table made by a model has: what aiconfigurator's own tables cover
SITE_SIZES = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240,
              12288, 16384, 51200, 65536)  # fmt: skip
#: m of such a table, before the rows at edges
M_GRID = tuple(2**power for power in range(16))


class GemmTimes:
    """Products of one dtype: by the profile's own model, else by the best that is known of its device.

    fp16 is taken to run as bf16 where the device has both at one rate and only the other was measured.
    """

    def __init__(self, profile: Profile, dtype: str) -> None:
        device = profile.device
        own = profile.models.product(dtype)
        self._ask: Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], npt.ArrayLike]
        if own is not None:
            self._ask, rows = own.fast.predict_us, own.rows
        else:
            same = dtype == "fp16" and device.peak("bf16") == device.peak("fp16")
            model = GemmModel.best(device, dtype="bf16" if same else dtype)
            self._ask, rows = lambda m, n, k: model.predict(m, n, k).latency_us, model.rows
        fitted = f"fitted to {rows:,} shapes" if rows else "from what other GPUs taught, nothing measured"
        self.note = f"products that were not measured are modelled ({fitted})"

    def latency_us(self, m: npt.ArrayLike, n: npt.ArrayLike, k: npt.ArrayLike) -> FloatArray:
        """µs of products, (rows,)."""
        return np.asarray(self._ask(m, n, k), dtype=np.float64)


def model_sites(times: GemmTimes, pairs: Sequence[tuple[int, int]], bound: float) -> list[tuple[int, int, int, float]]:
    """(m, n, k, µs) at every (n, k): M_GRID, and as many rows at edges as keep straight lines within `bound`."""
    m = places_between(np.array(M_GRID, dtype=np.int64))
    n, k = (np.array(sizes) for sizes in zip(*pairs, strict=True))
    expected = times.latency_us(*(part.ravel() for part in np.broadcast_arrays(m[None, :], n[:, None], k[:, None])))
    in_grid = np.isin(m, M_GRID)
    sites = [
        Site(*pair, m, own, in_grid) for pair, own in zip(pairs, expected.reshape(len(pairs), len(m)), strict=True)
    ]
    picked = choose(sites, bound, "max")
    rows = []
    for site, added in zip(picked.sites, picked.added, strict=True):
        kept = site.in_table | added
        rows += [
            (int(x), site.n, site.k, float(us)) for x, us in zip(site.m[kept], site.expected_us[kept], strict=True)
        ]
    return rows


def moved_through(times: GemmTimes, m: IntArray, n: int, k: int, rows_m: IntArray, rows_us: FloatArray) -> FloatArray:
    """µs at sizes m of one (n, k): measured where a row is there, else the model moved through the rows; (places,)."""
    if not len(rows_m):
        return times.latency_us(m, n, k)
    every = np.union1d(m, rows_m).astype(np.int64)
    in_table = np.isin(every, rows_m)
    moved = through_rows(every, times.latency_us(every, n, k), in_table, rows_us)
    return np.asarray(moved[np.isin(every, m)], dtype=np.float64)


def attention_us(profile: Profile, works: Sequence[Attention]) -> FloatArray:
    """µs of attention of one dtype by the profile's model or the best there is, (works,)."""
    model = profile.models.attention or AttentionModel.best(profile.device)
    return np.asarray(model.predict(works).latency_us, dtype=np.float64)
