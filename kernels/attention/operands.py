"""Validates the operands of attention and builds the kernels' arguments.

Any strides are allowed if the elements of a row (head_dim) are contiguous: [batch, heads, seq,
head_dim], or [batch, seq, heads, head_dim] transposed to this order. Other storage is refused,
because reading it fast needs a copy, and an implicit copy would be timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from quantbench.kernels import launching
from quantbench.kernels.attention.menu import MAX_HEAD_DIM, MIN_HEAD_DIM, Loads, split_head_dim
from quantbench.kernels.launching import MAX_REGISTERS, require_like, short, widest

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.quantization import VECTOR_BYTES
from quantbench.workload.dtypes import DTYPES, dtype_name
from quantbench.workload.ops import Attention

WHO = "attention"

_SMALLEST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Checked:
    """Validated attention problem.

    work: size of the problem.
    scale: factor on the scores.
    align: number of elements that a thread can load at a time, a power of two.
    descriptors: whether TMA descriptors can address all tensors on a device that has them.
    """

    work: Attention
    scale: float
    align: int
    descriptors: bool

    def loads(self, descriptors: bool) -> Loads:
        """Returns how rows are loaded, with or without descriptors."""
        return Loads(self.align * DTYPES[self.work.dtype].element_bytes, descriptors)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    **others: torch.Tensor,
) -> Checked:
    """Validates q[batch, heads, seq_q, head_dim] and k, v[batch, kv_heads, seq_k, head_dim].

    scale: factor on the scores; None for 1/√head_dim.
    others: further tensors to load, by name. They have the shape of q.

    Raises InputError for incompatible tensors, and UnsupportedError for a dtype, GPU or Triton
    version without support.
    """
    work = _work(q, k, v, causal)
    tensors = {"q": q, "k": k, "v": v} | others
    for name, x in tensors.items():
        shape = q.shape if name in others else x.shape
        require_like(WHO, name, x, shape, q.dtype, q.device)
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise InputError(
                WHO,
                f"{name} with strides {tuple(x.stride())}",
                "the elements of a row side by side",
            )
    if scale is None:
        scale = work.head_dim**-0.5
    if not isfinite(scale) or scale <= 0:
        raise InputError(WHO, f"scale = {scale!r}", "a finite number above 0")
    launching.require_support(WHO, "q", q, work.dtype, too_old)
    align = widest(VECTOR_BYTES // DTYPES[work.dtype].element_bytes, work.head_dim)
    descriptors = launching.HAS_TENSOR_DESCRIPTOR and work.dtype != "fp32"
    for x in tensors.values():
        align = widest(align, *_strides(x))
        descriptors = descriptors and _describable(x)
    return Checked(work, float(scale), align, descriptors)


def strides(name: str, x: torch.Tensor, descriptors: bool) -> dict[str, int]:
    """Returns the kernels' stride arguments for a tensor.

    Descriptors use no strides. The row stride, a compile-time constant, is then 0, so that one
    kernel serves all strides.
    """
    batch, head, row = _strides(x)
    return {
        f"{name}_batch_stride": batch,
        f"{name}_head_stride": head,
        f"{name.upper()}_ROW_STRIDE": 0 if descriptors else row,
    }


def arguments(
    tensors: dict[str, torch.Tensor], checked: Checked, tile: Tile, descriptors: bool
) -> dict[str, Any]:
    """Returns the arguments that the kernels share.

    The shared arguments are the inputs and their strides, the sizes, the parts of head_dim, and the
    tile.

    tensors: input tensors by argument name. They are passed as pointers, or as descriptors of boxes
        with block_n rows for k and v, and block_m rows for the other tensors.
    """
    work = checked.work
    given: dict[str, Any] = {
        "seq_q": work.seq_q,
        "seq_k": work.seq_k,
        "CAUSAL": work.causal,
        "DESCRIPTORS": descriptors,
        # With ieee, fp32 is multiplied without tensor cores. The value has no effect on 16 bits.
        "PRECISION": "ieee" if work.dtype == "fp32" else "tf32",
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    given |= parts(checked) | backend_options(tile, work.dtype, checked.align, work.causal)
    for name, x in tensors.items():
        given |= strides(name, x, descriptors) | {name: x, f"{name}_tail": None}
        if descriptors:
            rows = tile.block_n if name in ("k", "v") else tile.block_m
            given[name] = _descriptor(x, rows, given["MAIN"])
            if given["TAIL"]:
                given[f"{name}_tail"] = _descriptor(x, rows, given["TAIL"])
    return given


def parts(checked: Checked) -> dict[str, int]:
    """Returns the arguments that describe how the kernels hold a row of head_dim elements."""
    main, tail = split_head_dim(checked.work.head_dim)
    return {"HEAD_DIM": checked.work.head_dim, "MAIN": main, "TAIL": tail, "ALIGN": checked.align}


def backend_options(
    tile: Tile, dtype: str = "bf16", align: int = 8, causal: bool = True
) -> dict[str, int]:
    """Returns num_warps, num_stages and, in one case, the hardware's register limit.

    The case is non-causal attention with loads under 16 bytes and up to 8 warps. Without an
    explicit limit, ptxas gives a thread half as many registers in this case, to fit a second block
    onto the SM, and spills. In other cases an explicit limit makes the code slower.

    align: number of elements that a thread can load at a time.
    """
    options = {"num_warps": tile.num_warps or 4, "num_stages": tile.stages or 2}
    narrow = align * DTYPES[dtype].element_bytes < VECTOR_BYTES
    if narrow and not causal and options["num_warps"] <= 8:
        options["maxnreg"] = MAX_REGISTERS
    return options


def _work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Attention:
    """Returns the size of the problem. Raises InputError for incompatible tensors."""
    shapes = f"q of shape {tuple(q.shape)}, k of {tuple(k.shape)}, v of {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(
            WHO,
            shapes,
            "[batch, heads, seq_q, head_dim] and twice [batch, kv_heads, seq_k, head_dim]",
        )
    if 0 in (*q.shape, *k.shape):
        raise InputError(WHO, shapes, "sizes of at least 1")
    if k.shape != v.shape:
        raise InputError(WHO, shapes, "k and v of one shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(WHO, shapes, "the same batch and head_dim")
    if not MIN_HEAD_DIM <= q.shape[3] <= MAX_HEAD_DIM:
        raise InputError(WHO, f"head_dim = {q.shape[3]}", f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise InputError(WHO, f"q in {short(q.dtype)}", "float16, bfloat16 or float32")
    return Attention(  # which also checks that kv_heads divides heads, and seq_q == seq_k if causal
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        seq_q=q.shape[2],
        seq_k=k.shape[2],
        head_dim=q.shape[3],
        dtype=dtype_name(q.dtype),
        causal=causal,
    )


def too_old(capability: tuple[int, int]) -> str | None:
    """Returns why a GPU of this compute capability has no attention kernel, or None.

    The limit was found by compiling: Triton 3.2, the last version with tensor-core code for sm_70
    and sm_75, aborts if one tl.dot reads the result of another.

    >>> too_old((7, 0))
    'triton compiles no attention for sm_70'
    """
    if capability < _SMALLEST_CAPABILITY:
        return f"triton compiles no attention for sm_{capability[0]}{capability[1]}"
    return None


def _strides(x: torch.Tensor) -> list[int]:
    """Returns the strides of batch, head and row in elements.

    The stride of a dimension of size 1 has no effect and could be 1, which Triton would compile as
    a constant. It is replaced by head_dim.
    """
    strides = list(x.stride()[:3])
    for dimension in range(3):
        if x.shape[dimension] == 1:
            strides[dimension] = x.shape[-1]
    return strides


def _describable(x: torch.Tensor) -> bool:
    """Returns whether a TMA descriptor can address x."""
    strides = _strides(x)
    bytes_apart = [x.data_ptr(), *(stride * x.element_size() for stride in strides)]
    return min(strides) > 0 and not any(n % launching.TMA_ALIGN_BYTES for n in bytes_apart)


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> Any:
    """Returns a TMA descriptor of x with boxes of rows × columns of one head."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [*_strides(x), 1], [1, 1, rows, columns])
