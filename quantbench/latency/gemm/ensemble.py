"""Averages several fitted cost models and their trees into one prediction of GEMM times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantbench.latency.forest import chunks
from quantbench.latency.gemm.cost_model import (
    LEAST_K,
    Array,
    FloatArray,
    IndexArray,
    Machine,
    Menu,
    Shapes,
    keep_freed_memory,
)
from quantbench.latency.gemm.member import Member, watched_columns


@dataclass(frozen=True)
class RawPrediction:
    """Predictions of rows, (rows,) each.

    log_us: log µs.
    variance: between members and trees, log time.
    physics: log µs of the cost models alone.
    kernel: index of the fastest kernel by the first member's cost model.
    waves: waves of that kernel.
    fixed_us: its launch and the latency of its steps of k.
    """

    log_us: FloatArray
    variance: FloatArray
    physics: FloatArray
    kernel: IndexArray
    waves: FloatArray
    fixed_us: FloatArray


@dataclass(frozen=True)
class Ensemble:
    """Members with a common machine and menu, whose log times are averaged.

    reference: another model (of this GPU or of a similar one), the correction of whose trees is an
        input of these.
    """

    machine: Machine
    menu: Menu
    members: tuple[Member, ...]
    reference: Ensemble | None = None

    def raw(
        self,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        batch: FloatArray | None = None,
        layout: FloatArray | None = None,
    ) -> RawPrediction:
        """Predicts rows, (rows,) each. layout: index in `LAYOUTS`, -1 (the default) if unknown."""
        batch = np.ones(len(m)) if batch is None else batch
        layout = np.full(len(m), -1.0) if layout is None else layout
        keep_freed_memory()
        # At least one chunk, so that no rows give empty columns.
        parts = chunks(len(m)) or [slice(0)]
        found = [
            vars(self._chunk(*(x[part] for x in (m, n, k, batch, layout)))).values()
            for part in parts
        ]
        return RawPrediction(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _chunk(
        self, m: FloatArray, n: FloatArray, k: FloatArray, *others: FloatArray
    ) -> RawPrediction:
        if (
            len(m) == 1
        ):  # numpy sums a single column in another order; batching must not change a prediction
            twice = self._chunk(*(np.repeat(x, 2) for x in (m, n, k, *others)))
            return RawPrediction(*(x[:1] for x in vars(twice).values()))
        deep = np.maximum(k, LEAST_K)
        shapes = Shapes(self.machine, self.menu, m, n, deep, *others)
        reference = (
            None if self.reference is None else self.reference.correction(m, n, deep, *others)
        )
        watched = watched_columns(shapes)
        log_us: list[Array] = []
        within: list[Array] = []
        costs: list[Array] = []
        for member in self.members:
            cost, parts = member.physics(shapes)
            if not costs:
                kernel = parts.log_time.argmin(axis=0)
                fastest = kernel, np.arange(len(m))
                waves = shapes.waves[fastest]
                fixed_us = np.broadcast_to(parts.fixed, parts.log_time.shape)[fastest]
            costs.append(cost)
            x = None
            if member.forest is not None:
                x = member.features(self.menu, shapes, cost, parts, watched, reference)
            correction, spread = member.correction(x, reference)
            log_us.append(cost + correction)
            within.append(spread)
        # For a log-normal time the expected relative error |predicted / true - 1| is least below
        # the median by the
        # variance: predicting twice the time costs 100 %, half of it 50 %.
        variance = np.var(log_us, axis=0) + np.mean(within, axis=0)
        middle = np.mean(log_us, axis=0) - variance
        physics = np.mean(costs, axis=0)
        short = k < LEAST_K
        if short.any():
            shallow = self._physics(*(x[short] for x in (m, n, k, *others)))
            middle[short] += shallow - physics[short]
            physics[short] = shallow
        return RawPrediction(middle, variance, physics, kernel, waves, fixed_us)

    def physics(self, *sizes: FloatArray) -> FloatArray:
        """Returns the mean log µs of the members' cost models, without trees, (rows,). sizes: as
        `raw`.
        """
        found = [self._physics(*(x[part] for x in sizes)) for part in chunks(len(sizes[0]))]
        return np.concatenate(found) if found else np.zeros(0)

    def _physics(self, *sizes: FloatArray) -> FloatArray:
        shapes = Shapes(self.machine, self.menu, *sizes)
        return np.asarray(np.mean([member.physics(shapes)[0] for member in self.members], axis=0))

    def correction(self, *sizes: FloatArray) -> FloatArray:
        """Returns the trees' correction of the cost model, (rows,), log time. sizes: as `raw`."""
        found = self.raw(*sizes)
        return found.log_us - found.physics
