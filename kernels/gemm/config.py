"""Describes how GEMM operands are stored, and derives the kernel's configuration from the storage.

A matrix is stored row-major or transposed (column-major), with a leading dimension in elements, as
in BLAS. The module also completes and checks tiles, and states how many tiles stream-k splits. It
needs neither a GPU nor tensors, so kernels can also be compiled ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quantbench.kernels.gemm.menu import SCHEDULES, architecture, tiles
from quantbench.kernels.launching import (
    HAS_TENSOR_DESCRIPTOR,
    MAX_REGISTERS,
    TMA_ALIGN_BYTES,
    widest,
)

from quantbench.errors import InputError, require_choice
from quantbench.launch import Tile
from quantbench.quantization import cdiv
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.ops import Gemm

#: operation name in error messages
WHO = "matmul"

_MAX_ALIGN = 16  # elements; a larger alignment does not make loads wider in any dtype

#: Number of rows of tiles that run together, for reuse in the L2 cache. Source: Triton's matmul
#: tutorials, which use 8.
GROUP_M = 8
#: Smallest number of elements of a large tile. The pipeline of a large tile leaves no shared memory
#: for the whole output. TMA therefore stores the output in two halves. In the persistent schedule,
#: one loop runs over all steps of all tiles.
_SUBTILE_ELEMENTS = 128 * 256
_SMALLEST_BLOCK = 16  # smallest side that tl.dot accepts
_FP8_SMALLEST_BLOCK_K = 32  # smallest reduction that tl.dot accepts in fp8
_LARGEST_BLOCK = 256  # limit of a TMA box. Source: cuTensorMapEncodeTiled, CUDA driver API
# Largest leading dimension for which the offsets within a tile of 256 rows fit 32 bits.
_LARGEST_LEADING = (2**31 - 1) // _LARGEST_BLOCK


@dataclass(frozen=True)
class Matrix:
    """Storage of one operand. Sizes are in elements.

    transposed: whether the matrix is stored as cols × rows.
    leading: distance between stored rows.
    batch_stride: distance between consecutive matrices of the batch. It is 0 if the batch has one
        matrix, or if one stored matrix serves the whole batch.
    align: largest power of two up to 16 that divides the length of a stored row, the leading
        dimension and the batch stride.
    descriptor: whether a TMA descriptor can address the matrix.
    """

    transposed: bool
    leading: int
    batch_stride: int
    align: int
    descriptor: bool


@dataclass(frozen=True)
class Operands:
    """Size of a validated GEMM and the storage of a, b and c."""

    gemm: Gemm
    a: Matrix
    b: Matrix
    c: Matrix


def align_bytes(operands: Operands) -> int:
    """Returns the alignment of the stored rows of a and b in bytes, at most 16."""
    element_bytes = DTYPES[operands.gemm.dtype].element_bytes
    return min(16, min(operands.a.align, operands.b.align) * element_bytes)


def padded(size: int) -> int:
    """Returns the size rounded up to a multiple of 16.

    The result serves as the leading dimension of operands with a single stored row, which has no
    effect on addresses.
    """
    return cdiv(size, _MAX_ALIGN) * _MAX_ALIGN


def matrix(
    transposed: bool,
    length: int,
    leading: int,
    batch_stride: int,
    element_bytes: int,
    *,
    addressable: bool = True,
) -> Matrix:
    """Returns the storage of a matrix.

    length: number of elements per stored row.
    leading, batch_stride: as in `Matrix`.
    addressable: whether the base address is a multiple of 16 bytes and the batch stride is above 0
        if there is a batch, as TMA needs.
    """
    aligned = all(size * element_bytes % TMA_ALIGN_BYTES == 0 for size in (leading, batch_stride))
    align = widest(_MAX_ALIGN, length, leading, batch_stride)
    return Matrix(transposed, leading, batch_stride, align, aligned and addressable)


@dataclass(frozen=True)
class Config:
    """Configuration of the kernel that multiplies.

    tile: tile with every field set.
    load_descriptors, store_descriptors: whether TMA descriptors load the operands and store the
        result.
    subtiles: number of parts, 1 or 2, in which a tile is written.
    flatten: whether the loops over tiles and over steps are one loop (persistent schedule only).
    warp_specialize: whether loading, multiplying and writing have separate warps. This applies to
        the persistent schedule on Blackwell; on Hopper, Triton 3.6 and 3.7 fail or ignore the
        option.
    max_registers: register limit per thread for the compiler; None for no limit.
    """

    schedule: str
    tile: Tile
    load_descriptors: bool
    store_descriptors: bool
    subtiles: int
    flatten: bool
    warp_specialize: bool
    max_registers: int | None


def configure(
    operands: Operands,
    schedule: str,
    tile: Tile,
    capability: tuple[int, int],
    *,
    path: str = "auto",
) -> Config:
    """Returns the configuration of the kernel for a schedule and a tile.

    tile: fields that are None come from `menu.tiles`.
    capability: compute capability of the GPU.
    path: how the kernel loads a and b: `pointers`, `descriptors`, or `auto`. `auto` uses
        descriptors on Hopper and newer if they can address a and b (never for fp32), and pointers
        otherwise.

    Raises InputError for a schedule, tile or path that the kernel cannot run.
    """
    require_choice(WHO, "schedule", schedule, SCHEDULES)
    require_choice(WHO, "operands", path, ("auto", "pointers", "descriptors"))
    tile = complete(tile, operands.gemm.dtype, schedule, capability, align_bytes(operands))
    _check_tile(tile, operands.gemm, schedule)
    load = _load_by_descriptors(operands, capability, path)
    longest = max(operands.a.leading, operands.b.leading)
    # With pointers, offsets inside a tile have 32 bits.
    if not load and longest > _LARGEST_LEADING:
        raise InputError(
            WHO, f"a leading dimension of {longest} elements", f"at most {_LARGEST_LEADING}"
        )
    # Pointers store the parts of split-k, which are fp32.
    store = load and operands.c.descriptor and tile.split_k == 1
    large = tile.elements >= _SUBTILE_ELEMENTS
    narrow = operands.gemm.dtype != "tf32"  # tf32 needs the shared memory for transposed copies
    warps = tile.num_warps or 0
    persistent = schedule == "persistent" and load
    specialize = persistent and capability[0] == 10 and warps >= 4 and narrow
    # An explicit limit of 255 registers is set where a thread needs nearly that many: before Hopper
    # and in fp32, where registers hold the sums and the fragments of the operands, and in stream_k,
    # where they hold two partial tiles. Without the limit, ptxas spills two registers there to keep
    # another block per SM. A block of more than 8 warps has fewer than 255 registers per thread, so
    # no limit is set for such a block.
    crowded = capability < (9, 0) or operands.gemm.dtype == "fp32" or schedule == "stream_k"
    return Config(
        schedule=schedule,
        tile=tile,
        load_descriptors=load,
        store_descriptors=store,
        subtiles=2 if schedule == "stream_k" or (store and large) else 1,
        flatten=persistent and (large or specialize),
        warp_specialize=specialize,
        max_registers=MAX_REGISTERS if crowded and warps <= 8 else None,
    )


def complete(
    tile: Tile, dtype: str, schedule: str, capability: tuple[int, int], aligned: int
) -> Tile:
    """Returns the tile with its missing fields filled in.

    The fields come from the tile in `menu.tiles` with the nearest number of output elements. Among
    equally near tiles, one with the same block_m and block_n is preferred.

    aligned: alignment of the operands' rows in bytes.
    """

    def distance(other: Tile) -> tuple[int, bool]:
        same_sides = (other.block_m, other.block_n) == (tile.block_m, tile.block_n)
        return abs(other.elements - tile.elements), not same_sides

    nearest = min(tiles(architecture(capability), dtype, schedule, aligned), key=distance)
    missing = [name for name, value in vars(tile).items() if value is None]
    return replace(tile, **{name: getattr(nearest, name) for name in missing})


def constexprs(operands: Operands, config: Config) -> dict[str, Any]:
    """Returns the kernel's compile-time arguments."""
    tile = config.tile
    gemm = operands.gemm
    values: dict[str, Any] = {
        "A_TRANSPOSED": operands.a.transposed,
        "B_TRANSPOSED": operands.b.transposed,
        "ALIGN_A": operands.a.align,
        "ALIGN_B": operands.b.align,
        "ALIGN_C": operands.c.align,
        "LOAD_DESCRIPTORS": config.load_descriptors,
        "STORE_DESCRIPTORS": config.store_descriptors,
        "BATCHED": gemm.batch > 1,
        "EVEN_K": gemm.k % (tile.block_k or 1) == 0,
        "PRECISION": "tf32" if gemm.dtype == "tf32" else "ieee",
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": GROUP_M,
        "SUBTILES": config.subtiles,
    }
    if config.schedule in ("data_parallel", "split_k"):
        values["SPLIT_K"] = tile.split_k
    if config.schedule == "persistent":
        values |= {"FLATTEN": config.flatten, "WARP_SPECIALIZE": config.warp_specialize}
    return values


def backend_options(config: Config) -> dict[str, Any]:
    """Returns num_warps, num_stages and the register limit, if there is one."""
    options = {"num_warps": config.tile.num_warps, "num_stages": config.tile.stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return options


def box_shapes(operands: Operands, config: Config) -> dict[str, list[int]]:
    """Returns the TMA box shape of each operand in stored order.

    The box of a batched GEMM has a leading 1.
    """
    tile = config.tile
    assert tile.block_k is not None
    boxes = {
        "a": [tile.block_m, tile.block_k],
        "b": [tile.block_k, tile.block_n],
        "c": [tile.block_m, tile.block_n // config.subtiles],
    }
    for name, matrix in (("a", operands.a), ("b", operands.b)):
        if matrix.transposed:
            boxes[name].reverse()
    return {name: [1, *box] if operands.gemm.batch > 1 else box for name, box in boxes.items()}


def streamed_tiles(tiles_in_all: int, programs: int) -> int:
    """Returns how many tiles stream-k splits by reduction steps.

    These are the tiles of the partial last wave and of the whole wave before it, so that each
    program gets the work of one to two tiles. The other tiles form whole waves ("two-tile
    stream-k", Osama et al. 2023). The result is 0 without a partial wave, and all tiles if they
    fill less than one wave.

    >>> streamed_tiles(300, programs=132), streamed_tiles(264, programs=132)
    (168, 0)
    >>> streamed_tiles(100, programs=132)
    100
    """
    rest = tiles_in_all % programs
    if rest == 0 or tiles_in_all < programs:
        return rest
    return rest + programs


def _check_tile(tile: Tile, gemm: Gemm, schedule: str) -> None:
    """Raises InputError for a tile that the kernel cannot run."""
    for name in ("block_m", "block_n", "block_k"):
        value = getattr(tile, name)
        low = _SMALLEST_BLOCK
        if name == "block_k" and gemm.dtype == "fp8":
            low = _FP8_SMALLEST_BLOCK_K
        if value < low or value & (value - 1):
            raise InputError(
                WHO, f"tile {tile} with {name} = {value}", f"a power of two of at least {low}"
            )
        if value > _LARGEST_BLOCK:
            raise InputError(WHO, f"tile {tile} with {name} = {value}", f"at most {_LARGEST_BLOCK}")
    warps = tile.num_warps or 0
    if warps not in (1, 2, 4, 8, 16, 32):
        raise InputError(WHO, f"tile {tile} with num_warps = {warps}", "a power of two up to 32")
    if tile.split_k > 1 and schedule != "split_k":
        raise InputError(WHO, f"tile {tile} with schedule = {schedule!r}", "schedule split_k")
    steps = cdiv(gemm.k, tile.block_k or 1)
    if tile.split_k > steps:
        raise InputError(
            WHO,
            f"tile {tile} with k = {gemm.k}",
            f"at most {steps} parts, the steps of the reduction",
        )


def _load_by_descriptors(operands: Operands, capability: tuple[int, int], path: str) -> bool:
    """Returns whether TMA descriptors load the operands.

    Raises InputError if the caller asked for descriptors and they cannot address the operands.
    """
    possible = HAS_TENSOR_DESCRIPTOR and operands.a.descriptor and operands.b.descriptor
    if path == "descriptors":
        if not possible:
            expected = "triton 3.6 or newer, rows and first elements at multiples of 16 bytes"
            raise InputError(WHO, "operands = 'descriptors'", expected)
        return True
    # fp32 without tf32 runs on scalar units, which read shared memory by rows, so TMA's layout
    # gains nothing.
    return path == "auto" and capability >= (9, 0) and operands.gemm.dtype != "fp32" and possible
