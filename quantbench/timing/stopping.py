"""Decides when a point's warm-up ends (`Steadiness`) and when its sampling ends (`StoppingRule`).

Both decisions use only the samples, their SM clocks and the elapsed time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt

from quantbench.errors import InputError
from quantbench.stats import median, noise, relative_half_width, typical_us

# Maximum relative difference between two successive windows that agree. SM clocks move in steps of
# 15 MHz, which is under 1 % of any GPU's working clock.
_STEADY_SHARE = 0.01

# Minimum number of samples in a window. For slow work, the window is therefore longer.
_MIN_WINDOW_SAMPLES = 3

# Length of a short window (see `Steadiness`). It contains 20 to 30 cold samples of a few
# microseconds.
_SHORT_WINDOW_S = 0.005

# Work is light if its runs take at most this fraction of the time. Light work cannot bring the card
# to its power limit: if the runs draw 180 % of the limit for a third of the time, and the flushes
# draw 60 % for two thirds, the mean power equals the limit. The real mean is lower, because the
# card is also idle between flushes.
_LIGHT_SHARE = 1 / 3

# Statistics are computed each time the number of samples has grown by this factor. Their total cost
# for n samples is then n log n, and a point takes at most a quarter more samples than it needs.
_CHECK_GROWTH = 1.25

# Rule for the noise floor. With independent samples, the interval of 4n samples is half as wide as
# that of n samples. If an interval still has more than 80 % of its width at a quarter of the
# samples, in three successive checks, the noise does not average out: the samples have two modes or
# drift. In simulation (log-normal 5 % and exponential 30 % noise, 2000 samples), this rule stopped
# 0 of 150 points too early, and recognised two modes 40 % apart after 215 samples. NVBench's stdrel
# criterion is similar: it looks for a flat standard deviation over more than 64 values.
_FLOOR_MIN_SAMPLES = 128
_FLOOR_SPAN = 4
_FLOOR_SHARE = 0.8
_FLOOR_CHECKS = 3


@dataclass
class _Window:
    """Times and SM clocks of one batch, or of several successive batches."""

    times_us: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether the window has enough samples to be compared."""
        return len(self.times_us) >= _MIN_WINDOW_SAMPLES


def same_clock(one_mhz: float | None, other_mhz: float | None) -> bool:
    """Returns whether two clocks agree within 1 %; False if one of them is unknown."""
    return bool(one_mhz and other_mhz and abs(one_mhz / other_mhz - 1) <= _STEADY_SHARE)


class Steadiness:
    """Compares the times and clocks of a warm-up's last two windows.

    A window is window_s seconds long, or 3 samples if that is longer. The work is steady if the
    windows' median times agree within 1 % plus noise, and their median clocks, if known, agree
    within 1 %.

    window_s: length of a window, in s.
    known_mhz: SM clock at which earlier light work was steady; None if unknown. If light work runs
        at this clock, short windows of 5 ms suffice: a clock that climbs from idle reaches
        known_mhz only at the end of its climb. Work at the power limit settles at another clock.

    >>> steadiness = Steadiness(window_s=0.1)
    >>> for at_s in (0.05, 0.10, 0.15, 0.20):
    ...     steadiness.add(at_s, [25.0, 25.1], [])
    >>> steadiness.steady
    True
    """

    def __init__(self, window_s: float, known_mhz: float | None = None) -> None:
        self._window_s = window_s
        self._known_mhz = known_mhz
        self._batches: list[tuple[float, _Window]] = []  # each with the time when it ended, in s
        self._sampled_us = 0.0  # sum of all samples
        self.rounds = 0  # batches added so far

    def add(self, at_s: float, samples_us: Sequence[float], clocks_mhz: Sequence[float]) -> None:
        """Adds one batch of at least one sample.

        at_s: time when the batch ended, in seconds since the beginning of the warm-up.
        """
        self._batches.append((at_s, _Window(list(samples_us), list(clocks_mhz))))
        # Batches older than both windows are dropped, but the last six always stay. They fill two
        # windows even if each batch has a single sample.
        recent = len(self._batches) - 2 * _MIN_WINDOW_SAMPLES
        while recent > 0 and at_s - self._batches[0][0] >= 2 * self._window_s:
            del self._batches[0]
            recent -= 1
        self._sampled_us += sum(samples_us)
        self.rounds += 1

    @property
    def typical_us(self) -> float:
        """Median time over the last window, in µs."""
        return typical_us(self._last.times_us)

    @property
    def clock_mhz(self) -> float | None:
        """Median SM clock over the last window, in MHz; None if unknown."""
        return _clock_mhz(self._last)

    @property
    def light(self) -> bool:
        """Whether the runs take so little of the time that the power limit cannot be reached."""
        return self._sampled_us * 1e-6 <= _LIGHT_SHARE * self._batches[-1][0]

    @property
    def counted_s(self) -> float:
        """Length of the windows on which `steady` is based, in s."""
        return _SHORT_WINDOW_S if self._settled else self._window_s

    @property
    def steady(self) -> bool:
        """Whether the last two windows are full and agree."""
        return self._agree(self._window_s) or self._settled

    @property
    def _settled(self) -> bool:
        """Whether light work has reached the known clock, so that short windows suffice."""
        if self._known_mhz is None or not self.light or not self._agree(_SHORT_WINDOW_S):
            return False
        return same_clock(_clock_mhz(self._windows(_SHORT_WINDOW_S)[1]), self._known_mhz)

    @property
    def _last(self) -> _Window:
        """The last of the windows on which `steady` is based."""
        return self._windows(self.counted_s)[1]

    def _agree(self, window_s: float) -> bool:
        """Returns whether the last two windows of this length are full and agree."""
        if not self._batches or self._batches[-1][0] < 2 * window_s:
            return False
        old, new = self._windows(window_s)
        if not (old.full and new.full):
            return False
        # The median of n samples scatters by about 1.25 σ/√n, and the difference of two medians by
        # √2 times as much. A difference of up to twice the latter counts as noise.
        fewest = min(len(old.times_us), len(new.times_us))
        scatter = 2 * sqrt(2) * 1.25 * max(noise(old.times_us), noise(new.times_us)) / sqrt(fewest)
        if abs(typical_us(new.times_us) / typical_us(old.times_us) - 1) > _STEADY_SHARE + scatter:
            return False
        return not (old.clocks_mhz and new.clocks_mhz) or same_clock(
            _clock_mhz(new), _clock_mhz(old)
        )

    def _windows(self, window_s: float) -> tuple[_Window, _Window]:
        """Returns the last two windows of this length, the earlier one first."""
        old = _Window()
        new = _Window()
        end_s = self._batches[-1][0]
        for at_s, batch in reversed(self._batches):
            if old.full and end_s - at_s >= 2 * window_s:
                break
            in_new = not old.times_us and (end_s - at_s < window_s or not new.full)
            window = new if in_new else old
            window.times_us += batch.times_us
            window.clocks_mhz += batch.clocks_mhz
        return old, new


def _clock_mhz(window: _Window) -> float | None:
    """Returns the median clock of a window; None if unknown."""
    return median(window.clocks_mhz) if window.clocks_mhz else None


class StoppingRule:
    """Decides from the samples when to stop sampling.

    The reasons to stop are checked in this order:
    - `precision`: the relative half-width of the median's 95 % interval is at or below the target.
      Even with coarse timer ticks, this interval narrows with more samples
      (`stats.typical_interval`).
    - `noise_floor`: more samples no longer narrow the interval, so the target cannot be reached.
    - `max_samples` and `max_time`: a bound is reached.

    half_width: target for the relative half-width.
    min_samples: number of samples at which statistics are first computed.
    max_samples: maximum number of samples.
    max_time_s: time limit, in s since the rule was created. It may end a point with fewer than
        min_samples, but not without any sample.
    now: function that reads the time, in s.
    tick_us: resolution of a sample in µs, which counts if all samples are equal.

    >>> rule = StoppingRule(
    ...     half_width=0.005, min_samples=10, max_samples=100, max_time_s=1.0, now=lambda: 0.0
    ... )
    >>> for _ in range(10):
    ...     rule.add(25.0)
    >>> rule.finished()
    'precision'
    """

    def __init__(
        self,
        *,
        half_width: float,
        min_samples: int,
        max_samples: int,
        max_time_s: float,
        now: Callable[[], float],
        tick_us: float = 0.0,
    ) -> None:
        self._half_width = half_width
        self.max_samples = max_samples
        self._max_time_s = max_time_s
        self._tick_us = tick_us
        self._now = now
        self._last_s = now()
        self._elapsed_s = 0.0
        self._samples_us: list[float] = []
        self._next_check = min_samples
        # Number of samples, and the half-width, at each check.
        self._widths: list[tuple[int, float]] = []
        self._flat_checks = 0

    @property
    def count(self) -> int:
        return len(self._samples_us)

    @property
    def missing(self) -> int:
        """Number of samples until the next check or the maximum, at least 1."""
        return max(1, min(self._next_check, self.max_samples) - self.count)

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit is reached. If the timer steps back, the step counts as 0 s."""
        now_s = self._now()
        self._elapsed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self._elapsed_s >= self._max_time_s

    def add(self, sample_us: float) -> None:
        """Adds a sample. Raises InputError unless it is a finite positive time."""
        if not 0 < sample_us < float("inf"):
            raise InputError(
                "StoppingRule.add", f"sample_us = {sample_us!r}", "a finite time above 0"
            )
        self._samples_us.append(sample_us)

    def finished(self) -> str | None:
        """Returns the reason to stop, or None to go on.

        Frequent calls are cheap, because statistics are computed only at growing intervals.
        """
        reason = None
        if self.count >= self._next_check:
            reason = self._check()
            self._next_check = max(self.count + 1, ceil(self.count * _CHECK_GROWTH))
        if reason is None and self.count >= self.max_samples:
            reason = "max_samples"
        if reason is None and self.out_of_time and self.count:
            reason = "max_time"
        return reason

    def _check(self) -> str | None:
        """Computes the statistics, and returns `precision`, `noise_floor` or None."""
        width = relative_half_width(self._samples_us, tick_us=self._tick_us)
        if width <= self._half_width:
            return "precision"
        self._widths.append((self.count, width))
        return "noise_floor" if self._flat() else None

    def _flat(self) -> bool:
        """Returns whether the interval hardly narrowed in the last checks (see _FLOOR_SHARE)."""
        count, width = self._widths[-1]
        earlier = [w for n, w in self._widths if n * _FLOOR_SPAN <= count]
        if count >= _FLOOR_MIN_SAMPLES and earlier and width > _FLOOR_SHARE * earlier[-1]:
            self._flat_checks += 1
        else:
            self._flat_checks = 0
        return self._flat_checks >= _FLOOR_CHECKS
