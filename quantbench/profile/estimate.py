"""The answers of a profile: times with interval and source, of many shapes (`Estimates`) or a layer (`layer_of`)."""

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
    """Many times; arrays have the broadcast shape of the query's sizes.

    source_code: index in SOURCES.
    outside: whether the shape is outside the measured range.
    compute_us, memory_us: of the arithmetic and of the bytes alone, at the peaks.
    note: of all of them.
    what: the estimated operation, for the reason why a time is beyond the profile's rows.
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
        """measured, interpolated or modelled, of each."""
        return np.array(SOURCES)[self.source_code]

    @cached_property
    def bound(self) -> npt.NDArray[np.str_]:
        """compute, memory or latency, of each: what takes most of the time."""
        most = np.maximum(self.compute_us, self.memory_us)
        busy = np.where(self.compute_us >= self.memory_us, 0, 1)
        return np.array(_BOUNDS)[np.where(most < _EXPLAINED * self.latency_us, 2, busy)]

    def __len__(self) -> int:
        return len(self.latency_us)

    def reshape(self, *shape: int) -> Estimates:
        """The same in another shape."""
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
    """A layer's time. source: the least certain of its operations'. bound: that of the most time. parts: its
    operations."""

    parts: ShapeEstimate | None = None

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        """Its operations, each with its estimate."""
        return () if self.parts is None else self.parts.ops


def layer_of(ops: Sequence[Op], found: Sequence[Estimate]) -> LayerEstimate:
    """The sum over the operations of a layer, each run once."""
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
