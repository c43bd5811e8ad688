"""Timing on a CUDA device: which method fits a point, and the timer that uses it. The CUDA calls are in `cuda_device`.

Three methods; `cuda_samplers` has the order of launches in each:

- events: runs of 20 µs and more. One run between two events, after a flush where it is to be cold.
- replay: shorter runs, hot; or cold where copies to rotate over are given. The mean of many runs in one graph.
- flushed graph: shorter runs, cold, no copies (needs a torch that records events in graphs). One run between two
  events inside a graph, after a flush.

Events and flushed graph time a run in the same way and carry the same 1-2 µs from event to kernel to event, so a sweep
that crosses 20 µs shows no step there. Replays do not carry them: a figure of several kernels per sample is not to be
joined to one of single runs.

Cold means that neither input nor output is in L2 and that L2 holds nothing that must be written back first. The flush
therefore *reads* a buffer of COLD_L2_MULTIPLE times L2: reading evicts what was there, dirty lines of earlier outputs
included, and leaves clean lines behind that cost nothing to replace. Writing the buffer, as a memset does, would leave
L2 full of dirty lines, and the timed kernel would pay for their way to memory: up to L2 size / bandwidth, 15 µs on an
H100. On parts whose L2 is in two halves (A100, H100) a line may be held once in each; the buffer is large enough for
both. What it cannot evict are lines that a kernel asked to keep (evict_last, persisting windows); copies in turn can.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, sleep

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.measurement import Measurement
from quantbench.timing.cuda_samplers import MAX_QUEUED, CudaOps, EventSampler, FlushedGraphSampler, ReplaySampler
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run, cold_copies
from quantbench.timing.session import Audit, WarmUp, sample_point, warm_up

# Below this a run is as short as the 1-2 µs between events and kernel weigh 10 %, and as a launch takes the host.
_GRAPH_BELOW_US = 20.0

# A graph of many runs takes about this long, so that the events' tick is 0.1 % of it.
_GRAPH_US = 500.0
_MAX_GRAPH_RUNS = 1000

# "a resolution of around 0.5 microseconds": cudaEventElapsedTime in NVIDIA's CUDA Runtime API reference.
_EVENT_TICK_US = 0.5

# Clocks climb from idle within tens of milliseconds and the power limit takes as long to bite: two windows of 50 ms
# must agree before sampling begins. A second is the most that is spent on it.
_WARM_UP_WINDOW_S = 0.05
_WARM_UP_LIMIT_S = 1.0


@dataclass(frozen=True)
class Method:
    """How a point is timed. name: `events`, `replay` or `flushed_graph`. copies: how many of the given copies rotate
    with the run itself. runs_per_sample: runs between two events."""

    name: str
    copies: int = 0
    runs_per_sample: int = 1

    @property
    def mode(self) -> str:
        """The word that stands in the measurement."""
        return "events" if self.name == "events" else "graph"


def choose_method(
    options: TimingOptions,
    steady_us: float,
    *,
    copies: int,
    min_bytes: int | None,
    l2_bytes: int,
    events_in_graphs: bool,
) -> Method:
    """The method for a run that takes steady_us once the device is warm.

    copies: how many copies of the run are on offer. min_bytes: the least that one run touches; without it nothing
    shows that the copies outgrow the cache, and they are not used: a graph must not be called cold on trust.
    Raises UnsupportedError where mode = 'graph' cannot be cold.
    """
    if options.mode == "events" or (options.mode == "auto" and steady_us >= _GRAPH_BELOW_US):
        return Method("events")
    many = min(_MAX_GRAPH_RUNS, ceil(_GRAPH_US / steady_us))
    if options.cache == "hot":
        return Method("replay", runs_per_sample=many)
    needed = cold_copies(l2_bytes, min_bytes) if min_bytes else None
    if needed is not None and copies + 1 >= needed:
        rounds = max(1, many // needed)
        return Method("replay", copies=needed - 1, runs_per_sample=needed * rounds)
    if events_in_graphs:
        return Method("flushed_graph")
    if options.mode == "auto":
        return Method("events")
    raise UnsupportedError(
        "timing",
        "mode = 'graph' with a cold cache: this torch records no events in graphs",
        f"torch 2.8 or later, or {'min_bytes and ' if needed is None else f'{needed - 1} '}copies to rotate over",
    )


class CudaTimer:
    """Times runs on the current CUDA device.

    spec: for the size of L2. state: tells what the device is doing (clock, power, throttle reasons). warmup_s,
    measuring_s: wall time spent so far, for the sweep's account of its own overhead. ops, now, pause: for tests.
    """

    def __init__(
        self,
        options: TimingOptions,
        spec: DeviceSpec,
        state: Callable[[], DeviceState],
        *,
        ops: CudaOps | None = None,
        now: Callable[[], float] = perf_counter,
        pause: Callable[[float], None] = sleep,
    ) -> None:
        if spec.kind != "cuda":
            raise InputError("CudaTimer", f"a device of kind {spec.kind!r}", "a cuda device")
        if ops is None:
            from quantbench.timing.cuda_device import TorchCuda

            ops = TorchCuda(spec, state)
        self._options = options
        self._spec = spec
        self._ops = ops
        self._now = now
        self._pause = pause
        self.warmup_s = 0.0
        self.measuring_s = 0.0

    def measure(
        self, run: Run, *, rotate: Sequence[Run] = (), min_bytes: int | None = None, audit: Audit | None = None
    ) -> Measurement:
        """Time `run`, which queues its work on the current stream.

        rotate: the same work on copies of its data, used where a graph is to be cold (made lazily: `LazyRuns`).
        min_bytes: the least that one run reads and writes, which tells how many copies that takes. audit: checks what
        the runs leave; it is called before each sample, or before each replay of a graph.
        """
        start_s = self._now()
        # The first calls load modules, compile, tune and allocate. Behind a hold that could wait for ever (lazy loading
        # may synchronise: NVBench issue 240), so they come before it.
        for _ in range(2):
            run()
        self._ops.synchronize()
        cold = self._options.cache == "cold"
        before = (lambda: None) if audit is None else audit.before_sample
        sampler: EventSampler | ReplaySampler | FlushedGraphSampler = EventSampler(
            self._ops, run, flush=cold, before=before
        )
        warm = self._warm_up(sampler)
        method = choose_method(
            self._options,
            warm.typical_us,
            copies=len(rotate),
            min_bytes=min_bytes,
            l2_bytes=self._spec.l2_bytes,
            events_in_graphs=self._ops.events_in_graphs,
        )
        if method.name == "replay":
            runs = [run, *(rotate[i] for i in range(method.copies))]
            sampler = ReplaySampler(self._ops, runs * (method.runs_per_sample // len(runs)), before)
            warm = self._warm_up(sampler)
        elif method.name == "flushed_graph":
            sampler = FlushedGraphSampler(self._ops, run, before)
            warm = self._warm_up(sampler)
        warm_s = self._now()
        self.warmup_s += warm_s - start_s
        try:
            measurement = sample_point(
                sampler,
                self._options,
                warm,
                mode=method.mode,
                runs_per_sample=sampler.runs_per_sample,
                batch_limit=MAX_QUEUED,
                tick_us=_EVENT_TICK_US / sampler.runs_per_sample,
                now=self._now,
                pause=self._pause,
            )
        finally:
            self.measuring_s += self._now() - warm_s
        if audit is not None:
            audit.after_sampling(lambda: sampler.sample(1))
        return measurement

    def _warm_up(self, sampler: EventSampler | ReplaySampler | FlushedGraphSampler) -> WarmUp:
        return warm_up(
            sampler,
            window_s=_WARM_UP_WINDOW_S,
            limit_s=min(_WARM_UP_LIMIT_S, self._options.max_time_s),
            batch_limit=MAX_QUEUED,
            now=self._now,
        )
