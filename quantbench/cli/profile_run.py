"""What the commands of `quantbench profile` do."""

from __future__ import annotations

import json
import os
from pathlib import Path

from quantbench.cli import profile_print as view
from quantbench.cli.console import output, say
from quantbench.cli.devices import device_line
from quantbench.cli.writable import check_file
from quantbench.errors import InputError, printable
from quantbench.files import folders_with, read_text
from quantbench.profile import Profile
from quantbench.report.source import read_one_run

# On one core of a 2024 server: fitting takes as long for 800 rows as for 8,000, cliffs as long as there are records.
_FIXED_S = {True: 15.0, False: 4.0}
_PER_RECORD_S = 3e-4


def export_profile(paths: list[Path], output_file: Path | None, fit: bool, as_json: bool) -> None:
    """Make a profile of runs and write it: without a name, as profile.json beside a device's runs, or here."""
    runs = [read_one_run(run) for path in paths for run in runs_below(path)]
    a_device = len(paths) == 1 and runs_below(paths[0]) != paths
    target = output_file or (paths[0] / "profile.json" if a_device else Path("profile.json"))
    check_file("profile export", target)
    records = sum(len(run.records) for run in runs)
    fits = fit and runs[0].info.device.kind == "cuda"  # processors have no model
    seconds = _FIXED_S[fits] + records * _PER_RECORD_S
    say(
        output(stderr=True),
        f"{records:,} record{'' if records == 1 else 's'}: cliffs, rules and models take about {seconds:.0f} s",
    )
    made = Profile.from_runs(runs, fit=fit)
    target.parent.mkdir(parents=True, exist_ok=True)
    made.save(target)
    if as_json:
        print(json.dumps({"profile": str(target), **view.profile_to_json(made)}, indent=1, allow_nan=False))
        return
    console = output()
    say(console, device_line(made.device))
    for line in (*view.origin_lines(made), *view.rows_lines(made), *view.model_lines(made)):
        say(console, printable(line))
    say(console, f"\nwritten: {target}" + "".join(f", {beside.name}" for beside in files_beside(target)))
    say(console, f"next: quantbench profile show {target}")


def runs_below(path: Path) -> list[Path]:
    """A run's folder itself, or the runs in a device's folder. Raises InputError where there is none."""
    if os.path.isfile(path):
        raise InputError("read run", f"{path} is a file", "folders of runs, or --format with a profile's file")
    itself = os.path.lexists(path / "run.json")
    below = [] if itself else folders_with(path, "*/run.json")
    if os.path.isdir(path) and os.access(path, os.X_OK) and not below and not itself:
        raise InputError("read run", f"{path} holds no run", "a run's folder, or a device's with its runs in it")
    return below or [path]


def files_beside(target: Path) -> list[Path]:
    """The Parquet files of a profile."""
    tables = json.loads(read_text(target))["tables"]
    return [target.with_name(table["file"]) for table in tables.values() if "file" in table]


def show_profile(file: Path, as_json: bool) -> None:
    """What is in a profile."""
    found = Profile.load(file)
    if as_json:
        print(json.dumps(view.profile_to_json(found), indent=1, allow_nan=False))
        return
    console = output()
    say(console, device_line(found.device))
    for line in view.origin_lines(found):
        say(console, printable(line))
    table = view.rows_table(found)
    if table is not None:
        console.print()
        console.print(table)
    console.print()
    for line in view.model_lines(found):
        say(console, printable(line))
    cliffs = view.cliffs_table(found)
    if cliffs is not None:
        console.print()
        console.print(cliffs)
    for line in view.finding_lines(found):
        say(console, printable(line))
    say(console, f"\nnext: quantbench profile query {file} --gemm 4096,4096,4096")


def validate_profile(file: Path, as_json: bool) -> None:
    """Load a profile, which checks all of it, and ask it once."""
    found = Profile.load(file)
    rows = {kind: len(table) for kind, table in found.tables.items()}
    if as_json:
        print(json.dumps({"profile": str(file), "valid": True, "device": found.device.name, "rows": rows}, indent=1))
        return
    listed = ", ".join(f"{count:,} {kind}" for kind, count in rows.items() if count) or "no"
    say(output(), f"{file}: a whole, unchanged profile of {found.device.name} with {listed} rows")
