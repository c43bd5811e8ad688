"""Analyses tables of GEMMs: the cost of one more row, and the cost of splitting by tensor parallelism.

Entry points: `edges_of` (times at m and m + 1, and the tile whose waves explain the steps), `prices` (splits by tp),
`rates` and `token_ratios` (numbers of tokens). Used by `evidence`; `page` uses `enough_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantbench.analysis.blocks import parts_to_fill
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import assumed_tile
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.stats import median, noise
from quantbench.workload import Gemm

# Smaller GEMMs are bound by launches and memory, so they show no tiles.
SMALLEST_N_K = 1024
SMALLEST_M = 64
# Smallest m for fitting waves to steps: from here on GEMMs of these widths are bound by arithmetic.
FIT_FROM_M = 256
_QUIET_M = range(6, 15)
# Ratio below which m + 1 counts as faster: beyond the repeatability of these tables.
FASTER = 0.97
# Tiles that cuBLAS ships for these formats (by kernel names), each with 1 or 2 resident blocks per SM.
_TILES = tuple((Tile(m, n), per_sm) for m in (64, 128, 192, 256) for n in (64, 128, 192, 256) for per_sm in (1, 2))


@dataclass(frozen=True)
class EdgeStep:
    """Step in time from m to m + 1 over all pairs (n, k).

    ratios: time at m + 1 over time at m, one per pair.
    low, median, high: 10, 50 and 90 % quantiles of the ratios.
    share_faster: share of the pairs that take over 3 % less time at m + 1.
    """

    m: int
    ratios: tuple[float, ...]
    low: float
    median: float
    high: float
    share_faster: float

    @property
    def shapes(self) -> int:
        return len(self.ratios)


@dataclass(frozen=True)
class TileFit:
    """Agreement between the waves of one tile and the measured steps.

    correlation: correlation between the logarithms of the wave ratios and the time ratios.
    at_wave, elsewhere: median step at which the number of waves grows, or does not.
    quartiles_at_wave, quartiles_elsewhere: lower and upper quartile of the same steps.
    """

    tile: Tile
    blocks_per_sm: int
    correlation: float
    at_wave: float
    elsewhere: float
    quartiles_at_wave: tuple[float, float]
    quartiles_elsewhere: tuple[float, float]


@dataclass(frozen=True)
class BelowOneWave:
    """Median steps of GEMMs of at most one wave that need one more row of tiles.

    begins: median if the tiles, cut until all SMs are busy (`parts_to_fill`), begin a second wave.
    fits: median if they do not.
    """

    begins: float
    fits: float


@dataclass(frozen=True)
class Edges:
    """Cost of one more row in one table.

    steps: steps, ascending in m.
    fits: fits of the candidate tiles, best first.
    below: steps below one wave of the device's assumed tile; None without such GEMMs.
    repeats: relative standard deviation of one time, estimated from neighbours that should take equal time.
    """

    steps: tuple[EdgeStep, ...]
    fits: tuple[TileFit, ...]
    below: BelowOneWave | None
    repeats: float

    def step(self, m: int) -> EdgeStep:
        """Returns the step after m."""
        return next(step for step in self.steps if step.m == m)

    def fit(self, tile: Tile, blocks_per_sm: int = 1) -> TileFit:
        """Returns the fit of one tile."""
        return next(fit for fit in self.fits if (fit.tile, fit.blocks_per_sm) == (tile, blocks_per_sm))


def edges_of(points: Sequence[Point], spec: DeviceSpec) -> Edges:
    """Computes the steps and fits of a GEMM table that has pairs m, m + 1 at edges."""
    times = {p.workload: p.latency_us for p in points if isinstance(p.workload, Gemm)}
    pairs: list[tuple[Gemm, Gemm, float]] = []
    for work, before_us in times.items():
        after = Gemm(work.m + 1, work.n, work.k, dtype=work.dtype, layout=work.layout)
        if after in times and work.m >= SMALLEST_M and min(work.n, work.k) >= SMALLEST_N_K:
            pairs.append((work, after, times[after] / before_us))
    steps = [_step(m, [ratio for a, _, ratio in pairs if a.m == m]) for m in sorted({a.m for a, _, _ in pairs})]
    bound = [pair for pair in pairs if pair[0].m >= FIT_FROM_M]
    fits = [fit for tile, per_sm in _TILES if (fit := _fit(bound, tile, per_sm, spec.sm_count)) is not None]
    below = _below_one_wave(pairs, spec)
    return Edges(tuple(steps), tuple(sorted(fits, key=lambda fit: -fit.correlation)), below, _repeats(times))


def _below_one_wave(pairs: Sequence[tuple[Gemm, Gemm, float]], spec: DeviceSpec) -> BelowOneWave | None:
    tile = assumed_tile(spec)
    begins: list[float] = []
    fits: list[float] = []
    for a, b, ratio in pairs:
        before, after = (quantize(work, tile, spec.sm_count).num_tiles for work in (a, b))
        if before < after <= spec.sm_count:
            parts = parts_to_fill(before, spec.sm_count)
            (begins if after * parts > spec.sm_count else fits).append(ratio)
    return BelowOneWave(median(begins), median(fits)) if begins and fits else None


def _repeats(times: Mapping[Gemm, float]) -> float:
    """Returns the noise of one time, from each time over the mean of its neighbours (variance 3/2 of one time's) at m
    from 5 to 15, at which GEMMs of these sizes are bound by reading weights."""
    off = []
    for work, us in times.items():
        if work.m in _QUIET_M and min(work.n, work.k) >= SMALLEST_N_K:
            around = [times.get(replace(work, m=work.m + step)) for step in (-1, 1)]
            if None not in around:
                off.append(us / (sum(a for a in around if a is not None) / 2))
    return float(noise(off) / np.sqrt(1.5))


def _step(m: int, ratios: Sequence[float]) -> EdgeStep:
    values = np.array(ratios)
    low, middle, high = (float(q) for q in np.quantile(values, (0.1, 0.5, 0.9)))
    return EdgeStep(m, tuple(ratios), low, middle, high, float(np.mean(values < FASTER)))


def _fit(pairs: Sequence[tuple[Gemm, Gemm, float]], tile: Tile, per_sm: int, sm_count: int) -> TileFit | None:
    waves = np.array([
        quantize(b, tile, sm_count, per_sm).num_waves / quantize(a, tile, sm_count, per_sm).num_waves
        for a, b, _ in pairs
    ])  # fmt: skip
    ratios = np.array([ratio for _, _, ratio in pairs])
    grows = waves > 1
    if grows.all() or not grows.any():
        return None
    at_wave, elsewhere = (np.quantile(ratios[chosen], (0.25, 0.5, 0.75)) for chosen in (grows, ~grows))
    return TileFit(
        tile, per_sm, float(np.corrcoef(np.log(waves), np.log(ratios))[0, 1]), float(at_wave[1]), float(elsewhere[1]),
        (float(at_wave[0]), float(at_wave[2])), (float(elsewhere[0]), float(elsewhere[2])),
    )  # fmt: skip


DEGREES = (2, 4, 8)
TOKENS = (512, 1024, 2048, 4096, 8192)
# Range of n and k for linear layers that are split by tp.
_LARGE = range(4096, 16384 + 1)


@dataclass(frozen=True)
class Price:
    """Price of splitting a GEMM by tp: tp · time of a part / time of the whole; 1.2 is 20 % more GPU time.

    column: True if n is split (qkv, up), False if k is (projection, down).
    tokens: rows m of the GEMM.
    ratios: price of each GEMM.
    """

    column: bool
    tp: int
    tokens: int
    ratios: tuple[float, ...]

    @property
    def price(self) -> float:
        return median(self.ratios)


def prices(points: Sequence[Point]) -> tuple[Price, ...]:
    """Computes the prices for each split dimension, tp and number of tokens."""
    times = _times(points)
    found = []
    for column in (True, False):
        for tp in DEGREES:
            for tokens in TOKENS:
                ratios = []
                for (m, n, k), whole_us in times.items():
                    if m != tokens or n not in _LARGE or k not in _LARGE or (n if column else k) % tp:
                        continue
                    part = (m, n // tp, k) if column else (m, n, k // tp)
                    if part in times:
                        ratios.append(tp * times[part] / whole_us)
                if ratios:
                    found.append(Price(column, tp, tokens, tuple(ratios)))
    return tuple(found)


def rates(points: Sequence[Point]) -> dict[int, float]:
    """Returns the median TFLOP/s of the large GEMMs by number of tokens, for powers of two from 512."""
    by_tokens: dict[int, list[float]] = {}
    for (m, n, k), us in _times(points).items():
        if n in _LARGE and k in _LARGE and m >= TOKENS[0] and m & (m - 1) == 0:
            by_tokens.setdefault(m, []).append(2 * m * n * k / us / 1e6)
    return {m: median(found) for m, found in sorted(by_tokens.items())}


def token_ratios(points: Sequence[Point], few: int, many: int) -> tuple[float, ...]:
    """Returns time per token at `few` tokens over that at `many`, one ratio per large GEMM."""
    times = _times(points)
    return tuple(
        (us / few) / (times[many, n, k] / many)
        for (m, n, k), us in times.items()
        if m == few and n in _LARGE and k in _LARGE and (many, n, k) in times
    )


def enough_tokens(found: dict[int, float], share: float = 0.95) -> int:
    """Returns the fewest tokens that reach `share` of the best rate. found: see `rates`."""
    best = max(found.values())
    return next(m for m, rate in found.items() if rate >= share * best)


def _times(points: Sequence[Point]) -> dict[tuple[int, int, int], float]:
    return {(p.workload.m, p.workload.n, p.workload.k): p.latency_us for p in points if isinstance(p.workload, Gemm)}
