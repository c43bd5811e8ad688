"""Time of an iteration, worked out by hand with even times."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_doubles import A100, EVERYWHERE, PLAIN, EvenTimes, bloom_like, job

from quantbench.alignment_rules import misaligned_sides
from quantbench.device import lookup
from quantbench.latency.estimate import Estimate
from quantbench.latency.interconnect import Link, cluster, reference_cluster, same_site
from quantbench.latency.model_times import BestTimes
from quantbench.latency.op_times import UNALIGNED_SHARE, CachedTimes
from quantbench.planner.calibration import Calibration, shipped
from quantbench.planner.iteration import (
    Iteration,
    data_parallel_s,
    exposed_s,
    iteration,
    point_to_point_s,
    tied_embedding_s,
)
from quantbench.planner.layer_time import LayerTime, LayerTimes, TimeInterval, _timed, divided
from quantbench.planner.layout import Job, LayerKey, Layout, layer_weights, stages_of
from quantbench.planner.memory import memory, stage_parameters
from quantbench.planner.row_results import predict_case
from quantbench.planner.rows import Case, TableRow
from quantbench.workload import Gemm, GroupedGemm, TransformerShape
from quantbench.workload.kinds import Compute
from quantbench.workload.presets import preset


def core(time: LayerTime) -> TimeInterval:
    return time.core[0] + time.core[1]


def times_of(of: Job, layout: Layout, calibration: Calibration = PLAIN) -> Iteration:
    return iteration(of, layout, LayerTimes(of, EvenTimes()), calibration)


def layer(key: LayerKey, **changes: Any) -> LayerTime:
    """One layer of a job of eight GPUs."""
    of = job(**{"gpus": 8, "gbs": 8, **changes})
    return LayerTimes(of, EvenTimes()).at(key)


def test_the_overhead_of_a_step_is_added_once_in_milliseconds() -> None:
    layout = Layout(8, 4, 12, 2)
    slower = times_of(job(gbs=2304), layout, replace(PLAIN, step_overhead_ms=100.0))
    assert slower.sec.mid == pytest.approx(times_of(job(gbs=2304), layout).sec.mid + 0.1)


@pytest.mark.parametrize(
    "layout",
    [Layout(8, 4, 12, 2), Layout(384, 1, 1, 1, zero=3), Layout(16, 2, 12, 1, recompute="none")],
)
def test_parts_add_up_to_the_whole(layout: Layout) -> None:
    found = times_of(job(gbs=2304), layout)
    assert sum(found.parts.values()) == pytest.approx(found.sec.mid, rel=1e-9)
    assert found.sec.low <= found.sec.mid <= found.sec.high


def test_products_are_what_flops_at_the_given_rate_take() -> None:
    of = job(gpus=8, gbs=4, shape=bloom_like(layers=6))
    found = times_of(of, Layout(1, 8, 1, 1))
    h, s = 14336, 2048
    weights = 3 * 2 * 12 * h**2 * s / 8 / 250e12
    assert found.products == pytest.approx(6 * 4 * weights, rel=1e-9)
    # Recomputation repeats the forward third, attention's forward half-third, bytes and
    # collectives.
    assert found.recompute > 6 * 4 * weights / 3


def test_a_pipeline_waits_for_its_slowest_stage_and_fills_once() -> None:
    of = job(gpus=32, gbs=16, shape=bloom_like(layers=8))
    single = LayerTimes(of, EvenTimes()).at(LayerKey(8, 1)).fitted(PLAIN)
    found = times_of(of, Layout(1, 8, 4, 1))
    hop = point_to_point_s(of, Layout(1, 8, 4, 1))
    layer = (single.once + single.repeated("full")).mid
    first = 2 * layer + hop + single.embedding
    middle = 2 * layer + 2 * hop
    last = 2 * layer + hop + single.logits.mid
    rest = found.data_parallel + found.optimizer
    assert last > middle
    assert found.sec.mid == pytest.approx(16 * last + first + 2 * middle + rest, rel=1e-9)
    assert found.bubble == pytest.approx(first + 2 * middle)
    assert found.bubble_share == pytest.approx(found.bubble / found.sec.mid)


def test_interleaving_divides_the_bubble() -> None:
    of = job(gpus=32, gbs=16, shape=bloom_like(layers=16))
    plain, chunked = (times_of(of, Layout(1, 8, 4, 1, interleave=v)) for v in (1, 4))
    assert chunked.bubble == pytest.approx(plain.bubble / 4, rel=0.15)  # each chunk sends once more
    assert chunked.point_to_point == pytest.approx(4 * plain.point_to_point)


def test_recomputation_costs_a_forward_pass() -> None:
    of = job(gpus=8, gbs=4, shape=bloom_like(layers=6))
    full, selective, none = (
        times_of(of, Layout(1, 8, 1, 1, recompute=kind)) for kind in ("full", "selective", "none")
    )
    assert none.recompute == 0
    assert 0 < selective.recompute < 0.2 * full.recompute
    assert full.sec.mid == pytest.approx(none.sec.mid + full.recompute)


def test_the_overhead_and_the_factor_are_what_they_say() -> None:
    of, layout = job(gpus=8, gbs=4, shape=bloom_like(layers=6)), Layout(1, 8, 1, 1)
    plain = times_of(of, layout)
    slower = times_of(of, layout, replace(PLAIN, layer_overhead_ms=5.0, tensor_factor=2.0))
    assert slower.overhead == pytest.approx(6 * 4 * 0.005)
    assert slower.tensor == pytest.approx(2 * plain.tensor)
    assert slower.recompute == pytest.approx(
        plain.recompute + plain.tensor / 2
    )  # two of six are done again
    assert slower.products == plain.products


def test_unaligned_heads_run_at_a_share_of_fp32() -> None:
    time = layer(LayerKey(8, 1), shape=bloom_like(layers=1, hidden=14400, heads=96))
    flops = 6 * 2 * 12 * 2048**2 * 150  # forward and backward, two products each
    assert core(time).mid == pytest.approx(flops / (19.5e12 * UNALIGNED_SHARE), rel=1e-3)


def test_the_softmax_fallback_moves_more_bytes() -> None:
    # 14 heads a GPU: one sample misses the kernel, two samples meet it.
    alone, pair = (layer(LayerKey(8, mbs), shape=bloom_like(layers=1, heads=112)) for mbs in (1, 2))
    products = 6 * 2 * 14 * 2048**2 * 128 / 250e12
    assert core(alone).mid - products > 2.5 * (core(pair).mid - 2 * products)


def test_rings_share_a_nodes_adapters() -> None:
    of = job(gbs=2048)
    share = replace(PLAIN, data_parallel_share=0.5)
    count = 10**9
    # TP 8: one member of each group per node, eight rings; volume 2, (dp - 1)/dp of 2 GB, at half
    # of 50 GB/s. Two buckets go around twice, over three hops of 20 µs.
    hops = 2 * 2 * 3 * 20e-6
    one = data_parallel_s(of, Layout(4, 8, 12, 1), share, count)
    assert one == pytest.approx(hops + 8 * 2 * 2e9 * 3 / 4 / 25e9)
    # TP 4: two members per node, four rings.
    two = data_parallel_s(of, Layout(8, 4, 12, 1), share, count)
    assert two == pytest.approx(hops + 4 * 2 * 2e9 * 7 / 8 / 25e9)
    assert data_parallel_s(of, Layout(1, 8, 48, 1), share, count) == 0


def test_zero_3_gathers_and_reduces_every_micro_batch() -> None:
    of = job(gbs=2016)
    plain, sharded = (
        data_parallel_s(of, Layout(48, 8, 1, 1, zero=z), PLAIN, 10**9) for z in (1, 3)
    )
    hop = 47 * 20e-6
    each = (plain - 2 * 2 * hop) / 2
    assert sharded == pytest.approx(3 * 42 * (each + 72 * hop))  # layer by layer, not in buckets
    assert exposed_s(of, Layout(48, 8, 1, 1, zero=3), PLAIN, 10.0, 4.0) == 6.0
    assert exposed_s(of, Layout(48, 8, 1, 1, zero=1), PLAIN, 10.0, 4.0) == 10.0
    assert exposed_s(replace(of, dp_overlap=0.3), Layout(48, 8, 1, 1), PLAIN, 10.0, 9.0) == 7.0


@pytest.mark.parametrize(("zero", "micro_batches"), [(0, 1), (1, 1), (2, 8)])
def test_traffic_hides_behind_the_last_micro_batch_or_behind_all(
    zero: int, micro_batches: int
) -> None:
    """Gradients that stay whole travel once, after the last of eight micro-batches; sharded ones
    after each.
    """
    of, layout = job(gpus=16, gbs=16, shape=bloom_like(layers=1)), Layout(2, 8, 1, 1, zero=zero)
    bare, hidden = (times_of(replace(of, dp_overlap=share), layout) for share in (0.0, 1.0))
    computed = hidden.sec.mid - hidden.data_parallel - hidden.optimizer
    assert hidden.data_parallel > 0
    assert bare.data_parallel - hidden.data_parallel == pytest.approx(computed * micro_batches / 8)


def test_links_inside_a_node_and_between_nodes() -> None:
    inside = job(gpus=8, gbs=8, shape=bloom_like(layers=4))
    between = job(gpus=32, gbs=32, shape=bloom_like(layers=4))
    gathered = data_parallel_s(inside, Layout(8, 1, 1, 1), PLAIN, 10**8)
    assert gathered == inside.cluster.intra_node(8).time_s(2 * 2e8 * 7 / 8)
    sent, stages = 2048 * 14336 * 2 / 2, Layout(4, 2, 4, 1)
    assert point_to_point_s(inside, Layout(2, 2, 2, 1)) == inside.cluster.intra_node(2).time_s(sent)
    assert point_to_point_s(between, stages) == pytest.approx(20e-6 + sent / 6.25e9)
    assert tied_embedding_s(between, stages, PLAIN, 10**8) == pytest.approx(2e8 / 6.25e9)
    assert tied_embedding_s(inside, Layout(4, 2, 1, 1), PLAIN, 10**8) == 0


def test_gathers_that_overlap_show_in_part_and_never_beyond_the_computation() -> None:
    of, waits = job(gbs=8 * 48, dp_overlap=1.0), replace(PLAIN, exposed_share=0.6)

    def shown(zero: int, traffic_s: float) -> float:
        return exposed_s(of, Layout(48, 8, 1, 1, zero=zero), waits, traffic_s, 4.0)

    # Two of three passes gather; reductions show a quarter as much.
    share = 0.6 * (2 / 3 + 0.25 / 3)
    assert [shown(3, s) for s in (2.0, 4.0, 6.0)] == pytest.approx(
        [2 * share, 4 * share, 4 * share + 2]
    )
    assert shown(0, 2.0) < shown(1, 2.0)


def test_context_parallelism_divides_tokens_and_leaves_a_ring_to_overlap() -> None:
    one, ring = (layer(LayerKey(2, 1, cp=cp), gpus=16, gbs=16) for cp in (1, 4))
    assert ring.products[0].mid == pytest.approx(one.products[0].mid / 4)
    assert core(ring).mid == pytest.approx(core(one).mid / 4)
    assert ring.context >= 0


@pytest.mark.parametrize("constant", ["straggler_spread", "congestion"])
def test_stragglers_and_congestion_grow_with_the_nodes(constant: str) -> None:
    def ratio(gpus: int) -> float:
        of, layout = (
            job(gpus=gpus, gbs=gpus, shape=bloom_like(layers=1)),
            Layout(gpus // 8, 8, 1, 1),
        )
        slower = times_of(of, layout, replace(PLAIN, **{constant: 0.05}))
        return slower.sec.mid / times_of(of, layout).sec.mid

    assert ratio(512) > ratio(16) > 1


def test_sequence_parallelism_divides_norms_and_residuals() -> None:
    whole, parallel = (layer(LayerKey(8, 1, sequence_parallel=of)).vector for of in (False, True))
    # Forward: two norms (8 bytes an element), two residual additions with a mask (14). Backward:
    # norms (20), dropouts (10), residual gradients (12), bias gradients (4). Seven eighths of it
    # go.
    bytes_each = 8 + 14 + 20 + 10 + 12 + 4
    saved_s = 7 / 8 * bytes_each * 2048 * 14336 / (0.8 * 2.039e12)
    assert sum(whole) - sum(parallel) == pytest.approx(saved_s, rel=1e-3)


def test_layers_are_asked_for_once_and_together() -> None:
    times = EvenTimes()
    layers = LayerTimes(job(), times)
    layers.prepare([LayerKey(8, 1), LayerKey(8, 2), LayerKey(4, 1, True)])
    layers.at(LayerKey(8, 2))
    assert times.asked == 1


@dataclass
class MeasuredProducts(EvenTimes):
    """Every product was measured."""

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        return [replace(one, source="measured") for one in super().estimates(workloads)]


def test_a_measured_product_of_unaligned_rows_keeps_its_time_and_its_interval() -> None:
    of = job(shape=bloom_like(layers=70, heads=96, hidden=14400), gpus=384)  # heads of 150
    measured, modelled = (
        core(LayerTimes(of, times).at(LayerKey(4, 1)))
        for times in (MeasuredProducts(), EvenTimes())
    )
    products = [op for op in divided(of.shape, 4, 1).ops() if op.name in ("scores", "context")]
    flops = sum(op.workload.flops for op in products)
    others_s = measured.mid - flops / 250e12  # of the softmax
    assert measured.low == pytest.approx(0.9 * measured.mid)
    assert measured.high == pytest.approx(1.2 * measured.mid)
    # Not measured: at the fitted share of the fp32 peak, with an interval.
    assert modelled.mid == pytest.approx(flops / (19.5e12 * UNALIGNED_SHARE) + others_s)
    assert modelled.low < modelled.mid < modelled.high


def test_equal_jobs_share_their_layers() -> None:
    times = EvenTimes()
    layouts = [*(Layout(8, 4, 12, mbs) for mbs in (1, 2, 2)), Layout(8, 4, 13, 1)]
    row, planners = TableRow("1"), {}
    found = [
        predict_case(row, Case(job(), one), lambda device: times, EVERYWHERE, planners).prediction
        for one in layouts
    ]
    assert times.asked == 2  # mbs 1 and 2
    assert found[1] == found[2]
    assert found[3] is None  # it breaks rules


def test_the_best_times_know_every_kind_of_work() -> None:
    times = BestTimes()(A100)
    shape = replace(bloom_like(layers=1), tp=8)
    ops = [*shape.ops(), *replace(shape, attention="flash").ops()]
    found = times.estimates([op.workload for op in ops])
    assert all(0 < t.low_us <= t.latency_us <= t.high_us for t in found)
    assert "a100-sxm4-80gb" in times.note
    fp16, bf16 = times.estimates([Gemm(4096, 4096, 4096, dtype=of) for of in ("fp16", "bf16")])
    assert fp16.latency_us == bf16.latency_us
    assert "fp16 is taken to run as the bf16 that was measured" in fp16.note


def test_links_interpolate_the_public_table() -> None:
    where = cluster("jean-zay-a100")
    link = where.intra_node(8)
    us = [1e6 * link.time_s(size) for size in link.bus_bytes]
    assert us == pytest.approx(link.latency_us)
    between_us = 1e6 * link.time_s((link.bus_bytes[-2] * link.bus_bytes[-1]) ** 0.5)
    assert us[-2] < between_us < us[-1]
    assert 1e6 * link.time_s(1) == us[0]
    assert 1e6 * link.time_s(10 * link.bus_bytes[-1]) == pytest.approx(10 * us[-1])
    assert where.intra_node(3) == where.intra_node(4)
    assert Link.of_rate(100.0, 10.0).time_s(1e9) == pytest.approx(0.01001, rel=0.01)


def test_the_system_that_is_assumed_for_a_gpu() -> None:
    assert reference_cluster(lookup("H200")).name == "dgx-h100"
    assert same_site("jean-zay-a100") == ("jean-zay-v100",)
    generic = reference_cluster(lookup("l40s-48gb"))
    assert generic.name == "generic"
    assert "assumed" in generic.source
    assert generic.changed() is generic
    assert generic.changed(gpus_per_node=4, node_gb_per_s=50.0).gpu_gb_per_s == 12.5
    # As many adapters per GPU as before; one link for any number of GPUs.
    assert generic.changed(gpus_per_node=4).gpu_gb_per_s == generic.gpu_gb_per_s
    linked = generic.changed(link_gb_per_s=200.0)
    assert linked.intra_node(2) == linked.intra_node(8)
    assert linked.intra_node(8).time_s(1e9) == pytest.approx(1 / 200, rel=0.01)


EXPERTS = TransformerShape(
    hidden=2048, heads=16, layers=4, seq=4096, vocab=51200, gated=True, experts=64, top_k=8, moe_ffn=768
)  # fmt: skip


def test_expert_parallelism_spreads_weights_and_keeps_the_rows_of_a_gpu() -> None:
    of = job(gpus=8, gbs=8, shape=EXPERTS)
    layouts = [Layout(8, 1, 1, 1, ep=ep) for ep in (1, 8)]
    every = 64 * 3 * 2048 * 768
    (dense, all_of_them), spread = (layer_weights(EXPERTS, layout) for layout in layouts)
    assert (all_of_them, spread) == (every, (dense, every // 8))
    one, eight = (LayerTimes(of, EvenTimes()).at(layout.per_layer) for layout in layouts)
    # 8 of 64 experts with 8 times the rows each: as many operations, which EvenTimes prices.
    expected_s = 4096 * 8 * 2 * 3 * 2048 * 768 / 250e12
    assert [one.experts[0].mid, eight.experts[0].mid] == pytest.approx([expected_s] * 2)
    assert one.reduces == 0 < eight.reduces
    alone, shared = (memory(of, layout, PLAIN).weights for layout in layouts)
    assert shared < alone


@pytest.mark.parametrize(
    ("name", "gpus", "tp", "ep"), [("kimi-k2", 1024, 4, 128), ("qwen3-30b-a3b", 64, 1, 1)]
)
def test_a_token_more_or_less_changes_little(name: str, gpus: int, tp: int, ep: int) -> None:
    where = reference_cluster(lookup("h100"))
    times = CachedTimes(BestTimes()(where.device))
    factors = shipped().of(where, "megatron-bridge")
    layout = Layout(gpus // tp, tp, 1, 1, zero=2, recompute="none", ep=ep)

    def seconds(seq: int) -> float:
        of = Job(replace(preset(name), seq=seq), where, gpus, 1024, stack="megatron-bridge")
        return iteration(of, layout, LayerTimes(of, times), factors).sec.mid

    for seq in (3000, 4096):
        near = [seconds(seq + change) for change in (-64, -8, -1, 1, 3, 24)]
        assert near == pytest.approx([seconds(seq)] * len(near), rel=0.03)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize("tokens", [4095, 4097, 4104])
def test_tokens_are_never_misaligned(dtype: str, layout: str, tokens: int) -> None:
    work = Gemm(tokens, 4096, 4096, dtype=dtype, layout=layout)
    if layout == "tn":
        work = replace(work, m=4096, k=tokens)
    ((timed, share),) = _timed(work).items()
    assert share == 1.0
    assert misaligned_sides(timed) == {}
    assert (timed.m, timed.k - work.k < 32) == (work.m, True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=8).filter(any))
def test_experts_at_full_tiles_have_the_rows_that_they_have(rows: list[int]) -> None:
    work = GroupedGemm(tuple(rows), 256, 512)
    shares = _timed(work)
    assert all(one.m % 8 == 0 and one.batch == len(rows) for one in shares if isinstance(one, Gemm))
    assert sum(shares.values()) == pytest.approx(sum(map(bool, rows)) / len(rows))
    assert sum(one.flops * share for one, share in shares.items()) == pytest.approx(
        sum(2 * max(8, count) * 256 * 512 for count in rows if count)
    )


def test_a_recipe_casts_what_no_kernel_before_can_cast() -> None:
    shape = TransformerShape(hidden=2048, heads=16, layers=4, seq=4096, vocab=51200)
    plain, cast = (
        layer(LayerKey(1, 1), shape=one)
        for one in (shape, replace(shape, dtype="fp8", fp8_recipe="tensorwise"))
    )
    # Two reads in bf16, two copies in fp8: of the input of proj, and of the gradients of the
    # outputs of qkv, proj and mlp_down.
    each_s = 4096 * 2048 * (2 * 2 + 2) / job(shape=shape).elementwise_bytes_per_s
    extra = [a - b for a, b in zip(cast.vector, plain.vector, strict=True)]
    assert extra == pytest.approx([each_s, (3 + 1 + 1) * each_s])
    halved = replace(PLAIN, quantized_factor=0.5, experts_factor=3.0)
    assert cast.fitted(halved).products[0].mid == pytest.approx(cast.products[0].mid / 2)
    assert plain.fitted(halved).products[0].mid == pytest.approx(plain.products[0].mid)


MIXED = replace(EXPERTS, layers=6, dense_layers=2, shared_ffn=1024, ffn=8192)


def test_layers_without_experts_are_priced_as_what_they_are() -> None:
    of = job(gpus=8, gbs=64, shape=MIXED)
    layout = Layout(4, 1, 2, 1, ep=4, recompute="none")
    layers = LayerTimes(of, EvenTimes())
    sparse, dense = (
        layers.at(layout.per_layer._replace(dense=one)).fitted(PLAIN) for one in (False, True)
    )
    assert dense.experts[0].mid == dense.reduces == 0 < sparse.experts[0].mid
    wider = 2 * 4096 * 2048 * 3 * (8192 - 1024) / 250e12
    assert dense.products[0].mid - sparse.products[0].mid == pytest.approx(wider)
    # The first stage has two of them and one with experts, the last has three with experts.
    found = iteration(of, layout, layers, PLAIN)
    first = 2 * dense.once.mid + sparse.once.mid + sparse.embedding
    last = 3 * sparse.once.mid + sparse.logits.mid
    hop = found.point_to_point / 16
    once = found.data_parallel + found.optimizer + found.stragglers
    slowest = 16 * (max(first, last) + hop)
    assert found.sec.mid == pytest.approx(slowest + min(first, last) + hop + once)


def test_layers_without_experts_change_the_weights_of_their_stage() -> None:
    of, layout = job(gpus=8, gbs=64, shape=MIXED), Layout(4, 1, 2, 1, ep=4)
    (first, first_experts), (last, last_experts) = (
        stage_parameters(of, layout, k) for k in stages_of(MIXED, layout)
    )
    each = 3 * 2048 * 768 * 64 // 4
    assert (first_experts, last_experts) == (each, 3 * each)
    # An MLP for the router and the shared experts, in two of three layers.
    assert first - last == 2 * (3 * 2048 * (8192 - 1024) - 64 * 2048)


def test_latent_attention_is_an_estimate_with_a_wide_interval() -> None:
    shapes = (
        replace(EXPERTS, head_dim=192, q_rank=512, kv_rank=256, rope_dim=64, value_dim=128),
        replace(EXPERTS, head_dim=160),
    )
    latent, plain = (layer(LayerKey(1, 1), shape=shape).core[0] for shape in shapes)
    assert latent.mid == plain.mid
    assert latent.high / latent.low > 1.3 * plain.high / plain.low
    # Keys and values of every head, and latents beside them.
    layout = Layout(8, 1, 1, 1, recompute="none")
    kept, kept_plain = (
        memory(job(gpus=8, gbs=8, shape=shape), layout, PLAIN).activations for shape in shapes
    )
    assert kept - kept_plain == pytest.approx(4 * 4096 * (4 * (512 + 256) + 2 * 64))


def test_node_limited_routing_sends_rows_to_fewer_nodes() -> None:
    def ratio(ep: int) -> float:
        limited = replace(EXPERTS, expert_groups=8, top_groups=4)
        some, every = (
            layer(LayerKey(1, 1, ep=ep), gpus=64, gbs=64, shape=shape).reduces
            for shape in (limited, EXPERTS)
        )
        return some / every

    # On 8 nodes of 8 GPUs a row needs 4 of them instead of 8 · (1 - (7/8)^8), one of which may be
    # its own.
    assert ratio(64) == pytest.approx(4 / (8 * (1 - (7 / 8) ** 8)), rel=0.02)
    assert ratio(8) < 1
