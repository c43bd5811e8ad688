"""Defines the record: a workload and the outcome of its measurement.

A record is one line of records.jsonl. The record's key identifies workload, provider and timing
options.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field

from quantbench.errors import InputError, require_choices, require_ints
from quantbench.launch import Launch
from quantbench.measurement import Check, Grade, Measurement
from quantbench.store.typed import Json, decode, encode
from quantbench.timing.options import TimingOptions
from quantbench.workload import Workload

RECORD_VERSION = 3
ORIGINS = ("measured", "imported", "simulated")
ROLES = ("point", "reference")
_KEY = re.compile("[0-9a-f]{16}")
FAILURES = ("out_of_memory", "illegal_access", "timeout", "crash", "wrong_result", "error")


@dataclass(frozen=True)
class GridPosition:
    """Grid point of a sweep at which a workload occurs; a workload may have several places.

    axes: value of each axis, by axis name.
    op: name of the workload's op at this grid point (`qkv`, `mlp_up.dgrad`, `gemm`).
    count: number of times that the shape at this grid point runs the workload.
    """

    axes: dict[str, int]
    op: str
    count: int = 1

    def __post_init__(self) -> None:
        require_ints(self, "count")


@dataclass(frozen=True)
class Measured:
    """Outcome of a point that was timed."""

    kind = "measured"

    measurement: Measurement
    grade: Grade


@dataclass(frozen=True)
class Skipped:
    """Outcome of a point that was not run, or that has no time in a table, with the reason."""

    kind = "skipped"

    reason: str


@dataclass(frozen=True)
class Failed:
    """Outcome of a point whose measurement failed.

    error: kind of the failure, one of FAILURES.
    message: error message.
    """

    kind = "failed"

    error: str
    message: str

    def __post_init__(self) -> None:
        require_choices(self, error=FAILURES)


Outcome = Measured | Skipped | Failed


@dataclass(frozen=True)
class Record:
    """One point of a run.

    key: hash of workload, provider and timing options (`record_key`).
    outcome: measurement, or the reason why there is none.
    launch: launch of the kernel; None if it is unknown.
    places: grid points at which the workload occurs.
    origin: origin of the time, one of ORIGINS.
    source: file or package of imported data; the device in a run on several devices; the original
        run's label in a merged run.
    role: `point` for a planned point, or `reference` for a repetition of a reference point, which
        shows drift.
    elapsed_s: time from the start of the run to the end of the point, in s.
    check: passed check of the computed result; None if the result was not checked.
    phases_s: duration in s of each of the point's phases, by phase. The phase `identify` is present
        only if the kernel's name was requested.
    """

    run_id: str
    key: str
    workload: Workload
    provider: str
    outcome: Outcome
    launch: Launch | None = None
    places: tuple[GridPosition, ...] = ()
    origin: str = "measured"
    source: str = ""
    role: str = "point"
    elapsed_s: float = 0.0
    check: Check | None = None
    phases_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choices(self, origin=ORIGINS, role=ROLES)
        if not _KEY.fullmatch(self.key):
            raise InputError("Record", f"key = {self.key!r}"[:80], "16 hex digits")
        if self.origin == "imported" and not self.source:
            raise InputError(
                "Record", "origin = 'imported' without a source", "where it comes from"
            )


def record_key(workload: Workload, provider: str, timing: TimingOptions) -> str:
    """Returns 16 hex digits that identify workload, provider and timing options.

    The key is the same on every machine.
    """
    what = {
        "workload": encode(workload),
        "provider": provider,
        "timing": encode(timing),
    }
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def record_to_json(record: Record) -> Json:
    """Encodes a record as one JSON object."""
    return {"version": RECORD_VERSION, **encode(record)}


def record_from_json(data: object) -> Record:
    """Decodes the output of `record_to_json`. Raises InputError for anything else."""
    if not isinstance(data, dict):
        raise InputError("record", repr(data)[:80], "a JSON object")
    fields = dict(data)
    version = fields.pop("version", None)
    if version != RECORD_VERSION:
        raise InputError(
            "record",
            f"version = {version!r}",
            f"{RECORD_VERSION} (another quantbench may have written it)",
        )
    return decode(Record, fields, "record")
