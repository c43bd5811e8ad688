"""Where cliffs are forecast: the rule on plain numbers, and the shipped A100 model at an edge that it knows."""

import numpy as np

from quantbench.latency.gemm_cliffs import MARGIN, MARGIN_ELSEWHERE, forecast, forecast_cliffs, margin_of
from quantbench.latency.gemm_model import GemmModel
from quantbench.latency.gemm_prior import shipped_pool


def test_an_unsure_model_forecasts_from_a_smaller_rise() -> None:
    rise, nothing = np.log([1.12, 1.08, 1.08, 1.02]), np.zeros(4)
    half_width = np.array([0.05, 0.05, 0.10, 0.10])
    assert forecast(rise, nothing, half_width, margin=0.0).tolist() == [True, False, False, False]
    assert forecast(rise, nothing, half_width, margin=0.3).tolist() == [True, False, True, False]
    assert forecast(nothing, rise, half_width, margin=0.3).tolist() == [True, False, True, False]
    assert forecast(rise, nothing, half_width, margin=0.3, step=0.2).tolist() == [False] * 4


def test_every_measured_family_has_a_margin_chosen_without_it() -> None:
    assert {known.family for known in shipped_pool()} == set(MARGIN)
    assert margin_of(GemmModel.prior("v100-sxm2-16gb", dtype="fp16")) == MARGIN_ELSEWHERE


def test_the_a100_model_sees_the_second_row_of_tiles() -> None:
    found = forecast_cliffs(GemmModel.best("a100-sxm4-80gb"), [256, 300, 300], 8192, [4096, 4096, 8192])
    assert found.tolist() == [True, False, False]
