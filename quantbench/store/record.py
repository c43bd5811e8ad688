"""Defines the record: a workload and the outcome of its measurement.

A record is one line of records.jsonl.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from functools import lru_cache
from sys import intern
from typing import TypeVar, cast

from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, require_choices, require_ints
from quantbench.launch import Launch, Tile
from quantbench.measurement import Check, Grade, Measurement
from quantbench.store.typed import Json, decode, encode
from quantbench.timing.options import TimingOptions
from quantbench.workload import Workload

RECORD_VERSION = 2
ORIGINS = ("measured", "imported", "simulated")
ROLES = ("point", "reference")
_KEY = re.compile("[0-9a-f]{16}")
_T = TypeVar("_T")
FAILURES = ("out_of_memory", "illegal_access", "timeout", "crash", "wrong_result", "error")


@dataclass(frozen=True)
class Place:
    """Position of a workload on the axes of a sweep. One workload may have several.

    axes: axis values by name.
    op: role of the workload at this place (`qkv`, `mlp_up.dgrad`, `gemm`).
    count: number of times that the shape runs the op.
    """

    axes: dict[str, int]
    op: str
    count: int = 1

    def __post_init__(self) -> None:
        require_ints(self, "count")


@dataclass(frozen=True)
class Measured:
    """Outcome of a point that was timed.

    (`latency.gemm.trees.Measured` is a different class, which holds training data.)
    """

    measurement: Measurement
    grade: Grade


@dataclass(frozen=True)
class Skipped:
    """Outcome of a point that was not run, with the reason why the device cannot run it."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """Outcome of a point whose run failed, with the error.

    kind: one of FAILURES.
    """

    kind: str
    message: str

    def __post_init__(self) -> None:
        require_choices(self, kind=FAILURES)


Outcome = Measured | Skipped | Failed


@dataclass(frozen=True)
class Record:
    """One point of a run.

    key: hash of workload, provider and timing (see `record_key`).
    launch: launch of the kernel; None if it is unknown.
    places: positions of the workload on the axes.
    origin: one of ORIGINS.
    source: where imported data comes from, or the device in a run on several devices.
    role: `point` for a planned point, or `reference` for a repetition of a reference point, which
        shows drift.
    elapsed_s: time since the run began, in s.
    check: error of the result against its reference; None if it was not checked.
    phases_s: duration of each phase of the point in s, as in run.json. `identify` is present only
        if the name of the kernel was requested.
    """

    run_id: str
    key: str
    workload: Workload
    provider: str
    outcome: Outcome
    launch: Launch | None = None
    places: tuple[Place, ...] = ()
    origin: str = "measured"
    source: str = ""
    role: str = "point"
    elapsed_s: float = 0.0
    check: Check | None = None
    phases_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choices(self, origin=ORIGINS, role=ROLES)
        if self.origin == "imported" and not self.source:
            raise InputError(
                "Record", "origin = 'imported' without a source", "where it comes from"
            )


_TILE_FIELDS = tuple(one.name for one in fields(Tile))


def _launch_to_json(launch: Launch | None) -> Json | None:
    """Encodes a launch as one flat JSON object.

    The fields of the tile stand next to the grid. An unknown launch is null.
    """
    if launch is None:
        return None
    flat: Json = encode(launch)
    tile = flat.pop("tile")
    return flat | (tile or dict.fromkeys(_TILE_FIELDS))


def _launch_from_json(data: object) -> Launch | None:
    """Decodes the output of `_launch_to_json`. Raises InputError for anything else."""
    if data is None:
        return None
    if not isinstance(data, dict):
        raise InputError("launch", repr(data)[:80], "a JSON object or null")
    rest = {name: value for name, value in data.items() if name not in _TILE_FIELDS}
    rest["tile"] = None
    known = {name: data[name] for name in _TILE_FIELDS if data.get(name) is not None}
    if "block_m" in known:
        rest["tile"] = decode(Tile, known)
    return decode(Launch, rest)


def _measurement_to_json(measurement: Measurement, grade: Grade) -> Json:
    """Encodes a measurement, with all its samples and its grade, as a JSON object."""
    values = {one.name: getattr(measurement, one.name) for one in fields(measurement)}
    return values | {
        "discarded": encode(measurement.discarded),
        "state_before": _encode_once(measurement.state_before),
        "state_after": _encode_once(measurement.state_after),
        "mean_clock": encode(measurement.mean_clock),
        "grade": encode(grade),
    }


@lru_cache(maxsize=64)
def _encode_once(value: DeviceState | TimingOptions) -> Json:
    return cast(Json, encode(value))


def _measurement_from_json(data: object) -> tuple[Measurement, Grade]:
    if not isinstance(data, dict):
        raise InputError("measurement", repr(data)[:80], "a JSON object")
    values = dict(data)
    grade = _decode_once(Grade, json.dumps(values.pop("grade", None)))
    for name in ("state_before", "state_after"):
        values[name] = _decode_once(DeviceState, json.dumps(values.get(name)))
    return decode(Measurement, values), grade


@lru_cache(maxsize=1024)
def _decode_once(kind: type[_T], text: str) -> _T:
    """Decodes JSON to objects that records share.

    The records of an imported table have one device state and a few grades, so sharing them saves
    memory.
    """
    return decode(kind, json.loads(text))


def record_key(workload: Workload, provider: str, timing: TimingOptions) -> str:
    """Returns 16 hex digits that identify workload, provider and timing options.

    The key is the same on every machine.
    """
    what = {
        "workload": encode(workload),
        "provider": provider,
        "timing": _encode_once(timing),
    }
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_to_json(record: Record) -> Json:
    """Encodes a record as one JSON object."""
    data: Json = {
        "version": RECORD_VERSION,
        "run_id": record.run_id,
        "key": record.key,
        "role": record.role,
        "origin": record.origin,
        "source": record.source,
        "elapsed_s": round(record.elapsed_s, 3),
        "places": encode(record.places),
        "workload": encode(record.workload),
        "provider": record.provider,
        "launch": _launch_to_json(record.launch),
    }
    if record.check is not None:
        data["check"] = encode(record.check)
    if record.phases_s:
        data["phases_s"] = {name: round(seconds, 4) for name, seconds in record.phases_s.items()}
    match record.outcome:
        case Measured(measurement, grade):
            data["measurement"] = _measurement_to_json(measurement, grade)
        case Skipped(reason):
            data["skipped"] = {"reason": reason}
        case Failed():
            data["failed"] = encode(record.outcome)
    return data


def record_from_json(data: object) -> Record:
    """Decodes the output of `record_to_json`. Raises InputError for anything else."""
    if not isinstance(data, dict):
        raise InputError("record", repr(data)[:80], "a JSON object")
    if data.get("version") != RECORD_VERSION:
        raise InputError(
            "record",
            f"version = {data.get('version')!r}",
            f"{RECORD_VERSION} (another quantbench may have written it)",
        )
    values: Json = {name: data.get(name) for name in ("places", "elapsed_s", "check")}
    for name in ("run_id", "key", "provider", "origin", "role", "source"):
        values[name] = _shared(data.get(name))
    values["workload"] = data.get("workload")
    if isinstance(values["workload"], dict):
        values["workload"] = {name: _shared(one) for name, one in values["workload"].items()}
    values["outcome"] = _outcome_from_json(data)
    values["launch"] = _launch_from_json(data.get("launch"))
    values["phases_s"] = data.get("phases_s", {})
    made = decode(Record, values, "record")
    if not _KEY.fullmatch(made.key):
        raise InputError("record", f"key = {made.key!r}"[:80], "16 hex digits")
    return made


def _shared(value: object) -> object:
    """Returns the one object that all records share for a text.

    Other values are returned unchanged.
    """
    return intern(value) if type(value) is str else value


def _outcome_from_json(data: Json) -> Outcome:
    """Decodes the outcome of a record. Raises InputError unless there is exactly one."""
    present = [name for name in ("measurement", "skipped", "failed") if name in data]
    if len(present) != 1:
        raise InputError(
            "record", f"outcomes {present}", "exactly one of measurement, skipped, failed"
        )
    if present[0] == "measurement":
        return Measured(*_measurement_from_json(data["measurement"]))
    if present[0] == "skipped":
        return decode(Skipped, data["skipped"])
    return decode(Failed, data["failed"])
