"""A smaller workload of the same kind, for checking results: cheap to compute in float64, and ragged where the
original is.

Sizes shrink to a base plus the remainder of the original, so that what decides about alignment, masking and partial
tiles stays: divisibility by any power of two up to the modulus. Formats, layouts, masks, head sizes, and the ratio
of query to key heads stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quantbench.workload import Attention, Gemm, Softmax, Workload


@dataclass(frozen=True)
class Sizes:
    """How far to shrink. Each is a base and a modulus: sizes come out between base and base + modulus."""

    gemm: tuple[int, int]
    rows: tuple[int, int]
    batch: tuple[int, int] = (16, 16)  # Megatron's fused softmax asks for batch % 8


# Float64 is slow on one CPU core, and on GPUs without it; these keep a reference under 0.3 s there.
_SIZES = {"cpu": Sizes(gemm=(192, 128), rows=(128, 64)), "cuda": Sizes(gemm=(1024, 256), rows=(512, 128))}


def stand_in(workload: Workload, device_kind: str) -> Workload:
    """The workload to check in place of `workload`; itself where it is small enough.

    >>> str(stand_in(Gemm(m=4100, n=4096, k=16384), "cpu"))
    'gemm 260×256×256 bf16 nn'
    """
    sizes = _SIZES[device_kind]
    if isinstance(workload, Gemm):
        m, n, k = (_shrink(size, sizes.gemm) for size in (workload.m, workload.n, workload.k))
        return replace(workload, m=m, n=n, k=k, batch=min(workload.batch, 3))
    if isinstance(workload, Softmax):
        rows, cols = (_shrink(size, sizes.rows) for size in (workload.rows, workload.cols))
        batch, mask_batch = _shrink_batch(workload.batch, workload.mask_batch, sizes.batch)
        return replace(workload, batch=batch, mask_batch=mask_batch, rows=rows, cols=cols)
    if isinstance(workload, Attention):
        seq_q, seq_k = (_shrink(size, sizes.rows) for size in (workload.seq_q, workload.seq_k))
        kv_heads = min(workload.kv_heads, 2)
        heads = kv_heads * (workload.heads // workload.kv_heads)
        return replace(workload, batch=min(workload.batch, 2), heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k)
    return workload


def _shrink(size: int, base_and_modulus: tuple[int, int]) -> int:
    base, modulus = base_and_modulus
    return size if size <= base else base + (size - base) % modulus


def _shrink_batch(batch: int, mask_batch: int, base_and_modulus: tuple[int, int]) -> tuple[int, int]:
    """A smaller batch with the same remainder, and samples that divide it: several where there were several."""
    smallest, modulus = _shrink(batch, base_and_modulus), base_and_modulus[1]
    for smaller in range(smallest, batch, modulus):
        for samples in range(2, mask_batch + 1):
            if smaller % samples == 0:
                return smaller, samples
    return (smallest, 1) if mask_batch == 1 else (batch, mask_batch)
