"""Where tile and wave edges lie along an axis, for drawing: between two sizes the dimensions grow in a straight line,
so the place where one more tile is needed is known exactly, also when no size there was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from quantbench.analysis.blocks import tile_in_use
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Tile
from quantbench.quantization import cdiv, credible_waves
from quantbench.workload import Gemm


@dataclass(frozen=True)
class DrawnEdges:
    """Axis positions after which one more tile, and one more wave, is needed. assumed: the tile was not identified."""

    tile: tuple[float, ...]
    wave: tuple[float, ...]
    assumed: bool


def drawn_edges(points: Sequence[Point], axis: str, spec: DeviceSpec) -> DrawnEdges:
    """Edges of one op's products along `axis`. The tile is that of each launch where known, else the device's assumed
    one. A wave edge is drawn where waves can be stated of the size after it (`quantization.credible_waves`)."""
    sizes = sorted({p.axes[axis]: p for p in points if isinstance(p.workload, Gemm)}.items())
    tile_edges: set[float] = set()
    wave_edges: set[float] = set()
    for (low, a), (high, b) in pairwise(sizes):
        assert isinstance(a.workload, Gemm)
        assert isinstance(b.workload, Gemm)
        used = tile_in_use(spec, b.workload.dtype, b.launch)
        waves = credible_waves(b.workload, used.tile, spec.sm_count, used.blocks_per_sm, b.peak_share)
        for share, tiles_before, tiles_after in tile_steps(a.workload, b.workload, used.tile):
            at = low + share * (high - low)
            tile_edges.add(at)
            if waves is not None and cdiv(tiles_after, spec.sm_count) > cdiv(tiles_before, spec.sm_count):
                wave_edges.add(at)
    assumed = all(p.launch is None or p.launch.tile is None for p in points)
    return DrawnEdges(tuple(sorted(tile_edges)), tuple(sorted(wave_edges)), assumed)


def tile_steps(a: Gemm, b: Gemm, tile: Tile) -> list[tuple[float, int, int]]:
    """From a to b: (share of the way, tiles up to there, tiles just after) wherever the number of tiles grows."""
    shares = {*_crossings(a.m, b.m, tile.block_m), *_crossings(a.n, b.n, tile.block_n)}
    steps = []
    for share in sorted(shares):
        before, after = _tiles(a, b, tile, share, past=False), _tiles(a, b, tile, share, past=True)
        if after > before:
            steps.append((share, before, after))
    return steps


def _crossings(start: int, stop: int, block: int) -> list[float]:
    """Shares of the way from start to stop at which a whole number of blocks is full; the start itself counts."""
    if stop <= start:
        return []
    first = cdiv(start, block) * block
    return [(edge - start) / (stop - start) for edge in range(first, stop, block)]


def _tiles(a: Gemm, b: Gemm, tile: Tile, share: float, *, past: bool) -> int:
    total = tile.split_k
    for start, stop, block in ((a.m, b.m, tile.block_m), (a.n, b.n, tile.block_n), (a.batch, b.batch, 1)):
        size = start + share * (stop - start)
        full = round(size / block)
        on_edge = abs(size / block - full) < 1e-9
        if on_edge:
            total *= full + (1 if past and stop > start else 0)
        else:
            total *= int(size // block) + 1
    return total
