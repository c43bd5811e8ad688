"""Defines the result types of profile queries: times with interval and source, for many shapes or one layer.

Entry points: `Estimates`; `LayerEstimate`, built by `layer_of`; the constants `MEASURED`, `INTERPOLATED` and
`MODELLED`, which number the sources. Used by `answers`, `interpolation`, `profile.profile` and the command `profile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.latency.estimate import Estimate
from quantbench.latency.op_times import CORRELATION, OpEstimate, ShapeEstimate, total
from quantbench.workload import Op

FloatArray = npt.NDArray[np.float64]

SOURCES = ("measured", "interpolated", "modelled")
MEASURED, INTERPOLATED, MODELLED = range(3)
# If neither arithmetic nor bytes explain this share of the time, the bound is latency.
_EXPLAINED = 1.0 / 3.0
_BOUNDS = ("compute", "memory", "latency")


@dataclass(frozen=True)
class Estimates:
    """Times of many shapes (not `latency.estimate.Estimates`); arrays have the broadcast shape of the query's sizes.

    low_us, high_us: interval of each time.
    source_code: index in SOURCES.
    outside: True if the shape is outside the measured range.
    compute_us, memory_us: time of the arithmetic alone and of the memory traffic alone, at the device's peaks.
    note: one note for all shapes.
    what: the estimated operation, named in the reason why a shape has no measured row.
    """

    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    source_code: npt.NDArray[np.int8]
    outside: npt.NDArray[np.bool_]
    compute_us: FloatArray = field(repr=False)
    memory_us: FloatArray = field(repr=False)
    note: str = ""
    what: str = ""

    @cached_property
    def source(self) -> npt.NDArray[np.str_]:
        """Source of each time: measured, interpolated or modelled."""
        return np.array(SOURCES)[self.source_code]

    @cached_property
    def bound(self) -> npt.NDArray[np.str_]:
        """Bound of each time: compute, memory or latency, whichever explains most of it."""
        most = np.maximum(self.compute_us, self.memory_us)
        busy = np.where(self.compute_us >= self.memory_us, 0, 1)
        return np.array(_BOUNDS)[np.where(most < _EXPLAINED * self.latency_us, 2, busy)]

    def __len__(self) -> int:
        return len(self.latency_us)

    def reshape(self, *shape: int) -> Estimates:
        arrays: dict[str, Any] = {
            name: value.reshape(shape) for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, **arrays)

    def __getitem__(self, row: int) -> Estimate:
        outside = bool(self.outside[row])
        beyond = self.source_code[row] == MODELLED and (outside or bool(self.note))
        return Estimate(
            float(self.latency_us[row]), float(self.low_us[row]), float(self.high_us[row]), str(self.source[row]),
            str(self.bound[row]), outside, self.note,
            unmeasured=f"{self.what}: beyond the rows of the profile" if beyond else "",
        )  # fmt: skip

    def __iter__(self) -> Iterator[Estimate]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class LayerEstimate(Estimate):
    """Time of one transformer layer.

    source: least certain source among the operations. bound: the bound that accounts for the most time.
    parts: estimates of the operations.
    """

    parts: ShapeEstimate | None = None

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """Operations of the layer with their estimates."""
        return () if self.parts is None else self.parts.ops


def layer_of(ops: Sequence[Op], found: Sequence[Estimate]) -> LayerEstimate:
    """Sums the estimates `found` of a layer's operations, which must have count 1."""
    works = [OpEstimate(op, one) for op, one in zip(ops, found, strict=True)]
    parts = total(works, CORRELATION)
    by_bound: dict[str, float] = {}
    for one in found:
        by_bound[one.bound] = by_bound.get(one.bound, 0.0) + one.latency_us
    return LayerEstimate(
        parts.latency_us,
        parts.low_us,
        parts.high_us,
        max((one.source for one in found), key=SOURCES.index),
        max(by_bound, key=lambda bound: by_bound[bound]),
        any(one.outside for one in found),
        "; ".join(parts.notes),
        parts=parts,
    )
