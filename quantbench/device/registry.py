"""The registry of known GPUs, read from registry.toml once, when it is first asked for."""

import re
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

# What a name may say beside the words of a slug, and which of those words do not tell the model.
_MAKERS = ("nvidia", "tesla", "geforce")
_MEMORY_SIZE = re.compile(r"^(\d+)g(?:i?b)?$")
_FORM_FACTOR = re.compile(r"^(sxm\d*|pcie|nvl)$")

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


def lookup(name: str) -> DeviceSpec:
    """The spec of a known GPU, by slug, by the name that CUDA reports, or by a short name: the words of a slug that
    leave one model (`h100`, `a100-40gb`, `A100 PCIe 80G`).

    One rule decides between cards of one model: SXM modules before cards in slots, then the larger memory. Raises
    InputError that lists candidates for a name that fits several models (`rtx-6000`) or none.

    >>> lookup("a100").name, lookup("V100-16GB").name
    ('a100-sxm4-80gb', 'v100-sxm2-16gb')
    """
    by_slug = {entry.spec.name: entry.spec for entry in entries()}
    by_cuda_name = {own.casefold(): entry.spec for entry in entries() for own in entry.names}
    exact = by_slug.get(name) or by_cuda_name.get(name.casefold())
    if exact is not None:
        return exact
    words = _words_of(name)
    found = [slug for slug in by_slug if all(_has_word(slug, word) for word in words)] if words else []
    named_whole = [slug for slug in found if _model_of(slug) == _model_of("-".join(words))]
    candidates = named_whole or found
    if len({_model_of(slug) for slug in candidates}) == 1:
        return max((by_slug[slug] for slug in candidates), key=lambda spec: ("-sxm" in spec.name, spec.memory_bytes))
    near = candidates or [slug for slug in by_slug if words and slug.split("-")[0] == words[0]]
    if not near:
        models = get_close_matches(_model_of("-".join(words)), map(_model_of, by_slug), n=3, cutoff=0.5)
        near = [slug for slug in by_slug if _model_of(slug) in models]
    expected = "one of " + ", ".join(near) if near else "a known GPU"
    raise InputError("device", repr(name), f"{expected} (`quantbench devices` lists all {len(by_slug)})")


def _words_of(name: str) -> list[str]:
    """A name as people and tables write it, in the words that slugs are made of: `NVIDIA A100_80GiB` as a100, 80gb."""
    words = re.split(r"[-_\s]+", name.strip().lower())
    return [_MEMORY_SIZE.sub(r"\1gb", word) for word in words if word and word not in _MAKERS]


def _has_word(slug: str, word: str) -> bool:
    return any(part == word or (word == "sxm" and part.startswith("sxm")) for part in slug.split("-"))


def _model_of(slug: str) -> str:
    """The slug without form factor and memory: `rtx-pro-6000-96gb` as rtx-pro-6000."""
    parts = slug.split("-")
    return "-".join(part for part in parts if not _MEMORY_SIZE.match(part) and not _FORM_FACTOR.match(part))


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
