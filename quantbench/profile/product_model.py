"""The model of products that a profile carries: the distilled one, which planners can ask by the million."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, StoreError, require_choice
from quantbench.latency.gemm_fast import WATCHED, FastGemm, fast_from_json, fast_to_json
from quantbench.latency.gemm_form import Machine
from quantbench.latency.gemm_sound import require_sound_fast
from quantbench.store.typed import Json
from quantbench.workload.dtypes import GEMM_DTYPES

FloatArray = npt.NDArray[np.float64]

_WHO = "profile model of products"
_NUM_FEATURES = 4 + len(WATCHED) + 2
# Shapes that every model must give a time for: m, n and k of ends and middle of what is asked.
_PROBES = tuple(
    np.array(sizes, dtype=np.float64)
    for sizes in (
        (1, 1, 64, 4096, 8192, 32768, 77),
        (1, 4096, 64, 4096, 28672, 131072, 31),
        (1, 4096, 64, 4096, 4096, 8192, 9),
    )
)


@dataclass(frozen=True)
class ProductModel:
    """Products of one number format. rows: measured rows that the model was fitted to (0: none). log_us, half: points
    of the half-width of the 90 % interval (log time) over the logarithm of the predicted time. note: what to know of
    it, in words. provenance: of the model, for people."""

    dtype: str
    fast: FastGemm
    rows: int
    log_us: tuple[float, ...]
    half: tuple[float, ...]
    note: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def half_width(self, latency_us: FloatArray) -> FloatArray:
        """Half-width of the 90 % interval, log time, (shapes,)."""
        return np.interp(np.log(latency_us), self.log_us, self.half)

    def half_width_of(self, latency_us: float) -> float:
        """Of one predicted time: as `half_width`."""
        x = log(latency_us)
        above = bisect_left(self.log_us, x)
        if above == 0:
            return self.half[0]
        if above == len(self.half):
            return self.half[-1]
        left, right = self.log_us[above - 1], self.log_us[above]
        return self.half[above - 1] + (self.half[above] - self.half[above - 1]) * (x - left) / (right - left)

    def to_json(self) -> Json:
        """As a JSON object."""
        return {
            "dtype": self.dtype, "rows": self.rows, "note": self.note, "provenance": dict(self.provenance),
            "log_us": list(self.log_us), "half_width": list(self.half), "distilled": fast_to_json(self.fast),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object, device: DeviceSpec) -> ProductModel:
        """What `to_json` wrote for this device. Raises InputError for anything else, sound or not."""
        try:
            return cls._from_json(data, device)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError, StoreError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(_WHO, f"a broken part ({error!r})"[:160], "what an export wrote") from None

    @classmethod
    def _from_json(cls, data: Any, device: DeviceSpec) -> ProductModel:
        dtype = require_choice(_WHO, "dtype", data["dtype"], GEMM_DTYPES)
        fast = fast_from_json(data["distilled"])
        log_us, half = (tuple(float(x) for x in data[name]) for name in ("log_us", "half_width"))
        made = cls(dtype, fast, data["rows"], log_us, half, data["note"], data["provenance"])
        _check(made, device)
        return made


def _check(model: ProductModel, device: DeviceSpec) -> None:
    fast = model.fast
    if type(model.rows) is not int or model.rows < 0 or not isinstance(model.note, str):
        raise InputError(_WHO, f"rows = {model.rows!r}, note {model.note!r}"[:100], "a count, and a text")
    if not isinstance(model.provenance, dict):
        raise InputError(_WHO, f"provenance {model.provenance!r}"[:100], "an object")
    if device.peak(model.dtype) is None or fast.machine != Machine.of(device, model.dtype):
        raise InputError(_WHO, f"a model of another device than {device.name}", "one of the profile's own")
    log_us, half = np.array(model.log_us), np.array(model.half)
    if len(log_us) != len(half) or not len(half) or not (np.diff(log_us) > 0).all() or not np.isfinite(log_us).all():
        raise InputError(_WHO, f"{len(log_us)} times for {len(half)} half-widths", "as many, times ascending")
    if not ((half > 0) & (half < 5)).all():
        raise InputError(_WHO, f"half-widths from {half.min():g} to {half.max():g}", "from 0 to 5, log time")
    require_sound_fast(fast)
    if int(fast.forest.feature.max()) >= _NUM_FEATURES or not 0 <= fast.most < 5:
        raise InputError(_WHO, "trees of other features or corrections", "what an export wrote")
    with np.errstate(all="ignore"):
        times_us = fast.predict_us(*_PROBES)
    if not (np.isfinite(times_us) & (times_us > 0)).all():
        raise InputError(_WHO, f"a time of {times_us.min():g} µs", "finite times above 0")
