"""Two runs held against each other: verdicts on literals, with known shifts and a known rate of
false claims.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_runs import SPEC, STATE, record, reference, run, samples

from quantbench.analysis.compare import CompareOptions, Comparison, compare_runs
from quantbench.analysis.curves import LEAST_ERROR, repeatability
from quantbench.analysis.significance import holm, rank_test
from quantbench.errors import InputError
from quantbench.launch import Launch, Tile
from quantbench.measurement import Grade
from quantbench.store.differences import Difference, differences
from quantbench.store.folder import Run
from quantbench.store.record import Failed, Measured, Record, Skipped
from quantbench.workload import Gemm


def points(
    shifts: list[float], *, seed: int, noise: float = 0.01, count: int = 30, **changes: Any
) -> list[Record]:
    """Points along n, each around 100 µs times its shift. changes: provider and launch of all."""
    found = []
    for i, shift in enumerate(shifts):
        work = Gemm(1024, 64 * (i + 1), 1024)
        times_us = samples(100 * shift, noise=noise, count=count, seed=seed + i)
        found.append(record(work, times_us, {"n": work.n}, **changes))
    return found


def verdicts(a: Run, b: Run, **options: object) -> dict[int, str]:
    compared = compare_runs(a, b, CompareOptions(**options))  # type: ignore[arg-type]
    return {point.place.axes["n"]: point.change for point in compared.points}


# --- the statistics ----------------------------------------------------------------------------------------------


def test_holm_on_a_worked_example() -> None:
    # 0.005·4, 0.01·3, 0.03·2 and 0.04·1, the last raised to what stands before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.9, 0.8]) == (1.0, 1.0)
    assert holm([]) == ()


def test_the_rank_test_on_samples_that_do_not_overlap() -> None:
    # Six against six apart: one of C(12, 6) = 924 orders, one-sided; twice that for two sides.
    a, b = (10.0, 10.1, 9.9, 10.2, 9.8, 10.05), (12.0, 12.12, 11.88, 12.24, 11.76, 12.06)
    test = rank_test(a, b, 0.01)
    assert test.p == pytest.approx(2 / 924)
    assert test.ratio == pytest.approx(1.2, rel=0.002)
    assert test.low < test.ratio < test.high
    back = rank_test(b, a, 0.01)
    assert back.p == test.p
    assert back.ratio == pytest.approx(1 / test.ratio)
    # Within the tolerance nothing is claimed, however sure the difference is.
    assert rank_test(a, b, 0.25).p == 1.0


def test_equal_quantised_samples_are_no_change() -> None:
    test = rank_test((1.024,) * 20, (1.024,) * 20, 0.0)
    assert (test.ratio, test.low, test.high, test.p) == (1.0, 1.0, 1.0, 1.0)


def test_thousands_of_samples_are_thinned_without_moving_the_interval() -> None:
    a = samples(100.0, noise=0.02, count=1500, seed=1)
    b = samples(101.5, noise=0.02, count=1500, seed=2)
    test = rank_test(a, b, 0.001)
    # Two normal samples of 2 %: the shift is known to 1.96 · 2 % · √(2 / 1500) · √(π / 3) = 0.147
    # %.
    assert test.ratio == pytest.approx(1.015, abs=0.002)
    assert (test.high - test.low) / 2 == pytest.approx(0.00147, rel=0.1)


@pytest.mark.slow
def test_a_rank_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(400):
        a = samples(100.0, noise=0.01, count=15, seed=2 * seed)
        b = samples(103.0, noise=0.01, count=15, seed=2 * seed + 1)
        test = rank_test(a, b, 0.01)
        covered += test.low <= 1.03 <= test.high
    assert 0.93 <= covered / 400 <= 0.98


# --- verdicts ----------------------------------------------------------------------------------------------------


def test_known_shifts_are_found_and_nothing_else() -> None:
    shifts = [1.0] * 40
    shifts[7], shifts[20], shifts[33] = 1.05, 0.95, 1.10
    found = verdicts(run(points([1.0] * 40, seed=0)), run(points(shifts, seed=1000)), margin=0.01)
    moved = {n: verdict for n, verdict in found.items() if verdict in ("slower", "faster")}
    assert moved == {64 * 8: "slower", 64 * 21: "faster", 64 * 34: "slower"}


@pytest.mark.slow
def test_false_regressions_stay_below_the_stated_rate() -> None:
    # Margin 0 is the hardest case: 100 pairs of runs of 10 points without any change. 5 % of the
    # pairs may show one false claim of either kind; binomially at most 10 of 100 with 98.9 %.
    false = 0
    for seed in range(100):
        a = run(points([1.0] * 10, seed=10_000 + 100 * seed, count=12))
        b = run(points([1.0] * 10, seed=1_000_000 + 100 * seed, count=12))
        found = set(verdicts(a, b, margin=0.0).values())
        false += bool(found & {"slower", "faster"})
    assert false <= 10


def test_points_come_in_the_order_of_verdicts_with_the_largest_change_first() -> None:
    shifts = [1.1, 0.7, 1.0, 1.6, 0.9, 1.3]
    compared = compare_runs(
        run(points([1.0] * 6, seed=0, noise=0.002)), run(points(shifts, seed=50, noise=0.002))
    )
    assert [round(point.ratio, 1) for point in compared.points] == [1.6, 1.3, 1.1, 0.7, 0.9, 1.0]
    assert compared.counts == {"slower": 3, "faster": 2, "same": 1, "unclear": 0}
    assert compared.regressions == 3


@pytest.mark.parametrize(("mhz", "change"), [(1950.0, "slower"), (1560.0, "unclear")])
def test_a_change_that_the_power_limit_may_explain_does_not_count(mhz: float, change: str) -> None:
    def at_clock(found: Record) -> Record:
        assert isinstance(found.outcome, Measured)
        measured = replace(
            found.outcome.measurement,
            clocks_mhz=(mhz,) * 30,
            state_before=replace(STATE, sm_clock_mhz=1980.0),
        )
        return replace(found, outcome=replace(found.outcome, measurement=measured))

    a, b = points([1.0] * 3, seed=0, noise=0.002), points([1.03] * 3, seed=50, noise=0.002)
    assert set(verdicts(run(list(map(at_clock, a))), run(list(map(at_clock, b)))).values()) == {
        change
    }


@pytest.mark.parametrize(
    ("shift", "noise", "margin", "change"),
    [(1.003, 0.002, 0.01, "same"), (1.03, 0.08, 0.01, "unclear"), (1.02, 0.002, 0.03, "same")],
)
def test_points_within_the_margin_are_the_same_and_noisy_ones_unclear(
    shift: float, noise: float, margin: float, change: str
) -> None:
    a, b = points([1.0] * 5, seed=0, noise=noise), points([shift] * 5, seed=50, noise=noise)
    assert set(verdicts(run(a), run(b), margin=margin).values()) == {change}


def test_what_the_reference_wanders_is_not_claimed() -> None:
    # Both runs wander by a few per cent: a shift of 4 % is nothing that they could show.
    drift = [1.0, 1.03, 0.97, 1.02, 0.98, 1.01, 0.99, 1.0]
    wandering = [reference(50.0 * f, elapsed_s=60.0 * i) for i, f in enumerate(drift)]
    a, b = points([1.0] * 5, seed=0, noise=0.002), points([1.04] * 5, seed=50, noise=0.002)
    assert set(verdicts(run(a), run(b)).values()) == {"slower"}
    compared = compare_runs(run([*wandering, *a]), run([*wandering, *b]))
    assert compared.tolerance > 0.05
    assert compared.regressions == 0
    assert (compared.wander.repeats_a, compared.wander.shift) == (8, 1.0)
    # MAD of {0, 3, 3, 2, 2, 1, 1, 0} is 1.5 %, times 1.4826.
    assert compared.wander.noise_a == pytest.approx(0.0222, abs=0.002)


def test_few_references_that_wander_claim_nothing_and_few_that_agree_do() -> None:
    # Three each: the noise is known badly, which is no reason to take it for zero.
    a, b = points([1.0] * 5, seed=0, noise=0.002), points([1.2] * 5, seed=50, noise=0.002)

    def compared(us_a: list[float], us_b: list[float]) -> Comparison:
        references_a = [reference(us, elapsed_s=60.0 * i) for i, us in enumerate(us_a)]
        references_b = [reference(us, elapsed_s=60.0 * i) for i, us in enumerate(us_b)]
        return compare_runs(run([*references_a, *a]), run([*references_b, *b]))

    wandering = compared([51.1, 56.7, 55.0], [55.8, 56.5, 49.3])
    assert wandering.regressions == 0
    assert wandering.tolerance > 0.2
    assert wandering.counts["unclear"] == 5  # a fifth more is not the same
    assert wandering.wander.noise_a == wandering.wander.noise_b == pytest.approx(0.064, abs=0.002)
    assert compared([50.0, 50.1, 49.9], [50.0, 49.9, 50.1]).regressions == 5
    # One run with many references and one with a single one: the first tells the noise.
    assert compared([50.0, 60.0, 50.0, 60.0], [50.0]).regressions == 0


def test_two_references_already_tell_that_a_run_is_noisy() -> None:
    assert repeatability([reference(50.0, 0.0), reference(56.0, 60.0)]) == pytest.approx(
        0.08, abs=0.005
    )
    assert repeatability([reference(50.0, 0.0)]) == repeatability([]) == LEAST_ERROR


@pytest.mark.parametrize(
    ("a", "b"), [((100.0,), (130.0,)), ((100.0, 101.0, 99.0), (130.0, 131.0, 129.0))]
)
def test_few_samples_are_unclear(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    one, two = (record(Gemm(1024, 64, 1024), us, {"n": 64}) for us in (a, b))
    point = compare_runs(run([one]), run([two])).points[0]
    assert (point.change, bool(point.why)) == ("unclear", True)
    assert point.ratio == pytest.approx(1.3, rel=0.01)


# --- which points belong together --------------------------------------------------------------------------------


def test_a_point_that_fails_now_is_a_regression_and_a_skipped_one_is_not() -> None:
    a = run(points([1.0] * 4, seed=0))
    b = points([1.0] * 4, seed=50)
    b[1] = replace(b[1], outcome=Failed("out_of_memory", "8 GiB asked for"))
    b[2] = replace(b[2], outcome=Skipped("fp8 needs a newer GPU"))
    compared = compare_runs(a, run(b[:3]))
    (lost,) = compared.lost
    assert (lost.place.axes["n"], lost.b.outcome) == (128, b[1].outcome)
    assert compared.regressions == 1
    assert (compared.only_a, compared.only_b) == (2, 0)


def refused(a: Run, b: Run, **options: object) -> InputError:
    with pytest.raises(InputError) as caught:
        compare_runs(a, b, CompareOptions(**options))  # type: ignore[arg-type]
    assert caught.value.operation == "compare"
    return caught.value


def test_rejected_figures_are_not_compared() -> None:
    a, b = points([1.0], seed=0), points([0.2], seed=50)
    assert isinstance(b[0].outcome, Measured)
    b[0] = replace(
        b[0], outcome=replace(b[0].outcome, grade=Grade("rejected", ("faster than the peak",)))
    )
    assert "every point of run B was rejected" in refused(run(a), run(b)).value
    assert "run B has no measured point" in refused(run(a), run([])).value
    both = run([*a, *(replace(r, provider="mine") for r in b)])
    of_mine = refused(both, both, by="workload", provider_a=a[0].provider, provider_b="mine")
    assert "every point of mine of run B was rejected" in of_mine.value


def test_by_workload_compares_across_providers() -> None:
    a = points([1.0] * 3, seed=0)
    b = points([1.5] * 3, seed=7, provider="triton")
    apart = refused(run(a), run(b))
    assert "the same workloads by other providers" in apart.value
    assert "--by workload" in apart.expected
    assert set(verdicts(run(a), run(b), by="workload").values()) == {"slower"}
    both = run([*a, *b])
    assert "run A has torch.mm, triton for" in refused(both, run(b), by="workload").value
    found = verdicts(both, both, by="workload", provider_a="torch.mm", provider_b="triton")
    assert set(found.values()) == {"slower"}
    assert refused(both, both, by="workload", provider_a="cublas").value == "--provider-a cublas"


def test_records_of_one_key_are_told_apart_by_their_kernel() -> None:
    quick, slow = Launch("quick"), Launch("slow")
    a = points([1.0], seed=1, launch=quick) + points([2.0], seed=2, launch=slow)
    b = points([2.0], seed=3, launch=slow) + points([1.0], seed=4, launch=quick)
    compared = compare_runs(run(a), run(b))
    assert sorted(round(point.ratio, 1) for point in compared.points) == [1.0, 1.0]


def test_a_changed_kernel_is_named_unless_the_provider_changed_too() -> None:
    def point(us: float, name: str, tile: Tile | None = None, provider: str = "torch.mm") -> Record:
        # Names that were read from two files are equal, not the same object.
        launch = Launch("".join([*name]), tile=tile)
        return points([us / 100], seed=1, provider=provider, launch=launch)[0]

    def why(a: Record, b: Record) -> str:
        return compare_runs(run([a]), run([b]), CompareOptions(by="workload")).points[0].why

    one = point(100.0, "k1", Tile(128, 256))
    assert why(one, point(130.0, "k2", Tile(64, 64))) == "the library changed from 128x256 to 64x64"
    others = (point(130.0, "k1"), point(100.0, "k2", provider="triton"), replace(one, launch=None))
    assert [why(one, other) + why(other, one) for other in others] == [""] * 3


# --- what may be compared ----------------------------------------------------------------------------------------


def test_other_devices_and_origins_are_refused_unless_forced() -> None:
    a, b = points([1.0], seed=0, noise=0.002), points([1.0], seed=9, noise=0.002)
    other = run(b, device=replace(SPEC, name="h100-test"))
    measured = run([replace(r, origin="measured") for r in b], origin="measured")
    assert refused(run(a), other).value == "different devices, a100-test and h100-test"
    assert refused(measured, run(a)).value == "measured figures against simulated ones"
    assert compare_runs(run(a), other, CompareOptions(force=True)).obstacles == (
        "different devices, a100-test and h100-test",
    )


def test_what_changed_is_named_device_first() -> None:
    a = run(
        points([1.0], seed=0),
        options={"timing": {"cache": "cold", "seed": 0}, "providers": ["torch"]},
    )
    b = run(
        points([1.0], seed=0), options={"timing": {"cache": "hot", "seed": 0}, "providers": ["torch", "triton"]},
        software={"torch": "2.13.0", "triton": "3.7.1"}, environment={"NVIDIA_TF32_OVERRIDE": "1"},
        device=replace(SPEC, memory_gb_per_s=1555), state=replace(STATE, other_processes=2),
    )  # fmt: skip
    assert differences(a, b) == (
        Difference("device", "memory_gb_per_s", "2039", "1555"),
        Difference("software", "torch", "2.11.0", "2.13.0"),
        Difference("software", "triton", "absent", "3.7.1"),
        Difference("options", "timing.cache", "cold", "hot"),
        Difference("options", "providers", "torch", "torch, triton"),
        Difference("environment", "NVIDIA_TF32_OVERRIDE", "absent", "1"),
        Difference("state", "other_processes", "absent", "2"),
    )
    assert differences(a, a) == ()


def test_runs_timed_differently_say_so_unless_matched_by_workload() -> None:
    a = run(points([1.0], seed=0), options={"timing": {"cache": "cold"}})
    b = [replace(r, key="0" * 16) for r in points([1.0], seed=5)]
    hot = {"timing": {"cache": "hot"}}
    assert "they are timed differently: cache cold → hot" in refused(a, run(b, options=hot)).value
    other = run([record(Gemm(8, 8, 8), (1.0,), {"n": 8})], options=hot)
    assert "no workload is in both" in refused(a, other, by="workload").value
