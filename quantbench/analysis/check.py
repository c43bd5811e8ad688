"""Runs every analysis on one run: cliffs with their causes, tiles and waves, and rules of thumb.

A cliff is a jump of the time between two neighbouring sizes, beyond the trend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from quantbench.analysis.blocks import Cause
from quantbench.analysis.curves import (
    Curve,
    FittedCurve,
    axes_of,
    curves_of,
    fit_curves,
    main_variant,
    repeatability,
)
from quantbench.analysis.experts import padding_lines
from quantbench.analysis.explain import cause_of_loss, known
from quantbench.analysis.jumps import Cliff, CommonCliff, common_cliffs, find_cliffs, jumps_of
from quantbench.analysis.neighbours import BadSize
from quantbench.analysis.periods import Period, TileOf, find_periods, tile_finder
from quantbench.analysis.rule_pairs import RunData
from quantbench.analysis.rules import RULES, RuleOfThumb, judge_all
from quantbench.analysis.summary import Point, held_of, points_of
from quantbench.launch import Tile
from quantbench.rules import Verdict
from quantbench.stats import median
from quantbench.store.folder import Run
from quantbench.store.typed import decode


@dataclass(frozen=True)
class RunCheck:
    """The result of `check_run`.

    (`measurement.Check` is a different class: the check of a kernel's output.)

    num_points: number of points that were analysed.
    curves: all curves of the run, by axis.
    num_curves: number of curves on which some neighbouring sizes are close enough to locate a step.
    noise: median relative standard error of all points on these `num_curves` curves; None if there
        is no such curve.
    cliffs: significant rises of the time, largest first.
    falls: significant drops of the time, largest first.
    common: sizes after which the median time over many curves rises, largest rise first.
    periods: for each curve family (same op, provider and variant), the tile and the waves that
        were inferred from its steps.
    rules: one verdict per rule of thumb.
    padding: one line on padded rows for each provider that ran grouped GEMMs.
    tile_of: function that maps a point of the run to its tile. It returns None if no tile is
        credible.
    """

    run: Run = field(repr=False)
    num_points: int
    curves: Mapping[str, tuple[Curve, ...]] = field(repr=False)
    num_curves: int
    noise: float | None
    cliffs: tuple[Cliff, ...]
    falls: tuple[Cliff, ...]
    common: tuple[CommonCliff, ...]
    periods: tuple[Period, ...]
    rules: tuple[Verdict, ...]
    padding: tuple[str, ...]
    tile_of: TileOf = field(repr=False)

    @cached_property
    def _by_curve(self) -> dict[tuple[object, ...], list[Cliff]]:
        """Cliffs by the key of their curve, largest first."""
        found: dict[tuple[object, ...], list[Cliff]] = {}
        for cliff in self.cliffs:
            key = _curve_key(cliff.after, cliff.axis)
            found.setdefault(key, []).append(cliff)
        return found

    def explain(self, bad: BadSize) -> Cause:
        """Returns the reason why a bad size has a lower rate than the better size nearby.

        The cause is that of a cliff to the bad size itself, else of the largest cliff between the
        two sizes. If there is no cliff, or if its cause is an edge of an assumed tile,
        `explain.cause_of_loss` determines the cause.
        """
        slow = bad.culprit
        better = bad.culprit_at_better
        low, high = sorted((better.axes[bad.axis], bad.size))
        # The largest cliff of a curve comes first.
        cliffs = self._by_curve.get(_curve_key(slow, bad.axis), ())
        for cliff in sorted(cliffs, key=lambda cliff: cliff.next != bad.size):
            if low <= cliff.at < high:
                cause = cliff.cause
                edge = cause.kind in ("tile edge", "wave edge")
                if edge and cause.evidence == "arithmetic" and not known(self.tile_of(cliff.after)):
                    break
                return cause
        return cause_of_loss(slow, better, self.run.info.device, self.tile_of)


def _curve_key(point: Point, axis: str) -> tuple[object, ...]:
    """Returns a key that is equal for all points of one curve along `axis`.

    The order in which a point lists its axes does not matter.
    """
    held = frozenset(held_of(point.axes, axis))
    return (axis, point.op, point.provider, point.workload.dtype, held)


def check_run(
    run: Run, *, rules: Sequence[RuleOfThumb] = RULES, points: Sequence[Point] | None = None
) -> RunCheck:
    """Analyses all curves of a run and tests the rules of thumb.

    rules: the rules to test; default all rules of `rules.RULES`.
    points: result of `points_of` on the run; default None computes the points here.
    """
    spec = run.info.device
    points = points_of(run.records, spec) if points is None else points
    curves = {axis: curves_of(points, axis) for axis in axes_of(points)}
    every = list(chain(*curves.values()))
    between = repeatability(run.records)
    fitted = fit_curves(every, between)
    stored = run.info.options.get("tiles", {})
    declared = {provider: decode(Tile, tile) for provider, tile in stored.items()}
    of_main = list(map(main_variant, every))
    alike = fitted if of_main == every else fit_curves(of_main, between)
    periods = find_periods(alike, spec, declared)
    explained_by = {period.family: period.chosen for period in periods if period.chosen is not None}
    tile_of = tile_finder(spec, periods, declared)
    jumps = jumps_of(fitted)
    cliffs = find_cliffs(jumps, spec, tile_of)
    shown = [one for one in fitted if one.curve.close_gaps]
    return RunCheck(
        run=run,
        num_points=len(points),
        curves=curves,
        num_curves=len(shown),
        noise=median(np.concatenate([one.sigma for one in shown])) if shown else None,
        cliffs=tuple(cliff for cliff in cliffs if cliff.ratio > 1),
        falls=tuple(cliff for cliff in cliffs if cliff.ratio < 1),
        common=common_cliffs(jumps, cliffs, spec, explained_by),
        periods=periods,
        rules=judge_all(RunData(points, fitted, spec, tile_of), rules),
        padding=padding_lines(points, tile_of),
        tile_of=tile_of,
    )


def fit_all(points: Sequence[Point], between: float) -> tuple[FittedCurve, ...]:
    """Fits every curve of the points along every axis.

    between: scatter between repeated measurements of one point, in log time (see
        `curves.fit_curves`).
    """
    curves = [curves_of(points, axis) for axis in axes_of(points)]
    return fit_curves(list(chain(*curves)), between)
