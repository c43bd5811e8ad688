"""The parts of a record as JSON objects, and back. Dictionaries live here and nowhere further in."""

from collections.abc import Mapping
from dataclasses import asdict, fields

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Discarded, Grade, Measurement
from quantbench.store.typed import Json, decode


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
    return decode(DeviceState, data)


def grade_from_json(data: object) -> Grade:
    """A trust grade and its reasons."""
    return decode(Grade, data)


def measurement_to_json(measurement: Measurement, grade: Grade) -> Json:
    """Every sample, and the grade beside them."""
    return {**asdict(measurement), "grade": asdict(grade)}


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
