"""When a point has been sampled enough. Sees only numbers and a clock; knows nothing of devices.

The reasons, strongest first:
- precision: the relative half width of the median's 95 % confidence interval is at or below the target;
- noise_floor: more samples no longer narrow that interval, so that the target is out of reach;
- max_samples, max_time: the bounds.
"""

from collections.abc import Callable
from math import ceil

from quantbench.errors import InputError
from quantbench.stats import median, relative_half_width, tick

# Statistics are computed when the number of samples has grown by this factor since the last time: the whole cost stays
# proportional to n log n, and a point takes at most a quarter more samples than it needed.
_CHECK_GROWTH = 1.25

# For independent samples the interval of 4n is half as wide as that of n. Where it still has more than 80 % of its
# width, three checks running, the rest is not noise that averages out: two modes, a drift, or the clock's tick.
# In simulation (log-normal 5 % and exponential 30 % noise, 2000 samples) this stopped 0 of 150 points too early,
# and two modes 40 % apart were recognised after 215 samples. NVBench's stdrel criterion, which gave the idea, looks
# for a flat standard deviation, and needs more than 64 values for it.
_FLOOR_MIN_SAMPLES = 128
_FLOOR_SPAN = 4
_FLOOR_SHARE = 0.8
_FLOOR_CHECKS = 3

# Where half a tick alone exceeds the target, samples beyond this many cannot help: a tick seen among 64 values is one.
_TICK_MIN_SAMPLES = 64


class StoppingRule:
    """Decides from samples alone when to stop.

    half_width: target relative half width of the median's 95 % interval. min_samples: none of the statistics is looked
    at before. max_time_s: measured by `now` (seconds, from any origin) since the rule was made; it ends a point
    with fewer than min_samples too, but not without any. tick_us: the clock's resolution where the samples themselves
    do not show it (all equal); 0 for none.

    >>> rule = StoppingRule(half_width=0.005, min_samples=10, max_samples=100, max_time_s=1.0, now=lambda: 0.0)
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
        self._min_samples = min_samples
        self.max_samples = max_samples
        self._max_time_s = max_time_s
        self._tick_us = tick_us
        self._now = now
        self._last_s = now()
        self._elapsed_s = 0.0
        self._samples_us: list[float] = []
        self._next_check = min_samples
        self._widths: list[tuple[int, float]] = []  # (samples, relative half width) at each check
        self._flat_checks = 0

    @property
    def count(self) -> int:
        """Samples added so far."""
        return len(self._samples_us)

    @property
    def missing(self) -> int:
        """Samples that may be added before the next check is due (at least 1): a fitting size for the next batch."""
        return max(1, min(self._next_check, self.max_samples) - self.count)

    @property
    def out_of_time(self) -> bool:
        """Whether max_time_s is over. A clock that steps back stands still for that step."""
        now_s = self._now()
        self._elapsed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self._elapsed_s >= self._max_time_s

    def add(self, sample_us: float) -> None:
        """Take one accepted sample in microseconds."""
        if not 0 < sample_us < float("inf"):
            raise InputError("StoppingRule.add", f"sample_us = {sample_us!r}", "a finite time above 0")
        self._samples_us.append(sample_us)

    def finished(self) -> str | None:
        """The reason to stop, or None. Cheap: the samples are looked at only at growing intervals."""
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
        tick_us = tick(self._samples_us) or self._tick_us
        unquantised = relative_half_width(self._samples_us)
        width = relative_half_width(self._samples_us, tick_us=tick_us)
        if width <= self._half_width:
            return "precision"
        self._widths.append((self.count, width))
        at_tick = (
            tick_us > 0 and self.count >= _TICK_MIN_SAMPLES and unquantised <= tick_us / 2 / median(self._samples_us)
        )
        return "noise_floor" if at_tick or self._flat() else None

    def _flat(self) -> bool:
        """Whether the interval has stopped narrowing."""
        count, width = self._widths[-1]
        earlier = [w for n, w in self._widths if n * _FLOOR_SPAN <= count]
        flat = count >= _FLOOR_MIN_SAMPLES and bool(earlier) and width > _FLOOR_SHARE * earlier[-1]
        self._flat_checks = self._flat_checks + 1 if flat else 0
        return self._flat_checks >= _FLOOR_CHECKS
