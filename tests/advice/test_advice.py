"""Advice with made-up times whose answers can be worked out by hand, and with the models of real
GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantbench.advice import Advice, Space, advise
from quantbench.advice.cost import WIDER, cost_of, ratio_factor
from quantbench.advice.space import DIMENSIONS, shapes_near
from quantbench.alignment_rules import broken_by_shape
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.model_times import ModelTimes
from quantbench.latency.op_times import UNMEASURED_COMMON, CachedTimes, OpTimes
from quantbench.latency.softmax import fallback_bytes
from quantbench.workload import Gemm, Softmax, TransformerShape
from quantbench.workload.kinds import Compute
from quantbench.workload.parameters import parameters, useful_parameters

A100 = lookup("a100-sxm4-80gb")
H100 = lookup("h100-sxm5-80gb")
#: the shape of the BigScience search: heads of 150, which are no multiple of 8
WIDE = TransformerShape(hidden=14400, heads=96, layers=80, vocab=250880, tp=8, attention="unfused")


@dataclass
class SimpleTimes:
    """Everything at 100 FLOP per ns, the sizes in `slow` (of a product's n) at half of it;
    intervals of ±10 %.
    """

    slow: tuple[int, ...] = ()
    device: DeviceSpec = A100
    note: str = "made up"
    source: str = "modelled"
    common_error: float = 0.0
    asked: list[int] = field(default_factory=list)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        self.asked.append(len(workloads))
        mids = [
            w.flops / 1e5 * (2 if isinstance(w, Gemm) and w.n in self.slow else 1)
            for w in workloads
        ]
        return [
            Estimate(mid, mid / 1.1, mid * 1.1, self.source, unmeasured=self.note) for mid in mids
        ]


def answers_of(times: OpTimes) -> CachedTimes:
    """The times as `advise` asks them."""
    return CachedTimes(times, softmax="megatron")


SMALL = TransformerShape(
    hidden=1024, heads=16, seq=512, vocab=51200, layers=4, tp=2, attention="unfused"
)


def test_nothing_is_wasted_where_every_rate_is_the_same() -> None:
    found = advise(SMALL, SimpleTimes())
    assert found.cost.waste_us == 0
    assert (found.cost.waste_low_us, found.cost.waste_high_us) == (0, 0)
    assert found.cost.latency.latency_us == pytest.approx(
        sum(o.workload.flops * o.count for o in SMALL.ops()) / 1e5
    )
    assert found.note == "made up"
    assert found.device is A100


def test_waste_is_the_time_beyond_that_at_the_rate_before_the_edge() -> None:
    # ffn / tp = 2056 pads to 2304; the product is made twice as slow as just before, at 2048. Tiles
    # explain 11 % of it.
    shape = replace(SMALL, ffn=4112)
    cost = cost_of(shape, answers_of(SimpleTimes(slow=(2056,))))
    op = next(o for o in cost.ops if o.op.label == "mlp_up")
    assert op.findings[0].edge.kind == "tile edge"
    assert op.findings[0].waste_us == pytest.approx(op.latency.latency_us * (1 - 2056 / 2304))
    assert op.waste_us == pytest.approx(4 * op.findings[0].waste_us)
    assert op.findings[0].low_us <= op.findings[0].waste_us <= op.findings[0].high_us
    # Of what tiles and waves do not bound, all of the difference counts.
    unaligned = replace(SMALL, hidden=1200, heads=8, kv_heads=8, head_dim=150)
    cost = cost_of(unaligned, answers_of(SimpleTimes(slow=(150,), source="measured")))
    op = next(o for o in cost.ops if o.op.label == "context")
    assert op.findings[0].waste_us == pytest.approx(op.latency.latency_us / 2)
    factor = exp(WIDER * log(1.1) * 2**0.5)
    assert op.findings[0].low_us == pytest.approx(op.latency.latency_us * (1 - factor / 2))
    assert op.findings[0].high_us == pytest.approx(op.latency.latency_us * (1 - 1 / factor / 2))
    assert cost.waste_low_us < cost.waste_us < cost.waste_high_us
    assert set(list(cost.by_name)[:2]) == {"scores", "context"}


def test_gpu_hours_are_those_of_all_gpus_for_all_tokens() -> None:
    cost = cost_of(SMALL, answers_of(SimpleTimes()))
    # 1 s of 2 GPUs for 512 tokens: 1e12 / 512 times two seconds.
    assert cost.gpu_hours_per_trillion_tokens(1e6) == pytest.approx(2 * 1e12 / 512 / 3600)


def test_a_softmax_that_is_not_fused_takes_as_long_as_its_bytes() -> None:
    answers = answers_of(SimpleTimes())
    work = Softmax(batch=9, rows=512, cols=512)
    assert answers.estimate(work).latency_us == pytest.approx(
        answers.fused(work).latency_us * fallback_bytes(work) / work.min_bytes
    )
    shape = replace(
        SMALL, heads=8, kv_heads=8, head_dim=128, tp=4
    )  # 2 heads a GPU: no multiple of 4
    cost = cost_of(shape, answers_of(SimpleTimes()))
    op = next(o for o in cost.ops if o.op.name == "softmax")
    assert op.findings[0].edge.kind == "fused softmax"
    assert op.findings[0].waste_us == pytest.approx(
        op.latency.latency_us - answers.fused(op.op.workload).latency_us
    )
    assert (
        0
        < op.findings[0].low_us
        < op.findings[0].waste_us
        < op.findings[0].high_us
        < op.latency.latency_us
    )


def sums(*parts: tuple[Compute, float, float]) -> dict[Compute, tuple[float, Estimate]]:
    return {work: (share, Estimate(1.0, 1 / factor, factor)) for work, share, factor in parts}


def test_what_is_wrong_with_both_alike_cancels() -> None:
    one, two, three = (Gemm(m, 1024, 1024) for m in (128, 256, 384))
    base = sums((one, 0.5, 1.2), (two, 0.5, 1.2))
    assert ratio_factor(base, base) == 1.0
    half = sums((one, 0.5, 1.2), (three, 0.5, 1.2))
    assert ratio_factor(base, half) == pytest.approx(exp(WIDER * log(1.2) * 0.5**0.5))
    other = sums((three, 1.0, 1.2))
    independent = exp(WIDER * log(1.2) * (0.25 + 0.25 + 1) ** 0.5)
    assert ratio_factor(base, other) == pytest.approx(independent)
    # Errors that are in common cancel: with all of them in common, nothing is left.
    assert 1 < ratio_factor(base, other, UNMEASURED_COMMON) < independent
    assert ratio_factor(base, other, 1.0) == pytest.approx(1.0)
    # Products and softmax have nothing in common.
    assert ratio_factor(base, sums((Softmax(8, 64, 64), 1.0, 1.2)), 1.0) > 1.2


@st.composite
def shapes(draw: st.DrawFn) -> TransformerShape:
    tp, group = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2]))
    kv_heads = draw(st.integers(1, 4)) * tp
    heads, width = kv_heads * group, draw(st.integers(33, 160))
    return TransformerShape(
        hidden=heads * width, heads=heads, kv_heads=kv_heads, ffn=draw(st.integers(100, 4000)) * tp,
        gated=draw(st.booleans()), layers=draw(st.integers(1, 90)), vocab=draw(st.integers(1000, 9000)) * tp, tp=tp,
        mbs=draw(st.sampled_from([1, 2, 3, 6])), seq=256, attention="unfused",
    )  # fmt: skip


def together(base: TransformerShape, space: Space) -> list[TransformerShape]:
    """The shapes whose sizes change jointly."""
    groups = shapes_near(base, space)
    return [shape for group, found in groups.items() if group.joint for shape in found]


def alone(base: TransformerShape, space: Space) -> dict[str, list[TransformerShape]]:
    """The shapes that differ in one dimension, by its name."""
    return {
        group.changed: found for group, found in shapes_near(base, space).items() if not group.joint
    }


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_every_shape_that_is_tried_keeps_the_rules(base: TransformerShape) -> None:
    space = Space()
    for shape in together(base, space):
        assert shape != base
        assert abs(parameters(shape) / parameters(base) - 1) <= space.tolerance * (1 + 1e-9)
        assert abs(shape.hidden / base.hidden - 1) <= space.near + 1 / base.hidden
        if shape.heads * shape.head_dim != shape.hidden:
            assert base.head_dim % 8
            assert (shape.heads, shape.hidden) == (base.heads, base.hidden)
        assert shape.head_dim in (*space.head_dims, base.head_dim, -(-base.head_dim // 8) * 8)
        assert shape.head_dim % 8 == 0
        assert shape.kv_heads % base.tp == 0 or shape.kv_heads == base.kv_heads
        assert shape.hidden % base.tp == shape.heads % base.tp == 0
        assert base.heads / 2 <= shape.heads <= 2 * base.heads
        assert shape.mbs == base.mbs
        assert shape.hidden == base.hidden or shape.hidden % 128 == 0
    for name, others in alone(base, space).items():
        for shape in others:
            allowed = {"heads": ("heads", "kv_heads", "head_dim"), "head_dim": ("head_dim",)}.get(
                name, (name,)
            )
            same = {
                f: getattr(base, f)
                for f in ("heads", "kv_heads", "head_dim", "ffn", "vocab", "mbs")
            }
            changed = {f for f, value in same.items() if getattr(shape, f) != value}
            assert changed
            assert changed <= set(allowed)
            assert (shape.hidden, shape.layers) == (base.hidden, base.layers)


@settings(max_examples=40, deadline=None)
@given(shapes(), st.sets(st.sampled_from(DIMENSIONS), min_size=1, max_size=3))
def test_what_is_kept_stays(base: TransformerShape, keep: set[str]) -> None:
    space = Space(keep=tuple(sorted(keep)))
    for shape in (
        *together(base, space),
        *(s for found in alone(base, space).values() for s in found),
    ):
        assert all(getattr(shape, name) == getattr(base, name) for name in keep)


def test_heads_that_do_not_make_up_the_hidden_size_stay() -> None:
    gemma = TransformerShape(
        hidden=3072, heads=16, head_dim=256, ffn=24576, gated=True, layers=28, vocab=256000
    )
    found = list(together(gemma, Space()))
    assert found
    assert {(s.heads, s.head_dim) for s in found} == {(16, 256)}
    assert "heads" not in alone(gemma, Space())


def test_a_padded_vocabulary_counts_as_no_parameters() -> None:
    padded = replace(SMALL, vocab=51456)
    assert useful_parameters(padded, SMALL.vocab) == parameters(SMALL)
    assert useful_parameters(SMALL, 60000) == parameters(SMALL)


def test_neighbours_are_held_against_each_other_at_equal_parameters() -> None:
    base = TransformerShape(hidden=2048, heads=16, seq=512, vocab=51200, layers=24)
    slow = SimpleTimes(slow=(2048,))  # proj, mlp_down and gradients at this hidden size
    found = advise(base, slow)
    best = found.neighbours[0].found
    assert best.shape.hidden != 2048
    weight = useful_parameters(best.shape, base.vocab) / parameters(base)
    expected = (
        found.cost.latency.latency_us / found.neighbours[0].cost.latency.latency_us * weight - 1
    )
    assert best.gain == pytest.approx(expected)
    assert best.low < best.gain < best.high
    assert best.parameters_change == pytest.approx(weight - 1)
    # Those that no nearer shape equals come first, the fastest first; the others follow likewise.
    ranked = [(not n.found.sure, not n.found.nearest, -n.found.gain) for n in found.neighbours]
    assert ranked == sorted(ranked)
    front = [n.found for n in found.neighbours if n.found.nearest and n.found.sure]
    assert sorted(front, key=lambda n: -n.move) == front
    assert len({n.found.shape.hidden for n in found.neighbours}) == len(found.neighbours)
    # One batch for the shape, one for its edges, one for all neighbours, and edges of the few that
    # are shown.
    assert len(slow.asked) < 30
    assert max(slow.asked) > found.tried


def test_of_edges_that_cost_the_same_but_for_rounding_alignment_is_named() -> None:
    shape = TransformerShape(
        hidden=2304, heads=24, layers=1, vocab=32000, seq=1975, attention="unfused"
    )
    ops = cost_of(shape, answers_of(ModelTimes(lookup("l40s-48gb")))).by_name["context"]
    (wgrad,) = (cost for cost in ops if cost.op.phase == "wgrad")
    first, second = wgrad.findings
    assert first.waste_us == pytest.approx(second.waste_us, rel=1e-9)
    assert (first.edge.kind, second.edge.kind) == ("alignment", "tile edge")


def test_no_micro_batch_has_more_rows_than_are_predicted(modelled: ModelTimes) -> None:
    """131,072 tokens are predicted; 16 times as many would be one row too many."""
    long = TransformerShape(hidden=1024, heads=8, seq=131_072, layers=2)
    assert [one.mbs for one in alone(long, Space())["mbs"]] == [2, 4, 8]
    assert advise(long, modelled).tried > 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"advise: dtype = 'fp8' on a100-sxm4-80gb; expected one of bf16"
    ):
        advise(replace(SMALL, dtype="fp8"), SimpleTimes())
    with pytest.raises(InputError, match=r"advise: top = -1; expected an integer"):
        advise(SMALL, SimpleTimes(), top=-1)
    with pytest.raises(InputError, match=r"advise: head_dim = 100; expected a multiple of 8"):
        Space(head_dims=(100,))
    with pytest.raises(InputError, match=r"advise: keep = 'depth'; expected one of hidden, heads"):
        Space(keep=("depth",))
    with pytest.raises(
        InputError,
        match=r"advise: tolerance = 0.9; expected a share of the parameters from 0 to 0.5",
    ):
        Space(tolerance=0.9)


@pytest.fixture(scope="module")
def modelled() -> ModelTimes:
    return ModelTimes(A100)


@pytest.fixture(scope="module")
def wide(modelled: ModelTimes) -> Advice:
    # The head widths of the BigScience search beside today's.
    return advise(WIDE, modelled, space=Space(head_dims=(64, 120, 128, 200, 216, 256)))


def test_misaligned_heads_are_found_first(wide: Advice) -> None:
    first, second = list(wide.cost.by_name)[:2]
    assert {first, second} == {"scores", "context"}
    worst = wide.cost.by_name[first][0].findings[0]
    assert worst.edge.kind == "alignment"
    assert worst.edge.words.startswith("head_dim = 150 is no multiple of 8")
    assert wide.cost.waste_share > 0.2
    assert wide.cost.waste_low_us < wide.cost.waste_us < wide.cost.waste_high_us


def test_the_sizes_that_the_search_ended_with_are_near_the_top(wide: Advice) -> None:
    hidden = [n.found.shape.hidden for n in wide.neighbours]
    assert {13824, 14336} <= set(hidden[:4])
    for advised in wide.neighbours:
        assert advised.found.low > 0
        assert advised.found.shape.head_dim % 8 == 0
        assert advised.found.reasons[0].startswith("head_dim 150 → ")
        assert advised.found.reasons[0].endswith(": 16-byte aligned")
        assert advised.cost.waste_share < wide.cost.waste_share
    other = next(n for n in wide.neighbours if n.found.shape.hidden == 13824)
    assert (
        other.changes
        == f"hidden 14400 → 13824, heads 96 → {other.found.shape.heads}, layers 80 → 87"
    )
    # Of the products that end at a tile's edge there, the one that gains the most is named.
    assert {"mlp_up n 7200 → 6912 = 54 × 128", "mlp_down n 14400 → 13824 = 108 × 128"} & set(
        other.found.reasons
    )


def test_a_shape_that_none_surely_beats_is_kept(modelled: ModelTimes) -> None:
    asked = TransformerShape(
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        gated=True,
        layers=32,
        vocab=128256,
        tied=False,
        seq=8192,
    )
    found = advise(asked, modelled)
    assert found.tried > 10
    assert found.keep
    assert found.better == ()
    assert all(one.found.low <= 0 for one in found.neighbours)
    odd = advise(replace(asked, vocab=128257), modelled)
    assert not odd.keep
    assert odd.better[0].found.shape.vocab == 128384


def test_what_nobody_measured_is_named_with_its_share(modelled: ModelTimes) -> None:
    flash = TransformerShape(hidden=2048, heads=16, layers=4, vocab=51200)
    (only,) = advise(flash, modelled, top=0).unmeasured
    assert only.reason == "backward attention: only forward passes measured"
    assert only.ops == ("attention.backward",)
    cost = cost_of(flash, answers_of(modelled))
    backward = next(o for o in cost.ops if o.op.label == "attention.backward")
    assert only.share == pytest.approx(backward.total_us / cost.latency.latency_us)
    unfused = advise(replace(flash, attention="unfused"), modelled, top=0).unmeasured
    assert {one.reason.partition(":")[0] for one in unfused} == {"batched products", "softmax"}
    nothing = advise(
        replace(flash, dtype="fp16"), ModelTimes(lookup("v100s-pcie-32gb")), top=0
    ).unmeasured
    assert sum(one.share for one in nothing) == pytest.approx(1)
    (made_up,) = advise(flash, SimpleTimes(), top=0).unmeasured
    assert made_up.reason == "made up"
    assert made_up.share == pytest.approx(1)


def test_one_change_alone_is_offered(wide: Advice) -> None:
    changed = {a.changes.split()[0]: a for a in wide.singles}
    assert {"heads", "mbs"} <= changed.keys()
    assert changed["heads"].found.shape.hidden == 14400
    # Both head counts that align heads of 14400 leave each GPU an odd number of them: no fused
    # softmax.
    assert changed["heads"].found.shape.heads in (72, 120)
    assert (
        changed["heads"]
        .found.reasons[-1]
        .startswith("but Megatron's fused softmax does not run: heads per GPU ")
    )
    assert [a.found.gain for a in wide.singles] == sorted(
        (a.found.gain for a in wide.singles), reverse=True
    )


def test_what_misaligned_heads_cost_a_measured_training_run(modelled: ModelTimes) -> None:
    """13824 with 128 heads of 108 instead of 64 of 216: 162.72 s instead of 121.28 s per iteration
    on 384 A100s (the BigScience search; the rate of unaligned products was fitted on these rows,
    the rest was not). 2048 samples go through 8 pipelines of 6 stages in micro-batches of 4, and
    every forward pass is computed twice."""
    seconds = []
    for heads in (64, 128):
        shape = TransformerShape(
            hidden=13824, heads=heads, layers=78, vocab=250880, tp=8, mbs=4, attention="unfused"
        )
        cost = cost_of(shape, answers_of(modelled))
        again_us = sum(o.total_us for o in cost.ops if o.op.phase == "forward")
        seconds.append((cost.latency.latency_us + again_us) / 1e6 / 6 * 2048 / 8 / 4)
        aligned = not any(f.edge.kind == "alignment" for o in cost.ops for f in o.findings)
        assert aligned == (heads == 64)
    assert seconds[1] - seconds[0] == pytest.approx(162.72 - 121.28, rel=0.3)


def test_times_of_models_come_with_their_kernels(modelled: ModelTimes) -> None:
    product = Gemm(2048, 14400, 1800, layout="nt")
    launch = CachedTimes(modelled).launch(product)
    assert launch.tile is not None
    assert launch.blocks_per_sm is not None
    assert CachedTimes(modelled).launch(Softmax(8, 512, 512)) is None
    assert CachedTimes(SimpleTimes()).launch(product) is None
    assert CachedTimes(SimpleTimes(), kernels=modelled).launch(product) == launch
    assert "products on a100-sxm4-80gb: fitted on" in modelled.note


def test_unaligned_batches_run_at_the_fitted_rate(modelled: ModelTimes) -> None:
    unaligned, aligned = (Gemm(2048, 2048, width, batch=12, layout="nt") for width in (150, 152))
    times = answers_of(modelled)
    slow, fast = times.estimates([unaligned, aligned])
    assert slow.latency_us > 3 * fast.latency_us
    assert slow.low_us < slow.latency_us < slow.high_us
    assert "unaligned rows: at a rate fitted to whole iterations" in times.note


def test_a_gpu_that_was_not_measured_says_so_and_is_less_sure() -> None:
    unmeasured = ModelTimes(lookup("v100s-pcie-32gb"))
    found = advise(replace(WIDE, dtype="fp16"), unmeasured)
    assert unmeasured.common_error == UNMEASURED_COMMON
    assert "nobody measured fp16 on v100s-pcie-32gb" in found.note
    assert next(iter(found.cost.by_name)) in ("scores", "context")


@dataclass
class MadeProfile:
    """A profile of which products without a batch were measured, and nothing else."""

    device: DeviceSpec = A100
    note: str = "profile of a made-up GPU"
    common_error: float = 0.0

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        found = []
        for work in workloads:
            source = "measured" if isinstance(work, Gemm) and work.batch == 1 else "modelled"
            found.append(
                Estimate(work.flops / 1e8, work.flops / 1e8, work.flops / 1e8, source, "compute")
            )
        return found


def test_a_profile_is_believed_where_it_was_measured() -> None:
    times = answers_of(MadeProfile())
    assert times.note == "profile of a made-up GPU"
    measured, modelled = Gemm(100, 150, 64), Gemm(2048, 150, 2048, batch=12)
    fast, slow = times.estimates([measured, modelled])
    assert (fast.low_us, fast.latency_us, fast.high_us) == tuple([measured.flops / 1e8] * 3)
    assert slow.latency_us > modelled.flops / 1e8
    assert slow.unmeasured.startswith("batched products of unaligned rows")
    assert times.note == (
        "profile of a made-up GPU; batched products of unaligned rows: at a rate fitted to whole iterations on A100s"
    )


def test_no_shape_is_suggested_that_crashes_unless_all_do() -> None:
    def crashes(shape: TransformerShape) -> bool:
        return any(one.rule.effect == "crashes" for one in broken_by_shape(shape, device=H100))

    times = ModelTimes(H100)
    odd = TransformerShape(
        hidden=5000, heads=40, layers=42, tp=4, dtype="fp8", fp8_recipe="tensorwise"
    )
    assert crashes(odd)
    found = advise(odd, times)
    assert found.compared
    assert not any(crashes(one.found.shape) for one in found.compared)
    # No size but seq, which a search leaves alone, could mend a number of tokens.
    hopeless = replace(odd, hidden=5120, seq=2041)
    assert crashes(hopeless)
    assert advise(hopeless, times).tried
