"""`quantbench profile export --format …`: what a planner or simulator loads, and what to know of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from quantbench.cli.console import output, say
from quantbench.cli.profile_run import runs_below
from quantbench.cli.writable import check_folder
from quantbench.errors import InputError, require_choice
from quantbench.profile.exporters.catalog import FORMATS, export_profile
from quantbench.profile.exporters.options import WHO, ExportOptions
from quantbench.profile.profile import Profile
from quantbench.report.source import read_one_run


def percentage(option: str, text: str) -> float:
    """`5%` or `5 %` as 0.05. Raises InputError for anything else.

    >>> percentage("--bound", "5%")
    0.05
    """
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) / 100.0
    except ValueError:
        raise InputError(option, repr(text), "a percentage such as 5%") from None
    if not text.strip().endswith("%") or not 0.0 < value < 1.0:
        raise InputError(option, repr(text), "a percentage between 0% and 100%, such as 5%")
    return value


def degrees(text: str) -> tuple[int, ...]:
    """`1,2,4` as integers, each once, ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,5}", part) and 0 < int(part) < 2**16 for part in parts):
        raise InputError("--tp", repr(text), "degrees of at least 1, comma separated: 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def export_format(
    paths: list[Path], name: str, target: Path | None, *, provider: str, dtype: str, layout: str, backend: str,
    version: str, model: str, tensor_parallel: str, fill: bool, bound: str, fit: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write a profile, or what runs make one, in a consumer's format, and say what is in it."""
    options = ExportOptions(
        provider=provider, dtype=dtype, layout=layout, backend=backend, version=version, model=model,
        tensor_parallel=degrees(tensor_parallel), fill=fill, bound=percentage("--bound", bound),
    )  # fmt: skip
    folder = target or Path(name)
    require_choice(WHO, "--format", name, FORMATS)
    check_folder(WHO, folder)
    made = export_profile(profile_of(paths, fit=fit), name, folder, options)
    if as_json:
        answer = {
            "format": name, "folder": str(folder), "paths": [str(path) for path in made.paths], "rows": made.rows,
            "left_out": dict(made.left_out), "notes": made.notes, "use": made.use,
        }  # fmt: skip
        print(json.dumps(answer, indent=1))
        return
    console = output()
    say(console, f"{folder}: " + ", ".join(f"{count:,} {kind}" for kind, count in made.rows.items()))
    for reason, count in made.left_out.most_common():
        say(console, f"  {count:,} rows left out: {reason}")
    for note in made.notes:
        say(console, f"  {note}")
    for line in made.use:
        say(console, f"use: {line}")


def profile_of(paths: list[Path], *, fit: bool) -> Profile:
    """The profile in a file, or the one that runs make (fit: with models fitted to them)."""
    files = [path for path in paths if os.path.lexists(path) and not os.path.isdir(path)]
    if not files:
        return Profile.from_runs([read_one_run(run) for path in paths for run in runs_below(path)], fit=fit)
    if len(paths) > 1:
        raise InputError("profile export", f"{files[0]} beside other paths", "one profile, or folders of runs")
    return Profile.load(files[0])
