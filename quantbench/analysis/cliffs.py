"""Cliffs: sizes after which the time jumps, on one curve (`find_cliffs`) or on many curves alike (`common_cliffs`).

A single figure per shape is too noisy for all but the largest steps of one curve; the median over a hundred curves is
not. `common_cliffs` therefore counts every compute-bound curve that has both sizes, whether or not it shows a cliff of
its own there. Called by `check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from quantbench.analysis.blocks import compute_bound, num_blocks
from quantbench.analysis.causes import Cause, CurveStep, cause_of
from quantbench.analysis.curve_fits import FittedCurve
from quantbench.analysis.curves import Curve
from quantbench.analysis.periods import Period, TileOf, tile_finder
from quantbench.analysis.staircase import Explanation
from quantbench.analysis.step_detection import Break
from quantbench.analysis.summary import Point
from quantbench.device.spec import DeviceSpec
from quantbench.quantization import cdiv
from quantbench.stats import median_interval
from quantbench.workload import Workload

# A jump of the time below this is not called a cliff, however quiet the measurement.
SMALLEST_CLIFF = log(1.03)
# Standard errors that a jump must have, for the largest of about a hundred places was looked for: noise alone then
# shows one false step in about seven curves of a hundred points (measured on simulated curves without steps).
_SURE = 4.0
_95_PERCENT = 1.96


@dataclass(frozen=True)
class Cliff:
    """Between `before` and `after`, neighbours on a curve, the time jumps beyond the trend around it.

    axis, op, provider, variant, held: the curve (see `curves.Curve`).
    ratio, low, high: time after over time before, with its 95 % interval; below 1 the time falls.
    first, last: axis values; the jump may lie after any size from `first` to `last`.
    rate_ratio: useful work per second after over before, trend included.
    cause: why the time jumps.
    """

    axis: str
    op: str
    provider: str
    variant: str
    held: Mapping[str, int]
    before: Point
    after: Point
    ratio: float
    low: float
    high: float
    first: int
    last: int
    rate_ratio: float
    cause: Cause

    @property
    def at(self) -> int:
        """The last size before the jump."""
        return self.before.axes[self.axis]

    @property
    def next(self) -> int:
        """The first size measured after the jump."""
        return self.after.axes[self.axis]

    @property
    def family(self) -> tuple[str, str, str]:
        return (self.op, self.provider, self.variant)


def find_cliffs(fitted: Iterable[FittedCurve], spec: DeviceSpec, periods: Sequence[Period]) -> tuple[Cliff, ...]:
    """Every significant jump, the largest first: rises after which the device does less work per second, and falls.

    periods: what explains the steps of each family, for points whose kernel was not recorded.
    """
    tile_of_family = tile_finder(spec, periods)
    found = []
    for one in fitted:
        tile_of = tile_of_family(one.curve.family)
        found += [_cliff(one, b, spec, tile_of) for b in one.fit.breaks if _counts(one, b)]
    return tuple(sorted(found, key=lambda cliff: -abs(log(cliff.ratio))))


def _counts(one: FittedCurve, found: Break) -> bool:
    """Whether a break is a cliff: high enough, significant, between close neighbours, and steeper than the work grows.

    A rise that is less steep than the work cannot be told from growth.
    """
    i, jump = found.index, found.log_jump
    if abs(jump) < SMALLEST_CLIFF or abs(jump) < _SURE * found.standard_error:
        return False
    if i not in one.curve.close_gaps:
        return False
    return jump < 0 or bool(one.fit.levels[i + 1] - one.fit.levels[i] > log(_growth(one.curve, i)))


def _growth(curve: Curve, i: int) -> float:
    return useful_work(curve.points[i + 1].workload) / useful_work(curve.points[i].workload)


def useful_work(workload: Workload) -> int:
    """Arithmetic operations, or bytes where there is none to count (collectives)."""
    return workload.flops or workload.min_bytes


def _cliff(one: FittedCurve, found: Break, spec: DeviceSpec, tile_of: TileOf) -> Cliff:
    curve, i = one.curve, found.index
    before, after = curve.points[i], curve.points[i + 1]
    reach = _95_PERCENT * found.standard_error
    return Cliff(
        axis=curve.axis, op=curve.op, provider=curve.provider, variant=curve.variant, held=dict(curve.held),
        before=before, after=after, ratio=exp(found.log_jump), low=exp(found.log_jump - reach),
        high=exp(found.log_jump + reach), first=curve.sizes[found.first], last=curve.sizes[found.last],
        rate_ratio=_growth(curve, i) * before.latency_us / after.latency_us,
        cause=cause_of(CurveStep(curve.points, i, found.log_jump), spec, tile_of),
    )  # fmt: skip


# Fewer curves are looked at one by one.
_FEWEST_CURVES = 8


# Kinds of cause that are told of one size.
_CAUSES_SAID = 2

#: axis, op, provider, variant, and the sizes on both sides
_Key = tuple[str, str, str, str, int, int]


@dataclass(frozen=True)
class CommonCliff:
    """After size `at` of `axis` the time jumps by `ratio`, the median over num_curves curves of one family.

    next: the next size.
    ratio, low, high: median jump with its 95 % interval.
    num_cliffs: curves with a significant jump of their own there.
    causes: kinds of cause of those curves with their number, the kind that costs most first.
    stepping, level: median ratio and number of the curves that begin a new wave there, and of those that do not; None
        where no tile explains the family's steps.
    """

    axis: str
    op: str
    provider: str
    variant: str
    at: int
    next: int
    num_curves: int
    ratio: float
    low: float
    high: float
    num_cliffs: int
    causes: tuple[tuple[str, int], ...]
    stepping: tuple[float, int] | None = None
    level: tuple[float, int] | None = None

    @property
    def cause(self) -> str:
        """The kind of cause that costs most."""
        return self.causes[0][0] if self.causes else "unexplained"

    @property
    def cause_words(self) -> str:
        """`wave edge 71, tile edge 64`: what explains the most costly cliffs, with the number of curves."""
        return ", ".join(f"{kind} {number}" for kind, number in self.causes[:_CAUSES_SAID]) or "unexplained"


def common_cliffs(
    fitted: Iterable[FittedCurve],
    cliffs: Sequence[Cliff],
    spec: DeviceSpec,
    explained_by: dict[tuple[str, str, str], Explanation],
) -> tuple[CommonCliff, ...]:
    """Sizes that many curves share and after which the median jump is 3 % or more, the largest first.

    explained_by: the tile that explains the steps of each family, where one does.
    """
    jumps: dict[_Key, list[tuple[float, bool | None]]] = {}
    counted: set[tuple[_Key, str]] = set()
    for one in fitted:
        curve, sizes = one.curve, one.curve.sizes
        rise = np.diff(curve.log_time) - one.fit.trend * np.diff(curve.log_size)
        explanation = explained_by.get(curve.family)
        for i in curve.close_gaps:
            if compute_bound(curve.points[i + 1].workload, spec):
                key: _Key = (curve.axis, *curve.family, sizes[i], sizes[i + 1])
                steps = None if explanation is None else _steps(one, i, explanation)
                jumps.setdefault(key, []).append((float(rise[i]), steps))
                counted.add((key, curve.points[i].key))
    heights: dict[_Key, dict[str, list[float]]] = {}
    for cliff in cliffs:
        at = (cliff.axis, *cliff.family, cliff.at, cliff.next)
        if cliff.ratio > 1 and (at, cliff.before.key) in counted:
            heights.setdefault(at, {}).setdefault(cliff.cause.kind, []).append(log(cliff.ratio))
    found = [_common(key, of_key, heights.get(key, {})) for key, of_key in jumps.items()]
    return tuple(sorted((c for c in found if c is not None), key=lambda c: -c.ratio))


def _steps(one: FittedCurve, i: int, explanation: Explanation) -> bool | None:
    """Whether the explanation needs more waves for point i + 1 than for point i."""
    blocks = [num_blocks(point.workload, explanation.tile) for point in one.curve.points[i : i + 2]]
    if None in blocks:
        return None
    before, after = (cdiv(count or 0, explanation.resident_blocks) for count in blocks)
    return after > before


def _common(
    key: _Key, jumps: Sequence[tuple[float, bool | None]], heights: dict[str, list[float]]
) -> CommonCliff | None:
    if len(jumps) < _FEWEST_CURVES:
        return None
    rises = [rise for rise, _ in jumps]
    middle = float(np.median(rises))
    interval = median_interval(rises)
    if middle < SMALLEST_CLIFF or interval.low <= 0:
        return None
    axis, op, provider, variant, at, following = key
    causes = tuple((kind, len(heights[kind])) for kind in sorted(heights, key=lambda kind: -sum(heights[kind])))
    return CommonCliff(
        axis, op, provider, variant, at, following, len(jumps), exp(middle), exp(interval.low), exp(interval.high),
        sum(number for _, number in causes), causes,
        _median_ratio([rise for rise, steps in jumps if steps]),
        _median_ratio([rise for rise, steps in jumps if steps is False]),
    )  # fmt: skip


def _median_ratio(rises: Sequence[float]) -> tuple[float, int] | None:
    return (exp(float(np.median(rises))), len(rises)) if rises else None
