"""Trains forests of decision trees with scikit-learn, and evaluates them with numpy alone.

The latency models of GEMMs and experts correct their cost models with a `Forest`. Prediction moves
all rows one level down in all trees in each numpy pass. The module also converts a forest to the
arrays of a model file and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import StoreError
from quantbench.latency.autodiff import FloatArray

Float32Array = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.intp]

#: rows per batch: enough to amortise numpy's call overhead, few enough to stay in the cache
CHUNK = 1024
# Leaf values (log time) are rounded to multiples of this step. The rounding changes a prediction,
# the mean over the trees, by at most half a step, which is 0.1 % of the time.
_VALUE_STEP = 2.0**-9
# Leaf values of a larger magnitude are clipped to this one.
_LARGEST_VALUE = 64.0
# Levels that a tree may have beyond log2(rows), the depth of a balanced tree with one row per leaf.
# The limit keeps prediction fast, because each level costs one pass over all rows and trees.
_SPARE_DEPTH = 5
# `from_arrays` refuses deeper trees, because a damaged file may contain any depth.
_DEEPEST = 64
# Feature number that marks a leaf in the stored arrays.
_LEAF = 255


def chunks(rows: int, most: int = CHUNK) -> list[slice]:
    """Returns consecutive slices of at most `most` rows that together cover all rows."""
    return [slice(start, start + most) for start in range(0, rows, most)]


@dataclass(frozen=True)
class Forest:
    """Decision trees as flat arrays, over all nodes of all trees.

    A node sends rows with feature <= threshold to its left child, which is stored directly after
    the node, and other rows to its right child. A leaf has the threshold +inf and is its own child.

    feature: (nodes,), index of the feature that a node tests.
    threshold: (nodes,), value that the feature is compared with.
    right: (nodes,), index of the right child.
    value: (nodes,), prediction of a leaf; 0 for other nodes.
    roots: (trees,), node index of each tree's root.
    depth: levels of the deepest tree.
    """

    feature: npt.NDArray[np.int16]
    threshold: Float32Array
    right: npt.NDArray[np.int32]
    value: Float32Array
    roots: npt.NDArray[np.int32]
    depth: int

    @classmethod
    def grow(cls, x: Float32Array, y: FloatArray, *, trees: int, leaf: int, seed: int) -> Forest:
        """Fits extremely randomised trees that predict y (rows,) from x (rows, features).

        trees: number of trees.
        leaf: smallest number of rows in a leaf.
        """
        from sklearn.ensemble import ExtraTreesRegressor

        deepest = int(np.ceil(np.log2(len(y)))) + _SPARE_DEPTH
        # Every split considers all features. A random third of the features per split gave larger
        # tail errors on A100 in fits to 1000 or more rows.
        grown = ExtraTreesRegressor(
            trees, min_samples_leaf=leaf, max_depth=deepest, random_state=seed, n_jobs=1
        ).fit(x, y)
        return cls._flat(grown.estimators_, scale=1.0)

    @classmethod
    def boost(
        cls,
        x: Float32Array,
        y: FloatArray,
        *,
        trees: int,
        depth: int,
        rate: float,
        leaf: int,
        seed: int,
    ) -> Forest:
        """Fits boosted trees that predict y (rows,) from x (rows, features).

        A boosted prediction is the learning rate times the sum over the trees, but `predict`
        averages over the trees. Leaf values are therefore multiplied by rate · trees.

        trees: number of trees.
        depth: levels of each tree.
        rate: learning rate.
        leaf: smallest number of rows in a leaf.
        """
        from sklearn.ensemble import GradientBoostingRegressor

        grown = GradientBoostingRegressor(
            n_estimators=trees,
            max_depth=depth,
            learning_rate=rate,
            min_samples_leaf=leaf,
            init="zero",
            random_state=seed,
        ).fit(x, y)
        return cls._flat(grown.estimators_[:, 0], scale=rate * trees)

    @classmethod
    def _flat(cls, estimators: Sequence[Any], scale: float) -> Forest:
        """Joins scikit-learn's trees into flat arrays with rounded thresholds and leaf values.

        Thresholds keep 16 significant bits. Leaf values are rounded to multiples of _VALUE_STEP.

        scale: factor on the leaf values.
        """
        trees = [estimator.tree_ for estimator in estimators]

        def joined(name: str) -> npt.NDArray[Any]:
            return np.concatenate([getattr(tree, name) for tree in trees])

        counts = [tree.node_count for tree in trees]
        roots = np.cumsum([0, *counts[:-1]])
        leaf = joined("children_left") < 0
        right = np.repeat(roots, counts) + joined("children_right")
        threshold = joined("threshold").astype(np.float32)
        # Thresholds are rounded down, never up. Otherwise a threshold just below a round value,
        # such as the fill 1 of a whole wave, could become equal to that value, and rows with the
        # value would go to the left child instead of the right.
        bits = threshold.view(np.uint32) + np.where(threshold < 0, np.uint32(255), np.uint32(0))
        bits &= np.uint32(0xFFFFFF00)
        value = np.round(scale * joined("value")[:, 0, 0] / _VALUE_STEP) * _VALUE_STEP
        value = np.clip(value, -_LARGEST_VALUE, _LARGEST_VALUE)
        return cls(
            feature=np.where(leaf, 0, joined("feature")).astype(np.int16),
            threshold=np.where(leaf, np.float32(np.inf), bits.view(np.float32)),
            right=np.where(leaf, np.arange(len(leaf)), right).astype(np.int32),
            value=np.where(leaf, value, 0.0).astype(np.float32),
            roots=roots.astype(np.int32),
            depth=max(1, *(tree.max_depth for tree in trees)),
        )

    def predict(self, x: Float32Array) -> tuple[FloatArray, FloatArray]:
        """Predicts the mean and variance over the trees, (rows,) each, for x (rows, features)."""
        mean = np.empty(len(x))
        variance = np.empty(len(x))
        for part in chunks(len(x)):
            values = self.value[self._leaves(np.ascontiguousarray(x[part].T))]  # (trees, rows)
            mean[part] = values.mean(axis=0)
            variance[part] = values.var(axis=0)
        return mean, variance

    # Indices have the dtype intp, because `take` converts any other dtype on every call.
    @cached_property
    def _children(self) -> IndexArray:
        """Left and right child of each node in turn, (2 · nodes,); a leaf is its own children."""
        left = np.arange(len(self.threshold)) + np.isfinite(self.threshold)
        return np.stack([left, self.right], axis=1).astype(np.intp).ravel()

    @cached_property
    def _feature(self) -> IndexArray:
        return self.feature.astype(np.intp)

    def _leaves(self, columns: Float32Array) -> IndexArray:
        """Returns the node index of the leaf that each row reaches in each tree, (trees, rows).

        columns: (features, rows), inputs of the trees.
        """
        rows = columns.shape[1]
        flat = columns.ravel()
        offset = np.arange(rows)
        node = np.repeat(self.roots.astype(np.intp)[:, None], rows, axis=1)
        row_of = self._feature * rows
        # `from_arrays` checks that no index is out of range; "wrap" is numpy's fastest mode.
        for _ in range(self.depth):
            place = row_of.take(node, mode="wrap")
            place += offset
            goes_right = flat.take(place, mode="wrap") > self.threshold.take(node, mode="wrap")
            node += node
            node += goes_right
            node = self._children.take(node, mode="wrap")
        return node

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the compact arrays that `from_arrays` reads.

        `feature` is _LEAF for a leaf. `number` is the value of a leaf or the threshold of another
        node. `right` is the offset from a node to its right child, 0 for a leaf.
        """
        leaf = np.isinf(self.threshold)
        skipped = self.right - np.arange(len(leaf))
        return {
            "feature": np.where(leaf, _LEAF, self.feature).astype(np.uint8),
            "number": np.where(leaf, self.value, self.threshold).astype(np.float32),
            "right": skipped.astype(np.uint16 if skipped.max() < 2**16 else np.uint32),
            "roots": self.roots,
            "depth": np.array(self.depth),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], num_features: int) -> Forest:
        """Inverse of `to_arrays`.

        num_features: number of features that the trees may test.

        Raises StoreError for trees that do not end in leaves or that test other features.
        """
        feature = arrays["feature"]
        number = arrays["number"].astype(np.float32)
        leaf = feature == _LEAF
        own = np.arange(len(leaf))
        found = cls(
            feature=np.where(leaf, 0, feature).astype(np.int16),
            threshold=np.where(leaf, np.float32(np.inf), number),
            right=(own + arrays["right"]).astype(np.int32),
            value=np.where(leaf, number, np.float32(0.0)),
            roots=arrays["roots"].astype(np.int32),
            depth=int(arrays["depth"]),
        )
        skipped = found.right - own
        sound = (
            0 < found.depth <= _DEEPEST
            and 0 < len(found.roots) <= len(leaf)
            and ((found.roots >= 0) & (found.roots < len(leaf))).all()
            and (found.feature < num_features).all()
            and np.isfinite(number).all()
            # Leaves, and only leaves, are their own right child.
            and ((skipped > 0) != leaf).all()
            and (found.right < len(leaf)).all()
        )
        if not sound:
            what = "trees that do not end or read unknown features"
            raise StoreError("Forest", what, "a whole model")
        return found
