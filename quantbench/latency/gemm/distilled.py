"""Distils a GEMM model into a fast one for queries of millions of shapes: similar predictions, without interval.

Entry points: `distil`, which returns a `FastGemm` of size `LEAN` or full; its method `predict_us`; `features` and
`WATCHED`, the inputs of its trees. Used by `model` (`GemmModel.compiled`), `files`, `profile.fit`,
`profile.models` and `tools.ship_gemm`.

The distilled model has a cost model of six kernels, refitted to the full model's predictions, and twenty boosted trees
for the remaining residual (two kernels and eight trees with `LEAN`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm.cost_model import (
    LEAST_K,
    Array,
    FloatArray,
    IndexArray,
    Machine,
    Menu,
    Shapes,
    Values,
    hand_prior,
    keep_freed_memory,
    log_latency,
)
from quantbench.latency.gemm.ensemble import Ensemble
from quantbench.latency.gemm.training import Prior, fit_parameters
from quantbench.latency.gemm.trees import Float32Array, Forest, Measured, chunks

_TAUGHT = 20_000  # shapes at which the full model is evaluated
_TAUGHT_PHYSICS = 1500  # shapes that the cost model is fitted to
_CHUNK = 4096
#: (block_m, block_n, blocks per SM) whose wave fill is a feature of the trees; for the first two, padding too
WATCHED = ((128, 256, 1), (128, 128, 2), (64, 64, 6))


@dataclass(frozen=True)
class Size:
    """Size of a distilled model. kernels: of its cost model. trees, depth, rate (learning rate), leaf (fewest rows)."""

    kernels: int
    trees: int
    depth: int
    rate: float
    leaf: int = 8


FULL = Size(6, 20, 11, 0.4, leaf=4)
#: half the cost per shape; errors on the public A100, H100 and B200 tables are 5 % larger (relative)
LEAN = Size(2, 8, 10, 0.6)


@dataclass(frozen=True)
class FastGemm:
    """Distilled GEMM model. machine, menu, parameters: small cost model. forest: trees whose mean corrects it by at
    most `most`, log time."""

    machine: Machine
    menu: Menu
    parameters: FloatArray
    forest: Forest
    most: float

    def predict_us(self, sizes_m: npt.ArrayLike, sizes_n: npt.ArrayLike, sizes_k: npt.ArrayLike) -> FloatArray:
        """Predicts µs of GEMMs, (rows,). Sizes: integers from 1, broadcast, not checked."""
        m, n, k = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(x, dtype=np.float64)) for x in (sizes_m, sizes_n, sizes_k))
        )
        log_us = self._raw(m, n, k)
        return np.asarray(np.maximum(np.exp(log_us), 2.0 * m * n * k / self.machine.flop_per_us))

    def _raw(self, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
        keep_freed_memory()
        log_us = np.empty(len(m))
        for part in chunks(len(m), _CHUNK):
            log_us[part] = self._chunk(m[part], n[part], k[part])
        return log_us

    def _chunk(self, m: FloatArray, n: FloatArray, k: FloatArray) -> Array:
        deep = np.maximum(k, LEAST_K)
        single = Values(self.parameters.astype(np.float32))
        physics, _ = log_latency(single, Shapes(self.machine, self.menu, m, n, deep, dtype=np.float32))
        x = features(self.machine, m, n, deep, physics)
        log_us = physics + np.clip(self.forest.predict(x)[0], -self.most, self.most)
        short = k < LEAST_K
        if short.any():
            # Below LEAST_K the trees see one k.
            values, sizes = Values(self.parameters), (m[short], n[short])
            shallow = log_latency(values, Shapes(self.machine, self.menu, *sizes, k[short]))[0]
            log_us[short] += shallow - log_latency(values, Shapes(self.machine, self.menu, *sizes, deep[short]))[0]
        return np.asarray(log_us)


def features(machine: Machine, m: FloatArray, n: FloatArray, k: FloatArray, log_us: Array) -> Float32Array:
    """Returns the inputs of a distilled model's trees, (rows, 9); `Member.features` is the full model's counterpart."""
    out = np.empty((len(m), 4 + len(WATCHED) + 2), dtype=np.float32)
    out[:, 0], out[:, 1], out[:, 2], out[:, 3] = np.log2(m), np.log2(n), np.log2(k), log_us
    for i, (block_m, block_n, held) in enumerate(WATCHED):
        tiles = np.ceil(m / block_m) * np.ceil(n / block_n)
        waves = tiles / (machine.sm_count * held)
        out[:, 4 + i] = waves / np.ceil(waves)
        if i < 2:
            out[:, 4 + len(WATCHED) + i] = m * n / (tiles * (block_m * block_n))
    return out


def distil(
    ensemble: Ensemble,
    *,
    also: tuple[FloatArray, FloatArray, FloatArray] | None = None,
    seed: int = 0,
    size: Size = FULL,
) -> FastGemm:
    """Fits a FastGemm to predictions of `ensemble`, in seconds. also: (m, n, k) of shapes to add to random ones."""
    m, n, k = _teaching_shapes(_TAUGHT, np.random.default_rng(seed))
    if also is not None:
        m, n, k = (np.concatenate([own, other]) for own, other in zip((m, n, k), also, strict=True))
    answer = ensemble.raw(m, n, k)
    mean = np.mean([member.parameters for member in ensemble.members], axis=0)
    some = np.random.default_rng(seed).permutation(len(m))[:_TAUGHT_PHYSICS]
    every = Shapes(ensemble.machine, ensemble.menu, m[some], n[some], k[some])
    menu = ensemble.menu.subset(_covering(log_latency(Values(mean), every)[1].log_time, size.kernels))
    few = slice(0, _TAUGHT_PHYSICS)
    one, none = np.ones(_TAUGHT_PHYSICS), np.full(_TAUGHT_PHYSICS, -1.0)
    rows = Measured(m[few], n[few], k[few], answer.log_us[few], np.full(_TAUGHT_PHYSICS, -1), one, none, one)
    prior = Prior(mean, 0.5 * hand_prior(menu.tiles)[1], "the whole model")
    parameters = fit_parameters(ensemble.machine, menu, rows, prior)
    values = Values(parameters)
    physics = np.concatenate(
        [
            log_latency(values, Shapes(ensemble.machine, menu, m[part], n[part], k[part]))[0]
            for part in chunks(len(m), _CHUNK)
        ]
    )
    x = features(ensemble.machine, m, n, k, physics)
    forest = Forest.boost(
        x, answer.log_us - physics, trees=size.trees, depth=size.depth, rate=size.rate, leaf=size.leaf, seed=seed
    )
    most = float(np.quantile(np.abs(forest.predict(x)[0]), 0.99))
    return FastGemm(ensemble.machine, menu, parameters, forest, most)


def _covering(log_time: Array, count: int) -> IndexArray:
    """Selects `count` kernels greedily to minimise the squared gaps to each shape's best, (kernels, rows).

    Selecting the most frequent winners instead would leave rare shapes without a suitable kernel."""
    gap = log_time - log_time.min(axis=0)
    left = np.full(gap.shape[1], np.inf)
    chosen: list[int] = []
    for _ in range(min(count, len(gap))):
        score = (np.minimum(left, gap) ** 2).sum(axis=1)
        score[chosen] = np.inf
        chosen.append(int(score.argmin()))
        left = np.minimum(left, gap[chosen[-1]])
    return np.array(chosen)


def _teaching_shapes(count: int, rng: np.random.Generator) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Draws shapes typical of planners: any m, often at both sides of tile edges; round n and k."""

    def rounded(x: FloatArray, steps: tuple[int, ...]) -> FloatArray:
        step = rng.choice(steps, count)
        return np.asarray(np.maximum(np.round(x / step), 1) * step)

    any_m = np.floor(2 ** rng.uniform(0, 15.5, count))
    edge_m = rounded(any_m, (16, 64, 128, 256)) + (rng.random(count) < 0.5)
    m = np.where(rng.random(count) < 0.7, edge_m, any_m)
    n, k = (rounded(2 ** rng.uniform(5, 16.05, count), (8, 32, 64, 128, 256, 512)) for _ in range(2))
    return m, n, k
