"""What attention takes: checked before anything is launched, and described in the words of the kernels.

Any strides are taken as long as the elements of a row (head_dim) lie side by side: [batch, heads, seq, head_dim] and
[batch, seq, heads, head_dim] seen as the former alike. Anything else is refused: reading it fast needs a copy, and a
copy that nobody asked for would be timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from quantbench.kernels.attention.compile import aligned, box
from quantbench.kernels.attention.menu import MAX_HEAD_DIM, MIN_HEAD_DIM, Loads, split_head_dim
from quantbench.kernels.features import HAS_TENSOR_DESCRIPTOR, INTERPRETER

from quantbench.errors import InputError, UnsupportedError
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.ops import Attention

WHO = "attention"
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

_SMALLEST_CAPABILITY = (8, 0)
_TMA_ALIGN_BYTES = 16  # of the first element and of every stride but the last. Source: cuTensorMapEncodeTiled


@dataclass(frozen=True)
class Checked:
    """A checked problem: its size, its scale, and how its tensors may be loaded.

    align: elements that a thread can move at a time. descriptors: whether TMA descriptors can address all of them on
    a device that has them.
    """

    work: Attention
    scale: float
    align: int
    descriptors: bool

    def loads(self, descriptors: bool) -> Loads:
        """How rows arrive, by descriptors or not."""
        return Loads(self.align * DTYPES[self.work.dtype].element_bytes, descriptors)


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, **others: torch.Tensor
) -> Checked:
    """The problem that q[batch, heads, seq_q, head_dim] and k, v[batch, kv_heads, seq_k, head_dim] pose.

    others: tensors of q's shape that are loaded beside them, by name. Raises InputError for what does not fit together
    and UnsupportedError for what this device cannot do.
    """
    work = _work(q, k, v, causal)
    for name, x in others.items():
        if x.shape != q.shape:
            raise InputError(WHO, f"{name} of shape {tuple(x.shape)}", f"{tuple(q.shape)}, that of q")
    tensors = {"q": q, "k": k, "v": v} | others
    for name, x in tensors.items():
        if x.dtype != q.dtype:
            raise InputError(WHO, f"{name} in {_short(x.dtype)} and q in {_short(q.dtype)}", "one format for all")
        if x.device != q.device:
            raise InputError(WHO, f"{name} on {x.device} and q on {q.device}", "one device for all")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise InputError(WHO, f"{name} with strides {tuple(x.stride())}", "the elements of a row side by side")
    if scale is None:
        scale = work.head_dim**-0.5
    if not isfinite(scale) or scale <= 0:
        raise InputError(WHO, f"scale = {scale!r}", "a finite number above 0")
    _check_device(q, work)
    strides = [stride for x in tensors.values() for stride in _strides(x)]
    return Checked(
        work=work,
        scale=float(scale),
        align=aligned(work.dtype, work.head_dim, *strides),
        descriptors=HAS_TENSOR_DESCRIPTOR and work.dtype != "fp32" and all(map(_describable, tensors.values())),
    )


def strides(name: str, x: torch.Tensor, descriptors: bool) -> dict[str, int]:
    """The kernels' stride arguments for a tensor. By descriptors none is used, and the row stride, which is compiled
    in, is left out of account: one kernel serves all."""
    batch, head, row = _strides(x)
    row_stride = 0 if descriptors else row
    return {f"{name}_batch_stride": batch, f"{name}_head_stride": head, f"{name.upper()}_ROW_STRIDE": row_stride}


def sources(tensors: dict[str, torch.Tensor], rows: dict[str, int], descriptors: bool) -> dict[str, Any]:
    """The kernels' arguments `q`, `q_tail`, …: tensors, or descriptors of boxes of so many rows each."""
    arguments: dict[str, Any] = {}
    for name, x in tensors.items():
        main, tail = split_head_dim(x.shape[-1])
        arguments[name] = _descriptor(x, rows[name], main) if descriptors else x
        arguments[f"{name}_tail"] = _descriptor(x, rows[name], tail) if descriptors and tail else None
    return arguments


def contiguous_like(who: str, out: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """`out` if it can hold a result of `like`'s shape and format, or a new tensor."""
    if out is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if out.shape != like.shape or out.dtype != like.dtype or out.device != like.device:
        raise InputError(
            WHO, f"{who} of shape {tuple(out.shape)} in {_short(out.dtype)} on {out.device}",
            f"{tuple(like.shape)} in {_short(like.dtype)} on {like.device}",
        )  # fmt: skip
    if not out.is_contiguous():
        raise InputError(WHO, f"{who} with strides {tuple(out.stride())}", "a contiguous tensor")
    return out


def _work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Attention:
    shapes = f"q of shape {tuple(q.shape)}, k of {tuple(k.shape)}, v of {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise InputError(WHO, shapes, "[batch, heads, seq_q, head_dim] and twice [batch, kv_heads, seq_k, head_dim]")
    if 0 in (*q.shape, *k.shape):
        raise InputError(WHO, shapes, "sizes of at least 1")
    if k.shape != v.shape:
        raise InputError(WHO, shapes, "k and v of one shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(WHO, shapes, "the same batch and head_dim")
    if not MIN_HEAD_DIM <= q.shape[3] <= MAX_HEAD_DIM:
        raise InputError(WHO, f"head_dim = {q.shape[3]}", f"from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    if q.dtype not in DTYPE_NAMES:
        raise InputError(WHO, f"q in {_short(q.dtype)}", "float16, bfloat16 or float32")
    return Attention(  # which also checks that kv_heads divides heads, and causal's seq_q == seq_k
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], seq_q=q.shape[2], seq_k=k.shape[2],
        head_dim=q.shape[3], dtype=DTYPE_NAMES[q.dtype], causal=causal,
    )  # fmt: skip


def _check_device(q: torch.Tensor, work: Attention) -> None:
    if INTERPRETER:
        reason = wrong_in_interpreter(work.dtype)
        if reason is not None:
            raise UnsupportedError(WHO, reason, "fp16 or fp32 there")
        return
    if not q.is_cuda:
        raise UnsupportedError(
            WHO, f"q on {q.device}", "CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"
        )
    reason = too_old(torch.cuda.get_device_capability(q.device))
    if reason is not None:
        raise UnsupportedError(WHO, reason, "a GPU of compute capability 8.0 or newer")


def wrong_in_interpreter(dtype: str) -> str | None:
    """Why triton's interpreter must not be asked for attention in this format, or None."""
    return "triton's interpreter multiplies the bit patterns of bf16" if dtype == "bf16" else None


def too_old(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability has no attention kernel, or None. Found by compiling: triton 3.2, the last
    with tensor-core code for sm_70 and sm_75, aborts on the two products in a row.

    >>> too_old((7, 0))
    'triton compiles no attention for sm_70'
    """
    if capability < _SMALLEST_CAPABILITY:
        return f"triton compiles no attention for sm_{capability[0]}{capability[1]}"
    return None


def _strides(x: torch.Tensor) -> list[int]:
    """Of batch, head and row. The stride of a dimension of size 1 means nothing, and is given as head_dim: an argument
    of 1 would be made a constant."""
    head_dim = x.shape[-1]
    return [stride if size > 1 else head_dim for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]


def _describable(x: torch.Tensor) -> bool:
    steps = [stride * x.element_size() for stride in _strides(x)]
    return x.data_ptr() % _TMA_ALIGN_BYTES == 0 and all(step > 0 and step % _TMA_ALIGN_BYTES == 0 for step in steps)


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [*_strides(x), 1], box(rows, columns))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
