"""One member of the ensemble: the cost model with its own parameters, and trees for what it leaves unexplained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm_features import choice_weights, feature_matrix, watched_columns
from quantbench.latency.gemm_fit import Measured
from quantbench.latency.gemm_forest import Forest
from quantbench.latency.gemm_form import Machine, Parts, Shapes, log_latency_with_parts
from quantbench.latency.gemm_menu import Menu
from quantbench.latency.gemm_parameters import Values

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
Array = npt.NDArray[np.floating[Any]]

_NARROWEST_CHOICE = 0.03
_CLIP = 5.0  # deviations beyond which a residual is taken for an outlier


@dataclass(frozen=True)
class Growth:
    """How trees are grown. trees: per member; leaf: least rows in a leaf."""

    trees: int = 24
    leaf: int = 2


@dataclass(frozen=True)
class Member:
    """parameters: (parameters + tiles,). forest: None where there were too few rows. slope: how much of a reference's
    residual is this GPU's too. most: the correction's limit, log time."""

    parameters: FloatArray
    forest: Forest | None
    slope: float = 0.0
    most: float = 0.0

    def physics(self, shapes: Shapes) -> tuple[Array, Parts]:
        """Log µs, (rows,), and its parts."""
        return log_latency_with_parts(Values(self.parameters.astype(shapes.dtype)), shapes)

    def weights(self, parts: Parts) -> Array:
        """How likely each kernel is taken, (kernels, rows)."""
        width = float(np.exp(Values(self.parameters)["choice"])[0])
        return choice_weights(parts, max(width, _NARROWEST_CHOICE))

    def features(
        self,
        menu: Menu,
        shapes: Shapes,
        log_us: Array,
        parts: Parts,
        weights: Array,
        watched: list[FloatArray],
        reference: FloatArray | None,
    ) -> Float32Array:
        """What the forest sees; a reference's residual, (rows,), is its last column."""
        x = feature_matrix(menu, shapes, log_us, parts, weights, watched)
        return x if reference is None else np.column_stack([x, reference.astype(np.float32)])

    def correction(self, x: Float32Array, reference: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """(log time to add, its variance over the trees), (rows,) each."""
        if self.forest is None:
            return np.zeros(len(x)), np.zeros(len(x))
        mean, variance = self.forest.predict(x)
        if reference is not None:
            mean = mean + self.slope * reference
        return np.clip(mean, -self.most, self.most), variance

    def by_tree(self, x: Float32Array, reference: FloatArray | None) -> FloatArray:
        """What each tree would add to log time, (trees, rows), unlimited; a row of zeros without a forest."""
        if self.forest is None:
            return np.zeros((1, len(x)))
        said = self.forest.by_tree(x).astype(np.float64)
        return said if reference is None else said + self.slope * reference


def train_member(
    machine: Machine,
    menu: Menu,
    parameters: FloatArray,
    rows: Measured,
    reference: FloatArray | None,
    growth: Growth,
    seed: int,
) -> Member:
    """Grow the trees on what `parameters` leave unexplained. reference: another model's residual, (rows,)."""
    bare = Member(parameters, None)
    x, residual = _residual(bare, machine, menu, rows, reference)
    slope = 0.0
    if reference is not None:
        reference = x[:, -1].astype(np.float64)  # of rows whose kernel is known, twice
        # Ridge towards none: a reference of another library may say nothing.
        slope = float((reference @ residual) / (reference @ reference + 10.0 * residual.var() + 1e-12))
        residual = residual - slope * reference
    centre = float(np.median(residual))
    deviation = 1.4826 * float(np.median(np.abs(residual - centre))) + 1e-6
    clipped = np.clip(residual, centre - _CLIP * deviation, centre + _CLIP * deviation)
    forest = Forest.grow(x, clipped, trees=growth.trees, leaf=growth.leaf, seed=seed)
    fitted = forest.predict(x)[0] + (0.0 if reference is None else slope * reference)
    return Member(parameters, forest, slope, float(np.abs(fitted).max()))


_CHUNK = 1000


def _residual(
    member: Member, machine: Machine, menu: Menu, rows: Measured, reference: FloatArray | None
) -> tuple[Float32Array, FloatArray]:
    """What the trees see of the rows and what is left for them: every row as one of which the kernel is not known, then
    those whose kernel was recorded once more, with it."""
    features, residual = [], []
    for start in range(0, len(rows), _CHUNK):
        part = rows.take(np.arange(start, min(start + _CHUNK, len(rows))))
        shapes = Shapes(machine, menu, part.m, part.n, part.k, dtype=np.float32)
        predicted, parts = member.physics(shapes)
        known = None if reference is None else reference[start : start + _CHUNK]
        weights, watched = member.weights(parts), watched_columns(shapes)
        features.append(member.features(menu, shapes, predicted, parts, weights, watched, known))
        residual.append(part.log_us - predicted)
        named = np.flatnonzero(part.kernel >= 0)
        if len(named):
            few = part.take(named)
            own, x = named_view(member, machine, menu, few, None if known is None else known[named])
            features.append(x)
            residual.append(few.log_us - own)
    return np.concatenate(features), np.concatenate(residual)


def named_view(
    member: Member, machine: Machine, menu: Menu, rows: Measured, reference: FloatArray | None
) -> tuple[Array, Float32Array]:
    """(log µs of each row's recorded kernel, what the trees see when that kernel is known to run)."""
    own = member.physics(Shapes(machine, menu.by_row(rows.kernel), rows.m, rows.n, rows.k))[0]
    shapes = Shapes(machine, menu, rows.m, rows.n, rows.k, dtype=np.float32)
    parts = member.physics(shapes)[1]
    taken = np.zeros_like(parts.log_time)
    taken[rows.kernel, np.arange(len(rows))] = 1.0
    return own, member.features(menu, shapes, own, parts, taken, watched_columns(shapes), reference)
