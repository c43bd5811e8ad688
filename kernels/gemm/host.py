"""Runs GEMMs with a chosen tile and schedule, and reports the exact launch.

    c = matmul(a, b, tile=Tile(128, 256), schedule="stream_k")

    work = plan(a, b, schedule="persistent")   # checked, compiled, allocated
    work.launch                                # tile, grid, registers, blocks per SM, …
    work.run()                                 # the launch alone; may be captured into a CUDA graph

Operands are stored by rows or by columns, with any leading dimension. Other storage (an inner
stride of 2, overlapping rows) is refused, because it would need a copy, which would be timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from quantbench.kernels import launching
from quantbench.kernels.gemm import kernels as gemm_kernels
from quantbench.kernels.gemm.config import (
    WHO,
    Config,
    Matrix,
    Operands,
    align_bytes,
    backend_options,
    box_shapes,
    configure,
    constexprs,
    matrix,
    padded,
    streamed_tiles,
)
from quantbench.kernels.gemm.menu import architecture, pick, tiles
from quantbench.kernels.launching import TORCH_DTYPES, Plan, short

from quantbench.errors import InputError, require_int
from quantbench.launch import Tile
from quantbench.quantization import cdiv, quantize
from quantbench.workload.dtypes import dtype_name, missing_format
from quantbench.workload.ops import Gemm

KERNELS = {
    "data_parallel": gemm_kernels.gemm_data_parallel,
    "split_k": gemm_kernels.gemm_data_parallel,
    "persistent": gemm_kernels.gemm_persistent,
    "stream_k": gemm_kernels.gemm_stream_k,
}

#: Device that the interpreter simulates. The menu needs an architecture, and a small number of SMs
#: keeps tests short.
INTERPRETED = launching.Gpu((8, 0), sm_count=4, l2_bytes=2**20)
_ADD_BLOCK = (32, 128)  # rows and columns per program of the kernel that adds the split-k parts


@dataclass(frozen=True)
class GemmPlan(Plan):
    """One GEMM, ready to run any number of times.

    A plan must not run on two streams at the same time, because all runs share the buffers of the
    plan: the result and, with split_k and stream_k, the partial sums.

    config: configuration of the kernel.
    steps: kernels of one run. The first multiplies. With split-k, a second adds up the parts.
    """

    operands: Operands
    config: Config


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tile: Tile | None = None,
    schedule: str = "data_parallel",
    out: torch.Tensor | None = None,
    tf32: bool = False,
    autotune: bool = False,
    operands: str = "auto",
) -> torch.Tensor:
    """Computes c = a·b for a[m, k], b[k, n], or [batch, m, k] and [batch, k, n].

    Products are accumulated in fp32. The operands are fp16, bf16, fp32 (multiplied in fp32, or in
    tf32 on request) or fp8 (e4m3, with a result in bf16), each row- or column-major. No gradients
    are computed.

    The arguments and the errors are those of `plan`.
    """
    work = plan(
        a, b, tile=tile, schedule=schedule, out=out, tf32=tf32, autotune=autotune, operands=operands
    )
    work.run()
    return work.out


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    tile: Tile | None = None,
    schedule: str = "data_parallel",
    out: torch.Tensor | None = None,
    tf32: bool = False,
    autotune: bool = False,
    operands: str = "auto",
    programs: int | None = None,
) -> GemmPlan:
    """Checks the operands, chooses and compiles the kernel, and allocates its buffers.

    tile: fields that are None come from the menu. Without a tile, `menu.pick` selects the one that
        is estimated to be fastest.
    schedule: data_parallel, split_k (tile.split_k parts), stream_k or persistent.
    out: tensor for the result; None allocates it.
    tf32: whether fp32 operands are multiplied in tf32.
    autotune: whether, without a tile, every tile of the menu is timed and the fastest selected. The
        tiles are timed once per process for each size, storage and schedule. With split_k, all have
        the number of parts of the tile that `menu.pick` selects.
    operands: how the kernel loads a and b: `pointers`, `descriptors` (TMA) or `auto`.
    programs: number of programs of stream_k and persistent; None for the number of resident blocks.
        stream_k takes at most the number of resident blocks, because its programs wait for each
        other.

    Raises InputError for invalid operands, dtypes and tiles, and UnsupportedError for a GPU that is
    not supported or lacks the dtype.
    """
    checked, out = check(a, b, out, tf32)
    if programs is not None:
        require_int(WHO, "programs", programs)
    gpu = launching.gpu_of(a, INTERPRETED)
    capability = gpu.capability

    def build(tile: Tile) -> GemmPlan:
        config = configure(checked, schedule, tile, capability, path=operands)
        return _build(a, b, out, checked, config, gpu.sm_count, programs)

    if tile is not None:
        return build(tile)
    picked = pick(checked.gemm, schedule, capability, gpu.sm_count, align_bytes(checked))
    if not autotune:
        return build(picked)
    menu = tiles(architecture(capability), checked.gemm.dtype, schedule, align_bytes(checked))
    choices = [
        replace(choice, split_k=min(picked.split_k, cdiv(checked.gemm.k, choice.block_k or 1)))
        for choice in menu
    ]
    return build(launching.fastest(WHO, build, choices, (checked, schedule, operands, a.device)))


def _build(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    operands: Operands,
    config: Config,
    sm_count: int,
    programs: int | None,
) -> GemmPlan:
    """Compiles the kernel of `config`, and allocates the buffers it needs beside a, b and out."""
    gemm = operands.gemm
    tile = config.tile
    split = tile.split_k > 1
    c = out
    written = operands
    if split:  # contiguous fp32 parts, one after the other
        c = out.new_empty((tile.split_k * gemm.batch, gemm.m, gemm.n), dtype=torch.float32)
        written = replace(
            operands, c=Matrix(False, gemm.n, gemm.m * gemm.n, operands.c.align, False)
        )
    arguments = kernel_arguments(a, b, c, written, config)
    kernel = KERNELS[config.schedule]
    described = launching.describe(WHO, kernel, arguments, a.device, tile)
    in_all = quantize(gemm, tile, sm_count).num_tiles // tile.split_k
    resident = sm_count * (described.blocks_per_sm or 1)
    if config.schedule == "persistent":
        grid = (min(in_all, programs or resident), 1, 1)
    elif config.schedule == "stream_k":
        grid = (programs or resident, 1, 1)
        if grid[0] > resident and not launching.INTERPRETER:
            raise InputError(
                WHO,
                f"programs = {programs}",
                f"at most {resident}, which the device holds at a time",
            )
        arguments |= _stream_k_arguments(out, tile, grid[0], streamed_tiles(in_all, grid[0]))
    else:
        grid = (in_all, tile.split_k, 1)
    steps = [launching.enqueue(kernel, grid, arguments, described)]
    if split:
        steps.append(_add_parts(c, out, operands, tile.split_k))
    return GemmPlan((out,), tuple(steps), operands, config)


def kernel_arguments(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, operands: Operands, config: Config
) -> dict[str, Any]:
    """Returns all arguments of the kernel that multiplies.

    a, b and c are passed as tensors (pointers) or as descriptors, which are created here once. The
    buffers of stream-k are empty here, because their sizes depend on the grid, which depends on the
    compiled kernel.
    """
    given: dict[str, Any] = {"a": a, "b": b, "c": c}
    boxes = box_shapes(operands, config)
    if config.load_descriptors:
        given["a"] = descriptor(a, operands.a, boxes["a"])
        given["b"] = descriptor(b, operands.b, boxes["b"])
    if config.store_descriptors:
        given["c"] = descriptor(c, operands.c, boxes["c"])
    if config.schedule == "stream_k":
        given |= _stream_k_arguments(c, config.tile, 0, 0)
    return given | sizes(operands) | constexprs(operands, config) | backend_options(config)


def _stream_k_arguments(
    out: torch.Tensor, tile: Tile, programs: int, streamed: int
) -> dict[str, Any]:
    """Allocates a partial tile and a flag for each program.

    Flags start at 0, and every run resets them to 0.

    streamed: number of tiles that stream-k splits by reduction steps.
    """
    return {
        "partials": out.new_empty(programs * tile.elements, dtype=torch.float32),
        "ready": out.new_zeros(programs, dtype=torch.int32),
        "streamed_tiles": streamed,
    }


def sizes(operands: Operands) -> dict[str, int]:
    """Returns the run-time sizes and strides of a kernel in elements."""
    gemm = operands.gemm
    return {
        "batches": gemm.batch,
        "m": gemm.m,
        "n": gemm.n,
        "k": gemm.k,
        "lda": operands.a.leading,
        "ldb": operands.b.leading,
        "ldc": operands.c.leading,
        "batch_stride_a": operands.a.batch_stride,
        "batch_stride_b": operands.b.batch_stride,
        "batch_stride_c": operands.c.batch_stride,
    }


def descriptor(x: torch.Tensor, matrix: Matrix, box: list[int]) -> Any:
    """Returns the TMA descriptor of a matrix, or of a batch of matrices if the box has 3 sides."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    stored = x.mT if matrix.transposed else x
    strides = [matrix.batch_stride, matrix.leading, 1]
    return TensorDescriptor(x, list(stored.shape[-len(box) :]), strides[-len(box) :], box)


def _add_parts(
    parts: torch.Tensor, out: torch.Tensor, operands: Operands, split_k: int
) -> launching.Step:
    """Returns the step that adds up the parts of split-k."""
    gemm = operands.gemm
    rows, cols = _ADD_BLOCK
    arguments = accepted(gemm_kernels.gemm_add_parts, sizes(operands)) | {
        "parts": parts,
        "c": out,
        "ALIGN_C": operands.c.align,
        "SPLIT_K": split_k,
        "BLOCK_M": rows,
        "BLOCK_N": cols,
        "num_warps": 4,
    }
    blocks = cdiv(gemm.m, rows) * cdiv(gemm.n, cols) * gemm.batch
    return launching.step(WHO, gemm_kernels.gemm_add_parts, blocks, arguments, out.device)


def accepted(kernel: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that are parameters of the kernel."""
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def check(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, tf32: bool
) -> tuple[Operands, torch.Tensor]:
    """Validates a·b, and returns its operands and the result tensor (`out`, or a new one).

    a, b: [m, k] and [k, n], or [batch, m, k] and [batch, k, n], of the same dtype and device.
    tf32: whether fp32 operands are multiplied in tf32.

    Raises InputError for incompatible tensors or dtypes, and UnsupportedError for a device that is
    not supported or lacks the dtype.
    """
    gemm = _gemm(a, b, tf32)
    launching.require_like(WHO, "b", b, b.shape, a.dtype, a.device)
    stored_a = stored("a", a)
    stored_b = stored("b", b)
    layout = "nt"[stored_a.transposed] + "nt"[stored_b.transposed]
    if layout != "tt":  # `Gemm` has no such layout, but the kernels take it
        gemm = replace(gemm, layout=layout)
    shape = (*a.shape[:-1], gemm.n)
    dtype = TORCH_DTYPES[gemm.output_dtype]
    if out is not None:
        launching.require_like(WHO, "out", out, shape, dtype, a.device)
        stored_in_rows(out)
    launching.require_support(
        WHO, "operands", a, gemm.dtype, lambda c: missing_format(gemm.dtype, c)
    )
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    return Operands(gemm, stored_a, stored_b, stored_in_rows(out)), out


def _gemm(a: torch.Tensor, b: torch.Tensor, tf32: bool) -> Gemm:
    """Returns the size and dtype of a·b. Raises InputError for incompatible tensors."""
    shapes = f"a of shape {tuple(a.shape)} and b of shape {tuple(b.shape)}"
    if a.dim() != b.dim() or a.dim() not in (2, 3):
        raise InputError(WHO, shapes, "[m, k] and [k, n], or [batch, m, k] and [batch, k, n]")
    if a.shape[-1] != b.shape[-2]:
        raise InputError(WHO, shapes, f"b with k = {a.shape[-1]} rows")
    if a.dim() == 3 and a.shape[0] != b.shape[0]:
        raise InputError(WHO, shapes, "the same batch")
    if 0 in a.shape or 0 in b.shape:
        raise InputError(WHO, shapes, "sizes of at least 1")
    if a.dtype not in TORCH_DTYPES.values():
        expected = ", ".join(map(short, dict.fromkeys(TORCH_DTYPES.values())))
        raise InputError(WHO, f"operands in {short(a.dtype)}", expected)
    dtype = dtype_name(a.dtype)
    if tf32:
        if dtype != "fp32":
            raise InputError(
                WHO, f"tf32 = True with operands in {short(a.dtype)}", "operands in float32"
            )
        dtype = "tf32"
    batch = a.shape[0] if a.dim() == 3 else 1
    return Gemm(m=a.shape[-2], n=b.shape[-1], k=a.shape[-1], batch=batch, dtype=dtype)


def stored(name: str, x: torch.Tensor) -> Matrix:
    """Returns the storage of an operand.

    Raises InputError if neither the rows nor the columns of the operand are contiguous.
    """
    rows, cols = x.shape[-2:]
    row_stride, col_stride = x.stride()[-2:]
    # The stride of a dimension of size 1 is arbitrary. A leading dimension of 1 is avoided, because
    # Triton compiles an argument of 1 as a constant.
    if col_stride == 1 and (rows == 1 or row_stride >= max(cols, 2)):
        return _matrix(x, False, cols, row_stride if rows > 1 else padded(cols))
    if row_stride == 1 and (cols == 1 or col_stride >= rows):
        return _matrix(x, True, rows, col_stride if cols > 1 else padded(rows))
    if cols == 1 and row_stride > 1:
        return _matrix(x, False, 1, row_stride)
    if rows == 1 and col_stride > 1:
        return _matrix(x, True, 1, col_stride)
    raise InputError(
        WHO, f"{name} with strides {tuple(x.stride())}", "row- or column-major storage"
    )


def stored_in_rows(x: torch.Tensor) -> Matrix:
    """Returns the storage of a result.

    Raises InputError unless the result is row-major without overlaps.
    """
    rows, cols = x.shape[-2:]
    row_stride, col_stride = x.stride()[-2:]
    in_rows = (cols == 1 or col_stride == 1) and (rows == 1 or row_stride >= cols)
    batches = 1
    batch_stride = 0
    if x.dim() == 3:
        batches = x.shape[0]
        batch_stride = x.stride(0)
    # The matrices of a batch do not overlap if each begins after the end of the one before, or if
    # equal rows of all matrices lie between two rows of one matrix.
    one_after_another = batch_stride >= (rows - 1) * row_stride + cols
    interleaved = batch_stride >= cols and row_stride >= (batches - 1) * batch_stride + cols
    if not in_rows or not (batches == 1 or one_after_another or interleaved):
        raise InputError(
            WHO, f"out with strides {tuple(x.stride())}", "row-major storage without overlaps"
        )
    return _matrix(x, False, cols, row_stride if rows > 1 else padded(cols))


def _matrix(x: torch.Tensor, transposed: bool, length: int, leading: int) -> Matrix:
    """Returns the storage of a tensor.

    length: number of elements per stored row.
    """
    batched = x.dim() == 3 and x.shape[0] > 1
    batch_stride = x.stride(0) if batched else 0
    aligned = x.data_ptr() % launching.TMA_ALIGN_BYTES == 0
    addressable = aligned and (batch_stride > 0 or not batched)
    return matrix(
        transposed, length, leading, batch_stride, x.element_size(), addressable=addressable
    )
