"""Identifies the kernel that a workload runs, and its tile, with torch.profiler (`identify`).

Each point is profiled once, in a process that times nothing. The tile and split-k follow from the
kernel's name and grid. The module also lists the software versions that a run records
(`versions`).
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantbench import __version__
from quantbench.launch import Launch, Tile
from quantbench.providers.kernel_names import KernelName, parse
from quantbench.quantization import cdiv, resident_blocks
from quantbench.workload import Gemm

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.workload import Workload

#: event in a Chrome trace, as torch.profiler's `export_chrome_trace` writes it
TraceEvent = Mapping[str, Any]


@dataclass(frozen=True)
class KernelEvent:
    """One kernel in a trace.

    launch: the launch without its tile. blocks_per_sm is the profiler's number, if there is one.
    duration_us: time of the kernel in µs.
    """

    launch: Launch
    duration_us: float


def identify(
    run: Callable[[], None],
    workload: Workload,
    device: DeviceSpec,
    *,
    trace: Callable[[Callable[[], None]], Sequence[TraceEvent]] | None = None,
) -> Launch | None:
    """Returns the launch of the kernel that does the main work of `run` (see `launch_of`).

    Returns None on a CPU, where nothing is profiled, and if the profiler saw no kernel. This
    function must be called after all timing: once the profiler has been active in a process, CUPTI
    slows down every launch.

    run: function that runs the workload once.
    trace: function that runs its argument once under a profiler and returns the events; default
        torch's profiler.
    """
    if device.kind != "cuda":
        return None
    events = (trace or trace_events)(run)
    return launch_of(kernel_events(events), workload, device)


def trace_events(run: Callable[[], None]) -> list[TraceEvent]:
    """Profiles one run with torch.profiler, and returns the events of the exported Chrome trace.

    A run before it, without the profiler, loads modules. The exported trace is used because the
    profiler's event objects do not contain grid, block, registers and shared memory.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    # Later versions of torch detach CUPTI after each profile if this variable is not 0. Detaching
    # is slow if there are many profiles. It also causes a race condition if the next profile starts
    # soon after (pytorch/kineto pull requests 1264 and 1554).
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="quantbench-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def read_trace(path: Path) -> list[TraceEvent]:
    """Reads the events of a Chrome trace, with invalid bytes in kernel names replaced."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return list(json.loads(text, strict=False)["traceEvents"])


def kernel_events(events: Sequence[TraceEvent]) -> tuple[KernelEvent, ...]:
    """Returns the kernels in a trace, sorted by start time, without memory copies and fills."""
    kernels = [event for event in events if str(event.get("cat", "")).lower() == "kernel"]
    # The order of the events in a trace is not fixed: it depends on when CUPTI returns its buffers.
    kernels.sort(key=lambda event: float(event.get("ts", 0.0)))
    return tuple(map(_kernel_event, kernels))


def _kernel_event(event: TraceEvent) -> KernelEvent:
    """Converts a kernel's event in a trace to a `KernelEvent`."""
    args = event.get("args", {})
    # Kineto computes the occupancy with the default limit of 48 KiB shared memory, so it writes 0
    # for every kernel that uses more (pytorch/kineto, CudaDeviceProperties.cpp). The argument
    # "blocks per SM" is not used: it is grid size / SM count, not the number of resident blocks.
    active = args.get("occupancy", {}).get("activeBlocksPerMultiprocessor")
    launch = Launch(
        str(event["name"]),
        grid=_three(args.get("grid")),
        block=_three(args.get("block")),
        registers=args.get("registers per thread"),
        shared_memory_bytes=args.get("shared memory"),
        blocks_per_sm=active or None,
    )
    return KernelEvent(launch, float(event.get("dur", 0.0)))


def _three(value: Any) -> tuple[int, int, int] | None:
    """Converts the sizes of a grid or block to integers; None if the trace does not state them."""
    if value is None:
        return None
    x, y, z = map(int, value)
    return x, y, z


def launch_of(
    kernels: Sequence[KernelEvent], workload: Workload, device: DeviceSpec
) -> Launch | None:
    """Returns the launch, with its tile, of the kernel that does the main work.

    This is the kernel with the longest duration among those whose name fits the workload's kind. If
    no name fits, all kernels except split-k reductions are considered. A split-k reduction is
    chosen only if no other kernel ran. Returns None without kernels.
    """
    if not kernels:
        return None
    named = [(kernel, parse(kernel.launch.kernel)) for kernel in kernels]
    splitting = any(name.role == "splitk_reduce" for _, name in named)
    role = {"grouped_gemm": "gemm", "permute": "other"}.get(workload.kind, workload.kind)
    working = [pair for pair in named if pair[1].role == role]
    if not working:
        working = [pair for pair in named if pair[1].role != "splitk_reduce"] or named
    longest, name = max(working, key=lambda pair: pair[0].duration_us)
    launch = longest.launch
    return replace(
        launch,
        blocks_per_sm=blocks_per_sm(launch, device),
        tile=_tile(launch, name, workload, device.warp_threads, splitting=splitting),
    )


def blocks_per_sm(launch: Launch, device: DeviceSpec) -> int | None:
    """Returns the number of resident blocks per SM, as the profiler stated it, else computed.

    Returns None if the device or the resources of the launch are unknown.
    """
    if launch.blocks_per_sm is not None:
        return launch.blocks_per_sm
    if device.kind != "cuda" or device.compute_capability is None:
        return None
    if launch.block is None or launch.registers is None:
        return None
    blocks = resident_blocks(
        device.compute_capability,
        threads=prod(launch.block),
        registers=launch.registers,
        shared_memory_bytes=launch.shared_memory_bytes or 0,
    )
    # The kernel ran, so a result of 0 would mean that the limits are wrong for this device.
    return blocks or None


def _tile(
    launch: Launch, name: KernelName, workload: Workload, warp_threads: int, *, splitting: bool
) -> Tile | None:
    """Returns the tile that a kernel's name states, with num_warps and split_k filled in.

    Returns None if the tile or its split_k is unknown.

    splitting: whether a split-k reduction kernel also ran.
    """
    tile = name.tile
    if tile is None:
        return None
    if launch.block is not None and tile.num_warps is None:
        tile = replace(tile, num_warps=cdiv(prod(launch.block), warp_threads))
    if not isinstance(workload, Gemm) or launch.grid is None:
        return None if name.split_k_unknown else tile
    split_k = split_k_of(launch.grid, name, workload, splitting=splitting)
    # A tile with a wrong split_k would give a wrong number of waves, so no tile is returned. The
    # kernel's name stays in the launch, so a later version of quantbench can parse it again.
    return None if split_k is None else replace(tile, split_k=split_k)


def split_k_of(
    grid: tuple[int, int, int], name: KernelName, gemm: Gemm, *, splitting: bool
) -> int | None:
    """Returns split_k, the number of blocks that share an output tile along the reduction.

    Returns None if the name and the grid do not determine split_k. The rules are, in this order:
    - If the name states a split_k, it is returned. Nothing else is used for Tensile, because some
      profilers count Tensile's grids in threads.
    - If a kernel launches one block per tile, its grid z is batch · split_k. Its x · y may exceed
      the number of tiles, because the rasterisation pads them.
    - The whole grid of a persistent kernel has tiles · batch · split_k blocks, as long as that many
      blocks are resident at once. The tiles are rounded up to whole clusters.

    grid: number of blocks along x, y and z.
    splitting: whether a split-k reduction kernel also ran.

    >>> name = parse("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT")
    >>> split_k_of((80, 1, 1), name, Gemm(m=8, n=2560, k=4096, layout="nt"), splitting=True)
    2
    """
    if name.tile is None:
        return None
    if name.tile.split_k > 1 or name.family == "tensile":
        return None if name.split_k_unknown else name.tile.split_k
    split = splitting or name.split_k_unknown
    # Kernels of family cublas, such as sgemm_32x32x32, spread their tiles over x, y and z.
    whole_grid = name.persistent or name.family == "cublas"
    if not whole_grid:
        if grid[2] % gemm.batch == 0 and (grid[2] > gemm.batch or not split):
            return grid[2] // gemm.batch
    elif name.persistent and not split:
        return 1
    cluster_m, cluster_n = name.cluster or (1, 1)
    tiles_m = cdiv(cdiv(gemm.m, name.tile.block_m), cluster_m) * cluster_m
    tiles_n = cdiv(cdiv(gemm.n, name.tile.block_n), cluster_n) * cluster_n
    parts, rest = divmod(prod(grid), tiles_m * tiles_n * gemm.batch)
    if rest == 0 and parts >= 1 and (parts > 1 or not split):
        return parts
    return None if split else 1


def versions() -> dict[str, str]:
    """Returns the versions of all software on which a measured time may depend, by name."""
    import torch

    found = {
        "quantbench": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "torch": torch.__version__,
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    # Triton compiles quantbench's own kernels. cuBLAS runs torch.mm; which kernel it chooses at
    # which size moves cliffs.
    for name, package in (
        ("triton", "triton"),
        ("cublas", "nvidia-cublas"),
        ("cublas", "nvidia-cublas-cu12"),
    ):
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found
