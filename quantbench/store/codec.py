"""The parts of a record as JSON objects, and back. Dictionaries live here and nowhere further in."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Discarded, Grade, Measurement
from quantbench.store.typed import first_mismatch

Json = dict[str, Any]
_T = TypeVar("_T")


def build(kind: type[_T], data: object, *, tuples: tuple[str, ...] = ()) -> _T:
    """A dataclass from a JSON object with exactly its fields; lists named in `tuples` become tuples."""
    if not isinstance(data, dict):
        raise InputError(kind.__name__, repr(data)[:80], "a JSON object")
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = data.keys() - known
    if unknown:
        raise InputError(kind.__name__, f"field {sorted(unknown)[0]!r}", "one of " + ", ".join(sorted(known)))
    values = {name: tuple(v) if name in tuples and isinstance(v, list) else v for name, v in data.items()}
    wrong = first_mismatch(kind, values)
    if wrong is not None:
        name, expected = wrong
        raise InputError(kind.__name__, f"{name} = {values[name]!r}"[:100], expected)
    try:
        return kind(**values)
    except TypeError as error:  # a field is missing
        raise InputError(kind.__name__, str(error), "its fields, with values of their types") from None


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
        tile = build(Tile, {name: value for name, value in tile_values.items() if value is not None})
    rest = {name: value for name, value in data.items() if name not in tile_names}
    return build(Launch, {**rest, "tile": tile}, tuples=("grid", "block"))


def state_from_json(data: object) -> DeviceState:
    """A device's state at one moment."""
    return build(DeviceState, data, tuples=("throttle_reasons",))


def grade_from_json(data: object) -> Grade:
    """A trust grade and its reasons."""
    return build(Grade, data, tuples=("reasons",))


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
    values["discarded"] = tuple(build(Discarded, d) for d in discarded)
    for name in ("samples_us", "clocks_mhz"):
        if not isinstance(values.get(name), list) or any(
            isinstance(v, bool) or not isinstance(v, int | float) for v in values[name]
        ):
            raise InputError("measurement", f"{name} = {values.get(name)!r}"[:100], "a list of numbers")
    return build(Measurement, values, tuples=("samples_us", "clocks_mhz")), grade


def spec_to_json(spec: DeviceSpec) -> Json:
    """A device's constants with their sources."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}


def spec_from_json(data: object) -> DeviceSpec:
    """What `spec_to_json` wrote."""
    return build(DeviceSpec, data, tuples=("compute_capability",))
