"""Predicted times of fused attention. Entry point: `AttentionModel`.

A fit selects the kernel family that explains the rows best (its tiles, whether it packs query heads) and its
parameters, then a Gaussian process of the residual where that lowers the error on held-out sites. The prior of a device
comes from the models of the GPUs that were measured (`knowledge`).
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

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.attention_cost_model import (
    FAMILIES,
    PARAMETERS,
    SPREAD,
    START,
    AttentionShapes,
    KernelFamily,
    Physics,
    Terms,
    assumed_family,
    cut,
    peak_tflops,
    times,
)
from quantbench.latency.estimate import Estimates, IntervalCalibration, bounded, name_bound, require_format
from quantbench.latency.families import family, family_of, generation
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.workload import Attention

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_WHO = "AttentionModel"
MODEL_FORMAT = "quantbench-attention-model"
MODEL_VERSION = 1
PRIORS = ("auto", "family-out")
_MODELS = Path(__file__).parent / "models"

#: rows that a fit of 12 parameters with priors needs; fewer leave the prior, which says so
FEWEST_ROWS = 20
# Fewer rows than this cannot carry a learner with a length scale for each feature.
_FEWEST_FOR_LEARNER = 40
# Relative errors below this are taken as noise by the loss; beyond it counts them by their size, not its square.
_NOISE = 0.05
_FOLDS = 5
# Share of the rows that an interval is to cover.
_COVERAGE = 0.90
# Where nothing at all was measured: factors on the predicted time that the interval spans.
_BLIND_BELOW, _BLIND_ABOVE = float(np.log(2.0)), float(np.log(3.0))
# A parameter that several GPUs agree on may still differ on the next one.
_LEAST_SPREAD = 0.2
# Shapes of a kind that the fitted rows do not hold: backward passes, other lengths of q and k, another mask, misaligned
# or very wide heads. The physics is kept, the learner is not asked, and the interval is wider by this factor. Decoding
# (seq_q = 1), which no fit here has seen, comes out within 1.6 on A100, H100 and H200 (5th to 95th percentile of the
# public tables) and within 2.4 on L40S.
_UNSEEN_HALF_WIDTH = float(np.log(2.0))
_WIDEST_HEAD = 256


@dataclass(frozen=True)
class AttentionModel:
    """A fitted (or prior) model of one device.

    dtype, masks: of the rows it was fitted on (masks: causal, full); others are predicted from the physics with a
    wider interval.
    below, above: extra half-widths in log time, from how far off a prior was elsewhere (0 for a fitted model).
    provenance: where the rows come from and the errors on those held out. note: what to know, in words.
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
        """The device that it predicts."""
        return self.physics.device

    @classmethod
    def prior(cls, device: DeviceSpec, *, prior: str = "auto") -> AttentionModel:
        """From the spec sheet and what other GPUs taught; family-out: nothing of the same architecture."""
        known = knowledge(device, family_out=_check_prior(prior) == "family-out")
        physics = Physics(device, known.family, known.start)
        note = f"attention on {device.name}: {known.words}"
        return cls(physics, IntervalCalibration(1.0, 0.0), below=known.log_below, above=known.log_above, note=note)

    @classmethod
    def best(cls, device: DeviceSpec) -> AttentionModel:
        """The model shipped for this device, or the prior where there is none (its note says which)."""
        data = shipped_json(device.name)
        return cls.prior(device) if data is None else cls.from_json(data, device)

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
        """Fit measured times (n,) in microseconds. cache_write: whether they include writing keys and values into a
        serving engine's cache, for all or (n,). Fewer than FEWEST_ROWS rows leave the prior, and its note says so."""
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        times_us = np.asarray(latency_us, dtype=float)
        if times_us.shape != (len(shapes),) or not (np.isfinite(times_us) & (times_us > 0)).all():
            raise InputError(_WHO, f"{times_us.size} times for {len(shapes)} shapes", "a finite time above 0 for each")
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

    def predict(
        self, works: Iterable[Attention] | AttentionShapes, *, cache_write: npt.ArrayLike = False, quick: bool = False
    ) -> Estimates:
        """Times of `works`, with 90 % intervals. cache_write: whether keys and values are also written away. quick: ten
        times as fast, with the same times and intervals that are wider, never narrower (the median over random shapes
        is up to 11 % wider with the public tables' models)."""
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        writes = np.broadcast_to(np.asarray(cache_write, dtype=bool), (len(shapes),))
        terms = self.physics.terms(shapes, writes)
        seen = self._seen(shapes)
        shift, deviation = np.zeros(len(shapes)), np.zeros(len(shapes))
        if self.learner is not None and seen.any():
            learned = _features(self.physics, shapes, terms)[seen]
            ask = self.learner.predict_quickly if quick else self.learner.predict
            shift[seen], deviation[seen] = ask(learned)
        half = self.interval.half_width(deviation**2) + np.where(seen, 0.0, _UNSEEN_HALF_WIDTH)
        fastest_us = shapes.flops / (peak_tflops(self.device, shapes.dtype) * 1e6)
        latency_us, low_us, high_us = bounded(
            terms.latency_us * np.exp(shift), half + self.below, half + self.above, fastest_us
        )
        bound = name_bound(terms.launch_us, terms.compute_us, terms.memory_us)
        note = self.note if seen.all() else f"{self.note}; {int((~seen).sum())} shapes beyond what was measured"
        return Estimates(latency_us, low_us, high_us, terms.waves, bound, note=note)

    @property
    def fitted(self) -> bool:
        """Whether it was fitted to rows of this device; a prior was not."""
        return self.below == self.above == 0.0

    def knows(self, work: Attention) -> bool:
        """Whether the fitted rows are of this kind; others are predicted with a wider interval."""
        return self.fitted and bool(self._seen(AttentionShapes.of([work]))[0])

    def _seen(self, shapes: AttentionShapes) -> BoolArray:
        """Whether rows are of the kind that was fitted, (n,)."""
        masked = np.where(shapes.causal, "causal" in self.masks, "full" in self.masks)
        usual = masked & ~shapes.backward & (shapes.seq_q == shapes.seq_k) & ~shapes.misaligned
        return np.asarray(usual & (shapes.head_dim <= _WIDEST_HEAD) & (shapes.dtype in (self.dtype, "fp16", "bf16")))

    def to_json(self) -> dict[str, Any]:
        """As plain numbers; the device by its slug."""
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
        """The model of `to_json`. Raises InputError for another device, format or version, and for a broken model."""
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
    """Devices that an attention model is shipped for."""
    return tuple(sorted(file.stem.removeprefix("attention-") for file in _MODELS.glob("attention-*.json")))


@cache
def shipped_json(slug: str) -> dict[str, Any] | None:
    """The shipped model of a device as `AttentionModel.to_json` wrote it; None where there is none."""
    if slug not in shipped_slugs():
        return None
    data: dict[str, Any] = json.loads((_MODELS / f"attention-{slug}.json").read_text(encoding="utf-8"))
    return data


@dataclass(frozen=True)
class Knowledge:
    """The prior of a device, and where it comes from, in words.

    start, spread: mean and standard deviation of the parameters. log_below, log_above: how far off the prior was on
    other GPUs (90 %, in log time).
    """

    family: KernelFamily
    start: FloatArray
    spread: FloatArray
    log_below: float
    log_above: float
    words: str


def knowledge(device: DeviceSpec, *, family_out: bool) -> Knowledge:
    """The prior of `device` from the shipped models. family_out: without those of its generation."""
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


def _fit_physics(
    device: DeviceSpec,
    shapes: AttentionShapes,
    latency_us: FloatArray,
    cache_write: BoolArray,
    families: Sequence[KernelFamily],
    start: FloatArray,
    spread: FloatArray,
) -> Physics:
    """The family and parameters that explain `latency_us` (n,) best. start, spread: the prior of the parameters."""
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


def _features(physics: Physics, shapes: AttentionShapes, terms: Terms) -> FloatArray:
    """Inputs of the Gaussian process, (n, 9): the shape, the physical prediction, waves and their filling."""
    blocks = cut(physics.family, shapes)
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


def _fit_learner(
    physics: Physics, shapes: AttentionShapes, latency_us: FloatArray, cache_write: BoolArray, seed: int
) -> tuple[GaussianProcess | None, IntervalCalibration]:
    """A Gaussian process of log(measured / physics), None where it does not help, and the interval of the predictions.

    Both are judged by cross-validation: rows that share heads, head_dim and mask are held out together, the parameters
    are fitted anew and the learner is conditioned anew without them.
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
        return learner, _calibrated(np.abs(learned[seen]), deviation[seen])
    return None, _calibrated(np.abs(alone[seen]), np.zeros(int(seen.sum())))


def _calibrated(error: FloatArray, deviation: FloatArray) -> IntervalCalibration:
    """The conformal quantile of held-out errors, (n,) log time."""
    floor = float(np.median(error)) + 1e-6
    score = error / np.sqrt(deviation**2 + floor**2)
    return IntervalCalibration(float(np.quantile(score, min(1.0, _COVERAGE * (1.0 + 1.0 / len(score))))), floor)
