"""Grades the quality of a measurement as A, B, C, D or rejected, and gives the reasons.

Every problem of the measurement is a reason with a weight. A total weight of 0 gives A, 1 gives B,
2 or 3 gives C, and more gives D. A rate above the hardware's peak and a time from Triton's
interpreter are rejected.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quantbench.device.spec import CACHE_OVER_MEMORY, PEAK_MARGIN, DeviceSpec
from quantbench.measurement import Grade, Measurement
from quantbench.stated import CLOCK_STEP_MHZ
from quantbench.stats import (
    median,
    noise,
    outlier_fraction,
    quantiles,
    spread,
    typical_interval,
    typical_us,
)
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import (
    HARD_THROTTLES,
    KEPT,
    LAUNCH_GAP,
    NOT_A_TIME,
    OTHER_THREADS,
    PREEMPTED,
    THROTTLED,
)
from quantbench.units import percent

#: Reason for grade D if a point's results could not be checked.
NO_CHECK = "its results were not checked: its task has no inputs()"
#: Reason for rejecting a time from Triton's interpreter.
INTERPRETED = "it ran in triton's interpreter: the time of no kernel"

# Weights of reasons. The sum of the weights determines the grade.
_NOTE = 0
_OFF = 1
_BAD = 2
_WORTHLESS = 4

# A pair of limits gives the weight _OFF above the first limit, and _BAD above the second. A single
# limit's name ends with its weight.


# Limits for the samples' spread (`stats.spread`, 10 % to 90 % quantile). It is 1 to 2 % for a GPU
# kernel on a quiet machine, and 3 to 4 % for a pinned CPU thread. Above 10 %, something else is
# running or the samples have two modes. Above 30 %, the samples hide a cliff (a sudden step in the
# time from one size to the next) of 10 %.
_SPREAD = (0.10, 0.30)
# A confidence interval wider than this many times its target hides the effects that a sweep looks
# for, which adds 1 to the weight of a missed target.
_HALF_WIDTH_BAD_FACTOR = 4.0
# Explanations of `Measurement.stopped_by` for a missed target.
_STOPPED = {"noise_floor": "the noise stopped falling"}
# Minimum number of samples that have a 95 % interval of the median.
_FEWEST = 6
# Limit for the fraction of outliers among the samples. The median is robust to outliers, but more
# than one in twenty means that the machine was shared. A single outlier means nothing: with ten
# samples of Gaussian noise, 4 % of points have an outlier.
_OUTLIERS_OFF = 0.05
_FEWEST_OUTLIERS = 2
# Limit for the relative change from the first half of the samples to the second. It equals the
# first limit for drift.
_TREND_OFF = 0.02
# Limits for drift: the relative change in the reference point's time since its first measurement,
# at equal SM clock. Quiet machines repeat times within 0.5 % (GPU) and 1.5 % (CPU), and small
# cliffs are 5 %.
_DRIFT = (0.02, 0.05)
# Limits for the relative change in the reference point's SM clock. Heat lowers this clock by 2 or
# 3 % in the first minutes.
_CLOCK_DRIFT = (0.05, 0.10)
# Limits for the SM clock's spread (10 % to 90 % quantile). One step of 15 MHz is under 1 %.
# Compute-bound times are inversely proportional to the clock.
_CLOCK_SPREAD = (0.03, 0.10)
# Limit for the uncertainty of the time that comes from the clock (`stated.Stated.clock`). One step
# of the clock is always allowed.
_CLOCK_UNSURE_OFF = 0.01
# Lower limits for the median SM clock, relative to the clock at which the data sheet gives the
# peaks. Large GEMMs under the power limit run at 75 to 85 % of that clock (H100, H200). If the SM
# clock is lower without a power limit, the card was idle, hot or locked.
_CLOCK_LOW_OFF = 0.75
_CLOCK_LOW_BAD = 0.50
# Limits for the fraction of discarded samples.
_DISCARDED = (0.10, 0.50)

# For each reason of a discard: its text, and its maximum weight. A card that was throttled is still
# hot in the samples that are kept. A preempted thread runs as before once it has its core back.
_DISCARDED_KINDS = {
    THROTTLED: ("throttled", _BAD),
    LAUNCH_GAP: ("timed with a launch gap", _BAD),
    PREEMPTED: ("preempted", _OFF),
    OTHER_THREADS: ("helped by other threads", _BAD),
}


@dataclass(frozen=True)
class Drift:
    """Change of the reference point since its first measurement.

    The reference point is a workload that a sweep measures repeatedly.

    time_ratio: time of the reference point divided by its first time. The change that the SM clock
        may explain is taken out.
    clock_ratio: its median SM clock divided by the first one; None if unknown.
    """

    time_ratio: float
    clock_ratio: float | None = None

    @property
    def off(self) -> bool:
        """Whether the time or the SM clock has changed by more than its limit."""
        return bool(list(_drift(self)))


def drift_of(first: Measurement, now: Measurement) -> Drift:
    """Returns the drift between the first measurement of the reference point and a later one.

    A change in the SM clock may change the time by up to the inverse ratio. A change in the time
    within this range does not count as drift.
    """
    ratio = now.stated.latency_us / first.stated.latency_us
    if not first.clocks_mhz or not now.clocks_mhz:
        return Drift(ratio)
    clock_ratio = median(now.clocks_mhz) / median(first.clocks_mhz)
    low, high = sorted((ratio, ratio * clock_ratio))
    return Drift(min(max(1.0, low), high), clock_ratio)


def grade(
    measurement: Measurement,
    *,
    flops: float,
    min_bytes: float,
    spec: DeviceSpec,
    dtype: str | None,
    drift: Drift | None = None,
    options: TimingOptions | None = None,
    interpreted: bool = False,
    unchecked: str = "",
) -> Grade:
    """Grades the quality of one measurement.

    flops: number of operations of one run.
    min_bytes: minimum device-memory traffic of one run, in bytes.
    spec: constants of the device, which give the peaks.
    dtype: dtype whose peak limits the rate. If it is None or has no known peak, the device's
        highest peak is the limit.
    drift: drift of the reference point; None if there is no reference point.
    options: timing options that the measurement should have followed; None for the defaults.
    interpreted: whether the point ran in Triton's interpreter, whose times describe no kernel.
    unchecked: reason why the results could not be checked, or "".
    """
    if interpreted:
        return Grade("rejected", (INTERPRETED,))
    impossible = tuple(_impossible(measurement, flops, min_bytes, spec, dtype))
    if impossible:
        return Grade("rejected", impossible)
    options = options or TimingOptions()
    found = [
        *_precision(measurement, options),
        *_samples(measurement),
        *_discards(measurement),
        *_clock(measurement, spec),
        *_surroundings(measurement, options),
        *_drift(drift),
    ]
    if unchecked:
        found.insert(0, (_WORTHLESS, unchecked))
    found.sort(key=lambda reason: -reason[0])
    weight = min(4, sum(weight for weight, _ in found))
    return Grade("ABCCD"[weight], tuple(reason for _, reason in found))


def _step(value: float, limits: tuple[float, float]) -> int:
    """Returns the weight of a value: _NOTE, _OFF or _BAD, by its pair of limits."""
    off, bad = limits
    if value > bad:
        return _BAD
    return _OFF if value > off else _NOTE


def _impossible(
    m: Measurement, flops: float, min_bytes: float, spec: DeviceSpec, dtype: str | None
) -> Iterator[str]:
    """Yields a message for each hardware peak that the measured rate exceeds."""
    time_s = m.stated.latency_us * 1e-6
    # A CPU's clock is not used: it is read between the runs and may differ from the clock during a
    # run. A CPU's peaks are upper bounds already.
    clock = None
    if spec.kind != "cpu":
        clock = m.highest_clock_mhz
    highest, which = _ceiling(spec, dtype, clock)
    faster = "faster than the hardware's peak:"
    tflops = flops / time_s / 1e12
    if tflops > highest * PEAK_MARGIN:
        at = f"the {clock:.0f} MHz seen" if clock else "its highest clock"
        yield (
            f"{faster} {tflops:.4g} TFLOP/s, where {spec.name} reaches at most {highest:.4g} "
            f"TFLOP/s in {which} at {at}"
        )
    # As much of min_bytes as the cache can hold may need no memory traffic during the run: it may
    # be cached before the run, or written back after the run.
    gb_per_s = max(0.0, min_bytes - spec.l2_bytes) / time_s / 1e9
    if gb_per_s > spec.memory_gb_per_s * PEAK_MARGIN:
        yield (
            f"{faster} at least {gb_per_s:.4g} GB/s through memory, where "
            f"{spec.name} reaches at most {spec.memory_gb_per_s:.4g} GB/s"
        )
    cached_gb_per_s = min_bytes / time_s / 1e9
    if cached_gb_per_s > spec.memory_gb_per_s * CACHE_OVER_MEMORY:
        yield (
            f"{faster} {cached_gb_per_s:.4g} GB/s, over {CACHE_OVER_MEMORY} times the "
            f"{spec.memory_gb_per_s:.4g} GB/s of {spec.name}'s memory, which no cache reaches"
        )


def _ceiling(spec: DeviceSpec, dtype: str | None, clock_mhz: float | None) -> tuple[float, str]:
    """Returns the peak in TFLOP/s at an SM clock, and the name of the peak's dtype.

    The peak is that of `dtype` or, if it is unknown, that of the device's fastest dtype.

    clock_mhz: SM clock; None for the highest.
    """
    highest = float("inf")
    fastest = ""
    for name in spec.peak_tflops:
        ceiling = spec.ceiling(name, clock_mhz)
        if ceiling is None:
            continue
        if name == dtype:
            return ceiling, dtype
        if not fastest or ceiling > highest:
            highest = ceiling
            fastest = f"{name}, its fastest format"
    return highest, fastest or "any format"


_Reasons = Iterator[tuple[int, str]]  # (weight, message) of each reason


def _precision(m: Measurement, options: TimingOptions) -> _Reasons:
    """Yields the problems with the number of samples and the width of the interval."""
    count = len(m.samples_us)
    if count < options.min_samples:
        few = f"{count} sample{'s' if count > 1 else ''}"
        if count < _FEWEST:
            yield _BAD, f"{few}, too few for an interval; {options.min_samples} were asked for"
        else:
            yield _OFF, f"{few}, {options.min_samples} were asked for"
    width = m.stated.sampling
    if options.half_width < width < float("inf"):
        why = _STOPPED.get(m.stopped_by, f"stopped by {m.stopped_by}")
        asked = f"the ±{100 * options.half_width:.2f} % asked for"
        weight = _BAD if width > _HALF_WIDTH_BAD_FACTOR * options.half_width else _OFF
        yield weight, f"the median is known to ±{100 * width:.2f} %, not to {asked} ({why})"


def _samples(m: Measurement) -> _Reasons:
    """Yields the problems with the distribution of the samples."""
    times_us = m.samples_us
    wide = spread(times_us)
    if weight := _step(wide, _SPREAD):
        yield (
            weight,
            f"samples spread by {percent(wide)} (10 % to 90 %; noise {percent(noise(times_us))})",
        )
    outliers = outlier_fraction(times_us)
    # The product of fraction and count is not exactly whole, so half a sample is subtracted.
    if outliers > _OUTLIERS_OFF and outliers * len(times_us) > _FEWEST_OUTLIERS - 0.5:
        yield _OFF, f"{percent(outliers)} of the samples are far out"
    half = len(times_us) // 2
    if half >= _FEWEST:
        first = times_us[:half]
        second = times_us[-half:]
        trend = typical_us(second) / typical_us(first) - 1
        early = typical_interval(first)
        late = typical_interval(second)
        apart = early.high < late.low or late.high < early.low
        if abs(trend) > _TREND_OFF and apart:
            way = "up" if trend > 0 else "down"
            yield _OFF, f"times went {way} by {percent(abs(trend))} while sampling"


def _discards(m: Measurement) -> _Reasons:
    """Yields the problems for which samples were discarded."""
    total = len(m.samples_us) + len(m.discarded)
    for kind, (words, worst) in _DISCARDED_KINDS.items():
        of_kind = [d for d in m.discarded if d.reason.startswith(kind)]
        kept = [d for d in of_kind if d.reason.endswith(KEPT)]
        if kept:
            why = kept[0].reason.removesuffix(KEPT).removeprefix(f"{kind}: ")
            yield _WORTHLESS, f"every sample was {words} ({why})"
        elif of_kind:
            weight = min(worst, _step(len(of_kind) / total, _DISCARDED))
            yield weight, f"{len(of_kind)} of {total} samples {words} and discarded"
    broken = [d for d in m.discarded if d.reason.startswith(NOT_A_TIME)]
    if broken:
        yield _BAD, f"{len(broken)} of {total} samples {broken[0].reason}"
    if m.stopped_by == "discards":
        yield _OFF, "sampling was given up: batch after batch had to be discarded"


def _clock(m: Measurement, spec: DeviceSpec) -> _Reasons:
    """Yields the problems with the SM clock."""
    if spec.kind == "cpu":
        return  # the clock of a CPU is never recorded, so its absence is no problem
    if not m.clocks_mhz:
        note = m.state_after.note or m.state_before.note
        yield _OFF, "the SM clock is not known" + (f" ({note})" if note else "")
        return
    low, middle, high = quantiles(m.clocks_mhz, (0.1, 0.5, 0.9))
    if weight := _step((high - low) / middle, _CLOCK_SPREAD):
        yield weight, f"the SM clock moved between {low:.0f} and {high:.0f} MHz"
    unsure = m.stated.clock
    if unsure > max(_CLOCK_UNSURE_OFF, CLOCK_STEP_MHZ / middle):
        at = f"the SM clock is at {middle:.0f} of {m.highest_clock_mhz:.0f} MHz"
        yield _OFF, f"the next visit may differ by {100 * unsure:.1f} %: {at}"
    peak_mhz = spec.sm_clock_mhz
    if middle < _CLOCK_LOW_OFF * peak_mhz:
        weight = _BAD if middle < _CLOCK_LOW_BAD * peak_mhz else _OFF
        why = ""
        if "sw_power_cap" in m.state_before.throttle_reasons + m.state_after.throttle_reasons:
            weight = _NOTE
            why = ", held down by the power limit"
        share = f"{percent(middle / peak_mhz)} of the {peak_mhz:.0f} MHz that the peak is stated at"
        yield weight, f"the SM clock was {middle:.0f} MHz, {share}{why}"


def _drift(drift: Drift | None) -> _Reasons:
    """Yields the reference point's changes that exceed their limits."""
    if drift is None:
        return
    change = abs(drift.time_ratio - 1)
    if not change <= _DRIFT[0]:
        slower = "slower" if drift.time_ratio > 1 else "faster"
        weight = _step(change, _DRIFT) or _BAD  # NaN counts as bad
        yield weight, f"the reference point had become {percent(change)} {slower} than at first"
    if drift.clock_ratio is not None:
        change = abs(drift.clock_ratio - 1)
        lower = "lower" if drift.clock_ratio < 1 else "higher"
        if weight := _step(change, _CLOCK_DRIFT):
            yield (
                weight,
                f"the SM clock of the reference point had become {percent(change)} {lower}",
            )


def _surroundings(m: Measurement, options: TimingOptions) -> _Reasons:
    """Yields the problems with the cache, with other processes and with throttling at the end."""
    if m.cache != options.cache:
        yield _BAD, f"measured with a {m.cache} cache, {options.cache} was asked for"
    others = max(m.state_before.other_processes or 0, m.state_after.other_processes or 0)
    if others:
        yield _OFF, f"{others} other process{'es' if others > 1 else ''} on the card"
    hard = sorted(HARD_THROTTLES.intersection(m.state_after.throttle_reasons))
    if hard:
        yield _OFF, f"the card was protecting itself in the end ({', '.join(hard)})"
