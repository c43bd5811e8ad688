"""Defines the result of timing one point: its samples, the check of its output and the grade of its quality.

Entry points: `Measurement`, `MeanClock`, `stated`, `Check`, `Grade`, `GRADES`, `Discarded`. Used by `timing`, `store`,
`sweep`, `importers`, `analysis`, `report`, `cluster`, `comm`, `profile`, `providers` and `pytest_plugin`. Only raw
samples are stored; `stated` and `stats` compute statistics on read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import hypot, inf, isinf

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, require_choice, require_int
from quantbench.stats import (
    CONFIDENCE,
    Interval,
    normal_quantile,
    relative_half_width,
    tick,
    typical_interval,
    typical_us,
)

GRADES = ("A", "B", "C", "D", "rejected")

Times = npt.NDArray[np.float64]

# Fewest samples whose clocks tell how their times follow the clock, and least relative range of these clocks.
_FEWEST_FOR_EXPONENT = 10
_LEAST_MOVE = 1e-4


@dataclass(frozen=True)
class Discarded:
    """Discarded sample.

    reason: starts with `throttled`, `preempted`, `launch gap`, `other threads` or `not a time` (then sample_us is 0).
    """

    sample_us: float
    reason: str
    clock_mhz: float | None = None


@dataclass(frozen=True)
class Check:
    """A point's passed output check by `providers.correctness`: largest relative error, and the tolerance.

    (`analysis.check.Check` is about a whole run.)
    """

    relative_error: float
    tolerance: float


@dataclass(frozen=True)
class Grade:
    """Quality grade of a measured time.

    reasons: every problem found; may be empty only for A.
    letter: A (no problem), B (one minor problem), C (several, or one serious), D (use only together with its reasons),
    `rejected` (impossible: faster than the hardware's peak, or not a valid time).
    """

    letter: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("Grade", "letter", self.letter, GRADES)
        if self.letter != "A" and not self.reasons:
            raise InputError("Grade", f"letter = {self.letter!r} without a reason", "a reason in words")


@dataclass(frozen=True)
class MeanClock:
    """Mean SM clock of a kind of work at a time.

    half_width_mhz: half-width of its 95 % interval.
    """

    mhz: float
    half_width_mhz: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.mhz < inf:
            raise InputError("MeanClock", f"mhz = {self.mhz!r}", "a finite clock above 0")
        if not 0 <= self.half_width_mhz < inf:
            raise InputError("MeanClock", f"half_width_mhz = {self.half_width_mhz!r}", "a finite width from 0 on")


@dataclass(frozen=True)
class Stated:
    """Time of one point at its mean clock.

    times_us: the samples, each as if it had been taken at the mean clock.
    latency_us: their median.
    interval: 95 % interval of the time at the mean clock.
    sampling: relative half-width that more samples narrow; infinite if there are too few for an interval.
    clock: relative half-width that the mean clock adds.
    """

    times_us: Sequence[float]
    latency_us: float
    interval: Interval
    sampling: float
    clock: float = 0.0

    @property
    def relative_half_width(self) -> float:
        """Half-width of the interval as a share of the time; infinite if there are too few samples."""
        if isinf(self.sampling):
            return self.sampling
        return self.interval.half_width / self.latency_us


def stated(
    samples_us: Sequence[float], clocks_mhz: Sequence[float], mean: MeanClock | None, tick_us: float = 0.0
) -> Stated:
    """Returns the time that the samples say at the mean clock.

    A time is proportional to clock^-e: e is 1 for work that waits for the SMs, 0 for work that waits for memory. Within
    these bounds, the samples and their clocks give the interval of e, by regression.

    clocks_mhz: SM clock at each sample; empty if unknown.
    tick_us: resolution of the times, used if all samples are equal.
    """
    if len(samples_us) == 1:  # large tables of single times
        return Stated(samples_us, samples_us[0], Interval(samples_us[0], samples_us[0], 0.0), inf)
    if mean is None or not clocks_mhz:
        interval = typical_interval(samples_us, tick_us=tick_us)
        width = relative_half_width(samples_us, tick_us=tick_us)
        return Stated(samples_us, typical_us(samples_us), interval, width)
    raw_us = np.asarray(samples_us, dtype=np.float64)
    logs = np.log(np.asarray(clocks_mhz, dtype=np.float64) / mean.mhz)
    low, high = _exponent(raw_us, logs)
    times_us = _scaled(raw_us, logs * (low + high) / 2)
    latency_us = typical_us(times_us)
    interval = typical_interval(times_us, tick_us=tick_us)
    half = interval.half_width / latency_us
    from_exponent = abs(float(logs.mean())) * (high - low) / 2
    from_mean = high * mean.half_width_mhz / mean.mhz
    clock = hypot(half, from_mean) - half + from_exponent
    sampling = half + from_exponent if interval.coverage >= CONFIDENCE else inf
    wider_us = clock * latency_us
    interval = Interval(interval.low - wider_us, interval.high + wider_us, interval.coverage)
    return Stated(times_us.tolist(), latency_us, interval, sampling, clock)


def _exponent(times_us: Times, log_clocks: Times) -> tuple[float, float]:
    """Returns the interval of the exponent e of time ~ clock^-e, within 0 and 1."""
    if len(log_clocks) < _FEWEST_FOR_EXPONENT or np.ptp(log_clocks) < _LEAST_MOVE:
        return 0.0, 1.0
    x = log_clocks - log_clocks.mean()
    squares = float(x @ x)
    y = np.log(times_us)
    y -= y.mean()
    exponent = -float(x @ y) / squares
    rest = y + exponent * x
    half = normal_quantile() * (float(rest @ rest) / (len(x) - 2) / squares) ** 0.5
    low, high = np.clip((exponent - half, exponent + half), 0.0, 1.0)
    return float(low), float(high)


def _scaled(times_us: Times, logs: Times) -> Times:
    """Returns times times exp(logs): one by one, or all alike where they lie on ticks, whose shares tell the time."""
    if float(np.ptp(logs) * times_us.mean()) < tick(times_us):
        logs = logs.mean()
    scaled: Times = times_us * np.exp(logs)
    return scaled


@dataclass(frozen=True)
class Measurement:
    """Timing samples of one point.

    samples_us: accepted device times of single runs in the order they were taken, microseconds.
    clocks_mhz: SM clock at each sample; empty if the device does not report it.
    stopped_by: rule that ended sampling (`precision`; `clock`: what is left of the interval is the mean
        clock's; `max_time`, `max_samples`, `noise_floor`; `discards` for too many
        discarded samples; `imported` for an imported time).
    mode: `events`, `graph` or `cpu`; `unknown` for some imported times.
    cache: `cold` or `hot`; `unknown` for some imported times.
    kernels_per_sample: runs per sample; above 1 if a single run is too short to time.
    floor_us: time of an empty kernel in the same mode on the same device, which every sample includes; None if unknown.
    mean_clock: mean SM clock of such work at that time, at which the time is stated; None if unknown.
    """

    samples_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...]
    discarded: tuple[Discarded, ...]
    stopped_by: str
    mode: str
    cache: str
    state_before: DeviceState
    state_after: DeviceState
    kernels_per_sample: int = 1
    floor_us: float | None = None
    mean_clock: MeanClock | None = None

    @cached_property
    def stated(self) -> Stated:
        """The time at the mean clock, with its interval."""
        return stated(self.samples_us, self.clocks_mhz, self.mean_clock)

    def __post_init__(self) -> None:
        require_int("Measurement", "kernels_per_sample", self.kernels_per_sample)
        if not self.samples_us:
            raise InputError("Measurement", "no samples", "at least one accepted sample")
        bad = next((s for s in self.samples_us if not 0 < s < float("inf")), None)
        if bad is not None:
            raise InputError("Measurement", f"sample {bad!r} µs", "a finite time above 0")
        if self.clocks_mhz and len(self.clocks_mhz) != len(self.samples_us):
            what = f"{len(self.clocks_mhz)} clocks for {len(self.samples_us)} samples"
            raise InputError("Measurement", what, "one each")
        if self.mean_clock is not None and not all(0 < mhz < inf for mhz in self.clocks_mhz):
            raise InputError("Measurement", "a clock that is not above 0 beside a mean clock", "clocks above 0 MHz")
        if self.floor_us is not None and not 0 < self.floor_us < float("inf"):
            raise InputError("Measurement", f"floor_us = {self.floor_us!r}", "a finite time above 0, or None")
        require_choice("Measurement", "mode", self.mode, ("events", "graph", "cpu", "unknown"))
        require_choice("Measurement", "cache", self.cache, ("cold", "hot", "unknown"))
