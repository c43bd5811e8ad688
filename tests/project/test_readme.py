"""What README promises: its commands are understood, its targets and files exist."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, run

from quantbench.analysis.check import check_run
from quantbench.device.wheels import TABLE
from quantbench.errors import StoreError
from quantbench.store.folder import read_run
from tools.guide.front import (
    BENCHMARK,
    CUBLAS_RUN,
    PICTURE,
    SWEEP_RUN,
    advise_text,
    draw_staircase,
    export_text,
    printed,
    read_staircase,
    staircase_text,
    sweep_text,
)

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
COMMANDS = [
    line for language, block in BLOCKS if not language for line in block.splitlines() if line
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [c for c in COMMANDS if c.startswith("quantbench ") and "--experiment" not in c]
)
def test_each_command_is_understood(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep is planned, for a GPU that need not be here; anything else is run as it stands. An
    experiment measures on a GPU; tests/analysis/test_check_command.py runs one on a simulated
    GPU."""
    words = line.removeprefix("quantbench ")
    if words.startswith("sweep ") and "--dry-run" not in words:
        words += " --dry-run --gpu a100-sxm4-80gb"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTBENCH_DEVICE", "cpu")
    assert run(words)


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("make ")])
def test_each_target_exists(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{line.split()[1]}:", makefile, re.M)


@pytest.mark.parametrize(
    "path", re.findall(r"`((?:quantbench|kernels|tests|docs|\.ci)/[\w./-]+)`", README)
)
def test_each_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_ci_runs_nothing_that_contributing_does_not_name() -> None:
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")
    ]
    assert commands == ["make check", "make test", "make test-extras"]
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command} ", contributing, re.M) for command in commands)


def test_ci_types_what_readme_types_as_a_stranger() -> None:
    typed = re.findall(r"^stranger (.*)$", (ROOT / ".ci" / "stranger").read_text(), re.M)
    assert typed[:2] == ["make sweep", 'make test TESTS="$*"']
    assert typed[2] == "bash -c 'source .venv/bin/activate && pytest --benchmark-only'"
    assert {"make sweep", "make test", "pytest --benchmark-only"} <= set(COMMANDS)
    for script in ("run", "nightly"):
        assert re.search(r"^\.ci/stranger", (ROOT / ".ci" / script).read_text(), re.M)


@pytest.mark.parametrize("line", ["volta", "cuda12", "cuda13"])
def test_each_line_of_wheels_is_an_extra_in_readme(line: str) -> None:
    (row,) = [row for row in README.splitlines() if f"`pip install '.[{line}]'`" in row]
    for wheels in TABLE:
        if wheels.name == line:
            assert wheels.requirements[0].removeprefix("torch==").removesuffix(".*") in row
            assert str(wheels.driver) in row


# --- what `python -m tools.guide.front` writes ------------------------------------------------------------


def place(name: str) -> str:
    """What stands between the markers of that name."""
    (found,) = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", README, re.S)
    return str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("advise", advise_text),
        ("sweep", lambda: sweep_text(read_run(ROOT / SWEEP_RUN))),
        ("export", lambda: export_text(ROOT)),
    ],
)
def test_samples_are_what_the_commands_print(name: str, write: Callable[[], str]) -> None:
    assert place(name) == write(), "run: python -m tools.guide.front"
    assert len(place(name).splitlines()) <= 16  # a screen has several


def test_the_sample_of_benchmarks_is_a_table_of_two_sizes() -> None:
    """Its times are those of the machine that wrote it."""
    fence, command, head, below, past, *_ = place("benchmark").splitlines()
    assert (fence, command) == ("```text", f"$ {BENCHMARK}")
    assert head.split()[-3:] == ["Median", "IQR", "Rounds"]
    assert below.startswith("test_gemm[0-below]")
    assert past.startswith("test_gemm[0-past]")


@pytest.mark.slow
def test_a_command_that_fails_is_no_sample() -> None:
    with pytest.raises(
        StoreError,
        match=r"front page: quantbench advise --gpu nosuch: .*; expected a run without error",
    ):
        printed("quantbench advise --gpu nosuch", ROOT)


@pytest.mark.slow
def test_the_staircase_is_what_the_runs_say(tmp_path: Path) -> None:
    found = read_staircase(ROOT)
    text = staircase_text(found, check_run(read_run(ROOT / CUBLAS_RUN), rules=()))
    assert place("staircase") == text, "run: python -m tools.guide.front"
    draw_staircase(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    rises = np.diff(found.triton.log_time)
    added = np.diff([found.waves(n).num_waves for n in found.triton.sizes]) > 0
    assert rises[added].min() > rises[~added].max()
    assert found.waves(found.edge[0].axes["n"]).efficiency == 1.0


def test_the_first_picture_is_the_staircase() -> None:
    assert re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)[0] == str(PICTURE)


def test_the_first_screen_has_installation_commands_and_the_picture() -> None:
    """In this order, within 60 lines, and the licence and what was measured soon after."""
    screen = README.splitlines()[:60]
    wanted = ["make install", "$ pytest", "$ quantbench sweep", "$ quantbench profile", "![Time"]
    lines = [next(i for i, line in enumerate(screen) if line.startswith(w)) for w in wanted]
    assert lines == sorted(lines)
    first = "\n".join(README.splitlines()[:75])
    assert "One GPU has been measured by us, an H200" in first
    assert "Apache License" in first
