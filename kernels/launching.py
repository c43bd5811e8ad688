"""From a kernel and its arguments to something that can be run any number of times, and that tells what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from quantbench.kernels.features import INTERPRETER
from triton.runtime import OutOfResources

from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.quantization import resident_blocks


@dataclass(frozen=True)
class Step:
    """One kernel launch, ready to go: `call` enqueues it on the current stream, `launch` describes it."""

    launch: Launch
    call: Callable[[], object]


def step(
    who: str,
    kernel: Any,
    grid: int,
    arguments: Mapping[str, Any],
    device: torch.device,
    tile: Tile | None = None,
) -> Step:
    """Compile `kernel` for these arguments (num_warps and the like among them) and a grid of `grid` blocks.

    Raises InputError when a block does not fit on one SM; who: the operation that the message names.
    """
    return enqueue(kernel, (grid, 1, 1), arguments, describe(who, kernel, arguments, device, tile))


def describe(
    who: str, kernel: Any, arguments: Mapping[str, Any], device: torch.device, tile: Tile | None = None
) -> Launch:
    """Compile `kernel` for these arguments and tell what a block of it takes; the grid is left open.

    Registers and what follows from them are None in the interpreter.
    """
    if INTERPRETER:
        return Launch(kernel.fn.__name__, tile=tile)
    with torch.cuda.device(device):
        compiled = kernel.warmup(grid=(1, 1, 1), **arguments)
        try:
            compiled._init_handles()  # loads the binary, which is when triton learns its registers
        except OutOfResources as error:
            raise InputError(who, f"tile {tile}: {error}", "a tile that fits on one SM") from None
    threads = 32 * compiled.metadata.num_warps
    return Launch(
        kernel=compiled.metadata.name,
        block=(threads, 1, 1),
        registers=compiled.n_regs,
        shared_memory_bytes=compiled.metadata.shared,
        blocks_per_sm=resident_blocks(
            torch.cuda.get_device_capability(device),
            threads=threads,
            registers=compiled.n_regs,
            shared_memory_bytes=compiled.metadata.shared,
        ),
        tile=tile,
    )


def enqueue(kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any], described: Launch) -> Step:
    """A kernel that was described, with the grid that it is to run on."""
    launcher = kernel[grid]
    return Step(replace(described, grid=grid), lambda: launcher(**arguments))


def run(steps: tuple[Step, ...], device: torch.device) -> None:
    """Enqueue the steps on the device's current stream, in order: launches only."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            for each in steps:
                each.call()
    else:
        for each in steps:
            each.call()
