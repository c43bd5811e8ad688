"""Predicts fused attention latencies with a cost model and a Gaussian process for its residual.

A fit selects the kernel family (its tiles, whether it packs query heads) and the parameters with
the lowest loss; priors come from the shipped models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.registry import same_chip
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.attention_cost_model import (
    FAMILIES,
    PARAMETERS,
    SPREAD,
    START,
    AttentionShapes,
    Blocks,
    KernelFamily,
    Physics,
    Terms,
    assumed_family,
    cut,
    peak_tflops,
    times,
)
from quantbench.latency.estimate import (
    Estimates,
    IntervalCalibration,
    bounded,
    measured_times,
    name_bound,
    require_format,
)
from quantbench.latency.families import family, family_of, generation
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.units import counted
from quantbench.workload import Attention

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_WHO = "AttentionModel"
MODEL_FORMAT = "quantbench-attention-model"
MODEL_VERSION = 1
PRIORS = ("auto", "family-out")
_MODELS = Path(__file__).parent / "models"

#: fewest rows for fitting the 12 parameters; with fewer, `fit` returns the prior
FEWEST_ROWS = 20
# Fewest rows for a Gaussian process, which has one length scale per feature.
_FEWEST_FOR_LEARNER = 40
# The loss is quadratic in relative errors below this size, and linear above.
_NOISE = 0.05
_FOLDS = 5
# Interval half-widths (log time) if no shipped model can serve as prior.
_BLIND_BELOW, _BLIND_ABOVE = float(np.log(2.0)), float(np.log(3.0))
# A parameter that several GPUs agree on may still differ on the next one.
_LEAST_SPREAD = 0.2
# Extra half-width for kinds of shapes absent from the fitted rows: backward passes, seq_q ≠ seq_k, another mask or
# dtype, misaligned or very wide heads. They are predicted without the Gaussian process. Decoding (seq_q = 1), absent
# from all fits, is within a factor of 1.6 on A100, H100 and H200 (5th to 95th percentile of the public tables) and
# within 2.4 on L40S.
UNSEEN_HALF_WIDTH = float(np.log(2.0))
WIDEST_HEAD = 256


@dataclass(frozen=True)
class AttentionModel:
    """Latency model of fused attention on one device, fitted to its rows or a prior.

    dtype, masks: dtype and masks (causal, full) of the fitted rows; other shapes get a wider interval, and no learner.
    below, above: extra half-widths of a prior's interval, log time, from its errors on other GPUs; 0 after a fit.
    note: source and caveats of the predictions.
    """

    physics: Physics
    interval: IntervalCalibration
    dtype: str = "bf16"
    masks: tuple[str, ...] = ("causal", "full")
    learner: GaussianProcess | None = None
    below: float = 0.0
    above: float = 0.0
    note: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> DeviceSpec:
        return self.physics.device

    @classmethod
    def prior(cls, device: DeviceSpec, *, prior: str = "auto") -> AttentionModel:
        """Returns an unfitted model from the spec sheet and the shipped models.

        prior: `auto`, or `family-out` to exclude models of the device's own generation.
        """
        known = knowledge(device, family_out=_check_prior(prior) == "family-out")
        physics = Physics(device, known.family, known.start)
        note = f"attention on {device.name}: {known.words}"
        return cls(physics, IntervalCalibration(1.0, 0.0), below=known.log_below, above=known.log_above, note=note)

    @classmethod
    def best(cls, device: DeviceSpec) -> AttentionModel:
        """Returns the model shipped for this device, or its prior if none is shipped; `note` says which."""
        data = next(filter(None, map(shipped_json, same_chip(device.name))), None)
        return cls.prior(device) if data is None else cls.from_json({**data, "device": device.name}, device)

    @classmethod
    def fit(
        cls,
        device: DeviceSpec,
        works: Iterable[Attention] | AttentionShapes,
        latency_us: npt.ArrayLike,
        *,
        cache_write: npt.ArrayLike = False,
        prior: str = "auto",
        seed: int = 0,
        provenance: dict[str, Any] | None = None,
    ) -> AttentionModel:
        """Fits measured times (n,), µs. cache_write: whether they include writing keys and values into a serving
        engine's cache, one value or (n,). Returns the prior, with a note, for fewer than FEWEST_ROWS rows."""
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        times_us = measured_times(_WHO, latency_us, len(shapes))
        writes = np.broadcast_to(np.asarray(cache_write, dtype=bool), times_us.shape)
        if len(shapes) < FEWEST_ROWS:
            few = cls.prior(device, prior=prior)
            return replace(few, note=f"{few.note} ({len(shapes)} rows are fewer than the {FEWEST_ROWS} a fit needs)")
        known = knowledge(device, family_out=_check_prior(prior) == "family-out")
        physics = _fit_physics(device, shapes, times_us, writes, list(FAMILIES.values()), known.start, known.spread)
        learner, interval = _fit_learner(physics, shapes, times_us, writes, seed)
        return cls(
            physics,
            interval,
            dtype=shapes.dtype,
            masks=tuple(name for name, rows in (("causal", shapes.causal), ("full", ~shapes.causal)) if rows.any()),
            learner=learner,
            note=f"attention on {device.name}: fitted on {len(shapes)} rows, tiles of {physics.family.name}",
            provenance=provenance or {},
        )

    def predict(self, works: Iterable[Attention] | AttentionShapes, *, cache_write: npt.ArrayLike = False) -> Estimates:
        """Predicts the times of `works`. cache_write: whether keys and values are also written to a cache."""
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        writes = np.broadcast_to(np.asarray(cache_write, dtype=bool), (len(shapes),))
        terms = self.physics.terms(shapes, writes)
        seen = self._seen(shapes)
        shift, deviation = np.zeros(len(shapes)), np.zeros(len(shapes))
        if self.learner is not None and seen.any():
            learned = _features(self.physics, shapes, terms)[seen]
            shift[seen], deviation[seen] = self.learner.predict(learned)
        half = self.interval.half_width(deviation**2) + np.where(seen, 0.0, UNSEEN_HALF_WIDTH)
        fastest_us = shapes.flops / (peak_tflops(self.device, shapes.dtype) * 1e6)
        latency_us, low_us, high_us = bounded(
            terms.latency_us * np.exp(shift), half + self.below, half + self.above, fastest_us
        )
        bound = name_bound(terms.launch_us, terms.compute_us, terms.memory_us)
        beyond = int((~seen).sum())
        note = f"{self.note}; {counted(beyond, 'shape')} beyond what was measured" if beyond else self.note
        return Estimates(latency_us, low_us, high_us, terms.waves, bound, note=note)

    @property
    def fitted(self) -> bool:
        """Whether the model was fitted to rows of this device, unlike a prior."""
        return self.below == self.above == 0.0

    def knows(self, work: Attention) -> bool:
        """Returns whether the fit covers this kind of shape (dtype, mask, head_dim); others get a wider interval."""
        return self.fitted and bool(self._seen(AttentionShapes.of([work]))[0])

    def _seen(self, shapes: AttentionShapes) -> BoolArray:
        masked = np.where(shapes.causal, "causal" in self.masks, "full" in self.masks)
        usual = masked & ~shapes.backward & (shapes.seq_q == shapes.seq_k) & ~shapes.misaligned
        return np.asarray(usual & (shapes.head_dim <= WIDEST_HEAD) & (shapes.dtype in (self.dtype, "fp16", "bf16")))

    def to_json(self) -> dict[str, Any]:
        """Returns the model as a JSON object; the device is stored by its slug."""
        return {
            "format": MODEL_FORMAT,
            "version": MODEL_VERSION,
            "device": self.device.name,
            "dtype": self.dtype,
            "masks": list(self.masks),
            "family": self.physics.family.name,
            "parameters": {p.name: float(value) for p, value in zip(PARAMETERS, self.physics.parameters, strict=True)},
            "interval": {"quantile": self.interval.factor, "floor": self.interval.floor},
            "below": self.below,
            "above": self.above,
            "learner": None if self.learner is None else self.learner.to_json(),
            "note": self.note,
            "provenance": self.provenance,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], device: DeviceSpec) -> AttentionModel:
        """Inverse of `to_json`. Raises InputError for another device, format or version, and for a broken model."""
        require_format(_WHO, data, MODEL_FORMAT, MODEL_VERSION, device)
        try:
            parameters = np.array([float(data["parameters"][p.name]) for p in PARAMETERS])
            learner = data["learner"]
            return cls(
                Physics(device, FAMILIES[data["family"]], parameters),
                IntervalCalibration(float(data["interval"]["quantile"]), float(data["interval"]["floor"])),
                dtype=str(data["dtype"]),
                masks=tuple(data["masks"]),
                learner=None if learner is None else GaussianProcess.from_json(learner),
                below=float(data["below"]),
                above=float(data["above"]),
                note=str(data["note"]),
                provenance=data["provenance"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(_WHO, f"broken model ({error!r})", "what to_json wrote") from None


def _check_prior(prior: str) -> str:
    return require_choice(_WHO, "prior", prior, PRIORS)


@cache
def shipped_slugs() -> tuple[str, ...]:
    return tuple(sorted(file.stem.removeprefix("attention-") for file in _MODELS.glob("attention-*.json")))


@cache
def shipped_json(slug: str) -> dict[str, Any] | None:
    """Returns the JSON of a device's shipped attention model, None if there is none."""
    if slug not in shipped_slugs():
        return None
    data: dict[str, Any] = json.loads((_MODELS / f"attention-{slug}.json").read_text(encoding="utf-8"))
    return data


@dataclass(frozen=True)
class Knowledge:
    """Prior of a device.

    start, spread: mean and standard deviation of the parameters.
    log_below, log_above: extra half-widths of the interval, log time, from the prior's errors on other GPUs.
    """

    family: KernelFamily
    start: FloatArray
    spread: FloatArray
    log_below: float
    log_above: float
    words: str


def knowledge(device: DeviceSpec, *, family_out: bool) -> Knowledge:
    """Returns the prior of `device` from the shipped models. family_out: whether to exclude its generation."""
    shipped = [model for model in map(shipped_json, shipped_slugs()) if model is not None]
    own = family(device)
    same = [model for model in shipped if _family_of(model) == own]
    foreign = [model for model in shipped if generation(_family_of(model)) != generation(own)]
    others = foreign if family_out else shipped
    if not others:
        words = "from the spec sheet alone; the interval is a guess"
        return Knowledge(assumed_family(device), START, SPREAD, _BLIND_BELOW, _BLIND_ABOVE, words)
    per_family: dict[str, list[FloatArray]] = {}
    for model in others:
        per_family.setdefault(_family_of(model), []).append(_parameters(model))
    means = np.array([np.mean(group, axis=0) for group in per_family.values()])
    start, spread = means.mean(axis=0), np.maximum(means.std(axis=0), _LEAST_SPREAD)
    kernels = assumed_family(device)
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


def _fit_physics(
    device: DeviceSpec,
    shapes: AttentionShapes,
    latency_us: FloatArray,
    cache_write: BoolArray,
    families: Sequence[KernelFamily],
    start: FloatArray,
    spread: FloatArray,
) -> Physics:
    """Fits family and parameters to `latency_us` (n,). start, spread: prior mean and deviation of the parameters."""
    from scipy.optimize import least_squares

    target = np.log(latency_us)

    def fitted(kernels: KernelFamily) -> tuple[float, FloatArray]:
        blocks = cut(kernels, shapes)

        def residuals(parameters: FloatArray) -> FloatArray:
            predicted = times(device, shapes, blocks, parameters, cache_write).latency_us
            error = (np.log(predicted) - target) / _NOISE
            # Pseudo-Huber, as a least-squares residual.
            robust = np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0))
            return np.concatenate([robust, (parameters - start) / spread])

        found = least_squares(residuals, start, method="trf")
        return float(found.cost), np.asarray(found.x)

    candidates = [(*fitted(kernels), kernels) for kernels in families]
    _, parameters, best = min(candidates, key=lambda candidate: candidate[0])
    return Physics(device, best, parameters)


def learner_features(device: DeviceSpec, shapes: AttentionShapes, blocks: Blocks, terms: Terms) -> FloatArray:
    """Returns the inputs of the Gaussian process, (n, 9): shape, predicted time, waves and their fill."""
    per_sm = blocks.rows / device.sm_count
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


def _features(physics: Physics, shapes: AttentionShapes, terms: Terms) -> FloatArray:
    return learner_features(physics.device, shapes, cut(physics.family, shapes), terms)


def _fit_learner(
    physics: Physics, shapes: AttentionShapes, latency_us: FloatArray, cache_write: BoolArray, seed: int
) -> tuple[GaussianProcess | None, IntervalCalibration]:
    """Fits a Gaussian process to log(measured / cost model), None if it does not help, and calibrates the interval.

    Both use cross-validation: rows that share heads, head_dim and mask are held out together, and the parameters and
    the process are refitted without them.
    """
    learner = None
    if len(shapes) >= _FEWEST_FOR_LEARNER:
        terms = physics.terms(shapes, cache_write)
        target = np.log(latency_us / terms.latency_us)
        learner = GaussianProcess.fit(_features(physics, shapes, terms), target, seed=seed)
    site = shapes.sites
    sites = np.random.default_rng(seed).permutation(site.max() + 1)
    alone, learned, deviation = (np.zeros(len(site)) for _ in range(3))
    seen = np.zeros(len(site), dtype=bool)
    for fold in range(min(_FOLDS, len(sites))):
        held = np.isin(site, sites[fold::_FOLDS])
        kept = np.flatnonzero(~held)
        if len(kept) < len(START):
            continue
        fitted = _fit_physics(
            physics.device, shapes[kept], latency_us[kept], cache_write[kept], [physics.family],
            physics.parameters, SPREAD,
        )  # fmt: skip
        terms = fitted.terms(shapes[held], cache_write[held])
        alone[held] = np.log(latency_us[held] / terms.latency_us)
        if learner is not None:
            shift, deviation[held] = learner.condition(kept).predict(_features(fitted, shapes[held], terms))
            learned[held] = alone[held] - shift
        seen |= held
    if learner is not None and np.abs(learned[seen]).mean() < np.abs(alone[seen]).mean():
        return learner, IntervalCalibration.of_held_out(np.abs(learned[seen]), deviation[seen] ** 2)
    return None, IntervalCalibration.of_held_out(np.abs(alone[seen]), np.zeros(int(seen.sum())))
