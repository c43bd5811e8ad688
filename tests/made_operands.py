"""Stored operands of GEMMs, for tests of how kernels are configured."""

from quantbench.kernels.gemm.config import Matrix, Operands, matrix

from quantbench.workload import Gemm
from quantbench.workload.dtypes import DTYPES


def contiguous(gemm: Gemm) -> Operands:
    """Builds `Operands` for contiguous tensors aligned to 16 bytes, as newly allocated tensors
    are.
    """

    def stored(rows: int, cols: int, transposed: bool, dtype: str) -> Matrix:
        length = rows if transposed else cols
        batch_stride = rows * cols if gemm.batch > 1 else 0
        return matrix(transposed, length, length, batch_stride, DTYPES[dtype].element_bytes)

    a = stored(gemm.m, gemm.k, gemm.layout[0] == "t", gemm.dtype)
    b = stored(gemm.k, gemm.n, gemm.layout[1] == "t", gemm.dtype)
    return Operands(gemm, a, b, stored(gemm.m, gemm.n, False, gemm.output_dtype))
