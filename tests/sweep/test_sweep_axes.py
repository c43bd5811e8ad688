"""Axes as text, defaults, what is refused."""

from dataclasses import replace

import pytest
from made_devices import A100

from quantbench.errors import InputError
from quantbench.sweep.axes import (
    Axis,
    Held,
    check_axes,
    ops_at,
    parse_axis,
    places_of,
    with_defaults,
)
from quantbench.sweep.edges import parse_grid, predicted_edges
from quantbench.sweep.options import SweepOptions, options_from_json, options_to_json
from quantbench.workload import Gemm, GroupedGemm, MoE, Op, Permute, Workload

GPU = with_defaults(Held(), A100)


def ops_of(text: str, held: Held) -> tuple[Op, ...]:
    """The ops of one point, whose sizes are written as axes."""
    axes = tuple(parse_axis(dim) for dim in text.split())
    return ops_at(axes, {axis.field: axis.values[0] for axis in axes}, held)[0]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("hidden=1024:4096:1024", (1024, 2048, 3072, 4096)),
        ("hidden=1024:1200", (1024, 1088, 1152)),  # the default step of hidden is 64
        ("tp=8,1,2,2,4", (1, 2, 4, 8)),
        ("n=5", (5,)),
        ("m=1:3:1,100", (1, 2, 3, 100)),
    ],
)
def test_ranges_and_lists(text: str, values: tuple[int, ...]) -> None:
    assert parse_axis(text) == Axis(text.partition("=")[0], values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("size=1:2", "'size'"),
        ("hidden=4096:1024", "'4096:1024'"),
        ("hidden=0:10", "'0:10'"),
        ("hidden=1:10:0", "'1:10:0'"),
        ("hidden=a:b", "'a:b'"),
        ("hidden=", "''"),
        ("hidden=1:2:3:4", "'1:2:3:4'"),
        ("hidden=-8", "'-8'"),
        ("hidden=1024@cliffs", "'@cliffs'"),
        ("hidden=1024@edges", "'1024@edges'"),
        ("hidden=99999999999", "'99999999999'"),
    ],
)
def test_what_is_not_a_range_is_named(text: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_axis(text)
    assert caught.value.operation.startswith("--dim")
    assert caught.value.value == value


def test_hidden_gives_the_linear_layers() -> None:
    ops = ops_of("hidden=4096", GPU)
    assert [op.name for op in ops] == ["qkv", "proj", "mlp_up", "mlp_down"]
    assert ops[0].workload == Gemm(m=2048, n=3 * 4096, k=4096, layout="nt")


def test_hidden_without_heads_takes_a_divisor() -> None:
    # 1032 = 8 · 129: head_dim 129 is the nearest to 128 that divides it.
    ops = ops_of("hidden=1032", GPU)
    assert ops[0].workload == Gemm(m=2048, n=3096, k=1032, layout="nt")


def test_a_layer_runs_one_attention_in_its_order() -> None:
    names = [op.name for op in ops_of("tp=1", replace(GPU, heads=32))]
    assert names == ["qkv", "attention", "proj", "mlp_up", "mlp_down", "logits"]
    names = [op.name for op in ops_of("tp=1", replace(GPU, heads=32, attention="unfused"))]
    assert names == ["qkv", "scores", "softmax", "context", "proj", "mlp_up", "mlp_down", "logits"]


def test_ops_of_two_kinds_of_attention_are_refused() -> None:
    with pytest.raises(InputError, match=r"^--ops: attention,softmax; expected "):
        Held(ops=("attention", "softmax"))


def test_plain_products() -> None:
    held = with_defaults(Held(k=64, layout="tn", batch=3, dtype="fp16"), A100)
    (op,) = ops_of("m=16 n=32", held)
    assert op.workload == Gemm(16, 32, 64, batch=3, dtype="fp16", layout="tn")


def expert_ops(text: str, held: Held) -> dict[str, Workload]:
    found = ops_of(text, with_defaults(held, A100, text.split()))
    return {op.label: op.workload for op in found}


MIXTRAL = Held(hidden=4096, experts=8, top_k=2, moe_ffn=14336, tokens=512)


def test_experts_take_the_place_of_the_mlp() -> None:
    found = expert_ops("experts=4", MIXTRAL)
    assert found == {
        "permute": Permute(512, 4096, 2),
        "experts_up_gate": GroupedGemm((256,) * 4, 2 * 14336, 4096, layout="nt"),
        "experts_down": GroupedGemm((256,) * 4, 4096, 14336, layout="nt"),
        "unpermute": Permute(512, 4096, 2, direction="unpermute"),
    }
    assert list(expert_ops("hidden=4096", MIXTRAL)) == ["qkv", "proj", *found]
    # Experts are not a default of other axes.
    assert "mlp_up" in expert_ops("hidden=4096", Held())


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("tokens=64", (16,) * 8),
        ("top-k=4", (256,) * 8),
        ("ep=4", (512,) * 2),  # four GPUs' tokens, a quarter of the experts
        ("tokens=64 ep=8", (128,)),
        ("tp=2", (128,) * 8),
    ],
)
def test_rows_of_the_experts_of_one_gpu(text: str, rows: tuple[int, ...]) -> None:
    down = expert_ops(text, MIXTRAL)["experts_down"]
    assert isinstance(down, GroupedGemm)
    assert down.tokens_per_expert == rows
    assert down.k == (7168 if text == "tp=2" else 14336)


def test_routing_is_a_distribution_or_counts() -> None:
    named = expert_ops("tokens=512", replace(MIXTRAL, routing="power_law_1.2"))["experts_down"]
    assert (
        named
        == MoE(512, 4096, 14336, 8, 2, distribution="power_law_1.2").grouped_gemms()["experts_down"]
    )
    measured = replace(MIXTRAL, routing=(512, 512, 0, 0, 0, 0, 0, 0))
    histogram = expert_ops("tokens=512", measured)["experts_down"]
    assert isinstance(histogram, GroupedGemm)
    assert histogram.tokens_per_expert == (512, 512, 0, 0, 0, 0, 0, 0)
    assert (
        options_from_json(options_to_json(SweepOptions(dims=("tokens=8",), held=measured))).held
        == measured
    )


def test_gradients_of_experts_keep_their_rows() -> None:
    held = replace(MIXTRAL, direction="backward", ops=("experts_down", "permute"))
    found = expert_ops("experts=8", held)
    rows = (128,) * 8
    assert found == {
        "permute.backward": Permute(512, 4096, 2, direction="unpermute"),
        "experts_down.dgrad": GroupedGemm(rows, n=14336, k=4096, layout="nn"),
        "experts_down.wgrad": GroupedGemm(rows, n=14336, k=4096, layout="tn"),
    }


def test_edges_lie_where_tokens_per_expert_fill_a_tile() -> None:
    """Products of 512 columns in 128x256 tiles: a wave of 108 blocks holds 54 times 128 rows. At
    3072 tokens 8 experts have 768 rows each, 48 times 128. Of the next rows, two per token, each
    begins another expert's tile."""
    held = replace(MIXTRAL, hidden=512, moe_ffn=512, ops=("experts_down",))
    (axis,) = parse_grid(("tokens=256:4096:256@edges",), with_defaults(held, A100), A100)
    added = set(axis.values) - set(range(256, 4097, 256))
    assert added == {3072 + 6 // 2, 3072 + 6 // 2 + 1}


@pytest.mark.parametrize(
    "dims", [(), ("tokens=1", "seq=2"), ("experts=1", "m=2"), ("hidden=1", "hidden=2")]
)
def test_axes_that_make_no_grid(dims: tuple[str, ...]) -> None:
    with pytest.raises(InputError):
        check_axes(tuple(parse_axis(text) for text in dims))


@pytest.mark.parametrize(
    ("held", "hidden"),
    [
        (Held(heads=7), 1024),
        (Held(heads=4, tp=8), 1024),
        (Held(tp=8), 1025),
        (Held(head_dim=128, ops=("attention",)), 1000),
    ],
)
def test_shapes_that_cannot_be(held: Held, hidden: int) -> None:
    with pytest.raises(InputError, match=r"with (heads|tp|head_dim) = "):
        ops_of(f"hidden={hidden}", with_defaults(held, A100))


def test_edges_stand_on_both_sides_of_a_wave() -> None:
    # m = 2304 and 128x256 tiles: 18 row tiles; 6 column tiles make 108 blocks, one wave of 108 SMs:
    # 1536 is its edge.
    held = with_defaults(Held(m=2304, k=1024), A100)
    (axis,) = parse_grid(("n=1024:2048:1024@edges",), held, A100)
    assert axis.values == (1024, 1536, 1600, 2048)


def test_sizes_past_an_edge_are_whole_lines_in_four_bits() -> None:
    held = with_defaults(Held(m=2304, k=1024, dtype="nvfp4"), A100)
    assert parse_grid(("n=1024:2048:1024@edges",), held, A100)[0].values == (1024, 1536, 1792, 2048)


def test_predicted_edges_of_hidden_repeat_those_of_its_products() -> None:
    held = with_defaults(Held(ops=("proj",)), A100)
    edges = predicted_edges((parse_axis("hidden=1024:8192:1024"),), 0, held, A100)
    # proj is 2048 × hidden: 16 row tiles, so 6 column tiles of 256 fit into a wave: 1536 is its
    # edge, 13 make two.
    assert edges[:2] == [1536, 3328]


def test_hidden_varies_at_a_fixed_head_dim_and_products_keep_every_size() -> None:
    held = with_defaults(Held(ops=("qkv", "attention"), heads_per_kv_head=4), A100)
    axes = (parse_axis("hidden=4096:4608:64"),)
    places, left_out = places_of(axes, held)
    assert [at["hidden"] for at, _ in places] == list(axes[0].values)
    by_hidden = {at["hidden"]: {op.name: op.workload for op in ops} for at, ops in places}
    attention = {
        hidden: ops["attention"] for hidden, ops in by_hidden.items() if "attention" in ops
    }
    assert {
        hidden: (work.heads, work.kv_heads, work.head_dim) for hidden, work in attention.items()
    } == {
        4096: (32, 8, 128),
        4608: (36, 9, 128),
    }
    # Products do not know heads: their widths are those of any heads in this ratio.
    assert {hidden: ops["qkv"].n for hidden, ops in by_hidden.items()} == {
        h: h + h // 2 for h in axes[0].values
    }
    assert left_out[0] == "hidden = 4160 with head_dim = 128: without attention"
    assert len(left_out) == len(places) - len(attention)


def test_heads_that_are_given_stay() -> None:
    held = with_defaults(Held(ops=("attention",), heads=32), A100)
    (op,) = ops_of("hidden=5120", held)
    assert (op.workload.heads, op.workload.head_dim) == (32, 160)


def test_a_misaligned_size_leaves_out_only_what_needs_heads() -> None:
    held = with_defaults(Held(ops=("qkv", "mlp_up", "attention"), heads_per_kv_head=4), A100)
    ((_, ops),) = places_of((parse_axis("hidden=4097"),), held)[0]
    assert [(op.name, op.workload.k) for op in ops] == [("mlp_up", 4097)]
