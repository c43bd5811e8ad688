"""`pytest --benchmark-only` as README types it: not `python -m pytest`, and with or without the
extra dev.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

SCRIPT = Path(sys.executable).parent / "pytest"
WITH_TOOLS = "tests/project/test_readme.py"
WITH_HYPOTHESIS = "tests/quantization/test_stats.py"
BENCHMARKS = "tests/benchmarks"

pytestmark = pytest.mark.slow


def collected(*paths: str, python_path: str = "") -> str:
    """What the typed command says of these paths; it must end without an error."""
    # hypothesis's own plugin is no part of what is tried, and fails without hypothesis.
    options = "-p no:hypothesispytest --benchmark-only --collect-only -q -rs"
    words = [str(SCRIPT), *options.split(), *paths]
    environment = {**os.environ, "PYTHONPATH": python_path}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_module_that_needs_the_extra_dev_is_skipped_with_the_reason(tmp_path: Path) -> None:
    absent = "raise ModuleNotFoundError(\"No module named 'hypothesis'\", name='hypothesis')"
    (tmp_path / "hypothesis.py").write_text(absent)
    said = collected(WITH_HYPOTHESIS, WITH_TOOLS, BENCHMARKS, python_path=str(tmp_path))
    assert f"{BENCHMARKS}/test_edge_pairs.py::test_gemm" in said
    assert f"{WITH_TOOLS}::" in said
    assert "hypothesis, of the extra quantbench[dev], is not installed" in said


def test_the_typed_command_collects_the_benchmarks_alone() -> None:
    found = [line for line in collected().splitlines() if "::" in line]
    assert found
    assert all(line.startswith(f"{BENCHMARKS}/") for line in found)
