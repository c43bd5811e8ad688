"""A sweep that is predicted instead of measured: the same axes, a model's answer at each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from quantbench.analysis.blocks import tile_in_use
from quantbench.analysis.explain import idle_reasons
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import OpEstimate, ShapeEstimate, total
from quantbench.latency.roofline import peak_share
from quantbench.sweep.axes import Axis
from quantbench.sweep.shapes import Held, ops_at
from quantbench.workload import Op


@dataclass(frozen=True)
class ForecastRow:
    """The ops at one place on the axes: one layer, or one product. estimate: their sum and its parts. logits: those of
    the whole model, apart, where the place has other ops as well. worst: the op with the smallest share of peak;
    peak_share: of the sum, weighted by time (None where a peak is not known)."""

    axes: dict[str, int]
    estimate: ShapeEstimate
    logits: ShapeEstimate | None
    peak_share: float | None
    worst: OpEstimate
    reasons: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """The ops of the sum, and the logits."""
        return (*self.estimate.ops, *(() if self.logits is None else self.logits.ops))


@dataclass(frozen=True)
class Forecast:
    """Rows in the order of the axes. impossible: places that cannot be, with the reason, left out."""

    rows: tuple[ForecastRow, ...]
    impossible: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """Every op of every row, logits among them."""
        return tuple(op for row in self.rows for op in row.ops)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the models, each once."""
        return tuple(dict.fromkeys(op.estimate.note for op in self.ops if op.estimate.note))


def forecast(axes: Sequence[Axis], held: Held, model: ModelTimes, *, skip_impossible: bool) -> Forecast:
    """Predict every place of a grid. `axes` have their edges added already, `held` its defaults filled in.

    Raises InputError for a place that cannot be, unless skip_impossible, and when none is left.
    """
    places: list[tuple[dict[str, int], tuple[Op, ...]]] = []
    impossible: list[str] = []
    for values in product(*(axis.values for axis in axes)):
        try:
            ops = ops_at(tuple(axes), values, held, "predict")
        except InputError as error:
            if not skip_impossible:
                raise
            impossible.append(str(error))
            continue
        if ops:
            places.append(({axis.field: value for axis, value in zip(axes, values, strict=True)}, ops))
    if not places:
        raise InputError("predict", "no place is left to predict", "axes and ops that have places in common")
    answers = iter(model.predict_ops([op for _, ops in places for op in ops], softmax=held.softmax))
    rows = [_row(at, [next(answers) for _ in ops], model.device, model.correlation(held.dtype)) for at, ops in places]
    return Forecast(tuple(rows), tuple(impossible))


def _reasons(op: OpEstimate, spec: DeviceSpec) -> tuple[str, ...]:
    work = op.op.workload
    used = tile_in_use(spec, work.dtype, op.estimate.launch)
    return idle_reasons(work, spec, used, peak_share(work, op.estimate.latency_us, spec))


def _row(axes: dict[str, int], found: list[OpEstimate], spec: DeviceSpec, correlation: float) -> ForecastRow:
    logits = [o for o in found if o.op.name == "logits"]
    ops = [o for o in found if o.op.name != "logits"] or logits
    shares = [peak_share(o.op.workload, o.estimate.latency_us, spec) for o in ops]
    estimate = total(ops, correlation)
    known = [share * o.total_us for share, o in zip(shares, ops, strict=True) if share is not None]
    worst = min(zip(shares, ops, strict=True), key=lambda pair: (pair[0] is None, pair[0] or 0.0, pair[1].op.label))[1]
    return ForecastRow(
        axes=axes,
        estimate=estimate,
        logits=total(logits, correlation) if logits and ops is not logits else None,
        peak_share=sum(known) / estimate.latency_us if len(known) == len(ops) else None,
        worst=worst,
        reasons=_reasons(worst, spec),
    )
