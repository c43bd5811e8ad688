"""Derives a GPU's spec from the properties it reports, also for parts of a known card and for
unknown cards.

Entry points: `match`, and its argument `Properties`. Used by `here`. A card is the registered one
only if name, compute capability, SM count and memory size all agree, so that a MIG slice, a vGPU or
a card with disabled SMs does not get the full card's peaks.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from quantbench.device.registry import Architecture, Entry, architectures, entries
from quantbench.device.spec import DeviceSpec, sm_name
from quantbench.errors import UnsupportedError

# CUDA reports less than the nominal memory: ECC on GDDR6 takes 6 %, the driver up to 3 %.
_MEMORY_SHARE = (0.88, 1.01)
_MIG = re.compile(r"^(?P<card>.+?) MIG (?P<profile>\S+)$")
# Rates of older architectures are not in the registry.
_OLDEST = (7, 0)
_GIB = 2**30
_REPORTED = "reported by the card"
# GeForce cards run these at half rate with fp32 accumulation (NVIDIA's Turing, GA102, Ada and RTX
# Blackwell whitepapers).
_GEFORCE_HALF = ("fp16", "bf16", "tf32", "fp8")


@dataclass(frozen=True)
class Properties:
    """Properties of a GPU reported by torch and NVML; None if neither reports it.

    name: name in CUDA (`NVIDIA A100-SXM4-80GB`).
    max_sm_clock_mhz, max_memory_clock_mhz: maximum settable clocks.
    smem_per_block_bytes: opt-in maximum shared memory per block.
    """

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int | None = None
    smem_per_sm_bytes: int | None = None
    smem_per_block_bytes: int | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    memory_bus_bits: int | None = None


def match(properties: Properties) -> DeviceSpec:
    """Returns the registered spec, or one with registered=False whose sources state the estimates.

    Raises UnsupportedError for unregistered GPUs before Volta, whose rates are not known.

    >>> match(Properties("NVIDIA H200", (9, 0), 132, 143771 * 2**20)).name
    'h200-sxm-141gb'
    """
    capability = properties.compute_capability
    mig = _MIG.match(properties.name)
    card = mig["card"] if mig else properties.name
    entry = next((e for e in entries() if card.casefold() in map(str.casefold, e.names)), None)
    if entry is None or entry.spec.compute_capability != capability:
        if capability < _OLDEST:
            major, minor = capability
            found = f"{properties.name} of compute capability {major}.{minor}"
            raise UnsupportedError(
                "device", found, "7.0 (Volta) or later, or a Tesla P100-PCIE-16GB"
            )
        return _unknown(properties, capability)
    least, most = (share * entry.spec.memory_bytes for share in _MEMORY_SHARE)
    whole = properties.sm_count == entry.spec.sm_count and least <= properties.memory_bytes <= most
    if mig is None and whole:
        return _with_reported_clock(entry.spec, properties)
    return _part_of(entry, properties, None if mig is None else mig["profile"])


def _with_reported_clock(spec: DeviceSpec, properties: Properties) -> DeviceSpec:
    """Raises the maximum clock to the reported one: cards of one name can differ (board partners'
    GeForces).
    """
    reported = properties.max_sm_clock_mhz
    if reported is None or reported <= spec.max_sm_clock_mhz:
        return spec
    return replace(
        spec, max_sm_clock_mhz=reported, source={**spec.source, "max_sm_clock_mhz": _REPORTED}
    )


def _part_of(entry: Entry, properties: Properties, mig_profile: str | None) -> DeviceSpec:
    """Scales the peaks of a registered card by the share of SMs, and for MIG bandwidth and L2 by
    that of memory.
    """
    card = entry.spec
    sm_share = properties.sm_count / card.sm_count
    # A MIG slice has its own memory channels and cache banks, in eighths of the card's (NVIDIA MIG
    # User Guide), and reports slightly less than its share of the memory. Other variants use all
    # channels and banks.
    eighths = max(1, round(8 * properties.memory_bytes / card.memory_bytes))
    memory_share = min(1.0, eighths / 8) if mig_profile else 1.0
    if mig_profile:
        what, suffix = f"MIG slice {mig_profile}", f"mig-{mig_profile}"
    elif properties.sm_count != card.sm_count:
        what, suffix = f"{properties.sm_count} of {card.sm_count} SMs", f"{properties.sm_count}sm"
    else:
        size_gib = round(properties.memory_bytes / _GIB)
        what, suffix = f"{size_gib} GiB of {card.memory_bytes // _GIB}", f"with-{size_gib}gb"
    share = f"estimated: {what} of {card.name}"
    reported, shared = ("sm_count", "memory_bytes"), ("l2_bytes", "memory_gb_per_s", "peak_tflops")
    part = replace(
        card,
        name=f"{card.name}-{suffix}".replace(".", "-"),
        sm_count=properties.sm_count,
        memory_bytes=properties.memory_bytes,
        l2_bytes=properties.l2_bytes or int(card.l2_bytes * memory_share),
        memory_gb_per_s=card.memory_gb_per_s * memory_share,
        peak_tflops={dtype: peak * sm_share for dtype, peak in card.peak_tflops.items()},
        source={
            **card.source,
            **dict.fromkeys(reported, _REPORTED),
            **dict.fromkeys(shared, share),
        },
        registered=False,
    )
    return _with_reported_clock(part, properties)


def _unknown(properties: Properties, capability: tuple[int, int]) -> DeviceSpec:
    """Estimates the spec of an unregistered GPU from its properties, its architecture's rates and
    upper bounds.
    """
    architecture, remark = _nearest_architecture(capability)
    of = architecture.name
    kin = [e.spec for e in entries() if e.spec.architecture == of]
    unreported = f"estimated: the highest of {of}, not reported by the card"
    smem = architecture.source["smem"]
    clock = (properties.max_sm_clock_mhz, max(s.max_sm_clock_mhz for s in kin), unreported)
    # As reported, else as estimated from the architecture.
    found: dict[str, tuple[Any, Any, str]] = {
        "sm_clock_mhz": clock,
        "max_sm_clock_mhz": clock,
        "l2_bytes": (properties.l2_bytes, max(s.l2_bytes for s in kin), unreported),
        "smem_per_sm_bytes": (properties.smem_per_sm_bytes, architecture.smem_per_sm_bytes, smem),
        "smem_per_block_bytes": (
            properties.smem_per_block_bytes,
            architecture.smem_per_block_bytes,
            smem,
        ),
    }
    values = {name: reported or estimated for name, (reported, estimated, _) in found.items()}
    if properties.max_memory_clock_mhz and properties.memory_bus_bits:
        memory_gb_per_s = (
            2e6 * properties.max_memory_clock_mhz * properties.memory_bus_bits / 8 / 1e9
        )
        memory_source = "estimated: 2 × the reported memory clock × bus width"
    else:
        memory_gb_per_s = max(s.memory_gb_per_s for s in kin)
        memory_source = unreported
    geforce = "geforce" in properties.name.casefold()
    rate = {
        dtype: ops / 2 if geforce and dtype in _GEFORCE_HALF else ops
        for dtype, ops in architecture.rate.items()
    }
    per_tflops = properties.sm_count * values["sm_clock_mhz"] * 1e-6
    halved = ", half for fp32 accumulation on a GeForce" if geforce else ""
    return DeviceSpec(
        name=slug_of(properties.name, properties.memory_bytes),
        kind="cuda",
        sm_count=properties.sm_count,
        **values,
        memory_bytes=properties.memory_bytes,
        memory_gb_per_s=memory_gb_per_s,
        peak_tflops={dtype: ops * per_tflops for dtype, ops in rate.items()},
        compute_capability=capability,
        source={
            **dict.fromkeys(("compute_capability", "sm_count", "memory_bytes"), _REPORTED),
            **{name: _REPORTED if reported else why for name, (reported, _, why) in found.items()},
            "memory_gb_per_s": memory_source,
            "peak_tflops": f"estimated: SMs × the rate of {of}{remark} × clock{halved}",
        },
        registered=False,
    )


def _nearest_architecture(capability: tuple[int, int]) -> tuple[Architecture, str]:
    known = {
        a.compute_capability: a for name, a in architectures().items() if name.startswith("sm_")
    }
    if capability in known:
        return known[capability], ""
    same_major = [a for (major, _), a in known.items() if major == capability[0]]
    fastest = max(same_major or known.values(), key=lambda a: a.rate["fp16"])
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
