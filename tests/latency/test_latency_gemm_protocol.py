"""The splits and error figures by which latency models are judged."""

import numpy as np
import pytest

from quantbench.errors import InputError
from tools.accuracy.scoring import (
    cliff_pairs,
    coverage,
    held_out,
    random_split,
    recall_and_precision,
    rises,
    summarize,
)
from tools.accuracy.tables import group_index


def grid(ms: list[int], sites: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows = sorted((m, n, k) for m in ms for n, k in sites)
    m, n, k = np.array(rows).T
    return m, n, k


def test_random_split_divides_the_rows() -> None:
    split, again, other = (random_split(100, 30, seed=seed) for seed in (1, 1, 2))
    assert sorted([*split.train, *split.test]) == list(range(100))
    assert len(split.train) == 30
    assert (again.train == split.train).all()
    assert set(other.train) != set(split.train)


def test_held_out_sites_share_no_site_and_do_not_move_with_the_seed() -> None:
    m, n, k = grid([1, 2, 64, 65], [(n, k) for n in (32, 64, 96) for k in (32, 64, 96)])
    group = group_index((n, k))
    split, other = (held_out(group, 7, seed) for seed in (0, 1))
    train, test = ({(n[i], k[i]) for i in part} for part in (split.train, split.test))
    assert not train & test
    assert len(test) == 9 // 2
    assert (split.test == other.test).all()
    assert set(split.train) != set(other.train)
    assert len(held_out(group, None, 0).train) == len(m) - len(split.test)
    with pytest.raises(InputError, match=r"train = 99 of 21 rows"):
        held_out(group, 99, 0)


def test_summary_figures() -> None:
    measured = np.full(4, 10.0)
    predicted = np.array([10.0, 11.0, 8.0, 13.0])
    error = summarize(predicted, measured)
    assert (error.median_pct, error.mean_pct) == pytest.approx((15.0, 15.0))
    assert error.p95_pct == pytest.approx(np.percentile([0, 10, 20, 30], 95))
    assert summarize(measured, measured, predicted == 10).rows == 1
    assert coverage(measured, predicted, predicted + 0.5) == 0.25
    with pytest.raises(InputError, match=r"no rows"):
        summarize(measured, measured, predicted == 0)


def test_cliffs_are_scored_on_neighbouring_m() -> None:
    m, n, k = grid([64, 65, 128, 129, 256, 257], [(1024, 1024), (512, 1024)])
    before, after = pairs = cliff_pairs(m, n, k)
    assert (m[before].tolist(), m[after].tolist()) == ([128, 256], [129, 257])
    assert n[before].tolist() == [1024, 1024]
    measured = rises(np.where((m == 129) & (n == 1024), 1.2, 1.0), pairs)
    forecast = rises(np.where(m >= 257, 2.0, np.where(m == 129, 1.11, 1.0)), pairs)
    assert measured.tolist() == [True, False]
    assert recall_and_precision(forecast, measured) == (1.0, 0.5)
    assert np.isnan(recall_and_precision(np.zeros(2, dtype=bool), measured)[1])
