"""Derives the spec of one CPU core from the processor data that the operating system reports.

The reported clock is often the base clock, above all in virtual machines, and the core runs up to
2× faster. So the spec holds upper bounds, not estimates: the widest multiply-add of the instruction
set, at the highest issue rate of any core with it, at the highest clock of any processor of the
model.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quantbench.device.spec import DeviceSpec, DeviceState

_CPUINFO = Path("/proc/cpuinfo")
_SYSFS = Path("/sys/devices/system/cpu/cpu0")
# Linux reports Arm cores by number only (arch/arm64/include/asm/cputype.h).
_ARM_CORES = {
    "0xd0c": "Neoverse N1",
    "0xd40": "Neoverse V1",
    "0xd49": "Neoverse N2",
    "0xd4f": "Neoverse V2",
    "0xac3": "Ampere-1",
}
_MIB = 2**20
_UNITS = {"K": 2**10, "M": _MIB, "G": 2**30}
# (flag, operations per cycle and core by dtype, reason); a multiply-add counts as two. x86: two
# vector units that each issue a multiply-add per cycle (Intel Optimization Reference Manual
# 248966-049; AMD Zen 5 Software Optimization Guide 58455, 2024). Each row is an upper bound for
# every core with its flag.
_X86 = (
    ("sse2", {"fp32": 8}, "SSE: 4 multiplies and 4 adds"),
    ("avx", {"fp32": 16}, "AVX: 8 multiplies and 8 adds"),
    ("fma", {"fp32": 32}, "AVX2 FMA: 2 × 8 multiply-adds"),
    ("avx2", {"int8": 128}, "AVX2: 2 × 32 multiply-adds"),
    ("avx512f", {"fp32": 64}, "AVX-512: 2 × 16 multiply-adds"),
    ("avx512bw", {"int8": 256}, "AVX-512BW: 2 × 64 multiply-adds"),
    ("avx512_bf16", {"bf16": 128}, "VDPBF16PS: 2 × 32 multiply-adds"),
    ("avx512_fp16", {"fp16": 128}, "AVX512-FP16: 2 × 32 multiply-adds"),
    ("amx_bf16", {"bf16": 1024}, "AMX TDPBF16PS: 16·16·32 multiply-adds in 16 cycles"),
    ("amx_fp16", {"fp16": 1024}, "AMX TDPFP16PS: 16·16·32 multiply-adds in 16 cycles"),
    ("amx_int8", {"int8": 2048}, "AMX TDPBSSD: 16·16·64 multiply-adds in 16 cycles"),
)
# Arm: four 128-bit vector units, the most of any Neoverse core (Arm Neoverse V1 and V2 Software
# Optimization Guides).
_ARM = (
    ("asimd", {"fp32": 32}, "Neon: 4 × 4 multiply-adds"),
    ("sve", {"fp32": 64, "fp16": 128}, "SVE: 2 × 512 bits (A64FX), the widest there is"),
    ("asimdhp", {"fp16": 64}, "Neon fp16: 4 × 8 multiply-adds"),
    ("bf16", {"bf16": 128}, "BFMMLA: 4 × 16 multiply-adds"),
    ("i8mm", {"int8": 256}, "SMMLA: 4 × 32 multiply-adds"),
)
# Apple's matrix unit, which torch reaches through Accelerate (D. Johnson, Apple M1 AMX notes, 2022:
# a 16×16 fp32 outer product each cycle; twice that is allowed for later generations).
_APPLE = (
    (
        "apple",
        {"fp32": 1024, "fp16": 4096, "bf16": 4096, "int8": 8192},
        "Apple AMX: 2 outer products a cycle",
    ),
)

# Highest clock of any processor of these models: (vendor, family, models, MHz, source).
_HIGHEST_MHZ = (
    (
        "AuthenticAMD",
        26,
        (0x02, 0x11),
        5000,
        "AMD EPYC 9005 series product table, 2024: EPYC 9575F",
    ),
    (
        "AuthenticAMD",
        25,
        (0x11, 0xA0),
        4400,
        "AMD EPYC 9004 series product table, 2022: EPYC 9174F",
    ),
    ("AuthenticAMD", 25, (0x01,), 4100, "AMD EPYC 7003 series product table, 2021: EPYC 72F3"),
    (
        "AuthenticAMD",
        23,
        (0x31,),
        4500,
        "AMD product tables, 2020: EPYC 7002, Ryzen Threadripper 3960X",
    ),
    (
        "GenuineIntel",
        6,
        (0x8F, 0xCF),
        4800,
        "Intel ARK, 2023: 4th and 5th Gen Xeon Scalable, Xeon w9-3495X",
    ),
    ("GenuineIntel", 6, (0x6A,), 4100, "Intel ARK, 2021: 3rd Gen Xeon Scalable (Ice Lake)"),
    ("GenuineIntel", 6, (0x55,), 5100, "Intel ARK, 2019: Xeon Scalable to Core i9-9990XE"),
)
_HIGHEST_OF_ALL = (6200.0, "Intel ARK, 2024: Core i9-14900KS, the highest clock sold")
_HIGHEST_OF_ARM = (4700.0, "Apple M4, 2024, the highest clock of an Arm core sold")

# Memory bandwidth of one core, GB/s: AMD's core complexes read 32 and write 16 bytes per fabric
# clock. Intel and Neoverse cores reach less, Apple's cores more.
_ONE_CORE_GB_PER_S = (
    100.0,
    "48 bytes per fabric clock of 2.1 GHz (AMD EPYC 9005 Architecture Overview, 2024)",
)
_ONE_APPLE_CORE_GB_PER_S = (
    150.0,
    "102 GB/s were measured on an M1 Max (AnandTech, 2021), half more is allowed",
)
_ASSUMED_CACHE_BYTES = 32 * _MIB


@dataclass(frozen=True)
class CpuInfo:
    """Processor data reported by the operating system.

    flags: instruction sets by their Linux names.
    reported_mhz: highest reported clock.
    exact_clock: whether this is the true maximum, including turbo (cpufreq with intel_pstate or
        amd-pstate).
    """

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
    """Reads this machine's processor data, from /proc and sysfs on Linux and sysctl on macOS."""
    import psutil

    memory_bytes = int(psutil.virtual_memory().total)
    if not _CPUINFO.exists():
        return _darwin_info(memory_bytes)
    max_mhz, exact_clock = _cpufreq(_SYSFS)
    return parse_cpuinfo(
        _CPUINFO.read_text(encoding="utf-8", errors="replace"),
        last_cache_bytes=_last_cache(_SYSFS),
        memory_bytes=memory_bytes,
        max_mhz=max_mhz,
        exact_clock=exact_clock,
    )


def parse_cpuinfo(
    text: str,
    *,
    last_cache_bytes: int | None,
    memory_bytes: int,
    max_mhz: float | None,
    exact_clock: bool,
) -> CpuInfo:
    """Parses the first processor of /proc/cpuinfo. max_mhz, exact_clock: cpufreq's clock, whether
    it includes turbo.
    """
    values: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        values[key.strip()] = value.strip()
    return CpuInfo(
        name=values.get("model name")
        or _ARM_CORES.get(values.get("CPU part", ""))
        or os.uname().machine,
        vendor=values.get("vendor_id", ""),
        family=int(_number(values.get("cpu family", ""))),
        model=int(_number(values.get("model", ""))),
        flags=frozenset((values.get("flags") or values.get("Features") or "").split()),
        last_cache_bytes=last_cache_bytes,
        memory_bytes=memory_bytes,
        reported_mhz=max(max_mhz or 0, _number(values.get("cpu MHz", ""))) or None,
        exact_clock=exact_clock,
    )


def _last_cache(sysfs: Path) -> int | None:
    """Returns the bytes of the cache of the highest level; None if none is listed."""
    highest: tuple[int, int | None] = (0, None)
    for index in (sysfs / "cache").glob("index*"):
        level = _read(index / "level")
        size = _read(index / "size")
        if level and size and size[-1] in _UNITS:
            highest = max(highest, (int(level), int(size[:-1]) * _UNITS[size[-1]]))
    return highest[1]


def _cpufreq(sysfs: Path) -> tuple[float | None, bool]:
    """Returns the maximum clock in MHz, and whether it includes turbo."""
    khz = _number(_read(sysfs / "cpufreq" / "cpuinfo_max_freq"))
    driver = _read(sysfs / "cpufreq" / "scaling_driver")
    exact = driver.startswith(
        ("intel_pstate", "intel_cpufreq", "amd-pstate", "amd_pstate", "apple-cpufreq")
    )
    return khz / 1000 or None, exact


def _read(path: Path) -> str:
    """Returns the file's text, stripped; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """Reads a number; 0 for any other text."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _darwin_info(memory_bytes: int) -> CpuInfo:
    names = (
        "machdep.cpu.brand_string",
        "hw.perflevel0.l2cachesize",
        "hw.l3cachesize",
        "hw.optional.arm.FEAT_BF16",
    )
    found = dict.fromkeys(names, "")
    for name in names:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[name] = done.stdout.strip()
    vendor = "GenuineIntel"
    flags = {"sse2", "avx", "fma", "avx2", "avx512f"}
    if os.uname().machine == "arm64":
        vendor = "Apple"
        flags = {"asimd", "apple"}
    if found["hw.optional.arm.FEAT_BF16"] == "1":
        flags.add("bf16")
    l2_bytes = _number(found["hw.perflevel0.l2cachesize"])
    return CpuInfo(
        found["machdep.cpu.brand_string"] or os.uname().machine,
        vendor,
        family=0,
        model=0,
        flags=frozenset(flags),
        last_cache_bytes=int(max(l2_bytes, _number(found["hw.l3cachesize"]))) or None,
        memory_bytes=memory_bytes,
        reported_mhz=None,
    )


def cpu_spec(info: CpuInfo) -> DeviceSpec:
    """Builds the spec of one core. All peaks are upper bounds, as stated in their sources."""
    rates = _rates(info)
    clock_mhz, clock_source = _clock(info)
    bound = f"estimated upper bound for one core at {clock_mhz:g} MHz"
    memory_gb_per_s, memory_source = _ONE_CORE_GB_PER_S
    if "apple" in info.flags:
        memory_gb_per_s, memory_source = _ONE_APPLE_CORE_GB_PER_S
    cache_source = "the last-level cache as the operating system reports it"
    if not info.last_cache_bytes:
        cache_source = "assumed, not reported"
    source = {
        "sm_count": "one pinned core is used",
        "sm_clock_mhz": clock_source,
        "max_sm_clock_mhz": clock_source,
        "l2_bytes": cache_source,
        "memory_bytes": "the machine's memory as the operating system reports it",
        "memory_gb_per_s": f"estimated upper bound for one core: {memory_source}",
        "peak_tflops": bound,
    }
    for dtype, (rate, reason) in rates.items():
        source[f"peak_tflops.{dtype}"] = f"{bound}: {rate} operations per cycle, {reason}"
    return DeviceSpec(
        name=cpu_slug(info.name),
        kind="cpu",
        sm_count=1,
        sm_clock_mhz=clock_mhz,
        l2_bytes=info.last_cache_bytes or _ASSUMED_CACHE_BYTES,
        smem_per_sm_bytes=0,
        memory_bytes=info.memory_bytes,
        memory_gb_per_s=memory_gb_per_s,
        peak_tflops={dtype: rate * clock_mhz * 1e-6 for dtype, (rate, _) in rates.items()},
        source=source,
        registered=False,
    )


def _rates(info: CpuInfo) -> dict[str, tuple[int, str]]:
    """Returns operations per cycle with their reason, by dtype. fp16 and bf16 run as fp32 if they
    are not native.
    """
    rates = {"fp32": (2, "one multiply-add")}
    for flag, gains, reason in (*_X86, *_ARM, *_APPLE):
        for dtype, rate in gains.items():
            if flag in info.flags and rate > rates.get(dtype, (0,))[0]:
                rates[dtype] = (rate, reason)
    fp32_rate, fp32_reason = rates["fp32"]
    for dtype in ("fp16", "bf16"):
        rates.setdefault(dtype, (fp32_rate, f"computed as fp32, {fp32_reason}"))
    return rates


def _clock(info: CpuInfo) -> tuple[float, str]:
    """Returns the core's highest clock and its source: the reported clock if exact, else the
    model's highest.
    """
    if info.exact_clock and info.reported_mhz:
        return info.reported_mhz, "cpufreq's maximum, turbo included"
    highest = _HIGHEST_OF_ARM if "asimd" in info.flags else _HIGHEST_OF_ALL
    for vendor, family, models, mhz, model_source in _HIGHEST_MHZ:
        if (vendor, family) == (info.vendor, info.family) and info.model in models:
            highest = (mhz, model_source)
    highest_mhz, source = highest
    if info.reported_mhz and info.reported_mhz > highest_mhz:
        return info.reported_mhz, "reported by the operating system"
    return highest_mhz, f"estimated upper bound, turbo is not reported: {source}"


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
    """Returns the load, and the clock unless a virtual machine hides it."""
    import psutil

    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    note = f"load average {load:.2f} over {cores} logical cores"
    clock_mhz = None
    if "hypervisor" in cpu_info().flags:  # it would report the base clock, not the core's clock
        note += "; the virtual machine hides the clock"
    elif frequency := psutil.cpu_freq():
        clock_mhz = frequency.current or None
    return DeviceState(sm_clock_mhz=clock_mhz, note=note, load_per_core=load / cores)
