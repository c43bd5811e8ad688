"""Runs `plan --rows` and `plan --fit`, which read a CSV table of training layouts.

`predict_table` predicts the time and memory of every row. `fit_table` fits a site's factors to the
measured times in the table. The factors correct times predicted from single ops for the machines
and software of the site.
"""

import json
from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path
from statistics import mean

from rich.table import Table
from rich.text import Text

from quantbench.cli.output import Lines, Result, check_file, plain_table, warning
from quantbench.cli.plan_setup import Setup, given
from quantbench.errors import InputError
from quantbench.files import write_file
from quantbench.planner.calibration import site_json
from quantbench.planner.fitting import fit_site, observe
from quantbench.planner.row_results import RowResult, Summary, predict_rows, summarize
from quantbench.planner.rows import read_table, require_stated
from quantbench.units import counted

# Relative errors of predicted times above this limit, in either direction, are printed in red.
_LARGE_ERROR = 0.08


def predict_table(setup: Setup, path: Path) -> Result:
    """Predicts every layout in a table, and compares predicted with measured values.

    path: CSV table with one layout per row.
    """
    results = predict_rows(
        read_table(path), setup.times_of, setup.calibrations, given(setup.options)
    )
    summary = summarize(results)
    answer = {
        "file": path,
        "calibrations": setup.calibrations.to_json(),
        "rows": map(RowResult.to_json, results),
        "summary": summary,
    }

    def lines() -> Lines:
        yield _rows_table(results)
        yield from _summary_lines(summary)
        unpredicted = [r.problem for r in results if r.prediction is None]
        if unpredicted:
            yield f"\n{len(unpredicted)} rows are not predicted, the first: {unpredicted[0]}"

    return Result(answer, lines())


def _rows_table(results: Sequence[RowResult]) -> Table:
    """Tabulates predicted and measured values, one line per predicted layout."""
    times = (">row", ">sec/it", ">measured", ">error")
    rates = (">hardware TFLOP/s", ">reported", ">GiB", ">stated")
    table = plain_table((*times, *rates, "layout"))
    for r in results:
        p = r.prediction
        row = r.row
        if p is None:
            continue
        error = Text("" if r.error is None else f"{100 * r.error:+.1f} %")
        if abs(r.error or 0) > _LARGE_ERROR:
            error.stylize("bold red")
        table.add_row(
            row.row_id,
            f"{p.sec_per_it:.2f}",
            _or_dash(row.sec_per_it),
            error,
            f"{r.hardware_tflops:.1f}",
            _or_dash(row.tflops),
            Text(f"{p.memory.total_gib:.0f}", style="" if p.fits else "red"),
            "OOM" if row.status == "oom" else _or_dash(row.mem_gb),
            str(p.layout),
        )
    return table


def _summary_lines(summary: Summary) -> Iterator[str]:
    """Yields lines with the errors of predicted time and memory over all rows."""
    if summary.rows:
        said = (
            f"time, {counted(summary.rows, 'row')}: mean error {summary.mape:.2f} %, "
            f"median {summary.median:.2f} %, bias {summary.bias:+.2f} %"
        )
        if not isnan(summary.spearman):
            said += f", rank correlation {summary.spearman:.3f}"
        yield said
    if summary.memory_rows:
        yield (
            f"memory, {counted(summary.memory_rows, 'row')}: mean error "
            f"{summary.memory_mape:.1f} %; {summary.oom_seen} of "
            f"{summary.oom_rows} rows that ran out of it were predicted to; a row that ran is "
            f"predicted at most "
            f"{100 * summary.worst_overrun:+.1f} % over the limit"
        )


def _or_dash(value: float | None) -> str:
    """Formats a number; None as a dash."""
    return "–" if value is None else f"{value:g}"


def fit_table(setup: Setup, path: Path, output: Path) -> Result:
    """Fits a site's factors to a table of its training runs, and writes the factors as JSON.

    path: CSV table of the training runs.
    output: JSON file to write.

    Raises InputError if no row can be predicted, or if the rows have several GPU types or software
    stacks.
    """
    check_file("plan --fit", output, suffix=".json")
    rows = read_table(path)
    cells = given(setup.options)
    require_stated(rows, cells, path.name)
    results = predict_rows(rows, setup.times_of, setup.calibrations, cells)
    cases = []
    errors_pct = []
    for r in results:
        if r.error is not None and r.case is not None:
            cases.append((r.case, r.row.sec_per_it or 0.0, path.name))
            errors_pct.append(100 * abs(r.error))
    if not cases:
        what = f"no row of {path.name} can be predicted: {results[0].problem}"
        raise InputError("plan --fit", what, "rows with all their cells")
    if len({(case.job.cluster.device.name, case.job.stack) for case, *_ in cases}) > 1:
        what = f"{path.name} has rows of several GPUs or stacks"
        raise InputError("plan --fit", what, "one site with one stack")
    prior = setup.calibration(cases[0][0].job)
    fit = fit_site(observe(cases, setup.times_of), prior)
    site = site_json(fit)
    write_file("plan --fit", output, json.dumps(site, indent=1) + "\n")
    known = fit.provenance

    def lines() -> Lines:
        yield f"fitted to {len(cases)} of {len(results)} rows of {path.name}: {fit}"
        yield (
            f"mean error {mean(errors_pct):.1f} % with the stack's factors, "
            f"{known['leave_one_out_mean_error_pct']:.1f} % with "
            "each row left out of the fit"
        )
        if known["unusual"]:
            factors = [f"{name} {getattr(fit, name):.3g}" for name in known["unusual"]]
            said = f"far from every known site: {', '.join(factors)}"
            yield warning(f"{said}; do the rows say all that was run?")
        if known["undetermined"]:
            names = ", ".join(known["undetermined"])
            yield f"not determined by these rows, close to the stack's values: {names}"
        for a, b in known["confounded"]:
            yield f"not told apart, only their joint effect is known: {a} and {b}"
        yield f"wrote {output}"
        yield f"\nNext: quantbench plan --site {output} …"

    return Result({"file": path, "site": site}, lines())
