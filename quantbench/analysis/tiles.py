"""Whose tile: what a point's product is computed with, from the best source there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from quantbench.analysis.blocks import TileInUse
from quantbench.analysis.periods import Period
from quantbench.analysis.staircase import Explanation
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.latency.roofline import assumed_tile
from quantbench.launch import Tile

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
        believed = TileInUse(chosen.tile, chosen.resident_blocks, "steps", period.tile_words, waves)
    else:
        assumed = assumed_tile(spec)
        at_a_time = 1 if one_core else spec.sm_count * assumed.blocks_per_sm
        words = f"{assumed.tile} tile (assumed)" + ("" if one_core else f" on {spec.sm_count} SMs")
        if period is None or _may_be(Explanation(assumed.tile.block_m, assumed.tile.block_n, at_a_time), period):
            believed = TileInUse(assumed.tile, at_a_time, "assumed", words, not one_core)

    def tile_of(point: Point) -> TileInUse | None:
        launch = point.launch
        if launch is None or launch.tile is None:
            return believed
        per_sm = launch.blocks_per_sm or 1
        at_a_time = 1 if one_core else spec.sm_count * per_sm
        return TileInUse(launch.tile, at_a_time, "launch", _launch_words(launch.tile, per_sm, spec), not one_core)

    return tile_of


def _may_be(assumed: Explanation, period: Period) -> bool:
    """Whether a staircase that was looked at, and that tells no tile for sure, leaves room for this one."""
    return period.recovered.verdict == "unclear" and assumed in period.recovered.plausible


def _launch_words(tile: Tile, per_sm: int, spec: DeviceSpec) -> str:
    short = f"{tile.block_m}x{tile.block_n} tile" + (f", split-k {tile.split_k}," if tile.split_k > 1 else "")
    if spec.kind == "cpu":
        return short
    return (
        f"{short} on {spec.sm_count} SMs" if per_sm == 1 else f"{short}, {per_sm} blocks on each of {spec.sm_count} SMs"
    )
