"""Selects the device to measure, a GPU or one CPU core, and provides its spec, state and warnings.

The environment variable QUANTBENCH_DEVICE selects the device: `cpu`, `cuda` or `cuda:<number>`.
Without this variable, the device is torch's current GPU, or the CPU if the machine shows no NVIDIA
card. The module also chooses the default dtype and the default attention for measurements.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from quantbench.device.cpu import cpu_info, cpu_spec, cpu_state
from quantbench.device.diagnosis import Machine, look, refusal
from quantbench.device.matching import Properties, match
from quantbench.device.nvml import HARMFUL_REASONS, Absent, Limits, Nvml
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

VARIABLE = "QUANTBENCH_DEVICE"
# Compute capability of V100, the oldest GPU with fused attention in current releases of torch.
_FIRST_FLASH = (7, 0)
# Load average per core above which other work visibly disturbs a pinned thread.
_BUSY_LOAD_PER_CORE = 0.5
# A card gets a warning if it is less than this far below its slowdown temperature, in °C. A sweep
# of several minutes heats a card by more than this, so such a card will slow down.
_HOT_MARGIN_C = 8.0
# Assumed slowdown temperature of a card that does not report one. Data-centre cards slow down
# between 85 and 95 °C.
_SLOWDOWN_C = 88.0
# A clock or power limit of at least this fraction of the card's default gives no warning.
_UNNOTICEABLE_SHARE = 0.99


def current() -> DeviceSpec:
    """Returns the spec of the device in use, and makes a GPU torch's current device.

    If QUANTBENCH_DEVICE is `cpu`, torch is not imported.

    Raises InputError if QUANTBENCH_DEVICE names no available device. Raises UnsupportedError for an
    unregistered GPU that is older than Volta, and for an NVIDIA card that torch cannot use. The CPU
    does not silently replace such a card: the user must select it.
    """
    index = gpu_index()
    if index is None:
        return cpu_spec(cpu_info())
    import torch

    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    return match(read_properties(properties, Nvml.open(str(properties.uuid))))


def monitor(spec: DeviceSpec) -> Callable[[], DeviceState]:
    """Returns a function that reads the state of the device in use.

    If NVML cannot be used, a GPU's state has only a note.

    spec: constants of the device in use.
    """
    if spec.kind == "cpu":
        return cpu_state
    nvml = open_nvml()
    if isinstance(nvml, Absent):
        state = DeviceState(note=nvml.note)
        return lambda: state
    return nvml.state


def open_nvml() -> Nvml | Absent:
    """Opens NVML for the GPU in use, which is found by its UUID.

    Returns Absent on a CPU, or if NVML cannot be used.
    """
    index = gpu_index()
    if index is None:
        return Absent("no GPU is used")
    import torch

    return Nvml.open(str(torch.cuda.get_device_properties(index).uuid))


def default_dtype(spec: DeviceSpec) -> str:
    """Returns the dtype to measure by default.

    The default is bf16 if the device's bf16 peak is above its fp32 peak. Otherwise, it is fp16 on a
    GPU and fp32 on a CPU.
    """
    bf16_tflops = spec.peak("bf16")
    if bf16_tflops is not None and bf16_tflops > (spec.peak("fp32") or 0):
        return "bf16"
    return "fp32" if spec.kind == "cpu" else "fp16"


def default_attention(spec: DeviceSpec) -> str:
    """Returns the attention implementation to measure by default, `flash` or `unfused`.

    The default is `flash` (one fused kernel) if torch has a fused kernel for the device. torch has
    one for CPUs, and for GPUs from V100 on: FlashAttention and cuDNN's kernel need sm_80, but
    torch's memory-efficient kernel also runs on V100 and T4.
    """
    capability = spec.compute_capability
    return "unfused" if capability is not None and capability < _FIRST_FLASH else "flash"


def read_properties(properties: torch._C._CudaDeviceProperties, nvml: Nvml | Absent) -> Properties:
    """Reads a GPU's properties from torch and NVML; NVML's values take precedence.

    Fields that neither torch nor NVML reports are None.

    properties: the GPU's properties as torch reports them.
    """
    limits = Limits() if isinstance(nvml, Absent) else nvml.limits()
    clock_khz = _property(properties, "clock_rate")
    memory_clock_khz = _property(properties, "memory_clock_rate")
    return Properties(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=_property(properties, "L2_cache_size"),
        max_sm_clock_mhz=limits.max_sm_clock_mhz or (clock_khz and clock_khz / 1000),
        max_memory_clock_mhz=limits.max_memory_clock_mhz
        or (memory_clock_khz and memory_clock_khz / 1000),
        memory_bus_bits=limits.memory_bus_bits or _property(properties, "memory_bus_width"),
    )


def inspect_machine() -> Machine | None:
    """Reads the state of the NVIDIA card to use, from the machine and torch.

    Returns None if QUANTBENCH_DEVICE selects the CPU.

    Raises InputError if QUANTBENCH_DEVICE is malformed or names a GPU that torch does not see, and
    UnsupportedError if torch is built for AMD GPUs.
    """
    wish = os.environ.get(VARIABLE, "").strip().lower()
    if wish == "cpu":
        return None
    chosen = re.fullmatch(r"(?:cuda(?::(\d+))?)?", wish)
    if chosen is None:
        raise InputError(VARIABLE, repr(wish), "cpu, cuda or cuda:<number>")
    import torch

    if torch.version.hip is not None:
        raise UnsupportedError(
            "device",
            f"torch {torch.__version__} for ROCm: measuring on AMD GPUs is not supported",
            "predictions and imported tables, which are supported, "
            f"or {VARIABLE}=cpu to measure the CPU",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the diagnosis reports torch's reasons
        count = torch.cuda.is_available() and torch.cuda.device_count()
        if not count:
            return look(torch, None)
        index = int(chosen[1] or 0) if wish else torch.cuda.current_device()
        if index >= count:
            raise InputError(VARIABLE, repr(wish), f"one of the {count} GPUs that torch sees")
        return look(torch, index)


def gpu_index() -> int | None:
    """Returns torch's number of the GPU in use, or None if the CPU is used.

    Raises the errors of `inspect_machine`. Raises InputError if QUANTBENCH_DEVICE selects a GPU but
    the machine has none. Raises UnsupportedError with a remedy if the machine has an NVIDIA card
    that cannot be measured.
    """
    machine = inspect_machine()
    if machine is None:
        return None
    error = refusal(machine)
    if error is not None:
        raise error
    wish = os.environ.get(VARIABLE, "").strip()
    if machine.index is None and wish:
        raise InputError(VARIABLE, repr(wish), "cpu: torch sees no GPU")
    return machine.index


def _property(properties: Any, name: str) -> Any:
    """Returns a property. Returns None if it is 0, or if this version of torch does not have it."""
    return getattr(properties, name, None) or None


def warnings_for(
    spec: DeviceSpec, state: DeviceState, limits: Limits | None = None
) -> tuple[str, ...]:
    """Returns a message for each condition of the device that disturbs timings.

    A message gives the condition, its effect on timings and, if possible, a remedy.

    spec: constants of the device.
    state: current state of the device.
    limits: current limits of a GPU; None if they are unknown.

    >>> spec = DeviceSpec("x", "cuda", 1, 1000, 2**20, 0, 2**30, 100, {}, (8, 0))
    >>> warnings_for(spec, DeviceState(throttle_reasons=("sw_power_cap",)))
    ('The clock is held down at this moment by sw_power_cap: kernels run slower.',)
    """
    if spec.kind == "cuda":
        limits = limits or Limits()
        return (*_state_warnings(state, limits), *_setting_warnings(spec, limits))
    load = state.load_per_core
    if load is None or load <= _BUSY_LOAD_PER_CORE:
        return ()
    return (
        f"This machine is busy: a load of {load:.1f} per core over the last minute, where at most "
        f"{_BUSY_LOAD_PER_CORE:g} leaves a pinned thread alone. Timings will scatter.",
    )


def _state_warnings(state: DeviceState, limits: Limits) -> Iterator[str]:
    """Yields a message for each part of a GPU's current state that disturbs timings."""
    if state.other_processes:
        yield (
            f"Other processes compute on this GPU ({state.other_processes}): their work lands in "
            "the timings. End them or take another GPU."
        )
    held = [reason for reason in state.throttle_reasons if reason in HARMFUL_REASONS]
    if held:
        yield f"The clock is held down at this moment by {', '.join(held)}: kernels run slower."
    slowdown_c = limits.slowdown_c or _SLOWDOWN_C
    if (state.temperature_c or 0.0) >= slowdown_c - _HOT_MARGIN_C:
        yield (
            f"The GPU is hot: {state.temperature_c:.0f} °C, and slows down from about "
            f"{slowdown_c:.0f} °C on. Let it cool, or expect the clock to fall."
        )


def _setting_warnings(spec: DeviceSpec, limits: Limits) -> Iterator[str]:
    """Yields a message for each GPU setting that disturbs work, and one if peaks are estimated."""
    set_mhz = limits.application_sm_mhz
    default_mhz = limits.default_application_sm_mhz
    if set_mhz and default_mhz and set_mhz < _UNNOTICEABLE_SHARE * default_mhz:
        yield (
            f"Its SM clock is set to {set_mhz:.0f} MHz instead of {default_mhz:.0f} MHz: kernels "
            "will run slower than published figures. "
            "An administrator resets it with nvidia-smi -rac."
        )
    now_w = limits.power_limit_w
    default_w = limits.default_power_limit_w
    if now_w and default_w and now_w < _UNNOTICEABLE_SHARE * default_w:
        yield (
            f"Its power is capped at {now_w:.0f} W instead of {default_w:.0f} W: "
            "long kernels will run slower than published figures."
        )
    if limits.exclusive:
        yield (
            "Only one process may use this GPU (compute mode EXCLUSIVE_PROCESS): kernels are named "
            "only with QUANTBENCH_KERNEL_NAMES=here, which slows later timings, or after "
            "nvidia-smi -c DEFAULT."
        )
    if not spec.registered:
        peaks = spec.source["peak_tflops"]
        yield f"This GPU is not in the registry as it stands; its peaks are {peaks}."
