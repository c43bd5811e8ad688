"""How the operands of a product are stored, in the words of the kernels. Pure: no tensors here.

A matrix is stored row-major or transposed (column-major), with a leading dimension in elements, as in BLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantbench.workload.dtypes import DTYPES
from quantbench.workload.gemm import Gemm

#: who speaks in error messages
WHO = "matmul"

_MAX_ALIGN = 16  # elements; more does not make loads wider, whatever the format
#: Of the first element and of every stride but the last. Source: cuTensorMapEncodeTiled, CUDA driver API.
TMA_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Matrix:
    """How one operand is stored. All sizes in elements.

    transposed: stored cols × rows. leading: distance between stored rows. batch_stride: between products (0: all
    products share this operand, or there is only one). align: largest power of two up to 16 that divides the length
    of a stored row, the leading dimension and the batch stride. descriptor: whether a TMA descriptor can address it.
    """

    transposed: bool
    leading: int
    batch_stride: int
    align: int
    descriptor: bool


@dataclass(frozen=True)
class Operands:
    """A checked product: its size, and how a, b and c are stored."""

    gemm: Gemm
    a: Matrix
    b: Matrix
    c: Matrix


def align_bytes(operands: Operands) -> int:
    """Bytes that every stored row of a and b begins at a multiple of, up to 16."""
    element_bytes = DTYPES[operands.gemm.dtype].element_bytes
    return min(16, min(operands.a.align, operands.b.align) * element_bytes)


def largest_alignment(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all sizes; 0 is divided by all.

    >>> largest_alignment(24, 0, 64)
    8
    """
    return min([_MAX_ALIGN, *(size & -size for size in sizes if size)])


def padded(size: int) -> int:
    """The next multiple of 16: a leading dimension where none is ever used, in a form that kernels like."""
    return -(-size // _MAX_ALIGN) * _MAX_ALIGN


def contiguous(gemm: Gemm) -> Operands:
    """Operands of a product whose tensors are contiguous and begin at multiples of 16 bytes, as fresh ones do."""
    a_transposed, b_transposed = (letter == "t" for letter in gemm.layout)
    return Operands(
        gemm,
        _contiguous(gemm.m, gemm.k, a_transposed, gemm.batch, gemm.dtype),
        _contiguous(gemm.k, gemm.n, b_transposed, gemm.batch, gemm.dtype),
        _contiguous(gemm.m, gemm.n, False, gemm.batch, gemm.output_dtype),
    )


def _contiguous(rows: int, cols: int, transposed: bool, batch: int, dtype: str) -> Matrix:
    leading = rows if transposed else cols
    batch_stride = rows * cols if batch > 1 else 0
    sizes = (leading, batch_stride)
    descriptor = all(size * DTYPES[dtype].element_bytes % TMA_ALIGN_BYTES == 0 for size in sizes)
    return Matrix(transposed, leading, batch_stride, largest_alignment(*sizes), descriptor)
