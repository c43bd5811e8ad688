"""Compares the metadata of two runs, to list what may explain a change of their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantbench.store.folder import Run

# Options that only state which points a run has, or from which file the points were imported. These
# options are not compared, because times are compared only for points that both runs have.
_NOT_OPTIONS = ("dims", "left_out", "sha256", "file")
#: device constants that affect times
CONSTANTS = (
    "sm_count",
    "sm_clock_mhz",
    "l2_bytes",
    "memory_bytes",
    "memory_gb_per_s",
    "peak_tflops",
)
# Values of the state at the start of the run that affect times.
_STATE = ("memory_clock_mhz", "throttle_reasons", "other_processes")


@dataclass(frozen=True)
class Difference:
    """A difference between the metadata of two runs.

    kind: device, origin, software, options, environment or state.
    name: name of the value that differs.
    a, b: values of the two runs as text; `absent` if a run has none.
    """

    kind: str
    name: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} {self.a} → {self.b}"


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Returns the differences between two runs' metadata that may explain a change of their times.

    The differences between their devices come first.
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
    """Returns where the times of a run come from, for example `measured and imported`."""
    return " and ".join(sorted({run.info.origin, *(record.origin for record in run.records)}))


def _text(values: Mapping[str, Any], name: str) -> str:
    """Returns a value by its name, as text; `absent` if the value is missing or empty."""
    if name not in values or values[name] in (None, "", (), []):
        return "absent"
    value = values[name]
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested mappings: `mode` in the mapping `timing` gets the name `timing.mode`.

    Only the first level of nesting is flattened.

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
