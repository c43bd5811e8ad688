"""Defines a device's hardware constants (`DeviceSpec`) and its changing state (`DeviceState`).

The constants determine wave counts and rooflines. The state contains values such as SM clock and
temperature, which change between measurements. The module also defines the margins above which a
measured rate is impossible.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quantbench.errors import InputError, require_choice

# Ranges of plausible values for devices built since 2016. They catch a misplaced decimal point or a
# wrong unit.
_RANGES: dict[str, tuple[float, float]] = {
    "sm_count": (1, 1024),
    "sm_clock_mhz": (200, 7000),
    "max_sm_clock_mhz": (200, 7000),
    "l2_bytes": (64 * 1024, 4 * 2**30),
    "smem_per_sm_bytes": (0, 2**20),
    "smem_per_block_bytes": (0, 2**20),
    "memory_bytes": (2**28, 2**44),
    "memory_gb_per_s": (1, 20_000),
}
# LLVM target by GFX IP version (AMD, ROCm documentation 7.13, 2026, AMD GPU specifications).
_GFX = {(9, 0): "gfx90a", (9, 4): "gfx942", (9, 5): "gfx950"}
# Pattern for a device's name, which names folders and files.
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PEAK_TFLOPS_RANGE = (0.001, 50_000)
# For each dtype, another dtype that has the same peak and differs only in its scales (NVIDIA,
# libcu++ 2026, tcgen05.mma: mxf4nvf4).
_SAME_PEAK = {"fp8_block": "fp8", "mxfp8": "fp8", "mxfp4": "nvfp4"}
# Lowest compute capability whose tensor or matrix cores apply one scale per 32 elements. AMD's
# first such GPU is gfx950 (9, 5). NVIDIA's first is sm_100 (10, 0), and its predecessor sm_90 is
# below this bound too.
_FIRST_MX = (9, 5)

#: Kinds of devices. AMD GPUs (rocm) cannot be measured; their times are predicted or imported.
DEVICE_KINDS = ("cuda", "rocm", "cpu")
#: Maximum possible ratio of a measured rate to the peak. The margin covers rounded peaks in data
#: sheets (H200: 4.8 TB/s printed, but 3201 MHz × 2 × 6144 bits give 4.92 TB/s), and the clock,
#: which is read to about 1 %.
PEAK_MARGIN = 1.05
#: Maximum possible ratio of a measured rate of minimum traffic to the memory bandwidth. No cache is
#: faster than memory by this factor. A CPU core's first-level cache moves up to 192 bytes per cycle
#: (two loads and a store of 512 bits), which is 700 GB/s at 3.7 GHz and 35 times one core's 20 GB/s
#: from memory. The L1 caches of an H100 together move 33 TB/s, which is 10 times its memory's rate.
CACHE_OVER_MEMORY = 100


@dataclass(frozen=True)
class DeviceSpec:
    """Hardware constants of one device model.

    On an AMD GPU (kind rocm), an SM is a compute unit (CU), a warp is a wavefront of 64 threads
    (`warp_threads`), a block is a workgroup, shared memory is the LDS, and a tensor core is a
    matrix core. "Blocks per SM" are the workgroups resident on one CU. All dies of an MI300 or
    MI350 form one device. The two dies of an MI250X are two devices.

    name: slug (`a100-sxm4-80gb`, `cpu-amd-epyc`).
    kind: one of DEVICE_KINDS.
    sm_count: number of streaming multiprocessors; on a CPU, number of cores in use.
    sm_clock_mhz: boost clock for which the data sheet gives the peaks.
    l2_bytes: size of the last-level cache (the Infinity Cache if there is one).
    smem_per_sm_bytes: shared memory per SM; 0 on a CPU.
    memory_gb_per_s: memory bandwidth in 1e9 bytes/s.
    peak_tflops: dense peak by dtype in 1e12 operations/s, with fp32 accumulation, and with tensor
        cores if they support the dtype.
    source: document or estimate for each constant, by field name. A single peak has a name such as
        `peak_tflops.bf16`.
    registered: whether the spec is a registered card's. False if it was derived from the device's
        reported properties.
    smem_per_block_bytes: opt-in maximum of shared memory per block; 0 if it is unknown.
    max_sm_clock_mhz: maximum SM clock; 0 means sm_clock_mhz. Many cards run above sm_clock_mhz, so
        their rates can exceed peak_tflops (see `ceiling`). An H100 SXM has its peaks at 1830 MHz,
        and runs at up to 1980 MHz.
    peak_clock_mhz: SM clock of each peak that the data sheet gives at another clock than
        sm_clock_mhz, by dtype.
    compute_capability: (major, minor); None on a CPU. On a rocm device, this is the GFX IP version
        as HIP reports it (9.4 for gfx942).
    board_power_w: maximum power that the card draws, in W; 0 if it is unknown.
    """

    name: str
    kind: str
    sm_count: int
    sm_clock_mhz: float
    l2_bytes: int
    smem_per_sm_bytes: int
    memory_bytes: int
    memory_gb_per_s: float
    peak_tflops: Mapping[str, float]
    compute_capability: tuple[int, int] | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    registered: bool = True
    smem_per_block_bytes: int = 0
    max_sm_clock_mhz: float = 0.0
    peak_clock_mhz: Mapping[str, float] = field(default_factory=dict)
    board_power_w: float = 0.0

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.name):
            raise InputError(
                "DeviceSpec", f"name = {self.name!r}"[:80], "letters, digits, '.', '_' and '-'"
            )
        who = f"DeviceSpec {self.name}"
        if self.max_sm_clock_mhz == 0:
            object.__setattr__(self, "max_sm_clock_mhz", self.sm_clock_mhz)
        require_choice(who, "kind", self.kind, DEVICE_KINDS)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(who, f"{name} = {value!r}", f"a number from {low} to {high}")
        low, high = _PEAK_TFLOPS_RANGE
        for dtype, peak in self.peak_tflops.items():
            if not low <= peak <= high:
                raise InputError(
                    who, f"peak_tflops[{dtype}] = {peak!r}", f"a number from {low} to {high}"
                )
        if self.kind == "cuda" and self.compute_capability is None:
            raise InputError(who, "compute_capability = None", "(major, minor) for a cuda device")
        if self.kind == "rocm" and self.compute_capability not in _GFX:
            known = ", ".join(_GFX.values())
            raise InputError(
                who, f"compute_capability = {self.compute_capability}", f"that of {known}"
            )

    def peak(self, dtype: str) -> float | None:
        """Returns the dense peak in TFLOP/s, or None if the dtype is unsupported or unknown."""
        if dtype == "mxfp8" and (self.compute_capability or (0, 0)) < _FIRST_MX:
            return None
        return self.peak_tflops.get(self._rated(dtype))

    @property
    def dtypes(self) -> str:
        """Names of the dtypes that have a peak, separated by commas."""
        named = {*self.peak_tflops, *_SAME_PEAK}
        return ", ".join(sorted(dtype for dtype in named if self.peak(dtype) is not None))

    def _rated(self, dtype: str) -> str:
        """Returns the key of `peak_tflops` for a dtype, which may be that of a similar dtype."""
        if dtype in self.peak_tflops:
            return dtype
        return _SAME_PEAK.get(dtype, dtype)

    def ceiling(self, dtype: str, clock_mhz: float | None = None) -> float | None:
        """Returns the peak in TFLOP/s at an SM clock, or None if the peak is unknown.

        A measured rate above `PEAK_MARGIN` times this ceiling is impossible.

        clock_mhz: SM clock in MHz; None for the maximum SM clock, or for the clock of the data
            sheet's peak if that is higher.
        """
        peak = self.peak(dtype)
        if peak is None:
            return None
        stated_mhz = self.peak_clock_mhz.get(self._rated(dtype), self.sm_clock_mhz)
        return peak * (clock_mhz or max(self.max_sm_clock_mhz, stated_mhz)) / stated_mhz

    @property
    def torch_kind(self) -> str:
        """Kind of the device in torch: `cuda` for every GPU, or `cpu`."""
        return "cpu" if self.kind == "cpu" else "cuda"

    @property
    def architecture(self) -> str:
        """Name of the architecture: `sm_80` (NVIDIA), `gfx942` (AMD's LLVM target) or `cpu`."""
        if self.compute_capability is None:
            return self.kind
        if self.kind == "rocm":
            return _GFX[self.compute_capability]
        return sm_name(self.compute_capability)

    @property
    def warp_threads(self) -> int:
        """Number of threads of a warp, or of a wavefront on AMD's CDNA GPUs."""
        return 64 if self.kind == "rocm" else 32


def sm_name(compute_capability: tuple[int, int]) -> str:
    """Returns NVIDIA's name for a compute capability, such as `sm_80`."""
    major, minor = compute_capability
    return f"sm_{major}{minor}"


@dataclass(frozen=True)
class DeviceState:
    """State of a device at one moment. Unknown values are None.

    throttle_reasons: NVML's active clock event reasons, which lower the clock.
    other_processes: number of compute processes on the device that are not quantbench's.
    note: reasons for unknown values ("NVML is not installed").
    load_per_core: load average of the last minute per logical core (CPU only).
    shared: marks the class for `store.typed`, which decodes equal states to one object.
    """

    shared = True

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    other_processes: int | None = None
    note: str = ""
    load_per_core: float | None = None
