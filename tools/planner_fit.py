"""Fits the planner's constants to a table of layouts and writes quantbench/planner/planner.json:
`python -m tools.planner_fit tests/data/bloom_tables.csv --elsewhere tests/data/published_layouts.csv --before 02-25`.

Times: fits four constants by robust (soft L1) least squares of log errors, over the timed rows dated before `--before`.
Memory: fits two constants likewise, over the rows of those days with a stated memory that is not noted as wrong. Later
rows are not used.

Published runs of other sites (`--elsewhere`) are not fitted; the 90 % quantile of their errors is the interval of sites
without fitted constants. docs/planning.md explains why GEMM times have no factor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import quantbench.planner
from quantbench.errors import InputError
from quantbench.latency.interconnect import same_site
from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import MEMORY_RANGES, RANGES, Calibration, Calibrations
from quantbench.planner.constraints import is_possible
from quantbench.planner.memory import memory
from quantbench.planner.predict import Prediction
from quantbench.planner.row_results import predict_cases
from quantbench.planner.rows import Case, TableRow, case_of, document_of, read_table, uncounted

FloatArray = npt.NDArray[np.float64]
Rows = Sequence[tuple[TableRow, Case]]

# Repeated runs of one layout differ by this share (rows of the documents that were run twice). Larger errors have a
# linear instead of a squared loss, so that unexplained rows do not dominate the fit.
_NOISE = 0.005
# Coverage of the interval, as in the latency models.
_COVERED = 0.9
#: start of the fits: 5 ms are about 300 launches of 15 µs; half of the network and of the fp32 peak
START = Calibration(1.5, 5.0, 0.5, 0.5, base_gib=4.0, activation_slack=0.1)


def _possible(rows: Sequence[TableRow], gpu: str) -> Rows:
    """Returns the rows whose layouts can run, with their cases. gpu: GPU in the table to select ("": all)."""
    cases = [(row, case_of(row)) for row in rows if not gpu or row.gpu == gpu]
    return [(row, case) for row, case in cases if is_possible(case.job, case.layout)]


def timed_cases(rows: Sequence[TableRow], *, gpu: str = "") -> Rows:
    """Returns the rows with a counted time and a possible layout, with their cases. gpu: GPU to select ("": all)."""
    return _possible([row for row in rows if row.sec_per_it is not None and uncounted(row) is None], gpu)


def _memory_cases(rows: Sequence[TableRow], gpu: str) -> Rows:
    """Returns the rows with a stated memory that is not noted as wrong, with their cases."""
    needed = ("mem_gb", "tp", "pp", "mbs", "gbs")
    stated = [row for row in rows if all(getattr(row, name) is not None for name in needed)]
    return _possible([r for r in stated if not r.source_error.startswith("Mem") and r.duplicate_of_line is None], gpu)


def log_errors(cases: Rows, times: TimesOf, calibration: Calibration) -> FloatArray:
    """Returns ln(predicted / measured) of the seconds per iteration, shape (cases,)."""
    found = predict_cases([case for _, case in cases], times, Calibrations({}, calibration))
    predicted = np.array([p.sec_per_it for p in found if isinstance(p, Prediction)])
    return np.asarray(np.log(predicted) - np.log([row.sec_per_it or np.nan for row, _ in cases]))


def fit_times(cases: Rows, times: TimesOf, start: Calibration = START) -> Calibration:
    """Fits the four constants of the iteration time to `cases`; the others are those of `start`."""
    return _least(lambda found: log_errors(cases, times, found), start, RANGES)


def _fit_memory(cases: Rows, start: Calibration) -> Calibration:
    """Fits the two constants of the memory to `cases`."""

    def errors(found: Calibration) -> FloatArray:
        predicted = [memory(case.job, case.layout, found).total_gib for _, case in cases]
        return np.asarray(np.log(predicted) - np.log([row.mem_gb or np.nan for row, _ in cases]))

    return _least(errors, start, MEMORY_RANGES)


def _least(
    errors: Callable[[Calibration], FloatArray], start: Calibration, ranges: dict[str, tuple[float, float]]
) -> Calibration:
    """Minimizes the errors over the constants in `ranges`."""
    from scipy.optimize import least_squares

    def with_constants(x: FloatArray) -> Calibration:
        values = zip(ranges.items(), np.exp(x), strict=True)
        clipped = {name: float(np.clip(value, low, high)) for (name, (low, high)), value in values}
        return replace(start, **clipped)  # type: ignore[arg-type]

    first = np.log([getattr(start, name) for name in ranges])
    found = least_squares(lambda x: errors(with_constants(x)), first, loss="soft_l1", f_scale=_NOISE, diff_step=1e-4)
    return with_constants(found.x)


def days_left_out(cases: Rows, times: TimesOf) -> dict[str, tuple[int, float]]:
    """Cross-validates by day: returns (rows, mean absolute error in percent) with constants from the other days."""
    found = {}
    for day in sorted({row.date for row, _ in cases}):
        kept, left = ([c for c in cases if (c[0].date == day) == out] for out in (False, True))
        errors = np.expm1(log_errors(left, times, fit_times(kept, times)))
        found[day] = (len(left), float(100 * np.abs(errors).mean()))
    return found


def _scatter(cases: Rows, times: TimesOf, calibration: Calibration) -> float:
    """Returns the 90 % quantile of |ln(predicted / measured)|."""
    return float(np.quantile(np.abs(log_errors(cases, times, calibration)), _COVERED))


def fit(path: Path, elsewhere: Path, before: str, gpu: str, times: TimesOf | None = None) -> Calibrations:
    """Fits all constants to the rows of the table `path` dated before `before`, and computes the scatter of published
    runs of other sites (table `elsewhere`) without fitted constants. gpu: GPU to select."""
    rows = [row for row in read_table(path) if row.date and row.date < before]
    cases = timed_cases(rows, gpu=gpu)
    sites = {case.job.cluster.name for _, case in cases}
    if len(cases) < 2 * len(RANGES) or len(sites) != 1:
        what = f"{len(cases)} timed rows before {before} of {len(sites)} clusters"
        raise InputError("planner_fit", what, f"at least {2 * len(RANGES)} rows of one cluster")
    source = times or BestTimes()
    found = _fit_memory(_memory_cases(rows, gpu), fit_times(cases, source))
    found = replace(found, scatter=_scatter(cases, source, found))
    command = f"python -m tools.planner_fit {path.name} --elsewhere {elsewhere.name} --before {before} --gpu {gpu}"
    provenance: dict[str, Any] = {
        "script": command,
        "table": _file(path),
        "documents": sorted({document_of(row) for row, _ in cases}),
        "fitted": [*RANGES, *MEMORY_RANGES],
        "rows_fitted": [row.row_id for row, _ in cases],
        "op_times": source(cases[0][1].job.cluster.device).note,
    }
    neutral = replace(found, tensor_factor=1.0, layer_overhead_ms=0.0, data_parallel_share=1.0)
    published = timed_cases(read_table(elsewhere))
    wide, (site,) = _scatter(published, source, neutral), sites
    rule = (
        "nothing fitted: collectives as alone, launches hidden, the network at its rate; unaligned_share, base_gib and "
        f"activation_slack as at {site}; scatter that of {len(published)} published runs"
    )
    neutral = replace(neutral, scatter=wide, provenance={"rule": rule, "published": _file(elsewhere)})
    rule = f"as at {site}: the same centre and software, nothing fitted to its own rows"
    kin = {name: replace(found, scatter=wide, provenance={"rule": rule}) for name in same_site(site)}
    return Calibrations({site: replace(found, provenance=provenance), **kin}, neutral)


def _file(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def main() -> None:
    """Fits the constants and writes planner.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--elsewhere", type=Path, help="published runs of other sites, for intervals")
    parser.add_argument("--before", default="02-25", help="rows dated from this day on are kept for the test")
    parser.add_argument("--gpu", default="A100-80GB", help="only rows of this GPU")
    parser.add_argument("--days", action="store_true", help="write nothing: each day's error when it is left out")
    arguments = parser.parse_args()
    if arguments.days:
        rows = [row for row in read_table(arguments.table) if row.date and row.date < arguments.before]
        for day, (count, error) in days_left_out(timed_cases(rows, gpu=arguments.gpu), BestTimes()).items():
            print(f"{day}: {count} rows, {error:.2f} % off with constants from the other days")
        return
    if arguments.elsewhere is None:
        parser.error("--elsewhere is needed to write the constants")
    found = fit(arguments.table, arguments.elsewhere, arguments.before, arguments.gpu)
    target = Path(quantbench.planner.__path__[0]) / "planner.json"
    target.write_text(json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
