"""Writes the evidence of each device from packed results: README.md, the profile of all runs, the report over hidden.

Entry point: `python -m tools.evidence.write PACKED…`; no GPU is needed. Unpacks runs and tables into the shelf
(`results/<device>/`), and computes all numbers from them; missing ones are marked as not measured.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quantbench.analysis.check import check_run
from quantbench.analysis.summary import Point, floor_lines, points_of
from quantbench.profile.profile import Profile
from quantbench.report.page import write_report
from quantbench.store.folder import Run, find_runs, read_run
from quantbench.units import duration
from tools.evidence.plan import COMMANDS, KERNEL_SWEEPS, RANDOM_SWEEP
from tools.evidence.run import extract
from tools.evidence.sections import cost_section, kernel_section, prediction_section, rule_section, timer_section
from tools.evidence.side_by_side import write_json

#: name of the sweep whose report is written
REPORTED = "hidden"
_MISSING = "Not measured yet: `python -m tools.evidence.run {command}`."


def main(
    packed: Annotated[list[Path], typer.Argument(help="Packed results, or folders that hold some.")],
    results: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("results"),
) -> None:
    """Unpacks the results, then writes the page, the profile and the report of each of their devices."""
    files = [file for path in packed for file in (sorted(path.glob("evidence-*.tar.gz")) if path.is_dir() else [path])]
    if not all(file.exists() for file in files) or not files:
        sys.exit(f"evidence: {', '.join(map(str, packed))}; expected evidence-*.tar.gz there")
    for folder in sorted({unpack(file, results) for file in files}):
        state = _table(folder, "state") or {}
        runs = {name: read_run(folder.parent / entry["run"]) for name, entry in state.items() if "run" in entry}
        page = folder / "README.md"
        page.write_text("\n".join(page_lines(folder, state, runs)) + "\n", encoding="utf-8")
        print(page)
        if runs:
            Profile.from_runs(list(runs.values())).save(folder / "profile.json")
            print(folder / "profile.json")
        if REPORTED in runs:
            print(write_report(runs[REPORTED], folder / "report").page)


def unpack(packed: Path, results: Path) -> Path:
    """Unpacks one command's results into results/<device>/, and its tables into the folder `evidence` there, which is
    returned. state.json there holds every part's outcome and the name of its run."""
    with tempfile.TemporaryDirectory() as name:
        extract(packed, name)
        (command,) = Path(name).iterdir()
        state = json.loads((command / "state.json").read_text(encoding="utf-8"))
        home = results / state.pop("device")
        folder: Path = home / "evidence"
        folder.mkdir(parents=True, exist_ok=True)
        for part, entry in state.items():
            for run in find_runs(command / part):
                shutil.copytree(run, home / run.name, dirs_exist_ok=True)
                entry["run"] = run.name
        for file in (*command.glob("*.json"), *command.glob("*.log")):
            if file.name != "state.json":
                shutil.copy(file, folder / file.name)
    write_json(folder / "state.json", (_table(folder, "state") or {}) | state)
    return folder


def page_lines(folder: Path, state: dict[str, Any], runs: dict[str, Run]) -> list[str]:
    """Returns the lines of one device's page.

    folder: folder with its tables. state: content of state.json. runs: sweeps by name.
    """
    copied = _table(folder, "copy-bandwidth")
    return [
        f"# Evidence from {folder.parent.name}",
        "",
        "Written by `python -m tools.evidence.write` from the files beside it and the runs below.",
        "",
        *_software(runs),
        *_section("Timer", timer_section, _table(folder, "timer-truth"), "a"),
        *_section("Timer beside NVBench", timer_section, _table(folder, "timer-nvbench"), "b"),
        *_section("What a point costs", cost_section, _table(folder, "cost"), "c"),
        "",
        "## Our kernels beside the libraries'",
        "",
        *kernel_section(_points(runs, KERNEL_SWEEPS), copied["gb_per_s"] if copied else None),
        *(f"\nAll {line}." for line in floor_lines((p.latency_us, p) for p in _points(runs, tuple(runs)))),
        "",
        "## Rules",
        "",
        *_rules(runs),
        "",
        "## Prediction",
        "",
        *_prediction(runs),
        "",
        "## Runs",
        "",
        *_run_lines(state, runs),
    ]


def _section(title: str, make: Any, table: dict[str, Any] | None, command: str) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    yield from make(table) if table else [_MISSING.format(command=command)]


def _table(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _points(runs: dict[str, Run], names: tuple[str, ...]) -> list[Point]:
    return [point for name in names if name in runs for point in points_of(runs[name].records, runs[name].info.device)]


def _rules(runs: dict[str, Run]) -> list[str]:
    """Formats verdicts over all runs together, because a rule's pairs may be in different runs."""
    swept = [run for name, run in runs.items() if name != RANDOM_SWEEP]
    if not swept:
        return [_MISSING.format(command="b")]
    together = replace(swept[0], records=tuple(record for run in swept for record in run.records))
    return rule_section(check_run(together))


def _prediction(runs: dict[str, Run]) -> list[str]:
    if RANDOM_SWEEP not in runs:
        return [_MISSING.format(command="c")]
    return prediction_section(_points(runs, (RANDOM_SWEEP,)), runs[RANDOM_SWEEP].info.device)


def _software(runs: dict[str, Run]) -> list[str]:
    """Lists each distinct set of software versions; more than one line means that the runs are not comparable."""
    sets = dict.fromkeys(", ".join(f"{k} {v}" for k, v in sorted(run.info.software.items())) for run in runs.values())
    return [f"Software: {text}." for text in sets]


def _run_lines(state: dict[str, Any], runs: dict[str, Run]) -> list[str]:
    lines = ["| part | points | how it ended | time | folder |", "|---|---:|---|---:|---|"]
    for name in (part.name for parts in COMMANDS.values() for part in parts if part.name in state):
        if name not in runs:
            lines.append(f"| {name} | – | {state[name]['how_ended']} | – | – |")
            continue
        run = runs[name]
        points = sum(record.role == "point" for record in run.records)
        elapsed_s = max((record.elapsed_s for record in run.records), default=0.0)
        how = run.info.how_ended or state[name]["how_ended"]
        lines.append(f"| {name} | {points:,} | {how} | {duration(elapsed_s)} | ../{run.folder.name} |")
    return lines


if __name__ == "__main__":
    typer.run(main)
