"""Fit the planner's constants to a table of layouts:
`python -m quantbench.planner.fit bloom_tables.csv --elsewhere published_layouts.csv --before 02-25`.

Writes planner.json beside this file. Times: four constants, a robust (soft L1) fit of the logarithm of the error over
the timed rows dated before `before`. Memory: two constants, likewise, over the rows of those days whose memory is
stated and not noted as wrong. No row from `before` on is looked at.

Why products have no factor of their own: rows of one tensor-parallel degree cannot tell slow products from slow
collectives (either suits the days before 02-25 about as well when each is left out in turn, `--days`), and Megatron's
runs at another A100 site are predicted within a few percent with products as alone (tests/data/published_layouts.csv).
So what a site loses is sought in what depends on the site: its collectives, its hosts and its network. Nothing is
fitted to those runs; what nine in ten of them stay within is the interval of sites without rows of their own.
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

from quantbench.errors import InputError
from quantbench.latency.interconnect import same_site
from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import TimesOf
from quantbench.planner.calibration import MEMORY_RANGES, RANGES, Calibration, Calibrations, everywhere
from quantbench.planner.constraints import is_possible
from quantbench.planner.context import case_of, document_of, uncounted
from quantbench.planner.layout import Case
from quantbench.planner.memory import memory
from quantbench.planner.predict import Prediction, predict_cases
from quantbench.planner.table import TableRow, read_table

FloatArray = npt.NDArray[np.float64]
Timed = tuple[TableRow, Case]

# Runs of one layout repeat within this (rows of the documents that were run twice). Errors beyond it count by their
# size instead of its square: a row that nobody explains must not bend the rest.
_NOISE = 0.005
# The intervals of the latency models, too, cover nine in ten.
_COVERED = 0.9
#: where a fit starts: 5 ms are about 300 launches of 15 µs; half of the network and of the fp32 peak
START = Calibration(1.5, 5.0, 0.5, 0.5, base_gib=4.0, activation_slack=0.1)
#: a site of which nothing is known
NEUTRAL = Calibration(1.0, 0.0, 1.0, 0.5, base_gib=4.0, activation_slack=0.1)


def timed_cases(rows: Sequence[TableRow], *, gpu: str = "") -> list[Timed]:
    """Rows with a time that can be predicted and counted, as cases. gpu: only rows of that GPU, as the table has it."""
    found = []
    for row in rows:
        if row.sec_per_it is None or uncounted(row) is not None or (gpu and row.gpu != gpu):
            continue
        case = case_of(row)
        if is_possible(case.job, case.layout):
            found.append((row, case))
    return found


def memory_cases(rows: Sequence[TableRow], *, gpu: str = "") -> list[Timed]:
    """Rows with a stated memory that is not noted as wrong, as cases."""
    found = []
    for row in rows:
        needed = (row.mem_gb, row.tp, row.pp, row.mbs, row.gbs)
        if None in needed or row.source_error.startswith("Mem") or row.duplicate_of_line is not None:
            continue
        if gpu and row.gpu != gpu:
            continue
        case = case_of(row)
        if is_possible(case.job, case.layout):
            found.append((row, case))
    return found


def fit_times(cases: Sequence[Timed], times: TimesOf, start: Calibration = START) -> Calibration:
    """The four constants of the iteration's time that suit `cases` best."""
    measured = np.log([float(row.sec_per_it or np.nan) for row, _ in cases])

    def with_constants(x: FloatArray) -> Calibration:
        return replace(start, **_clipped(np.exp(x), RANGES))  # type: ignore[arg-type]

    def errors(x: FloatArray) -> FloatArray:
        return np.log(predicted_s(cases, times, with_constants(x))) - measured

    x = _least(errors, np.log([getattr(start, name) for name in RANGES]))
    return with_constants(x)


def predicted_s(cases: Sequence[Timed], times: TimesOf, calibration: Calibration) -> FloatArray:
    """Predicted seconds per iteration of possible cases."""
    found = predict_cases([case for _, case in cases], times, everywhere(calibration))
    return np.array([p.sec_per_it for p in found if isinstance(p, Prediction)])


def days_left_out(cases: Sequence[Timed], times: TimesOf) -> dict[str, tuple[int, float]]:
    """By day: its rows, and their mean error in percent with constants from the other days."""
    found = {}
    for day in sorted({row.date for row, _ in cases}):
        kept, left = ([c for c in cases if (c[0].date == day) == out] for out in (False, True))
        measured = np.array([float(row.sec_per_it or np.nan) for row, _ in left])
        errors = predicted_s(left, times, fit_times(kept, times)) / measured - 1
        found[day] = (len(left), float(100 * np.abs(errors).mean()))
    return found


def scatter(cases: Sequence[Timed], times: TimesOf, calibration: Calibration) -> float:
    """What |ln(predicted / measured)| of nine in ten cases stays within."""
    measured = np.log([float(row.sec_per_it or np.nan) for row, _ in cases])
    return float(np.quantile(np.abs(np.log(predicted_s(cases, times, calibration)) - measured), _COVERED))


def fit_memory(cases: Sequence[Timed], start: Calibration) -> Calibration:
    """The two constants of the memory that suit `cases` best."""
    measured = np.log([float(row.mem_gb or np.nan) for row, _ in cases])

    def with_constants(x: FloatArray) -> Calibration:
        return replace(start, **_clipped(np.exp(x), MEMORY_RANGES))  # type: ignore[arg-type]

    def errors(x: FloatArray) -> FloatArray:
        calibration = with_constants(x)
        return np.log([memory(case.job, case.layout, calibration).total_gib for _, case in cases]) - measured

    return with_constants(_least(errors, np.log([getattr(start, name) for name in MEMORY_RANGES])))


def _clipped(values: FloatArray, ranges: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: float(np.clip(v, low, high)) for (name, (low, high)), v in zip(ranges.items(), values, strict=True)}


def _least(errors: Callable[[FloatArray], FloatArray], start: FloatArray) -> FloatArray:
    from scipy.optimize import least_squares

    return np.asarray(least_squares(errors, start, loss="soft_l1", f_scale=_NOISE, diff_step=1e-4).x)


def fit(path: Path, elsewhere: Path, before: str, gpu: str, times: TimesOf | None = None) -> Calibrations:
    """All constants from the rows of a table that are dated before `before`, with their provenance, and how far
    published runs of other sites (`elsewhere`) are from what is predicted of them with nothing fitted."""
    rows = [row for row in read_table(path) if row.date and row.date < before]
    cases = timed_cases(rows, gpu=gpu)
    sites = {case.job.cluster.name for _, case in cases}
    if len(cases) < 2 * len(RANGES) or len(sites) != 1:
        what = f"{len(cases)} timed rows before {before} of {len(sites)} clusters"
        raise InputError("planner.fit", what, f"at least {2 * len(RANGES)} rows of one cluster")
    source = times or BestTimes()
    found = fit_memory(memory_cases(rows, gpu=gpu), fit_times(cases, source))
    found = replace(found, scatter=scatter(cases, source, found))
    provenance: dict[str, Any] = {
        "script": f"python -m quantbench.planner.fit {path.name} --elsewhere {elsewhere.name} --before {before} "
        f"--gpu {gpu}",
        "table": _file(path),
        "documents": sorted({document_of(row) for row, _ in cases}),
        "fitted": [*RANGES, *MEMORY_RANGES],
        "rows_fitted": [row.row_id for row, _ in cases],
        "op_times": source(cases[0][1].job.cluster.device).note,
    }
    neutral = replace(
        NEUTRAL, unaligned_share=found.unaligned_share, base_gib=found.base_gib, activation_slack=found.activation_slack
    )
    published = timed_cases(read_table(elsewhere))
    wide = scatter(published, source, neutral)
    rule = (
        "nothing fitted: collectives as alone, launches hidden, the network at its rate; unaligned_share, base_gib and "
        f"activation_slack as at {min(sites)}; scatter that of {len(published)} published runs"
    )
    neutral = replace(neutral, scatter=wide, provenance={"rule": rule, "published": _file(elsewhere)})
    site = min(sites)
    fitted = {site: replace(found, provenance=provenance)}
    for kin in same_site(site):
        rule = f"as at {site}: the same centre and software, nothing fitted to its own rows"
        fitted[kin] = replace(found, scatter=wide, provenance={"rule": rule})
    return Calibrations(fitted, neutral)


def _file(path: Path) -> dict[str, str]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def main() -> None:
    """Fit and write planner.json."""
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
    target = Path(__file__).with_name("planner.json")
    target.write_text(json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, site in found.sites.items():
        print(f"{name}: {site.constants}")
        print(f"memory: {site.base_gib:.3g} GiB, slack {site.activation_slack:.3g}; scatter {site.scatter:.3g}")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
