"""Computes the GEMM cost model: the time of every kernel that a library may choose, and of its
choice.

A kernel runs batch · ceil(m / block_m) · ceil(n / block_n) · split_k blocks in waves. Its time is a
launch, plus the p-norm of arithmetic (quantised by waves, softened by a fluid share), memory reads
(each operand cold or hot in L2) and traffic between L2 and the SMs, combined by a second norm with
writing c (near a sum for kernels that do not overlap tiles), plus costs per wave, per step of k, of
the split-k reduction and of quantizing a to a narrow format. The library is assumed to choose
nearly the fastest kernel: a soft minimum over the menu. Every term rises with k, and so does the
total.

Units: µs, bytes, FLOP. Arrays are (kernels, rows) unless stated otherwise, because numpy is faster
    on long rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.autodiff import (
    Variable,
    exp,
    log,
    maximum,
    minimum,
    sigmoid,
    soft_minimum,
    soft_plus,
    value_of,
)
from quantbench.latency.estimate import Parameter
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.ops import LAYOUTS

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
Array = npt.NDArray[np.floating[Any]]

#: block_m × block_n, as in the names of cuBLAS's and CUTLASS's kernels from Volta to Blackwell
TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 128), (128, 32), (32, 64), (64, 32), (16, 128), (16, 64), (32, 256),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)
# An fp32 accumulator of this many elements fills half the registers of an SM: one such block is
# resident.
_LARGEST_TILE = 32768
_MOST_BLOCKS_PER_SM = 6


def resident_blocks(block_m: Any, block_n: Any) -> Any:
    """Returns the resident blocks per SM of a tile, limited by accumulator registers; for numbers
    and arrays.
    """
    return np.clip(np.floor(_LARGEST_TILE / (block_m * block_n)), 1, _MOST_BLOCKS_PER_SM)


@dataclass(frozen=True)
class Kernels:
    """Columns of a menu, (kernels, 1) each."""

    tile_index: IndexArray
    split_k: FloatArray
    block_m: FloatArray
    block_n: FloatArray
    blocks_per_sm: FloatArray


@dataclass(frozen=True)
class Menu:
    """Kernels that a library is assumed to choose from: all pairs of tile and split, or a subset.

    tiles: (block_m, block_n) of each tile.
    kernels: (tile index, split_k) of each kernel.
    """

    tiles: tuple[tuple[int, int], ...]
    kernels: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.kernels:
            raise InputError("Menu", "no kernels", "at least one")

    @classmethod
    def of(cls, unit: str = "tensor cores") -> Menu:
        """Returns the kernels of a unit (`families.unit`): all pairs of TILES and SPLITS; on CUDA
        cores only tiles of 32 to 128, as in the names of cuBLAS's sgemm from Pascal to Ampere: a
        thread holds at most 8 × 8 sums."""
        sides = (32, 128) if unit == "CUDA cores" else (0, max(max(tile) for tile in TILES))
        tiles = [
            i for i, tile in enumerate(TILES) if sides[0] <= min(tile) and max(tile) <= sides[1]
        ]
        return cls(TILES, tuple((tile, split) for tile in tiles for split in SPLITS))

    def subset(self, chosen: IndexArray) -> Menu:
        """Returns the menu of the kernels at these indices; all tiles stay, so tile indices do not
        change.
        """
        return replace(self, kernels=tuple(self.kernels[int(i)] for i in chosen))

    def __len__(self) -> int:
        return len(self.kernels)

    @cached_property
    def each(self) -> Kernels:
        """Columns of all kernels, (kernels, 1)."""
        tile = np.array([t for t, _ in self.kernels], dtype=np.intp)[:, None]
        split = np.array([split for _, split in self.kernels], dtype=np.float64)[:, None]
        block_m, block_n = (
            np.array(sides, dtype=np.float64)[tile] for sides in zip(*self.tiles, strict=True)
        )
        return Kernels(tile, split, block_m, block_n, resident_blocks(block_m, block_n))

    @cached_property
    def of_tile(self) -> tuple[tuple[int, slice | IndexArray], ...]:
        """(tile index, positions of its kernels) for each tile with kernels."""
        return _groups(self.each.tile_index[:, 0])

    @cached_property
    def of_split(self) -> tuple[tuple[int, slice | IndexArray], ...]:
        """(index in SPLITS, positions of its kernels) for each split with kernels; others count as
        the next larger.
        """
        return _groups(
            np.minimum(np.searchsorted(SPLITS, self.each.split_k[:, 0]), len(SPLITS) - 1)
        )


def _groups(of: IndexArray) -> tuple[tuple[int, slice | IndexArray], ...]:
    """Returns (group, positions) for each group; positions are a slice if contiguous, which avoids
    copies.
    """
    found: list[tuple[int, slice | IndexArray]] = []
    for group in np.unique(of):
        at = np.flatnonzero(of == group)
        together = at[-1] - at[0] + 1 == len(at)
        found.append((int(group), slice(int(at[0]), int(at[-1]) + 1) if together else at))
    return tuple(found)


# z is the logarithm of a constant whose meaning starts with "log".
PARAMETERS = (
    Parameter("efficiency", "log share of the peak that the best tile reaches", np.log(0.75), 0.25),
    Parameter("fill", "log elements of k worth the filling of a block's pipeline", np.log(200.0), 0.7),
    Parameter("saturation", "log blocks on an SM that saturate it", np.log(1.5), 0.4),
    Parameter("fluid", "logit of the share of waves that is softened by overlap", -0.5, 1.0),
    Parameter("dram", "log share of the memory's bandwidth that is reached", np.log(0.85), 0.2),
    Parameter("block_flow", "log bytes per µs that a resident block of 128 × 128 reads", np.log(50e3), 0.7),
    Parameter("block_flow_growth", "exponent of block_m + block_n in block_flow", 0.7, 0.3),
    Parameter("flow_norm", "log(p - 1) of the norm that joins block flow and bandwidth", np.log(2.0), 0.5),
    Parameter("l2_speed", "log bandwidth of L2 over that of memory", np.log(2.5), 0.4),
    Parameter("hot_a", "log share of L2 that holds a between runs", np.log(0.7), 0.5),
    Parameter("hot_b", "log share of L2 that holds b between runs, six copies of it", np.log(0.7), 0.7),
    Parameter("hot_c", "log share of L2 that holds c between runs, six copies of it", np.log(0.7), 0.7),
    Parameter("hot_width", "log width of the step from hot to cold, in log bytes", np.log(0.4), 0.5),
    Parameter("write", "log cost of a written byte over a read one", 0.0, 0.15),
    Parameter("l2_to_sm", "log bandwidth between L2 and the SMs over that of memory", np.log(3.0), 0.5),
    Parameter("overlap", "log(p - 1) of the norm that joins arithmetic and traffic", np.log(2.0), 0.5),
    Parameter("write_overlap", "log(p - 1) of the norm that joins the main loop and writing c", np.log(0.7), 1.0),
    Parameter("launch", "log µs of an empty kernel", np.log(2.2), 0.4),
    Parameter("prologue", "log µs that a block of 128 × 128 adds to the launch", np.log(0.3), 0.8),
    Parameter("wave", "log µs between waves", np.log(0.4), 0.8),
    Parameter("epilogue", "log µs of writing 128 × 128 results of a wave", np.log(0.15), 0.8),
    Parameter("step", "log µs latency of 32 elements of k", np.log(0.015), 0.8),
    Parameter("step_growth", "exponent of block_m + block_n in step", 0.0, 0.5),
    Parameter("split", "log µs of a split-k reduction", 0.0, 0.7),
    Parameter("split_steps", "log µs per doubling of split_k", np.log(0.1), 0.7),
    Parameter("split_speed", "log bandwidth of partial sums over that of L2", 0.0, 0.7),
    # Without a reduction kernel, parts that add to one output tile take turns (CUTLASS: "serial
    # split-K").
    Parameter("split_serial", "log µs that each further part of k waits for the one before it", np.log(0.01), 2.0),
    Parameter("small_tile", "log penalty of small tiles in many waves", np.log(0.03), 1.0),
    Parameter("choice", "log width of the choice among kernels, in log time", np.log(0.05), 0.5),
    Parameter("power", "slowdown of long kernels by a lower clock, tenths of log time", 0.0, 0.5),
    Parameter("power_after", "log compute time over 1 ms at which the slowdown sets in", 0.0, 1.0),
    Parameter("vector_launch", "log launch of the matrix-vector kernel over that of a GEMM", 0.0, 0.3),
    Parameter("vector_flow", "log bandwidth of the matrix-vector kernel over that of a GEMM", np.log(0.7), 0.3),
    Parameter("misaligned", "log factor of arithmetic per halving of alignment below 16 bytes", 0.25, 0.15),
    # A table timed from Python holds the host's launch: 30 to 100 µs. It is no property of the GPU.
    Parameter("host", "log µs of the host's work that the measured times include", np.log(0.05), 2.5),
    # Every row of a long operand begins on another page, and the TLB holds few.
    Parameter("far", "log bytes of k in a row from which arithmetic waits for address translation", np.log(64e3), 0.7),
    Parameter("far_growth", "exponent of k in that wait", 0.0, 0.3),
    # Only for narrow formats (`Machine.is_narrow`). Blocks whose rows lie partly beyond m take
    # longer than full ones in the CUTLASS kernels of vLLM, SGLang and TensorRT-LLM on Hopper;
    # cuBLAS's do not.
    Parameter("padded", "log extra arithmetic of a row beyond m, in rows", np.log(0.1), 1.2),
    # A layer in a narrow format first quantizes its 16-bit activations, in another kernel.
    Parameter("convert", "log cost of a byte that quantizing a moves over one that the GEMM reads", np.log(0.1), 1.5),
    Parameter("convert_row", "log µs of quantizing a row of a", np.log(1e-3), 1.5),
)  # fmt: skip
INDEX = {p.name: i for i, p in enumerate(PARAMETERS)}
#: the tiles' efficiencies come after the named parameters in a vector
FIRST_TILE = len(PARAMETERS)
_TILE_SD = 0.3
#: indices of the parameters of a benchmark's host and of few shapes, which members do not vary
UNVARIED = [
    INDEX[name] for name in ("host", "far", "far_growth", "padded", "convert", "convert_row")
]


def hand_prior() -> tuple[FloatArray, FloatArray]:
    """Returns (mean, sd), each (parameters + tiles,), of the prior for a GPU without
    measurements.
    """
    small = [
        -0.16 * float(np.log2(_LARGEST_TILE / (m * n))) for m, n in TILES
    ]  # small tiles reuse each byte less
    mean = np.array([p.mean for p in PARAMETERS] + small)
    sd = np.array([p.sd for p in PARAMETERS] + [_TILE_SD] * len(TILES))
    return mean, sd


# On the GPUs of the public tables this share is 0.1 if the waves of one tile explain the steps
# (A100), and 0.4 to 0.9 if they do not (docs/choosing-shapes.md). The hand prior has 0.38.
_LARGEST_FLUID_SHARE = 1 / 3


def runs_in_waves(vectors: Sequence[FloatArray]) -> bool:
    """Returns whether GEMMs run in waves: the mean fluid share over members is below a third.

    vectors: (parameters,) of each member of a model.
    """
    fluid = [1.0 / (1.0 + np.exp(-vector[INDEX["fluid"]])) for vector in vectors]
    return bool(np.mean(fluid) < _LARGEST_FLUID_SHARE)


@dataclass(frozen=True)
class Values:
    """Named access to a parameter vector: a plain array, or an `autodiff.Variable` to compute a
    gradient.
    """

    vector: Any

    def __getitem__(self, name: str) -> Any:
        i = INDEX[name]
        part = slice(i, i + 1)
        return self.vector.take(part) if isinstance(self.vector, Variable) else self.vector[part]

    def tiles(self, index: IndexArray) -> Any:
        """Returns the log efficiency of each kernel's tile, in the shape of `index`."""
        at = FIRST_TILE + index
        return self.vector.take(at) if isinstance(self.vector, Variable) else self.vector[at]


_STEP_K = 32.0  # elements of k that a block loads at a time
_COPIES = 6.0  # copies of b and c that a benchmark cycles through
_LONG_US = 1000.0
# Doubling k halves a misalignment and multiplies the steps by at least 1.5: below log(1.5) it is
# never faster.
_MOST_MISALIGNED = 0.4
_POWER_SLOPE = 1.0 / 0.7
_FAR_SLOPE = 3.0
_NT, _TN = LAYOUTS.index("nt"), LAYOUTS.index("tn")
#: smallest k that the trees see: one step of a main loop; smaller k are corrected like this one
LEAST_K = 32.0


@dataclass(frozen=True)
class Machine:
    """Device constants that the cost model needs for one dtype; rates per µs."""

    sm_count: int
    flop_per_us: float
    bytes_per_us: float
    l2_bytes: float
    element_bytes: float
    output_bytes: int

    @property
    def is_narrow(self) -> bool:
        """Whether a and b have fewer bytes per element than c, as in FP8 and FP4."""
        return self.element_bytes < self.output_bytes

    @classmethod
    def of(cls, device: DeviceSpec, dtype: str) -> Machine:
        """Builds the constants for GEMMs of `dtype`, which the device must support."""
        kind, peak = DTYPES[dtype], device.peak(dtype)
        if peak is None:
            raise InputError(
                "Machine.of", f"{device.name} has no peak for {dtype}", "a dtype that it supports"
            )
        return cls(
            sm_count=device.sm_count,
            flop_per_us=peak * 1e6,
            bytes_per_us=device.memory_gb_per_s * 1e3,
            l2_bytes=float(device.l2_bytes),
            element_bytes=kind.element_bytes / kind.packed,
            output_bytes=DTYPES[kind.output].element_bytes,
        )


class Shapes:
    """Terms of the cost model for kernels × rows that do not depend on parameters.

    m, n, k, batch: (rows,) each; batch is 1 by default.
    layout: index in `LAYOUTS`, -1 (the default) if unknown: rows of a and b then run along k.
    """

    def __init__(
        self,
        machine: Machine,
        menu: Menu,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        batch: FloatArray | None = None,
        layout: FloatArray | None = None,
    ) -> None:
        self.machine = machine
        self.log_bandwidth = math.log(machine.bytes_per_us)  # a float, which makes no array wider
        batch = np.ones(len(m)) if batch is None else batch
        self.m, self.n, self.k, self.batch = m, n, k, batch
        self.layout = np.full(len(m), -1.0) if layout is None else layout
        of = menu.each
        self.tile_index = of.tile_index
        tiles = batch * np.ceil(m / of.block_m) * np.ceil(n / of.block_n)
        blocks = tiles * of.split_k
        resident = machine.sm_count * of.blocks_per_sm
        fluid = blocks / resident
        full = np.floor(fluid)
        rest = blocks - full * resident
        has_rest = (rest > 0).astype(np.float64)
        # A part is at least one step: splitting further only adds blocks, and time still rises with
        # k.
        k_part = np.maximum(np.ceil(k / (of.split_k * _STEP_K)) * _STEP_K, _STEP_K)
        l2_bytes = blocks * (of.block_m + of.block_n) * k_part * machine.element_bytes

        self.tiles = tiles
        self.blocks = blocks
        self.k_part = k_part
        self.fluid = fluid
        self.full = full
        self.has_rest = has_rest
        self.waves = full + has_rest
        self.last = np.ceil(rest / machine.sm_count) / of.blocks_per_sm
        self.log_at_once = np.log(np.minimum(blocks, resident))
        self.l2_bytes = l2_bytes / np.minimum(
            blocks / machine.sm_count, 1.0
        )  # as if every SM were busy
        self.partial_bytes = np.where(of.split_k > 1, 8.0, 0.0) * of.block_m * of.block_n * blocks
        self.smallness = np.log(1.0 + fluid) * np.log2(_LARGEST_TILE / (of.block_m * of.block_n))

        self.held = of.blocks_per_sm
        self.split_k = of.split_k
        self.wave_flop = of.blocks_per_sm * (2.0 * of.block_m * of.block_n)
        self.area = of.block_m * of.block_n / 16384.0  # of 128 × 128
        self.growth = np.log((of.block_m + of.block_n) / 256.0)
        self.is_split = (of.split_k > 1).astype(np.float64)
        self.split_doublings = np.log2(of.split_k)

        element_bytes = machine.element_bytes * batch
        a_bytes, b_bytes = element_bytes * m * k, element_bytes * k * n
        c_bytes = machine.output_bytes * batch * m * n
        self.a_bytes = a_bytes
        self.b_bytes = b_bytes
        self.c_bytes = c_bytes
        log_l2 = np.log(machine.l2_bytes)
        self.reuse_a = np.log(a_bytes + b_bytes + c_bytes) - log_l2
        self.reuse_b = np.log(a_bytes + _COPIES * b_bytes + c_bytes) - log_l2
        self.reuse_c = np.log(a_bytes + b_bytes + _COPIES * c_bytes) - log_l2
        # No table of a narrow format shows a matrix-vector kernel.
        self.is_vector = (((m == 1) | (n == 1)) & (not machine.is_narrow)).astype(np.float64)
        self.log_row_bytes = np.log(k * machine.element_bytes)
        # Share of the rows that a block reads along k: those of a but in tn, those of b but in nn
        # and tn.
        tall, wide = np.minimum(m, of.block_m), np.minimum(n, of.block_n)
        self.along_k = (
            tall * (self.layout != _TN) + wide * ((self.layout < 0) | (self.layout == _NT))
        ) / (tall + wide)
        self.log_compute = np.log(2.0 * batch * m * n * k / machine.flop_per_us / _LONG_US)
        if machine.is_narrow:
            self.padding = 1.0 - m / (np.ceil(m / of.block_m) * of.block_m)
            self.a_rows = batch * m
            self.converted_us = batch * m * k * (2.0 + machine.element_bytes) / machine.bytes_per_us
        by_n, by_k = _halvings(n * machine.output_bytes), _halvings(k * machine.element_bytes)
        # A part of k shorter than a step is padded to one, whatever its alignment.
        self.halvings: Array | None = None
        if by_n.any() or by_k.any():
            padded = k < of.split_k * _STEP_K
            self.halvings = np.where(padded, by_n, np.maximum(by_n, by_k))


def _halvings(row_bytes: FloatArray) -> FloatArray:
    """Returns how many halvings a row's alignment is below 16 bytes, (rows,): 0 at 16 bytes, 3 at
    2.
    """
    whole = row_bytes.astype(np.int64)
    halvings: FloatArray = 4.0 - np.log2(np.minimum(whole & -whole, 16))
    return halvings


@dataclass(frozen=True)
class Parts:
    """Parts of each kernel's time, (kernels, rows) µs, and the log of the total; Variables if a
    gradient is needed.

    fixed: launch, and the latency of the steps of k, which more tiles do not lengthen.
    """

    log_time: Any
    arithmetic: Any
    memory: Any
    l2: Any
    write: Any
    reduction: Any
    fixed: Any


def _traffic(p: Values, s: Shapes) -> tuple[Any, Any, Any, Any]:
    """Returns bytes read from memory, read from L2, written to memory and written to L2, (rows,)
    each.
    """
    narrow = exp(-1.0 * p["hot_width"])
    read = s.a_bytes * sigmoid((s.reuse_a - p["hot_a"]) * narrow) + s.b_bytes * sigmoid(
        (s.reuse_b - p["hot_b"]) * narrow
    )
    c_bytes = s.c_bytes * exp(p["write"])
    written = c_bytes * sigmoid((s.reuse_c - p["hot_c"]) * narrow)
    return read, s.a_bytes + s.b_bytes - read, written, c_bytes - written


def _norm(power: Any, *logs: Any) -> Any:
    """Computes the log of the p-norm of quantities given as logs: their sum for p = 1, the largest
    for infinity.
    """
    top = value_of(logs[0])
    for x in logs[1:]:
        top = np.maximum(top, value_of(x))
    total = exp(power * (logs[0] - top))
    for x in logs[1:]:
        total = total + exp(power * (x - top))
    return top + log(total) / power


def kernel_parts(p: Values, s: Shapes) -> Parts:
    """Computes the time of every kernel and its parts."""
    machine = s.machine
    busy = minimum(
        exp(p["saturation"]) / s.held, 1.0
    )  # share of a full wave that one block a SM takes
    stepped = s.full + maximum(s.last, busy) * s.has_rest
    waves = stepped + sigmoid(p["fluid"]) * (minimum(stepped, maximum(s.fluid, busy)) - stepped)
    rate = exp(p["efficiency"] + p.tiles(s.tile_index)) * (machine.flop_per_us / machine.sm_count)
    depth = s.k_part
    if s.halvings is not None:
        depth = depth * exp(minimum(p["misaligned"], _MOST_MISALIGNED) * s.halvings)
    far_rows = soft_plus((s.log_row_bytes - p["far"]) * _FAR_SLOPE) / _FAR_SLOPE
    far = exp(s.along_k * (maximum(p["far_growth"], 0.0) * far_rows))
    arithmetic = far * (waves * (depth + exp(p["fill"])) * (s.wave_flop / rate))
    if machine.is_narrow:
        arithmetic = arithmetic * (1.0 + exp(p["padded"]) * s.padding)

    log_bandwidth = p["dram"] + s.log_bandwidth
    l2_speed = exp(log_bandwidth + p["l2_speed"])
    flow = p["block_flow"] + p["block_flow_growth"] * s.growth
    sharp = exp(p["flow_norm"]) + 1.0
    # 1 / bandwidth, limited by memory or by the flow of the resident blocks
    per_byte = exp(
        soft_plus(sharp * ((log_bandwidth - flow) - s.log_at_once)) / sharp - log_bandwidth
    )
    read, read_l2, written, written_l2 = _traffic(p, s)
    memory = read * per_byte + read_l2 / l2_speed
    write = written * per_byte + written_l2 / l2_speed
    l2 = s.l2_bytes / exp(log_bandwidth + p["l2_to_sm"])

    main_loop = _norm(exp(p["overlap"]) + 1.0, log(arithmetic), log(memory), log(l2))
    joined = exp(_norm(exp(p["write_overlap"]) + 1.0, main_loop, log(write)))
    reduction = s.partial_bytes / (l2_speed * exp(p["split_speed"])) + (
        exp(p["split"]) * s.is_split
        + exp(p["split_steps"]) * s.split_doublings
        + exp(p["split_serial"]) * (s.split_k - 1.0)
    )
    per_wave = exp(p["wave"]) + exp(p["epilogue"]) * (s.area * s.held)
    launch = exp(p["launch"]) + exp(p["host"]) + exp(p["prologue"]) * s.area
    once = launch - exp(p["wave"])  # the first wave waits for none
    steps = exp(p["step"] + p["step_growth"] * s.growth) / _STEP_K * s.k_part
    time = joined + reduction + (per_wave * s.waves + once) + steps
    if machine.is_narrow:
        time = time + (exp(p["convert"]) * s.converted_us + exp(p["convert_row"]) * s.a_rows)
    log_time = log(time) + exp(p["small_tile"]) * s.smallness
    return Parts(log_time, arithmetic, memory, l2, write, reduction, launch + steps)


def clock_loss(p: Values, s: Shapes) -> Any:
    """Computes the log slowdown of each shape by a lower clock, (rows,), whichever kernel runs."""
    return 0.1 * (
        maximum(p["power"], 0.0) * sigmoid((s.log_compute - p["power_after"]) * _POWER_SLOPE)
    )


def chosen_time(p: Values, s: Shapes, log_time: Any) -> Any:
    """Computes log µs of each shape, (rows,): soft minimum over kernels, clock loss, matrix-vector
    kernels.
    """
    least = soft_minimum(log_time, exp(p["choice"])) + clock_loss(p, s)
    if not s.is_vector.any():
        return least
    read, read_l2, written, written_l2 = _traffic(p, s)
    log_bandwidth = p["dram"] + s.log_bandwidth
    vector = log(
        exp(p["launch"] + p["vector_launch"])
        + (read + written) / exp(log_bandwidth + p["vector_flow"])
        + (read_l2 + written_l2) / exp(log_bandwidth + p["l2_speed"])
    )
    return least + s.is_vector * (minimum(vector, least) - least)


def log_latency(p: Values, s: Shapes) -> tuple[Any, Parts]:
    """Computes log µs of each shape, (rows,), and the parts by kernel."""
    parts = kernel_parts(p, s)
    return chosen_time(p, s, parts.log_time), parts


_LARGE_BYTES = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed arrays, once per process.

    glibc returns freed blocks above 128 KiB to the kernel, and the cost model's temporaries are
    just above: a fit of 200 rows took a million page faults. Freeing one large block raises the
    limit to its size (mallopt(3), "dynamic mmap threshold"). The block is never touched, so it
    costs nothing; other C libraries are unaffected."""
    np.empty(_LARGE_BYTES, dtype=np.uint8)
