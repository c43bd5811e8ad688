"""From measured times back to the tile and the number of blocks that run at a time.

Each candidate explanation (`staircase`) predicts a number of waves for every point. On each curve the log time is taken
as `share · log(waves + overhead)` plus a smooth trend plus noise; the trend is a Gaussian process that bends too slowly
to make steps, so that only the steps can tell candidates apart. What the best candidate leaves unexplained tells how
sure one can be of it. Nothing is read off kernel names here, and the number of SMs only narrows the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.analysis.curve_fits import FittedCurve
from quantbench.analysis.staircase import Candidates, Explanation, Floats, Ints

VERDICTS = ("clear", "unclear", "no single tile", "no waves")

# Overheads in waves: what a launch costs beside its waves, from nothing to twice one wave.
_OVERHEADS = (0.0, 0.25, 0.5, 1.0, 2.0)
# Time grows at most in proportion to the waves, a little more where clocks fall under load.
_MOST_SHARE = 1.05
# The trend as a Gaussian process over log size: (amplitude in log time, length in log size). Slow bends from bandwidth
# to compute over two octaves, slight ones over half an octave; and any level and elasticity.
_TREND_BENDS = ((0.5, 2.0), (0.05, 0.5))
_TREND_LEVEL, _TREND_ELASTICITY = 10.0, 1.0
# A class must be this likely among all candidates to be named.
CONFIDENT = 0.95
#: and its waves must account for this share of what a smooth trend leaves: below the first no tile is worth naming
EXPLAINS_LITTLE, EXPLAINS_MUCH = 0.3, 0.4
# With this many curves, confidence is also how often the class wins when the curves are drawn anew.
_FEWEST_TO_RESAMPLE, _RESAMPLES, _RESAMPLE_SEED = 8, 200, 0
# Waves that improve the fit by less than this (twice log likelihood) are no waves at all.
_LEAST_IMPROVEMENT = 12.0
# That there are none can be said when those of three in four candidates would improve it by more than this.
_WOULD_SHOW = 100.0


@dataclass(frozen=True)
class Recovered:
    """What explains the steps of some curves.

    verdict: one of VERDICTS. best: the explanations of the likeliest class, indistinguishable at the sizes measured.
    confidence: that it is this class and no other candidate. explained: share of the squared deviations from a smooth
    trend, beyond noise, that its waves account for. rivals: one explanation each of the next classes, likeliest first.
    plausible: every explanation of these classes and the best one.
    """

    verdict: str
    best: tuple[Explanation, ...]
    confidence: float
    explained: float
    rivals: tuple[Explanation, ...]
    plausible: frozenset[Explanation]


def recover(curves: Sequence[FittedCurve], found: Candidates) -> Recovered:
    """The class of `found` that explains the curves best; the points of `found.waves` are those of `curves`."""
    found = _shortlist(curves, found)
    misfit, visible, null, points = _misfits(curves, found.waves, _OVERHEADS)
    total = misfit.sum(axis=0)
    order = np.argsort(total, kind="stable")
    best = int(order[0])
    freedom = max(points - 3.0 * len(curves), 1.0)
    # Where even the best leaves more than noise, differences count for less in proportion.
    scale = max(1.0, total[best] / freedom)
    weight = np.exp(-(total - total[best]) / 2 / scale)
    confidence = float(weight[best] / weight.sum())
    if len(curves) >= _FEWEST_TO_RESAMPLE:
        confidence = min(confidence, _share_of_wins(misfit, best))
    gain = null.sum() - total[best]
    explained = float(np.clip(gain / max(null.sum() - freedom, 1e-9), 0.0, 1.0))
    if gain / scale < _LEAST_IMPROVEMENT or not _rises(found.waves[best]):
        rising = visible[found.waves.max(axis=1) > found.waves.min(axis=1)]
        would_show = not rising.size or np.quantile(rising, 0.25) / scale > _WOULD_SHOW
        verdict = "no waves" if would_show else "unclear"
    elif explained < EXPLAINS_LITTLE:
        verdict = "no single tile"
    elif confidence >= CONFIDENT and explained >= EXPLAINS_MUCH:
        verdict = "clear"
    else:
        verdict = "unclear"
    likely = _likely(order, weight)
    return Recovered(
        verdict, found.members[best], confidence, explained, tuple(found.members[i][0] for i in likely),
        frozenset(explanation for i in (best, *likely) for explanation in found.members[i]),
    )  # fmt: skip


def _rises(waves: Ints) -> bool:
    return bool(waves.max() > waves.min())


# Classes at least this likely beside the best one are rivals; more than a few help nobody.
_RIVAL, _MOST_RIVALS = 0.01, 5


def _likely(order: Ints, weight: Floats) -> list[int]:
    return [int(i) for i in order[1 : _MOST_RIVALS + 1] if weight[i] >= _RIVAL]


# More classes than the first number are first tried with these overheads alone, and the best so many kept.
_MANY_CLASSES, _FIRST_OVERHEADS, _SHORTLIST = 4000, (0.0, 1.0), 2000


def _shortlist(curves: Sequence[FittedCurve], found: Candidates) -> Candidates:
    if len(found.waves) <= _MANY_CLASSES:
        return found
    misfit, _, _, _ = _misfits(curves, found.waves, _FIRST_OVERHEADS)
    kept = np.sort(np.argsort(misfit.sum(axis=0), kind="stable")[:_SHORTLIST])
    return Candidates(found.waves[kept], tuple(found.members[i] for i in kept))


def _misfits(
    curves: Sequence[FittedCurve], waves: Ints, overheads: Sequence[float]
) -> tuple[Floats, Floats, Floats, int]:
    """Squared misfit over variance of each candidate on each curve (curves, classes), what its waves would add to it
    if they were there and not seen (classes,), the misfit of the trend alone (curves,), and the number of points."""
    misfit = np.full((len(curves), len(waves)), np.inf)
    visible = np.zeros(len(waves))
    null = np.empty(len(curves))
    logs = [np.log(np.arange(1, int(waves.max()) + 1) + overhead) for overhead in overheads]
    start = 0
    for i, fitted in enumerate(curves):
        own = waves[:, start : start + len(fitted.curve.points)] - 1
        start += len(fitted.curve.points)
        whiten = _whitener(fitted.curve.log_size, fitted.sigma)
        y = whiten @ fitted.curve.log_time
        null[i] = y @ y
        for number, log_of in enumerate(logs):
            x = log_of[own] @ whiten.T
            xx, xy = np.einsum("ij,ij->i", x, x), x @ y
            visible += xx if number == 0 else 0.0
            share = np.clip(xy / np.maximum(xx, 1e-12), 0.0, _MOST_SHARE)
            misfit[i] = np.minimum(misfit[i], null[i] - 2 * share * xy + share**2 * xx)
    return misfit, visible, null, start


def _whitener(log_size: Floats, sigma: Floats) -> Floats:
    """The matrix that turns a smooth trend plus noise into unit scatter (points, points)."""
    u = log_size - log_size.mean()
    apart = u[:, None] - u
    covariance = np.diag(sigma**2) + _TREND_LEVEL**2 + _TREND_ELASTICITY**2 * np.outer(u, u)
    for amplitude, length in _TREND_BENDS:
        covariance += amplitude**2 * np.exp(-0.5 * (apart / length) ** 2)
    inverse: Floats = np.linalg.inv(np.linalg.cholesky(covariance))
    return inverse


def _share_of_wins(misfit: Floats, best: int) -> float:
    """How often `best` has the least misfit when as many curves are drawn with repetition."""
    rng = np.random.default_rng(_RESAMPLE_SEED)
    times = rng.multinomial(len(misfit), np.full(len(misfit), 1 / len(misfit)), size=_RESAMPLES)
    totals = times @ misfit
    return float(np.mean(totals[:, best] <= totals.min(axis=1) + 1e-9))
