"""Defines one member of a GEMM model: a cost model, and trees that predict its error.

`train_member` grows the trees on the cost model's residuals, measured minus modelled log time. The
inputs of the trees are the columns of `Member.columns`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantbench.latency.autodiff import NEGLIGIBLE, FloatArray
from quantbench.latency.forest import Float32Array, Forest, chunks
from quantbench.latency.gemm.cost_model import (
    SPLITS,
    Array,
    IndexArray,
    Machine,
    Menu,
    Parts,
    Shapes,
    Sizes,
    Values,
    log_latency,
)
from quantbench.workload.dtypes import ALIGNED_ELEMENTS


@dataclass(frozen=True)
class TrainingRows:
    """Measured GEMMs to which a model is fitted.

    log_us: (rows,), log of the measured times in µs.
    row_scales: whether the library pads the scales of a before an fp8_block GEMM. Such a GEMM has
        one scale for each row of a and block of k.
    """

    sizes: Sizes
    log_us: FloatArray
    row_scales: bool = False

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def batched(self) -> bool:
        """Whether batched GEMMs are among the rows."""
        return bool((self.sizes.batch > 1).any())

    @property
    def layouts(self) -> bool:
        """Whether the batched GEMMs, or the unbatched GEMMs, have several layouts."""
        batched = self.sizes.batch > 1
        return any(len(np.unique(self.sizes.layout[kind])) > 1 for kind in (batched, ~batched))

    @property
    def unaligned(self) -> bool:
        """Whether some n or k is no multiple of 8, so that 16-bit rows are not 16-byte aligned."""
        return bool((self.sizes.n % ALIGNED_ELEMENTS + self.sizes.k % ALIGNED_ELEMENTS).any())

    def take(self, rows: slice | IndexArray) -> TrainingRows:
        return replace(self, sizes=self.sizes.take(rows), log_us=self.log_us[rows])


# A kernel's gap is its log time minus the fastest kernel's. The trees see gaps up to this limit.
_LARGEST_GAP = 1.5
# Smallest width, in log time, of the soft choice among kernels in `Member.weights`. With a narrower
# choice, the trees' inputs would jump where two kernels are equally fast.
_NARROWEST_CHOICE = 0.03
_CLIP = 5.0  # distance from the median, in deviations, at which residuals are clipped for the trees
# Multiple that m must have to avoid padding. The 4-byte scales of a are loaded through TMA in rows
# of m scales, and TMA needs rows aligned to 16 bytes. For any other m, the scales are padded first,
# which takes longer than many GEMMs (DeepGEMM's README: "the LHS scaling factor is required to have
# a TMA-aligned and transposed layout").
_ALIGNED_SCALES = 4.0


def _expected(weights: Array, of: Array) -> Array:
    """Returns the weighted mean of a quantity over kernels, (rows,).

    weights: (kernels, rows), weights that sum to 1 over the kernels.
    of: the quantity, which broadcasts to (kernels, rows).

    The mean is computed with einsum, because a matmul's rounding of one row would depend on the
    other rows.
    """
    expected: Array = np.einsum("kr,kr->r", weights, np.broadcast_to(of, weights.shape))
    return expected


def _rounded(mean: Array) -> Array:
    """Rounds a weighted mean, (rows,), so that the mean of equal numbers is that number.

    The weights sum to 1 only up to rounding errors, and trees could split on these errors. The
    added shift moves fractions such as 1/32 away from the midpoint between two rounded numbers. At
    a midpoint, the last bit of the mean would decide the direction of rounding.
    """
    rounded: Array = np.round(mean + 1e-7, 4)
    return rounded


def _least_gaps(
    gaps: Array, positions: dict[int, slice | IndexArray], count: int
) -> list[Array | float]:
    """Returns the smallest gap in each group of kernels, each (rows,) or a constant.

    gaps: (kernels, rows), log time of each kernel minus that of the fastest kernel.
    positions: maps each group that has kernels to the positions of its kernels.
    count: number of groups. A group without kernels gets _LARGEST_GAP.
    """
    least: list[Array | float] = [_LARGEST_GAP] * count
    for group, kernels in positions.items():
        least[group] = gaps[kernels].min(axis=0)
    return least


@dataclass(frozen=True)
class Growth:
    """Settings of tree growth.

    trees: number of trees per member.
    leaf: smallest number of rows in a leaf.
    """

    trees: int = 24
    leaf: int = 2


@dataclass(frozen=True)
class Member:
    """Cost model with the forest that corrects it.

    parameters: (parameters + tiles,), parameters of the cost model.
    forest: trees that predict the correction; None if there were too few rows to grow trees.
    slope: factor on the reference model's correction, which is added to the forest's correction.
    limit: largest magnitude of the summed correction in log time.
    batched, layouts: whether the forest's inputs include the batch and the layout.
    unaligned: whether GEMMs with unaligned rows were fitted.
    row_scales: whether the forest's inputs say that the scales of a must be padded.
    """

    parameters: FloatArray
    forest: Forest | None
    slope: float = 0.0
    limit: float = 0.0
    batched: bool = False
    layouts: bool = False
    unaligned: bool = False
    row_scales: bool = False

    def physics(self, shapes: Shapes) -> tuple[Array, Parts]:
        """Returns the cost model's log time in µs, (rows,), and every kernel's time by parts."""
        return log_latency(Values(self.parameters), shapes)

    def weights(self, parts: Parts) -> Array:
        """Returns the probability that the library chooses each kernel, (kernels, rows).

        The probabilities of a row sum to 1.
        """
        width = max(float(np.exp(Values(self.parameters)["choice"])[0]), _NARROWEST_CHOICE)
        above = (parts.log_time.min(axis=0) - parts.log_time) / width
        weights: Array = np.exp(np.maximum(above, NEGLIGIBLE))
        total: Array = weights.sum(axis=0)
        return weights / total

    def features(
        self, shapes: Shapes, log_us: Array, parts: Parts, reference: FloatArray | None
    ) -> Float32Array:
        """Returns the inputs of the forest, (rows, features).

        The arguments are those of `columns`.
        """
        columns = self.columns(shapes, log_us, parts, reference)
        out = np.empty((len(columns), len(shapes.sizes)), dtype=np.float32)
        for i, column in enumerate(columns):
            out[i] = column
        return out.T

    def columns(
        self, shapes: Shapes, log_us: Array, parts: Parts, reference: FloatArray | None
    ) -> list[Any]:
        """Returns the inputs of the forest as columns, each (rows,) or a constant.

        log_us, parts: result of `physics`.
        reference: (rows,), the reference model's correction, which becomes the last column; None
            if there is no reference model.
        """
        sizes = shapes.sizes
        kernels = shapes.menu.each
        weights = self.weights(parts)
        log_m = np.log2(sizes.batch * sizes.m)
        log_n = np.log2(sizes.n)
        log_k = np.log2(sizes.k)
        columns: list[Any] = [log_m, log_n, log_k]
        columns += [log_m + log_n, log_n + log_k, log_m + log_k, log_m + log_n + log_k, log_us]
        # The next columns are parts of the kernel's time as fractions of the whole time. The time
        # of a small tile in very many waves can exceed single precision, so the exponent is
        # limited. The limit does no harm, because such a tile is never chosen.
        per_time = weights * np.exp(np.maximum(-parts.log_time, NEGLIGIBLE))
        for part in (parts.arithmetic, parts.memory, parts.l2, parts.write, parts.reduction):
            columns.append(_expected(per_time, part))
        # The unit of `area` is a tile of 128 × 128 = 16384 elements. The last of the next four
        # columns is the fraction of the tiles' elements that lie inside c.
        per_area = _expected(weights / shapes.waves.tiles, 1.0 / (16384.0 * kernels.area))
        columns += [
            _rounded(_expected(weights, kernels.split_k)),
            np.log(_rounded(_expected(weights, shapes.waves.count))),
            _rounded(_expected(weights, shapes.waves.exact / shapes.waves.count)),
            _rounded(sizes.batch * sizes.m * sizes.n * per_area),
        ]
        gaps = np.minimum(parts.log_time - parts.log_time.min(axis=0), _LARGEST_GAP)
        nearest = np.sort(gaps.T, axis=1)  # faster than np.partition for few columns
        # Gaps of the second and the fifth fastest kernel.
        for rank in (1, 4):
            columns.append(nearest[:, min(rank, len(gaps) - 1)])
        columns += shapes.common_tiles
        if self.batched:
            columns += [np.log2(sizes.batch), np.log2(sizes.m)]
        if self.layouts:
            columns.append(sizes.layout)
        if self.row_scales:
            beyond = sizes.m - _ALIGNED_SCALES * np.floor(sizes.m / _ALIGNED_SCALES)
            columns.append(np.minimum(beyond, 1.0))
        columns += _least_gaps(gaps, dict(shapes.menu.of_tile), len(shapes.menu.tiles))
        columns += _least_gaps(gaps, dict(shapes.menu.of_split), len(SPLITS))
        return columns if reference is None else [*columns, reference]

    def correction(self, x: Float32Array | None, reference: FloatArray | None) -> tuple[Any, Any]:
        """Returns the correction to the log time and its variance over the trees, (rows,) each.

        Both results are 0.0 if there is no forest, or if x is None.

        x: (rows, features), inputs of the forest.
        reference: (rows,), the reference model's correction; None if there is no reference model.
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
    """Returns a member with trees grown on the residuals of its cost model.

    parameters: (parameters + tiles,), fitted parameters of the cost model.
    reference: (rows,), the reference model's correction, which is an input of the trees; None if
        there is no reference model.
    """
    bare = Member(
        parameters,
        None,
        batched=rows.batched,
        layouts=rows.layouts,
        unaligned=rows.unaligned,
        row_scales=rows.row_scales,
    )
    inputs = []
    residuals = []
    for chunk in chunks(len(rows), 1000):
        part = rows.take(chunk)
        shapes = Shapes.of(machine, menu, part.sizes)
        predicted, parts = bare.physics(shapes)
        known = None if reference is None else reference[chunk]
        inputs.append(bare.features(shapes, predicted, parts, known))
        residuals.append(part.log_us - predicted)
    x = np.concatenate(inputs)
    residual = np.concatenate(residuals)
    slope = 0.0
    shared = np.zeros(len(rows))
    if reference is not None:
        # The slope comes from a ridge regression. The penalty, ten times the residual's variance,
        # pulls the slope to 0, because a reference for another library may not help. The last term
        # avoids a division by 0.
        variance = reference @ reference + 10.0 * residual.var() + 1e-12
        slope = float((reference @ residual) / variance)
        shared = slope * reference
    forest = _grown(x, residual - shared, growth, seed)
    limit = float(np.abs(forest.predict(x)[0] + shared).max())
    return replace(bare, forest=forest, slope=slope, limit=limit)


def _grown(x: Float32Array, residual: FloatArray, growth: Growth, seed: int) -> Forest:
    """Returns a forest grown on residuals (rows,) that are first clipped to limit outliers.

    Residuals are clipped at _CLIP deviations from their median. A deviation is 1.4826 times the
    median absolute deviation, which equals the standard deviation of Gaussian residuals.
    """
    centre = float(np.median(residual))
    deviation = 1.4826 * float(np.median(np.abs(residual - centre))) + 1e-6
    clipped = np.clip(residual, centre - _CLIP * deviation, centre + _CLIP * deviation)
    return Forest.grow(x, clipped, trees=growth.trees, leaf=growth.leaf, seed=seed)
