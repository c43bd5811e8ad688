"""Architecture families, whose models share a prior because libraries run the same kernels, and their generations."""

from __future__ import annotations

from quantbench.device.spec import DeviceSpec


def family(device: DeviceSpec) -> str:
    """The architecture family: GPUs whose libraries share kernels.

    >>> from quantbench.device import lookup
    >>> family(lookup("b200-sxm-180gb")), family(lookup("rtx-5090-32gb"))
    ('blackwell', 'blackwell-rtx')
    """
    return family_of(device.compute_capability)


def family_of(compute_capability: tuple[int, int] | None) -> str:
    """The family by compute capability; None is a CPU."""
    if compute_capability is None:
        return "cpu"
    major, minor = compute_capability
    if major == 7:
        return "turing" if minor >= 5 else "volta"
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    # sm_12x has a name in common with sm_10x and no kernels: neither tcgen05 nor tensor memory, but mma.sync as Ada.
    return {9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell-rtx"}.get(major, f"sm_{major}{minor}")


def generation(name: str) -> str:
    """The generation of a family, by NVIDIA's name. A prior "family-out" leaves the whole generation out.

    >>> generation("blackwell-rtx")
    'blackwell'
    """
    return name.partition("-")[0]
