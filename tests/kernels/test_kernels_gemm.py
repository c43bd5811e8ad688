"""Our GEMM kernels against float64, run by triton's interpreter on the CPU.

Tolerances are on ‖c − ref‖ / ‖ref‖: fp16 rounds its result to 11 bits (2e-4; 5e-4 allowed), fp32
sums up to a few hundred products in any order (2e-7; 2e-6 allowed), fp8 gives bf16 that the
interpreter cuts instead of rounding (4e-3; 1e-2 allowed). Outputs are filled with NaN first, so
that an element that is not written shows.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import EXAMPLES, in_interpreter
from quantbench.kernels.gemm import matmul, plan
from quantbench.kernels.gemm.menu import SCHEDULES
from references import relative_error

from quantbench.errors import QuantbenchError
from quantbench.launch import Tile
from quantbench.quantization import quantize
from quantbench.workload import Gemm

TOLERANCE = {torch.float16: 5e-4, torch.float32: 2e-6, torch.float8_e4m3fn: 1e-2}
SMALL = Tile(32, 32, block_k=16, stages=2, num_warps=4)


def stored(
    *shape: int, transposed: bool = False, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """A random matrix (or a batch of them) of `shape`, stored by columns where transposed."""
    *batch, rows, cols = shape
    generator = torch.Generator().manual_seed(sum(shape))
    if transposed:
        return torch.randn(*batch, cols, rows, generator=generator).to(dtype).transpose(-1, -2)
    return torch.randn(*shape, generator=generator).to(dtype)


def poisoned(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.full((*a.shape[:-1], b.shape[-1]), torch.nan, dtype=dtype or a.dtype)


def error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    return relative_error(c, a.double() @ b.double())


def tile_for(schedule: str, tile: Tile = SMALL, split_k: int = 3) -> Tile:
    return replace(tile, split_k=split_k) if schedule == "split_k" else tile


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("operands", ["pointers", "descriptors"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_reads_every_layout(schedule: str, layout: str, operands: str) -> None:
    """Products in batches of two where the layout is nt."""
    batch = (2,) if layout == "nt" else ()
    a = stored(*batch, 40, 56, transposed=layout[0] == "t")
    b = stored(*batch, 56, 40, transposed=layout[1] == "t")
    out = poisoned(a, b)
    matmul(a, b, tile=tile_for(schedule), schedule=schedule, out=out, operands=operands)
    assert error(out, a, b) < TOLERANCE[torch.float16]


@in_interpreter
@pytest.mark.parametrize("schedule", SCHEDULES)
@EXAMPLES
@given(
    m=st.integers(1, 70), n=st.integers(1, 40), k=st.integers(1, 70), programs=st.integers(1, 9),
    split_k=st.integers(1, 5), transposed=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)  # fmt: skip
def test_any_shape(
    schedule: str, m: int, n: int, k: int, programs: int, split_k: int, transposed: tuple[bool, bool],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Ragged edges, parts of one step and of several, fewer tiles than programs and more."""
    a = stored(m, k, transposed=transposed[0], dtype=dtype)
    b = stored(k, n, transposed=transposed[1], dtype=dtype)
    tile = tile_for(
        schedule, Tile(32, 16, block_k=32, stages=2, num_warps=4), min(split_k, -(-k // 32))
    )
    work = plan(a, b, tile=tile, schedule=schedule, out=poisoned(a, b), programs=programs)
    work.run()
    assert error(work.out, a, b) < TOLERANCE[dtype]


@in_interpreter
@pytest.mark.parametrize("programs", range(1, 8))
def test_stream_k_shares_tiles_between_any_number_of_programs(programs: int) -> None:
    """3 tiles of 5 steps each: every cut falls somewhere else, and some programs get less than a
    tile.
    """
    a, b = stored(90, 70), stored(70, 20)
    work = plan(a, b, tile=SMALL, schedule="stream_k", out=poisoned(a, b), programs=programs)
    work.run()
    assert error(work.out, a, b) < TOLERANCE[torch.float16]
    assert work.launch.grid == (programs, 1, 1)


@in_interpreter
@pytest.mark.parametrize("schedule", ["stream_k", "split_k"])
def test_a_second_run_gives_the_same_bits(schedule: str) -> None:
    """Partial sums are added in a fixed order, and stream-k's flags are down again after a run."""
    a, b = stored(90, 70), stored(70, 20)
    out = poisoned(a, b)
    work = plan(a, b, tile=tile_for(schedule), schedule=schedule, out=out, programs=2)
    work.run()
    first = out.clone()
    out.fill_(torch.nan)
    work.run()
    assert torch.equal(out, first)


@in_interpreter
def test_fp8_products_come_out_in_bf16() -> None:
    a = stored(40, 96, dtype=torch.float8_e4m3fn)
    b = stored(96, 56, transposed=True, dtype=torch.float8_e4m3fn)
    c = matmul(a, b, tile=Tile(32, 32, block_k=32, stages=2, num_warps=4))
    assert c.dtype == torch.bfloat16
    assert error(c, a, b) < TOLERANCE[torch.float8_e4m3fn]


@in_interpreter
def test_views_are_read_and_written_where_they_are() -> None:
    """Leading dimensions beyond the row's length, an operand shared by all products, a result in a
    larger tensor.
    """
    a = stored(50, 80)[3:43, 8:60]
    b = stored(64, 90, transposed=True)[4:56, :33]
    frame = torch.full((60, 40), 7.0, dtype=torch.float16)
    matmul(a, b, tile=SMALL, out=frame[10:50, 2:35])
    assert error(frame[10:50, 2:35], a, b) < TOLERANCE[torch.float16]
    frame[10:50, 2:35] = 7.0
    assert (frame == 7.0).all()
    shared = a.unsqueeze(0).expand(2, -1, -1)
    several = torch.stack([b, 2 * b])
    assert error(matmul(shared, several, tile=SMALL), shared, several) < TOLERANCE[torch.float16]


@in_interpreter
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 1, 17), (1, 40, 1), (17, 1, 1), (1, 1, 33)])
def test_sizes_of_one(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = stored(m, k), stored(k, n)
    out = poisoned(a, b)
    matmul(a, b, tile=SMALL, out=out)
    assert error(out, a, b) < TOLERANCE[torch.float16]


@in_interpreter
def test_the_launch_is_the_one_that_quantization_counts() -> None:
    a, b = stored(2, 72, 104), stored(2, 104, 40)
    tile = replace(SMALL, split_k=3)
    steps = plan(a, b, tile=tile, schedule="split_k").steps
    assert [step.launch.kernel for step in steps] == ["gemm_data_parallel", "gemm_add_parts"]
    counted = quantize(Gemm(72, 40, 104, batch=2, dtype="fp16"), tile, sm_count=1)
    assert (steps[0].launch.tile, steps[0].launch.num_blocks) == (tile, counted.num_tiles)
    for programs, blocks in ((5, 5), (50, 12)):
        persistent = plan(a, b, tile=SMALL, schedule="persistent", programs=programs)
        assert persistent.launch.grid == (blocks, 1, 1)


@in_interpreter
def test_without_a_tile_the_menu_decides() -> None:
    a, b = (
        stored(130, 70, dtype=torch.float32),
        stored(70, 90, dtype=torch.float32),
    )
    work = plan(a, b)
    work.run()
    assert error(work.out, a, b) < TOLERANCE[torch.float32]
    assert str(work.launch.tile) == "128x64x16"


@in_interpreter
@pytest.mark.parametrize(
    ("cols", "dtype", "options", "value"),
    [
        (17, torch.float16, {"operands": "descriptors"}, "operands = 'descriptors'"),
        (16, torch.float32, {"autotune": True}, "autotune in the interpreter"),
        (16, torch.bfloat16, {}, "triton's interpreter multiplies the bit patterns of bf16"),
    ],
)
def test_what_does_not_fit_is_refused(
    cols: int, dtype: torch.dtype, options: dict[str, Any], value: str
) -> None:
    a = torch.ones(16, cols, dtype=dtype)
    with pytest.raises(QuantbenchError) as caught:
        matmul(a, a.mT, **options)
    assert caught.value.value.startswith(value)
