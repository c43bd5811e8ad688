"""Compares the metadata of two runs, to list differences that may explain a change in times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantbench.store.folder import Run

# Options that are not compared, because they cannot change the time of a point: they select a run's
# points, or name the file from which the points were imported.
_NOT_OPTIONS = ("dims", "left_out", "sha256", "file")
#: device constants that affect times, as fields of `DeviceSpec`
CONSTANTS = (
    "sm_count",
    "sm_clock_mhz",
    "l2_bytes",
    "memory_bytes",
    "memory_gb_per_s",
    "peak_tflops",
)
# Fields of the device's state at the start of a run that affect times.
_STATE = ("memory_clock_mhz", "throttle_reasons", "other_processes")


@dataclass(frozen=True)
class Difference:
    """A difference between the metadata of two runs.

    kind: kind of metadata: device, origin, software, options, environment or state.
    name: name of the value that differs.
    a, b: the two runs' values as text; `absent` for a missing value.
    """

    kind: str
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} {self.a} → {self.b}"


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Returns the differences between two runs' metadata that may explain a change in times.

    Differences between the devices come first.
    """
    of_a = _metadata(a)
    of_b = _metadata(b)
    if a.info.device.name != b.info.device.name:  # the constants of different devices differ anyway
        of_a["device"] = {"device": a.info.device.name}
        of_b["device"] = {"device": b.info.device.name}
    found = []
    for kind, values in of_a.items():
        others = of_b[kind]
        for name in {**values, **others}:
            if name not in values or name not in others or values[name] != others[name]:
                found.append(Difference(kind, name, _text(values, name), _text(others, name)))
    return tuple(found)


def _metadata(run: Run) -> dict[str, dict[str, Any]]:
    """Returns the recorded metadata of a run, by kind and name as in `Difference`."""
    info = run.info
    options = {name: value for name, value in info.options.items() if name not in _NOT_OPTIONS}
    return {
        "device": {name: getattr(info.device, name) for name in CONSTANTS},
        "origin": {"origin": origins_of(run), "source": info.source},
        "software": dict(info.software),
        "options": flattened({"seed": info.seed, **options}),
        "environment": dict(info.environment),
        "state": {name: getattr(info.state, name) for name in _STATE},
    }


def origins_of(run: Run) -> str:
    """Returns the origins of a run's times as text, for example `measured and imported`."""
    return " and ".join(sorted({run.info.origin, *(record.origin for record in run.records)}))


def _text(values: Mapping[str, Any], name: str) -> str:
    """Returns a named value as text; `absent` if the value is missing or empty."""
    if name not in values or values[name] in (None, "", (), []):
        return "absent"
    value = values[name]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens the first level of nested mappings.

    For example, `mode` in the mapping `timing` gets the name `timing.mode`.

    >>> flattened({"seed": 0, "timing": {"mode": "graph"}})
    {'seed': 0, 'timing.mode': 'graph'}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": one for inner, one in value.items()}
        else:
            found[name] = value
    return found
