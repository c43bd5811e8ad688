"""Statistics against published tables and hand-worked examples."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantbench import stats
from quantbench.errors import InputError

# n, rank from below, rank from above, coverage in per cent as printed. Source: "Confidence
# Intervals for the Population Median", table A.7 of a statistics textbook (p. 656,
# coursehero.com/file/5646626: n = 2 to 20, all rank pairs); the row taken is the narrowest with at
# least 95 %.
PUBLISHED_RANKS = [
    (5, 1, 5, 93.8), (6, 1, 6, 96.9), (8, 1, 8, 99.2), (9, 2, 8, 96.1), (11, 2, 10, 98.8), (12, 3, 10, 96.1),
    (14, 3, 12, 98.7), (15, 4, 12, 96.5), (16, 4, 13, 97.9), (17, 5, 13, 95.1), (20, 6, 15, 95.9),
]  # fmt: skip


@pytest.mark.parametrize(("count", "low", "high", "percent"), PUBLISHED_RANKS)
def test_ranks_as_in_the_published_table(count: int, low: int, high: int, percent: float) -> None:
    got_low, got_high, coverage = stats.median_ranks(count)
    assert (got_low, got_high) == (low, high)
    # The table's confidence levels are rounded, some of them downwards.
    assert coverage * 100 == pytest.approx(percent, abs=0.11)


@given(st.integers(6, 3000), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_ranks_are_the_narrowest_that_cover(count: int, confidence: float) -> None:
    low, high, coverage = stats.median_ranks(count, confidence)
    assert low + high == count + 1
    if coverage >= confidence:
        inner = stats._coverage(count, low + 1)
        assert low == (count + 1) // 2 or inner < confidence
    else:
        assert low == 1


def test_coverage_holds_in_simulation() -> None:
    # Exponential times, skewed as timings are: the interval must contain the true median ln 2 in 95
    # % of 2000 draws.
    rng = np.random.default_rng(20240607)
    hits = 0
    for _ in range(2000):
        interval = stats.median_interval(rng.exponential(size=25))
        hits += interval.low <= np.log(2) <= interval.high
    # Exact coverage at n = 25 is 95.67 %; three standard errors of 2000 draws are 1.4 %.
    assert hits / 2000 == pytest.approx(0.9567, abs=0.014)


# ---- times of a clock that ticks


def ticked(
    rng: np.random.Generator, true_us: float, tick_us: float, count: int, noise_us: float = 0.0
) -> list[float]:
    """What a clock of this tick reads for a work that begins at random moments."""
    stop_us = rng.uniform(0, tick_us, count) + true_us + rng.normal(0, noise_us, count)
    return (np.floor(stop_us / tick_us) * tick_us).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tick_us", [0.032, 1.024])
@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
def test_ticked_times_are_unbiased_and_their_interval_covers_the_truth(
    tick_us: float, noise: float
) -> None:
    rng = np.random.default_rng(11)
    errors, hits, turns = [], 0, 400
    for true_us in rng.uniform(12, 14, turns):
        samples = ticked(rng, true_us, tick_us, 100, noise * tick_us)
        errors.append((stats.typical_us(samples) - true_us) / tick_us)
        interval = stats.typical_interval(samples, tick_us=tick_us)
        hits += interval.low <= true_us <= interval.high
    # The error of a mean of 100 is at most a tenth of 0.5 ticks plus the noise; a median's is up to
    # half a tick.
    assert np.std(errors) < 0.13 * (0.5 + noise)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / turns**0.5
    assert hits / turns > 0.92


def test_equal_times_are_known_the_better_the_more_there_are() -> None:
    # One of n samples elsewhere would move the time by 1/n of a tick; z²/√2 = 2.72 of them are
    # allowed for.
    for count in (20, 200):
        width = stats.relative_half_width([10.0] * count, tick_us=1.0)
        assert width == pytest.approx(2.72 / count / 10, rel=0.01)
    assert stats.relative_half_width([10.0] * 6) == 0.0
    assert stats.relative_half_width([10.0] * 5) == float("inf")


def test_an_outlier_is_no_tick() -> None:
    assert stats.typical_us([10.0] * 99 + [30.0]) == 10.0
    assert stats.typical_us([10.0] * 99 + [10.5]) == pytest.approx(10.005)
    assert stats.typical_us([10.0] * 90 + [10.5] * 9 + [300.0]) == pytest.approx(10 + 0.5 * 10 / 99)
    assert stats.untied([10.0, 10.0, 30.0]).tolist() == [10.0, 10.0, 30.0]
    assert stats.outlier_fraction([10.0] * 90 + [10.5] * 10) == 0.0
    assert stats.outlier_fraction([10.0] * 90 + [10.5] * 9 + [300.0]) == 0.01


@given(st.lists(st.integers(10_000, 10_000_000), min_size=2, max_size=60, unique=True))
def test_times_without_ties_have_the_median_and_its_interval(nanoseconds: list[int]) -> None:
    times = [ns / 1e3 for ns in nanoseconds]
    assert stats.typical_us(times) == stats.median(times)
    assert stats.typical_interval(times) == stats.median_interval(times)
    assert stats.untied(times).tolist() == sorted(times)
    middle = stats.median(times)
    deviation = stats.median([abs(us - middle) for us in times])
    assert stats.noise(times) == pytest.approx(deviation / 0.6744897501960817 / middle)
    low, high = stats.quantiles(times, (0.1, 0.9))
    assert stats.spread(times) == pytest.approx((high - low) / middle)


def test_an_outlier_does_not_tie_other_times() -> None:
    # A millionth of the 2 ms was taken for rounding, and so a nanosecond between the others.
    times = [10.0, 10.016, 10.008, 510.327, 510.324, 2000.001, 510.326]
    assert stats.typical_us(times) == stats.median(times) == 510.324


def test_untied_times_show_a_shift_of_less_than_a_tick() -> None:
    rng = np.random.default_rng(14)
    one, other = (stats.untied(ticked(rng, us, 0.5, 400)) for us in (12.1, 12.3))
    assert np.median(other) - np.median(one) == pytest.approx(0.2, abs=0.05)


def test_a_confidence_that_is_reached_exactly_is_reached() -> None:
    # Three samples enclose the median with 75 %.
    assert stats.relative_half_width([99.0, 100.0, 101.0], confidence=0.75) == pytest.approx(0.01)
    assert stats.relative_half_width([99.0, 100.0, 101.0], confidence=0.76) == float("inf")
    assert stats.median_ranks(8, 1 - 2 * 9 / 2**8)[:2] == (2, 7)


def test_times_around_zero_have_no_relative_figures() -> None:
    for samples in ([-1.0] * 10, [0.0] * 10):
        assert stats.relative_half_width(samples) == float("inf")
        assert stats.noise(samples) == float("inf")
        assert stats.spread(samples) == float("inf")


def test_quantiles_spread_and_median_by_hand() -> None:
    samples = [100.0 + i for i in range(11)]  # 100 … 110
    assert stats.median(samples) == 105.0
    assert stats.quantiles(samples, (0.0, 0.1, 0.9)) == (100.0, 101.0, 109.0)
    assert stats.spread(samples) == pytest.approx(8 / 105)
    assert stats.relative_half_width(samples) == pytest.approx(4 / 105)  # ranks 2 and 10


@pytest.mark.parametrize(
    ("samples", "far", "near"),
    [
        ([2.0, 2.0, 3.0, 4.0, 4.0, 2.0, 3.0], 50.0, 9.9),  # quartiles 2 and 4: fences at −4 and 10
        ([10.0, 10.2, 10.4, 10.5, 10.6, 10.8, 11.0], 8.6, 8.7),  # at 8.65 and 12.15
        ([10.0, 10.2, 10.4, 10.5, 10.6, 10.8, 11.0], 12.4, 12.3),  # at 8.85 and 12.35
    ],
)
def test_outliers_are_what_lies_three_interquartile_ranges_away(
    samples: list[float], far: float, near: float
) -> None:
    assert stats.outlier_fraction([*samples, near]) == 0.0
    assert stats.outlier_fraction([*samples, far]) == 0.125


def test_noise_is_a_standard_deviation_that_stands_a_third_of_disturbed_samples() -> None:
    samples = np.random.default_rng(1).normal(100.0, 2.0, size=20_000)
    assert stats.noise(samples) == pytest.approx(0.02, rel=0.03)
    # The median is 10.1; distances from it 0 0 .1 .1 .2 .3 4.9 4.9 4.9, their median .2.
    samples = [10.0, 10.0, 10.1, 9.9, 10.1, 9.8, 15.0, 15.0, 15.0]
    assert stats.noise(samples) == pytest.approx(1.4826 * 0.2 / 10.1, rel=1e-3)
    # Nine in ten on one tick: the noise is that of the ticks.
    assert stats.noise([10.0] * 90 + [10.5] * 10) == pytest.approx(0.5 * 0.1**0.5 / 10)


@pytest.mark.parametrize(
    ("samples", "tick"),
    [
        ([10.24, 11.264, 10.24, 13.312], 1.024),  # A100 events
        ([7.296, 7.328, 7.424], 0.032),  # H100 events
        ([5.0, 5.0, 5.0], 0.0),
        ([5.0], 0.0),
        ([5.0, 5.00000001, 5.5], 0.5),  # the same tick through float32 milliseconds
    ],
)
def test_tick_is_the_smallest_step(samples: list[float], tick: float) -> None:
    assert stats.tick(samples) == pytest.approx(tick)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: stats.median([]), "samples of shape (0,)"),
        (lambda: stats.noise([1.0, float("nan")]), "a sample of nan"),
        (lambda: stats.quantiles([1.0], [1.5]), "shares = (1.5,)"),
        (lambda: stats.median_ranks(5, 95.0), "confidence = 95.0"),
        (lambda: stats.median_ranks(0), "count = 0"),
    ],
)
def test_errors_name_the_value(call: Callable[[], object], value: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.value == value
