"""Fits the attention cost model: the kernel family that explains the rows best, its parameters, and a residual learner.

`knowledge` is the prior of a device, from the GPUs that were measured. Entry points: `knowledge`, `fit_physics`,
`cross_validate`, `fit_learner`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention_cost_model import (
    FAMILIES,
    PARAMETERS,
    SPREAD,
    START,
    AttentionShapes,
    Blocks,
    KernelFamily,
    Terms,
    assumed_family,
    blocks_of,
    times,
)
from quantbench.latency.families import family, family_of, generation
from quantbench.latency.gaussian_process import GaussianProcess

FloatArray = npt.NDArray[np.float64]

# Where nothing at all was measured: factors on the predicted time that the interval spans.
_BLIND_BELOW, _BLIND_ABOVE = float(np.log(2.0)), float(np.log(3.0))
# A parameter that several GPUs agree on may still differ on the next one.
_LEAST_SPREAD = 0.2


@dataclass(frozen=True)
class Knowledge:
    """Where a fit starts and how far it may go cheaply; what a prior predicts with, and how far off that was on other
    GPUs (90 %, in log time). words: the same for people."""

    family: KernelFamily
    start: FloatArray
    spread: FloatArray
    log_below: float
    log_above: float
    words: str


def knowledge(device: DeviceSpec, *, family_out: bool) -> Knowledge:
    """What the shipped models know about `device`. family_out: without those of its generation."""
    shipped = [model for model in map(shipped_json, shipped_slugs()) if model is not None]
    own = family(device)
    same = [model for model in shipped if _family_of(model) == own]
    foreign = [model for model in shipped if generation(_family_of(model)) != generation(own)]
    others = foreign if family_out else shipped
    if not others:
        words = "from the spec sheet alone; the interval is a guess"
        return Knowledge(assumed_family(device.compute_capability), START, SPREAD, _BLIND_BELOW, _BLIND_ABOVE, words)
    per_family: dict[str, list[FloatArray]] = {}
    for model in others:
        per_family.setdefault(_family_of(model), []).append(_parameters(model))
    means = np.array([np.mean(group, axis=0) for group in per_family.values()])
    start, spread = means.mean(axis=0), np.maximum(means.std(axis=0), _LEAST_SPREAD)
    kernels = assumed_family(device.compute_capability)
    names = ", ".join(model["device"] for model in others)
    words = f"from the spec sheet and the models of {names}; nothing measured on it"
    if same and not family_out:
        start, kernels = np.mean([_parameters(m) for m in same], axis=0), FAMILIES[same[0]["family"]]
        names = ", ".join(model["device"] for model in same)
        words = f"from the spec sheet and its relatives {names}; nothing measured on it"
    transfers = [model["provenance"]["transfer"] for model in others]
    below = max(-transfer["log_low"] for transfer in transfers)
    above = max(transfer["log_high"] for transfer in transfers)
    return Knowledge(kernels, start, spread, max(0.0, below), max(0.0, above), words)


def _family_of(model: dict[str, Any]) -> str:
    major, minor = model["provenance"]["compute_capability"]
    return family_of((major, minor))


def _parameters(model: dict[str, Any]) -> FloatArray:
    return np.array([float(model["parameters"][p.name]) for p in PARAMETERS])


@cache
def shipped_slugs() -> tuple[str, ...]:
    """Devices that an attention model is shipped for."""
    names = [entry.name for entry in files("quantbench.latency.shipped").iterdir()]
    return tuple(
        sorted(n.removeprefix("attention-").removesuffix(".json") for n in names if n.startswith("attention-"))
    )


@cache
def shipped_json(slug: str) -> dict[str, Any] | None:
    """The shipped model of a device as `AttentionModel.to_json` wrote it; None where there is none."""
    if slug not in shipped_slugs():
        return None
    text = files("quantbench.latency.shipped").joinpath(f"attention-{slug}.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


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
    for kernels in families:
        loss, parameters = _fit_one(device, shapes, blocks_of(kernels, shapes), target, cache_write, start, spread)
        if best is None or loss < best[0]:
            best = (loss, Physics(device, kernels, parameters))
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
class IntervalCalibration:
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


def calibrate(held: HeldOut, *, with_learner: bool) -> IntervalCalibration:
    """The conformal quantile of the held-out errors."""
    error = np.abs((held.learned if with_learner else held.physics)[held.seen])
    deviation = held.deviation[held.seen] if with_learner else np.zeros(len(error))
    floor = float(np.median(error)) + 1e-6
    score = error / np.sqrt(deviation**2 + floor**2)
    return IntervalCalibration(float(np.quantile(score, min(1.0, COVERAGE * (1.0 + 1.0 / len(score))))), floor)


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
