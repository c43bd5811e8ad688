"""Predicts GEMM latencies on one GPU with a model that is fitted to measured shapes.

`GemmModel.fit` starts from a prior learned on other GPUs, so a few measured shapes suffice.
`GemmModel.best` returns a device's shipped model, or the prior if none is shipped. Models can be
saved to and loaded from files.

>>> model = GemmModel.prior("a100-sxm4-80gb")
>>> found = model.predict(4096, 4096, [4096, 8192])
>>> bool(found.latency_us[0] < found.latency_us[1])
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

from quantbench.device.registry import known as known_devices
from quantbench.device.registry import lookup, same_chip
from quantbench.device.spec import PEAK_MARGIN, DeviceSpec
from quantbench.errors import InputError, QuantbenchError, StoreError, require_choice
from quantbench.files import read_bytes, reason, write_file
from quantbench.latency.autodiff import FloatArray
from quantbench.latency.estimate import (
    Estimate,
    Estimates,
    IntervalCalibration,
    measured_times,
    name_bound,
)
from quantbench.latency.families import family, unit
from quantbench.latency.gemm import files
from quantbench.latency.gemm.cost_model import Machine, Menu, runs_in_waves
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.inputs import gemm_sizes, machine_of, without_layout
from quantbench.latency.gemm.member import Member, TrainingRows
from quantbench.latency.gemm.training import (
    FEWEST_FOR_TREES,
    FEWEST_ROWS,
    Effort,
    MeasuredGpu,
    Prior,
    choose,
    near,
    pooled,
    shipped_pool,
    spec_sheet,
    train,
)
from quantbench.latency.libraries import LIBRARIES, default_library, libraries_of, resolve_library
from quantbench.latency.model_file import BROKEN, device_from_json, device_to_json, pack, unpack
from quantbench.workload import Gemm
from quantbench.workload.dtypes import GEMM_DTYPES

#: folder of the models that are part of the package
FOLDER = Path(__file__).parent.parent / "models"
MODEL_FORMAT = "quantbench-gemm-model"
MODEL_VERSION = 1
# `from_bytes` predicts the time of this shape to check the model.
_PROBE = ([128], [4096], [1024])


@dataclass(frozen=True)
class GemmModel:
    """Latency model for GEMMs of one dtype and library on one device.

    ensemble: cost models with trees, which predict the times.
    interval: calibration of the 90 % interval.
    rows: number of measured shapes that the model was fitted to; 0 for an unfitted model.
    prior_source: GPUs or specification that the prior came from, for notes.
    note: caveats of the predictions.
    provenance: origin of the measurements, saved with the model.
    library: library whose kernels were measured (`libraries.LIBRARIES`).
    """

    device: DeviceSpec
    dtype: str
    ensemble: Ensemble
    interval: IntervalCalibration
    rows: int
    prior_source: str
    note: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    library: str = "torch"

    @classmethod
    def fit(
        cls,
        device: DeviceSpec | str,
        m: npt.ArrayLike,
        n: npt.ArrayLike,
        k: npt.ArrayLike,
        latency_us: npt.ArrayLike,
        *,
        batch: npt.ArrayLike = 1,
        layout: str | Sequence[str] = "nn",
        dtype: str = "bf16",
        library: str = "torch",
        prior: str | GemmModel | Sequence[GemmModel] = "auto",
        seed: int = 0,
        effort: Effort | None = None,
    ) -> GemmModel:
        """Fits a model to measured shapes.

        m, n, k: (rows,), sizes of the GEMMs.
        latency_us: (rows,), measured times in µs.
        batch: number of independent GEMMs in each row, (rows,) or one number for all.
        layout: storage of a and b (`workload.Gemm.layout`), one for each row or one for all.
        library: library whose kernels were measured.
        prior: selects the prior of the cost model's parameters and the reference. The reference is
            a fitted model whose correction is an input of the trees. One of
            "auto": the prior is the shipped parameters of this GPU, or else of its family, or else
            of all measured GPUs. The reference is the first of three models that is shipped:
            (1) this GPU, dtype and library, (2) the most similar GPU of the family, this dtype and
            library, whose parameters are then also the prior, (3) this GPU and dtype with the
            default library;
            "family-out": the shipped parameters of other GPU generations, no reference;
            "none": the spec sheet, no reference;
            a model: the model's parameters as the prior, and the model as the reference;
            a sequence of models: the parameters of the models in this GPU's family, or else of all
            models in the sequence, no reference.
        seed: seed of the fit; the same rows and seed give the same model.
        effort: settings of the fit; the default depends on the number of rows.

        Rows faster than PEAK_MARGIN times the device's peak rate are left out; a fitted model has
        their number in `provenance["above_peak"]`. If fewer than FEWEST_ROWS rows remain, the
        result is the prior, with a note. Raises InputError for invalid sizes or times, and
        UnsupportedError for a dtype that the device lacks.
        """
        who = "GemmModel.fit"
        spec = _device(device)
        require_choice(who, "library", library, LIBRARIES)
        machine = machine_of(spec, dtype)
        if np.ndim(batch) == 0:
            batch = np.full(np.size(m), batch)
        sizes = gemm_sizes(who, layout, m, n, k, batch)
        times = measured_times(who, latency_us, len(sizes))
        # Before an fp8_block GEMM, libraries pad the scales of a if their rows are not aligned.
        # SGLang has no such step, because its quantization writes aligned scales
        # (`sglang_per_token_group_quant_fp8`, option `scale_tma_aligned`).
        padded = dtype == "fp8_block" and library != "sglang"
        rows = TrainingRows(sizes, np.log(times), row_scales=padded)
        if not rows.layouts:
            rows = replace(rows, sizes=without_layout(machine, sizes))
        possible = sizes.flop <= PEAK_MARGIN * machine.flop_per_us * times  # (rows,)
        rows = rows.take(np.flatnonzero(possible))
        start = _start(spec, dtype, prior, library)
        if len(rows) < FEWEST_ROWS:
            bare = _unfitted(spec, dtype, machine, start, library)
            few = f"{len(rows)} rows are too few to fit ({FEWEST_ROWS} are needed)"
            return replace(bare, note=f"{few}: the prior as it stands. {bare.note}")
        effort = effort or Effort.of(len(rows))
        menu = Menu.of(unit(spec, dtype))
        ensemble, interval = train(machine, menu, rows, start.prior, start.reference, effort, seed)
        note = ""
        if len(rows) < FEWEST_FOR_TREES:
            note = f"{len(rows)} rows: the cost model was fitted, no trees were grown"
            note += f" ({FEWEST_FOR_TREES} are needed)"
        provenance = {}
        if not possible.all():
            provenance["above_peak"] = int((~possible).sum())
        source = start.prior.source
        return cls(
            spec, dtype, ensemble, interval, len(rows), source, note, provenance, library=library
        )

    @classmethod
    def prior(
        cls,
        device: DeviceSpec | str,
        *,
        dtype: str = "bf16",
        family_out: bool = False,
        library: str = "",
    ) -> GemmModel:
        """Returns the unfitted model of a device, with a wide interval.

        family_out: whether to exclude measured GPUs of the device's generation.
        library: library whose kernels will run, as in `best`. The note names the library, but the
            predicted times do not depend on it.
        """
        spec = _device(device)
        library = resolve_library(spec.name, dtype, library, "GemmModel.prior")
        machine = machine_of(spec, dtype)
        start = _Start(*choose(spec, dtype, shipped_pool(), family_out=family_out))
        return _unfitted(spec, dtype, machine, start, library)

    @classmethod
    def best(cls, device: DeviceSpec | str, *, dtype: str = "bf16", library: str = "") -> GemmModel:
        """Returns the shipped model for a device, dtype and library, or else the prior.

        library: library whose kernels will run; "" means `libraries.default_library`.

        Raises InputError for an unknown library.
        """
        spec = _device(device)
        library = resolve_library(spec.name, dtype, library, "GemmModel.best")
        shipped = shipped_model(spec.name, dtype, library)
        if shipped is not None:
            return shipped
        prior = cls.prior(spec, dtype=dtype, library=library)
        if library not in libraries_of(spec.name, dtype):
            return prior
        note = (
            f"no model of {library}'s {dtype} products on {spec.name} is shipped: "
            "quantbench import aiconfigurator reads its table, profile export fits it, and "
            f"--profile predicts with it; expected from {prior.prior_source}, the interval is wide"
        )
        return replace(prior, note=note)

    def predict(
        self,
        m: npt.ArrayLike,
        n: npt.ArrayLike,
        k: npt.ArrayLike,
        *,
        batch: npt.ArrayLike = 1,
        layout: str | Sequence[str] = "nn",
    ) -> Estimates:
        """Predicts the times of GEMMs, each `batch` products of an (m, k) and a (k, n) matrix.

        m, n, k, batch: sizes, which broadcast. The estimates have the common shape of the sizes.
        layout: storage of a and b, one for all GEMMs; for one-dimensional sizes also one for each
            row. The layout changes the alignment of the rows of a and b. If the model was fitted to
            several layouts, the layout is also an input of the trees.

        No prediction is below the time at the device's peak. Raises InputError for invalid sizes.
        """
        wide = np.broadcast_arrays(m, n, k, batch)
        shape = wide[0].shape
        flat = [column.ravel() for column in wide]
        sizes = gemm_sizes("GemmModel.predict", layout, *flat)
        machine = self.ensemble.machine
        if not self.layouts:
            sizes = without_layout(machine, sizes)
        answer = self.ensemble.raw(sizes)
        peak_us = sizes.flop / machine.flop_per_us
        latency_us = np.maximum(np.exp(answer.log_us), peak_us)
        factor = np.exp(self.interval.half_width(answer.variance))
        read = machine.element_bytes * (sizes.m + sizes.n) * sizes.k
        written = machine.output_bytes * sizes.m * sizes.n
        memory_us = sizes.batch * (read + written) / machine.bytes_per_us
        each = self.ensemble.menu.each
        tiles = np.concatenate([each.block_m, each.block_n, each.split_k], axis=1)  # (kernels, 3)
        return Estimates(
            latency_us=latency_us.reshape(shape),
            low_us=np.maximum(latency_us / factor, peak_us).reshape(shape),
            high_us=(latency_us * factor).reshape(shape),
            waves=answer.waves.astype(np.int64).reshape(shape),
            bound=name_bound(answer.fixed_us, peak_us, memory_us).reshape(shape),
            note=self.note,
            tiles=tiles[answer.kernel].astype(np.int64).reshape(*shape, 3),
            beyond=(latency_us / np.exp(answer.physics) - 1).reshape(shape),
        )

    @property
    def batched(self) -> bool:
        """Whether batched GEMMs were among the fitted rows."""
        return any(member.batched for member in self.ensemble.members)

    @property
    def unaligned(self) -> bool:
        """Whether GEMMs with an n or k that is no multiple of 8 were among the fitted rows."""
        return any(member.unaligned for member in self.ensemble.members)

    @property
    def layouts(self) -> bool:
        """Whether the model was fitted to several layouts.

        If not, predictions depend on the layout only through the alignment of rows.
        """
        return any(member.layouts for member in self.ensemble.members)

    @property
    def in_waves(self) -> bool:
        """Whether GEMMs run in waves, so that a partial last wave leaves SMs idle.

        The result follows from the cost models' fitted parameters (`runs_in_waves`).
        """
        return runs_in_waves(self._vectors)

    @property
    def _vectors(self) -> list[FloatArray]:
        """Parameter vector of each member's cost model."""
        return [member.parameters for member in self.ensemble.members]

    def predict_gemms(self, gemms: Sequence[Gemm]) -> list[Estimate]:
        """Returns one estimate per GEMM, in order.

        Raises InputError for a GEMM whose dtype is not the model's.
        """
        for gemm in gemms:
            if gemm.dtype != self.dtype:
                expected = f"products of {self.dtype}, which the model was fitted to"
                raise InputError("predict_gemms", f"{gemm}", expected)
        columns: dict[str, Any] = {}
        for name in ("m", "n", "k", "batch", "layout"):
            columns[name] = [getattr(gemm, name) for gemm in gemms]
        return list(self.predict(**columns))

    def measured_gpu(self) -> MeasuredGpu:
        """Returns the members' mean cost model parameters, from which `fit` can make a prior."""
        mean = np.mean(self._vectors, axis=0)
        of = family(self.device)
        return MeasuredGpu(self.device.name, of, self.dtype, mean, self.rows, "", 0.0)

    def to_bytes(self) -> bytes:
        """Returns the content of the model's file."""
        ensemble, arrays = files.ensemble_to_json(self.ensemble)
        names = ("dtype", "library", "rows", "prior_source", "note", "provenance")
        header = {
            "format": MODEL_FORMAT,
            "version": MODEL_VERSION,
            "device": device_to_json(self.device),
            **{name: getattr(self, name) for name in names},
            "interval": dict(vars(self.interval)),
            "ensemble": ensemble,
        }
        return pack(header, arrays)

    @classmethod
    def from_bytes(cls, content: bytes) -> GemmModel:
        """Inverse of `to_bytes`.

        Raises InputError for another format or version, and StoreError for a broken model.
        """
        who = "GemmModel.load"
        data, arrays = unpack(who, content, MODEL_FORMAT, MODEL_VERSION)
        try:
            made = cls(
                device=device_from_json(data["device"]),
                dtype=require_choice(who, "dtype", data["dtype"], GEMM_DTYPES),
                ensemble=files.ensemble_from_json(data["ensemble"], arrays),
                interval=IntervalCalibration.from_json(data["interval"]),
                rows=int(data["rows"]),
                prior_source=str(data["prior_source"]),
                note=str(data["note"]),
                provenance=dict(data["provenance"]),
                library=require_choice(who, "library", data["library"], LIBRARIES),
            )
            with np.errstate(all="ignore"):
                us = made.predict(*_PROBE)
        except QuantbenchError:
            raise
        except BROKEN as error:
            raise StoreError(who, f"a broken part ({error!r})"[:160], "a whole model") from error
        if not (0 < us.low_us[0] <= us.latency_us[0] <= us.high_us[0] < np.inf):
            what = f"a time of {us.latency_us[0]} µs"
            raise StoreError(who, what, "a finite one within its interval")
        return made

    def save(self, path: str | Path) -> None:
        """Writes the model to a file atomically. Raises StoreError if the write fails."""
        write_file("GemmModel.save", Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> GemmModel:
        """Reads a file that `save` wrote. Raises InputError or StoreError for any other file."""
        try:
            content = read_bytes(path)
        except OSError as error:
            what = f"{path} ({reason(error)})"
            raise StoreError("GemmModel.load", what, "a file that GemmModel.save wrote") from error
        return cls.from_bytes(content)


def file_name(slug: str, dtype: str, library: str) -> str:
    """Returns the file name of the shipped model for a device, dtype and library.

    >>> file_name("h100-sxm5-80gb", "fp8", "vllm")
    'h100-sxm5-80gb-fp8-vllm.gemm'
    """
    return f"{slug}-{dtype}-{library}.gemm"


def shipped_model(slug: str, dtype: str, library: str = "") -> GemmModel | None:
    """Returns the shipped model for a device, dtype and library, or None if there is none.

    library: "" means the default library of the device and dtype.

    A device without a model gets the model of another card with the same chip, adapted to the
    device's memory bandwidth.
    """
    return _shipped(slug, dtype, library or default_library(slug, dtype))


@cache
def _shipped(slug: str, dtype: str, library: str) -> GemmModel | None:
    """Returns the device's model, or else that of a card with the same chip, or else None."""
    for name in same_chip(slug):
        file = FOLDER / file_name(name, dtype, library)
        if file.is_file():
            model = GemmModel.load(file)
            return model if name == slug else _of_same_chip(model, lookup(slug))
    return None


def _of_same_chip(model: GemmModel, device: DeviceSpec) -> GemmModel:
    """Returns one card's model adapted to another card with the same chip, with a note."""
    ensemble = replace(model.ensemble, machine=machine_of(device, model.dtype))
    note = f"products on {device.name}: as measured on {model.device.name}, the same chip"
    return replace(model, device=device, ensemble=ensemble, note=note)


def _device(device: DeviceSpec | str) -> DeviceSpec:
    return lookup(device) if isinstance(device, str) else device


@dataclass(frozen=True)
class _Start:
    """Starting point of a fit.

    prior: prior of the cost model's parameters.
    blind: half-width in log time of the 90 % interval if only the prior predicts.
    reference: model whose correction is an input of the trees; None if there is no such model.
    """

    prior: Prior
    blind: float
    reference: Ensemble | None = None


def _start(
    device: DeviceSpec, dtype: str, prior: str | GemmModel | Sequence[GemmModel], library: str
) -> _Start:
    """Returns the starting point that `prior`, as in `GemmModel.fit`, selects."""
    who = "GemmModel.fit"
    if isinstance(prior, GemmModel):
        _, blind = choose(device, dtype, shipped_pool(), family_out=True)
        return _Start(near([prior.measured_gpu()], same_gpu=False), blind, prior.ensemble)
    if not isinstance(prior, str):
        if not prior or not all(isinstance(model, GemmModel) for model in prior):
            raise InputError(who, f"prior = {prior!r}", "GemmModels, or auto, family-out or none")
        _, blind = choose(device, dtype, shipped_pool(), family_out=True)
        gpus = [model.measured_gpu() for model in prior]
        kin = [gpu for gpu in gpus if gpu.family == family(device)]
        if kin:
            return _Start(near(kin, same_gpu=False), blind)
        return _Start(pooled(gpus, spec_sheet(device, dtype)), blind)
    require_choice(who, "prior", prior, ("auto", "family-out", "none"))
    pool = () if prior == "none" else shipped_pool()
    start = _Start(*choose(device, dtype, pool, family_out=prior != "auto"))
    if prior != "auto":
        return start
    # A similar GPU's model for the same dtype and library predicts this GPU's times better than a
    # model of this GPU for another library, so it comes first.
    shipped = shipped_model(device.name, dtype, resolve_library(device.name, dtype, library))
    if shipped is None:
        shipped = shipped_kin(device, dtype, library)
        if shipped is not None:
            start = replace(start, prior=near([shipped.measured_gpu()], same_gpu=False))
    shipped = shipped or shipped_model(device.name, dtype)
    return start if shipped is None else replace(start, reference=shipped.ensemble)


def shipped_kin(device: DeviceSpec, dtype: str, library: str) -> GemmModel | None:
    """Returns the shipped model of the most similar other GPU in the device's family.

    Only GPUs with a shipped model for this dtype and library count. The most similar GPU is the one
    whose number of SMs is nearest. The result is None if there is no such GPU.
    """
    kin = [gpu for gpu in known_devices() if family(gpu) == family(device)]
    for gpu in sorted(kin, key=lambda gpu: abs(gpu.sm_count - device.sm_count)):
        if gpu.name != device.name:
            shipped = shipped_model(gpu.name, dtype, resolve_library(gpu.name, dtype, library))
            if shipped is not None:
                return shipped
    return None


def _unfitted(
    device: DeviceSpec, dtype: str, machine: Machine, start: _Start, library: str
) -> GemmModel:
    """Returns a model with the prior's mean parameters, no trees and a wide interval."""
    source = start.prior.source
    ensemble = Ensemble(machine, Menu.of(), (Member(start.prior.mean, None),))
    whose = f" with {library}" if libraries_of(device.name, dtype) else ""
    note = f"nobody measured {dtype}{whose} on {device.name}: expected from {source}"
    note += "; the interval is wide"
    interval = IntervalCalibration(1.0, start.blind)
    return GemmModel(device, dtype, ensemble, interval, 0, source, note, library=library)
