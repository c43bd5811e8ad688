"""Samples a point: warms up, then takes batches until the stopping rule is satisfied.

The warm-up lasts until the times are steady. The device, the timer and the sleep are injected, so
that tests can simulate them.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Protocol

from quantbench.device.nvml import HARMFUL_REASONS
from quantbench.device.spec import DeviceState
from quantbench.errors import MeasurementError
from quantbench.measurement import Discarded, MeanClock, Measurement
from quantbench.stated import stated
from quantbench.stats import median, typical_us
from quantbench.timing.mean_clock import MeanClocks
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run
from quantbench.timing.stopping import Steadiness, StoppingRule, same_clock
from quantbench.units import percent

# Device time of a batch. It is long compared with one synchronisation and one reading of the device
# state, which take a millisecond or two. It is short enough that a throttled stretch costs few
# samples.
_BATCH_US = 10_000.0

# A sample is throttled if its SM clock is below this fraction of the steady clock of the same work
# (NVBench uses the same fraction). The clock of the data sheet cannot be used: a large GEMM under
# the power limit stays below 75 % of the boost clock, so every sample would be discarded (NVBench
# issue 231).
_THROTTLE_SHARE = 0.75

#: Throttle reasons of NVML that mean that the card protects itself. The power limit is not one of
#: them, because large GEMMs always run at it, and the clock that is recorded with each sample shows
#: it.
HARD_THROTTLES = HARMFUL_REASONS - {"sw_power_cap"}

# Pause after a batch with throttled samples. It is doubled after each further such batch. NVBench
# sleeps for 0.05 s.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.8

# Sampling is given up after this many batches in a row without a good sample. If all of them were
# throttled, the pauses between them add up to 0.75 s. Batches in which the thread was only
# preempted do not count, because it gets its core back within milliseconds.
_MAX_BAD_BATCHES = 5

# If an SM clock changes by more than this fraction within 50 ms, it has not merely wandered: work
# has begun, or the power limit acts.
_JUMP = 0.05

# Approximate maximum number of steady samples of the warm-up that are reused. More would make
# records large, because a record has two numbers (time and clock) for each sample.
_MOST_REUSED = 64

# Only the clocks of this last part of a point are used for the mean clock, because the clock may
# still climb a little at its beginning.
_SETTLED_S = 0.02

# Maximum number of batches of a warm-up, so that it ends even if the timer of the host stands
# still.
_MAX_WARM_UP_ROUNDS = 2000

#: `Discarded.reason` begins with THROTTLED, LAUNCH_GAP, PREEMPTED, OTHER_THREADS or NOT_A_TIME
THROTTLED = "throttled"
#: maximum number of samples behind one hold; more would save little of the time of a batch
MAX_QUEUED = 16
LAUNCH_GAP = "launch gap"
PREEMPTED = "preempted"
OTHER_THREADS = "other threads"
NOT_A_TIME = "not a time"
#: end of the reason of the one discarded sample if every sample was bad and the others were kept
KEPT = "; so were all the others, which are kept"


@dataclass(frozen=True)
class Batch:
    """Samples that were taken with one synchronisation.

    samples_us: device times of single runs, in µs.
    clocks_mhz: SM clock of each sample; empty if unknown.
    state: state of the device while it worked.
    invalid: for each sample the reason why it is invalid ("launch gap: …") or ""; empty if all
        samples are valid.
    """

    samples_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...] = ()
    state: DeviceState = field(default_factory=DeviceState)
    invalid: tuple[str, ...] = ()


class Sampler(Protocol):
    """Source of the samples of one point."""

    def sample(self, count: int) -> Batch:
        """Takes about `count` samples, at least one."""


class Audit(Protocol):
    """Check that the timed work is really computed.

    The implementation is `quantbench.providers.audit.Audit`.
    """

    def before_sample(self) -> None:
        """Is called before each sample, on the stream of the run, and is not timed.

        The method may queue work but must not wait for the device.
        """

    def after_sampling(self, sample: Callable[[], object]) -> None:
        """Is called once after the last sample.

        sample: function that takes one more sample in the same way and waits for it.
        """


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up.

    typical_us: median time of the last samples, in µs.
    clock_mhz: median SM clock of the last samples; None if unknown.
    steady: whether the times became steady before the time limit.
    state: device state at the end.
    light: whether the runs took only a small part of the time (see `Steadiness`).
    batches: steady batches at the end, each with the time when it ended.
    """

    typical_us: float
    clock_mhz: float | None
    steady: bool
    state: DeviceState
    light: bool = False
    batches: tuple[tuple[float, Batch], ...] = ()


def batch_size(typical_us: float, limit: int) -> int:
    """Returns the number of samples that fill a batch, from 1 to `limit`."""
    return max(1, min(limit, int(_BATCH_US / typical_us)))


def warm_up(
    sampler: Sampler,
    *,
    window_s: float,
    limit_s: float,
    batch_limit: int,
    now: Callable[[], float],
    known_mhz: float | None = None,
) -> WarmUp:
    """Samples until the times and the clock are steady over two windows, or until a time limit.

    The samples are taken exactly as in the measurement, including flushes, because other work would
    settle at another clock.

    window_s: length of a window, in s.
    limit_s: time limit, in s.
    batch_limit: maximum number of samples in a batch.
    now: function that reads the time, in s.
    known_mhz: SM clock at which earlier light work was steady. At this clock, short windows suffice
        for light work (see `Steadiness`).
    Raises MeasurementError if no sample is a finite positive time.
    """
    steadiness = Steadiness(window_s, known_mhz)
    start_s = now()
    count = 1
    batches = []
    while True:
        batch = sampler.sample(count)
        times = list(filter(_is_time, batch.samples_us))
        at_s = now()
        batches.append((at_s, batch))
        elapsed_s = max(0.0, at_s - start_s)
        if times:
            steadiness.add(elapsed_s, times, batch.clocks_mhz)
            count = batch_size(typical_us(times), batch_limit)
        over = elapsed_s >= limit_s or steadiness.rounds >= _MAX_WARM_UP_ROUNDS or not times
        if over or steadiness.steady:
            break
    if not steadiness.rounds:
        raise MeasurementError(
            "warm-up", f"samples of {batch.samples_us[:3]}", "finite times above 0"
        )
    return WarmUp(
        typical_us=steadiness.typical_us,
        clock_mhz=steadiness.clock_mhz,
        steady=steadiness.steady,
        state=batch.state,
        light=steadiness.light,
        batches=_last(batches, steadiness.counted_s) if steadiness.steady else (),
    )


def _last(batches: list[tuple[float, Batch]], seconds: float) -> tuple[tuple[float, Batch], ...]:
    """Returns the batches of the last seconds, after the last jump of the clock.

    If these batches have more than _MOST_REUSED samples, only every second, third, … batch is
    returned.
    """
    end_s, end = batches[-1]
    recent = []
    many = 0
    for at_s, batch in reversed(batches):
        if end_s - at_s >= seconds or _jumped(batch.clocks_mhz, end.clocks_mhz):
            break
        recent.append((at_s, batch))
        many += len(batch.samples_us)
    recent.reverse()
    return tuple(recent[:: max(1, -(-many // _MOST_REUSED))])


def _jumped(before_mhz: Sequence[float], after_mhz: Sequence[float]) -> bool:
    """Returns whether two SM clocks differ by more than an SM clock wanders."""
    if not before_mhz or not after_mhz:
        return False
    return abs(median(before_mhz) / median(after_mhz) - 1) > _JUMP


def sample_point(
    sampler: Sampler,
    options: TimingOptions,
    warm: WarmUp,
    *,
    mode: str,
    runs_per_sample: int,
    batch_limit: int,
    tick_us: float,
    now: Callable[[], float],
    pause: Callable[[float], None],
    clocks: MeanClocks | None = None,
) -> Measurement:
    """Samples a point after its warm-up.

    Sampling ends when the stopping rule is satisfied or sampling is given up. Sampling is given up
    after too many bad batches (stopped by `discards`). Throttled samples are discarded, and a pause
    follows them. If every sample was bad, all are kept except the one with the lowest clock, whose
    reason ends with `KEPT`.

    mode, runs_per_sample: stored in the `Measurement`.
    batch_limit: maximum number of samples in a batch.
    tick_us: resolution of one sample, in µs.
    now: function that reads the time, in s.
    pause: function that sleeps for a number of seconds.
    clocks: mean SM clocks of the points so far, to which times are corrected; None if SM clocks are
        not recorded. With them, the steady samples of the warm-up are used too, because they show
        more of the clock than one batch.

    Raises MeasurementError if every sample was bad and fewer than two are finite positive times.
    """
    good: list[Discarded] = []
    bad: list[Discarded] = []
    seen: list[tuple[float, Batch]] = []

    def mean_clock(own_mhz: Sequence[float]) -> MeanClock | None:
        """Returns the mean SM clock now; None if the clocks are unknown."""
        if clocks is None or not own_mhz:
            return None
        return clocks.of(now(), own_mhz, limited=_limited(seen))

    def widths(samples_us: Sequence[float]) -> tuple[float, float]:
        """Returns the relative half-width of the time, and the part that more samples narrow."""
        own_mhz = _clocks_mhz(good)
        found = stated(samples_us, own_mhz, mean_clock(own_mhz), tick_us)
        return found.relative_half_width, found.sampling

    rule = StoppingRule(
        half_width=options.half_width,
        min_samples=options.min_samples,
        max_samples=options.max_samples,
        max_time_s=options.max_time_s,
        now=now,
        widths=widths,
    )
    if clocks is not None:
        for at_s, batch in warm.batches:
            accepted, _ = _judge(batch, warm.clock_mhz)
            if len(good) + len(accepted) < options.max_samples:
                good += accepted
                seen.append((at_s, batch))
        for s in good:
            rule.add(s.sample_us)
    pause_s = _FIRST_PAUSE_S
    bad_batches = 0
    stopped_by = None
    with _no_garbage_collection():
        while stopped_by is None:
            wanted = min(rule.missing, batch_size(warm.typical_us, batch_limit))
            batch = sampler.sample(wanted)
            seen.append((now(), batch))
            accepted, rejected = _judge(batch, warm.clock_mhz)
            good += accepted
            bad += rejected
            for s in accepted:
                rule.add(s.sample_us)
            kinds = {s.reason.partition(":")[0] for s in rejected}
            if accepted:
                bad_batches = 0
            elif kinds - {PREEMPTED}:
                bad_batches += 1
            given_up = bad_batches >= _MAX_BAD_BATCHES or len(bad) >= rule.max_samples
            stopped_by = rule.finished()
            if stopped_by is None and given_up:
                stopped_by = "discards"
            if stopped_by is None and not good and len(bad) > 1 and rule.out_of_time:
                stopped_by = "max_time"  # the rule itself waits for a first good sample
            if stopped_by is None and THROTTLED in kinds:
                pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = _FIRST_PAUSE_S
    if not good:
        good, bad = _keep(bad)
    clocks_mhz = _clocks_mhz(good)
    mean = mean_clock(clocks_mhz)
    if clocks is not None and clocks_mhz and not _limited(seen):
        end_s = seen[-1][0]
        last = [(at_s, batch.clocks_mhz) for at_s, batch in seen if end_s - at_s <= _SETTLED_S]
        clocks.learn(clocks_mhz, [each for each in last if each[1]])
    return Measurement(
        samples_us=tuple(s.sample_us for s in good),
        clocks_mhz=clocks_mhz if len(clocks_mhz) == len(good) else (),
        discarded=tuple(bad),
        stopped_by=stopped_by,
        mode=mode,
        cache=options.cache,
        state_before=warm.state,
        state_after=batch.state,
        kernels_per_sample=runs_per_sample,
        mean_clock=mean,
    )


def _clocks_mhz(samples: Sequence[Discarded]) -> tuple[float, ...]:
    """Returns the clocks of the samples that have a clock."""
    return tuple(s.clock_mhz for s in samples if s.clock_mhz is not None)


def _limited(batches: Sequence[tuple[float, Batch]]) -> bool:
    """Returns whether the power limit held the clock down in one of the batches."""
    return any("sw_power_cap" in batch.state.throttle_reasons for _, batch in batches)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables Python's garbage collector within the block, as timeit does.

    A collection takes milliseconds, and freeing device memory waits for the device.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Timer:
    """Base class of the timers, which time runs on one device.

    A process should create one timer with `make_timer`, because its creation allocates and
    compiles. Subclasses for GPUs set _floor_us, the time of an empty kernel, and _mean_clocks.

    warmup_s, measuring_s: wall time spent so far on warm-ups and on sampling, in s.
    """

    _batch_limit: int
    _warm_up_window_s: float
    _warm_up_limit_s: float

    def __init__(
        self, options: TimingOptions, now: Callable[[], float], pause: Callable[[float], None]
    ) -> None:
        self._options = options
        self._now = now
        self._pause = pause
        # Clock at which light work was last steady over whole windows.
        self._known_mhz: float | None = None
        self._mean_clocks: MeanClocks | None = None
        self._floor_us: float | None = None
        self.warmup_s = 0.0
        self.measuring_s = 0.0

    def measure(
        self,
        run: Run,
        *,
        copy: Callable[[int], Run] | None = None,
        min_bytes: int | None = None,
        audit: Audit | None = None,
    ) -> Measurement:
        """Times `run`.

        run: function that does the work once. On CUDA it queues the work on the current stream.
        copy: function that makes a run of the same work on another copy of its data. Its argument
            is the number of the copy, from 0.
        min_bytes: minimum number of bytes that one run touches. `min_bytes` and `copy` allow cold
            times of short kernels on CUDA (see `quantbench.timing.rotation`); both are ignored on a
            CPU.
        audit: object that checks the results.

        Raises MeasurementError if no sample is a finite positive time, and whatever `run` and
        `audit` raise.
        """
        raise NotImplementedError

    def _warm_up(self, sampler: Sampler) -> WarmUp:
        """Warms up, and updates the known clock of light work."""
        warm = warm_up(
            sampler,
            window_s=self._warm_up_window_s,
            limit_s=min(self._warm_up_limit_s, self._options.max_time_s),
            batch_limit=self._batch_limit,
            now=self._now,
            known_mhz=self._known_mhz,
        )
        # The known clock changes only if light work is steady over whole windows at a clock that
        # differs by more than 1 %, so it cannot follow a slow ramp.
        moved = warm.clock_mhz and not same_clock(warm.clock_mhz, self._known_mhz)
        if warm.steady and warm.light and moved:
            self._known_mhz = warm.clock_mhz
        return warm

    def _sample(
        self,
        sampler: Sampler,
        warm: WarmUp,
        audit: Audit | None,
        start_s: float,
        mode: str,
        runs: int,
        tick_us: float,
    ) -> Measurement:
        """Samples a point after its warm-up and audits it.

        start_s: time when the warm-up began, in s.
        runs: number of runs per sample.
        """
        warm_s = self._now()
        self.warmup_s += warm_s - start_s
        try:
            measurement = sample_point(
                sampler,
                self._options,
                warm,
                mode=mode,
                runs_per_sample=runs,
                batch_limit=self._batch_limit,
                tick_us=tick_us,
                now=self._now,
                pause=self._pause,
                clocks=self._mean_clocks,
            )
        finally:
            self.measuring_s += self._now() - warm_s
        if audit is not None:
            audit.after_sampling(lambda: sampler.sample(1))
        return replace(measurement, floor_us=self._floor_us)


def _is_time(value: float) -> bool:
    """Returns whether a value is a finite positive time."""
    return isfinite(value) and value > 0


def before_sample(audit: Audit | None) -> Run:
    """Returns the function to call before each sample, which does nothing without an audit."""
    if audit is None:
        return lambda: None
    return audit.before_sample


def _judge(batch: Batch, steady_mhz: float | None) -> tuple[list[Discarded], list[Discarded]]:
    """Splits the samples of a batch into good and bad ones.

    Good samples have an empty reason, bad samples the reason why they are discarded.

    steady_mhz: steady clock of the same work; None if unknown.
    """
    clocks: Sequence[float | None] = batch.clocks_mhz or [None] * len(batch.samples_us)
    hard = ", ".join(r for r in batch.state.throttle_reasons if r in HARD_THROTTLES)
    invalid = batch.invalid or [""] * len(batch.samples_us)
    good: list[Discarded] = []
    bad: list[Discarded] = []
    for time_us, clock_mhz, why in zip(batch.samples_us, clocks, invalid, strict=True):
        if not _is_time(time_us):
            # The time is stored as 0, because JSON has no NaN. The reason keeps the value.
            why = f"{NOT_A_TIME}: {time_us!r} µs"
            time_us = 0.0
        elif not why and hard:
            why = f"{THROTTLED}: {hard}"
        elif not why and clock_mhz is not None and steady_mhz:
            share = clock_mhz / steady_mhz
            if clock_mhz < _THROTTLE_SHARE * steady_mhz:
                steady = f"the steady {steady_mhz:.0f} MHz"
                why = f"{THROTTLED}: {clock_mhz:.0f} MHz is {percent(share)} of {steady}"
        kind = bad if why else good
        kind.append(Discarded(time_us, why, clock_mhz))
    return good, bad


def _keep(bad: list[Discarded]) -> tuple[list[Discarded], list[Discarded]]:
    """Splits samples that were all bad into kept and discarded samples.

    All finite positive times are kept except the one with the lowest clock, whose reason ends with
    KEPT.
    Raises MeasurementError if fewer than two samples are finite positive times.
    """
    times = [s for s in bad if _is_time(s.sample_us)]
    if len(times) < 2:
        raise MeasurementError(
            "collect", f"{len(bad)} samples, none usable ({bad[-1].reason})", "finite times above 0"
        )
    worst = min(times, key=lambda s: (s.clock_mhz or 0.0, -s.sample_us))
    kept = [s for s in times if s is not worst]
    rest = [s for s in bad if not _is_time(s.sample_us)]
    return kept, [*rest, replace(worst, reason=worst.reason + KEPT)]
