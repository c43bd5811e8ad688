"""Tabulates tile and wave edges of named kernels on GPUs whose only measured table is NeuSight's.

Entry point: `named_kernels`, used by `tools.guide.__main__` where it is given that table.
"""

from __future__ import annotations

from pathlib import Path

from quantbench.analysis.kernel_waves import KernelWaves, kernel_waves
from quantbench.analysis.summary import points_of
from quantbench.device import lookup
from quantbench.importers import neusight
from quantbench.importers.runs import records_of
from tools.guide.markers import table

_GPUS = {"v100-pcie-32gb": "V100", "p100-pcie-16gb": "P100", "a100-pcie-40gb": "A100 PCIe"}
# Kernels shown of a GPU, and the times of how many blocks per SM.
_MOST, _MOST_PER_SM = 2, 5


def named_kernels(file: Path) -> str:
    """Returns the table of the kernels with the most products on each GPU. file: NeuSight's table, all GPUs."""
    rows = []
    for slug, gpu in _GPUS.items():
        spec = lookup(slug)
        found = neusight.read_rows(file, spec)
        points = points_of(records_of(found.rows, neusight.origin_of(file, found, spec), spec), spec)
        rows += [_row(f"{gpu} ({spec.sm_count} SMs)", kernel) for kernel in kernel_waves(points, spec)[:_MOST]]
    head = ["GPU", "kernel", "products", "time of 1, 2, 3, … blocks per SM", "rises after blocks", "a tile filled to",
            "takes, of a full one's time", "rows off 16 bytes"]  # fmt: skip
    return table(head, rows, numeric=False)


def _row(gpu: str, kernel: KernelWaves) -> list[str]:
    times = " ".join("–" if wave is None else f"{wave:.1f}" for wave in kernel.waves[1 : 2 * _MOST_PER_SM : 2])
    edges = ", ".join(f"{edge.blocks} (+{100 * (edge.ratio - 1):.0f} %)" for edge in kernel.edges[:_MOST_PER_SM])
    low, exponent, off = kernel.fill_low, kernel.fill_exponent, kernel.unaligned
    return [
        gpu, f"`{kernel.kernel}`", f"{kernel.num_points:,}", times, edges or "–",
        "–" if low is None else f"{100 * low:.0f} %",
        "–" if low is None or exponent is None else f"{100 * low**exponent:.0f} %",
        "–" if off is None or kernel.unaligned_error is None
        else f"{100 * off:+.1f} % ±{200 * kernel.unaligned_error:.1f}",
    ]  # fmt: skip
