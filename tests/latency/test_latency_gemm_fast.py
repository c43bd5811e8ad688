"""The distilled model: close to the whole one, and as sane."""

import json
from functools import cache

import numpy as np
import pytest

from quantbench.latency.gemm.distilled import FastGemm
from quantbench.latency.gemm.files import fast_from_parts, fast_to_parts, text_arrays
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.gemm.trees import Forest


@cache
def both() -> tuple[GemmModel, FastGemm]:
    model = GemmModel.best("h200-sxm-141gb")
    return model, model.compiled()


def sizes(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    m = np.floor(2 ** rng.uniform(0, 14, count))
    n, k = (64 * np.floor(2 ** rng.uniform(0, 8, count)) for _ in range(2))
    return m, n, k


def test_it_repeats_the_whole_model() -> None:
    model, fast = both()
    m, n, k = sizes(1000)
    error = np.abs(fast.predict_us(m, n, k) / model.predict(m, n, k).latency_us - 1)
    assert np.median(error) < 0.03
    assert np.quantile(error, 0.95) < 0.12


def test_json_gives_the_same_predictions() -> None:
    _, fast = both()
    back = fast_from_parts(json.loads(json.dumps(text_arrays(fast_to_parts(fast)))))
    m, n, k = sizes(100)
    assert np.array_equal(back.predict_us(m, n, k), fast.predict_us(m, n, k))


@pytest.mark.parametrize("way", ["grow", "boost"])
def test_forests_learn(way: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(400, 3)).astype(np.float32)
    y = np.where(x[:, 0] > 0.5, 1.0, -1.0) + x[:, 1]
    if way == "grow":
        forest = Forest.grow(x, y, trees=10, leaf=2, seed=0)
    else:
        forest = Forest.boost(x, y, trees=20, depth=4, rate=0.3, leaf=5, seed=0)
    mean, variance = forest.predict(x)
    assert np.abs(mean - y).mean() < 0.3 * np.abs(y - y.mean()).mean()
    assert (variance >= 0).all()
