"""The contests: who learns from what, how it is judged, and how the tables are written."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError
from tools.accuracy.contests import (
    Answer,
    Contest,
    Contestant,
    gaussian_process,
    log_interpolation,
    roofline,
    run_contests,
)
from tools.accuracy.scoring import ErrorSummary, Line, cells, over_seeds
from tools.accuracy.tables import GemmTable

A100 = lookup("a100-sxm4-80gb")


def products(m: np.ndarray, n: np.ndarray, k: np.ndarray, dtype: str = "bf16") -> GemmTable:
    return GemmTable(A100.name, dtype, {"m": m, "n": n, "k": k}, np.ones(len(m)))


def contest() -> Contest:
    """Products on a made-up A100 at 60 % of the roofline, with a 30 % step after m = 128 and m =
    256.
    """
    ms, ns, ks = (
        (1, 64, 65, 128, 129, 256, 257, 512),
        range(1024, 6144, 1024),
        (1024, 2048, 4096, 8192),
    )
    table = products(*np.array(list(product(ms, ns, ks))).T)
    m = table.sizes["m"]
    step = np.where(m > 256, 1.69, np.where(m > 128, 1.3, 1.0))
    return Contest(replace(table, latency_us=3 + table.ideal_us() / 0.6 * step))


def fixed(name: str, factor: float, train_rows: int | None = 20) -> Contestant:
    """Predicts the measured time times a factor."""

    def answer(train: GemmTable, test: GemmTable, seed: int) -> Answer:
        measured = test.latency_us
        return Answer(measured * factor, (measured * 0.9, measured * 1.1), fit_s=1.0, predict_s=0.5)

    return Contestant(name, train_rows, answer)


def judged(*contestants: Contestant) -> list[Line]:
    """Scores of two seeds; each fit is told of, and who learns nothing runs once."""
    steps: list[str] = []
    found = list(run_contests([(contest(), contestants)], (0, 1), steps.append))
    runs = sum(2 if one.train_rows else 1 for one in contestants)
    assert len(set(steps)) == runs
    return found


def test_scores_of_a_known_answer() -> None:
    (found,) = judged(fixed("ten percent over", 1.1))
    assert (found.errors.median_pct, found.errors.p95_pct) == pytest.approx((10, 10))
    assert (found.coverage, found.cliff_recall, found.cliff_precision) == (1.0, 1.0, 1.0)
    assert (found.train_rows, found.seeds, found.fit_s) == (20, 2, 1.0)
    assert found.shapes_per_s == pytest.approx(80 / 0.5)  # half of 20 sites with 8 rows each


def test_baselines_learn_from_the_training_rows_only() -> None:
    seen: list[set[tuple[int, ...]]] = []

    def spy(train: GemmTable, test: GemmTable, seed: int) -> Answer:
        rows, others = (set(zip(*part.shapes, strict=True)) for part in (train, test))
        seen.append(rows)
        assert not rows & others
        return Answer(test.latency_us)

    found = judged(
        roofline(), log_interpolation(40), gaussian_process(40), Contestant("spy", 40, spy)
    )
    assert len(seen) == 2
    assert all(len(rows) == 40 for rows in seen)
    assert seen[0] != seen[1]
    errors = {entry.model: entry.errors.median_pct for entry in found}
    assert errors["Gaussian process on log efficiency"] < errors["spec-sheet roofline"]
    assert errors["spec-sheet roofline"] > 30


def test_rows_without_an_answer_are_counted_not_forgiven() -> None:
    def half(train: GemmTable, test: GemmTable, seed: int) -> Answer:
        latency_us = test.latency_us.copy()
        latency_us[::2] = np.nan
        return Answer(latency_us)

    def none(train: GemmTable, test: GemmTable, seed: int) -> Answer:
        return Answer(np.full(len(test), np.nan))

    (found,) = judged(Contestant("half", 20, half))
    assert found.unanswered == pytest.approx(0.5)
    assert "(no answer to 50 %)" in cells(found)[2]
    assert found.cliff_recall is None
    with pytest.raises(InputError, match=r"none answered none of 80 rows; expected at least one"):
        judged(Contestant("none", 20, none))


def test_roofline_by_hand_and_its_refusal() -> None:
    side = np.array([4096, 4096])
    square, thin = products(np.array([4096, 1]), side, side).ideal_us()
    assert square == pytest.approx(2 * 4096**3 / 312e6)
    assert thin == pytest.approx(2 * (4096 + 4096**2 + 4096) / A100.memory_gb_per_s / 1e3)
    with pytest.raises(InputError, match=r"a100-sxm4-80gb has no peak for fp8"):
        products(side, side, side, "fp8").ideal_us()


SUMMARY = ErrorSummary(100, 4.551, 6.52, 19.04)


BARE = Line("a100-sxm4-80gb", "sites", "ours", 200, 1, SUMMARY)


def test_a_busy_moment_moves_no_time() -> None:
    rates = (40_000.0, 9_000.0, 41_000.0)
    found = over_seeds([replace(BARE, fit_s=400_000.0 / rate, shapes_per_s=rate) for rate in rates])
    assert found.seeds == 3
    assert (found.shapes_per_s, found.fit_s) == (40_000.0, 10.0)
    assert over_seeds([BARE]) == BARE
