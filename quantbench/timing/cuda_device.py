"""Makes the CUDA calls that the samplers need, with torch and two Triton kernels.

One kernel holds the stream while work is queued, the other reads the counters of the SMs, from
which the SM clock is computed.
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

# Shortest time between two readings of the device state. NVML takes milliseconds for a reading, and
# no disturbance of timings is shorter than this time.
_STATE_PERIOD_S = 0.02

# Launch options of the probes. triton 3.9 warns if fp fusion is not set, although the probes have
# no multiplications.
_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": True}

# Longest time of a hold. It is a thousand times the time to queue a batch, and short enough to wait
# for in a deadlock.
_HOLD_TIMEOUT_NS = 500_000_000

# First and longest sleep of `SleepHold`, in cycles (2 ms and 0.5 s at 2 GHz).
_FIRST_SLEEP_CYCLES = 4_000_000
_LONGEST_SLEEP_CYCLES = 1_000_000_000

# Upper bound on %smid, larger than the number of SMs of any GPU (B200: 148).
_MAX_SMS = 512

# Shortest time over which an SM clock is computed. %globaltimer ticks every 32 ns on some GPUs and
# every 1 µs on others, which is at most 0.2 % of this time.
_WINDOW_NS = 500_000

# Each SM gives one clock, and this quantile over the SMs is taken as the SM clock. The cycle
# counter of an SM may stop while the SM sleeps, and no counter runs faster than the clock, so the
# upper quartile is robust to a few sleeping SMs and to a misread stamp.
_UPPER = 0.75


class HostFlagHold:
    """Holds a stream by a kernel that spins on a flag in pinned host memory.

    The caller calls `hold()`, queues the work to be timed, calls `release()`, synchronises, and
    then asks `was_held()`. The kernel ends after half a second in any case. Then `was_held()` is
    False and the batch is invalid. This happens if queued work waits for the device: a
    synchronisation or a copy to pageable memory in the run itself, the first launch of a kernel,
    cudaFree (also from an exhausted allocator), more than about 1024 launches (`MAX_QUEUED` samples
    fit), or a profiler that serialises launches.
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
        """Returns whether the flag ended the kernel, and not its time limit."""
        return bool(self._timed_out_view[0] == 0)


class SleepHold:
    """Holds a stream by torch.cuda._sleep, for machines on which Triton cannot build kernels.

    The length of the sleep is a guess. It is doubled each time the device wakes before the host has
    queued everything, and such a batch counts as not held.
    """

    def __init__(self) -> None:
        self._cycles = _FIRST_SLEEP_CYCLES
        self._awake = torch.cuda.Event()
        self._late = False

    def hold(self) -> None:
        torch.cuda._sleep(self._cycles)
        self._awake.record()

    def release(self) -> None:
        """Checks whether the device still sleeps when everything is queued."""
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

    Tests replace it by a simulated device.

    Creating an object allocates the flush buffer (COLD_L2_MULTIPLE × L2) and compiles the two probe
    kernels, which takes about a second the first time. Without these kernels (no Triton, or no C
    compiler) a sleep holds the stream and the SM clock is the one that NVML reports; the note of
    `state()` says so.
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

        Cold means that neither input nor output is in L2, and that L2 holds nothing that must be
        written back. The flush reads a buffer of COLD_L2_MULTIPLE times L2, which evicts everything
        and leaves clean lines. A memset would leave dirty lines, and the timed kernel would pay for
        writing them back (up to 15 µs on an H100). The flush does not evict lines that a kernel
        asked to keep (evict_last, persisting windows). Rotating over copies does.
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
        """Queues the kernel that reads the counters of all SMs.

        Without the probe kernels it does nothing.

        index: number of the stamp within the batch.
        """
        if self._stamp_kernel is not None:
            self._stamp_kernel[(self._stamp_blocks,)](
                self._stamp_rows[index], _MAX_SMS, **_ONE_WARP
            )

    def clocks_mhz(self, stamps: int) -> tuple[float, ...]:
        """Returns the SM clocks between the first `stamps` stamps of this batch, in MHz.

        Returns an empty tuple if the clocks are unknown. Must be called after `synchronize`.
        """
        if self._stamp_kernel is None:
            return ()
        rows = self._stamps[:stamps].cpu().numpy()
        return clocks_from_stamps(np.asarray(rows, dtype=np.int64))

    def state(self) -> DeviceState:
        """Returns the state of the device, which is read at most 50 times a second.

        Its note says whether the probe kernels are missing.
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
        """Captures the work that `body` queues as a graph.

        Returns the function that replays the graph. `body` first runs once on the stream of the
        capture, so that cuBLAS and the allocator set up their state of this stream outside the
        graph.
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
        """Builds and runs the two kernels. Returns "", or the reason why they are missing."""
        if os.environ.get("TRITON_INTERPRET") == "1":
            return "no counters of the SM clock: TRITON_INTERPRET is set"
        try:
            from quantbench.timing import probes

            held = HostFlagHold(probes.hold)
            # The kernels run twice. The second time everything is loaded, so a flag that is set at
            # once must end the hold.
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
    """Returns the SM clock between neighbouring stamps, Δcycles / Δnanoseconds in MHz.

    Returns an empty tuple if a stamp has no SM, or if two stamps have no SM in common. A gap
    shorter than half a millisecond is joined with its neighbours: over a shorter gap the resolution
    of the timer would show, and the SM clock does not change faster.

    stamps: globaltimer in ns and clock64 in cycles (stamps, SMs, 2); both are 0 if no block ran on
        an SM.

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
    """Returns the SM clock between two stamps in MHz; None if no SM has both stamps.

    before, after: the stamps (SMs, 2).
    """
    both = (before[:, 0] > 0) & (after[:, 0] > before[:, 0]) & (after[:, 1] > before[:, 1])
    if not both.any():
        return None
    delta = (after - before)[both]
    return float(np.quantile(delta[:, 1] / delta[:, 0] * 1e3, _UPPER))
