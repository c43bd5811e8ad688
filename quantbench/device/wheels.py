"""Chooses the torch and triton that fit a machine's driver and card, by one table.

Uses only the standard library and nothing of this package: `make install` runs this file with a
bare Python.
"""

from __future__ import annotations

from dataclasses import dataclass

Capability = tuple[int, int]

_COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility"
_MINOR_VERSIONS = f"{_COMPATIBILITY}/minor-version-compatibility.html, table 1"
_MATRIX = "https://github.com/pytorch/pytorch/pull/175253"


@dataclass(frozen=True)
class Wheels:
    """One line of the table.

    name: of the line, and of the extra of this package that asks for the same.
    requirements: what pip is asked for. torch requires a triton itself, so only another is named.
    cuda: version of CUDA that this torch comes with; empty for the CPU build.
    driver: lowest major version of NVIDIA's driver.
    lowest, end: compute capabilities, from the lowest up to but without the end.
    source: of cards and driver.
    """

    name: str
    requirements: tuple[str, ...]
    cuda: str
    driver: int
    lowest: Capability
    end: Capability
    source: str


#: The first line that serves both card and driver is taken.
TABLE = (
    Wheels(
        "cuda13", ("torch==2.15.*",), "13.2", 580, (7, 5), (13, 0),
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
    # torch up to 2.10 serves a V100 as well, but triton after 3.2 compiles for 8.0 and newer only.
    Wheels(
        "volta", ("torch==2.6.*", "triton==3.2.*"), "12.4", 525, (5, 0), (7, 5),
        "cards: torch.cuda.get_arch_list() of the wheel, "
        "https://github.com/triton-lang/triton/pull/5066; "
        f"driver: {_MINOR_VERSIONS}",
    ),
)  # fmt: skip

#: Without an NVIDIA driver: any torch that passes the tests, as PyTorch's CPU build if possible.
CPU_REQUIREMENTS = ("torch>=2.6,<2.16", 'triton>=3.2,<3.10; platform_system == "Linux"')
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Choice:
    """What to install on a machine.

    name: of the line, "cpu" without an NVIDIA driver, "" if no torch since 2.6 serves the machine.
    requirements: what pip is asked for; empty if nothing serves the machine.
    index: package index where torch is looked for first; None: pip's own.
    reason: one clause, what was found and what follows.
    command: command that mends an environment with another torch, or what to do instead.
    """

    name: str
    requirements: tuple[str, ...]
    index: str | None
    reason: str
    command: str


def choose(driver: str | None, capability: Capability | None) -> Choice:
    """Chooses torch and triton for a machine.

    driver: version of NVIDIA's driver, as 535.183.01; None if there is none.
    capability: compute capability, as (8, 0); None if unknown, then 7.5 or newer is assumed.
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


def install_line(driver: str | None, capability: Capability | None) -> str:
    """Returns the command that mends an environment whose torch does not fit; see `choose`."""
    return choose(driver, capability).command


def _chosen(name: str, requirements: tuple[str, ...], index: str | None, reason: str) -> Choice:
    # pip keeps an installed torch of the right version, even if built for another CUDA.
    command = "pip uninstall --yes torch triton && pip install"
    if index is not None:
        command += f" --extra-index-url {index}"
    for requirement in requirements:
        command += f" '{requirement}'"
    return Choice(name, requirements, index, reason, command)


def _serves(wheels: Wheels, capability: Capability | None) -> bool:
    return capability is None or wheels.lowest <= capability < wheels.end


def _card(capability: Capability | None) -> str:
    if capability is None:
        return "a card of unknown compute capability"
    return f"a card of compute capability {capability[0]}.{capability[1]}"
