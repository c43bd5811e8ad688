"""Holds the fitted models of a profile (distilled GEMM, softmax, attention) and converts them to JSON and back.

Entry points: `Models`, `ProductModel`, `models_to_json`, `models_from_json`. Used by `profile.profile`, `fit`,
`sources` and `tools.shelf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError, require_choice
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gemm.cost_model import Machine
from quantbench.latency.gemm.distilled import WATCHED, FastGemm
from quantbench.latency.gemm.files import fast_from_parts, fast_to_parts, require_sound_fast, text_arrays
from quantbench.latency.libraries import LIBRARIES
from quantbench.latency.softmax import SoftmaxModel
from quantbench.store.typed import Json
from quantbench.workload import Attention, Softmax
from quantbench.workload.dtypes import GEMM_DTYPES

FloatArray = npt.NDArray[np.float64]

_WHO, _EXPECTED = "profile model of products", "what an export wrote"
_NUM_FEATURES = 4 + len(WATCHED) + 2
# m, n, k of probe shapes: a loaded model must predict a finite time for each.
_PRODUCT_PROBES = tuple(
    np.array(sizes, dtype=np.float64)
    for sizes in (
        (1, 1, 64, 4096, 8192, 32768, 77),
        (1, 4096, 64, 4096, 28672, 131072, 31),
        (1, 4096, 64, 4096, 4096, 8192, 9),
    )
)


@dataclass(frozen=True)
class ProductModel:
    """Distilled GEMM model of one dtype and library, with its interval.

    rows: number of measured rows that the model was fitted to.
    log_us, half: (points,) log of predicted µs, ascending, and half-width of the 90 % interval there, log time.
    """

    dtype: str
    fast: FastGemm
    rows: int
    log_us: tuple[float, ...]
    half: tuple[float, ...]
    note: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    library: str = "torch"

    def half_width(self, latency_us: FloatArray) -> FloatArray:
        """Returns the half-width of the 90 % interval at predicted times, log time, (shapes,)."""
        return np.interp(np.log(latency_us), self.log_us, self.half)

    def to_json(self) -> Json:
        return {
            "dtype": self.dtype, "library": self.library, "rows": self.rows, "note": self.note,
            "provenance": dict(self.provenance),
            "log_us": list(self.log_us), "half_width": list(self.half),
            "distilled": text_arrays(fast_to_parts(self.fast)),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Any, device: DeviceSpec) -> ProductModel:
        """Inverse of `to_json`. Raises InputError if the data is invalid or for another device."""
        with _sound(_WHO):
            dtype = require_choice(_WHO, "dtype", data["dtype"], GEMM_DTYPES)
            library = require_choice(_WHO, "library", data["library"], LIBRARIES)
            fast = fast_from_parts(data["distilled"])
            log_us, half = (tuple(float(x) for x in data[name]) for name in ("log_us", "half_width"))
            made = cls(dtype, fast, data["rows"], log_us, half, data["note"], data["provenance"], library)
            _check(made, device)
            return made


@contextmanager
def _sound(who: str) -> Iterator[None]:
    """Turns any error from malformed data into an InputError; mutes numpy's warnings."""
    try:
        with np.errstate(all="ignore"):
            yield
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError, StoreError) as error:
        raise InputError(who, f"a broken part ({error!r})"[:160], _EXPECTED) from None


def _require_times(who: str, *times_us: FloatArray) -> None:
    every = np.concatenate(times_us)
    if not (np.isfinite(every) & (every > 0)).all():
        raise InputError(who, f"a time of {every.min():g} µs", "finite times above 0")


def _check(model: ProductModel, device: DeviceSpec) -> None:
    fast = model.fast
    if device.peak(model.dtype) is None or fast.machine != Machine.of(device, model.dtype):
        raise InputError(_WHO, f"a model of another device than {device.name}", "one of the profile's own")
    log_us, half = np.array(model.log_us), np.array(model.half)
    if not (
        type(model.rows) is int and model.rows >= 0
        and isinstance(model.note, str) and isinstance(model.provenance, dict)
        and len(log_us) == len(half) > 0 and np.isfinite(log_us).all() and (np.diff(log_us) > 0).all()
        and ((half > 0) & (half < 5)).all()
        and int(fast.forest.feature.max()) < _NUM_FEATURES and 0 <= fast.most < 5
    ):  # fmt: skip
        raise InputError(_WHO, f"{model.rows!r} rows, {len(log_us)} times for {len(half)} half-widths", _EXPECTED)
    require_sound_fast(fast)
    _require_times(_WHO, fast.predict_us(*_PRODUCT_PROBES))


_KINDS = ("gemm", "softmax", "attention")
_SOFTMAX_PROBES = (Softmax(64, 2048, 2048), Softmax(1, 1, 1))
_ATTENTION_PROBES = (Attention(1, 32, 2048, 2048, 128), Attention(8, 8, 64, 64, 64))


@dataclass(frozen=True)
class Models:
    """Models for shapes that were not measured.

    gemm: one model per dtype and library; of each dtype, that with the most rows first.
    softmax, attention: None if the device has no such model.
    softmax_fused: True if the softmax model describes one fused kernel, False for the unfused fallback.
    """

    gemm: tuple[ProductModel, ...] = ()
    softmax: SoftmaxModel | None = None
    softmax_fused: bool = True
    attention: AttentionModel | None = None

    def product(self, dtype: str, library: str = "") -> ProductModel | None:
        """Returns the model of a dtype and library ("": the first), None if there is none."""
        return next((model for model in self.gemm if model.dtype == dtype and library in ("", model.library)), None)


def models_to_json(models: Models) -> Json:
    """Returns the models as a JSON object with one list per kind."""
    softmax = None if models.softmax is None else {**models.softmax.to_json(), "fused": models.softmax_fused}
    return {
        "gemm": [model.to_json() for model in models.gemm],
        "softmax": [] if softmax is None else [softmax],
        "attention": [] if models.attention is None else [models.attention.to_json()],
    }


def models_from_json(data: Mapping[str, Sequence[Json]], device: DeviceSpec) -> Models:
    """Inverse of `models_to_json`. Raises InputError if the data is invalid or for another device."""
    if set(data) != set(_KINDS):
        raise InputError("profile models", ", ".join(data)[:80] or "none", "lists of " + ", ".join(_KINDS))
    if len(data["softmax"]) > 1 or len(data["attention"]) > 1:
        raise InputError("profile models", "several models of softmax or attention", "one at most of each")
    gemm = tuple(ProductModel.from_json(one, device) for one in data["gemm"])
    if len({(model.dtype, model.library) for model in gemm}) < len(gemm):
        raise InputError("profile models", "two models of products of one dtype and library", "one of each")
    softmax, fused = _softmax(data["softmax"][0], device) if data["softmax"] else (None, True)
    return Models(gemm, softmax, fused, _attention(data["attention"][0], device) if data["attention"] else None)


def _softmax(data: Any, device: DeviceSpec) -> tuple[SoftmaxModel, bool]:
    who = "profile model of softmax"
    with _sound(who):
        fused = data["fused"]
        model = SoftmaxModel.from_json(data, device)
        if not isinstance(fused, bool) or not isinstance(model.note, str):
            raise InputError(who, f"fused = {fused!r}, note {model.note!r}"[:100], "true or false, and a text")
        found = model.predict(_SOFTMAX_PROBES)
        _require_times(who, found.low_us, found.latency_us, found.high_us)
        return model, fused


def _attention(data: Any, device: DeviceSpec) -> AttentionModel:
    who = "profile model of attention"
    with _sound(who):
        model = AttentionModel.from_json(data, device)
        if model.dtype not in ("fp16", "bf16", "fp32") or not isinstance(model.note, str):
            raise InputError(who, f"dtype = {model.dtype!r}"[:100], "fp16, bf16 or fp32")
        # A model of bf16 answers for fp16 on a GPU that has no bf16.
        dtype = model.dtype if device.peak(model.dtype) else "fp16"
        found = model.predict([replace(probe, dtype=dtype) for probe in _ATTENTION_PROBES])
        _require_times(who, found.low_us, found.latency_us, found.high_us)
        return model
