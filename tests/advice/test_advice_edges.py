"""Edges of the advice by hand: which one an op is past, what is just before it, and the names of
its sides.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from quantbench.advice.edges import edges
from quantbench.alignment_rules import misaligned_sides, side_names
from quantbench.device import lookup
from quantbench.latency.model_times import ModelTimes
from quantbench.launch import Launch, Tile
from quantbench.megatron import fused_softmax_failures
from quantbench.workload import Attention, Gemm, Op, Softmax, TransformerShape
from quantbench.workload.kinds import Compute

A100 = lookup("a100-sxm4-80gb")
LARGE = Launch("made up", tile=Tile(128, 256), blocks_per_sm=1)
SHAPE = TransformerShape(hidden=14400, heads=96, layers=80, vocab=250880, tp=8, attention="unfused")


def op(work: Compute, name: str = "gemm", phase: str = "forward") -> Op:
    return Op(name, phase, work, 1)


def test_a_product_just_past_a_wave() -> None:
    # 18 × 12 tiles are two full waves on 108 SMs; one row more makes 19 × 12, and a third wave of
    # 12.
    found = edges(op(Gemm(m=2305, n=3072, k=4096)), A100, LARGE)
    # Without its last column of tiles it would fit into two waves as well.
    assert [(edge.kind, edge.before) for edge in found] == [
        ("wave edge", Gemm(m=2304, n=3072, k=4096)), ("wave edge", Gemm(m=2305, n=2816, k=4096)),
    ]  # fmt: skip
    assert found[0].words == "wave 3 of 3 is 11 % full, and m = 2305 is past 2304 (128x256 tiles)"
    # 2305 · 3072 useful elements of 3 · 108 tiles, against all of 2 · 108.
    assert found[0].largest_share == pytest.approx(1 - 2305 * 3072 / (3 * 108 * 128 * 256))
    assert edges(op(Gemm(m=2304, n=3072, k=4096)), A100, LARGE) == ()


def test_a_product_just_past_a_tile_within_its_wave() -> None:
    found = edges(op(Gemm(m=1024, n=2056, k=4096)), A100, LARGE)
    assert [(edge.kind, edge.before.n) for edge in found if isinstance(edge.before, Gemm)] == [
        ("tile edge", 2048)
    ]
    assert found[0].words == "n = 2056 pads to 2304: 11 % idle (128x256 tiles)"


def test_no_edge_contradicts_the_rate() -> None:
    past = op(Gemm(m=2305, n=3072, k=4096))
    assert [edge.kind for edge in edges(past, A100, LARGE, 0.6)] == ["wave edge", "wave edge"]
    assert [edge.kind for edge in edges(past, A100, LARGE, 0.8)] == ["tile edge"]
    assert edges(past, A100, LARGE, 0.97) == ()
    two_per_sm = replace(LARGE, blocks_per_sm=2)
    assert [edge.kind for edge in edges(past, A100, two_per_sm, 0.6)] == ["tile edge"]
    # The assumed tile's waves are refuted on an H100.
    assert [edge.kind for edge in edges(past, lookup("h100-sxm5-80gb"))] == ["tile edge"]


def test_waves_are_looked_for_no_further_than_one_would_move() -> None:
    # 120 tiles: the edge at 108 is at m = 1152 of 1280, a tenth below; of 256 tiles it is much
    # further away.
    assert [edge.kind for edge in edges(op(Gemm(m=1280, n=3072, k=4096)), A100, LARGE)] == [
        "wave edge"
    ]
    assert edges(op(Gemm(m=2048, n=4096, k=4096)), A100, LARGE) == ()


def test_without_a_known_launch_the_assumed_tile_is_said() -> None:
    found = edges(op(Gemm(m=2305, n=3072, k=4096)), A100)
    assert "(128x256 tiles assumed)" in found[0].words
    on_volta = edges(op(Gemm(m=2305, n=3072, k=4096, dtype="fp16")), lookup("v100-sxm2-32gb"))
    assert all("(256x128 tiles assumed)" in edge.words for edge in on_volta)


@pytest.mark.parametrize(
    ("gemm", "sides"),
    [
        (Gemm(100, 150, 64), {"n": 8}),
        (Gemm(100, 64, 150, layout="nt"), {"k": 8}),
        (Gemm(100, 64, 150), {"k": 8}),
        (Gemm(100, 64, 64, layout="tn"), {"m": 8}),
        (Gemm(100, 64, 64), {}),
        (Gemm(100, 66, 66, dtype="tf32"), {"n": 4, "k": 4}),
        (Gemm(100, 24, 24, dtype="fp8"), {"k": 16}),
        (Gemm(100, 150, 64, dtype="fp8", layout="tn"), {"n": 8}),
        (Gemm(100, 64, 100, dtype="fp8", layout="tn"), {"k": 16}),
        (Gemm(100, 24, 32, dtype="fp8", layout="nt"), {}),  # its output is bf16
    ],
    ids=str,
)
def test_rows_that_are_no_whole_vectors(gemm: Gemm, sides: dict[str, int]) -> None:
    assert misaligned_sides(gemm) == sides


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "nvfp4"])
def test_alignment_names_the_side_that_the_time_uses(dtype: str) -> None:
    times = ModelTimes(lookup("b200-sxm-180gb"))
    whole = Gemm(4096, 4096, 4096, dtype=dtype, layout="tn")
    for side in ("m", "k"):
        odd = replace(whole, m=4095) if side == "m" else replace(whole, k=4095)
        slow = times.estimates([odd, whole])
        words = " ".join(
            edge.words for edge in edges(op(odd), times.device) if edge.kind == "alignment"
        )
        assert (slow[0].latency_us > 1.2 * slow[1].latency_us) == (
            f"{side} = 4095 is no multiple" in words
        )


def test_misaligned_heads_are_named_and_cut_down_to_whole_vectors() -> None:
    by_label = {o.label: o for o in SHAPE.ops()}
    for label, side in (
        ("scores", "k"),
        ("context", "n"),
        ("scores.wgrad", "n"),
        ("context.wgrad", "n"),
    ):
        found = edges(by_label[label], A100, LARGE)[0]
        assert found.kind == "alignment"
        assert found.words == "head_dim = 150 is no multiple of 8: rows aligned to 4 bytes, not 16"
        assert found.before == replace(by_label[label].workload, **{side: 144})
    assert [e.kind for e in edges(by_label["qkv"], A100, LARGE)].count("alignment") == 0


def test_fused_attention_is_past_a_vector_and_a_padding() -> None:
    found = edges(op(Attention(1, 12, 2048, 2048, 150), "attention"), A100)
    assert [(e.kind, e.before.head_dim) for e in found if isinstance(e.before, Attention)] == [
        ("alignment", 144), ("tile edge", 128),
    ]  # fmt: skip
    assert found[1].words == "head_dim = 150 pads to 160: 6.2 % idle"
    assert edges(op(Attention(1, 12, 2048, 2048, 128), "attention"), A100) == ()
    assert (
        edges(op(Attention(1, 12, 2048, 2048, 24), "attention"), A100) == ()
    )  # nothing narrower is whole


def test_a_softmax_that_megatron_does_not_fuse() -> None:
    taken = Softmax(batch=16, rows=2048, cols=2048, mask_batch=2)
    assert fused_softmax_failures(taken) == ()
    assert edges(op(taken, "softmax"), A100) == ()
    refused = Softmax(batch=9, rows=2048, cols=2048)
    (found,) = edges(op(refused, "softmax"), A100)
    assert (found.kind, found.before) == ("fused softmax", refused)
    assert found.words == (
        "Megatron's fused softmax does not run: heads per GPU 9 · MBS 1 = 9 is not a multiple of 4"
    )  # fmt: skip


def test_every_side_of_every_product_has_the_name_of_its_size() -> None:
    shape = TransformerShape(
        hidden=1024,
        heads=16,
        kv_heads=4,
        ffn=3072,
        gated=True,
        seq=384,
        vocab=51200,
        tp=2,
        mbs=2,
        attention="unfused",
    )
    sizes = {
        "tokens": 768, "hidden": 1024, "qkv width / tp": (8 + 2 * 2) * 64, "seq": 384, "head_dim": 64,
        "heads · head_dim / tp": 512, "ffn / tp": 1536, "2 · ffn / tp": 3072, "vocab / tp": 25600,
    }  # fmt: skip
    fused_gate = replace(shape, gate_fused=True)
    products = [o for s in (shape, fused_gate) for o in s.ops() if isinstance(o.workload, Gemm)]
    assert {o.name for o in products} >= {"mlp_gate", "mlp_up_gate", "scores", "context", "logits"}
    for product in products:
        named = {side: sizes[name] for side, name in side_names(product).items()}
        assert named == {side: getattr(product.workload, side) for side in "mnk"}, product.label
