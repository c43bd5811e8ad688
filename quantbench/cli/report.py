"""Command `report`: writes a self-contained HTML report of a run, or of imported training logs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, option
from quantbench.cli.output import Lines, Result, warning
from quantbench.errors import InputError, printable
from quantbench.units import axis_words

if TYPE_CHECKING:
    from quantbench.report.page import Written
    from quantbench.store.folder import Run


@command
def report(
    runs: list[Path] = argument(
        "Folder of a run, or one or more of imported training logs.", metavar="RUN"
    ),
    target: Path | None = option(
        None,
        "Folder for the page (default: the run's), or NAME.html.",
        "-o",
        "--output",
    ),
    where: list[str] | None = option(
        None, "Show only points with these sizes: n=5120,k=5120.", metavar="AXIS=VALUE"
    ),
) -> Result:
    """Write an HTML page that shows which sizes are slow, by how much and why."""
    from quantbench.importers.training_run import read_training, training_folders
    from quantbench.report.page import write_report
    from quantbench.report.source import parse_where
    from quantbench.report.training import fastest, training_table, write_training_report
    from quantbench.store.folder import read_one_run

    logs = training_folders(runs)
    if logs:
        if where:
            raise InputError(
                "report", f"--where {where[0]} with training logs", "a sweep's run with --where"
            )
        if any(run.is_absolute() for run in runs):
            runs = [run.absolute() for run in runs]
        shared = Path(os.path.commonpath(runs))
        made = write_training_report(logs, target or shared)
        summaries = [read_training(folder) for folder in logs]
        answer = fastest(summaries)
        untold = (
            "the logs do not give GPUs and tokens: import them with --gpus, --seq and the layout "
            "(quantbench import megatron-log --help)"
        )
        table = training_table(summaries)
        told = (table, answer or untold, f"page: {made.page}")
        return Result({"page": made.page, "answer": answer or None}, told)
    if len(runs) > 1:
        expected = "one run, or training logs (quantbench import megatron-log)"
        raise InputError("report", f"{len(runs)} runs", expected)
    asked = parse_where(where or ())
    found = read_one_run(runs[0])
    written = write_report(found, target or runs[0], asked)
    lines = _lines(found, written, runs[0])
    lead = written.lead
    if lead is None:
        return Result({"page": written.page, "answer": None}, lines, exit_code=2)
    return Result({"page": written.page, "answer": lead.sentence}, lines)


def _lines(found: Run, written: Written, folder: Path) -> Lines:
    yield device_line(found.info.device)
    if found.info.origin != "measured":
        yield (f"{found.info.origin.upper()} DATA", "bold"), ": not measured on this machine"
    for text in found.warnings:
        yield warning(printable(text))
    yield "this run has no measured point" if written.lead is None else written.lead.sentence
    yield f"page: {written.page}"
    if written.lead is not None and written.lead.several:
        axes = dict(written.lead.bad[0].row.axes)
        del axes[written.lead.axis]
        held = ",".join(axis_words(axes))
        yield f"to see one shape: quantbench report {folder} --where {held}"
