"""Recovers the tile and the number of resident blocks from the steps of curves.

`recover` models the log time of each curve as `share · log(waves + overhead)` plus a smooth trend
plus noise; the trend is a Gaussian process too slow for steps, so only steps distinguish the
candidates. Kernel names are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from quantbench.analysis.curves import FittedCurve
from quantbench.launch import Tile
from quantbench.workload import Gemm

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

#: tile sides of GPU kernels, in elements (from the names of cuBLAS, CUTLASS and nvjet kernels, and
#: our own)
BLOCK_SIDES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
#: tile sides of CPU kernels, whose m side is a few rows of registers
CPU_BLOCK_SIDES = (1, 4, 6, 8, 12, 14, 16, 24, 28, 32, 48, 64, 96, 128)
#: most output elements of a tile: no kernel keeps more in registers (320×128 is the largest seen)
_LARGEST_TILE = 256 * 192
#: most resident blocks per SM: GEMM kernels use too many registers and too much shared memory for
#: more
MOST_BLOCKS_PER_SM = 4


@dataclass(frozen=True)
class Explanation:
    """A tile of block_m × block_n, with `resident_blocks` blocks running concurrently on the
    device.
    """

    block_m: int
    block_n: int
    resident_blocks: int

    @property
    def tile(self) -> Tile:
        return Tile(self.block_m, self.block_n)

    def per_sm(self, sm_count: int) -> int | None:
        """Returns the resident blocks per SM; None if the number is not whole."""
        return None if self.resident_blocks % sm_count else self.resident_blocks // sm_count


@dataclass(frozen=True)
class Candidates:
    """Explanations grouped into classes that predict the same steps.

    waves: number of waves of the first member of each class (classes, points).
    members: explanations of each class.
    """

    waves: Ints
    members: tuple[tuple[Explanation, ...], ...]


def candidates(
    products: Sequence[Sequence[Gemm]], sides: Sequence[int], resident: Sequence[int]
) -> Candidates:
    """Lists all explanations with tile sides from `sides` and resident blocks from `resident`, by
    class.

    products: GEMMs of each curve; the points of `Candidates.waves` follow their order.

    >>> sizes = [[Gemm(m=4096, n=n, k=64) for n in range(256, 4096, 256)]]
    >>> found = candidates(sizes, (128, 256), (108, 216))
    >>> for members in found.members:
    ...     if Explanation(128, 256, 108) in members:
    ...         print(*members, sep="\\n")
    Explanation(block_m=128, block_n=128, resident_blocks=216)
    Explanation(block_m=128, block_n=256, resident_blocks=108)
    Explanation(block_m=256, block_n=128, resident_blocks=108)
    """
    sizes = map(attrgetter("m", "n", "batch"), chain.from_iterable(products))
    m, n, batch = np.array(list(sizes), dtype=np.int64).T
    ends = np.cumsum(list(map(len, products)))
    by_class: dict[bytes, list[Explanation]] = {}
    rows: list[Ints] = []
    at_a_time = np.array(sorted(resident), dtype=np.int64)
    for block_m, block_n in product(sides, sides):
        if block_m * block_n > _LARGEST_TILE:
            continue
        num_tiles = batch * -(-m // block_m) * -(-n // block_n)
        waves = -(-num_tiles // at_a_time[:, None])
        waves = waves.astype(np.int32)
        shapes = _shape(waves, ends)
        for i, count in enumerate(at_a_time):
            key = shapes[i].tobytes()
            if key not in by_class:
                by_class[key] = []
                rows.append(waves[i])
            by_class[key].append(Explanation(block_m, block_n, int(count)))
    return Candidates(np.stack(rows), tuple(map(tuple, by_class.values())))


def _shape(waves: Ints, ends: Ints) -> npt.NDArray[np.float32]:
    """Scales each row of waves (rows, points) to 0 … 1 on each curve, in single precision so that
    equal shapes have equal bits."""
    shapes = np.empty(waves.shape, dtype=np.float32)
    start = 0
    for stop in ends:
        part = waves[:, start:stop]
        low = part.min(axis=1, keepdims=True)
        rise = np.maximum(part.max(axis=1, keepdims=True) - low, 1)
        shapes[:, start:stop] = (part - low) / rise
        start = stop
    return shapes


# Launch overheads that are tried, in units of one wave's time.
_OVERHEADS = (0.0, 0.25, 0.5, 1.0, 2.0)
# Upper limit of `share`: time is at most proportional to the waves, plus a margin for clocks that
# drop under load.
_MOST_SHARE = 1.05
# Gaussian process of the trend: (amplitude in log time, length in log size) of large slow bends
# (memory- to compute- bound) and of slight faster ones; wide priors for level and elasticity.
_TREND_BENDS = ((0.5, 2.0), (0.05, 0.5))
_TREND_LEVEL = 10.0
_TREND_ELASTICITY = 1.0
# Smallest probability of the best class for a clear result.
CONFIDENT = 0.95
#: smallest explained share of the deviations from the trend for any tile, and for a clear result
EXPLAINS_LITTLE = 0.3
EXPLAINS_MUCH = 0.4
# From this many curves on, confidence is at most the share of bootstrap resamples that the class
# wins.
_FEWEST_TO_RESAMPLE = 8
_RESAMPLES = 200
_RESAMPLE_SEED = 0
# Smallest improvement of the fit (twice log likelihood) that is evidence for waves.
_LEAST_IMPROVEMENT = 12.0
# Smallest likelihood of a rival relative to the best class, and the largest number of rivals.
_RIVAL = 0.01
_MOST_RIVALS = 5
# "no waves" requires that the waves of three in four candidates would improve the fit by more than
# this.
_WOULD_SHOW = 100.0


@dataclass(frozen=True)
class Recovered:
    """Result of `recover`.

    verdict: one of `rules.VERDICTS` on "one tile explains the steps".
    reason: `no waves` or `no single tile` if that is refuted, else "".
    best: explanations of the most likely class, which predict the same steps at the measured sizes.
    confidence: probability of this class among all candidates.
    explained: share of the squared deviations from a smooth trend, beyond noise, that its waves
        explain.
    rivals: one explanation of each of the next likely classes, most likely first.
    plausible: all explanations of the best class and the rivals.
    """

    verdict: str
    reason: str
    best: tuple[Explanation, ...]
    confidence: float
    explained: float
    rivals: tuple[Explanation, ...]
    plausible: frozenset[Explanation] = field(repr=False)


def recover(curves: Sequence[FittedCurve], found: Candidates) -> Recovered:
    """Finds the class that best explains the curves. The columns of `found.waves` are the points of
    `curves`.
    """
    misfit, visible, null, points = _misfits(curves, found.waves)
    total = misfit.sum(axis=0)
    order = np.argsort(total, kind="stable")
    best = int(order[0])
    freedom = max(points - 3.0 * len(curves), 1.0)
    # If the best class leaves more than noise, likelihood differences are scaled down.
    scale = max(1.0, total[best] / freedom)
    weight = np.exp(-(total - total[best]) / 2 / scale)
    confidence = float(weight[best] / weight.sum())
    if len(curves) >= _FEWEST_TO_RESAMPLE:
        confidence = min(confidence, _share_of_wins(misfit, best))
    gain = null.sum() - total[best]
    explained = float(np.clip(gain / max(null.sum() - freedom, 1e-9), 0.0, 1.0))
    verdict = "INCONCLUSIVE"
    reason = ""
    rises = np.ptp(found.waves, axis=1) > 0
    if gain / scale < _LEAST_IMPROVEMENT or not rises[best]:
        rising = visible[rises]
        if not rising.size or np.quantile(rising, 0.25) / scale > _WOULD_SHOW:
            verdict = "REFUTED"
            reason = "no waves"
    elif explained < EXPLAINS_LITTLE:
        verdict = "REFUTED"
        reason = "no single tile"
    elif confidence >= CONFIDENT and explained >= EXPLAINS_MUCH:
        verdict = "CONFIRMED"
    rivals = [found.members[i] for i in order[1 : _MOST_RIVALS + 1] if weight[i] >= _RIVAL]
    return Recovered(
        verdict,
        reason,
        found.members[best],
        confidence,
        explained,
        rivals=tuple(map(itemgetter(0), rivals)),
        plausible=frozenset(found.members[best]).union(*rivals),
    )


def _misfits(curves: Sequence[FittedCurve], waves: Ints) -> tuple[Floats, Floats, Floats, int]:
    """Computes the misfit of every class, as squared residuals over variance.

    Returns the misfit of each class on each curve (curves, classes); the improvement that its waves
    would make if present, at share 1 and the first overhead (classes,); the misfit of the trend
    (curves,); the number of points.
    """
    misfit = np.full((len(curves), len(waves)), np.inf)
    visible = np.zeros(len(waves))
    null = np.empty(len(curves))
    logs = [np.log(np.arange(1, int(waves.max()) + 1) + overhead) for overhead in _OVERHEADS]
    start = 0
    for i, fitted in enumerate(curves):
        own = waves[:, start : start + len(fitted.curve.points)] - 1
        start += len(fitted.curve.points)
        whiten = _whitener(fitted.curve.log_size, fitted.sigma)
        y = whiten @ fitted.curve.log_time
        null[i] = y @ y
        for number, log_of in enumerate(logs):
            x = log_of[own] @ whiten.T
            xx = np.einsum("ij,ij->i", x, x)
            xy = x @ y
            visible += xx if number == 0 else 0.0
            share = np.clip(xy / np.maximum(xx, 1e-12), 0.0, _MOST_SHARE)
            misfit[i] = np.minimum(misfit[i], null[i] - 2 * share * xy + share**2 * xx)
    return misfit, visible, null, start


def _whitener(log_size: Floats, sigma: Floats) -> Floats:
    """Returns the matrix that whitens a smooth trend plus noise (points, points)."""
    u = log_size - log_size.mean()
    apart = u[:, None] - u
    covariance = np.diag(sigma**2) + _TREND_LEVEL**2 + _TREND_ELASTICITY**2 * np.outer(u, u)
    for amplitude, length in _TREND_BENDS:
        covariance += amplitude**2 * np.exp(-0.5 * (apart / length) ** 2)
    inverse: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return inverse


def _share_of_wins(misfit: Floats, best: int) -> float:
    """Returns the share of bootstrap resamples of the curves in which `best` has the smallest
    misfit.
    """
    rng = np.random.default_rng(_RESAMPLE_SEED)
    times = rng.multinomial(len(misfit), np.full(len(misfit), 1 / len(misfit)), size=_RESAMPLES)
    totals = times @ misfit
    return float(np.mean(totals[:, best] <= totals.min(axis=1) + 1e-9))
