"""Describes one CPU core: its spec (`cpu_spec`), and the machine's load and clock (`cpu_state`).

A core's clock frequency, vector units and bandwidth cannot be read reliably, above all in virtual
machines. The spec's peaks are therefore upper bounds for every core. A measured rate above a peak
is impossible, but a rate as a fraction of a peak has no meaning.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quantbench.device.spec import DeviceSpec, DeviceState

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_ASSUMED_CACHE_BYTES = 32 * 2**20  # last-level cache where the operating system reports none

# Upper bounds for every core, with sources below: clock frequency, operations per clock cycle by
# dtype (a multiply-add counts as two), and memory bandwidth in GB/s.
_HIGHEST_MHZ = 6200.0
_MOST_PER_CYCLE = {"fp32": 1024, "fp16": 4096, "bf16": 4096, "int8": 8192}
_MOST_GB_PER_S = 150.0
_PEAK_SOURCE = (
    "upper bound of any core: two outer products a cycle, one more than Apple's matrix unit "
    "(D. Johnson, Apple M1 AMX notes, 2022), at 6200 MHz (Intel ARK, 2024: Core i9-14900KS)"
)
_BANDWIDTH_SOURCE = (
    "upper bound of any core: half more than the 102 GB/s of an M1 Max core (AnandTech, 2021)"
)
# Instruction sets that multiply bf16. A core without them computes bf16 as fp32.
_NATIVE_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class CpuInfo:
    """Data that the operating system reports about a processor.

    name: model name.
    flags: names of the instruction sets, as in /proc/cpuinfo; empty on macOS.
    last_cache_bytes: size of the last-level cache in bytes; None if it is not reported.
    memory_bytes: size of the machine's memory in bytes.
    """

    name: str
    flags: frozenset[str]
    last_cache_bytes: int | None
    memory_bytes: int


@cache
def cpu_info() -> CpuInfo:
    """Reads the data of this machine's processor.

    On Linux, the name and the flags come from /proc/cpuinfo, and the cache size from sysfs.
    """
    import psutil

    memory_bytes = int(psutil.virtual_memory().total)
    if not _CPUINFO.exists():
        return CpuInfo(_darwin_name(), frozenset(), None, memory_bytes)
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    return parse_cpuinfo(text, last_cache_bytes=_last_cache(_CACHES), memory_bytes=memory_bytes)


def _darwin_name() -> str:
    """Returns the processor's model name on macOS."""
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def parse_cpuinfo(text: str, *, last_cache_bytes: int | None, memory_bytes: int) -> CpuInfo:
    """Parses the first processor in /proc/cpuinfo.

    Arm cores have no model name there. Their name is the architecture and the part number.

    text: content of /proc/cpuinfo.
    last_cache_bytes, memory_bytes: values for the fields of `CpuInfo` that the file lacks.
    """
    values: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        values[key.strip()] = value.strip()
    number = f"{os.uname().machine} {values.get('CPU part', '')}"
    flags = values.get("flags") or values.get("Features") or ""
    return CpuInfo(
        name=values.get("model name") or number,
        flags=frozenset(flags.split()),
        last_cache_bytes=last_cache_bytes,
        memory_bytes=memory_bytes,
    )


def _last_cache(caches: Path) -> int | None:
    """Returns the size of the last-level cache in bytes, or None if the folder lists no cache.

    caches: sysfs folder of a core's caches.
    """
    sizes = sorted(caches.glob("index*/size"))
    if not sizes:
        return None
    return int(sizes[-1].read_text().strip().removesuffix("K")) * 2**10


def cpu_spec(info: CpuInfo) -> DeviceSpec:
    """Builds the spec of one core. Its peaks and bandwidth are upper bounds for every core."""
    most = dict(_MOST_PER_CYCLE)
    if not info.flags & _NATIVE_BF16:
        most["bf16"] = most["fp32"]
    cache_source = "the last-level cache as the operating system reports it"
    if not info.last_cache_bytes:
        cache_source = "assumed, not reported"
    return DeviceSpec(
        name=cpu_slug(info.name),
        kind="cpu",
        sm_count=1,
        sm_clock_mhz=_HIGHEST_MHZ,
        l2_bytes=info.last_cache_bytes or _ASSUMED_CACHE_BYTES,
        smem_per_sm_bytes=0,
        memory_bytes=info.memory_bytes,
        memory_gb_per_s=_MOST_GB_PER_S,
        peak_tflops={dtype: ops * _HIGHEST_MHZ * 1e-6 for dtype, ops in most.items()},
        source={
            "sm_count": "one pinned core is used",
            "sm_clock_mhz": _PEAK_SOURCE,
            "l2_bytes": cache_source,
            "memory_bytes": "the machine's memory as the operating system reports it",
            "memory_gb_per_s": _BANDWIDTH_SOURCE,
            "peak_tflops": _PEAK_SOURCE,
        },
        registered=False,
    )


def cpu_slug(name: str) -> str:
    """Builds the slug `cpu-<model>` from a processor's model name.

    >>> cpu_slug("Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz")
    'cpu-intel-xeon-platinum-8488c'
    >>> cpu_slug("AMD EPYC 7763 64-Core Processor")
    'cpu-amd-epyc-7763'
    """
    name = re.sub(
        r"\((r|tm|c)\)|@.*$|\b\d+-core\b|\bprocessor\b|\bcpu\b|\b(with\b|w/).*$",
        " ",
        name.casefold(),
    )
    return "cpu-" + (re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown")


def cpu_state() -> DeviceState:
    """Returns the machine's load and clock frequency. A virtual machine hides the frequency."""
    import psutil

    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    note = f"load average {load:.2f} over {cores} logical cores"
    clock_mhz = None
    if "hypervisor" in cpu_info().flags:  # a virtual machine reports the base clock
        note += "; the virtual machine hides the clock"
    elif frequency := psutil.cpu_freq():
        clock_mhz = frequency.current or None
    return DeviceState(sm_clock_mhz=clock_mhz, note=note, load_per_core=load / cores)
