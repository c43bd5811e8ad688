"""Fitting attention: the family that explains the rows best, its parameters, and a learner of what is left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention_physics import SPREAD, START, AttentionShapes, Terms, blocks_of, times
from quantbench.latency.attention_tiles import FAMILIES, Blocks, KernelFamily
from quantbench.latency.gaussian_process import GaussianProcess

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Relative errors below this are taken as noise by the loss; beyond it counts them by their size, not its square.
_NOISE = 0.05
_FOLDS = 5
#: share of the rows that an interval is to cover
COVERAGE = 0.90
# Fewer rows than this cannot carry a learner with a length scale for each feature.
FEWEST_FOR_LEARNER = 40


@dataclass(frozen=True)
class Physics:
    """A family and its parameters: everything that `times` needs beside the shapes."""

    device: DeviceSpec
    family: KernelFamily
    parameters: FloatArray

    def terms(self, shapes: AttentionShapes, cache_write: BoolArray) -> Terms:
        """Times and their parts."""
        return times(self.device, shapes, blocks_of(self.family, shapes), self.parameters, cache_write)


def fit_physics(
    device: DeviceSpec,
    shapes: AttentionShapes,
    latency_us: FloatArray,
    cache_write: BoolArray,
    families: Sequence[KernelFamily],
    start: FloatArray = START,
    spread: FloatArray = SPREAD,
) -> Physics:
    """The family and parameters that explain `latency_us` (n,) best. start, spread: what is known of the parameters."""
    best: tuple[float, Physics] | None = None
    target = np.log(latency_us)
    for family in families:
        loss, parameters = _fit_one(device, shapes, blocks_of(family, shapes), target, cache_write, start, spread)
        if best is None or loss < best[0]:
            best = (loss, Physics(device, family, parameters))
    assert best is not None
    return best[1]


def _fit_one(
    device: DeviceSpec, shapes: AttentionShapes, blocks: Blocks, target: FloatArray, cache_write: BoolArray,
    start: FloatArray, spread: FloatArray,
) -> tuple[float, FloatArray]:  # fmt: skip
    from scipy.optimize import least_squares

    def residuals(parameters: FloatArray) -> FloatArray:
        predicted = times(device, shapes, blocks, parameters, cache_write).latency_us
        error = (np.log(predicted) - target) / _NOISE
        # Pseudo-Huber, as a least-squares residual.
        robust = np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0))
        return np.concatenate([robust, (parameters - start) / spread])

    found = least_squares(residuals, start, method="trf")
    return float(found.cost), np.asarray(found.x)


def features(physics: Physics, shapes: AttentionShapes, terms: Terms) -> FloatArray:
    """What the learner of the rest looks at, (n, 9): the shape, the physical prediction, waves and their filling."""
    blocks = blocks_of(physics.family, shapes)
    per_sm = blocks.rows / physics.device.sm_count
    filling = terms.waves / per_sm
    group = shapes.heads / shapes.kv_heads
    return np.column_stack(
        [
            np.log(shapes.seq_q),
            np.log(shapes.batch * shapes.heads),
            2.0 * np.log(shapes.head_dim),
            np.log(group),
            np.log(terms.latency_us),
            np.log(per_sm),
            filling * np.minimum(1.0, 4.0 / terms.waves),
            np.log(shapes.seq_q * group),
            2.0 * shapes.causal,
        ]
    )


@dataclass(frozen=True)
class Interval:
    """Calibration of the 90 % interval in log time: half_width = quantile · √(deviation² + floor²), where deviation
    is the learner's own. Without a learner the floor alone carries it."""

    quantile: float
    floor: float

    def half_width(self, deviation: FloatArray) -> FloatArray:
        """(n,) half-widths in log time."""
        return self.quantile * np.sqrt(deviation**2 + self.floor**2)


@dataclass(frozen=True)
class HeldOut:
    """Errors in log time of rows that were held out by site, (n,) each: of the physics alone and with the learner,
    and the learner's own standard deviation. Rows whose fold was too small to fit are not `seen`."""

    physics: FloatArray
    learned: FloatArray
    deviation: FloatArray
    seen: BoolArray


def cross_validate(
    physics: Physics, learner: GaussianProcess | None, shapes: AttentionShapes, latency_us: FloatArray,
    cache_write: BoolArray, seed: int,
) -> HeldOut:  # fmt: skip
    """Site-grouped cross-validation: rows that share heads and head_dim are held out together, the parameters are
    fitted anew and the learner conditioned anew without them."""
    site = np.unique(
        np.stack([shapes.heads, shapes.kv_heads, shapes.head_dim, shapes.causal]), axis=1, return_inverse=True
    )[1].ravel()
    sites = np.random.default_rng(seed).permutation(site.max() + 1)
    alone, learned, deviation = (np.zeros(len(site)) for _ in range(3))
    seen = np.zeros(len(site), dtype=bool)
    for fold in range(min(_FOLDS, len(sites))):
        held = np.isin(site, sites[fold::_FOLDS])
        kept = np.flatnonzero(~held)
        if len(kept) < len(START):
            continue
        fitted = fit_physics(
            physics.device, shapes[kept], latency_us[kept], cache_write[kept], [physics.family], physics.parameters
        )
        terms = fitted.terms(shapes[held], cache_write[held])
        alone[held] = np.log(latency_us[held] / terms.latency_us)
        if learner is not None:
            shift, deviation[held] = learner.condition(kept).predict(features(fitted, shapes[held], terms))
            learned[held] = alone[held] - shift
        seen |= held
    return HeldOut(alone, learned, deviation, seen)


def calibrate(held: HeldOut, *, with_learner: bool) -> Interval:
    """The conformal quantile of the held-out errors."""
    error = np.abs((held.learned if with_learner else held.physics)[held.seen])
    deviation = held.deviation[held.seen] if with_learner else np.zeros(len(error))
    floor = float(np.median(error)) + 1e-6
    score = error / np.sqrt(deviation**2 + floor**2)
    return Interval(float(np.quantile(score, min(1.0, COVERAGE * (1.0 + 1.0 / len(score))))), floor)


def learner_helps(held: HeldOut) -> bool:
    """Whether the learner lowers the held-out error, in the mean over rows."""
    return bool(np.abs(held.learned[held.seen]).mean() < np.abs(held.physics[held.seen]).mean())


def fit_learner(
    physics: Physics, shapes: AttentionShapes, latency_us: FloatArray, cache_write: BoolArray, seed: int
) -> GaussianProcess | None:
    """A Gaussian process on log(measured / physics); None for too few rows."""
    if len(shapes) < FEWEST_FOR_LEARNER:
        return None
    terms = physics.terms(shapes, cache_write)
    return GaussianProcess.fit(features(physics, shapes, terms), np.log(latency_us / terms.latency_us), seed=seed)


def all_families() -> list[KernelFamily]:
    """Every family, for a fit that lets the rows tell."""
    return list(FAMILIES.values())
