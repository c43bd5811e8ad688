"""Finds the efficiency edges that an op has just crossed.

A size crosses an edge if it breaks 16-byte alignment, starts a new tile or wave, or violates the
conditions of Megatron's fused softmax. Experts cross an edge if their rows do not fill tiles, or if
some GPUs or experts get more rows than others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from quantbench.alignment_rules import misaligned_sides, side_names
from quantbench.analysis.blocks import padded, tile_in_use
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Launch
from quantbench.megatron import softmax_objections
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

KINDS = ("alignment", "fused softmax", "wave edge", "tile edge", "skew")
# Rows of the tiles of grouped GEMMs. Kernels use a smaller tile for few rows per expert.
_EXPERT_TILES = (16, 64, 128)
#: Largest relative change of a size at which a wave edge is looked for. It equals
#: `analysis.neighbours.NEAR`, which is not imported because it needs scipy.
NEAR = 0.10


@dataclass(frozen=True)
class Edge:
    """Condition by which an op has become less efficient.

    In contrast, `sweep.refine.Edge` is a measured jump.

    kind: one of KINDS.
    words: description of the edge.
    before: workload just before the edge. For the fused softmax, this is the op's own workload; for
        skew, it is the same experts with balanced rows.
    largest_share: upper bound of the fraction of the op's time that the edge costs. The bound is
        the idle fraction of the device for tiles and waves, and 1 for other edges.
    """

    kind: str
    words: str
    before: Compute
    largest_share: float = 1.0


def edges(
    op: Op, device: DeviceSpec, launch: Launch | None = None, peak_share: float | None = None
) -> tuple[Edge, ...]:
    """Returns every edge that the op has crossed.

    launch: kernel that runs the op; None for the device's assumed tile.
    peak_share: predicted rate as a fraction of the peak. Tile and wave edges that would allow only
        a lower rate are left out.
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
    reasons = "; ".join(softmax_objections(work)) if isinstance(work, Softmax) else ""
    if reasons:
        words = f"Megatron's fused softmax does not run: {reasons}"
        return (Edge("fused softmax", words, work),)
    return ()


def _unaligned(gemm: Gemm, names: dict[str, str]) -> Iterator[Edge]:
    """Yields one edge for all misaligned sides, with the aligned sizes below them as `before`.

    names: name of each side in the text of the edge.
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
    """Yields the wave edges and the tile edges of m and n.

    A side has a wave edge at the first multiple of the tile, going down from the size by at most
    NEAR, at which the GEMM needs fewer waves. It has a tile edge at the nearest multiple below the
    size if padding the size leaves part of the device idle, unless that multiple is the wave edge.

    names, device, launch, peak_share: as in `_unaligned` and `edges`.
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
    """Returns the edge of a size that is padded.

    name, size: name and value of the size.
    to: value that it is padded to.
    before: workload just before the edge.
    """
    idle = 1 - size / to
    words = f"{padding_words(name, size, to)}: {percent(idle)} idle{suffix}"
    return Edge("tile edge", words, before, idle)


def _of_experts(work: MoE) -> Iterator[Edge]:
    """Yields the edges of experts: skewed loads, and rows of an expert that do not fill tiles."""
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
    """Yields the edges of head_dim: misaligned rows, and padding to a width of the kernel."""
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
    """Returns head_dim as the attention kernel pads it; unchanged if the padding is unknown."""
    found = padded(work)
    return work.head_dim if found is None else found[2]
