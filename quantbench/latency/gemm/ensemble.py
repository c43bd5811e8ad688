"""Averages several fitted cost models and their trees into one prediction of GEMM times.

The average is over log times. The variance of a prediction comes from the spread between members
and between trees. `GemmModel` uses an `Ensemble` to predict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quantbench.latency.autodiff import FloatArray
from quantbench.latency.forest import chunks
from quantbench.latency.gemm.cost_model import (
    LEAST_K,
    IndexArray,
    Machine,
    Menu,
    Shapes,
    Sizes,
    keep_freed_memory,
)
from quantbench.latency.gemm.member import Member


@dataclass(frozen=True)
class RawPrediction:
    """Predictions of GEMMs, (rows,) each.

    log_us: predicted log time in µs.
    variance: variance of the log time between members, plus the mean variance between trees.
    physics: log time in µs from the cost models alone, averaged over the members.
    kernel: index in the menu of the kernel that the first member's cost model finds fastest.
    waves: number of waves of that kernel.
    fixed_us: launch time of that kernel plus the latency of its main-loop steps along k.
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

    reference: ensemble of another model, for this GPU or a similar one. The correction by the
        reference's trees is an input of this ensemble's trees. None if there is no such model.
    """

    machine: Machine
    menu: Menu
    members: tuple[Member, ...]
    reference: Ensemble | None = None

    def shapes(self, sizes: Sizes) -> Shapes:
        """Returns the cost model terms that do not depend on the members' parameters."""
        return Shapes.of(self.machine, self.menu, sizes)

    def raw(self, sizes: Sizes) -> RawPrediction:
        """Predicts GEMMs without intervals. The device's peak rate is not applied as a limit."""
        keep_freed_memory()
        # Without rows, one empty chunk gives empty columns.
        parts = [self._chunk(sizes.take(rows)) for rows in chunks(len(sizes)) or [slice(0)]]
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return RawPrediction(*map(np.concatenate, columns))

    def _chunk(self, sizes: Sizes) -> RawPrediction:
        """Predicts one chunk of GEMMs. A chunk is so small that its arrays stay in the cache."""
        if len(sizes) == 1:
            # numpy sums a single column in another order than several. Doubling the row keeps its
            # prediction the same as in a batch.
            twice = self._chunk(sizes.take(np.zeros(2, dtype=np.intp)))
            return RawPrediction(*(column[:1] for column in vars(twice).values()))
        deep = replace(sizes, k=np.maximum(sizes.k, LEAST_K))
        shapes = self.shapes(deep)
        reference = None if self.reference is None else self.reference.correction(deep)
        costs = [member.physics(shapes) for member in self.members]
        log_us = []
        within = []
        for member, (cost, parts) in zip(self.members, costs, strict=True):
            x = None
            if member.forest is not None:
                x = member.features(shapes, cost, parts, reference)
            correction, spread = member.correction(x, reference)
            log_us.append(cost + correction)
            within.append(spread)
        # For a log-normal time, the expected relative error |predicted / true - 1| is smallest if
        # the predicted log time is the mean log time minus its variance. Low predictions cost less:
        # half the true time is an error of only 50 %, twice the true time an error of 100 %.
        variance = np.var(log_us, axis=0) + np.mean(within, axis=0)
        middle = np.mean(log_us, axis=0) - variance
        physics = np.mean([cost for cost, _ in costs], axis=0)
        # The trees saw k raised to LEAST_K. For a smaller k, the trees' correction is kept, and the
        # cost models' time is computed again with the true k.
        short = sizes.k < LEAST_K
        if short.any():
            shallow = self.physics(sizes.take(short))
            middle[short] += shallow - physics[short]
            physics[short] = shallow
        first = costs[0][1]
        kernel = first.log_time.argmin(axis=0)
        fastest = kernel, np.arange(len(sizes))
        fixed_us = np.broadcast_to(first.fixed, first.log_time.shape)[fastest]
        waves = shapes.waves.count[fastest]
        return RawPrediction(middle, variance, physics, kernel, waves, fixed_us)

    def physics(self, sizes: Sizes) -> FloatArray:
        """Returns the mean log time in µs from the cost models without trees, (rows,)."""
        shapes = self.shapes(sizes)
        return np.asarray(np.mean([member.physics(shapes)[0] for member in self.members], axis=0))

    def correction(self, sizes: Sizes) -> FloatArray:
        """Returns the correction that the trees add to the cost models' log time, (rows,)."""
        found = self.raw(sizes)
        return found.log_us - found.physics
