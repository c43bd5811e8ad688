"""The simplest estimate that knows waves: enough to plan a sweep and to draw where edges are expected.

It assumes one tile for every product on a device. Where kernels were identified, or a fitted model exists, those know
better; this is what is left when nothing was measured.
"""

from dataclasses import dataclass

from quantbench.device.spec import DeviceSpec
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.workload import Attention, Gemm, Workload


@dataclass(frozen=True)
class AssumedTile:
    """A tile taken for granted: blocks_per_sm of it are resident on an SM. reason: why this one, in words."""

    tile: Tile
    blocks_per_sm: int
    reason: str


# The steps of the public A100 bf16 GEMM table follow the waves of a 128×256 tile at one block per SM more closely than
# those of any other tile (correlation 0.72); Hopper's and Blackwell's follow none as closely, so theirs is a guess.
_AMPERE_AND_LATER = AssumedTile(Tile(128, 256), 1, "128x256 tile, one block per SM, is assumed")
# The largest tile of cuBLAS's fp16 kernels on Volta and Turing (volta_fp16_s884gemm_fp16_256x128_…).
_VOLTA = AssumedTile(Tile(256, 128), 1, "256x128 tile, one block per SM, is assumed")
# oneDNN's AVX-512 kernels walk n in blocks of 64 columns: measured as steps every 64 in n on one core.
_CPU = AssumedTile(Tile(1, 64), 1, "columns in blocks of 64 (oneDNN) are assumed")

# What a large product reaches of the data-sheet peak; good libraries on large shapes reach 0.7 to 0.85.
_COMPUTE_EFFICIENCY = 0.75
_BANDWIDTH_EFFICIENCY = 0.8
# Start and end of a kernel on the device, without the launch from the host.
_KERNEL_OVERHEAD_US = {"cuda": 3.0, "cpu": 2.0}


def assumed_tile(spec: DeviceSpec) -> AssumedTile:
    """The tile that is taken for granted on a device when nothing else is known."""
    if spec.compute_capability is None:
        return _CPU
    return _AMPERE_AND_LATER if spec.compute_capability >= (8, 0) else _VOLTA


def roofline_us(workload: Workload, spec: DeviceSpec) -> float:
    """Estimated time of one run in microseconds: waves of the assumed tile, or bytes over bandwidth if that is more.

    Good to a factor of about two; for planning, never for a result.
    """
    memory_us = workload.min_bytes / (spec.memory_gb_per_s * 1e3 * _BANDWIDTH_EFFICIENCY)
    compute_us = 0.0
    if isinstance(workload, Gemm | Attention):
        # Of what a device has no arithmetic for, the slowest it has is taken: emulation is never faster.
        peak = spec.peak(workload.dtype) or min(spec.peak_tflops.values())
        compute_us = workload.flops / (peak * 1e6 * _COMPUTE_EFFICIENCY)
    if isinstance(workload, Gemm):
        assumed = assumed_tile(spec)
        compute_us /= quantize(workload, assumed.tile, spec.sm_count, assumed.blocks_per_sm).efficiency
    return max(memory_us, compute_us) + _KERNEL_OVERHEAD_US[spec.kind]


def peak_share(workload: Workload, latency_us: float, spec: DeviceSpec) -> float | None:
    """Useful work per second over what the device could do at most."""
    if isinstance(workload, Gemm | Attention):
        peak = spec.peak(workload.dtype)
        return None if peak is None else workload.flops / latency_us / 1e6 / peak
    return workload.min_bytes / latency_us / 1e3 / spec.memory_gb_per_s
