"""What README promises: its commands are understood, its targets and files exist."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import run

from quantbench.device.wheels import TABLE
from quantbench.errors import StoreError
from tools.guide.front import (
    PAGES,
    PICTURE,
    advise_text,
    draw_staircase,
    read_staircase,
    staircase_text,
)

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_each_link_and_picture_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_ci_runs_nothing_that_readme_does_not_name() -> None:
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")
    ]
    assert commands == ["make check", "make test", "make test-extras"]
    assert all(f"`{command}`" in README for command in commands)


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


def place(page: Path, name: str) -> str:
    """What stands between the markers of that name."""
    (found,) = re.findall(
        rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", page.read_text(encoding="utf-8"), re.S
    )
    return str(found)


@pytest.mark.slow
def test_the_sample_of_advice_is_what_the_command_prints() -> None:
    printed = advise_text()
    for page in PAGES:
        assert place(ROOT / page, "advise") == printed, "run: python -m tools.guide.front"


@pytest.mark.slow
def test_a_command_that_fails_is_no_sample() -> None:
    with pytest.raises(
        StoreError,
        match=r"front page: quantbench advise --gpu nosuch: .*; expected a run without error",
    ):
        advise_text(("advise", "--gpu", "nosuch"))


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="the extra quantbench[tables] is not installed"
)
def test_the_staircase_is_what_the_table_says(tmp_path: Path) -> None:
    found = read_staircase()
    for page in PAGES:
        assert place(ROOT / page, "staircase") == staircase_text(found), (
            "run: python -m tools.guide.front"
        )
    draw_staircase(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_picture_is_the_staircase() -> None:
    for page in PAGES:
        first = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))[0]
        assert ((ROOT / page).parent / first).resolve() == (ROOT / PICTURE).resolve()
