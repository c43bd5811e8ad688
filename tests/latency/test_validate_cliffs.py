"""What forecasts of cliffs are judged by, and how the numbers behind them are found, on rises whose truth is known."""

from dataclasses import replace

import numpy as np
import pytest

from quantbench.latency.gemm.cliffs import Calibration
from quantbench.latency.scoring import LEVELS, ErrorSummary, Line, cliff_levels, over_seeds
from tools.accuracy.cliff_calibration import Rises, calibrate
from tools.accuracy.page import levels_table

IS_CLIFF = np.array([True, False, True, False])


def test_levels_count_what_is_found_and_what_is_true() -> None:
    found = cliff_levels(np.array([0.9, 0.3, 0.22, 0.05]), IS_CLIFF)
    assert (found.pairs, found.measured) == (4, 0.5)
    assert found.expected == pytest.approx((0.9 + 0.3 + 0.22 + 0.05) / 4)
    at = {level: (found.found[i], found.true[i]) for i, level in enumerate(LEVELS)}
    assert at[0.20] == (1.0, pytest.approx(2 / 3))
    assert at[0.25] == (0.5, 0.5)
    assert at[0.50] == (0.5, 1.0)


def test_where_nothing_is_likely_nothing_can_be_true() -> None:
    nothing = cliff_levels(np.full(4, 0.01), IS_CLIFF)
    assert set(nothing.true) == {None}
    all_of_it = cliff_levels(np.full(4, 0.99), IS_CLIFF)
    bare = Line("gpu", "sites", "ours", 200, 1, ErrorSummary(1, 1.0, 1.0, 1.0))
    both = over_seeds([replace(bare, cliff_levels=levels) for levels in (nothing, all_of_it)]).cliff_levels
    assert both is not None
    assert both.found[0] == 0.5  # of none and of all
    assert both.true[0] == 0.5  # of the one that forecast any
    assert both.pairs == 8
    assert over_seeds([replace(bare, cliff_levels=nothing)]).cliff_levels == nothing


def test_the_table_has_a_row_for_each_gpu() -> None:
    found = cliff_levels(np.array([0.9, 0.3, 0.22, 0.05]), IS_CLIFF)
    header, rule, *rows = levels_table([("one", 200, found), ("two", None, found)]).splitlines()
    assert header.count("|") == rule.count("|") == rows[0].count("|") == 4 + len(LEVELS)
    assert rows[0].startswith("| one | 200 | 37 % / 50 % |")
    assert rows[1].startswith("| two | – |")


@pytest.mark.slow
def test_calibration_finds_the_numbers_that_made_the_rises() -> None:
    rng = np.random.default_rng(0)

    def device(share: float, spread: float, noise: float, rows: int = 40_000) -> Rises:
        rise, deviation = rng.normal(0.06, 0.12, rows), rng.uniform(0.01, 0.2, rows)
        real = share * rise + np.hypot(spread * deviation, noise) * rng.standard_normal(rows)
        return Rises(rise, deviation, real > np.log(1.1))

    found = calibrate({"one": [device(0.8, 0.9, 0.05)], "other": [device(0.8, 0.9, 0.05), device(0.8, 0.9, 0.05)]})
    assert (found.share, found.spread, found.noise) == pytest.approx((0.8, 0.9, 0.05), rel=0.1)


def test_every_family_counts_alike_in_a_calibration() -> None:
    rng = np.random.default_rng(1)
    rise = rng.normal(0.06, 0.12, 20_000)
    deviation = np.full(len(rise), 0.02)
    whole = Rises(rise, deviation, rise + 0.03 * rng.standard_normal(len(rise)) > np.log(1.1))
    none = Rises(rise, deviation, rng.random(len(rise)) < 0.2)
    once, often = calibrate({"a": [whole], "b": [none]}), calibrate({"a": [whole], "b": [none] * 5})
    assert (once.share, once.spread, once.noise) == pytest.approx((often.share, often.spread, often.noise), rel=0.02)
    assert isinstance(once, Calibration)
