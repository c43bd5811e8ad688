"""Predicts each row of a table of training runs, and compares it with the row's measured values.

`predict_rows` returns one `RowResult` per row, and `summarize` the errors over all rows.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, nan
from typing import Any

import numpy as np

from quantbench.errors import QuantbenchError
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import Calibrations
from quantbench.planner.constraints import OF_SOFTWARE, strict_violations
from quantbench.planner.formulas import tflops_by_calculator
from quantbench.planner.memory import limit_bytes
from quantbench.planner.predict import Planner, Prediction
from quantbench.planner.rows import SMALLEST_MBS_REASON, Assumption, Case, Given, TableRow, case_of

# Micro-batch sizes to try for a row that does not give one.
_MICRO_BATCHES = tuple(2**power for power in range(7))
# Reason that is recorded for the micro-batch size that was found by trying.
_TUNED = "not stated: the fastest that fits"

# Values of the prediction's JSON, and measured fields of the row, that a row's JSON contains.
_SHOWN = (
    "sec_per_it",
    "sec_per_it_low",
    "sec_per_it_high",
    "hardware_tflops",
    "mem_gb",
    "fits",
    "bubble_share",
    "bound",
)
_MEASURED = ("sec_per_it", "tflops", "mem_gb", "status")


@dataclass(frozen=True)
class RowResult:
    """Row of a table of training runs, with its prediction.

    case: job and layout of the row; None if the row's values are incomplete or invalid.
    prediction: predicted time and memory; None if there is no case, or if its layout cannot run.
    hardware_tflops: predicted TFLOP/s per GPU by the formula that the row names
        (`formulas.tflops_by_calculator`), or by `formulas.hardware_flops` for another formula.
    problem: why the row has no prediction; "" if it has one.
    """

    row: TableRow
    case: Case | None = None
    prediction: Prediction | None = None
    hardware_tflops: float | None = None
    problem: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the predicted time: predicted / measured - 1.

        None for a duplicate row, and if the predicted or the measured time is missing.
        """
        if self.prediction is None or self.row.sec_per_it is None or self._repeats:
            return None
        return self.prediction.sec_per_it / self.row.sec_per_it - 1

    @property
    def ran(self) -> bool:
        """Whether the run succeeded. It is False if the run failed or ran out of memory."""
        return self.row.status not in ("oom", "fail")

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory: predicted / measured - 1.

        None for a duplicate row, for a run that did not succeed, and if the predicted or the
        measured memory is missing.
        """
        if self.prediction is None or self.row.mem_gb is None or self._repeats or not self.ran:
            return None
        return self.prediction.memory.total_gib / self.row.mem_gb - 1

    @property
    def _repeats(self) -> bool:
        """Whether the row is a duplicate of another row of the table."""
        return self.row.duplicate_of_line is not None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object.

        Times are in seconds, memory in GiB, and errors in percent.
        """
        row = self.row
        known = {} if self.prediction is None else self.prediction.to_json()
        known["hardware_tflops"] = self.hardware_tflops
        data: dict[str, Any] = {
            "row_id": row.row_id,
            **{name: known.get(name) for name in _SHOWN},
            "problem": self.problem,
            "measured": {name: getattr(row, name) for name in _MEASURED},
        }
        for name in ("error", "memory_error"):
            error = getattr(self, name)
            data[f"{name}_pct"] = None if error is None else 100 * error
        data["duplicate_of_line"] = row.duplicate_of_line
        data["assumed"] = [asdict(one) for one in self.case.assumed] if self.case else []
        return data


@dataclass(frozen=True)
class Summary:
    """Prediction errors over the rows of a table. An error is nan if no row has it.

    rows: number of rows with a known time error.
    mape: mean absolute time error in percent.
    median: median absolute time error in percent.
    bias: mean time error in percent; positive if predictions are too slow.
    spearman: rank correlation of predicted and measured times; nan for fewer than 3 rows, and if
        all predicted or all measured times are equal.
    memory_rows: number of rows with a known memory error.
    memory_mape: mean absolute memory error in percent.
    oom_rows: number of predicted rows whose run ran out of memory.
    oom_seen: number of `oom_rows` that are also predicted to exceed the usable memory.
    worst_overrun: largest value of predicted memory / usable memory - 1 over the successful runs;
        negative if all of these runs are predicted to fit.
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


def predict_rows(
    rows: Sequence[TableRow], times: TimesOf, calibrations: Calibrations, given: Given | None = None
) -> list[RowResult]:
    """Predicts each row, in order. If a row has no prediction, its `problem` is the reason.

    A row without a micro-batch size gets the fastest size that fits in memory, because published
    runs are tuned. Layouts may break framework-specific rules (`constraints.OF_SOFTWARE`), because
    the rows describe real runs.

    times: function from a GPU to its op times.
    calibrations: factors of training for all sites and stacks.
    given: values for the rows' empty cells; None for usual values.
    """
    planners: dict[object, Planner] = {}
    results = []
    for row in rows:
        try:
            choices = _choices(case_of(row, given))
        except QuantbenchError as error:
            results.append(RowResult(row, problem=str(error)))
            continue
        found = [predict_case(row, case, times, calibrations, planners) for case in choices]
        # If no case fits, all times are inf, and `min` returns the first case: the smallest size.
        results.append(min(found, key=_time_if_it_fits))
    return results


def predict_case(
    row: TableRow,
    case: Case,
    times: TimesOf,
    calibrations: Calibrations,
    planners: dict[object, Planner],
) -> RowResult:
    """Predicts the job and layout of one row.

    If the layout breaks a strict rule that is not framework-specific, the result has no prediction,
    and its `problem` describes the broken rules.

    case: job and layout of the row.
    times: function from a GPU to its op times.
    calibrations: factors of training for all sites and stacks.
    planners: cache of planners by job (`Job.key`), so that equal jobs share layer times. A planner
        that is missing is added.
    """
    job = case.job
    broken = strict_violations(job, case.layout)
    problem = "; ".join(str(one) for one in broken if one.name not in OF_SOFTWARE)
    if problem:
        return RowResult(row, case, problem=problem)
    if job.key not in planners:
        factors = calibrations.of(job.cluster, job.stack)
        planners[job.key] = Planner(job, times(job.cluster.device), factors)
    found = planners[job.key].predict(case.layout)
    tflops = tflops_by_calculator(
        job.shape,
        gbs=job.gbs,
        tp=case.layout.tp,
        sec_per_it=found.sec_per_it,
        gpus=job.gpus,
        size_b=row.size_b,
    )
    calculator = row.calculator
    if "simple" in calculator:
        calculator = "simple"
    return RowResult(row, case, found, tflops.get(calculator, found.hardware_tflops))


def _choices(case: Case) -> list[Case]:
    """Returns one case per micro-batch size to try; only `case` if the row gives the size."""
    unknown = Assumption("mbs", 1, SMALLEST_MBS_REASON)
    if unknown not in case.assumed:
        return [case]
    each = case.job.gbs // case.layout.dp
    others = tuple(one for one in case.assumed if one != unknown)
    found = []
    for mbs in _MICRO_BATCHES:
        if mbs == 1 or each % mbs == 0:
            assumed = (*others, Assumption("mbs", mbs, _TUNED))
            found.append(Case(case.job, replace(case.layout, mbs=mbs), assumed))
    return found


def _time_if_it_fits(result: RowResult) -> float:
    """Returns the predicted time per iteration in s; inf if the row has none or does not fit."""
    found = result.prediction
    return found.sec_per_it if found and found.fits else inf


def summarize(results: Sequence[RowResult]) -> Summary:
    """Computes the errors of predicted times and memory over the rows of a table."""
    from scipy.stats import spearmanr

    counted = [r for r in results if r.error is not None and r.prediction]
    pairs = np.array([(r.prediction.sec_per_it, r.row.sec_per_it) for r in counted if r.prediction])
    # Spearman's correlation is undefined if all predicted or all measured times are equal.
    varied = len(pairs) >= 3 and np.ptp(pairs, axis=0).all()
    errors = np.array([r.error for r in counted] or [nan])
    memory = [abs(r.memory_error) for r in results if r.memory_error is not None]
    overruns = []
    oom = []
    for r in results:
        if r.prediction and r.ran and r.case:
            overruns.append(r.prediction.memory.total / limit_bytes(r.case.job) - 1)
        elif r.prediction and r.row.status == "oom":
            oom.append(not r.prediction.fits)
    return Summary(
        rows=len(counted),
        mape=float(100 * np.abs(errors).mean()),
        median=float(100 * np.median(np.abs(errors))),
        bias=float(100 * errors.mean()),
        spearman=float(spearmanr(pairs).statistic) if varied else nan,
        memory_rows=len(memory),
        memory_mape=float(100 * np.mean(memory or [nan])),
        oom_rows=len(oom),
        oom_seen=sum(oom),
        worst_overrun=max(overruns, default=nan),
    )
