"""The fitted models of a profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.attention import AttentionModel
from quantbench.latency.gaussian_process import GaussianProcess
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.product_model import ProductModel
from quantbench.store.typed import Json
from quantbench.workload import Attention, Softmax

_KINDS = ("gemm", "softmax", "attention")
_PROBES = {
    "softmax": [Softmax(64, 2048, 2048), Softmax(1, 1, 1)],
    "attention": [Attention(1, 32, 2048, 2048, 128), Attention(8, 8, 64, 64, 64)],
}


@dataclass(frozen=True)
class Models:
    """Models for shapes that were not measured. gemm: one per number format. softmax, attention: None if the device has
    no such model. softmax_fused: True if the softmax model describes one fused kernel, False for the three-kernel
    fallback."""

    gemm: tuple[ProductModel, ...] = ()
    softmax: SoftmaxModel | None = None
    softmax_fused: bool = True
    attention: AttentionModel | None = None

    def product(self, dtype: str) -> ProductModel | None:
        """The model of a format."""
        return next((model for model in self.gemm if model.dtype == dtype), None)


def models_to_json(models: Models) -> Json:
    """As a JSON object: a list by kind."""
    softmax = None if models.softmax is None else {**models.softmax.to_json(), "fused": models.softmax_fused}
    return {
        "gemm": [model.to_json() for model in models.gemm],
        "softmax": [] if softmax is None else [softmax],
        "attention": [] if models.attention is None else [models.attention.to_json()],
    }


def models_from_json(data: object, device: DeviceSpec) -> Models:
    """What `models_to_json` wrote for this device. Raises InputError for anything else."""
    if not isinstance(data, dict) or set(data) != set(_KINDS) or not all(isinstance(v, list) for v in data.values()):
        raise InputError("profile models", repr(data)[:80], "lists of " + ", ".join(_KINDS))
    for kind in ("softmax", "attention"):
        if len(data[kind]) > 1:
            raise InputError("profile models", f"{len(data[kind])} models of {kind}", "one at most")
    gemm = tuple(ProductModel.from_json(one, device) for one in data["gemm"])
    if len({model.dtype for model in gemm}) < len(gemm):
        raise InputError("profile models", "two models of products of one dtype", "one of each")
    softmax, fused, attention = None, True, None
    for one in data["softmax"]:
        softmax, fused = _softmax(one, device)
    for one in data["attention"]:
        attention = _attention(one, device)
    return Models(gemm, softmax, fused, attention)


def _softmax(data: Any, device: DeviceSpec) -> tuple[SoftmaxModel, bool]:
    who = "profile model of softmax"
    try:
        fused = data["fused"]
        model = SoftmaxModel.from_json(data, device)
        if not isinstance(fused, bool) or not isinstance(model.note, str):
            raise InputError(who, f"fused = {fused!r}, note {model.note!r}"[:100], "true or false, and a text")
        with np.errstate(all="ignore"):
            _check_times(who, model.predict(_PROBES["softmax"]))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _broken(who, error) from None
    return model, fused


def _attention(data: Any, device: DeviceSpec) -> AttentionModel:
    who = "profile model of attention"
    try:
        model = AttentionModel.from_json(data, device)
        if model.dtype not in ("fp16", "bf16", "fp32") or not isinstance(model.note, str):
            raise InputError(who, f"dtype = {model.dtype!r}"[:100], "fp16, bf16 or fp32")
        _check_learner(who, model.learner)
        # The physics alone: the learner's matrices are worth their time only when it is asked.
        with np.errstate(all="ignore"):
            _check_times(who, replace(model, learner=None).predict(_PROBES["attention"]))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise _broken(who, error) from None
    return model


def _check_learner(who: str, learner: GaussianProcess | None) -> None:
    if learner is None:
        return
    rows, features = learner.features.shape if learner.features.ndim == 2 else (0, 0)
    vectors = (learner.shift, learner.spread, learner.length_scales)
    numbers = np.concatenate([x.ravel() for x in (learner.features, learner.targets, *vectors)])
    scales = (learner.amplitude, learner.noise, *learner.spread.tolist(), *learner.length_scales.tolist())
    if (
        not rows or learner.targets.shape != (rows,) or any(x.shape != (features,) for x in vectors)
        or not np.isfinite(numbers).all() or not all(0 < x < float("inf") for x in scales)
        or not isfinite(learner.centre)
    ):  # fmt: skip
        raise InputError(who, "a learner of odd shapes or numbers", "what an export wrote")


def _broken(who: str, error: Exception) -> InputError:
    if isinstance(error, InputError):
        return error
    return InputError(who, f"a broken part ({error!r})"[:160], "what an export wrote")


def _check_times(who: str, found: Any) -> None:
    times_us = np.concatenate([found.low_us, found.latency_us, found.high_us])
    if not (np.isfinite(times_us) & (times_us > 0)).all():
        raise InputError(who, f"a time of {times_us.min():g} µs", "finite times above 0")
