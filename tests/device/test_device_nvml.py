"""NVML through a library object that answers, refuses and disappears as told."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from quantbench.device.nvml import Absent, Limits, Nvml, decode_reasons
from quantbench.device.spec import DeviceState


class FakeError(Exception):
    """Stands for pynvml.NVMLError."""


class FakeLibrary:
    """nvidia-ml-py's functions on one H200-like card. refuse: names of functions that raise."""

    NVMLError = FakeError

    def __init__(
        self, *refuse: str, pids: tuple[int, ...] = (), reasons: int = 0, mig: bool = False
    ) -> None:
        self.refuse = set(refuse)
        self.pids = pids
        self.reasons = reasons
        self.mig = mig
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or name in self.missing:
            raise AttributeError(f"no {name}")

        def call(*arguments: Any) -> Any:
            self.asked.append((name, arguments))
            if name in self.refuse:
                raise FakeError("Not Supported")
            return self.answer(name, arguments)

        return call

    missing: frozenset[str] = frozenset()
    compute_mode = 0

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "nvmlDeviceGetHandleByUUID":
            if arguments[0] not in ("GPU-1234", "MIG-5678"):
                raise FakeError("Not Found")
            return "slice" if arguments[0].startswith("MIG") else "card"
        if name == "nvmlDeviceGetClockInfo":
            return {1: 1980, 2: 3201}[arguments[1]]
        if name == "nvmlDeviceGetMaxClockInfo":
            return {1: 1980, 2: 3201}[arguments[1]]
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceIsMigDeviceHandle": ctypes.c_uint(
                self.mig
            ),  # as nvidia-ml-py answers it, unlike the others
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "card",
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 123456,
            "nvmlDeviceGetCurrentClocksEventReasons": self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in self.pids],
            "nvmlSystemGetDriverVersion": "580.159.03",
            "nvmlDeviceGetApplicationsClock": 1980,
            "nvmlDeviceGetDefaultApplicationsClock": 1830,
            "nvmlDeviceGetComputeMode": self.compute_mode,
            "nvmlDeviceGetMemoryBusWidth": 6144,
            "nvmlDeviceGetEnforcedPowerLimit": 700000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
            "nvmlDeviceGetTemperatureThreshold": 95,
        }
        return answers[name]


def opened(library: FakeLibrary, uuid: str = "1234") -> Nvml:
    found = Nvml.open(
        uuid=uuid,
        library=library,
        own_pids=lambda: frozenset({100}),
        pid_exists=lambda pid: pid < 1_000_000,
    )
    assert isinstance(found, Nvml)
    return found


def test_state() -> None:
    state = opened(FakeLibrary(reasons=0x4, pids=(100, 200))).state()
    assert state == DeviceState(
        sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        temperature_c=41,
        power_w=123.456,
        throttle_reasons=("sw_power_cap",),
        other_processes=1,
    )


def test_limits() -> None:
    assert opened(FakeLibrary()).limits() == Limits(
        driver_version="580.159.03",
        max_sm_clock_mhz=1980,
        max_memory_clock_mhz=3201,
        application_sm_mhz=1980,
        default_application_sm_mhz=1830,
        memory_bus_bits=6144,
        power_limit_w=700,
        default_power_limit_w=700,
        slowdown_c=95,
        exclusive=False,
    )


def test_a_card_for_one_process_only() -> None:
    library = FakeLibrary()
    library.compute_mode = 3
    assert opened(library).limits().exclusive


@pytest.mark.parametrize(
    ("refused", "field"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetComputeRunningProcesses", "other_processes"),
    ],
)
def test_one_refused_question_leaves_the_others(refused: str, field: str) -> None:
    state = opened(FakeLibrary(refused)).state()
    assert getattr(state, field) is None
    assert state.sm_clock_mhz == 1980
    assert state.note.endswith(": Not Supported")
    assert state.note.count("no ") == 1


def test_a_card_that_answers_nothing_still_gives_a_state() -> None:
    names = (
        "nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceIsMigDeviceHandle",
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetComputeRunningProcesses",
    )  # fmt: skip
    nvml = opened(FakeLibrary(*names))
    state = nvml.state()
    assert state.note.split("; ") == [
        "no power: Not Supported", "no SM clock: Not Supported", "no memory clock: Not Supported",
        "no temperature: Not Supported", "no throttle reasons: Not Supported", "no process list: Not Supported",
    ]  # fmt: skip


def test_a_library_from_before_the_renaming() -> None:
    library = FakeLibrary(reasons=0x20)
    library.missing = frozenset(
        {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMemoryBusWidth"}
    )
    nvml = opened(library)
    assert nvml.state().throttle_reasons == ("sw_thermal",)
    limits = nvml.limits()
    assert limits.memory_bus_bits is None
    assert limits.note == "no memory bus width: no nvmlDeviceGetMemoryBusWidth"


def test_a_driver_from_before_the_renaming() -> None:
    library = FakeLibrary("nvmlDeviceGetCurrentClocksEventReasons", reasons=0x80)
    assert opened(library).state().throttle_reasons == ("hw_power_brake",)


def test_the_gpu_is_found_by_uuid_never_by_index() -> None:
    library = FakeLibrary()
    opened(library, uuid="1234")
    assert [a for n, a in library.asked if n == "nvmlDeviceGetHandleByUUID"] == [("GPU-1234",)]
    assert not [n for n, _ in library.asked if "Index" in n]


def test_a_mig_slice_has_its_cards_clocks_and_its_own_processes() -> None:
    library = FakeLibrary(mig=True, pids=(200,))
    state = opened(library, uuid="5678").state()
    assert state.other_processes == 1
    asked = dict(library.asked)
    assert asked["nvmlDeviceGetComputeRunningProcesses"] == ("slice",)
    assert asked["nvmlDeviceGetPowerUsage"] == ("card",)


def test_absent_driver_is_a_stated_fact() -> None:
    assert Nvml.open(uuid="1234", library=FakeLibrary("nvmlInit")) == Absent(
        "NVML does not start: Not Supported"
    )


def test_unknown_gpu_is_a_stated_fact() -> None:
    assert Nvml.open(uuid="unheard", library=FakeLibrary()) == Absent(
        "NVML does not know this GPU (MIG-unheard: Not Found)"
    )


def test_processes_can_be_left_out() -> None:
    library = FakeLibrary(pids=(200,))
    assert opened(library).state(processes=False).other_processes is None
    assert "nvmlDeviceGetComputeRunningProcesses" not in dict(library.asked)


def test_numbers_of_another_namespace_are_not_counted() -> None:
    state = opened(FakeLibrary(pids=(4_000_001, 4_000_002))).state()
    assert state.other_processes is None
    assert (
        state.note
        == "NVML reports 2 process ids of another PID namespace, perhaps including this process"
    )


def test_a_process_that_just_ended_is_another_one_if_we_see_ourselves() -> None:
    assert opened(FakeLibrary(pids=(100, 4_000_001))).state().other_processes == 1


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, ()),
        (0x1, ("gpu_idle",)),
        (0x2 | 0x10, ("applications_clocks_setting", "sync_boost")),
        (
            0x4 | 0x8 | 0x20 | 0x40 | 0x80,
            ("sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"),
        ),
        (0x100, ("display_clock_setting",)),
        (0x2000, ("unknown_0x2000",)),
    ],
)
def test_reasons_in_words(mask: int, words: tuple[str, ...]) -> None:
    assert decode_reasons(mask) == words


def test_bits_are_those_of_the_real_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    named = {
        "SwPowerCap": "sw_power_cap", "HwSlowdown": "hw_slowdown", "SwThermalSlowdown": "sw_thermal",
        "HwThermalSlowdown": "hw_thermal", "HwPowerBrakeSlowdown": "hw_power_brake", "GpuIdle": "gpu_idle",
        "SyncBoost": "sync_boost",
    }  # fmt: skip
    for name, word in named.items():
        assert decode_reasons(getattr(pynvml, f"nvmlClocksThrottleReason{name}")) == (word,)


def test_alone_on_the_card_nobody_else_is_asked_for() -> None:
    def never() -> frozenset[int]:
        raise AssertionError("the process tree was walked")

    found = Nvml.open(uuid="1234", library=FakeLibrary(pids=(os.getpid(),)), own_pids=never)
    assert isinstance(found, Nvml)
    assert found.state().other_processes == 0


def test_the_process_tree_is_walked_again_only_for_other_processes() -> None:
    walks: list[int] = []

    def own_pids() -> frozenset[int]:
        walks.append(1)
        return frozenset({100})

    library = FakeLibrary(pids=(100, 200))
    found = Nvml.open(
        uuid="1234", library=library, own_pids=own_pids, pid_exists=lambda pid: pid < 1_000_000
    )
    assert isinstance(found, Nvml)
    assert [found.state().other_processes for _ in range(3)] == [1, 1, 1]
    assert len(walks) == 1
    library.pids = (100, 200, 300)
    assert found.state().other_processes == 2
    library.pids = (4_000_001,)
    assert [found.state().note for _ in range(2)] == [
        "NVML reports 1 process ids of another PID namespace, perhaps including this process"
    ] * 2
    assert len(walks) == 3
