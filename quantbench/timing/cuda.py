"""Times runs on a CUDA device with one of three methods.

Entry points: `CudaTimer`, created by `make_timer`, and `choose_method`, which selects the method. `cuda_samplers`
defines the order of launches of each method, `cuda_device` makes the CUDA calls.

- events: runs of 20 µs and more. One run between two events, after a flush if the cache is cold.
- replay: shorter runs with a hot cache, or with a cold one if there are copies to rotate over. A sample is the mean of
  many runs in one graph.
- flushed_graph: shorter runs with a cold cache and no copies (needs a torch that records events in graphs). One run
  between two events inside a graph, after a flush.

`events` and `flushed_graph` both include the same 1-2 µs between event and kernel, so a sweep that crosses 20 µs shows
no step there. `replay` does not include them: do not compare its times with those of single runs.

Cold means that neither input nor output is in L2 and that L2 holds nothing that must be written back first. The flush
therefore *reads* a buffer of COLD_L2_MULTIPLE times L2. Reading evicts everything, dirty lines of earlier outputs
included, and leaves clean lines that cost nothing to replace. Writing the buffer, as a memset does, would leave dirty
lines, and the timed kernel would pay for writing them back: up to L2 size / bandwidth, 15 µs on an H100. If L2 has two
halves (A100, H100), each may hold a copy of a line; the buffer is large enough for both. The flush does not evict lines
that a kernel asked to keep (evict_last, persisting windows); rotating over copies does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter, sleep

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.measurement import Measurement
from quantbench.timing.cuda_samplers import MAX_QUEUED, CudaOps, EventSampler, FlushedGraphSampler, replay_sampler
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run, cold_copies
from quantbench.timing.session import Audit, Timer

# Below this the 1-2 µs between events and kernel are 10 % of the time, and a launch takes the host as long as the run.
_GRAPH_BELOW_US = 20.0

# A graph of many runs takes about this long, so that the events' tick is 0.1 % of it.
_GRAPH_US = 500.0
_MAX_GRAPH_RUNS = 1000

# cudaEventElapsedTime: "a resolution of around 0.5 microseconds" (NVIDIA's CUDA Runtime API reference).
_EVENT_TICK_US = 0.5


@dataclass(frozen=True)
class Method:
    """Timing method of one point. name: `events`, `replay` or `flushed_graph`. copies: number of copies that rotate
    with the run itself. runs_per_sample: runs between two events."""

    name: str
    copies: int = 0
    runs_per_sample: int = 1

    @property
    def mode(self) -> str:
        """Value of the measurement's `mode` field: `events` or `graph`."""
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
    """Selects the method for a run that takes steady_us once the device is warm.

    copies: copies of the run that are available. min_bytes: least number of bytes that one run touches; if None, copies
    are not used, since they might fit into the cache. Raises UnsupportedError if mode = 'graph' is requested and cannot
    be timed with a cold cache.
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


class CudaTimer(Timer):
    """Timer for the current CUDA device.

    spec: device whose L2 size is used. state: reads clock, power and throttle reasons. Tests replace ops, now and
    pause.
    """

    _batch_limit = MAX_QUEUED
    # Clocks climb from idle, and the power limit acts, within tens of milliseconds.
    _warm_up_window_s = 0.05
    _warm_up_limit_s = 1.0

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
        if spec.kind == "cpu":
            raise InputError("CudaTimer", f"a device of kind {spec.kind!r}", "a cuda or rocm device")
        if ops is None:
            from quantbench.timing.cuda_device import TorchCuda

            ops = TorchCuda(spec, state)
        super().__init__(options, now, pause)
        self._spec = spec
        self._ops = ops

    def measure(
        self, run: Run, *, rotate: Sequence[Run] = (), min_bytes: int | None = None, audit: Audit | None = None
    ) -> Measurement:
        """Times `run`; see `Timer.measure`. The audit changes inputs before each sample or graph replay."""
        start_s = self._now()
        # The first calls load modules, compile, tune and allocate. That may synchronise (NVBench issue 240) and would
        # wait for ever behind a hold.
        for _ in range(2):
            run()
        self._ops.synchronize()
        cold = self._options.cache == "cold"
        before = (lambda: None) if audit is None else audit.before_sample
        sampler: EventSampler | FlushedGraphSampler = EventSampler(self._ops, run, flush=cold, before=before)
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
            sampler = replay_sampler(self._ops, runs * (method.runs_per_sample // len(runs)), before)
            warm = self._warm_up(sampler)
        elif method.name == "flushed_graph":
            sampler = FlushedGraphSampler(self._ops, run, before)
            warm = self._warm_up(sampler)
        tick_us = _EVENT_TICK_US / sampler.runs_per_sample
        return self._sample(sampler, warm, audit, start_s, method.mode, sampler.runs_per_sample, tick_us)
