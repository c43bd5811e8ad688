"""Finds out why torch cannot use this machine's NVIDIA card, and how to fix it.

`look` reads the state of device files, driver, environment variables and torch once. `findings`
then judges each part, and `refusal` makes the error that a measurement raises.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantbench.device import wheels
from quantbench.device.spec import sm_name
from quantbench.errors import UnsupportedError

_BLOCKING = "CUDA_LAUNCH_BLOCKING"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_UNKNOWN_CARD = "an NVIDIA card"
# Text in torch's message if the driver works but shows torch no card.
_NO_CARDS = "No CUDA GPUs are available"
# Text in torch's message if the driver is too old for this torch.
_TOO_OLD = "too old"


@dataclass(frozen=True)
class Machine:
    """State of the machine's NVIDIA card, as device files, driver and torch report it.

    index: torch's number of the card; None if torch cannot use any card.
    reason: torch's message why it cannot use a card; empty if it can.
    card: name of the card; empty if there is no sign of a card.
    capability: compute capability of the card; None if it is unknown.
    driver: driver version; None if neither NVML nor /proc/driver/nvidia reports it.
    device_files: paths of the cards' device files (/dev/nvidia0).
    closed_files: device files that this process cannot open. They are checked only if torch cannot
        use a card.
    visible: value of CUDA_VISIBLE_DEVICES; None if it is not set.
    blocking: value of CUDA_LAUNCH_BLOCKING; None if it is not set.
    torch: version of torch.
    cuda: CUDA version for which torch is built; None if torch is built without CUDA.
    architectures: architectures for which torch has machine code (`sm_80`) or PTX (`compute_90`);
        empty if they are unknown.
    """

    index: int | None
    reason: str
    card: str
    capability: tuple[int, int] | None
    driver: str | None
    device_files: tuple[str, ...]
    closed_files: tuple[str, ...]
    visible: str | None
    blocking: str | None
    torch: str
    cuda: str | None
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis: the state of one part, and its problem if there is one.

    what: name of the part, such as `driver`.
    found: state of the part.
    problem: reason why the card cannot be measured; empty if the part is in order.
    remedy: fix for the problem; empty if the part is in order.
    """

    what: str
    found: str
    problem: str = ""
    remedy: str = ""


def opens(path: Path) -> bool:
    """Returns whether permissions and the container let this process open a device file."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def look(
    torch: Any,
    index: int | None,
    *,
    root: Path = Path("/"),
    ask_driver: Callable[[], tuple[str | None, wheels.Capability | None]] = wheels.machine,
    environ: Mapping[str, str] = os.environ,
    may_open: Callable[[Path], bool] = opens,
) -> Machine:
    """Reads the state of the machine's card from device files, driver, environment and torch.

    torch: the torch module.
    index: torch's number of the card in use; None if torch cannot use a card.
    root: root of the file system.
    ask_driver: function that returns the driver's version and the highest compute capability of its
        GPUs.
    environ: environment variables.
    may_open: function that returns whether a device file can be opened.
    """
    driver, capability = ask_driver()
    files = sorted(root.glob("dev/nvidia[0-9]*"))
    closed: list[Path] = []
    if index is None:
        reason = _reason(torch)
        closed = [path for path in files if not may_open(path)]
        card = _first_model(root / "proc/driver/nvidia/gpus")
        if not card and (files or capability):
            card = _UNKNOWN_CARD
    else:
        reason = ""
        properties = torch.cuda.get_device_properties(index)
        card = properties.name
        capability = (properties.major, properties.minor)
    return Machine(
        index=index,
        reason=reason,
        card=card,
        capability=capability,
        driver=driver,
        device_files=tuple(map(str, files)),
        closed_files=tuple(map(str, closed)),
        visible=environ.get(_VISIBLE),
        blocking=environ.get(_BLOCKING),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        architectures=tuple(torch.cuda.get_arch_list()),
    )


def refusal(machine: Machine) -> UnsupportedError | None:
    """Returns the error to raise instead of a measurement on this machine's card.

    The result is None if the card can be measured, or if there is no card.
    """
    problems = [finding for finding in findings(machine) if finding.problem]
    if not machine.card or not problems:
        return None
    first = problems[0]
    capability = "" if machine.capability is None else f"{sm_name(machine.capability)}, "
    built = "without CUDA"
    if machine.cuda is not None:
        built = " ".join(["for CUDA", machine.cuda, *machine.architectures])
    card = f"{machine.card} ({capability}driver {machine.driver or 'unknown'})"
    torch_says = f" (torch: {machine.reason})" if machine.reason not in first.problem else ""
    found = f"{card} with torch {machine.torch} built {built}: {first.problem}{torch_says}"
    return UnsupportedError(
        "device", found, f"{first.remedy}; QUANTBENCH_DEVICE=cpu measures the CPU"
    )


def findings(machine: Machine) -> Iterator[Finding]:
    """Yields a finding for each part, in the order in which a user should solve the problems."""
    capability = "" if machine.capability is None else f" ({sm_name(machine.capability)})"
    yield Finding("card", f"{machine.card}{capability}")
    yield _device_file(machine)
    yield _driver(machine)
    yield from _variables(machine)
    yield from _torch(machine)


def _device_file(machine: Machine) -> Finding:
    """Judges whether this process can open at least one of the cards' device files."""
    what = "device file"
    files = " ".join(machine.device_files) or "none"
    if machine.closed_files and machine.closed_files == machine.device_files:
        remedy = f"a user, a container or a job that may open {files}"
        return Finding(what, files, f"{files} cannot be opened", remedy)
    return Finding(what, files)


def _driver(machine: Machine) -> Finding:
    """Judges whether there is a driver. An unknown driver is fine if torch can use a card."""
    found = machine.driver or "unknown"
    if machine.reason and machine.driver is None:
        remedy = "NVIDIA's driver, for containers by docker run --gpus all"
        return Finding("driver", found, "no driver is found", remedy)
    return Finding("driver", found)


def _variables(machine: Machine) -> Iterator[Finding]:
    """Judges the environment variables that can hide cards or prevent timing, if they are set."""
    if machine.visible is not None:
        found = repr(machine.visible)
        nothing_named = machine.visible.strip() in ("", "-1")
        if machine.reason and (nothing_named or _NO_CARDS in machine.reason):
            yield Finding(
                _VISIBLE, found, f"{_VISIBLE}={found} hides every card", f"{_VISIBLE} unset"
            )
        else:
            yield Finding(_VISIBLE, found)
    if machine.blocking is not None:
        found = repr(machine.blocking)
        # CUDA parses the value as a number, so any value other than zeros may turn blocking on.
        if machine.blocking.strip().strip("0"):
            problem = f"{_BLOCKING}={found} makes every launch wait, so nothing can be timed"
            yield Finding(_BLOCKING, found, problem, f"{_BLOCKING} unset or 0")
        else:
            yield Finding(_BLOCKING, found)


def _torch(machine: Machine) -> Iterator[Finding]:
    """Judges torch's build, and whether it has code for the card's architecture."""
    install = wheels.install_line(machine.driver, machine.capability)
    if machine.cuda is None:
        yield Finding("torch", machine.torch, "this torch is for CPUs", install)
        return
    found = f"{machine.torch} for CUDA {machine.cuda}"
    if not machine.reason:
        yield Finding("torch", found)
    elif _TOO_OLD in machine.reason:
        yield Finding("torch", found, machine.reason, install)
    else:
        yield Finding(
            "torch", found, machine.reason, "a card that CUDA programs can use (nvidia-smi)"
        )
    capability = machine.capability
    architectures = " ".join(machine.architectures) or "unknown"
    known = bool(machine.architectures)
    if capability is not None and known and not has_code(machine.architectures, capability):
        problem = f"this torch has no code for {sm_name(capability)}"
        yield Finding("architectures", architectures, problem, install)
    else:
        yield Finding("architectures", architectures)


def has_code(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Returns whether code for one of `architectures` runs on a GPU of this compute capability.

    Machine code (sm_80) runs on the same major version with the same or a higher minor version. PTX
    (compute_90) runs on the same and all higher versions. With suffix f, code runs only within the
    same major version. With suffix a, code runs only on exactly the same version. Source: CUDA C++
    Programming Guide 13.0, binary and PTX compatibility.

    >>> has_code(("sm_80", "sm_86"), (8, 9)), has_code(("sm_75", "sm_80"), (7, 0))
    (True, False)
    """
    for name in architectures:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if found is None:
            continue
        kind, major, minor, suffix = found.groups()
        built_for = (int(major), int(minor))
        same_major = built_for[0] == capability[0]
        if suffix == "a":
            runs = built_for == capability
        else:
            runs = built_for <= capability and (same_major or (kind == "compute" and not suffix))
        if runs:
            return True
    return False


def _reason(torch: Any) -> str:
    """Returns the first sentence of torch's message why it cannot use a card."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return re.split(r"\n|\. (?=[A-Z])", str(error).strip())[0]
    return "torch counts no card"


def _first_model(gpus: Path) -> str:
    """Returns the name of the first card that the driver lists, or "" if it lists none.

    gpus: folder in which the driver describes its cards.
    """
    for information in sorted(gpus.glob("*/information")):
        text = information.read_text(encoding="utf-8")
        found = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
        return found[1] if found else _UNKNOWN_CARD
    return ""
