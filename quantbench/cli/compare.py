"""Command `compare`: compares two runs and labels each point faster, slower, same or unclear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, option, percentage
from quantbench.cli.output import Lines, Result, check_file, encoded
from quantbench.errors import printable

if TYPE_CHECKING:
    from quantbench.analysis.compare import Comparison


@command
def compare(
    run_a: Path = argument("Folder of the baseline run.", metavar="A"),
    run_b: Path = argument("Folder of the run to compare with it.", metavar="B"),
    margin: str = option("1%", "Differences below this are ignored."),
    by: str = option("key", "Match points by key (workload, provider and timing) or by workload."),
    provider_a: str = option("", "Use only this provider's points of A."),
    provider_b: str = option("", "Use only this provider's points of B."),
    force: bool = option(
        False, "Compare even if devices or origins (measured, imported, …) differ."
    ),
    junit: Path | None = option(None, "Also write JUnit XML here."),
) -> Result:
    """Compare two runs point by point; exit code 1 on a regression."""
    from quantbench.analysis.compare import CompareOptions, compare_runs
    from quantbench.report.junit import write_junit
    from quantbench.store.folder import read_one_run

    options = CompareOptions(
        margin=percentage("--margin", margin),
        by=by,
        provider_a=provider_a,
        provider_b=provider_b,
        force=force,
    )
    a, b = read_one_run(run_a), read_one_run(run_b)
    if junit is not None:
        check_file("write JUnit", junit)
    comparison = compare_runs(a, b, options)
    if junit is not None:
        write_junit(comparison, junit)
    answer = {
        "a": comparison.a.folder,
        "b": comparison.b.folder,
        "device": comparison.b.info.device.name,
        "counts": comparison.counts,
        "regressions": comparison.regressions,
        "median_ratio": comparison.median_ratio if comparison.points else None,
        **encoded(comparison),
        "lost": [{**encoded(lost), "outcome": encoded(lost.b.outcome)} for lost in comparison.lost],
    }
    return Result(answer, _lines(comparison, junit), exit_code=bool(comparison.regressions))


def _lines(comparison: Comparison, junit: Path | None) -> Lines:
    """Yields the lines and the table that the command prints.

    junit: JUnit file that was written; None if none was asked for.
    """
    from quantbench.report.comparison import (
        comparison_table,
        differences_lines,
        method_lines,
        result_lines,
    )

    yield device_line(comparison.b.info.device)
    for name, run in (("A", comparison.a), ("B", comparison.b)):
        info = run.info
        words = f"{name}: {run.folder} (started {info.started}"
        if info.how_ended != "complete":
            words += f", {info.how_ended}, not complete"
        if info.origin == "measured":
            yield f"{words})"
        else:
            yield f"{words}, ", (info.origin.upper(), "bold"), ")"
    yield from map(printable, (*differences_lines(comparison), *method_lines(comparison)))
    table = comparison_table(comparison)
    if table is not None:
        yield from ("", table)
    yield ""
    yield from result_lines(comparison)
    if junit is not None:
        yield f"JUnit: {junit}"
    yield f"Next: quantbench report {comparison.b.folder}"
