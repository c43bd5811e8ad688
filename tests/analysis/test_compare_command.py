"""`quantbench compare` as a user or a build runs it: words, exit codes, JSON, JUnit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import refused, run, run_json
from made_runs import reference, write
from made_runs import run as made_run
from test_compare import points as quiet

from quantbench.launch import Launch
from quantbench.store.record import Failed, Record

HOSTILE = "k<script>&\x00\x1b[31m$\\frac"


def points(shifts: list[float], seed: int, provider: str = "torch.mm") -> list[Record]:
    launch = Launch(f"{HOSTILE}{seed}")
    return quiet(shifts, seed=seed, noise=0.003, count=20, launch=launch, provider=provider)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """results/a100-test/ with runs a, same, slower, fails."""
    write(tmp_path, made_run(points([1.0] * 6, 0), "a"))
    write(tmp_path, made_run(points([1.0] * 6, 50), "same", software={"torch": "2.13.0"}))
    write(tmp_path, made_run(points([1.0, 1.0, 1.2, 1.0, 1.0, 0.8], 50), "slower"))
    fails = points([1.0] * 6, 50)
    fails[2] = replace(fails[2], outcome=Failed("crash", HOSTILE))
    write(tmp_path, made_run(fails, "fails"))
    return tmp_path / "a100-test"


@pytest.fixture(autouse=True)
def _there(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def test_a_run_that_was_killed_is_said_to_be(runs: Path) -> None:
    write(runs.parent, made_run(points([1.0] * 6, 0), "killed", how_ended="running"))
    assert run("compare a killed").count("running, not complete") == 1


def test_no_regression_is_exit_code_0(runs: Path) -> None:
    said = run("compare a same")
    lines = said.splitlines()
    assert lines[0].startswith("a100-test: 108 SMs")
    assert "SIMULATED DATA" in said
    _, _, after = said.partition("\nsoftware: torch 2.11.0 → 2.13.0\n")
    assert "6 points: 0 slower, 0 faster, 6 same, 0 unclear" in after
    assert "nothing could be judged" not in said


def test_a_regression_is_exit_code_1_and_stands_first(runs: Path) -> None:
    said = run("compare a slower --junit out/junit.xml", code=1)
    assert "6 points: 1 slower, 1 faster, 4 same, 0 unclear" in said
    assert said.index("gemm n=192") < said.index("gemm n=384")
    assert "\x1b" not in said
    suite = ElementTree.parse(runs / "out" / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "1", "0")
    (failed,) = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed.get("name") == "gemm n=192"
    failure = failed.find("failure")
    assert "slower: 99.9 µs → 120 µs, ratio 1.2" in (failure.text or "")
    assert "k<script>&?" in (failure.text or "")


def test_a_point_that_fails_now_is_exit_code_1(runs: Path) -> None:
    said = run("compare a fails --junit junit.xml", code=1)
    assert "measured in A and failing in B: 1" in said
    suite = ElementTree.parse(runs / "junit.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("6", "1")


def test_providers_are_named_if_there_are_several(runs: Path) -> None:
    assert "torch.mm" not in run("compare a slower", code=1)
    for name, shift in (("a2", 1.0), ("b2", 1.2)):
        mine = points([shift], 0, "mine:G")
        (other,) = points([1.0], 0, "mine:Lost")
        if name == "b2":
            other = replace(other, outcome=Failed("crash", HOSTILE))
        write(runs.parent, made_run([*points([1.0], 0), *mine, other], name))
    said = run("compare a2 b2", code=1)
    assert "gemm n=64  mine:G " in said
    assert "gemm n=64 by mine:Lost: crash" in said


def test_the_reference_is_named_and_a_comparison_without_a_verdict_says_so(runs: Path) -> None:
    noisy = [reference(50.0, 0.0), *quiet([1.0] * 3, seed=0, noise=0.1)]
    write(runs.parent, made_run(noisy, "noisy"))
    said = run("compare noisy noisy")
    assert "nothing could be judged: every point is unclear" in said
    assert "the reference point itself (torch.mm on gemm 2048×2048×2048 bf16 nn): B takes" in said


def test_json_has_every_point(runs: Path) -> None:
    found = run_json("compare a slower", code=1)
    assert found["counts"] == {"slower": 1, "faster": 1, "same": 4, "unclear": 0}
    assert found["regressions"] == 1
    assert (found["options"]["margin"], found["tolerance"]) == (0.01, 0.01)
    worst = found["points"][0]
    assert (worst["place"]["axes"], worst["change"]) == ({"n": 192}, "slower")
    assert worst["low"] < worst["ratio"] < worst["high"]
    assert len(found["points"]) == 6


@pytest.mark.parametrize(
    ("words", "operation", "value"),
    [
        ("a nowhere", "read run", "nowhere"),
        ("a same --margin 150%", "--margin", "'150%'"),
        ("a same --by name", "compare", "by = 'name'"),
        ("a same --junit /dev/null/x", "write JUnit", "/dev/null/x (File exists)"),
    ],
)
def test_wrong_use_names_the_value(words: str, operation: str, value: str) -> None:
    error = refused(f"compare {words}")
    assert (error.operation, error.value) == (operation, value)
