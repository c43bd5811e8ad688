"""`quantbench report RUN`: one self-contained HTML page and its pictures, of a run or of imported training logs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli.devices import device_line
from quantbench.cli.options import AsJson
from quantbench.cli.output import output, print_json, say, say_warning
from quantbench.errors import InputError, printable
from quantbench.importers.training_run import read_training, training_folders
from quantbench.report.page import write_report
from quantbench.report.source import parse_where, read_one_run
from quantbench.report.training import fastest, training_table, write_training_report

_UNTOLD = (
    "the logs do not give GPUs and tokens, so there is no picture: import them with --gpus, --seq and the layout "
    "(quantbench import megatron-log --help)"
)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folder of a run, or one or more of imported training logs.")
    ],
    target: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder for the page and its PNGs (default: the run's), or NAME.html for the page alone.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=VALUE", help="Show only points with these sizes: n=5120,k=5120.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page that shows which sizes are slow, by how much and why."""
    logs = training_folders(runs)
    if logs:
        mixed = len({run.is_absolute() for run in runs}) > 1
        shared = Path(os.path.commonpath([run.absolute() for run in runs] if mixed else runs))
        _training(logs, target or shared, as_json)
        return
    if len(runs) > 1:
        raise InputError("report", f"{len(runs)} runs", "one run, or training logs (quantbench import megatron-log)")
    asked = parse_where(where or ())
    found = read_one_run(runs[0])
    written = write_report(found, target or runs[0], asked)
    if as_json:
        answer = None if written.lead is None else written.lead.sentence
        print_json({"page": written.page, "pictures": written.pictures, "answer": answer})
        return
    console = output()
    say(console, device_line(found.info.device))
    if found.info.origin != "measured":
        say(console, (f"{found.info.origin.upper()} DATA", "bold"), ": not measured on this machine")
    for warning in found.warnings:
        say_warning(console, printable(warning))
    say(console, "this run has no measured point" if written.lead is None else written.lead.sentence)
    say(console, f"page: {written.page!s}{_beside(written.pictures)}")
    if written.lead is not None and written.lead.several:
        shape = written.lead.bad[0].row.axes
        held = ",".join(
            f"{name.replace('_', '-')}={value}" for name, value in shape.items() if name != written.lead.axis
        )
        say(console, f"to see one shape: quantbench report {runs[0]} --where {held}")


def _beside(pictures: Sequence[Path]) -> str:
    many = len(pictures)
    return f" (and {many} picture{'' if many == 1 else 's'} beside it)" if many else ""


def _training(logs: list[Path], folder: Path, as_json: bool) -> None:
    """Throughput by layout, of imported training logs."""
    written = write_training_report(logs, folder)
    summaries = [read_training(folder) for folder in logs]
    answer = fastest(summaries)
    if as_json:
        print_json({"page": written.page, "pictures": written.pictures, "answer": answer or None})
        return
    console = output()
    console.print(training_table(summaries))
    say(console, answer or _UNTOLD)
    say(console, f"page: {written.page!s}{_beside(written.pictures)}")
