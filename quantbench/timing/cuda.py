"""Times work on a CUDA device with `CudaTimer`.

A sample is either one run between two CUDA events, or the mean of many runs in a CUDA graph. Only
the options decide between the two methods, never the length of a run. A change of method
within a sweep would look like a cliff (a sudden step in the time) of 5 to 12 %.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.measurement import Measurement
from quantbench.stats import typical_us
from quantbench.timing.cuda_samplers import EventSampler, replay_sampler, samples_that_fit
from quantbench.timing.options import TimingOptions
from quantbench.timing.rotation import Run, cold_copies
from quantbench.timing.session import MAX_QUEUED, Audit, Timer, before_sample

if TYPE_CHECKING:
    from quantbench.timing.cuda_device import TorchCuda

# Device time of one graph, which sets its number of runs. The events' resolution, 0.5 µs, is 0.1 %
# of this time.
_GRAPH_US = 500.0
_MAX_GRAPH_RUNS = 1000
# Maximum number of copies in a cold graph. Making more copies takes seconds. Small work that needs
# more copies to overflow the cache is refused.
_MOST_COPIES = 6000

# Time for which the first work runs before it is timed, to heat the card. While a card heats up,
# its SM clock falls by one or two percent, fastest in the first seconds.
_HEAT_S = 2.0

# Resolution of CUDA events. Source: NVIDIA's CUDA Runtime API reference, cudaEventElapsedTime: "a
# resolution of around 0.5 microseconds".
_EVENT_TICK_US = 0.5


def runs_in_graph(
    options: TimingOptions, run_us: float, *, min_bytes: int | None, l2_bytes: int
) -> tuple[int, int]:
    """Returns the number of copies of a run for its graph, and the graph's total number of runs.

    With a cold cache, the graph rotates over the run and its copies, which evict each other. With a
    hot cache, it repeats the run without copies.

    run_us: time of one run, in µs.
    min_bytes: minimum number of bytes that one run touches. None if this number is unknown, or if
        the run cannot be copied.
    l2_bytes: size of the L2 cache, in bytes.

    Raises UnsupportedError if the cache must be cold, but min_bytes is None or too many copies
    would be needed.
    """
    many = min(_MAX_GRAPH_RUNS, ceil(_GRAPH_US / run_us))
    if options.cache == "hot":
        return 0, many
    needed = cold_copies(l2_bytes, min_bytes) if min_bytes else 1
    if not 1 < needed <= _MOST_COPIES + 1:
        found = f"mode = 'graph' with a cold cache and {needed - 1} copies to rotate over"
        raise UnsupportedError(
            "timing", found, f"min_bytes and copies, at most {_MOST_COPIES}, or mode = 'auto'"
        )
    return needed - 1, needed * max(1, many // needed)


class CudaTimer(Timer):
    """Timer for the current CUDA device.

    In the modes `auto` and `events`, a sample is the time of one run between two events. The stream
    is held (see `cuda_samplers`) until all work is queued, and a flush before the run makes a cold
    cache. A sample includes 1 to 2.5 µs between the events and the kernel. The time of an empty
    kernel, measured in the same way, shows this overhead: it is every measurement's `floor_us`.
    In the mode `graph`, a sample is the mean of many runs in one graph, without this overhead. With
    a cold cache, the graph rotates over copies of the run (see `rotation`).

    spec: constants of the device. Only the L2 size is used.
    state: function that reads the device's SM clock, power and throttle reasons.
    ops: CUDA calls; None for `TorchCuda`.
    now: function that reads the time, in s.
    pause: function that sleeps for a number of seconds.
    """

    _batch_limit = MAX_QUEUED
    # Clocks climb from idle within tens of milliseconds, and the power limit acts equally fast.
    _warm_up_window_s = 0.05
    _warm_up_limit_s = 1.0

    def __init__(
        self,
        options: TimingOptions,
        spec: DeviceSpec,
        state: Callable[[], DeviceState],
        *,
        ops: TorchCuda | None = None,
        now: Callable[[], float] = perf_counter,
        pause: Callable[[float], None] = sleep,
    ) -> None:
        if spec.kind != "cuda":
            raise InputError("CudaTimer", f"a device of kind {spec.kind!r}", "a cuda device")
        if ops is None:
            from quantbench.timing.cuda_device import TorchCuda

            ops = TorchCuda(spec, state)
        super().__init__(options, now, pause)
        self._spec = spec
        self._ops = ops
        self._mode = "graph" if options.mode == "graph" else "events"
        self._hot = False
        # Number of samples per hold that did not time out at earlier points, by the number of torch
        # operations in a run.
        self._held_limits: dict[int, int] = {}
        ops.empty()
        ops.synchronize()
        sampler = self._events(ops.empty)
        if self._mode == "graph":
            sampler = replay_sampler(ops, [ops.empty] * _MAX_GRAPH_RUNS)
        self._floor_us = self._warm_up(sampler).typical_us

    def measure(
        self,
        run: Run,
        *,
        copy: Callable[[int], Run] | None = None,
        min_bytes: int | None = None,
        audit: Audit | None = None,
    ) -> Measurement:
        """Times `run`; see `Timer.measure` for the arguments.

        The audit changes the inputs before each sample or each replay of the graph.
        """
        start_s = self._now()
        # The first calls load modules, compile, tune and allocate. They may also synchronise
        # (NVBench issue 240). Behind a hold, a synchronisation would wait until the hold times out.
        run()
        operations = _count_operations(run)
        self._ops.synchronize()
        before = before_sample(audit)
        limit = self._held_limits.get(operations) or samples_that_fit(operations)
        sampler = self._events(run, before, limit)
        if self._mode == "graph":
            run_us = max(_EVENT_TICK_US, typical_us(sampler.sample(MAX_QUEUED).samples_us))
            if copy is None:
                min_bytes = None
            copies, runs = runs_in_graph(
                self._options, run_us, min_bytes=min_bytes, l2_bytes=self._spec.l2_bytes
            )
            turn = [run]
            if copy is not None:
                turn += map(copy, range(copies))
            sampler = replay_sampler(self._ops, turn * (runs // len(turn)), before)
        if not self._hot:
            self._heat(sampler)
            self._hot = True
        warm = self._warm_up(sampler)
        runs = sampler.runs_per_sample
        measurement = self._sample(
            sampler, warm, audit, start_s, self._mode, runs, _EVENT_TICK_US / runs
        )
        if sampler.held_limit is not None:
            self._held_limits[operations] = sampler.held_limit
        return measurement

    def _heat(self, sampler: EventSampler) -> None:
        """Runs the first work until the card is hot."""
        warm = self._warm_up(sampler)
        # A batch takes at most an eighth of _HEAT_S, or is a single run. With MAX_QUEUED runs per
        # batch, a run of several seconds would heat the card for minutes.
        count = min(MAX_QUEUED, max(1, int(_HEAT_S / 8 * 1e6 / warm.typical_us)))
        start_s = self._now()
        while self._now() - start_s < _HEAT_S:
            sampler.sample(count)

    def _events(
        self, run: Run, before: Run = lambda: None, limit: int = MAX_QUEUED
    ) -> EventSampler:
        """Returns a sampler of single runs between two events.

        limit: maximum number of samples behind one hold.
        """
        flush = self._options.cache == "cold"
        return EventSampler(self._ops, run, flush=flush, before=before, limit=limit)


def _count_operations(run: Run) -> int:
    """Calls `run` once, and returns how many torch operations it executed, including views."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    counter = Counter()
    with counter:
        run()
    return counter.count
