"""Which gaps of a coarse pass hold a jump that is worth bisecting to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log, sqrt

from quantbench.analysis.check import fit_all
from quantbench.analysis.cliffs import find_cliffs, useful_work
from quantbench.analysis.curve_fits import FittedCurve
from quantbench.analysis.point_noise import repeatability
from quantbench.analysis.summary import points_of
from quantbench.device.spec import DeviceSpec
from quantbench.store.record import Record
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.sweep.refine import Gap, PlacedGap, Refine, grain_of

# Jumps below this are left where the coarse pass saw them, and so are those beyond this many, the largest first.
_SMALLEST = log(1.05)
_MOST_GAPS = 32
# Between sizes far apart a fall of the rate is taken for a step when it is this many standard errors.
_SURE = 4.0


def refine_of(options: SweepOptions, spec: DeviceSpec) -> Refine:
    """The `more` of a sweep with --refine on a device."""
    axes, _ = plan_sweep(options, spec)
    return Refine(options, axes, spec, partial(find_gaps, spec=spec))


def find_gaps(records: Sequence[Record], spec: DeviceSpec) -> tuple[PlacedGap, ...]:
    """Gaps with a step up of 5 % or more: cliffs where sizes are close, and falls of the rate where they are not."""
    fitted = fit_all(points_of(records, spec), repeatability(records))
    cliffs = {(id(cliff.before), cliff.axis): log(cliff.ratio) for cliff in find_cliffs(fitted, spec, ())}
    found: list[tuple[float, PlacedGap]] = []
    for one in fitted:
        close = set(one.curve.close_gaps)
        for i, before in enumerate(one.curve.points[:-1]):
            height = cliffs.get((id(before), one.curve.axis), 0.0) if i in close else _loss(one, i)
            if height >= _SMALLEST:
                found.append((height, _placed(one, i)))
    found.sort(key=lambda pair: -pair[0])
    return tuple(placed for _, placed in found[:_MOST_GAPS])


def _loss(one: FittedCurve, i: int) -> float:
    """By how much (a logarithm) the rate falls over a wide gap; 0 where that is not sure."""
    before, after = one.curve.points[i], one.curve.points[i + 1]
    loss = log(after.latency_us / before.latency_us * useful_work(before.workload) / useful_work(after.workload))
    return loss if loss > _SURE * sqrt(one.sigma[i] ** 2 + one.sigma[i + 1] ** 2) else 0.0


def _placed(one: FittedCurve, i: int) -> PlacedGap:
    curve = one.curve
    before, after = curve.points[i], curve.points[i + 1]
    gap = Gap(
        curve.sizes[i], curve.sizes[i + 1], before.latency_us, after.latency_us, float(one.fit.trend[i]),
        float(max(one.sigma[i], one.sigma[i + 1])), grain_of(curve.axis.replace("_", "-")),
    )  # fmt: skip
    return PlacedGap(gap, curve.axis, dict(curve.held), curve.op, curve.provider)
