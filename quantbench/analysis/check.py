"""Analyses a run: cliffs, their causes, tiles and rules of thumb; gaps to refine.

Entry points: `check_run`, which returns a `Check`, used by the commands `check` and `sweep`, by `report`,
`profile.build` and tools; `refine_of`, used by `sweep --refine`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import log, sqrt

import numpy as np

from quantbench.analysis.cliffs import Cliff, CommonCliff, common_cliffs, find_cliffs, useful_work
from quantbench.analysis.curves import (
    Curve,
    FittedCurve,
    axes_of,
    curves_of,
    fit_curves,
    repeatability,
)
from quantbench.analysis.experts import padding_lines
from quantbench.analysis.periods import Period, TileOf, find_periods, tile_finder
from quantbench.analysis.rule_pairs import Material
from quantbench.analysis.rules import RULES, RuleOfThumb, judge_all
from quantbench.analysis.summary import Point, points_of
from quantbench.analysis.verdict import Verdict
from quantbench.device.spec import DeviceSpec
from quantbench.stats import median
from quantbench.store.folder import Run
from quantbench.store.record import Record
from quantbench.sweep.axes import grain_of
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.refine import Gap, PlacedGap, Refine


@dataclass(frozen=True)
class Check:
    """Result of `check_run` (`measurement.Check` is the check of a kernel's output).

    num_curves: number of curves with neighbours close enough to show a step.
    noise: median relative standard error of the points on these curves; None if there are none.
    cliffs: significant rises of the time, largest first.
    falls: significant drops of the time, largest first.
    common: sizes after which the median over many curves rises.
    periods: tile and waves recovered from the steps of each curve family.
    rules: one verdict per rule of thumb.
    padding: one line per provider that ran grouped GEMMs, on the rows that it pads.
    tile_of: function from a point of the run to its tile; None if the steps contradict the assumed tile.
    """

    run: Run
    num_points: int
    curves: Mapping[str, tuple[Curve, ...]]
    num_curves: int
    noise: float | None
    cliffs: tuple[Cliff, ...]
    falls: tuple[Cliff, ...]
    common: tuple[CommonCliff, ...]
    periods: tuple[Period, ...]
    rules: tuple[Verdict, ...]
    padding: tuple[str, ...]
    tile_of: TileOf

    @property
    def period(self) -> Period | None:
        """The period that explains most of the variation, a clear one if there is any; None without periods."""
        return min(self.periods, key=lambda p: (not p.clear, -p.recovered.explained), default=None)


def check_run(run: Run, *, rules: Sequence[RuleOfThumb] = RULES, points: Sequence[Point] | None = None) -> Check:
    """Analyses all curves of a run and tests the rules. points: `points_of` the run, if already computed."""
    spec = run.info.device
    points = points_of(run.records, spec) if points is None else points
    curves = {axis: curves_of(points, axis) for axis in axes_of(points)}
    fitted = fit_all(points, repeatability(run.records))
    periods = find_periods(fitted, spec)
    jumps = find_cliffs(fitted, spec, periods)
    explained_by = {period.family: period.chosen for period in periods if period.chosen is not None}
    tile_of = tile_finder(spec, periods)
    shown = [one for one in fitted if one.curve.close_gaps]
    return Check(
        run=run, num_points=len(points), curves=curves, num_curves=len(shown),
        noise=median(np.concatenate([one.sigma for one in shown])) if shown else None,
        cliffs=tuple(cliff for cliff in jumps if cliff.ratio > 1),
        falls=tuple(cliff for cliff in jumps if cliff.ratio < 1),
        common=common_cliffs(fitted, jumps, spec, explained_by), periods=periods,
        rules=judge_all(Material(points, fitted, spec, tile_of), rules),
        padding=padding_lines(points, tile_of), tile_of=tile_of,
    )  # fmt: skip


def fit_all(points: Sequence[Point], between: float) -> tuple[FittedCurve, ...]:
    """Fits every curve along every axis. between: scatter between points, log time (see `curves.fit_curves`)."""
    return fit_curves([curve for axis in axes_of(points) for curve in curves_of(points, axis)], between)


# Smallest jump (log time) that is refined, and the largest number of gaps.
_SMALLEST = log(1.05)
_MOST_GAPS = 32
# A drop of the rate over a wide gap counts as a step from this many standard errors.
_SURE = 4.0


def refine_of(options: SweepOptions, spec: DeviceSpec) -> Refine:
    """Builds the refinement step of a sweep with --refine."""
    axes, _ = plan_sweep(options, spec)
    return Refine(options, axes, spec, partial(find_gaps, spec=spec))


def find_gaps(records: Sequence[Record], spec: DeviceSpec) -> tuple[PlacedGap, ...]:
    """Finds up to 32 gaps with a step of 5 % or more: cliffs between close sizes, rate drops between distant ones."""
    fitted = fit_all(points_of(records, spec), repeatability(records))
    cliffs = {(id(cliff.before), cliff.axis): log(cliff.ratio) for cliff in find_cliffs(fitted, spec, ())}
    found: list[tuple[float, PlacedGap]] = []
    for one in fitted:
        curve, close = one.curve, set(one.curve.close_gaps)
        for i, (before, after) in enumerate(pairwise(curve.points)):
            if i in close:
                height = cliffs.get((id(before), curve.axis), 0.0)
            else:  # the drop of the rate, if it is significant
                work_ratio = useful_work(before.workload) / useful_work(after.workload)
                height = log(after.latency_us / before.latency_us * work_ratio)
                height *= height > _SURE * sqrt(one.sigma[i] ** 2 + one.sigma[i + 1] ** 2)
            if height >= _SMALLEST:
                gap = Gap(
                    curve.sizes[i], curve.sizes[i + 1], before.latency_us, after.latency_us, float(one.fit.trend[i]),
                    float(max(one.sigma[i : i + 2])), grain_of(curve.axis.replace("_", "-")),
                )  # fmt: skip
                found.append((height, PlacedGap(gap, curve.axis, dict(curve.held), curve.op, curve.provider)))
    found.sort(key=lambda pair: -pair[0])
    return tuple(placed for _, placed in found[:_MOST_GAPS])
