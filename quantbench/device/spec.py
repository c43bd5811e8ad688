"""The constants of a device that arithmetic on tiles, waves and rooflines needs (`DeviceSpec`), and its state."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quantbench.errors import InputError, require_choice

# Wide enough for anything built between 2016 and today, narrow enough to catch a slipped decimal or a wrong unit.
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
# Folders and files have this name.
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PEAK_TFLOPS_RANGE = (0.001, 50_000)


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device.

    name: its slug (`a100-sxm4-80gb`, `cpu-amd-epyc`). kind: cuda or cpu.
    sm_count: streaming multiprocessors; on a CPU the cores in use.
    sm_clock_mhz: the boost clock that the peaks are stated at.
    l2_bytes: last-level cache. smem_per_sm_bytes: shared memory of one SM (0 on a CPU).
    memory_gb_per_s: 1e9 bytes a second.
    peak_tflops: dense peak by dtype, 1e12 operations a second, with tensor cores where the dtype has them and fp32
        accumulation.
    source: of each constant, by field name; `peak_tflops.bf16` and the like for single peaks.
    registered: False for a spec derived from what an unknown device reports about itself.
    smem_per_block_bytes: the most that one block can have, by opting in (0: not known).
    max_sm_clock_mhz: the highest clock the device can run at; 0 stands for sm_clock_mhz. It is above sm_clock_mhz on
        many cards (H100 SXM: peaks at 1830 MHz, runs at up to 1980), and a peak is a bound only at its own clock: see
        `ceiling`.
    peak_clock_mhz: by dtype, the clock of peaks that are not stated at sm_clock_mhz.
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

    def __post_init__(self) -> None:
        if not _SLUG.fullmatch(self.name):
            raise InputError("DeviceSpec", f"name = {self.name!r}"[:80], "letters, digits, '.', '_' and '-'")
        who = f"DeviceSpec {self.name}"
        if self.max_sm_clock_mhz == 0:
            object.__setattr__(self, "max_sm_clock_mhz", self.sm_clock_mhz)
        require_choice(who, "kind", self.kind, ("cuda", "cpu"))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(who, f"{name} = {value!r}", f"a number from {low} to {high}")
        low, high = _PEAK_TFLOPS_RANGE
        for dtype, peak in self.peak_tflops.items():
            if not low <= peak <= high:
                raise InputError(who, f"peak_tflops[{dtype}] = {peak!r}", f"a number from {low} to {high}")
        if self.kind == "cuda" and self.compute_capability is None:
            raise InputError(who, "compute_capability = None", "(major, minor) for a cuda device")

    def peak(self, dtype: str) -> float | None:
        """Dense peak in TFLOP/s for `dtype`; None where the device has no such arithmetic or it is not known."""
        return self.peak_tflops.get(dtype)

    def ceiling(self, dtype: str, clock_mhz: float | None = None) -> float | None:
        """The TFLOP/s that cannot be exceeded at `clock_mhz` (default: the highest clock); None as for `peak`.

        The stated peak scaled from the clock it is stated at. A figure above the ceiling is no measurement.
        """
        peak = self.peak(dtype)
        if peak is None:
            return None
        stated_mhz = self.peak_clock_mhz.get(dtype, self.sm_clock_mhz)
        return peak * (clock_mhz or max(self.max_sm_clock_mhz, stated_mhz)) / stated_mhz

    @property
    def architecture(self) -> str:
        """`sm_80` and the like, or `cpu`."""
        if self.compute_capability is None:
            return "cpu"
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


@dataclass(frozen=True)
class DeviceState:
    """A device's state at one moment; None where it is not known.

    throttle_reasons: names of what holds the clock down now. other_processes: on the card, not ours.
    note: why something is missing ("NVML is not installed").
    load_per_core: on a processor, the load average of the last minute over its logical cores.
    """

    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    other_processes: int | None = None
    note: str = ""
    load_per_core: float | None = None
