"""Extremely randomised trees as flat arrays: grown by scikit-learn, evaluated and stored by numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]

_ROWS_AT_ONCE = 1024  # keeps the walk's arrays in cache
# Levels beyond those of a balanced tree: every level costs a walk over all rows and trees.
_SPARE_DEPTH = 5


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
        for start in range(0, len(x), _ROWS_AT_ONCE):
            part = x[start : start + _ROWS_AT_ONCE]
            values = self.by_tree(part)
            mean[start : start + len(part)] = values.mean(axis=0)
            variance[start : start + len(part)] = values.var(axis=0)
        return mean, variance

    def by_tree(self, x: Float32Array) -> Float32Array:
        """What each tree says, (trees, rows), of x (rows, features)."""
        return self.value[self._leaves(np.ascontiguousarray(x.T))]

    # Indices are intp throughout: numpy casts others on every take.
    @cached_property
    def _children(self) -> npt.NDArray[np.intp]:
        """(2 · nodes,) left and right child of each node; a leaf's are itself."""
        own = np.arange(len(self.threshold))
        left = np.where(np.isinf(self.threshold), own, own + 1)
        return np.stack([left, self.right], axis=1).astype(np.intp).ravel()

    @cached_property
    def _feature(self) -> npt.NDArray[np.intp]:
        return self.feature.astype(np.intp)

    def _leaves(self, columns: Float32Array) -> npt.NDArray[np.intp]:
        """(trees, rows) node that each row ends in; columns is (features, rows)."""
        rows = columns.shape[1]
        flat, offset = columns.ravel(), np.arange(rows)
        node = np.repeat(self.roots.astype(np.intp)[:, None], rows, axis=1)
        row_of = self._feature * rows
        # No index is out of range (`gemm_sound`), and numpy looks for such fastest where it would wrap them.
        for _ in range(self.depth):
            place = row_of.take(node, mode="wrap")
            place += offset
            goes_right = flat.take(place, mode="wrap") > self.threshold.take(node, mode="wrap")
            node += node
            node += goes_right
            node = self._children.take(node, mode="wrap")
        return node
