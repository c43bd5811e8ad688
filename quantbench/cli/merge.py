"""`quantbench merge RUN…`: merge several runs of one kind of device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of the runs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Results folder in which the merged run is created.")],
    run_id: Annotated[str, typer.Option(help="Name of the merged run (default: the first one's, and -merged).")] = "",
    force: Annotated[bool, typer.Option("--force", help="Merge even if devices or software differ.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Merge runs of one device and software: each point once, with its most trusted measurement."""
    from quantbench.cli.console import output as console_for
    from quantbench.cli.console import say
    from quantbench.cluster.cards import card_lines, compare_cards
    from quantbench.cluster.merge import merge_runs, write_merged
    from quantbench.report.source import read_one_run

    merged = merge_runs([read_one_run(folder) for folder in runs], run_id, force=force)
    folder = write_merged(output, merged)
    points = sum(record.role == "point" for record in merged.records)
    lines = card_lines(compare_cards(merged.records))
    if as_json:
        print(
            json.dumps(
                {
                    "run": str(folder), "runs": len(runs), "points": points, "repeated": merged.repeated,
                    "how_ended": merged.info.how_ended, "notes": list(merged.notes), "cards": list(lines),
                },
                indent=1,
            )
        )  # fmt: skip
        return
    console = console_for()
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
