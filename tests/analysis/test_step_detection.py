"""The piecewise fit on curves of a few points, whose steps are known."""

import numpy as np
import numpy.typing as npt
import pytest

from quantbench.analysis.step_detection import PiecewiseFit, describe, find_pieces

Floats = npt.NDArray[np.float64]
SIGMA = 0.01


def fit_pieces(log_size: Floats, log_time: Floats, sigma: Floats) -> tuple[PiecewiseFit, ...]:
    return describe(find_pieces(log_size, log_time, sigma))


def stairs(*runs: tuple[int, float]) -> Floats:
    """One curve of log times: for each run its points and its level."""
    return np.concatenate([np.full(points, level) for points, level in runs])[None]


def sizes(points: int, first: float = 32.0) -> Floats:
    return np.log(np.arange(first, first + points))


def sigma(curve: Floats) -> Floats:
    return np.full(curve.shape, SIGMA)


def indices(curve: Floats) -> list[int]:
    (fit,) = fit_pieces(sizes(curve.shape[1]), curve, sigma(curve))
    return [one.index for one in fit.breaks]


def test_a_step_is_reported_with_its_place_its_height_and_its_error() -> None:
    curve = stairs((8, 1.0), (8, 1.3))
    (fit,) = fit_pieces(sizes(16), curve, sigma(curve))
    (one,) = fit.breaks
    assert (one.index, one.first, one.last) == (7, 7, 7)
    assert one.log_jump == pytest.approx(0.3, abs=0.01)
    # Levels of 8 points each are known to σ/√8; their slopes, at the edge, add up to as much again.
    assert SIGMA * (2 / 8) ** 0.5 < one.standard_error < 3 * SIGMA * (2 / 8) ** 0.5
    assert fit.levels == pytest.approx(curve[0], abs=0.005)
    assert fit.trend.shape == (15,)


def test_a_step_is_found_from_two_and_a_quarter_standard_errors_on() -> None:
    """Between two levels of eight points each; smaller ones would be seen in noise."""
    found = {
        height: indices(stairs((8, 1.0), (8, 1.0 + height * SIGMA)))
        for height in (1.5, 2.0, 2.25, 3.0)
    }
    assert found == {1.5: [], 2.0: [], 2.25: [7], 3.0: [7]}


def test_where_a_point_lies_between_two_levels_the_place_is_a_range() -> None:
    curve = stairs((8, 1.0), (1, 1.02), (8, 1.04))
    (fit,) = fit_pieces(sizes(17), curve, sigma(curve))
    (one,) = fit.breaks
    assert (one.first, one.last) == (7, 8)


def test_each_step_lies_between_its_neighbours() -> None:
    curve = stairs((4, 1.0), (4, 1.4), (4, 1.8), (4, 1.5))
    (fit,) = fit_pieces(sizes(16), curve, sigma(curve))
    assert [(one.index, one.first, one.last) for one in fit.breaks] == [
        (3, 3, 3),
        (7, 7, 7),
        (11, 11, 11),
    ]


def test_points_that_all_stand_apart_are_a_piece_each() -> None:
    curve = np.resize([1.0, 3.0, 2.0], 12)[None]
    assert indices(curve) == list(range(11))
    assert indices(stairs((1, 1.0), (1, 2.0))) == [0]


def test_freedom_counts_levels_and_half_of_the_slopes() -> None:
    """A piece of one point takes that point only; a longer one its level and half a slope."""
    curve = stairs((4, 1.0), (1, 2.0), (4, 3.0))
    pieces = find_pieces(sizes(9), curve, sigma(curve))
    assert [own.tolist() for own in pieces.starts] == [[0, 4, 5]]
    assert pieces.freedom.tolist() == [9 - 1.5 - 1 - 1.5]


def test_squared_residuals_are_about_as_many_as_the_degrees_of_freedom() -> None:
    """A little fewer, as the pieces are those that leave least."""
    noise = SIGMA * np.random.default_rng(7).standard_normal((200, 24))
    pieces = find_pieces(sizes(24), stairs((12, 1.0), (12, 1.5)) + noise, np.full((200, 24), SIGMA))
    assert pieces.chi2.sum() / pieces.freedom.sum() == pytest.approx(0.9, abs=0.1)


def test_a_curve_of_one_point_has_no_break() -> None:
    pieces = find_pieces(np.zeros(1), np.full((2, 1), 3.0), np.full((2, 1), SIGMA))
    assert (pieces.freedom.tolist(), pieces.chi2.tolist()) == ([0.0, 0.0], [0.0, 0.0])
    fits = fit_pieces(np.zeros(1), np.array([[3.0], [4.0]]), np.full((2, 1), SIGMA))
    assert [(fit.breaks, fit.levels.tolist()) for fit in fits] == [((), [3.0]), ((), [4.0])]


def test_a_kink_in_the_trend_is_no_step() -> None:
    """Flat at first, as long as overhead rules, then proportional to the size: the trend follows,
    without a break.
    """
    log_size = np.log(np.geomspace(1, 64, 49))
    curve = np.log(8 + np.exp(log_size))[None]
    (fit,) = fit_pieces(log_size, curve, np.full(curve.shape, SIGMA))
    assert fit.breaks == ()
    assert fit.trend[0] < 0.3
    assert fit.trend[-1] > 0.7
    assert fit.levels == pytest.approx(curve[0], abs=2 * SIGMA)


def test_curves_of_equal_sizes_are_fitted_alike_whether_they_share_them_or_not() -> None:
    log_size = np.log(np.geomspace(1, 64, 49))
    curves = np.log(8 + np.exp(log_size)) + np.array([0.0, 0.4])[:, None] * (np.arange(49) > 20)
    together = fit_pieces(log_size, curves, np.full(curves.shape, SIGMA))
    apart = fit_pieces(np.stack([log_size, log_size]), curves, np.full(curves.shape, SIGMA))
    assert [[one.index for one in fit.breaks] for fit in together] == [[], [20]]
    for one, other in zip(together, apart, strict=True):
        assert [b.index for b in one.breaks] == [b.index for b in other.breaks]
        assert one.trend == pytest.approx(other.trend, abs=1e-6)
        assert one.levels == pytest.approx(other.levels, abs=1e-6)
