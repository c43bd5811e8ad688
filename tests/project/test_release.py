"""Wheel and source distribution: built without network, complete, typed, and working from outside
the checkout.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from commands import ROOT

from quantbench import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools puts its own words there
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""
# What a user does first, where nothing of the checkout is in reach: arithmetic, a prediction, a
# sweep, its files.
SMOKE = """
import subprocess, sys
from pathlib import Path
import quantbench
from quantbench.device import lookup
from quantbench.latency import GemmModel
from quantbench.store.folder import read_run
from quantbench.store.schema import schema
from quantbench.workload.presets import preset

assert Path(sys.argv[1]) in Path(quantbench.__file__).parents, quantbench.__file__
assert lookup("h100-sxm5-80gb").sm_count == 132
assert preset("llama-3-8b").hidden == 4096
assert schema("run")["$id"] == "quantbench-run-2"
assert GemmModel.best("a100-sxm4-80gb").predict(4096, 4096, 4096).latency_us > 0

def quantbench_(*words):
    done = subprocess.run([sys.executable, "-m", "quantbench", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

assert quantbench_("--version").strip() == f"quantbench {quantbench.__version__}"
quantbench_("devices")
quantbench_("advise", "--model", "llama-3-8b", "--tp", "2", "--gpu", "h100-sxm5-80gb")
quick = ("-m", "64", "-k", "64", "--precision", "20%", "--cache", "hot", "--dtype", "fp32")
quantbench_("sweep", "--dim", "n=64,96,128", *quick)
(run,) = Path("results").glob("*/*")
assert len([r for r in read_run(run).records if r.role == "point"]) == 3
quantbench_("report", str(run))
assert list(run.glob("*.html")), list(run.iterdir())
print("works", sys.version.split()[0])
"""


def python(*words: str, cwd: Path, interpreter: str = sys.executable, **environment: str) -> str:
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter, *words], cwd=cwd, env={**bare, "QUANTBENCH_DEVICE": "cpu", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the repository holds, without anything built or installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("quantbench", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    if not os.environ.get("QUANTBENCH_BUILD"):
        pytest.skip("make test-extras builds and installs the wheel (QUANTBENCH_BUILD=1)")
    out = tmp_path_factory.mktemp("dist")
    python("-c", BUILD, str(out), cwd=checkout)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


def test_a_plain_checkout_runs_where_the_dependencies_are(checkout: Path) -> None:
    code = "import quantbench, quantbench.kernels as k; print(quantbench.__file__, k.__file__)"
    said = python("-c", code, cwd=checkout)
    assert said == f"{checkout}/quantbench/__init__.py {checkout}/kernels/__init__.py\n"
    assert python("-m", "quantbench", "--version", cwd=checkout).startswith("quantbench ")


def test_models_leave_the_wheel_below_13_mb() -> None:
    # Files of models do not deflate; the sources in a wheel are 0.8 MB.
    models = (ROOT / "quantbench").rglob("models/*")
    assert 1e6 < sum(p.stat().st_size for p in models if p.suffix != ".json") < 12e6


def sources() -> set[str]:
    """Everything that a user needs, as it is called in the package."""
    kept = {".py", ".toml", ".json", ".gemm", ".j2", ".css", ".typed"}
    found = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "quantbench").rglob("*.*")
        if p.suffix in kept
    }
    found |= {
        f"quantbench/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "kernels").rglob("*.py")
    }
    return {name for name in found if "__pycache__" not in name} | {"quantbench/py.typed"}


@pytest.mark.slow
def test_the_wheel_holds_every_file_and_its_types(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    assert sources() <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "results"))]


def test_the_source_distribution_holds_every_file(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {re.sub("^quantbench/kernels/", "kernels/", name) for name in sources()}
    assert expected | {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_its_metadata_says_what_pyproject_does(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_string(wheel.read(name).decode())
        points = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Version"] == PROJECT["version"] == __version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"tables", "ray", "dev"} <= set(metadata.get_all("Provides-Extra"))
    assert "quantbench = quantbench.__main__:main" in points
    assert "quantbench = quantbench.pytest_plugin" in points


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert next(heading for heading in headings if heading != "Unreleased") == __version__


# Other interpreters that have the dependencies, to try the wheel with:
# QUANTBENCH_PYTHONS=/a/bin/python:/b/bin/python.
PYTHONS = [sys.executable, *filter(None, os.environ.get("QUANTBENCH_PYTHONS", "").split(":"))]
OFFLINE = (
    "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("interpreter", PYTHONS)
def test_the_wheel_installs_without_network_and_works_from_elsewhere(
    built: tuple[Path, Path], tmp_path: Path, interpreter: str
) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    python(*OFFLINE, str(site), str(built[0]), cwd=work, interpreter=interpreter)
    (work / "smoke.py").write_text(SMOKE)
    said = python("smoke.py", str(site), cwd=work, interpreter=interpreter, PYTHONPATH=str(site))
    assert said.startswith("works ")


@pytest.mark.slow
def test_the_source_distribution_installs_without_network(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    python(*OFFLINE, str(tmp_path / "site"), str(built[1]), cwd=tmp_path)
    assert (tmp_path / "site" / "quantbench" / "py.typed").exists()
    assert (tmp_path / "site" / "quantbench" / "kernels" / "gemm" / "__init__.py").exists()
