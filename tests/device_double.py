"""A double of a CUDA device in simulated time, with CUDA's asynchronous semantics.

Two clocks run: the host's, which every call advances, and the device's, which the queued work
advances. The host waits for the device only where CUDA makes it wait: in a synchronisation, and
when the queue is full. The SM clock climbs from idle, falls with the power that the work draws and
with heat, wanders slowly, and moves in steps of 15 MHz, as that of an H200 does
(docs/evidence.md).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, floor
from typing import Any

from simulator import SimulatedGpu

from quantbench.device import lookup
from quantbench.device.spec import DeviceState
from quantbench.latency.op_times import roofline_us
from quantbench.launch import Launch, Tile
from quantbench.workload import Gemm

QUEUE_LIMIT = 1024
_TICK_US = 0.5
_CALL_US, _LAUNCH_US, _NODE_US, _ARRIVAL_US = 0.2, 4.0, 0.5, 6.0
_BETWEEN_KERNELS_US, _EVENT_TO_KERNEL_US, _KERNEL_TO_EVENT_US = 0.8, 1.3, 0.3
#: what a time between two events has beside that of the kernel
EVENTS_US = _EVENT_TO_KERNEL_US + _KERNEL_TO_EVENT_US
_HOLD_TIMEOUT_US = 500_000.0
FULL_MHZ, _IDLE_SHARE = 1980.0, 0.55
# The clock climbs while the device works and falls while it does not.
_WARM_US, _COOL_US = 30_000.0, 300_000.0
_FLUSH_US, _STAMP_US, _NOISE = 66.0, 2.5, 0.003
# The clock wanders as an Ornstein-Uhlenbeck process; heat and power are averages over these times.
CLOCK_STEP_MHZ = 15.0
_WANDER_US, _HEAT_US, _POWER_US = 2_000_000.0, 20_000_000.0, 20_000.0
# Share of the clock that work loses which draws all of the power limit; half of the limit costs none.
_POWER_LOSS = 0.2
# The clock is constant for so long within a kernel.
_MOMENT_US = 500.0
_IDLE_POWER = 0.1
_STAMP_WINDOW_US = 500.0
# What is left of the clock while the card protects itself.
_THROTTLED = 0.6
# While another process shares the device, one kernel in so many waits for a time slice of it.
_SLICE_EVERY, _SLICE_US = 20, 2000.0


@dataclass
class Event:
    """An event: when the device reached it, to the tick; None before."""

    at_us: float | None = None


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    us: its time at the full clock.
    clocked: share of this time that is inversely proportional to the clock; the rest waits for
        memory.
    power: what it draws, as a share of the power limit.
    """

    name: str
    us: float
    clocked: float = 1.0
    power: float = 0.5


@dataclass(frozen=True)
class Stamp:
    """The kernel that reads the SM's counters."""

    index: int


@dataclass(frozen=True)
class Graph:
    """A captured graph: one launch."""

    nodes: tuple[Work, ...]


Work = Event | Kernel | Stamp | Graph
_STAMP = Kernel("stamp", _STAMP_US)


@dataclass
class Gpu:
    """The device of one process.

    wander: standard deviation of the clock over seconds, as a share of it.
    heat: share of the clock that it loses as it gets hot.
    slowdown: factor on all times that the clock does not show.
    throttled: whether it protects itself from heat.
    others: number of other processes on it.
    """

    wander: float = 0.0
    heat: float = 0.0
    slowdown: float = 1.0
    throttled: bool = False
    others: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    warm_us: float = 0.0
    after_event: bool = False
    held_at_us: float | None = None
    timed_out: bool = False
    waiting: list[Work] = field(default_factory=list)
    running: deque[float] = field(default_factory=deque)
    graph: list[Work] | None = None
    ran: list[Kernel] | None = None
    stamps: dict[int, tuple[float, float]] = field(default_factory=dict)  # device_us, cycles
    random: random.Random = field(default_factory=lambda: random.Random(0))
    cycles: float = 0.0
    hot_us: float = 0.0  # busy time, forgotten as the heat flows off
    power: float = _IDLE_POWER
    deviation: float = 0.0  # of the clock, in standard deviations
    mhz: float = field(init=False)  # the SM clock at this moment

    def __post_init__(self) -> None:
        self._set_clock()

    @property
    def mean_mhz(self) -> float:
        """The SM clock without its wander and its steps."""
        climbed = 1 - (1 - _IDLE_SHARE) * exp(-self.warm_us / _WARM_US)
        cooler = 1 - self.heat * self.hot_us / _HEAT_US
        drawn = 1 - _POWER_LOSS * max(0.0, 2 * self.power - 1)
        return FULL_MHZ * climbed * cooler * drawn * (_THROTTLED if self.throttled else 1.0)

    def _set_clock(self) -> None:
        self.mhz = (
            round(self.mean_mhz * (1 + self.wander * self.deviation) / CLOCK_STEP_MHZ)
            * CLOCK_STEP_MHZ
        )

    @property
    def capped(self) -> bool:
        """Whether the power limit holds the clock down."""
        return self.power > 1

    def _pass(self, us: float, power: float, *, busy: bool) -> None:
        """Lets device time pass; the clock stays as it was until its end."""
        self.cycles += us * self.mhz
        self.device_us += us
        if busy:
            self.warm_us = min(self.warm_us + us, 10 * _WARM_US)
        else:
            self.warm_us *= exp(-us / _COOL_US)
        cooled = exp(-us / _HEAT_US)
        self.hot_us = self.hot_us * cooled + busy * _HEAT_US * (1 - cooled)
        self.power += (power - self.power) * (1 - exp(-us / _POWER_US))
        kept = exp(-us / _WANDER_US)
        if self.wander:
            self.deviation = (
                self.deviation * kept + self.random.gauss(0.0, 1.0) * (1 - kept * kept) ** 0.5
            )
        self._set_clock()

    def queue(self, work: Work, host_us: float = _LAUNCH_US) -> None:
        """Launches work; into the graph while one is captured."""
        if self.graph is not None:
            self.graph.append(work)
            return
        self.host_us += host_us
        if self.held_at_us is not None:
            if len(self.waiting) >= QUEUE_LIMIT:
                raise RuntimeError(
                    f"deadlock: {QUEUE_LIMIT} launches wait behind a held stream, and the next blocks"
                )
            self.waiting.append(work)
            return
        while self.running and self.running[0] <= self.host_us:
            self.running.popleft()
        if len(self.running) >= QUEUE_LIMIT:
            self.host_us = self.running.popleft()
        self._run(work, self.host_us + _ARRIVAL_US)
        self.running.append(self.device_us)

    def _run(self, work: Work, earliest_us: float) -> None:
        if isinstance(work, Graph):
            for node in work.nodes:
                self._run(node, earliest_us)
            return
        if earliest_us > self.device_us:
            self._pass(earliest_us - self.device_us, _IDLE_POWER, busy=False)
        if isinstance(work, Event):
            self.device_us += _KERNEL_TO_EVENT_US
            self.cycles += _KERNEL_TO_EVENT_US * self.mhz
            work.at_us = floor(self.device_us / _TICK_US) * _TICK_US
            self.after_event = True
            return
        gap_us = _EVENT_TO_KERNEL_US if self.after_event else _BETWEEN_KERNELS_US
        self.device_us += gap_us
        self.cycles += gap_us * self.mhz
        self.after_event = False
        if isinstance(work, Stamp):
            self.stamps[work.index] = (self.device_us, self.cycles)
            work = _STAMP
        elif self.ran is not None:
            self.ran.append(work)
        if self.others and self.random.random() < 1 / _SLICE_EVERY:
            self._pass(_SLICE_US, work.power, busy=True)
        left_us = work.us * self.slowdown * exp(self.random.gauss(0.0, _NOISE))
        while left_us > 0:
            times_longer = 1 - work.clocked + work.clocked * FULL_MHZ / self.mhz
            done_us = min(left_us, _MOMENT_US)
            self._pass(done_us * times_longer, work.power, busy=True)
            left_us -= done_us

    def hold(self) -> None:
        """Holds the stream from what is queued so far."""
        self.queue(Kernel("zero the stamps", 1.5))
        self.host_us += _LAUNCH_US
        self.held_at_us, self.timed_out = self.host_us, False
        self.stamps.clear()

    def release(self) -> None:
        """Lets the work behind the hold run; it began by itself if the hold timed out before."""
        if self.held_at_us is None:
            return
        end_us = self.held_at_us + _HOLD_TIMEOUT_US
        self.host_us += 1.0
        self.timed_out = self.host_us > end_us
        self.device_us = max(self.device_us, min(self.host_us, end_us) + 1.0)
        self.held_at_us = None
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            self._run(work, 0.0)
            self.running.append(self.device_us)

    def synchronize(self) -> None:
        """Waits for the device; a lost context shows here."""
        if self.graph is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self.held_at_us is not None:  # the hold's own timeout ends it
            self.host_us = self.held_at_us + _HOLD_TIMEOUT_US + 1.0
            self.release()
        self.host_us = max(self.host_us, self.device_us) + 5.0
        self.running.clear()

    def now_s(self) -> float:
        """The host's clock, s."""
        self.host_us += _CALL_US
        return self.host_us * 1e-6

    def pause(self, seconds: float) -> None:
        """Sleeps on the host."""
        self.host_us += seconds * 1e6

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Captures a graph. A replay is one launch that takes the host a while for each node, as
        before CUDA 12.6.
        """
        body()
        self.graph = []
        try:
            body()
            graph = Graph(tuple(self.graph))
        finally:
            self.graph = None
        return partial(self.queue, graph, _LAUNCH_US + _NODE_US * len(graph.nodes))


class Pair:
    """Start and stop events."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._events = gpu, (Event(), Event())

    def start(self) -> None:
        self._gpu.queue(self._events[0], 1.0)

    def stop(self) -> None:
        self._gpu.queue(self._events[1], 1.0)

    def elapsed_us(self) -> float:
        start, stop = (event.at_us for event in self._events)
        if start is None or stop is None:
            raise RuntimeError("CUDA error: device not ready")
        return stop - start


class Ops:
    """`quantbench.timing.cuda_device.TorchCuda` on the double."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.hold, self.release, self.synchronize, self.capture = (
            gpu.hold,
            gpu.release,
            gpu.synchronize,
            gpu.capture,
        )

    def event_pair(self, **_: bool) -> Pair:
        return Pair(self._gpu)

    def empty(self) -> None:
        self._gpu.queue(Kernel("empty", 1.2))

    def flush(self) -> None:
        self._gpu.queue(Kernel("flush", _FLUSH_US, clocked=0.0))

    def was_held(self) -> bool:
        return not self._gpu.timed_out

    def stamp(self, index: int) -> None:
        self._gpu.queue(Stamp(index))

    def clocks_mhz(self, stamps: int) -> tuple[float, ...]:
        """As `clocks_from_stamps` does for one SM, of which this is 20 times faster."""
        last = stamps - 1
        clocks = []
        for gap in range(last):
            low, high = gap, gap + 1
            while self._us_between(low, high) < _STAMP_WINDOW_US and (low > 0 or high < last):
                low, high = max(low - 1, 0), min(high + 1, last)
            cycles = self._gpu.stamps[high][1] - self._gpu.stamps[low][1]
            clocks.append(cycles / self._us_between(low, high))
        return tuple(clocks)

    def _us_between(self, low: int, high: int) -> float:
        return self._gpu.stamps[high][0] - self._gpu.stamps[low][0]

    def state(self) -> Any:
        return state_now(self._gpu)


def state_now(gpu: Gpu) -> Any:
    """The device's state, as NVML would tell it: not the clock that the power limit leaves."""
    reasons = ("sw_power_cap",) * gpu.capped + ("hw_thermal",) * gpu.throttled
    return DeviceState(
        sm_clock_mhz=FULL_MHZ, temperature_c=50.0, power_w=500.0, throttle_reasons=reasons, other_processes=gpu.others,
        note="simulated",
    )  # fmt: skip


# --- work ------------------------------------------------------------------------------------------------------------


def kernel_of(work: Any) -> tuple[Kernel, Any]:
    """Returns the kernel that does a workload, and its launch."""
    device = lookup("h200-sxm-141gb")
    if not isinstance(work, Gemm):
        return Kernel(f"simulated_{work.kind}", 3.0 + 1.3 * roofline_us(work, device)), Launch(
            f"simulated_{work.kind}"
        )
    tile = Tile(128, 256)
    name = "nvjet_sm90_tst_256x128_64x4_1x1_v_bz_TNT"  # cuBLAS names its tiles n × m
    peak = device.peak(work.dtype) or device.peak("bf16")
    per_k_ns = 2 * tile.block_m * tile.block_n / (0.8 * peak / device.sm_count * 1e3)
    gpu = SimulatedGpu(device.sm_count, tile, tile_ns_per_k=per_k_ns)
    return Kernel(name, gpu.time_us(work)), replace(gpu.launch(work), kernel=name)
