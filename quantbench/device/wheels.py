"""Chooses the versions of torch and Triton that fit a machine's driver and GPU, and installs them.

`make install` runs this file as a script before anything is installed, so it uses only the standard
library and nothing from this package. `install_line` returns the command that repairs an
environment whose torch does not fit.
"""

import argparse
import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Compute capability (major, minor).
Capability = tuple[int, int]

_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility"
_MINOR_VERSIONS = f"{_COMPATIBILITY}/minor-version-compatibility.html, table 1"
_MATRIX = "https://github.com/pytorch/pytorch/pull/175253"


@dataclass(frozen=True)
class Wheels:
    """Versions of torch and Triton, and the GPUs and drivers for which they work.

    name: name of the entry, and of this package's extra with the same requirements.
    requirements: requirements for pip. They include Triton only if its version differs from the
        version that torch requires.
    cuda: CUDA version for which this torch is built.
    driver: lowest major version of NVIDIA's driver.
    lowest, end: lowest compute capability, and the first one above the supported range.
    source: documents that give the compute capabilities and the driver.
    """

    name: str
    requirements: tuple[str, ...]
    cuda: str
    driver: int
    lowest: Capability
    end: Capability
    source: str


#: Known versions. The first entry that works with the machine's card and driver applies.
TABLE = (
    # With torch 2.15, triton 3.9 spills registers in some of our kernels (`make test-aot`).
    Wheels(
        "cuda13", ("torch==2.13.*",), "13.0", 580, (7, 5), (13, 0),
        f"cards: torch.cuda.get_arch_list() of the wheel; driver: {_MINOR_VERSIONS}",
    ),
    Wheels(
        "cuda12", ("torch==2.10.*",), "12.8", 570, (10, 0), (13, 0),
        f"cards: {_MATRIX}; driver: the first that knows Blackwell, "
        "https://docs.nvidia.com/cuda/archive/12.8.0/cuda-toolkit-release-notes, table 3",
    ),
    Wheels(
        "cuda12", ("torch==2.10.*",), "12.8", 525, (7, 5), (10, 0),
        f"cards: {_MATRIX}; driver: {_MINOR_VERSIONS}",
    ),
    # torch up to 2.10 also serves a V100, but Triton after 3.2 compiles only for 8.0 and newer.
    Wheels(
        "volta", ("torch==2.6.*", "triton==3.2.*"), "12.4", 525, (5, 0), (7, 5),
        "cards: torch.cuda.get_arch_list() of the wheel, "
        "https://github.com/triton-lang/triton/pull/5066; "
        f"driver: {_MINOR_VERSIONS}",
    ),
)  # fmt: skip

#: Requirements on a machine without an NVIDIA driver. They accept any torch version that passes the
#: tests. PyTorch's CPU build, from CPU_INDEX, is preferred.
CPU_REQUIREMENTS = ("torch>=2.6,<2.14", 'triton>=3.2,<3.8; platform_system == "Linux"')
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Choice:
    """Packages to install on a machine.

    name: name of an entry in TABLE; "cpu" without an NVIDIA driver; "" if no torch since 2.6 works
        on the machine.
    requirements: requirements for pip; empty if no torch works on the machine.
    index: package index that is searched for torch first; None for pip's default index.
    reason: one clause with the card and driver that were found, and the conclusion.
    command: command that repairs an environment whose torch does not fit; advice to the user if no
        torch works.
    """

    name: str
    requirements: tuple[str, ...]
    index: str | None
    reason: str
    command: str


def choose(driver: str | None, capability: Capability | None) -> Choice:
    """Returns the torch and Triton for a machine.

    driver: version of NVIDIA's driver, such as 535.183.01; None if there is no driver.
    capability: compute capability of the GPU, such as (8, 0). If it is None (unknown), the first
        entry of TABLE that works with the driver applies.
    """
    if driver is None:
        return _chosen("cpu", CPU_REQUIREMENTS, CPU_INDEX, "no NVIDIA driver, so the CPU build")
    found = f"{_card(capability)} with driver {driver}"
    serving = [wheels for wheels in TABLE if _serves(wheels, capability)]
    if not serving:
        reason = f"{found}: no torch since 2.6 was built for this card"
        return Choice("", (), None, reason, "set QUANTBENCH_DEVICE=cpu to use the CPU")
    for wheels in serving:
        if int(driver.partition(".")[0]) >= wheels.driver:
            reason = f"{found}, so CUDA {wheels.cuda}"
            return _chosen(wheels.name, wheels.requirements, None, reason)
    needed = min(wheels.driver for wheels in serving)
    reason = f"{found}: torch for this card needs driver {needed} or newer"
    return Choice("", (), None, reason, f"update NVIDIA's driver to {needed} or newer")


def machine(
    load: Callable[[str], Any] = ctypes.CDLL, proc: Path = Path("/proc/driver/nvidia/version")
) -> tuple[str | None, Capability | None]:
    """Returns the version of NVIDIA's driver and the highest compute capability of its GPUs.

    Unknown values are None.

    load: function that loads NVML by its file name.
    proc: file in which the kernel module reports its version. It is read if NVML cannot be loaded,
        as in some containers.
    """
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        nvml = None
    if nvml is not None and nvml.nvmlInit_v2() == 0:
        return _ask_nvml(nvml)
    if not proc.is_file():
        return None, None
    version = re.search(r"\s(\d+\.[\d.]+)\s", proc.read_text(encoding="utf-8"))
    return (version[1] if version else None), None


def _ask_nvml(nvml: Any) -> tuple[str | None, Capability | None]:
    """Returns the driver's version and the highest compute capability that NVML reports.

    Both values are None if NVML reports no GPU.
    """
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value == 0:
        return None, None
    version = ctypes.create_string_buffer(80)
    nvml.nvmlSystemGetDriverVersion(version, len(version))
    capabilities = []
    for index in range(count.value):
        card = ctypes.c_void_p()
        major = ctypes.c_int()
        minor = ctypes.c_int()
        answer = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card))
        if answer != 0:  # this user may not open the card
            continue
        numbers = (ctypes.byref(major), ctypes.byref(minor))
        if nvml.nvmlDeviceGetCudaComputeCapability(card, *numbers) == 0:
            capabilities.append((major.value, minor.value))
    return version.value.decode(), max(capabilities, default=None)


def install_line(driver: str | None, capability: Capability | None) -> str:
    """Returns the command that repairs an environment whose torch does not fit.

    The arguments are those of `choose`.
    """
    return choose(driver, capability).command


def _chosen(name: str, requirements: tuple[str, ...], index: str | None, reason: str) -> Choice:
    """Returns the choice with the command that installs its requirements."""
    # pip would keep an installed torch of the right version even if it was built for another CUDA
    # version, so torch is uninstalled first.
    command = "pip uninstall --yes torch triton && pip install"
    if index is not None:
        command += f" --extra-index-url {index}"
    for requirement in requirements:
        command += f" '{requirement}'"
    return Choice(name, requirements, index, reason, command)


def by_name(name: str) -> Choice:
    """Returns the choice with the name of an entry in TABLE, for any machine.

    Any other name gives the CPU build.
    """
    reason = f"the line {name} was asked for"
    for wheels in TABLE:
        if wheels.name == name:
            return _chosen(name, wheels.requirements, None, reason)
    return _chosen("cpu", CPU_REQUIREMENTS, CPU_INDEX, reason)


def install(choice: Choice, arguments: list[str], python: str = sys.executable) -> None:
    """Installs the chosen torch and Triton with pip.

    If torch cannot be installed from the choice's index, pip uses its default index instead.

    arguments: further arguments of pip install.
    python: interpreter whose environment is changed.

    Raises CalledProcessError if pip fails.
    """
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if choice.index is not None:
        torch = choice.requirements[0]
        # pip retries only once, so that it fails within seconds if this index is out of reach.
        alone = ["--no-deps", "--retries", "1", "--index-url", choice.index, torch]
        tried = subprocess.run([*pip, *alone], stderr=subprocess.PIPE, text=True)
        if tried.returncode:
            why = tried.stderr.strip().rpartition("\n")[2]
            said = f"{choice.index} gave no torch ({why}): installing the one that pip finds"
            print(said, flush=True)
    subprocess.run([*pip, *choice.requirements, *arguments], check=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs this file's command line, and returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Installs the torch and triton that fit this machine.",
        epilog="Further arguments go to pip install.",
    )
    names = ["cpu", *dict.fromkeys(wheels.name for wheels in TABLE)]
    parser.add_argument("--line", choices=names, help="take this line of the table")
    options, further = parser.parse_known_args(arguments)
    choice = by_name(options.line) if options.line else choose(*machine())
    if not choice.name:
        instead = "or for the CPU alone: make install WHEELS=cpu"
        print(f"{choice.reason}: {choice.command}, {instead}", file=sys.stderr)
        return 1
    print(f"{choice.reason}: installing {', '.join(choice.requirements)}", flush=True)
    try:
        install(choice, further)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def _serves(wheels: Wheels, capability: Capability | None) -> bool:
    """Returns whether an entry supports a compute capability. None (unknown) fits every entry."""
    return capability is None or wheels.lowest <= capability < wheels.end


def _card(capability: Capability | None) -> str:
    """Describes a card by its compute capability."""
    if capability is None:
        return "a card of unknown compute capability"
    return f"a card of compute capability {capability[0]}.{capability[1]}"


if __name__ == "__main__":
    sys.exit(main())
