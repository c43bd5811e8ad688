"""`quantbench report RUN`: one self-contained HTML page and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for the page and its PNGs (default: the run's own).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Write one HTML page that answers which sizes are bad, by how much and why."""
    from quantbench.report.page import write_report
    from quantbench.report.source import read_one_run

    found = read_one_run(run)
    written = write_report(found, output or run)
    if as_json:
        answer = None if written.lead is None else written.lead.sentence
        print(
            json.dumps(
                {"page": str(written.page), "pictures": [str(p) for p in written.pictures], "answer": answer}, indent=1
            )
        )
        return
    from rich.markup import escape

    from quantbench.cli.console import output as console_output
    from quantbench.cli.console import say
    from quantbench.cli.devices import device_line
    from quantbench.report.words import printable

    console = console_output()
    say(console, escape(device_line(found.info.device)))
    if found.info.origin != "measured":
        say(console, f"[bold]{found.info.origin.upper()} DATA[/bold]: nothing here was measured on this machine")
    for warning in found.warnings:
        say(console, f"[yellow]warning:[/yellow] {escape(printable(warning))}")
    say(console, "no point of this run has a figure" if written.lead is None else escape(written.lead.sentence))
    say(console, f"page: {escape(str(written.page))} (and {len(written.pictures)} pictures beside it)")
