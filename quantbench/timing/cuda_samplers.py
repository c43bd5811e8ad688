"""In what order launches are queued for one batch of samples. The CUDA calls themselves are injected (`CudaOps`).

One batch is one synchronisation:

    hold the stream · stamp · [audit · flush · start event · run · stop event · stamp] × count · let go · wait

- Why hold: an event pair around a launch into an empty stream measures the host (Python, the driver, 5-40 µs) and not
  the kernel. While a one-thread kernel spins on a flag in host memory, everything queues up behind it; once the
  host lets go, the device runs it back to back.
- The audit changes a little of the inputs (`session.Audit`), so that no run can repeat an earlier result. In a graph of
  many runs it stands before the replay.
- The flush stands before the start event in the same stream, so it has ended when the clock starts.
- The state (clocks, power, throttle reasons) is read between letting go and waiting: the device is at work then.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from quantbench.device.spec import DeviceState
from quantbench.timing.rotation import Run
from quantbench.timing.session import LAUNCH_GAP, Batch

#: Samples queued at most behind one hold. The driver takes about 1024 launches before it blocks the host, which would
#: then never let go; a sample is 8 launches and as many as the run itself makes, so 16 leaves room for runs of 50.
MAX_QUEUED = 16

#: Runs queued at most behind one hold as nodes of graphs. Before CUDA 12.6 launching a graph costs the host time for
#: each of its nodes (NVIDIA's blog, "Constant Time Launch for Straight-Line CUDA Graphs", 2024): they are taken to fill
#: the queue as launches do.
MAX_QUEUED_RUNS = 512


class EventPair(Protocol):
    """A start and a stop event."""

    def start(self) -> None:
        """Record the start in the current stream."""

    def stop(self) -> None:
        """Record the stop in the current stream."""

    def elapsed_us(self) -> float:
        """Device time between them, once both have happened."""


class CudaOps(Protocol):
    """What samplers need of a device; `cuda_device.TorchCuda` is the real one."""

    events_in_graphs: bool

    def event_pair(self, *, in_graph: bool = False) -> EventPair:
        """A new pair; in_graph: to be recorded inside a captured graph."""

    def flush(self) -> None:
        """Queue what makes the last-level cache cold."""

    def hold(self) -> None:
        """Hold the stream until `release`."""

    def release(self) -> None:
        """Let the queued work run."""

    def was_held(self) -> bool:
        """After `synchronize`: whether the stream stayed held until `release`."""

    def stamp(self, index: int) -> None:
        """Queue the reading of the SMs' counters as stamp `index`, from 0."""

    def clocks_mhz(self, stamps: int) -> tuple[float, ...]:
        """After `synchronize`: the clock between neighbouring stamps, empty where it cannot be told."""

    def state(self) -> DeviceState:
        """What the device is doing now."""

    def synchronize(self) -> None:
        """Wait for all queued work; raises what went wrong in it."""

    def capture(self, body: Callable[[], None], rehearsal: Callable[[], None]) -> Run:
        """Capture what body queues as a graph and return its replay; rehearsal is run first, uncaptured."""


class EventSampler:
    """Each run alone between two events."""

    runs_per_sample = 1

    def __init__(self, ops: CudaOps, run: Run, *, flush: bool, before: Run = lambda: None) -> None:
        self._ops = ops
        self._before = before
        self._run = run
        self._flush = flush
        self._pairs = [ops.event_pair() for _ in range(MAX_QUEUED)]
        self._limit = MAX_QUEUED

    def sample(self, count: int) -> Batch:
        """Up to MAX_QUEUED samples, fewer after a batch whose hold ran out."""
        pairs = self._pairs[: min(count, self._limit)]

        def queue() -> None:
            for index, pair in enumerate(pairs):
                self._before()
                if self._flush:
                    self._ops.flush()
                pair.start()
                self._run()
                pair.stop()
                self._ops.stamp(index + 1)

        batch = _held(self._ops, queue, stamps=len(pairs) + 1, times=lambda: [p.elapsed_us() for p in pairs])
        if batch.invalid:
            self._limit = max(1, self._limit // 2)
        return batch


class ReplaySampler:
    """A graph of many runs between two events; a sample is their mean.

    With a hot cache the runs are one and the same; with a cold one they are copies in turn (see `rotation`), which
    need no flush: in the steady state each run also pays for writing back what an earlier one left.
    """

    def __init__(self, ops: CudaOps, runs: Sequence[Run], before: Run = lambda: None) -> None:
        self._ops = ops
        self._before = before
        self.runs_per_sample = len(runs)
        self._limit = max(1, min(MAX_QUEUED, MAX_QUEUED_RUNS // len(runs)))
        self._pairs = [ops.event_pair() for _ in range(self._limit)]

        def body() -> None:
            for run in runs:
                run()

        self._replay = ops.capture(body, rehearsal=body)
        self._replay()  # the first launch of a graph uploads it, which must not happen behind a hold
        ops.synchronize()

    def sample(self, count: int) -> Batch:
        """As many samples as may be queued, fewer after a batch whose hold ran out."""
        pairs = self._pairs[: min(count, self._limit)]

        def queue() -> None:
            for index, pair in enumerate(pairs):
                self._before()
                pair.start()
                self._replay()
                pair.stop()
                self._ops.stamp(index + 1)

        def times() -> list[float]:
            return [pair.elapsed_us() / self.runs_per_sample for pair in pairs]

        batch = _held(self._ops, queue, stamps=len(pairs) + 1, times=times)
        if batch.invalid:
            self._limit = max(1, self._limit // 2)
        return batch


class FlushedGraphSampler:
    """A graph of [flush · start event · run · stop event] repeated: cold single runs without any launch from the host.

    The events are nodes of the graph, so that the flush stays outside them; each run is one sample. What remains in a
    sample beside the kernel is the step from event to kernel to event, 1-2 µs, and the events' tick.
    """

    runs_per_sample = 1

    def __init__(self, ops: CudaOps, run: Run, before: Run = lambda: None) -> None:
        self._ops = ops
        self._before = before
        self._pairs = [ops.event_pair(in_graph=True) for _ in range(MAX_QUEUED)]

        def body() -> None:
            for pair in self._pairs:
                ops.flush()
                pair.start()
                run()
                pair.stop()

        def rehearsal() -> None:
            ops.flush()
            run()

        self._replay = ops.capture(body, rehearsal)
        self._replay()
        ops.synchronize()

    def sample(self, count: int) -> Batch:
        """One replay: MAX_QUEUED samples, however many were wanted."""

        def queue() -> None:
            self._before()
            self._replay()
            self._ops.stamp(1)

        return _held(self._ops, queue, stamps=2, times=lambda: [pair.elapsed_us() for pair in self._pairs])


def _held(ops: CudaOps, queue: Callable[[], None], *, stamps: int, times: Callable[[], list[float]]) -> Batch:
    """Queue behind a hold, let go, wait, read. The stream is let go also when queueing fails."""
    ops.hold()
    try:
        ops.stamp(0)
        queue()
    finally:
        ops.release()
    state = ops.state()
    ops.synchronize()
    samples_us = times()
    clocks = ops.clocks_mhz(stamps)
    if not clocks and state.sm_clock_mhz is not None:
        clocks = (state.sm_clock_mhz,)
    if len(clocks) == 1:
        clocks *= len(samples_us)
    invalid = () if ops.was_held() else (f"{LAUNCH_GAP}: the device had to wait for the host",) * len(samples_us)
    return Batch(tuple(samples_us), clocks, state, invalid)
