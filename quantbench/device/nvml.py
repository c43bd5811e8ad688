"""A GPU's state from NVML, which may be absent, or refuse any single question, without stopping a measurement.

The library object is passed in where one is at hand (tests do so); its functions and its NVMLError are those of
nvidia-ml-py. Bit values and names follow nvml.h (NVIDIA Management Library API Reference, driver 580).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from quantbench.device.spec import DeviceState

_T = TypeVar("_T")

# nvmlClocksEventReasons: bit → our word for it.
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
#: Reasons that hold the clock below what the card would run at by itself, for heat or power: timings suffer.
HARMFUL_REASONS = frozenset({"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})

_CLOCK_SM = 1
_CLOCK_MEMORY = 2
_TEMPERATURE_GPU = 0
_THRESHOLD_SLOWDOWN = 1


@dataclass(frozen=True)
class Absent:
    """NVML is not to be had; note says why, in words."""

    note: str


@dataclass(frozen=True)
class Limits:
    """What the card may do, as it is set now; None where it does not tell.

    max_*: the highest clocks. application_sm_mhz: the clock that work is set to run at. power_limit_w: enforced now;
    default_power_limit_w: what the card is sold with. slowdown_c: the temperature at which the hardware slows down.
    persistence: whether the driver stays loaded between programs. note: what was not told, and why.
    """

    driver_version: str | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    application_sm_mhz: float | None = None
    memory_bus_bits: int | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    slowdown_c: float | None = None
    persistence: bool | None = None
    note: str = ""


class Nvml:
    """NVML's view of one GPU. Make it with `Nvml.open`.

    own_pids tells the processes that are ours (a function, since workers come and go); pid_exists, whether a process
    number means anything here (in a container NVML counts the host's processes).
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
        self._processes_handle = handle
        self._own_pids = own_pids
        self._pid_exists = pid_exists
        self._judged: tuple[set[int], int | None, str] = (set(), 0, "")  # process numbers, how many are others', note
        # A MIG slice has no clocks or temperature of its own; the card it is part of has.
        self._handle = handle
        is_slice, _ = self._ask("MIG mode", lambda: library.nvmlDeviceIsMigDeviceHandle(handle))
        if is_slice:
            card, _ = self._ask("card", lambda: library.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
            self._handle = handle if card is None else card

    @classmethod
    def open(
        cls,
        *,
        uuid: str | None = None,
        pci_bus_id: str | None = None,
        library: Any = None,
        own_pids: Callable[[], frozenset[int]] | None = None,
        pid_exists: Callable[[int], bool] | None = None,
    ) -> Nvml | Absent:
        """The GPU with this UUID (with or without NVML's `GPU-` or `MIG-` before it) or PCI bus id.

        Never by index: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER renumber the GPUs for CUDA and not for NVML.
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
        names = [uuid] if uuid and uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"] if uuid else []
        ways = [(library.nvmlDeviceGetHandleByUUID, name) for name in names]
        if pci_bus_id:
            ways.append((library.nvmlDeviceGetHandleByPciBusId, pci_bus_id))
        why = "CUDA tells neither its UUID nor its PCI bus id"
        for find, name in ways:
            try:
                handle = find(name)
            except library.NVMLError as error:
                why = f"{name}: {error}"
            else:
                return cls(library, handle, own_pids=own_pids or _own_pids, pid_exists=pid_exists or _pid_exists)
        return Absent(f"NVML does not know this GPU ({why})")

    def state(self, *, processes: bool = True) -> DeviceState:
        """What the card is doing now. processes=False leaves out the costly question of who else computes on it."""
        notes: list[str] = []
        ask = _Noting(self._ask, notes)
        lib, handle = self._nvml, self._handle
        power_mw = ask("power", lambda: lib.nvmlDeviceGetPowerUsage(handle))
        return DeviceState(
            sm_clock_mhz=ask("SM clock", lambda: float(lib.nvmlDeviceGetClockInfo(handle, _CLOCK_SM))),
            memory_clock_mhz=ask("memory clock", lambda: float(lib.nvmlDeviceGetClockInfo(handle, _CLOCK_MEMORY))),
            temperature_c=ask("temperature", lambda: float(lib.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU))),
            power_w=None if power_mw is None else power_mw / 1000,
            throttle_reasons=ask("throttle reasons", self._read_reasons) or (),
            other_processes=self._other_processes(ask, notes) if processes else None,
            note="; ".join(notes),
        )

    def sm_clock_mhz(self) -> float | None:
        """The SM clock alone, cheap enough to ask around every sample."""
        clock, _ = self._ask("SM clock", lambda: float(self._nvml.nvmlDeviceGetClockInfo(self._handle, _CLOCK_SM)))
        return clock

    def throttle_reasons(self) -> tuple[str, ...]:
        """What holds the clock down now, in words; empty if nothing does or NVML does not tell."""
        reasons, _ = self._ask("throttle reasons", self._read_reasons)
        return reasons or ()

    def limits(self) -> Limits:
        """Clocks, power and temperature that the card is held to."""
        notes: list[str] = []
        ask = _Noting(self._ask, notes)
        lib, handle = self._nvml, self._handle
        power_mw = ask("power limit", lambda: lib.nvmlDeviceGetEnforcedPowerLimit(handle))
        default_mw = ask("default power limit", lambda: lib.nvmlDeviceGetPowerManagementDefaultLimit(handle))
        persistence = ask("persistence mode", lambda: lib.nvmlDeviceGetPersistenceMode(handle))
        return Limits(
            driver_version=ask("driver version", lambda: str(lib.nvmlSystemGetDriverVersion())),
            max_sm_clock_mhz=ask("highest SM clock", lambda: float(lib.nvmlDeviceGetMaxClockInfo(handle, _CLOCK_SM))),
            max_memory_clock_mhz=ask(
                "highest memory clock", lambda: float(lib.nvmlDeviceGetMaxClockInfo(handle, _CLOCK_MEMORY))
            ),
            application_sm_mhz=ask(
                "applications clock", lambda: float(lib.nvmlDeviceGetApplicationsClock(handle, _CLOCK_SM))
            ),
            memory_bus_bits=ask("memory bus width", lambda: int(lib.nvmlDeviceGetMemoryBusWidth(handle))),
            power_limit_w=None if power_mw is None else power_mw / 1000,
            default_power_limit_w=None if default_mw is None else default_mw / 1000,
            slowdown_c=ask(
                "slowdown temperature",
                lambda: float(lib.nvmlDeviceGetTemperatureThreshold(handle, _THRESHOLD_SLOWDOWN)),
            ),
            persistence=None if persistence is None else bool(persistence),
            note="; ".join(notes),
        )

    def _ask(self, what: str, question: Callable[[], _T]) -> tuple[_T | None, str | None]:
        """The answer, or None and why there is none. A function that this nvidia-ml-py lacks is no answer either."""
        try:
            return question(), None
        except self._nvml.NVMLError as error:
            return None, f"no {what}: {error}"
        except AttributeError as error:
            return None, f"no {what}: {error}"

    def _read_reasons(self) -> tuple[str, ...]:
        # The function was renamed in driver 535; older libraries only know the old name.
        new = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if new is not None:
            mask, _ = self._ask("throttle reasons", lambda: new(self._handle))
            if mask is not None:
                return decode_reasons(mask)
        return decode_reasons(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _other_processes(self, ask: _Noting, notes: list[str]) -> int | None:
        running = ask("process list", lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._processes_handle))
        if running is None:
            return None
        pids = {int(process.pid) for process in running}
        if pids <= {os.getpid()}:  # the usual case, and walking the process tree takes milliseconds
            return 0
        if (
            pids != self._judged[0]
        ):  # asked some fifty times a second, beside samples; the same numbers, the same answer
            self._judged = (pids, *self._judge(pids))
        _, others, note = self._judged
        if note:
            notes.append(note)
        return others

    def _judge(self, pids: set[int]) -> tuple[int | None, str]:
        """How many of these processes are not ours, None where it cannot be told, and why not."""
        own = self._own_pids()
        strangers = {pid for pid in pids - own if not self._pid_exists(pid)}
        if strangers and not pids & own:
            # One of them may be this very process under the host's number.
            note = f"NVML counts {len(pids)} processes by numbers of another namespace, ours perhaps among them"
            return None, note
        return len(pids - own), ""


class _Noting:
    """Asks, and keeps in `notes` why there was no answer."""

    def __init__(self, ask: Callable[..., tuple[Any, str | None]], notes: list[str]) -> None:
        self._ask = ask
        self._notes = notes

    def __call__(self, what: str, question: Callable[[], _T]) -> _T | None:
        answer, why = self._ask(what, question)
        if why is not None:
            self._notes.append(why)
        found: _T | None = answer
        return found


def decode_reasons(mask: int) -> tuple[str, ...]:
    """Words for the bits of NVML's clock event reasons, lowest first.

    >>> decode_reasons(0x24)
    ('sw_power_cap', 'sw_thermal')
    """
    bits = [1 << i for i in range(mask.bit_length()) if mask >> i & 1]
    return tuple(_REASONS.get(bit, f"unknown_{bit:#x}") for bit in bits)


def _own_pids() -> frozenset[int]:
    """This process, those it started, and those that started it (a sweep's own process waits for its worker)."""
    import psutil

    me = psutil.Process()
    family = [me, *me.children(recursive=True), *me.parents()]
    return frozenset(process.pid for process in family)


def _pid_exists(pid: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(pid))
