"""How many blocks of a kernel are resident on one SM: NVIDIA's occupancy rule, as a pure function.

Limits: CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability" (warps, blocks, registers
and shared memory per SM). Allocation rules: `cuda_occupancy.h` of the CUDA toolkit 12.6 (registers go to whole warps,
256 at a time, in four partitions; shared memory goes out in 128 or 256 bytes, and from compute capability 8.0 on the
driver keeps 1 KiB of it per block). What is left out is what a profiler does not show: barriers, and clusters that
need room for several blocks at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.errors import require_int
from quantbench.quantization import cdiv

WARP_THREADS = 32
_KIB = 1024
_REGISTERS_PER_SM = 65_536  # every compute capability from 7.0 on
_REGISTER_UNIT_PER_WARP = 256
_PARTITIONS = 4
_RESERVED_SMEM_BYTES = 1 * _KIB  # per block, from compute capability 8.0 on


@dataclass(frozen=True)
class SmLimits:
    """What one SM can hold at a time. smem_bytes: the largest carve-out of shared memory."""

    warps: int
    blocks: int
    smem_bytes: int


#: by compute capability, from the guide's table
SM_LIMITS: dict[tuple[int, int], SmLimits] = {
    (7, 0): SmLimits(64, 32, 96 * _KIB),
    (7, 5): SmLimits(32, 16, 64 * _KIB),
    (8, 0): SmLimits(64, 32, 164 * _KIB),
    (8, 6): SmLimits(48, 16, 100 * _KIB),
    (8, 7): SmLimits(48, 16, 164 * _KIB),
    (8, 9): SmLimits(48, 24, 100 * _KIB),
    (9, 0): SmLimits(64, 32, 228 * _KIB),
    (10, 0): SmLimits(64, 32, 228 * _KIB),
    (10, 3): SmLimits(64, 32, 228 * _KIB),
    (12, 0): SmLimits(48, 24, 100 * _KIB),
    (12, 1): SmLimits(48, 24, 100 * _KIB),
}


def resident_blocks(
    compute_capability: tuple[int, int], *, threads: int, registers: int, shared_memory_bytes: int
) -> int | None:
    """Blocks of one kernel that one SM holds at a time; 0 where not even one fits, None for an unknown device.

    threads: per block. registers: per thread. shared_memory_bytes: per block, static and dynamic together.

    >>> resident_blocks((8, 0), threads=256, registers=128, shared_memory_bytes=49_152)
    2
    """
    limits = SM_LIMITS.get(compute_capability)
    if limits is None:
        return None
    require_int("resident_blocks", "threads", threads, high=1024)
    require_int("resident_blocks", "registers", registers, low=0, high=256)
    require_int("resident_blocks", "shared_memory_bytes", shared_memory_bytes, low=0)
    warps = cdiv(threads, WARP_THREADS)
    return min(
        limits.blocks,
        limits.warps // warps,
        _by_registers(warps, registers),
        _by_shared_memory(compute_capability, limits.smem_bytes, shared_memory_bytes),
    )


def _by_registers(warps: int, registers: int) -> int:
    if registers == 0:
        return _REGISTERS_PER_SM
    per_warp = cdiv(registers * WARP_THREADS, _REGISTER_UNIT_PER_WARP) * _REGISTER_UNIT_PER_WARP
    # The launch check pretends that a block fills all partitions evenly.
    if per_warp * cdiv(warps, _PARTITIONS) * _PARTITIONS > _REGISTERS_PER_SM:
        return 0
    warps_per_sm = _REGISTERS_PER_SM // _PARTITIONS // per_warp * _PARTITIONS
    return warps_per_sm // warps


def _by_shared_memory(compute_capability: tuple[int, int], smem_bytes: int, shared_memory_bytes: int) -> int:
    ampere_on = compute_capability >= (8, 0)
    unit = 128 if ampere_on else 256
    used = shared_memory_bytes + (_RESERVED_SMEM_BYTES if ampere_on else 0)
    if used == 0:
        return smem_bytes
    return smem_bytes // (cdiv(used, unit) * unit)
