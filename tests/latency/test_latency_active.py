"""Choosing what to measure next: doubtful shapes, both sides of edges, and no crowding."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from quantbench.errors import InputError
from quantbench.latency.gemm.cliffs import next_points
from quantbench.latency.gemm.model import GemmModel


@dataclass(frozen=True)
class Answer:
    latency_us: np.ndarray
    low_us: np.ndarray
    high_us: np.ndarray


class Model:
    """A staircase with a 30 % step after m = 128, doubtful where k is large."""

    def predict(self, m: np.ndarray, n: np.ndarray, k: np.ndarray) -> Answer:
        latency_us = np.where(m > 128, 13.0, 10.0) * n / 1024
        width = np.where(k >= 4096, 0.4, 0.1)
        return Answer(latency_us, latency_us * np.exp(-width), latency_us * np.exp(width))


MODEL = cast(GemmModel, Model())


def candidates() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    grid = [(m, n, k) for m in (64, 65, 128, 129, 512) for n in (1024, 4096) for k in (1024, 4096)]
    m, n, k = np.array(grid).T
    return m, n, k


def test_both_sides_of_the_doubtful_edge_come_first() -> None:
    m, n, k = candidates()
    chosen = next_points(MODEL, (m, n, k), 4, edge_share=0.5)
    assert sorted(m[chosen[:2]].tolist()) == [128, 129]
    assert k[chosen[:2]].tolist() == [4096, 4096]
    assert n[chosen[0]] == n[chosen[1]]


def test_without_edges_doubtful_shapes_are_drawn_more_often() -> None:
    m, n, k = candidates()
    drawn = np.concatenate([next_points(MODEL, (m, n, k), 4, edge_share=0.0, seed=seed) for seed in range(50)])
    assert 0.75 < np.mean(k[drawn] == 4096) < 1.0  # odds of 16 to 1, but never certain
    again = next_points(MODEL, (m, n, k), 4, edge_share=0.0, seed=3)
    assert again.tolist() == next_points(MODEL, (m, n, k), 4, edge_share=0.0, seed=3).tolist()
    assert len(set(again.tolist())) == 4


def test_all_candidates_once_and_never_more() -> None:
    m, n, k = candidates()
    assert sorted(next_points(MODEL, (m, n, k), len(m)).tolist()) == list(range(len(m)))
    with pytest.raises(InputError, match=r"count = 21; expected an integer from 1 to 20"):
        next_points(MODEL, (m, n, k), 21)
    with pytest.raises(InputError, match=r"edge_share = 1.5; expected a share from 0 to 1"):
        next_points(MODEL, (m, n, k), 2, edge_share=1.5)
