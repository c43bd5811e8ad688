"""Averages several fitted cost models and their trees into one prediction of GEMM times.

Entry points: `Ensemble`; `Reference`, the rows that it was fitted to; `shape_keys`. Used by `model`,
`training`, `distilled`, `files` and tools.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm.cost_model import (
    LEAST_K,
    FloatArray,
    IndexArray,
    Machine,
    Menu,
    Shapes,
    keep_freed_memory,
)
from quantbench.latency.gemm.trees import Measured, Member, chunks, watched_columns

IntArray = npt.NDArray[np.int64]
#: m, n, k, batch and layout (index in `LAYOUTS`), (rows,) each
Sizes = tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True)
class Reference:
    """Residual of another model (of this GPU or of a similar one): the correction of its trees, log time."""

    ensemble: Ensemble

    def at(self, *sizes: FloatArray) -> FloatArray:
        """Returns the residual at shapes, (rows,), log time. sizes: as `Ensemble.raw`."""
        return self.ensemble.correction(*sizes)


def _all_sizes(
    m: FloatArray, n: FloatArray, k: FloatArray, batch: FloatArray | None = None, layout: FloatArray | None = None
) -> Sizes:
    return m, n, k, np.ones(len(m)) if batch is None else batch, np.full(len(m), -1.0) if layout is None else layout


@dataclass(frozen=True)
class RawPrediction:
    """Log µs (rows,), variance between members and trees (rows,), each member's fastest kernel (members, rows), and log
    µs of the cost model alone (rows,)."""

    log_us: FloatArray
    variance: FloatArray
    kernels: IndexArray
    physics: FloatArray


def _combined(log_us: list[FloatArray], within: list[FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Returns (prediction, variance), (rows,) each, log time, from the members' predictions and tree variances.

    For a log-normal time the expected relative error |predicted / true - 1| is least below the median by the variance:
    predicting twice the time costs 100 %, half of it 50 %.
    """
    variance = np.var(log_us, axis=0) + (np.mean(within, axis=0) if within else 0.0)
    return np.mean(log_us, axis=0) - variance, variance


@dataclass(frozen=True)
class Ensemble:
    """Members with a common machine and menu, whose log times are averaged (`_combined`)."""

    machine: Machine
    menu: Menu
    members: tuple[Member, ...]
    reference: Reference | None = None

    def raw(self, *asked: FloatArray) -> RawPrediction:
        """Predicts at m, n, k and optionally batch and layout, (rows,) each."""
        sizes = m, *_ = _all_sizes(*asked)
        keep_freed_memory()
        log_us, variance, alone = np.empty((3, len(m)))
        kernels = np.empty((len(self.members), len(m)), dtype=np.intp)
        for part in chunks(len(m)):
            log_us[part], variance[part], kernels[:, part], alone[part] = self._raw(*(x[part] for x in sizes))
        return RawPrediction(log_us, variance, kernels, alone)

    def _raw(
        self, m: FloatArray, n: FloatArray, k: FloatArray, *others: FloatArray
    ) -> tuple[FloatArray, FloatArray, IndexArray, FloatArray]:
        if len(m) == 1:  # numpy sums a single column in another order; batching must not change a prediction
            alone = self._raw(*(np.repeat(x, 2) for x in (m, n, k, *others)))
            return alone[0][:1], alone[1][:1], alone[2][:, :1], alone[3][:1]
        deep = np.maximum(k, LEAST_K)
        shapes = Shapes(self.machine, self.menu, m, n, deep, *others)
        reference = None if self.reference is None else self.reference.at(m, n, deep, *others)
        watched = watched_columns(shapes)
        log_us, within, kernels, costs = [], [], [], []
        for member in self.members:
            physics, parts = member.physics(shapes)
            costs.append(physics)
            kernels.append(parts.log_time.argmin(axis=0))
            correction = np.zeros(len(m))
            if member.forest is not None:
                x = member.features(self.menu, shapes, physics, parts, watched, reference)
                correction, spread = member.correction(x, reference)
                within.append(spread)
            log_us.append(physics + correction)
        log_time, variance = _combined(log_us, within)
        alone = np.mean(costs, axis=0)
        short = k < LEAST_K
        if short.any():
            shallow = self._physics(*(x[short] for x in (m, n, k, *others)))
            log_time[short] += shallow - alone[short]
            alone[short] = shallow
        return log_time, variance, np.stack(kernels), alone

    def named(self, kernel: IndexArray, split_k: FloatArray, *sizes: FloatArray) -> FloatArray:
        """Predicts log µs of shapes, (rows,), for known kernels.

        kernel: (rows,) index of the nearest one in the menu. split_k: (rows,), their own. sizes: `Sizes`."""
        log_us = np.empty(len(kernel))
        for part in chunks(len(kernel)):
            m, n, k, batch, layout = (x[part] for x in sizes)
            rows = Measured(m, n, k, np.zeros(len(m)), kernel[part], batch, layout, split_k[part])
            known = None if self.reference is None else self.reference.at(*rows.sizes)
            found, within = [], []
            for member in self.members:
                own, x = member.named(self.machine, self.menu, rows, known, whole=member.named_forest is not None)
                correction, spread = member.correction(x, known, named=True)
                found.append(own + correction)
                within.append(spread)
            log_us[part] = _combined(found, within)[0]
        return log_us

    def rise(self, m: FloatArray, n: FloatArray, k: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns mean and standard deviation, (rows,) each, of the rise in log time from m to m + 1 over all trees of
        all members. Most errors are the same at both ends and cancel."""
        both = [
            self._by_tree(m[part] + 1.0, n[part], np.maximum(k[part], LEAST_K))
            - self._by_tree(m[part], n[part], np.maximum(k[part], LEAST_K))
            for part in chunks(len(m))
        ]
        by_tree = np.concatenate(both, axis=1) if both else np.zeros((1, 0))
        return by_tree.mean(axis=0), by_tree.std(axis=0)

    def _by_tree(self, m: FloatArray, n: FloatArray, k: FloatArray) -> FloatArray:
        """Returns log µs by tree, (members · trees, rows)."""
        shapes = Shapes(self.machine, self.menu, m, n, k)
        reference = None if self.reference is None else self.reference.at(m, n, k, shapes.batch, shapes.layout)
        watched = watched_columns(shapes)
        log_time = []
        for member in self.members:
            physics, parts = member.physics(shapes)
            x = member.features(self.menu, shapes, physics, parts, watched, reference)
            log_time.append(physics + member.by_tree(x, reference))
        return np.concatenate(log_time)

    def physics(self, *sizes: FloatArray) -> FloatArray:
        """Returns the mean log µs of the members' cost models, without trees, (rows,). sizes: as `raw`."""
        found = [self._physics(*(x[part] for x in sizes)) for part in chunks(len(sizes[0]))]
        return np.concatenate(found) if found else np.zeros(0)

    def _physics(self, *sizes: FloatArray) -> FloatArray:
        shapes = Shapes(self.machine, self.menu, *sizes)
        return np.asarray(np.mean([member.physics(shapes)[0] for member in self.members], axis=0))

    def correction(self, *sizes: FloatArray) -> FloatArray:
        """Returns the trees' correction of the cost model, (rows,), log time. sizes: as `raw`."""
        return self.raw(*sizes).log_us - self.physics(*sizes)
