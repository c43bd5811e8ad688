"""The messages between a sweep and its workers, as JSON: `Hello`, then a `Reply` to each `Request`.

They go over the pipes of `quantbench.sweep.child`, and over the network in `quantbench.cluster`. JSON and not pickle: a
broken worker can at worst send a line that does not parse.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch
from quantbench.measurement import Check, Grade, Measurement
from quantbench.store.codec import (
    launch_from_json,
    launch_to_json,
    measurement_from_json,
    measurement_to_json,
    spec_from_json,
    spec_to_json,
    state_from_json,
)
from quantbench.store.typed import decode
from quantbench.timing.options import TimingOptions
from quantbench.workload import Workload, workload_from_json, workload_to_json

_UNGRADED = Grade("A", ())  # the sweep grades


@dataclass(frozen=True)
class Hello:
    """A worker's first message: its device."""

    device: DeviceSpec
    state: DeviceState
    software: dict[str, str]


@dataclass(frozen=True)
class Request:
    """One point to run."""

    workload: Workload
    provider: str


@dataclass(frozen=True)
class Reply:
    """The result of a request: exactly one of measurement, skipped (why) and failed (kind, message).

    checked: result of the checks, None if there were none. phases_s: seconds by phase. broken: the worker cannot go on
    (its GPU context is lost).
    """

    measurement: Measurement | None = None
    skipped: str | None = None
    failed: tuple[str, str] | None = None
    launch: Launch | None = None
    checked: Check | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    broken: bool = False


def hello_to_json(hello: Hello) -> dict[str, Any]:
    return {"device": spec_to_json(hello.device), "state": asdict(hello.state), "software": hello.software}


def hello_from_json(data: dict[str, Any]) -> Hello:
    return Hello(spec_from_json(data["device"]), state_from_json(data["state"]), data["software"])


def request_to_json(request: Request) -> dict[str, Any]:
    return {"workload": workload_to_json(request.workload), "provider": request.provider}


def request_from_json(data: dict[str, Any]) -> Request:
    return Request(workload_from_json(data["workload"]), data["provider"])


def reply_to_json(reply: Reply) -> dict[str, Any]:
    return {
        "measurement": None if reply.measurement is None else measurement_to_json(reply.measurement, _UNGRADED),
        "skipped": reply.skipped,
        "failed": reply.failed,
        "launch": launch_to_json(reply.launch),
        "checked": None if reply.checked is None else asdict(reply.checked),
        "phases_s": reply.phases_s,
        "broken": reply.broken,
    }


def reply_from_json(data: dict[str, Any]) -> Reply:
    """The worker's reply. Raises InputError if it is malformed, such as a NaN among the samples."""
    try:
        measurement = data["measurement"]
        return Reply(
            measurement=None if measurement is None else measurement_from_json(measurement)[0],
            skipped=data["skipped"],
            failed=None if data["failed"] is None else (str(data["failed"][0]), str(data["failed"][1])),
            launch=launch_from_json(data["launch"]),
            checked=None if data["checked"] is None else decode(Check, data["checked"]),
            phases_s=data["phases_s"],
            broken=data["broken"],
        )
    except (KeyError, TypeError, IndexError) as error:
        raise InputError("worker reply", repr(error), "the fields of a reply") from None


def timing_to_json(timing: TimingOptions) -> dict[str, Any]:
    return asdict(timing)


def timing_from_json(data: object) -> TimingOptions:
    return decode(TimingOptions, data)
