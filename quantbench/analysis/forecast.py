"""Predicts the time of every grid point of a sweep, for `quantbench predict`.

`forecast` predicts the times. `with_cliffs` adds two predictions for single GEMMs: the rise of the
time from m to m + 1, and how much slower than the fastest kernel the library is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

import numpy as np

from quantbench.analysis.blocks import idle_reasons, tile_in_use
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency import op_times
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.op_times import CachedTimes, OpEstimate, peak_share, total
from quantbench.launch import Tile
from quantbench.sweep.axes import Axis, Held, places_of
from quantbench.units import counted
from quantbench.workload import Gemm

_SIDES = attrgetter("m", "n", "k")


@dataclass(frozen=True)
class Rise:
    """Predicted relative rise of the time from m to m + 1, with its 90 % interval.

    share: relative rise; 0.3 means that the time at m + 1 is 30 % longer.
    low, high: bounds of the interval, in the same unit.
    """

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class PredictedOp:
    """Prediction for one run of an op.

    count: number of runs of the op at the grid point.
    latency_us, low_us, high_us: predicted time of one run in µs, and its 90 % interval.
    peak_share: predicted rate as a fraction of peak; None if the peak is unknown.
    tile: tile of the predicted launch; None if no launch is predicted.
    estimate: the full prediction. `latency.estimate.Estimate` describes the other fields.
    """

    op: str
    count: int
    workload: str
    latency_us: float
    low_us: float
    high_us: float
    source: str
    bound: str
    waves: int | None
    peak_share: float | None
    tile: Tile | None
    estimate: OpEstimate = field(repr=False)


@dataclass(frozen=True)
class PredictedPoint:
    """Prediction for one grid point, which runs a single op or all ops of a layer.

    axes: value of each axis at the grid point.
    latency_us, low_us, high_us, tflops: predicted time in µs with its 90 % interval, and rate, of
        the summed ops. The logits are summed only if the grid point has no other op.
    logits_us: time of the logits in µs; None if they are summed, or if there are none.
    peak_share: mean of the summed ops' fractions of peak, weighted by time; None if a peak is
        unknown.
    worst_op: name of the summed op with the smallest fraction of peak.
    reasons: the reasons why the worst op runs below peak.
    ops: all ops, including the logits.
    summed: estimates of the summed ops.
    worst: estimate of the worst op.
    rise_at_next_m: rise of the time from m to m + 1 (see `rises_at_next_m`).
    slower_than_best_kernel: see the function of this name.
    """

    axes: dict[str, int]
    latency_us: float
    low_us: float
    high_us: float
    tflops: float
    logits_us: float | None
    peak_share: float | None
    worst_op: str
    reasons: tuple[str, ...]
    ops: tuple[PredictedOp, ...]
    summed: tuple[OpEstimate, ...] = field(repr=False)
    worst: OpEstimate = field(repr=False)
    rise_at_next_m: Rise | None = None
    slower_than_best_kernel: float = 0.0


@dataclass(frozen=True)
class Forecast:
    """Predictions for all points of a grid.

    rows: predicted grid points, in the order of the axes.
    impossible: one error message for each grid point that was skipped because its sizes are
        impossible.
    """

    rows: tuple[PredictedPoint, ...]
    impossible: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """Estimates of all ops, over all grid points."""
        ops = chain.from_iterable(row.ops for row in self.rows)
        return tuple(map(attrgetter("estimate"), ops))

    @property
    def notes(self) -> tuple[str, ...]:
        """Distinct notes on the sources of the predictions."""
        return tuple(dict.fromkeys(op.estimate.note for op in self.ops if op.estimate.note))

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Distinct reasons why predicted times rest on no measurement, most frequent first.

        Each text gives the reason and the number of ops that it applies to.
        """
        reasons = Counter(op.estimate.unmeasured for op in self.ops if op.estimate.unmeasured)
        return tuple(
            f"{reason} ({count} of {counted(len(self.ops), 'op')})"
            for reason, count in reasons.most_common()
        )


def forecast(axes: Sequence[Axis], held: Held, times: CachedTimes) -> Forecast:
    """Predicts every point of a grid.

    axes: axes of the grid, with `@edges` (sizes around predicted cliffs) already expanded.
    held: values of all other dimensions, with the defaults filled in.
    times: source of predicted op times for one device.

    Raises InputError if the grid has no possible point.
    """
    places, impossible = places_of(axes, held, "predict", modelled=True)
    asked = [op.workload for op in chain.from_iterable(ops for _, ops in places)]
    if not asked:
        why = f" ({impossible[0].removeprefix('predict: ')})" if impossible else ""
        expected = "axes and ops that have places in common"
        raise InputError("predict", f"no place is left to predict{why}", expected)
    times.ask(asked)
    correlation = op_times.correlation_of(times)
    rows = []
    for at, ops in places:
        if ops:
            estimates = [OpEstimate(op, times.estimate(op.workload)) for op in ops]
            rows.append(_row(at, estimates, times.device, correlation))
    return Forecast(tuple(rows), impossible)


def _row(
    axes: dict[str, int], found: list[OpEstimate], spec: DeviceSpec, correlation: float
) -> PredictedPoint:
    """Sums the predictions of all ops at one grid point.

    found: estimates of all ops at the grid point.
    correlation: correlation between the errors of different ops, for the interval of the sum.
    """
    layer: list[PredictedOp] = []
    logits: list[PredictedOp] = []
    for estimate in found:
        part = logits if estimate.op.name == "logits" else layer
        part.append(_op(estimate, spec))
    logits_us = None
    if layer and logits:
        logits_us = sum(one.estimate.total_us for one in logits)
    ops = tuple(layer + logits)
    layer = layer or logits
    summed = tuple(one.estimate for one in layer)
    whole = total(summed, correlation)
    known = [one.peak_share * one.estimate.total_us for one in layer if one.peak_share is not None]
    worst = min(layer, key=lambda one: (one.peak_share is None, one.peak_share or 0.0, one.op))
    work = worst.estimate.op.workload
    used = tile_in_use(spec, work.dtype, worst.estimate.estimate.launch)
    reasons = idle_reasons(work, spec, used, worst.peak_share)
    return PredictedPoint(
        axes=axes,
        latency_us=whole.latency_us,
        low_us=whole.low_us,
        high_us=whole.high_us,
        tflops=whole.tflops,
        logits_us=logits_us,
        peak_share=sum(known) / whole.latency_us if len(known) == len(layer) else None,
        worst_op=worst.op,
        reasons=tuple(reason.words for reason in reasons),
        ops=ops,
        summed=summed,
        worst=worst.estimate,
    )


def _op(found: OpEstimate, spec: DeviceSpec) -> PredictedOp:
    """Converts an estimate to a `PredictedOp`, with its fraction of the device's peak."""
    one = found.estimate
    return PredictedOp(
        op=found.op.label,
        count=found.op.count,
        workload=str(found.op.workload),
        latency_us=one.latency_us,
        low_us=one.low_us,
        high_us=one.high_us,
        source=one.source,
        bound=one.bound,
        waves=one.waves,
        peak_share=peak_share(found.op.workload, one.latency_us, spec),
        tile=None if one.launch is None else one.launch.tile,
        estimate=found,
    )


def with_cliffs(rows: Sequence[PredictedPoint], model: GemmModel) -> tuple[PredictedPoint, ...]:
    """Fills in `rise_at_next_m` and `slower_than_best_kernel` of the rows."""
    found = []
    rises = rises_at_next_m(rows, model)
    for row, rise, share in zip(rows, rises, slower_than_best_kernel(rows, model), strict=True):
        found.append(replace(row, rise_at_next_m=rise, slower_than_best_kernel=share))
    return tuple(found)


def rises_at_next_m(rows: Sequence[PredictedPoint], model: GemmModel) -> tuple[Rise | None, ...]:
    """Returns the predicted rise of the time from m to m + 1 for each row.

    The result is None for a row that is not a single unbatched GEMM along m, and for all rows if
    the model has no training rows.

    For the interval, the errors of the two times are treated as independent. The interval was
    checked on six public tables, with 200 training rows each: 90 % of the measured rises lie within
    0.7 to 1.1 half-widths of the predicted rise.
    """
    asked: dict[int, Gemm] = {}
    for i, row in enumerate(rows):
        work = _along_m(row)
        if work is not None and model.rows:
            asked[i] = work
    found: list[Rise | None] = [None] * len(rows)
    if not asked:
        return tuple(found)
    m, n, k = np.array(list(map(_SIDES, asked.values()))).T
    layouts = [work.layout for work in asked.values()]
    before = model.predict(m, n, k, layout=layouts)
    after = model.predict(m + 1, n, k, layout=layouts)
    ratio = after.latency_us / before.latency_us
    log_width = np.hypot(
        np.log(before.high_us / before.latency_us), np.log(after.high_us / after.latency_us)
    )
    factor = np.exp(log_width)
    rises = np.stack([ratio, ratio / factor, ratio * factor], axis=1) - 1.0
    for i, rise in zip(asked, rises.tolist(), strict=True):
        found[i] = Rise(*rise)
    return tuple(found)


def slower_than_best_kernel(rows: Sequence[PredictedPoint], model: GemmModel) -> tuple[float, ...]:
    """Returns how much slower than the cost model's fastest kernel each GEMM is predicted to be.

    The result is predicted time / time of the fastest kernel − 1, and at least 0. A large value
    means that similar GEMMs were measured to be slower than that kernel, for instance because the
    library chose another kernel or the SM clock dropped. The result is 0 for all rows if the rows
    are not single GEMMs, or if the model has no training rows.
    """
    gemms = []
    for row in rows:
        work = row.ops[0].estimate.op.workload
        if len(row.ops) != 1 or not isinstance(work, Gemm) or not model.rows:
            return (0.0,) * len(rows)  # all points of a grid have the same ops
        gemms.append(work)
    batch = [min(one.batch, LARGEST_SIDE // one.m) for one in gemms]
    layouts = [one.layout for one in gemms]
    found = model.predict(*zip(*map(_SIDES, gemms), strict=True), batch=batch, layout=layouts)
    assert found.beyond is not None
    return tuple(found.beyond.clip(0.0).tolist())


def _along_m(row: PredictedPoint) -> Gemm | None:
    """Returns the GEMM of a row that is a single unbatched GEMM on a grid with an axis m.

    Returns None for other rows, and for the largest m that the model takes.
    """
    work = row.summed[0].op.workload
    if "m" not in row.axes or len(row.summed) != 1 or not isinstance(work, Gemm) or work.batch != 1:
        return None
    return work if work.m < LARGEST_SIDE else None
