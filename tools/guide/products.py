"""What the tables of matrix products show: the cost of one more row, and the price of tensor parallelism.

`edges_of` compares the times at m and m + 1 over all large products and tests which tile's waves explain the steps.
`prices`, `rates` and `token_ratios` compare products that are split by tp, or have more tokens.
`evidence.find` calls all of them.
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

# Smaller products wait for launches and memory; what they show is not the tiles.
SMALLEST_N_K = 1024
SMALLEST_M = 64
# Waves are held against steps from here on, where the products of these widths are bound by arithmetic.
FIT_FROM_M = 256
_QUIET_M = range(6, 15)
# Where m + 1 is faster by more than single figures of these tables repeat within.
FASTER = 0.97
# The tiles that cuBLAS ships for these formats (kernel names), with what may be resident of them on an SM.
_TILES = tuple((Tile(m, n), per_sm) for m in (64, 128, 192, 256) for n in (64, 128, 192, 256) for per_sm in (1, 2))


@dataclass(frozen=True)
class EdgeStep:
    """The step from m to m + 1 over all pairs (n, k).

    ratios: time at m + 1 over time at m.
    low, median, high: their 10, 50 and 90 % quantile.
    share_faster: share of shapes that are more than 3 % faster with the larger m.
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
    """How well the waves of one tile explain the steps.

    correlation: between the logarithms of the ratios of waves and of times.
    at_wave, elsewhere: median step where the number of waves grows, and where it does not.
    quartiles_at_wave, quartiles_elsewhere: lower and upper quartile of each.
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
    """Median steps of products of less than one wave that need one more row of tiles.

    begins: where those tiles, cut until all SMs are busy (`parts_to_fill`), begin a second wave.
    fits: where they do not.
    """

    begins: float
    fits: float


@dataclass(frozen=True)
class Edges:
    """The cost of one more row in one table.

    steps: ascending in m.
    fits: every candidate tile, the best first.
    below: for the tile that is assumed for the device; None without such products.
    repeats: relative standard deviation of one figure, from neighbours between which nothing changes.
    """

    steps: tuple[EdgeStep, ...]
    fits: tuple[TileFit, ...]
    below: BelowOneWave | None
    repeats: float

    def step(self, m: int) -> EdgeStep:
        """The step after m."""
        return next(step for step in self.steps if step.m == m)

    def fit(self, tile: Tile, blocks_per_sm: int = 1) -> TileFit:
        """The fit of one tile."""
        return next(fit for fit in self.fits if (fit.tile, fit.blocks_per_sm) == (tile, blocks_per_sm))


def edges_of(points: Sequence[Point], spec: DeviceSpec) -> Edges:
    """Steps and fits of a table of plain products that has m and m + 1 on both sides of edges."""
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
    tile = assumed_tile(spec).tile
    begins: list[float] = []
    fits: list[float] = []
    for a, b, ratio in pairs:
        before, after = (quantize(work, tile, spec.sm_count).num_tiles for work in (a, b))
        if before < after <= spec.sm_count:
            parts = parts_to_fill(before, spec.sm_count)
            (begins if after * parts > spec.sm_count else fits).append(ratio)
    return BelowOneWave(median(begins), median(fits)) if begins and fits else None


def _repeats(times: Mapping[Gemm, float]) -> float:
    """From m = 5 to 15 a product of these sizes reads its weights, and one row more changes nothing: each figure
    against the mean of its neighbours, whose variance is 3/2 of that of one figure."""
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
# Linear layers of models that are split: hidden sizes and widths of the MLP as the tables have them.
_LARGE = range(4096, 16384 + 1)


@dataclass(frozen=True)
class Price:
    """The price of splitting a product by tp: tp · time of the part over time of the whole; 1.2 is 20 % more GPU time.

    column: whether n is split (qkv, up) or k (projection, down).
    tokens: rows of the product.
    ratios: of every product.
    """

    column: bool
    tp: int
    tokens: int
    ratios: tuple[float, ...]

    @property
    def price(self) -> float:
        return median(self.ratios)


def prices(points: Sequence[Point]) -> tuple[Price, ...]:
    """Prices for each split dimension, degree and number of tokens."""
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
    """Median TFLOP/s of the large products by number of tokens."""
    by_tokens: dict[int, list[float]] = {}
    for (m, n, k), us in _times(points).items():
        if n in _LARGE and k in _LARGE and m >= TOKENS[0] and m & (m - 1) == 0:
            by_tokens.setdefault(m, []).append(2 * m * n * k / us / 1e6)
    return {m: median(found) for m, found in sorted(by_tokens.items())}


def token_ratios(points: Sequence[Point], few: int, many: int) -> tuple[float, ...]:
    """Time per token at `few` tokens over that at `many`, for each large product."""
    times = _times(points)
    return tuple(
        (us / few) / (times[many, n, k] / many)
        for (m, n, k), us in times.items()
        if m == few and n in _LARGE and k in _LARGE and (many, n, k) in times
    )


def enough_tokens(found: dict[int, float], share: float = 0.95) -> int:
    """The fewest tokens that reach `share` of the best rate."""
    best = max(found.values())
    return next(m for m, rate in found.items() if rate >= share * best)


def _times(points: Sequence[Point]) -> dict[tuple[int, int, int], float]:
    return {(p.workload.m, p.workload.n, p.workload.k): p.latency_us for p in points if isinstance(p.workload, Gemm)}
