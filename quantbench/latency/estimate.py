"""The answer of every latency model and profile, a time with its interval, and what all models need to give one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.launch import Launch

FloatArray = npt.NDArray[np.float64]

BOUNDS = ("compute", "memory", "latency")


@dataclass(frozen=True)
class Estimate:
    """The time of one run of an op.

    latency_us: the expected time.
    low_us, high_us: its 90 % interval; of a measured shape, the interval of its median.
    source: measured, interpolated (between two measured shapes) or modelled.
    bound: what takes the time: compute, memory, or latency (launching and filling); "" where it is not known.
    outside: whether the shape lies outside the range that was measured.
    note: what to know of the model, in words.
    launch: the kernel that the model selects, where it names one.
    waves: waves of a product's blocks; None where they cannot be stated (`quantization.credible_waves`).
    unmeasured: why no measurement of this kind on this GPU supports the time; "" where one does.
    """

    latency_us: float
    low_us: float
    high_us: float
    source: str = "modelled"
    bound: str = ""
    outside: bool = False
    note: str = ""
    launch: Launch | None = None
    waves: int | None = None
    unmeasured: str = ""

    def times(self, factor: float) -> Estimate:
        """The same with the time and its interval multiplied."""
        return replace(
            self, latency_us=factor * self.latency_us, low_us=factor * self.low_us, high_us=factor * self.high_us
        )


@dataclass(frozen=True)
class Estimates:
    """Many estimates; arrays of (n,). waves: waves of blocks that the model believes in. note: what to know of all of
    them, in words ("" when there is nothing)."""

    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    waves: FloatArray
    bound: npt.NDArray[np.str_]
    source: str = "modelled"
    note: str = ""

    def __len__(self) -> int:
        return len(self.latency_us)

    def __getitem__(self, row: int) -> Estimate:
        return Estimate(
            float(self.latency_us[row]), float(self.low_us[row]), float(self.high_us[row]), self.source,
            str(self.bound[row]), note=self.note,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Estimate]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class Parameter:
    """A constant of a cost model, with the mean and standard deviation that are expected before other GPUs are known.

    meaning: in words, with its scale: a logarithm, a logit or the plain number.
    """

    name: str
    meaning: str
    mean: float
    sd: float


@dataclass(frozen=True)
class IntervalCalibration:
    """Half-width of a 90 % interval in log time: factor · √(variance + floor²), with the model's own variance."""

    factor: float
    floor: float

    def half_width(self, variance: FloatArray) -> FloatArray:
        """(n,) log time, for the variance of the prediction, (n,)."""
        return np.asarray(self.factor * np.sqrt(variance + self.floor**2))


def require_format(who: str, data: Mapping[str, Any], model_format: str, version: int, device: DeviceSpec) -> None:
    """Raise InputError unless a model's JSON is of this format, version and device."""
    if data.get("format") != model_format or data.get("version") != version:
        raise InputError(
            who, f"{data.get('format')} version {data.get('version')}", f"{model_format} version {version}"
        )
    if data.get("device") != device.name:
        raise InputError(who, f"a model of {data.get('device')}", f"one of {device.name}")


def bounded(
    latency_us: FloatArray, half_below: FloatArray, half_above: FloatArray, fastest_us: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(latency, low, high) from half-widths in log time, none of them faster than the hardware's peak allows."""
    latency_us = np.maximum(latency_us, fastest_us)
    low_us = np.maximum(latency_us * np.exp(-half_below), fastest_us)
    return latency_us, low_us, latency_us * np.exp(half_above)


def name_bound(launch_us: FloatArray, compute_us: FloatArray, memory_us: FloatArray) -> npt.NDArray[np.str_]:
    """The largest of the three parts, by name; all (n,)."""
    parts = np.stack([compute_us, memory_us, launch_us])
    return np.asarray(np.array(BOUNDS)[np.argmax(parts, axis=0)], dtype=np.str_)
