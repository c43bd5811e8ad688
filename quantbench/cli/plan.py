"""`quantbench plan`: the fastest layout of a training job over GPUs, or what a table of layouts should have taken.

Each mode of the command is a function here; it returns whether something was found that makes the exit code 1.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from quantbench.cli import plan_print as show
from quantbench.cli.options import AsJson, grouped
from quantbench.cli.output import output, print_json, say
from quantbench.cli.plan_options import PlanOptions
from quantbench.planner.calibration import shipped
from quantbench.planner.constraints import violations
from quantbench.planner.folklore import judge_folklore
from quantbench.planner.memory import GIB, limit_bytes
from quantbench.planner.predict import Planner, job_to_json, provenance
from quantbench.planner.row_checks import check_rows
from quantbench.planner.row_results import misses, predict_rows, summarize
from quantbench.planner.rows import read_table
from quantbench.planner.search import search, shape_search


@grouped
def plan(
    arguments: PlanOptions,
    shape_search_too: Annotated[
        bool,
        typer.Option("--shape-search", help="Also vary hidden size, heads and layers.", rich_help_panel="Shape search"),
    ] = False,
    rows: Annotated[
        Path | None, typer.Option(help="CSV table of layouts to predict row by row (columns as in bloom_tables.csv).")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check one layout, or with --rows a table; exit code 1 if anything is wrong."),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Number of results to print.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Rank all layouts (DP, TP, PP, MBS, interleaving, ZeRO, recomputation) of a job by predicted time."""
    if rows is not None:
        found = _check_table(rows, arguments, as_json) if check else _rows(rows, arguments, as_json)
    elif check:
        found = _check_layout(arguments, as_json)
    elif shape_search_too:
        found = _shapes(arguments, top, as_json)
    else:
        found = _search_layouts(arguments, top, as_json)
    if found:
        raise typer.Exit(1)


def _search_layouts(arguments: PlanOptions, top: int, as_json: bool) -> bool:
    """Rank every layout of a job."""
    job, space = arguments.job(), arguments.space()
    begun = time.perf_counter()
    times = arguments.times(job.cluster.device)
    calibration = shipped().of(job.cluster)
    found = search(job, times, calibration, space)
    elapsed_s = time.perf_counter() - begun
    judged = judge_folklore(job, found)
    if as_json:
        answer = {
            **provenance(sys.argv[1:]),
            "job": job_to_json(job, calibration, times.note, arguments.assumed()),
            "space": asdict(space), "looked_at": found.looked_at, "too_large": found.too_large, "search_s": elapsed_s,
            "layouts": [p.to_json() for p in found.ranked],
            "rules_of_thumb": [j.to_json() for j in judged],
        }  # fmt: skip
        print_json(answer)
        return not found.ranked
    console = output()
    for line in show.header_lines(job, calibration, times.note, arguments.assumed()):
        say(console, line)
    say(console, show.search_line(job, found, elapsed_s))
    if not found.ranked:
        return True
    console.print(show.layouts_table(found.ranked[:top], limit_bytes(job)))
    say(console, "\nThe fastest layout's iteration, by what takes the time:")
    for line in show.parts_lines(found.ranked[0]):
        say(console, f"  {line}")
    for line in show.bound_lines(found.ranked[0]):
        say(console, f"  {line}")
    say(console, "\nRules of thumb, held against this search:")
    for parts in show.rules_lines(judged):
        say(console, "  ", *parts)
    say(console, f"\nNext: {show.next_command(arguments, found.ranked[0].layout)}")
    return False


def _check_layout(arguments: PlanOptions, as_json: bool) -> bool:
    """Hold one layout against every rule, and say what it would take."""
    layout = arguments.layout()
    job = arguments.job(gpus=arguments.gpus or layout.dp * layout.tp * layout.pp)
    broken = violations(job, layout)
    strict = [v for v in broken if v.constraint.strict]
    calibration = shipped().of(job.cluster)
    times = arguments.times(job.cluster.device)
    prediction = None if strict else Planner(job, times, calibration).predict(layout)
    wrong = bool(strict) or (prediction is not None and not prediction.fits)
    if as_json:
        answer: dict[str, Any] = {**provenance(sys.argv[1:])}
        answer["job"] = job_to_json(job, calibration, times.note, arguments.assumed(one_layout=True))
        answer["violations"] = [
            {"rule": v.constraint.rule, "name": v.constraint.name, "strict": v.constraint.strict, "message": v.message}
            for v in broken
        ]
        answer["layout"] = asdict(layout)
        answer["prediction"] = None if prediction is None else prediction.to_json()
        print_json(answer)
        return wrong
    console = output()
    for line in show.header_lines(job, calibration, times.note, arguments.assumed(one_layout=True)):
        say(console, line)
    say(console, f"{layout}: {show.check_line(broken)}")
    for violation in broken:
        style = "red" if violation.constraint.strict else "yellow"
        word = "impossible" if violation.constraint.strict else "costs time"
        say(console, "  ", (word, style), f" {violation}")
    if prediction is not None:
        limit = limit_bytes(job) / GIB
        fits = ("fits", "") if prediction.fits else ("does not fit", "red")
        say(console, f"  memory {prediction.memory.total_gib:.1f} of {limit:.1f} GiB: ", fits)
        for line in (show.prediction_line(prediction), *show.bound_lines(prediction)):
            say(console, f"  {line}")
    return wrong


def _shapes(arguments: PlanOptions, top: int, as_json: bool) -> bool:
    """Rank shapes of about the same number of parameters."""
    job, space = arguments.job(), arguments.shape_space()
    begun = time.perf_counter()
    times = arguments.times(job.cluster.device)
    calibration = shipped().of(job.cluster)
    found = shape_search(job, times, calibration, space, arguments.space())
    elapsed_s = time.perf_counter() - begun
    if as_json:
        answer = {
            **provenance(sys.argv[1:]),
            "job": job_to_json(job, calibration, times.note, arguments.assumed()),
            "space": asdict(space), "search_s": elapsed_s, "shapes": [s.to_json() for s in found],
        }  # fmt: skip
        print_json(answer)
        return not found
    console = output()
    for line in show.header_lines(job, calibration, times.note, arguments.assumed()):
        say(console, line)
    hiddens = len({s.shape.hidden for s in found})
    budget = f"{space.parameters / 1e9:.1f} B parameters ±{space.tolerance:.0%}"
    say(console, f"{len(found)} shapes of {hiddens} hidden sizes, {budget}, in {elapsed_s:.1f} s")
    console.print(show.shapes_table(found[:top], space.parameters))
    say(console, "\nThe best of each hidden size:")
    console.print(show.shapes_table(show.best_by_hidden(found), space.parameters))
    return not found


def _rows(path: Path, arguments: PlanOptions, as_json: bool) -> bool:
    """Predict every row of a table and hold it against what was measured."""
    results = predict_rows(read_table(path), arguments.times, shipped(), arguments.given())
    summary = summarize(results)
    if as_json:
        missed = [{**r.to_json(), "known": known} for r, known in misses(results)]
        answer = {
            **provenance(sys.argv[1:]), "file": str(path), "calibrations": shipped().to_json(),
            "rows": [r.to_json() for r in results], "summary": asdict(summary), "missed_by_more_than_8_percent": missed,
        }  # fmt: skip
        print_json(answer)
        return False
    console = output()
    console.print(show.rows_table(results))
    for line in show.summary_lines(summary):
        say(console, line)
    missed_rows = misses(results)
    if missed_rows:
        say(console, "\nMissed by more than 8 %, and what is known:")
        for result, known in missed_rows:
            say(console, f"  {result.row.place}: {100 * (result.error or 0):+.1f} %: {known}")
    unpredicted = [r for r in results if r.prediction is None]
    if unpredicted:
        say(console, f"\n{len(unpredicted)} rows are not predicted, the first: {unpredicted[0].problem}")
    return False


def _check_table(path: Path, arguments: PlanOptions, as_json: bool) -> bool:
    """Look for rows that cannot be and cells that contradict each other."""
    found = check_rows(read_table(path), arguments.times, shipped())
    if as_json:
        answer = {
            **provenance(sys.argv[1:]), "file": str(path),
            "findings": [
                {"row_id": f.row.row_id, "line": f.row.line, "kind": f.kind, "message": f.message} for f in found
            ],
        }  # fmt: skip
        print_json(answer)
        return bool(found)
    console = output()
    for finding in found:
        say(console, str(finding))
    count = len({f.row.row_id for f in found})
    say(
        console,
        f"{count} rows of {path.name} have something wrong" if found else f"nothing is wrong in {path.name}",
    )
    return bool(found)
