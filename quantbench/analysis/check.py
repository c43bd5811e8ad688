"""Everything that `quantbench check` says about a run: cliffs, what explains them, and the rules judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.analysis.blocks import TileInUse
from quantbench.analysis.cliffs import Cliff, find_cliffs
from quantbench.analysis.common_cliffs import CommonCliff, common_cliffs
from quantbench.analysis.curve_fits import FittedCurve, fit_curves
from quantbench.analysis.curves import axes_of, curves_of, variant_of
from quantbench.analysis.periods import Period, find_periods
from quantbench.analysis.point_noise import repeatability
from quantbench.analysis.rule_pairs import Material
from quantbench.analysis.rule_verdicts import Verdict
from quantbench.analysis.rules import RULES, Rule, judge_all
from quantbench.analysis.summary import Point, points_of
from quantbench.analysis.tiles import tile_finder
from quantbench.stats import median
from quantbench.store.folder import Run


@dataclass(frozen=True)
class Check:
    """num_points: measured points that were looked at. num_curves: curves with neighbours close enough to show a step.
    noise: median standard error of a point on them (a share of its time), None without curves. cliffs: rises, the
    largest first; falls: sizes past which the time drops. common: sizes after which many curves rise."""

    run: Run
    num_points: int
    num_curves: int
    noise: float | None
    cliffs: tuple[Cliff, ...]
    falls: tuple[Cliff, ...]
    common: tuple[CommonCliff, ...]
    periods: tuple[Period, ...]
    rules: tuple[Verdict, ...]

    def tile_of(self, point: Point) -> TileInUse | None:
        """Whose tile a point of the run is computed with; None where none can be believed."""
        family = (point.op, point.provider, variant_of(point.workload))
        return tile_finder(self.run.info.device, self.periods)(family)(point)

    @property
    def period(self) -> Period | None:
        """The period that says most: a clear one before any other, then the one that explains most."""
        order = sorted(self.periods, key=lambda p: (not p.clear, -p.recovered.explained))
        return order[0] if order else None


def check_run(run: Run, *, rules: Sequence[Rule] = RULES, blind: bool = False) -> Check:
    """Look at every curve of a run and judge the rules. blind: as if the device's number of SMs were not known."""
    spec = run.info.device
    points = points_of(run.records, spec)
    fitted = fit_all(points, repeatability(run.records))
    periods = find_periods(fitted, spec, blind=blind)
    jumps = find_cliffs(fitted, spec, periods)
    explained_by = {period.family: period.chosen for period in periods if period.chosen is not None}
    material = Material(points, fitted, spec, tile_finder(spec, periods))
    shown = [one for one in fitted if one.curve.close_gaps]
    return Check(
        run=run,
        num_points=len(points),
        num_curves=len(shown),
        noise=median(np.concatenate([one.sigma for one in shown])) if shown else None,
        cliffs=tuple(cliff for cliff in jumps if cliff.ratio > 1),
        falls=tuple(cliff for cliff in jumps if cliff.ratio < 1),
        common=common_cliffs(fitted, jumps, spec, explained_by),
        periods=periods,
        rules=judge_all(material, rules),
    )


def fit_all(points: Sequence[Point], between: float) -> tuple[FittedCurve, ...]:
    """Every curve along every axis, fitted."""
    return fit_curves([curve for axis in axes_of(points) for curve in curves_of(points, axis)], between)
