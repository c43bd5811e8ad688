"""Tabulates what NeuSight's and DeepBench's tables show of GPUs that no other measured table has.

Entry points: `named_kernels`, tile and wave edges by kernel (fp32); `half_precision`, fp16 on the V100; `hidden_sizes`,
the slots of its SMs. Used by `tools.guide.__main__`, the first two where it is given the tables.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import median

from quantbench.analysis.kernel_waves import KernelWaves, kernel_waves
from quantbench.analysis.summary import points_of
from quantbench.device import lookup
from quantbench.importers import deepbench, neusight
from quantbench.importers.runs import records_of
from quantbench.quantization import VECTOR_BYTES, gemm_alignment_bytes
from quantbench.workload import Gemm
from tools.guide.markers import table
from tools.guide.shapes import of_sizes, shares

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


_V100 = "v100-sxm2-16gb"
# A product with a smaller side takes as long as its operands' bytes, whatever the alignment.
_LARGE_SIDE = 512
_ROWS = (16, 32, 64, 128)


def half_precision(file: Path) -> dict[str, str]:
    """Returns the table of rates by alignment, and that of times by rows m, of fp16 on the V100. file: DeepBench's."""
    by_alignment: dict[int, list[float]] = defaultdict(list)
    by_layer: dict[tuple[int, int, str], dict[int, float]] = defaultdict(dict)
    for row in deepbench.read_rows(file, lookup(_V100)).rows:
        work = row.workload
        if not isinstance(work, Gemm) or work.dtype != "fp16":
            continue
        by_layer[work.n, work.k, work.layout][work.m] = row.latency_us
        if min(work.m, work.n, work.k) >= _LARGE_SIDE:
            by_alignment[min(VECTOR_BYTES, gemm_alignment_bytes(work))].append(work.flops / row.latency_us / 1e6)
    rates = [
        [f"{aligned} bytes{' and more' if aligned == VECTOR_BYTES else ''}", str(len(found)), f"{median(found):.0f}",
         f"{min(found):.0f} to {max(found):.0f}"]
        for aligned, found in sorted(by_alignment.items())
    ]  # fmt: skip
    times = []
    for rows in _ROWS[1:]:
        ratios = [of[rows] / of[_ROWS[0]] for of in by_layer.values() if _ROWS[0] in of and rows in of]
        times.append([
            f"{_ROWS[0]} → {rows}", str(len(ratios)), f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"
        ])  # fmt: skip
    return {
        "v100-alignment": table(["rows aligned to", "products", "TFLOP/s", "range"], rates),
        "v100-rows": table(["rows m", "layers", "takes, of the time of 16", "range"], times),
    }


def hidden_sizes() -> str:
    """Returns the table of the share of the V100's block slots in use by hidden sizes that its SMs divide."""
    spec = lookup(_V100)
    lines = []
    for mbs in (1, 4):
        counted = shares(spec, mbs)
        divided, others = (of_sizes(counted, spec.sm_count, divides=divides) for divides in (True, False))
        lines.append([
            str(mbs), f"{100 * divided.mean:.1f} %", f"{100 * others.mean:.1f} %",
            f"{100 * divided.lowest:.0f} to {100 * divided.highest:.0f} %",
        ])  # fmt: skip
    return table(["MBS", f"hidden % {spec.sm_count} = 0", "all others", "range of the former"], lines)
