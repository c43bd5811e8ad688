"""Megatron's fused softmax: its conditions, case by case, worked out by hand from its source."""

import pytest

from quantbench.errors import InputError
from quantbench.megatron import Availability, batches_per_block, megatron_fused_available

# get_batch_per_block: 128 threads / min(32, next power of two of sk) warps, times two rows per warp
# up to 128 columns.
BLOCKS = {17: 8, 32: 8, 64: 8, 128: 8, 129: 4, 256: 4, 2048: 4, 4096: 4, 16384: 4, 16: 16, 1: 256}


@pytest.mark.parametrize(("sk", "rows"), BLOCKS.items())
def test_rows_per_block(sk: int, rows: int) -> None:
    assert batches_per_block(sk) == rows


def heads_step(mbs: int, tp: int, seq: int = 2048) -> int:
    """The smallest number of heads that the causal kernel takes; its multiples are then the only
    others.
    """
    good = [
        heads
        for heads in range(tp, 40 * tp, tp)
        if megatron_fused_available(sq=seq, sk=seq, heads_per_gpu=heads // tp, mbs=mbs).available
    ]
    assert good == list(range(good[0], 40 * tp, good[0]))
    return good[0]


# (heads / TP · MBS) % 4 == 0 with TP 8: heads % 8 at MBS 4, % 16 at MBS 2, % 32 at MBS 1. BLOOM's
# notes derive 16 for MBS 4. With rows of 8 per block (sq = 128) each of them doubles.
@pytest.mark.parametrize(
    ("mbs", "tp", "seq", "step"),
    [(4, 8, 2048, 8), (2, 8, 2048, 16), (1, 8, 2048, 32), (8, 8, 2048, 8), (4, 8, 128, 16), (1, 8, 128, 64),
     (1, 1, 2048, 4), (2, 4, 2048, 8)],
)  # fmt: skip
def test_heads_that_the_causal_kernel_takes(mbs: int, tp: int, seq: int, step: int) -> None:
    assert heads_step(mbs, tp, seq) == step


def case(**changes: object) -> Availability:
    base: dict[str, object] = {"sq": 2048, "sk": 2048, "heads_per_gpu": 14, "mbs": 2}
    return megatron_fused_available(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fusion_on": False}, "fusion is switched off"),
        ({"dtype": "fp32"}, "dtype fp32 is neither fp16 nor bf16"),
        ({"mask": "none"}, "there is no mask"),
        ({"sq": 16, "sk": 16, "heads_per_gpu": 16}, "sk = 16 is not from 17 to 2048"),
        ({"sq": 2052, "sk": 2052}, "sk = 2052 is not from 17 to 2048"),
        ({"sq": 2046, "sk": 2046}, "sq = 2046 is not a multiple of 4"),
        ({"mbs": 1}, "heads per GPU 14 · MBS 1 = 14 is not a multiple of 4"),
        ({"sq": 128, "sk": 128}, "heads per GPU 14 · MBS 2 = 28 is not a multiple of 8"),
        ({"sq": 100, "sk": 100, "mask": "full"}, "sq = 100 is not a multiple of 8"),
        ({"sq": 102, "sk": 256, "mask": "full"}, "sq = 102 is not a multiple of 4"),
        ({"mask": "full", "mbs": 1}, "heads per GPU 14 · MBS 1 = 14 is not a multiple of 4"),
    ],
)
def test_each_condition_alone(changes: dict[str, object], reason: str) -> None:
    assert case(**changes).reasons == (reason,)


@pytest.mark.parametrize(
    "changes",
    [
        {"sq": 20, "sk": 20, "heads_per_gpu": 4},  # 8 matrices for 8 rows per block
        {"sq": 2048, "sk": 17, "mask": "full"},  # no condition on sk % 4 in the oldest generation
        {"sq": 100, "sk": 129, "mask": "full"},  # rows of 4 per block
        {"dtype": "fp16"},
        {"generation": "4096", "mask": "none"},
    ],
)
def test_shapes_that_are_fused(changes: dict[str, object]) -> None:
    assert case(**changes).available


def test_limits_of_the_generations() -> None:
    for generation, limit in (("2048", 2048), ("4096", 4096), ("16384", 16384)):
        assert case(generation=generation, sq=limit, sk=limit).available
        longer = case(generation=generation, sq=limit + 4, sk=limit + 4)
        assert longer.reasons == (f"sk = {limit + 4} is not from 17 to {limit}",)


def test_later_generations_ask_for_sk_in_fours() -> None:
    assert case(sk=1026, mask="full").available
    assert case(sk=1026, mask="full", generation="4096").reasons == (
        "sk = 1026 is not a multiple of 4",
    )


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"sk": 1024}, "causal with sq = 2048, sk = 1024"),
        ({"mbs": 0}, "mbs = 0"),
        ({"mask": "padding"}, "mask = 'padding'"),
        ({"generation": "8192"}, "generation = '8192'"),
        ({"dtype": "fp8"}, "dtype = 'fp8'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], value: str) -> None:
    with pytest.raises(InputError) as told:
        case(**changes)
    assert (told.value.operation, told.value.value) == ("megatron_fused_available", value)
