"""Defines the JSON messages between a sweep and its workers: `Hello`, then a `Reply` to each
`Request`.

JSON rather than pickle: the worst that a broken worker can send is a line that does not parse.
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
    """First message of a worker: its device, the device's state and limits, and software versions
    by name.

    limits: None on a CPU and without NVML.
    tiles: those that user-defined providers declare, by provider.
    """

    device: DeviceSpec
    state: DeviceState
    software: dict[str, str]
    limits: Limits | None = None
    tiles: dict[str, Tile] = field(default_factory=dict)


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


def reply_from_json(data: object) -> Reply:
    """Reads a worker's reply; a malformed one, such as with a NaN among the samples, counts as
    failed.
    """
    try:
        return decode(Reply, data, "worker reply", whole=True)
    except InputError as error:
        return Reply(failed=("error", str(error)))
