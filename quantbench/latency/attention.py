"""Predicts fused attention latencies with a cost model and a Gaussian process that corrects it.

`AttentionModel.best` returns a device's shipped model, or a prior from other GPUs' shipped models.
`AttentionModel.fit` tries several kernel families, which differ in tiles and in whether they pack
query heads, and keeps the family and parameters with the lowest loss.
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
    BACKWARD_FLOPS,
    FAMILIES,
    PARAMETERS,
    SPREAD,
    START,
    AttentionShapes,
    KernelFamily,
    Physics,
    assumed_family,
    peak_tflops,
)
from quantbench.latency.decode_cost_model import DecodePhysics
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

#: Smallest number of rows for fitting the 12 parameters. With fewer rows, `fit` returns the prior.
FEWEST_ROWS = 20
# Smallest number of rows for fitting a Gaussian process, which has one length scale per feature.
_FEWEST_FOR_LEARNER = 40
# The loss of a row is quadratic for relative errors below this size and linear above.
_NOISE = 0.05
_FOLDS = 5
# Half-widths of the interval (log time), below and above, if no shipped model can be the prior.
_BLIND_BELOW, _BLIND_ABOVE = float(np.log(2.0)), float(np.log(3.0))
# Smallest standard deviation of a parameter in a prior from other GPUs: a parameter that several
# GPUs agree on may still differ on the next one.
_LEAST_SPREAD = 0.2
# Extra half-width (log time) for shapes unlike the fitted rows. Backward passes are predicted from
# the forward time. Shapes with another mask or dtype, with misaligned or very wide heads, or with
# unequal sequence lengths that were not fitted are predicted without the Gaussian process.
UNSEEN_HALF_WIDTH = float(np.log(2.0))
# Heads with a larger head_dim count as very wide.
WIDEST_HEAD = 256


#: cost model of one kind of attention: `Physics` for equal sequence lengths, `DecodePhysics` for
#: unequal ones, such as decoding
CostModel = Physics | DecodePhysics


@dataclass(frozen=True)
class Corrected:
    """Cost model of one kind of attention, with a learned correction and a calibrated interval.

    learner: Gaussian process that predicts log(measured time / cost model's time); None without
        such a correction.
    below, above: extra half-widths of a prior's interval in log time, from the prior's errors on
        other GPUs. Both are 0 after a fit.
    """

    physics: CostModel
    interval: IntervalCalibration
    learner: GaussianProcess | None = None
    below: float = 0.0
    above: float = 0.0

    @property
    def fitted(self) -> bool:
        """Whether the model was fitted to rows of this device; False for a prior."""
        return self.below == self.above == 0.0

    def predict(
        self, shapes: AttentionShapes, cache_write: BoolArray, seen: BoolArray
    ) -> FloatArray:
        """Predicts forward passes.

        cache_write: (n,), whether the time includes writing keys and values to a cache.
        seen: (n,), whether the fit covers this kind of shape. Other shapes get the cost model's
            time without the learner's correction.

        Returns an array (7, n) with these rows: time in µs; half-widths of the interval below and
        above the time, in log time; launch, compute and memory time in µs; number of waves.
        """
        terms = self.physics.cost(shapes, cache_write)(self.physics.parameters)
        shift, deviation = np.zeros(len(shapes)), np.zeros(len(shapes))
        if self.learner is not None and seen.any():
            shift[seen], deviation[seen] = self.learner.predict(
                self.physics.features(shapes, terms)[seen]
            )
        half = self.interval.half_width(deviation**2)
        parts = (terms.launch_us, terms.compute_us, terms.memory_us, terms.waves)
        return np.array(
            [terms.latency_us * np.exp(shift), half + self.below, half + self.above, *parts]
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **self.physics.to_json(),
            "interval": vars(self.interval),
            "learner": None if self.learner is None else self.learner.to_json(),
            "below": self.below,
            "above": self.above,
        }

    @classmethod
    def from_json(
        cls, data: dict[str, Any], kind: type[CostModel], device: DeviceSpec
    ) -> Corrected:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError if the data is broken."""
        learner = data["learner"]
        return cls(
            kind.from_json(data, device),
            IntervalCalibration.from_json(data["interval"]),
            None if learner is None else GaussianProcess.from_json(learner),
            float(data["below"]),
            float(data["above"]),
        )


@dataclass(frozen=True)
class AttentionModel:
    """Latency model of fused attention on one device: fitted to measured rows, or a prior.

    prefill: model for equal sequence lengths (seq_q = seq_k).
    decode: model for unequal sequence lengths. If it is None, `prefill` also predicts unequal
        lengths, with a wider interval.
    dtype, masks: dtype and masks (causal, full) of the fitted rows. Shapes with another dtype or
        mask get a wider interval and no learned correction. fp16 and bf16 are always covered.
    backward_cost: time of a backward pass over the time of its forward pass. The default is the
        ratio of their FLOPs.
    note: source and caveats of the predictions.
    """

    prefill: Corrected
    decode: Corrected | None = None
    dtype: str = "bf16"
    masks: tuple[str, ...] = ("causal", "full")
    backward_cost: float = BACKWARD_FLOPS
    note: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> DeviceSpec:
        return self.prefill.physics.device

    @classmethod
    def prior(cls, device: DeviceSpec, *, prior: str = "auto") -> AttentionModel:
        """Returns an unfitted model from the spec sheet and the shipped models.

        prior: `auto`, or `family-out` to exclude models of the device's generation.
        """
        require_choice(_WHO, "prior", prior, PRIORS)
        known = attention_prior(device, family_out=prior == "family-out")
        return cls(known.prefill(device), note=f"attention on {device.name}: {known.words}")

    @classmethod
    def best(cls, device: DeviceSpec) -> AttentionModel:
        """Returns the model shipped for this device, or the device's prior if none is shipped.

        The result's `note` names its source.
        """
        data = next(filter(None, map(shipped_json, same_chip(device.name))), None)
        return (
            cls.prior(device)
            if data is None
            else cls.from_json({**data, "device": device.name}, device)
        )

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
        """Fits the model to measured times.

        works: n attention shapes, all of one dtype.
        latency_us: (n,), measured times in µs.
        cache_write: whether the times include writing keys and values into a serving engine's
            cache; one value or (n,).
        prior: `auto` or `family-out`, as in the classmethod `prior`.

        Equal and unequal sequence lengths are fitted separately, each only if it has at least
        FEWEST_ROWS forward passes. If neither has, the result is the prior, with a note.
        """
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        times_us = measured_times(_WHO, latency_us, len(shapes))
        writes = np.broadcast_to(np.asarray(cache_write, dtype=bool), times_us.shape)
        bare = cls.prior(device, prior=prior)
        unequal = shapes.seq_q != shapes.seq_k
        equal_rows = np.flatnonzero(~unequal & ~shapes.backward)
        unequal_rows = np.flatnonzero(unequal & ~shapes.backward)
        if max(len(equal_rows), len(unequal_rows)) < FEWEST_ROWS:
            return replace(
                bare,
                note=f"{bare.note} "
                f"({len(shapes)} rows are fewer than the {FEWEST_ROWS} a fit needs)",
            )
        prefill, decode = bare.prefill, None
        masks, words = bare.masks, []
        if len(equal_rows) >= FEWEST_ROWS:
            known = attention_prior(device, family_out=prior == "family-out")
            families = [Physics(device, one, known.start) for one in FAMILIES.values()]
            rows = shapes[equal_rows]
            prefill = _fitted(
                families, known.spread, rows, times_us[equal_rows], writes[equal_rows], seed
            )
            masks = tuple(
                n for n, seen in (("causal", rows.causal), ("full", ~rows.causal)) if seen.any()
            )
            words.append(
                f"fitted on {len(rows)} rows, tiles of {prefill.physics.to_json()['family']}"
            )
        if len(unequal_rows) >= FEWEST_ROWS:
            rows = shapes[unequal_rows]
            decode = _fitted(
                DecodePhysics.candidates(device),
                DecodePhysics.spread,
                rows,
                times_us[unequal_rows],
                writes[unequal_rows],
                seed,
            )
            words.append(f"unequal sequences fitted on {len(rows)} rows")
        model = cls(
            prefill,
            decode,
            shapes.dtype,
            masks,
            note=f"attention on {device.name}: {'; '.join(words)}",
            provenance=provenance or {},
        )
        return model._with_backward_cost(shapes, times_us)

    def _with_backward_cost(
        self, shapes: AttentionShapes, latency_us: FloatArray
    ) -> AttentionModel:
        """Returns the model with `backward_cost` fitted to the backward passes among the rows.

        The cost is the median of measured backward over predicted forward time. The model is
        unchanged if there are fewer than FEWEST_ROWS backward passes.
        """
        rows = np.flatnonzero(shapes.backward)
        if len(rows) < FEWEST_ROWS:
            return self
        forward_us = self.predict(
            replace(shapes[rows], backward=np.zeros(len(rows), dtype=bool))
        ).latency_us
        return replace(self, backward_cost=float(np.median(latency_us[rows] / forward_us)))

    def predict(
        self, works: Iterable[Attention] | AttentionShapes, *, cache_write: npt.ArrayLike = False
    ) -> Estimates:
        """Predicts the times of attention shapes, all of one dtype.

        cache_write: whether keys and values are also written to a cache; one value or (n,).
        """
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        writes = np.broadcast_to(np.asarray(cache_write, dtype=bool), (len(shapes),))
        seen = self._seen(shapes)
        beyond = ~seen | shapes.backward
        columns = np.empty((7, len(shapes)))
        equal = shapes.seq_q == shapes.seq_k
        for rows in map(np.flatnonzero, (equal, ~equal)):
            if len(rows):
                columns[:, rows] = self._of(shapes[rows[:1]]).predict(
                    shapes[rows], writes[rows], seen[rows]
                )
        forward_us, below, above, launch_us, compute_us, memory_us, waves = columns
        fastest_us = shapes.flops / (peak_tflops(self.device, shapes.dtype) * 1e6)
        latency_us = forward_us * np.where(shapes.backward, self.backward_cost, 1.0)
        more = np.where(beyond, UNSEEN_HALF_WIDTH, 0.0)
        latency_us, low_us, high_us = bounded(latency_us, below + more, above + more, fastest_us)
        bound = name_bound(launch_us, compute_us, memory_us)
        note = self.note
        if beyond.any():
            note += f"; {counted(int(beyond.sum()), 'shape')} beyond what was measured"
        return Estimates(latency_us, low_us, high_us, waves, bound, note=note)

    @property
    def fitted(self) -> bool:
        """Whether the model for equal sequence lengths was fitted to times of this device."""
        return self.prefill.fitted

    def knows(self, work: Attention) -> bool:
        """Returns whether the fit covers this shape's dtype, mask, head_dim and direction.

        Other shapes get a wider interval.
        """
        shapes = AttentionShapes.of([work])
        return (
            self._of(shapes).fitted and bool(self._seen(shapes)[0]) and work.direction == "forward"
        )

    def _of(self, shapes: AttentionShapes) -> Corrected:
        """Returns the model for `shapes`, whose sequence lengths are all equal or all unequal."""
        if self.decode is None or shapes.seq_q[0] == shapes.seq_k[0]:
            return self.prefill
        return self.decode

    def _seen(self, shapes: AttentionShapes) -> BoolArray:
        """Returns whether the fit covers the mask, dtype and head_dim of each shape, (n,).

        If unequal sequence lengths were fitted, all masks are covered for them.
        """
        masked = np.where(shapes.causal, "causal" in self.masks, "full" in self.masks)
        kind = np.where(shapes.seq_q == shapes.seq_k, masked, self.decode is not None)
        return np.asarray(
            kind
            & ~shapes.misaligned
            & (shapes.head_dim <= WIDEST_HEAD)
            & (shapes.dtype in (self.dtype, "fp16", "bf16"))
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the model as a JSON object that names the device by its slug."""
        return {
            "format": MODEL_FORMAT,
            "version": MODEL_VERSION,
            "device": self.device.name,
            "prefill": self.prefill.to_json(),
            "decode": None if self.decode is None else self.decode.to_json(),
            "dtype": self.dtype,
            "masks": list(self.masks),
            "backward_cost": self.backward_cost,
            "note": self.note,
            "provenance": self.provenance,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], device: DeviceSpec) -> AttentionModel:
        """Inverse of `to_json`.

        Raises InputError for another device, format or version, and for a broken model.
        """
        require_format(_WHO, data, MODEL_FORMAT, MODEL_VERSION, device)
        try:
            decode = data["decode"]
            return cls(
                Corrected.from_json(data["prefill"], Physics, device),
                None if decode is None else Corrected.from_json(decode, DecodePhysics, device),
                dtype=str(data["dtype"]),
                masks=tuple(data["masks"]),
                backward_cost=float(data["backward_cost"]),
                note=str(data["note"]),
                provenance=data["provenance"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(_WHO, f"broken model ({error!r})", "what to_json wrote") from None


@cache
def shipped_slugs() -> tuple[str, ...]:
    """Returns the slugs of the devices whose attention model is part of the package."""
    return tuple(
        sorted(file.stem.removeprefix("attention-") for file in _MODELS.glob("attention-*.json"))
    )


@cache
def shipped_json(slug: str) -> dict[str, Any] | None:
    """Returns the JSON of the attention model shipped for a device, or None if there is none."""
    if slug not in shipped_slugs():
        return None
    data: dict[str, Any] = json.loads(
        (_MODELS / f"attention-{slug}.json").read_text(encoding="utf-8")
    )
    return data


@dataclass(frozen=True)
class AttentionPrior:
    """Prior of a device's attention model.

    family: kernel family that the device is assumed to run.
    start, spread: (parameters,), mean and standard deviation of each parameter.
    log_below, log_above: extra half-widths of the interval in log time, from the prior's errors on
        other GPUs.
    words: source of the prior, for the model's note.
    """

    family: KernelFamily
    start: FloatArray
    spread: FloatArray
    log_below: float
    log_above: float
    words: str

    def prefill(self, device: DeviceSpec) -> Corrected:
        """Returns the unfitted model for equal sequence lengths."""
        physics = Physics(device, self.family, self.start)
        return Corrected(
            physics, IntervalCalibration(1.0, 0.0), below=self.log_below, above=self.log_above
        )


def attention_prior(device: DeviceSpec, *, family_out: bool) -> AttentionPrior:
    """Returns the prior of `device` from the shipped models.

    The parameters' mean is that of the device's family, or else of all families used. Their
    standard deviation is taken over families. The extra half-widths are the largest errors that
    priors made on the models' GPUs (`provenance["transfer"]`).

    family_out: whether to exclude all models of the device's generation.
    """
    shipped = [model for model in map(shipped_json, shipped_slugs()) if model is not None]
    own = family(device)
    same = [model for model in shipped if _family_of(model) == own]
    foreign = [model for model in shipped if generation(_family_of(model)) != generation(own)]
    others = foreign if family_out else shipped
    if not others:
        words = "from the spec sheet alone; the interval is a guess"
        return AttentionPrior(
            assumed_family(device), START, SPREAD, _BLIND_BELOW, _BLIND_ABOVE, words
        )
    per_family: dict[str, list[FloatArray]] = {}
    for model in others:
        per_family.setdefault(_family_of(model), []).append(_parameters(model))
    means = np.array([np.mean(group, axis=0) for group in per_family.values()])
    start, spread = means.mean(axis=0), np.maximum(means.std(axis=0), _LEAST_SPREAD)
    kernels = assumed_family(device)
    names = ", ".join(model["device"] for model in others)
    words = f"from the spec sheet and the models of {names}; nothing measured on it"
    if same and not family_out:
        start, kernels = (
            np.mean([_parameters(m) for m in same], axis=0),
            FAMILIES[same[0]["prefill"]["family"]],
        )
        names = ", ".join(model["device"] for model in same)
        words = f"from the spec sheet and its relatives {names}; nothing measured on it"
    transfers = [model["provenance"]["transfer"] for model in others]
    below = max(-transfer["log_low"] for transfer in transfers)
    above = max(transfer["log_high"] for transfer in transfers)
    return AttentionPrior(kernels, start, spread, max(0.0, below), max(0.0, above), words)


def _family_of(model: dict[str, Any]) -> str:
    """Returns the architecture family of a shipped model's GPU."""
    major, minor = model["provenance"]["compute_capability"]
    return family_of((major, minor))


def _parameters(model: dict[str, Any]) -> FloatArray:
    """Returns the parameters of a shipped model for equal sequence lengths, (parameters,)."""
    return np.array([float(model["prefill"]["parameters"][p.name]) for p in PARAMETERS])


def _fit_physics(
    candidates: Sequence[CostModel],
    spread: FloatArray,
    shapes: AttentionShapes,
    latency_us: FloatArray,
    cache_write: BoolArray,
) -> CostModel:
    """Fits the parameters of each candidate and returns the candidate with the lowest loss.

    spread: (parameters,), prior standard deviation of each parameter. The prior mean is the
        candidate's value.
    latency_us: (n,), measured times in µs.
    """
    from scipy.optimize import least_squares

    target = np.log(latency_us)

    def fitted(physics: CostModel) -> tuple[float, CostModel]:
        cost = physics.cost(shapes, cache_write)

        def residuals(parameters: FloatArray) -> FloatArray:
            error = (np.log(cost(parameters).latency_us) - target) / _NOISE
            # Half the square of `robust` is the pseudo-Huber loss.
            robust = np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0))
            return np.concatenate([robust, (parameters - physics.parameters) / spread])

        found = least_squares(residuals, physics.parameters, method="trf")
        return found.cost, replace(physics, parameters=found.x)

    return min(map(fitted, candidates), key=lambda found: found[0])[1]


def _fitted(
    candidates: Sequence[CostModel],
    spread: FloatArray,
    shapes: AttentionShapes,
    latency_us: FloatArray,
    cache_write: BoolArray,
    seed: int,
) -> Corrected:
    """Fits a cost model and the learner that corrects it, and calibrates the interval.

    The learner is a Gaussian process for log(measured time / cost model's time). Cross-validation
    decides whether to keep the learner, and provides the held-out errors for the interval. Rows
    with the same heads, kv_heads, head_dim and mask are in one fold; if all rows are the same in
    these, folds are made of single rows. Each fold refits the parameters but not the learner's
    hyperparameters. A fold is skipped if fewer rows than parameters remain outside it.
    """
    physics = _fit_physics(candidates, spread, shapes, latency_us, cache_write)
    learner = None
    if len(shapes) >= _FEWEST_FOR_LEARNER:
        terms = physics.cost(shapes, cache_write)(physics.parameters)
        target = np.log(latency_us / terms.latency_us)
        learner = GaussianProcess.fit(physics.features(shapes, terms), target, seed=seed)
    site = shapes.sites
    if not site.any():
        site = np.arange(len(shapes))
    sites = np.random.default_rng(seed).permutation(site.max() + 1)
    alone, learned, deviation = np.zeros((3, len(site)))
    seen = np.zeros(len(site), dtype=bool)
    for fold in range(min(_FOLDS, len(sites))):
        held = np.isin(site, sites[fold::_FOLDS])
        kept = np.flatnonzero(~held)
        if len(kept) < len(physics.parameters):
            continue
        without = _fit_physics(
            [physics], physics.spread, shapes[kept], latency_us[kept], cache_write[kept]
        )
        terms = without.cost(shapes[held], cache_write[held])(without.parameters)
        alone[held] = np.log(latency_us[held] / terms.latency_us)
        if learner is not None:
            shift, deviation[held] = learner.condition(kept).predict(
                without.features(shapes[held], terms)
            )
            learned[held] = alone[held] - shift
        seen |= held
    error = np.abs(learned[seen])
    bare_error = np.abs(alone[seen])
    if learner is None or error.mean() >= bare_error.mean():
        learner, error = None, bare_error
        deviation[:] = 0.0
    return Corrected(physics, IntervalCalibration.of_held_out(error, deviation[seen] ** 2), learner)
