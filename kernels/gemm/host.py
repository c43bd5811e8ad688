"""Matrix products with a user-defined tile and schedule, and a launch that is known exactly.

    from quantbench.kernels.gemm import matmul, plan
    from quantbench.launch import Tile

    c = matmul(a, b, tile=Tile(128, 256), schedule="stream_k")

    work = plan(a, b, schedule="persistent")   # checked, compiled, allocated
    work.launch                                # Launch: tile, grid, block, registers, shared memory, blocks per SM
    work.run()                                 # the launch alone; may be captured into a CUDA graph

`kernels.py` describes what each program computes, `menu.py` lists the tiles there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantbench.kernels import launching
from quantbench.kernels.features import HAS_TENSOR_DESCRIPTOR, INTERPRETER
from quantbench.kernels.gemm import kernels as gemm_kernels
from quantbench.kernels.gemm.compile import KERNELS, box_shapes
from quantbench.kernels.gemm.config import (
    WHO,
    Config,
    Matrix,
    Operands,
    align_bytes,
    backend_options,
    configure,
    constexprs,
    num_tiles,
    streamed_tiles,
)
from quantbench.kernels.gemm.menu import architecture, pick, tiles
from quantbench.kernels.gemm.operands import check

from quantbench.errors import InputError, UnsupportedError, require_int
from quantbench.launch import Launch, Tile
from quantbench.quantization import cdiv

#: Device that the interpreter plays: a tile menu must come from somewhere, and few programs make short tests.
_INTERPRETED_CAPABILITY = (8, 0)
_INTERPRETED_SM_COUNT = 4
_ADD_BLOCK = (32, 128)  # rows and columns per program of the kernel that adds up split-k parts
_AUTOTUNE_WARMUP_MS, _AUTOTUNE_MS = 20, 80


@dataclass(frozen=True)
class GemmPlan:
    """One product, ready to run any number of times.

    out: what `run` writes. config: how the kernel was built. steps: every kernel of one run in order; the first does
    the multiplying (split-k adds its parts up in a second one). One plan must not run on two streams at the same time:
    partial sums have one place.
    """

    out: torch.Tensor
    operands: Operands
    config: Config
    steps: tuple[launching.Step, ...]

    @property
    def launch(self) -> Launch:
        """The kernel that multiplies. Registers and what follows from them are None in the interpreter."""
        return self.steps[0].launch

    def run(self) -> None:
        """Enqueue the product once on the current stream: launches only, no allocation, no synchronisation."""
        launching.run(self.steps, self.out.device)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, tile: Tile | None = None, schedule: str = "data_parallel",
    out: torch.Tensor | None = None, tf32: bool = False, autotune: bool = False, operands: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """c = a·b for a[m, k], b[k, n], or [batch, m, k] and [batch, k, n]; summed in fp32.

    fp16, bf16, fp32 (products in fp32, or in tf32 on request) and fp8 (e4m3, result in bf16). Each operand may be
    stored by rows or by columns. Arguments as for `plan`, which also tells the launch. No gradients.
    """
    work = plan(a, b, tile=tile, schedule=schedule, out=out, tf32=tf32, autotune=autotune, operands=operands)
    work.run()
    return work.out


def plan(
    a: torch.Tensor, b: torch.Tensor, *, tile: Tile | None = None, schedule: str = "data_parallel",
    out: torch.Tensor | None = None, tf32: bool = False, autotune: bool = False, operands: str = "auto",
    programs: int | None = None,
) -> GemmPlan:  # fmt: skip
    """Check the operands, choose and compile the kernel, allocate what it needs.

    tile: fields left None come from the menu; None altogether picks the tile that should be fastest (`menu.pick`),
    and with autotune=True the one that was (every tile of the menu is timed once per kind of product and process).
    schedule: data_parallel, split_k (tile.split_k parts), stream_k or persistent. operands: `pointers`, `descriptors`
    (TMA) or `auto`. programs: grid of stream_k and persistent, by default as many as the device holds at a time;
    for stream_k never more than that, since its programs wait for each other.

    Raises InputError for operands and tiles that do not fit, UnsupportedError for what the device cannot do.
    """
    checked, out = check(a, b, out, tf32)
    if programs is not None:
        require_int(WHO, "programs", programs)
    capability, sm_count = _device(a)

    def build(tile: Tile) -> GemmPlan:
        config = configure(
            checked, schedule, tile, capability, path=operands, descriptors_available=HAS_TENSOR_DESCRIPTOR
        )
        return _build(a, b, out, checked, config, sm_count, programs)

    if tile is not None:
        return build(tile)
    picked = pick(checked.gemm, schedule, capability, sm_count, align_bytes(checked))
    if not autotune:
        return build(picked)
    menu = tiles(architecture(capability), checked.gemm.dtype, schedule, align_bytes(checked))
    choices = [replace(choice, split_k=picked.split_k) for choice in menu]
    return build(_fastest(build, choices, (checked, schedule, operands, a.device)))


_FASTEST: dict[tuple[Any, ...], Tile] = {}


def _fastest(build: Callable[[Tile], GemmPlan], choices: list[Tile], key: tuple[Any, ...]) -> Tile:
    """The tile with the shortest median time on this device."""
    if INTERPRETER:
        raise UnsupportedError(WHO, "autotune in the interpreter", "a GPU to time on")
    if key not in _FASTEST:
        from triton.testing import do_bench

        def time_ms(tile: Tile) -> float:
            run = build(tile).run
            return float(do_bench(run, warmup=_AUTOTUNE_WARMUP_MS, rep=_AUTOTUNE_MS, return_mode="median"))

        _FASTEST[key] = min(choices, key=time_ms)
    return _FASTEST[key]


def _device(a: torch.Tensor) -> tuple[tuple[int, int], int]:
    if not a.is_cuda:  # the operands were checked: this is the interpreter
        return _INTERPRETED_CAPABILITY, _INTERPRETED_SM_COUNT
    properties = torch.cuda.get_device_properties(a.device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _build(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, operands: Operands, config: Config, sm_count: int,
    programs: int | None,
) -> GemmPlan:  # fmt: skip
    """Everything that happens once: compile, size the grid, allocate."""
    gemm, tile = operands.gemm, config.tile
    split = config.schedule == "split_k" and tile.split_k > 1
    c, stored = out, operands
    if split:  # the parts: fp32, one after the other, rows without gaps
        c = out.new_empty((tile.split_k * gemm.batch, gemm.m, gemm.n), dtype=torch.float32)
        stored = replace(operands, c=Matrix(False, gemm.n, gemm.m * gemm.n, operands.c.align, False))
    arguments: dict[str, Any] = dict(zip("abc", _tensors(a, b, c, stored, config), strict=True))
    arguments |= _sizes(stored) | constexprs(stored, config) | backend_options(config)
    if config.schedule == "stream_k":
        arguments |= _stream_k_arguments(out, tile, 0, 0)

    kernel = KERNELS[config.schedule]
    described = launching.describe(WHO, kernel, arguments, a.device, tile)
    in_all, resident = num_tiles(operands, tile), sm_count * (described.blocks_per_sm or 1)
    if config.schedule == "persistent":
        grid = (min(in_all, programs or resident), 1, 1)
    elif config.schedule == "stream_k":
        grid = (programs or resident, 1, 1)
        if grid[0] > resident and not INTERPRETER:
            raise InputError(WHO, f"programs = {programs}", f"at most {resident}, which the device holds at a time")
        arguments |= _stream_k_arguments(out, tile, grid[0], streamed_tiles(in_all, grid[0]))
    else:
        grid = (in_all, tile.split_k, 1)
    steps = [launching.enqueue(kernel, grid, arguments, described)]
    if split:
        steps.append(_add_parts(c, out, operands, tile.split_k))
    return GemmPlan(out, operands, config, tuple(steps))


def _stream_k_arguments(out: torch.Tensor, tile: Tile, programs: int, streamed: int) -> dict[str, Any]:
    """A slot for a partial tile and a flag for each program. The flags are down, and every run leaves them down."""
    return {
        "partials": out.new_empty(programs * tile.elements, dtype=torch.float32),
        "ready": out.new_zeros(programs, dtype=torch.int32),
        "streamed_tiles": streamed,
    }


def _sizes(operands: Operands) -> dict[str, int]:
    gemm = operands.gemm
    return {
        "batches": gemm.batch, "m": gemm.m, "n": gemm.n, "k": gemm.k,
        "lda": operands.a.leading, "ldb": operands.b.leading, "ldc": operands.c.leading,
        "batch_stride_a": operands.a.batch_stride, "batch_stride_b": operands.b.batch_stride,
        "batch_stride_c": operands.c.batch_stride,
    }  # fmt: skip


def _tensors(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, operands: Operands, config: Config) -> list[Any]:
    """a, b and c as the kernel takes them: tensors (pointers), or descriptors, which are made here once."""
    if not config.load_descriptors:
        return [a, b, c]
    boxes = box_shapes(operands, config)
    described = [
        _descriptor(x, matrix, boxes[name]) for name, x, matrix in (("a", a, operands.a), ("b", b, operands.b))
    ]
    return [*described, _descriptor(c, operands.c, boxes["c"]) if config.store_descriptors else c]


def _descriptor(x: torch.Tensor, matrix: Matrix, box: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, cols = x.shape[-2:]
    shape, strides = [cols, rows] if matrix.transposed else [rows, cols], [matrix.leading, 1]
    if len(box) == 3:
        shape, strides = [x.shape[0], *shape], [matrix.batch_stride, *strides]
    return TensorDescriptor(x, shape, strides, box)


def _add_parts(parts: torch.Tensor, out: torch.Tensor, operands: Operands, split_k: int) -> launching.Step:
    """The second kernel of split-k."""
    gemm, (rows, cols) = operands.gemm, _ADD_BLOCK
    arguments = {
        "parts": parts, "c": out, "batches": gemm.batch, "m": gemm.m, "n": gemm.n,
        "ldc": operands.c.leading, "batch_stride_c": operands.c.batch_stride,
        "ALIGN_C": operands.c.align, "SPLIT_K": split_k, "BLOCK_M": rows, "BLOCK_N": cols, "num_warps": 4,
    }  # fmt: skip
    blocks = cdiv(gemm.m, rows) * cdiv(gemm.n, cols) * gemm.batch
    return launching.step(WHO, gemm_kernels.gemm_add_parts, blocks, arguments, out.device)
