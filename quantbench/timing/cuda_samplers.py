"""Queues the launches of a batch of samples behind a held stream, so that the host is not timed.

Two events around a launch into an empty stream measure the host (Python and the driver, 5 to 40 µs)
instead of the kernel. So a kernel of one thread spins on a flag in host memory while all samples of
a batch are queued behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantbench.timing.rotation import Run
from quantbench.timing.session import LAUNCH_GAP, MAX_QUEUED, Batch

if TYPE_CHECKING:
    from quantbench.timing.cuda_device import TorchCuda


# The driver queues about this many launches before it blocks the host. A blocked host never
# releases the stream.
_QUEUE_LAUNCHES = 1024
# Launches of a sample in addition to those of its run: 3 of the audit, 2 of the flush, 2 events and
# a stamp.
_SAMPLE_LAUNCHES = 8
# Assumed number of kernels that one torch operation launches. A GEMM with split-k launches two: one
# for the parts, and one for their sum. Few operations launch more.
_OPERATION_LAUNCHES = 2

#: Maximum number of runs that are queued behind one hold as nodes of graphs. Before CUDA 12.6 the
#: launch of a graph costs the host time for each node (NVIDIA's blog, "Constant Time Launch for
#: Straight-Line CUDA Graphs", 2024), so a node counts like a launch.
MAX_QUEUED_RUNS = 512


def samples_that_fit(operations: int) -> int:
    """Returns how many samples fit behind one hold.

    operations: number of torch operations in a run.

    >>> samples_that_fit(1), samples_that_fit(64), samples_that_fit(1000)
    (16, 7, 1)
    """
    launches = _SAMPLE_LAUNCHES + _OPERATION_LAUNCHES * operations
    return max(1, min(MAX_QUEUED, _QUEUE_LAUNCHES // launches))


class EventSampler:
    """Sampler that times each run between two events.

    A batch has one synchronisation. The stream is held and stamped. Then each sample queues the
    audit's change of the inputs, the flush, the start event, the run, the stop event and a stamp.
    Last, the stream is released. While the queued work runs, the state of the device (clocks,
    power, throttle reasons) is read.

    flush: whether to make the cache cold before each run.
    before: function that is called before each sample.
    runs_per_sample: number of runs in one call of `run`. A sample is the mean time of these runs.
    limit: maximum number of samples behind one hold. It is halved after each batch whose hold timed
        out.
    held_limit: limit of the last batch that stayed held after a larger batch had timed out; None if
        no such batch was taken. Later points can start with this limit.
    """

    def __init__(
        self,
        ops: TorchCuda,
        run: Run,
        *,
        flush: bool,
        before: Run = lambda: None,
        runs_per_sample: int = 1,
        limit: int = MAX_QUEUED,
    ) -> None:
        self._ops = ops
        self._before = before
        self._run = run
        self._flush = flush
        self.runs_per_sample = runs_per_sample
        self._limit = max(1, min(limit, MAX_QUEUED_RUNS // runs_per_sample))
        self._too_many: int | None = None
        self.held_limit: int | None = None
        self._pairs = [ops.event_pair() for _ in range(self._limit)]

    def sample(self, count: int) -> Batch:
        """Takes up to `count` samples, and at most as many as the limit allows."""
        pairs = self._pairs[: min(count, self._limit)]
        self._ops.hold()
        try:
            self._ops.stamp(0)
            for index, pair in enumerate(pairs):
                self._before()
                if self._flush:
                    self._ops.flush()
                pair.start()
                self._run()
                pair.stop()
                self._ops.stamp(index + 1)
        finally:  # the stream is released even if queueing fails
            self._ops.release()
        state = self._ops.state()
        self._ops.synchronize()
        samples_us = tuple(pair.elapsed_us() / self.runs_per_sample for pair in pairs)
        clocks = self._ops.clocks_mhz(len(pairs) + 1)
        # Without probe kernels, the one clock that NVML reports stands for all samples.
        if not clocks and state.sm_clock_mhz is not None:
            clocks = (state.sm_clock_mhz,)
        if len(clocks) == 1:
            clocks *= len(samples_us)
        if self._ops.was_held():
            if self._too_many is not None and len(pairs) < self._too_many:
                self.held_limit = self._limit
            return Batch(samples_us, clocks, state)
        self._too_many = len(pairs)
        self._limit = max(1, self._limit // 2)
        reason = f"{LAUNCH_GAP}: the device had to wait for the host"
        return Batch(samples_us, clocks, state, (reason,) * len(samples_us))


def replay_sampler(ops: TorchCuda, runs: Sequence[Run], before: Run = lambda: None) -> EventSampler:
    """Returns a sampler whose run is a graph of `runs`. A sample is the mean of the runs.

    runs: for a hot cache, the same run repeated. For a cold cache, copies in turn (see `rotation`),
        which evict each other, so that no flush is needed. In the steady state each run also pays
        for writing back the output of an earlier run.
    """

    def body() -> None:
        for run in runs:
            run()

    replay = ops.capture(body)
    replay()  # the first launch of a graph uploads it, which must not happen behind a hold
    ops.synchronize()
    return EventSampler(ops, replay, flush=False, before=before, runs_per_sample=len(runs))
