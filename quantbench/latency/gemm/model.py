"""Fits a GEMM latency model to a few measured shapes, starting from a prior learned on other GPUs.

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
from quantbench.latency.gemm.inputs import k_as_stored, layout_indices, machine_of, whole_sizes
from quantbench.latency.gemm.member import Member, TrainingRows
from quantbench.latency.gemm.training import (
    FEWEST_FOR_TREES,
    FEWEST_ROWS,
    Effort,
    Known,
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

#: folder of the shipped models
FOLDER = Path(__file__).parent.parent / "models"
MODEL_FORMAT = "quantbench-gemm-model"
MODEL_VERSION = 1
# `from_bytes` checks the time of this shape.
_PROBE = ([128], [4096], [1024])


@dataclass(frozen=True)
class GemmModel:
    """Latency model for GEMMs of one dtype and library on one device.

    library: whose kernels ran (`libraries.LIBRARIES`).
    provenance: origin of the measurements, saved with the model.
    note: caveats of the predictions.
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
        """Fits a model to measured shapes m, n, k and times latency_us, (rows,) each.

        batch: independent products of each row, (rows,) or one number.
        layout: storage of a and b (`workload.Gemm.layout`), of each row or of all.
        library: whose kernels ran.
        prior: "auto" (best shipped parameters, and the residual of the shipped model of this GPU,
            or else of one of its family, in this dtype and library), "family-out" (other GPU
            generations only), "none" (spec sheet only), a model (its parameters and its residual)
            or a sequence of models (their parameters).
        seed: the same rows and seed give the same model.

        Rows above the device's peak are left out; `provenance` has their number.
        Returns the prior, with a note, for fewer than 20 rows. Raises InputError for invalid sizes
        or times, UnsupportedError for a dtype that the device lacks.
        """
        spec = _device(device)
        require_choice("GemmModel.fit", "library", library, LIBRARIES)
        machine = machine_of(spec, dtype)
        m = np.atleast_1d(np.asarray(m))
        sizes = whole_sizes(
            "GemmModel.fit",
            m,
            n,
            k,
            np.broadcast_to(batch, m.shape) if np.ndim(batch) == 0 else batch,
        )
        times = measured_times("GemmModel.fit", latency_us, len(sizes[0]))
        menu = Menu.of(unit(spec, dtype))
        layouts = layout_indices("GemmModel.fit", layout, len(times))
        rows = TrainingRows(sizes[0], sizes[1], sizes[2], sizes[3], layouts, np.log(times))
        if not rows.layouts:
            rows = replace(
                rows, k=k_as_stored(machine, sizes, layouts), layout=np.full(len(rows), -1.0)
            )
        possible = 2.0 * np.prod(sizes, axis=0) <= PEAK_MARGIN * machine.flop_per_us * times
        rows = rows.take(np.flatnonzero(possible))
        start, blind, reference = _start(spec, dtype, prior, library)
        if len(rows) < FEWEST_ROWS:
            bare = _unfitted(spec, dtype, machine, start, blind, library)
            few = f"{len(rows)} rows are too few to fit ({FEWEST_ROWS} are needed): the prior as it stands. "
            return replace(bare, note=few + bare.note)
        ensemble, interval = train(
            machine, menu, rows, start, reference, effort or Effort.of(len(rows)), seed
        )
        note = ""
        if len(rows) < FEWEST_FOR_TREES:
            note = f"{len(rows)} rows: the cost model was fitted, no trees were grown ({FEWEST_FOR_TREES} are needed)"
        told = {} if possible.all() else {"above_peak": int((~possible).sum())}
        return cls(
            spec, dtype, ensemble, interval, len(rows), start.source, note, told, library=library
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

        family_out: whether to exclude measured GPUs of the same generation.
        library: as in `best`; a prior does not depend on it.
        """
        spec = _device(device)
        library = resolve_library(spec.name, dtype, library, "GemmModel.prior")
        machine = machine_of(spec, dtype)
        start, blind = choose(spec, dtype, shipped_pool(), family_out=family_out)
        return _unfitted(spec, dtype, machine, start, blind, library)

    @classmethod
    def best(cls, device: DeviceSpec | str, *, dtype: str = "bf16", library: str = "") -> GemmModel:
        """Returns the shipped model of a device, dtype and library; else the prior.

        library: whose kernels will run, "" for `libraries.default_library`. Raises InputError for
            an unknown one.
        """
        spec = _device(device)
        library = resolve_library(spec.name, dtype, library, "GemmModel.best")
        shipped = shipped_model(spec.name, dtype, library)
        if shipped is not None:
            return shipped
        prior = cls.prior(spec, dtype=dtype, library=library)
        if library not in libraries_of(spec.name, dtype):
            return prior
        why = f"no model of {library}'s {dtype} products on {spec.name} is shipped: quantbench import aiconfigurator "
        why += "reads its table, profile export fits it, and --profile predicts with it"
        return replace(
            prior, note=f"{why}; expected from {prior.prior_source}, the interval is wide"
        )

    def predict(
        self,
        m: npt.ArrayLike,
        n: npt.ArrayLike,
        k: npt.ArrayLike,
        *,
        batch: npt.ArrayLike = 1,
        layout: str | Sequence[str] = "nn",
    ) -> Estimates:
        """Predicts GEMMs m×k times k×n, `batch` of them at once; the sizes broadcast, and the
        result has their common shape.

        layout: as in `fit`, of each row only for one-dimensional sizes; changes alignment, and more
            if several were fitted.

        No prediction is below the time at the device's peak.
        """
        wide = np.broadcast_arrays(np.asarray(m), np.asarray(n), np.asarray(k), np.asarray(batch))
        sizes = whole_sizes("GemmModel.predict", *(w.ravel() for w in wide))
        layouts = layout_indices("GemmModel.predict", layout, len(sizes[0]))
        if not self.layouts:
            m, n, _, batch = sizes
            sizes = (m, n, k_as_stored(self.ensemble.machine, sizes, layouts), batch)
            layouts = np.full(len(layouts), -1.0)
        answer = self.ensemble.raw(sizes[0], sizes[1], sizes[2], sizes[3], layouts)
        peak_us = 2.0 * np.prod(sizes, axis=0) / self.ensemble.machine.flop_per_us
        latency_us = np.maximum(np.exp(answer.log_us), peak_us)
        factor = np.exp(self.interval.half_width(answer.variance))
        machine = self.ensemble.machine
        rows_m, rows_n, rows_k, batches = sizes
        read = machine.element_bytes * (rows_m + rows_n) * rows_k
        memory_us = batches * (read + machine.output_bytes * rows_m * rows_n) / machine.bytes_per_us
        asked, each = wide[0].shape, self.ensemble.menu.each
        columns = (
            column[answer.kernel, 0] for column in (each.block_m, each.block_n, each.split_k)
        )
        return Estimates(
            latency_us=latency_us.reshape(asked),
            low_us=np.maximum(latency_us / factor, peak_us).reshape(asked),
            high_us=(latency_us * factor).reshape(asked),
            waves=answer.waves.astype(np.int64).reshape(asked),
            bound=name_bound(answer.fixed_us, peak_us, memory_us).reshape(asked),
            note=self.note,
            tiles=np.stack(list(columns), axis=-1).astype(np.int64).reshape(*asked, 3),
            beyond=(latency_us / np.exp(answer.physics) - 1).reshape(asked),
        )

    @property
    def batched(self) -> bool:
        """Whether batched products were among the fitted rows."""
        return any(member.batched for member in self.ensemble.members)

    @property
    def layouts(self) -> bool:
        """Whether products of several layouts were among the fitted rows; otherwise it matters for
        alignment only.
        """
        return any(member.layouts for member in self.ensemble.members)

    @property
    def in_waves(self) -> bool:
        """Whether, by the fitted parameters, GEMMs run in waves, so that a partial last wave leaves
        SMs idle.
        """
        return runs_in_waves([member.parameters for member in self.ensemble.members])

    def predict_gemms(self, gemms: Sequence[Gemm]) -> list[Estimate]:
        """Predicts GEMMs of the model's dtype, in order."""
        for gemm in gemms:
            if gemm.dtype != self.dtype:
                raise InputError(
                    "predict_gemms",
                    f"{gemm}",
                    f"products of {self.dtype}, which the model was fitted to",
                )
        found = self.predict(
            *([getattr(g, size) for g in gemms] for size in "mnk"),
            batch=[g.batch for g in gemms],
            layout=[g.layout for g in gemms],
        )
        return list(found)

    def known(self) -> Known:
        """Returns the mean cost model parameters, as input to the priors of other GPUs."""
        vector = np.mean([member.parameters for member in self.ensemble.members], axis=0)
        return Known(self.device.name, family(self.device), self.dtype, vector, self.rows, "", 0.0)

    def to_bytes(self) -> bytes:
        """Returns the content of the model's file."""
        ensemble, arrays = files.ensemble_to_parts(self.ensemble)
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
        """Inverse of `to_bytes`. Raises InputError for another format or version, StoreError for a
        broken model.
        """
        who = "GemmModel.load"
        data, arrays = unpack(who, content, MODEL_FORMAT, MODEL_VERSION)
        try:
            made = cls(
                device=device_from_json(data["device"]),
                dtype=require_choice(who, "dtype", data["dtype"], GEMM_DTYPES),
                ensemble=files.ensemble_from_parts(data["ensemble"], arrays),
                interval=IntervalCalibration(
                    float(data["interval"]["factor"]), float(data["interval"]["floor"])
                ),
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
            raise StoreError(
                who, f"a time of {us.latency_us[0]} µs", "a finite one within its interval"
            )
        return made

    def save(self, path: str | Path) -> None:
        """Writes a file, at once. Raises StoreError if it cannot."""
        write_file("GemmModel.save", Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> GemmModel:
        """Reads what `save` wrote. Raises InputError or StoreError if it is no such file."""
        try:
            content = read_bytes(path)
        except OSError as error:
            raise StoreError(
                "GemmModel.load", f"{path} ({reason(error)})", "a file that GemmModel.save wrote"
            ) from error
        return cls.from_bytes(content)


def file_name(slug: str, dtype: str, library: str) -> str:
    """Returns the name of a shipped model's file.

    >>> file_name("h100-sxm5-80gb", "fp8", "vllm")
    'h100-sxm5-80gb-fp8-vllm.gemm'
    """
    return f"{slug}-{dtype}-{library}.gemm"


def shipped_model(slug: str, dtype: str, library: str = "") -> GemmModel | None:
    """Returns the packaged model of a device, dtype and library ("": the default one), None if
    there is none.

    A card with the chip of a measured one has its model, with the rate of its own memory.
    """
    return _shipped_model(slug, dtype, library or default_library(slug, dtype))


@cache
def _shipped_model(slug: str, dtype: str, library: str) -> GemmModel | None:
    file = FOLDER / file_name(slug, dtype, library)
    if file.is_file():
        return GemmModel.load(file)
    twins = (one for one in same_chip(slug) if (FOLDER / file_name(one, dtype, library)).is_file())
    twin = next(twins, None)
    if twin is None:
        return None
    measured = _shipped_model(twin, dtype, library)
    assert measured is not None
    device = lookup(slug)
    ensemble = replace(measured.ensemble, machine=machine_of(device, dtype))
    note = f"products on {slug}: as measured on {twin}, the same chip"
    return replace(measured, device=device, ensemble=ensemble, note=note)


def _device(device: DeviceSpec | str) -> DeviceSpec:
    return lookup(device) if isinstance(device, str) else device


def _start(
    device: DeviceSpec, dtype: str, prior: str | GemmModel | Sequence[GemmModel], library: str
) -> tuple[Prior, float, Ensemble | None]:
    """Returns the requested prior, the half-width of its interval (log time) and a reference
    model.
    """
    if isinstance(prior, GemmModel):
        _, blind = choose(device, dtype, shipped_pool(), family_out=True)
        return near([prior.known()], same_gpu=False), blind, prior.ensemble
    if not isinstance(prior, str):
        if not prior or not all(isinstance(model, GemmModel) for model in prior):
            raise InputError(
                "GemmModel.fit", f"prior = {prior!r}", "GemmModels, or auto, family-out or none"
            )
        known = [model.known() for model in prior]
        kin = [k for k in known if k.family == family(device)]
        _, blind = choose(device, dtype, shipped_pool(), family_out=True)
        return (
            (near(kin, same_gpu=False) if kin else pooled(known, spec_sheet(device, dtype))),
            blind,
            None,
        )
    require_choice("GemmModel.fit", "prior", prior, ("auto", "family-out", "none"))
    if prior == "none":
        start, blind = choose(device, dtype, (), family_out=True)
        return start, blind, None
    start, blind = choose(device, dtype, shipped_pool(), family_out=prior == "family-out")
    if prior == "family-out":
        return start, blind, None
    # A GPU's products in another format, or by another library, say little about these; a like
    # GPU's say much.
    shipped = shipped_model(device.name, dtype, resolve_library(device.name, dtype, library))
    if shipped is None and (shipped := shipped_kin(device, dtype, library)) is not None:
        start = near([shipped.known()], same_gpu=False)
    shipped = shipped or shipped_model(device.name, dtype)
    return start, blind, None if shipped is None else shipped.ensemble


def shipped_kin(device: DeviceSpec, dtype: str, library: str) -> GemmModel | None:
    """Returns the shipped model of another GPU of the family, that with the nearest number of SMs;
    None without one.
    """
    others = [d for d in known_devices() if family(d) == family(device) and d.name != device.name]
    for other in sorted(others, key=lambda d: abs(d.sm_count - device.sm_count)):
        shipped = shipped_model(other.name, dtype, resolve_library(other.name, dtype, library))
        if shipped is not None:
            return shipped
    return None


def _unfitted(
    device: DeviceSpec, dtype: str, machine: Machine, start: Prior, blind: float, library: str
) -> GemmModel:
    member = Member(start.mean, None)
    ensemble = Ensemble(machine, Menu.of(), (member,))
    whose = f" with {library}" if libraries_of(device.name, dtype) else ""
    note = f"nobody measured {dtype}{whose} on {device.name}: expected from {start.source}; the interval is wide"
    interval = IntervalCalibration(1.0, blind)
    return GemmModel(device, dtype, ensemble, interval, 0, start.source, note, library=library)
