"""Counts the blocks and waves of a workload, and names the reasons why it runs below peak.

A block computes one output tile. A wave is a set of blocks that run concurrently and fill the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log2

from quantbench.device.spec import DeviceSpec
from quantbench.errors import require_choice
from quantbench.latency.gemm.cost_model import INDEX, PARAMETERS
from quantbench.latency.gemm.training import known_in_waves
from quantbench.latency.op_times import assumed_tile
from quantbench.launch import Launch, Tile
from quantbench.quantization import (
    alignment_bytes,
    alignment_words,
    cdiv,
    gemm_alignment_bytes,
    idle_shares,
    quantize,
)
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, GroupedGemm, Softmax, Workload


@dataclass(frozen=True)
class TileInUse:
    """The tile that computes a workload, and the number of resident blocks.

    tile: output tile of one block.
    resident_blocks: number of blocks that run concurrently on the whole device.
    source: where the tile comes from: `launch` (the recorded launch), `declared` (by a user-defined
        provider), `steps` (inferred from steps in the run's measured times) or `assumed` (the
        device's default).
    words: description for the user (`128x256 tile on 108 SMs`).
    waves: False if the blocks do not run in waves, as on a CPU core or in a persistent kernel that
        divides the work evenly.
    blocks_per_sm: number of resident blocks per SM, from the same source as the tile; None if it is
        unknown, or if the blocks do not run in waves.
    """

    tile: Tile
    resident_blocks: int
    source: str
    words: str
    waves: bool = True
    blocks_per_sm: int | None = None

    @property
    def identified(self) -> bool:
        """Whether the tile comes from the recorded launch."""
        return self.source == "launch"


def tile_in_use(spec: DeviceSpec, dtype: str, launch: Launch | None) -> TileInUse:
    """Returns the tile of a launch if it is known, else the tile assumed for the device.

    dtype: data type of the GEMM. Some GPUs run GEMMs in waves for some data types only. An assumed
        tile runs in waves if measurements of this GPU, or else of its architecture family, show
        waves for this data type.
    launch: recorded launch of the kernel; None if no kernel was recorded.
    """
    if spec.kind == "cpu":
        if launch is None or launch.tile is None:
            assumed = assumed_tile(spec)
            return TileInUse(assumed, 1, "assumed", f"{assumed} tile (assumed)", waves=False)
        return TileInUse(launch.tile, 1, "launch", tile_words(launch.tile, 1, 1), waves=False)
    if launch is None or launch.tile is None:
        assumed = assumed_tile(spec)
        words = f"{assumed} tile (assumed) on {spec.sm_count} SMs"
        waves = known_in_waves(spec, dtype)
        return TileInUse(assumed, spec.sm_count, "assumed", words, waves, 1 if waves else None)
    resident = spec.sm_count * (launch.blocks_per_sm or 1)
    words = tile_words(launch.tile, resident, spec.sm_count)
    return TileInUse(launch.tile, resident, "launch", words, blocks_per_sm=launch.blocks_per_sm)


def tile_words(tile: Tile, resident_blocks: int, sm_count: int) -> str:
    """Describes a tile and its resident blocks for the user.

    Examples: `128x256 tile on 108 SMs`, `64x64 tile, 2 blocks on each of 108 SMs`.

    resident_blocks: number of blocks that run concurrently on the whole device.
    sm_count: number of SMs; 1 for a CPU core.

    >>> tile_words(Tile(128, 256), 97, 108)
    '128x256 tile, 97 blocks at a time'
    """
    words = f"{tile.block_m}x{tile.block_n} tile"
    if tile.split_k > 1:
        words += f", split-k {tile.split_k},"
    if sm_count == 1:
        return words
    if resident_blocks == sm_count:
        return f"{words} on {sm_count} SMs"
    per_sm, rest = divmod(resident_blocks, sm_count)
    if rest:
        return f"{words}, {resident_blocks} blocks at a time"
    return f"{words}, {per_sm} blocks on each of {sm_count} SMs"


def num_blocks(workload: Workload, tile: Tile) -> int | None:
    """Returns the number of blocks that compute a GEMM, a grouped GEMM or attention.

    Returns None for other workloads.

    >>> num_blocks(Gemm(m=257, n=512, k=64), Tile(128, 256))
    6
    """
    match workload:
        case Gemm() | GroupedGemm():
            return quantize(workload, tile, sm_count=1).num_tiles
        case Attention():
            # In the forward pass a block keeps block_m queries and loops over the keys. In the
            # backward pass it keeps block_m keys and loops over the queries.
            rows = workload.seq_q if workload.direction == "forward" else workload.seq_k
            return workload.batch * workload.heads * cdiv(rows, tile.block_m)
        case _:
            return None


def num_waves(workload: Workload, tile: Tile, resident_blocks: int) -> int | None:
    """Returns a workload's number of waves; None if `num_blocks` returns None for the workload."""
    blocks = num_blocks(workload, tile)
    return None if blocks is None else cdiv(blocks, resident_blocks)


def largest_split_k(blocks: int, resident_blocks: int) -> int:
    """Returns the largest power of two into which each block can be split within one wave.

    If the blocks fill at most half a wave, libraries split them, by narrower tiles or by split-k.

    >>> largest_split_k(24, 108), largest_split_k(60, 108)
    (4, 1)
    """
    return int(1 << max(0, (resident_blocks // max(1, blocks)).bit_length() - 1))


def row_alignment_bytes(workload: Workload) -> int | None:
    """Returns the alignment in bytes of a workload's rows in memory: a power of two up to 128.

    Returns None for workloads other than GEMMs, grouped GEMMs, attention and softmax.
    """
    match workload:
        case Gemm() | GroupedGemm():
            return gemm_alignment_bytes(workload)
        case Attention():
            return alignment_bytes(workload.head_dim, workload.dtype)
        case Softmax():
            return alignment_bytes(workload.cols, workload.dtype)
        case _:
            return None


# Attention kernels pad head_dim to a multiple of this; FlashAttention 2 compiles for multiples of
# 32.
_HEAD_DIM_STEP = 32


def padded(workload: Workload) -> tuple[str, int, int] | None:
    """Returns the dimension that an attention or softmax kernel pads: (name, size, padded size).

    Returns None for other workloads. The padding of a GEMM depends on its tile.

    >>> padded(Softmax(batch=8, rows=96, cols=96))
    ('columns', 96, 128)
    """
    match workload:
        case Attention(head_dim=size):
            return "head_dim", size, cdiv(size, _HEAD_DIM_STEP) * _HEAD_DIM_STEP
        case Softmax():
            return "columns", workload.cols, 1 << (workload.cols - 1).bit_length()
        case _:
            return None


def compute_bound(workload: Workload, spec: DeviceSpec) -> bool:
    """Returns whether arithmetic takes longer than memory traffic at the peak rates of the device.

    Also returns True if the peak for the data type is unknown, and on a CPU, whose peaks are only
    upper bounds.
    """
    peak = spec.peak(workload.dtype)
    if peak is None or spec.kind == "cpu":
        return True
    return workload.flops / (peak * 1e3) > workload.min_bytes / spec.memory_gb_per_s


# Idle time of the SMs, as a fraction of the total, from which it is reported as a reason.
_SMALLEST_IDLE = 0.01

#: possible values of `Cause.kind`; an edge is a size after which one more wave or tile is needed
KINDS = (
    "throttling",
    "kernel change",
    "alignment",
    "wave edge",
    "tile edge",
    "fewer blocks than SMs",
    "memory boundary",
    "unexplained",
)
EVIDENCE = ("identity", "arithmetic", "clock")


@dataclass(frozen=True)
class Cause:
    """Why one size takes longer than another, or why a size runs below peak.

    kind: one of KINDS.
    words: explanation for the user.
    evidence: source of the cause: `identity` (the recorded kernels), `arithmetic` (a computation
        from the sizes and a tile) or `clock` (the recorded SM clock).
    """

    kind: str
    words: str
    evidence: str

    def __post_init__(self) -> None:
        require_choice("Cause", "kind", self.kind, KINDS)
        require_choice("Cause", "evidence", self.evidence, EVIDENCE)


def idle_reasons(
    workload: Workload, spec: DeviceSpec, used: TileInUse | None, peak_share: float | None
) -> tuple[Cause, ...]:
    """Returns the reasons why a workload runs below peak, the largest loss first.

    For GEMMs, the reasons are misaligned rows, and padding and partial waves that leave at least
    1 % of the SMs' time idle. For attention, the only reason is the alignment of head_dim. Other
    workloads have no reasons.

    spec: device that runs the workload.
    used: tile that computes the workload; with None only the alignment is checked.
    peak_share: measured or predicted rate as a fraction of peak; None if it is unknown. An idle
        fraction that contradicts this rate is left out.
    """
    if isinstance(workload, Attention):
        if workload.head_dim % 8 == 0:  # 8 fp16 or bf16 elements fill a 16-byte load
            return ()
        words = f"head_dim = {workload.head_dim} is not a multiple of 8"
        return (Cause("alignment", words, "arithmetic"),)
    if not isinstance(workload, Gemm | GroupedGemm):
        return ()
    causes = []
    aligned = gemm_alignment_bytes(workload)
    if aligned < 16:
        words = alignment_words(aligned, verb="are")
        causes.append((misalignment_loss(aligned), Cause("alignment", words, "arithmetic")))
    if used is not None:
        by = f" ({used.tile} assumed)" if used.source == "assumed" else ""
        evidence = "identity" if used.identified else "arithmetic"
        for idle in idle_shares(workload, used.tile, spec.sm_count, used.blocks_per_sm, peak_share):
            if idle.share >= _SMALLEST_IDLE:
                words = f"{idle.words}: {percent(idle.share)} idle{by}"
                causes.append((idle.share, Cause(idle.kind, words, evidence)))
    ranked = sorted(causes, key=lambda one: -one[0])
    return tuple(cause for _, cause in ranked)


def misalignment_loss(aligned_bytes: int) -> float:
    """Returns the fraction of a GEMM's rate that is lost because rows are not aligned to 16 bytes.

    Each halving of the alignment below 16 bytes multiplies the rate by exp(−misaligned), where
    `misaligned` is a parameter of the GEMM cost model.

    aligned_bytes: alignment of the rows in bytes: a power of two, at most 16.

    >>> round(misalignment_loss(2), 2)
    0.53
    """
    # Number of halvings from 16 = 2⁴ bytes down to this alignment.
    halvings = 4 - log2(aligned_bytes)
    return 1 - exp(-PARAMETERS[INDEX["misaligned"]].mean * halvings)
