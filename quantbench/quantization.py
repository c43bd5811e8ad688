"""Tile and wave quantization of a matrix product, and occupancy: pure, exact integer arithmetic.

A product is cut into tiles of block_m × block_n, padded up to whole tiles (tile quantization). Tiles run in waves: the
device holds sm_count · blocks_per_sm blocks at a time, and the last wave takes as long as a full one however few tiles
it has (wave quantization). Split-k multiplies the blocks: each tile is computed in split_k parts.

Entry points: `quantize`, `idle_shares`, `resident_blocks`. The terms are those of NVIDIA's "Matrix Multiplication
Background User's Guide" (tile and wave quantization) and of DeepGEMM (num_waves, last wave). The `*_words` functions
are the one place where an edge is put into words: `check`, `report`, `advise`, `sweep` and `compare` all use them.

Sources of the occupancy rule: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability"
(warps, blocks, registers and shared memory per SM); `cuda_occupancy.h` of the CUDA toolkit 12.6 (registers go to whole
warps, 256 at a time, in four partitions; shared memory goes out in 128 or 256 bytes, and from compute capability 8.0 on
the driver keeps 1 KiB of it per block). Barriers, and clusters that need room for several blocks at once, are left out:
a profiler does not show them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

from quantbench.errors import require_int, shortened
from quantbench.launch import Launch, Tile
from quantbench.units import percent
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.ops import Gemm

WARP_THREADS = 32
_KIB = 1024
_REGISTERS_PER_SM = 65_536  # every compute capability from 7.0 on
_REGISTER_UNIT_PER_WARP = 256
_PARTITIONS = 4
_RESERVED_SMEM_BYTES = 1 * _KIB  # per block, from compute capability 8.0 on


@dataclass(frozen=True)
class SmLimits:
    """What one SM can hold at a time. smem_bytes: the largest carve-out of shared memory."""

    warps: int
    blocks: int
    smem_bytes: int


#: by compute capability, from the guide's table
SM_LIMITS: dict[tuple[int, int], SmLimits] = {
    (7, 0): SmLimits(64, 32, 96 * _KIB),
    (7, 5): SmLimits(32, 16, 64 * _KIB),
    (8, 0): SmLimits(64, 32, 164 * _KIB),
    (8, 6): SmLimits(48, 16, 100 * _KIB),
    (8, 7): SmLimits(48, 16, 164 * _KIB),
    (8, 9): SmLimits(48, 24, 100 * _KIB),
    (9, 0): SmLimits(64, 32, 228 * _KIB),
    (10, 0): SmLimits(64, 32, 228 * _KIB),
    (10, 3): SmLimits(64, 32, 228 * _KIB),
    (12, 0): SmLimits(48, 24, 100 * _KIB),
    (12, 1): SmLimits(48, 24, 100 * _KIB),
}


@dataclass(frozen=True)
class Quantization:
    """How a product falls into tiles and waves. All counts are exact; efficiencies are in (0, 1].

    num_tiles: blocks to run, split-k parts and batch included. tile_efficiency: useful share of the padded output.
    num_waves: waves, the last one included. last_wave_tiles: blocks in the last wave (1 … resident_blocks).
    wave_efficiency: num_tiles / (num_waves · resident_blocks). resident_blocks: blocks the device holds at a time.
    alignment_bytes: the largest power of two up to 128 that divides every stored row's length in bytes.
    """

    num_tiles: int
    tile_efficiency: float
    num_waves: int
    last_wave_tiles: int
    wave_efficiency: float
    resident_blocks: int
    alignment_bytes: int

    @property
    def efficiency(self) -> float:
        """Share of the occupied block slots × elements that does useful work."""
        return self.tile_efficiency * self.wave_efficiency


@dataclass(frozen=True)
class IdleShare:
    """A share of the SMs' time that a product's tiles leave unused.

    kind: `tile edge` (padding), `wave edge` (the last wave), or `fewer blocks than SMs`.
    share: 0 to 1.
    words: the reason, without the share.
    """

    kind: str
    share: float
    words: str


def cdiv(value: int, divisor: int) -> int:
    """Integers only: value / divisor, rounded up.

    >>> cdiv(3264, 128)
    26
    """
    return -(-value // divisor)


def quantize(gemm: Gemm, tile: Tile, sm_count: int, blocks_per_sm: int = 1) -> Quantization:
    """Tiles and waves of `gemm` with `tile` on sm_count SMs that hold blocks_per_sm blocks each.

    >>> quantize(Gemm(m=2304, n=3072, k=4096), Tile(128, 256), sm_count=108).num_waves
    2
    """
    require_int("quantize", "sm_count", sm_count)
    require_int("quantize", "blocks_per_sm", blocks_per_sm)
    tiles_m, tiles_n = cdiv(gemm.m, tile.block_m), cdiv(gemm.n, tile.block_n)
    num_tiles = gemm.batch * tiles_m * tiles_n * tile.split_k
    resident = sm_count * blocks_per_sm
    num_waves = cdiv(num_tiles, resident)
    padded = tiles_m * tile.block_m * tiles_n * tile.block_n
    return Quantization(
        num_tiles=num_tiles,
        tile_efficiency=gemm.m * gemm.n / padded,
        num_waves=num_waves,
        last_wave_tiles=num_tiles - (num_waves - 1) * resident,
        wave_efficiency=num_tiles / (num_waves * resident),
        resident_blocks=resident,
        alignment_bytes=gemm_alignment_bytes(gemm),
    )


def credible_waves(
    gemm: Gemm, tile: Tile, sm_count: int, blocks_per_sm: int | None, peak_share: float | None
) -> Quantization | None:
    """Tiles and waves of a product where they can be stated; None where they would mislead.

    They can be stated where one block at a time is known to run on an SM, and where the rate fits in: a product at 72 %
    of peak does not leave 52 % of the SMs idle. With several blocks on an SM, a wave that is half full takes less time
    than a full one, so the count says nothing about idle SMs.

    blocks_per_sm: None where blocks are not known to run in waves. peak_share: the measured or predicted rate as a
    share of the device's peak; None where it is not known.
    """
    if blocks_per_sm != 1:
        return None
    found = quantize(gemm, tile, sm_count)
    return found if _leaves_room(found.efficiency, peak_share) else None


def idle_shares(
    gemm: Gemm, tile: Tile, sm_count: int, blocks_per_sm: int | None, peak_share: float | None
) -> tuple[IdleShare, ...]:
    """What padding and the last wave leave idle, the largest share first; empty where that contradicts the rate.

    Together the shares never exceed 1 - peak_share. Arguments: see `credible_waves`.

    >>> [idle.words for idle in idle_shares(Gemm(m=2305, n=3072, k=4096), Tile(128, 256), 108, 1, peak_share=0.6)]
    ['wave 3 of 3 is 11 % full', 'm = 2305 pads to 2432']
    >>> idle_shares(Gemm(m=2305, n=3072, k=4096), Tile(128, 256), 108, 1, peak_share=0.97)
    ()
    """
    found = []
    for name, size, block in (("m", gemm.m, tile.block_m), ("n", gemm.n, tile.block_n)):
        padded = cdiv(size, block) * block
        found.append(IdleShare("tile edge", 1 - size / padded, padding_words(name, size, padded)))
    used = prod(1 - idle.share for idle in found)
    if not _leaves_room(used, peak_share):
        return ()
    waves = credible_waves(gemm, tile, sm_count, blocks_per_sm, peak_share)
    num_blocks = quantize(gemm, tile, sm_count).num_tiles
    if waves is not None:
        found.append(IdleShare("wave edge", 1 - waves.wave_efficiency, last_wave_words(waves)))
    elif _leaves_room(used * num_blocks / sm_count, peak_share):
        words = f"{num_blocks} blocks for {sm_count} SMs"
        found.append(IdleShare("fewer blocks than SMs", 1 - num_blocks / sm_count, words))
    return tuple(sorted((idle for idle in found if idle.share > 0), key=lambda idle: -idle.share))


def padding_words(name: str, size: int, padded_to: int) -> str:
    """`m = 2305 pads to 2432`: a tile edge."""
    return f"{name} = {size} pads to {padded_to}"


def last_wave_words(found: Quantization) -> str:
    """`wave 3 of 3 is 11 % full`: a wave edge."""
    full = percent(found.last_wave_tiles / found.resident_blocks)
    return f"wave {found.num_waves} of {found.num_waves} is {full} full"


def alignment_words(aligned_bytes: int, needed_bytes: int = 16, *, verb: str = "") -> str:
    """`rows aligned to 4 bytes, not 16`; with a verb, `rows are aligned to 4 bytes, not 16`."""
    return f"rows {verb}{' ' if verb else ''}aligned to {aligned_bytes} bytes, not {needed_bytes}"


def kernel_change_words(old: Launch, new: Launch, longest: int = 60) -> str:
    """`the library changed from 128x256 to 64x64`: the tiles if they differ, else the kernels' names.

    longest: characters of a kernel's name; what is longer is cut in its middle.
    """
    if old.tile is not None and new.tile is not None and str(old.tile) != str(new.tile):
        return f"the library changed from {old.tile} to {new.tile}"
    return f"the library changed from {shortened(old.kernel, longest)} to {shortened(new.kernel, longest)}"


def _leaves_room(used: float, peak_share: float | None) -> bool:
    """Whether a product whose tiles keep a share `used` of the SMs' time busy can reach this share of peak."""
    return peak_share is None or peak_share <= used


def alignment_bytes(row_length: int, dtype: str, limit: int = 128) -> int:
    """The largest power of two up to `limit` that divides a row of row_length elements, in bytes.

    Kernels that load 16 bytes at a time need 16; whole cache lines need 128.

    >>> alignment_bytes(150, "bf16"), alignment_bytes(128, "bf16")
    (4, 128)
    """
    row_bytes = row_length * DTYPES[dtype].element_bytes
    return min(limit, row_bytes & -row_bytes)


def gemm_alignment_bytes(gemm: Gemm) -> int:
    """Worst alignment among the stored rows of a, b and c."""
    row_a = gemm.k if gemm.layout[0] == "n" else gemm.m
    row_b = gemm.n if gemm.layout[1] == "n" else gemm.k
    return min(
        alignment_bytes(row_a, gemm.dtype),
        alignment_bytes(row_b, gemm.dtype),
        alignment_bytes(gemm.n, gemm.output_dtype),
    )


def tile_edges(block: int, start: int, stop: int, multiple: Fraction | int = 1) -> Iterator[int]:
    """Sizes x in [start, stop] that fill whole tiles and where x + 1 needs one more: multiple·x is the tiled
    dimension, `block` the tile (multiple is 3 for hidden → QKV, 4/tp for hidden → ffn, and so on).

    >>> list(tile_edges(128, 1, 400))
    [128, 256, 384]
    >>> list(tile_edges(128, 1, 100, multiple=3))
    [42, 85]
    """
    scale = Fraction(multiple)
    tiles = ceil(scale * start / block)
    while (edge := int(tiles * block / scale)) <= stop:  # the largest x with scale·x <= tiles·block
        if edge >= start:
            yield edge
            start = edge + 1  # several tiles may end at one edge
        tiles += 1


def wave_edges(gemms: list[tuple[int, Gemm]], tile: Tile, sm_count: int, blocks_per_sm: int = 1) -> list[int]:
    """Axis values after which one more wave is needed: `gemms` pairs each axis value with its product, ascending.

    >>> sizes = [(n, Gemm(m=1024, n=n, k=64)) for n in (3328, 3456, 3584)]
    >>> wave_edges(sizes, Tile(128, 256), sm_count=108)
    [3328]
    """
    waves = [quantize(gemm, tile, sm_count, blocks_per_sm).num_waves for _, gemm in gemms]
    return [value for (value, _), now, then in zip(gemms, waves, waves[1:], strict=False) if then > now]


def resident_blocks(
    compute_capability: tuple[int, int], *, threads: int, registers: int, shared_memory_bytes: int
) -> int | None:
    """Blocks of one kernel that one SM holds at a time; 0 where not even one fits, None for an unknown device.

    threads: per block. registers: per thread. shared_memory_bytes: per block, static and dynamic together.

    >>> resident_blocks((8, 0), threads=256, registers=128, shared_memory_bytes=49_152)
    2
    """
    limits = SM_LIMITS.get(compute_capability)
    if limits is None:
        return None
    require_int("resident_blocks", "threads", threads, high=1024)
    require_int("resident_blocks", "registers", registers, low=0, high=256)
    require_int("resident_blocks", "shared_memory_bytes", shared_memory_bytes, low=0)
    warps = cdiv(threads, WARP_THREADS)
    fitting = [limits.blocks, limits.warps // warps]
    if registers:
        per_warp = cdiv(registers * WARP_THREADS, _REGISTER_UNIT_PER_WARP) * _REGISTER_UNIT_PER_WARP
        # The launch check assumes that a block fills all partitions evenly.
        launches = per_warp * cdiv(warps, _PARTITIONS) * _PARTITIONS <= _REGISTERS_PER_SM
        warps_per_sm = _REGISTERS_PER_SM // _PARTITIONS // per_warp * _PARTITIONS
        fitting.append(warps_per_sm // warps if launches else 0)
    unit, reserved = (128, _RESERVED_SMEM_BYTES) if compute_capability >= (8, 0) else (256, 0)
    used = cdiv(shared_memory_bytes + reserved, unit) * unit
    if used:
        fitting.append(limits.smem_bytes // used)
    return min(fitting)
