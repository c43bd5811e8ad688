"""Command `report`: writes a self-contained HTML report of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.cli.devices import device_line
from quantbench.cli.options import argument, command, option
from quantbench.cli.output import Lines, Result, warning
from quantbench.errors import printable
from quantbench.units import axis_words

if TYPE_CHECKING:
    from quantbench.report.page import Written
    from quantbench.store.folder import Run


@command
def report(
    run: Path = argument("Folder of a run.", metavar="RUN"),
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
    from quantbench.report.page import write_report
    from quantbench.report.source import parse_where
    from quantbench.store.folder import read_one_run

    asked = parse_where(where or ())
    found = read_one_run(run)
    written = write_report(found, target or run, asked)
    lines = _lines(found, written, run)
    lead = written.lead
    if lead is None:
        return Result({"page": written.page, "answer": None}, lines, exit_code=2)
    return Result({"page": written.page, "answer": lead.sentence}, lines)


def _lines(found: Run, written: Written, folder: Path) -> Lines:
    """Yields the lines that the command prints: device, warnings, main result and page.

    folder: folder of the run as typed.
    """
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
