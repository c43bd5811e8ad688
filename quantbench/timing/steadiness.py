"""Whether a device has settled: pure, sees only times, clocks and when they were taken."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from quantbench.stats import median, noise

# Two neighbouring windows that differ by less than this are the same state; clocks move in steps of 15 MHz, which is
# under 1 % of any GPU's working clock.
_STEADY_SHARE = 0.01

# Fewer samples than this in a window say nothing about a trend; slow work makes a window longer instead.
_MIN_WINDOW_SAMPLES = 3


@dataclass
class _Window:
    times_us: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.times_us) >= _MIN_WINDOW_SAMPLES


@dataclass(frozen=True)
class _Batch:
    at_s: float
    times_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...]


class Steadiness:
    """Compares the last window of window_s seconds (or 3 samples, if that is longer) with the one before it.

    Steady means that the median time of both agrees within 1 % plus what noise explains, and the median clock within
    1 % where it is known.

    >>> steadiness = Steadiness(window_s=0.1)
    >>> for at_s in (0.05, 0.10, 0.15, 0.20):
    ...     steadiness.add(at_s, [25.0, 25.1], [])
    >>> steadiness.steady
    True
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._batches: list[_Batch] = []
        self.rounds = 0  # batches added so far

    def add(self, at_s: float, samples_us: Sequence[float], clocks_mhz: Sequence[float]) -> None:
        """Take one batch of at least one sample. at_s: seconds since warming up began, at the end of the batch."""
        self._batches.append(_Batch(at_s, tuple(samples_us), tuple(clocks_mhz)))
        self._batches = [
            b
            for i, b in enumerate(self._batches)
            if at_s - b.at_s < 2 * self._window_s or i >= len(self._batches) - 2 * _MIN_WINDOW_SAMPLES
        ]
        self.rounds += 1

    @property
    def typical_us(self) -> float:
        """Median time over the last window."""
        return median(self._windows()[1].times_us)

    @property
    def clock_mhz(self) -> float | None:
        """Median clock over the last window; None where it is not known."""
        clocks = self._windows()[1].clocks_mhz
        return median(clocks) if clocks else None

    @property
    def steady(self) -> bool:
        """Whether the last two windows agree; False while they are not full."""
        if not self._batches or self._batches[-1].at_s < 2 * self._window_s:
            return False
        old, new = self._windows()
        if not (old.full and new.full):
            return False
        # A median of n samples scatters by about 1.25 σ/√n, the difference of two by √2 of that; twice it is noise.
        fewest = min(len(old.times_us), len(new.times_us))
        scatter = 2 * sqrt(2) * 1.25 * max(noise(old.times_us), noise(new.times_us)) / sqrt(fewest)
        if abs(median(new.times_us) / median(old.times_us) - 1) > _STEADY_SHARE + scatter:
            return False
        if not (old.clocks_mhz and new.clocks_mhz):
            return True
        return abs(median(new.clocks_mhz) / median(old.clocks_mhz) - 1) <= _STEADY_SHARE

    def _windows(self) -> tuple[_Window, _Window]:
        """The window before the last, and the last."""
        old, new = _Window(), _Window()
        end_s = self._batches[-1].at_s
        for batch in reversed(self._batches):
            in_new = not old.times_us and (end_s - batch.at_s < self._window_s or not new.full)
            window = new if in_new else old
            window.times_us += batch.times_us
            window.clocks_mhz += batch.clocks_mhz
        return old, new
