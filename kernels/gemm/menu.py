"""Lists the GEMM tiles for each GPU architecture, and selects a tile by its estimated clock cycles.

Each tile of a menu compiles for its architecture with every schedule and layout, without spills and
within the shared memory of one block; the tests compile all of them. The sets follow Triton's
matmul tutorials: 128×256×32 and 128×128×32 on Ampere, 128×256×64 with 8 warps on Hopper and
Blackwell, and smaller tiles for GEMMs that would not fill the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import hypot

from quantbench.launch import Tile
from quantbench.quantization import cdiv, resident_blocks
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.ops import Gemm

SCHEDULES = ("data_parallel", "split_k", "stream_k", "persistent")

#: numbers of parts that are tried for split-k
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
#: Fixed cost of a wave of tiles in clock cycles: the latency from the first load to the first
#: result, and the latency of the write, which begins only after the last result. A global load
#: takes 500 to 600 cycles on A100 and H100 (microbenchmarks: Luo et al. 2024), and filling the
#: pipeline takes about two loads in a row.
_LATENCY_CLOCKS = 1200.0
# Registers per thread for addresses and fragments, beside the fp32 sums, in compiled kernels. Only
# `estimated_blocks_per_sm` uses this number.
_REGISTERS_BESIDE_SUMS = 40


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture that the choice of a tile depends on.

    tiles: menu for 16-bit operands whose rows begin at multiples of at least 16 bytes.
    flops_per_clock: 16-bit tensor-core operations per SM and clock cycle.
    l2_bytes_per_clock: bytes that one SM reads from L2 per clock cycle if all SMs read.

    The rates come from the whitepapers of V100 2017, Turing 2018, A100 2020 (L2: 2048 bytes per
    cycle on V100, 5120 on A100), GA102 2020 and H100 2022. No L2 bandwidth is published for Hopper
    and later, so the bandwidth of the A100 is assumed there, and divided by the SM count of a large
    GPU of the architecture.
    """

    tiles: tuple[Tile, ...]
    flops_per_clock: int
    l2_bytes_per_clock: float


def _tiles(*sizes: tuple[int, int, int, int, int]) -> tuple[Tile, ...]:
    """Returns tiles from (block_m, block_n, block_k, stages, num_warps)."""
    return tuple(Tile(m, n, k, stages=stages, num_warps=warps) for m, n, k, stages, warps in sizes)


# Tiles for rows that do not begin at multiples of 16 bytes. Narrow loads go through registers
# instead of straight to shared memory, so only smaller tiles fit into the registers, in any dtype.
_UNALIGNED = _tiles((128, 64, 32, 2, 8), (64, 64, 32, 2, 4))
# Tiles for fp32, which does not use tensor cores.
_SCALAR = _tiles((128, 128, 16, 3, 8), (128, 64, 16, 3, 4))

_VOLTA = _tiles((128, 128, 32, 2, 8), (128, 64, 32, 2, 4), (64, 128, 32, 2, 4))
_SMALL = _tiles((128, 64, 32, 4, 4), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4))
_AMPERE = _tiles((128, 256, 32, 3, 8), (256, 128, 32, 3, 8), (128, 128, 32, 4, 8)) + _SMALL
_ADA = _tiles((128, 128, 32, 3, 8)) + _SMALL
_HOPPER = _tiles(
    (128, 256, 64, 4, 8), (256, 128, 64, 4, 8), (128, 128, 64, 4, 8), (128, 128, 64, 3, 4),
    (64, 256, 64, 3, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4),
)  # fmt: skip
# tcgen05 multiplies 128 rows at a time, so a tile of 64 rows uses half of its rate.
_BLACKWELL = tuple(tile for tile in _HOPPER if (tile.block_m, tile.block_n) != (64, 256))

ARCHITECTURES: dict[int, Architecture] = {
    70: Architecture(_VOLTA, 1024, 2048 / 80),
    75: Architecture(_VOLTA, 1024, 1280 / 40),
    80: Architecture(_AMPERE, 2048, 5120 / 108),
    86: Architecture(_ADA, 1024, 5120 / 108),
    89: Architecture(_ADA, 1024, 5120 / 142),
    90: Architecture(_HOPPER, 4096, 5120 / 132),
    100: Architecture(_BLACKWELL, 8192, 5120 / 148),
    120: Architecture(_ADA, 1024, 5120 / 188),
}


def architecture(capability: tuple[int, int]) -> int:
    """Returns the newest architecture of the GEMM menu that a compute capability supports.

    That is the newest architecture that is not newer than the capability itself, or the oldest
    architecture if all are newer.

    >>> architecture((10, 3))
    100
    """
    number = 10 * capability[0] + capability[1]
    return max((arch for arch in ARCHITECTURES if arch <= number), default=min(ARCHITECTURES))


def tiles(
    arch: int, dtype: str, schedule: str = "data_parallel", align_bytes: int = 16
) -> tuple[Tile, ...]:
    """Returns the tiles for an architecture, dtype, schedule and alignment of the operands' rows.

    >>> [str(tile) for tile in tiles(80, "fp32")]
    ['128x128x16', '128x64x16']
    """
    if dtype == "fp32":
        return _SCALAR
    if align_bytes < 16:
        return _UNALIGNED
    fitting = ARCHITECTURES[arch].tiles
    if schedule == "stream_k" and arch < 90:
        # Before Hopper, registers hold the fragments of the operands. A tile of 256 rows then
        # leaves no registers for adding up partial tiles.
        fitting = tuple(tile for tile in fitting if tile.block_m <= 128)
    if dtype == "tf32" and arch >= 100:
        # Blackwell transposes tf32 with copies in shared memory, for which large tiles leave no
        # room.
        fitting = tuple(tile for tile in fitting if tile.elements <= 128 * 128)
    # block_k is scaled so that a step covers as many bytes of the reduction as with 16-bit
    # operands. tf32 has one stage less, because its result is twice as wide as a 16-bit result and
    # takes the place of a stage in shared memory.
    element_bytes = DTYPES[dtype].element_bytes
    scaled = []
    for tile in fitting:
        stages = tile.stages or 0
        if dtype == "tf32" and stages > 2:
            stages -= 1
        scaled.append(
            replace(tile, block_k=2 * (tile.block_k or 0) // element_bytes, stages=stages)
        )
    return tuple(scaled)


def pick(
    gemm: Gemm, schedule: str, capability: tuple[int, int], sm_count: int, align_bytes: int = 16
) -> Tile:
    """Returns the tile of the menu with the lowest `estimated_clocks`, and for split_k its parts.

    align_bytes: alignment of the operands' rows in bytes.

    >>> str(pick(Gemm(8192, 8192, 8192), "data_parallel", (9, 0), sm_count=132))
    '128x256x64'
    >>> str(pick(Gemm(128, 128, 8192), "split_k", (9, 0), sm_count=132))
    '64x64x64 split-k 32'
    """
    choices = list(tiles(architecture(capability), gemm.dtype, schedule, align_bytes))
    if schedule == "split_k":
        choices = [replace(tile, split_k=split) for tile, split in product(choices, _SPLITS)]
        choices = [t for t in choices if t.split_k == 1 or t.split_k * (t.block_k or 1) <= gemm.k]
    return min(
        choices, key=lambda tile: estimated_clocks(gemm, tile, schedule, capability, sm_count)
    )


def estimated_clocks(
    gemm: Gemm, tile: Tile, schedule: str, capability: tuple[int, int], sm_count: int
) -> float:
    """Estimates the clock cycles of a GEMM. The estimate only serves to rank the tiles of one menu.

    The estimate is a roofline for one SM (tensor cores against the L2 cache), times the waves that
    the schedule needs.
    """
    machine = ARCHITECTURES[architecture(capability)]
    element_bytes = DTYPES[gemm.dtype].element_bytes
    output_bytes = DTYPES[gemm.output_dtype].element_bytes
    # Tensor cores multiply twice as many 8-bit numbers per cycle as 16-bit numbers, and half as
    # many tf32 numbers. fp32 has 128 scalar units per SM with a multiply-add per cycle each (64 on
    # Volta, Turing and A100).
    rate = machine.flops_per_clock * 2.0 / element_bytes
    if gemm.dtype == "fp32":
        rate = 256.0
    steps = cdiv(gemm.k, (tile.block_k or 1) * tile.split_k)
    padded_k = steps * (tile.block_k or 1)
    multiply = 2.0 * tile.elements * padded_k / rate
    load = (tile.block_m + tile.block_n) * padded_k * element_bytes / machine.l2_bytes_per_clock
    write_bytes = 4 if tile.split_k > 1 else output_bytes
    # Multiplying and loading overlap only in part, so the result lies between their maximum and
    # their sum.
    busy = hypot(multiply, load) + tile.elements * write_bytes / machine.l2_bytes_per_clock
    per_sm = estimated_blocks_per_sm(tile, gemm.dtype, capability)
    num_tiles = gemm.batch * cdiv(gemm.m, tile.block_m) * cdiv(gemm.n, tile.block_n) * tile.split_k
    # Blocks that share an SM share its throughput and hide each other's latency. The last wave
    # spreads over all SMs.
    waves, rest = divmod(num_tiles, sm_count * per_sm)
    clocks = waves * (per_sm * busy + _LATENCY_CLOCKS)
    if schedule == "stream_k":
        # The second latency is for the partial tiles, which one program writes and another reads.
        clocks += rest / sm_count * busy + 2 * _LATENCY_CLOCKS
    elif rest:
        clocks += cdiv(rest, sm_count) * busy + _LATENCY_CLOCKS
    if tile.split_k > 1:
        # A second kernel reads the fp32 parts and writes c. Its launch and its latency are counted
        # as two latencies.
        moved = gemm.batch * gemm.m * gemm.n * (4 * tile.split_k + output_bytes)
        clocks += moved / (sm_count * machine.l2_bytes_per_clock) + 2 * _LATENCY_CLOCKS
    return clocks


def estimated_blocks_per_sm(tile: Tile, dtype: str, capability: tuple[int, int]) -> int:
    """Estimates the resident blocks per SM of a menu tile.

    The estimate counts registers for the sums and shared memory for the stages. It is at least 1.
    """
    threads = 32 * (tile.num_warps or 4)
    stage_bytes = (tile.block_m + tile.block_n) * (tile.block_k or 1) * DTYPES[dtype].element_bytes
    resident = resident_blocks(
        capability,
        threads=threads,
        registers=min(255, tile.elements // threads + _REGISTERS_BESIDE_SUMS),
        shared_memory_bytes=(tile.stages or 2) * stage_bytes,
    )
    # `resident` is 0 if the estimated block does not fit, and None for an unknown device.
    return resident or 1
