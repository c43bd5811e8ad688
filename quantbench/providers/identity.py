"""Identifies the kernel that a workload ran, with torch.profiler, and the installed software
versions. Each point is profiled once, in a process that times nothing.
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

#: Trace event as written by `export_chrome_trace`.
TraceEvent = Mapping[str, Any]


@dataclass(frozen=True)
class KernelEvent:
    """One kernel of a trace. launch: without its tile; blocks per SM as the profiler has them."""

    launch: Launch
    duration_us: float


def identify(
    run: Callable[[], None],
    workload: Workload,
    device: DeviceSpec,
    *,
    trace: Callable[[Callable[[], None]], Sequence[TraceEvent]] | None = None,
) -> Launch | None:
    """Returns the launch that does `run`'s work (see `launch_of`); None if the profiler saw no
    kernel, and on a CPU, where it is not asked.

    Call it after all timing: once the profiler has been active in a process, CUPTI adds to the cost
    of every launch. `trace` runs its argument once under a profiler and returns the trace's events
    (torch's profiler by default).
    """
    if device.kind != "cuda":
        return None
    events = (trace or trace_events)(run)
    return launch_of(kernel_events(events), workload, device)


def trace_events(run: Callable[[], None]) -> list[TraceEvent]:
    """Runs once to load modules, then once under torch.profiler; returns the events of its Chrome
    trace.

    The exported trace is read rather than the profiler's event objects, because only the trace has
    grid, block, registers and shared memory.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    # Later versions detach CUPTI after each profile: slow when there are many, and a race when the
    # next comes soon after (pytorch/kineto pull requests 1264 and 1554).
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
    """Reads the events of a Chrome trace, replacing invalid bytes in kernel names."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return list(json.loads(text, strict=False)["traceEvents"])


def kernel_events(events: Sequence[TraceEvent]) -> tuple[KernelEvent, ...]:
    """Returns the kernels among a trace's events, by start time, without copies and fills."""
    kernels = [event for event in events if str(event.get("cat", "")).lower() == "kernel"]
    # A trace is written as CUPTI's buffers come back, in no fixed order.
    kernels.sort(key=lambda event: float(event.get("ts", 0.0)))
    return tuple(map(_kernel_event, kernels))


def _kernel_event(event: TraceEvent) -> KernelEvent:
    args = event.get("args", {})
    # Kineto computes its occupancy without the opt-in shared memory and so writes 0 for every
    # kernel that uses more than 48 KiB of it (pytorch/kineto, CudaDeviceProperties.cpp). "blocks
    # per SM" is grid size / SM count.
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
    """Returns the three numbers of a grid or block; None if the trace has none."""
    if value is None:
        return None
    x, y, z = map(int, value)
    return x, y, z


def launch_of(
    kernels: Sequence[KernelEvent], workload: Workload, device: DeviceSpec
) -> Launch | None:
    """Returns the launch of the longest kernel whose name matches `workload`.

    If none matches, returns the longest of all. A split-k reduction kernel is chosen only if no
    other kernel ran.
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
    """Returns the resident blocks per SM from the profiler, or else computed; None if the device is
    unknown.
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
    # It ran, so 0 would only mean that the limits do not fit this device.
    return blocks or None


def _tile(
    launch: Launch, name: KernelName, workload: Workload, warp_threads: int, *, splitting: bool
) -> Tile | None:
    """Returns the tile that the kernel's name states, with its split of the reduction; None if one
    of the two is unknown.
    """
    tile = name.tile
    if tile is None:
        return None
    if launch.block is not None and tile.num_warps is None:
        tile = replace(tile, num_warps=cdiv(prod(launch.block), warp_threads))
    if not isinstance(workload, Gemm) or launch.grid is None:
        return None if name.split_k_unknown else tile
    split_k = split_k_of(launch.grid, name, workload, splitting=splitting)
    # A tile with a wrong split would give wrong waves; the name stays in the launch and can be
    # parsed again.
    return None if split_k is None else replace(tile, split_k=split_k)


def split_k_of(
    grid: tuple[int, int, int], name: KernelName, gemm: Gemm, *, splitting: bool
) -> int | None:
    """Returns how many blocks share an output tile along the reduction; None if name and grid do
    not determine it.

    splitting: whether a reduction kernel also ran.

    A split in the name is taken; Tensile's grids are not read, because some profilers count them in
    threads. Kernels that launch a block per tile count batch · split_k in grid z, beside an x·y
    that may be padded by the rasterisation. A persistent kernel's whole grid is tiles · batch ·
    split_k, as long as that is resident at once; tiles are rounded up to whole clusters.

    >>> name = parse("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT")
    >>> split_k_of((80, 1, 1), name, Gemm(m=8, n=2560, k=4096, layout="nt"), splitting=True)
    2
    """
    if name.tile is None:
        return None
    if name.tile.split_k > 1 or name.family == "tensile":
        return None if name.split_k_unknown else name.tile.split_k
    split = splitting or name.split_k_unknown
    # cuBLAS's sgemm_32x32x32 spreads its tiles over x, y and z alike.
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
    """Returns the versions of all installed software that a measured time may depend on, by
    name.
    """
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
    # triton compiles our kernels; cuBLAS stands behind mm, and its choice of kernels moves cliffs.
    for name, package in (
        ("triton", "triton"),
        ("cublas", "nvidia-cublas"),
        ("cublas", "nvidia-cublas-cu12"),
    ):
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found
