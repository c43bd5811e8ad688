"""Exact counts for a workload and a tile: blocks, waves, padding, alignment, and the reasons why SMs stay idle.

`tile_in_use` names the tile that computes a workload; `num_blocks`, `padded` and `row_alignment_bytes` count with it;
`idle_reasons` says what runs below peak and why. Used by `cliffs`, `periods`, `forecast`, the report and `advice`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.device.spec import DeviceSpec
from quantbench.latency.gemm.training import known_in_waves
from quantbench.latency.op_times import assumed_tile
from quantbench.launch import Launch, Tile
from quantbench.quantization import alignment_bytes, alignment_words, cdiv, gemm_alignment_bytes, idle_shares
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Softmax, Workload


@dataclass(frozen=True)
class TileInUse:
    """The tile a workload is computed with, and how many blocks of it run at a time.

    tile: its sides.
    resident_blocks: blocks that run at a time on the whole device.
    source: `launch` (read from the recorded launch), `steps` (recovered from the run's staircase) or `assumed` (for the
        device).
    words: for people (`128x256 tile on 108 SMs`).
    waves: False where blocks do not run in waves (one core; persistent kernels that share out the work).
    blocks_per_sm: from the launch, the steps or the device's family; None where unknown or where there are no waves.
    """

    tile: Tile
    resident_blocks: int
    source: str
    words: str
    waves: bool = True
    blocks_per_sm: int | None = None

    @property
    def identified(self) -> bool:
        """Whether the tile was read from the recorded launch."""
        return self.source == "launch"


def tile_in_use(spec: DeviceSpec, dtype: str, launch: Launch | None) -> TileInUse:
    """The tile of a launch where it is known, else the one assumed for the device.

    dtype: of the product. The assumed tile runs in waves only where measurements of the device's family say so.
    """
    one_core = spec.kind == "cpu"
    if launch is None or launch.tile is None:
        assumed = assumed_tile(spec)
        at_a_time = 1 if one_core else spec.sm_count * assumed.blocks_per_sm
        words = f"{assumed.tile} tile (assumed)" + ("" if one_core else f" on {spec.sm_count} SMs")
        waves = not one_core and known_in_waves(spec, dtype)
        return TileInUse(
            assumed.tile, at_a_time, "assumed", words, waves, assumed.blocks_per_sm if waves else None
        )  # fmt: skip
    per_sm = launch.blocks_per_sm or 1
    return TileInUse(
        launch.tile, 1 if one_core else spec.sm_count * per_sm, "launch", _launch_words(launch.tile, per_sm, spec),
        not one_core, None if one_core else launch.blocks_per_sm,
    )  # fmt: skip


def _launch_words(tile: Tile, per_sm: int, spec: DeviceSpec) -> str:
    short = f"{tile.block_m}x{tile.block_n} tile" + (f", split-k {tile.split_k}," if tile.split_k > 1 else "")
    if spec.kind == "cpu":
        return short
    return (
        f"{short} on {spec.sm_count} SMs" if per_sm == 1 else f"{short}, {per_sm} blocks on each of {spec.sm_count} SMs"
    )


def num_blocks(workload: Workload, tile: Tile) -> int | None:
    """Blocks that compute the workload; None where the tile does not determine them.

    >>> num_blocks(Gemm(m=257, n=512, k=64), Tile(128, 256))
    6
    """
    match workload:
        case Gemm():
            tiles = cdiv(workload.m, tile.block_m) * cdiv(workload.n, tile.block_n)
            return workload.batch * tiles * tile.split_k
        case Attention():
            # Each block keeps block_m queries and walks over the keys; the backward pass may do it the other way.
            rows = workload.seq_q if workload.direction == "forward" else workload.seq_k
            return workload.batch * workload.heads * cdiv(rows, tile.block_m)
        case _:
            return None


def parts_to_fill(blocks: int, resident_blocks: int) -> int:
    """Parts that a library can cut each block into to keep more SMs busy: the largest power of two that still fits.

    Libraries do so (narrower tiles, split-k) when there are fewer blocks than half a wave.

    >>> parts_to_fill(24, 108), parts_to_fill(60, 108)
    (4, 1)
    """
    return int(1 << max(0, (resident_blocks // max(1, blocks)).bit_length() - 1))


def row_alignment_bytes(workload: Workload) -> int | None:
    """The largest power of two up to 128 that divides the rows in memory, in bytes; None for a collective."""
    match workload:
        case Gemm():
            return gemm_alignment_bytes(workload)
        case Attention():
            return alignment_bytes(workload.head_dim, workload.dtype)
        case Softmax():
            return alignment_bytes(workload.cols, workload.dtype)
        case _:
            return None


# Rows of head_dim go through the tensor cores in such steps; FlashAttention 2 compiles for multiples of 32.
_HEAD_DIM_STEP = 32


def padded(workload: Workload) -> tuple[str, int, int] | None:
    """What is padded besides the tile's own sides: (dimension, its size, the size it pads to); None where nothing is.

    >>> padded(Softmax(batch=8, rows=96, cols=96))
    ('columns', 96, 128)
    """
    match workload:
        case Attention():
            return "head_dim", workload.head_dim, cdiv(workload.head_dim, _HEAD_DIM_STEP) * _HEAD_DIM_STEP
        case Softmax():
            return "columns", workload.cols, 1 << (workload.cols - 1).bit_length()
        case _:
            return None


def compute_bound(workload: Workload, spec: DeviceSpec) -> bool:
    """Whether arithmetic takes longer than memory traffic by the data sheet; True where the peak is not known."""
    peak = spec.peak(workload.dtype)
    return peak is None or workload.flops / (peak * 1e3) > workload.min_bytes / spec.memory_gb_per_s


# Less than this share lost is not worth a sentence.
_WORTH_SAYING = 0.01


@dataclass(frozen=True)
class IdleReason:
    """A reason why a workload runs below the peak. kind: as of `quantization.IdleShare`, or `alignment`.

    words: for people, with the share of time that is idle where it is known.
    """

    kind: str
    words: str


def idle_reasons(
    workload: Workload, spec: DeviceSpec, used: TileInUse | None, peak_share: float | None
) -> tuple[IdleReason, ...]:
    """Padding, the last wave and misaligned rows, the largest share first. Empty when nothing is lost.

    used: the tile that computes the workload; without one, tiles and waves give no reason.
    peak_share: the measured or predicted rate as a share of peak, None where it is not known. Shares that contradict
    it are left out.
    """
    if isinstance(workload, Attention):
        if workload.head_dim % 8 == 0:  # loads of 16 bytes in fp16 and bf16
            return ()
        return (IdleReason("alignment", f"head_dim = {workload.head_dim} is not a multiple of 8"),)
    if not isinstance(workload, Gemm):
        return ()
    said = []
    if used is not None:
        by = f" ({used.tile} assumed)" if used.source == "assumed" else ""
        for idle in idle_shares(workload, used.tile, spec.sm_count, used.blocks_per_sm, peak_share):
            if idle.share >= _WORTH_SAYING:
                said.append(IdleReason(idle.kind, f"{idle.words}: {percent(idle.share)} idle{by}"))
    aligned = gemm_alignment_bytes(workload)
    if aligned < 16:
        said.append(IdleReason("alignment", alignment_words(aligned, verb="are")))
    return tuple(said)
