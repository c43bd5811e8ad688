"""Timing on a processor: one pinned thread, one wall clock.

The embedded default where there is no GPU, measured as carefully as a shared machine allows: two threads on two shared
cores scatter by 20-26 %, one pinned thread by about 1.3 %.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.measurement import Measurement
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run
from quantbench.timing.session import PREEMPTED, Batch, sample_point, warm_up

if sys.platform == "linux":
    import resource

# Measured on an AMD EPYC (32 MiB L3), summing 4 MiB: 41 µs hot, 80 µs after reading one cache's worth, 93 µs after
# two, 102 µs after three and no more after four. Three cost 2.1 ms a sample there.
_FLUSH_LLC_MULTIPLE = 3

# One cache line is enough to bring it in.
_LINE_BYTES = 64

_MAX_BATCH = 16

# A core leaves its idle clock within milliseconds; what takes longer is the neighbours' business and not to be waited
# for. Two windows of 10 ms must agree.
_WARM_UP_WINDOW_S = 0.01
_WARM_UP_LIMIT_S = 0.25

# Long enough to count as having slept, short enough that the core keeps its clock.
_NAP_S = 0.0001

# perf_counter_ns reads the time stamp counter in nanoseconds, and a call takes 50 ns.
_TICK_US = 0.05


def thread_preemptions() -> int:
    """How often this thread has lost its core to another so far; 0 where the system does not count it (not Linux)."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


@dataclass(frozen=True)
class CpuClocks:
    """What the sampler reads; replaced in tests.

    wall_ns: the wall clock. thread_ns: time this thread has had on a core. preemptions: how often it has lost its core
    to another thread so far. nap: sleeps for so many seconds.
    """

    wall_ns: Callable[[], int] = time.perf_counter_ns
    thread_ns: Callable[[], int] = time.thread_time_ns
    preemptions: Callable[[], int] = thread_preemptions
    nap: Callable[[float], None] = time.sleep


class CpuSampler:
    """Each run between two readings of the wall clock, after a flush where it is to be cold.

    buffer: what is read before each run, one word per cache line; None for a hot cache. Reading and not writing: lines
    that were only read cost the run nothing when they make room, modified ones would be written back in its time.

    A run during which the thread lost its core is marked as preempted, and its time is what the thread had of
    the core: nearer to the truth than the wall clock, should nothing better be had. After one, the thread naps
    between flush and run, since the scheduler gives a thread that wakes a whole slice of time.
    """

    def __init__(self, run: Run, buffer: npt.NDArray[np.int64] | None, clocks: CpuClocks) -> None:
        self._run = run
        self._lines = None if buffer is None else buffer[:: _LINE_BYTES // buffer.itemsize]
        self._clocks = clocks
        self._crowded = False

    def sample(self, count: int) -> Batch:
        """`count` samples."""
        taken = [self._sample() for _ in range(count)]
        return Batch(tuple(time_us for time_us, _ in taken), invalid=tuple(why for _, why in taken))

    def _sample(self) -> tuple[float, str]:
        clocks = self._clocks
        if self._lines is not None:
            self._lines.sum()
        if self._crowded:
            clocks.nap(_NAP_S)
        before = clocks.preemptions()
        thread_start_ns = clocks.thread_ns()
        start_ns = clocks.wall_ns()
        self._run()
        stop_ns = clocks.wall_ns()
        thread_stop_ns = clocks.thread_ns()
        lost = clocks.preemptions() - before
        self._crowded = lost > 0
        if not lost:
            return (stop_ns - start_ns) / 1e3, ""
        times = "once" if lost == 1 else f"{lost} times"
        return (thread_stop_ns - thread_start_ns) / 1e3, f"{PREEMPTED}: the core went to others {times}"


class CpuTimer:
    """Times runs on one core. Arguments and attributes as for `CudaTimer`; clocks, now, pause: for tests.

    While it measures, the calling thread is pinned to one core and torch to one thread; both are put back after.
    """

    def __init__(
        self,
        options: TimingOptions,
        spec: DeviceSpec,
        state: Callable[[], DeviceState],
        *,
        clocks: CpuClocks | None = None,
        now: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if spec.kind != "cpu":
            raise InputError("CpuTimer", f"a device of kind {spec.kind!r}", "a processor")
        options.require_device("cpu")
        self._options = options
        self._state = state
        self._clocks = clocks or CpuClocks()
        self._now = now
        self._pause = pause
        # Ones: pages of a fresh buffer of zeros are all the same page, which stays in the first-level cache.
        words = _FLUSH_LLC_MULTIPLE * spec.l2_bytes // 8
        self._buffer = np.ones(words, dtype=np.int64) if options.cache == "cold" else None
        self.warmup_s = 0.0
        self.measuring_s = 0.0

    def measure(self, run: Run, *, rotate: Sequence[Run] = (), min_bytes: int | None = None) -> Measurement:
        """Time `run`, which returns when its work is done. rotate and min_bytes are not needed on a processor."""
        with _one_thread():
            return self._measure(run)

    def _measure(self, run: Run) -> Measurement:
        start_s = self._now()
        before = self._state()
        run()  # the first call may pack weights, build a primitive, touch fresh pages
        sampler = CpuSampler(run, self._buffer, self._clocks)
        warm = warm_up(
            sampler,
            window_s=_WARM_UP_WINDOW_S,
            limit_s=min(_WARM_UP_LIMIT_S, self._options.max_time_s),
            batch_limit=_MAX_BATCH,
            now=self._now,
        )
        warm_s = self._now()
        self.warmup_s += warm_s - start_s
        try:
            measurement = sample_point(
                sampler,
                self._options,
                warm,
                mode="cpu",
                runs_per_sample=1,
                batch_limit=_MAX_BATCH,
                tick_us=_TICK_US,
                now=self._now,
                pause=self._pause,
            )
        finally:
            self.measuring_s += self._now() - warm_s
        return replace(measurement, state_before=before, state_after=self._state())


@contextmanager
def _one_thread() -> Iterator[None]:
    """The calling thread on one core (the last allowed one: interrupts favour the first) and torch on one thread."""
    torch = sys.modules.get("torch")  # where nobody has imported it there is nothing to hold back
    threads = torch.get_num_threads() if torch else 0
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    if torch:
        torch.set_num_threads(1)
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if torch:
            torch.set_num_threads(threads)
