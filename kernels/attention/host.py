"""Runs flash attention, forward and backward, with a chosen tile, and reports the exact launch.

    o = attention(q, k, v, causal=True)                     # differentiable
    work = plan_forward(q, k, v, tile=Tile(128, 128, stages=2, num_warps=8), schedule="overlapped")

q is [batch, heads, seq_q, head_dim]. k and v are [batch, kv_heads, seq_k, head_dim], where kv_heads
divides heads (grouped-query attention). fp16 and bf16 use tensor cores, fp32 does not, and sums are
in fp32. head_dim is any number from 8 to 256.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import e, log2
from typing import Any

import torch
from quantbench.kernels.attention.backward import (
    attention_backward_kv,
    attention_backward_q,
    attention_delta,
)
from quantbench.kernels.attention.forward import attention_forward
from quantbench.kernels.attention.menu import (
    SCHEDULES,
    WITH_DESCRIPTORS,
    Setting,
    architecture,
    backward_tiles,
    forward_menu,
)
from quantbench.kernels.attention.operands import (
    WHO,
    Checked,
    arguments,
    backend_options,
    check,
    parts,
    strides,
)
from quantbench.kernels.launching import Gpu, Plan, fastest, gpu_of, result, step

from quantbench.errors import InputError, require_choice
from quantbench.launch import Launch, Tile
from quantbench.quantization import cdiv
from quantbench.workload.dtypes import DTYPES

#: Device that the interpreter simulates. It is a Hopper GPU, so that descriptors and the overlapped
#: schedule are interpreted too.
_INTERPRETED = Gpu((9, 0), sm_count=4, l2_bytes=2**20)
_SMALLEST_BLOCK = 16  # smallest side that tl.dot accepts
# A program of the kernel for delta takes block_m whole rows. block_n has no effect.
_DELTA_TILE = Tile(64, 16, num_warps=4, stages=1)


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """Forward or backward pass, ready to run any number of times.

    outputs: (o, lse) for forward, where lse is log₂ Σ exp of each row's scores in fp32; (dq, dk,
        dv) for backward.
    setting: tile and schedule of forward; None for backward.
    """

    setting: Setting | None = None

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Launches of one run, in order. The interpreter gives no registers and no occupancy."""
        return tuple(each.launch for each in self.steps)

    @property
    def launch(self) -> Launch:
        """Launch of the kernel that does most of the work.

        That is the only launch of a forward pass, or the launch of a backward pass that computes
        dk and dv.
        """
        return self.launches[0] if self.setting is not None else self.launches[1]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    tile: Tile | None = None,
    schedule: str | None = None,
    autotune: bool = False,
) -> torch.Tensor:
    """Computes softmax(q·kᵀ · scale)·v; the result is differentiable.

    scale: 1/√head_dim by default.

    The other arguments and the errors are those of `plan_forward`.
    """
    return _Attention.apply(q, k, v, causal, scale, tile, schedule, autotune)


def plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    tile: Tile | None = None,
    schedule: str | None = None,
    autotune: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    operands: str = "auto",
) -> AttentionPlan:
    """Checks the operands, chooses and compiles the forward kernel, and allocates its outputs.

    scale: factor on the scores, 1/√head_dim by default.
    tile: block_m rows of q, block_n rows of k and v, stages and num_warps. Fields that are None
        come from the menu.
    schedule: `plain` or `overlapped`. The default is the schedule of the menu's nearest entry.
    autotune: how an entry of the menu is selected if neither tile nor schedule is given. True times
        all entries, once per process for each problem size, and selects the fastest. False selects
        the first entry.
    out, lse: tensors for the results; None allocates them.
    operands: how the kernel loads q, k and v: `pointers`, `descriptors` (TMA) or `auto`.

    Raises InputError for invalid operands and tiles, and UnsupportedError for a dtype, GPU or
    Triton version without support.
    """
    checked = check(q, k, v, causal, scale)
    work = checked.work
    gpu = gpu_of(q, _INTERPRETED)
    descriptors = _by_descriptors(checked, gpu.capability, operands)
    out = result(WHO, "out", out, q.shape, q.dtype, q.device)
    lse = result(WHO, "lse", lse, q.shape[:-1], torch.float32, q.device)
    menu = forward_menu(
        architecture(gpu.capability),
        work.head_dim,
        checked.loads(descriptors),
        fp32=work.dtype == "fp32",
    )

    def build(setting: Setting) -> AttentionPlan:
        given = forward_arguments(q, k, v, out, lse, checked, setting, descriptors, gpu.l2_bytes)
        grid = cdiv(work.seq_q, setting.tile.block_m) * work.batch * work.heads
        only = step(WHO, attention_forward, grid, given, q.device, setting.tile)
        return AttentionPlan((out, lse), (only,), setting)

    if tile is not None or schedule is not None:
        return build(_completed(tile, schedule, menu, descriptors, work.dtype))
    if not autotune:
        return build(menu[0])
    return build(fastest(WHO, build, menu, (work, descriptors, q.device)))


def plan_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    kv_tile: Tile | None = None,
    q_tile: Tile | None = None,
    operands: str = "auto",
) -> AttentionPlan:
    """Checks the operands, and compiles the kernels for the gradients of q, k and v.

    o, lse: outputs of forward.
    grad: gradient of o.
    kv_tile: tile of the kernel that computes dk and dv; None for the menu's.
    q_tile: tile of the kernel that computes dq; None for the menu's.

    The other arguments and the errors are those of `plan_forward`.
    """
    checked = check(q, k, v, causal, scale, o=o, grad=grad)
    work = checked.work
    result(WHO, "lse", lse, q.shape[:-1], torch.float32, q.device)
    capability = gpu_of(q, _INTERPRETED).capability
    descriptors = _by_descriptors(checked, capability, operands)
    defaults = backward_tiles(
        architecture(capability),
        work.head_dim,
        checked.loads(descriptors),
        fp32=work.dtype == "fp32",
    )
    kv_tile = kv_tile or defaults[0]
    q_tile = q_tile or defaults[1]
    delta = torch.empty_like(lse)  # [batch, heads, seq_q]
    gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for_delta = delta_arguments(o, grad, delta, checked)
    for_kv, for_q = backward_arguments(
        q, k, v, grad, lse, delta, gradients, checked, kv_tile, q_tile, descriptors
    )
    delta_blocks = cdiv(work.seq_q, _DELTA_TILE.block_m) * work.batch * work.heads
    kv_blocks = cdiv(work.seq_k, kv_tile.block_n) * work.batch * work.kv_heads
    q_blocks = cdiv(work.seq_q, q_tile.block_m) * work.batch * work.heads
    steps = (
        step(WHO, attention_delta, delta_blocks, for_delta, q.device, _DELTA_TILE),
        step(WHO, attention_backward_kv, kv_blocks, for_kv, q.device, kv_tile),
        step(WHO, attention_backward_q, q_blocks, for_q, q.device, q_tile),
    )
    return AttentionPlan(gradients, steps)


class _Attention(torch.autograd.Function):
    """Autograd function whose backward pass recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        scale: float | None,
        tile: Tile | None,
        schedule: str | None,
        autotune: bool,
    ) -> torch.Tensor:
        work = plan_forward(
            q, k, v, causal=causal, scale=scale, tile=tile, schedule=schedule, autotune=autotune
        )
        work.run()
        o, lse = work.outputs
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        # autograd may pass an expanded gradient, such as the gradient of a sum. Only such a
        # gradient is copied.
        work = plan_backward(q, k, v, o, lse, grad.contiguous(), causal=ctx.causal, scale=ctx.scale)
        work.run()
        return *work.outputs, None, None, None, None, None


def heads_side_by_side(checked: Checked, l2_bytes: int) -> int:
    """Returns the number of query heads whose programs run together.

    The k and v of these heads fill at most half of the L2 cache; the other half is for q, o and
    other data. Even if less than one kv head fits, the query heads that share one kv head run
    together.
    """
    work = checked.work
    kv_bytes = 2 * work.seq_k * work.head_dim * DTYPES[work.dtype].element_bytes
    kv_heads = max(1, l2_bytes // 2 // kv_bytes)
    return min(work.batch * work.heads, kv_heads * (work.heads // work.kv_heads))


def forward_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    checked: Checked,
    setting: Setting,
    descriptors: bool,
    l2_bytes: int,
) -> dict[str, Any]:
    """Returns the arguments of the forward kernel."""
    work = checked.work
    return (
        arguments({"q": q, "k": k, "v": v}, checked, setting.tile, descriptors)
        | strides("o", out, False)
        | {
            "o": out,
            "lse": lse,
            "all_heads": work.batch * work.heads,
            "heads": work.heads,
            "kv_group": work.heads // work.kv_heads,
            "side_by_side": heads_side_by_side(checked, l2_bytes),
            "scale_log2e": checked.scale * log2(e),
            "EVEN_K": work.seq_k % setting.tile.block_n == 0,
            "OVERLAP": setting.schedule == "overlapped",
        }
    )


def delta_arguments(
    o: torch.Tensor, grad: torch.Tensor, delta: torch.Tensor, checked: Checked
) -> dict[str, Any]:
    """Returns the arguments of the kernel that computes delta."""
    work = checked.work
    return (
        {
            "o": o,
            "do": grad,
            "delta": delta,
            "heads": work.heads,
            "seq_q": work.seq_q,
            "BLOCK_M": _DELTA_TILE.block_m,
        }
        | strides("o", o, False)
        | strides("do", grad, False)
        | parts(checked)
        | backend_options(_DELTA_TILE)
    )


def backward_arguments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
    checked: Checked,
    kv_tile: Tile,
    q_tile: Tile,
    descriptors: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of the kernel for dk and dv, and of the kernel for dq.

    gradients: tensors for dq, dk and dv.
    """
    work = checked.work
    tensors = {"q": q, "k": k, "v": v, "do": grad}
    shared = {
        "lse": lse,
        "delta": delta,
        "kv_group": work.heads // work.kv_heads,
        "scale": checked.scale,
        "scale_log2e": checked.scale * log2(e),
    }
    keeping_kv = (
        arguments(tensors, checked, kv_tile, descriptors)
        | shared
        | {
            "dk": gradients[1],
            "dv": gradients[2],
            "kv_heads": work.kv_heads,
            "EVEN_Q": work.seq_q % kv_tile.block_m == 0,
        }
    )
    keeping_q = (
        arguments(tensors, checked, q_tile, descriptors)
        | shared
        | {
            "dq": gradients[0],
            "heads": work.heads,
            "EVEN_K": work.seq_k % q_tile.block_n == 0,
        }
    )
    return keeping_kv, keeping_q


def _completed(
    tile: Tile | None,
    schedule: str | None,
    menu: tuple[Setting, ...],
    descriptors: bool,
    dtype: str,
) -> Setting:
    """Returns the requested tile and schedule, completed from the menu's nearest entry.

    Only entries with the requested schedule count, if the menu has any. The nearest of them has the
    smallest sum of the differences in block_m and block_n. Without a tile, the first of them gives
    the tile. Raises InputError for a schedule or tile that the kernel cannot run.
    """
    if schedule is not None:
        require_choice(WHO, "schedule", schedule, SCHEDULES)
    if schedule == "overlapped" and not descriptors:
        raise InputError(
            WHO, "schedule = 'overlapped' by pointers", "descriptors, which Hopper and newer have"
        )
    fitting = [entry for entry in menu if schedule in (None, entry.schedule)] or list(menu)
    if tile is None:
        return replace(fitting[0], schedule=schedule or fitting[0].schedule)
    for name, size in (("block_m", tile.block_m), ("block_n", tile.block_n)):
        if size < _SMALLEST_BLOCK or size & (size - 1):
            raise InputError(
                WHO,
                f"tile {tile} with {name} = {size}",
                f"a power of two, at least {_SMALLEST_BLOCK}",
            )

    def distance(entry: Setting) -> int:
        return abs(entry.tile.block_m - tile.block_m) + abs(entry.tile.block_n - tile.block_n)

    nearest = min(fitting, key=distance)
    completed = replace(
        tile,
        stages=tile.stages or nearest.tile.stages,
        num_warps=tile.num_warps or nearest.tile.num_warps,
    )
    return Setting(completed, schedule or nearest.schedule)


def _by_descriptors(checked: Checked, capability: tuple[int, int], operands: str) -> bool:
    """Returns whether TMA descriptors load the operands.

    Raises InputError if the caller asked for descriptors and they cannot address the operands.
    """
    require_choice(WHO, "operands", operands, ("auto", "pointers", "descriptors"))
    if operands == "descriptors" and not checked.descriptors:
        raise InputError(
            WHO,
            "operands = 'descriptors'",
            "triton 3.6 or newer, 16-bit numbers, and rows at multiples of 16 bytes",
        )
    # sm_120 has TMA, but lacks the matrix instructions that read what TMA writes.
    return operands == "descriptors" or (
        operands == "auto" and checked.descriptors and architecture(capability) in WITH_DESCRIPTORS
    )
