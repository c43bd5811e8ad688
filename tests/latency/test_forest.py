"""Forests: what they learn, and that their arrays give the same predictions."""

import numpy as np
import pytest

from quantbench.latency.forest import Forest


def grown(way: str) -> tuple[Forest, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(400, 3)).astype(np.float32)
    y = np.where(x[:, 0] > 0.5, 1.0, -1.0) + x[:, 1]
    if way == "grow":
        return Forest.grow(x, y, trees=10, leaf=2, seed=0), x, y
    return Forest.boost(x, y, trees=20, depth=4, rate=0.3, leaf=5, seed=0), x, y


@pytest.mark.parametrize("way", ["grow", "boost"])
def test_forests_learn(way: str) -> None:
    forest, x, y = grown(way)
    mean, variance = forest.predict(x)
    assert np.abs(mean - y).mean() < 0.3 * np.abs(y - y.mean()).mean()
    assert (variance >= 0).all()


@pytest.mark.parametrize("way", ["grow", "boost"])
def test_arrays_give_the_same_predictions(way: str) -> None:
    forest, x, _ = grown(way)
    again = Forest.from_arrays(forest.to_arrays(), 3)
    assert [part.tolist() for part in again.predict(x)] == [
        part.tolist() for part in forest.predict(x)
    ]
