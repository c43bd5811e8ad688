"""`quantbench compare` as a user or a build runs it: words, exit codes, JSON, JUnit, the picture."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_runs import record, run, samples, write

from quantbench.launch import Launch
from quantbench.store.record import Failed, Record
from quantbench.workload import Gemm

HOSTILE = "k<script>&\x00\x1b[31m$\\frac"


def points(shifts: list[float], seed: int) -> list[Record]:
    return [
        record(Gemm(1024, 64 * (i + 1), 1024), samples(100 * shift, noise=0.003, count=20, seed=seed + i),
               {"n": 64 * (i + 1)}, launch=Launch(f"{HOSTILE}{seed}"))
        for i, shift in enumerate(shifts)
    ]  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """results/a100-test/ with runs a, same, slower, fails."""
    write(tmp_path, run(points([1.0] * 6, 0), "a"))
    write(tmp_path, run(points([1.0] * 6, 50), "same", software={"torch": "2.13.0"}))
    write(tmp_path, run(points([1.0, 1.0, 1.2, 1.0, 1.0, 0.8], 50), "slower"))
    fails = points([1.0] * 6, 50)
    fails[2] = replace(fails[2], outcome=Failed("crash", HOSTILE))
    write(tmp_path, run(fails, "fails"))
    return tmp_path / "a100-test"


def compare(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quantbench", "compare", *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_run_that_was_killed_is_said_to_be(runs: Path) -> None:
    write(runs.parent, run(points([1.0] * 6, 0), "killed", how_ended="running"))
    lines = compare(runs, "a", "killed").stdout.replace("\n", "")
    assert "B: killed (started 2026-11-20T13:45:00+00:00, running, not complete, SIMULATED)" in lines
    assert lines.count("not complete") == 1


def test_the_verdict_of_a_run_that_takes_no_picture_is_printed(runs: Path) -> None:
    (runs / "slower" / "compare-with-a.png").mkdir()
    done = compare(runs, "a", "slower")
    assert done.returncode == 1
    assert "1 slower" in done.stdout
    assert "no picture: write picture: slower/compare-with-a.png" in done.stdout
    refused = compare(runs, "a", "slower", "-o", "slower")
    assert refused.returncode == 2
    assert "slower" not in refused.stdout


@pytest.mark.slow
def test_no_regression_is_exit_code_0(runs: Path) -> None:
    done = compare(runs, "a", "same")
    assert done.returncode == 0, done.stderr
    assert "SIMULATED DATA" in done.stdout
    assert "software: torch 2.11.0 → 2.13.0" in done.stdout
    assert "6 points: 0 slower, 0 faster, 6 same, 0 unclear" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("a100-test: 108 SMs")
    assert lines.index("software: torch 2.11.0 → 2.13.0") < next(i for i, x in enumerate(lines) if "6 points" in x)
    assert (runs / "same" / "compare-with-a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_regression_is_exit_code_1_and_stands_first(runs: Path) -> None:
    done = compare(runs, "a", "slower", "--junit", "out/junit.xml", "-o", "out")
    assert done.returncode == 1, done.stderr
    assert "6 points: 1 slower, 1 faster, 4 same, 0 unclear" in done.stdout
    assert done.stdout.index("gemm n=192") < done.stdout.index("gemm n=384")
    assert "\x1b" not in done.stdout
    assert (runs / "out" / "compare-with-a.png").exists()
    suite = ElementTree.parse(runs / "out" / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "1", "0")
    (failed,) = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed.get("name") == "gemm n=192"
    failure = failed.find("failure")
    assert failure is not None
    assert "slower: 99.9 µs → 120 µs, ratio 1.2" in (failure.text or "")
    assert "k<script>&?" in (failure.text or "")


@pytest.mark.slow
def test_a_point_that_fails_now_is_exit_code_1(runs: Path) -> None:
    done = compare(runs, "a", "fails", "--junit", "junit.xml")
    assert done.returncode == 1
    assert "measured in A and failing in B: 1" in done.stdout
    suite = ElementTree.parse(runs / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("6", "1")


@pytest.mark.slow
def test_json_has_every_point(runs: Path) -> None:
    done = compare(runs, "a", "slower", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["counts"] == {"slower": 1, "faster": 1, "same": 4, "unclear": 0}
    assert found["regressions"] == 1
    assert (found["margin"], found["tolerance"]) == (0.01, 0.01)
    worst = found["points"][0]
    assert (worst["axes"], worst["verdict"]) == ({"n": 192}, "slower")
    assert worst["low"] < worst["ratio"] < worst["high"]
    assert len(found["points"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("a", "nowhere"), "read run: nowhere; expected a folder with run.json in it"),
        (("a", "."), "read run: . holds 4 runs; expected one of them: a, fails, same, …"),
        (("a", "same", "--margin", "much"), "--margin: 'much'; expected a percentage from 0% to 100%"),
        (("a", "same", "--margin", "150%"), "--margin: '150%'; expected a percentage from 0% to 100%"),
        (("a", "same", "--by", "name"), "by = 'name'; expected one of key, workload"),
        (("a", "same", "-o", "/dev/null/x"), "expected a folder that can be written"),
        (("a", "same", "--junit", "/dev/null/x"), "expected a file that can be written"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(runs: Path, words: tuple[str, ...], message: str) -> None:
    done = compare(runs, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_records_of_another_run_are_refused(runs: Path) -> None:
    lines = (runs / "same" / "records.jsonl").read_text() + (runs / "a" / "records.jsonl").read_text()
    (runs / "same" / "records.jsonl").write_text(lines)
    done = compare(runs, "a", "same")
    assert done.returncode == 2
    assert "same has records of a; expected records of same alone" in done.stderr
