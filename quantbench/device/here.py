"""The device at hand: the GPU that torch would use, or one core of this machine's processor.

QUANTBENCH_DEVICE chooses: `cpu` forces the processor, `cuda` or `cuda:1` demands a GPU. Without it the first GPU is
taken where there is one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quantbench.device.cpu import cpu_spec, cpu_state
from quantbench.device.cpu_info import cpu_info
from quantbench.device.matching import Properties, match
from quantbench.device.nvml import Absent, Nvml
from quantbench.device.spec import DeviceSpec, DeviceState
from quantbench.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

VARIABLE = "QUANTBENCH_DEVICE"
# Compute capability of V100, the oldest GPU that current releases of torch run fused attention on.
_FIRST_FLASH = (7, 0)


def current() -> DeviceSpec:
    """The spec of the device at hand, which becomes torch's current one, so that work runs where it is said to.

    Imports torch, unless the processor is forced.

    Raises InputError for a QUANTBENCH_DEVICE that names no device here, UnsupportedError for a GPU that is not
    NVIDIA's or too old.
    """
    index = _chosen_index()
    if index is None:
        return cpu_spec(cpu_info())
    import torch

    if torch.version.hip is not None:
        raise UnsupportedError(
            "device", f"{torch.cuda.get_device_name(index)} through ROCm", f"an NVIDIA GPU, or {VARIABLE}=cpu"
        )
    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    return match(read_properties(properties, _open_nvml(properties)))


def monitor(spec: DeviceSpec) -> Callable[[], DeviceState]:
    """A function that tells the state of the device at hand each time it is called; `spec` is what `current` gave.

    Where NVML is absent the state holds nothing but a note that says so.
    """
    if spec.kind == "cpu":
        return cpu_state
    nvml = open_nvml()
    if isinstance(nvml, Absent):
        state = DeviceState(note=nvml.note)
        return lambda: state
    return nvml.state


def open_nvml() -> Nvml | Absent:
    """NVML for the GPU at hand, matched by UUID or PCI bus id; Absent on a processor."""
    index = _chosen_index()
    if index is None:
        return Absent("no GPU is used")
    import torch

    return _open_nvml(torch.cuda.get_device_properties(index))


def default_dtype(spec: DeviceSpec) -> str:
    """What is measured unless asked otherwise: bf16 where it is computed natively; else fp16 on a GPU, fp32 on a CPU.

    A processor's spec bounds bf16 above fp32 exactly where it has instructions for it.
    """
    bf16, fp32 = spec.peak("bf16"), spec.peak("fp32")
    if bf16 is not None and (fp32 is None or bf16 > fp32):
        return "bf16"
    return "fp16" if spec.kind == "cuda" else "fp32"


def default_attention(spec: DeviceSpec) -> str:
    """How attention runs unless asked otherwise: flash (one kernel) where torch has such a kernel, else unfused.

    FlashAttention and cuDNN's kernel need sm_80; torch's memory-efficient kernel runs on V100 and T4 as well, and
    processors have torch's own flash kernel.
    """
    capability = spec.compute_capability
    return "unfused" if capability is not None and capability < _FIRST_FLASH else "flash"


def read_properties(properties: torch._C._CudaDeviceProperties, nvml: Nvml | Absent) -> Properties:
    """What torch and NVML tell, in one; fields that this torch does not have are None."""
    limits = None if isinstance(nvml, Absent) else nvml.limits()
    clock_khz, memory_clock_khz = _has(properties, "clock_rate"), _has(properties, "memory_clock_rate")
    return Properties(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        sm_count=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=_has(properties, "L2_cache_size"),
        smem_per_sm_bytes=_has(properties, "shared_memory_per_multiprocessor"),
        smem_per_block_bytes=_has(properties, "shared_memory_per_block_optin"),
        max_sm_clock_mhz=(limits and limits.max_sm_clock_mhz) or (clock_khz and clock_khz / 1000),
        max_memory_clock_mhz=(limits and limits.max_memory_clock_mhz) or (memory_clock_khz and memory_clock_khz / 1000),
        memory_bus_bits=(limits and limits.memory_bus_bits) or _has(properties, "memory_bus_width"),
    )


def _chosen_index() -> int | None:
    """Number of the CUDA device to use; None for the processor."""
    wish = os.environ.get(VARIABLE, "").strip().lower()
    if wish == "cpu":
        return None
    chosen = re.fullmatch(r"(?:cuda(?::(\d+))?)?", wish)
    if chosen is None:
        raise InputError(VARIABLE, repr(wish), "cpu, cuda or cuda:<number>")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not wish:
        return torch.cuda.current_device() if count else None
    index = int(chosen[1] or 0)
    if index >= count:
        raise InputError(
            VARIABLE, repr(wish), f"one of the {count} GPUs that torch sees" if count else "cpu: torch sees no GPU"
        )
    return index


def _open_nvml(properties: Any) -> Nvml | Absent:
    uuid, bus = getattr(properties, "uuid", None), getattr(properties, "pci_bus_id", None)
    pci_bus_id = None
    if bus is not None:
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        pci_bus_id = f"{domain:08X}:{bus:02X}:{device:02X}.0"
    return Nvml.open(uuid=None if uuid is None else str(uuid), pci_bus_id=pci_bus_id)


def _has(properties: Any, name: str) -> Any:
    """A property, or None where this torch does not have it or the driver left it 0."""
    return getattr(properties, name, None) or None
