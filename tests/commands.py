"""Commands in this process, typed as in a shell: a line in, what was said out."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quantbench.cli.app import app
from quantbench.errors import QuantbenchError

ROOT = Path(__file__).resolve().parents[1]


def python(*words: str, **options: Any) -> str:
    """Returns what a process of Python prints; fails unless it ends well. options: of the
    process.
    """
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(line: str, code: int = 0) -> str:
    """Returns what the command line prints; fails unless it ends with `code`."""
    result = CliRunner().invoke(app, shlex.split(line), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def run_json(line: str, code: int = 0) -> Any:
    """Returns what the command line answers as JSON."""
    result = CliRunner().invoke(app, shlex.split(f"{line} --json"), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refused(line: str) -> QuantbenchError:
    """Returns the error that the command line ends with."""
    with pytest.raises(QuantbenchError) as caught:
        run(line)
    return caught.value
