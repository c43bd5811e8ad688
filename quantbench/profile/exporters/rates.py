"""Derives rates that simple planners take as input: achieved TFLOP/s, memory and link bandwidth.

The rates come from measured rows, or from the models if there are no such rows. The module also
computes the curves of efficiency over the size of the work.
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

#: Shorter runs do not count as compute-bound, because the launch dominates their time.
_LEAST_US = 50.0
_PLAN_OPTIONS = "; give --gpus-per-node and --node-gbit-per-s"
#: width of a curve's bins as a power of two
_LOG2_BIN = 2
#: Work counts for the efficiency curve of the arithmetic if it reaches less than this fraction of
#: the memory bandwidth. It counts for the curve of the memory if it reaches less than this fraction
#: of the peak.
_EXPLAINED = 0.5
#: Sides of modelled GEMMs if none was measured: squares, and GEMMs of few rows.
_MODEL_SQUARES = tuple(2**power for power in range(6, 15))
_MODEL_ROWS = (1, 8, 16)


#: (rows,), record array of workloads with the columns of `works_of`
Works = np.recarray[Any, Any]


def works_of(works: Iterable[Workload], latency_us: npt.ArrayLike) -> Works:
    """Returns FLOP, bytes, time in µs, TFLOP/s and GB/s of workloads as a record array, (rows,).

    latency_us: (rows,), times in µs.
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
    """Achieved rates of the GEMMs of one dtype, and of memory.

    tflops: median over the compute-bound GEMMs, which are `compute`; each counts as at most the
        peak.
    gb_per_s: median over the memory-bound work, which is `memory`; each piece counts as at most the
        memory bandwidth.
    compute_by_size, memory_by_size: work for the efficiency curves of the arithmetic and of the
        memory, including short runs.
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

    If no compute-bound GEMM, or no memory-bound work, was measured, modelled GEMMs take its place.
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
        # Memory traffic takes more than twice as long as the arithmetic. Work of less than four
        # times the L2 may be served from the cache.
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
    # Work that appears faster than the memory was served from the cache.
    streamed = streams[
        (streams.tflops < _EXPLAINED * peak) & (streams.gb_per_s <= device.memory_gb_per_s)
    ]
    return Achieved(dtype, tflops, gb_per_s, compute, memory, by_size, streamed, peak)


def curve(size: FloatArray, share: FloatArray) -> list[list[float]]:
    """Returns the efficiency by size of the work: [[size, efficiency], …], descending in size.

    Neighbouring sizes are a factor of four or more apart, and the last size is 0. Consumers look up
    the first size that is not above the size of their work.

    size, share: (rows,), size and efficiency of each piece of work. The efficiency of a listed size
        is the median over the work up to the next larger listed size, at most 1.
    """
    # The bins use frexp, because a rounded logarithm may put a power of two into the bin below it.
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

    inside_gb_per_s, between_gb_per_s: rate within a node, and between nodes per GPU.
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
    """Returns the links of the GPU in its vendor's reference system.

    `share` and the latency inside a node come from measured all-reduces if there are any.
    """
    cluster = reference_cluster(profile.device)
    stated, source = stated_link(profile.device)
    measured = _measured_inside(profile, out)
    if measured is None:
        link = cluster.intra_node(cluster.gpus_per_node)  # from public NCCL tables if there are any
        measured = link.bus_bytes[-1] / link.latency_us[-1] / 1e3, link.latency_us[0]
    reached, latency_us = measured
    # Some sources end with the options of `plan` that replace them.
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

    The bandwidth, in GB/s, is that of the largest message, over the maximum number of GPUs. The
    latency, in µs, is the time of the smallest message, over the minimum number of GPUs.
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
