"""Derives the rates that simple planners take as input: achieved TFLOP/s and bandwidths.

`achieved` returns the rates of arithmetic and memory, and `link_rates` the rates of the links. The
rates come from measured rows, or from models where rows are missing. `curve` gives the efficiency
by the size of the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import UnsupportedError
from quantbench.latency.interconnect import (
    NODE_LATENCY_S,
    host_link,
    reference_cluster,
    stated_link,
)
from quantbench.profile.exporters.modelled import GemmTimes
from quantbench.profile.exporters.options import (
    WHO,
    Exported,
    ExportOptions,
    collectives,
    dtype_of,
    products,
)
from quantbench.profile.linear_interpolation import FloatArray
from quantbench.profile.profile import Profile
from quantbench.workload import Gemm, Workload

#: Shortest time in µs of a compute-bound GEMM. The launch dominates shorter times.
_LEAST_US = 50.0
#: End of some sources of link rates: options of `quantbench plan` that do not apply to exports.
_PLAN_OPTIONS = "; give --gpus-per-node and --node-gbit-per-s"
#: Width of an efficiency curve's bins, as a power of two of the size.
_LOG2_BIN = 2
#: Work is used for the arithmetic's efficiency curve if it reaches less than this fraction of the
#: memory bandwidth, and for the memory's curve if it reaches less than this fraction of the peak.
_EXPLAINED = 0.5
#: Sizes of modelled GEMMs, used if none was measured: m = n = k, or few rows m.
_MODEL_SQUARES = tuple(2**power for power in range(6, 15))
_MODEL_ROWS = (1, 8, 16)


#: Record array of workloads, (rows,), with the columns of `works_of`.
Works = np.recarray[Any, Any]


def works_of(works: Iterable[Workload], latency_us: npt.ArrayLike) -> Works:
    """Returns a record array (rows,) with FLOP, bytes, time in µs, TFLOP/s and GB/s.

    works: workloads.
    latency_us: (rows,), their times in µs.
    """
    found = list(works)
    us = np.asarray(latency_us, dtype=np.float64)
    flops = np.array([work.flops for work in found], dtype=np.float64)
    moved_bytes = np.array([work.min_bytes for work in found], dtype=np.float64)
    columns = [flops, moved_bytes, us, flops / us / 1e6, moved_bytes / us / 1e3]
    names = ["flops", "moved_bytes", "latency_us", "tflops", "gb_per_s"]
    return np.rec.fromarrays(columns, dtype=[(name, np.float64) for name in names])


@dataclass(frozen=True)
class Achieved:
    """Achieved rates of one dtype's GEMMs, and of memory.

    tflops: median over `compute`. A rate above the peak counts as the peak.
    gb_per_s: median over `memory`. A rate above the memory bandwidth counts as the bandwidth.
    compute: compute-bound GEMMs.
    memory: memory-bound GEMMs and softmax.
    compute_by_size, memory_by_size: workloads for the efficiency curves of the arithmetic and the
        memory, including short ones.
    peak_tflops: the device's peak for the dtype.
    """

    dtype: str
    tflops: float
    gb_per_s: float
    compute: Works
    memory: Works
    compute_by_size: Works
    memory_by_size: Works
    peak_tflops: float


def achieved(profile: Profile, options: ExportOptions, out: Exported) -> Achieved:
    """Returns the achieved rates of measured GEMMs and softmax.

    If no compute-bound GEMM was measured, TFLOP/s come from modelled GEMMs. If no memory-bound work
    was measured, GB/s come from modelled GEMMs.

    Raises UnsupportedError if the device has no peak for the dtype.
    """
    device = profile.device
    dtype = dtype_of(profile, options)
    peak = device.peak(dtype)
    if peak is None:
        raise UnsupportedError(WHO, f"{device.name} has no peak for {dtype}", "another --dtype")
    ridge = (
        peak * 1e3 / device.memory_gb_per_s
    )  # FLOP per byte at which arithmetic and memory traffic take equally long

    def bound_by_arithmetic(works: Works) -> Any:
        return works[(works.flops > ridge * works.moved_bytes) & (works.latency_us >= _LEAST_US)]

    def bound_by_memory(works: Works) -> Any:
        # Memory traffic takes more than twice as long as the arithmetic. Data of less than four
        # times the L2's size may be served from the cache.
        large = works.moved_bytes > 4 * device.l2_bytes
        return works[(works.flops < 0.5 * ridge * works.moved_bytes) & large]

    table = products(profile, ExportOptions(options.provider, options.layout, dtype), out)
    softmax = profile.tables["softmax"]
    # Grade D means that the inputs were in a cache, so the rate is not the memory's.
    softmax = softmax.where((softmax["direction"] == "forward") & (softmax["grade"] != "D"))
    from_memory = table.where(table["grade"] != "D")
    measured = works_of(table.workloads(), table["latency_us"])
    streams = works_of(
        [*from_memory.workloads(), *softmax.workloads()],
        np.concatenate([from_memory["latency_us"], softmax["latency_us"]]),
    )
    compute = bound_by_arithmetic(measured)
    memory = bound_by_memory(streams)
    of_compute = f"{len(compute):,} measured products of {dtype}"
    of_memory = f"{len(memory):,} measured pieces of memory-bound work"
    if not len(compute) or not len(memory):
        shapes = [(s, s, s) for s in _MODEL_SQUARES]
        shapes += [(m, s, s) for m, s in product(_MODEL_ROWS, (*_MODEL_SQUARES, 2**15))]
        works = [Gemm(*sizes, dtype=dtype, layout="nt") for sizes in shapes]
        modelled = works_of(works, GemmTimes(profile, dtype).latency_us(*np.array(shapes).T))
        if not len(compute):
            measured = modelled
            of_compute = f"products of {dtype} as modelled"
            compute = bound_by_arithmetic(modelled)
        if not len(memory):
            streams = modelled
            of_memory = "memory-bound work as modelled"
            memory = bound_by_memory(modelled)
    out.notes.append(f"achieved TFLOP/s from {of_compute}; achieved GB/s from {of_memory}")
    tflops = float(np.median(np.minimum(compute.tflops, peak)))
    gb_per_s = float(np.median(np.minimum(memory.gb_per_s, device.memory_gb_per_s)))
    by_size = measured[measured.gb_per_s < _EXPLAINED * device.memory_gb_per_s]
    # Workloads that seem faster than the memory bandwidth were served from the cache.
    streamed = streams[
        (streams.tflops < _EXPLAINED * peak) & (streams.gb_per_s <= device.memory_gb_per_s)
    ]
    return Achieved(dtype, tflops, gb_per_s, compute, memory, by_size, streamed, peak)


def curve(size: FloatArray, share: FloatArray) -> list[list[float]]:
    """Returns the efficiency by size of the work: [[size, efficiency], …], descending in size.

    Listed sizes are powers of four, but the last size is 0. Planners look up the first listed size
    that is not above the size of their work. The efficiency is the median over the work from the
    listed size up to four times this size, at most 1.

    size, share: (rows,), size and efficiency of each workload.
    """
    # frexp is exact. A rounded logarithm may put a power of two into the bin below it.
    bins = (np.frexp(size)[1] - 1) // _LOG2_BIN
    found = [
        [2.0 ** (_LOG2_BIN * b), min(1.0, float(np.median(share[bins == b])))]
        for b in sorted(set(bins.tolist()))
    ]
    found[0][0] = 0.0  # smaller sizes than the measured ones get the efficiency of the smallest
    return found[::-1]


@dataclass(frozen=True)
class LinkRates:
    """Links of a GPU. Rates are for one direction, in 1e9 bytes per second.

    inside_gb_per_s: nominal rate per GPU within a node.
    between_gb_per_s: rate per GPU between nodes.
    inside_latency_s, between_latency_s: time of a small message in seconds.
    share: fraction of `inside_gb_per_s` that a large all-reduce achieves, at most 1.
    host_gb_per_s: rate of the GPU's link to the host.
    """

    gpus_per_node: int
    inside_gb_per_s: float
    between_gb_per_s: float
    inside_latency_s: float
    between_latency_s: float
    share: float
    host_gb_per_s: float


def link_rates(profile: Profile, out: Exported) -> LinkRates:
    """Returns the GPU's links in its vendor's reference system.

    `share` and `inside_latency_s` come from measured all-reduces if there are any, and otherwise
    from public NCCL tables or from assumptions.
    """
    cluster = reference_cluster(profile.device)
    stated, source = stated_link(profile.device)
    measured = _measured_inside(profile, out)
    if measured is None:
        link = cluster.intra_node(cluster.gpus_per_node)  # from public NCCL tables if there are any
        measured = link.bus_bytes[-1] / link.latency_us[-1] / 1e3, link.latency_us[0]
    reached, latency_us = measured
    # Some sources end with the options of `quantbench plan` that override them.
    out.notes.append(f"links: {cluster.source.replace(_PLAN_OPTIONS, '')}; {source}")
    return LinkRates(
        gpus_per_node=cluster.gpus_per_node,
        inside_gb_per_s=stated,
        between_gb_per_s=cluster.gpu_gb_per_s,
        inside_latency_s=latency_us / 1e6,
        between_latency_s=NODE_LATENCY_S,
        share=min(1.0, reached / stated),
        host_gb_per_s=host_link(profile.device)[0],
    )


def _measured_inside(profile: Profile, out: Exported) -> tuple[float, float] | None:
    """Returns the bus bandwidth and the latency of all-reduces measured within a node, or None.

    The bandwidth, in GB/s, is the largest message's rate. The latency, in µs, is the smallest
    message's time. If several numbers of GPUs have such a message, the bandwidth is of the largest
    number of GPUs, and the latency of the smallest.
    """
    table = collectives(profile, Exported()).matching(op="all_reduce", num_nodes=1)
    if not len(table):
        return None
    sizes = list(zip(table["message_bytes"].tolist(), table["num_gpus"].tolist(), strict=True))
    largest = sizes.index(max(sizes))
    smallest = sizes.index(min(sizes))
    work: Any = table.workloads()[largest]
    gb_per_s = work.bus_bytes / float(table["latency_us"][largest]) / 1e3
    out.notes.append(f"inside a node: measured, {work} at {gb_per_s:.4g} GB/s on the bus")
    return gb_per_s, float(table["latency_us"][smallest])
