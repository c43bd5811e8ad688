"""Predicts how long an MoE layer's experts take on the layer's busiest GPU.

A `MoEModel` multiplies the roofline time by a correction, which it learns from a few measured
layers and from models of other GPUs, its references. The module also reads and writes files of such
models.

>>> layer = MoE(tokens=512, hidden=4096, expert_ffn=14336, num_experts=8, top_k=2)
>>> found = MoEModel.best("h100-sxm5-80gb", library="vllm").predict([layer])
>>> bool(found.low_us[0] < found.latency_us[0] < found.high_us[0])
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.estimate import (
    Estimates,
    IntervalCalibration,
    bounded,
    measured_times,
    name_bound,
)
from quantbench.latency.families import family, generation
from quantbench.latency.forest import Float32Array, Forest
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
from quantbench.latency.moe_features import NUM_FEATURES, Layers
from quantbench.workload import MoE

# Trees predict the log of the correction to the spec sheet's roofline. Their inputs are the layer's
# features (`moe_features`) and the corrections by the references. There are two learners. The first
# fits its trees to the residual of a linear combination of the references' corrections; it
# extrapolates well if GPUs resemble each other. The second fits its trees to the residual of a
# constant, so the references' corrections are only inputs of the trees; it is safer if GPUs differ.
_WHO = "MoEModel"
MODEL_FORMAT = "quantbench-moe-model"
#: Version 1 is the initial version.
MODEL_VERSION = 1
_MODELS = Path(__file__).parent / "models"
PRIORS = ("auto", "family-out", "none")
#: smallest number of rows for a fit; with fewer, `fit` returns the prior
FEWEST_ROWS = 20
# Largest number of references of a model.
_MOST_REFERENCES = 5
_ALONE = "without models of other GPUs"
# Largest number of rows that are used to choose the references.
_CHOICE_ROWS = 1000
_FOLDS = 3  # folds of the cross-validation that calibrates the interval
_LEAST_LEAF = 3  # smallest number of rows in a leaf
_RATE = 0.08  # learning rate of the boosted trees
# Smallest half-width (log time) of a prior's interval if no reference is of the GPU's architecture
# family. It is the error that priors made on L40S and A100. Otherwise the half-width is the largest
# `provenance["transfer"]` of the references: the 90 % quantile of the error that a prior makes on
# the reference's own table.
_BLIND = float(np.log(4.0))
# Ridge penalty on the slopes of the references. The penalty weighs as much as this many rows with a
# correction of 1 and a residual of 0. Without it, a few rows could change the slopes a lot.
_RIDGE = 3.0


@dataclass(frozen=True)
class Growth:
    """Settings of each learner's trees.

    randomised: number of randomised trees; 0 for no randomised forest.
    boosted: number of boosted trees; 0 for no boosted forest.
    depth: depth of the boosted trees.
    """

    randomised: int = 24
    boosted: int = 150
    depth: int = 6


@dataclass(frozen=True)
class Learner:
    """Linear combination of the references' corrections, and forests that predict its residual.

    slopes: (1 + references,), intercept, and the factor on each reference's correction.
    forests: forests that each predict the whole residual; the model averages over them.
    """

    slopes: FloatArray
    forests: tuple[Forest, ...]

    def base(self, corrections: FloatArray) -> FloatArray:
        """Returns the linear combination, (layers,).

        corrections: (layers, references).
        """
        return np.asarray(self.slopes[0] + corrections @ self.slopes[1:])


@dataclass(frozen=True)
class _Rows:
    """Measured layers that learners are fitted to.

    x: (layers, features), inputs of the trees, with the references' corrections last.
    corrections: (layers, references), log of each reference's predicted time over the roofline of
        the reference's GPU.
    residual: (layers,), log of the measured time over the roofline.
    """

    x: Float32Array
    corrections: FloatArray
    residual: FloatArray

    def __len__(self) -> int:
        return len(self.residual)

    def take(self, rows: npt.NDArray[np.bool_]) -> _Rows:
        return _Rows(*(column[rows] for column in vars(self).values()))


def _learners(rows: _Rows, growth: Growth, seed: int) -> tuple[Learner, ...]:
    """Returns the fitted learners of a model.

    The first learner starts from the linear combination of the references' corrections that fits
    the residual best. The second starts from the median residual; it is the only learner if there
    are no references.
    """
    count = rows.corrections.shape[1]
    plain = np.append(np.median(rows.residual), np.zeros(count))
    if not count:
        return (_grown(rows, plain, growth, seed),)
    linear = _slopes(rows.corrections, rows.residual)
    return _grown(rows, linear, growth, seed), _grown(rows, plain, growth, seed)


def _grown(rows: _Rows, slopes: FloatArray, growth: Growth, seed: int) -> Learner:
    """Returns a learner with these slopes, and a randomised and a boosted forest for the residual.

    `growth` can leave out either forest.
    """
    bare = Learner(slopes, ())
    rest = rows.residual - bare.base(rows.corrections)
    forests = []
    if growth.randomised:
        trees = growth.randomised
        forests.append(Forest.grow(rows.x, rest, trees=trees, leaf=_LEAST_LEAF, seed=seed))
    if growth.boosted:
        boosted = Forest.boost(
            rows.x,
            rest,
            trees=growth.boosted,
            depth=growth.depth,
            rate=_RATE,
            leaf=_LEAST_LEAF,
            seed=seed,
        )
        forests.append(boosted)
    return replace(bare, forests=tuple(forests))


def _slopes(corrections: FloatArray, residual: FloatArray) -> FloatArray:
    """Returns the intercept and the slopes of a ridge regression, (1 + references,)."""
    centre = corrections.mean(axis=0)
    middle = residual.mean()
    x = corrections - centre
    slopes = np.linalg.solve(x.T @ x + _RIDGE * np.eye(x.shape[1]), x.T @ (residual - middle))
    return np.concatenate([[middle - centre @ slopes], slopes])


@dataclass(frozen=True)
class MoEModel:
    """Latency model of MoE experts of one dtype, run by one library on one device.

    The model is either fitted or a prior.

    references: models of other GPUs, whose corrections are inputs of this model.
    learners: fitted learners of the correction; empty for a prior, whose correction is the mean of
        the references' corrections.
    interval: calibration in log time. The variance is taken over forests, or over the references'
        corrections for a prior.
    rows: number of measured layers; 0 for a prior.
    """

    device: DeviceSpec
    dtype: str
    library: str
    references: tuple[MoEModel, ...]
    learners: tuple[Learner, ...]
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
        """Fits the model to measured layers of one dtype.

        latency_us: (n,), measured times in µs.
        library: library whose kernels were measured.
        prior: models that may be references: "auto" (the shipped models of other GPUs),
            "family-out" (the shipped models of other GPU generations), "none", or a sequence of
            models.
        seed: the same rows and seed give the same model.

        Returns the prior, with a note, for fewer than FEWEST_ROWS rows. Raises InputError for
        invalid times, for no layers and for several dtypes, and UnsupportedError for a device that
        is no GPU.
        """
        spec = _gpu(device)
        dtype = _one_dtype(works)
        require_choice(_WHO, "library", library, LIBRARIES)
        times = measured_times(_WHO, latency_us, len(works))
        if len(works) < FEWEST_ROWS:
            bare = cls.prior(spec, dtype=dtype, library=library, prior=prior)
            few = f"{len(works)} rows are too few to fit ({FEWEST_ROWS} are needed)"
            return replace(bare, note=f"{few}: the prior as it stands. {bare.note}")
        layers = Layers.of(works)
        residual = np.log(times) - layers.roofline(spec)
        references = _select_references(_others(spec, dtype, prior), works, residual, seed)
        corrections = _corrections(references, layers)
        rows = _Rows(_inputs(layers, spec, corrections), corrections, residual)
        growth = growth or Growth()
        names = sorted({one._source for one in references})
        sources = f"with the models of {', '.join(names)}" if names else _ALONE
        return cls(
            spec,
            dtype,
            library,
            references,
            _learners(rows, growth, seed),
            _calibrate(rows, _sites(layers), growth, seed),
            len(works),
            f"experts of {library} on {spec.name}: fitted to {len(works)} rows, {sources}",
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
        """Returns the unfitted model of a device, dtype and library.

        The model is the roofline with the mean correction of up to _MOST_REFERENCES models of other
        GPUs. Models of the same library come first, and among them, models of the same GPU family.

        prior: as in `fit`.
        """
        spec = _gpu(device)
        require_choice(_WHO, "library", library, LIBRARIES)

        # The most similar models sort first.
        def unlike(one: MoEModel) -> tuple[bool, bool, str]:
            return (
                one.library != library,
                family(one.device) != family(spec),
                one.device.name,
            )

        alike = sorted(_others(spec, dtype, prior), key=unlike)[:_MOST_REFERENCES]
        sources = ", ".join(one._source for one in alike) or "the spec sheet alone"
        note = f"experts of {library} on {spec.name}: not measured; from {sources}"
        errors = [float(one.provenance["transfer"]) for one in alike]
        if family(spec) not in [family(one.device) for one in alike]:
            errors.append(_BLIND)
        interval = IntervalCalibration(1.0, max(errors))
        return cls(spec, dtype, library, tuple(alike), (), interval, note=note)

    @classmethod
    def best(cls, device: DeviceSpec | str, *, dtype: str = "bf16", library: str = "") -> MoEModel:
        """Returns the model shipped for a GPU, dtype and library, or its prior if none is shipped.

        library: library whose kernels will run. With "", shipped models are ranked by three rules,
            a later rule only deciding ties of the earlier ones:
            a library outside `MASKED_EXPERTS` comes first;
            the default library of GEMMs (`libraries.default_library`) comes first;
            the model with the most rows comes first.
            If none is shipped, the prior is for trtllm.
        """
        spec = _gpu(device)
        usual = library or default_library(spec.name, dtype)

        def rank(one: MoEModel) -> tuple[bool, bool, int]:
            return (
                one.library not in MASKED_EXPERTS,
                one.library == usual,
                one.provenance["rows"],
            )

        def applies(one: MoEModel) -> bool:
            return one.device.name == spec.name and library in ("", one.library)

        found = max(filter(applies, shipped_models(dtype)), key=rank, default=None)
        if found is None:
            return cls.prior(spec, dtype=dtype, library=library or "trtllm")
        if found.library not in MASKED_EXPERTS:
            return found
        return replace(found, note=f"{found.note}; {MASKED_WORDS}")

    @property
    def _source(self) -> str:
        return f"{self.library} on {self.device.name}"

    def predict(self, works: Sequence[MoE]) -> Estimates:
        """Predicts the times of layers of the model's dtype on each layer's busiest GPU.

        No prediction is below the time of that GPU's FLOPs at peak. Raises InputError for another
        dtype.
        """
        if not works:
            none = np.zeros(0)
            return Estimates(none, none, none, none, none.astype(np.str_), note=self.note)
        if _one_dtype(works) != self.dtype:
            expected = f"{self.dtype}, to which the model was fitted"
            raise InputError(_WHO, f"layers of {works[0].dtype}", expected)
        layers = Layers.of(works)
        by_forest = self._by_forest(layers)
        half = self.interval.half_width(by_forest.var(axis=0))
        expected_us = np.exp(layers.roofline(self.device) + by_forest.mean(axis=0))
        times = bounded(expected_us, half, half, layers.compute_us(self.device))
        bound = name_bound(*layers.limits(self.device))
        return Estimates(*times, layers.waves(self.device), bound, note=self.note)

    def correction(self, layers: Layers) -> FloatArray:
        """Returns the log of the predicted time over the roofline, (layers,), for any dtype."""
        return np.asarray(self._by_forest(layers).mean(axis=0))

    def _by_forest(self, layers: Layers) -> FloatArray:
        """Returns the log of the predicted time over the roofline for each forest.

        The result is (forests, layers), or (references, layers) for a prior.
        """
        corrections = _corrections(self.references, layers)
        if self.learners:
            x = _inputs(layers, self.device, corrections)
            return _predicted(self.learners, x, corrections)
        return corrections.T if corrections.size else np.zeros((1, len(layers)))


def save_models(path: Path, models: Sequence[MoEModel]) -> None:
    """Writes models and all their references to one file. Raises StoreError if the write fails."""
    # Models are identified by `id`, because comparing two models would compare arrays.
    places: dict[int, int] = {}
    order: list[MoEModel] = []
    for model in models:
        for one in (*model.references, model):
            if id(one) not in places:
                places[id(one)] = len(order)
                order.append(one)
    arrays: Arrays = {}
    headers = []
    for i, model in enumerate(order):
        headers.append(_to_json(model, places))
        for j, learner in enumerate(model.learners):
            arrays[f"{i}.{j}.slopes"] = learner.slopes
            for k, forest in enumerate(learner.forests):
                arrays |= outer(forest.to_arrays(), f"{i}.{j}.{k}.")
    header = {"format": MODEL_FORMAT, "version": MODEL_VERSION, "models": headers}
    write_file(_WHO, path, pack(header, arrays))


def _to_json(model: MoEModel, places: Mapping[int, int]) -> dict[str, Any]:
    """Returns the header of a model.

    places: maps the `id` of each model to the model's index in the file.
    """
    return {
        "device": device_to_json(model.device),
        "dtype": model.dtype,
        "library": model.library,
        "references": [places[id(reference)] for reference in model.references],
        "forests": [len(learner.forests) for learner in model.learners],
        "interval": [model.interval.factor, model.interval.floor],
        "rows": model.rows,
        "note": model.note,
        "provenance": model.provenance,
    }


def load_models(path: Path) -> list[MoEModel]:
    """Reads a file that `save_models` wrote.

    Raises StoreError for a damaged file and for another format.
    """
    try:
        data, arrays = unpack(_WHO, read_bytes(path), MODEL_FORMAT, MODEL_VERSION)
        models: list[MoEModel] = []
        for i, header in enumerate(data["models"]):
            models.append(_from_json(header, inner(arrays, f"{i}."), models))
        return models
    except (*BROKEN, StoreError) as error:
        what = f"{path} ({one_line(str(error))[:100]})"
        raise StoreError(_WHO, what, f"a file of {MODEL_FORMAT}") from None


def _from_json(data: Any, arrays: Arrays, before: Sequence[MoEModel]) -> MoEModel:
    """Returns a model from its header.

    arrays: arrays of this model.
    before: all earlier models in the file, which include this model's references.
    """
    references = tuple(before[i] for i in data["references"])
    inputs = NUM_FEATURES + len(references)
    learners = []
    for j, count in enumerate(data["forests"]):
        part = inner(arrays, f"{j}.")
        forests = tuple(Forest.from_arrays(inner(part, f"{k}."), inputs) for k in range(count))
        learners.append(Learner(part["slopes"], forests))
    return MoEModel(
        device_from_json(data["device"]),
        data["dtype"],
        data["library"],
        references,
        tuple(learners),
        IntervalCalibration(*map(float, data["interval"])),
        data["rows"],
        data["note"],
        data["provenance"],
    )


@cache
def shipped_models(dtype: str) -> tuple[MoEModel, ...]:
    """Returns the models for a dtype that are part of the package.

    Each model was fitted to one table, without references.
    """
    file = _MODELS / f"{dtype}.moe"
    return tuple(load_models(file)) if file.is_file() else ()


def _corrections(models: Sequence[MoEModel], layers: Layers) -> FloatArray:
    """Returns the correction of each model for each layer, (layers, models)."""
    return np.array([one.correction(layers) for one in models]).reshape(-1, len(layers)).T


def _inputs(layers: Layers, device: DeviceSpec, corrections: FloatArray) -> Float32Array:
    """Returns the inputs of the trees: features, then the references' corrections."""
    return np.concatenate([layers.features(device), corrections.astype(np.float32)], axis=1)


def _predicted(learners: Sequence[Learner], x: Float32Array, corrections: FloatArray) -> FloatArray:
    """Returns each forest's log of the predicted time over the roofline, (forests, layers)."""
    found = []
    for learner in learners:
        base = learner.base(corrections)
        found += [base + forest.predict(x)[0] for forest in learner.forests]
    return np.array(found)


def _calibrate(
    rows: _Rows, sites: npt.NDArray[np.intp], growth: Growth, seed: int
) -> IntervalCalibration:
    """Calibrates the interval by cross-validation over model shapes.

    Each fold of model shapes is predicted by a fit to the other folds. If there are fewer model
    shapes than folds, single layers are assigned to folds instead.

    sites: (layers,), index of each layer's model shape.
    """
    count = len(rows)
    rng = np.random.default_rng(seed)
    names = rng.permutation(sites.max() + 1)
    fold_of = (names % _FOLDS)[sites]
    if len(names) < _FOLDS:
        fold_of = rng.integers(_FOLDS, size=count)
    # A quarter of the randomised trees is enough to estimate errors.
    quick = replace(growth, randomised=growth.randomised // 4)
    error = np.zeros(count)
    variance = np.zeros(count)
    for fold in range(_FOLDS):
        inside = fold_of == fold
        if inside.all() or not inside.any():
            continue
        held = rows.take(inside)
        learners = _learners(rows.take(~inside), quick, seed)
        found = _predicted(learners, held.x, held.corrections)
        error[inside] = np.abs(found.mean(axis=0) - held.residual)
        variance[inside] = found.var(axis=0)
    return IntervalCalibration.of_held_out(error, variance)


def _sites(layers: Layers) -> npt.NDArray[np.intp]:
    """Returns the index of each layer's model shape, (layers,).

    A model shape is one (hidden, expert_ffn, top_k, num_experts).
    """
    shapes = np.stack([layers.hidden, layers.expert_ffn, layers.top_k, layers.num_experts])
    return np.unique(shapes, axis=1, return_inverse=True)[1].ravel()


def _select_references(
    others: Sequence[MoEModel], works: Sequence[MoE], residual: FloatArray, seed: int
) -> tuple[MoEModel, ...]:
    """Returns up to _MOST_REFERENCES models whose corrections best explain the residual.

    Models are chosen one by one. A linear combination of the models chosen so far is fitted to the
    residual. The next model is the one whose correction correlates best with the remaining error.

    residual: (layers,), log of the measured time over the roofline.
    """
    rows = np.random.default_rng(seed).permutation(len(residual))[:_CHOICE_ROWS]
    residual = residual[rows]
    corrections = _corrections(others, Layers.of([works[i] for i in rows]))
    columns = corrections - corrections.mean(axis=0)
    columns /= np.linalg.norm(columns, axis=0) + 1e-9
    chosen: list[int] = []
    rest = residual - residual.mean()
    while len(chosen) < min(_MOST_REFERENCES, len(others)):
        left = np.setdiff1d(np.arange(len(others)), chosen)
        chosen.append(int(left[np.argmax(np.abs(rest @ columns[:, left]))]))
        part = corrections[:, chosen]
        rest = residual - Learner(_slopes(part, residual), ()).base(part)
    return tuple(others[i] for i in chosen)


def _others(device: DeviceSpec, dtype: str, prior: str | Sequence[MoEModel]) -> list[MoEModel]:
    """Returns the models that `prior`, as in `MoEModel.fit`, allows as references."""
    if not isinstance(prior, str):
        return list(prior)
    require_choice(_WHO, "prior", prior, PRIORS)
    if prior == "none":
        return []
    others = [one for one in shipped_models(dtype) if one.device.name != device.name]
    if prior == "auto":
        return others
    excluded = generation(family(device))
    return [one for one in others if generation(family(one.device)) != excluded]


def _gpu(device: DeviceSpec | str) -> DeviceSpec:
    """Returns the specification of a GPU. Raises UnsupportedError for a CPU."""
    spec = lookup(device) if isinstance(device, str) else device
    if spec.kind == "cpu":
        raise UnsupportedError(_WHO, f"{spec.name} is a {spec.kind}", "a GPU")
    return spec


def _one_dtype(works: Sequence[MoE]) -> str:
    """Returns the dtype of all layers. Raises InputError for no layers and for several dtypes."""
    dtypes = {work.dtype for work in works}
    if len(dtypes) != 1:
        what = f"layers of {', '.join(sorted(dtypes)) or 'no dtype'}"
        raise InputError(_WHO, what, "layers of one dtype")
    return dtypes.pop()
