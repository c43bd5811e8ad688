"""Samples a point (one workload of a sweep): warms up, then takes batches of samples.

The warm-up ends when the times are steady, and the sampling when a stopping rule is satisfied.
`Timer` is the base class of `CudaTimer` and `CpuTimer`. The device, the clock and the sleep are
injected, so that tests can simulate them.
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
from quantbench.measurement import Discarded, Measurement
from quantbench.stats import median, typical_us
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run
from quantbench.timing.stopping import Steadiness, StoppingRule, same_clock
from quantbench.units import percent

# Device time of a batch. A batch ends with one synchronisation and one reading of the device state,
# which take one or two milliseconds and should cost little in comparison. A shorter batch loses
# fewer samples if the card throttles.
_BATCH_US = 10_000.0

# A sample is throttled if its SM clock is below this fraction of the same work's steady clock
# (NVBench uses the same fraction). The data sheet's boost clock cannot be the reference: a large
# GEMM under the power limit stays below 75 % of it, so every sample would be discarded (NVBench
# issue 231).
_THROTTLE_SHARE = 0.75

#: NVML's throttle reasons for which samples are discarded, because the card protects itself. The
#: power limit is not included: large GEMMs always run at this limit, and each sample's recorded
#: clock shows its effect.
HARD_THROTTLES = HARMFUL_REASONS - {"sw_power_cap"}

# Pause after a batch with throttled samples, in s. It is doubled after each further such batch.
# NVBench sleeps for 0.05 s.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.8

# Sampling is given up after this many successive batches without a good sample. If all were
# throttled, the pauses between them add up to 0.75 s. Batches whose bad samples were only preempted
# do not count, because the thread gets its core back within milliseconds.
_MAX_BAD_BATCHES = 5

# Relative change in the SM clock between two batches that counts as a jump. A clock does not wander
# that far: a jump means that work has begun, or that the power limit acts.
_JUMP = 0.05

# Approximate maximum number of the warm-up's steady samples that a measurement reuses. More would
# make records large, because a record has two numbers (time and clock) for each sample.
_MOST_REUSED = 64

# Maximum number of batches in a warm-up, so that it ends even if the host's timer stands still.
_MAX_WARM_UP_ROUNDS = 2000

#: `Discarded.reason` begins with THROTTLED, LAUNCH_GAP, PREEMPTED, OTHER_THREADS or NOT_A_TIME.
THROTTLED = "throttled"
#: Maximum number of samples that are queued while the stream is held (see `cuda_samplers`). More
#: samples per synchronisation would save little time.
MAX_QUEUED = 16
LAUNCH_GAP = "launch gap"
PREEMPTED = "preempted"
OTHER_THREADS = "other threads"
NOT_A_TIME = "not a time"
#: Suffix of a discard reason. If every sample of a point is bad, only one is discarded, and its
#: reason has this suffix.
KEPT = "; so were all the others, which are kept"


@dataclass(frozen=True)
class Batch:
    """Samples that were taken with one synchronisation.

    samples_us: device time per run of each sample, in µs.
    clocks_mhz: SM clock of each sample; empty if unknown.
    state: state of the device during the batch.
    invalid: for each sample, the reason why it is invalid ("launch gap: …"), or "" if it is valid;
        empty if all samples are valid.
    """

    samples_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...] = ()
    state: DeviceState = field(default_factory=DeviceState)
    invalid: tuple[str, ...] = ()


class Sampler(Protocol):
    """Source of the samples of one point."""

    def sample(self, count: int) -> Batch:
        """Takes up to `count` samples, at least one."""


class Audit(Protocol):
    """Check that the timed work is really computed.

    The implementation is `quantbench.providers.audit.Audit`.
    """

    def before_sample(self) -> None:
        """Prepares the next sample, such as by changing the inputs.

        The timer calls this method on the run's stream, outside the timed interval. The method may
        queue work, but must not wait for the device.
        """

    def after_sampling(self, sample: Callable[[], object]) -> None:
        """Checks the results, once after the last sample.

        sample: function that takes one more sample in the same way, and waits for it.
        """


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up.

    typical_us: median time over the last window, in µs.
    clock_mhz: median SM clock over the last window; None if unknown.
    steady: whether the times became steady before the time limit.
    state: device state in the last batch.
    light: whether the work is too light to reach the power limit (see `Steadiness.light`).
    batches: the steady batches at the end.
    """

    typical_us: float
    clock_mhz: float | None
    steady: bool
    state: DeviceState
    light: bool = False
    batches: tuple[Batch, ...] = ()


def batch_size(typical_us: float, limit: int) -> int:
    """Returns the number of samples in a batch, from 1 to `limit`, for a time per sample in µs."""
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
    """Samples until times and clocks agree over two successive windows, or until a time limit.

    The samples are taken exactly as in the measurement, including flushes, because other work would
    settle at another clock.

    sampler: source of the samples.
    window_s: length of a window, in s.
    limit_s: time limit, in s.
    batch_limit: maximum number of samples in a batch.
    now: function that reads the time, in s.
    known_mhz: SM clock at which earlier light work was steady; None if unknown. At this clock,
        short windows suffice for light work (see `Steadiness`).

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


def _last(batches: list[tuple[float, Batch]], seconds: float) -> tuple[Batch, ...]:
    """Returns the batches of the last `seconds`, but none from before the clock's last jump.

    If these batches have more than _MOST_REUSED samples, only every second (third, …) batch is
    returned.

    batches: time when each batch ended, in s, and the batch.
    """
    end_s, end = batches[-1]
    recent = []
    many = 0
    for at_s, batch in reversed(batches):
        if end_s - at_s >= seconds or _jumped(batch.clocks_mhz, end.clocks_mhz):
            break
        recent.append(batch)
        many += len(batch.samples_us)
    recent.reverse()
    return tuple(recent[:: max(1, -(-many // _MOST_REUSED))])


def _jumped(before_mhz: Sequence[float], after_mhz: Sequence[float]) -> bool:
    """Returns whether the median SM clocks of two batches differ by a jump (see _JUMP)."""
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
) -> Measurement:
    """Samples a point after its warm-up, whose steady samples count too.

    Sampling ends when the stopping rule is satisfied, or after too many bad batches (stopped by
    `discards`). Throttled and invalid samples are bad, and are discarded. A pause follows a batch
    with throttled samples. If every sample of the point was bad, all are kept except the sample
    with the lowest clock, whose reason ends with `KEPT`.

    sampler: source of the samples.
    warm: result of the point's warm-up.
    mode, runs_per_sample: values for the fields `mode` and `kernels_per_sample` of the result.
    batch_limit: maximum number of samples in a batch.
    tick_us: resolution of one sample, in µs.
    now: function that reads the time, in s.
    pause: function that sleeps for a number of seconds.

    Raises MeasurementError if every sample was bad and fewer than two are finite positive times.
    """
    good: list[Discarded] = []
    bad: list[Discarded] = []
    rule = StoppingRule(
        half_width=options.half_width,
        min_samples=options.min_samples,
        max_samples=options.max_samples,
        max_time_s=options.max_time_s,
        now=now,
        tick_us=tick_us,
    )
    for batch in warm.batches:
        accepted, _ = _judge(batch, warm.clock_mhz)
        if len(good) + len(accepted) < options.max_samples:
            good += accepted
    for s in good:
        rule.add(s.sample_us)
    pause_s = _FIRST_PAUSE_S
    bad_batches = 0
    stopped_by = None
    with _no_garbage_collection():
        while stopped_by is None:
            wanted = min(rule.missing, batch_size(warm.typical_us, batch_limit))
            batch = sampler.sample(wanted)
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
    clocks_mhz = tuple(s.clock_mhz for s in good if s.clock_mhz is not None)
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
    )


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
    """Base class of the timers, each of which times work on one device.

    A process should create only one timer, with `make_timer`, because a new timer allocates memory
    and compiles kernels. On GPUs, subclasses set _floor_us, the time of an empty kernel.

    warmup_s: wall time spent on warm-ups so far, in s.
    measuring_s: wall time spent on sampling so far, in s.
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

        run: function that does the work once. On CUDA, it queues the work on the current stream.
        copy: function that returns a run of the same work on another copy of the data. Its argument
            is the number of the copy, from 0.
        min_bytes: minimum number of bytes that one run touches. The mode `graph` needs `copy` and
            `min_bytes` for a cold cache (see `quantbench.timing.rotation`). A CPU ignores them.
        audit: check of the results; None for no check.

        Raises MeasurementError if no sample is a finite positive time. Exceptions of `run` and
        `audit` pass through.
        """
        raise NotImplementedError

    def _warm_up(self, sampler: Sampler) -> WarmUp:
        """Warms up, and updates the clock at which light work is known to be steady."""
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

        start_s: time when `measure` began, in s.
        runs: number of runs per sample.
        tick_us: resolution of one sample, in µs.
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
    """Splits a batch into good and bad samples.

    A good sample has an empty reason. A bad sample has the reason why it is discarded.

    steady_mhz: SM clock at which the same work was steady; None if unknown.
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
    """Splits a point's samples, all of which are bad, into kept and discarded samples.

    All finite positive times are kept, except the sample with the lowest clock. Its reason ends
    with KEPT.

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
