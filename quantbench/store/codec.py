"""The parts of a record as JSON objects, and back. Dictionaries live here and nowhere further in."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import lru_cache
from typing import TypeVar

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Discarded, Grade, Measurement
from quantbench.store.typed import Json, decode

_T = TypeVar("_T")

# An imported table repeats one device state and a few grades in all of its records: each is kept once.
_MOST_SHARED = 1024
_shared: dict[tuple[type, str], object] = {}


def _decode_shared(kind: type[_T], data: object) -> _T:
    """`decode`, with one object for equal data."""
    key = (kind, repr(data))
    found = _shared.get(key)
    if not isinstance(found, kind):
        found = decode(kind, data)
        if len(_shared) >= _MOST_SHARED:
            _shared.clear()
        _shared[key] = found
    return found


def launch_to_json(launch: Launch | None) -> Json | None:
    """A launch, flat: the tile's dimensions beside the grid, null where not known."""
    if launch is None:
        return None
    flat = asdict(launch)
    flat.pop("tile")
    tile = launch.tile
    for name in (f.name for f in fields(Tile)):
        flat[name] = None if tile is None else getattr(tile, name)
    return flat


def launch_from_json(data: object) -> Launch | None:
    """What `launch_to_json` wrote."""
    if data is None:
        return None
    if not isinstance(data, dict):
        raise InputError("launch", repr(data)[:80], "a JSON object or null")
    tile_names = {f.name for f in fields(Tile)}
    tile_values = {name: value for name, value in data.items() if name in tile_names}
    tile = None
    if tile_values.get("block_m") is not None:
        tile = decode(Tile, {name: value for name, value in tile_values.items() if value is not None})
    rest = {name: value for name, value in data.items() if name not in tile_names}
    return decode(Launch, {**rest, "tile": tile})


def state_from_json(data: object) -> DeviceState:
    """A device's state at one moment."""
    return _decode_shared(DeviceState, data)


def grade_from_json(data: object) -> Grade:
    """A trust grade and its reasons."""
    return _decode_shared(Grade, data)


def measurement_to_json(measurement: Measurement, grade: Grade) -> Json:
    """Every sample, and the grade beside them."""
    values = {f.name: getattr(measurement, f.name) for f in fields(measurement)}
    return {
        **values,
        "discarded": [asdict(d) for d in measurement.discarded],
        "state_before": _state_to_json(measurement.state_before),
        "state_after": _state_to_json(measurement.state_after),
        "grade": {"letter": grade.letter, "reasons": grade.reasons},
    }


@lru_cache(maxsize=64)
def _state_to_json(state: DeviceState) -> Json:
    return asdict(state)


def measurement_from_json(data: object) -> tuple[Measurement, Grade]:
    """What `measurement_to_json` wrote."""
    if not isinstance(data, dict):
        raise InputError("measurement", repr(data)[:80], "a JSON object")
    values = dict(data)
    grade = grade_from_json(values.pop("grade", None))
    for name in ("state_before", "state_after"):
        values[name] = state_from_json(values.get(name))
    discarded = values.get("discarded")
    if not isinstance(discarded, list):
        raise InputError("measurement", f"discarded = {discarded!r}", "a list")
    values["discarded"] = tuple(decode(Discarded, d) for d in discarded)
    return decode(Measurement, values), grade


def spec_to_json(spec: DeviceSpec) -> Json:
    """A device's constants with their sources."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}


def spec_from_json(data: object) -> DeviceSpec:
    """What `spec_to_json` wrote."""
    return decode(DeviceSpec, data)
