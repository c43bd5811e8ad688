"""Describes how many rows a provider of grouped GEMMs adds when it pads each expert's rows.

A kernel that runs all experts in one launch pads each expert's rows to whole tiles. A loop of one
GEMM per expert pads no rows. The module also determines the number of rows per expert (`rows_of`),
which some rules of thumb are about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap

from quantbench.analysis.periods import TileOf
from quantbench.analysis.summary import Point
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import padded_rows
from quantbench.units import axis_words, percent
from quantbench.workload import GroupedGemm, MoE


def rows_of(point: Point) -> int:
    """Returns the number of rows that each expert of a grouped GEMM or an MoE layer computes.

    Returns 0 for experts with different numbers of rows, and for all other workloads.
    """
    work = point.workload
    if isinstance(work, GroupedGemm | MoE):
        rows = set(work.tokens_per_expert)
        return rows.pop() if len(rows) == 1 else 0
    return 0


#: block_m of the tile that shows what padding would cost a provider that pads nothing; most grouped
#: kernels on GPUs use this number (DeepGEMM pads to 128)
_USUAL_BLOCK_M = 128


def padding_lines(points: Iterable[Point], tile_of: TileOf) -> tuple[str, ...]:
    """Describes in one line per provider of grouped GEMMs how it pads the rows of the experts.

    If no tile of the provider is known, the line says that the padding is unknown. GEMMs of layout
    tn (weight gradients) are left out, because the tokens are their reduction dimension.

    tile_of: function that maps a point to its tile (see `periods.tile_finder`). Assumed tiles are
        not used.
    """
    by_provider: dict[str, list[_Padding]] = {}
    for point in points:
        work = point.workload
        if not isinstance(work, GroupedGemm) or work.layout == "tn":
            continue
        known = by_provider.setdefault(point.provider, [])
        used = tile_of(point)
        if point.provider in UNPADDED:
            known.append(_Padding(point.axes, work, _USUAL_BLOCK_M))
        elif used is not None and used.source != "assumed":
            known.append(_Padding(point.axes, work, used.tile.block_m))
    return tuple(starmap(_line, by_provider.items()))


@dataclass(frozen=True)
class _Padding:
    """A grouped GEMM at one grid point. Each expert's rows are padded to multiples of block_m."""

    axes: dict[str, int]
    work: GroupedGemm
    block_m: int

    @property
    def factor(self) -> float:
        """Number of rows with padding, divided by the number of rows without padding."""
        return padded_rows(self.work, self.block_m) / self.work.rows

    def __str__(self) -> str:
        """Formats the padding: `512 rows to 4,096 (+700 %) at experts = 32`."""
        padded = padded_rows(self.work, self.block_m)
        words = f"{self.work.rows:,} rows to {padded:,} (+{percent(self.factor - 1)})"
        if self.axes:
            words += f" at {', '.join(axis_words(self.axes, ' = '))}"
        return words


def _line(provider: str, known: list[_Padding]) -> str:
    """Describes the padding of one provider in one line, which names the worst case.

    known: the provider's grouped GEMMs with a known tile. For a provider in UNPADDED, block_m is
        _USUAL_BLOCK_M.
    """
    kernel = f"{provider} multiplies each expert's rows"
    if not known:
        return f"{kernel} by a kernel whose tile is not known: whether it pads them cannot be told"
    worst = max(known, key=lambda one: one.factor)
    if provider in UNPADDED:
        steps = "its steps are those of single products and of their number"
        other = f"a kernel with tiles of {_USUAL_BLOCK_M} rows would pad {worst}"
        return f"{kernel} as they are and pads none: {steps}; {other}"
    blocks = " or ".join(map(str, sorted({one.block_m for one in known})))
    return f"{kernel} padded to tiles of {blocks} rows: at most {worst}"
