"""The curve that tiles and waves alone would draw, between and through the measured sizes.

Between two measured sizes the product's dimensions grow in a straight line (as in `drawn_edges`), so the number of
tiles and waves is known at every place in between. The curve is scaled once, to the middle of the measured rates: it
says where the teeth are and how deep, not how fast the device is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quantbench.analysis.blocks import TileInUse, tile_in_use
from quantbench.analysis.drawn_edges import tile_steps
from quantbench.analysis.summary import Point
from quantbench.analysis.tiles import TileOf
from quantbench.device.spec import DeviceSpec
from quantbench.launch import Tile
from quantbench.quantization import cdiv, quantize
from quantbench.workload import Gemm

# Where the memory is what takes the time, teeth are hidden; a good kernel reaches about this share of the bandwidth.
_BANDWIDTH_EFFICIENCY = 0.8
# Points that reach this share of it are left out where the curve is scaled.
_MEMORY_BOUND = 0.5
# More teeth than this between two neighbours are finer than a picture shows: a straight line is drawn between them.
_MOST_TEETH = 12


@dataclass(frozen=True)
class Sawtooth:
    """sizes: places on the axis, ascending, each edge twice (full, and one past it). tflops: the rate there.
    assumed: the tile was not identified but taken for granted; tile: in words. guess: nor is it known that the device
    runs in waves, so that the curve is no explanation."""

    sizes: tuple[float, ...]
    tflops: tuple[float, ...]
    assumed: bool
    tile: str
    guess: bool


def sawtooth(points: Sequence[Point], axis: str, spec: DeviceSpec, known: TileOf = lambda _: None) -> Sawtooth | None:
    """The curve for the points of one op and provider along `axis`; None where they are no products, fewer than two
    sizes, or need the same number of tiles everywhere (along k).

    known: whose tile a point is computed with (`tiles.tile_finder`); where that is None, the device's assumed one.
    """
    by_size = sorted({p.axes[axis]: p for p in points if isinstance(p.workload, Gemm)}.items())
    if len(by_size) < 2:
        return None
    used = {size: _used(p, spec, known) for size, p in by_size}
    if len({quantize(p.workload, used[size].tile, 1).num_tiles for size, p in by_size}) == 1:  # type: ignore[arg-type]
        return None
    sizes: list[float] = []
    compute: list[float] = []
    memory: list[float] = []
    for (low, a), (high, b) in pairwise(by_size):
        assert isinstance(a.workload, Gemm)
        assert isinstance(b.workload, Gemm)
        tile, resident = used[high].tile, used[high].resident_blocks
        for share, num_tiles in _places(a.workload, b.workload, tile):
            sizes.append(low + share * (high - low))
            m, n, k, batch = (_between(a.workload, b.workload, name, share) for name in ("m", "n", "k", "batch"))
            slots = cdiv(num_tiles, resident) * resident
            compute.append(m * n * batch * tile.split_k / (slots * tile.elements))
            moved = _element_bytes(a.workload) * batch * (m * k + k * n + m * n)
            memory.append(2 * m * n * k * batch / moved * spec.memory_gb_per_s * _BANDWIDTH_EFFICIENCY / 1e3)
    scale = _scale([(p, used[size]) for size, p in by_size], spec)
    rates = np.minimum(scale * np.array(compute), np.array(memory))
    peak = spec.peak(by_size[0][1].workload.dtype)
    if peak is not None:
        rates = np.minimum(rates, peak)
    assumed = all(u.source == "assumed" for u in used.values())
    return Sawtooth(
        tuple(sizes), tuple(float(r) for r in rates), assumed, _words(tuple(used.values())),
        guess=assumed and spec.kind == "cuda" and not any(u.waves for u in used.values()),
    )  # fmt: skip


def _used(point: Point, spec: DeviceSpec, known: TileOf) -> TileInUse:
    return known(point) or tile_in_use(spec, point.workload.dtype, point.launch)


def _words(used: Sequence[TileInUse]) -> str:
    last = used[-1]
    if all(u.source == "assumed" for u in used):
        return f"{last.tile} assumed"
    if len({str(u.tile) for u in used}) > 1:
        return "tile of the kernel that ran"
    return f"{last.tile}, told by the steps" if last.source == "steps" else str(last.tile)


def _places(a: Gemm, b: Gemm, tile: Tile) -> list[tuple[float, int]]:
    """(share of the way, tiles there), at both ends and on both sides of each edge between them."""
    teeth = tile_steps(a, b, tile)
    ends = [(0.0, quantize(a, tile, 1).num_tiles), (1.0, quantize(b, tile, 1).num_tiles)]
    if len(teeth) > _MOST_TEETH:
        return ends
    inner = [(share, tiles) for share, before, after in teeth for tiles in (before, after)]
    return [ends[0], *inner, ends[1]]


def _between(a: Gemm, b: Gemm, name: str, share: float) -> float:
    start: int = getattr(a, name)
    stop: int = getattr(b, name)
    return start + share * (stop - start)


def _element_bytes(gemm: Gemm) -> float:
    """Mean over inputs and output, which may be of different width."""
    return gemm.min_bytes / (gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n))


def _scale(points: Sequence[tuple[Point, TileInUse]], spec: DeviceSpec) -> float:
    """Measured rate over the share of the slots in use, in the middle of the points that arithmetic bounds."""
    ratios, bound_by_compute = [], []
    for point, used in points:
        assert isinstance(point.workload, Gemm)
        ratios.append(point.tflops / quantize(point.workload, used.tile, used.resident_blocks).efficiency)
        bound_by_compute.append(point.gb_per_s < _MEMORY_BOUND * spec.memory_gb_per_s)
    chosen = [ratio for ratio, kept in zip(ratios, bound_by_compute, strict=True) if kept]
    return float(np.median(chosen or ratios))
