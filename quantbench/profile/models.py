"""Defines the models of a profile, which predict unmeasured shapes, and converts them to JSON.

`models_from_json` also checks that loaded models give sound times for probe shapes.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.estimate import Estimates
from quantbench.latency.gemm.model import GemmModel, shipped_model
from quantbench.latency.softmax import SoftmaxModel
from quantbench.store.typed import Json
from quantbench.units import percent
from quantbench.workload import Attention, Softmax

_WHO = "profile model of products"
# m, n and k of probe shapes. A loaded GEMM model must predict finite times above 0 for all of them.
_PRODUCT_PROBES = np.array(
    [
        (1, 1, 64, 4096, 8192, 32768, 77),
        (1, 4096, 64, 4096, 28672, 131072, 31),
        (1, 4096, 64, 4096, 4096, 8192, 9),
    ],
    dtype=np.float64,
)


# Values of m, n and k over which the typical interval of a GEMM model is computed.
_PROBED = (2 ** np.arange(14)[:, None, None], 2 ** np.arange(8, 15)[:, None], 2 ** np.arange(8, 15))


def interval_words(model: GemmModel) -> str:
    """Returns a GEMM model's typical 90 % interval, in words."""
    probed = model.predict(*_PROBED)
    middle = float(np.median(probed.high_us / probed.latency_us)) - 1
    return f"90 % of shapes within ±{percent(middle)}"


def _product_to_json(model: GemmModel) -> Json:
    """Returns a GEMM model as a JSON object.

    The field `model` has the model's file in base64, or None for a model that quantbench ships.
    """
    shipped = model is shipped_model(model.device.name, model.dtype, model.library)
    return {
        "dtype": model.dtype,
        "library": model.library,
        "rows": model.rows,
        "note": model.note,
        "provenance": {**model.provenance, "prior": model.prior_source},
        "model": None if shipped else b64encode(model.to_bytes()).decode("ascii"),
    }


def _product_from_json(data: Any, device: DeviceSpec) -> GemmModel:
    """Loads a GEMM model; the inverse of `_product_to_json`.

    Raises InputError if the data is invalid or is of another device.
    """
    with _sound(_WHO):
        if data["model"] is None:
            made = shipped_model(device.name, data["dtype"], data["library"])
            if made is None:
                what = (
                    f"the shipped model of {data['library']}'s {data['dtype']} products "
                    f"on {device.name}"
                )
                raise InputError(_WHO, what, "a model that quantbench ships")
        else:
            made = GemmModel.from_bytes(b64decode(data["model"], validate=True))
        declared = (data["dtype"], data["library"], data["rows"], data["note"])
        if (made.dtype, made.library, made.rows, made.note) != declared or made.device != device:
            raise InputError(
                _WHO,
                f"a model of {made.dtype} on {made.device.name}",
                f"one of {declared[0]} on {device.name}",
            )
        _require_times(_WHO, made.predict(*_PRODUCT_PROBES))
        return made


@contextmanager
def _sound(who: str) -> Iterator[None]:
    """Turns the errors that malformed data causes into InputError, and mutes numpy's warnings.

    who: the operation for error messages.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except InputError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        OverflowError,
        AttributeError,
        StoreError,
    ) as error:
        raise InputError(who, f"a broken part ({error!r})"[:160], "what an export wrote") from None


def _require_times(who: str, found: Estimates) -> None:
    """Raises InputError if a time or an interval's limit is not finite or not above 0."""
    every = np.concatenate([found.low_us, found.latency_us, found.high_us])
    if not (np.isfinite(every) & (every > 0)).all():
        raise InputError(who, f"a time of {every.min():g} µs", "finite times above 0")


_KINDS = ("gemm", "softmax", "attention")
# Probe shapes. A loaded model must predict finite times above 0 for all of them.
_SOFTMAX_PROBES = (Softmax(64, 2048, 2048), Softmax(1, 1, 1))
_ATTENTION_PROBES = (Attention(1, 32, 2048, 2048, 128), Attention(8, 8, 64, 64, 64))


@dataclass(frozen=True)
class Models:
    """Models for shapes that were not measured.

    gemm: one model per dtype and library. For each dtype, the model of the library with the most
        rows comes first.
    softmax, attention: one model each, or None if the profile has no such model.
    softmax_fused: True if the softmax model describes one fused kernel, False if it describes
        several kernels.
    """

    gemm: tuple[GemmModel, ...] = ()
    softmax: SoftmaxModel | None = None
    softmax_fused: bool = True
    attention: AttentionModel | None = None

    def product(self, dtype: str, library: str = "") -> GemmModel | None:
        """Returns the GEMM model for a dtype and library, or None if no model has the dtype.

        library: preferred library. Without a model for it, or with "", the dtype's first model is
            returned.
        """
        of_dtype = [model for model in self.gemm if model.dtype == dtype]
        for model in of_dtype:
            if library and model.library == library:
                return model
        return next(iter(of_dtype), None)


def models_to_json(models: Models) -> Json:
    """Returns the models as a JSON object with one list per kind."""
    found: dict[str, list[Json]] = {
        "gemm": [_product_to_json(model) for model in models.gemm],
        "softmax": [],
        "attention": [],
    }
    if models.softmax is not None:
        found["softmax"].append({**models.softmax.to_json(), "fused": models.softmax_fused})
    if models.attention is not None:
        found["attention"].append(models.attention.to_json())
    return found


def models_from_json(data: Mapping[str, Sequence[Json]], device: DeviceSpec) -> Models:
    """Loads the models; the inverse of `models_to_json`.

    data: lists of JSON objects by kind.

    Raises InputError if the data is invalid or is of another device.
    """
    if set(data) != set(_KINDS):
        raise InputError(
            "profile models", ", ".join(data)[:80] or "none", "lists of " + ", ".join(_KINDS)
        )
    if len(data["softmax"]) > 1 or len(data["attention"]) > 1:
        raise InputError(
            "profile models", "several models of softmax or attention", "one at most of each"
        )
    found = Models(tuple(_product_from_json(one, device) for one in data["gemm"]))
    if len({(model.dtype, model.library) for model in found.gemm}) < len(found.gemm):
        raise InputError(
            "profile models", "two models of products of one dtype and library", "one of each"
        )
    for one in data["softmax"]:
        softmax, fused = _softmax(one, device)
        found = replace(found, softmax=softmax, softmax_fused=fused)
    for one in data["attention"]:
        found = replace(found, attention=_attention(one, device))
    return found


def _softmax(data: Any, device: DeviceSpec) -> tuple[SoftmaxModel, bool]:
    """Returns the softmax model, and whether it describes one fused kernel.

    Raises InputError if the data is invalid or describes another device.
    """
    who = "profile model of softmax"
    with _sound(who):
        fused = data["fused"]
        model = SoftmaxModel.from_json(data, device)
        if not isinstance(fused, bool) or not isinstance(model.note, str):
            raise InputError(
                who, f"fused = {fused!r}, note {model.note!r}"[:100], "true or false, and a text"
            )
        _require_times(who, model.predict(_SOFTMAX_PROBES))
        return model, fused


def _attention(data: Any, device: DeviceSpec) -> AttentionModel:
    """Returns the attention model.

    Raises InputError if the data is invalid or describes another device.
    """
    who = "profile model of attention"
    with _sound(who):
        model = AttentionModel.from_json(data, device)
        if model.dtype not in ("fp16", "bf16", "fp32") or not isinstance(model.note, str):
            raise InputError(who, f"dtype = {model.dtype!r}"[:100], "fp16, bf16 or fp32")
        # On a GPU without bf16, a bf16 model predicts fp16.
        dtype = model.dtype if device.peak(model.dtype) else "fp16"
        probes = [replace(probe, dtype=dtype) for probe in _ATTENTION_PROBES]
        _require_times(who, model.predict(probes))
        return model
