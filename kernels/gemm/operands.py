"""What `matmul` takes: checked before anything is launched, and described in the words of the kernels.

Operands are stored by rows or by columns, with any leading dimension. Anything else (a step of 2 between neighbours,
rows that overlap) is refused: reading it fast needs a copy, and a copy that nobody asked for would be timed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from quantbench.kernels.features import INTERPRETER, require_architecture
from quantbench.kernels.gemm.config import TMA_ALIGN_BYTES, WHO, Matrix, Operands, largest_alignment, padded

from quantbench.errors import InputError, UnsupportedError
from quantbench.workload.ops import Gemm

#: torch's formats by name; tf32 is fp32 storage with another product
DTYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
}
OUTPUT_DTYPES = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float8_e4m3fn: torch.bfloat16,
}
#: Compute capability from which on the tensor cores have a format. Sources: NVIDIA A100 whitepaper 2020 (bf16, tf32),
#: Ada whitepaper 2022 (fp8).
FIRST_CAPABILITY = {"bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9)}


def check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, tf32: bool) -> tuple[Operands, torch.Tensor]:
    """The operands of a·b and the tensor that the result goes to (`out`, or a new one).

    a: [m, k] or [batch, m, k], b: [k, n] or [batch, k, n], same format and device. Raises InputError for what does
    not fit together and UnsupportedError for what this device cannot do.
    """
    gemm = _gemm(a, b, tf32)
    if a.device != b.device:
        raise InputError(WHO, f"a on {a.device} and b on {b.device}", "one device for both")
    stored_a, stored_b = _stored("a", a), _stored("b", b)
    layout = "".join("t" if x.transposed else "n" for x in (stored_a, stored_b))
    if layout != "tt":  # which Gemm has no word for, and the kernels do not mind
        gemm = replace(gemm, layout=layout)
    shape = (*a.shape[:-1], gemm.n)
    dtype = OUTPUT_DTYPES[a.dtype]
    if out is not None:
        _check_out(out, shape, dtype, a.device)
    _check_device(a, gemm.dtype)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    return Operands(gemm, stored_a, stored_b, _stored_in_rows(out)), out


def _check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(out.shape) != shape:
        raise InputError(WHO, f"out of shape {tuple(out.shape)}", f"{shape}")
    if out.dtype != dtype:
        raise InputError(WHO, f"out in {_short(out.dtype)}", f"{_short(dtype)}, the format of this product")
    if out.device != device:
        raise InputError(WHO, f"out on {out.device}", f"{device}, where a and b are")
    _stored_in_rows(out)


def _gemm(a: torch.Tensor, b: torch.Tensor, tf32: bool) -> Gemm:
    shapes = f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)}"
    if a.dim() != b.dim() or a.dim() not in (2, 3):
        raise InputError(WHO, shapes, "[m, k] and [k, n], or [batch, m, k] and [batch, k, n]")
    if a.shape[-1] != b.shape[-2]:
        raise InputError(WHO, shapes, f"b with k = {a.shape[-1]} rows")
    if a.dim() == 3 and a.shape[0] != b.shape[0]:
        raise InputError(WHO, shapes, "the same batch")
    if 0 in a.shape or 0 in b.shape:
        raise InputError(WHO, shapes, "sizes of at least 1")
    if a.dtype != b.dtype:
        raise InputError(WHO, f"a in {_short(a.dtype)} and b in {_short(b.dtype)}", "one format for both")
    if a.dtype not in DTYPE_NAMES:
        raise InputError(WHO, f"operands in {_short(a.dtype)}", ", ".join(map(_short, DTYPE_NAMES)))
    dtype = DTYPE_NAMES[a.dtype]
    if tf32:
        if dtype != "fp32":
            raise InputError(WHO, f"tf32 = True with operands in {_short(a.dtype)}", "operands in float32")
        dtype = "tf32"
    batch = a.shape[0] if a.dim() == 3 else 1
    return Gemm(m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], batch=batch, dtype=dtype)


def _check_device(a: torch.Tensor, dtype: str) -> None:
    if INTERPRETER:
        reason = wrong_in_interpreter(dtype)
        if reason is not None:
            raise UnsupportedError(WHO, reason, "fp16 or fp32 there")
        return
    if not a.is_cuda:
        raise UnsupportedError(
            WHO, f"operands on {a.device}", "CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"
        )
    capability = torch.cuda.get_device_capability(a.device)
    require_architecture(WHO, capability)
    missing = missing_format(dtype, capability)
    if missing is not None:
        raise UnsupportedError(WHO, missing, "a format that it has, or a newer GPU")


def wrong_in_interpreter(dtype: str) -> str | None:
    """Why triton's interpreter must not be asked for a product in this format, or None."""
    return "triton's interpreter multiplies the bit patterns of bf16" if dtype == "bf16" else None


def missing_format(dtype: str, capability: tuple[int, int]) -> str | None:
    """Why tensor cores of this compute capability do not multiply in a format, or None.

    >>> missing_format("fp8", (8, 0))
    'sm_80 has no fp8 products'
    """
    if capability >= FIRST_CAPABILITY.get(dtype, (0, 0)):
        return None
    return f"sm_{capability[0]}{capability[1]} has no {dtype} products"


def _stored(name: str, x: torch.Tensor) -> Matrix:
    rows, cols = x.shape[-2:]
    row_stride, col_stride = x.stride()[-2:]
    # The stride of a dimension of size 1 means nothing. A leading dimension of 1 is never needed, and is avoided:
    # triton makes a constant of an argument that is 1.
    if col_stride == 1 and (rows == 1 or row_stride >= max(cols, 2)):
        return _matrix(x, False, cols, row_stride if rows > 1 else padded(cols))
    if row_stride == 1 and (cols == 1 or col_stride >= rows):
        return _matrix(x, True, rows, col_stride if cols > 1 else padded(rows))
    if cols == 1 and row_stride > 1:
        return _matrix(x, False, 1, row_stride)
    if rows == 1 and col_stride > 1:
        return _matrix(x, True, 1, col_stride)
    raise InputError(WHO, f"{name} with strides {tuple(x.stride())}", "row- or column-major storage")


def _stored_in_rows(x: torch.Tensor) -> Matrix:
    rows, cols = x.shape[-2:]
    row_stride, col_stride = x.stride()[-2:]
    in_rows = (cols == 1 or col_stride == 1) and (rows == 1 or row_stride >= cols)
    batches, batch_stride = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    one_after_another = batch_stride >= (rows - 1) * row_stride + cols
    interleaved = batch_stride >= cols and row_stride >= (batches - 1) * batch_stride + cols
    if not in_rows or not (batches == 1 or one_after_another or interleaved):
        raise InputError(WHO, f"out with strides {tuple(x.stride())}", "row-major storage without overlaps")
    return _matrix(x, False, cols, row_stride if rows > 1 else padded(cols))


def _matrix(x: torch.Tensor, transposed: bool, length: int, leading: int) -> Matrix:
    batched = x.dim() == 3 and x.shape[0] > 1
    batch_stride = x.stride(0) if batched else 0
    align = largest_alignment(length, leading, batch_stride)
    aligned = all(size * x.element_size() % TMA_ALIGN_BYTES == 0 for size in (leading, batch_stride))
    descriptor = aligned and x.data_ptr() % TMA_ALIGN_BYTES == 0 and (batch_stride > 0 or not batched)
    return Matrix(transposed, leading, batch_stride, align, descriptor)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
