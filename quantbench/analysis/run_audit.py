"""Finds the GEMM times of a run that no hardware explains.

Entry points: `audit_run`, which returns `Audited` rows. Used by the command `check` (`--audit`).
`latency.gemm.table_audit` has the rules.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from quantbench.latency.gemm.table_audit import Unexplained, audit
from quantbench.stats import typical_us
from quantbench.store.folder import Run
from quantbench.store.record import Measured, Record
from quantbench.workload import Gemm
from quantbench.workload.ops import LAYOUTS


@dataclass(frozen=True)
class Audited:
    """Unexplained GEMM of a run."""

    gemm: Gemm
    provider: str
    latency_us: float
    found: Unexplained


def audit_run(run: Run) -> tuple[int, list[Audited]]:
    """Returns the number of GEMM times in a run and the unexplained ones, worst first.

    Times of one provider and dtype are compared; dtypes without a peak on the device are left out.
    """
    tables: dict[tuple[str, str], list[tuple[Record, Measured, Gemm]]] = defaultdict(list)
    for record in run.records:
        outcome, work = record.outcome, record.workload
        if record.role == "point" and isinstance(outcome, Measured) and isinstance(work, Gemm):
            tables[record.provider, work.dtype].append((record, outcome, work))
    rows, found = 0, []
    for (provider, dtype), table in tables.items():
        peak = run.info.device.peak(dtype)
        if peak is None:
            continue
        gemms = [gemm for _, _, gemm in table]
        measured = [outcome.measurement for _, outcome, _ in table]
        times = np.array([typical_us(each.samples_us) for each in measured])
        sizes = [np.array([getattr(gemm, size) for gemm in gemms]) for size in ("m", "n", "k", "batch")]
        layout = np.array([LAYOUTS.index(gemm.layout) for gemm in gemms])
        methods = [f"{each.mode}, {each.cache} cache" for each in measured]
        rows += len(table)
        for one in audit(sizes, times, peak * 1e6, group=layout, methods=methods):
            found.append(Audited(gemms[one.row], provider, float(times[one.row]), one))
    return rows, sorted(found, key=lambda each: -each.found.ratio)
