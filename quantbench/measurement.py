"""Defines the result of timing one point: its samples, the check of its output and the grade of its quality.

Entry points: `Measurement`, `Check`, `Grade`, `GRADES`, `Discarded`. Used by `timing`, `store`, `sweep`, `importers`,
`analysis`, `report`, `cluster`, `comm`, `profile`, `providers` and `pytest_plugin`. Only raw samples are stored;
`stats` computes statistics on read.
"""

from dataclasses import dataclass

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, require_choice, require_int

GRADES = ("A", "B", "C", "D", "rejected")


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
    `rejected` (impossible: faster than the hardware's peak, or not the time of a kernel).
    """

    letter: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("Grade", "letter", self.letter, GRADES)
        if self.letter != "A" and not self.reasons:
            raise InputError("Grade", f"letter = {self.letter!r} without a reason", "a reason in words")


@dataclass(frozen=True)
class Measurement:
    """Timing samples of one point.

    samples_us: accepted device times of single runs in the order they were taken, microseconds.
    clocks_mhz: SM clock at each sample; empty if the device does not report it.
    stopped_by: rule that ended sampling (`precision`, `max_time`, `max_samples`, `noise_floor`; `discards` for too many
        discarded samples; `imported` for an imported time).
    mode: `events`, `graph` or `cpu`; `unknown` for some imported times.
    cache: `cold` or `hot`; `unknown` for some imported times.
    kernels_per_sample: runs per sample; above 1 if a single run is too short to time.
    floor_us: time of an empty kernel in the same mode on the same device, which every sample includes; None if unknown.
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
        if self.floor_us is not None and not 0 < self.floor_us < float("inf"):
            raise InputError("Measurement", f"floor_us = {self.floor_us!r}", "a finite time above 0, or None")
        require_choice("Measurement", "mode", self.mode, ("events", "graph", "cpu", "unknown"))
        require_choice("Measurement", "cache", self.cache, ("cold", "hot", "unknown"))
