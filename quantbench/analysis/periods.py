"""Infers the tile, the number of resident blocks and the step spacing from the steps in each curve
family's latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from quantbench.analysis.blocks import TileInUse, compute_bound, tile_in_use, tile_words
from quantbench.analysis.curves import Family, FittedCurve, curve_family
from quantbench.analysis.staircase import (
    BLOCK_SIDES,
    CPU_BLOCK_SIDES,
    MOST_BLOCKS_PER_SM,
    Explanation,
    Recovered,
    candidates,
    recover,
)
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import assumed_tile
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import cdiv
from quantbench.units import percent
from quantbench.workload import Gemm

# Most curves compared with the candidates, and most points in total. Longer curves are cut, because
# the work grows with the square of their points.
_MOST_CURVES = 48
_MOST_POINTS = 6000
_LONGEST_CURVE = 256
# Usual limit of the ratio of a tile's sides.
_USUAL_ASPECT = 2.0
# Fewest points of a curve from which steps are explained.
_FEWEST_POINTS = 6


@dataclass(frozen=True)
class Period:
    """Tile and waves inferred from the steps of one curve family (op, provider, variant) along
    `axis`.

    recovered: explanations found, with their confidence.
    num_curves: number of curves compared with the candidates.
    spacing, spacing_error: distance between steps in axis units, with standard error; None if steps
        are few or uneven.
    chosen: the reported explanation; None if none is clear.
    """

    axis: str
    op: str
    provider: str
    variant: str
    recovered: Recovered
    sm_count: int
    num_curves: int
    spacing: float | None = None
    spacing_error: float | None = None
    chosen: Explanation | None = field(default=None)

    @property
    def family(self) -> Family:
        return (self.op, self.provider, self.variant)

    @property
    def sure_words(self) -> str:
        """Confidence as text, e.g. `97 % sure`; `over 99 % sure` above 99 %."""
        confidence = self.recovered.confidence
        return "over 99 % sure" if confidence > 0.99 else f"{percent(confidence)} sure"

    @property
    def clear(self) -> bool:
        """Whether the search has a clear result."""
        return self.recovered.verdict == "CONFIRMED"

    @property
    def tile_words(self) -> str:
        """Description of the chosen explanation, e.g. `128x256 tile on 108 SMs`; "" without one."""
        return "" if self.chosen is None else self.words_of(self.chosen)

    def words_of(self, explanation: Explanation) -> str:
        """Describes one of the explanations (see `blocks.tile_words`)."""
        return tile_words(explanation.tile, explanation.resident_blocks, self.sm_count)


def find_periods(fitted: Sequence[FittedCurve], spec: DeviceSpec) -> tuple[Period, ...]:
    """Infers the period of each family of GEMM curves with enough close points, along the axis with
    most of them.
    """
    families: dict[Family, dict[str, list[FittedCurve]]] = {}
    for one in fitted:
        if (
            isinstance(one.curve.points[0].workload, Gemm)
            and len(one.curve.close_gaps) >= _FEWEST_POINTS - 1
        ):
            families.setdefault(one.curve.family, {}).setdefault(one.curve.axis, []).append(one)
    found = []
    for by_axis in families.values():
        axis = max(
            by_axis, key=lambda name: sum(len(one.curve.close_gaps) for one in by_axis[name])
        )
        found.append(_period(by_axis[axis], spec))
    return tuple(found)


def _period(curves: Sequence[FittedCurve], spec: DeviceSpec) -> Period:
    chosen = _choose(curves, spec)
    # One resident block stands for kernels without waves: on a CPU core, and persistent kernels
    # that divide the last tiles.
    most_per_sm = 0 if spec.kind == "cpu" else MOST_BLOCKS_PER_SM
    resident = [1, *(spec.sm_count * per_sm for per_sm in range(1, most_per_sm + 1))]
    sides = CPU_BLOCK_SIDES if spec.kind == "cpu" else BLOCK_SIDES
    products = [
        [p.workload for p in one.curve.points if isinstance(p.workload, Gemm)] for one in chosen
    ]
    recovered = recover(chosen, candidates(products, sides, resident))
    curve = curves[0].curve
    best = min(recovered.best, key=lambda e: _strangeness(e, spec))
    spacing, error = _spacing(curves)
    return Period(
        curve.axis,
        *curve.family,
        recovered,
        spec.sm_count,
        len(chosen),
        spacing,
        error,
        best if recovered.verdict == "CONFIRMED" else None,
    )


def _choose(curves: Sequence[FittedCurve], spec: DeviceSpec) -> list[FittedCurve]:
    """Selects evenly spaced compute-bound curves, because a memory bound hides the waves."""
    parts = []  # of at most _LONGEST_CURVE points
    for one in curves:
        points = len(one.curve.points)
        number = cdiv(points, _LONGEST_CURVE)
        ends = pairwise(points * i // number for i in range(number + 1))
        parts += [one] if number == 1 else [one.part(*both) for both in ends]
    middles = [one.curve.points[len(one.curve.points) // 2].workload for one in parts]
    bound = [
        one for one, middle in zip(parts, middles, strict=True) if compute_bound(middle, spec)
    ] or parts
    number = min(
        len(bound),
        _MOST_CURVES,
        max(1, _MOST_POINTS // max(len(one.curve.points) for one in bound)),
    )
    return [bound[i * len(bound) // number] for i in range(number)]


def _strangeness(explanation: Explanation, spec: DeviceSpec) -> tuple[float, ...]:
    """Returns a sort key that selects one of several equivalent explanations.

    Prefers, in this order: few blocks per SM, sides that are powers of two, an aspect ratio up to
    two, a size near the device's assumed tile.
    """
    assumed = assumed_tile(spec)
    sides = (explanation.block_m, explanation.block_n)
    odd = sum(side & (side - 1) != 0 for side in sides)
    away = abs(np.log(sides[0] / assumed.block_m)) + abs(np.log(sides[1] / assumed.block_n))
    per_sm = explanation.per_sm(spec.sm_count) or 99
    return (per_sm, odd, max(_USUAL_ASPECT, max(sides) / min(sides)), float(away), *sides)


def _spacing(curves: Sequence[FittedCurve]) -> tuple[float | None, float | None]:
    """Returns the mean distance between steps on the curve with the most steps, and its standard
    error. Allows for missed steps, which leave gaps of a whole number of distances."""
    best: list[float] = []
    for one in curves:
        sizes = one.curve.sizes
        rises = [b for b in one.fit.breaks if b.log_jump > 4 * b.standard_error]
        places = [(sizes[b.index] + sizes[b.index + 1]) / 2 for b in rises]
        best = max(best, places, key=len)
    if len(best) < 3:
        return None, None
    usual = float(np.median([b - a for a, b in pairwise(best)]))
    number = np.array(
        [0, *np.cumsum([max(1, round((b - a) / usual)) for a, b in pairwise(best)])],
        dtype=np.float64,
    )
    slope, offset = np.polyfit(number, best, 1)
    scatter = float(
        np.std(np.array(best) - slope * number - offset, ddof=2 if len(best) > 2 else 1)
    )
    if scatter > slope / 2:
        return None, None
    return float(slope), scatter / float(np.sqrt(((number - number.mean()) ** 2).sum()))


#: maps a point to its tile; None if no tile is credible
TileOf = Callable[[Point], TileInUse | None]


def tile_finder(spec: DeviceSpec, periods: Iterable[Period]) -> TileOf:
    """Returns a function from a point to its tile: recorded, else recovered from its family's
    steps, else assumed.

    A loop of one product per expert has no tile: the products run one after the other, so their
    waves are not shared. Without a recorded or recovered tile it returns None if the measured steps
    contradict the assumed tile.
    """
    one_core = spec.kind == "cpu"
    by_family = {period.family: period for period in periods}

    @cache
    def without_launch(family: Family, dtype: str) -> TileInUse | None:
        period = by_family.get(family)
        if period is not None and period.chosen is not None:
            chosen = period.chosen
            waves = not one_core and chosen.resident_blocks > 1
            per_sm = chosen.per_sm(spec.sm_count) if waves else None
            return TileInUse(
                chosen.tile, chosen.resident_blocks, "steps", period.tile_words, waves, per_sm
            )
        used = tile_in_use(spec, dtype, None)
        assumed = Explanation(used.tile.block_m, used.tile.block_n, used.resident_blocks)
        may_be = period is None or (
            period.recovered.verdict == "INCONCLUSIVE" and assumed in period.recovered.plausible
        )
        return used if may_be else None

    def tile_of(point: Point) -> TileInUse | None:
        if point.provider in UNPADDED:
            return None
        if point.launch is None or point.launch.tile is None:
            return without_launch(curve_family(point), point.workload.dtype)
        return tile_in_use(spec, point.workload.dtype, point.launch)

    return tile_of
