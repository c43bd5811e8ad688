"""GEMM on a GPU: every schedule, format and layout against float64, what runs against what was said
to run.
"""

from dataclasses import replace

import pytest
import torch
from ahead_of_time import compile_gemm
from hypothesis import given
from hypothesis import strategies as st
from interpreter import EXAMPLES
from quantbench.kernels.gemm import matmul, plan
from quantbench.kernels.gemm.menu import SCHEDULES, architecture, tiles
from quantbench.kernels.launching import HAS_TENSOR_DESCRIPTOR
from references import relative_error

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.providers.correctness import tolerance
from quantbench.providers.inputs import TORCH_DTYPES, Inputs
from quantbench.workload import Gemm
from quantbench.workload.dtypes import missing_format

pytestmark = pytest.mark.gpu

DTYPES = ("fp16", "bf16", "fp32", "tf32", "fp8")
PATHS = ("pointers", "descriptors") if HAS_TENSOR_DESCRIPTOR else ("pointers",)


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


def device_spec():  # type: ignore[no-untyped-def]
    from quantbench import device

    return device.current()


def skip_where_missing(dtype: str) -> None:
    reason = missing_format(dtype, capability())
    if reason is not None:
        pytest.skip(reason)


def compared(
    gemm: Gemm, schedule: str, tile: Tile | None = None, path: str = "auto", seed: int = 0
) -> float:
    """Relative error of a product whose result was NaN before."""
    a, b = Inputs(device_spec(), "normal", seed).operands(gemm)
    shape = (*a.shape[:-1], gemm.n)
    out = torch.full(shape, torch.nan, dtype=TORCH_DTYPES[gemm.output_dtype], device="cuda")
    matmul(a, b, tile=tile, schedule=schedule, out=out, tf32=gemm.dtype == "tf32", operands=path)
    return relative_error(out, a.double() @ b.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_tile_of_the_menu_is_right(schedule: str, dtype: str) -> None:
    """1000 × 1048 × 1032: ragged for every tile, rows at multiples of 16 bytes for TMA in all
    formats but fp8.
    """
    skip_where_missing(dtype)
    gemm = Gemm(1000, 1048, 1040 if dtype == "fp8" else 1032, dtype=dtype, layout="nt")
    for tile in tiles(architecture(capability()), dtype, schedule):
        chosen = replace(tile, split_k=3) if schedule == "split_k" else tile
        assert compared(gemm, schedule, chosen) <= tolerance(gemm).relative_norm, chosen


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_batches(dtype: str, schedule: str, layout: str, path: str) -> None:
    skip_where_missing(dtype)
    if path == "descriptors" and capability() < (9, 0):
        pytest.skip("TMA begins with Hopper")
    gemm = Gemm(272, 400, 304, batch=3, dtype=dtype, layout=layout)
    assert compared(gemm, schedule, path=path) <= tolerance(gemm).relative_norm


@pytest.mark.parametrize("schedule", SCHEDULES)
@EXAMPLES
@given(
    m=st.integers(1, 600), n=st.integers(1, 600), k=st.integers(1, 900), batch=st.integers(1, 3),
    layout=st.sampled_from(["nn", "nt", "tn"]), dtype=st.sampled_from(["fp16", "fp32"]),
)  # fmt: skip
def test_any_shape(
    schedule: str, m: int, n: int, k: int, batch: int, layout: str, dtype: str
) -> None:
    gemm = Gemm(m, n, k, batch, dtype, layout)
    assert compared(gemm, schedule) <= tolerance(gemm).relative_norm


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hundred_runs_give_the_same_bits(schedule: str) -> None:
    """One wave and a bit more: stream-k's programs wait for each other in every run. Half of the
    runs replay a graph."""
    gemm = Gemm(1920, 1664, 2080, dtype="fp16", layout="nt")
    a, b = Inputs(device_spec()).operands(gemm)
    tile = Tile(128, 128, split_k=3 if schedule == "split_k" else 1)
    work = plan(a, b, schedule=schedule, tile=tile)
    work.run()
    first = work.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run()
    for run in (work.run, graph.replay) * 50:
        work.out.fill_(torch.nan)
        run()
        assert torch.equal(work.out, first)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_launch_is_what_ran(schedule: str) -> None:
    """Against the profiler's own record of grid, block, registers and shared memory."""
    from quantbench.providers.identity import kernel_events, trace_events

    gemm = Gemm(1920, 1664, 2080, dtype="fp16", layout="nt")
    a, b = Inputs(device_spec()).operands(gemm)
    work = plan(a, b, schedule=schedule)
    ran = kernel_events(trace_events(work.run))
    assert len(ran) == len(work.steps)
    for event, step in zip(ran, work.steps, strict=True):
        said = step.launch
        seen = event.launch
        assert (seen.kernel, seen.grid, seen.block) == (said.kernel, said.grid, said.block)
        assert (seen.registers, seen.shared_memory_bytes) == (
            said.registers,
            said.shared_memory_bytes,
        )


def test_the_launch_is_what_ahead_of_time_compilation_says() -> None:
    gemm = Gemm(4096, 4096, 4096, dtype="fp16", layout="nt")
    a, b = Inputs(device_spec()).operands(gemm)
    for schedule in ("data_parallel", "stream_k", "persistent"):
        work = plan(a, b, schedule=schedule)
        major, minor = capability()
        built = compile_gemm(work.operands, work.config, 10 * major + minor)
        assert built.registers == work.launch.registers
        assert built.shared_memory_bytes == work.launch.shared_memory_bytes
        assert (built.threads, 1, 1) == work.launch.block
        assert built.spills == 0


def test_more_programs_than_fit_would_wait_for_ever() -> None:
    a, b = Inputs(device_spec()).operands(Gemm(512, 512, 512, dtype="fp16"))
    with pytest.raises(InputError, match="which the device holds at a time"):
        plan(a, b, schedule="stream_k", programs=100_000)


def test_a_tile_too_large_for_an_sm_is_named() -> None:
    a, b = Inputs(device_spec()).operands(Gemm(512, 512, 512, dtype="fp16"))
    with pytest.raises(InputError, match="out of resource: shared memory"):
        plan(a, b, tile=Tile(128, 256, 64, stages=7))


def test_autotuning_takes_the_fastest_of_the_menu_and_remembers() -> None:
    a, b = Inputs(device_spec()).operands(Gemm(1024, 1024, 1024, dtype="fp16"))
    first = plan(a, b, autotune=True)
    assert first.launch.tile in tiles(architecture(capability()), "fp16")
    assert plan(a, b, autotune=True).launch == first.launch
    first.run()
    assert torch.isfinite(first.out).all()


def test_offsets_beyond_31_bits() -> None:
    """A matrix of more than 2³¹ elements: its last rows must be read and written where they are."""
    rows, cols = 2**17 + 64, 2**14 + 64
    if torch.cuda.mem_get_info()[0] < 3 * rows * cols * 2:
        pytest.skip("needs 13 GB of free device memory")
    a = torch.zeros(rows, cols, dtype=torch.float16, device="cuda")
    a[-100:] = 1
    b = torch.zeros(cols, 256, dtype=torch.float16, device="cuda")
    b[-3:] = 1
    for path in PATHS if capability() >= (9, 0) else ("pointers",):
        c = matmul(a, b, operands=path)
        assert (c[-100:] == 3).all()
        assert (c[:-100] == 0).all()
        wide = matmul(a[:, :64], b[:64, :64].expand(64, 64), operands=path)
        assert wide.shape == (rows, 64)
