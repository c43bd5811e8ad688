"""Predicts the times of a sweep's grid, and the rise of the time from m to m + 1.

Entry points: `forecast`, which returns a `Forecast` of `PredictedPlace` objects; `Rise` and `rises_at_next_m`;
`slower_than_best_kernel`. Used by the command `predict`; `report.forecast` shows the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.analysis.blocks import idle_reasons, tile_in_use
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency import op_times
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.op_times import OpEstimate, RememberedTimes, ShapeEstimate, peak_share, total
from quantbench.sweep.axes import Axis, Held, places_of
from quantbench.workload import Gemm


@dataclass(frozen=True)
class PredictedPlace:
    """Predicted ops at one place on the axes: one layer, or a single op.

    estimate: estimates of the ops and their sum, without the logits if there are other ops.
    logits: estimate of the model's logits if the place has other ops as well, else None.
    peak_share: time-weighted share of peak of the ops in `estimate`; None if a peak is unknown.
    worst: op with the smallest share of peak.
    reasons: why the worst op runs below peak.
    """

    axes: dict[str, int]
    estimate: ShapeEstimate
    logits: ShapeEstimate | None
    peak_share: float | None
    worst: OpEstimate
    reasons: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        return (*self.estimate.ops, *(() if self.logits is None else self.logits.ops))


@dataclass(frozen=True)
class Forecast:
    """Predictions over a grid of axes.

    rows: predicted places, in axis order.
    impossible: one error message per place that cannot exist and was skipped.
    """

    rows: tuple[PredictedPlace, ...]
    impossible: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        return tuple(op for row in self.rows for op in row.ops)

    @property
    def notes(self) -> tuple[str, ...]:
        """Distinct notes on the basis of the predictions."""
        notes = dict.fromkeys(op.estimate.note for op in self.ops if op.estimate.note)
        if any(op.estimate.unmeasured == op_times.UNALIGNED_NOTE for op in self.ops):
            notes[op_times.UNALIGNED_NOTE] = None
        return tuple(notes)


def forecast(axes: Sequence[Axis], held: Held, times: RememberedTimes) -> Forecast:
    """Predicts every place of a grid.

    axes: axes with `@edges` already expanded.
    held: values of all other dimensions, defaults filled in.
    times: source of op times for the device.
    Raises InputError if no place is left.
    """
    found, impossible = places_of(axes, held, "predict", modelled=True)
    places = [(at, ops) for at, ops in found if ops]
    if not places:
        why = f" ({impossible[0].removeprefix('predict: ')})" if impossible else ""
        raise InputError("predict", f"no place is left to predict{why}", "axes and ops that have places in common")
    times.ask(op.workload for _, ops in places for op in ops)
    correlation = op_times.correlation_of(times)
    estimates = ((at, [OpEstimate(op, times.estimate(op.workload)) for op in ops]) for at, ops in places)
    return Forecast(tuple(_row(at, ops, times.device, correlation) for at, ops in estimates), impossible)


def _row(axes: dict[str, int], found: list[OpEstimate], spec: DeviceSpec, correlation: float) -> PredictedPlace:
    logits = [o for o in found if o.op.name == "logits"]
    ops = [o for o in found if o.op.name != "logits"] or logits
    shares = [peak_share(o.op.workload, o.estimate.latency_us, spec) for o in ops]
    estimate = total(ops, correlation)
    known = [share * o.total_us for share, o in zip(shares, ops, strict=True) if share is not None]
    worst = min(zip(shares, ops, strict=True), key=lambda pair: (pair[0] is None, pair[0] or 0.0, pair[1].op.label))[1]
    work = worst.op.workload
    used = tile_in_use(spec, work.dtype, worst.estimate.launch)
    reasons = idle_reasons(work, spec, used, peak_share(work, worst.estimate.latency_us, spec))
    of_logits = total(logits, correlation) if logits and ops is not logits else None
    share = sum(known) / estimate.latency_us if len(known) == len(ops) else None
    return PredictedPlace(axes, estimate, of_logits, share, worst, tuple(reason.words for reason in reasons))


@dataclass(frozen=True)
class Rise:
    """Predicted relative rise of the time from m to m + 1 (0.3: 30 % longer), with its 90 % interval."""

    share: float
    low: float
    high: float


def rises_at_next_m(rows: Sequence[PredictedPlace], model: GemmModel) -> tuple[Rise | None, ...]:
    """Returns for each row the predicted rise from m to m + 1.

    The errors of both times count as independent: on six public tables, learned from 200 rows, 90 % of the rises then
    lie within 0.7 to 1.1 half-widths of the interval.
    None for rows other than a single unbatched GEMM along m, and for all rows if the model has no training rows.
    """
    asked = [(i, work) for i, row in enumerate(rows) if model.rows and (work := _along_m(row)) is not None]
    found: list[Rise | None] = [None] * len(rows)
    if not asked:
        return tuple(found)
    m, n, k = (np.array([getattr(work, side) for _, work in asked]) for side in "mnk")
    layouts = [work.layout for _, work in asked]
    before, after = (model.predict(size, n, k, layout=layouts) for size in (m, m + 1))
    ratio = after.latency_us / before.latency_us
    factor = np.exp(np.hypot(*(np.log(one.high_us / one.latency_us) for one in (before, after))))
    for (i, _), *ratios in zip(asked, ratio, ratio / factor, ratio * factor, strict=True):
        found[i] = Rise(*(float(one) - 1.0 for one in ratios))
    return tuple(found)


def slower_than_best_kernel(rows: Sequence[PredictedPlace], model: GemmModel) -> tuple[float, ...]:
    """Returns for each row of a single GEMM by how much (a share of the time) the model's rows of such products were
    slower than the fastest kernel of its cost model, as another kernel or a lower clock makes them; 0 for other rows.
    """
    works = [row.ops[0].op.workload for row in rows if len(row.ops) == 1 and model.rows]
    gemms = [work for work in works if isinstance(work, Gemm)]
    if len(gemms) < len(rows):  # the ops of a grid's places are the same
        return (0.0,) * len(rows)
    sizes = ([getattr(one, side) for one in gemms] for side in "mnk")
    batch = [min(one.batch, LARGEST_SIDE // one.m) for one in gemms]
    found = model.predict(*sizes, batch=batch, layout=[one.layout for one in gemms])
    assert found.beyond is not None
    return tuple(found.beyond.clip(0.0).tolist())


def _along_m(row: PredictedPlace) -> Gemm | None:
    """Returns the only GEMM of a row along m, None for other rows and at the largest m."""
    work = row.estimate.ops[0].op.workload
    if "m" not in row.axes or len(row.estimate.ops) != 1 or not isinstance(work, Gemm) or work.batch != 1:
        return None
    return work if work.m < LARGEST_SIDE else None
