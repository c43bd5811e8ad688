"""Predicts the time of an MoE layer's experts on the busiest GPU, from a few measured layers and
other GPUs' models.

>>> layer = MoE(tokens=512, hidden=4096, expert_ffn=14336, num_experts=8, top_k=2)
>>> found = MoEModel.best("h100-sxm5-80gb", library="vllm").predict([layer])
>>> bool(found.low_us[0] < found.latency_us[0] < found.high_us[0])
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.registry import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError, UnsupportedError, one_line, require_choice
from quantbench.files import read_bytes, write_file
from quantbench.latency.estimate import (
    Estimates,
    IntervalCalibration,
    bounded,
    measured_times,
    name_bound,
)
from quantbench.latency.families import family, generation
from quantbench.latency.forest import Forest
from quantbench.latency.libraries import LIBRARIES, MASKED_EXPERTS, MASKED_WORDS, default_library
from quantbench.latency.model_file import (
    BROKEN,
    Arrays,
    device_from_json,
    device_to_json,
    inner,
    outer,
    pack,
    unpack,
)
from quantbench.latency.moe_features import NUM_FEATURES, Float32Array, FloatArray, Layers
from quantbench.workload import MoE

# A model is the spec sheet's roofline times the exponential of what trees make of the layer's terms
# (`moe_features`) and of the corrections that the models of other GPUs, its references, make of the
# same layer. One half of the trees learns what a linear combination of those corrections leaves
# over: it extrapolates where GPUs resemble each other. The other half takes them as inputs only,
# which is safer where they do not.
_WHO = "MoEModel"
MODEL_FORMAT = "quantbench-moe-model"
#: 1: initial version
MODEL_VERSION = 1
_MODELS = Path(__file__).parent / "models"
PRIORS = ("auto", "family-out", "none")
#: fewest rows of a fit; with fewer, `fit` returns the prior
FEWEST_ROWS = 20
_MOST_REFERENCES = 5
# Rows on which references are chosen.
_CHOICE_ROWS = 1000
_FOLDS = 3
_LEAST_LEAF, _RATE = 3, 0.08
# Half-width of the interval, log time, without a reference of the GPU's architecture: as the priors
# of L40S and A100 were off. With one it is the largest error (90 % quantile) that the references'
# own priors made (`provenance["transfer"]`).
_BLIND = float(np.log(4.0))
# Ridge penalty of the references' slopes, in rows: a few rows must not swing them.
_RIDGE = 3.0


@dataclass(frozen=True)
class Growth:
    """Settings of the trees of each half: the number of randomised ones, and of boosted ones and
    their depth.
    """

    randomised: int = 24
    boosted: int = 150
    depth: int = 6


@dataclass(frozen=True)
class Half:
    """Forests for what `slopes`, (1 + references,), leave of the log residual: an intercept, and a
    share of each reference's correction."""

    slopes: FloatArray
    forests: tuple[Forest, ...]

    def base(self, known: FloatArray) -> FloatArray:
        """Returns the linear part, (layers,). known: (layers, references)."""
        return np.asarray(self.slopes[0] + known @ self.slopes[1:])

    @classmethod
    def grow(
        cls,
        x: Float32Array,
        known: FloatArray,
        y: FloatArray,
        linear: bool,
        growth: Growth,
        seed: int,
    ) -> Half:
        bare = cls(
            _slopes(known, y) if linear else np.append(np.median(y), np.zeros(known.shape[1])), ()
        )
        rest = y - bare.base(known)
        forests = []
        if growth.randomised:
            forests.append(
                Forest.grow(x, rest, trees=growth.randomised, leaf=_LEAST_LEAF, seed=seed)
            )
        if growth.boosted:
            forests.append(
                Forest.boost(
                    x,
                    rest,
                    trees=growth.boosted,
                    depth=growth.depth,
                    rate=_RATE,
                    leaf=_LEAST_LEAF,
                    seed=seed,
                )
            )
        return cls(bare.slopes, tuple(forests))


def _slopes(known: FloatArray, y: FloatArray) -> FloatArray:
    """Returns intercept and slopes of a ridge regression, (1 + references,)."""
    centre = known.mean(axis=0)
    x = known - centre
    slopes = np.linalg.solve(x.T @ x + _RIDGE * np.eye(x.shape[1]), x.T @ (y - y.mean()))
    return np.concatenate([[y.mean() - centre @ slopes], slopes])


@dataclass(frozen=True)
class MoEModel:
    """Model of the experts of MoE layers of one dtype, run by one library on one device, fitted or
    a prior.

    references: models of other GPUs whose corrections are inputs.
    halves: empty for a prior, which takes the mean of its references' corrections.
    interval: calibration in log time; of a prior, the spread of its references sets the variance.
    """

    device: DeviceSpec
    dtype: str
    library: str
    references: tuple[MoEModel, ...]
    halves: tuple[Half, ...]
    interval: IntervalCalibration
    rows: int = 0
    note: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        device: DeviceSpec | str,
        works: Sequence[MoE],
        latency_us: npt.ArrayLike,
        *,
        library: str,
        prior: str | Sequence[MoEModel] = "auto",
        seed: int = 0,
        growth: Growth | None = None,
    ) -> MoEModel:
        """Fits measured times (n,), µs, of layers of one dtype.

        prior: "auto" (the shipped models of other GPUs; never this GPU's own), "family-out" (of
            other GPU generations only), "none" or a sequence of models.
        seed: the same rows and seed give the same model.

        Returns the prior, with a note, for fewer than FEWEST_ROWS rows. Raises InputError for
        invalid times, no layers or several dtypes, UnsupportedError for a device that is no GPU.
        """
        spec, dtype = _gpu(device), _one_dtype(works)
        require_choice(_WHO, "library", library, LIBRARIES)
        times = measured_times(_WHO, latency_us, len(works))
        if len(works) < FEWEST_ROWS:
            bare = cls.prior(spec, dtype=dtype, library=library, prior=prior)
            note = f"{len(works)} rows are too few to fit ({FEWEST_ROWS} are needed): the prior as it stands. {bare.note}"
            return replace(bare, note=note)
        layers = Layers.of(works)
        y = np.log(times) - layers.roofline(spec)
        references = _most_telling(_others(spec, dtype, prior), works, y, seed)
        seen = np.array([one.correction(layers) for one in references]).reshape(-1, len(y)).T
        x = np.concatenate([layers.features(spec), seen.astype(np.float32)], axis=1)
        growth = growth or Growth()
        halves = _halves(x, seen, y, growth, seed)
        names = sorted({f"{one.library} on {one.device.name}" for one in references})
        note = f"experts of {library} on {spec.name}: fitted to {len(works)} rows"
        note += (
            f", with the models of {', '.join(names)}"
            if names
            else ", without models of other GPUs"
        )
        return cls(
            spec,
            dtype,
            library,
            references,
            halves,
            _calibrate(x, seen, y, _sites(layers), growth, seed),
            len(works),
            note,
        )

    @classmethod
    def prior(
        cls,
        device: DeviceSpec | str,
        *,
        dtype: str = "bf16",
        library: str,
        prior: str | Sequence[MoEModel] = "auto",
    ) -> MoEModel:
        """Returns the unfitted model: the roofline with the mean correction of the GPUs and
        libraries that are most alike. prior: as in `fit`."""
        spec = _gpu(device)
        require_choice(_WHO, "library", library, LIBRARIES)
        alike = sorted(
            _others(spec, dtype, prior),
            key=lambda one: (
                one.library != library,
                family(one.device) != family(spec),
                one.device.name,
            ),
        )
        chosen = tuple(alike[:_MOST_REFERENCES])
        names = (
            ", ".join(f"{one.library} on {one.device.name}" for one in chosen)
            or "the spec sheet alone"
        )
        note = f"experts of {library} on {spec.name}: not measured; from {names}"
        beyond = max((float(one.provenance["transfer"]) for one in chosen), default=_BLIND)
        if not any(family(one.device) == family(spec) for one in chosen):
            beyond = max(beyond, _BLIND)
        return cls(spec, dtype, library, chosen, (), IntervalCalibration(1.0, beyond), note=note)

    @classmethod
    def best(cls, device: DeviceSpec | str, *, dtype: str = "bf16", library: str = "") -> MoEModel:
        """Returns the model shipped for a GPU, dtype and library, or its prior if none is shipped.

        library: "" for one not in `MASKED_EXPERTS` if such a one was measured; among these the
            default of products (`libraries.default_library`) or else the one with the largest
            table; trtllm if none was measured.
        """
        spec = _gpu(device)
        usual = library or default_library(spec.name, dtype)
        own = [
            one
            for one in shipped_models(dtype)
            if one.device.name == spec.name and library in ("", one.library)
        ]
        if not own:
            return cls.prior(spec, dtype=dtype, library=library or "trtllm")
        found = max(
            own,
            key=lambda m: (
                m.library not in MASKED_EXPERTS,
                m.library == usual,
                m.provenance["rows"],
            ),
        )
        masked = found.library in MASKED_EXPERTS
        return replace(found, note=f"{found.note}; {MASKED_WORDS}") if masked else found

    def predict(self, works: Sequence[MoE]) -> Estimates:
        """Predicts the busiest rank's time of layers of the model's dtype. No time is below that of
        the FLOPs at the device's peak. Raises InputError for another dtype."""
        if not works:
            none = np.zeros(0)
            return Estimates(none, none, none, none, none.astype(np.str_), note=self.note)
        if _one_dtype(works) != self.dtype:
            raise InputError(
                _WHO, f"layers of {works[0].dtype}", f"{self.dtype}, to which the model was fitted"
            )
        layers = Layers.of(works)
        by_forest = self._by_forest(layers)
        half = self.interval.half_width(by_forest.var(axis=0))
        compute_us = layers.compute_us(self.device)
        latency_us, low_us, high_us = bounded(
            np.exp(layers.roofline(self.device) + by_forest.mean(axis=0)), half, half, compute_us
        )
        bound = name_bound(*layers.limits(self.device))
        waves = layers.waves(self.device)
        return Estimates(latency_us, low_us, high_us, waves, bound, note=self.note)

    def correction(self, layers: Layers) -> FloatArray:
        """Returns the log of the predicted time over the roofline, (layers,), also for layers of
        another dtype.
        """
        return np.asarray(self._by_forest(layers).mean(axis=0))

    def _by_forest(self, layers: Layers) -> FloatArray:
        """Returns the log of the predicted time over the roofline by forest (of a prior: by
        reference).
        """
        known = (
            np.array([one.correction(layers) for one in self.references]).reshape(-1, len(layers)).T
        )
        if not self.halves:
            return known.T if known.size else np.zeros((1, len(layers)))
        x = np.concatenate([layers.features(self.device), known.astype(np.float32)], axis=1)
        return _predicted(self.halves, x, known)

    def save(self, path: Path) -> None:
        """Writes the model and its references as a file that `load` reads."""
        save_models(path, [self])

    @classmethod
    def load(cls, path: Path) -> MoEModel:
        """Reads what `save` wrote. Raises the errors of `load_models`."""
        return load_models(path)[-1]


def save_models(path: Path, models: Sequence[MoEModel]) -> None:
    """Writes models and all their references to one file, trees rounded (`Forest.rounded`)."""
    order: list[MoEModel] = []
    for model in models:
        order += [
            one for one in (*model.references, model) if not any(one is known for known in order)
        ]
    arrays: Arrays = {}
    told = []
    for i, one in enumerate(order):
        told.append(_to_json(one, order))
        for j, half in enumerate(one.halves):
            arrays[f"{i}.{j}.slopes"] = half.slopes
            for k, forest in enumerate(half.forests):
                arrays |= outer(forest.to_arrays(), f"{i}.{j}.{k}.")
    write_file(
        _WHO, path, pack({"format": MODEL_FORMAT, "version": MODEL_VERSION, "models": told}, arrays)
    )


def _to_json(model: MoEModel, order: Sequence[MoEModel]) -> dict[str, Any]:
    return {
        "device": device_to_json(model.device),
        "dtype": model.dtype,
        "library": model.library,
        "references": [
            next(i for i, one in enumerate(order) if one is known) for known in model.references
        ],
        "forests": [len(half.forests) for half in model.halves],
        "interval": [model.interval.factor, model.interval.floor],
        "rows": model.rows,
        "note": model.note,
        "provenance": model.provenance,
    }


def load_models(path: Path) -> list[MoEModel]:
    """Reads what `save_models` wrote. Raises InputError for another format, StoreError for a
    damaged file.
    """
    try:
        data, arrays = unpack(_WHO, read_bytes(path), MODEL_FORMAT, MODEL_VERSION)
        models: list[MoEModel] = []
        for i, one in enumerate(data["models"]):
            models.append(_from_json(one, inner(arrays, f"{i}."), models))
        return models
    except (*BROKEN, StoreError) as error:
        raise StoreError(
            _WHO, f"{path} ({one_line(str(error))[:100]})", f"a file of {MODEL_FORMAT}"
        ) from None


def _from_json(data: Any, arrays: Arrays, known: Sequence[MoEModel]) -> MoEModel:
    seen = NUM_FEATURES + len(data["references"])
    halves = []
    for j, count in enumerate(data["forests"]):
        own = inner(arrays, f"{j}.")
        forests = tuple(Forest.from_arrays(inner(own, f"{k}."), seen) for k in range(count))
        halves.append(Half(own["slopes"], forests))
    return MoEModel(
        device_from_json(data["device"]),
        data["dtype"],
        data["library"],
        tuple(known[i] for i in data["references"]),
        tuple(halves),
        IntervalCalibration(*map(float, data["interval"])),
        data["rows"],
        data["note"],
        data["provenance"],
    )


@cache
def shipped_models(dtype: str) -> tuple[MoEModel, ...]:
    """Returns the models in the package of a dtype, each fitted to its own table without
    references.
    """
    file = _MODELS / f"{dtype}.moe"
    return tuple(load_models(file)) if file.is_file() else ()


def _predicted(halves: Sequence[Half], x: Float32Array, known: FloatArray) -> FloatArray:
    return np.array(
        [half.base(known) + forest.predict(x)[0] for half in halves for forest in half.forests]
    )


def _halves(
    x: Float32Array, known: FloatArray, y: FloatArray, growth: Growth, seed: int
) -> tuple[Half, ...]:
    kinds = (True, False) if known.shape[1] else (False,)
    return tuple(Half.grow(x, known, y, linear, growth, seed) for linear in kinds)


def _calibrate(
    x: Float32Array,
    known: FloatArray,
    y: FloatArray,
    sites: npt.NDArray[np.intp],
    growth: Growth,
    seed: int,
) -> IntervalCalibration:
    """Calibrates the interval on the errors of folds of models' shapes, each predicted by a fit
    without it.
    """
    rng = np.random.default_rng(seed)
    names = rng.permutation(sites.max() + 1)
    fold_of = (names % _FOLDS)[sites] if len(names) >= _FOLDS else rng.integers(_FOLDS, size=len(y))
    quick = replace(growth, randomised=growth.randomised // 4)
    error, variance = np.zeros(len(y)), np.zeros(len(y))
    for fold in range(_FOLDS):
        held = fold_of == fold
        if held.all() or not held.any():
            continue
        halves = _halves(x[~held], known[~held], y[~held], quick, seed)
        found = _predicted(halves, x[held], known[held])
        error[held], variance[held] = np.abs(found.mean(axis=0) - y[held]), found.var(axis=0)
    return IntervalCalibration.of_held_out(error, variance)


def _sites(layers: Layers) -> npt.NDArray[np.intp]:
    """Returns the index of each layer's model shape."""
    shapes = np.stack([layers.hidden, layers.expert_ffn, layers.top_k, layers.num_experts])
    return np.unique(shapes, axis=1, return_inverse=True)[1].ravel()


def _most_telling(
    others: Sequence[MoEModel], works: Sequence[MoE], y: FloatArray, seed: int
) -> tuple[MoEModel, ...]:
    """Returns the models that explain most of the residual y, (layers,), together: each in turn the
    one that correlates best with what those before it leave over."""
    rows = np.random.default_rng(seed).permutation(len(y))[:_CHOICE_ROWS]
    few, y = Layers.of([works[i] for i in rows]), y[rows]
    known = np.array([one.correction(few) for one in others]).reshape(-1, len(y)).T
    columns = known - known.mean(axis=0)
    columns /= np.linalg.norm(columns, axis=0) + 1e-9
    chosen: list[int] = []
    rest = y - y.mean()
    while len(chosen) < min(_MOST_REFERENCES, len(others)):
        left = np.setdiff1d(np.arange(len(others)), chosen)
        chosen.append(int(left[np.argmax(np.abs(rest @ columns[:, left]))]))
        rest = y - Half(_slopes(known[:, chosen], y), ()).base(known[:, chosen])
    return tuple(others[i] for i in chosen)


def _others(device: DeviceSpec, dtype: str, prior: str | Sequence[MoEModel]) -> list[MoEModel]:
    """Returns the models that may be references."""
    if not isinstance(prior, str):
        return list(prior)
    require_choice(_WHO, "prior", prior, PRIORS)
    if prior == "none":
        return []
    own = generation(family(device))
    return [
        one
        for one in shipped_models(dtype)
        if one.device.name != device.name
        and (prior == "auto" or generation(family(one.device)) != own)
    ]


def _gpu(device: DeviceSpec | str) -> DeviceSpec:
    spec = lookup(device) if isinstance(device, str) else device
    if spec.kind == "cpu":
        raise UnsupportedError(_WHO, f"{spec.name} is a {spec.kind}", "a GPU")
    return spec


def _one_dtype(works: Sequence[MoE]) -> str:
    dtypes = {work.dtype for work in works}
    if len(dtypes) != 1:
        raise InputError(
            _WHO, f"layers of {', '.join(sorted(dtypes)) or 'no dtype'}", "layers of one dtype"
        )
    return dtypes.pop()
