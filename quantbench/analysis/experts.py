"""Counts the rows of experts, and tells how many of them grouped GEMMs pad.

A kernel that runs all experts in one launch pads each expert's rows to whole tiles; a loop of
products pads none.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import padded_rows
from quantbench.units import percent
from quantbench.workload import GroupedGemm, MoE


def rows_of(point: Point) -> int:
    """Returns the rows of the fullest expert of grouped products or of a layer; 0 if not all
    experts have the same.
    """
    work = point.workload
    if isinstance(work, GroupedGemm | MoE):
        rows = set(work.tokens_per_expert)
        return rows.pop() if len(rows) == 1 else 0
    return 0


#: rows of the tile that unpadded rows are compared with, as of most grouped kernels on GPUs
#: (DeepGEMM pads to 128)
_USUAL_BLOCK_M = 128


def padding_lines(points: Iterable[Point], tile_of: TileOf) -> tuple[str, ...]:
    """Returns a line for each provider that ran grouped GEMMs: the rows that it pads, or that this
    is not known.

    tile_of: function from a point to its tile (`check.RunCheck.tile_of`); assumed tiles do not
        count.
    """
    by_provider: dict[str, list[tuple[Point, GroupedGemm]]] = {}
    for point in points:
        if isinstance(point.workload, GroupedGemm) and point.workload.layout != "tn":
            by_provider.setdefault(point.provider, []).append((point, point.workload))
    return tuple(_line(provider, group, tile_of) for provider, group in by_provider.items())


def _line(provider: str, group: list[tuple[Point, GroupedGemm]], tile_of: TileOf) -> str:
    who = f"{provider} multiplies each expert's"
    if provider in UNPADDED:
        point, work = max(
            group, key=lambda pair: padded_rows(pair[1], _USUAL_BLOCK_M) / pair[1].rows
        )
        added = _added(point, work, _USUAL_BLOCK_M)
        return (
            f"{who} rows as they are and pads none: its steps are those of single products and of their number; a "
            f"kernel with tiles of {_USUAL_BLOCK_M} rows would pad {added}"
        )
    tiles = [(point, work, tile_of(point)) for point, work in group]
    known = [
        (point, work, used.tile.block_m)
        for point, work, used in tiles
        if used and used.source != "assumed"
    ]
    if not known:
        return (
            f"{who} rows by a kernel whose tile is not known: whether it pads them cannot be told"
        )
    added = _added(*max(known, key=lambda one: padded_rows(one[1], one[2]) / one[1].rows))
    blocks = " or ".join(map(str, sorted({block_m for *_, block_m in known})))
    return f"{who} rows padded to tiles of {blocks} rows: at most {added}"


def _added(point: Point, work: GroupedGemm, block_m: int) -> str:
    """Formats the padding of one point: `512 rows to 4,096 (+700 %) at experts = 32`."""
    padded = padded_rows(work, block_m)
    at = ", ".join(f"{name.replace('_', '-')} = {value}" for name, value in point.axes.items())
    return f"{work.rows:,} rows to {padded:,} (+{percent(padded / work.rows - 1)})" + (
        f" at {at}" if at else ""
    )
