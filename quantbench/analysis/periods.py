"""Infers tiles and resident blocks from the steps of measured times, one result per curve family.

A curve family has the same op, provider and variant. `find_periods` infers the results, and
`tile_finder` uses them to give a tile to points for which no kernel was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import numpy as np

from quantbench.analysis.blocks import TileInUse, compute_bound, tile_in_use, tile_words
from quantbench.analysis.curves import (
    Curve,
    Family,
    FittedCurve,
    OfFamily,
    curve_family,
)
from quantbench.analysis.staircase import (
    BLOCK_SIDES,
    CPU_BLOCK_SIDES,
    MOST_BLOCKS_PER_SM,
    Recovered,
    TileCandidate,
    candidates,
    recover,
)
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.op_times import assumed_tile
from quantbench.launch import Launch, Tile
from quantbench.providers.catalog import UNPADDED
from quantbench.quantization import cdiv
from quantbench.units import percent
from quantbench.workload import Gemm

# Limits of the curves that are compared with the candidate tiles: maximum number of curves, and
# maximum number of points on all of them together. Curves of more than _LONGEST_CURVE points are
# cut, because the work grows with the square of a curve's points.
_MOST_CURVES = 48
_MOST_POINTS = 6000
_LONGEST_CURVE = 256
# Largest ratio of a tile's sides that does not count against the tile.
_USUAL_ASPECT = 2.0
# A curve needs this many points at close sizes, or more, for its steps to be explained.
_FEWEST_POINTS = 6


@dataclass(frozen=True)
class Period(OfFamily):
    """Tile and waves inferred from the steps of one curve family along `axis`.

    recovered: result of the search for a tile, with its confidence.
    sm_count: number of SMs of the device.
    num_curves: number of curves that were compared with the candidates.
    spacing, spacing_error: distance between steps in axis units, and its standard error; None if
        the steps are few or uneven.
    chosen: explanation (tile and resident blocks) that is reported; None if the search has no clear
        result.
    declared: block_m and block_n of the tile that a user-defined provider declares; None if there
        is none.
    """

    recovered: Recovered
    sm_count: int
    num_curves: int
    spacing: float | None = None
    spacing_error: float | None = None
    chosen: TileCandidate | None = None
    declared: Tile | None = None

    @property
    def confirms_declared(self) -> bool:
        """Whether the reported explanation has the declared tile."""
        return self.chosen is not None and self.chosen.tile == self.declared

    @property
    def fits_declared(self) -> bool:
        """Whether the declared tile is among the tiles that fit the steps best.

        If the search has no clear result, these are all plausible tiles.
        """
        fitting = self.recovered.best if self.clear else self.recovered.plausible
        return self.declared in {explanation.tile for explanation in fitting}

    @property
    def sure_words(self) -> str:
        """Confidence of the search as text: `97 % sure`, or `over 99 % sure` above 99 %."""
        confidence = self.recovered.confidence
        return "over 99 % sure" if confidence > 0.99 else f"{percent(confidence)} sure"

    @property
    def clear(self) -> bool:
        """Whether the search for a tile has a clear result."""
        return self.recovered.verdict == "CONFIRMED"

    @property
    def tile_words(self) -> str:
        """Description of the chosen explanation (`128x256 tile on 108 SMs`); "" without one."""
        return "" if self.chosen is None else self.words_of(self.chosen)

    def words_of(self, explanation: TileCandidate) -> str:
        """Describes an explanation of this family's steps (see `blocks.tile_words`)."""
        return tile_words(explanation.tile, explanation.resident_blocks, self.sm_count)


def find_periods(
    fitted: Sequence[FittedCurve], spec: DeviceSpec, declared: Mapping[str, Tile] = {}
) -> tuple[Period, ...]:
    """Infers the tile and the waves of each GEMM curve family that has enough close points.

    If a family has curves along several axes, only the axis with the most pairs of close points is
    used.

    declared: tiles that user-defined providers declare, by provider id.
    """
    families: dict[Family, dict[str, list[FittedCurve]]] = {}
    for one in fitted:
        curve = one.curve
        if isinstance(curve.points[0].workload, Gemm) and _num_close(one) >= _FEWEST_POINTS - 1:
            families.setdefault(curve.family, {}).setdefault(curve.axis, []).append(one)
    found = []
    for by_axis in families.values():
        most = max(by_axis.values(), key=lambda curves: sum(map(_num_close, curves)))
        found.append(_period(most, spec, _declared_tile(most, declared)))
    return tuple(found)


def _declared_tile(curves: Sequence[FittedCurve], declared: Mapping[str, Tile]) -> Tile | None:
    """Returns block_m and block_n of the tile that a user-defined provider declares.

    If the launches of all points state the same tile, that tile is used. Otherwise the tile in
    `declared` is used. Returns None for built-in providers, and for a tile with split_k, which the
    search for a tile does not support.
    """
    provider = curves[0].curve.provider
    if ":" not in provider:
        return None
    points = chain.from_iterable(one.curve.points for one in curves)
    launched = {point.launch and point.launch.tile for point in points}
    tile = launched.pop() if len(launched) == 1 else None
    tile = tile or declared.get(provider)
    if tile is None or tile.split_k > 1:
        return None
    return Tile(tile.block_m, tile.block_n)


def _num_close(one: FittedCurve) -> int:
    """Returns the number of gaps on a curve that are small enough to locate a step."""
    return len(one.curve.close_gaps)


def _period(curves: Sequence[FittedCurve], spec: DeviceSpec, declared: Tile | None) -> Period:
    """Infers the tile and the waves of one family from its curves along one axis."""
    chosen = _choose(curves, spec)
    # One resident block stands for kernels without waves. These are kernels on a CPU core, and
    # persistent kernels that divide the last tiles among all blocks.
    resident = [1]
    sides: tuple[int, ...] = CPU_BLOCK_SIDES
    if spec.kind != "cpu":
        resident += range(spec.sm_count, spec.sm_count * MOST_BLOCKS_PER_SM + 1, spec.sm_count)
        sides = BLOCK_SIDES
    products = [_products(one.curve) for one in chosen]
    recovered = recover(chosen, candidates(products, sides, resident, declared))
    curve = curves[0].curve
    spacing, error = _spacing(curves)
    best = None
    if recovered.verdict == "CONFIRMED":
        of_declared = [one for one in recovered.best if one.tile == declared]
        best = min(of_declared or recovered.best, key=lambda one: _plausibility(one, spec))
    return Period(
        curve.axis,
        *curve.family,
        recovered,
        spec.sm_count,
        len(chosen),
        spacing,
        error,
        best,
        declared,
    )


def _products(curve: Curve) -> list[Gemm]:
    """Returns the GEMMs of a curve, by point."""
    return [point.workload for point in curve.points if isinstance(point.workload, Gemm)]


def _choose(curves: Sequence[FittedCurve], spec: DeviceSpec) -> list[FittedCurve]:
    """Selects the curves to compare with the candidates, within the limits above.

    Long curves are cut into parts, and parts are selected at even intervals. If some parts are
    compute-bound, only these are selected, because waves do not show in memory-bound times.
    """
    parts = []
    bound = []
    for one in curves:
        points = len(one.curve.points)
        number = cdiv(points, _LONGEST_CURVE)
        for i in range(number):
            part = one.part(points * i // number, points * (i + 1) // number)
            parts.append(part)
            middle = part.curve.points[len(part.curve.points) // 2]
            if compute_bound(middle.workload, spec):
                bound.append(part)
    bound = bound or parts
    longest = max(len(one.curve.points) for one in bound)
    number = min(len(bound), _MOST_CURVES, max(1, _MOST_POINTS // longest))
    return [bound[i * len(bound) // number] for i in range(number)]


def _plausibility(explanation: TileCandidate, spec: DeviceSpec) -> tuple[float, ...]:
    """Returns a sort key by which one of several equivalent explanations is selected.

    The preference is, in this order: few blocks per SM, sides that are powers of two, an aspect
    ratio of at most two, and sides near those of the device's assumed tile.
    """
    assumed = assumed_tile(spec)
    m = explanation.block_m
    n = explanation.block_n
    odd = (m.bit_count() > 1) + (n.bit_count() > 1)
    aspect = max(_USUAL_ASPECT, m / n, n / m)
    away = abs(np.log(m / assumed.block_m)) + abs(np.log(n / assumed.block_n))
    # Explanations without a whole number of blocks per SM come last.
    per_sm = explanation.per_sm(spec.sm_count) or 99
    return (per_sm, odd, aspect, float(away), m, n)


def _spacing(curves: Sequence[FittedCurve]) -> tuple[float | None, float | None]:
    """Returns the mean distance between steps in axis units, and its standard error.

    The curve with the most steps is used. Where a step was missed, two neighbouring steps are
    counted as several distances apart. Returns (None, None) if the curve has fewer than three
    steps, or if they are uneven.
    """
    best = np.zeros(0)
    for one in curves:
        middles = np.convolve(one.curve.sizes, [0.5, 0.5], "valid")
        # Only rises of more than four standard errors count as steps, as in `jumps.Jump.cliff`.
        rises = [b.index for b in one.fit.breaks if b.log_jump > 4 * b.standard_error]
        places = middles[np.array(rises, dtype=np.intp)]
        best = max(best, places, key=len)
    if len(best) < 3:
        return None, None
    apart = np.diff(best)
    number = np.append(0.0, np.cumsum(np.maximum(1, np.round(apart / np.median(apart)))))
    slope, offset = np.polyfit(number, best, 1)
    scatter = float(np.std(best - slope * number - offset, ddof=2))
    # The steps are uneven if they scatter by more than half of the mean distance.
    if scatter > slope / 2:
        return None, None
    return float(slope), scatter / float(np.sqrt(((number - number.mean()) ** 2).sum()))


#: function that maps a point to its tile, or to None if no tile is credible
TileOf = Callable[[Point], TileInUse | None]


def tile_finder(
    spec: DeviceSpec, periods: Iterable[Period], declared: Mapping[str, Tile] = {}
) -> TileOf:
    """Returns a function that maps a point to its tile.

    The first available tile is used, in this order:
    1. the tile of the recorded launch;
    2. the tile that a user-defined provider declares. If the steps confirm this tile, the result
       inferred from the steps is used, because it includes the number of resident blocks;
    3. the tile inferred from the steps of the point's family;
    4. the tile assumed for the device.

    The function returns None if the measured steps contradict the assumed tile. It also returns
    None for a loop of one GEMM per expert, whose GEMMs run one after the other and share no waves.

    periods: result of `find_periods` on the run.
    declared: tiles that user-defined providers declare, by provider id.
    """
    one_core = spec.kind == "cpu"
    by_family = {period.family: period for period in periods}

    @cache
    def without_launch(family: Family, dtype: str) -> TileInUse | None:
        """Returns the inferred tile, else the assumed tile if the steps allow it, else None."""
        period = by_family.get(family)
        used = tile_in_use(spec, dtype, None)
        if period is None:
            return used
        chosen = period.chosen
        if chosen is not None:
            resident = chosen.resident_blocks
            waves = not one_core and resident > 1
            per_sm = chosen.per_sm(spec.sm_count) if waves else None
            return TileInUse(chosen.tile, resident, "steps", period.tile_words, waves, per_sm)
        assumed = TileCandidate(used.tile.block_m, used.tile.block_n, used.resident_blocks)
        recovered = period.recovered
        plausible = recovered.verdict == "INCONCLUSIVE" and assumed in recovered.plausible
        return used if plausible else None

    def tile_of(point: Point) -> TileInUse | None:
        """Returns the tile of a point in the order above."""
        if point.provider in UNPADDED:
            return None
        dtype = point.workload.dtype
        if point.launch is not None and point.launch.tile is not None:
            return tile_in_use(spec, dtype, point.launch)
        family = curve_family(point)
        tile = declared.get(point.provider)
        if tile is None or (family in by_family and by_family[family].confirms_declared):
            return without_launch(family, dtype)
        launch = replace(point.launch or Launch(point.provider), tile=tile)
        return replace(tile_in_use(spec, dtype, launch), source="declared")

    return tile_of
