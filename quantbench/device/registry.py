"""The registry of known GPUs, read from registry.toml once, when it is first asked for."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError

_KIB = 2**10
_MIB = 2**20
_GIB = 2**30

# Fields of a spec that carry a constant, and so a source, for every registered GPU.
SOURCED = (
    "compute_capability",
    "sm_count",
    "sm_clock_mhz",
    "max_sm_clock_mhz",
    "l2_bytes",
    "smem_per_sm_bytes",
    "smem_per_block_bytes",
    "memory_bytes",
    "memory_gb_per_s",
    "peak_tflops",
)


@dataclass(frozen=True)
class Architecture:
    """What all GPUs of one compute capability share.

    rate: dense operations per SM and clock by dtype, at full rate. smem_per_sm_bytes, smem_per_block_bytes: shared
    memory. source: where they come from (`smem`, `rate`).
    """

    compute_capability: tuple[int, int]
    rate: Mapping[str, int]
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    source: Mapping[str, str]


@dataclass(frozen=True)
class Entry:
    """One known GPU with what only matching and checking need.

    names: as CUDA reports them. memory_clock_mhz, memory_bus_bits: what the bandwidth is made of (two transfers a
    clock). half_rate: dtypes that this product runs at half its architecture's rate.
    """

    spec: DeviceSpec
    names: tuple[str, ...]
    memory_clock_mhz: float
    memory_bus_bits: int
    half_rate: tuple[str, ...]


def lookup(slug: str) -> DeviceSpec:
    """The spec of a known GPU. Raises InputError, naming the nearest slugs, for any other.

    >>> lookup("a100-sxm4-80gb").sm_count
    108
    """
    known_slugs = [entry.spec.name for entry in entries()]
    if slug in known_slugs:
        return entries()[known_slugs.index(slug)].spec
    # `a100` names four slugs that all look less like it than `a10-24gb` does, so that same beginnings come first.
    first, *rest = slug.lower().split("-")
    near = [s for s in known_slugs if first and s.split("-")[0] == first]
    if rest or not near:
        near = get_close_matches(slug.lower(), near or known_slugs, n=3, cutoff=0.5) or near
    expected = "one of " + ", ".join(near) if near else "a known GPU"
    raise InputError("device", repr(slug), f"{expected} (`quantbench devices` lists all {len(known_slugs)})")


def known() -> tuple[DeviceSpec, ...]:
    """Every GPU of the registry, by age of its architecture."""
    return tuple(entry.spec for entry in entries())


@cache
def entries() -> tuple[Entry, ...]:
    """Every entry of the registry, in the file's order."""
    data = _data()
    return tuple(_entry(slug, values, data["documents"]) for slug, values in data["device"].items())


@cache
def architectures() -> Mapping[tuple[int, int], Architecture]:
    """What is known of each compute capability."""
    data = _data()
    found = {}
    for text, values in data["architecture"].items():
        capability = _capability(text)
        found[capability] = Architecture(
            compute_capability=capability,
            rate=values["rate"],
            smem_per_sm_bytes=values["smem_per_sm_kib"] * _KIB,
            smem_per_block_bytes=values["smem_per_block_kib"] * _KIB,
            source={name: _cite(text, data["documents"]) for name, text in values["source"].items()},
        )
    return found


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((files("quantbench.device") / "registry.toml").read_text(encoding="utf-8"))


def _entry(slug: str, values: dict[str, Any], documents: dict[str, str]) -> Entry:
    capability = _capability(values["compute_capability"])
    architecture = architectures()[capability]
    sources = {name: values["source"].get(name, values["source"]["default"]) for name in SOURCED}
    if "compute_capability" not in values["source"]:
        sources["compute_capability"] = "cuda"
    source = {name: _cite(text, documents) for name, text in sources.items()}
    source["smem_per_sm_bytes"] = source["smem_per_block_bytes"] = architecture.source["smem"]
    if "max_sm_clock_mhz" not in values:
        source["max_sm_clock_mhz"] = source["sm_clock_mhz"]
    spec = DeviceSpec(
        name=slug,
        kind="cuda",
        sm_count=values["sm_count"],
        sm_clock_mhz=values["sm_clock_mhz"],
        max_sm_clock_mhz=values.get("max_sm_clock_mhz", values["sm_clock_mhz"]),
        l2_bytes=int(values["l2_mib"] * _MIB),
        smem_per_sm_bytes=architecture.smem_per_sm_bytes,
        smem_per_block_bytes=architecture.smem_per_block_bytes,
        memory_bytes=values["memory_gib"] * _GIB,
        memory_gb_per_s=values["memory_gb_per_s"],
        peak_tflops=values["peak_tflops"],
        peak_clock_mhz=values.get("peak_clock_mhz", {}),
        compute_capability=capability,
        source=source,
    )
    return Entry(
        spec=spec,
        names=tuple(values["names"]),
        memory_clock_mhz=values["memory_clock_mhz"],
        memory_bus_bits=values["memory_bus_bits"],
        half_rate=tuple(values.get("half_rate", ())),
    )


def _cite(text: str, documents: dict[str, str]) -> str:
    """`key: remark` → the document's title, and the remark."""
    key, _, remark = text.partition(":")
    return documents[key] + (f":{remark}" if remark else "")


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
