"""How likely one row more costs a cliff, at the places of a forecast for which the probabilities are calibrated."""

from __future__ import annotations

from collections.abc import Sequence

from quantbench.analysis.forecast import ForecastRow
from quantbench.latency.gemm.cliffs import cliff_probability
from quantbench.latency.gemm.model import GemmModel
from quantbench.workload import Gemm

# What `latency.gemm.cliffs` is calibrated on: edges of tiles in m, of products that are no slivers.
_LEAST_M, _EDGE, _LEAST_NK = 128, 32, 1024


def cliff_odds(rows: Sequence[ForecastRow], model: GemmModel) -> tuple[float | None, ...]:
    """The probability that m + 1 takes over 10 % longer than m, 0 to 1, for each row. None for what is no single plain
    product, for sizes off the calibration (m a multiple of 32 from 128 on, n and k from 1024 on), and for all rows of a
    model without measured rows."""
    asked = [(i, work) for i, row in enumerate(rows) if model.rows and (work := _plain(row)) is not None]
    odds: list[float | None] = [None] * len(rows)
    if asked:
        m, n, k = zip(*((work.m, work.n, work.k) for _, work in asked), strict=True)
        for (i, _), probability in zip(asked, cliff_probability(model, m, n, k), strict=True):
            odds[i] = float(probability)
    return tuple(odds)


def _plain(row: ForecastRow) -> Gemm | None:
    """The only product of a row, where its odds are calibrated."""
    if "m" not in row.axes or len(row.estimate.ops) != 1:
        return None
    work = row.estimate.ops[0].op.workload
    if not isinstance(work, Gemm) or work.batch != 1:
        return None
    return work if work.m >= _LEAST_M and work.m % _EDGE == 0 and min(work.n, work.k) >= _LEAST_NK else None
