"""Writes the evidence of each device: README.md, the profile of all runs, and the report of the sweep over hidden.

Entry point: `python -m tools.evidence.write`. Run by `make evidence`. All numbers are computed from the runs and tables
in the device's folder; missing ones are marked as not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quantbench.analysis.check import check_run
from quantbench.analysis.summary import Point, points_of
from quantbench.errors import InputError
from quantbench.profile.profile import Profile
from quantbench.report.page import write_report
from quantbench.store.folder import Run, read_run
from quantbench.units import duration
from tools.evidence.sections import cost_section, kernel_section, prediction_section, rule_section, timer_section
from tools.evidence.steps import RANDOM_SWEEP, STEPS, TABLES

#: name of the sweep whose report is written
REPORTED = "hidden"
_MISSING = "Not measured yet: `make evidence STEPS={step}`."


def main(results: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("results")) -> None:
    """Writes the page, the profile and the report of every device that has evidence."""
    folders = sorted(results.glob("*/evidence"))
    if not folders:
        raise InputError("evidence", str(results), "a folder with <device>/evidence in it (make evidence)")
    for folder in folders:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        runs = {name: read_run(results.parent / entry["run"]) for name, entry in state.items() if entry.get("run")}
        page = folder / "README.md"
        page.write_text("\n".join(page_lines(folder, state, runs)) + "\n", encoding="utf-8")
        print(page)
        if runs:
            Profile.from_runs(list(runs.values())).save(folder / "profile.json")
            print(folder / "profile.json")
        if REPORTED in runs:
            print(write_report(runs[REPORTED], folder / "report").page)


def page_lines(folder: Path, state: dict[str, Any], runs: dict[str, Run]) -> list[str]:
    """Returns the lines of one device's page.

    folder: folder with its tables. state: content of state.json. runs: sweeps by name.
    """
    if not runs:
        return ["# Evidence", "", "Nothing was measured yet."]
    info = next(iter(runs.values())).info
    copied = _table(folder, "copy-bandwidth")
    return [
        f"# Evidence from {info.device.name}",
        "",
        "Written by `python -m tools.evidence.write` from the files beside it and the runs below.",
        "",
        *_software(runs),
        *_section("Timer", timer_section, _table(folder, "timer-truth"), step=1),
        *_section("What a point costs", cost_section, _table(folder, "cost"), step=3),
        "",
        "## Our kernels beside the libraries'",
        "",
        *kernel_section(_points(runs, [sweep.name for sweep in STEPS[1]]), copied["gb_per_s"] if copied else None),
        "",
        "## Rules",
        "",
        *_rules(runs),
        "",
        "## Prediction",
        "",
        *prediction_section(_points(runs, [RANDOM_SWEEP]), info.device),
        "",
        "## Runs",
        "",
        *_run_lines(state, runs),
    ]


def _section(title: str, make: Any, table: dict[str, Any] | None, *, step: int) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from make(table) if table else [_MISSING.format(step=step)]


def _table(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _points(runs: dict[str, Run], names: list[str]) -> list[Point]:
    return [point for name in names if name in runs for point in points_of(runs[name].records, runs[name].info.device)]


def _rules(runs: dict[str, Run]) -> list[str]:
    """Formats verdicts over all runs together, because a rule's pairs may be in different runs."""
    swept = [runs[sweep.name] for step in (1, 2) for sweep in STEPS[step] if sweep.name in runs]
    if not swept:
        return [_MISSING.format(step=2)]
    together = replace(swept[0], records=tuple(record for run in swept for record in run.records))
    return rule_section(check_run(together))


def _software(runs: dict[str, Run]) -> list[str]:
    """Lists each distinct set of software versions; more than one line means that the runs are not comparable."""
    sets = dict.fromkeys(", ".join(f"{k} {v}" for k, v in sorted(run.info.software.items())) for run in runs.values())
    return [f"Software: {text}." for text in sets]


def _run_lines(state: dict[str, Any], runs: dict[str, Run]) -> list[str]:
    lines = ["| sweep | points | how it ended | time | folder |", "|---|---:|---|---:|---|"]
    for name, entry in state.items():
        if name not in runs:
            if any(name in tables for tables in TABLES.values()):
                continue
            lines.append(f"| {name} | – | {entry.get('how_ended', '–')} | – | – |")
            continue
        run = runs[name]
        points = sum(record.role == "point" for record in run.records)
        elapsed_s = max((record.elapsed_s for record in run.records), default=0.0)
        lines.append(f"| {name} | {points:,} | {run.info.how_ended} | {duration(elapsed_s)} | ../{run.folder.name} |")
    return lines


if __name__ == "__main__":
    typer.run(main)
