"""Times runs on a CPU with the wall clock, on one pinned thread.

One thread gives repeatable times: on a machine with two shared cores, the times of one pinned
thread scatter by about 1.3 %, and the times of two threads by 20 to 26 %.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.measurement import Measurement
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run
from quantbench.timing.session import (
    OTHER_THREADS,
    PREEMPTED,
    Audit,
    Batch,
    Timer,
    before_sample,
)
from quantbench.units import percent

if sys.platform == "linux":
    import resource

# The flush before a cold sample reads this many times the size of the last-level cache. On an AMD
# EPYC (32 MiB L3), summing 4 MiB takes 41 µs with a hot cache. After a flush of 1, 2, 3 and 4 times
# the cache size, it takes 80, 93, 102 and 102 µs. A flush of 3 times the size costs 2.1 ms.
_FLUSH_LLC_MULTIPLE = 3

# Size of a cache line in bytes. The flush reads one word per line.
_LINE_BYTES = 64

# Length of the sleep after a preempted run, in s. It is long enough for the scheduler to count the
# thread as having slept, and short enough that the core keeps its clock frequency.
_NAP_S = 0.0001

# A run counts as helped by other threads, and its sample is discarded, if the process's other
# threads use more CPU time during the run than _HELP_SHARE of its wall time plus _HELP_NS. _HELP_NS
# covers the time to read the clocks.
_HELP_SHARE = 0.2
_HELP_NS = 20_000

# Resolution of a sample: the 50 ns that a call of perf_counter_ns takes.
_TICK_US = 0.05


def thread_preemptions() -> int:
    """Returns how often this thread has lost its core so far, or 0 on a system other than Linux."""
    if sys.platform != "linux":
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


@dataclass(frozen=True)
class CpuClocks:
    """Clocks that `CpuSampler` reads; tests replace them.

    wall_ns: function that reads the wall clock, in ns.
    thread_ns: function that reads the CPU time of this thread, in ns.
    preemptions: function that returns how often this thread has lost its core.
    nap: function that sleeps for a number of seconds.
    process_ns: function that reads the CPU time of all threads of the process, in ns; None to
        ignore other threads.
    """

    wall_ns: Callable[[], int] = time.perf_counter_ns
    thread_ns: Callable[[], int] = time.thread_time_ns
    preemptions: Callable[[], int] = thread_preemptions
    nap: Callable[[float], None] = time.sleep
    process_ns: Callable[[], int] | None = None


class CpuSampler:
    """Sampler that reads the wall clock before and after each run.

    A run is preempted, and so invalid, if the thread lost its core during the run. Its sample is
    the thread's CPU time. The next run follows a short sleep, because a thread that wakes up gets a
    whole time slice. A run is also invalid if other threads of the process worked during the run.

    run: function that does the work once.
    buffer: array that is read before each run to make the cache cold; None for a hot cache. Reading
        leaves clean cache lines, which need no write-back during the run.
    before: function that is called before each sample.
    """

    def __init__(
        self,
        run: Run,
        buffer: npt.NDArray[np.int64] | None,
        clocks: CpuClocks,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._before = before
        self._lines = None if buffer is None else buffer[:: _LINE_BYTES // buffer.itemsize]
        self._clocks = clocks
        self._crowded = False

    def sample(self, count: int) -> Batch:
        taken = [self._sample() for _ in range(count)]
        return Batch(tuple(time_us for time_us, _ in taken), invalid=tuple(why for _, why in taken))

    def _sample(self) -> tuple[float, str]:
        """Times one run. Returns its time in µs and the reason why it is invalid, or ""."""
        clocks = self._clocks
        self._before()
        if self._lines is not None:
            self._lines.sum()
        if self._crowded:
            clocks.nap(_NAP_S)
        before = clocks.preemptions()
        process_start_ns = clocks.process_ns() if clocks.process_ns else 0
        thread_start_ns = clocks.thread_ns()
        start_ns = clocks.wall_ns()
        self._run()
        stop_ns = clocks.wall_ns()
        thread_stop_ns = clocks.thread_ns()
        process_stop_ns = clocks.process_ns() if clocks.process_ns else 0
        lost = clocks.preemptions() - before
        self._crowded = lost > 0
        run_ns = stop_ns - start_ns
        thread_ns = thread_stop_ns - thread_start_ns
        others_ns = process_stop_ns - process_start_ns - thread_ns
        if others_ns > _HELP_SHARE * run_ns + _HELP_NS:
            share = others_ns / max(1, run_ns)
            return run_ns / 1e3, f"{OTHER_THREADS}: they ran for {percent(share)} of its time"
        if not lost:
            return run_ns / 1e3, ""
        times = "once" if lost == 1 else f"{lost} times"
        return thread_ns / 1e3, f"{PREEMPTED}: the core went to others {times}"


class CpuTimer(Timer):
    """Timer for one CPU core.

    During a measurement, the calling thread is pinned to one core, and torch uses one thread.
    Afterwards, both settings are restored.

    The arguments are those of `CudaTimer`, with `clocks` in place of `ops`.
    """

    _batch_limit = 16
    # A core leaves its idle clock frequency within milliseconds. Slower changes in the times come
    # from other processes, and a longer warm-up would not end them.
    _warm_up_window_s = 0.01
    _warm_up_limit_s = 0.25

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
        super().__init__(options, now, pause)
        self._state = state
        self._clocks = clocks or CpuClocks(process_ns=time.process_time_ns)
        # The buffer is filled with ones, because a fresh buffer of zeros maps to a single page,
        # which stays in the first-level cache.
        words = _FLUSH_LLC_MULTIPLE * spec.l2_bytes // 8
        self._buffer = np.ones(words, dtype=np.int64) if options.cache == "cold" else None

    def measure(
        self,
        run: Run,
        *,
        copy: Callable[[int], Run] | None = None,
        min_bytes: int | None = None,
        audit: Audit | None = None,
    ) -> Measurement:
        """Times `run`, which must return only when its work is done.

        See `Timer.measure` for the arguments.
        """
        with _one_thread():
            start_s = self._now()
            before = self._state()
            run()  # the first call may pack weights, build a primitive or touch fresh pages
            sampler = CpuSampler(run, self._buffer, self._clocks, before_sample(audit))
            warm = self._warm_up(sampler)
            measurement = self._sample(sampler, warm, audit, start_s, "cpu", 1, _TICK_US)
            return replace(measurement, state_before=before, state_after=self._state())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pins the calling thread to one core, and torch to one thread, within the block.

    The core is the last allowed core, because interrupts favour the first.
    """
    torch = sys.modules.get("torch")  # torch has no threads if nobody has imported it
    if torch:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
    cores: set[int] = set()
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if torch:
            torch.set_num_threads(threads)
