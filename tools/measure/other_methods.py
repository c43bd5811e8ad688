"""Times a kernel with the methods of other projects, to compare with quantbench's timer.

A method is a function that runs a kernel and returns samples in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quantbench.device.spec import DeviceSpec
from quantbench.workload import Gemm


@dataclass(frozen=True)
class Case:
    """GEMM to time, the device, and the function that runs the GEMM once."""

    gemm: Gemm
    spec: DeviceSpec
    run: Callable[[], None]


#: function that times a case; returns samples in microseconds, or none if it cannot time the case
Method = Callable[[Case], list[float]]
_MAMF_WARM_UP = 50
_MAMF_RUNS = 100
_MAMF_CLEAR_BYTES = 256 * 2**20


def do_bench(case: Case) -> list[float]:
    """Runs `triton.testing.do_bench` with its default times: 25 ms of warm-up, 100 ms of runs.

    It times each launch between two events, and clears the cache by writing a buffer.
    """
    from triton.testing import do_bench as bench

    return [float(ms) * 1e3 for ms in bench(case.run, return_mode="all")]


def mamf(case: Case) -> list[float]:
    """Times runs as mamf-finder does (stas00/ml-engineering): 50 runs to warm up, then 100.

    Each of the 100 is timed between two events. Before it, the cache is cleared by zeroing 256 MiB.
    """
    import torch

    clear = torch.empty(_MAMF_CLEAR_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(_MAMF_WARM_UP):
        case.run()
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(_MAMF_RUNS)]
    stops = [torch.cuda.Event(enable_timing=True) for _ in range(_MAMF_RUNS)]
    for start, stop in zip(starts, stops, strict=True):
        clear.zero_()
        start.record()
        case.run()
        stop.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]


def graph6(case: Case) -> list[float]:
    """Returns one sample: the mean of six runs in a CUDA graph.

    The graph is replayed once untimed and once timed, without clearing the cache.
    """
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(6):
            case.run()
    graph.replay()
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return [float(start.elapsed_time(stop)) * 1e3 / 6]


#: methods to compare with, on a GPU
METHODS: dict[str, Method] = {
    "do_bench": do_bench,
    "mamf": mamf,
    "graph6": graph6,
}
