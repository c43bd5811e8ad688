"""Predicting every row of a table of layouts, and holding the predictions against what the rows say was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantbench.errors import QuantbenchError
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import OF_SOFTWARE, Violation
from quantbench.planner.context import NOT_TOLD, Given, case_of, known_of, uncounted
from quantbench.planner.formulas import CALCULATORS, simple_tflops
from quantbench.planner.layout import Assumption, Case
from quantbench.planner.memory import GIB, limit_bytes
from quantbench.planner.predict import Prediction, predict_cases
from quantbench.planner.table import TableRow

#: errors beyond this are shown with what is known about the row
WORTH_A_WORD = 0.08


# Micro-batches that are tried where a row tells none.
_MICRO_BATCHES = tuple(2**power for power in range(7))
_TUNED = "not told: the fastest that fits"


@dataclass(frozen=True)
class RowResult:
    """A row and what is predicted of it. prediction: None where `problem` says why. tflops: as the row's own
    calculator states them, for the predicted time."""

    row: TableRow
    case: Case | None = None
    prediction: Prediction | None = None
    tflops: float | None = None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured time, minus 1, for rows that count."""
        if self.prediction is None or self.row.sec_per_it is None or uncounted(self.row) is not None:
            return None
        return self.prediction.sec_per_it / self.row.sec_per_it - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over stated memory, minus 1, for rows that count and ran."""
        counted = self.row.duplicate_of_line is None and self.row.status not in ("oom", "fail")
        if self.prediction is None or self.row.mem_gb is None or not counted:
            return None
        return self.prediction.memory.total_gib / self.row.mem_gb - 1

    def to_json(self) -> dict[str, Any]:
        """Plain numbers; times in seconds, memory in GiB, errors in percent."""
        p = self.prediction
        data: dict[str, Any] = {"row_id": self.row.row_id, "line": self.row.line}
        data["sec_per_it"] = None if p is None else p.sec_per_it
        data["sec_per_it_low"] = None if p is None else p.iteration.sec.low
        data["sec_per_it_high"] = None if p is None else p.iteration.sec.high
        data["tflops"] = self.tflops
        data["mem_gb"] = None if p is None else p.memory.total_gib
        data["fits"] = None if p is None else p.fits
        data["bubble_share"] = None if p is None else p.iteration.bubble_share
        data["bound"] = None if p is None else p.iteration.bound
        data["problem"] = self.problem
        data["measured"] = {
            "sec_per_it": self.row.sec_per_it, "tflops": self.row.tflops, "mem_gb": self.row.mem_gb,
            "status": self.row.status,
        }  # fmt: skip
        data["error_pct"] = None if self.error is None else 100 * self.error
        data["memory_error_pct"] = None if self.memory_error is None else 100 * self.memory_error
        data["uncounted"] = uncounted(self.row)
        assumed = () if self.case is None else self.case.assumed
        data["assumed"] = [{"name": a.name, "value": a.value, "why": a.why} for a in assumed]
        return data


@dataclass(frozen=True)
class Summary:
    """Errors over the rows that count. mape, median, memory_mape: in percent; spearman: rank correlation of time (nan
    below 3 rows). oom_seen: rows that ran out of memory and were predicted to, of oom_rows. worst_overrun: the most
    that a row that ran was predicted above the limit, as a share of it."""

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


def predict_rows(
    rows: Sequence[TableRow], times: TimesOf, calibrations: Calibrations, given: Given | None = None
) -> list[RowResult]:
    """Every row in order; what cannot be predicted says why instead.

    Rows of a table ran somewhere: rules that are one framework's and not arithmetic's keep none of them from being
    predicted. And they were tuned: a micro-batch size that nobody tells is the fastest that fits."""
    cases: list[Case | str] = []
    for row in rows:
        try:
            cases.append(case_of(row, given))
        except QuantbenchError as error:
            cases.append(str(error))
    choices = [_choices(case) for case in cases if isinstance(case, Case)]
    flat = [case for some in choices for case in some]
    found = iter(predict_cases(flat, times, calibrations, forgiven=OF_SOFTWARE))
    tuned = iter([_fastest([(case, next(found)) for case in some]) for some in choices])
    results = []
    for row, given_case in zip(rows, cases, strict=True):
        if isinstance(given_case, str):
            results.append(RowResult(row, problem=given_case))
            continue
        case, prediction = next(tuned)
        if isinstance(prediction, Prediction):
            results.append(RowResult(row, case, prediction, _tflops(row, case, prediction)))
        else:
            results.append(RowResult(row, case, problem="; ".join(map(str, prediction))))
    return results


def _choices(case: Case) -> list[Case]:
    """The case with every micro-batch size that it may have had; itself alone where that is known."""
    unknown = next((a for a in case.assumed if a.name == "mbs" and a.why == NOT_TOLD), None)
    if unknown is None:
        return [case]
    each = case.job.gbs // case.layout.dp
    sizes = [mbs for mbs in _MICRO_BATCHES if mbs == 1 or each % mbs == 0]
    others = tuple(a for a in case.assumed if a is not unknown)
    return [
        replace(case, layout=replace(case.layout, mbs=mbs), assumed=(*others, Assumption("mbs", mbs, _TUNED)))
        for mbs in sizes
    ]


def _fastest(
    found: Sequence[tuple[Case, Prediction | tuple[Violation, ...]]],
) -> tuple[Case, Prediction | tuple[Violation, ...]]:
    """The fastest that fits; where none does the first."""
    fitting = [(p.sec_per_it, n) for n, (_, p) in enumerate(found) if isinstance(p, Prediction) and p.fits]
    return found[min(fitting)[1] if fitting else 0]


def summarize(results: Sequence[RowResult]) -> Summary:
    """Errors over all rows that count."""
    errors = np.array([r.error for r in results if r.error is not None])
    memory = np.abs([r.memory_error for r in results if r.memory_error is not None])
    oom = [r for r in results if r.row.status == "oom" and r.prediction is not None]
    ran = [
        r for r in results if r.row.status not in ("oom", "fail") and r.prediction is not None and r.case is not None
    ]
    overruns = [r.prediction.memory.total / limit_bytes(r.case.job) - 1 for r in ran if r.prediction and r.case]
    nothing = float("nan")
    return Summary(
        rows=len(errors),
        mape=float(100 * np.abs(errors).mean()) if len(errors) else nothing,
        median=float(100 * np.median(np.abs(errors))) if len(errors) else nothing,
        bias=float(100 * errors.mean()) if len(errors) else nothing,
        spearman=_spearman(results),
        memory_rows=len(memory),
        memory_mape=float(100 * memory.mean()) if len(memory) else nothing,
        oom_rows=len(oom),
        oom_seen=sum(not r.prediction.fits for r in oom if r.prediction is not None),
        worst_overrun=max(overruns, default=nothing),
    )


def _spearman(results: Sequence[RowResult]) -> float:
    from scipy.stats import spearmanr

    pairs = [(r.prediction.sec_per_it, r.row.sec_per_it) for r in results if r.error is not None and r.prediction]
    if len(pairs) < 3:
        return float("nan")
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


def _tflops(row: TableRow, case: Case, prediction: Prediction) -> float:
    """The predicted time as the row's own calculator states it; Megatron's where the row names none."""
    shape, job = case.job.shape, case.job
    if row.calculator == "old" and CALCULATORS["old"].objection(shape) is None:
        return CALCULATORS["old"].tflops(
            shape, gbs=job.gbs, tp=case.layout.tp, sec_per_it=prediction.sec_per_it, gpus=job.gpus
        )
    if "simple" in row.calculator and row.size_b is not None:
        return simple_tflops(
            size_b=row.size_b, seq=shape.seq, gbs=job.gbs, sec_per_it=prediction.sec_per_it, gpus=job.gpus
        )
    return prediction.tflops


def misses(results: Sequence[RowResult]) -> list[tuple[RowResult, str]]:
    """Rows missed by more than 8 %, the worst first, with what is known about them."""
    beyond = [r for r in results if r.error is not None and abs(r.error) > WORTH_A_WORD]
    beyond.sort(key=lambda r: -abs(r.error or 0.0))
    return [(r, known_of(r.row) or "nothing is known that would explain it") for r in beyond]


def gib_limit(case: Case) -> float:
    """What a process can have of the GPU's memory, in GiB."""
    return limit_bytes(case.job) / GIB
