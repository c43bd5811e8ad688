"""Defines the JSON messages between a sweep and its workers: `Hello`, then a `Reply` to each `Request`.

Entry points: the types `Hello`, `Request` and `Reply`, and the functions `*_to_json` and `*_from_json`. Used by
`child`, `worker`, `naming`, `compiling`, `runner` and `session`, which send them over pipes, and by `cluster`, which
sends them over the network. JSON rather than pickle: the worst that a broken worker can send is a line that does not
parse.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.launch import Launch
from quantbench.measurement import Check, Measurement
from quantbench.store.typed import Json, decode, encode
from quantbench.timing.options import TimingOptions
from quantbench.workload import Workload, workload_from_json, workload_to_json


@dataclass(frozen=True)
class Hello:
    """First message of a worker: its device, the device's state and software versions by name."""

    device: DeviceSpec
    state: DeviceState
    software: dict[str, str]


@dataclass(frozen=True)
class Request:
    """One point to run. name: whether its kernel is to be identified."""

    workload: Workload
    provider: str
    name: bool = True


@dataclass(frozen=True)
class Reply:
    """Result of a request: at most one of measurement, skipped (reason) and failed (kind, message).

    launch: kernel that ran, the only content of a reply of `naming`.
    checked: result of the checks, None if not checked.
    phases_s: seconds by phase.
    broken: whether the worker must be replaced (its GPU context is lost).
    """

    measurement: Measurement | None = None
    skipped: str | None = None
    failed: tuple[str, str] | None = None
    launch: Launch | None = None
    checked: Check | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    broken: bool = False


def hello_to_json(hello: Hello) -> Json:
    return dict(encode(hello))


def hello_from_json(data: object) -> Hello:
    return decode(Hello, data)


def request_to_json(request: Request) -> Json:
    return {"workload": workload_to_json(request.workload), "provider": request.provider, "name": request.name}


def request_from_json(data: Json) -> Request:
    return Request(workload_from_json(data["workload"]), data["provider"], data["name"])


def reply_to_json(reply: Reply) -> Json:
    return dict(encode(reply))


def reply_from_json(data: object) -> Reply:
    """Reads a worker's reply. Raises InputError if it is malformed, such as a NaN among the samples."""
    return decode(Reply, data, "worker reply", whole=True)


def timing_to_json(timing: TimingOptions) -> Json:
    return dict(encode(timing))


def timing_from_json(data: object) -> TimingOptions:
    return decode(TimingOptions, data)
