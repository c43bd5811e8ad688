"""The residual of the cost model, learned by extremely randomised trees: one forest per ensemble member.

`Forest` holds trees as flat arrays (grown by scikit-learn, evaluated and stored by numpy). `Member` is a cost model
together with its forest; `train_member` fits one to `Measured` rows.
"""

from __future__ import annotations

from dataclasses import dataclass
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

#: rows at a time: enough that numpy's calls weigh little, few enough that their arrays stay in the cache
CHUNK = 1024
# Levels beyond those of a balanced tree: every level costs a walk over all rows and trees.
_SPARE_DEPTH = 5


@dataclass(frozen=True)
class Measured:
    """Measured shapes, (rows,) each. kernel: index in the menu of the kernel that was recorded, -1 where none was."""

    m: FloatArray
    n: FloatArray
    k: FloatArray
    log_us: FloatArray
    kernel: IndexArray

    def __len__(self) -> int:
        return len(self.m)

    def take(self, rows: IndexArray) -> Measured:
        """Only these rows."""
        return Measured(*(column[rows] for column in vars(self).values()))


def chunks(rows: int, most: int = CHUNK) -> list[slice]:
    """Slices of at most `most` rows that cover all."""
    return [slice(start, start + most) for start in range(0, rows, most)]


@dataclass(frozen=True)
class Forest:
    """Trees side by side. feature, threshold, right, value: (nodes,); roots: (trees,); depth: of the deepest tree.

    A node's left child (feature <= threshold) is the next node; a leaf points to itself on both sides, with
    threshold +inf.
    """

    feature: npt.NDArray[np.int16]
    threshold: Float32Array
    right: npt.NDArray[np.int32]
    value: Float32Array
    roots: npt.NDArray[np.int32]
    depth: int

    @classmethod
    def grow(cls, x: Float32Array, y: FloatArray, *, trees: int, leaf: int, seed: int) -> Forest:
        """Trees that explain y (rows,) by x (rows, features), each leaf holding at least `leaf` rows."""
        from sklearn.ensemble import ExtraTreesRegressor

        deepest = int(np.ceil(np.log2(len(y)))) + _SPARE_DEPTH
        # Every split looks at all the features: with a third of them A100's tail, from 1000 rows, came out longer.
        grown = ExtraTreesRegressor(trees, min_samples_leaf=leaf, max_depth=deepest, random_state=seed, n_jobs=1)
        grown.fit(x, y)
        return cls._flat([estimator.tree_ for estimator in grown.estimators_], scale=1.0)

    @classmethod
    def boost(
        cls, x: Float32Array, y: FloatArray, *, trees: int, depth: int, rate: float, leaf: int, seed: int
    ) -> Forest:
        """Trees each grown on half the rows, on what those before it left, and taken at `rate`. Their *mean* is the
        prediction, as with `grow`: the stored values are that much larger."""
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
            # Half precision is a thousandth of a correction, and half the size of a stored model.
            value=value.astype(np.float16).astype(np.float32),
            roots=starts[:-1].astype(np.int32),
            depth=max(t.max_depth for t in parts),
        )

    def predict(self, x: Float32Array) -> tuple[FloatArray, FloatArray]:
        """(mean, variance) over the trees, (rows,) each, for x (rows, features)."""
        mean, variance = np.empty(len(x)), np.empty(len(x))
        for part in chunks(len(x)):
            values = self.by_tree(x[part])
            mean[part], variance[part] = values.mean(axis=0), values.var(axis=0)
        return mean, variance

    def by_tree(self, x: Float32Array) -> Float32Array:
        """The prediction of each tree, (trees, rows), for x (rows, features)."""
        return self.value[self._leaves(np.ascontiguousarray(x.T))]

    # Indices are intp throughout: numpy casts others on every take.
    @cached_property
    def _children(self) -> IndexArray:
        """(2 · nodes,) left and right child of each node; a leaf's are itself."""
        own = np.arange(len(self.threshold))
        left = np.where(np.isinf(self.threshold), own, own + 1)
        return np.stack([left, self.right], axis=1).astype(np.intp).ravel()

    @cached_property
    def _feature(self) -> IndexArray:
        return self.feature.astype(np.intp)

    def _leaves(self, columns: Float32Array) -> IndexArray:
        """(trees, rows) node that each row ends in; columns is (features, rows)."""
        rows = columns.shape[1]
        flat, offset = columns.ravel(), np.arange(rows)
        node = np.repeat(self.roots.astype(np.intp)[:, None], rows, axis=1)
        row_of = self._feature * rows
        # No index is out of range (`files.require_sound`), and numpy looks for such fastest where it would wrap them.
        for _ in range(self.depth):
            place = row_of.take(node, mode="wrap")
            place += offset
            goes_right = flat.take(place, mode="wrap") > self.threshold.take(node, mode="wrap")
            node += node
            node += goes_right
            node = self._children.take(node, mode="wrap")
        return node


_FAR = 1.5  # log time beyond which a kernel is out of the question
_WATCHED_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))
_NARROWEST_CHOICE = 0.03
_CLIP = 5.0  # deviations beyond which a residual is taken for an outlier


def _expected(weights: Array, of: Array) -> Array:
    """The mean over kernels, (rows,). No matrix product: its rounding of a row depends on the rows beside it."""
    return np.asarray(np.einsum("kr,kr->r", weights, np.broadcast_to(of, weights.shape)))


def watched_columns(shapes: Shapes) -> list[FloatArray]:
    """Waves, fill of the last wave and padding for tiles that libraries like, whatever the menu; (rows,) each."""
    columns = []
    for block_m, block_n in _WATCHED_TILES:
        tiles = np.ceil(shapes.m / block_m) * np.ceil(shapes.n / block_n)
        waves = tiles / (shapes.machine.sm_count * float(resident_blocks(block_m, block_n)))
        columns += [np.log(waves), waves / np.ceil(waves), shapes.m * shapes.n / (tiles * (block_m * block_n))]
    return columns


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
        return log_latency(Values(self.parameters.astype(shapes.dtype)), shapes)

    def weights(self, parts: Parts) -> Array:
        """How likely each kernel is taken, (kernels, rows), columns summing to 1."""
        width = max(float(np.exp(Values(self.parameters)["choice"])[0]), _NARROWEST_CHOICE)
        weights = np.exp(np.maximum((parts.log_time.min(axis=0) - parts.log_time) / width, NEGLIGIBLE))
        return np.asarray(weights / weights.sum(axis=0))

    def features(
        self,
        menu: Menu,
        shapes: Shapes,
        log_us: Array,
        parts: Parts,
        watched: list[FloatArray],
        reference: FloatArray | None,
        weights: Array | None = None,
    ) -> Float32Array:
        """The inputs of the forest, (rows, features). log_us, parts: the cost model's prediction (`physics`).

        watched: `watched_columns(shapes)`, which all members share. reference: a reference's residual, (rows,), the
        last column. weights: how likely each kernel is taken, where that is not the member's own choice.
        """
        if weights is None:
            weights = self.weights(parts)
        log_m, log_n, log_k = np.log2(shapes.m), np.log2(shapes.n), np.log2(shapes.k)
        # The time of a small tile in very many waves can exceed single precision; such a tile is never chosen.
        per_time = weights * np.exp(np.maximum(-parts.log_time, NEGLIGIBLE))
        columns = [log_m, log_n, log_k, log_m + log_n, log_n + log_k, log_m + log_k, log_m + log_n + log_k, log_us]
        priced = (parts.arithmetic, parts.memory, parts.l2, parts.write, parts.reduction)
        columns += [_expected(per_time, part) for part in priced]
        columns += [
            _expected(weights, shapes.split_k),
            np.log(_expected(weights, shapes.waves)),
            _expected(weights, shapes.fluid / shapes.waves),
            shapes.m * shapes.n * _expected(weights / shapes.tiles, 1.0 / (16384.0 * shapes.area)),
        ]
        far = np.minimum(parts.log_time - parts.log_time.min(axis=0), _FAR)
        nearest = np.sort(far.T, axis=1)  # faster than a partition of so few
        columns += [nearest[:, min(1, len(far) - 1)], nearest[:, min(4, len(far) - 1)], *watched]
        first_split = len(columns) + len(menu.tiles)
        count = first_split + len(SPLITS) + (reference is not None)
        out = np.full((count, far.shape[1]), _FAR, dtype=np.float32)
        for i, column in enumerate(columns):
            out[i] = column
        for place, kernels in menu.of_tile:
            out[len(columns) + place] = far[kernels].min(axis=0)
        for place, kernels in menu.of_split:
            out[first_split + place] = far[kernels].min(axis=0)
        if reference is not None:
            out[-1] = reference
        return out.T

    def correction(self, x: Float32Array, reference: FloatArray | None) -> tuple[FloatArray, FloatArray]:
        """(log time to add, its variance over the trees), (rows,) each."""
        if self.forest is None:
            return np.zeros(len(x)), np.zeros(len(x))
        mean, variance = self.forest.predict(x)
        if reference is not None:
            mean = mean + self.slope * reference
        return np.clip(mean, -self.most, self.most), variance

    def by_tree(self, x: Float32Array, reference: FloatArray | None) -> FloatArray:
        """What each tree adds to log time, (trees, rows), without the limit; a row of zeros without a forest."""
        if self.forest is None:
            return np.zeros((1, len(x)))
        correction = self.forest.by_tree(x).astype(np.float64)
        return correction if reference is None else correction + self.slope * reference

    def named(
        self, machine: Machine, menu: Menu, rows: Measured, reference: FloatArray | None
    ) -> tuple[Array, Float32Array]:
        """(log µs of each row's recorded kernel, the inputs of the forest when that kernel is known to run)."""
        own = self.physics(Shapes(machine, menu.by_row(rows.kernel), rows.m, rows.n, rows.k))[0]
        shapes = Shapes(machine, menu, rows.m, rows.n, rows.k, dtype=np.float32)
        parts = self.physics(shapes)[1]
        taken = np.zeros_like(parts.log_time)
        taken[rows.kernel, np.arange(len(rows))] = 1.0
        return own, self.features(menu, shapes, own, parts, watched_columns(shapes), reference, taken)


def train_member(
    machine: Machine,
    menu: Menu,
    parameters: FloatArray,
    rows: Measured,
    reference: FloatArray | None,
    growth: Growth,
    seed: int,
) -> Member:
    """Grow the trees on the residual of the cost model. reference: another model's residual, (rows,)."""
    bare = Member(parameters, None)
    x, residual = _residual(bare, machine, menu, rows, reference)
    slope = 0.0
    if reference is not None:
        reference = x[:, -1].astype(np.float64)  # of rows whose kernel is known, twice
        # Ridge regression: the reference of another library may not help at all.
        slope = float((reference @ residual) / (reference @ reference + 10.0 * residual.var() + 1e-12))
        residual = residual - slope * reference
    centre = float(np.median(residual))
    deviation = 1.4826 * float(np.median(np.abs(residual - centre))) + 1e-6
    clipped = np.clip(residual, centre - _CLIP * deviation, centre + _CLIP * deviation)
    forest = Forest.grow(x, clipped, trees=growth.trees, leaf=growth.leaf, seed=seed)
    fitted = forest.predict(x)[0] + (0.0 if reference is None else slope * reference)
    return Member(parameters, forest, slope, float(np.abs(fitted).max()))


def _residual(
    member: Member, machine: Machine, menu: Menu, rows: Measured, reference: FloatArray | None
) -> tuple[Float32Array, FloatArray]:
    """(inputs of the trees, residual): every row as if its kernel were unknown, then the rows with a recorded kernel
    again, with it."""
    features, residual = [], []
    for chunk in chunks(len(rows), 1000):
        part = rows.take(np.arange(len(rows))[chunk])
        shapes = Shapes(machine, menu, part.m, part.n, part.k, dtype=np.float32)
        predicted, parts = member.physics(shapes)
        known = None if reference is None else reference[chunk]
        features.append(member.features(menu, shapes, predicted, parts, watched_columns(shapes), known))
        residual.append(part.log_us - predicted)
        named = np.flatnonzero(part.kernel >= 0)
        if len(named):
            few = part.take(named)
            own, x = member.named(machine, menu, few, None if known is None else known[named])
            features.append(x)
            residual.append(few.log_us - own)
    return np.concatenate(features), np.concatenate(residual)
