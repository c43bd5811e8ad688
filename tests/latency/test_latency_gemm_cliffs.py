"""Where cliffs are forecast: the probability on plain numbers, and the shipped A100 model at an edge that it knows."""

import numpy as np
import pytest

from quantbench.errors import InputError
from quantbench.latency.gemm.cliffs import (
    CALIBRATION_ELSEWHERE,
    CALIBRATIONS,
    Calibration,
    calibration_of,
    cliff_probability,
)
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.training import shipped_pool

A100 = "a100-sxm4-80gb"


def test_a_rise_of_the_step_is_as_likely_as_not() -> None:
    exact = Calibration(share=1.0, spread=1.0, noise=0.05)
    rise = np.log([1.10, 1.10, 1.20])
    deviation = np.array([0.0, 0.3, 0.0])
    assert exact.probability(rise, deviation)[:2].tolist() == pytest.approx([0.5, 0.5])
    # 0.087 above the step in log time, which is 1.74 standard deviations.
    assert exact.probability(rise, deviation)[2] == pytest.approx(0.9591, abs=1e-4)


def test_the_less_sure_the_trees_the_closer_to_a_half() -> None:
    exact = Calibration(share=1.0, spread=1.0, noise=0.02)
    below, above = np.log(1.02), np.log(1.25)
    unsure = np.array([0.0, 0.02, 0.1, 0.5])
    assert np.all(np.diff(exact.probability(np.full(4, below), unsure)) > 0)
    assert np.all(np.diff(exact.probability(np.full(4, above), unsure)) < 0)


def test_a_rise_that_comes_true_in_part_must_be_larger() -> None:
    half = Calibration(share=0.5, spread=1.0, noise=0.05)
    assert half.probability(2.0 * np.log([1.10]), np.zeros(1))[0] == pytest.approx(0.5)


def test_every_measured_family_is_calibrated_without_itself() -> None:
    assert {known.family for known in shipped_pool() if known.dtype == "bf16"} == set(CALIBRATIONS)
    assert calibration_of(GemmModel.prior("v100-sxm2-16gb", dtype="fp16")) is CALIBRATION_ELSEWHERE
    for calibration in (*CALIBRATIONS.values(), CALIBRATION_ELSEWHERE):
        assert 0.0 < calibration.share <= 1.2
        assert calibration.spread > 0.0
        assert calibration.noise > 0.0


def test_the_a100_model_sees_the_second_row_of_tiles() -> None:
    model = GemmModel.best(A100)
    sizes = ([256, 300, 300], 12288, [4096, 4096, 8192])
    probability = cliff_probability(model, *sizes)
    assert probability[0] > 0.9 > 0.1 > probability[1:].max()


def test_a_rise_is_the_mean_over_all_trees_and_its_deviation_their_spread() -> None:
    ensemble = GemmModel.best(A100).ensemble
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
    expected = CALIBRATION_ELSEWHERE.probability(rise, deviation)[0]
    assert cliff_probability(model, 256, 8192, 4096)[0] == expected


def test_nothing_asked_is_nothing_forecast() -> None:
    assert cliff_probability(GemmModel.best(A100), [], [], []).tolist() == []


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match=r"cliff_probability: m = 0"):
        cliff_probability(GemmModel.best(A100), 0, 4096, 4096)
