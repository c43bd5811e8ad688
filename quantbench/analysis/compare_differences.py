"""What differs between two runs beside their figures, and what forbids to compare them at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quantbench.store.folder import Run
from quantbench.store.run import RunInfo

# What was asked to be measured differs between any two runs and is settled by matching points.
_NOT_OPTIONS = ("dims", "left_out", "sha256", "file")
_CONSTANTS = ("sm_count", "sm_clock_mhz", "l2_bytes", "memory_bytes", "memory_gb_per_s", "peak_tflops")
_STATE = ("memory_clock_mhz", "throttle_reasons", "other_processes")


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same. kind: device, origin, software, options, environment or state; a, b: in words,
    `absent` where a run does not have it."""

    kind: str
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} {self.a} → {self.b}"


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Everything that may explain a change, device first. Empty when only the time of day differs."""
    one, two = a.info, b.info
    found = [*_of_device(one, two), *_of("origin", {"origin": _origins(a)}, {"origin": _origins(b)})]
    found += _of("origin", {"source": one.source}, {"source": two.source})
    found += _of("software", one.software, two.software)
    found += _of("options", _options(one), _options(two))
    found += _of("environment", one.environment, two.environment)
    states = [{name: getattr(info.state, name) for name in _STATE} for info in (one, two)]
    return (*found, *_of("state", *states))


def obstacles(a: Run, b: Run) -> tuple[str, ...]:
    """Why the two must not be compared, in words; empty when they may be."""
    found = []
    if a.info.device.name != b.info.device.name:
        found.append(f"different devices, {a.info.device.name} and {b.info.device.name}")
    if _origins(a) != _origins(b):
        found.append(f"{_origins(a)} figures against {_origins(b)} ones")
    return tuple(found)


def _of_device(a: RunInfo, b: RunInfo) -> list[Difference]:
    found = _of("device", {"device": a.device.name}, {"device": b.device.name})
    if found:
        return found
    one, two = asdict(a.device), asdict(b.device)
    return _of("device", {name: one[name] for name in _CONSTANTS}, {name: two[name] for name in _CONSTANTS})


def _origins(run: Run) -> str:
    return " and ".join(sorted({run.info.origin, *(record.origin for record in run.records)}))


def _options(info: RunInfo) -> dict[str, Any]:
    flat: dict[str, Any] = {"seed": info.seed}
    for name, value in info.options.items():
        if name in _NOT_OPTIONS:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            flat[name] = value
    return flat


def _of(kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    names = [*a, *(name for name in b if name not in a)]
    return [
        Difference(kind, name, _text(a, name), _text(b, name))
        for name in names
        if a.get(name) != b.get(name) or (name in a) != (name in b)
    ]


def _text(values: Mapping[str, Any], name: str) -> str:
    if name not in values or values[name] in (None, "", (), []):
        return "absent"
    value = values[name]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
