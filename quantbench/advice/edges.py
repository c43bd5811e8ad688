"""Finds the efficiency edges that an op has crossed: sizes past which it became less efficient.

`edges` returns the edges of one op. A size crosses an edge if it breaks 16-byte alignment, starts a
new tile or wave (a round of tiles over all SMs), or violates a condition of Megatron's fused
softmax. Experts cross an edge if their rows do not fill whole tiles, or if some GPUs or experts get
more rows than others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quantbench.alignment_rules import misaligned_sides, side_names
from quantbench.analysis.blocks import padded, tile_in_use
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch
from quantbench.megatron import fused_softmax_failures
from quantbench.quantization import (
    VECTOR_BYTES,
    alignment_bytes,
    alignment_words,
    cdiv,
    credible_waves,
    gemm_alignment_bytes,
    idle_shares,
    last_wave_words,
    padding_words,
    quantize,
)
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, MoE, Op, Softmax
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.kinds import Compute

#: kinds of edges
KINDS = ("alignment", "fused softmax", "wave edge", "tile edge", "skew")
# Heights in rows of the tiles that grouped GEMMs use. Kernels use a lower tile if experts have few
# rows.
_EXPERT_TILES = (16, 64, 128)
#: Largest relative distance from a size to a wave edge below it. The value equals
#: `analysis.neighbours.NEAR`, which is not imported because it needs scipy.
NEAR = 0.10


@dataclass(frozen=True)
class Edge:
    """An edge that an op has crossed. (`sweep.refine.Edge` is different: a measured jump.)

    kind: one of KINDS.
    words: description of the edge.
    before: the op's workload with the crossing size just before the edge. For the fused softmax, it
        is the unchanged workload; for skew, it has balanced rows per expert.
    largest_share: upper bound of the time that the edge wastes, as a fraction of the op's time. For
        tiles and waves, it is the fraction of the GPU that becomes idle at the edge; otherwise 1.
    """

    kind: str
    words: str
    before: Compute
    largest_share: float = 1.0


def edges(
    op: Op, device: DeviceSpec, launch: Launch | None = None, peak_share: float | None = None
) -> tuple[Edge, ...]:
    """Returns all edges that an op has crossed.

    launch: launch of the kernel that runs the op; None to assume the device's usual tile.
    peak_share: predicted rate as a fraction of the device's peak; None if it is unknown. Tile and
        wave edges that contradict this rate are left out: a GEMM at 90 % of the peak cannot leave
        20 % of the SMs idle.
    """
    work = op.workload
    if isinstance(work, Gemm):
        names = {side: side for side in ("m", "n", "k")} | side_names(op)
        waves = _tiles_and_waves(work, names, device, launch, peak_share)
        return (*_unaligned(work, names), *waves)
    if isinstance(work, Attention):
        return tuple(_of_attention(work))
    if isinstance(work, MoE):
        return tuple(_of_experts(work))
    reasons = "; ".join(fused_softmax_failures(work)) if isinstance(work, Softmax) else ""
    if reasons:
        words = f"Megatron's fused softmax does not run: {reasons}"
        return (Edge("fused softmax", words, work),)
    return ()


def _unaligned(gemm: Gemm, names: dict[str, str]) -> Iterator[Edge]:
    """Yields one alignment edge if any side of a GEMM is misaligned.

    Its `before` has each misaligned side rounded down to the next aligned size.

    names: name of each side (m, n, k) to use in the description.
    """
    changes: dict[str, Any] = {}
    uneven: dict[str, None] = {}
    for side, step in misaligned_sides(gemm).items():
        size = getattr(gemm, side)
        changes[side] = max(step, size // step * step)
        uneven[f"{names[side]} = {size} is no multiple of {step}"] = None
    if changes:
        alignment = alignment_words(gemm_alignment_bytes(gemm), VECTOR_BYTES)
        yield Edge("alignment", f"{', '.join(uneven)}: {alignment}", replace(gemm, **changes))


def _tiles_and_waves(
    gemm: Gemm,
    names: dict[str, str],
    device: DeviceSpec,
    launch: Launch | None,
    peak_share: float | None,
) -> Iterator[Edge]:
    """Yields the wave edges and tile edges of a GEMM's m and n.

    A side has a wave edge at the largest multiple of the tile below its size for which the GEMM
    needs fewer waves. The multiple must be at most 10 % (NEAR) below the size. A side has a tile
    edge at the largest multiple below its size if the size does not fill whole tiles, unless this
    multiple is already the wave edge.

    names: as in `_unaligned`.
    device, launch, peak_share: as in `edges`.
    """
    used = tile_in_use(device, gemm.dtype, launch)
    tile = used.tile
    sm_count = device.sm_count
    tiles = f"{tile} tiles" if used.identified else f"{tile} tiles assumed"
    now = credible_waves(gemm, tile, sm_count, used.blocks_per_sm, peak_share)
    idle = idle_shares(gemm, tile, sm_count, used.blocks_per_sm, peak_share)
    pads = "tile edge" in [one.kind for one in idle]
    for side, block in {"m": tile.block_m, "n": tile.block_n}.items():
        size = getattr(gemm, side)
        name = names[side]
        first = (size - 1) // block * block
        for below in range(first, 0, -block):
            near = below >= size * (1 - NEAR)
            if not near and below != first:
                break
            changes: dict[str, Any] = {side: below}
            shorter = replace(gemm, **changes)
            then = quantize(shorter, tile, sm_count)
            if near and now is not None and then.num_waves < now.num_waves:
                words = f"{last_wave_words(now)}, and {name} = {size} is past {below} ({tiles})"
                share = max(0.0, 1 - now.efficiency / then.efficiency)
                yield Edge("wave edge", words, shorter, share)
                break
            if below == first and size % block and pads:
                yield _tile_edge(name, size, cdiv(size, block) * block, shorter, f" ({tiles})")


def _tile_edge(name: str, size: int, to: int, before: Compute, suffix: str = "") -> Edge:
    """Returns the tile edge of a size that the kernel pads.

    name: name of the size.
    size: value of the size.
    to: padded value.
    before: workload just before the edge.
    suffix: text to append to the description.
    """
    idle = 1 - size / to
    words = f"{padding_words(name, size, to)}: {percent(idle)} idle{suffix}"
    return Edge("tile edge", words, before, idle)


def _of_experts(work: MoE) -> Iterator[Edge]:
    """Yields the edges of experts: skewed rows, and rows that do not fill whole tiles."""
    balanced = replace(work, distribution="balanced")
    if work.skew > 1 and work.distribution != "balanced":
        words = f"the busiest of {work.ep} GPUs has {work.skew:.2f} times the rows of the mean"
        if work.ep == 1:
            words = f"the fullest expert has {max(work.tokens_per_expert)} rows"
            words += f", the mean {work.rows_per_expert:.4g}"
        yield Edge("skew", f"{words} ({work.routing_words})", balanced)
    rows = max(balanced.tokens_per_expert)
    block = _EXPERT_TILES[0]
    for tile in _EXPERT_TILES:
        if tile <= rows:
            block = tile
    to = cdiv(rows, block) * block
    tokens = rows // block * block * work.num_experts // work.top_k
    if to != rows and tokens:
        full = replace(work, tokens=tokens)
        yield _tile_edge("rows of an expert", rows, to, full, f" (tiles of {block} rows)")


def _of_attention(work: Attention) -> Iterator[Edge]:
    """Yields the edges of attention's head_dim: misaligned rows, and padding by the kernel."""
    step = VECTOR_BYTES // DTYPES[work.dtype].element_bytes
    width = work.head_dim
    if width % step:
        alignment = alignment_words(alignment_bytes(width, work.dtype), VECTOR_BYTES)
        words = f"head_dim = {width} is no multiple of {step}: {alignment}"
        yield Edge("alignment", words, replace(work, head_dim=max(step, width // step * step)))
    to = _padded(work)
    if to == width:
        return
    for narrower in range(width - 1, 0, -1):
        before = replace(work, head_dim=narrower)
        if _padded(before) == narrower:
            yield _tile_edge("head_dim", width, to, before)
            return


def _padded(work: Attention) -> int:
    """Returns head_dim after the attention kernel's padding."""
    found = padded(work)
    return work.head_dim if found is None else found[2]
