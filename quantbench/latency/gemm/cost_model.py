"""The GEMM cost model: the kernels of a library's menu, how long each takes for a shape, and which is taken.

A kernel runs ceil(m / block_m) · ceil(n / block_n) · split_k blocks in waves. Its time is a launch, plus the p-norm of
arithmetic (quantised by waves, softened by a fluid share), reads from memory (each operand cold or hot in L2) and
traffic between L2 and the SMs, joined by a norm of its own with the writing of c, which kernels that do not overlap
tiles add to the rest; plus what waves, steps of k and the reduction of split-k add. The library is taken to
choose nearly the fastest: a soft minimum over the menu. Every term rises with k, and so does the whole.

Entry points: `Menu`, `Machine`, `Shapes`, `log_latency`. Units: µs, bytes, FLOP. Arrays are (kernels, rows) unless
stated otherwise: numpy is faster on long rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.autodiff import Variable, exp, log, maximum, minimum, sigmoid, soft_minimum, soft_plus, value_of
from quantbench.latency.estimate import Parameter
from quantbench.workload.dtypes import DTYPES

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
Array = npt.NDArray[np.floating[Any]]

#: block_m × block_n, as in the names of cuBLAS's and CUTLASS's kernels from Volta to Blackwell
TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 128), (128, 32), (32, 64), (64, 32), (16, 128), (16, 64), (32, 256),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)
# An fp32 accumulator of this many elements fills half the registers of an SM: one such block is resident.
_LARGEST_TILE = 32768
_MOST_BLOCKS_PER_SM = 6


def resident_blocks(block_m: Any, block_n: Any) -> Any:
    """Blocks of a tile that an SM holds at a time, as the accumulator's registers allow; for numbers and arrays."""
    return np.clip(np.floor(_LARGEST_TILE / (block_m * block_n)), 1, _MOST_BLOCKS_PER_SM)


@dataclass(frozen=True)
class Kernels:
    """Columns of a menu: (kernels, 1), or (1, rows) where each row has one kernel."""

    tile_index: IndexArray
    split_k: FloatArray
    block_m: FloatArray
    block_n: FloatArray
    blocks_per_sm: FloatArray


@dataclass(frozen=True)
class Menu:
    """The kernels that a library is assumed to choose from: every tile with every split, or a part of them.

    tiles: (block_m, block_n). kernels: (tile index, split_k) of each.
    """

    tiles: tuple[tuple[int, int], ...]
    kernels: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.kernels:
            raise InputError("Menu", "no kernels", "at least one")

    @classmethod
    def of(cls, tiles: tuple[tuple[int, int], ...] = TILES) -> Menu:
        """All splits of all the tiles."""
        return cls(tiles, tuple((t, split) for t in range(len(tiles)) for split in SPLITS))

    def subset(self, chosen: IndexArray) -> Menu:
        """Only the kernels at these indices; the tiles stay, so that a tile's index means the same."""
        return Menu(self.tiles, tuple(self.kernels[int(i)] for i in chosen))

    def __len__(self) -> int:
        return len(self.kernels)

    @cached_property
    def each(self) -> Kernels:
        """Every kernel for every row."""
        tile = np.array([t for t, _ in self.kernels], dtype=np.intp)[:, None]
        split = np.array([split for _, split in self.kernels], dtype=np.float64)[:, None]
        block_m, block_n = (np.array(sides, dtype=np.float64)[tile] for sides in zip(*self.tiles, strict=True))
        return Kernels(tile, split, block_m, block_n, resident_blocks(block_m, block_n))

    def by_row(self, kernel: IndexArray) -> Kernels:
        """One kernel for each row, (rows,) indices."""
        return Kernels(*(column[kernel, 0][None, :] for column in vars(self.each).values()))

    @cached_property
    def of_tile(self) -> tuple[tuple[int, slice | IndexArray], ...]:
        """(tile index, its kernels) of each tile that has any."""
        return _groups(self.each.tile_index[:, 0])

    @cached_property
    def of_split(self) -> tuple[tuple[int, slice | IndexArray], ...]:
        """(index in SPLITS, its kernels) of each split that has any; those between count as the next larger."""
        return _groups(np.minimum(np.searchsorted(SPLITS, self.each.split_k[:, 0]), len(SPLITS) - 1))

    def nearest(self, block_m: int, block_n: int, split_k: int) -> int:
        """Index of the kernel closest to a recorded tile and split, in factors."""
        own = self.each
        distance = (
            np.abs(np.log2(own.block_m / block_m))
            + np.abs(np.log2(own.block_n / block_n))
            + np.abs(np.log2(own.split_k / split_k))
        )
        return int(np.argmin(distance))


def _groups(of: IndexArray) -> tuple[tuple[int, slice | IndexArray], ...]:
    """(group, its positions) of each group: a slice where its members are neighbours, which copies nothing."""
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
    Parameter("block_flow", "log bytes per µs that one resident block of 128 + 128 draws", np.log(50e3), 0.7),
    Parameter("block_flow_growth", "exponent of block_m + block_n in it", 0.7, 0.3),
    Parameter("flow_norm", "log(p - 1) of the norm that joins block flow and bandwidth", np.log(2.0), 0.5),
    Parameter("l2_speed", "log bandwidth of L2 over that of memory", np.log(2.5), 0.4),
    Parameter("hot_a", "log share of L2 that holds a between runs", np.log(0.7), 0.5),
    Parameter("hot_b", "log share of L2 that holds b between runs, six copies of it", np.log(0.7), 0.7),
    Parameter("hot_c", "log share of L2 that holds c between runs, six copies of it", np.log(0.7), 0.7),
    Parameter("hot_width", "log width of that step, in log bytes", np.log(0.4), 0.5),
    Parameter("write", "log cost of a written byte over a read one", 0.0, 0.15),
    Parameter("l2_to_sm", "log bandwidth between L2 and the SMs over that of memory", np.log(3.0), 0.5),
    Parameter("overlap", "log(p - 1) of the norm that joins arithmetic and traffic", np.log(2.0), 0.5),
    Parameter("write_overlap", "log(p - 1) of the norm that joins the main loop and writing c", np.log(0.7), 1.0),
    Parameter("launch", "log µs of an empty kernel", np.log(2.2), 0.4),
    Parameter("prologue", "log µs that a block of 128 × 128 adds to it", np.log(0.3), 0.8),
    Parameter("wave", "log µs between waves", np.log(0.4), 0.8),
    Parameter("epilogue", "log µs of writing 128 × 128 results of a wave", np.log(0.15), 0.8),
    Parameter("step", "log µs latency of 32 elements of k", np.log(0.015), 0.8),
    Parameter("step_growth", "exponent of block_m + block_n in it", 0.0, 0.5),
    Parameter("split", "log µs of a split-k reduction", 0.0, 0.7),
    Parameter("split_steps", "log µs per doubling of split_k", np.log(0.1), 0.7),
    Parameter("split_speed", "log bandwidth of partial sums over that of L2", 0.0, 0.7),
    # Parts that add to one output tile take turns where there is no reduction of its own (CUTLASS: "serial split-K").
    Parameter("split_serial", "log µs that each further part of k waits for the one before it", np.log(0.01), 2.0),
    Parameter("small_tile", "log penalty of small tiles in many waves", np.log(0.03), 1.0),
    Parameter("choice", "log width of the choice among kernels, in log time", np.log(0.05), 0.5),
    Parameter("power", "tenths of log time that a long kernel loses to its clock", 0.0, 0.5),
    Parameter("power_after", "log of compute time over 1 ms where that sets in", 0.0, 1.0),
    Parameter("vector_launch", "log launch of the matrix-vector kernel over that of a product", 0.0, 0.3),
    Parameter("vector_flow", "log bandwidth of the matrix-vector kernel over that of a product", np.log(0.7), 0.3),
    Parameter("misaligned", "log factor of arithmetic per halving of alignment below 16 bytes", 0.25, 0.15),
)  # fmt: skip
INDEX = {p.name: i for i, p in enumerate(PARAMETERS)}
#: the tiles' efficiencies come after the named parameters in a vector
FIRST_TILE = len(PARAMETERS)
_TILE_SD = 0.3


def hand_prior(tiles: tuple[tuple[int, int], ...] = TILES) -> tuple[FloatArray, FloatArray]:
    """(mean, sd), each (parameters + tiles,), for a GPU of which only the spec sheet is known."""
    small = [-0.16 * float(np.log2(_LARGEST_TILE / (m * n))) for m, n in tiles]  # small tiles reuse each byte less
    mean = np.array([p.mean for p in PARAMETERS] + small)
    sd = np.array([p.sd for p in PARAMETERS] + [_TILE_SD] * len(tiles))
    return mean, sd


# On the GPUs of the public tables this share is 0.1 where the waves of one tile explain the steps (A100), and from 0.4
# to 0.9 where they do not (docs/choosing-shapes.md); 0.38 is what is assumed before any measurement.
_LARGEST_FLUID_SHARE = 1 / 3


def runs_in_waves(vectors: Sequence[FloatArray]) -> bool:
    """Whether products run in waves by these parameters: the mean share of a wave that overlap softens is small.

    vectors: (parameters,) of each member of a model.
    """
    fluid = [1.0 / (1.0 + np.exp(-vector[INDEX["fluid"]])) for vector in vectors]
    return bool(np.mean(fluid) < _LARGEST_FLUID_SHARE)


@dataclass(frozen=True)
class Values:
    """A parameter vector by name: a plain array, or an `autodiff.Variable` where a gradient is wanted."""

    vector: Any

    def __getitem__(self, name: str) -> Any:
        i = INDEX[name]
        part = slice(i, i + 1)
        return self.vector.take(part) if isinstance(self.vector, Variable) else self.vector[part]

    def tiles(self, index: IndexArray) -> Any:
        """Log efficiency of each kernel's tile, (kernels,)."""
        at = FIRST_TILE + index
        return self.vector.take(at) if isinstance(self.vector, Variable) else self.vector[at]


_STEP_K = 32.0  # elements of k that a block loads at a time
_COPIES = 6.0  # of b and c, through which a benchmark of layers goes before it comes back to the first
_LONG_US = 1000.0
# Doubling k halves a misalignment and at least multiplies the steps by 1.5: below log(1.5) it is never faster.
_MOST_MISALIGNED = 0.4
_POWER_SLOPE = 1.0 / 0.7
#: below this k the trees are asked for this k: a step of every kernel's main loop is longer
LEAST_K = 32.0
#: log time, generously: what single precision may move
ROUNDING = 1e-4


@dataclass(frozen=True)
class Machine:
    """A device's figures for one number format that the cost model needs. Rates per µs."""

    sm_count: int
    flop_per_us: float
    bytes_per_us: float
    l2_bytes: float
    element_bytes: int
    output_bytes: int

    @classmethod
    def of(cls, device: DeviceSpec, dtype: str) -> Machine:
        """The machine that `device` is for products of `dtype`, which it must have."""
        kind = DTYPES[dtype]
        return cls(
            sm_count=device.sm_count,
            flop_per_us=device.peak_tflops[dtype] * 1e6,
            bytes_per_us=device.memory_gb_per_s * 1e3,
            l2_bytes=float(device.l2_bytes),
            element_bytes=kind.element_bytes,
            output_bytes=DTYPES[kind.output].element_bytes,
        )


class Shapes:
    """Everything about kernels × rows that does not depend on a parameter.

    dtype: what the arrays are rounded to at the end; counts of blocks and waves are exact before that. float32 is
    faster, and moves a log time by less than ROUNDING.
    """

    def __init__(
        self,
        machine: Machine,
        menu: Menu | Kernels,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        *,
        dtype: type[np.floating[Any]] = np.float64,
    ) -> None:
        def rounded(x: FloatArray) -> Array:
            return x.astype(dtype, copy=False)

        self.machine, self.dtype = machine, dtype
        self.log_bandwidth = math.log(machine.bytes_per_us)  # a float, which makes no array wider
        self.m, self.n, self.k = m, n, k
        of = menu.each if isinstance(menu, Menu) else menu
        self.tile_index = of.tile_index
        tiles = np.ceil(m / of.block_m) * np.ceil(n / of.block_n)
        blocks = tiles * of.split_k
        resident = machine.sm_count * of.blocks_per_sm
        fluid = blocks / resident
        full = np.floor(fluid)
        rest = blocks - full * resident
        has_rest = (rest > 0).astype(np.float64)
        # A part is never shorter than a step: a split beyond that only adds blocks, and time still rises with k.
        k_part = np.maximum(np.ceil(k / (of.split_k * _STEP_K)) * _STEP_K, _STEP_K)
        l2_bytes = blocks * (of.block_m + of.block_n) * k_part * machine.element_bytes

        self.tiles, self.blocks, self.k_part = rounded(tiles), rounded(blocks), rounded(k_part)
        self.fluid, self.full, self.has_rest = rounded(fluid), rounded(full), rounded(has_rest)
        self.waves = rounded(full + has_rest)
        self.last = rounded(np.ceil(rest / machine.sm_count) / of.blocks_per_sm)
        self.log_at_once = np.log(rounded(np.minimum(blocks, resident)))
        self.l2_bytes = rounded(l2_bytes / np.minimum(blocks / machine.sm_count, 1.0))  # as if every SM were busy
        self.partial_bytes = rounded(np.where(of.split_k > 1, 8.0, 0.0) * of.block_m * of.block_n * blocks)
        self.smallness = np.log(1.0 + self.fluid) * rounded(np.log2(_LARGEST_TILE / (of.block_m * of.block_n)))

        self.held, self.split_k = rounded(of.blocks_per_sm), rounded(of.split_k)
        self.wave_flop = rounded(of.blocks_per_sm * (2.0 * of.block_m * of.block_n))
        self.area = rounded(of.block_m * of.block_n / 16384.0)  # of 128 × 128
        self.growth = rounded(np.log((of.block_m + of.block_n) / 256.0))
        self.is_split = rounded((of.split_k > 1).astype(np.float64))
        self.split_doublings = rounded(np.log2(of.split_k))

        a_bytes, b_bytes = machine.element_bytes * m * k, machine.element_bytes * k * n
        c_bytes = machine.output_bytes * m * n
        self.a_bytes, self.b_bytes, self.c_bytes = rounded(a_bytes), rounded(b_bytes), rounded(c_bytes)
        log_l2 = np.log(machine.l2_bytes)
        self.reuse_a = rounded(np.log(a_bytes + b_bytes + c_bytes) - log_l2)
        self.reuse_b = rounded(np.log(a_bytes + _COPIES * b_bytes + c_bytes) - log_l2)
        self.reuse_c = rounded(np.log(a_bytes + b_bytes + _COPIES * c_bytes) - log_l2)
        self.is_vector = rounded(((m == 1) | (n == 1)).astype(np.float64))
        self.log_compute = rounded(np.log(2.0 * m * n * k / machine.flop_per_us / _LONG_US))
        by_n, by_k = _halvings(n * machine.output_bytes), _halvings(k * machine.element_bytes)
        # A part of k that is shorter than a step is padded to one, however it is aligned.
        self.halvings: Array | None = None
        if by_n.any() or by_k.any():
            padded = k < of.split_k * _STEP_K
            self.halvings = rounded(np.where(padded, by_n, np.maximum(by_n, by_k)))


def _halvings(row_bytes: FloatArray) -> FloatArray:
    """How many times a row's alignment falls short of 16 bytes by half, (rows,): 0 at 16 bytes, 3 at 2."""
    whole = row_bytes.astype(np.int64)
    return np.asarray(4.0 - np.log2(np.minimum(whole & -whole, 16)))


@dataclass(frozen=True)
class Parts:
    """The parts of each kernel's time, (kernels, rows) µs, and the log of the whole; Variables where a gradient is
    wanted."""

    log_time: Any
    arithmetic: Any
    memory: Any
    l2: Any
    write: Any
    joined: Any
    reduction: Any


def _traffic(p: Values, s: Shapes) -> tuple[Any, Any, Any, Any]:
    """Bytes read from memory, read from L2, written to memory and written to L2, (rows,) each."""
    narrow = exp(-1.0 * p["hot_width"])
    read = s.a_bytes * sigmoid((s.reuse_a - p["hot_a"]) * narrow) + s.b_bytes * sigmoid(
        (s.reuse_b - p["hot_b"]) * narrow
    )
    c_bytes = s.c_bytes * exp(p["write"])
    written = c_bytes * sigmoid((s.reuse_c - p["hot_c"]) * narrow)
    return read, s.a_bytes + s.b_bytes - read, written, c_bytes - written


def _norm(power: Any, *logs: Any) -> Any:
    """Log of the p-norm of quantities given by their logs: between their sum (1) and the largest (infinity)."""
    top = value_of(logs[0])
    for x in logs[1:]:
        top = np.maximum(top, value_of(x))
    total = exp(power * (logs[0] - top))
    for x in logs[1:]:
        total = total + exp(power * (x - top))
    return top + log(total) / power


def kernel_parts(p: Values, s: Shapes) -> Parts:
    """The time of every kernel and its parts."""
    machine = s.machine
    busy = minimum(exp(p["saturation"]) / s.held, 1.0)  # share of a full wave that one block a SM takes
    stepped = s.full + maximum(s.last, busy) * s.has_rest
    waves = stepped + sigmoid(p["fluid"]) * (minimum(stepped, maximum(s.fluid, busy)) - stepped)
    rate = exp(p["efficiency"] + p.tiles(s.tile_index)) * (machine.flop_per_us / machine.sm_count)
    depth = s.k_part
    if s.halvings is not None:
        depth = depth * exp(minimum(p["misaligned"], _MOST_MISALIGNED) * s.halvings)
    arithmetic = waves * (depth + exp(p["fill"])) * (s.wave_flop / rate)

    log_bandwidth = p["dram"] + s.log_bandwidth
    l2_speed = exp(log_bandwidth + p["l2_speed"])
    flow = p["block_flow"] + p["block_flow_growth"] * s.growth
    sharp = exp(p["flow_norm"]) + 1.0
    # 1 / bandwidth, joined with what the resident blocks draw
    per_byte = exp(soft_plus(sharp * ((log_bandwidth - flow) - s.log_at_once)) / sharp - log_bandwidth)
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
    once = exp(p["launch"]) + exp(p["prologue"]) * s.area - exp(p["wave"])  # the first wave waits for none
    per_k = exp(p["step"] + p["step_growth"] * s.growth) / _STEP_K
    time = joined + reduction + (per_wave * s.waves + once) + per_k * s.k_part
    log_time = log(time) + exp(p["small_tile"]) * s.smallness
    return Parts(log_time, arithmetic, memory, l2, write, joined, reduction)


def chosen_time(p: Values, s: Shapes, log_time: Any) -> Any:
    """Log µs of each shape, (rows,): the soft minimum over kernels, the clock's loss, and m = 1 as matrix-vector."""
    least = soft_minimum(log_time, exp(p["choice"]))
    least = least + 0.1 * (maximum(p["power"], 0.0) * sigmoid((s.log_compute - p["power_after"]) * _POWER_SLOPE))
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
    """Log µs of each shape, (rows,), and its parts by kernel."""
    parts = kernel_parts(p, s)
    return chosen_time(p, s, parts.log_time), parts


_LARGE_BYTES = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Once per process. glibc gives arrays beyond 128 KiB back to the kernel when they are freed, and a cost model's
    temporaries are just beyond: a fit from 200 rows took a million page faults. When one large block is freed, glibc
    raises that limit to its size (mallopt(3), "dynamic mmap threshold"). The block is never touched, so it costs
    nothing, and elsewhere than in glibc nothing happens."""
    np.empty(_LARGE_BYTES, dtype=np.uint8)
