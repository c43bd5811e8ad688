"""Finds the efficiency edges that an op has just crossed.

A size crosses an edge when it breaks 16-byte alignment, starts a new tile or wave, or leaves the
conditions of Megatron's fused softmax. Experts cross one if their rows do not fill tiles, and are
skewed if not all get the same.
"""

from __future__ import annotations

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
# Rows of the tiles of grouped GEMMs: kernels take a smaller one for few rows per expert.
_EXPERT_TILES = (16, 64, 128)
#: largest relative change of a size that is considered; equal to `analysis.neighbours.NEAR`, which
#: imports scipy
NEAR = 0.10


@dataclass(frozen=True)
class Edge:
    """A condition by which an op has become less efficient; `sweep.refine.Edge` is a measured jump.

    kind: one of KINDS.
    before: the workload just before the edge; for the fused softmax, the same workload; for skew,
        balanced experts.
    largest_share: upper bound of the share of the op's time that this edge costs: for tiles and
        waves the idle share, else 1.
    """

    kind: str
    words: str
    before: Compute
    largest_share: float = 1.0


def edges(
    op: Op, device: DeviceSpec, launch: Launch | None = None, peak_share: float | None = None
) -> tuple[Edge, ...]:
    """Returns every edge that the op has crossed.

    launch: the kernel that runs it; None for the device's assumed tile.
    peak_share: predicted rate as a share of peak; tile and wave edges that contradict it are left
        out.
    """
    work = op.workload
    if isinstance(work, Gemm):
        names = side_names(op)
        return (
            *_unaligned(work, names),
            *_tiles_and_waves(work, names, device, launch, peak_share),
        )
    if isinstance(work, Attention):
        return tuple(_of_attention(work))
    if isinstance(work, MoE):
        return tuple(_of_experts(work))
    reasons = softmax_objections(work) if isinstance(work, Softmax) else ()
    words = f"Megatron's fused softmax does not run: {'; '.join(reasons)}"
    return (Edge("fused softmax", words, work),) if reasons else ()


def _unaligned(gemm: Gemm, names: dict[str, str]) -> Iterator[Edge]:
    off = misaligned_sides(gemm)
    if not off:
        return
    changes: dict[str, Any] = {
        side: max(step, getattr(gemm, side) // step * step) for side, step in off.items()
    }
    said = dict.fromkeys(
        f"{names.get(side, side)} = {getattr(gemm, side)} is no multiple of {step}"
        for side, step in off.items()
    )
    words = f"{', '.join(said)}: {alignment_words(gemm_alignment_bytes(gemm), VECTOR_BYTES)}"
    yield Edge("alignment", words, replace(gemm, **changes))


def _tiles_and_waves(
    gemm: Gemm,
    names: dict[str, str],
    device: DeviceSpec,
    launch: Launch | None,
    peak_share: float | None,
) -> Iterator[Edge]:
    used = tile_in_use(device, gemm.dtype, launch)
    tile, sm_count = used.tile, device.sm_count
    tiles = f"{tile} tiles" if used.identified else f"{tile} tiles assumed"
    now = credible_waves(gemm, tile, sm_count, used.blocks_per_sm, peak_share)
    idle = idle_shares(gemm, tile, sm_count, used.blocks_per_sm, peak_share)
    pads = any(one.kind == "tile edge" for one in idle)
    for side, block in (("m", tile.block_m), ("n", tile.block_n)):
        size, name = getattr(gemm, side), names.get(side, side)
        first = (size - 1) // block * block
        for below in range(first, 0, -block):
            near = below >= size * (1 - NEAR)
            if not near and below != first:
                break
            changes: dict[str, Any] = {side: below}
            shorter = replace(gemm, **changes)
            then = quantize(shorter, tile, sm_count)
            if near and now is not None and then.num_waves < now.num_waves:
                words = f"{last_wave_words(now)}, and {name} = {size} is past {below}"
                yield Edge(
                    "wave edge",
                    f"{words} ({tiles})",
                    shorter,
                    max(0.0, 1 - now.efficiency / then.efficiency),
                )
                break
            if below == first and size % block and pads:
                to = cdiv(size, block) * block
                words = f"{padding_words(name, size, to)}: {percent(1 - size / to)} idle ({tiles})"
                yield Edge("tile edge", words, shorter, 1 - size / to)


def _of_experts(work: MoE) -> Iterator[Edge]:
    balanced = replace(work, distribution="balanced")
    if work.skew > 1 and work.distribution != "balanced":
        words = f"the busiest of {work.ep} GPUs has {work.skew:.2f} times the rows of the mean"
        if work.ep == 1:
            words = f"the fullest expert has {max(work.tokens_per_expert)} rows, the mean {work.rows_per_expert:.4g}"
        yield Edge("skew", f"{words} ({work.routing_words})", balanced)
    rows = max(balanced.tokens_per_expert)
    block = max((tile for tile in _EXPERT_TILES if tile <= rows), default=_EXPERT_TILES[0])
    to = cdiv(rows, block) * block
    tokens = rows // block * block * work.num_experts // work.top_k
    if to != rows and tokens:
        words = f"{padding_words('rows of an expert', rows, to)}: {percent(1 - rows / to)} idle (tiles of {block} rows)"
        yield Edge("tile edge", words, replace(work, tokens=tokens), 1 - rows / to)


def _of_attention(work: Attention) -> Iterator[Edge]:
    step = VECTOR_BYTES // DTYPES[work.dtype].element_bytes
    if work.head_dim % step:
        bytes_now = alignment_bytes(work.head_dim, work.dtype)
        words = f"head_dim = {work.head_dim} is no multiple of {step}: {alignment_words(bytes_now, VECTOR_BYTES)}"
        yield Edge(
            "alignment", words, replace(work, head_dim=max(step, work.head_dim // step * step))
        )
    to = _padded(work)
    narrower = (replace(work, head_dim=width) for width in range(work.head_dim - 1, 0, -1))
    before = next((other for other in narrower if _padded(other) == other.head_dim), None)
    if to != work.head_dim and before is not None:
        idle = 1 - work.head_dim / to
        yield Edge(
            "tile edge",
            f"{padding_words('head_dim', work.head_dim, to)}: {percent(idle)} idle",
            before,
            idle,
        )


def _padded(work: Attention) -> int:
    found = padded(work)
    return work.head_dim if found is None else found[2]
