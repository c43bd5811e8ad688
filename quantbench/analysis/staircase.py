"""Infers the tile and the number of resident blocks from the steps of curves, without kernel names.

The time of a GEMM forms a staircase over its sizes, because each wave of blocks takes a full step.
A candidate tile predicts the number of waves at each size. `recover` finds the candidate whose
waves explain the curves best.

The log time of each curve is modelled as `share · log(waves + overhead)` plus a smooth trend plus
noise. `share` is an exponent: 0 if the waves do not affect the time, and 1 if the time is
proportional to waves + overhead. The trend is a Gaussian process that changes too slowly to follow
steps, so only the steps distinguish the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from math import prod
from operator import attrgetter, itemgetter

import numpy as np
import numpy.typing as npt

from quantbench.analysis.curves import FittedCurve
from quantbench.launch import Tile
from quantbench.workload import Gemm

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float64]

#: tile sides of GPU kernels, in elements; from the names of cuBLAS, CUTLASS and nvjet kernels, and
#: from quantbench's own kernels
BLOCK_SIDES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
#: tile sides of CPU kernels, in elements; block_m is small, because it counts rows of registers
CPU_BLOCK_SIDES = (1, 4, 6, 8, 12, 14, 16, 24, 28, 32, 48, 64, 96, 128)
#: maximum number of output elements of a candidate tile; larger tiles do not fit into registers
#: (320×128 is the largest that was seen)
_LARGEST_TILE = 256 * 192
#: maximum number of resident blocks per SM; the registers and the shared memory that GEMM kernels
#: use allow no more
MOST_BLOCKS_PER_SM = 4


@dataclass(frozen=True)
class TileCandidate:
    """A tile and a number of resident blocks, which together predict the waves at every size.

    block_m, block_n: sides of the tile, in output elements.
    resident_blocks: number of blocks that run concurrently on the device.
    """

    block_m: int
    block_n: int
    resident_blocks: int

    @property
    def tile(self) -> Tile:
        return Tile(self.block_m, self.block_n)

    def per_sm(self, sm_count: int) -> int | None:
        """Returns the number of resident blocks per SM; None if it is not a whole number."""
        return None if self.resident_blocks % sm_count else self.resident_blocks // sm_count


@dataclass(frozen=True)
class Candidates:
    """Explanations grouped into classes, such that all members of a class predict the same steps.

    waves: number of waves by the first member of each class (classes, points).
    members: explanations of each class.
    """

    waves: Ints
    members: tuple[tuple[TileCandidate, ...], ...]


def candidates(
    products: Sequence[Sequence[Gemm]],
    sides: Sequence[int],
    resident: Sequence[int],
    declared: Tile | None = None,
) -> Candidates:
    """Lists all explanations with the given tile sides and resident blocks, grouped into classes.

    products: GEMMs of each curve. The points of `Candidates.waves` have the same order.
    sides: possible values of block_m and of block_n, in elements.
    resident: possible numbers of resident blocks on the device.
    declared: tile that is added to the candidates; default none.

    >>> sizes = [[Gemm(m=4096, n=n, k=64) for n in range(256, 4096, 256)]]
    >>> found = candidates(sizes, (128, 256), (108, 216))
    >>> for members in found.members:
    ...     if TileCandidate(128, 256, 108) in members:
    ...         print(*members, sep="\\n")
    TileCandidate(block_m=128, block_n=128, resident_blocks=216)
    TileCandidate(block_m=128, block_n=256, resident_blocks=108)
    TileCandidate(block_m=256, block_n=128, resident_blocks=108)
    """
    sizes = map(attrgetter("m", "n", "batch"), chain.from_iterable(products))
    m, n, batch = np.array(list(sizes), dtype=np.int64).T
    ends = np.cumsum(list(map(len, products)))
    by_class: dict[bytes, list[TileCandidate]] = {}
    rows: list[Ints] = []
    at_a_time = np.array(sorted(resident), dtype=np.int64)
    tiles = {pair for pair in product(sides, sides) if prod(pair) <= _LARGEST_TILE}
    if declared is not None:
        tiles.add((declared.block_m, declared.block_n))
    for block_m, block_n in sorted(tiles):
        num_tiles = batch * -(-m // block_m) * -(-n // block_n)
        waves = -(-num_tiles // at_a_time[:, None])
        waves = waves.astype(np.int32)
        shapes = _shape(waves, ends)
        for i, count in enumerate(at_a_time):
            key = shapes[i].tobytes()
            if key not in by_class:
                by_class[key] = []
                rows.append(waves[i])
            by_class[key].append(TileCandidate(block_m, block_n, int(count)))
    return Candidates(np.stack(rows), tuple(map(tuple, by_class.values())))


def _shape(waves: Ints, ends: Ints) -> npt.NDArray[np.float32]:
    """Scales wave counts to 0 … 1 on each curve, so that only the shape of the steps remains.

    The result has the shape (rows, points). It is in single precision, so that rows with the same
    steps are equal bit for bit.

    waves: numbers of waves, one row per number of resident blocks (rows, points).
    ends: index of the first point after each curve (curves,).
    """
    shapes = np.empty(waves.shape, dtype=np.float32)
    start = 0
    for stop in ends:
        part = waves[:, start:stop]
        low = part.min(axis=1, keepdims=True)
        rise = np.maximum(part.max(axis=1, keepdims=True) - low, 1)
        shapes[:, start:stop] = (part - low) / rise
        start = stop
    return shapes


# Launch overheads that are tried, in units of one wave's time. For each curve and class, the
# overhead with the smallest misfit is used.
_OVERHEADS = (0.0, 0.25, 0.5, 1.0, 2.0)
# Upper limit of the exponent `share`. The time grows at most in proportion to the waves; 0.05 is a
# margin for SM clocks that drop under load.
_MOST_SHARE = 1.05
# Prior of the trend. It is a Gaussian process with two terms, each given as (amplitude in log time,
# length in log size): large slow bends, such as from memory-bound to compute-bound, and small
# faster bends. The level and the elasticity (d log time / d log size) of the trend have wide
# priors with these standard deviations, so that they do not distinguish the candidates.
_TREND_BENDS = ((0.5, 2.0), (0.05, 0.5))
_TREND_LEVEL = 10.0
_TREND_ELASTICITY = 1.0
# Minimum probability of the best class for a clear result.
CONFIDENT = 0.95
#: if the best class explains less than this fraction of the deviations from the trend, no single
#: tile explains the steps
EXPLAINS_LITTLE = 0.3
#: minimum of the same fraction for a clear result
EXPLAINS_MUCH = 0.4
# With this many curves or more, the confidence is limited to the fraction of bootstrap resamples in
# which the best class has the smallest misfit.
_FEWEST_TO_RESAMPLE = 8
_RESAMPLES = 200
_RESAMPLE_SEED = 0
# Minimum improvement of the fit by waves, as twice the log likelihood ratio, that is evidence for
# waves. With a smaller improvement, the verdict is "no waves" or INCONCLUSIVE.
_LEAST_IMPROVEMENT = 12.0
# A rival is a class with at least the fraction _RIVAL of the best class's likelihood. At most
# _MOST_RIVALS rivals are reported.
_RIVAL = 0.01
_MOST_RIVALS = 5
# "no waves" is reported only if waves, had they been present, would have improved the fit by more
# than this for three in four candidates. Otherwise the curves are too flat or too noisy to tell.
_WOULD_SHOW = 100.0


@dataclass(frozen=True)
class Recovered:
    """Result of `recover`.

    verdict: one of `rules.VERDICTS` on the statement "one tile explains the steps".
    reason: `no waves` or `no single tile` if the verdict is REFUTED, else "".
    best: all explanations in the most likely class. They predict the same steps at the measured
        sizes.
    confidence: probability of the best class among all classes.
    explained: fraction of the squared deviations from a smooth trend, beyond noise, that waves of
        the best class explain.
    rivals: one explanation from each rival class, most likely first.
    plausible: all explanations in the best class and in the rival classes.
    """

    verdict: str
    reason: str
    best: tuple[TileCandidate, ...]
    confidence: float
    explained: float
    rivals: tuple[TileCandidate, ...]
    plausible: frozenset[TileCandidate] = field(repr=False)


def recover(curves: Sequence[FittedCurve], found: Candidates) -> Recovered:
    """Finds the class of candidates that best explains the curves.

    found: result of `candidates` for the same curves. The columns of `found.waves` are the points
        of all curves, in order.
    """
    misfit, visible, null, points = _misfits(curves, found.waves)
    total = misfit.sum(axis=0)
    order = np.argsort(total, kind="stable")
    best = int(order[0])
    # The fit of each curve uses three degrees of freedom: the exponent `share`, and the level and
    # the elasticity of the trend.
    freedom = max(points - 3.0 * len(curves), 1.0)
    # If the residuals of the best class exceed the noise, the likelihood differences are scaled
    # down.
    scale = max(1.0, total[best] / freedom)
    weight = np.exp(-(total - total[best]) / 2 / scale)
    confidence = float(weight[best] / weight.sum())
    if len(curves) >= _FEWEST_TO_RESAMPLE:
        confidence = min(confidence, _bootstrap_win_fraction(misfit, best))
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
    """Computes the misfit of every class, as the sum of squared residuals / variance.

    Returns four values:
    - the misfit of each class on each curve (curves, classes);
    - by how much the waves of each class would improve the fit if they were present with exponent
      `share` = 1 and without overhead (classes,);
    - the misfit of the trend without waves (curves,);
    - the number of points.

    waves: number of waves of each class at each point (classes, points).
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
    """Returns the matrix that turns a smooth trend plus noise into white noise (points, points).

    log_size: log sizes of a curve (points,).
    sigma: standard errors of its log times (points,).
    """
    u = log_size - log_size.mean()
    apart = u[:, None] - u
    covariance = np.diag(sigma**2) + _TREND_LEVEL**2 + _TREND_ELASTICITY**2 * np.outer(u, u)
    for amplitude, length in _TREND_BENDS:
        covariance += amplitude**2 * np.exp(-0.5 * (apart / length) ** 2)
    inverse: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return inverse


def _bootstrap_win_fraction(misfit: Floats, best: int) -> float:
    """Returns the fraction of bootstrap resamples in which `best` has the smallest misfit.

    Each resample draws, with replacement, as many curves as were measured.

    misfit: misfit of each class on each curve (curves, classes).
    best: index of the class with the smallest misfit on all curves.
    """
    rng = np.random.default_rng(_RESAMPLE_SEED)
    times = rng.multinomial(len(misfit), np.full(len(misfit), 1 / len(misfit)), size=_RESAMPLES)
    totals = times @ misfit
    return float(np.mean(totals[:, best] <= totals.min(axis=1) + 1e-9))
