"""Intervals and grades on a device whose clock wanders, heats up, is capped or lies; the truth is
known.
"""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from benchmarks.timer_on_double import (
    BETWEEN_S,
    CONDITIONS,
    HEAT,
    MIX,
    Found,
    grades,
    one_batch,
    ours,
    points,
    timer_of,
    truth_us,
)  # fmt: skip
from device_double import Gpu, Kernel
from made_devices import A100
from made_runs import measurement

from quantbench.measurement import MeanClock, Measurement
from quantbench.stated import stated
from quantbench.timing.grade import drift_of, grade
from quantbench.timing.mean_clock import MeanClocks
from quantbench.timing.options import TimingOptions


@pytest.mark.parametrize("wander", [0.01, pytest.param(0.005, marks=pytest.mark.slow)])
def test_stated_intervals_hold_and_cost_no_more(wander: float) -> None:
    found, before = (
        [point for seed in (1, 2, 3) for point in points(method, wander, seed)]
        for method in (ours, one_batch)
    )
    assert len(found) == len(before) == 3 * len(MIX)
    assert np.mean([point.covered for point in found]) >= 0.87
    assert _cost_s(found) <= 1.6 * _cost_s(before)
    if wander >= 0.01:
        assert np.mean([point.covered for point in before]) < 0.7
        spread, spread_before = (np.std([point.error for point in of]) for of in (found, before))
        assert spread < 0.75 * spread_before


def _cost_s(found: list[Found]) -> float:
    return float(np.mean([point.cost_s for point in found]))


def test_work_at_the_power_limit_is_stated_at_its_own_clock() -> None:
    covered = []
    for seed in range(4):
        gpu = Gpu(random=random.Random(seed), wander=0.005, heat=HEAT)
        timer = timer_of(gpu)
        for power in (0.5, 1.4, 0.5, 1.6):
            gpu.pause(BETWEEN_S)
            kernel = Kernel("k", 2000.0, power=power)
            measured = timer.measure(partial(gpu.queue, kernel))
            assert (measured.mean_clock.mhz < 1850) == (power > 1)
            interval = measured.stated.interval
            covered.append(interval.low <= truth_us(gpu, kernel) <= interval.high)
    assert sum(covered) >= 13


# ---- grades


@pytest.mark.slow
def test_a_healthy_card_earns_its_grades() -> None:
    found = grades("healthy", seed=1, count=40)
    assert found.count("A") >= 0.9 * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("condition", [name for name in CONDITIONS if name != "healthy"])
def test_no_point_is_a_while_the_card_is_not_what_it_was(condition: str) -> None:
    found = grades(condition, seed=1, count=26)
    assert len(found) >= 10
    assert "A" not in found


def _measured(us: float, mhz: float) -> Measurement:
    return measurement((us,) * 20, clocks_mhz=(mhz,) * 20, mean_clock=MeanClock(mhz))


@pytest.mark.parametrize(
    ("us", "mhz", "time_ratio"),
    [
        (100.0, 1400.0, 1.0),
        (102.5, 1400.0 / 1.025, 1.0),  # the clock explains it
        (100.0, 1400.0 / 1.025, 1.0),  # the reference waits for memory
        (101.0, 1400.0 / 1.025, 1.0),
        (105.0, 1400.0, 1.05),
        (105.0 * 1.025, 1400.0 / 1.025, 1.05),  # slower than its clock explains
        (105.0, 1400.0 * 1.02, 1.05),  # a faster clock does not explain it at all
        (95.0, 1400.0, 0.95),
    ],
)
def test_drift_is_what_the_clock_does_not_explain(us: float, mhz: float, time_ratio: float) -> None:
    drift = drift_of(_measured(100.0, 1400.0), _measured(us, mhz))
    assert drift.time_ratio == pytest.approx(time_ratio)
    assert drift.clock_ratio == pytest.approx(mhz / 1400.0)


def _letter(measured: Measurement, **options: Any) -> str:
    return grade(measured, flops=1, min_bytes=1, spec=A100, dtype="bf16", **options).letter


@pytest.mark.parametrize(("share", "letter"), [(0.96, "A"), (0.94, "B"), (0.88, "C")])
def test_a_clock_that_is_far_from_the_first_costs_a_grade(share: float, letter: str) -> None:
    first = _measured(100.0, 1400.0)
    drift = drift_of(first, _measured(100.0 / share, 1400.0 * share))
    assert _letter(first, drift=drift) == letter


@pytest.mark.parametrize(("far", "letter"), [(1, "A"), (2, "B")])
def test_one_outlier_costs_no_grade(far: int, letter: str) -> None:
    samples = (100.0, 100.1, 100.2, 100.1, 100.0, 100.2, 100.1, 100.0, 100.1, 100.1)
    samples = (*samples[far:], *[110.0] * far)
    measured = replace(_measured(100.0, 1400.0), samples_us=samples, clocks_mhz=(1400.0,) * 10)
    assert _letter(measured, options=TimingOptions(half_width=0.1)) == letter


# ---- times at the mean clock


CLOCKS = tuple(1400.0 * (1 + 0.001 * step) for step in range(-10, 11))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_samples_tell_how_their_times_follow_the_clock(exponent: float) -> None:
    rng = np.random.default_rng(1)
    samples = [
        100.0 * (mhz / 1414.0) ** -exponent * np.exp(rng.normal(0, 0.0005)) for mhz in CLOCKS
    ]
    found = stated(samples, CLOCKS, MeanClock(1414.0))
    assert found.latency_us == pytest.approx(100.0, rel=0.001)
    assert found.interval.low <= 100.0 <= found.interval.high
    assert found.relative_half_width < 0.003


def test_a_clock_that_does_not_move_tells_nothing_about_the_exponent() -> None:
    found = stated([100.0] * 12, [1386.0] * 12, MeanClock(1400.0))
    assert found.interval.low == pytest.approx(99.0, rel=0.001)  # as 1 / clock
    assert found.interval.high == pytest.approx(100.0, rel=0.001)  # not at all


def test_an_unsure_mean_clock_widens_the_interval() -> None:
    samples = [100.0 * 1400.0 / mhz for mhz in CLOCKS]
    sure = stated(samples, CLOCKS, MeanClock(1400.0))
    unsure = stated(samples, CLOCKS, MeanClock(1400.0, 14.0))
    assert unsure.latency_us == sure.latency_us
    assert unsure.relative_half_width == pytest.approx(0.01, rel=0.1)
    assert unsure.sampling == sure.sampling


# ---- the mean clock


def _learnt(clocks: MeanClocks, mhz: list[float], start_s: float = 0.0) -> float:
    """Adds points of one clock each, half a second apart. Returns the time after them."""
    for number, each in enumerate(mhz):
        clocks.learn([each] * 10, [(start_s + 0.5 * number, [each] * 10)])
    return start_s + 0.5 * len(mhz)


def test_the_mean_is_that_of_the_last_seconds() -> None:
    clocks = MeanClocks()
    at_s = _learnt(clocks, [1390.0, 1410.0, 1410.0, 1390.0, 1390.0, 1410.0, 1410.0, 1390.0])
    found = clocks.of(at_s, [1420.0] * 10, limited=False)
    assert found.mhz == pytest.approx(1400.0, abs=1.0)
    assert 7.0 < found.half_width_mhz < 12.0  # 2.4 · 10.7 / √8


def test_a_mean_that_falls_is_followed() -> None:
    clocks = MeanClocks()
    at_s = _learnt(clocks, [1400.0 - number for number in range(20)])
    assert clocks.of(at_s, [1380.0] * 10, limited=False).mhz == pytest.approx(1380.0, abs=0.5)


def test_limited_work_has_a_clock_of_its_own_as_unsure_as_single_clocks() -> None:
    clocks = MeanClocks()
    at_s = _learnt(clocks, [1390.0, 1410.0] * 6)
    found = clocks.of(at_s, [1300.0] * 10, limited=True)
    assert found.mhz == 1300.0
    assert found.half_width_mhz == pytest.approx(1.96 * 10 / 1400 * 1300, rel=0.01)


def test_two_points_in_a_row_at_another_clock_begin_a_new_mean() -> None:
    clocks = MeanClocks()
    at_s = _learnt(clocks, [1400.0] * 8)
    at_s = _learnt(clocks, [1200.0], at_s)
    assert clocks.of(at_s, [1400.0] * 10, limited=False).mhz == 1400.0  # one alone changes nothing
    at_s = _learnt(clocks, [1400.0, 1200.0, 1200.0, 1200.0, 1200.0, 1200.0], at_s)
    assert clocks.of(at_s, [1201.0] * 10, limited=False).mhz == 1200.0
