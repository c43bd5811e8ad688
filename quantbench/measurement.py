"""Defines the results of measuring one point: its samples, output check and quality grade.

Only raw samples are stored. Statistics are computed when a measurement is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, require_choices, require_ints

if TYPE_CHECKING:
    from quantbench.stated import Stated

GRADES = ("A", "B", "C", "D", "rejected")
MODES = ("events", "graph", "cpu", "unknown")
CACHES = ("cold", "hot", "unknown")


@dataclass(frozen=True)
class Discarded:
    """Sample that was discarded.

    sample_us: time in µs; 0 if the value was not a finite positive time.
    reason: text that starts with `throttled`, `preempted`, `launch gap`, `other threads` or `not a
        time`.
    clock_mhz: SM clock at the sample; None if it is unknown.
    """

    sample_us: float
    reason: str
    clock_mhz: float | None = None


@dataclass(frozen=True)
class Check:
    """Passed check of a point's output by `providers.correctness`.

    `analysis.check`, by contrast, checks a whole run.

    relative_error: largest relative error in the output.
    tolerance: largest relative error that passes.
    """

    relative_error: float
    tolerance: float


@dataclass(frozen=True)
class Grade:
    """Quality grade of a measured time.

    letter: A (no problem), B (one minor problem), C (several minor problems or a serious problem),
        D (worse: use the time only together with the reasons) or `rejected` (impossible: faster
        than the hardware's peak, or not a kernel's time).
    reasons: text of each problem found; empty only for A.
    shared: marks the class for `store.typed`, which decodes equal grades to one object.
    """

    shared = True

    letter: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_choices(self, letter=GRADES)
        if self.letter != "A" and not self.reasons:
            raise InputError(
                "Grade", f"letter = {self.letter!r} without a reason", "a reason in words"
            )


@dataclass(frozen=True)
class Measurement:
    """Timing samples of one point.

    samples_us: accepted device times per run in µs, in the order in which they were taken.
    clocks_mhz: SM clock at each sample; empty if the device does not report it.
    discarded: samples that were not accepted, with reasons.
    stopped_by: reason why sampling ended: `precision`, `max_time`, `max_samples`, `noise_floor`,
        `discards` (too many discarded samples), or `imported` for an imported time.
    mode: `events`, `graph` or `cpu`; `unknown` for some imported times.
    cache: `cold` or `hot`; `unknown` for some imported times.
    state_before: device state before sampling.
    state_after: device state after the last sample.
    kernels_per_sample: number of runs per sample, above 1 for graphs of several runs.
    floor_us: time of an empty kernel in the same mode on the same device, below which no kernel
        gets; None if it is unknown.
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

    @cached_property
    def stated(self) -> Stated:
        """Time of the point, with its interval."""
        from quantbench.stated import stated  # importing numpy takes longer than some commands

        return stated(self.samples_us, self.clocks_mhz, self.highest_clock_mhz)

    @property
    def highest_clock_mhz(self) -> float | None:
        """Highest SM clock that was recorded for the point; None if none is known.

        The driver's readings are those of a card that draws little power: on an H200 they stay at
        1980 MHz while the clock of the samples is 1560 MHz.
        """
        states = (self.state_before, self.state_after)
        seen = [*self.clocks_mhz, *(state.sm_clock_mhz for state in states)]
        return max((mhz for mhz in seen if mhz is not None), default=None)

    def __post_init__(self) -> None:
        require_ints(self, "kernels_per_sample")
        if not self.samples_us:
            raise InputError("Measurement", "no samples", "at least one accepted sample")
        bad = next((s for s in self.samples_us if not 0 < s < inf), None)
        if bad is not None:
            raise InputError("Measurement", f"sample {bad!r} µs", "a finite time above 0")
        if self.clocks_mhz and len(self.clocks_mhz) != len(self.samples_us):
            raise InputError(
                "Measurement",
                f"{len(self.clocks_mhz)} clocks for {len(self.samples_us)} samples",
                "one each",
            )
        bad_mhz = next((mhz for mhz in self.clocks_mhz if not 0 < mhz < inf), None)
        if bad_mhz is not None:
            raise InputError("Measurement", f"clock {bad_mhz!r} MHz", "a finite clock above 0")
        if self.floor_us is not None and not 0 < self.floor_us < inf:
            raise InputError(
                "Measurement", f"floor_us = {self.floor_us!r}", "a finite time above 0, or None"
            )
        require_choices(self, mode=MODES, cache=CACHES)
