"""Cliffs: sizes past which the time jumps, found blind on every curve of a run, each with its cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from quantbench.analysis.causes import Cause, CurveStep, cause_of
from quantbench.analysis.curve_fits import FittedCurve
from quantbench.analysis.curves import Curve
from quantbench.analysis.periods import Period
from quantbench.analysis.step_detection import Break
from quantbench.analysis.summary import Point
from quantbench.analysis.tiles import TileOf, tile_finder
from quantbench.device.spec import DeviceSpec
from quantbench.workload import Workload

# A jump of the time below this is not called a cliff, however quiet the measurement.
SMALLEST_CLIFF = log(1.03)
# Standard errors that a jump must have, for the largest of about a hundred places was looked for: noise alone then
# shows one false step in about seven curves of a hundred points (measured on simulated curves without steps).
_SURE = 4.0
_95_PERCENT = 1.96


@dataclass(frozen=True)
class Cliff:
    """Between `before` and `after`, neighbours on a curve, the time jumps by `ratio` beyond the trend around it.

    ratio, low, high: time after over time before, and its 95 % interval; below 1 the time falls. first, last: axis
    values; the jump may as well lie after any size from `first` to `last`. rate_ratio: useful work per second after
    over before, trend and all: what a person who goes from one size to the next sees.
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
        """The first size measured behind it."""
        return self.after.axes[self.axis]

    @property
    def family(self) -> tuple[str, str, str]:
        return (self.op, self.provider, self.variant)


def find_cliffs(fitted: Iterable[FittedCurve], spec: DeviceSpec, periods: Sequence[Period]) -> tuple[Cliff, ...]:
    """Every jump that is sure, the largest first: rises behind which the device does less work per second, and falls.

    periods: what explains the steps of each family, for the causes of points whose kernel was not recorded.
    """
    tile_of_family = tile_finder(spec, periods)
    found = []
    for one in fitted:
        tile_of = tile_of_family(one.curve.family)
        found += [_cliff(one, b, spec, tile_of) for b in one.fit.breaks if _counts(one, b)]
    return tuple(sorted(found, key=lambda cliff: -abs(log(cliff.ratio))))


def _counts(one: FittedCurve, found: Break) -> bool:
    """Whether a break is a cliff: high enough, sure, between close neighbours, and where it goes up, steeper than the
    work grows (what is less steep cannot be told from growth)."""
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
