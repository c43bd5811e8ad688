"""The stopping rule, fed with literals and a clock of our own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from quantbench import stats
from quantbench.errors import InputError
from quantbench.timing.stopping import StoppingRule


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rule(clock: Clock | None = None, tick_us: float = 0.0, **changes: float) -> StoppingRule:
    def widths(samples: Sequence[float]) -> tuple[float, float]:
        width = stats.relative_half_width(samples, tick_us=tick_us)
        return width, width

    values = {
        "half_width": 0.005,
        "min_samples": 10,
        "max_samples": 1000,
        "max_time_s": 1.0,
        **changes,
    }
    return StoppingRule(now=clock or Clock(), widths=widths, **values)  # type: ignore[arg-type]


def feed(of: StoppingRule, samples: object) -> tuple[int, str | None]:
    for sample in samples:  # type: ignore[attr-defined]
        of.add(float(sample))
        reason = of.finished()
        if reason:
            return of.count, reason
    return of.count, None


def test_steady_samples_stop_at_the_minimum() -> None:
    assert feed(rule(), [100.0, 100.2] * 50) == (10, "precision")


def test_what_samples_cannot_narrow_is_not_waited_for() -> None:
    def widths(samples: Sequence[float]) -> tuple[float, float]:
        return 0.02, 0.02 / len(samples)

    of = StoppingRule(
        half_width=0.005, min_samples=4, max_samples=100, max_time_s=1.0, now=Clock(), widths=widths
    )
    assert feed(of, [100.0] * 50) == (
        9,
        "clock",
    )  # looked at with 4, 5, 7 and 9; 0.02 / 9 is less than 0.005 / 2


def test_nine_samples_are_not_enough() -> None:
    assert feed(rule(), [100.0] * 9) == (9, None)


def test_precision_needs_more_samples_the_noisier_they_are() -> None:
    rng = np.random.default_rng(3)
    few, reason_few = feed(rule(), rng.normal(100, 0.5, 1000))
    many, reason_many = feed(rule(), rng.normal(100, 2.0, 1000))
    assert reason_few == reason_many == "precision"
    # (1.96 · 1.2533 · noise / 0.005)² is 6 and 96
    assert few <= 16
    assert 50 <= many <= 220


def test_five_samples_never_are_precise() -> None:
    # Below six there is no 95 % interval at all, whatever the minimum asks.
    assert feed(rule(min_samples=3), [100.0] * 8) == (
        7,
        "precision",
    )  # looked at with 3, 4, 5 and 7


def test_equal_samples_on_a_coarse_clock_are_not_precise_at_once() -> None:
    # 10 µs on events of 0.5 µs: that none of 10 reads 10.5 does not exclude 10.1.
    count, reason = feed(rule(tick_us=0.5), [10.0] * 1000)
    assert reason == "precision"
    assert 27 <= count <= 34  # 2.72 · 0.5 / 10 / 0.005, and a quarter more
    assert feed(rule(tick_us=0.5), [100.0] * 1000) == (10, "precision")


def test_more_samples_make_a_coarse_clock_precise() -> None:
    rng = np.random.default_rng(5)
    quantised = np.floor(rng.uniform(10.2, 10.7, 1000) / 0.5) * 0.5
    count, reason = feed(rule(), quantised)
    assert reason == "precision"
    assert 60 <= count <= 130  # (1.96 · 0.25 / 10 / 0.005)² is 96


def test_two_modes_stop_at_the_noise_floor() -> None:
    rng = np.random.default_rng(6)
    samples = rng.normal(100, 2, 1000) + 40 * (rng.random(1000) < 0.5)
    count, reason = feed(rule(), samples)
    assert reason == "noise_floor"
    assert 128 <= count <= 600


def test_plain_noise_is_not_taken_for_the_floor() -> None:
    # Log-normal with 5 %: the interval keeps narrowing, and 0.5 % is reached at about 600 samples.
    for seed in range(20):
        samples = 100 * np.exp(0.05 * np.random.default_rng(seed).standard_normal(2000))
        _, reason = feed(rule(max_samples=2000), samples)
        assert reason == "precision"


def test_max_samples_ends_noisy_points() -> None:
    rng = np.random.default_rng(7)
    assert feed(rule(max_samples=50), rng.normal(100, 30, 100).clip(1)) == (50, "max_samples")


def test_max_time_ends_a_point_precise_or_not() -> None:
    clock = Clock()
    of = rule(clock, max_time_s=1.0)
    of.add(100.0)
    clock.now_s = 100.9
    assert of.finished() is None
    clock.now_s = 101.0
    assert of.finished() == "max_time"


def test_max_time_waits_for_a_first_sample() -> None:
    clock = Clock()
    of = rule(clock)
    clock.now_s = 200.0
    assert of.out_of_time
    assert of.finished() is None
    of.add(5.0)
    assert of.finished() == "max_time"


def test_precision_is_named_before_the_bounds() -> None:
    clock = Clock()
    of = rule(clock, max_samples=10)
    for _ in range(10):
        of.add(100.0)
    clock.now_s = 1e6
    assert of.finished() == "precision"


def test_a_clock_that_steps_back_stands_still() -> None:
    clock = Clock()
    of = rule(clock, max_time_s=1.0)
    of.add(100.0)
    clock.now_s = 100.6
    assert of.finished() is None
    clock.now_s = 50.0  # an hour was set back
    assert of.finished() is None
    clock.now_s = 50.3
    assert of.finished() is None
    clock.now_s = 50.5  # 0.6 + 0.5 seconds have really been seen
    assert of.finished() == "max_time"


def test_missing_counts_to_the_next_check() -> None:
    of = rule(min_samples=10, max_samples=12)
    assert of.missing == 10
    for _ in range(4):
        of.add(100.0)
    assert of.missing == 6
    for sample in (1.0, 50.0, 100.0, 150.0, 200.0, 250.0):
        of.add(sample)
    assert of.finished() is None
    assert of.missing == 2  # the check after ten is due at 13, but twelve is the end


def test_statistics_are_looked_at_only_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def count(samples: list[float], **rest: float) -> float:
        looked.append(len(samples))
        return width_of(samples, **rest)

    width_of = stats.relative_half_width
    monkeypatch.setattr(stats, "relative_half_width", count)
    feed(rule(max_samples=2000), np.random.default_rng(8).normal(100, 40, 2000).clip(1))
    assert len(set(looked)) <= 26  # log(2000 / 10) / log(1.25) is 24
    assert sorted(set(looked))[:4] == [10, 13, 17, 22]


@pytest.mark.parametrize("sample", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(sample: float) -> None:
    with pytest.raises(InputError) as caught:
        rule().add(sample)
    assert (
        str(caught.value)
        == f"StoppingRule.add: sample_us = {sample!r}; expected a finite time above 0"
    )
