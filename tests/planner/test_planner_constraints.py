"""Every rule of layouts: kept, broken, and the words that say what to change."""

from __future__ import annotations

import pytest
from planner_doubles import bloom_like, job

from quantbench.errors import InputError
from quantbench.latency.interconnect import cluster
from quantbench.planner.constraints import CONSTRAINTS, is_possible, strict_violations, violations
from quantbench.planner.layout import Job, Layout, StageKind, stage_kinds
from quantbench.workload import TransformerShape
from quantbench.workload.parameters import padded_vocab

GOOD = Layout(dp=8, tp=4, pp=12, mbs=2)


def messages(layout: Layout, of: Job | None = None) -> dict[str, str]:
    return {v.constraint.name: v.message for v in violations(of or job(), layout)}


def test_the_fastest_measured_layout_keeps_every_rule() -> None:
    assert violations(job(), GOOD) == ()
    assert is_possible(job(), GOOD)


@pytest.mark.parametrize(
    ("layout", "of", "name", "text"),
    [
        (Layout(8, 8, 10, 4), job(gpus=320), "gpus", "dp 8 · tp 8 · pp 10 = 640 GPUs, and there are 320; dp = 4 uses"),
        (Layout(8, 5, 12, 1), job(gpus=384), "gpus", "tp · pp must divide 384"),
        (Layout(32, 2, 1, 4), job(gpus=64, gbs=192), "gbs", "192 is no multiple of mbs 4 · dp 32 = 128 (64 left over)"),
        (Layout(8, 1, 48, 1), None, "stages", "72 layers over 48 stages leave 24 over; take layers = 48 or 96"),
        (Layout(1, 4, 96, 1), None, "stages", "72 layers cannot fill 96 stages; take pp = 72 or less"),
        (Layout(8, 3, 16, 1), None, "heads % tp", "heads 64 is no multiple of tp 3; take heads = 63 or 66"),
        (Layout(8, 16, 3, 1), None, "tp in a node", "tp 16 reaches beyond a node of 8 GPUs"),
        (Layout(8, 4, 12, 2, zero=2), None, "ZeRO with stages", "ZeRO-2 shards what pipeline stages accumulate"),
        (Layout(8, 4, 12, 2, interleave=5), None, "interleave", "72 layers cannot be cut into 12 stages of 5 equal"),
        (Layout(96, 4, 1, 1, interleave=2), None, "interleave", "interleave 2 without pipeline stages"),
    ],
)
def test_strict_rules_say_what_to_change(layout: Layout, of: Job | None, name: str, text: str) -> None:
    found = messages(layout, of)
    assert text in found[name]
    assert not is_possible(of or job(), layout)


def test_interleaving_needs_whole_groups_of_micro_batches() -> None:
    # 2048 / (2 · 8) = 128 micro-batches are no whole groups of 12.
    text = messages(Layout(8, 4, 12, 2, interleave=2))["interleave"]
    assert "in groups of pp 12, and there are 128; take a gbs or mbs that gives 120 or 132" in text


def test_embeddings_may_count_as_layers() -> None:
    shape = bloom_like(layers=70)
    plain, counted = GOOD, Layout(8, 4, 12, 2, partition="embedding")
    assert "70 layers over 12 stages leave 10 over" in messages(plain, job(shape=shape))["stages"]
    assert is_possible(job(shape=shape), counted)
    wrong = Layout(8, 4, 12, 2, partition="embedding")
    assert "72 layers and 2 embeddings over 12 stages" in messages(wrong)["stages"]
    assert is_possible(job(shape=bloom_like(layers=71)), Layout(8, 4, 12, 2, partition="uneven"))


def test_grouped_heads_and_sequence_parallelism() -> None:
    shape = TransformerShape(hidden=6144, heads=48, kv_heads=6, layers=12, vocab=51200, seq=2050)
    of = job(gpus=4, gbs=8, shape=shape)
    found = messages(Layout(1, 4, 1, 1, sequence_parallel=True), of)
    assert "kv_heads 6 and tp 4: neither divides the other" in found["kv_heads"]
    assert "seq 2050 divisible by tp 4; take seq = 2048 or 2052" in found["sequence parallel"]


def test_rules_that_only_cost_time_do_not_forbid() -> None:
    of = job(gbs=2016, shape=bloom_like(heads=96, hidden=14400))
    found = {v.constraint.name: v for v in violations(of, Layout(48, 8, 1, 1))}
    assert "head_dim 150 is no multiple of 8" in found["head_dim % 8"].message
    assert not found["head_dim % 8"].constraint.strict
    assert is_possible(of, Layout(48, 8, 1, 1))


def test_an_aligned_number_of_heads_is_offered() -> None:
    text = messages(Layout(48, 8, 1, 1), job(shape=bloom_like(heads=96, hidden=14400)))["head_dim % 8"]
    assert "heads = 72 is aligned" in text  # 14400 / 72 = 200 = 25 · 8


def test_megatrons_fused_softmax() -> None:
    # 112 heads over 8 GPUs are 14 a GPU: 14 · 1 is no multiple of 4, 14 · 2 is.
    shape = bloom_like(heads=112)
    assert "heads per GPU 14 · MBS 1 = 14" in messages(Layout(4, 8, 12, 1), job(shape=shape))["fused softmax"]
    assert "fused softmax" not in messages(Layout(4, 8, 12, 2), job(shape=shape))


def test_few_micro_batches_and_odd_vocabularies_are_told() -> None:
    found = messages(Layout(32, 1, 12, 4), job(gbs=2048))
    assert "16 micro-batches through 12 stages leave each idle 41 %" in found["bubble"]
    shape = TransformerShape(hidden=4096, heads=32, layers=12, vocab=50264)
    assert "Megatron pads it to 51200" in messages(Layout(1, 8, 1, 1), job(gpus=8, gbs=8, shape=shape))["vocab"]


def test_every_rule_has_a_name_of_its_own() -> None:
    names = [c.name for c in CONSTRAINTS]
    assert len(set(names)) == len(names)
    assert all(c.rule for c in CONSTRAINTS)


def test_layouts_and_jobs_refuse_what_is_none() -> None:
    with pytest.raises(InputError, match="layout: zero = 4; expected an integer from 0 to 3"):
        Layout(1, 1, 1, 1, zero=4)
    with pytest.raises(InputError, match="layout: recompute = 'some'; expected one of full, selective, none"):
        Layout(1, 1, 1, 1, recompute="some")
    with pytest.raises(InputError, match=r"plan: dp_overlap = 1\.5; expected a share from 0 to 1"):
        job(dp_overlap=1.5)
    with pytest.raises(InputError, match="plan: optimizer = 'sgd'"):
        job(optimizer="sgd")


@pytest.mark.parametrize(
    ("layers", "pp", "partition", "kinds"),
    [
        (72, 1, "layers", [StageKind(72, 1, first=True, last=True)]),
        (72, 2, "layers", [StageKind(36, 1, first=True), StageKind(36, 1, last=True)]),
        (70, 2, "embedding", [StageKind(35, 1, first=True), StageKind(35, 1, last=True)]),
        (7, 2, "uneven", [StageKind(3, 1, first=True), StageKind(4, 1, last=True)]),
        (
            11, 4, "uneven",
            [StageKind(2, 1, first=True), StageKind(3, 2), StageKind(3, 1, last=True)],
        ),
    ],
)  # fmt: skip
def test_how_layers_fall_onto_stages(layers: int, pp: int, partition: str, kinds: list[StageKind]) -> None:
    assert list(stage_kinds(layers, pp, partition)) == kinds


@pytest.mark.parametrize(
    ("spread", "interleave", "dense"),
    [
        (False, 1, [3, 3, 0, 0]),
        # Chunks of one layer go around the stages: layers 0 to 5 are on stages 0, 1, 2, 3, 0, 1.
        (False, 3, [2, 2, 1, 1]),
        (True, 1, [1.5, 1.5, 1.5, 1.5]),
    ],
)
def test_which_stages_hold_the_layers_without_experts(spread: bool, interleave: int, dense: list[float]) -> None:
    kinds = stage_kinds(12, 4, "layers", 6, spread, interleave)
    assert [kind.dense for kind in kinds for _ in range(kind.count)] == dense


@pytest.mark.parametrize("pp", [1, 2, 4, 8, 61])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_no_layer_without_experts_is_lost(pp: int, interleave: int) -> None:
    kinds = stage_kinds(61, pp, "uneven", 3, False, interleave)
    assert sum(kind.dense * kind.count for kind in kinds) == pytest.approx(3)


def test_stages_of_different_length_may_be_interleaved() -> None:
    of = job(gpus=256, gbs=4096, shape=bloom_like(layers=61))
    assert is_possible(of, Layout(64, 1, 4, 1, interleave=4, partition="uneven"))
    broken = strict_violations(of, Layout(64, 1, 4, 1, interleave=16, partition="uneven"))
    assert [str(v) for v in broken] == [
        "interleave: 61 layers cannot fill 4 stages of 16 chunks; take interleave = 15 or less"
    ]


@pytest.mark.parametrize("layers", [5, 12, 70, 96, 191])
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_no_layer_is_lost(layers: int, pp: int) -> None:
    kinds = stage_kinds(layers, pp, "uneven")
    assert sum(kind.layers * kind.count for kind in kinds) == layers
    assert sum(kind.count for kind in kinds) == pp
    assert (kinds[0].first, kinds[-1].last) == (True, True)


def test_vocabularies_are_padded_as_megatron_does() -> None:
    assert [padded_vocab(v, tp) for v, tp in ((250000, 8), (50257, 4), (51200, 8))] == [250880, 50688, 51200]


def test_a_cluster_that_nobody_knows() -> None:
    with pytest.raises(InputError, match="cluster: 'moon'; expected one of jean-zay-a100"):
        cluster("moon")
