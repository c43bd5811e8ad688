"""Our grouped GEMM kernels against float64, run by triton's interpreter on the CPU.

Tolerances: see `test_kernels_gemm`. Outputs are filled with NaN first, so that an element that is
    not written shows.
"""

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import EXAMPLES, in_interpreter
from quantbench.kernels.gemm import grouped

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.providers.inputs import input_templates, output_templates
from quantbench.quantization import quantize
from quantbench.workload import GroupedGemm

TOLERANCE = {"fp16": 5e-4, "fp32": 2e-6, "fp8": 1e-2}
SMALL = Tile(32, 16, block_k=32, stages=2, num_warps=4)
SKEWED = (33, 0, 1, 0, 64, 7)


def operands(work: GroupedGemm) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(work.rows)
    a, b = (
        torch.empty_strided(like.shape, like.stride()).normal_(generator=generator).to(like.dtype)
        for like in input_templates(work)
    )
    return a, b


def check(work: GroupedGemm, tile: Tile = SMALL, **options: object) -> None:
    a, b = operands(work)
    plan = grouped.plan(a, b, work.tokens_per_expert, tile=tile, **options)  # type: ignore[arg-type]
    plan.out.fill_(torch.nan)
    plan.run()
    reference = references.grouped(work, a.double(), b.double())
    assert plan.out.dtype == output_templates(work)[0].dtype
    assert plan.out.shape == reference.shape
    assert references.relative_error(plan.out, reference) <= TOLERANCE[work.dtype]


@in_interpreter
@pytest.mark.parametrize("path", ["pointers", "descriptors"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("schedule", grouped.SCHEDULES)
def test_forward_and_both_gradients(schedule: str, layout: str, path: str) -> None:
    """Empty experts, one expert with all tokens, rows that are no multiple of the tile."""
    for counts in (SKEWED, (0, 70, 0)):
        work = GroupedGemm(counts, n=24, k=40, dtype="fp16", layout=layout)
        check(work, schedule=schedule, path=path)


@in_interpreter
@EXAMPLES
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), n=st.integers(1, 40),
    k=st.integers(1, 70), layout=st.sampled_from(["nn", "nt", "tn"]), dtype=st.sampled_from(["fp16", "fp32"]),
    schedule=st.sampled_from(grouped.SCHEDULES), programs=st.integers(1, 5),
)  # fmt: skip
def test_any_routing(
    counts: list[int], n: int, k: int, layout: str, dtype: str, schedule: str, programs: int
) -> None:
    check(GroupedGemm(tuple(counts), n, k, dtype, layout), schedule=schedule, programs=programs)


@in_interpreter
def test_fp8_products_come_out_in_bf16() -> None:
    check(
        GroupedGemm(SKEWED, n=48, k=96, dtype="fp8", layout="nt"),
        Tile(32, 32, block_k=32, stages=2, num_warps=4),
    )


@in_interpreter
def test_there_is_a_block_for_each_tile_of_each_expert() -> None:
    work = GroupedGemm(SKEWED, n=40, k=56, dtype="fp16")
    launch = grouped.plan(*operands(work), SKEWED, tile=SMALL).launch
    assert launch.grid == (quantize(work, SMALL, sm_count=1).num_tiles, 1, 1)
    assert launch.grid == ((2 + 0 + 1 + 0 + 2 + 1) * 3, 1, 1)


@in_interpreter
@pytest.mark.parametrize(
    ("shape", "weights", "counts", "named"),
    [
        ((8, 16), (2, 16, 8), (4, 5), "9 in all"),
        ((8, 16), (2, 16, 8), (9, -1), "counts of at least 0"),
        ((8, 16), (2, 16, 8), (4, 3, 1), "b of 2 experts"),
        ((8, 16), (2, 8, 8), (4, 4), "k = 16"),
        ((2, 8, 16), (2, 16, 8), (4, 4), "a of shape"),
    ],
)
def test_operands_that_do_not_fit(
    shape: tuple[int, ...], weights: tuple[int, ...], counts: tuple[int, ...], named: str
) -> None:
    a, b = torch.zeros(shape).half(), torch.zeros(weights).half()
    with pytest.raises(InputError, match=named):
        grouped.grouped_matmul(a, b, counts)
