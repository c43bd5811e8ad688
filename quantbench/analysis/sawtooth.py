"""Computes tile and wave edges along a curve, and the rate predicted by tiles and waves alone, for plots.

Entry points: `drawn_edges`, used by `report.sweep_result`; `sawtooth`, which returns a `Sawtooth`, used by
`report.op_curves` and `tools.guide`.

Between two measured sizes all dimensions grow linearly, so the positions of the edges between them are exact. The rate
is scaled to the measured points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quantbench.analysis.blocks import TileInUse, num_blocks, parts_to_fill
from quantbench.analysis.curves import Curve
from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Tile
from quantbench.quantization import cdiv, credible_waves, quantize
from quantbench.workload import Gemm


def drawn_edges(curve: Curve, tile_of: TileOf) -> tuple[list[float], list[float]]:
    """Returns the axis positions after which another tile, and another wave, is needed, ascending, along a curve of
    GEMMs whose tile was recorded or recovered from the steps.

    Assumed tiles give no edges, because nothing in the run supports them. Wave edges are included if waves are credible
    for the size after the edge (`quantization.credible_waves`).
    """
    tile_edges: set[float] = set()
    wave_edges: set[float] = set()
    for (low, a), (high, b) in pairwise(zip(curve.sizes, curve.points, strict=True)):
        used = tile_of(b)
        if used is None or used.source == "assumed":
            continue
        if not isinstance(a.workload, Gemm) or not isinstance(b.workload, Gemm):
            continue
        at_a_time = used.resident_blocks
        held = used.blocks_per_sm if used.waves else None
        waves = credible_waves(b.workload, used.tile, at_a_time, held, b.peak_share)
        for share, before, after in tile_steps(a.workload, b.workload, used.tile):
            at = low + share * (high - low)
            tile_edges.add(at)
            if waves is not None and cdiv(after, at_a_time) > cdiv(before, at_a_time):
                wave_edges.add(at)
    return sorted(tile_edges), sorted(wave_edges)


def tile_steps(a: Gemm, b: Gemm, tile: Tile) -> list[tuple[float, int, int]]:
    """Returns (fraction of the way from a to b, tiles up to it, tiles just after) for each increase of the tiles."""
    shares = {*_crossings(a.m, b.m, tile.block_m), *_crossings(a.n, b.n, tile.block_n)}
    steps = ((at, _tiles(a, b, tile, at, past=False), _tiles(a, b, tile, at, past=True)) for at in sorted(shares))
    return [(share, before, after) for share, before, after in steps if after > before]


def _crossings(start: int, stop: int, block: int) -> list[float]:
    """Returns the fractions of the way from start to stop at multiples of block, without the end."""
    if stop <= start:
        return []
    first = cdiv(start, block) * block
    return [(edge - start) / (stop - start) for edge in range(first, stop, block)]


def _tiles(a: Gemm, b: Gemm, tile: Tile, share: float, *, past: bool) -> int:
    total = tile.split_k
    for start, stop, block in ((a.m, b.m, tile.block_m), (a.n, b.n, tile.block_n), (a.batch, b.batch, 1)):
        blocks = (start + share * (stop - start)) / block
        on_edge = abs(blocks - round(blocks)) < 1e-9
        total *= round(blocks) + (past and stop > start) if on_edge else int(blocks) + 1
    return total


# Share of the memory bandwidth that a good kernel reaches; it caps the rate of the teeth.
_BANDWIDTH_EFFICIENCY = 0.8
# Points that reach this share of the memory bandwidth are not used to scale the curve.
_MEMORY_BOUND = 0.5
# More teeth than this between two neighbours are too fine to plot; the curve has a gap instead.
_MOST_TEETH = 12


@dataclass(frozen=True)
class Sawtooth:
    """Rate predicted by tiles and waves.

    sizes: axis positions, ascending; each edge appears twice (last tile full, and one past it).
    tflops: rate at each position, TFLOP/s; nan in a gap.
    """

    sizes: tuple[float, ...]
    tflops: tuple[float, ...]
    tile: str


def sawtooth(points: Sequence[Point], axis: str, spec: DeviceSpec, known: TileOf) -> Sawtooth | None:
    """Returns the predicted rate for the points of one op and provider along `axis`.

    known: function from a point to its tile (`periods.tile_finder`). For a tile recovered from the steps, the curve
        begins at half a wave, because libraries split tiles below that.

    None if there are fewer than two sizes of GEMMs, if all need the same number of tiles (along k), or if a tile is
    unknown or only assumed.
    """
    used: dict[int, TileInUse] = {}
    by_size: list[tuple[int, Point]] = []
    for size, p in sorted({p.axes[axis]: p for p in points if isinstance(p.workload, Gemm)}.items()):
        found = known(p)
        if found is None or found.source == "assumed":
            return None
        blocks = num_blocks(p.workload, found.tile) or 0
        if by_size or found.source != "steps" or parts_to_fill(blocks, found.resident_blocks) == 1:
            by_size.append((size, p))
            used[size] = found
    if len(by_size) < 2:
        return None
    if len({quantize(p.workload, used[size].tile, 1).num_tiles for size, p in by_size}) == 1:  # type: ignore[arg-type]
        return None
    rows: list[tuple[float, float, float]] = []  # size, share of compute, rate of the memory in TFLOP/s
    for (low, a), (high, b) in pairwise(by_size):
        assert isinstance(a.workload, Gemm)
        assert isinstance(b.workload, Gemm)
        tile, resident, first = used[high].tile, used[high].resident_blocks, a.workload
        elements = first.batch * (first.m * first.k + first.k * first.n + first.m * first.n)
        element_bytes = first.min_bytes / elements  # mean over inputs and output
        for share, num_tiles in _places(a.workload, b.workload, tile):
            if num_tiles is None:
                rows.append(((low + high) / 2, np.nan, np.nan))
                continue
            ends = ((getattr(a.workload, name), getattr(b.workload, name)) for name in ("m", "n", "k", "batch"))
            m, n, k, batch = (start + share * (stop - start) for start, stop in ends)
            slots = cdiv(num_tiles, resident) * resident
            compute = m * n * batch * tile.split_k / (slots * tile.elements)
            moved = element_bytes * batch * (m * k + k * n + m * n)
            memory = 2 * m * n * k * batch / moved * spec.memory_gb_per_s * _BANDWIDTH_EFFICIENCY / 1e3
            rows.append((low + share * (high - low), compute, memory))
    sizes, of_compute, of_memory = np.array(rows).T
    scale = _scale([(p, used[size]) for size, p in by_size], spec)
    peak = spec.peak(by_size[0][1].workload.dtype)
    rates = np.minimum(np.minimum(scale * of_compute, of_memory), np.inf if peak is None else peak)
    last = used[by_size[-1][0]]
    words = f"{last.tile}, {'recovered from the steps' if last.source == 'steps' else 'recorded'}"
    if len({str(one.tile) for one in used.values()}) > 1:
        words = "tile of the kernel that ran"
    return Sawtooth(tuple(sizes.tolist()), tuple(rates.tolist()), words)


def _places(a: Gemm, b: Gemm, tile: Tile) -> list[tuple[float, int | None]]:
    """Returns (fraction of the way, tiles) at both ends and on both sides of each edge between them. With too many
    edges, these are replaced by the midpoint without a number of tiles."""
    teeth = tile_steps(a, b, tile)
    inner: list[tuple[float, int | None]] = [(share, tiles) for share, *both in teeth for tiles in both]
    if len(teeth) > _MOST_TEETH:
        inner = [(0.5, None)]
    return [(0.0, quantize(a, tile, 1).num_tiles), *inner, (1.0, quantize(b, tile, 1).num_tiles)]


def _scale(points: Sequence[tuple[Point, TileInUse]], spec: DeviceSpec) -> float:
    """Returns the median of measured rate / tile and wave efficiency over the compute-bound points."""
    bound = [(p, used) for p, used in points if p.gb_per_s < _MEMORY_BOUND * spec.memory_gb_per_s] or points
    gemms = [(p, p.workload, used) for p, used in bound if isinstance(p.workload, Gemm)]
    ratios = [p.tflops / quantize(work, used.tile, used.resident_blocks).efficiency for p, work, used in gemms]
    return float(np.median(ratios))
