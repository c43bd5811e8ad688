"""What must stay light: torch and triton are loaded where work is run and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "quantbench"
# Layers that run work on a device; every other one must import without torch and triton.
HEAVY_LAYERS = ("providers", "timing")
HEAVY = ("torch", "triton")


def light_modules() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] in HEAVY_LAYERS or path.stem == "__main__":
            continue
        names.append(".".join(parts[:-1] if path.stem == "__init__" else parts))
    return names


@pytest.mark.slow
def test_everything_but_providers_and_timing_imports_without_torch() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {light_modules()!r}: importlib.import_module(name)\n"
        "import quantbench.providers, quantbench.providers.catalog, quantbench.providers.base\n"
        "import quantbench.timing, quantbench.timing.options, quantbench.timing.grade\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_help_loads_nothing_that_computes() -> None:
    code = (
        "import sys\n"
        "sys.argv = ['quantbench', '--help']\n"
        "from quantbench.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'triton', 'numpy', 'scipy', 'pandas', 'matplotlib', 'seaborn', 'sklearn')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "[]"
    assert "sweep" in done.stdout


def test_no_command_computes_before_it_is_called() -> None:
    code = (
        "import sys\n"
        "from quantbench.cli.app import COMMANDS, load\n"
        "for name in COMMANDS: load(name)\n"
        "heavy = ('torch', 'triton', 'numpy', 'scipy', 'pandas', 'matplotlib', 'seaborn', 'sklearn', 'pyarrow')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
