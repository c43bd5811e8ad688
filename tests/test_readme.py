"""What README promises: its commands are understood, its targets and files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", README, re.S) for line in block.splitlines() if line]


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("quantbench ")])
def test_each_command_is_understood(line: str, tmp_path: Path) -> None:
    """A sweep is planned, for a GPU that need not be here; anything else is run as it stands."""
    words = shlex.split(line)[1:]
    if words[0] == "sweep" and "--dry-run" not in words:
        words += ["--dry-run", "--gpu", "a100-sxm4-80gb"]
    done = subprocess.run(
        [sys.executable, "-m", "quantbench", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("make ")])
def test_each_target_exists(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{line.split()[1]}:", makefile, re.M)


@pytest.mark.parametrize("path", re.findall(r"`((?:quantbench|kernels|tests|docs|\.ci)/[\w./-]+)`", README))
def test_each_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("path", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_each_link_and_picture_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_ci_runs_nothing_that_readme_does_not_name() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make check", "make test"]
    assert all(f"`{command}`" in README for command in commands)
