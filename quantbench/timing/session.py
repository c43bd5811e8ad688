"""How a point is sampled: warm up until it is steady, then take batches until a rule says stop. Policy only.

What is timed, and on what, stands behind `Sampler`; time and sleep are injected. So warming up, discarding, backing
off and giving up are tested on any machine with literals.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

from quantbench.device.nvml import HARMFUL_REASONS
from quantbench.device.spec import DeviceState
from quantbench.errors import MeasurementError
from quantbench.measurement import Discarded, Measurement
from quantbench.stats import median
from quantbench.timing.options import TimingOptions
from quantbench.timing.steadiness import Steadiness
from quantbench.timing.stopping import StoppingRule

# A batch takes about this long on the device: long enough that one synchronisation and one reading of the device's
# state (a millisecond or two) weigh little, short enough that a throttled stretch costs few samples.
_BATCH_US = 10_000.0

# A sample counts as throttled below this share of the clock that the same work ran at once it was steady (NVBench's
# share). It is taken from that and not from the data sheet's clock, because a large product under the power limit
# runs below 75 % of the boost clock for good: a threshold from the data sheet has discarded every sample before
# (NVBench issue 231).
THROTTLE_SHARE = 0.75

# NVML's reasons that say the card protects itself. The power limit is not among them: it is where large products
# live, and the clock recorded beside each sample tells it.
HARD_THROTTLES = HARMFUL_REASONS - {"sw_power_cap"}

# Back-off after a batch with throttled samples: NVBench sleeps 0.05 s; doubled while it does not help.
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.8

# Batches in a row without one good sample before sampling ends (1.55 s of pauses): the card will not recover soon.
# A preempted thread gets its core back within milliseconds, so such batches do not count.
_MAX_BAD_BATCHES = 5

# Warming up ends after so many batches whatever the clock says, so that one that stands still cannot hold it up.
_MAX_WARM_UP_ROUNDS = 2000

#: `Discarded.reason` begins with one of these.
THROTTLED = "throttled"
LAUNCH_GAP = "launch gap"
PREEMPTED = "preempted"
OTHER_THREADS = "other threads"
NOT_A_TIME = "not a time"
#: Ends the reason of the one discarded sample that speaks for all the others, which had to be kept.
KEPT = "; so were all the others, which are kept"


@dataclass(frozen=True)
class Batch:
    """Samples taken together.

    samples_us: device times of single runs. clocks_mhz: SM clock beside each sample; empty where it is not known.
    state: what the device was doing meanwhile. invalid: why a sample is not to be trusted ("launch gap: …") or "", one
    for each; empty where all are good.
    """

    samples_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...] = ()
    state: DeviceState = field(default_factory=DeviceState)
    invalid: tuple[str, ...] = ()


class Sampler(Protocol):
    """Somebody who can take samples of one point."""

    def sample(self, count: int) -> Batch:
        """Take about `count` samples, at least one."""


class Audit(Protocol):
    """Somebody who sees to it that what is timed is computed (`quantbench.providers.audit`)."""

    def before_sample(self) -> None:
        """Called before each sample, outside of its time, on the stream that the run is queued on; it may queue work,
        and must not wait for the device."""

    def after_sampling(self, sample: Callable[[], object]) -> None:
        """Called once after the last sample. sample: takes one more as those before were taken, and waits for it."""


@dataclass(frozen=True)
class WarmUp:
    """What warming up found. typical_us: median of the last samples. clock_mhz: their median clock, None where it is
    not known. steady: False where time ran out first. state: what the device was doing in the end."""

    typical_us: float
    clock_mhz: float | None
    steady: bool
    state: DeviceState


@dataclass(frozen=True)
class Collected:
    """What sampling left. stopped_by: the stopping rule's reason, or `discards` after too many bad batches."""

    samples_us: tuple[float, ...]
    clocks_mhz: tuple[float, ...]
    discarded: tuple[Discarded, ...]
    stopped_by: str
    state: DeviceState


def batch_size(typical_us: float, limit: int) -> int:
    """Samples that fill a batch, from 1 to `limit`."""
    return max(1, min(limit, int(_BATCH_US / typical_us)))


def warm_up(sampler: Sampler, *, window_s: float, limit_s: float, batch_limit: int, now: Callable[[], float]) -> WarmUp:
    """Run until times and clock are steady over two windows of window_s, at most limit_s.

    Warming up is sampling like later on, flushes included, and the samples are thrown away: the steady state
    of another mixture of work would be another clock. Raises MeasurementError when no sample is a time.
    """
    steadiness = Steadiness(window_s)
    start_s = now()
    count = 1
    while True:
        batch = sampler.sample(count)
        times = [t for t in batch.samples_us if _is_time(t)]
        elapsed_s = max(0.0, now() - start_s)
        if times:
            steadiness.add(elapsed_s, times, batch.clocks_mhz)
            count = batch_size(median(times), batch_limit)
        over = elapsed_s >= limit_s or steadiness.rounds >= _MAX_WARM_UP_ROUNDS or not times
        if over or steadiness.steady:
            break
    if not steadiness.rounds:
        raise MeasurementError("warm-up", f"samples of {batch.samples_us[:3]}", "finite times above 0")
    return WarmUp(steadiness.typical_us, steadiness.clock_mhz, steadiness.steady, batch.state)


def collect(
    sampler: Sampler, rule: StoppingRule, warm: WarmUp, *, batch_limit: int, sleep: Callable[[float], None]
) -> Collected:
    """Sample until `rule` is satisfied, discarding what was throttled and backing off meanwhile.

    When every sample would be discarded they are kept, all but the slowest clocked, whose reason says so. Raises
    MeasurementError when not one of them is a time.
    """
    good: list[_Sample] = []
    bad: list[_Sample] = []
    pause_s = _FIRST_PAUSE_S
    bad_batches = 0
    stopped_by = None
    while stopped_by is None:
        wanted = min(rule.missing, batch_size(warm.typical_us, batch_limit))
        batch = sampler.sample(wanted)
        samples = _judge(batch, warm.clock_mhz)
        accepted = [s for s in samples if not s.reason]
        good += accepted
        bad += [s for s in samples if s.reason]
        for s in accepted:
            rule.add(s.time_us)
        if accepted:
            bad_batches = 0
        elif not all(s.reason.startswith(PREEMPTED) for s in samples):
            bad_batches += 1
        stopped_by = rule.finished()
        if stopped_by is None and (bad_batches >= _MAX_BAD_BATCHES or len(bad) >= rule.max_samples):
            stopped_by = "discards"
        if stopped_by is None and not good and len(bad) > 1 and rule.out_of_time:
            stopped_by = "max_time"  # the rule itself waits for a first good sample
        if stopped_by is None and any(s.reason.startswith(THROTTLED) for s in samples):
            sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            pause_s = _FIRST_PAUSE_S
    if not good:
        good, bad = _keep(bad)
    clocks = tuple(s.clock_mhz for s in good if s.clock_mhz is not None)
    return Collected(
        samples_us=tuple(s.time_us for s in good),
        clocks_mhz=clocks if len(clocks) == len(good) else (),
        discarded=tuple(Discarded(s.time_us, s.reason, s.clock_mhz) for s in bad),
        stopped_by=stopped_by,
        state=batch.state,
    )


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
    """Collect as `options` ask and put together what is stored. mode, runs_per_sample: as in `Measurement`.
    tick_us: the resolution of one sample."""
    rule = StoppingRule(
        half_width=options.half_width,
        min_samples=options.min_samples,
        max_samples=options.max_samples,
        max_time_s=options.max_time_s,
        now=now,
        tick_us=tick_us,
    )
    with _no_garbage_collection():
        got = collect(sampler, rule, warm, batch_limit=batch_limit, sleep=pause)
    return Measurement(
        samples_us=got.samples_us,
        clocks_mhz=got.clocks_mhz,
        discarded=got.discarded,
        stopped_by=got.stopped_by,
        mode=mode,
        cache=options.cache,
        state_before=warm.state,
        state_after=got.state,
        kernels_per_sample=runs_per_sample,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector held back, as timeit does: it takes milliseconds, and may free device memory, which waits."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class _Sample:
    time_us: float
    clock_mhz: float | None
    reason: str


def _is_time(value: float) -> bool:
    return isfinite(value) and value > 0


def _judge(batch: Batch, steady_mhz: float | None) -> list[_Sample]:
    """Each sample with the reason why it does not count, or an empty one."""
    clocks: Sequence[float | None] = batch.clocks_mhz or [None] * len(batch.samples_us)
    hard = ", ".join(r for r in batch.state.throttle_reasons if r in HARD_THROTTLES)
    invalid = batch.invalid or [""] * len(batch.samples_us)
    judged = []
    for time_us, clock_mhz, why in zip(batch.samples_us, clocks, invalid, strict=True):
        if not _is_time(time_us):
            # Stored as 0: a record is JSON, which has no NaN. The reason keeps what was read.
            judged.append(_Sample(0.0, clock_mhz, f"{NOT_A_TIME}: {time_us!r} µs"))
        elif why:
            judged.append(_Sample(time_us, clock_mhz, why))
        elif hard:
            judged.append(_Sample(time_us, clock_mhz, f"{THROTTLED}: {hard}"))
        elif clock_mhz is not None and steady_mhz is not None and clock_mhz < THROTTLE_SHARE * steady_mhz:
            share = f"{clock_mhz:.0f} MHz is {clock_mhz / steady_mhz:.0%} of the steady {steady_mhz:.0f} MHz"
            judged.append(_Sample(time_us, clock_mhz, f"{THROTTLED}: {share}"))
        else:
            judged.append(_Sample(time_us, clock_mhz, ""))
    return judged


def _keep(bad: list[_Sample]) -> tuple[list[_Sample], list[_Sample]]:
    """Everything was discarded: keep the real times, and let the worst of them say so."""
    times = [s for s in bad if _is_time(s.time_us)]
    if len(times) < 2:
        raise MeasurementError("collect", f"{len(bad)} samples, none usable ({bad[-1].reason})", "finite times above 0")
    worst = min(times, key=lambda s: (s.clock_mhz or 0.0, -s.time_us))
    kept = [s for s in times if s is not worst]
    rest = [s for s in bad if not _is_time(s.time_us)]
    return kept, [*rest, _Sample(worst.time_us, worst.clock_mhz, worst.reason + KEPT)]
