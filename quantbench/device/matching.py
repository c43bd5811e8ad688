"""Derives a GPU's hardware constants from its reported properties; `match` is the entry point.

A GPU whose name, compute capability, SM count and memory size agree with a registered card gets
that card's constants. If only the SM count or the memory differs, as for a MIG slice, the card's
constants are scaled. The constants of an unknown card are estimated from its architecture.
"""

import re
from dataclasses import dataclass, replace

from quantbench.device.registry import Architecture, architectures, entries
from quantbench.device.spec import DeviceSpec, sm_name
from quantbench.errors import UnsupportedError

# A card counts as whole if its reported memory, divided by the registered size, lies between these
# limits. ECC on GDDR6 takes 6 % of the memory, and the driver takes up to 3 %.
_LEAST_MEMORY = 0.88
_MOST_MEMORY = 1.01
# Lowest compute capability of a supported unknown card. The registry lacks the rates of older
# architectures.
_OLDEST = (7, 0)
_GIB = 2**30
_REPORTED = "reported by the card"
# Dtypes that GeForce cards multiply at half rate with fp32 accumulation. Sources: NVIDIA's Turing,
# GA102, Ada and RTX Blackwell whitepapers.
_GEFORCE_HALF = ("fp16", "bf16", "tf32", "fp8")


@dataclass(frozen=True)
class Properties:
    """Properties of a GPU that torch and NVML report.

    A property that neither torch nor NVML reports is None.

    name: the GPU's name in CUDA (`NVIDIA A100-SXM4-80GB`).
    max_sm_clock_mhz, max_memory_clock_mhz: highest clocks that can be set.
    memory_bus_bits: width of the memory bus.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    memory_bus_bits: int | None = None


def match(properties: Properties) -> DeviceSpec:
    """Returns the spec of the GPU with these properties.

    If the GPU is not a whole registered card, the spec has registered=False, and its `source` names
    the estimated constants.

    Raises UnsupportedError for an unregistered GPU that is older than Volta, because its
    architecture's rates are unknown.

    >>> match(Properties("NVIDIA H200", (9, 0), 132, 143771 * 2**20)).name
    'h200-sxm-141gb'
    """
    capability = properties.compute_capability
    card, mig, _ = properties.name.partition(" MIG ")
    entry = next((e for e in entries() if card.casefold() in map(str.casefold, e.names)), None)
    if entry is None or entry.spec.compute_capability != capability:
        if capability < _OLDEST:
            major, minor = capability
            found = f"{properties.name} of compute capability {major}.{minor}"
            raise UnsupportedError(
                "device", found, "7.0 (Volta) or later, or a Tesla P100-PCIE-16GB"
            )
        return _unknown(properties, capability)
    spec = entry.spec
    memory_share = properties.memory_bytes / spec.memory_bytes
    whole_memory = _LEAST_MEMORY <= memory_share <= _MOST_MEMORY
    if mig or not whole_memory or properties.sm_count != spec.sm_count:
        spec = _scaled_spec(spec, properties, is_mig=bool(mig))
    return _with_reported_clock(spec, properties)


def _with_reported_clock(spec: DeviceSpec, properties: Properties) -> DeviceSpec:
    """Returns the spec with the higher of the reported and the registered maximum SM clock.

    Cards of one name can differ, such as GeForce cards from several board partners.
    """
    reported = properties.max_sm_clock_mhz
    if reported is None or reported <= spec.max_sm_clock_mhz:
        return spec
    return replace(
        spec, max_sm_clock_mhz=reported, source={**spec.source, "max_sm_clock_mhz": _REPORTED}
    )


def _scaled_spec(card: DeviceSpec, properties: Properties, *, is_mig: bool) -> DeviceSpec:
    """Returns the spec of a MIG slice or another variant of a registered card.

    The peaks are scaled by the fraction of the card's SMs. For a MIG slice, the bandwidth is scaled
    by the fraction of the card's memory. The L2 size is scaled likewise if it is not reported.

    card: constants of the registered card.
    is_mig: whether the GPU is a MIG slice.
    """
    # A MIG slice has a number of eighths of the card's memory channels and cache banks (NVIDIA MIG
    # User Guide), and reports slightly less memory than that. Other variants of a card use all
    # channels and banks.
    memory_share = 1.0
    if is_mig:
        eighths = max(1, round(8 * properties.memory_bytes / card.memory_bytes))
        memory_share = min(1.0, eighths / 8)
    sm_count = properties.sm_count
    size_gib = round(properties.memory_bytes / _GIB)
    of_sms = f"{sm_count} of {card.sm_count} SMs"
    of_memory = f"{size_gib} of {card.memory_bytes // _GIB} GiB"
    share = f"estimated: {of_sms} and {of_memory} of {card.name}"
    peaks = card.peak_tflops.items()
    return replace(
        card,
        name=f"{card.name}-{sm_count}sm-{size_gib}gb",
        sm_count=sm_count,
        memory_bytes=properties.memory_bytes,
        l2_bytes=properties.l2_bytes or int(card.l2_bytes * memory_share),
        memory_gb_per_s=card.memory_gb_per_s * memory_share,
        peak_tflops={dtype: peak * sm_count / card.sm_count for dtype, peak in peaks},
        source={
            **card.source,
            **dict.fromkeys(("sm_count", "memory_bytes"), _REPORTED),
            **dict.fromkeys(("l2_bytes", "memory_gb_per_s", "peak_tflops"), share),
        },
        registered=False,
    )


def _unknown(properties: Properties, capability: tuple[int, int]) -> DeviceSpec:
    """Estimates the spec of an unregistered GPU from its properties and its architecture.

    For a value that the GPU does not report, the estimate is the highest value among registered
    GPUs of the same architecture.
    """
    architecture, remark = _nearest_architecture(capability)
    of = architecture.name
    kin = [e.spec for e in entries() if e.spec.architecture == of]
    unreported = f"estimated: the highest of {of}, not reported by the card"
    sm_clock_mhz = properties.max_sm_clock_mhz
    clock_source = _REPORTED
    if not sm_clock_mhz:
        sm_clock_mhz = max(s.max_sm_clock_mhz for s in kin)
        clock_source = unreported
    l2_bytes = properties.l2_bytes
    l2_source = _REPORTED
    if not l2_bytes:
        l2_bytes = max(s.l2_bytes for s in kin)
        l2_source = unreported
    if properties.max_memory_clock_mhz and properties.memory_bus_bits:
        memory_gb_per_s = (
            2e6 * properties.max_memory_clock_mhz * properties.memory_bus_bits / 8 / 1e9
        )
        memory_source = "estimated: 2 × the reported memory clock × bus width"
    else:
        memory_gb_per_s = max(s.memory_gb_per_s for s in kin)
        memory_source = unreported
    rate: dict[str, float] = dict(architecture.rate)
    halved = ""
    if "geforce" in properties.name.casefold():
        halved = ", half for fp32 accumulation on a GeForce"
        for dtype in rate.keys() & set(_GEFORCE_HALF):
            rate[dtype] /= 2
    per_tflops = properties.sm_count * sm_clock_mhz * 1e-6
    return DeviceSpec(
        name=slug_of(properties.name, properties.memory_bytes),
        kind="cuda",
        sm_count=properties.sm_count,
        sm_clock_mhz=sm_clock_mhz,
        l2_bytes=l2_bytes,
        smem_per_sm_bytes=architecture.smem_per_sm_bytes,
        smem_per_block_bytes=architecture.smem_per_block_bytes,
        memory_bytes=properties.memory_bytes,
        memory_gb_per_s=memory_gb_per_s,
        peak_tflops={dtype: ops * per_tflops for dtype, ops in rate.items()},
        compute_capability=capability,
        source={
            **dict.fromkeys(("compute_capability", "sm_count", "memory_bytes"), _REPORTED),
            **dict.fromkeys(("sm_clock_mhz", "max_sm_clock_mhz"), clock_source),
            **dict.fromkeys(
                ("smem_per_sm_bytes", "smem_per_block_bytes"), architecture.smem_source
            ),
            "l2_bytes": l2_source,
            "memory_gb_per_s": memory_source,
            "peak_tflops": f"estimated: SMs × the rate of {of}{remark} × clock{halved}",
        },
        registered=False,
    )


def _nearest_architecture(capability: tuple[int, int]) -> tuple[Architecture, str]:
    """Returns the architecture that represents a compute capability, and a remark for its source.

    If the registry has the capability's own architecture, the remark is empty. Otherwise, the
    result is the architecture with the highest fp16 rate, of the same major version if possible,
    and the remark says that the capability is unknown.
    """
    known = [one for name, one in architectures().items() if name.startswith("sm_")]
    for one in known:
        if one.compute_capability == capability:
            return one, ""
    same_major = [one for one in known if one.compute_capability[0] == capability[0]]
    fastest = max(same_major or known, key=lambda one: one.rate["fp16"])
    return fastest, f" (nothing is known of {sm_name(capability)})"


def slug_of(name: str, memory_bytes: int) -> str:
    """Builds the slug of an unregistered GPU from its name and memory.

    >>> slug_of("NVIDIA GeForce RTX 3080 Ti", 12 * 2**30)
    'rtx-3080-ti-12gb'
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")
    words = re.sub(r"^(nvidia-|tesla-|geforce-|amd-|instinct-)+", "", words)
    size = f"{round(memory_bytes / _GIB)}gb"
    return words if words.endswith(size) else f"{words}-{size}"
