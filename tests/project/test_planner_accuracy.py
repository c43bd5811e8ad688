"""The table of docs/planning.md says what the planner does, and the commands on that page run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from quantbench.cli.plan import plan
from quantbench.latency.model_times import BestTimes
from quantbench.planner.calibration import shipped
from tools.planner_accuracy import PAGE, Group, accuracy_table, groups

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / PAGE
COMMANDS = re.findall(r"^quantbench (plan .+)$", DOCS.read_text(), re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def found() -> list[Group]:
    return list(groups(ROOT / "tests" / "data", BestTimes(), shipped()))


@pytest.mark.slow
def test_the_page_has_the_figures_of_today(found: list[Group]) -> None:
    fresh = [line for line in accuracy_table(found).splitlines() if line.startswith("| ") and "---" not in line]
    page = DOCS.read_text().splitlines()
    assert len(fresh) == 10
    for line in fresh[1:]:
        name, cells = line.split(" | ", 1)
        old = next(other.split(" | ", 1)[1] for other in page if other.startswith(f"{name} | "))
        numbers = [[float(n) for n in _NUMBER.findall(text)] for text in (old, cells)]
        # A new fit of the products' models moves errors by some tenths; `make docs` writes the table again.
        for then, now, unit in zip(*numbers, ("rows", "%", "%", "%", "rank", "share"), strict=True):
            assert now == pytest.approx(then, abs={"rows": 0, "%": 0.5, "rank": 0.05, "share": 12}[unit]), (name, unit)


def test_what_is_asked_of_the_planner(found: list[Group]) -> None:
    by_name = {group.name: group for group in found}
    assert by_name["documents, days fitted to"].summary.rows == 64
    later = by_name["documents, 02-25 (nothing fitted)"]
    assert (later.summary.rows, later.summary.mape <= 4.0) == (20, True)
    every = by_name["documents, all A100 rows"]
    assert (every.summary.rows, every.summary.mape <= 3.5, every.summary.spearman >= 0.95) == (84, True, True)
    # A site and a GPU that nothing was fitted to: too fast, and the interval says that it may be.
    assert by_name["documents, V100"].inside == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    app = typer.Typer()
    app.command()(plan)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert done.output.strip()
