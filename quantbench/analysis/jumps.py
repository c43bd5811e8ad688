"""Finds the cliffs of a run, and the gaps between measured sizes that a sweep should refine.

A jump is the change of the time between two neighbouring points of a curve, significant or not. A
cliff is a significant jump between two close sizes. A common cliff is a significant median jump
over many curves. The cliffs here are measured; `latency.gemm.cliffs` predicts cliffs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log, sqrt

import numpy as np

from quantbench.analysis.blocks import Cause, compute_bound, num_waves
from quantbench.analysis.curves import Family, FittedCurve, OfFamily
from quantbench.analysis.explain import CurveStep, cause_of
from quantbench.analysis.periods import TileOf
from quantbench.analysis.staircase import TileCandidate
from quantbench.analysis.step_detection import Break
from quantbench.analysis.summary import Point, useful_work
from quantbench.device.spec import DeviceSpec
from quantbench.stats import median_interval
from quantbench.sweep.refine import AxisGap, Gap
from quantbench.sweep.sizes import grain_of
from quantbench.units import dashed

# Smallest jump in log time that is called a cliff, however low the noise is.
SMALLEST_CLIFF = log(1.03)
# Number of standard errors that a cliff must exceed. The number is high because each curve has many
# gaps. Even so, a false step appears on about one in seven simulated curves without steps (100
# points each).
_MIN_STANDARD_ERRORS = 4.0
_95_PERCENT = 1.96


@dataclass(frozen=True)
class Jump:
    """The change of the time over one gap of a curve, from point `index` to the next point.

    log_rise: change of the measured log time, beyond the trend.
    step: break of the piecewise fit at this gap; None if there is no break.
    close: whether the two sizes are close enough to locate a step between them.
    """

    fitted: FittedCurve
    index: int
    log_rise: float
    step: Break | None
    close: bool

    @property
    def before(self) -> Point:
        return self.fitted.curve.points[self.index]

    @property
    def after(self) -> Point:
        return self.fitted.curve.points[self.index + 1]

    @property
    def log_growth(self) -> float:
        """Natural logarithm of useful work after the gap / useful work before it."""
        return log(useful_work(self.after.workload) / useful_work(self.before.workload))

    @property
    def cliff(self) -> Break | None:
        """The step if it is a cliff: large, significant, and between close sizes; else None.

        A step up is a cliff only if the fitted time grows more than the useful work.
        """
        step = self.step
        if step is None or not self.close:
            return None
        if abs(step.log_jump) < max(SMALLEST_CLIFF, _MIN_STANDARD_ERRORS * step.standard_error):
            return None
        before, after = self.fitted.fit.levels[self.index : self.index + 2]
        return step if step.log_jump < 0 or after - before > self.log_growth else None

    @property
    def log_height(self) -> float:
        """Height in log time by which gaps are chosen for refinement.

        Between close sizes this is the height of the cliff, or 0 if there is no cliff. Between
        distant sizes it is the drop of the log rate, or 0 if the drop is not significant.
        """
        if self.close:
            cliff = self.cliff
            return 0.0 if cliff is None else cliff.log_jump
        height = log(self.after.latency_us / self.before.latency_us) - self.log_growth
        one, two = self.fitted.sigma[self.index : self.index + 2]
        return height if height > _MIN_STANDARD_ERRORS * sqrt(one**2 + two**2) else 0.0


def jumps_of(fitted: Iterable[FittedCurve]) -> tuple[Jump, ...]:
    """Returns the jumps over all gaps of the curves."""
    return tuple(jump for one in fitted for jump in _jumps(one))


def _jumps(one: FittedCurve) -> Iterator[Jump]:
    """Yields the jump over each gap of one curve."""
    curve = one.curve
    rises = np.diff(curve.log_time) - one.fit.trend * np.diff(curve.log_size)
    steps = {found.index: found for found in one.fit.breaks}
    close = set(curve.close_gaps)
    for i, rise in enumerate(rises.tolist()):
        yield Jump(one, i, rise, steps.get(i), i in close)


@dataclass(frozen=True)
class Cliff(OfFamily):
    """A significant jump of the time between two neighbouring points of a curve.

    held: values of the other axes.
    at, next: last size before the jump, and first measured size after it.
    ratio, low, high: time after the jump / time before it, corrected for the trend, with its 95 %
        interval. A ratio below 1 means that the time falls.
    first, last: the jump lies after a size in this range, with 95 % confidence.
    rate_ratio: measured rate of useful work after the jump / rate before it; the trend is included.
    cause: why the time jumps.
    keys: keys of the records before and after the jump.
    before, after: points before and after the jump.
    """

    held: Mapping[str, int]
    at: int
    next: int
    ratio: float
    low: float
    high: float
    first: int
    last: int
    rate_ratio: float
    cause: Cause
    keys: tuple[str, str]
    before: Point = field(repr=False)
    after: Point = field(repr=False)


def find_cliffs(jumps: Iterable[Jump], spec: DeviceSpec, tile_of: TileOf) -> tuple[Cliff, ...]:
    """Returns the cliffs among the jumps, largest first (see `Jump.cliff`).

    tile_of: function that maps a point to its tile (see `periods.tile_finder`).
    """
    found = []
    for jump in jumps:
        step = jump.cliff
        if step is not None:
            found.append(_cliff(jump, step, spec, tile_of))
    return tuple(sorted(found, key=lambda cliff: -abs(log(cliff.ratio))))


def _cliff(jump: Jump, step: Break, spec: DeviceSpec, tile_of: TileOf) -> Cliff:
    """Describes the significant step of a jump as a cliff, with its cause."""
    curve = jump.fitted.curve
    reach = _95_PERCENT * step.standard_error
    return Cliff(
        axis=curve.axis,
        op=curve.op,
        provider=curve.provider,
        variant=curve.variant,
        held=dict(curve.held),
        at=curve.sizes[jump.index],
        next=curve.sizes[jump.index + 1],
        ratio=exp(step.log_jump),
        low=exp(step.log_jump - reach),
        high=exp(step.log_jump + reach),
        first=curve.sizes[step.first],
        last=curve.sizes[step.last],
        rate_ratio=exp(jump.log_growth) * jump.before.latency_us / jump.after.latency_us,
        cause=cause_of(CurveStep(curve.points, jump.index, step.log_jump), spec, tile_of),
        keys=(jump.before.key, jump.after.key),
        before=jump.before,
        after=jump.after,
    )


# Minimum number of curves with a jump at the same sizes from which a common cliff is determined.
_FEWEST_CURVES = 8
# Maximum number of kinds of cause that `CommonCliff.cause_words` names.
_CAUSES_NAMED = 2

#: (axis, op, provider, variant, size before the gap, size after it)
_Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True)
class CommonCliff(OfFamily):
    """A significant median jump over many curves of one family, between two sizes of `axis`.

    at, next: the two sizes, which are neighbours on the curves.
    num_curves: number of compute-bound curves that were measured at both sizes.
    ratio, low, high: median jump, as time after / time before without the trend, with its 95 %
        interval.
    num_cliffs: number of these curves on which the jump is itself a cliff.
    causes: number of such cliffs by kind of cause. The kind with the largest total log height comes
        first.
    stepping: (median ratio, number of curves) for the curves that begin a new wave between the two
        sizes; None if there are none, or if no tile explains the family's steps.
    level: the same for the curves that do not begin a new wave.
    """

    at: int
    next: int
    num_curves: int
    ratio: float
    low: float
    high: float
    num_cliffs: int
    causes: Mapping[str, int]
    stepping: tuple[float, int] | None = None
    level: tuple[float, int] | None = None

    @property
    def cause(self) -> str:
        """Kind of cause with the largest total height; `unexplained` if no curve has a cliff."""
        return next(iter(self.causes), "unexplained")

    @property
    def cause_words(self) -> str:
        """The first two kinds of cause with their numbers: `wave edge 71, tile edge 64`."""
        words = [f"{kind} {number}" for kind, number in self.causes.items()]
        return ", ".join(words[:_CAUSES_NAMED]) or "unexplained"


def common_cliffs(
    jumps: Iterable[Jump],
    cliffs: Sequence[Cliff],
    spec: DeviceSpec,
    explained_by: Mapping[Family, TileCandidate],
) -> tuple[CommonCliff, ...]:
    """Finds the sizes at which the median jump over many curves is significant, largest first.

    At least eight curves must be measured at both sizes. The median must rise by 3 % or more, and
    its 95 % interval must exclude 0. Only close sizes and compute-bound points are used.

    cliffs: the result of `find_cliffs` on the same jumps.
    spec: device of the run.
    explained_by: tile that explains the steps of a family, by family. Other families are missing.
    """
    rises: dict[_Key, list[tuple[float, bool | None]]] = {}
    counted: set[tuple[_Key, str]] = set()
    for jump in jumps:
        curve = jump.fitted.curve
        if jump.close and compute_bound(jump.after.workload, spec):
            at, following = curve.sizes[jump.index : jump.index + 2]
            key: _Key = (curve.axis, *curve.family, at, following)
            explanation = explained_by.get(curve.family)
            steps = None if explanation is None else _more_waves(jump, explanation)
            rises.setdefault(key, []).append((jump.log_rise, steps))
            counted.add((key, jump.before.key))
    heights: dict[_Key, dict[str, list[float]]] = {}
    for cliff in cliffs:
        key = (cliff.axis, *cliff.family, cliff.at, cliff.next)
        if cliff.ratio > 1 and (key, cliff.before.key) in counted:
            heights.setdefault(key, {}).setdefault(cliff.cause.kind, []).append(log(cliff.ratio))
    found = []
    for key, of_key in rises.items():
        common = _common(key, of_key, heights.get(key, {}))
        if common is not None:
            found.append(common)
    return tuple(sorted(found, key=lambda common: -common.ratio))


def _more_waves(jump: Jump, explanation: TileCandidate) -> bool | None:
    """Returns whether the point after the gap needs more waves than the point before the gap.

    Returns None if the workload has no known number of blocks.
    """
    before = num_waves(jump.before.workload, explanation.tile, explanation.resident_blocks)
    after = num_waves(jump.after.workload, explanation.tile, explanation.resident_blocks)
    return None if before is None or after is None else after > before


def _common(
    key: _Key, jumps: Sequence[tuple[float, bool | None]], heights: dict[str, list[float]]
) -> CommonCliff | None:
    """Returns the common cliff at one pair of sizes; None if the median jump is not significant.

    key: axis, family and sizes.
    jumps: (log rise, whether the curve begins a new wave) for each curve.
    heights: log heights of the cliffs at these sizes, by kind of cause.
    """
    if len(jumps) < _FEWEST_CURVES:
        return None
    rises = [rise for rise, _ in jumps]
    middle = float(np.median(rises))
    interval = median_interval(rises)
    if middle < SMALLEST_CLIFF or interval.low <= 0:
        return None
    kinds = sorted(heights, key=lambda kind: -sum(heights[kind]))
    causes = {kind: len(heights[kind]) for kind in kinds}
    return CommonCliff(
        *key,
        num_curves=len(jumps),
        ratio=exp(middle),
        low=exp(interval.low),
        high=exp(interval.high),
        num_cliffs=sum(causes.values()),
        causes=causes,
        stepping=_median_ratio([rise for rise, steps in jumps if steps]),
        level=_median_ratio([rise for rise, steps in jumps if steps is False]),
    )


def _median_ratio(rises: Sequence[float]) -> tuple[float, int] | None:
    """Returns the median of log rises as a ratio, and their number; None if there are none."""
    return (exp(float(np.median(rises))), len(rises)) if rises else None


# Smallest jump in log time that is refined, and maximum number of gaps that `find_gaps` returns.
_SMALLEST_GAP = log(1.05)
_MOST_GAPS = 32


def find_gaps(jumps: Iterable[Jump]) -> tuple[AxisGap, ...]:
    """Returns the gaps whose `log_height` is 5 % or more, at most 32 of them, highest first."""
    large = []
    for jump in jumps:
        height = jump.log_height
        if height >= _SMALLEST_GAP:
            large.append((height, _gap(jump)))
    large.sort(key=lambda pair: -pair[0])
    return tuple(gap for _, gap in large[:_MOST_GAPS])


def _gap(jump: Jump) -> AxisGap:
    """Converts a jump to an `AxisGap`, from which a sweep bisects the jump's position."""
    fitted = jump.fitted
    curve = fitted.curve
    i = jump.index
    gap = Gap(
        curve.sizes[i],
        curve.sizes[i + 1],
        jump.before.latency_us,
        jump.after.latency_us,
        float(fitted.fit.trend[i]),
        float(max(fitted.sigma[i : i + 2])),
        grain_of(dashed(curve.axis), jump.before.workload.dtype),
    )
    return AxisGap(gap, curve.axis, dict(curve.held), curve.op, curve.provider)
