"""Whose tile: what a point's product is computed with, from the best source there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from quantbench.analysis.blocks import TileInUse, tile_in_use
from quantbench.analysis.periods import Period
from quantbench.analysis.staircase import Explanation
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec

Family = tuple[str, str, str]
#: the tile of a point; None where no tile can be believed
TileOf = Callable[[Point], TileInUse | None]


def tile_finder(spec: DeviceSpec, periods: Iterable[Period]) -> Callable[[Family], TileOf]:
    """For each family of curves (op, provider, variant), whose tile its points are computed with."""
    finders = {period.family: _finder(spec, period) for period in periods}
    unknown = _finder(spec, None)
    return lambda family: finders.get(family, unknown)


def _finder(spec: DeviceSpec, period: Period | None) -> TileOf:
    """Whose tile explains a step: the recorded launch's; else the one that explains the family's staircase; else the
    one assumed for the device. Where the staircase was looked at and speaks against that one, none is assumed."""
    believed: TileInUse | None = None
    one_core = spec.kind == "cpu"
    if period is not None and period.chosen is not None:
        chosen = period.chosen
        waves = not one_core and chosen.resident_blocks > 1
        per_sm = chosen.per_sm(spec.sm_count) if waves else None
        believed = TileInUse(chosen.tile, chosen.resident_blocks, "steps", period.tile_words, waves, per_sm)

    @cache
    def without_launch(dtype: str) -> TileInUse | None:
        used = tile_in_use(spec, dtype, None)
        return used if period is None or _may_be(used, period) else None

    def tile_of(point: Point) -> TileInUse | None:
        if point.launch is None or point.launch.tile is None:
            return believed or without_launch(point.workload.dtype)
        return tile_in_use(spec, point.workload.dtype, point.launch)

    return tile_of


def _may_be(assumed: TileInUse, period: Period) -> bool:
    """Whether a staircase that was looked at, and that tells no tile for sure, leaves room for this one."""
    explanation = Explanation(assumed.tile.block_m, assumed.tile.block_n, assumed.resident_blocks)
    return period.recovered.verdict == "unclear" and explanation in period.recovered.plausible
