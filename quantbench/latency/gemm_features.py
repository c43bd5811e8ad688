"""What the residual learner sees of a shape: its size, the waves, and how the cost model came to its time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.gemm_form import Parts, Shapes
from quantbench.latency.gemm_menu import SPLITS, Menu
from quantbench.latency.tape import NEGLIGIBLE

FloatArray = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
Array = npt.NDArray[np.floating[Any]]

_FAR = 1.5  # log time beyond which a kernel is out of the question
_WATCHED_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 64))


def choice_weights(parts: Parts, width: float) -> Array:
    """How likely each kernel is taken, (kernels, rows), columns summing to 1."""
    weights = np.exp(np.maximum((parts.log_time.min(axis=0) - parts.log_time) / width, NEGLIGIBLE))
    return np.asarray(weights / weights.sum(axis=0))


def _expected(weights: Array, of: Array) -> Array:
    """The mean over kernels, (rows,). No matrix product: its rounding of a row depends on the rows beside it."""
    return np.asarray(np.einsum("kr,kr->r", weights, np.broadcast_to(of, weights.shape)))


def feature_matrix(
    menu: Menu, shapes: Shapes, log_us: Array, parts: Parts, weights: Array, watched: list[FloatArray]
) -> Float32Array:
    """(rows, features) of the shapes whose cost model says log_us and parts, and takes kernels by `weights`.

    watched: `watched_columns(shapes)`, which all cost models share.
    """
    log_m, log_n, log_k = np.log2(shapes.m), np.log2(shapes.n), np.log2(shapes.k)
    # A small tile in very many waves can be priced beyond what single precision holds; nobody takes it.
    per_time = weights * np.exp(np.maximum(-parts.log_time, NEGLIGIBLE))
    columns = [log_m, log_n, log_k, log_m + log_n, log_n + log_k, log_m + log_k, log_m + log_n + log_k, log_us]
    columns += [
        _expected(per_time, part) for part in (parts.arithmetic, parts.memory, parts.l2, parts.write, parts.reduction)
    ]
    columns += [
        _expected(weights, shapes.split_k),
        np.log(_expected(weights, shapes.waves)),
        _expected(weights, shapes.fluid / shapes.waves),
        shapes.m * shapes.n * _expected(weights / shapes.tiles, 1.0 / (16384.0 * shapes.area)),
    ]
    far = np.minimum(parts.log_time - parts.log_time.min(axis=0), _FAR)
    nearest = np.sort(far.T, axis=1)  # faster than a partition of so few
    columns += [nearest[:, min(1, len(far) - 1)], nearest[:, min(4, len(far) - 1)]]
    columns += watched
    stacked = np.empty((len(columns) + len(menu.tiles) + len(SPLITS), far.shape[1]), dtype=np.float32)
    for i, column in enumerate(columns):
        stacked[i] = column
    gaps = stacked[len(columns) :]
    gaps[...] = _FAR
    for place, kernels in menu.of_tile:
        gaps[place] = far[kernels].min(axis=0)
    for place, kernels in menu.of_split:
        gaps[len(menu.tiles) + place] = far[kernels].min(axis=0)
    return stacked.T


def watched_columns(shapes: Shapes) -> list[FloatArray]:
    """Waves, fill of the last wave and padding for tiles that libraries like, whatever the menu."""
    columns = []
    held = Menu.of(_WATCHED_TILES).blocks_per_sm[:: len(SPLITS)]
    for (block_m, block_n), blocks_per_sm in zip(_WATCHED_TILES, held, strict=True):
        tiles = np.ceil(shapes.m / block_m) * np.ceil(shapes.n / block_n)
        waves = tiles / (shapes.machine.sm_count * blocks_per_sm)
        columns += [np.log(waves), waves / np.ceil(waves), shapes.m * shapes.n / (tiles * (block_m * block_n))]
    return columns
