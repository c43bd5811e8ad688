"""The result of timing one point (`Measurement`): every raw sample, discarded ones with reasons, and a `Grade`.

Statistics are derived on read (`quantbench.stats`); nothing here is an average.
"""

from dataclasses import dataclass

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, require_choice, require_int

GRADES = ("A", "B", "C", "D", "rejected")


@dataclass(frozen=True)
class Discarded:
    """A sample that does not count. reason: begins with `throttled`, `preempted`, `launch gap`, `other threads` or `not
    a time` (whose sample_us is 0), and says more in words."""

    sample_us: float
    reason: str
    clock_mhz: float | None = None


@dataclass(frozen=True)
class Check:
    """The result of checking a point's outputs (`quantbench.providers.correctness`): the largest relative error, and
    the bound that it kept."""

    relative_error: float
    tolerance: float


@dataclass(frozen=True)
class Grade:
    """The trust in a figure. reasons: why it is not higher.

    letter: A (steady, cold as asked, clock steady), B (one thing off), C (several, or one badly), D (read it only
    beside its reasons), rejected (impossible: faster than the hardware's peak, or not a time at all).
    """

    letter: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choice("Grade", "letter", self.letter, GRADES)
        if self.letter != "A" and not self.reasons:
            raise InputError("Grade", f"letter = {self.letter!r} without a reason", "a reason in words")


@dataclass(frozen=True)
class Measurement:
    """The samples of one point.

    samples_us: accepted device times of single runs in the order they were taken, microseconds.
    clocks_mhz: SM clock at each sample; empty if the device does not report it.
    stopped_by: the rule that ended sampling (`precision`, `max_time`, `max_samples`, `noise_floor`; `discards` for too
        many discarded samples; `imported` for a figure from elsewhere).
    mode: how it was timed (`events`, `graph`, `cpu`). cache: `cold` or `hot`. `unknown` if an imported figure does not
        say.
    kernels_per_sample: runs per sample if a single run is too short to time (1: each run alone).
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
        require_choice("Measurement", "mode", self.mode, ("events", "graph", "cpu", "unknown"))
        require_choice("Measurement", "cache", self.cache, ("cold", "hot", "unknown"))
