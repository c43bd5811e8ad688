"""Reads a GPU's state and limits from NVML, through `Nvml.open`.

If a query fails, its value is None, and a note gives the reason. The state includes the number of
other processes on the GPU, without quantbench's own. Bit values and names follow nvml.h (NVIDIA
Management Library API Reference, driver 580).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from quantbench.device.spec import DeviceState

# Names of NVML's clock event reasons (reasons for a lowered clock), by bit.
_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clock_setting",
}
#: Clock event reasons that disturb timings, because heat or power lowers the clock.
HARMFUL_REASONS = frozenset(
    {"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
)

# Values of NVML's enumerations, which are arguments or results of its functions.
_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_TEMPERATURE_GPU = 0
_THRESHOLD_SLOWDOWN = 1
_COMPUTE_EXCLUSIVE_PROCESS = 3


@dataclass(frozen=True)
class Absent:
    """Result of `Nvml.open` if NVML cannot be used.

    note: reason, for users.
    """

    note: str


@dataclass(frozen=True)
class Limits:
    """Current limits and settings of a GPU. Values that NVML does not report are None.

    application_sm_mhz: SM clock that is set for applications (nvidia-smi -ac).
    default_application_sm_mhz: default for application_sm_mhz. It is often below the maximum SM
        clock (V100: 1312 of 1530 MHz).
    slowdown_c: temperature in °C at which the hardware slows down.
    exclusive: whether only one process may use the card (compute mode EXCLUSIVE_PROCESS).
    note: names of the missing values, with the reasons.
    """

    driver_version: str | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    application_sm_mhz: float | None = None
    default_application_sm_mhz: float | None = None
    memory_bus_bits: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    slowdown_c: float | None = None
    exclusive: bool | None = None
    note: str = ""


def _own_pids() -> frozenset[int]:
    """Returns the ids of this process, its descendants and its ancestors.

    All of them count as quantbench's own. If this process is a sweep's worker, its ancestors
    include the main process.
    """
    import psutil

    me = psutil.Process()
    return frozenset(process.pid for process in (me, *me.children(recursive=True), *me.parents()))


def _pid_exists(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))


class Nvml:
    """NVML connection to one GPU, made by `Nvml.open`.

    library: the module pynvml (nvidia-ml-py), or a stand-in.
    handle: NVML handle of the GPU or MIG slice.
    own_pids: function that returns the ids of quantbench's own processes. The ids change as workers
        start and end.
    pid_exists: function that returns whether a process id exists in this PID namespace. In a
        container, NVML may report the host's ids, which do not exist here.
    """

    def __init__(
        self,
        library: Any,
        handle: Any,
        *,
        own_pids: Callable[[], frozenset[int]],
        pid_exists: Callable[[int], bool],
    ) -> None:
        self._nvml = library
        self._own_pids = own_pids
        self._pid_exists = pid_exists
        # Last result of `_judge`, after the process ids that it was computed from.
        self._judged: tuple[set[int], int | None, str] = (set(), 0, "")
        # For a MIG slice, the slice's handle reports the processes, and the card's handle reports
        # clocks and temperature.
        self._processes_handle = self._handle = handle
        if self._number([], "MIG mode", "nvmlDeviceIsMigDeviceHandle"):
            card = self._ask([], "card", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
            self._handle = handle if card is None else card

    @classmethod
    def open(
        cls,
        uuid: str,
        *,
        library: Any = None,
        own_pids: Callable[[], frozenset[int]] = _own_pids,
        pid_exists: Callable[[int], bool] = _pid_exists,
    ) -> Nvml | Absent:
        """Opens the GPU or MIG slice with this UUID.

        A UUID is needed, because CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER renumber GPUs for CUDA
        but not for NVML.

        uuid: UUID as torch reports it, without NVML's prefix `GPU-` or `MIG-`.
        library: the module pynvml, or a stand-in; None to import pynvml.
        own_pids, pid_exists: functions as in `Nvml`.
        """
        if library is None:
            try:
                library = import_module("pynvml")
            except ImportError:
                return Absent("the Python package nvidia-ml-py is not installed")
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            return Absent(f"NVML does not start: {error}")
        why = ""
        for name in (f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                handle = library.nvmlDeviceGetHandleByUUID(name)
            except library.NVMLError as error:
                why = f"{name}: {error}"
            else:
                return cls(library, handle, own_pids=own_pids, pid_exists=pid_exists)
        return Absent(f"NVML does not know this GPU ({why})")

    def state(self, *, processes: bool = True) -> DeviceState:
        """Reads the card's state.

        processes: whether to count other processes, which is the slowest query.
        """
        notes: list[str] = []
        number = partial(self._number, notes)
        return DeviceState(
            power_w=self._watts(notes, "power", "nvmlDeviceGetPowerUsage"),
            sm_clock_mhz=number("SM clock", "nvmlDeviceGetClockInfo", _CLOCK_SM),
            memory_clock_mhz=number("memory clock", "nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
            temperature_c=number("temperature", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            throttle_reasons=self._reasons(notes),
            other_processes=self._other_processes(notes) if processes else None,
            note="; ".join(notes),
        )

    def limits(self) -> Limits:
        """Reads the card's limits and settings."""
        notes: list[str] = []
        number = partial(self._number, notes)
        return Limits(
            power_limit_w=self._watts(notes, "power limit", "nvmlDeviceGetEnforcedPowerLimit"),
            default_power_limit_w=self._watts(
                notes, "default power limit", "nvmlDeviceGetPowerManagementDefaultLimit"
            ),
            driver_version=self._ask(
                notes, "driver version", "nvmlSystemGetDriverVersion", kind=str
            ),
            max_sm_clock_mhz=number("highest SM clock", "nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
            max_memory_clock_mhz=number(
                "highest memory clock", "nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY
            ),
            application_sm_mhz=number(
                "applications clock", "nvmlDeviceGetApplicationsClock", _CLOCK_SM
            ),
            default_application_sm_mhz=number(
                "default applications clock", "nvmlDeviceGetDefaultApplicationsClock", _CLOCK_SM
            ),
            memory_bus_bits=number("memory bus width", "nvmlDeviceGetMemoryBusWidth", kind=int),
            slowdown_c=number(
                "slowdown temperature", "nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN
            ),
            exclusive=number("compute mode", "nvmlDeviceGetComputeMode", kind=_is_exclusive),
            note="; ".join(notes),
        )

    def _ask(
        self,
        notes: list[str],
        what: str,
        function: str,
        *arguments: Any,
        kind: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """Calls an NVML function, and returns its converted result.

        If the function fails or does not exist, the result is None, and the reason is appended to
        `notes`.

        notes: list to which the reason is appended.
        what: name of the value, for the note.
        function: name of the NVML function.
        kind: function that converts the result.
        """
        try:
            return kind(getattr(self._nvml, function)(*arguments))
        except (self._nvml.NVMLError, AttributeError) as error:
            notes.append(f"no {what}: {error}")
            return None

    def _number(
        self,
        notes: list[str],
        what: str,
        function: str,
        *arguments: Any,
        kind: Callable[[Any], Any] = float,
    ) -> Any:
        """Calls an NVML function for this GPU as `_ask` does. The result is a number.

        `kind` converts the number; the default is float.
        """
        # In nvidia-ml-py 12.535 to 13.615, nvmlDeviceIsMigDeviceHandle returns a ctypes object
        # instead of a number.
        return self._ask(
            notes,
            what,
            function,
            self._handle,
            *arguments,
            kind=lambda answer: kind(getattr(answer, "value", answer)),
        )

    def _watts(self, notes: list[str], what: str, function: str) -> float | None:
        """Calls an NVML function that returns milliwatts, as `_number` does, and returns watts."""
        milliwatts = self._number(notes, what, function)
        return None if milliwatts is None else milliwatts / 1000

    def _reasons(self, notes: list[str]) -> tuple[str, ...]:
        """Returns the names of the active clock event reasons; () if they are unknown."""
        # The function was renamed in driver 535. Older libraries have only the old name.
        mask = self._ask([], "", "nvmlDeviceGetCurrentClocksEventReasons", self._handle)
        if mask is None:
            mask = self._ask(
                notes, "throttle reasons", "nvmlDeviceGetCurrentClocksThrottleReasons", self._handle
            )
        return () if mask is None else decode_reasons(mask)

    def _other_processes(self, notes: list[str]) -> int | None:
        """Returns the number of other compute processes on the GPU; None if unknown."""
        function = "nvmlDeviceGetComputeRunningProcesses"
        running = self._ask(notes, "process list", function, self._processes_handle)
        if running is None:
            return None
        pids = {int(process.pid) for process in running}
        if pids <= {os.getpid()}:  # the usual case needs no walk of the process tree (milliseconds)
            return 0
        # The result is cached, because this method runs about 50 times a second during sampling.
        if pids != self._judged[0]:
            self._judged = (pids, *self._judge(pids))
        _, others, note = self._judged
        if note:
            notes.append(note)
        return others

    def _judge(self, pids: set[int]) -> tuple[int | None, str]:
        """Returns the number of processes that are not quantbench's own, and a note.

        If the number cannot be determined, it is None, and the note gives the reason. Otherwise the
        note is empty.

        pids: ids of the processes that compute on the GPU.
        """
        own = self._own_pids()
        unknown = any(not self._pid_exists(pid) for pid in pids - own)
        if unknown and not pids & own:
            # One of these ids may be the host's id of this process.
            reported = f"NVML reports {len(pids)} process ids of another PID namespace"
            return None, f"{reported}, perhaps including this process"
        return len(pids - own), ""


def decode_reasons(mask: int) -> tuple[str, ...]:
    """Returns the names of the clock event reasons in NVML's bit mask, lowest bit first.

    >>> decode_reasons(0x24)
    ('sw_power_cap', 'sw_thermal')
    """
    bits = (1 << i for i in range(mask.bit_length()))
    return tuple(_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits if mask & bit)


def _is_exclusive(compute_mode: int) -> bool:
    """Returns whether NVML's compute mode allows only one process on the GPU."""
    return compute_mode == _COMPUTE_EXCLUSIVE_PROCESS
