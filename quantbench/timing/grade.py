"""How far a measurement can be trusted: a letter and its reasons in words. Pure.

Every reason has a weight; the letter follows from their sum: 0 is A, 1 is B, 2 and 3 are C, more is D. A figure that
the hardware cannot reach is rejected whatever else is true of it.
"""

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.measurement import Grade, Measurement
from quantbench.stats import median, median_interval, noise, outlier_share, quantiles, relative_half_width, spread, tick
from quantbench.timing.options import TimingOptions
from quantbench.timing.session import HARD_THROTTLES, KEPT, LAUNCH_GAP, NOT_A_TIME, OTHER_THREADS, PREEMPTED, THROTTLED

#: Why a point is graded D whose results nobody but its provider has seen.
NO_CHECK = "its results were not checked: its task has no inputs()"

_NOTE, _OFF, _BAD, _WORTHLESS = 0, 1, 2, 4

# 10 %-90 % spread. A quiet GPU kernel has 1-2 %, a pinned CPU thread 3-4 %; at 10 % something else is running or
# the samples have two modes, at 30 % a 10 % cliff is within the samples of one point.
_SPREAD_OFF, _SPREAD_BAD = 0.10, 0.30
# Missing the target half width is one thing off; four times the target is the width of the effects looked for.
_HALF_WIDTH_BAD_FACTOR = 4.0
# Fewer samples than this have no 95 % interval for the median at all.
_FEWEST = 6
# Far-out samples: the median stands them, but more than one in twenty says that the machine was not ours alone.
_OUTLIERS_OFF = 0.05
# Between the first and the second half of the samples; as for drift.
_TREND_OFF = 0.02
# Reference point now against its first time. Quiet machines repeat within 0.5 % (GPU) and 1.5 % (CPU); 5 % is the size
# of the smaller cliffs.
_DRIFT_OFF, _DRIFT_BAD = 0.02, 0.05
# 10 %-90 % spread of the SM clock. Steps of 15 MHz are under 1 %; compute-bound time follows the clock one to one.
_CLOCK_SPREAD_OFF, _CLOCK_SPREAD_BAD = 0.03, 0.10
# Median clock against the clock that the peaks are stated at. Large products under the power limit run at 75-85 % of it
# (H100, H200); below that, and not because of the power limit, the card was idle, hot or locked down.
_CLOCK_LOW_OFF, _CLOCK_LOW_BAD = 0.75, 0.50
# Share of samples thrown away as throttled, or for a launch gap.
_DISCARDED_OFF, _DISCARDED_BAD = 0.10, 0.50

# In words, and the weight at most: a throttled card is still warm in the samples that count, while a thread that has
# its core back runs as before.
_DISCARDED_KINDS = {
    THROTTLED: ("throttled", _BAD),
    LAUNCH_GAP: ("timed with a launch gap", _BAD),
    PREEMPTED: ("preempted", _OFF),
    OTHER_THREADS: ("helped by other threads", _BAD),
}

# Nothing above its peak is a time of that work. The margin is for peaks from data sheets, which are rounded (H200:
# 4.8 TB/s is printed, 3201 MHz × 2 × 6144 bits make 4.92), and for clocks, read to about 1 %.
_PEAK_MARGIN = 1.05
# No cache is this much faster than memory: a core's first-level cache moves up to 192 bytes a cycle (two loads and a
# store of 512 bits), 700 GB/s at 3.7 GHz, 35 times one core's 20 GB/s; an H100's L1 caches together 33 TB/s, 10 times.
_CACHE_OVER_MEMORY = 100


def grade(
    measurement: Measurement,
    *,
    flops: float,
    min_bytes: float,
    spec: DeviceSpec,
    dtype: str | None,
    drift_ratio: float | None = None,
    options: TimingOptions | None = None,
    interpreted: bool = False,
    unchecked: str = "",
) -> Grade:
    """Grade one point.

    flops, min_bytes: what the work must compute and move through device memory, once per run. dtype: the arithmetic,
    for the peak; where it is None, or the device's peak in it is not known, the highest peak of the device counts.
    drift_ratio: time of the reference point now over its first time; None where there is none.
    options: what was asked for (target half width, cache, sample count); the defaults where it is not given.
    interpreted: it ran in triton's interpreter, which checks results and times nothing. unchecked: why its results
    could not be checked.
    """
    impossible = _impossible(measurement, flops, min_bytes, spec, dtype)
    if impossible:
        return Grade("rejected", tuple(impossible))
    options = options or TimingOptions()
    found = [
        *_precision(measurement, options),
        *_samples(measurement),
        *_discards(measurement),
        *_clock(measurement, spec),
        *_surroundings(measurement, options, drift_ratio),
    ]
    if unchecked:
        found.insert(0, (_WORTHLESS, unchecked))
    if interpreted:
        found.insert(0, (_WORTHLESS, "it ran in triton's interpreter: the time of no kernel"))
    weight = sum(w for w, _ in found)
    letter = "A" if weight == 0 else "B" if weight == 1 else "C" if weight <= 3 else "D"
    return Grade(letter, tuple(reason for _, reason in sorted(found, key=lambda f: -f[0])))


_Found = list[tuple[int, str]]


def _step(value: float, off: float, bad: float) -> int:
    return _BAD if value > bad else _OFF if value > off else _NOTE


def best_clock_mhz(measurement: Measurement) -> float | None:
    """The highest SM clock seen with this point; None where the device did not tell."""
    states = (measurement.state_before, measurement.state_after)
    seen = [*measurement.clocks_mhz, *(s.sm_clock_mhz for s in states if s.sm_clock_mhz is not None)]
    return max(seen, default=None)


def _impossible(m: Measurement, flops: float, min_bytes: float, spec: DeviceSpec, dtype: str | None) -> list[str]:
    """Sentences that name the figure and the peak it exceeds."""
    time_s = median(m.samples_us) * 1e-6
    found = []
    # Not a processor's clock: what it reports between runs is not what it ran at, and its peaks are bounds already.
    clock = best_clock_mhz(m) if spec.kind == "cuda" else None
    highest, which = _ceiling(spec, dtype, clock)
    tflops = flops / time_s / 1e12
    if tflops > highest * _PEAK_MARGIN:
        at = f"the {clock:.0f} MHz seen" if clock else "its highest clock"
        found.append(
            f"faster than the hardware's peak: {tflops:.4g} TFLOP/s, where {spec.name} reaches at most "
            f"{highest:.4g} TFLOP/s in {which} at {at}"
        )
    # Not all of min_bytes: up to a whole cache of it may have been there before, or be written back afterwards.
    gb_per_s = max(0.0, min_bytes - spec.l2_bytes) / time_s / 1e9
    if gb_per_s > spec.memory_gb_per_s * _PEAK_MARGIN:
        found.append(
            f"faster than the hardware's peak: at least {gb_per_s:.4g} GB/s through memory, where "
            f"{spec.name} reaches at most {spec.memory_gb_per_s:.4g} GB/s"
        )
    cached_gb_per_s = min_bytes / time_s / 1e9
    if cached_gb_per_s > spec.memory_gb_per_s * _CACHE_OVER_MEMORY:
        found.append(
            f"faster than the hardware's peak: {cached_gb_per_s:.4g} GB/s, over {_CACHE_OVER_MEMORY} times the "
            f"{spec.memory_gb_per_s:.4g} GB/s of {spec.name}'s memory, which no cache reaches"
        )
    return found


def _ceiling(spec: DeviceSpec, dtype: str | None, clock_mhz: float | None) -> tuple[float, str]:
    """The TFLOP/s that cannot be exceeded, and in which format: dtype, or the fastest where its peak is not known."""
    known = {name: ceiling for name in spec.peak_tflops if (ceiling := spec.ceiling(name, clock_mhz)) is not None}
    if dtype in known:
        return known[dtype], str(dtype)
    fastest = max(known, key=lambda name: known[name], default=None)
    return (float("inf"), "any format") if fastest is None else (known[fastest], f"{fastest}, its fastest format")


def _precision(m: Measurement, options: TimingOptions) -> _Found:
    found: _Found = []
    count = len(m.samples_us)
    if count < options.min_samples:
        few = f"{count} sample{'s' if count > 1 else ''}"
        if count < _FEWEST:
            found.append((_BAD, f"{few}, too few for an interval; {options.min_samples} were asked for"))
        else:
            found.append((_OFF, f"{few}, {options.min_samples} were asked for"))
    width = relative_half_width(m.samples_us, tick_us=tick(m.samples_us))
    if options.half_width < width < float("inf"):
        why = "the noise stopped falling" if m.stopped_by == "noise_floor" else f"stopped by {m.stopped_by}"
        found.append(
            (
                _BAD if width > _HALF_WIDTH_BAD_FACTOR * options.half_width else _OFF,
                f"the median is known to ±{width:.2%}, not to the ±{options.half_width:.2%} asked for ({why})",
            )
        )
    return found


def _samples(m: Measurement) -> _Found:
    found: _Found = []
    wide = spread(m.samples_us)
    if wide > _SPREAD_OFF:
        reason = f"samples spread by {wide:.0%} (10 % to 90 %; noise {noise(m.samples_us):.1%})"
        found.append((_step(wide, _SPREAD_OFF, _SPREAD_BAD), reason))
    outliers = outlier_share(m.samples_us)
    if outliers > _OUTLIERS_OFF:
        found.append((_OFF, f"{outliers:.0%} of the samples are far out"))
    half = len(m.samples_us) // 2
    if half >= _FEWEST:
        first, second = m.samples_us[:half], m.samples_us[-half:]
        trend = median(second) / median(first) - 1
        one, two = median_interval(first), median_interval(second)
        apart = one.high < two.low or two.high < one.low
        if abs(trend) > _TREND_OFF and apart:
            found.append((_OFF, f"times went {'up' if trend > 0 else 'down'} by {abs(trend):.1%} while sampling"))
    return found


def _discards(m: Measurement) -> _Found:
    found: _Found = []
    total = len(m.samples_us) + len(m.discarded)
    for kind, (words, worst) in _DISCARDED_KINDS.items():
        of_kind = [d for d in m.discarded if d.reason.startswith(kind)]
        kept = [d for d in of_kind if d.reason.endswith(KEPT)]
        if kept:
            why = kept[0].reason.removesuffix(KEPT).removeprefix(f"{kind}: ")
            found.append((_WORTHLESS, f"every sample was {words} ({why})"))
        elif of_kind:
            weight = min(worst, _step(len(of_kind) / total, _DISCARDED_OFF, _DISCARDED_BAD))
            found.append((weight, f"{len(of_kind)} of {total} samples {words} and discarded"))
    broken = [d for d in m.discarded if d.reason.startswith(NOT_A_TIME)]
    if broken:
        found.append((_BAD, f"{len(broken)} of {total} samples {broken[0].reason}"))
    if m.stopped_by == "discards":
        found.append((_OFF, "sampling was given up: batch after batch had to be discarded"))
    return found


def _clock(m: Measurement, spec: DeviceSpec) -> _Found:
    if spec.kind != "cuda":
        return []  # a processor does not tell its clock, and that is no fault of the point
    clocks = list(m.clocks_mhz)
    if not clocks:
        note = m.state_after.note or m.state_before.note
        return [(_OFF, "the SM clock is not known" + (f" ({note})" if note else ""))]
    found: _Found = []
    low, middle, high = quantiles(clocks, (0.1, 0.5, 0.9))
    unsteady = (high - low) / middle
    if unsteady > _CLOCK_SPREAD_OFF:
        reason = f"the SM clock moved between {low:.0f} and {high:.0f} MHz"
        found.append((_step(unsteady, _CLOCK_SPREAD_OFF, _CLOCK_SPREAD_BAD), reason))
    if middle < _CLOCK_LOW_OFF * spec.sm_clock_mhz:
        limited = _power_limited(m.state_before) or _power_limited(m.state_after)
        weight = _NOTE if limited else _BAD if middle < _CLOCK_LOW_BAD * spec.sm_clock_mhz else _OFF
        why = ", held down by the power limit" if limited else ""
        share = f"{middle / spec.sm_clock_mhz:.0%} of the {spec.sm_clock_mhz:.0f} MHz that the peak is stated at"
        found.append((weight, f"the SM clock was {middle:.0f} MHz, {share}{why}"))
    return found


def _power_limited(state: DeviceState) -> bool:
    return "sw_power_cap" in state.throttle_reasons


def _surroundings(m: Measurement, options: TimingOptions, drift_ratio: float | None) -> _Found:
    found: _Found = []
    if m.cache != options.cache:
        found.append((_BAD, f"measured with a {m.cache} cache, {options.cache} was asked for"))
    if drift_ratio is not None and not abs(drift_ratio - 1) <= _DRIFT_OFF:
        slower = "slower" if drift_ratio > 1 else "faster"
        weight = _step(abs(drift_ratio - 1), _DRIFT_OFF, _DRIFT_BAD) or _BAD
        found.append((weight, f"the reference point had become {abs(drift_ratio - 1):.1%} {slower} than at first"))
    others = max(s.other_processes or 0 for s in (m.state_before, m.state_after))
    if others:
        found.append((_OFF, f"{others} other process{'es' if others > 1 else ''} on the card"))
    hard = sorted({r for r in m.state_after.throttle_reasons if r in HARD_THROTTLES})
    if hard:
        found.append((_OFF, f"the card was protecting itself in the end ({', '.join(hard)})"))
    return found
