"""Fits the cost model's residual with extremely randomised trees, one forest per ensemble member.

Entry points: `Forest` (trees grown by scikit-learn, evaluated by numpy), `VALUE_STEP`, `Member` (a cost model and its
forests), `train_member`, `Measured` (training rows), `Growth`, `watched_columns`, `chunks`, `Float32Array`,
`NAMED_COLUMNS`. Used by `ensemble`, `training`, `distilled`, `model`, `files`, `public`, `latency.moe`,
`explore.evaluator` and tools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.autodiff import NEGLIGIBLE
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

Float32Array = npt.NDArray[np.float32]

#: rows per batch: amortises numpy's call overhead and keeps the arrays in the cache
CHUNK = 1024
#: resolution of leaf values, log time: a forest's mean moves by 0.1 % at most
VALUE_STEP = 2.0**-9
# Levels allowed beyond a balanced tree's: every level costs a pass over all rows and trees.
_SPARE_DEPTH = 5
_DEEPEST_BOOSTED = 8


@dataclass(frozen=True)
class Measured:
    """Measured shapes and log times, (rows,) each.

    kernel: menu index of the kernel nearest to the recorded one, -1 if unknown.
    batch: 1 for single products.
    layout: index in `LAYOUTS`, -1 if unknown.
    split_k: of the recorded kernel; only of rows with a known kernel.

    `store.record.Measured` is a different class.
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    log_us: FloatArray
    kernel: IndexArray
    batch: FloatArray
    layout: FloatArray
    split_k: FloatArray

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
        return any(len(np.unique(self.layout[kind])) > 1 for kind in (self.batch == 1, self.batch > 1))

    def take(self, rows: IndexArray) -> Measured:
        return Measured(*(column[rows] for column in vars(self).values()))

    def recorded(self, machine: Machine, menu: Menu) -> Shapes:
        """Returns the terms of each row's recorded kernel, (1, rows)."""
        return Shapes(machine, menu.by_row(self.kernel, self.split_k), *self.sizes)


def chunks(rows: int, most: int = CHUNK) -> list[slice]:
    """Returns slices of at most `most` rows that cover all rows."""
    return [slice(start, start + most) for start in range(0, rows, most)]


@dataclass(frozen=True)
class Forest:
    """Decision trees as flat arrays.

    feature, threshold, right, value: (nodes,).
    roots: (trees,), node index of each root.

    A node's left child (feature <= threshold) is the next node; a leaf is its own child, with threshold +inf.
    """

    feature: npt.NDArray[np.int16]
    threshold: Float32Array
    right: npt.NDArray[np.int32]
    value: Float32Array
    roots: npt.NDArray[np.int32]
    depth: int

    @classmethod
    def grow(cls, x: Float32Array, y: FloatArray, *, trees: int, leaf: int, seed: int) -> Forest:
        """Grows extremely randomised trees of y (rows,) over x (rows, features), with at least `leaf` rows per leaf."""
        from sklearn.ensemble import ExtraTreesRegressor

        deepest = int(np.ceil(np.log2(len(y)))) + _SPARE_DEPTH
        # Every split considers all features: a third of them gave larger tail errors on A100 from 1000 rows.
        grown = ExtraTreesRegressor(trees, min_samples_leaf=leaf, max_depth=deepest, random_state=seed, n_jobs=1)
        grown.fit(x, y)
        return cls._flat([estimator.tree_ for estimator in grown.estimators_], scale=1.0)

    @classmethod
    def boost(
        cls, x: Float32Array, y: FloatArray, *, trees: int, depth: int, rate: float, leaf: int, seed: int
    ) -> Forest:
        """Grows boosted trees, each on the residual of the previous ones for half the rows, with learning rate `rate`.
        Leaf values are scaled so that the prediction is the trees' mean, as with `grow`."""
        from sklearn.tree import DecisionTreeRegressor

        rng = np.random.default_rng(seed)
        rest, grown = y.copy(), []
        for i in range(trees):
            rows = rng.permutation(len(y))[: len(y) // 2]
            tree = DecisionTreeRegressor(
                max_depth=depth, min_samples_leaf=leaf, max_features=0.6, random_state=seed + i
            ).fit(x[rows], rest[rows])
            rest -= rate * tree.predict(x)
            grown.append(tree.tree_)
        return cls._flat(grown, scale=rate * trees)

    @classmethod
    def boost_by_histogram(
        cls, x: Float32Array, y: FloatArray, *, trees: int, leaves: int, rate: float, leaf: int, seed: int
    ) -> Forest:
        """Grows boosted trees of at most `leaves` leaves on binned features: ten times faster than `boost`, for which
        it has the same scaling of leaf values."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        grown = HistGradientBoostingRegressor(
            max_iter=trees, max_leaf_nodes=leaves, learning_rate=rate, min_samples_leaf=leaf,
            max_depth=_DEEPEST_BOOSTED, early_stopping=False, random_state=seed,
        ).fit(x, y)  # fmt: skip
        parts, start, roots = [], 0, []
        for (predictor,) in grown._predictors:
            nodes = predictor.nodes[_preorder(predictor.nodes)]
            place = np.empty(len(nodes), dtype=np.int32)
            place[_preorder(predictor.nodes)] = np.arange(len(nodes))
            is_leaf = nodes["is_leaf"] == 1
            right = start + np.where(is_leaf, np.arange(len(nodes)), place[nodes["right"]])
            parts.append((nodes, is_leaf, right))
            roots.append(start)
            start += len(nodes)
        nodes, is_leaf, right = (np.concatenate([part[i] for part in parts]) for i in range(3))
        value = float(grown._baseline_prediction.ravel()[0]) + trees * nodes["value"]
        return cls(
            feature=np.where(is_leaf, 0, nodes["feature_idx"]).astype(np.int16),
            threshold=np.where(is_leaf, np.inf, nodes["num_threshold"]).astype(np.float32),
            right=right.astype(np.int32),
            value=np.where(is_leaf, value, 0.0).astype(np.float16).astype(np.float32),
            roots=np.array(roots, dtype=np.int32),
            depth=max(1, *(int(part[0]["depth"].max()) for part in parts)),
        )

    @classmethod
    def _flat(cls, parts: list[Any], scale: float) -> Forest:
        starts = np.cumsum([0] + [t.node_count for t in parts])
        feature, threshold, right = [], [], []
        for tree, start in zip(parts, starts, strict=False):
            own = np.arange(tree.node_count)
            is_leaf = tree.children_left < 0
            feature.append(np.where(is_leaf, 0, tree.feature))
            threshold.append(np.where(is_leaf, np.inf, tree.threshold))
            right.append(start + np.where(is_leaf, own, tree.children_right))
        value = scale * np.concatenate([t.value[:, 0, 0] for t in parts])
        return cls(
            feature=np.concatenate(feature).astype(np.int16),
            threshold=np.concatenate(threshold).astype(np.float32),
            right=np.concatenate(right).astype(np.int32),
            value=value.astype(np.float32),
            roots=starts[:-1].astype(np.int32),
            depth=max(1, *(t.max_depth for t in parts)),
        ).rounded()

    def rounded(self) -> Forest:
        """Returns the forest as files store it: thresholds to 16 significant bits, leaf
        values in steps of VALUE_STEP, none elsewhere."""
        # Rounded down, a threshold passes no value of few bits, such as a whole wave's fill of 1.
        bits = self.threshold.view(np.uint32) + np.where(self.threshold < 0, np.uint32(255), np.uint32(0))
        bits &= np.uint32(0xFFFFFF00)
        leaf = np.isinf(self.threshold)
        most = np.float32(32767 * VALUE_STEP)
        value = np.clip(np.round(self.value / VALUE_STEP) * VALUE_STEP, -most, most)
        return replace(
            self,
            threshold=np.where(leaf, np.float32(np.inf), bits.view(np.float32)),
            value=np.where(leaf, value, 0.0).astype(np.float32),
        )

    def predict(self, x: Float32Array) -> tuple[FloatArray, FloatArray]:
        """Predicts mean and variance over the trees, (rows,) each, for x (rows, features)."""
        mean, variance = np.empty(len(x)), np.empty(len(x))
        for part in chunks(len(x)):
            values = self.by_tree(x[part])
            mean[part], variance[part] = values.mean(axis=0), values.var(axis=0)
        return mean, variance

    def by_tree(self, x: Float32Array) -> Float32Array:
        """Predicts with each tree, (trees, rows), for x (rows, features)."""
        return self.value[self._leaves(np.ascontiguousarray(x.T))]

    # Indices are intp throughout: numpy casts others on every take.
    @cached_property
    def _children(self) -> IndexArray:
        """Left and right child of each node, (2 · nodes,); a leaf's children are itself."""
        own = np.arange(len(self.threshold))
        left = np.where(np.isinf(self.threshold), own, own + 1)
        return np.stack([left, self.right], axis=1).astype(np.intp).ravel()

    @cached_property
    def _feature(self) -> IndexArray:
        return self.feature.astype(np.intp)

    def _leaves(self, columns: Float32Array) -> IndexArray:
        """Returns the leaf of each row, (trees, rows). columns: (features, rows)."""
        rows = columns.shape[1]
        flat, offset = columns.ravel(), np.arange(rows)
        node = np.repeat(self.roots.astype(np.intp)[:, None], rows, axis=1)
        row_of = self._feature * rows
        # No index is out of range (`files.require_sound`); "wrap" is numpy's fastest mode.
        for _ in range(self.depth):
            place = row_of.take(node, mode="wrap")
            place += offset
            goes_right = flat.take(place, mode="wrap") > self.threshold.take(node, mode="wrap")
            node += node
            node += goes_right
            node = self._children.take(node, mode="wrap")
        return node


def _preorder(nodes: npt.NDArray[Any]) -> IndexArray:
    """Returns the order in which a node's left child follows it, of scikit-learn's binned trees."""
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if not nodes["is_leaf"][node]:
            waiting += [int(nodes["right"][node]), int(nodes["left"][node])]
    return np.array(order, dtype=np.intp)


_FAR = 1.5  # cap on a kernel's log time above the fastest kernel's
_WATCHED_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
_NARROWEST_CHOICE = 0.03
_CLIP = 5.0  # deviations at which residuals are clipped
#: fewest recorded kernels for a forest of their own
FEWEST_NAMED = 30
#: inputs of that forest after the others': tile index, area, size and log time above the fastest kernel's
NAMED_COLUMNS = 4


def _expected(weights: Array, of: Array) -> Array:
    """Returns the weighted mean over kernels, (rows,). Not a matrix product, whose rounding depends on other rows."""
    expected: Array = np.einsum("kr,kr->r", weights, np.broadcast_to(of, weights.shape))
    return expected


def watched_columns(shapes: Shapes) -> list[FloatArray]:
    """Returns log waves, fill of the waves and padding for common tiles, independent of the menu; (rows,) each."""
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
    named_forest: forest for recorded kernels, None if too few were recorded; `forest` then serves them too.
    slope: share of a reference's residual that is added.
    most: limit of the correction, log time.
    batched, layouts: whether the forest's inputs include the batch and the layout.
    """

    parameters: FloatArray
    forest: Forest | None
    named_forest: Forest | None = None
    slope: float = 0.0
    most: float = 0.0
    batched: bool = False
    layouts: bool = False

    def physics(self, shapes: Shapes) -> tuple[Array, Parts]:
        """Computes the cost model's log µs, (rows,), and its parts."""
        return log_latency(Values(self.parameters), shapes)

    def weights(self, parts: Parts) -> Array:
        """Returns the probability that each kernel is chosen, (kernels, rows); columns sum to 1."""
        width = max(float(np.exp(Values(self.parameters)["choice"])[0]), _NARROWEST_CHOICE)
        weights: Array = np.exp(np.maximum((parts.log_time.min(axis=0) - parts.log_time) / width, NEGLIGIBLE))
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
        own: tuple[Shapes, Parts] | None = None,
    ) -> Float32Array:
        """Returns the inputs of the forest, (rows, features): `columns`, and `reference` (rows,) as the last one."""
        columns = self.columns(menu, shapes, log_us, parts, watched, own)
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
        own: tuple[Shapes, Parts] | None = None,
    ) -> list[Any]:
        """Returns the inputs of the forest but for the reference, each (rows,) or a constant.

        log_us, parts: result of `physics`.
        watched: `watched_columns(shapes)`, shared by all members.
        own: terms and parts of the recorded kernels, (1, rows), if they are known.
        """
        of, at = own or (shapes, parts)
        weights = np.ones_like(at.log_time) if own else self.weights(parts)
        log_m, log_n, log_k = np.log2(shapes.batch * shapes.m), np.log2(shapes.n), np.log2(shapes.k)
        # The time of a small tile in very many waves can exceed single precision; such a tile is never chosen.
        per_time = weights * np.exp(np.maximum(-at.log_time, NEGLIGIBLE))
        columns: list[Any] = [log_m, log_n, log_k, log_m + log_n, log_n + log_k, log_m + log_k, log_m + log_n + log_k]
        columns.append(log_us)
        priced = (at.arithmetic, at.memory, at.l2, at.write, at.reduction)
        columns += [_expected(per_time, part) for part in priced]
        means = (
            _expected(weights, of.split_k),
            _expected(weights, of.waves),
            _expected(weights, of.fluid / of.waves),
            shapes.batch * shapes.m * shapes.n * _expected(weights / of.tiles, 1.0 / (16384.0 * of.area)),
        )
        # Means of equal numbers: unrounded, a tree could tell 1 from the sum of the weights. The shift keeps fractions
        # such as 1/32 off the edges between two rounded numbers, where the last bit of a sum would decide.
        split_k, waves, fill, padding = (np.round(mean + 1e-7, 4) for mean in means)
        columns += [split_k, np.log(waves), fill, padding]
        far = np.minimum(parts.log_time - parts.log_time.min(axis=0), _FAR)
        nearest = np.sort(far.T, axis=1)  # faster than np.partition for few columns
        columns += [nearest[:, min(1, len(far) - 1)], nearest[:, min(4, len(far) - 1)], *watched]
        if self.batched:
            columns += [np.log2(shapes.batch), np.log2(shapes.m)]
        if self.layouts:
            columns.append(shapes.layout)
        for groups, count in ((menu.of_tile, len(menu.tiles)), (menu.of_split, len(SPLITS))):
            of_group = dict(groups)
            columns += [far[of_group[i]].min(axis=0) if i in of_group else _FAR for i in range(count)]
        return columns

    def correction(
        self, x: Float32Array, reference: FloatArray | None, *, named: bool = False
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the log time to add and its variance over the trees, (rows,) each."""
        forest = self.named_forest if named and self.named_forest is not None else self.forest
        if forest is None:
            return np.zeros(len(x)), np.zeros(len(x))
        mean, variance = forest.predict(x)
        if reference is not None:
            mean = mean + self.slope * reference
        return np.clip(mean, -self.most, self.most), variance

    def by_tree(self, x: Float32Array, reference: FloatArray | None) -> FloatArray:
        """Returns each tree's unlimited correction of log time, (trees, rows); zeros, (1, rows), if no forest."""
        if self.forest is None:
            return np.zeros((1, len(x)))
        correction = self.forest.by_tree(x).astype(np.float64)
        return correction if reference is None else correction + self.slope * reference

    def named(
        self, machine: Machine, menu: Menu, rows: Measured, reference: FloatArray | None, *, whole: bool
    ) -> tuple[Array, Float32Array]:
        """Returns log µs of each row's recorded kernel, and the forest's inputs with that kernel's probability 1.

        whole: whether to add the NAMED_COLUMNS that `named_forest` has besides."""
        of = rows.recorded(machine, menu)
        own, own_parts = self.physics(of)
        shapes = Shapes(machine, menu, *rows.sizes)
        parts = self.physics(shapes)[1]
        x = self.features(menu, shapes, own, parts, watched_columns(shapes), reference, (of, own_parts))
        if whole:
            slower = own_parts.log_time[0] - parts.log_time.min(axis=0)
            x = np.column_stack([x, of.tile_index[0], of.area[0], of.growth[0], slower]).astype(np.float32)
        return own, x


def train_member(
    machine: Machine,
    menu: Menu,
    parameters: FloatArray,
    rows: Measured,
    reference: FloatArray | None,
    growth: Growth,
    seed: int,
) -> Member:
    """Grows a member's trees on the residual of its cost model. reference: residual of another model, (rows,)."""
    bare = Member(parameters, None, batched=rows.batched, layouts=rows.layouts)
    x, residual = _residual(bare, machine, menu, rows, reference)
    slope = 0.0
    if reference is not None:
        # Ridge regression, because the reference of another library may not help.
        slope = float((reference @ residual) / (reference @ reference + 10.0 * residual.var() + 1e-12))
    shared = np.zeros(len(rows)) if reference is None else slope * reference
    forest = _grown(x, residual - shared, growth, seed)
    most = float(np.abs(forest.predict(x)[0] + shared).max())
    made = replace(bare, forest=forest, slope=slope, most=most)
    named = np.flatnonzero(rows.kernel >= 0)
    if len(named) < FEWEST_NAMED:
        return made
    part = rows.take(named)
    own, x = bare.named(machine, menu, part, None if reference is None else reference[named], whole=True)
    forest = _grown(x, part.log_us - own - shared[named], growth, seed)
    return replace(made, named_forest=forest, most=max(most, float(np.abs(forest.predict(x)[0] + shared[named]).max())))


def _grown(x: Float32Array, residual: FloatArray, growth: Growth, seed: int) -> Forest:
    centre = float(np.median(residual))
    deviation = 1.4826 * float(np.median(np.abs(residual - centre))) + 1e-6
    clipped = np.clip(residual, centre - _CLIP * deviation, centre + _CLIP * deviation)
    return Forest.grow(x, clipped, trees=growth.trees, leaf=growth.leaf, seed=seed)


def _residual(
    member: Member, machine: Machine, menu: Menu, rows: Measured, reference: FloatArray | None
) -> tuple[Float32Array, FloatArray]:
    """Returns the inputs of the trees and the residual of all rows, with unknown kernels."""
    features, residual = [], []
    for chunk in chunks(len(rows), 1000):
        part = rows.take(np.arange(len(rows))[chunk])
        shapes = Shapes(machine, menu, *part.sizes)
        predicted, parts = member.physics(shapes)
        known = None if reference is None else reference[chunk]
        features.append(member.features(menu, shapes, predicted, parts, watched_columns(shapes), known))
        residual.append(part.log_us - predicted)
    return np.concatenate(features), np.concatenate(residual)
