"""What the commands of `quantbench profile` do."""

from __future__ import annotations

import json
from pathlib import Path

from rich.markup import escape

from quantbench.cli.console import output, say
from quantbench.profile import Profile
from quantbench.store.folder import read_run


def export_profile(runs: list[Path], target: Path, fit: bool, as_json: bool) -> None:
    """Make a profile of runs and write it."""
    made = Profile.from_runs([read_run(run) for run in runs], fit=fit)
    made.save(target)
    rows = {kind: len(table) for kind, table in made.tables.items()}
    if as_json:
        print(json.dumps({"profile": str(target), "device": made.device.name, "rows": rows}, indent=1))
        return
    console = output()
    say(console, escape(f"{made.device.name}: " + ", ".join(f"{n:,} {kind}" for kind, n in rows.items() if n)))
    say(console, escape(f"next: quantbench profile show {target}"))
