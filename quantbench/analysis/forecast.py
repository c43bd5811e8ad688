"""A sweep that is predicted instead of measured: `forecast` predicts a grid of axes. Called by `predict`.

`cliff_odds` adds the probability that one row more costs a cliff, where that probability is calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from quantbench.analysis.blocks import idle_reasons, tile_in_use
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.gemm.cliffs import cliff_probability
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.op_times import (
    UNALIGNED_NOTE,
    OpEstimate,
    RememberedTimes,
    ShapeEstimate,
    correlation_of,
    peak_share,
    total,
)
from quantbench.sweep.axes import Axis, Held, ops_at
from quantbench.workload import Gemm, Op


@dataclass(frozen=True)
class ForecastRow:
    """The ops at one place on the axes: one layer, or one product.

    estimate: the sum of the ops, and its parts.
    logits: logits of the whole model, apart, where the place has other ops as well.
    peak_share: of the sum, weighted by time; None where a peak is not known.
    worst: the op with the smallest share of peak.
    reasons: why the worst op runs below peak, in words.
    """

    axes: dict[str, int]
    estimate: ShapeEstimate
    logits: ShapeEstimate | None
    peak_share: float | None
    worst: OpEstimate
    reasons: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """The ops of the sum, then the logits."""
        return (*self.estimate.ops, *(() if self.logits is None else self.logits.ops))


@dataclass(frozen=True)
class Forecast:
    """rows: in the order of the axes.
    impossible: reasons of the places that were left out because they cannot exist.
    """

    rows: tuple[ForecastRow, ...]
    impossible: tuple[str, ...]

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """Every op of every row, logits among them."""
        return tuple(op for row in self.rows for op in row.ops)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the predictions are based on, each once."""
        notes = dict.fromkeys(op.estimate.note for op in self.ops if op.estimate.note)
        if any(op.estimate.unmeasured == UNALIGNED_NOTE for op in self.ops):
            notes[UNALIGNED_NOTE] = None
        return tuple(notes)


def forecast(axes: Sequence[Axis], held: Held, times: RememberedTimes, *, skip_impossible: bool) -> Forecast:
    """Predict every place of a grid.

    axes: with their edges already added.
    held: with its defaults filled in.
    times: of the GPU, as `plan` and `advise` ask them.
    Raises InputError for a place that cannot exist, unless skip_impossible, and when no place is left.
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
    times.ask(op.workload for _, ops in places for op in ops)
    correlation = correlation_of(times)
    rows = [
        _row(at, [OpEstimate(op, times.estimate(op.workload)) for op in ops], times.device, correlation)
        for at, ops in places
    ]
    return Forecast(tuple(rows), tuple(impossible))


def _reasons(op: OpEstimate, spec: DeviceSpec) -> tuple[str, ...]:
    work = op.op.workload
    used = tile_in_use(spec, work.dtype, op.estimate.launch)
    found = idle_reasons(work, spec, used, peak_share(work, op.estimate.latency_us, spec))
    return tuple(reason.words for reason in found)


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


# What `latency.gemm.cliffs` is calibrated on: edges of tiles in m, of products that are no slivers.
_LEAST_M, _EDGE, _LEAST_NK = 128, 32, 1024


def cliff_odds(rows: Sequence[ForecastRow], model: GemmModel) -> tuple[float | None, ...]:
    """Probability, 0 to 1, that m + 1 takes over 10 % longer than m, for each row.

    None for rows that are not a single plain product, for sizes outside the calibration (m a multiple of 32 from 128
    on, n
    and k from 1024 on), and for all rows of a model without measured rows.
    """
    asked = [(i, work) for i, row in enumerate(rows) if model.rows and (work := _plain(row)) is not None]
    odds: list[float | None] = [None] * len(rows)
    if asked:
        m, n, k = zip(*((work.m, work.n, work.k) for _, work in asked), strict=True)
        for (i, _), probability in zip(asked, cliff_probability(model, m, n, k), strict=True):
            odds[i] = float(probability)
    return tuple(odds)


def _plain(row: ForecastRow) -> Gemm | None:
    """The only product of a row, if the probability is calibrated for it."""
    if "m" not in row.axes or len(row.estimate.ops) != 1:
        return None
    work = row.estimate.ops[0].op.workload
    if not isinstance(work, Gemm) or work.batch != 1:
        return None
    return work if work.m >= _LEAST_M and work.m % _EDGE == 0 and min(work.n, work.k) >= _LEAST_NK else None
