"""Computes the tile and wave quantization of a GEMM or grouped GEMM, and its kernel's occupancy.

Each thread block computes one tile of block_m × block_n outputs. The output is padded to whole
tiles (tile quantization). With split_k, several blocks share a tile. The blocks run in waves of
sm_count · blocks_per_sm resident blocks, and a partly filled last wave takes as long as a full wave
(wave quantization). The terms are those of DeepGEMM and of NVIDIA's "Matrix Multiplication
Background User's Guide".
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from quantbench.errors import require_int, shortened
from quantbench.launch import Launch, Tile
from quantbench.units import percent
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.moe import GroupedGemm
from quantbench.workload.ops import Gemm

#: Number of threads in a warp on NVIDIA GPUs.
WARP_THREADS = 32
#: Number of bytes in a thread's widest load.
VECTOR_BYTES = 16
# Number of rows per expert that is aligned in every dtype, so that only the weights can be
# misaligned.
_ALIGNED_ROWS = 256
_KIB = 1024
# Occupancy rule. Registers are allocated per warp in units of 256, in four partitions of the SM.
# Shared memory is allocated in units of 128 or 256 bytes. From compute capability 8.0 on, 1 KiB per
# block is reserved. Barriers and clusters are ignored, because a profiler does not report them.
# Sources: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability", and
# `cuda_occupancy.h` of the CUDA toolkit 12.6.
_REGISTERS_PER_SM = 65_536  # on every compute capability from 7.0 on
_REGISTER_UNIT_PER_WARP = 256
_PARTITIONS = 4
_RESERVED_SMEM_BYTES = 1 * _KIB  # per block, from compute capability 8.0 on
#: Number of tensor memory columns per SM of compute capability 10. Source: NVIDIA tilus
#: documentation, "128 lanes x 512 columns".
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class SmLimits:
    """Limits of one SM.

    warps: maximum number of resident warps.
    blocks: maximum number of resident blocks.
    smem_bytes: size of shared memory.
    """

    warps: int
    blocks: int
    smem_bytes: int


#: SM limits by compute capability. Source: CUDA C++ Programming Guide.
SM_LIMITS = {
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
    """Tiles and waves of a GEMM. All counts are exact, and efficiencies are in (0, 1].

    num_tiles: number of blocks: the output tiles of the whole batch, times split_k.
    tile_efficiency: useful fraction of the padded output.
    num_waves: number of waves, including a partly filled last wave.
    last_wave_tiles: number of blocks in the last wave, 1 to resident_blocks.
    wave_efficiency: filled fraction of the waves, num_tiles / (num_waves · resident_blocks).
    resident_blocks: maximum number of resident blocks on the whole device.
    """

    num_tiles: int
    tile_efficiency: float
    num_waves: int
    last_wave_tiles: int
    wave_efficiency: float
    resident_blocks: int

    @property
    def efficiency(self) -> float:
        """Product of tile and wave efficiency."""
        return self.tile_efficiency * self.wave_efficiency


@dataclass(frozen=True)
class IdleShare:
    """Fraction of the SMs' time that a GEMM does not use, with the reason.

    kind: `tile edge` (padding to whole tiles), `wave edge` (a partly filled last wave), or `fewer
        blocks than SMs`.
    share: unused fraction, 0 to 1.
    words: text of the reason, without the fraction.
    """

    kind: str
    share: float
    words: str


def cdiv(value: int, divisor: int) -> int:
    """Returns value / divisor, rounded up to an integer.

    >>> cdiv(3264, 128)
    26
    """
    return -(-value // divisor)


def divisors(number: int) -> list[int]:
    """Returns all divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def quantize(
    gemm: Gemm | GroupedGemm, tile: Tile, sm_count: int, blocks_per_sm: int = 1
) -> Quantization:
    """Returns the tiles and waves of a GEMM.

    tile: tile that each block computes.
    sm_count: number of SMs.
    blocks_per_sm: number of resident blocks per SM.

    >>> quantize(Gemm(m=2304, n=3072, k=4096), Tile(128, 256), sm_count=108).num_waves
    2
    >>> quantize(GroupedGemm((1, 0, 129), n=3072, k=4096), Tile(128, 256), sm_count=108).num_tiles
    36
    """
    require_int("quantize", "sm_count", sm_count)
    require_int("quantize", "blocks_per_sm", blocks_per_sm)
    gemms = Counter(gemm.gemms if isinstance(gemm, GroupedGemm) else (gemm,))
    tiles = 0
    elements = 0
    for one, count in gemms.items():
        rows_of_tiles = cdiv(one.m, tile.block_m)
        tiles += count * one.batch * rows_of_tiles * cdiv(one.n, tile.block_n)
        elements += count * one.batch * one.m * one.n
    num_tiles = tiles * tile.split_k
    resident = sm_count * blocks_per_sm
    num_waves = cdiv(num_tiles, resident)
    return Quantization(
        num_tiles=num_tiles,
        tile_efficiency=elements / (tiles * tile.elements),
        num_waves=num_waves,
        last_wave_tiles=num_tiles - (num_waves - 1) * resident,
        wave_efficiency=num_tiles / (num_waves * resident),
        resident_blocks=resident,
    )


def padded_rows(gemm: GroupedGemm, block_m: int) -> int:
    """Returns the total number of rows if each expert's rows are padded to a multiple of block_m.

    >>> padded_rows(GroupedGemm((1, 0, 129), n=3072, k=4096), block_m=128)
    384
    """
    return sum(cdiv(rows, block_m) * block_m for rows in gemm.tokens_per_expert)


def credible_waves(
    gemm: Gemm | GroupedGemm,
    tile: Tile,
    sm_count: int,
    blocks_per_sm: int | None,
    peak_share: float | None,
) -> Quantization | None:
    """Returns the tiles and waves of a GEMM, or None if they would mislead.

    The result is None if blocks_per_sm is not 1: with several blocks per SM, a half-full wave takes
    less time than a full wave. It is also None if the waves contradict the rate: a GEMM at 72 % of
    peak cannot leave 52 % of the SMs' time unused.

    tile: tile that each block computes.
    sm_count: number of SMs.
    blocks_per_sm: number of resident blocks per SM; None if it is unknown.
    peak_share: measured or predicted rate as a fraction of the device's peak; None if it is
        unknown.
    """
    if blocks_per_sm != 1:
        return None
    found = quantize(gemm, tile, sm_count)
    return found if _leaves_room(found.efficiency, peak_share) else None


def idle_shares(
    gemm: Gemm | GroupedGemm,
    tile: Tile,
    sm_count: int,
    blocks_per_sm: int | None,
    peak_share: float | None,
) -> tuple[IdleShare, ...]:
    """Returns the fractions of the SMs' time that padding and waves leave unused, largest first.

    A fraction that contradicts the rate is left out. The product of the used fractions (1 − unused)
    is therefore at least peak_share. If the padding alone contradicts the rate, the result is
    empty. The arguments are those of `credible_waves`.

    >>> gemm = Gemm(m=2305, n=3072, k=4096)
    >>> [idle.words for idle in idle_shares(gemm, Tile(128, 256), 108, 1, peak_share=0.6)]
    ['wave 3 of 3 is 11 % full', 'm = 2305 pads to 2432']
    >>> idle_shares(gemm, Tile(128, 256), 108, 1, peak_share=0.97)
    ()
    """
    if isinstance(gemm, GroupedGemm) and gemm.layout != "tn":
        rows = ("the experts' rows", gemm.rows, padded_rows(gemm, tile.block_m))
    else:
        m = gemm.k if isinstance(gemm, GroupedGemm) else gemm.m
        rows = ("m", m, cdiv(m, tile.block_m) * tile.block_m)
    found = []
    for name, size, padded in (rows, ("n", gemm.n, cdiv(gemm.n, tile.block_n) * tile.block_n)):
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
    """Describes the padding of a dimension to whole tiles: `m = 2305 pads to 2432`."""
    return f"{name} = {size} pads to {padded_to}"


def last_wave_words(found: Quantization) -> str:
    """Describes a partly filled last wave: `wave 3 of 3 is 11 % full`."""
    full = percent(found.last_wave_tiles / found.resident_blocks)
    return f"wave {found.num_waves} of {found.num_waves} is {full} full"


def alignment_words(aligned_bytes: int, needed_bytes: int = VECTOR_BYTES, *, verb: str = "") -> str:
    """Describes a misalignment: `rows aligned to 4 bytes, not 16`.

    aligned_bytes: alignment of the rows.
    needed_bytes: required alignment.
    verb: verb that makes the text a sentence: with "are", it begins with `rows are aligned to`.
    """
    return f"rows {verb}{' ' if verb else ''}aligned to {aligned_bytes} bytes, not {needed_bytes}"


def kernel_change_words(old: Launch, new: Launch, longest: int = 60) -> str:
    """Describes a kernel change: `the library changed from 128x256 to 64x64`.

    If the tiles are equal or unknown, the text contains the kernels' names instead. If the names
    are equal too, it contains the registers and the resident blocks that differ.

    longest: maximum number of characters for a kernel's name. Longer names are cut in the middle.
    """
    if old.tile is not None and new.tile is not None and str(old.tile) != str(new.tile):
        return f"the library changed from {old.tile} to {new.tile}"
    before = shortened(old.kernel, longest)
    return (
        variant_words(old, new)
        or f"the library changed from {before} to {shortened(new.kernel, longest)}"
    )


def variant_words(old: Launch | None, new: Launch | None) -> str:
    """Describes how the registers or the blocks per SM of one kernel differ between two launches.

    Such launches ran different compiled variants. Returns "" if the variants are equal or unknown,
    or if the kernels or their tiles differ.
    """
    changes = []
    if old and new and (old.kernel, str(old.tile)) == (new.kernel, str(new.tile)):
        for name in ("registers", "blocks_per_sm"):
            before = getattr(old, name)
            after = getattr(new, name)
            if before and after and before != after:
                changes.append(f"{before} to {after} {name}")
    compiled = "another variant of the kernel was compiled: "
    return compiled + ", ".join(changes) if changes else ""


def _leaves_room(used: float, peak_share: float | None) -> bool:
    """Returns whether a rate is possible if the SMs do useful work for a fraction of the time.

    used: fraction of the SMs' time.
    peak_share: rate as a fraction of the device's peak; None if it is unknown.
    """
    return peak_share is None or peak_share <= used


def alignment_bytes(row_length: int, dtype: str) -> int:
    """Returns the alignment of rows: the largest power of two, up to 128, that divides their bytes.

    Loads of 16 bytes need an alignment of 16, and loads of whole cache lines need 128.

    row_length: number of elements in a row.

    >>> alignment_bytes(150, "bf16"), alignment_bytes(128, "bf16")
    (4, 128)
    """
    row_bytes = DTYPES[dtype].row_bytes(row_length)
    return min(128, row_bytes & -row_bytes)


def gemm_alignment_bytes(gemm: Gemm | GroupedGemm) -> int:
    """Returns the smallest alignment of a GEMM's rows (see `alignment_bytes`).

    These are the rows of a and b (`Gemm.contiguous_dims`) and of c.
    """
    if isinstance(gemm, GroupedGemm):
        gemm = gemm.gemm(_ALIGNED_ROWS)
    rows = (alignment_bytes(getattr(gemm, side), gemm.dtype) for side in gemm.contiguous_dims)
    return min(*rows, alignment_bytes(gemm.n, gemm.output_dtype))


def resident_blocks(
    compute_capability: tuple[int, int],
    *,
    threads: int,
    registers: int,
    shared_memory_bytes: int,
    tensor_memory_columns: int = 0,
) -> int | None:
    """Returns the maximum number of a kernel's blocks that are resident on one SM.

    The result is 0 if not even one block fits, and None for an unknown compute capability.

    threads: threads per block.
    registers: registers per thread.
    shared_memory_bytes: static and dynamic shared memory per block.
    tensor_memory_columns: columns of Blackwell's tensor memory that a block allocates.

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
        fitting.append(_REGISTERS_PER_SM // _PARTITIONS // per_warp * _PARTITIONS // warps)
    unit, reserved = (128, _RESERVED_SMEM_BYTES) if compute_capability >= (8, 0) else (256, 0)
    used = cdiv(shared_memory_bytes + reserved, unit) * unit
    if used:
        fitting.append(limits.smem_bytes // used)
    if tensor_memory_columns:
        fitting.append(TENSOR_MEMORY_COLUMNS // tensor_memory_columns)
    return min(fitting)
