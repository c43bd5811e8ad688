"""Which torch is installed: the table, what the machine says, and the choice against local
indexes.
"""

import ctypes
import subprocess
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from quantbench.device import wheels
from quantbench.device.wheels import Choice, choose, install_line, machine

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize(
    ("driver", "capability", "line"),
    [
        (None, None, "cpu"),
        ("525.60.13", (6, 0), "volta"),  # P100
        ("535.183.01", (7, 0), "volta"),  # V100
        ("580.95.05", (7, 0), "volta"),
        ("535.183.01", (7, 5), "cuda12"),  # T4
        ("525.60.13", (8, 0), "cuda12"),  # A100
        ("579.10", (9, 0), "cuda12"),  # H100
        ("570.26", (12, 0), "cuda12"),
        ("580.65.06", (8, 0), "cuda13"),
        ("590.10", (10, 0), "cuda13"),
        ("580.65.06", None, "cuda13"),
        ("550.54.15", None, "cuda12"),
    ],
)
def test_driver_and_card_choose_the_line(
    driver: str | None, capability: tuple[int, int] | None, line: str
) -> None:
    choice = choose(driver, capability)
    assert choice.name == line
    assert choice.command.startswith("pip uninstall --yes torch triton && pip install")
    assert all(f"'{requirement}'" in choice.command for requirement in choice.requirements)
    if driver:
        assert driver in choice.reason
    if capability:
        assert f"{capability[0]}.{capability[1]}" in choice.reason


@pytest.mark.parametrize(
    ("driver", "capability", "advice"),
    [
        ("470.256.02", (8, 0), "update NVIDIA's driver to 525 or newer"),
        ("560.35.03", (10, 0), "update NVIDIA's driver to 570 or newer"),
        ("470.256.02", (3, 7), "set QUANTBENCH_DEVICE=cpu to use the CPU"),  # K80
    ],
)
def test_a_machine_that_nothing_serves_gets_advice(
    driver: str, capability: tuple[int, int], advice: str
) -> None:
    choice = choose(driver, capability)
    assert (choice.name, choice.requirements) == ("", ())
    assert install_line(driver, capability) == advice


def test_the_extras_are_the_table() -> None:
    for line in wheels.TABLE:
        assert EXTRAS[line.name] == list(line.requirements)


def test_the_project_bounds_torch_only_from_below() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [each for each in project["dependencies"] if each.startswith(("torch", "triton"))]
    assert len(bounds) == 2
    assert not any("<" in each or "==" in each.split(";")[0] for each in bounds)


class Nvml:
    """A stand-in for libnvidia-ml: cards by capability; None for one that may not be opened."""

    def __init__(self, *cards: tuple[int, int] | None, started: int = 0) -> None:
        self.cards = cards
        self.started = started

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.started

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.cards)
        return 0

    def nvmlSystemGetDriverVersion(self, version: Any, size: int) -> int:  # noqa: N802
        version.value = b"535.183.01"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, card: Any) -> int:  # noqa: N802
        card._obj.value = index + 1
        return 0 if self.cards[index] else 4

    def nvmlDeviceGetCudaComputeCapability(  # noqa: N802
        self, card: ctypes.c_void_p, major: Any, minor: Any
    ) -> int:
        major._obj.value, minor._obj.value = self.cards[card.value - 1] or (0, 0)
        return 0


NOWHERE = Path("/nonexistent")


@pytest.mark.parametrize(
    ("nvml", "found"),
    [
        (Nvml((8, 0)), ("535.183.01", (8, 0))),
        (Nvml((7, 0), (9, 0)), ("535.183.01", (9, 0))),
        (Nvml(None, (7, 5)), ("535.183.01", (7, 5))),
        (Nvml(None), ("535.183.01", None)),
        (Nvml(), (None, None)),
    ],
)
def test_nvml_says_driver_and_card(
    nvml: Nvml, found: tuple[str | None, tuple[int, int] | None]
) -> None:
    assert machine(lambda name: nvml, NOWHERE) == found


VERSIONS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n": "535.183.01",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@b)\n": "580.95.05",
}


@pytest.mark.parametrize("text", VERSIONS)
def test_without_nvml_the_kernel_module_says_the_driver(text: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(text)

    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert machine(load, tmp_path / "version") == (VERSIONS[text], None)
    # NVML of another version than the driver's module does not start.
    assert machine(lambda name: Nvml((8, 0), started=18), tmp_path / "version") == (
        VERSIONS[text],
        None,
    )
    assert machine(load, NOWHERE) == (None, None)


# --- what pip then does ------------------------------------------------------------------------------------


def add_wheel(index: Path, name: str, version: str) -> None:
    """Adds an empty package to a local package index."""
    folder = index / name
    folder.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name}-{version}-py3-none-any.whl">{name}</a>')


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def bare_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_environment: str
) -> Iterator[str]:
    """Python of an empty environment whose package index has torch's CUDA build, and another
    package.
    """
    add_wheel(tmp_path / "pypi", "torch", "2.15.0")
    add_wheel(tmp_path / "pypi", "other", "1.0")
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "pypi").as_uri())
    yield empty_environment
    words = ["-m", "pip", "uninstall", "--yes", "--quiet", "torch", "other"]
    subprocess.run([empty_environment, *words], check=True)


def installed(python: str) -> set[str]:
    done = subprocess.run(
        [python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_without_a_gpu_the_cpu_build_is_installed(
    tmp_path: Path, bare_pip: str, capfd: pytest.CaptureFixture[str]
) -> None:
    add_wheel(tmp_path / "cpu", "torch", "2.15.0+cpu")
    choice = Choice("cpu", ("torch>=2.6,<2.16",), (tmp_path / "cpu").as_uri(), "", "")
    wheels.install(choice, ["other"], bare_pip)
    assert installed(bare_pip) == {"torch==2.15.0+cpu", "other==1.0"}
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_without_pytorchs_index_pip_takes_what_it_finds(
    tmp_path: Path, bare_pip: str, capfd: pytest.CaptureFixture[str]
) -> None:
    choice = Choice("cpu", ("torch>=2.6,<2.16",), (tmp_path / "nowhere").as_uri(), "", "")
    wheels.install(choice, ["other"], bare_pip)
    assert installed(bare_pip) == {"torch==2.15.0", "other==1.0"}
    (line,) = capfd.readouterr().out.splitlines()
    assert "nowhere gave no torch" in line


def test_one_line_says_what_is_installed_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(wheels, "machine", lambda: ("535.183.01", (7, 0)))
    monkeypatch.setattr(
        wheels, "install", lambda choice, arguments: asked.append((choice.name, arguments))
    )
    assert wheels.main(["--editable", ".[dev]"]) == 0
    assert wheels.main(["--line", "cuda12"]) == 0
    assert asked == [("volta", ["--editable", ".[dev]"]), ("cuda12", [])]
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "a card of compute capability 7.0 with driver 535.183.01, so CUDA 12.4: installing torch==2.6.*, triton==3.2.*"
    )
    assert second == "the line cuda12 was asked for: installing torch==2.10.*"


def test_nothing_is_installed_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wheels, "machine", lambda: ("470.256.02", (8, 0)))
    monkeypatch.setattr(wheels, "install", lambda *arguments: pytest.fail("installed"))
    assert wheels.main([]) == 1
    assert "update NVIDIA's driver to 525 or newer" in capsys.readouterr().err
