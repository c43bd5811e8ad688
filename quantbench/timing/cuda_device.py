"""Implements the samplers' CUDA calls (events, flush, hold, SM clocks, graphs) as `TorchCuda`.

It uses torch and two Triton kernels, the probes. One probe holds the stream while work is queued.
The other reads the cycle counters of all SMs (a stamp), from which the SM clock is computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.reasons import reason_line
from quantbench.timing.rotation import COLD_L2_MULTIPLE, Run
from quantbench.timing.session import MAX_QUEUED

# Minimum time between two readings of the device state, in s. NVML takes milliseconds for a
# reading. Disturbances of timings last longer than this period.
_STATE_PERIOD_S = 0.02

# Launch options of the probes. triton 3.9 warns if fp fusion is not set, although the probes have
# no multiplications.
_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": True}

# Time limit of a hold. It is a thousand times the time to queue a batch, and still short if a
# deadlock occurs and the host has to wait for the limit.
_HOLD_TIMEOUT_NS = 500_000_000

# First and longest sleep of `SleepHold`, in clock cycles (2 ms and 0.5 s at 2 GHz).
_FIRST_SLEEP_CYCLES = 4_000_000
_LONGEST_SLEEP_CYCLES = 1_000_000_000

# Upper bound on %smid, larger than the number of SMs of any GPU (B200: 148).
_MAX_SMS = 512

# Minimum time over which an SM clock is computed. The GPU's timer (%globaltimer) ticks every 32 ns
# on some GPUs and every 1 µs on others. A tick is at most 0.2 % of this time.
_WINDOW_NS = 500_000

# Quantile of the SMs' separate clocks that is taken as the SM clock. An SM's cycle counter may stop
# while the SM sleeps, but no counter runs faster than the clock. The upper quartile is therefore
# robust to a few sleeping SMs, and to a misread stamp.
_UPPER = 0.75


class HostFlagHold:
    """Holds a stream with a kernel that spins on a flag in pinned host memory.

    The caller calls `hold()`, queues the work to be timed, calls `release()`, synchronises, and
    then calls `was_held()`. If the flag is not set within half a second, the kernel ends anyway.
    `was_held()` is then False, and the batch is invalid. This happens if the host waits for the
    device while it queues: because of a synchronisation or a copy to pageable memory in the run,
    the first launch of a kernel, cudaFree (also by an allocator without free memory), more than
    about 1024 launches (`MAX_QUEUED` samples fit), or a profiler that serialises launches.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._release = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._timed_out = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._release_view = self._release.numpy()
        self._timed_out_view = self._timed_out.numpy()

    def hold(self) -> None:
        """Queues the spinning kernel on the current stream."""
        self._release_view[0] = 0
        self._timed_out_view[0] = 0
        self._kernel[(1,)](self._release, self._timed_out, _HOLD_TIMEOUT_NS, **_ONE_WARP)

    def release(self) -> None:
        """Sets the flag, which the device sees over the bus within about a microsecond."""
        self._release_view[0] = 1

    def was_held(self) -> bool:
        """Returns whether the flag ended the kernel, rather than the time limit."""
        return bool(self._timed_out_view[0] == 0)


class SleepHold:
    """Holds a stream with torch.cuda._sleep, for machines on which Triton cannot build kernels.

    The length of the sleep is a guess. If the device wakes before the host has queued everything,
    the batch counts as not held, and the next sleep is twice as long.
    """

    def __init__(self) -> None:
        self._cycles = _FIRST_SLEEP_CYCLES
        self._awake = torch.cuda.Event()
        self._late = False

    def hold(self) -> None:
        torch.cuda._sleep(self._cycles)
        self._awake.record()

    def release(self) -> None:
        """Checks whether the device is still asleep. The caller has queued everything."""
        self._late = self._awake.query()
        if self._late:
            self._cycles = min(2 * self._cycles, _LONGEST_SLEEP_CYCLES)

    def was_held(self) -> bool:
        return not self._late


class TorchEventPair:
    """Two timing events on the current stream."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._start.record()

    def stop(self) -> None:
        self._stop.record()

    def elapsed_us(self) -> float:
        """Returns the device time between the two events, in µs."""
        return float(self._start.elapsed_time(self._stop)) * 1e3


class TorchCuda:
    """CUDA calls of the samplers, on the current device and stream.

    Tests replace this class with a simulated device.

    Creating an object allocates the flush buffer (COLD_L2_MULTIPLE × L2) and compiles the probe
    kernels, which takes about a second the first time. Without the probes (no Triton, or no C
    compiler), a sleep holds the stream, the SM clock comes from NVML, and the note of `state()`
    gives the reason.

    spec: constants of the device. Only the L2 size is used.
    state: function that reads the device's state.
    """

    def __init__(self, spec: DeviceSpec, state: Callable[[], DeviceState]) -> None:
        self._ask_state = state
        self._state = DeviceState()
        self._state_at_s = -inf
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        l2_bytes = max(spec.l2_bytes, int(getattr(properties, "L2_cache_size", 0)))
        self._buffer = torch.ones(
            COLD_L2_MULTIPLE * l2_bytes // 4, dtype=torch.float32, device="cuda"
        )
        self._sink = torch.zeros((), dtype=torch.float32, device="cuda")
        self._graph_stream = torch.cuda.Stream()
        self._stamps = torch.zeros((MAX_QUEUED + 1, _MAX_SMS, 2), dtype=torch.int64, device="cuda")
        self._stamp_rows = list(self._stamps)
        self._stamp_blocks = 2 * properties.multi_processor_count
        self._hold: HostFlagHold | SleepHold = SleepHold()
        self._stamp_kernel: Any = None
        self._note = self._load_probes()
        self.flush()
        self.synchronize()

    def event_pair(self) -> TorchEventPair:
        """Returns a new pair of events."""
        return TorchEventPair()

    def empty(self) -> None:
        """Queues a kernel of one thread block that writes one number."""
        self._sink.fill_(0.0)

    def flush(self) -> None:
        """Makes the cache cold by reading a buffer.

        In a cold cache, L2 contains neither inputs nor outputs of the run, and no lines that must
        be written back. The flush reads a buffer of COLD_L2_MULTIPLE times the size of L2. This
        evicts the other data and leaves clean lines. A memset would leave dirty lines, and writing
        them back would slow the timed kernel (by up to 15 µs on an H100). The flush does not evict
        lines that a kernel asked to keep (evict_last, persisting windows), but rotating over copies
        does.
        """
        torch.sum(self._buffer, dim=0, out=self._sink)

    def hold(self) -> None:
        """Clears the stamps of the last batch and holds the current stream."""
        self._stamps.zero_()
        self._hold.hold()

    def release(self) -> None:
        """Lets the queued work run."""
        self._hold.release()

    def was_held(self) -> bool:
        """Returns whether the stream stayed held until `release`.

        The caller must call `synchronize` first.
        """
        return self._hold.was_held()

    def stamp(self, index: int) -> None:
        """Queues the kernel that reads the counters of all SMs. Does nothing without the probes.

        index: number of the stamp within the batch, from 0.
        """
        if self._stamp_kernel is not None:
            self._stamp_kernel[(self._stamp_blocks,)](
                self._stamp_rows[index], _MAX_SMS, **_ONE_WARP
            )

    def clocks_mhz(self, stamps: int) -> tuple[float, ...]:
        """Returns the SM clocks between neighbouring stamps of this batch, in MHz.

        The result is empty if the clocks are unknown. The caller must call `synchronize` first.

        stamps: number of stamps in the batch.
        """
        if self._stamp_kernel is None:
            return ()
        rows = self._stamps[:stamps].cpu().numpy()
        return clocks_from_stamps(np.asarray(rows, dtype=np.int64))

    def state(self) -> DeviceState:
        """Returns the state of the device, which is read at most 50 times a second.

        The state's note gives the reason if the probes are missing.
        """
        if monotonic() - self._state_at_s >= _STATE_PERIOD_S:
            state = self._ask_state()
            self._state = replace(state, note="; ".join(filter(None, (state.note, self._note))))
            self._state_at_s = monotonic()
        return self._state

    def synchronize(self) -> None:
        """Waits for all queued work and raises its errors."""
        torch.cuda.synchronize()

    def capture(self, body: Callable[[], None]) -> Run:
        """Captures the work that `body` queues as a graph, and returns a function to replay it.

        `body` first runs once on the capture's stream. In this run, cuBLAS and the allocator set up
        their state for the stream, outside the graph.
        """
        self._graph_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._graph_stream):
            body()
        torch.cuda.current_stream().wait_stream(self._graph_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._graph_stream):
            body()
        return graph.replay

    def _load_probes(self) -> str:
        """Builds and runs the probes. Returns "", or the reason why they cannot be used."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            return "no counters of the SM clock: TRITON_INTERPRET is set"
        try:
            from quantbench.timing import probes

            held = HostFlagHold(probes.hold)
            # The kernels run twice. In the second pass everything is loaded, so the flag ends the
            # hold at once.
            for _ in range(2):
                held.hold()
                held.release()
                probes.stamp[(self._stamp_blocks,)](self._stamp_rows[0], _MAX_SMS, **_ONE_WARP)
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001
            # Triton is missing, does not know the GPU, or lacks a C compiler for its launcher. Its
            # compilation errors are not RuntimeErrors. torch still works.
            return f"no counters of the SM clock: {reason_line(error)}"
        self._hold = held
        self._stamp_kernel = probes.stamp
        return ""


def clocks_from_stamps(stamps: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """Returns the SM clock between neighbouring stamps, Δcycles / Δtime in MHz.

    A gap between stamps that is shorter than half a millisecond is joined with its neighbours,
    because the timer's resolution is too coarse for it. The SM clock does not change faster. The
    result is empty if a stamp contains no SM, or if two stamps have no SM in common.

    stamps: [stamps, SMs, 2], globaltimer in ns and clock64 in cycles. The two numbers are 0 for an
        SM on which no block of the probe ran.

    >>> one_sm = np.array([[[1_000, 500]], [[1_001_000, 1_980_500]]], dtype=np.int64)
    >>> clocks_from_stamps(one_sm)
    (1980.0,)
    """
    count = len(stamps) - 1
    stamped = (stamps[:, :, 0] > 0).sum(axis=1) > 0
    if count < 1 or not stamped.all():
        return ()
    at_ns = np.array([np.median(row[row > 0]) for row in stamps[:, :, 0]])
    clocks = []
    for gap in range(count):
        low = gap
        high = gap + 1
        while at_ns[high] - at_ns[low] < _WINDOW_NS and (low > 0 or high < count):
            low = max(low - 1, 0)
            high = min(high + 1, count)
        mhz = _mhz(stamps[low], stamps[high])
        if mhz is None:
            return ()
        clocks.append(mhz)
    return tuple(clocks)


def _mhz(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> float | None:
    """Returns the SM clock between two stamps in MHz, or None if the stamps have no SM in common.

    before, after: [SMs, 2], one stamp each.
    """
    both = (before[:, 0] > 0) & (after[:, 0] > before[:, 0]) & (after[:, 1] > before[:, 1])
    if not both.any():
        return None
    delta = (after - before)[both]
    return float(np.quantile(delta[:, 1] / delta[:, 0] * 1e3, _UPPER))
