"""`quantbench compare A B`: faster, slower, same or unclear, point by point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.analysis.compare import CompareOptions, Comparison, compare_runs
from quantbench.cli.devices import device_line
from quantbench.cli.options import AsJson
from quantbench.cli.output import check_file, check_folder, output, print_json, say
from quantbench.errors import InputError, printable
from quantbench.report.comparison import (
    comparison_table,
    comparison_to_json,
    differences_lines,
    draw_comparison,
    method_lines,
    result_lines,
    write_junit,
)
from quantbench.report.source import read_one_run


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="A", help="Folder of the baseline run.")],
    run_b: Annotated[Path, typer.Argument(metavar="B", help="Folder of the run to compare with it.")],
    margin: Annotated[str, typer.Option(help="Differences below this are ignored.")] = "1%",
    by: Annotated[
        str, typer.Option(help="Match points by key (workload, provider and timing) or by workload.")
    ] = "key",
    provider_a: Annotated[str, typer.Option(help="Use only this provider's points of A.")] = "",
    provider_b: Annotated[str, typer.Option(help="Use only this provider's points of B.")] = "",
    noise: Annotated[str, typer.Option(help="Standard deviation of single figures in imported tables: 3%.")] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Compare even if devices differ, or measured with simulated runs.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the picture (default: run B's).")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two runs point by point; exit code 1 on a regression."""

    options = CompareOptions(
        margin=share("--margin", margin), by=by, provider_a=provider_a, provider_b=provider_b,
        noise=share("--noise", noise) if noise else None, force=force,
    )  # fmt: skip
    a, b = read_one_run(run_a), read_one_run(run_b)
    check_folder("write picture", folder or run_b)
    if junit is not None:
        check_file("write JUnit", junit)
    comparison = compare_runs(a, b, options)
    picture = None
    if comparison.points:
        picture = (folder or run_b) / f"compare-with-{comparison.a.info.run_id}.png"
        draw_comparison(comparison, picture)
    if junit is not None:
        write_junit(comparison, junit)
    if as_json:
        print_json({**comparison_to_json(comparison), "picture": picture})
    else:
        _say(comparison, picture, junit)
    if comparison.regressions:
        raise typer.Exit(1)


def _say(comparison: Comparison, picture: Path | None, junit: Path | None) -> None:

    console = output()
    say(console, device_line(comparison.b.info.device))
    for name, run in (("A", comparison.a), ("B", comparison.b)):
        origin = ("",) if run.info.origin == "measured" else (", ", (run.info.origin.upper(), "bold"))
        say(console, f"{name}: {run.folder} (started {run.info.started}", *origin, ")")
    for line in (*differences_lines(comparison), *method_lines(comparison)):
        say(console, printable(line))
    table = comparison_table(comparison)
    if table is not None:
        console.print()
        console.print(table)
    console.print()
    for line in result_lines(comparison):
        say(console, line)
    if picture is not None:
        say(console, f"picture: {picture}")
    if junit is not None:
        say(console, f"JUnit: {junit}")
    say(console, f"Next: quantbench report {comparison.b.folder}")


def share(option: str, text: str) -> float:
    """`1%`, `0.5 %` or `0.01` as a share.

    >>> share("--margin", "1%"), share("--margin", "0.02")
    (0.01, 0.02)
    """
    number = text.strip().removesuffix("%")
    try:
        return float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        raise InputError(option, repr(text), "a share such as 1% or 0.01") from None
