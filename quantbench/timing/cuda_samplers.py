"""Samples device times with `EventSampler`, without timing the host.

Two events around a launch into an empty stream measure the host (Python and the driver, 5 to 40 µs)
instead of the kernel. The sampler therefore holds the stream: a one-thread kernel spins on a flag
in host memory while all samples of a batch are queued behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quantbench.timing.rotation import Run
from quantbench.timing.session import LAUNCH_GAP, MAX_QUEUED, Batch

if TYPE_CHECKING:
    from quantbench.timing.cuda_device import TorchCuda


# The driver queues about this many launches before it blocks the host. A blocked host cannot
# release the stream.
_QUEUE_LAUNCHES = 1024
# Number of launches per sample, without those of the run: 3 for the audit, 2 for the flush, 2
# events and a stamp.
_SAMPLE_LAUNCHES = 8
# Assumed number of kernels that one torch operation launches. A split-k GEMM launches two: one for
# the slices, and one for their sum. Few operations launch more.
_OPERATION_LAUNCHES = 2

#: Maximum number of graph nodes (runs) that are queued behind one hold. Before CUDA 12.6, launching
#: a graph costs host time for each node (NVIDIA's blog, "Constant Time Launch for Straight-Line
#: CUDA Graphs", 2024), so a node counts like a launch.
MAX_QUEUED_RUNS = 512


def samples_that_fit(operations: int) -> int:
    """Returns how many samples fit behind one hold.

    operations: number of torch operations in one run.

    >>> samples_that_fit(1), samples_that_fit(64), samples_that_fit(1000)
    (16, 7, 1)
    """
    launches = _SAMPLE_LAUNCHES + _OPERATION_LAUNCHES * operations
    return max(1, min(MAX_QUEUED, _QUEUE_LAUNCHES // launches))


class EventSampler:
    """Sampler that times each run between two events.

    A batch has one synchronisation. First, the stream is held and stamped: a stamp reads the SMs'
    cycle counters. Then each sample queues `before`, the flush, the start event, the run, the stop
    event and a stamp. Last, the stream is released. While the queued work runs, the host reads the
    device's state (clocks, power, throttle reasons).

    ops: CUDA calls.
    run: function that queues the work.
    flush: whether to make the cache cold before each run.
    before: function that is called before each sample, such as the audit's change of the inputs.
    runs_per_sample: number of runs in one call of `run`. A sample is the mean time of these runs.
    limit: maximum number of samples per hold. It is halved after each batch whose hold timed out.
    held_limit: reduced limit with which a batch stayed held after a larger batch had timed out;
        None if there is no such batch. Later points can start with this limit.
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
        """Takes `count` samples, or fewer if the limit is lower."""
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
        # Without the probes, the SM clock that NVML reports applies to all samples.
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
    """Returns a sampler of graph replays. A sample is the mean time of the runs in the graph.

    runs: runs of the graph, in order. For a hot cache, this is one run repeated. For a cold cache,
        it is a run and its copies in turn (see `rotation`). They evict each other, so no flush is
        needed. The time of a run then includes writing back the output of an earlier run.
    before: function that is called before each replay.
    """

    def body() -> None:
        for run in runs:
            run()

    replay = ops.capture(body)
    replay()  # the first launch of a graph uploads it, which must not happen behind a hold
    ops.synchronize()
    return EventSampler(ops, replay, flush=False, before=before, runs_per_sample=len(runs))
