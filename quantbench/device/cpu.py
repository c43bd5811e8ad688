"""Describes one CPU core by what the operating system reports and by bounds that no core exceeds.

Clock frequency, vector units and bandwidth of a core cannot be read reliably, above all in virtual
machines. The peaks are therefore upper bounds of any core: a rate above a peak is impossible, but a
fraction of a peak has no meaning. The module also reads the machine's load and clock frequency.
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

_HIGHEST_MHZ = 6200.0
# Maximum number of operations per clock cycle of a core, by dtype. A multiply-add counts as two
# operations.
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
    """Data of a processor that the operating system reports.

    name: name of the model.
    flags: names of the instruction sets, as in /proc/cpuinfo; empty on macOS.
    last_cache_bytes: size of the last-level cache; None if it is not reported.
    memory_bytes: memory of the machine.
    """

    name: str
    flags: frozenset[str]
    last_cache_bytes: int | None
    memory_bytes: int


@cache
def cpu_info() -> CpuInfo:
    """Reads the data of this machine's processor.

    On Linux the name, the flags and the cache come from /proc/cpuinfo and sysfs.
    """
    import psutil

    memory_bytes = int(psutil.virtual_memory().total)
    if not _CPUINFO.exists():
        return CpuInfo(_darwin_name(), frozenset(), None, memory_bytes)
    text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    return parse_cpuinfo(text, last_cache_bytes=_last_cache(_CACHES), memory_bytes=memory_bytes)


def _darwin_name() -> str:
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def parse_cpuinfo(text: str, *, last_cache_bytes: int | None, memory_bytes: int) -> CpuInfo:
    """Parses the first processor of /proc/cpuinfo.

    Arm cores have no model name there, so their name is the architecture and the part number.

    text: content of /proc/cpuinfo.
    last_cache_bytes, memory_bytes: values that the file lacks, as in `CpuInfo`.
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
    """Returns the size of the last-level cache in bytes, or None if no cache is listed.

    caches: sysfs folder of a core's caches.
    """
    sizes = sorted(caches.glob("index*/size"))
    if not sizes:
        return None
    return int(sizes[-1].read_text().strip().removesuffix("K")) * 2**10


def cpu_spec(info: CpuInfo) -> DeviceSpec:
    """Builds the spec of one core, whose peaks and bandwidth are upper bounds of any core."""
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
    """Builds the slug `cpu-<model>` from the reported name of a processor.

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
    """Returns the machine's load, and its clock frequency unless a virtual machine hides it."""
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
