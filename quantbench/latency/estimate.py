"""Defines the estimates that latency models return, and calibrates their 90 % intervals.

Times are in µs. Half-widths of intervals are in log time, so an interval spans a factor in each
direction. The module also contains checks that all models share: of measured times, and of the
format of stored models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.autodiff import FloatArray
from quantbench.launch import Launch, Tile

BOUNDS = ("compute", "memory", "latency")


@dataclass(frozen=True)
class Estimate:
    """Latency of one run of an op, with its 90 % interval.

    latency_us: expected time.
    low_us, high_us: 90 % interval of the time. For a measured shape, this is the interval of the
        median time.
    source: measured, interpolated (between two measured shapes) or modelled.
    bound: dominant part of the time: compute, memory, or latency (launch and pipeline fill); "" if
        it is unknown.
    outside: whether the shape is outside the measured range.
    note: source and caveats of the model's predictions.
    launch: kernel that the model selected; None if the model selects no kernel.
    waves: number of waves of the GEMM's blocks; None if it cannot be determined
        (`quantization.credible_waves`).
    unmeasured: why no measurement on this GPU supports the time; "" if a measurement does.
    format: dtype, layout or mask, direction and provider of the profile's times; "" if a model made
        the estimate.
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
    format: str = ""

    def scaled(self, factor: float) -> Estimate:
        """Returns this estimate with the time and its interval multiplied by `factor`."""
        return replace(
            self,
            latency_us=factor * self.latency_us,
            low_us=factor * self.low_us,
            high_us=factor * self.high_us,
        )


@dataclass(frozen=True)
class Estimates:
    """Estimates of many workloads as columns, (n,) or in the shape of the given sizes.

    `profile.answers.ProfileEstimates` is the counterpart for profiles.

    waves: modelled number of waves of blocks.
    note: caveats that apply to all estimates.
    tiles: (…, 3), block_m, block_n and split_k of the selected kernels; None except for GEMMs.
    beyond: predicted time over the cost model's time, minus 1; None except for GEMMs.
    """

    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    waves: npt.NDArray[Any]
    bound: npt.NDArray[np.str_]
    source: str = "modelled"
    note: str = ""
    tiles: npt.NDArray[np.int64] | None = None
    beyond: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.latency_us)

    def __getitem__(self, row: int) -> Estimate:
        launch = None
        waves = None
        if self.tiles is not None:
            block_m, block_n, split_k = self.tiles[row].tolist()
            tile = Tile(block_m, block_n, split_k=split_k)
            launch = Launch(kernel=f"modelled {tile}", tile=tile)
            waves = int(self.waves[row])
        return Estimate(
            float(self.latency_us[row]),
            float(self.low_us[row]),
            float(self.high_us[row]),
            self.source,
            str(self.bound[row]),
            note=self.note,
            launch=launch,
            waves=waves,
        )

    def __iter__(self) -> Iterator[Estimate]:
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True)
class Parameter:
    """Parameter of a cost model.

    mean, sd: mean and standard deviation of the hand-set prior. A prior learned from measured GPUs
        replaces the hand-set prior where there is one.
    meaning: definition and scale (logarithm, logit or plain number).
    """

    name: str
    meaning: str
    mean: float
    sd: float


@dataclass(frozen=True)
class IntervalCalibration:
    """Calibration of a 90 % interval: half-width in log time = factor · √(variance + floor²).

    factor: multiplier of the deviation √(variance + floor²).
    floor: smallest deviation in log time: the median absolute error of held-out rows.
    """

    factor: float
    floor: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> IntervalCalibration:
        return cls(float(data["factor"]), float(data["floor"]))

    @classmethod
    def of_held_out(
        cls,
        error: FloatArray,
        variance: FloatArray,
        tails: Sequence[tuple[float, float]] = ((0.9, 1.0),),
    ) -> IntervalCalibration:
        """Calibrates the interval on n held-out rows.

        error: (n,), absolute error in log time.
        variance: (n,), predicted variance of log time.
        tails: pairs (share, ratio). For each pair, the `share` quantile of the scaled errors times
            the ratio estimates the 0.9 quantile. The factor is the geometric mean of the estimates.
            By default, it is the 0.9 quantile itself.
        """
        floor = float(np.median(error)) + 1e-3
        scaled = error / np.sqrt(variance + floor**2)
        factors = [np.quantile(scaled, share) * ratio for share, ratio in tails]
        return cls(float(np.prod(factors) ** (1.0 / len(factors))), floor)

    def half_width(self, variance: FloatArray) -> FloatArray:
        """Returns the interval's half-width in log time for each predicted variance, (n,)."""
        half: FloatArray = self.factor * np.sqrt(variance + self.floor**2)
        return half


def measured_times(who: str, latency_us: npt.ArrayLike, count: int) -> FloatArray:
    """Returns measured times as an array, (count,) in µs.

    who: the model's name for error messages.

    Raises InputError unless there are `count` times, all finite and above 0.
    """
    times = np.atleast_1d(np.asarray(latency_us, dtype=np.float64))
    if times.shape != (count,):
        what = f"latency_us of shape {times.shape} for {count} shapes"
        raise InputError(who, what, "one time each")
    bad = ~(np.isfinite(times) & (times > 0))
    if bad.any():
        raise InputError(who, f"latency_us = {times[bad][0]}", "finite times above 0 µs")
    return times


def require_format(
    who: str, data: Mapping[str, Any], model_format: str, version: int, device: DeviceSpec
) -> None:
    """Raises InputError unless a model's JSON has this format, version and device.

    who: the model's name for error messages.
    """
    found = f"{data.get('format')} version {data.get('version')}"
    expected = f"{model_format} version {version}"
    if found != expected:
        raise InputError(who, found, expected)
    if data.get("device") != device.name:
        raise InputError(who, f"a model of {data.get('device')}", f"one of {device.name}")


def bounded(
    latency_us: FloatArray, half_below: FloatArray, half_above: FloatArray, fastest_us: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns the latency and the low and high end of its interval in µs, (n,) each.

    No result is below `fastest_us`.

    half_below, half_above: (n,), half-widths of the interval in log time.
    """
    latency_us = np.maximum(latency_us, fastest_us)
    low_us = np.maximum(latency_us * np.exp(-half_below), fastest_us)
    return latency_us, low_us, latency_us * np.exp(half_above)


def name_bound(
    launch_us: FloatArray, compute_us: FloatArray, memory_us: FloatArray
) -> npt.NDArray[np.str_]:
    """Returns which of the three times is largest in each row, (n,): one of BOUNDS.

    The name for the launch time is "latency".
    """
    parts = np.stack([compute_us, memory_us, launch_us])
    return np.asarray(np.array(BOUNDS)[np.argmax(parts, axis=0)], dtype=np.str_)
