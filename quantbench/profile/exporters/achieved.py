"""What a GPU was measured to reach, in the few figures that simple planners take: TFLOP/s, GB/s, and both by size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.profile.blindspots import FloatArray
from quantbench.profile.exporters.modelled import GemmTimes
from quantbench.profile.exporters.options import WHO, Exported, ExportOptions
from quantbench.profile.exporters.rows import dtype_of, products
from quantbench.profile.profile import Profile
from quantbench.workload import Gemm, Workload

#: shorter runs tell of launching more than of arithmetic or memory
_LEAST_US = 50.0
#: sizes of a curve, from one bin to the next, as a power of two
_LOG2_BIN = 2
#: work stands in the curve of the one where the other explains less than this of its time
_EXPLAINED = 0.5
#: sizes of the products that a model is asked for where none was measured: squares, and short and wide ones
_MODEL_SQUARES = tuple(2**power for power in range(6, 15))
_MODEL_ROWS = (1, 8, 16)


@dataclass(frozen=True)
class Works:
    """Pieces of work with their times. flops, moved_bytes: of each, as `Workload` counts them; all (rows,)."""

    flops: FloatArray
    moved_bytes: FloatArray
    latency_us: FloatArray

    def where(self, rows: npt.NDArray[np.bool_]) -> Works:
        """Some of them."""
        return Works(self.flops[rows], self.moved_bytes[rows], self.latency_us[rows])

    def __len__(self) -> int:
        return len(self.latency_us)

    @property
    def tflops(self) -> FloatArray:
        """Arithmetic of each per second."""
        return self.flops / self.latency_us / 1e6

    @property
    def gb_per_s(self) -> FloatArray:
        """Fewest bytes of each per second, 1e9 bytes."""
        return self.moved_bytes / self.latency_us / 1e3


@dataclass(frozen=True)
class Achieved:
    """dtype: of the products. tflops: median of those that arithmetic bounds; gb_per_s: median of the work that memory
    bounds. compute, memory: that work. compute_by_size, memory_by_size: short runs too, for curves: those of which the
    other's peak does not explain the time. peak_tflops: the device's. note: what both rest on."""

    dtype: str
    tflops: float
    gb_per_s: float
    compute: Works
    memory: Works
    compute_by_size: Works
    memory_by_size: Works
    peak_tflops: float
    note: str


def achieved(profile: Profile, options: ExportOptions, out: Exported) -> Achieved:
    """Rates of the profile's products and softmax, or of the model where nothing was measured."""
    device = profile.device
    dtype = dtype_of(profile, options)
    peak = device.peak(dtype)
    if peak is None:
        raise UnsupportedError(WHO, f"{device.name} has no peak for {dtype}", "another --dtype")
    table = products(profile, ExportOptions(options.provider, options.layout, dtype), out)
    # A grade of D says that the inputs lay in a cache: no rate of the memory.
    from_memory = table["grade"] != "D"
    measured = _works(list(zip(table.workloads(), table["latency_us"].tolist(), strict=True)))
    streams = _joined(measured.where(from_memory), _softmax(profile))
    compute = _bound_by_arithmetic(measured, device, peak)
    memory = _bound_by_memory(streams, device, peak)
    rests = [f"{len(compute):,} measured products of {dtype}", f"{len(memory):,} measured pieces of memory-bound work"]
    if not len(compute) or not len(memory):
        modelled = _modelled(profile, dtype)
        if not len(compute):
            measured, rests[0] = modelled, f"products of {dtype} as modelled"
            compute = _bound_by_arithmetic(modelled, device, peak)
        if not len(memory):
            streams, rests[1] = modelled, "memory-bound work as modelled"
            memory = _bound_by_memory(modelled, device, peak)
    note = f"achieved TFLOP/s from {rests[0]}; achieved GB/s from {rests[1]}"
    out.notes.append(note)
    tflops = float(np.median(np.minimum(compute.tflops, peak)))
    gb_per_s = float(np.median(np.minimum(memory.gb_per_s, device.memory_gb_per_s)))
    by_size = measured.where(measured.gb_per_s < _EXPLAINED * device.memory_gb_per_s)
    # What is faster than the memory came from the cache.
    streamed = streams.where((streams.tflops < _EXPLAINED * peak) & (streams.gb_per_s <= device.memory_gb_per_s))
    return Achieved(dtype, tflops, gb_per_s, compute, memory, by_size, streamed, peak, note)


def curve(size: FloatArray, share: FloatArray) -> list[list[float]]:
    """[[size, share], …] as consumers look it up: the first size that is not larger than theirs counts. Sizes descend
    strictly in steps of four and end at 0; the share is the median of those from there to the next size, at most 1."""
    # frexp and not a logarithm, so that a power of two falls into the bin that it begins
    bins = (np.frexp(size)[1] - 1) // _LOG2_BIN
    found = [[2.0 ** (_LOG2_BIN * b), min(1.0, float(np.median(share[bins == b])))] for b in sorted(set(bins.tolist()))]
    # What is smaller than anything that was timed gets the smallest ones' share.
    found[0][0] = 0.0
    return found[::-1]


def _works(pairs: list[tuple[Workload, float]]) -> Works:
    flops, moved, times = (
        np.array(values, dtype=np.float64)
        for values in (
            [work.flops for work, _ in pairs], [work.min_bytes for work, _ in pairs], [us for _, us in pairs]
        )
    )  # fmt: skip
    return Works(flops, moved, times)


def _joined(one: Works, other: Works) -> Works:
    return Works(*(np.concatenate([getattr(one, n), getattr(other, n)]) for n in vars(one)))


def _softmax(profile: Profile) -> Works:
    """Forward softmax that was measured from memory."""
    table = profile.tables["softmax"]
    table = table.where((table["direction"] == "forward") & (table["grade"] != "D"))
    return _works(list(zip(table.workloads(), table["latency_us"].tolist(), strict=True)))


def _ridge(device: DeviceSpec, peak_tflops: float) -> float:
    """FLOPs per byte at which arithmetic takes as long as the memory."""
    return peak_tflops * 1e3 / device.memory_gb_per_s


def _bound_by_arithmetic(works: Works, device: DeviceSpec, peak: float) -> Works:
    return works.where((works.flops > _ridge(device, peak) * works.moved_bytes) & (works.latency_us >= _LEAST_US))


def _bound_by_memory(works: Works, device: DeviceSpec, peak: float) -> Works:
    large = works.moved_bytes > 4 * device.l2_bytes  # what fits in the cache may have come from there
    return works.where((works.flops < 0.5 * _ridge(device, peak) * works.moved_bytes) & large)


def _modelled(profile: Profile, dtype: str) -> Works:
    shapes = [(s, s, s) for s in _MODEL_SQUARES] + [(m, s, s) for m in _MODEL_ROWS for s in (*_MODEL_SQUARES, 2**15)]
    times = GemmTimes(profile, dtype)
    us = times.latency_us(*(np.array(sizes) for sizes in zip(*shapes, strict=True)))
    works = [Gemm(m=m, n=n, k=k, dtype=dtype, layout="nt") for m, n, k in shapes]
    return _works(list(zip(works, us.tolist(), strict=True)))
