"""What the operating system tells about this machine's processor: /proc and sysfs on Linux, sysctl on macOS."""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_SYSFS = Path("/sys/devices/system/cpu/cpu0")


@dataclass(frozen=True)
class CpuInfo:
    """What the operating system tells. flags: instruction sets in Linux's names. reported_mhz: the highest clock that
    it names; exact_clock: that it is the true maximum, turbo included (cpufreq with intel_pstate or amd-pstate)."""

    name: str
    vendor: str
    family: int
    model: int
    flags: frozenset[str]
    last_cache_bytes: int | None
    memory_bytes: int
    reported_mhz: float | None
    exact_clock: bool = False


@cache
def cpu_info() -> CpuInfo:
    """This machine's processor."""
    import psutil

    memory_bytes = int(psutil.virtual_memory().total)
    if _CPUINFO.exists():
        reported_mhz, exact_clock = _cpufreq(_SYSFS)
        return parse_cpuinfo(
            _CPUINFO.read_text(encoding="utf-8", errors="replace"),
            last_cache_bytes=_last_cache(_SYSFS),
            memory_bytes=memory_bytes,
            max_mhz=reported_mhz,
            exact_clock=exact_clock,
        )
    return _darwin_info(memory_bytes)


# Linux names Arm cores by number only (arch/arm64/include/asm/cputype.h).
_ARM_CORES = {
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xac3": "Ampere-1",
}


def parse_cpuinfo(
    text: str, *, last_cache_bytes: int | None, memory_bytes: int, max_mhz: float | None, exact_clock: bool
) -> CpuInfo:
    """The first processor of a Linux /proc/cpuinfo, with what stands elsewhere."""
    values: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        values[key.strip()] = value.strip()
    arm_core = values.get("CPU part", "")
    mhz = [m for m in (max_mhz, _number(values.get("cpu MHz", ""))) if m]
    return CpuInfo(
        name=values.get("model name") or _ARM_CORES.get(arm_core) or os.uname().machine,
        vendor=values.get("vendor_id", ""),
        family=int(_number(values.get("cpu family", "")) or 0),
        model=int(_number(values.get("model", "")) or 0),
        flags=frozenset((values.get("flags") or values.get("Features") or "").split()),
        last_cache_bytes=last_cache_bytes,
        memory_bytes=memory_bytes,
        reported_mhz=max(mhz) if mhz else None,
        exact_clock=exact_clock,
    )


def _last_cache(sysfs: Path) -> int | None:
    """Size of the outermost cache of a processor, bytes."""
    largest: tuple[int, int] | None = None
    for index in sorted((sysfs / "cache").glob("index*")):
        level, size = _read(index / "level"), _read(index / "size")
        if level and size and size[-1] in "KMG":
            scale = {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
            found = (int(level), int(size[:-1]) * scale)
            largest = max(largest or found, found)
    return largest[1] if largest else None


def _cpufreq(sysfs: Path) -> tuple[float | None, bool]:
    """Highest clock in MHz that cpufreq names, and whether its driver counts turbo in."""
    khz = _read(sysfs / "cpufreq" / "cpuinfo_max_freq")
    driver = _read(sysfs / "cpufreq" / "scaling_driver") or ""
    exact = driver.startswith(("intel_pstate", "intel_cpufreq", "amd-pstate", "amd_pstate", "apple-cpufreq"))
    return (int(khz) / 1000 if khz else None), exact


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _darwin_info(memory_bytes: int) -> CpuInfo:
    """macOS, by sysctl."""
    names = ("machdep.cpu.brand_string", "hw.perflevel0.l2cachesize", "hw.l3cachesize", "hw.optional.arm.FEAT_BF16")
    found = {}
    for name in names:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        found[name] = done.stdout.strip() if done.returncode == 0 else ""
    flags = {"asimd", "apple"} if os.uname().machine == "arm64" else {"sse2", "avx", "fma", "avx2", "avx512f"}
    if found["hw.optional.arm.FEAT_BF16"] == "1":
        flags.add("bf16")
    cache_bytes = max(int(_number(found[n]) or 0) for n in ("hw.perflevel0.l2cachesize", "hw.l3cachesize"))
    return CpuInfo(
        name=found["machdep.cpu.brand_string"] or os.uname().machine,
        vendor="Apple" if "apple" in flags else "GenuineIntel",
        family=0,
        model=0,
        flags=frozenset(flags),
        last_cache_bytes=cache_bytes or None,
        memory_bytes=memory_bytes,
        reported_mhz=None,
    )
