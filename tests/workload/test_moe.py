"""Tests the routing and the products of a mixture-of-experts layer."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantbench.errors import InputError
from quantbench.launch import Tile
from quantbench.quantization import padded_rows, quantize
from quantbench.workload import Gemm, GroupedGemm, MoE

MIXTRAL = MoE(tokens=1000, hidden=4096, expert_ffn=14336, num_experts=8, top_k=2)


@settings(deadline=None)
@given(
    tokens=st.integers(1, 3000),
    ranks=st.sampled_from([1, 2, 8]),
    local=st.integers(1, 40),
    top_k=st.integers(1, 8),
    distribution=st.sampled_from(
        ["balanced", "power_law_1", "power_law_1.2", "power_law_3", "histogram"]
    ),
    seed=st.integers(0, 5),
)
def test_every_draw_routes_each_token_to_top_k_different_experts(
    tokens: int, ranks: int, local: int, top_k: int, distribution: str, seed: int
) -> None:
    experts = ranks * local
    top_k = min(top_k, experts)
    counts = tuple(100 if e == 0 else e % 3 for e in range(experts))
    layer = MoE(
        tokens, 64, 64, experts, top_k, ep=ranks, seed=seed,
        distribution=counts if distribution == "histogram" else distribution,
    )  # fmt: skip
    rows = layer.tokens_per_expert
    assert len(rows) == experts
    assert sum(rows) == tokens * top_k
    assert min(rows) >= 0
    assert max(rows) <= tokens  # an expert is chosen at most once by a token
    assert sum(layer.rows_per_rank) == sum(rows)
    assert layer.skew >= 1
    assert layer.rows_per_rank[layer.busiest_rank] == max(layer.rows_per_rank)
    assert replace(layer).tokens_per_expert == rows  # the same seed draws the same rows


def test_balanced_rows_differ_by_at_most_one_on_every_rank() -> None:
    layer = replace(MIXTRAL, tokens=1001, ep=4)
    assert set(layer.tokens_per_expert) == {250, 251}
    assert max(layer.rows_per_rank) - min(layer.rows_per_rank) <= 1


def test_a_power_law_has_the_spread_of_its_density() -> None:
    layer = replace(MIXTRAL, tokens=8192, num_experts=256, top_k=8, distribution="power_law_1.2")
    # Share of the rows of the busiest tenth of the experts; they begin at `edge` of the density
    # x^-1.2 on [1, most].
    most = 0.8 * 8192
    edge = (1 - 0.9 * (1 - most**-0.2)) ** -5
    expected = (most**0.8 - edge**0.8) / (most**0.8 - 1)
    shares = []
    for seed in range(20):
        rows = sorted(replace(layer, seed=seed).tokens_per_expert, reverse=True)
        shares.append(sum(rows[:26]) / sum(rows))
    assert sum(shares) / len(shares) == pytest.approx(expected, abs=0.03)
    assert len(set(shares)) == 20


def test_a_histogram_is_scaled_to_the_tokens() -> None:
    layer = replace(MIXTRAL, tokens=100, num_experts=4, distribution=(4, 2, 1, 1), ep=2)
    assert layer.tokens_per_expert == (100, 50, 25, 25)
    assert layer.rows_per_rank == (150, 50)
    assert layer.skew == 1.5


def test_a_layer_is_the_products_of_its_busiest_rank() -> None:
    layer = replace(MIXTRAL, num_experts=4, distribution=(1, 1, 4, 2), ep=2, tp=2)
    up, down = layer.grouped_gemms().values()
    assert up == GroupedGemm((1000, 500), n=14336, k=4096, layout="nt")
    assert down == GroupedGemm((1000, 500), n=4096, k=7168, layout="nt")
    assert layer.flops == up.flops + down.flops == 2 * 1500 * 4096 * 3 * 7168
    assert list(replace(layer, gated=False).grouped_gemms()) == ["experts_up", "experts_down"]


def test_grouped_arithmetic_is_the_sum_over_experts_with_rows() -> None:
    grouped = GroupedGemm((300, 0, 1, 128), n=512, k=256, layout="nt")
    assert grouped.gemms == tuple(Gemm(m, 512, 256, layout="nt") for m in (300, 1, 128))
    assert grouped.flops == sum(gemm.flops for gemm in grouped.gemms)
    assert grouped.min_bytes == sum(gemm.min_bytes for gemm in grouped.gemms)
    tile = Tile(128, 256)
    whole = quantize(grouped, tile, sm_count=4)
    assert (
        whole.num_tiles
        == sum(quantize(gemm, tile, sm_count=4).num_tiles for gemm in grouped.gemms)
        == 10
    )
    assert (whole.num_waves, whole.last_wave_tiles) == (3, 2)
    assert whole.tile_efficiency == pytest.approx(grouped.rows / padded_rows(grouped, 128))


def test_weight_gradients_reduce_over_rows_and_write_zeros_for_idle_experts() -> None:
    grad = GroupedGemm((300, 0, 1), n=512, k=256, layout="tn")
    assert grad.gemms == (Gemm(256, 512, 300, layout="tn"), Gemm(256, 512, 1, layout="tn"))
    assert grad.flops == replace(grad, layout="nn").flops
    assert grad.min_bytes == sum(gemm.min_bytes for gemm in grad.gemms) + prod((512, 256, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"top_k": 9}, "top_k = 9"),
        ({"ep": 3}, "num_experts = 8 with ep = 3"),
        ({"tp": 5}, "expert_ffn = 14336 with tp = 5"),
        ({"tokens": 0}, "tokens = 0"),
        ({"distribution": "power_law_"}, "distribution = 'power_law_'"),
        ({"distribution": "power_law_-1"}, "power_law_-1"),
        ({"distribution": "power_law_nan"}, "power_law_nan"),
        ({"distribution": (1, 2)}, "distribution of 2 experts"),
        ({"distribution": (0,) * 8}, "all 0"),
        ({"distribution": (1.5,) * 8}, "1.5"),
    ],
)
def test_errors_name_the_wrong_value(change: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match="MoE: ") as raised:
        replace(MIXTRAL, **change)
    assert named in str(raised.value)
    with pytest.raises(InputError, match="tokens_per_expert"):
        GroupedGemm((0, 0), 16, 16)
