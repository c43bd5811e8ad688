"""Predicts the rows of a table of layouts and compares the predictions with the measured values."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from quantbench.errors import QuantbenchError
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import OF_SOFTWARE, Violation, strict_violations
from quantbench.planner.formulas import tflops_by_calculator
from quantbench.planner.memory import limit_bytes
from quantbench.planner.predict import Planner, Prediction
from quantbench.planner.rows import NOT_TOLD, Assumption, Case, Given, TableRow, case_of, known_of

#: rows with larger errors are listed with their notes
WORTH_A_WORD = 0.08
# Micro-batch sizes to try for a row without one.
_MICRO_BATCHES = tuple(2**power for power in range(7))
_TUNED = "not stated: the fastest that fits"

# Fields of the prediction's JSON that a row's JSON includes.
_SHOWN = (
    "sec_per_it", "sec_per_it_low", "sec_per_it_high", "hardware_tflops", "mem_gb", "fits", "bubble_share", "bound",
)  # fmt: skip

Outcome = Prediction | tuple[Violation, ...]


@dataclass(frozen=True)
class RowResult:
    """Row of a table and its prediction.

    case: job and layout of the row; None if they could not be built.
    prediction: prediction for the case; None if `problem` has the reason.
    hardware_tflops: predicted TFLOP/s per GPU with recomputation, by the row's calculator.
    """

    row: TableRow
    case: Case | None = None
    prediction: Prediction | None = None
    hardware_tflops: float | None = None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the predicted time; None for rows that are not counted."""
        if (
            self.prediction is None
            or self.row.sec_per_it is None
            or self.row.duplicate_of_line is not None
        ):
            return None
        return self.prediction.sec_per_it / self.row.sec_per_it - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory; None for duplicates and rows that did not run."""
        counted = self.row.duplicate_of_line is None and self.row.status not in ("oom", "fail")
        if self.prediction is None or self.row.mem_gb is None or not counted:
            return None
        return self.prediction.memory.total_gib / self.row.mem_gb - 1

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object: times in seconds, memory in GiB, errors in
        percent.
        """
        row = self.row
        known = (
            {}
            if self.prediction is None
            else {**self.prediction.to_json(), "hardware_tflops": self.hardware_tflops}
        )
        errors = {"error_pct": self.error, "memory_error_pct": self.memory_error}
        return {
            "row_id": row.row_id,
            "line": row.line,
            **{name: known.get(name) for name in _SHOWN},
            "problem": self.problem,
            "measured": {
                name: getattr(row, name) for name in ("sec_per_it", "tflops", "mem_gb", "status")
            },
            **{name: None if error is None else 100 * error for name, error in errors.items()},
            "duplicate_of_line": row.duplicate_of_line,
            "assumed": [asdict(a) for a in (self.case.assumed if self.case else ())],
        }


@dataclass(frozen=True)
class Summary:
    """Prediction errors over the counted rows; nan if there are none.

    rows, memory_rows: number of rows with an error of time, of memory.
    mape, median, bias: mean absolute, median absolute and mean error of time, percent.
    memory_mape: percent.
    spearman: rank correlation of predicted and measured time (nan below 3 rows).
    oom_seen: rows predicted to run out of memory, of the oom_rows rows that did.
    worst_overrun: largest excess of predicted memory over the limit in rows that ran, as a share of
        the limit.
    """

    rows: int
    mape: float
    median: float
    bias: float
    spearman: float
    memory_rows: int
    memory_mape: float
    oom_rows: int
    oom_seen: int
    worst_overrun: float


def predict_cases(
    cases: Sequence[Case],
    times: TimesOf,
    calibrations: Calibrations,
    *,
    forgiven: Container[str] = (),
) -> list[Outcome]:
    """Predicts each case, or returns the strict rules it breaks. Equal jobs share their layer
    times.

    forgiven: names of strict rules that a case may break.
    """
    planners: dict[tuple[object, ...], Planner] = {}
    found: list[Outcome] = []
    for case in cases:
        job = case.job
        broken = tuple(
            v for v in strict_violations(job, case.layout) if v.constraint.name not in forgiven
        )
        if broken:
            found.append(broken)
            continue
        if job.key not in planners:
            planners[job.key] = Planner(
                job, times(job.cluster.device), calibrations.of(job.cluster, job.stack)
            )
        found.append(planners[job.key].predict(case.layout))
    return found


def predict_rows(
    rows: Sequence[TableRow], times: TimesOf, calibrations: Calibrations, given: Given | None = None
) -> list[RowResult]:
    """Predicts every row, in order. A row that cannot be predicted has the reason in `problem`.

    Rows may break framework-specific rules (`constraints.OF_SOFTWARE`), because they were run. An
    unknown micro-batch size is taken as the fastest that fits, because published runs are tuned.
    """
    cases: list[Case | str] = []
    for row in rows:
        try:
            cases.append(case_of(row, given))
        except QuantbenchError as error:
            cases.append(str(error))
    choices = [[] if isinstance(case, str) else _choices(case) for case in cases]
    outcomes = iter(
        predict_cases(
            [c for some in choices for c in some], times, calibrations, forgiven=OF_SOFTWARE
        )
    )
    results = []
    for row, problem, some in zip(rows, cases, choices, strict=True):
        if isinstance(problem, str):
            results.append(RowResult(row, problem=problem))
            continue
        case, outcome = _fastest([(choice, next(outcomes)) for choice in some])
        if isinstance(outcome, Prediction):
            results.append(RowResult(row, case, outcome, _tflops(row, case, outcome)))
        else:
            results.append(RowResult(row, case, problem="; ".join(map(str, outcome))))
    return results


def _choices(case: Case) -> list[Case]:
    """Returns the case with every possible micro-batch size, or only itself if the size is
    known.
    """
    unknown = next((a for a in case.assumed if a.name == "mbs" and a.why == NOT_TOLD), None)
    if unknown is None:
        return [case]
    each = case.job.gbs // case.layout.dp
    others = tuple(a for a in case.assumed if a is not unknown)
    return [
        replace(
            case,
            layout=replace(case.layout, mbs=mbs),
            assumed=(*others, Assumption("mbs", mbs, _TUNED)),
        )
        for mbs in _MICRO_BATCHES
        if mbs == 1 or each % mbs == 0
    ]


def _fastest(found: Sequence[tuple[Case, Outcome]]) -> tuple[Case, Outcome]:
    # the first case if none fits
    fitting = [
        (p.sec_per_it, n) for n, (_, p) in enumerate(found) if isinstance(p, Prediction) and p.fits
    ]
    return found[min(fitting)[1] if fitting else 0]


def _tflops(row: TableRow, case: Case, prediction: Prediction) -> float:
    """Returns the predicted TFLOPs by the row's calculator; as in `Prediction` if the row names
    none.
    """
    name = "old" if row.calculator == "old" else ""
    if "simple" in row.calculator and row.size_b is not None:
        name = "simple"
    job, tp = case.job, case.layout.tp
    found = tflops_by_calculator(
        job.shape,
        gbs=job.gbs,
        tp=tp,
        sec_per_it=prediction.sec_per_it,
        gpus=job.gpus,
        size_b=row.size_b,
    )
    return found.get(name, prediction.hardware_tflops)


def summarize(results: Sequence[RowResult]) -> Summary:
    from scipy.stats import spearmanr

    nan = float("nan")
    pairs = [
        (r.prediction.sec_per_it, r.row.sec_per_it)
        for r in results
        if r.error is not None and r.prediction
    ]
    # A constant has no ranks.
    varied = len(pairs) >= 3 and all(len(set(values)) > 1 for values in zip(*pairs, strict=True))
    errors = np.array([r.error for r in results if r.error is not None] or [nan])
    memory = np.abs([r.memory_error for r in results if r.memory_error is not None] or [nan])
    predicted = [(r.row.status, r.prediction, r.case) for r in results if r.prediction and r.case]
    overruns = [
        p.memory.total / limit_bytes(c.job) - 1
        for status, p, c in predicted
        if status not in ("oom", "fail")
    ]
    oom = [p for status, p, _ in predicted if status == "oom"]
    return Summary(
        rows=len(pairs),
        mape=float(100 * np.abs(errors).mean()),
        median=float(100 * np.median(np.abs(errors))),
        bias=float(100 * errors.mean()),
        spearman=float(spearmanr(*zip(*pairs, strict=True)).statistic) if varied else nan,
        memory_rows=sum(r.memory_error is not None for r in results),
        memory_mape=float(100 * memory.mean()),
        oom_rows=len(oom),
        oom_seen=sum(not p.fits for p in oom),
        worst_overrun=max(overruns, default=nan),
    )


def misses(results: Sequence[RowResult]) -> list[tuple[RowResult, str]]:
    """Returns the rows with errors above 8 %, largest first, each with its notes."""
    beyond = [r for r in results if r.error is not None and abs(r.error) > WORTH_A_WORD]
    beyond.sort(key=lambda r: -abs(r.error or 0.0))
    return [(r, known_of(r.row) or "nothing is known that would explain it") for r in beyond]
