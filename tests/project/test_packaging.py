"""The package from outside: installed without network or build isolation, and run from a plain
checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BARE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
LOOK = """
import quantbench, quantbench.kernels, quantbench.device, json
from quantbench.store.schema import schema
from quantbench.workload.presets import preset
print(json.dumps([quantbench.__file__, quantbench.kernels.__file__, schema("run")["$id"], preset("bloom-176b").hidden]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the repository holds, without anything built or installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("quantbench", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def python(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**BARE, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_plain_checkout_runs_where_the_dependencies_are(checkout: Path) -> None:
    done = python("-m", "quantbench", "--version", cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quantbench ")
    done = python("-c", LOOK, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert f'"{checkout}/quantbench/__init__.py", "{checkout}/kernels/__init__.py"' in done.stdout
    assert '"quantbench-run-2", 14336' in done.stdout


def test_models_leave_the_wheel_below_13_mb() -> None:
    # Files of models do not deflate; the sources in a wheel are 0.8 MB.
    size = sum(
        p.stat().st_size for p in (ROOT / "quantbench").rglob("models/*") if p.suffix != ".json"
    )
    assert 1e6 < size < 12e6


@pytest.mark.slow
def test_it_installs_without_network_and_imports_from_elsewhere(
    checkout: Path, tmp_path: Path
) -> None:
    pytest.importorskip(
        "setuptools", reason="--no-build-isolation needs setuptools where quantbench is installed"
    )
    site = tmp_path / "site"
    words = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    )
    done = python(*words, str(checkout), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = python("-c", LOOK, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert (
        f'"{site}/quantbench/__init__.py", "{site}/quantbench/kernels/__init__.py"' in done.stdout
    )
    installed = {path.relative_to(site).as_posix() for path in (site / "quantbench").rglob("*.py")}
    expected = {
        path.relative_to(checkout).as_posix() for path in (checkout / "quantbench").rglob("*.py")
    }
    expected |= {
        f"quantbench/{path.relative_to(checkout).as_posix()}"
        for path in (checkout / "kernels").rglob("*.py")
    }
    assert installed == expected
    data = {
        p.relative_to(checkout).as_posix()
        for p in (checkout / "quantbench").rglob("*.*")
        if p.suffix in (".toml", ".json", ".gemm", ".j2", ".css")
    }
    assert data <= {
        path.relative_to(site).as_posix() for path in (site / "quantbench").rglob("*.*")
    }
