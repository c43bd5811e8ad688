"""Defines the JSON messages between a sweep and its workers.

A worker first introduces itself and then replies to each request. JSON is used instead of pickle,
so that a broken worker can do no more than send a message that does not parse.
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
    """First message of a worker, which describes its device and its software.

    state, limits: state and limits of the device; no limits on a CPU and without NVML.
    software: versions by name.
    tiles: tiles that user-defined providers declare, by the name of the provider.
    """

    device: DeviceSpec
    state: DeviceState
    software: dict[str, str]
    limits: Limits | None = None
    tiles: dict[str, Tile] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One point to run.

    name: whether its kernel must be identified.
    """

    workload: Workload
    provider: str
    name: bool = True


@dataclass(frozen=True)
class Reply:
    """Result of a request. At most one of measurement, skipped and failed is set.

    skipped: reason why the point was skipped.
    failed: kind of the failure, and its message.
    launch: launch of the kernel that ran. It is the only content of a reply of `naming`.
    checked: result of the checks; None if the results were not checked.
    phases_s: duration of each phase in s, by its name.
    broken: whether the worker must be replaced because its GPU context is lost.
    """

    measurement: Measurement | None = None
    skipped: str | None = None
    failed: tuple[str, str] | None = None
    launch: Launch | None = None
    checked: Check | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    broken: bool = False


def reply_from_json(data: object) -> Reply:
    """Reads the reply of a worker.

    A malformed reply counts as a failed point, for example a NaN among the samples.
    """
    try:
        return decode(Reply, data, "worker reply", whole=True)
    except InputError as error:
        return Reply(failed=("error", str(error)))
