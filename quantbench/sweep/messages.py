"""Defines the JSON messages between a sweep and its worker processes.

A worker first sends a `Hello` and then a `Reply` to each `Request`. The messages are JSON instead
of pickle, so that a broken worker can do no more harm than send a message that does not parse.
"""

from dataclasses import dataclass, field

from quantbench.device.nvml import Limits
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Check, Measurement
from quantbench.store.typed import decode
from quantbench.workload import Workload


@dataclass(frozen=True)
class Hello:
    """First message of a worker: its device and software.

    state: state of the device when the worker started.
    software: version of each package, by name.
    limits: limits of the device as NVML reports them; None on a CPU and without NVML.
    tiles: tile that each user-defined provider declares, by provider name.
    """

    device: DeviceSpec
    state: DeviceState
    software: dict[str, str]
    limits: Limits | None = None
    tiles: dict[str, Tile] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One point to run.

    name: whether to identify the point's kernel.
    """

    workload: Workload
    provider: str
    name: bool = True


@dataclass(frozen=True)
class Reply:
    """Result of a request. At most one of measurement, skipped and failed is set.

    skipped: reason why the point was skipped.
    failed: kind of failure, and its message.
    launch: launch of the point's kernel; None if it is unknown. The process that identifies kernels
        (`naming`) sets only this field, or `failed`.
    checked: result of the correctness checks; None if there were no checks.
    phases_s: duration of each phase in s, by phase name.
    broken: whether the process that sent the reply must be replaced, because its GPU context is
        lost.
    """

    measurement: Measurement | None = None
    skipped: str | None = None
    failed: tuple[str, str] | None = None
    launch: Launch | None = None
    checked: Check | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    broken: bool = False


def reply_from_json(data: object) -> Reply:
    """Decodes the reply of a worker.

    A malformed reply, such as one with a NaN among the samples, becomes a failed point.
    """
    try:
        return decode(Reply, data, "worker reply", whole=True)
    except InputError as error:
        return Reply(failed=("error", str(error)))
