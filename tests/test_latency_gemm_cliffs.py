"""Where cliffs are forecast: the rule on plain numbers, and the shipped A100 model at an edge that it knows."""

import numpy as np
import pytest

from quantbench.errors import InputError
from quantbench.latency.gemm_cliffs import DEVIATIONS, DEVIATIONS_ELSEWHERE, deviations_of, forecast, forecast_cliffs
from quantbench.latency.gemm_model import GemmModel
from quantbench.latency.gemm_prior import shipped_pool


def test_an_unsure_model_forecasts_from_a_smaller_rise() -> None:
    rise = np.log([1.12, 1.08, 1.08, 1.02])
    deviation = np.array([0.02, 0.02, 0.04, 0.04])
    assert forecast(rise, deviation, deviations=0.0).tolist() == [True, False, False, False]
    assert forecast(rise, deviation, deviations=0.8).tolist() == [True, False, True, False]
    assert forecast(rise, deviation, deviations=0.8, step=0.2).tolist() == [False] * 4


def test_every_measured_family_has_a_count_chosen_without_it() -> None:
    assert {known.family for known in shipped_pool()} == set(DEVIATIONS)
    assert deviations_of(GemmModel.prior("v100-sxm2-16gb", dtype="fp16")) == DEVIATIONS_ELSEWHERE


def test_the_a100_model_sees_the_second_row_of_tiles() -> None:
    found = forecast_cliffs(GemmModel.best("a100-sxm4-80gb"), [256, 300, 300], 8192, [4096, 4096, 8192])
    assert found.tolist() == [True, False, False]


def test_a_rise_is_the_mean_over_all_trees_and_its_deviation_their_spread() -> None:
    ensemble = GemmModel.best("a100-sxm4-80gb").ensemble
    m, n, k = np.array([256.0, 300.0, 2048.0]), np.full(3, 8192.0), np.array([4096.0, 4096.0, 16.0])
    rise, deviation = ensemble.rise(m, n, k)
    # Trees within their limits: the means of both ends, without what is taken off for their variance.
    ends = [answer.log_us + answer.variance for answer in (ensemble.raw(m, n, k), ensemble.raw(m + 1.0, n, k))]
    np.testing.assert_allclose(rise, ends[1] - ends[0], atol=1e-5)
    # Between edges the trees agree, whatever they are off at both ends; at an edge they place it differently.
    assert 0 < deviation[1] < deviation[0]
    assert deviation[1] ** 2 < ensemble.raw(m, n, k).variance[1]


def test_a_prior_forecasts_by_its_cost_model_alone() -> None:
    model = GemmModel.prior("v100-sxm2-16gb", dtype="fp16")
    rise, deviation = model.ensemble.rise(np.array([256.0]), np.array([8192.0]), np.array([4096.0]))
    assert deviation[0] == 0.0
    assert forecast_cliffs(model, 256, 8192, 4096)[0] == (rise[0] > np.log(1.1))


def test_nothing_asked_is_nothing_forecast() -> None:
    assert forecast_cliffs(GemmModel.best("a100-sxm4-80gb"), [], [], []).tolist() == []


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match=r"forecast_cliffs: m = 0"):
        forecast_cliffs(GemmModel.best("a100-sxm4-80gb"), 0, 4096, 4096)
