"""Megatron-LM's fused scale + mask + softmax, with gradients, and its launch told exactly.

    from quantbench.kernels.softmax import scaled_causal_softmax, scaled_masked_softmax, plan_forward

    y = scaled_causal_softmax(scores, 0.125)              # scores, y: [batch, heads, sq, sk]
    y = scaled_masked_softmax(scores, mask, 0.125)        # mask: [batch, 1, sq, sk], True drops

    work = plan_forward(scores, 0.125, causal=True)       # checked, compiled, allocated
    work.launch                                           # Launch: tile, grid, block, registers, blocks per SM
    work.run()                                            # the launch alone; may be captured into a CUDA graph

fp16, bf16 or fp32 in and out, fp32 inside. `kernels.py` describes what a program does. When Megatron itself uses
its fused kernel and when it falls back is `quantbench.megatron.megatron_fused_available`, to be had from here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, isfinite, log2
from typing import Any

import torch
from quantbench.kernels import launching
from quantbench.kernels.features import INTERPRETER, require_architecture
from quantbench.kernels.softmax.kernels import (
    MAX_COLS,
    softmax_backward,
    softmax_forward,
    softmax_tile,
    vector_elements,
)

from quantbench.errors import InputError, UnsupportedError
from quantbench.launch import Launch, Tile
from quantbench.megatron import megatron_fused_available
from quantbench.quantization import cdiv

__all__ = [
    "SoftmaxPlan",
    "megatron_fused_available",
    "plan_backward",
    "plan_forward",
    "scaled_causal_softmax",
    "scaled_causal_softmax_backward",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "scaled_softmax",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class SoftmaxPlan:
    """One softmax or its gradient, ready to run any number of times. out: what `run` writes."""

    out: torch.Tensor
    steps: tuple[launching.Step, ...]

    @property
    def launch(self) -> Launch:
        """The kernel as it runs; registers and what follows from them are None in the interpreter."""
        return self.steps[0].launch

    def run(self) -> None:
        """Enqueue the kernel once on the current stream."""
        launching.run(self.steps, self.out.device)


def scaled_causal_softmax(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · scores) over columns 0 … row of scores[batch, heads, sq, sk], sq = sk; zeros above the diagonal.

    What stands above the diagonal is not used, whatever it is. Differentiable.
    """
    return _Softmax.apply(scores, None, scale, True)


def scaled_masked_softmax(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · scores, masked ones set to -10000) for scores[batch, heads, sq, sk]; differentiable.

    mask: boolean [batch, 1, sq, sk] or [1, 1, sq, sk], True drops. A row that is masked whole is 1 / sk everywhere.
    """
    return _Softmax.apply(scores, mask, scale, False)


def scaled_softmax(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale · scores) over the last dimension of scores[batch, heads, sq, sk]; differentiable."""
    return _Softmax.apply(scores, None, scale, False)


def scaled_causal_softmax_backward(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of the scores from that of y = scaled_causal_softmax(scores, scale); zeros above the diagonal."""
    return _ran(plan_backward(grad, y, scale, causal=True))


def scaled_masked_softmax_backward(grad: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of the scores from that of y = scaled_masked_softmax(scores, mask, scale), or scaled_softmax."""
    return _ran(plan_backward(grad, y, scale))


def plan_forward(
    scores: torch.Tensor, scale: float, *, causal: bool = False, mask: torch.Tensor | None = None,
    out: torch.Tensor | None = None, tile: Tile | None = None,
) -> SoftmaxPlan:  # fmt: skip
    """Check, compile and allocate. tile: rows, row length and warps of a program; None takes `softmax_tile`'s.

    Raises InputError for tensors that do not fit, UnsupportedError for what the device cannot do.
    """
    who = "softmax"
    _check(who, "scores", scores, scale, causal)
    if causal and mask is not None:
        raise InputError(who, "causal = True with a mask", "one of the two")
    if mask is not None:
        _check_mask(who, mask, scores)
    out = _output(who, out, scores)
    _, heads, sq, _ = scores.shape
    shared = _shared_arguments(scores, "causal" if causal else "none" if mask is None else "full")
    arguments = {
        "x": scores, "mask": None if mask is None else mask.view(torch.uint8), "y": out,
        "rows_per_sample": heads * sq, "mask_rows_per_sample": 0 if mask is None or mask.shape[0] == 1 else sq,
        "scale_log2e": scale * log2(e),
    } | shared  # fmt: skip
    return _plan(who, softmax_forward, arguments, out, tile or softmax_tile(scores.shape[-1], scores.element_size()))


def plan_backward(
    grad: torch.Tensor, y: torch.Tensor, scale: float, *, causal: bool = False,
    out: torch.Tensor | None = None, tile: Tile | None = None,
) -> SoftmaxPlan:  # fmt: skip
    """As `plan_forward`, for scale · y · (grad - Σ grad · y). grad, y: [batch, heads, sq, sk]."""
    who = "softmax backward"
    _check(who, "y", y, scale, causal)
    _same(who, "grad", grad, "y", y)
    out = _output(who, out, y)
    shared = _shared_arguments(y, "causal" if causal else "none")
    arguments = {"dy": grad, "y": y, "dx": out, "scale": float(scale)} | shared
    if tile is None:
        tile = softmax_tile(y.shape[-1], y.element_size(), "backward")
    return _plan(who, softmax_backward, arguments, out, tile)


class _Softmax(torch.autograd.Function):
    """Keeps y, from which alone the gradient follows."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
        y = _ran(plan_forward(scores, scale, causal=causal, mask=mask))
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        # autograd hands on expanded gradients (of a sum, say); those alone are copied.
        return _ran(plan_backward(grad.contiguous(), y, ctx.scale, causal=ctx.causal)), None, None, None


def _ran(work: SoftmaxPlan) -> torch.Tensor:
    work.run()
    return work.out


def _plan(who: str, kernel: Any, arguments: dict[str, Any], out: torch.Tensor, tile: Tile) -> SoftmaxPlan:
    cols = out.shape[-1]
    if tile.block_n < cols or tile.block_n & (tile.block_n - 1) or tile.block_m & (tile.block_m - 1):
        raise InputError(who, f"tile {tile}", f"powers of two, and a block_n of at least {cols} columns")
    constants = {"ROWS": tile.block_m, "BLOCK_COLS": tile.block_n, "num_warps": tile.num_warps or 4, "num_stages": 1}
    grid = cdiv(arguments["rows_in_all"], tile.block_m)
    return SoftmaxPlan(out, (launching.step(who, kernel, grid, arguments | constants, out.device, tile),))


def _shared_arguments(x: torch.Tensor, mask: str) -> dict[str, Any]:
    rows, cols = x.numel() // x.shape[-1], x.shape[-1]
    align = vector_elements(cols, x.element_size())
    return {"rows_in_all": rows, "rows_per_head": x.shape[-2], "cols": cols, "MASK": mask, "ALIGN": align}


def _check(who: str, name: str, x: torch.Tensor, scale: float, causal: bool) -> None:
    shape = f"{name} of shape {tuple(x.shape)}"
    if x.dim() != 4 or 0 in x.shape:
        raise InputError(who, shape, "[batch, heads, sq, sk], each at least 1")
    if x.dtype not in _DTYPES:
        raise InputError(who, f"{name} in {_short(x.dtype)}", "float16, bfloat16 or float32")
    if not x.is_contiguous():
        raise InputError(who, f"{name} with strides {tuple(x.stride())}", "a contiguous tensor")
    if x.shape[-1] > MAX_COLS:
        raise InputError(who, shape, f"at most {MAX_COLS} columns, which a program holds at a time")
    if x.numel() // x.shape[-1] > _MAX_ROWS:
        raise InputError(who, shape, f"at most {_MAX_ROWS} rows in all")
    if causal and x.shape[-1] != x.shape[-2]:
        raise InputError(who, f"causal with {shape}", "sq equal to sk")
    if not isfinite(scale) or scale <= 0:
        raise InputError(who, f"scale = {scale!r}", "a finite number above 0")
    if INTERPRETER:
        return
    if not x.is_cuda:
        raise UnsupportedError(
            who, f"{name} on {x.device}", "CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported"
        )
    capability = torch.cuda.get_device_capability(x.device)
    require_architecture(who, capability)
    reason = missing_bf16(_short(x.dtype), capability)
    if reason is not None:
        raise UnsupportedError(who, reason, "float16 or float32 there")


def missing_bf16(dtype: str, capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability cannot take a format, or None. Source: NVIDIA A100 whitepaper 2020.

    >>> missing_bf16("bfloat16", (7, 0))
    'sm_70 has no bfloat16'
    """
    if dtype in ("bf16", "bfloat16") and capability < (8, 0):
        return f"sm_{capability[0]}{capability[1]} has no bfloat16"
    return None


def _check_mask(who: str, mask: torch.Tensor, scores: torch.Tensor) -> None:
    samples, _, sq, sk = scores.shape
    if tuple(mask.shape) not in ((samples, 1, sq, sk), (1, 1, sq, sk)):
        raise InputError(who, f"mask of shape {tuple(mask.shape)}", f"{(samples, 1, sq, sk)} or {(1, 1, sq, sk)}")
    if mask.dtype != torch.bool:
        raise InputError(who, f"mask in {_short(mask.dtype)}", "bool, True where a score is dropped")
    if not mask.is_contiguous():
        raise InputError(who, f"mask with strides {tuple(mask.stride())}", "a contiguous tensor")
    if mask.device != scores.device:
        raise InputError(who, f"mask on {mask.device}", f"{scores.device}, where the scores are")


def _output(who: str, out: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty_like(like)
    _same(who, "out", out, "the scores", like)
    return out


def _same(who: str, name: str, x: torch.Tensor, other: str, like: torch.Tensor) -> None:
    if x.shape != like.shape:
        raise InputError(who, f"{name} of shape {tuple(x.shape)}", f"{tuple(like.shape)}, that of {other}")
    if x.dtype != like.dtype:
        raise InputError(who, f"{name} in {_short(x.dtype)}", f"{_short(like.dtype)}, the format of {other}")
    if not x.is_contiguous():
        raise InputError(who, f"{name} with strides {tuple(x.stride())}", "a contiguous tensor")
    if x.device != like.device:
        raise InputError(who, f"{name} on {x.device}", f"{like.device}, where {other} is")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
