"""One member of a GEMM model: a cost model, and trees that correct its residual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantbench.latency.autodiff import NEGLIGIBLE
from quantbench.latency.forest import Float32Array, Forest, chunks
from quantbench.latency.gemm.cost_model import (
    SPLITS,
    Array,
    FloatArray,
    IndexArray,
    Machine,
    Menu,
    Parts,
    Shapes,
    Values,
    log_latency,
    resident_blocks,
)


@dataclass(frozen=True)
class TrainingRows:
    """Measured shapes and log times, (rows,) each.

    batch: 1 for single products.
    layout: index in `LAYOUTS`, -1 if unknown.
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    batch: FloatArray
    layout: FloatArray
    log_us: FloatArray

    def __len__(self) -> int:
        return len(self.m)

    @property
    def sizes(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """m, n, k, batch and layout, in the order of `Shapes`."""
        return self.m, self.n, self.k, self.batch, self.layout

    @property
    def batched(self) -> bool:
        """Whether batched products are among the rows."""
        return bool((self.batch > 1).any())

    @property
    def layouts(self) -> bool:
        """Whether single products, or batched ones, of several layouts are among the rows."""
        return any(
            len(np.unique(self.layout[kind])) > 1 for kind in (self.batch == 1, self.batch > 1)
        )

    def take(self, rows: IndexArray) -> TrainingRows:
        return TrainingRows(*(column[rows] for column in vars(self).values()))


_LARGEST_GAP = 1.5  # cap on a kernel's log time above the fastest kernel's
_WATCHED_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
_NARROWEST_CHOICE = 0.03
_CLIP = 5.0  # deviations at which residuals are clipped


def _expected(weights: Array, of: Array) -> Array:
    """Returns the weighted mean over kernels, (rows,). Not a matrix product, whose rounding depends
    on other rows.
    """
    expected: Array = np.einsum("kr,kr->r", weights, np.broadcast_to(of, weights.shape))
    return expected


def watched_columns(shapes: Shapes) -> list[FloatArray]:
    """Returns log waves, fill of the waves and padding for common tiles, independent of the menu;
    (rows,) each.
    """
    columns = []
    for block_m, block_n in _WATCHED_TILES:
        tiles = shapes.batch * np.ceil(shapes.m / block_m) * np.ceil(shapes.n / block_n)
        waves = tiles / (shapes.machine.sm_count * float(resident_blocks(block_m, block_n)))
        columns += [
            np.log(waves),
            waves / np.ceil(waves),
            shapes.batch * shapes.m * shapes.n / (tiles * (block_m * block_n)),
        ]
    return columns


@dataclass(frozen=True)
class Growth:
    """Settings of tree growth: number of trees per member, and fewest rows in a leaf."""

    trees: int = 24
    leaf: int = 2


@dataclass(frozen=True)
class Member:
    """Cost model with its forest.

    parameters: (parameters + tiles,).
    forest: None if rows were too few.
    slope: share of a reference's residual that is added.
    limit: largest correction, log time.
    batched, layouts: whether the forest's inputs include the batch and the layout.
    """

    parameters: FloatArray
    forest: Forest | None
    slope: float = 0.0
    limit: float = 0.0
    batched: bool = False
    layouts: bool = False

    def physics(self, shapes: Shapes) -> tuple[Array, Parts]:
        """Computes the cost model's log µs, (rows,), and its parts."""
        return log_latency(Values(self.parameters), shapes)

    def weights(self, parts: Parts) -> Array:
        """Returns the probability that each kernel is chosen, (kernels, rows); columns sum to 1."""
        width = max(float(np.exp(Values(self.parameters)["choice"])[0]), _NARROWEST_CHOICE)
        weights: Array = np.exp(
            np.maximum((parts.log_time.min(axis=0) - parts.log_time) / width, NEGLIGIBLE)
        )
        total: Array = weights.sum(axis=0)
        return weights / total

    def features(
        self,
        menu: Menu,
        shapes: Shapes,
        log_us: Array,
        parts: Parts,
        watched: list[FloatArray],
        reference: FloatArray | None,
    ) -> Float32Array:
        """Returns the inputs of the forest, (rows, features): `columns`, and `reference` (rows,) as
        the last one.
        """
        columns = self.columns(menu, shapes, log_us, parts, watched)
        if reference is not None:
            columns.append(reference)
        out = np.empty((len(columns), parts.log_time.shape[1]), dtype=np.float32)
        for i, column in enumerate(columns):
            out[i] = column
        return out.T

    def columns(
        self,
        menu: Menu,
        shapes: Shapes,
        log_us: Array,
        parts: Parts,
        watched: list[FloatArray],
    ) -> list[Any]:
        """Returns the inputs of the forest but for the reference, each (rows,) or a constant.

        log_us, parts: result of `physics`.
        watched: `watched_columns(shapes)`, shared by all members.
        """
        weights = self.weights(parts)
        log_m, log_n, log_k = np.log2(shapes.batch * shapes.m), np.log2(shapes.n), np.log2(shapes.k)
        # The time of a small tile in very many waves can exceed single precision; such a tile is
        # never chosen.
        per_time = weights * np.exp(np.maximum(-parts.log_time, NEGLIGIBLE))
        columns: list[Any] = [
            log_m,
            log_n,
            log_k,
            log_m + log_n,
            log_n + log_k,
            log_m + log_k,
            log_m + log_n + log_k,
        ]
        columns.append(log_us)
        priced = (parts.arithmetic, parts.memory, parts.l2, parts.write, parts.reduction)
        columns += [_expected(per_time, part) for part in priced]
        means = (
            _expected(weights, shapes.split_k),
            _expected(weights, shapes.waves),
            _expected(weights, shapes.fluid / shapes.waves),
            shapes.batch
            * shapes.m
            * shapes.n
            * _expected(weights / shapes.tiles, 1.0 / (16384.0 * shapes.area)),
        )
        # Means of equal numbers: unrounded, a tree could tell 1 from the sum of the weights. The
        # shift keeps fractions such as 1/32 off the edges between two rounded numbers, where the
        # last bit of a sum would decide.
        split_k, waves, fill, padding = (np.round(mean + 1e-7, 4) for mean in means)
        columns += [split_k, np.log(waves), fill, padding]
        gaps = np.minimum(parts.log_time - parts.log_time.min(axis=0), _LARGEST_GAP)
        nearest = np.sort(gaps.T, axis=1)  # faster than np.partition for few columns
        columns += [nearest[:, min(1, len(gaps) - 1)], nearest[:, min(4, len(gaps) - 1)], *watched]
        if self.batched:
            columns += [np.log2(shapes.batch), np.log2(shapes.m)]
        if self.layouts:
            columns.append(shapes.layout)
        for groups, count in ((menu.of_tile, len(menu.tiles)), (menu.of_split, len(SPLITS))):
            of_group = dict(groups)
            columns += [
                gaps[of_group[i]].min(axis=0) if i in of_group else _LARGEST_GAP
                for i in range(count)
            ]
        return columns

    def correction(self, x: Float32Array | None, reference: FloatArray | None) -> tuple[Any, Any]:
        """Returns the log time to add and its variance over the trees, (rows,) each; 0.0 without
        trees.
        """
        if self.forest is None or x is None:
            return 0.0, 0.0
        mean, variance = self.forest.predict(x)
        if reference is not None:
            mean = mean + self.slope * reference
        return np.clip(mean, -self.limit, self.limit), variance


def train_member(
    machine: Machine,
    menu: Menu,
    parameters: FloatArray,
    rows: TrainingRows,
    reference: FloatArray | None,
    growth: Growth,
    seed: int,
) -> Member:
    """Grows a member's trees on the residual of its cost model. reference: residual of another
    model, (rows,).
    """
    bare = Member(parameters, None, batched=rows.batched, layouts=rows.layouts)
    x, residual = _residual(bare, machine, menu, rows, reference)
    slope = 0.0
    if reference is not None:
        # Ridge regression, because the reference of another library may not help.
        slope = float(
            (reference @ residual) / (reference @ reference + 10.0 * residual.var() + 1e-12)
        )
    shared = np.zeros(len(rows)) if reference is None else slope * reference
    forest = _grown(x, residual - shared, growth, seed)
    limit = float(np.abs(forest.predict(x)[0] + shared).max())
    return replace(bare, forest=forest, slope=slope, limit=limit)


def _grown(x: Float32Array, residual: FloatArray, growth: Growth, seed: int) -> Forest:
    centre = float(np.median(residual))
    deviation = 1.4826 * float(np.median(np.abs(residual - centre))) + 1e-6
    clipped = np.clip(residual, centre - _CLIP * deviation, centre + _CLIP * deviation)
    return Forest.grow(x, clipped, trees=growth.trees, leaf=growth.leaf, seed=seed)


def _residual(
    member: Member, machine: Machine, menu: Menu, rows: TrainingRows, reference: FloatArray | None
) -> tuple[Float32Array, FloatArray]:
    """Returns the inputs of the trees and the residual of all rows."""
    features, residual = [], []
    for chunk in chunks(len(rows), 1000):
        part = rows.take(np.arange(len(rows))[chunk])
        shapes = Shapes(machine, menu, *part.sizes)
        predicted, parts = member.physics(shapes)
        known = None if reference is None else reference[chunk]
        features.append(
            member.features(menu, shapes, predicted, parts, watched_columns(shapes), known)
        )
        residual.append(part.log_us - predicted)
    return np.concatenate(features), np.concatenate(residual)
