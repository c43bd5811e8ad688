"""One line of records.jsonl: one point, and what came of it.

History of the format:
1  first version. Later, without a change for readers: `check`, absent where a result was not checked or an older
   version wrote the record.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from sys import intern
from typing import Any

from quantbench.errors import InputError, require_choice, require_int
from quantbench.launch import Launch
from quantbench.measurement import Check, Grade, Measurement
from quantbench.store.codec import launch_from_json, launch_to_json, measurement_from_json, measurement_to_json
from quantbench.store.typed import decode, is_number
from quantbench.timing.options import TimingOptions
from quantbench.workload import Workload, workload_from_json, workload_to_json

RECORD_VERSION = 1
ORIGINS = ("measured", "imported", "simulated")
ROLES = ("point", "reference")
_KEY = re.compile("[0-9a-f]{16}")
FAILURES = ("out_of_memory", "illegal_access", "timeout", "crash", "wrong_result", "error")


@dataclass(frozen=True)
class Place:
    """Where on the axes a workload stands: one workload may stand in several places.

    axes: axis values, by name. op: the op it is there (`qkv`, `mlp_up.dgrad`, `gemm`). count: how often the shape at
    this place runs it.
    """

    axes: dict[str, int]
    op: str
    count: int = 1

    def __post_init__(self) -> None:
        require_int("Place", "count", self.count)


@dataclass(frozen=True)
class Measured:
    """The point was timed."""

    measurement: Measurement
    grade: Grade


@dataclass(frozen=True)
class Skipped:
    """The point could not be run here, and why; known without running it."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """The point was tried and gave no figure. kind: one of FAILURES."""

    kind: str
    message: str

    def __post_init__(self) -> None:
        require_choice("Failed", "kind", self.kind, FAILURES)


Outcome = Measured | Skipped | Failed


@dataclass(frozen=True)
class Record:
    """One point of a run.

    key: names workload, provider and timing (see `record_key`). launch: the kernel that ran, where known. origin:
    measured here, imported from a named source, or simulated. role: a point of the plan, or one of the repetitions of
    the reference point that show drift. elapsed_s: since the run began. check: what the checks of the results found.
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

    def __post_init__(self) -> None:
        require_choice("Record", "origin", self.origin, ORIGINS)
        require_choice("Record", "role", self.role, ROLES)
        if self.origin == "imported" and not self.source:
            raise InputError("Record", "origin = 'imported' without a source", "where it comes from")


def record_key(workload: Workload, provider: str, timing: TimingOptions) -> str:
    """16 hex digits that name what is measured, by whom and how. The same three give the same key on any machine."""
    what = {"workload": workload_to_json(workload), "provider": provider, "timing": _timing_to_json(timing)}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def _timing_to_json(timing: TimingOptions) -> dict[str, Any]:
    return asdict(timing)


def record_to_json(record: Record) -> dict[str, Any]:
    """The record as one JSON object."""
    data: dict[str, Any] = {
        "version": RECORD_VERSION,
        "run_id": record.run_id,
        "key": record.key,
        "role": record.role,
        "origin": record.origin,
        "source": record.source,
        "elapsed_s": round(record.elapsed_s, 3),
        "places": [{"axes": dict(p.axes), "op": p.op, "count": p.count} for p in record.places],
        "workload": workload_to_json(record.workload),
        "provider": record.provider,
        "launch": launch_to_json(record.launch),
    }
    if record.check is not None:
        data["check"] = asdict(record.check)
    match record.outcome:
        case Measured(measurement, grade):
            data["measurement"] = measurement_to_json(measurement, grade)
        case Skipped(reason):
            data["skipped"] = {"reason": reason}
        case Failed():
            data["failed"] = asdict(record.outcome)
    return data


def record_from_json(data: object) -> Record:
    """What `record_to_json` wrote, in this version or an older one. Raises InputError for anything else."""
    if not isinstance(data, dict):
        raise InputError("record", repr(data)[:80], "a JSON object")
    version = data.get("version")
    if version != RECORD_VERSION:
        raise InputError(
            "record", f"version = {version!r}", f"{RECORD_VERSION} (a newer quantbench may have written it)"
        )
    texts: dict[str, str] = {}
    for name in ("run_id", "key", "provider", "origin", "role", "source"):
        value = data.get(name)
        if not isinstance(value, str):
            raise InputError("record", f"{name} = {value!r}", "a text")
        texts[name] = intern(value)  # the same in most records
    if not _KEY.fullmatch(str(texts["key"])):
        raise InputError("record", f"key = {texts['key']!r}"[:80], "16 hex digits")
    elapsed_s = data.get("elapsed_s")
    if not is_number(elapsed_s):
        raise InputError("record", f"elapsed_s = {elapsed_s!r}"[:100], "a finite number")
    places = data.get("places")
    if not isinstance(places, list):
        raise InputError("record", f"places = {places!r}"[:80], "a list")
    return Record(
        workload=workload_from_json(data.get("workload")),
        outcome=_outcome_from_json(data),
        launch=launch_from_json(data.get("launch")),
        places=tuple(decode(Place, p) for p in places),
        elapsed_s=float(elapsed_s),
        check=decode(Check, data["check"]) if data.get("check") is not None else None,
        **texts,
    )


def _outcome_from_json(data: dict[str, Any]) -> Outcome:
    present = [name for name in ("measurement", "skipped", "failed") if name in data]
    if len(present) != 1:
        raise InputError("record", f"outcomes {present}", "exactly one of measurement, skipped, failed")
    if present[0] == "measurement":
        return Measured(*measurement_from_json(data["measurement"]))
    if present[0] == "skipped":
        return decode(Skipped, data["skipped"])
    return decode(Failed, data["failed"])
