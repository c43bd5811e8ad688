"""Searching layouts and shapes, and the rules of thumb beside them."""

from dataclasses import replace
from itertools import product

import pytest
from planner_doubles import LIKE_JEAN_ZAY, PLAIN, EvenTimes, bloom_like, job

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.latency.interconnect import cluster, reference_cluster
from quantbench.latency.model_times import BestTimes
from quantbench.planner.calibration import shipped
from quantbench.planner.constraints import is_possible
from quantbench.planner.folklore import judge_folklore
from quantbench.planner.iteration import ring_passes
from quantbench.planner.layout import Job, Layout
from quantbench.planner.memory import limit_bytes
from quantbench.planner.search import LayoutSpace, layouts, search
from quantbench.quantization import divisors
from quantbench.workload import TransformerShape
from quantbench.workload.presets import preset
from tools.planner_bridge import PUBLISHED_LAYOUTS, Published

AS_THEN = LayoutSpace(recompute=("full",), sequence_parallel=(False,), interleave=(1,))
NARROW = job(gpus=64, gbs=64, shape=bloom_like(layers=4, hidden=4096, heads=32))
WAITS = replace(PLAIN, exposed_share=0.5)
H100 = reference_cluster(lookup("h100"))
LLAMA = Job(preset("llama-3-8b"), H100, 64, 512)
SMALL = TransformerShape(
    hidden=1024, heads=16, layers=4, vocab=51200, seq=512, attention="unfused", dropout=True
)


def test_every_layout_that_keeps_the_rules_is_looked_at() -> None:
    of = job(gpus=16, gbs=16, shape=SMALL)
    space = LayoutSpace(zero=(0, 1), recompute=("full", "none"))
    found = set(layouts(of, space))
    expected = set()
    degrees = divisors(16)
    rest = ((1, 2, 4), (0, 1), ("full", "none"), (False, True))
    for values in product(*[degrees] * 4, *rest):
        layout = Layout(*values)
        alone = layout.tp == 1 and layout.sequence_parallel
        if (layout.dp == 1 and layout.zero) or alone or layout.pp > 4:
            continue
        if is_possible(of, layout):
            expected.add(layout)
    assert {layout for layout in found if layout.partition == "layers"} == expected


def test_selective_recomputation_of_flash_attention_is_tried_only_if_named() -> None:
    def tried(attention: str, space: LayoutSpace) -> set[str]:
        of = job(gpus=4, gbs=4, shape=replace(SMALL, attention=attention, dropout=False))
        return {layout.recompute for layout in layouts(of, space)}

    assert tried("unfused", LayoutSpace()) == {"full", "selective", "none"}
    assert tried("flash", LayoutSpace()) == {"full", "none"}
    assert tried("flash", LayoutSpace(recompute=("selective",))) == {"selective"}


def test_a_search_ranks_what_fits_by_time() -> None:
    of = job()
    found = search(of, EvenTimes(), LIKE_JEAN_ZAY, AS_THEN)
    assert found.looked_at == len(found.ranked) + found.too_large
    times = [p.sec_per_it for p in found.ranked]
    assert times == sorted(times)
    assert all(p.memory.total <= limit_bytes(of) for p in found.ranked)
    assert all(is_possible(of, p.layout) for p in found.ranked)


def test_a_bound_degree_stays() -> None:
    times = EvenTimes()
    space = LayoutSpace(tp=(4,), pp=(12,), mbs=(2,), zero=(1,), dp=(8,))
    found = search(job(), times, LIKE_JEAN_ZAY, space)
    assert {(p.layout.tp, p.layout.pp, p.layout.mbs) for p in found.ranked} == {(4, 12, 2)}
    assert times.asked == 1  # layers are asked for in one batch


def test_nothing_fits_and_nothing_is_possible() -> None:
    found = search(job(gpus=8, gbs=8), EvenTimes(), PLAIN)
    assert found.ranked == ()
    assert found.smallest[1].total > limit_bytes(job(gpus=8, gbs=8))
    assert judge_folklore(job(gpus=8, gbs=8), found, LayoutSpace()) == []


@pytest.mark.parametrize(
    ("of", "space", "cause", "expected"),
    [
        (Job(preset("mixtral-8x7b"), H100, 64, 512), LayoutSpace(ep=(16,)), "8 experts", "a divisor of 8"),
        (LLAMA, LayoutSpace(ep=(8,)), "0 experts", "ep = 1"),
        (replace(LLAMA, gpus=16), LayoutSpace(cp=(3,)), "= 12 GPUs", "tp · pp · cp that divides 16"),
        (replace(LLAMA, gpus=48), LayoutSpace(cp=(3,)), "seq 8192", "seq = 8190"),
        (replace(LLAMA, gpus=24), LayoutSpace(), "gbs 512 is no multiple", "gbs = "),
        (replace(LLAMA, shape=replace(LLAMA.shape, seq=8191)), LayoutSpace(tp=(2,), sequence_parallel=(True,)),
         "needs seq 8191 divisible by tp 2", "seq = 8190"),
        (job(), LayoutSpace(tp=(3,)), "heads 64 is no multiple of tp 3", "a tp that divides it"),
        (job(96, 96, bloom_like(layers=79)), LayoutSpace(tp=(8,), pp=(12,)), "79 layers over", "--allow-uneven"),
        (job(96, 96), LayoutSpace(tp=(8,), pp=(12,), interleave=(5,)), "12 stages of 5 equal chunks", "divides 6"),
    ],
)  # fmt: skip
def test_the_cause_is_named_if_no_layout_keeps_every_rule(
    of: Job, space: LayoutSpace, cause: str, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        search(of, EvenTimes(), PLAIN, space)
    assert cause in caught.value.value
    assert expected in caught.value.expected


@pytest.mark.parametrize(("seq", "tried"), [(4096, {1}), (8192, {1, 2}), (32768, {1, 2, 4, 8})])
def test_context_parallelism_is_tried_where_sequences_are_long(seq: int, tried: set[int]) -> None:
    of = Job(replace(LLAMA.shape, seq=seq), H100, 16, 16)
    assert {layout.cp for layout in layouts(of, LayoutSpace())} == tried


def test_uneven_stages_are_found_when_asked_for() -> None:
    of = job(gpus=8, gbs=8, shape=replace(SMALL, layers=5))
    plain = search(of, EvenTimes(), PLAIN, LayoutSpace(pp=(4,), uneven=True))
    assert {p.layout.partition for p in plain.ranked} == {"uneven"}
    with pytest.raises(InputError):
        search(of, EvenTimes(), PLAIN, LayoutSpace(pp=(4,)))


def test_the_measured_best_is_near_the_top() -> None:
    of = Job(bloom_like(), cluster("jean-zay-a100"), 384, 2048)
    found = search(of, BestTimes()(of.cluster.device), shipped().of(of.cluster), AS_THEN)
    ranked = [p.layout for p in found.ranked]
    seconds = {
        (at.dp, at.tp, at.pp, at.mbs): p.sec_per_it
        for at, p in zip(ranked, found.ranked, strict=True)
    }
    best = found.ranked[0].sec_per_it
    # Lines 474, 477 and 478 were within 2 % of each other and the fastest of all that was tried.
    assert max(seconds[at] for at in ((8, 4, 12, 2), (16, 4, 6, 2), (16, 2, 12, 2))) < 1.06 * best
    assert seconds[8, 8, 6, 4] > seconds[8, 4, 12, 2]  # line 448 against 474
    assert seconds[4, 8, 12, 1] > 1.1 * best  # line 278, the slowest of those


def test_rules_of_thumb_are_judged() -> None:
    of = job()
    found = search(of, EvenTimes(), LIKE_JEAN_ZAY, AS_THEN)
    judged = {j.rule.name: j for j in judge_folklore(of, found, AS_THEN)}
    most = max(p.layout.dp for p in found.ranked)
    assert f"with the most DP ({most})" in judged["DP"].finding
    for j in judged.values():
        assert j.rule.source
        assert j.rule.weakness
        if j.choice is not None:
            assert j.cost == pytest.approx(j.choice.sec_per_it / found.ranked[0].sec_per_it - 1)
            assert j.verdict == ("holds" if (j.cost or 0) <= 0.02 else "costs time")
    assert {"holds", "costs time"} <= {j.verdict for j in judged.values()}
    assert judged["18 bytes"].verdict == judged["head_dim"].verdict == "holds"
    assert "0 over a multiple of 128, 80 over one of 108" in judged["hidden % 108"].finding


@pytest.mark.parametrize(
    ("of", "space", "name", "verdict", "words"),
    [
        (job(gbs=24), LayoutSpace(dp=(24,), recompute=("full",)), "MBS 2", "fails", "fits; the best is"),
        (job(), LayoutSpace(mbs=(1,), recompute=("full",)), "MBS 2", "note", "excluded by --mbs"),
        (job(gpus=8, gbs=64, shape=SMALL), LayoutSpace(pp=(2,)), "18 bytes", "note", "excluded by --pp"),
        (job(shape=bloom_like(80, 96, 14400), gpus=320), AS_THEN, "head_dim", "costs time", ""),
        (job(gpus=8, gbs=64, shape=SMALL), LayoutSpace(), "18 bytes", "holds", "the model fits one GPU"),
    ],
)  # fmt: skip
def test_a_rule_that_fails_or_costs_time(
    of: Job, space: LayoutSpace, name: str, verdict: str, words: str
) -> None:
    judged = judge_folklore(of, search(of, EvenTimes(), LIKE_JEAN_ZAY, space), space)
    (one,) = (j for j in judged if j.rule.name == name)
    assert (one.verdict, words in one.finding) == (verdict, True)


def test_overlapped_zero_3_is_not_free() -> None:
    """With gathers that show, ZeRO-3 loses to ZeRO-1 where both fit."""
    space = LayoutSpace(tp=(1,), pp=(1,), zero=(1, 3))
    found = search(replace(NARROW, dp_overlap=1.0), EvenTimes(), WAITS, space)
    assert found.ranked[0].layout.zero == 1


def test_of_equal_layouts_the_one_that_shards_least_is_first() -> None:
    """With one micro-batch ZeRO-2 sends what ZeRO-1 does; a stack with FSDP gathers the weights at
    each micro-batch.
    """
    space = LayoutSpace(tp=(1,), pp=(1,), mbs=(1,), zero=(1, 2), recompute=("none",))
    found = search(NARROW, EvenTimes(), WAITS, space)
    assert [p.layout.zero for p in found.ranked] == [1, 2]
    assert found.ranked[0].sec_per_it == found.ranked[1].sec_per_it
    two = Layout(64, 1, 1, 1, zero=2)
    assert ring_passes(replace(NARROW, gbs=256, stack="megatron"), two) == (1, 4)
    assert ring_passes(replace(NARROW, gbs=256, stack="fsdp"), two) == (4, 4)


@pytest.mark.parametrize(
    "published",
    [pytest.param(one, marks=pytest.mark.slow if one.recipe else (), id=f"{one.model}-{one.gpus}-{one.recipe}")
     for one in PUBLISHED_LAYOUTS],
)  # fmt: skip
def test_published_layouts_are_found_near_the_top(published: Published) -> None:
    """Among the first five or within 5 %; Llama 3.1 405B in 8 bits is behind layouts without
    context parallelism.
    """
    ranked, alike = published.rank(BestTimes(), shipped())
    exact = alike[0].layout
    assert (exact.mbs, exact.interleave) == (published.layout.mbs, published.layout.interleave)
    missed = published.model == "llama-3.1-405b" and published.recipe
    behind = alike[0].sec_per_it / ranked[0].sec_per_it - 1
    assert behind < (0.15 if missed else 0.05) or ranked.index(alike[0]) < 5
