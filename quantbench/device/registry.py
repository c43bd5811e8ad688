"""Reads the registry of known GPUs from registry.toml; `lookup` finds a GPU by name.

The registry contains the constants of GPU models and architectures, with their sources.
"""

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

# Words in CUDA's device names that slugs omit.
_MAKERS = ("nvidia", "tesla", "geforce", "amd", "instinct")
_MEMORY_SIZE = re.compile(r"^(\d+)g(?:i?b)?$")
_NOT_MODEL = re.compile(r"^(sxm\d*|pcie|nvl|\d+g(i?b)?)$")

#: Fields of a spec that have a source for every registered GPU.
SOURCED = (
    "compute_capability", "sm_count", "sm_clock_mhz", "max_sm_clock_mhz", "l2_bytes",
    "smem_per_sm_bytes",
    "smem_per_block_bytes", "memory_bytes", "memory_gb_per_s", "peak_tflops",
)  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """Constants that all GPUs of one compute capability (or of one LLVM target of AMD) share.

    name: name of the architecture, as in `DeviceSpec.architecture`.
    rate: dense operations per SM and clock cycle, by dtype. Some cards run at a lower rate.
    smem_per_sm_bytes: shared memory per SM.
    smem_per_block_bytes: opt-in maximum of shared memory per block.
    smem_source: document that gives the shared memory sizes.
    """

    name: str
    compute_capability: tuple[int, int]
    rate: Mapping[str, int]
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    smem_source: str


@dataclass(frozen=True)
class Entry:
    """Entry of the registry for one GPU model.

    names: names that CUDA reports for the model.
    """

    spec: DeviceSpec
    names: tuple[str, ...]


def lookup(name: str) -> DeviceSpec:
    """Returns the spec of a registered GPU.

    If several variants of one model match, the result is the file's first SXM module, or the first
    match if no variant is an SXM module. The file lists the variants with more public measurements
    first.

    name: slug, CUDA's device name, or words of a slug that identify one model (`h100`, `a100-40gb`,
        `A100 PCIe 80G`).

    Raises InputError with candidates if the name matches several models (`rtx-6000`) or none.

    >>> lookup("a100").name, lookup("V100").name
    ('a100-sxm4-80gb', 'v100-sxm2-16gb')
    """
    by_slug = {spec.name: spec for spec in known()}
    if name in by_slug:
        return by_slug[name]
    for entry in entries():
        if name.casefold() in map(str.casefold, entry.names):
            return entry.spec
    words = _words_of(name)
    model = _model_of("-".join(words))
    found = [slug for slug in by_slug if words and _parts(slug).issuperset(words)]
    candidates = [slug for slug in found if _model_of(slug) == model] or found
    if len({_model_of(slug) for slug in candidates}) == 1:
        return by_slug[max(candidates, key=lambda slug: "-sxm" in slug)]
    near = candidates or [slug for slug in by_slug if words and slug.split("-")[0] == words[0]]
    if not near:
        models = get_close_matches(model, map(_model_of, by_slug), n=3, cutoff=0.5)
        near = [slug for slug in by_slug if _model_of(slug) in models]
    expected = "a known GPU"
    if near:
        expected = "one of " + ", ".join(near)
    raise InputError(
        "device", repr(name), f"{expected} (`quantbench devices` lists all {len(by_slug)})"
    )


def _parts(slug: str) -> set[str]:
    """Returns the words of a slug, plus `sxm` if one of them is a version of SXM (sxm4)."""
    parts = set(slug.split("-"))
    if "-sxm" in slug:
        parts.add("sxm")
    return parts


def same_chip(slug: str) -> tuple[str, ...]:
    """Returns a slug, and the slugs of other cards with the same chip and form factor.

    The cards may differ in memory size and bandwidth.

    >>> same_chip("v100-sxm2-32gb"), same_chip("h100-pcie-80gb")
    (('v100-sxm2-32gb', 'v100-sxm2-16gb'), ('h100-pcie-80gb',))
    """
    chips = {spec.name: _chip(spec) for spec in known()}
    chip = chips.pop(slug, None)
    return (slug, *(other for other in chips if chips[other] == chip))


def _chip(spec: DeviceSpec) -> tuple[object, ...]:
    """Returns the properties that are equal for cards with the same chip and form factor."""
    form = [part for part in spec.name.split("-") if not _MEMORY_SIZE.match(part)]
    return form, spec.sm_count, spec.sm_clock_mhz, spec.l2_bytes, dict(spec.peak_tflops)


def _words_of(name: str) -> list[str]:
    """Returns a name's words as in a slug: a100 and 80gb for `NVIDIA A100_80GiB`."""
    words = re.split(r"[-_\s]+", name.strip().lower())
    return [_MEMORY_SIZE.sub(r"\1gb", word) for word in words if word and word not in _MAKERS]


def _model_of(slug: str) -> str:
    """Returns a slug without form factor and memory size: rtx-pro-6000 for `rtx-pro-6000-96gb`."""
    return "-".join(part for part in slug.split("-") if not _NOT_MODEL.match(part))


def known() -> tuple[DeviceSpec, ...]:
    """Returns the specs of all registered GPUs, in file order."""
    return tuple(entry.spec for entry in entries())


@cache
def entries() -> tuple[Entry, ...]:
    """Returns the entries of all registered GPUs, in file order."""
    data = _data()
    return tuple(_entry(slug, values, data["documents"]) for slug, values in data["device"].items())


@cache
def architectures() -> Mapping[str, Architecture]:
    """Returns the known architectures by name (`sm_80`, `gfx942`)."""
    data = _data()
    found = {}
    for name, values in data["architecture"].items():
        found[name] = Architecture(
            name=name,
            compute_capability=_capability(values.get("gfx_ip", name.removeprefix("sm_"))),
            rate=values["rate"],
            smem_per_sm_bytes=values["smem_per_sm_kib"] * _KIB,
            smem_per_block_bytes=values["smem_per_block_kib"] * _KIB,
            smem_source=_cite(values["source"]["smem"], data["documents"]),
        )
    return found


@cache
def _data() -> dict[str, Any]:
    """Parses registry.toml, once per process."""
    return tomllib.loads((files("quantbench.device") / "registry.toml").read_text(encoding="utf-8"))


def _entry(slug: str, values: dict[str, Any], documents: dict[str, str]) -> Entry:
    """Builds the entry of one GPU from its table in the file.

    values: content of the table.
    documents: titles of cited documents, by key.
    """
    architecture = architectures()[values["architecture"]]
    amd = architecture.name.startswith("gfx")
    cited = values["source"] if amd else {"compute_capability": "cuda", **values["source"]}
    source = {name: _cite(cited.get(name, cited["default"]), documents) for name in SOURCED}
    source["smem_per_sm_bytes"] = source["smem_per_block_bytes"] = architecture.smem_source
    if "max_sm_clock_mhz" not in values:
        source["max_sm_clock_mhz"] = source["sm_clock_mhz"]
    spec = DeviceSpec(
        name=slug,
        kind="rocm" if amd else "cuda",
        sm_count=values["sm_count"],
        sm_clock_mhz=values["sm_clock_mhz"],
        memory_gb_per_s=values["memory_gb_per_s"],
        peak_tflops=values["peak_tflops"],
        max_sm_clock_mhz=values.get("max_sm_clock_mhz", 0),
        l2_bytes=int(values["l2_mib"] * _MIB),
        smem_per_sm_bytes=architecture.smem_per_sm_bytes,
        smem_per_block_bytes=architecture.smem_per_block_bytes,
        memory_bytes=values["memory_gib"] * _GIB,
        peak_clock_mhz=values.get("peak_clock_mhz", {}),
        board_power_w=values.get("board_power_w", 0.0),
        compute_capability=architecture.compute_capability,
        source=source,
    )
    return Entry(spec, tuple(values["names"]))


def _cite(text: str, documents: dict[str, str]) -> str:
    """Returns a citation `key: remark` with the document's title in place of its key."""
    key, colon, remark = text.partition(":")
    return documents[key] + colon + remark


def _capability(digits: str) -> tuple[int, int]:
    """Parses a compute capability such as `90` or `120`. The last digit is the minor version."""
    return int(digits[:-1]), int(digits[-1])
