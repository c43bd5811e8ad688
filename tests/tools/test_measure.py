"""What is measured on a GPU beside sweeps: tables that are taken up, figures made of them, the
script that runs all.
"""

import json
import os
import re
import shlex
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path

import made_runs
import pytest
from typer.testing import CliRunner

from quantbench.cli.app import app
from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.workload import Gemm
from tools.measure import side_by_side
from tools.measure.figures import cost_lines, prediction_lines, timer_lines
from tools.measure.other_methods import Case
from tools.measure.random_shapes import random_shapes

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "measure" / "on_gpu"
_TEXT = SCRIPT.read_text(encoding="utf-8")
_BOTH = re.search(r'both="(.*)"', _TEXT)
SWEEPS = re.findall(r"^    sweep \S+ (.*)$", _TEXT, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("words", SWEEPS)
def test_each_sweep_of_the_script_can_be_planned_for_an_h200(words: str, tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("m,n,k\n64,64,64\n")
    typed = words.replace("$both", _BOTH[1]).replace("$OUT/$step/shapes.csv", str(shapes))
    done = CliRunner().invoke(
        app, ["sweep", *shlex.split(typed), "--dry-run", "--gpu", "h200-sxm-141gb", "--json"]
    )
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["points"]


def test_the_script_packs_what_a_step_left_and_goes_on_with_its_runs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\necho "$@" >> "$CALLS"\n'
        'while [ $# -gt 1 ]; do [ "$1" = --results ] && into=$2; shift; done\n'
        '[ -z "${into:-}" ] || { mkdir -p "$into/gpu/run" && touch "$into/gpu/run/run.json"; }\nexit 1\n'
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    calls = tmp_path / "calls"
    here = {**os.environ, "PYTHON": str(python), "OUT": str(out), "CALLS": str(calls)}
    for _ in range(2):
        subprocess.run([SCRIPT, "hidden"], env=here, check=True, capture_output=True)
    run = out / "hidden" / "hidden" / "gpu" / "run"
    asked = [line for line in calls.read_text().splitlines() if " sweep " in line]
    assert asked == [
        f"-m quantbench sweep --dim hidden --results {run.parents[1]}",
        f"-m quantbench sweep --resume {run} --budget 3m",
    ]
    with tarfile.open(out / "hidden.tar.gz") as packed:
        assert {"hidden/log.txt", "hidden/hidden/gpu/run/run.json"} <= set(packed.getnames())


def test_a_table_that_was_cut_short_is_finished_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def method(case: Case) -> list[float]:
        asked.append(case.gemm.m)
        if len(asked) == 8:
            raise KeyboardInterrupt
        return [9.0, 7.0, 8.0]

    monkeypatch.setattr(side_by_side, "prepare", lambda gemm, spec: Case(gemm, spec, lambda: None))
    gemms = [Gemm(n, n, n) for n in (64, 128, 192)]
    given = (tmp_path / "table.json", lookup("h200-sxm-141gb"), gemms)
    with pytest.raises(KeyboardInterrupt):
        side_by_side.measure_rows(*given, {"one": method})
    assert len(side_by_side.measure_rows(*given, {"one": method})) == 3
    assert asked == [*[64] * 3, *[128] * 3, *[192] * 2, *[192] * 3]
    # A method that came later is added to the rows that are there.
    rows = side_by_side.measure_rows(*given, {"one": method, "last": lambda case: []})
    assert len(asked) == 11
    assert rows == json.loads(given[0].read_text())["rows"]
    assert [row["sizes"][0] for row in rows] == [64, 128, 192]
    assert all(row["medians_us"] == {"one": [8.0] * 3, "last": []} for row in rows)


def test_timers_are_compared_from_twenty_microseconds_on() -> None:
    short = {"medians_us": {"quantbench": [5.0, 5.1, 5.2], "mamf": [9.3]}}
    long = {"medians_us": {"quantbench": [101.0] * 2, "do_bench": [100.0], "mamf": []}}
    assert timer_lines({"rows": [short, long]}) == [
        "- differs from do_bench by at most 1.00 % (median 1.00 %)",
        "- repeats spread by at most 4.00 % (median 2.00 %)",
    ]


@pytest.mark.parametrize(
    ("ours_s", "ours_us", "verdict"),
    [
        (0.12, [10.0, 10.1], "met"),
        (0.13, [10.0, 10.1], "missed"),
        (0.05, [10.0, 11.1], "missed"),
        (0.05, [10.0], "missed"),
    ],
)
def test_the_target_of_the_cost_is_met_or_missed(
    ours_s: float, ours_us: list[float], verdict: str
) -> None:
    row = {
        "medians_us": {"quantbench": ours_us, "mamf": [10.0, 11.0]},
        "wall_s": {"quantbench": [ours_s], "mamf": [0.022]}, "prepare_s": 0.5,
    }  # fmt: skip
    # 30 s over 50 points and 0.022 s, against five times ours.
    assert cost_lines({"repeats": 2, "rows": [row]})[-1].endswith(f": {verdict}.")


@pytest.mark.slow
def test_predictions_are_judged_on_products_that_were_not_fitted() -> None:
    works = [Gemm(m, n, k, layout="nt") for m, n, k in random_shapes()[:420]]
    timed = [
        made_runs.record(work, [5.0 + 3.0 * work.flops / 312e6] * 5, {"m": work.m})
        for work in works
    ]
    run = made_runs.run(timed)
    head, _, *lines = prediction_lines(run, {"again": run})
    assert head == "| model | random (220) | again (420) |"
    cells = [line.split("|") for line in lines]
    medians = {row[1].strip(): float(row[2].split()[0]) for row in cells}
    assert medians["other GPUs' and 200 rows"] < medians["shipped"]
    with pytest.raises(InputError, match="100 products"):
        prediction_lines(replace(run, records=run.records[:100]))
