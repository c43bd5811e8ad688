"""Lists the libraries with public kernel timings, and selects the default for a GPU and dtype.

The kernels that run, and the shapes at which latency jumps, depend on the library as much as on the
GPU. The default is the library with the largest public table of GEMM times, except that vLLM comes
last for fp8_block.
"""

from quantbench.device.registry import same_chip
from quantbench.errors import require_choice

#: Libraries whose kernels were measured. The bf16 GEMMs of vllm, sglang and trtllm were measured as
#: calls of `torch.nn.functional.linear`.
LIBRARIES = ("torch", "triton", "vllm", "sglang", "trtllm", "aiter")

#: Serving engines. Their attention of prompts also writes keys and values to a cache.
ENGINES = ("vllm", "sglang", "trtllm")

#: Maps a device slug to the device's system name in aiconfigurator-core. Not every system has a
#: GEMM table.
SYSTEMS: dict[str, str] = {
    "a100-pcie-80gb": "a100_pcie",
    "a100-sxm4-80gb": "a100_sxm",
    "a30-24gb": "a30",
    "b200-sxm-180gb": "b200_sxm",
    "b300-sxm-270gb": "b300_sxm",
    "gb200-186gb": "gb200",
    "gb300-279gb": "gb300",
    "h100-pcie-80gb": "h100_pcie",
    "h100-sxm5-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "l4-24gb": "l4",
    "l40s-48gb": "l40s",
    "rtx-pro-6000-server-96gb": "rtx_pro_6000_server",
}
_NEWEST = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
_WITH_NEWEST = (
    "b200_sxm",
    "b300_sxm",
    "gb200",
    "gb300",
    "h100_sxm",
    "h200_sxm",
    "l40s",
    "rtx_pro_6000_server",
)
#: Maps a system to its libraries with a GEMM table in aiconfigurator-core 0.12.0, and each library
#: to the version of its newest table. Libraries are sorted by the number of shapes in their tables,
#: largest first, so the first is the default. If these numbers differ by at most 1 %, the order is
#: vLLM, SGLang, TensorRT-LLM. For fp8_block, `libraries_of` moves vLLM to the end: vLLM's small
#: GEMMs take 55 to 300 µs where SGLang's take 4 µs, because vLLM's times include the host's work
#: (aiconfigurator issue 1414).
TABLES: dict[str, dict[str, str]] = {
    "a100_sxm": {"sglang": "0.5.10", "vllm": "0.14.0", "trtllm": "1.0.0"},
    **dict.fromkeys(_WITH_NEWEST, _NEWEST),
}
#: Libraries whose expert times for ep > 1 may include rows of other GPUs' experts. SGLang's
#: collector masks such rows (aiconfigurator, 2026, collector/helper.py,
#: build_rank0_local_workload). Some times of vLLM cover all top_k rows of each token that reaches
#: the GPU. docs/experts.md shows the time that ep = 8 saves for each library.
MASKED_EXPERTS = ("sglang", "vllm")
MASKED_WORDS = "times for ep > 1 may include masked rows of other GPUs' experts"
#: Maps a system to the library and version of its default table.
DEFAULT_TABLES: dict[str, tuple[str, str]] = {
    system: next(iter(of.items())) for system, of in TABLES.items()
}
#: Maps a system to the dtypes of its GEMM tables. A system that is missing here has the dtypes in
#: _BLACKWELL. The weight-only and smooth-quantised formats (int8_wo, int4_wo, sq) are left out,
#: because their GEMMs are not int8 GEMMs.
_FORMATS: dict[str, tuple[str, ...]] = {
    "a100_sxm": ("bf16",),
    **dict.fromkeys(("h100_sxm", "h200_sxm", "l40s"), ("bf16", "fp8", "fp8_block")),
}
_BLACKWELL = ("bf16", "fp8", "fp8_block", "nvfp4")
# Maps (system, dtype) to the libraries in TABLES that are not used: libraries without a table of
# the dtype, and vLLM on the RTX PRO 6000, whose table has only 518 rows.
_WITHOUT = {
    ("l40s", "fp8_block"): ("sglang",),
    ("rtx_pro_6000_server", "fp8_block"): ("vllm", "sglang"),
}
#: Maps (device slug, dtype) to the library that was timed in another public file
#: (`tools.published_tables`).
_PUBLISHED = {
    ("mi300x-192gb", "fp8_block"): "aiter",
    ("mi355x-288gb", "fp8_block"): "aiter",
    ("a100-pcie-40gb", "fp32"): "torch",
    ("p100-pcie-16gb", "fp32"): "torch",
    ("t4-16gb", "fp32"): "torch",
    ("v100-pcie-32gb", "fp32"): "torch",
    ("v100-sxm2-16gb", "fp32"): "torch",
    ("v100-sxm2-16gb", "fp16"): "torch",
}


def writes_cache(provider: str) -> bool:
    """Returns whether a provider's attention of prompts includes the write to a cache.

    >>> writes_cache("vllm.flash_attn_fa3"), writes_cache("torch.flash")
    (True, False)
    """
    return library_of(provider) in ENGINES


def system_of(name: str) -> str:
    """Returns aiconfigurator's system name for a device slug; other names are returned unchanged.

    >>> system_of("a100-sxm4-80gb"), system_of("gb200")
    ('a100_sxm', 'gb200')
    """
    return SYSTEMS.get(name, name)


def slug_of(system: str) -> str | None:
    """Returns the device slug of an aiconfigurator system, or None if it is unknown."""
    return next((slug for slug, name in SYSTEMS.items() if name == system), None)


def libraries_of(slug: str, dtype: str) -> tuple[str, ...]:
    """Returns the libraries with a public GEMM table for a device and dtype, the default first.

    A device without a table has the libraries of a card with the same chip and other memory.

    >>> libraries_of("h100-sxm5-80gb", "fp8"), libraries_of("h100-sxm5-80gb", "nvfp4")
    (('vllm', 'sglang', 'trtllm'), ())
    """
    return next(filter(None, (_libraries_of(one, dtype) for one in same_chip(slug))), ())


def _libraries_of(slug: str, dtype: str) -> tuple[str, ...]:
    """Returns the libraries with a public table of exactly this device, the default first."""
    published = _PUBLISHED.get((slug, dtype))
    if published is not None:
        return (published,)
    system = system_of(slug)
    if dtype not in _FORMATS.get(system, _BLACKWELL):
        return ()
    without = _WITHOUT.get((system, dtype), ())
    found = [library for library in TABLES.get(system, ()) if library not in without]
    return tuple(sorted(found, key=lambda library: dtype == "fp8_block" and library == "vllm"))


def default_library(slug: str, dtype: str) -> str:
    """Returns the library to assume if the user names none; torch if no library was measured.

    >>> default_library("h100-sxm5-80gb", "fp8"), default_library("l4-24gb", "fp8")
    ('vllm', 'torch')
    """
    return next(iter(libraries_of(slug, dtype)), "torch")


def library_words(slug: str, dtype: str, requested: str, operation: str) -> str:
    """Returns a line that names the library whose GEMMs are predicted, and why it was selected.

    requested: name of the library that the user asked for, or "".
    operation: the caller's name for error messages.

    Raises InputError for an unknown name.

    >>> library_words("h100-sxm5-80gb", "fp8", "", "predict")
    'library = vllm (the default: the largest table of 3)'
    """
    measured = libraries_of(slug, dtype)
    of = dtype
    if dtype == "fp16" and not measured:
        of = "bf16"
        measured = libraries_of(slug, of)
    name = resolve_library(slug, of, requested, operation)
    why = "as asked" if requested else "the default"
    if name not in measured:
        why += f"; nobody measured its {dtype} products there"
    elif requested and name != requested:
        why = f"its {dtype} products are {requested}'s"
    elif not requested and len(measured) == 1:
        why = "the only one measured"
    elif not requested:
        why += f": the largest table of {len(measured)}"
        if measured[-1] == "vllm":
            why += " but vllm's, which holds the host's work"
    if requested and (name, dtype) == ("vllm", "fp8_block"):
        why += "; its times of few rows hold the host's work, many times the kernel's"
    return f"library = {name} ({why})"


def library_of(provider: str) -> str:
    """Returns the library that a provider's name begins with; torch if it begins with none.

    >>> library_of("vllm.flash_attn_fa3"), library_of("cublas")
    ('vllm', 'torch')
    """
    name = provider.partition(".")[0]
    return name if name in LIBRARIES else "torch"


def resolve_library(slug: str, dtype: str, library: str, operation: str = "library") -> str:
    """Returns `library`, or the default library if it is "".

    For bf16, torch is replaced by the default library, because that library's bf16 GEMMs were
    measured as calls of `torch.nn.functional.linear`.

    operation: the caller's name for error messages.

    Raises InputError for an unknown name.
    """
    if not library:
        return default_library(slug, dtype)
    require_choice(operation, "library", library, LIBRARIES)
    measured = libraries_of(slug, dtype)
    return measured[0] if measured and library == "torch" and dtype == "bf16" else library
