"""Flash attention, forward and backward, with a user-defined tile and a launch that is known exactly.

    from quantbench.kernels.attention import attention, plan_forward
    from quantbench.launch import Tile

    o = attention(q, k, v, causal=True)                     # differentiable

    work = plan_forward(q, k, v, tile=Tile(128, 128, stages=2, num_warps=8), schedule="overlapped")
    work.launch                                             # Launch: tile, grid, block, registers, shared memory
    work.run()                                              # the launch alone; may be captured into a CUDA graph

q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim], kv_heads a divisor of heads (grouped-query
attention). fp16 and bf16 by tensor cores, fp32 without; sums in fp32. head_dim up to 256, any. What a program does is
described in `forward.py` and `backward.py`; `menu.py` lists the blocks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import e, log2
from typing import Any

import torch
from quantbench.kernels import launching
from quantbench.kernels.attention.backward import attention_backward_kv, attention_backward_q, attention_delta
from quantbench.kernels.attention.compile import DELTA_TILE, backend_options, precision
from quantbench.kernels.attention.forward import attention_forward
from quantbench.kernels.attention.menu import (
    SCHEDULES,
    WITH_DESCRIPTORS,
    Setting,
    architecture,
    backward_tiles,
    forward_menu,
    split_head_dim,
)
from quantbench.kernels.attention.operands import WHO, Checked, check, contiguous_like, sources, strides
from quantbench.kernels.features import INTERPRETER

from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.launch import Launch, Tile
from quantbench.quantization import cdiv
from quantbench.workload.dtypes import DTYPES

#: Device that the interpreter plays: Hopper, so that descriptors and the overlapped schedule are interpreted too.
_INTERPRETED_CAPABILITY, _INTERPRETED_L2_BYTES = (9, 0), 2**20
_SMALLEST_BLOCK = 16  # what a matrix instruction takes
_AUTOTUNE_WARMUP_MS, _AUTOTUNE_MS = 20, 80


@dataclass(frozen=True)
class AttentionPlan:
    """Forward or backward, ready to run any number of times.

    outputs: what `run` writes: (o, lse), lse being log₂ of the row sums in fp32; or (dq, dk, dv). steps: its launches
    in order. setting: how forward is run; None for backward.
    """

    outputs: tuple[torch.Tensor, ...]
    steps: tuple[launching.Step, ...]
    setting: Setting | None = None

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Every kernel of one run, in order; registers and what follows from them are None in the interpreter."""
        return tuple(each.launch for each in self.steps)

    @property
    def launch(self) -> Launch:
        """The kernel that does most: forward's only one, or backward's that keeps k and v."""
        return self.launches[0] if self.setting is not None else self.launches[1]

    def run(self) -> None:
        """Enqueue all launches once on the current stream: no allocation, no synchronisation."""
        launching.run(self.steps, self.outputs[0].device)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None,
    tile: Tile | None = None, schedule: str | None = None, autotune: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(q·kᵀ · scale)·v; scale defaults to 1/√head_dim. Differentiable; arguments as for `plan_forward`."""
    return _Attention.apply(q, k, v, causal, scale, tile, schedule, autotune)


def plan_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True, scale: float | None = None,
    tile: Tile | None = None, schedule: str | None = None, autotune: bool = False,
    out: torch.Tensor | None = None, lse: torch.Tensor | None = None, operands: str = "auto",
) -> AttentionPlan:  # fmt: skip
    """Check the operands, choose and compile the kernel, allocate what it writes.

    tile: block_m rows of q, block_n of k and v, stages, num_warps; fields left None come from the menu. schedule:
    `plain` or `overlapped`, by default what the menu has for the tile. Without a tile the menu's first entry is taken,
    with autotune=True the fastest (each is timed once per kind of problem and process). operands: `pointers`,
    `descriptors` (TMA) or `auto`.

    Raises InputError for operands and tiles that do not fit, UnsupportedError for what the device cannot do.
    """
    checked = check(q, k, v, causal, scale)
    work = checked.work
    capability, l2_bytes = _device(q)
    descriptors = _by_descriptors(checked, capability, operands)
    out = contiguous_like("out", out, q)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    else:
        lse = contiguous_like("lse", lse, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
    menu = forward_menu(architecture(capability), work.head_dim, checked.loads(descriptors), fp32=work.dtype == "fp32")

    def build(setting: Setting) -> AttentionPlan:
        return _forward(q, k, v, out, lse, checked, setting, descriptors, l2_bytes)

    if tile is not None or schedule is not None:
        return build(_completed(tile, schedule, menu, descriptors, work.dtype))
    if not autotune:
        return build(menu[0])
    return build(_fastest(build, menu, (work, descriptors, q.device)))


def plan_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor, *,
    causal: bool = True, scale: float | None = None, kv_tile: Tile | None = None, q_tile: Tile | None = None,
    operands: str = "auto",
) -> AttentionPlan:  # fmt: skip
    """As `plan_forward`, for the gradients of q, k and v. o, lse: what forward wrote; grad: the gradient of o.

    kv_tile, q_tile: tiles of the kernel that keeps k and v and of the one that keeps q.
    """
    checked = check(q, k, v, causal, scale, o=o, grad=grad)
    work = checked.work
    if lse.shape != q.shape[:-1] or lse.dtype != torch.float32 or not lse.is_contiguous() or lse.device != q.device:
        raise InputError(
            WHO, f"lse of shape {tuple(lse.shape)} in {lse.dtype} on {lse.device}", "what forward wrote for this q"
        )
    capability, _ = _device(q)
    descriptors = _by_descriptors(checked, capability, operands)
    defaults = backward_tiles(
        architecture(capability), work.head_dim, checked.loads(descriptors), fp32=work.dtype == "fp32"
    )
    kv_tile, q_tile = kv_tile or defaults[0], q_tile or defaults[1]
    delta = torch.empty_like(lse)
    gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return AttentionPlan(
        gradients,
        (
            _delta(o, grad, delta, checked),
            _backward_kv(q, k, v, grad, lse, delta, gradients, checked, kv_tile, descriptors),
            _backward_q(q, k, v, grad, lse, delta, gradients, checked, q_tile, descriptors),
        ),
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None,
        tile: Tile | None, schedule: str | None, autotune: bool,
    ) -> torch.Tensor:  # fmt: skip
        work = plan_forward(q, k, v, causal=causal, scale=scale, tile=tile, schedule=schedule, autotune=autotune)
        work.run()
        o, lse = work.outputs
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        # autograd hands on expanded gradients (of a sum, say); those alone are copied.
        work = plan_backward(q, k, v, o, lse, grad.contiguous(), causal=ctx.causal, scale=ctx.scale)
        work.run()
        return *work.outputs, None, None, None, None, None


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, checked: Checked,
    setting: Setting, descriptors: bool, l2_bytes: int,
) -> AttentionPlan:  # fmt: skip
    work, tile = checked.work, setting.tile
    all_heads = work.batch * work.heads
    arguments = _arguments({"q": q, "k": k, "v": v}, checked, tile, descriptors) | strides("o", out, descriptors=False)
    arguments |= {
        "o": out, "lse": lse, "all_heads": all_heads, "heads": work.heads, "kv_group": work.heads // work.kv_heads,
        "side_by_side": heads_side_by_side(checked, l2_bytes), "scale_log2e": checked.scale * log2(e),
        "EVEN_K": work.seq_k % tile.block_n == 0, "OVERLAP": setting.schedule == "overlapped",
    }  # fmt: skip
    grid = cdiv(work.seq_q, tile.block_m) * all_heads
    step = launching.step(WHO, attention_forward, grid, arguments, q.device, tile)
    return AttentionPlan((out, lse), (step,), setting)


def heads_side_by_side(checked: Checked, l2_bytes: int) -> int:
    """Query heads whose programs run together: as many as have their k and v in half of the L2 cache, at least one kv
    head's. (The other half is for q, o and what else passes through.)"""
    work = checked.work
    kv_bytes = 2 * work.seq_k * work.head_dim * DTYPES[work.dtype].element_bytes
    return min(work.batch * work.heads, max(1, l2_bytes // 2 // kv_bytes) * (work.heads // work.kv_heads))


def _delta(o: torch.Tensor, grad: torch.Tensor, delta: torch.Tensor, checked: Checked) -> launching.Step:
    work = checked.work
    main, tail = split_head_dim(work.head_dim)
    arguments = {
        "o": o, "do": grad, "delta": delta, "heads": work.heads, "seq_q": work.seq_q, "HEAD_DIM": work.head_dim,
        "MAIN": main, "TAIL": tail, "ALIGN": checked.align, "BLOCK_M": DELTA_TILE.block_m,
    }  # fmt: skip
    arguments |= strides("o", o, descriptors=False) | strides("do", grad, descriptors=False)
    arguments |= backend_options(DELTA_TILE)
    grid = cdiv(work.seq_q, DELTA_TILE.block_m) * work.batch * work.heads
    return launching.step(WHO, attention_delta, grid, arguments, o.device, DELTA_TILE)


def _backward_kv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    gradients: tuple[torch.Tensor, ...], checked: Checked, tile: Tile, descriptors: bool,
) -> launching.Step:  # fmt: skip
    work = checked.work
    arguments = _arguments({"q": q, "k": k, "v": v, "do": grad}, checked, tile, descriptors)
    arguments |= _backward_arguments(checked, lse, delta) | {
        "dk": gradients[1], "dv": gradients[2], "kv_heads": work.kv_heads, "EVEN_Q": work.seq_q % tile.block_m == 0,
    }  # fmt: skip
    grid = cdiv(work.seq_k, tile.block_n) * work.batch * work.kv_heads
    return launching.step(WHO, attention_backward_kv, grid, arguments, q.device, tile)


def _backward_q(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    gradients: tuple[torch.Tensor, ...], checked: Checked, tile: Tile, descriptors: bool,
) -> launching.Step:  # fmt: skip
    work = checked.work
    arguments = _arguments({"q": q, "k": k, "v": v, "do": grad}, checked, tile, descriptors)
    arguments |= _backward_arguments(checked, lse, delta) | {
        "dq": gradients[0], "heads": work.heads, "EVEN_K": work.seq_k % tile.block_n == 0,
    }  # fmt: skip
    grid = cdiv(work.seq_q, tile.block_m) * work.batch * work.heads
    return launching.step(WHO, attention_backward_q, grid, arguments, q.device, tile)


def _backward_arguments(checked: Checked, lse: torch.Tensor, delta: torch.Tensor) -> dict[str, Any]:
    work = checked.work
    return {
        "lse": lse, "delta": delta, "kv_group": work.heads // work.kv_heads, "scale": checked.scale,
        "scale_log2e": checked.scale * log2(e),
    }  # fmt: skip


def _arguments(tensors: dict[str, torch.Tensor], checked: Checked, tile: Tile, descriptors: bool) -> dict[str, Any]:
    """What the kernels share: inputs and their strides, sizes, the parts of head_dim, the tile."""
    work = checked.work
    main, tail = split_head_dim(work.head_dim)
    rows = {name: tile.block_n if name in ("k", "v") else tile.block_m for name in tensors}
    arguments = sources(tensors, rows, descriptors)
    for name, x in tensors.items():
        arguments |= strides(name, x, descriptors)
    return arguments | {
        "seq_q": work.seq_q, "seq_k": work.seq_k, "HEAD_DIM": work.head_dim, "MAIN": main, "TAIL": tail,
        "ALIGN": checked.align, "CAUSAL": work.causal, "DESCRIPTORS": descriptors, "PRECISION": precision(work.dtype),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    } | backend_options(tile, work.dtype, checked.align, work.causal)  # fmt: skip


def _completed(
    tile: Tile | None, schedule: str | None, menu: tuple[Setting, ...], descriptors: bool, dtype: str
) -> Setting:
    """The setting that was asked for, with what was left open from the menu's nearest entry."""
    if schedule is not None:
        require_choice(WHO, "schedule", schedule, SCHEDULES)
    if schedule == "overlapped" and not descriptors:
        raise InputError(WHO, "schedule = 'overlapped' by pointers", "descriptors, which Hopper and newer have")
    fitting = [entry for entry in menu if schedule in (None, entry.schedule)] or list(menu)
    if tile is None:
        return replace(fitting[0], schedule=schedule or fitting[0].schedule)
    for name, size in (("block_m", tile.block_m), ("block_n", tile.block_n)):
        if size < _SMALLEST_BLOCK or size & (size - 1):
            raise InputError(WHO, f"tile {tile} with {name} = {size}", f"a power of two, at least {_SMALLEST_BLOCK}")
    nearest = min(fitting, key=lambda entry: (
        abs(entry.tile.block_m - tile.block_m) + abs(entry.tile.block_n - tile.block_n)
    ))  # fmt: skip
    completed = replace(
        tile, stages=tile.stages or nearest.tile.stages, num_warps=tile.num_warps or nearest.tile.num_warps
    )
    return Setting(completed, schedule or nearest.schedule)


def _by_descriptors(checked: Checked, capability: tuple[int, int], operands: str) -> bool:
    require_choice(WHO, "operands", operands, ("auto", "pointers", "descriptors"))
    if operands == "descriptors" and not checked.descriptors:
        raise InputError(
            WHO, "operands = 'descriptors'", "triton 3.4 or newer, 16-bit numbers, and rows at multiples of 16 bytes"
        )
    # sm_120 has TMA but not the matrix instructions that read what it writes.
    return operands == "descriptors" or (
        operands == "auto" and checked.descriptors and architecture(capability) in WITH_DESCRIPTORS
    )


def _device(q: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Compute capability and bytes of L2 cache."""
    if not q.is_cuda:  # the operands were checked: this is the interpreter
        return _INTERPRETED_CAPABILITY, _INTERPRETED_L2_BYTES
    properties = torch.cuda.get_device_properties(q.device)
    return (properties.major, properties.minor), properties.L2_cache_size


_FASTEST: dict[tuple[Any, ...], Setting] = {}


def _fastest(build: Callable[[Setting], AttentionPlan], menu: tuple[Setting, ...], key: tuple[Any, ...]) -> Setting:
    """The entry of the menu with the shortest median time on this device."""
    if INTERPRETER:
        raise UnsupportedError(WHO, "autotune in the interpreter", "a GPU to time on")
    if key not in _FASTEST:
        from triton.testing import do_bench

        def time_ms(setting: Setting) -> float:
            run = build(setting).run
            return float(do_bench(run, warmup=_AUTOTUNE_WARMUP_MS, rep=_AUTOTUNE_MS, return_mode="median"))

        _FASTEST[key] = min(menu, key=time_ms)
    return _FASTEST[key]
