"""Intervals and grades on a device whose clock follows the power, wanders, heats up or lies; the
truth is known.
"""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from device_double import Gpu, Kernel
from made_devices import A100
from made_runs import measurement
from timer_on_double import BETWEEN_S, CONDITIONS, HEAT, WANDER, grades, timer_of, truth_us

from quantbench.measurement import Measurement
from quantbench.stated import stated
from quantbench.timing.grade import drift_of, grade
from quantbench.timing.options import TimingOptions

# Time in µs, the share of it that follows the clock, and the power, as a share of the limit.
MIX = [
    (10, 1.0, 0.5),
    (30, 0.5, 0.5),
    (100, 0.0, 0.6),
    (300, 1.0, 0.8),
    (1000, 1.0, 1.0),
    (2000, 0.5, 0.9),
    (5000, 1.0, 1.0),
]


def test_intervals_hold_for_later_visits_and_the_clock_is_that_of_the_work() -> None:
    covered = []
    by_samples = []
    clocks_mhz = {}
    for seed in range(6):
        gpu = Gpu(random=random.Random(seed), wander=WANDER, heat=HEAT)
        timer = timer_of(gpu)
        timer.measure(lambda: gpu.queue(Kernel("first", 200.0)))  # noqa: B023
        for us, clocked, power in random.Random(seed).sample(MIX, len(MIX)):
            gpu.pause(BETWEEN_S)
            kernel = Kernel("k", us, clocked, power)
            measured = timer.measure(partial(gpu.queue, kernel))
            found = measured.stated
            error = abs(found.latency_us / truth_us(gpu, kernel) - 1)
            covered.append(error <= found.relative_half_width)
            by_samples.append(error <= found.sampling)
            clocks_mhz[power] = float(np.median(measured.clocks_mhz))
    assert np.mean(covered) >= 0.9
    assert np.mean(by_samples) < 0.7
    assert clocks_mhz[1.0] < 0.9 * clocks_mhz[0.5]


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
    return measurement((us,) * 20, clocks_mhz=(mhz,) * 20)


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


# ---- the stated time


def test_the_time_is_that_of_the_samples_and_one_clock_step_widens_its_interval() -> None:
    samples = [99.9, 100.0, 100.1, 100.2, 100.3] * 4
    found = stated(samples, [1500.0] * 20)
    plain = stated(samples, ())
    assert found.latency_us == plain.latency_us
    assert plain.clock == 0.0
    assert 0.0005 < plain.relative_half_width == plain.sampling < 0.003
    assert found.sampling == plain.sampling
    assert found.clock == 0.01  # 15 of 1500 MHz
    assert found.relative_half_width == pytest.approx(np.hypot(0.01, plain.relative_half_width))


def test_too_few_samples_have_no_interval() -> None:
    assert stated([100.0], [1500.0]).relative_half_width == float("inf")
