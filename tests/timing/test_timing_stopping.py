"""The stopping rule, fed with literals and a clock of our own."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from quantbench.errors import InputError
from quantbench.timing.stopping import StoppingRule


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rule(clock: Clock | None = None, **changes: Any) -> StoppingRule:
    bounds = {"half_width": 0.005, "min_samples": 10, "max_samples": 1000, "max_time_s": 1.0}
    return StoppingRule(now=clock or Clock(), **{**bounds, **changes})


def feed(of: StoppingRule, samples: Iterable[float]) -> tuple[int, str | None]:
    for sample in samples:
        of.add(sample)
        reason = of.finished()
        if reason:
            return of.count, reason
    return of.count, None


def normal(sd: float, seed: int = 3, count: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).normal(100, sd, count).clip(1)


TWO_MODES = normal(2) + 40 * (np.random.default_rng(6).random(1000) < 0.5)
TICKED = np.floor(np.random.default_rng(5).uniform(10.2, 10.7, 1000) / 0.5) * 0.5


@pytest.mark.parametrize(
    ("changes", "samples", "reason", "low", "high"),
    [
        ({}, [100.0, 100.2] * 50, "precision", 10, 10),
        ({}, [100.0] * 9, None, 9, 9),
        # (1.96 · 1.2533 · noise / 0.005)² is 6 and 96
        ({}, normal(0.5), "precision", 10, 16),
        ({}, normal(2.0), "precision", 50, 220),
        # Below six there is no 95 % interval at all; looked at with 3, 4, 5 and 7.
        ({"min_samples": 3}, [100.0] * 8, "precision", 7, 7),
        # 10 µs on events of 0.5 µs: that none of 10 reads 10.5 does not exclude 10.1. 2.72 · 0.5 /
        # 10 / 0.005, and a quarter more.
        ({"tick_us": 0.5}, [10.0] * 1000, "precision", 27, 34),
        ({"tick_us": 0.5}, [100.0] * 1000, "precision", 10, 10),
        ({}, TICKED, "precision", 60, 130),  # (1.96 · 0.25 / 10 / 0.005)² is 96
        ({}, TWO_MODES, "noise_floor", 128, 600),
        ({"max_samples": 50}, normal(30), "max_samples", 50, 50),
        ({"max_samples": 10, "max_time_s": 0.0, "min_samples": 1}, [100.0] * 10, "max_time", 1, 1),
        ({"max_samples": 10}, [100.0] * 10, "precision", 10, 10),  # named before the bounds
    ],
)
def test_when_a_point_ends(
    changes: dict[str, float], samples: Iterable[float], reason: str | None, low: int, high: int
) -> None:
    count, found = feed(rule(**changes), samples)
    assert found == reason
    assert low <= count <= high


def test_plain_noise_is_not_taken_for_the_floor() -> None:
    # Log-normal with 5 %: the interval keeps narrowing, and 0.5 % is reached at about 600 samples.
    for seed in range(20):
        samples = 100 * np.exp(0.05 * np.random.default_rng(seed).standard_normal(2000))
        assert feed(rule(max_samples=2000), samples)[1] == "precision"


def test_max_time_ends_a_point_but_waits_for_a_first_sample() -> None:
    clock = Clock()
    of = rule(clock)
    clock.now_s = 100.9
    assert not of.out_of_time
    clock.now_s = 101.0
    assert of.out_of_time
    assert of.finished() is None
    of.add(100.0)
    assert of.finished() == "max_time"


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
    of = rule(max_samples=20)
    missing = []
    for sample in normal(40, count=20):
        missing.append(of.missing)
        of.add(sample)
        of.finished()
    # Statistics are looked at after 10, 13 and 17 samples; twenty are the end.
    assert missing == [*range(10, 0, -1), 3, 2, 1, 4, 3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("sample", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(sample: float) -> None:
    with pytest.raises(InputError, match=f"sample_us = {sample!r}"):
        rule().add(sample)
