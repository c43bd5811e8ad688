"""Determines a GPU's architecture family, and which of its units multiplies matrices of a dtype.

Libraries run the same kernels on all GPUs of a family, so the latency models of these GPUs share a
prior.
"""

from quantbench.device.spec import DeviceSpec

_FAMILIES = {
    6: "pascal",
    7: "volta",
    8: "ampere",
    9: "hopper",
    10: "blackwell",
    11: "blackwell",
    # NVIDIA also calls these Blackwell, but they run other kernels: they have mma.sync like Ada and
    # neither tcgen05 nor tensor memory.
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
    """Returns the generation of a family, as NVIDIA names it.

    The prior "family-out" excludes all GPUs of the device's generation.

    >>> generation("blackwell-rtx")
    'blackwell'
    """
    return name.partition("-")[0]


def unit(device: DeviceSpec, dtype: str) -> str:
    """Returns the unit that multiplies matrices of a dtype: tensor, CUDA or (AMD) matrix cores.

    CUDA cores multiply fp32 everywhere, every dtype before Volta, and int8 on Volta, whose tensor
    cores support only fp16.

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
