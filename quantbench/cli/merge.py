"""`quantbench merge RUN…`: merge several runs of one kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantbench.cli.options import AsJson
from quantbench.cli.output import output, print_json, say
from quantbench.cluster.cards import card_lines, compare_cards
from quantbench.cluster.merge import merge_runs, write_merged
from quantbench.report.source import read_one_run


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of the runs.")],
    results: Annotated[Path, typer.Option("-o", "--output", help="Results folder in which the merged run is created.")],
    run_id: Annotated[str, typer.Option(help="Name of the merged run (default: the first run's, and -merged).")] = "",
    force: Annotated[bool, typer.Option("--force", help="Merge even if devices or software differ.")] = False,
    as_json: AsJson = False,
) -> None:
    """Merge runs of one device and software: each point once, with its most trusted measurement."""
    merged = merge_runs([read_one_run(folder) for folder in runs], run_id, force=force)
    folder = write_merged(results, merged)
    points = sum(record.role == "point" for record in merged.records)
    lines = card_lines(compare_cards(merged.records))
    if as_json:
        answer = {
            "run": folder, "runs": len(runs), "points": points, "repeated": merged.repeated,
            "how_ended": merged.info.how_ended, "notes": merged.notes, "cards": lines,
        }  # fmt: skip
        print_json(answer)
        return
    console = output()
    repeated = f"; {merged.repeated} were there twice, and the better trusted measurement stands" * bool(
        merged.repeated
    )
    say(console, f"{len(runs)} runs of {merged.info.device.name}, {points} points{repeated}")
    for note in merged.notes:
        say(console, ("note:", "yellow"), f" {note}")
    for line in lines:
        say(console, line)
    say(console, f"kept in {folder!s}/")
    say(console, f"Next: quantbench check {folder!s}")
