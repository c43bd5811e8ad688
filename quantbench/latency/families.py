"""Groups GPUs into architecture families, whose models share a prior because libraries run the same
kernels on them.
"""

from quantbench.device.spec import DeviceSpec

_FAMILIES = {
    6: "pascal",
    7: "volta",
    8: "ampere",
    9: "hopper",
    10: "blackwell",
    11: "blackwell",
    # Also called Blackwell, but it runs other kernels: it has mma.sync like Ada, no tcgen05 or
    # tensor memory.
    12: "blackwell-rtx",
}


def family(device: DeviceSpec) -> str:
    """Returns the architecture family of a device.

    >>> from quantbench.device import lookup
    >>> family(lookup("b200-sxm-180gb")), family(lookup("rtx-5090-32gb"))
    ('blackwell', 'blackwell-rtx')
    """
    return "cdna" if device.kind == "rocm" else family_of(device.compute_capability)


def family_of(compute_capability: tuple[int, int] | None) -> str:
    """Returns the architecture family for a compute capability; None means a CPU."""
    if compute_capability is None:
        return "cpu"
    major, minor = compute_capability
    exceptions = {(7, 5): "turing", (8, 9): "ada"}
    return exceptions.get(compute_capability) or _FAMILIES.get(major, f"sm_{major}{minor}")


def generation(name: str) -> str:
    """Returns NVIDIA's generation name of a family. The prior "family-out" excludes the whole
    generation.

    >>> generation("blackwell-rtx")
    'blackwell'
    """
    return name.partition("-")[0]


def unit(device: DeviceSpec, dtype: str) -> str:
    """Returns which unit multiplies matrices of a dtype: tensor cores, CUDA cores or matrix cores
    (AMD).

    CUDA cores: fp32, everything before Volta, and int8 on Volta, whose tensor cores have fp16 only.

    >>> from quantbench.device import lookup
    >>> unit(lookup("a100-sxm4-80gb"), "fp32"), unit(lookup("a100-sxm4-80gb"), "tf32")
    ('CUDA cores', 'tensor cores')
    """
    if device.kind == "rocm":
        return "matrix cores"
    capability = device.compute_capability or (0, 0)
    if dtype == "fp32" or capability < (7, 0) or (dtype == "int8" and capability < (7, 5)):
        return "CUDA cores"
    return "tensor cores"
