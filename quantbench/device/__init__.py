"""Describes devices: hardware constants and, for the device in use, its state and warnings."""

from quantbench.device.here import (
    current,
    default_attention,
    default_dtype,
    gpu_index,
    inspect_machine,
    monitor,
    open_nvml,
    warnings_for,
)
from quantbench.device.matching import Properties, match
from quantbench.device.nvml import HARMFUL_REASONS, Absent, Limits, Nvml
from quantbench.device.registry import known, lookup
from quantbench.device.spec import DeviceSpec, DeviceState

__all__ = [
    "HARMFUL_REASONS",
    "Absent",
    "DeviceSpec",
    "DeviceState",
    "Limits",
    "Nvml",
    "Properties",
    "current",
    "default_attention",
    "default_dtype",
    "gpu_index",
    "inspect_machine",
    "known",
    "lookup",
    "match",
    "monitor",
    "open_nvml",
    "warnings_for",
]
