"""Predicts GEMM times from tiles, waves and memory traffic of the kernels a library may choose.

A kernel is a tile and a split_k. It runs batch · ceil(m / block_m) · ceil(n / block_n) · split_k
blocks in waves; a wave is the blocks that are resident at once. A kernel's time has these parts:

- The arithmetic time jumps with each additional wave. The parameter "fluid" softens the jumps,
  because waves overlap.
- A p-norm joins the times of arithmetic, memory reads and L2 traffic to the main loop's time. A
  second p-norm joins the main loop and the writing of c.
- Launch, waves, main-loop steps along k, the split-k reduction and quantization are added.

The library is assumed to choose nearly the fastest kernel, so the time of a GEMM is a soft minimum
over the kernels (`log_latency`).

Units: µs, bytes, FLOP. A row is one GEMM. Arrays are (kernels, rows) unless another shape is given,
because numpy is faster on long rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product, starmap
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy import exp, log, maximum, minimum

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.autodiff import FloatArray, sigmoid, soft_minimum, soft_plus, value_of
from quantbench.latency.estimate import Parameter
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.ops import LAYOUTS

IndexArray = npt.NDArray[np.intp]
Array = npt.NDArray[np.floating[Any]]

#: block_m × block_n, as in the names of cuBLAS's and CUTLASS's kernels from Volta to Blackwell
TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 128), (128, 32), (32, 64), (64, 32), (16, 128), (16, 64), (32, 256),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)
# Tiles whose waves and padding are inputs of the trees, even if the menu lacks these tiles.
_COMMON_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
# Elements of the largest tile. Its fp32 accumulator fills half the registers of an SM, so that only
# one such block is resident.
_LARGEST_TILE = 32768
# Largest number of resident blocks per SM, which is assumed for the smallest tiles.
_MOST_BLOCKS_PER_SM = 6


def resident_blocks(block_m: Any, block_n: Any) -> Any:
    """Returns how many blocks of a tile are resident on an SM, limited by accumulator registers.

    block_m, block_n: numbers or arrays.
    """
    return np.clip(np.floor(_LARGEST_TILE / (block_m * block_n)), 1, _MOST_BLOCKS_PER_SM)


@dataclass(frozen=True)
class Kernels:
    """Columns of a menu's kernels, (kernels, 1) each.

    tile_index: index of each kernel's tile in `Menu.tiles`.
    split_k: number of slices of k, each of which has its own blocks.
    block_m, block_n: sides of the tile.
    blocks_per_sm: blocks that are resident on an SM.
    """

    tile_index: IndexArray
    split_k: FloatArray
    block_m: FloatArray
    block_n: FloatArray
    blocks_per_sm: FloatArray

    @cached_property
    def area(self) -> FloatArray:
        """Tile area over the area of a 128 × 128 tile."""
        return self.block_m * self.block_n / 16384.0

    @cached_property
    def growth(self) -> FloatArray:
        """Log of (block_m + block_n) / 256, which is 0 for a 128 × 128 tile."""
        return np.asarray(np.log((self.block_m + self.block_n) / 256.0))


@dataclass(frozen=True)
class Menu:
    """Kernels that a library is assumed to choose from: pairs of a tile and a split_k.

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
        """Returns the kernels of a unit (`families.unit`): all pairs of TILES and SPLITS.

        CUDA cores have only tiles with sides of 32 to 128, as in the names of cuBLAS's sgemm
        kernels from Pascal to Ampere, because a thread accumulates at most 8 × 8 sums.
        """
        tiles = list(range(len(TILES)))
        if unit == "CUDA cores":
            tiles = [i for i in tiles if min(TILES[i]) >= 32 and max(TILES[i]) <= 128]
        return cls(TILES, tuple(product(tiles, SPLITS)))

    def subset(self, chosen: IndexArray) -> Menu:
        """Returns a menu of only the kernels at these indices.

        All tiles stay in the menu, so tile indices do not change.
        """
        return replace(self, kernels=tuple(self.kernels[int(i)] for i in chosen))

    def __len__(self) -> int:
        return len(self.kernels)

    @cached_property
    def each(self) -> Kernels:
        """Columns of all kernels of the menu."""
        tile = np.array(self.kernels, dtype=np.intp)[:, :1]  # (kernels, 1)
        split_k = np.array(self.kernels, dtype=np.float64)[:, 1:]
        blocks = np.array(self.tiles, dtype=np.float64)[tile[:, 0]]  # (kernels, 2)
        block_m = blocks[:, :1]
        block_n = blocks[:, 1:]
        return Kernels(tile, split_k, block_m, block_n, resident_blocks(block_m, block_n))

    @cached_property
    def of_tile(self) -> tuple[tuple[int, slice | IndexArray], ...]:
        """Pairs (tile index, positions of its kernels) for each tile that has kernels."""
        return _groups(self.each.tile_index[:, 0])

    @cached_property
    def of_split(self) -> tuple[tuple[int, slice | IndexArray], ...]:
        """Pairs (index in SPLITS, positions of its kernels) for each split that has kernels.

        A split_k that is not in SPLITS counts as the next larger one.
        """
        place = np.searchsorted(SPLITS, self.each.split_k[:, 0])
        return _groups(np.minimum(place, len(SPLITS) - 1))


def _groups(of: IndexArray) -> tuple[tuple[int, slice | IndexArray], ...]:
    """Returns pairs (group, positions of its kernels).

    Contiguous positions are returned as a slice, which avoids copies.

    of: (kernels,), group of each kernel.
    """
    found: list[tuple[int, slice | IndexArray]] = []
    for group in np.unique(of):
        at = np.flatnonzero(of == group)
        together = at[-1] - at[0] + 1 == len(at)
        positions = slice(int(at[0]), int(at[-1]) + 1) if together else at
        found.append((int(group), positions))
    return tuple(found)


# The columns are name, meaning, prior mean and standard deviation (`Parameter`). Means are on the
# scale that the meaning begins with, usually a logarithm.
PARAMETERS = tuple(starmap(Parameter, (
    ("efficiency", "log share of the peak that the best tile reaches", log(0.75), 0.25),
    ("fill", "log elements of k worth the filling of a block's pipeline", log(200.0), 0.7),
    ("saturation", "log blocks on an SM that saturate it", log(1.5), 0.4),
    ("fluid", "logit of the share of waves that is softened by overlap", -0.5, 1.0),
    ("dram", "log share of the memory's bandwidth that is reached", log(0.85), 0.2),
    ("block_flow", "log bytes per µs that a resident block of 128 × 128 reads", log(50e3), 0.7),
    ("block_flow_growth", "exponent of block_m + block_n in block_flow", 0.7, 0.3),
    ("flow_norm", "log(p - 1) of the norm that joins block flow and bandwidth", log(2.0), 0.5),
    ("l2_speed", "log bandwidth of L2 over that of memory", log(2.5), 0.4),
    ("hot_a", "log share of L2 that holds a between runs", log(0.7), 0.5),
    ("hot_b", "log share of L2 that holds b between runs, six copies of it", log(0.7), 0.7),
    ("hot_c", "log share of L2 that holds c between runs, six copies of it", log(0.7), 0.7),
    ("hot_width", "log width of the step from hot to cold, in log bytes", log(0.4), 0.5),
    ("write", "log cost of a written byte over a read one", 0.0, 0.15),
    ("l2_to_sm", "log bandwidth between L2 and the SMs over that of memory", log(3.0), 0.5),
    ("overlap", "log(p - 1) of the norm that joins arithmetic and traffic", log(2.0), 0.5),
    ("write_overlap", "log(p - 1) of the norm that joins main loop and writing c", log(0.7), 1.0),
    ("launch", "log µs of an empty kernel", log(2.2), 0.4),
    ("prologue", "log µs that a block of 128 × 128 adds to the launch", log(0.3), 0.8),
    ("wave", "log µs between waves", log(0.4), 0.8),
    ("epilogue", "log µs of writing 128 × 128 results of a wave", log(0.15), 0.8),
    ("step", "log µs latency of 32 elements of k", log(0.015), 0.8),
    ("step_growth", "exponent of block_m + block_n in step", 0.0, 0.5),
    ("split", "log µs of a split-k reduction", 0.0, 0.7),
    ("split_steps", "log µs per doubling of split_k", log(0.1), 0.7),
    ("split_speed", "log bandwidth of partial sums over that of L2", 0.0, 0.7),
    # Without a reduction kernel, the blocks that add their k slices to one output tile take turns
    # (CUTLASS: "serial split-K").
    ("split_serial", "log µs that a further part of k waits for the one before", log(0.01), 2.0),
    ("small_tile", "log penalty of small tiles in many waves", log(0.03), 1.0),
    ("choice", "log width of the choice among kernels, in log time", log(0.05), 0.5),
    ("power", "slowdown of long kernels by a lower clock, tenths of log time", 0.0, 0.5),
    ("power_after", "log compute time over 1 ms at which the slowdown sets in", 0.0, 1.0),
    ("vector_launch", "log launch of the matrix-vector kernel over that of a GEMM", 0.0, 0.3),
    ("vector_flow", "log bandwidth of the matrix-vector kernel over that of a GEMM", log(0.7), 0.3),
    ("misaligned", "log factor of arithmetic per halving of alignment below 16 bytes", 0.25, 0.15),
    # Times measured from Python include the host's launch of 30 to 100 µs, which does not depend on
    # the GPU.
    ("host", "log µs of the host's work that the measured times include", log(0.05), 2.5),
    # Each long row of an operand begins on another memory page, and the TLB holds few pages.
    ("tlb_reach", "log bytes of k in a row from which translating addresses costs", log(64e3), 0.7),
    ("tlb_growth", "exponent of k in that time", 0.0, 0.3),
    # This parameter applies to narrow formats only (`Machine.is_narrow`). In the CUTLASS kernels of
    # vLLM, SGLang and TensorRT-LLM on Hopper, blocks whose rows lie partly beyond m take longer
    # than full ones; in cuBLAS's kernels they do not.
    ("padded", "log extra arithmetic of a row beyond m, in rows", log(0.1), 1.2),
    # A layer in a narrow format first quantizes its 16-bit activations in a separate kernel.
    ("convert", "log cost of a byte moved to quantize a over one the GEMM reads", log(0.1), 1.5),
    ("convert_row", "log µs of quantizing a row of a", log(1e-3), 1.5),
)))  # fmt: skip
INDEX = {p.name: i for i, p in enumerate(PARAMETERS)}
#: index of the first tile's log efficiency in a parameter vector, after the named parameters
FIRST_TILE = len(PARAMETERS)
# Prior standard deviation of a tile's log efficiency.
_TILE_SD = 0.3
#: Indices of parameters whose prior has the same mean for all members of a model, because they
#: describe a benchmark's host or few shapes.
UNVARIED = [
    INDEX[name] for name in ("host", "tlb_reach", "tlb_growth", "padded", "convert", "convert_row")
]


def hand_prior() -> tuple[FloatArray, FloatArray]:
    """Returns the prior for a GPU without measurements: its mean and its standard deviation.

    Both are (parameters + tiles,).
    """
    area = np.prod(TILES, axis=1)
    small = -0.16 * np.log2(_LARGEST_TILE / area)  # small tiles reuse each byte less
    mean = np.concatenate([[p.mean for p in PARAMETERS], small])
    sd = np.array([p.sd for p in PARAMETERS] + [_TILE_SD] * len(TILES))
    return mean, sd


# Sigmoid of the parameter "fluid" from which GEMMs do not count as running in waves. For the GPUs
# of the public tables, it is 0.1 if the waves of one tile explain the jumps in latency (A100), and
# 0.4 to 0.9 if they do not (docs/choosing-shapes.md). For the hand prior, it is 0.38.
_LARGEST_FLUID_FRACTION = 1 / 3


def runs_in_waves(vectors: Sequence[FloatArray]) -> bool:
    """Returns whether GEMMs run in waves: the members' mean sigmoid of "fluid" is below 1/3.

    vectors: (parameters + tiles,) each, parameter vectors of a model's members.
    """
    fluid = [1.0 / (1.0 + np.exp(-vector[INDEX["fluid"]])) for vector in vectors]
    return bool(np.mean(fluid) < _LARGEST_FLUID_FRACTION)


@dataclass(frozen=True)
class Values:
    """Access to a parameter vector by name.

    vector: (parameters + tiles,), a plain array, or an `autodiff.Variable` to compute a gradient.
    """

    vector: Any

    def __getitem__(self, name: str) -> Any:
        """Returns the parameter of this name, (1,)."""
        i = INDEX[name]
        return self.vector[i : i + 1]

    def tiles(self, index: IndexArray) -> Any:
        """Returns the log efficiency of each kernel's tile, in the shape of `index`."""
        return self.vector[FIRST_TILE + index]


_STEP_K = 32.0  # elements of k that a block loads in one main-loop step
_COPIES = 6.0  # copies of b and c that a benchmark cycles through
_LONG_US = 1000.0  # compute time in µs that the parameter "power_after" is relative to
# Cap on the parameter "misaligned", the log cost of a halving of the alignment. Doubling k removes
# one halving, but multiplies the number of main-loop steps, which is rounded up, by at least 1.5.
# With a log cost below log(1.5), a larger k is therefore never faster.
_MOST_MISALIGNED = 0.4
# Slope, per log unit of compute time, with which the SM clock falls (`clock_loss`).
_POWER_SLOPE = 1.0 / 0.7
# Slope, per log unit of a row's bytes, of the bend above which translating addresses takes time
# (`kernel_parts`).
_TLB_SLOPE = 3.0
_NT, _TN = LAYOUTS.index("nt"), LAYOUTS.index("tn")
#: smallest k that the trees see: one step of a main loop. A GEMM with a smaller k gets the trees'
#: correction for this k.
LEAST_K = 32.0


@dataclass(frozen=True)
class Machine:
    """Constants of a device that the cost model needs for one dtype; rates are per µs."""

    sm_count: int
    flop_per_us: float
    bytes_per_us: float
    l2_bytes: float
    element_bytes: float
    output_bytes: int

    @property
    def is_narrow(self) -> bool:
        """Whether a and b have fewer bytes per element than c, as with FP8 and FP4."""
        return self.element_bytes < self.output_bytes

    @classmethod
    def of(cls, device: DeviceSpec, dtype: str) -> Machine:
        """Returns the constants for GEMMs of `dtype`.

        Raises InputError if the device has no peak for the dtype.
        """
        kind = DTYPES[dtype]
        peak = device.peak(dtype)
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


@dataclass(frozen=True)
class Sizes:
    """Sizes of GEMMs, (rows,) each.

    layout: index in `LAYOUTS`, or -1 if the layout is unknown. The rows of a and b are then assumed
        to run along k.
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    batch: FloatArray
    layout: FloatArray

    @classmethod
    def of(
        cls,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        batch: FloatArray | None = None,
        layout: FloatArray | None = None,
    ) -> Sizes:
        """Returns the sizes of GEMMs.

        batch: (rows,); None for single GEMMs.
        layout: (rows,), index in `LAYOUTS`; None if the layout is unknown.
        """
        if batch is None:
            batch = np.ones(len(m))
        if layout is None:
            layout = np.full(len(m), -1.0)
        return cls(m, n, k, batch, layout)

    def __len__(self) -> int:
        return len(self.m)

    def take(self, rows: slice | IndexArray | npt.NDArray[np.bool_]) -> Sizes:
        return Sizes(*(column[rows] for column in vars(self).values()))

    @property
    def flop(self) -> FloatArray:
        return 2.0 * self.m * self.n * self.k * self.batch


@dataclass(frozen=True)
class Waves:
    """Blocks of each kernel in waves, all (kernels, rows)."""

    tiles: Array  # number of tiles that cover c
    blocks: Array  # tiles · split_k
    exact: Array  # number of waves, not rounded: blocks over the blocks resident on all SMs
    full: Array  # number of whole waves
    has_partial: Array  # 1.0 if a partial wave follows, else 0.0
    count: Array  # number of whole and partial waves
    last: Array  # time of the partial wave as a fraction of a whole wave's time
    log_at_once: Array  # log of the blocks that run at the same time

    @classmethod
    def of(cls, sm_count: int, kernels: Kernels, sizes: Sizes) -> Waves:
        """Returns the waves in which each kernel runs each GEMM."""
        rows = np.ceil(sizes.m / kernels.block_m)
        columns = np.ceil(sizes.n / kernels.block_n)
        tiles = sizes.batch * rows * columns
        blocks = tiles * kernels.split_k
        resident = sm_count * kernels.blocks_per_sm
        exact = blocks / resident
        full = np.floor(exact)
        partial = blocks - full * resident
        has_partial = (partial > 0).astype(np.float64)
        return cls(
            tiles=tiles,
            blocks=blocks,
            exact=exact,
            full=full,
            has_partial=has_partial,
            count=full + has_partial,
            last=np.ceil(partial / sm_count) / kernels.blocks_per_sm,
            log_at_once=np.log(np.minimum(blocks, resident)),
        )


@dataclass(frozen=True)
class Operands:
    """Bytes of the operands, and the bytes moved between two uses of an operand, (rows,) each.

    reuse_a, reuse_b, reuse_c: log of the bytes that a benchmark moves between two uses of the same
        copy of the operand, over the size of L2.
    """

    a_bytes: FloatArray
    b_bytes: FloatArray
    c_bytes: FloatArray
    reuse_a: FloatArray
    reuse_b: FloatArray
    reuse_c: FloatArray

    @classmethod
    def of(cls, machine: Machine, sizes: Sizes) -> Operands:
        """Returns the operands of each GEMM.

        A benchmark is assumed to cycle through _COPIES copies of b and c, and to reuse a.
        """
        element_bytes = machine.element_bytes * sizes.batch
        a_bytes = element_bytes * sizes.m * sizes.k
        b_bytes = element_bytes * sizes.k * sizes.n
        c_bytes = machine.output_bytes * sizes.batch * sizes.m * sizes.n
        log_l2 = np.log(machine.l2_bytes)
        return cls(
            a_bytes,
            b_bytes,
            c_bytes,
            reuse_a=np.log(a_bytes + b_bytes + c_bytes) - log_l2,
            reuse_b=np.log(a_bytes + _COPIES * b_bytes + c_bytes) - log_l2,
            reuse_c=np.log(a_bytes + b_bytes + _COPIES * c_bytes) - log_l2,
        )


@dataclass(frozen=True)
class Narrow:
    """Terms of formats whose elements are narrower than their results (`Machine.is_narrow`)."""

    padding: Array  # (kernels, rows) fraction of the tiles' rows that lie beyond m
    a_rows: FloatArray  # (rows,) number of rows of a, in all batches together
    converted_us: FloatArray  # (rows,) time of the bytes that quantizing a moves, at peak bandwidth


@dataclass(frozen=True)
class Shapes:
    """Terms of the cost model that do not depend on its parameters.

    log_bandwidth: log of the memory bandwidth in bytes per µs.
    halvings: result of `_misalignment`; None if all rows are aligned.
    narrow: terms of a narrow format; None for other formats.
    """

    machine: Machine
    menu: Menu
    sizes: Sizes
    waves: Waves
    operands: Operands
    log_bandwidth: float
    k_slice: Array  # elements of k in a block's slice, rounded up to main-loop steps
    l2_bytes: Array  # bytes from L2 to the SMs, over the fraction of SMs that have a block
    partial_bytes: Array  # bytes of split-k partial sums, written and read
    smallness: Array  # log(1 + waves) · log2(area of the largest tile / area of this tile)
    along_k: Array  # fraction of a block's operand rows that run along k
    log_row_bytes: FloatArray  # (rows,) log of the bytes in an operand row that runs along k
    log_compute: FloatArray  # (rows,) log of the compute time at peak over 1 ms
    is_vector: FloatArray  # (rows,) 1.0 for matrix-vector products
    halvings: Array | None
    narrow: Narrow | None

    @classmethod
    def of(cls, machine: Machine, menu: Menu, sizes: Sizes) -> Shapes:
        """Returns the terms of each GEMM for the kernels of a menu."""
        kernels = menu.each
        m = sizes.m
        n = sizes.n
        k = sizes.k
        batch = sizes.batch
        waves = Waves.of(machine.sm_count, kernels, sizes)
        # A slice of k is at least one step, so that the time still rises with k. Splitting further
        # only adds blocks.
        k_slice = np.maximum(np.ceil(k / (kernels.split_k * _STEP_K)) * _STEP_K, _STEP_K)
        sides = kernels.block_m + kernels.block_n
        l2_bytes = waves.blocks * sides * k_slice * machine.element_bytes
        # Each partial sum of 4 bytes is written once and read once. Without split-k, there is none.
        split_bytes = np.where(kernels.split_k > 1, 8.0, 0.0) * kernels.block_m * kernels.block_n
        by_area = np.log2(_LARGEST_TILE / (kernels.block_m * kernels.block_n))
        # Rows of a run along k except in tn; rows of b run along k except in nn and tn.
        tall = np.minimum(m, kernels.block_m)
        wide = np.minimum(n, kernels.block_n)
        a_along = sizes.layout != _TN
        b_along = (sizes.layout < 0) | (sizes.layout == _NT)
        narrow = None
        if machine.is_narrow:
            # Quantizing a reads its 2-byte elements and writes narrow ones.
            narrow = Narrow(
                padding=1.0 - m / (np.ceil(m / kernels.block_m) * kernels.block_m),
                a_rows=batch * m,
                converted_us=batch * m * k * (2.0 + machine.element_bytes) / machine.bytes_per_us,
            )
        # No table of a narrow format shows the effect of a matrix-vector kernel.
        is_vector = ((m == 1) | (n == 1)) & (not machine.is_narrow)
        return cls(
            machine=machine,
            menu=menu,
            sizes=sizes,
            waves=waves,
            operands=Operands.of(machine, sizes),
            log_bandwidth=math.log(machine.bytes_per_us),  # a float, which makes no array wider
            k_slice=k_slice,
            l2_bytes=l2_bytes / np.minimum(waves.blocks / machine.sm_count, 1.0),
            partial_bytes=split_bytes * waves.blocks,
            smallness=np.log(1.0 + waves.exact) * by_area,
            along_k=(tall * a_along + wide * b_along) / (tall + wide),
            log_row_bytes=np.log(k * machine.element_bytes),
            log_compute=np.log(2.0 * batch * m * n * k / machine.flop_per_us / _LONG_US),
            is_vector=is_vector.astype(np.float64),
            halvings=_misalignment(machine, kernels, sizes),
            narrow=narrow,
        )

    @cached_property
    def common_tiles(self) -> list[FloatArray]:
        """Inputs of the trees for each common tile, (rows,) each, independent of the menu.

        The inputs are the log of the waves, how full the waves are, and the fraction of the tiles'
        elements that lie inside c.
        """
        sizes = self.sizes
        columns = []
        for block_m, block_n in _COMMON_TILES:
            tiles = sizes.batch * np.ceil(sizes.m / block_m) * np.ceil(sizes.n / block_n)
            waves = tiles / (self.machine.sm_count * float(resident_blocks(block_m, block_n)))
            padding = sizes.batch * sizes.m * sizes.n / (tiles * (block_m * block_n))
            columns += [np.log(waves), waves / np.ceil(waves), padding]
        return columns


def _misalignment(machine: Machine, kernels: Kernels, sizes: Sizes) -> Array | None:
    """Returns by how many halvings of 16 bytes misaligned rows slow each kernel, (kernels, rows).

    The result is None if all rows are aligned.
    """
    by_n = _halvings(sizes.n * machine.output_bytes)
    by_k = _halvings(sizes.k * machine.element_bytes)
    if not by_n.any() and not by_k.any():
        return None
    # A slice of k that is shorter than a step is padded to a step, so its alignment has no effect.
    padded = sizes.k < kernels.split_k * _STEP_K
    return np.where(padded, by_n, np.maximum(by_n, by_k))


def _halvings(row_bytes: FloatArray) -> FloatArray:
    """Returns how often 16 bytes must be halved to get a row's alignment, (rows,).

    The result is 0 for rows aligned to 16 bytes and 3 for rows aligned to 2 bytes.
    """
    whole = row_bytes.astype(np.int64)
    halvings: FloatArray = 4.0 - np.log2(np.minimum(whole & -whole, 16))
    return halvings


@dataclass(frozen=True)
class Parts:
    """Parts of each kernel's time in µs, and the log of the whole time, (kernels, rows) each.

    The fields are plain arrays, or Variables if a gradient is needed.

    fixed: launch plus the latency of the main-loop steps along k, independent of the tile count.
    """

    log_time: Any
    arithmetic: Any
    memory: Any
    l2: Any
    write: Any
    reduction: Any
    fixed: Any


def _traffic(p: Values, s: Shapes) -> tuple[Any, Any, Any, Any]:
    """Returns the bytes read from memory, read from L2, written to memory and written to L2.

    All four are (rows,). Operands that stay in L2 between a benchmark's runs are read from L2.

    p: parameters of the cost model.
    s: terms of the shapes that do not depend on parameters.
    """
    of = s.operands
    narrow = exp(-1.0 * p["hot_width"])
    cold_a = sigmoid((of.reuse_a - p["hot_a"]) * narrow)
    cold_b = sigmoid((of.reuse_b - p["hot_b"]) * narrow)
    cold_c = sigmoid((of.reuse_c - p["hot_c"]) * narrow)
    read = of.a_bytes * cold_a + of.b_bytes * cold_b
    c_bytes = of.c_bytes * exp(p["write"])
    written = c_bytes * cold_c
    return read, of.a_bytes + of.b_bytes - read, written, c_bytes - written


def _norm(power: Any, *logs: Any) -> Any:
    """Returns the log of the p-norm (for p = 1, the sum) of quantities that are given as logs.

    power: exponent p of the norm.
    logs: logs of the quantities.
    """
    top = value_of(logs[0])
    for x in logs[1:]:
        top = np.maximum(top, value_of(x))
    total = exp(power * (logs[0] - top))
    for x in logs[1:]:
        total = total + exp(power * (x - top))
    return top + log(total) / power


def kernel_parts(p: Values, s: Shapes) -> Parts:
    """Returns the time of every kernel and the parts of that time, (kernels, rows).

    Every term rises with k, and therefore the time does. The arguments are those of `_traffic`.
    """
    machine = s.machine
    kernels = s.menu.each
    # `stepped` is a step function of the number of blocks. The parameter "fluid" moves it towards a
    # straight line. A partial wave takes at least `busy` of a full wave's time: blocks that do not
    # saturate an SM are no faster than blocks that just saturate it.
    busy = minimum(exp(p["saturation"]) / kernels.blocks_per_sm, 1.0)
    stepped = s.waves.full + maximum(s.waves.last, busy) * s.waves.has_partial
    softened = minimum(stepped, maximum(s.waves.exact, busy)) - stepped
    waves = stepped + sigmoid(p["fluid"]) * softened
    efficiency = exp(p["efficiency"] + p.tiles(kernels.tile_index))
    rate = efficiency * (machine.flop_per_us / machine.sm_count)
    # Misaligned rows slow arithmetic as a larger k would. Long rows add the cost of translating
    # addresses. `arithmetic` is the time of all waves. In each wave, an SM computes all its
    # resident blocks.
    depth = s.k_slice
    if s.halvings is not None:
        depth = depth * exp(minimum(p["misaligned"], _MOST_MISALIGNED) * s.halvings)
    beyond = soft_plus((s.log_row_bytes - p["tlb_reach"]) * _TLB_SLOPE) / _TLB_SLOPE
    translation = exp(s.along_k * (maximum(p["tlb_growth"], 0.0) * beyond))
    wave_flop = kernels.blocks_per_sm * (2.0 * kernels.block_m * kernels.block_n)
    arithmetic = translation * (waves * (depth + exp(p["fill"])) * (wave_flop / rate))
    if s.narrow is not None:
        arithmetic = arithmetic * (1.0 + exp(p["padded"]) * s.narrow.padding)

    # Reading is limited by the memory's bandwidth or by the flow into the resident blocks; a norm
    # joins the two limits. Bytes that stay in L2 between runs move at the bandwidth of L2.
    log_bandwidth = p["dram"] + s.log_bandwidth
    l2_speed = exp(log_bandwidth + p["l2_speed"])
    flow = p["block_flow"] + p["block_flow_growth"] * kernels.growth
    sharp = exp(p["flow_norm"]) + 1.0
    slower = soft_plus(sharp * ((log_bandwidth - flow) - s.waves.log_at_once)) / sharp
    per_byte = exp(slower - log_bandwidth)  # µs, for bytes that are not in L2
    read, read_l2, written, written_l2 = _traffic(p, s)
    memory = read * per_byte + read_l2 / l2_speed
    write = written * per_byte + written_l2 / l2_speed
    l2 = s.l2_bytes / exp(log_bandwidth + p["l2_to_sm"])

    main_loop = _norm(exp(p["overlap"]) + 1.0, log(arithmetic), log(memory), log(l2))
    joined = exp(_norm(exp(p["write_overlap"]) + 1.0, main_loop, log(write)))
    reduction = s.partial_bytes / (l2_speed * exp(p["split_speed"])) + (
        exp(p["split"]) * (kernels.split_k > 1)
        + exp(p["split_steps"]) * np.log2(kernels.split_k)
        + exp(p["split_serial"]) * (kernels.split_k - 1.0)
    )
    per_wave = exp(p["wave"]) + exp(p["epilogue"]) * (kernels.area * kernels.blocks_per_sm)
    launch = exp(p["launch"]) + exp(p["host"]) + exp(p["prologue"]) * kernels.area
    once = launch - exp(p["wave"])  # the first wave waits for none
    steps = exp(p["step"] + p["step_growth"] * kernels.growth) / _STEP_K * s.k_slice
    time = joined + reduction + (per_wave * s.waves.count + once) + steps
    if s.narrow is not None:
        convert = exp(p["convert"]) * s.narrow.converted_us
        time = time + (convert + exp(p["convert_row"]) * s.narrow.a_rows)
    log_time = log(time) + exp(p["small_tile"]) * s.smallness
    return Parts(log_time, arithmetic, memory, l2, write, reduction, launch + steps)


def clock_loss(p: Values, s: Shapes) -> Any:
    """Returns the log slowdown of each GEMM by a lower SM clock, (rows,).

    The slowdown is the same for all kernels. The arguments are those of `_traffic`.
    """
    # "power" is in tenths of log time.
    long = sigmoid((s.log_compute - p["power_after"]) * _POWER_SLOPE)
    return 0.1 * (maximum(p["power"], 0.0) * long)


def chosen_time(p: Values, s: Shapes, log_time: Any) -> Any:
    """Returns the log time in µs of each GEMM with the kernel the library chooses, (rows,).

    A matrix-vector product takes the time of the matrix-vector kernel if that is shorter.

    p, s: as in `_traffic`.
    log_time: (kernels, rows), log time of each kernel in µs.
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
    """Returns the log time in µs of each GEMM, (rows,), and the parts of each kernel's time.

    The arguments are those of `_traffic`.
    """
    parts = kernel_parts(p, s)
    return chosen_time(p, s, parts.log_time), parts


# Size of the block that `keep_freed_memory` frees: just below the largest threshold that glibc sets
# by itself, 32 MiB (mallopt(3)).
_LARGE_BYTES = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Makes glibc keep freed arrays, once per process.

    glibc returns freed blocks above 128 KiB to the operating system. The temporary arrays of the
    cost model are just above that limit: a fit of 200 rows took a million page faults. Freeing one
    large block raises the limit to the block's size (mallopt(3), "dynamic mmap threshold"). The
    block is never touched, so it costs nothing. Other C libraries are unaffected.
    """
    np.empty(_LARGE_BYTES, dtype=np.uint8)
