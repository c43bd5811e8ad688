"""Predicted times of fused attention: bytes, FLOPs, waves of row blocks, head_dim padding and alignment.

A fit lets the rows tell which kernel family ran (its tiles, whether it packs query heads), then its parameters, then
a Gaussian process of what is left over where that lowers the error on held-out sites.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, require_choice
from quantbench.latency.attention_cost_model import FAMILIES, PARAMETERS, AttentionShapes, peak_tflops
from quantbench.latency.attention_fitting import (
    IntervalCalibration,
    Knowledge,
    Physics,
    all_families,
    calibrate,
    cross_validate,
    features,
    fit_learner,
    fit_physics,
    knowledge,
    learner_helps,
)
from quantbench.latency.estimate import Estimates, bounded, name_bound
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.workload import Attention

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_WHO = "AttentionModel"
MODEL_FORMAT = "quantbench-attention-model"
MODEL_VERSION = 1
PRIORS = ("auto", "family-out")

#: rows that a fit of 13 parameters with priors needs; fewer leave the prior, which says so
FEWEST_ROWS = 20
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
        """What it predicts for."""
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
        from quantbench.latency.attention_fitting import shipped_json

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
        known: Knowledge = knowledge(device, family_out=_check_prior(prior) == "family-out")
        physics = fit_physics(device, shapes, times_us, writes, all_families(), known.start, known.spread)
        learner = fit_learner(physics, shapes, times_us, writes, seed)
        held = cross_validate(physics, learner, shapes, times_us, writes, seed)
        if learner is not None and not learner_helps(held):
            learner = None
        return cls(
            physics,
            calibrate(held, with_learner=learner is not None),
            dtype=shapes.dtype,
            masks=tuple(name for name, rows in (("causal", shapes.causal), ("full", ~shapes.causal)) if rows.any()),
            learner=learner,
            note=f"attention on {device.name}: fitted on {len(shapes)} rows, tiles of {physics.family.name}",
            provenance=provenance or {},
        )

    def predict(
        self, works: Iterable[Attention] | AttentionShapes, *, cache_write: npt.ArrayLike = False, quick: bool = False
    ) -> Estimates:
        """Times of `works`, with 90 % intervals. cache_write: whether keys and values are also written away. quick: for
        those who ask by the hundred thousand: the same times, with intervals that are wider (by up to 11 % in the
        middle of random shapes on the public tables' models), never narrower."""
        shapes = works if isinstance(works, AttentionShapes) else AttentionShapes.of(works)
        writes = np.broadcast_to(np.asarray(cache_write, dtype=bool), (len(shapes),))
        terms = self.physics.terms(shapes, writes)
        seen = self._seen(shapes)
        shift, deviation = np.zeros(len(shapes)), np.zeros(len(shapes))
        if self.learner is not None and seen.any():
            learned = features(self.physics, shapes, terms)[seen]
            ask = self.learner.predict_quickly if quick else self.learner.predict
            shift[seen], deviation[seen] = ask(learned)
        half = self.interval.half_width(deviation) + np.where(seen, 0.0, _UNSEEN_HALF_WIDTH)
        fastest_us = shapes.flops / (peak_tflops(self.device, shapes.dtype) * 1e6)
        latency_us, low_us, high_us = bounded(
            terms.latency_us * np.exp(shift), half + self.below, half + self.above, fastest_us
        )
        bound = name_bound(terms.launch_us, terms.compute_us, terms.memory_us)
        note = self.note if seen.all() else f"{self.note}; {int((~seen).sum())} shapes beyond what was measured"
        return Estimates(latency_us, low_us, high_us, terms.waves, bound, note=note)

    @property
    def fitted(self) -> bool:
        """Whether rows of this device are behind it; a prior has none."""
        return self.below == self.above == 0.0

    def knows(self, work: Attention) -> bool:
        """Whether the fitted rows are of this kind; others are predicted with a wider interval."""
        return self.fitted and bool(self._seen(AttentionShapes.of([work]))[0])

    def _seen(self, shapes: AttentionShapes) -> BoolArray:
        """Rows of the kind that public tables hold."""
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
            "interval": {"quantile": self.interval.quantile, "floor": self.interval.floor},
            "below": self.below,
            "above": self.above,
            "learner": None if self.learner is None else self.learner.to_json(),
            "note": self.note,
            "provenance": self.provenance,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], device: DeviceSpec) -> AttentionModel:
        """What `to_json` wrote, for the device that it was made for. Raises InputError for anything else."""
        if data.get("format") != MODEL_FORMAT or data.get("version") != MODEL_VERSION:
            found = f"{data.get('format')} version {data.get('version')}"
            raise InputError(_WHO, found, f"{MODEL_FORMAT} version {MODEL_VERSION}")
        if data.get("device") != device.name:
            raise InputError(_WHO, f"a model of {data.get('device')}", f"one of {device.name}")
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
