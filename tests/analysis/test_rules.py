"""Rules as experiments: pairs on runs made for them, verdicts on literals, plans on devices."""

from collections.abc import Callable
from math import exp, log

import made_runs
import numpy as np
import pytest
from made_devices import CPU
from simulator import SimulatedGpu, along, noisy_us, records_of

from quantbench.analysis.check import fit_all
from quantbench.analysis.curves import LEAST_ERROR
from quantbench.analysis.periods import find_periods, tile_finder
from quantbench.analysis.rule_pairs import RulePair, RunData
from quantbench.analysis.rules import RULES, judge_all, rule_named, untested_lines, verdict_on
from quantbench.analysis.summary import points_of
from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.launch import Tile
from quantbench.rules import Verdict
from quantbench.store.record import Record
from quantbench.sweep.options import SweepOptions, plan_sweep
from quantbench.workload import Attention, Gemm, GroupedGemm, Softmax, Workload

A100 = lookup("a100-sxm4-80gb")


def material(records: list[Record], spec: DeviceSpec) -> RunData:
    points = points_of(records, spec)
    fitted = fit_all(points, LEAST_ERROR)
    return RunData(points, fitted, spec, tile_finder(spec, find_periods(fitted, spec)))


def verdict(rule: str, records: list[Record], spec: DeviceSpec = A100) -> Verdict:
    return verdict_on(rule_named(rule), rule_named(rule).find(material(records, spec)))


def record(
    workload: Workload, us: float, axes: dict[str, int], op: str, provider: str = "torch.mm"
) -> Record:
    samples = noisy_us(us, 0.005, 10, np.random.default_rng(round(us * 1e3)))
    return made_runs.record(workload, samples, axes, op=op, provider=provider)


def hidden_sweep(time_us: Callable[[int], float], values: list[int]) -> list[Record]:
    return [
        record(Gemm(2048, h, h, layout="nt"), time_us(h), {"hidden": h}, "proj") for h in values
    ]


def test_verdicts_follow_the_interval() -> None:
    def of(*effects: float, error: float = 0.002) -> str:
        return verdict_on(
            RULES[0], [RulePair(("a", "b"), log(effect), error) for effect in effects]
        ).verdict

    assert of(1.30) == "CONFIRMED"
    assert of(1.00) == "REFUTED"
    assert of(0.80) == "REFUTED"
    assert of(1.012) == "INCONCLUSIVE"
    assert of(1.012, error=0.0001) == "CONFIRMED"
    assert of(1.0, error=0.05) == "INCONCLUSIVE"
    assert of(*[1.05] * 10) == "CONFIRMED"
    assert of(1.3, 0.8) == "INCONCLUSIVE"  # two pairs at odds tell nothing
    assert of(1.3, 1.15, 1.1) == "CONFIRMED"  # these differ in how much, not in whether
    about = (RULES[0].id, RULES[0].statement, RULES[0].claim)
    assert verdict_on(RULES[0], "why not") == Verdict(*about, "NOT TESTED", reason="why not")


def test_a_verdict_has_effect_interval_and_the_records_behind_it() -> None:
    found = verdict_on(
        RULES[0],
        [
            RulePair((f"a{i}", f"b{i}"), log(1.1) + 0.001 * i, 0.001, predicted=log(1.2))
            for i in range(-4, 5)
        ],
    )
    assert found.effect == pytest.approx(1.1, rel=0.01)
    assert 1.095 < found.low < 1.1 < found.high < 1.105
    assert found.num_pairs == 9
    assert found.predicted == pytest.approx(1.2)
    assert found.evidence[:2] == ("a-4", "b-4")
    assert len(found.evidence) == 18


def test_hidden_128_against_64_beside_it() -> None:
    values = [h + d for h in (1024, 2048, 3072) for d in (-64, 0, 64)]
    slow = verdict(
        "hidden-128", hidden_sweep(lambda h: h * h * 1e-5 * (1 if h % 128 == 0 else 1.1), values)
    )
    same = verdict("hidden-128", hidden_sweep(lambda h: h * h * 1e-5, values))
    assert (slow.verdict, same.verdict) == ("CONFIRMED", "REFUTED")
    assert slow.effect == pytest.approx(1.1, rel=0.01)
    assert slow.num_pairs == 3
    assert len(slow.evidence) == 9


def test_the_rule_of_the_sm_count_is_judged_between_sizes_that_are_alike_otherwise() -> None:
    # 1728 and 3456 are multiples of 108 and of 64; 128 up and down they stay what they are to 64
    # and 128.
    values = [h + d for h in (1728, 3456, 5184) for d in (-128, -64, 0, 64, 128)]
    only_128 = verdict(
        "hidden-sm-count",
        hidden_sweep(lambda h: h * h * 1e-5 * (1 if h % 128 == 0 else 1.2), values),
    )
    assert only_128.verdict == "REFUTED"  # that 3456 is faster than 3392 is the merit of 128
    waves = verdict(
        "hidden-sm-count",
        hidden_sweep(lambda h: h * h * 1e-5 * (1 if h % 108 == 0 else 1.2), values),
    )
    assert waves.verdict == "CONFIRMED"
    assert waves.effect == pytest.approx(1.2, rel=0.01)


def test_whole_model_rules_need_their_axis() -> None:
    found = verdict("hidden-128", [record(Gemm(1, 8, 8), 5.0, {"n": 8}, "gemm")])
    assert found.verdict == "NOT TESTED"
    assert (
        found.reason
        == "no curve along hidden of qkv, proj, mlp_up, mlp_gate, mlp_up_gate, mlp_down"
    )


@pytest.mark.parametrize(("penalty", "expected"), [(1.3, "CONFIRMED"), (1.0, "REFUTED")])
def test_k_8_on_a_simulated_gpu(penalty: float, expected: str) -> None:
    gpu = SimulatedGpu(108, Tile(128, 256), misaligned=penalty)
    values = [k + d for k in (1024, 4096) for d in (-4, -2, -1, 0, 1, 2, 4)]
    found = verdict(
        "k-8",
        records_of(gpu, along("k", values, Gemm(4096, 4096, 1, layout="nt")), noise=0.01, seed=2),
    )
    assert found.verdict == expected
    assert found.effect == pytest.approx(penalty, rel=0.01)


def test_head_dim_is_compared_where_it_pads_to_the_same_size() -> None:
    def attention(head_dim: int, us: float) -> Record:
        return record(
            Attention(1, 16, 1024, 1024, head_dim),
            us,
            {"head_dim": head_dim},
            "attention",
            "torch.flash",
        )

    padded_to_128 = [
        attention(d, 100.0 * (1 if d % 8 == 0 else 1.34)) for d in (100, 102, 104, 106, 108)
    ]
    found = verdict("head-dim-8", padded_to_128)
    assert found.verdict == "CONFIRMED"
    assert found.effect == pytest.approx(1.34, rel=0.02)
    across = verdict("head-dim-8", [attention(128, 100.0), attention(132, 180.0)])
    assert across.verdict == "NOT TESTED"  # 132 pads to 160: another tile, not another alignment


def softmax(batch: int, cols: int, us: float, provider: str) -> Record:
    return record(
        Softmax(batch, cols, cols), us, {"heads": batch, "seq": cols}, "softmax", provider
    )


def test_the_price_of_megatrons_fallback() -> None:
    fused = [softmax(b, 2048, 10.0 * b, "triton.fused") for b in (12, 16, 20)]
    fallback = [softmax(b, 2048, 42.0 * b, "torch.eager") for b in (12, 13, 16, 18, 20)]
    found = verdict("heads-mbs-4", fused + fallback)
    assert found.verdict == "CONFIRMED"
    assert found.num_pairs == 2  # 13 and 18 break the rule
    assert found.effect == pytest.approx(4.2, rel=0.02)
    assert (
        verdict("heads-mbs-4", fallback).reason
        == "not measured: a fused softmax where the rule is kept"
    )
    assert (
        verdict("heads-mbs-4", fused).reason
        == "not measured: the fallback with heads / TP × MBS no multiple of 4"
    )


def test_short_rows_ask_for_a_multiple_of_eight() -> None:
    records = [
        softmax(16, 128, 16.0, "triton.fused"), softmax(24, 128, 24.0, "triton.fused"),
        softmax(20, 128, 60.0, "torch.eager"), softmax(28, 128, 84.0, "torch.eager"),
        softmax(20, 2048, 99.0, "torch.eager"), softmax(20, 2048, 33.0, "triton.fused"),
    ]  # fmt: skip
    found = verdict("batches-per-block", records)
    assert (found.verdict, found.num_pairs) == ("CONFIRMED", 2)
    assert found.effect == pytest.approx(3.0, rel=0.02)


def test_rows_beyond_2048_fall_back() -> None:
    records = [
        softmax(16, 2048, 100.0, "triton.fused"),
        softmax(16, 2560, 100 * (2560 / 2048) ** 2 * 3, "torch.eager"),
    ]
    found = verdict("softmax-sk-2048", records)
    assert found.verdict == "CONFIRMED"
    assert found.effect == pytest.approx(3.0, rel=0.02)


def layer(axis: str, value: int, tokens: int, us: float, slow_us: float = 1e6) -> list[Record]:
    """A product by torch, and attention by two providers of which the faster counts."""
    works = [("qkv", Gemm(tokens, 1024, 1024), us, "torch.mm")]
    attention = Attention(1, 8, tokens, tokens, 64)
    works += [
        ("attention", attention, us, "torch.flash"),
        ("attention", attention, slow_us, "torch.math"),
    ]  # type: ignore[list-item]
    return [
        record(work, time_us, {axis: value}, op, provider) for op, work, time_us, provider in works
    ]


def test_mbs_2_against_the_value_that_does_best() -> None:
    def runs(times: dict[int, float]) -> list[Record]:
        return [
            record(Gemm(2048 * mbs, 4096, 4096), us, {"mbs": mbs}, "qkv") for mbs, us in times.items()
        ]  # fmt: skip

    best = verdict("mbs-2", runs({1: 120.0, 2: 200.0, 4: 440.0, 8: 1000.0}))
    assert best.verdict == "CONFIRMED"
    assert best.effect == pytest.approx(1.1, rel=0.01)  # against 4, the strongest of the others
    assert verdict("mbs-2", runs({1: 120.0, 2: 200.0, 4: 360.0})).verdict == "REFUTED"
    assert verdict("mbs-2", runs({1: 120.0})).reason.startswith("no layer at mbs = 2")
    alone = [
        r for mbs in (1, 2, 4) for r in layer("mbs", mbs, 512, 1.0) if r.places[0].op == "attention"
    ]
    assert verdict("mbs-2", alone).verdict == "NOT TESTED"


def test_layers_take_each_op_by_its_fastest_provider() -> None:
    records = (
        layer("tp", 1, 512, 400.0)
        + layer("tp", 2, 256, 250.0)
        + layer("tp", 2, 256, 250.0, slow_us=9e5)
    )
    found = verdict("tp-shrinks-n", records)
    assert found.verdict == "CONFIRMED"
    assert all("torch.math" not in key for key in found.evidence)
    assert found.num_pairs == 1


def test_a_table_of_products_tells_what_halving_n_costs() -> None:
    gpu = SimulatedGpu(108, Tile(128, 256), overhead_us=50.0)
    records = records_of(
        gpu, along("n", (4096, 8192, 16384), Gemm(4096, 1, 4096)), noise=0.003, seed=1
    )
    found = verdict("tp-shrinks-n", records, gpu.spec())
    true = [
        gpu.time_us(Gemm(4096, n // 2, 4096)) * 2 / gpu.time_us(Gemm(4096, n, 4096)) for n in (8192, 16384)
    ]  # fmt: skip
    assert found.num_pairs == 2
    assert found.effect == pytest.approx(exp(np.mean(np.log(true))), rel=0.01)


def test_whole_waves_where_the_tile_was_recorded_or_recovered() -> None:
    gpu = SimulatedGpu(128, Tile(128, 128))
    points = along("n", range(1024, 8193, 64), Gemm(4096, 1, 4096))
    for launches in (True, False):
        found = verdict(
            "whole-waves",
            records_of(gpu, points, noise=0.01, seed=6, launches=launches),
            gpu.spec(),
        )
        assert found.verdict == "CONFIRMED"
        assert found.predicted > 1.02
    unknown = verdict("whole-waves", records_of(gpu, points[:3], noise=0.01, seed=6), gpu.spec())
    assert unknown.reason.startswith("the tile is not known: no kernel was recorded")


def test_every_rule_is_judged_even_on_nothing() -> None:
    found = judge_all(material([], A100))
    assert [v.rule for v in found] == [rule.id for rule in RULES]
    assert {v.verdict for v in found} == {"NOT TESTED"}
    assert all(v.reason for v in found)


def test_rows_of_an_expert_are_compared_not_tokens() -> None:
    records = []
    for rows in range(96, 400, 16):
        work = GroupedGemm((rows,) * 8, 2048, 2048)
        us = work.rows * (1.0 if rows % 64 == 0 else 1.1)
        records.append(record(work, us, {"tokens": 4 * rows}, "experts_up"))
    found = verdict("expert-rows-64", records)
    assert found.verdict == "CONFIRMED"
    assert found.effect == pytest.approx(1.1, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
@pytest.mark.parametrize("slug", ["a100-sxm4-80gb", "h200-sxm-141gb"])
def test_the_planned_points_hold_the_pairs_that_the_rule_needs(rule: str, slug: str) -> None:
    """Run each rule's plan on a stand-in that takes time by work alone: then there is something to
    judge.
    """
    spec = lookup(slug)
    plan = rule_named(rule).experiment(spec)
    options = SweepOptions(plan.dims, plan.held, plan.providers)
    _, planned = plan_sweep(options, spec)
    assert 2 <= len(planned.points) <= 250
    gpu = SimulatedGpu(spec.sm_count, Tile(128, 256))
    records = []
    for point in planned.points:
        work = point.workload
        us = gpu.time_us(work) if isinstance(work, Gemm) else work.min_bytes / 1e5
        launch = gpu.launch(work) if isinstance(work, Gemm) else None
        taken = {"provider": point.provider, "launch": launch, "places": point.places}
        records.append(made_runs.record(work, [us] * 10, {}, **taken))
    assert verdict(rule, records, spec).verdict != "NOT TESTED"


ON_A_CPU = ("mbs-2", "tp-shrinks-n")


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if rule.id not in ON_A_CPU])
def test_rules_of_gpus_have_no_experiment_on_a_cpu(rule: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        rule_named(rule).experiment(CPU)
    assert error.value.operation == f"--experiment {rule}"
    assert error.value.expected.endswith("mbs-2, tp-shrinks-n")


@pytest.mark.slow
def test_rules_of_gpus_are_not_judged_on_a_cpu() -> None:
    """The same records, with pairs for hidden % 128, as those of a GPU and as those of a CPU."""
    records = hidden_sweep(
        lambda h: h**2 * (1.0 if h % 128 == 0 else 1.1), list(range(1024, 4096, 64))
    )
    verdicts = {v.rule: v for v in judge_all(material(records, A100))}
    assert verdicts["hidden-128"].verdict == "CONFIRMED"
    on_cpu = judge_all(material(records, CPU))
    assert {v.verdict for v in on_cpu} == {"NOT TESTED"}
    own, others = untested_lines(on_cpu, CPU)
    assert own.startswith("2 rules not tested: mbs-2, tp-shrinks-n; ")
    assert others.startswith("16 rules about GPUs")


def test_rules_that_were_not_tested_are_one_line() -> None:
    (line,) = untested_lines(judge_all(material([], A100)), A100)
    assert line.startswith(f"{len(RULES)} rules not tested: hidden-128, hidden-sm-count, ")
    (line,) = untested_lines(judge_all(material([], A100), [rule_named("k-8")]), A100)
    assert line == "k-8 not tested: no curve along k"


@pytest.mark.parametrize("rule", ON_A_CPU)
def test_plans_for_a_processor_are_small(rule: str) -> None:
    plan = rule_named(rule).experiment(CPU)
    _, planned = plan_sweep(SweepOptions(plan.dims, plan.held, plan.providers), CPU)
    assert planned.estimate_s < 120


def test_unknown_rules_are_refused_with_all_names() -> None:
    with pytest.raises(InputError) as error:
        rule_named("folklore")
    assert error.value.value == "'folklore'"
    assert error.value.expected.count(",") == len(RULES) - 1
