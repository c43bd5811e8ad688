"""The models that a profile's answers rest on, each over all sizes of its kind of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_physics import AttentionShapes
from quantbench.latency.estimate import Estimates
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.arithmetic import flops, min_bytes
from quantbench.profile.product_model import ProductModel
from quantbench.profile.surface import Base
from quantbench.workload import Softmax

FloatArray = npt.NDArray[np.float64]
Sizes = tuple[npt.NDArray[np.int64], ...]
Single = tuple[Callable[..., tuple[float, float]], Callable[[float], tuple[float, float]]]

#: sizes of products, attention and softmax, as tables have them
PRODUCT_SIZES = ("m", "n", "k", "batch")
ATTENTION_SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim")
SOFTMAX_SIZES = ("batch", "rows", "cols")

#: of the spec sheet's estimate: good to a factor of two
ROOFLINE_HALF_WIDTH = log(2.0)
_SMALL_KERNEL_US = {"cuda": 3.0, "cpu": 2.0}
_REACHED = 0.75  # of the peaks


@dataclass(frozen=True)
class ProductBase:
    """Products from the distilled model. sizes: m, n, k, batch; a batch counts as batch times the rows. wider: added to
    the interval (log time), for a format that runs like the model's and is not."""

    model: ProductModel
    wider: float = 0.0

    def times(self, sizes: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        m, n, k, batch = sizes
        found = self.model.fast.predict_us(m * batch, n, k, rising=False)
        half = self.model.half_width(found) + self.wider
        floor_us = np.asarray(m * batch, dtype=np.float64) * n * k * self._per_product_us
        return found, half, half, floor_us

    def single(self) -> Single:
        from quantbench.latency.gemm_fast_single import single_function

        # The answers are remembered by whoever asks.
        us, half_width, wider = single_function(self.model.fast, rising=False), self.model.half_width_of, self.wider
        us, per_product_us = getattr(us, "__wrapped__", us), self._per_product_us

        def one(m: int, n: int, k: int, batch: int) -> tuple[float, float]:
            m *= batch
            return us(m, n, k), m * n * k * per_product_us

        def halves(latency_us: float) -> tuple[float, float]:
            half = half_width(latency_us) + wider
            return half, half

        return one, halves

    @cached_property
    def _per_product_us(self) -> float:
        """µs that a multiplication with its addition takes at the peak."""
        return 2.0 / self.model.fast.machine.flop_per_us


@dataclass(frozen=True)
class TransferredBase:
    """Products of a format that was not measured: those of another one, times what the spec sheet makes of the
    difference in bytes and peaks."""

    base: ProductBase
    device: DeviceSpec
    dtype: str
    wider: float

    def times(self, sizes: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        found, below, above, _ = self.base.times(sizes)
        small_us = _SMALL_KERNEL_US[self.device.kind]
        alike, other = (
            roofline_parts(self.device, "gemm", columns_of(PRODUCT_SIZES, sizes, (("dtype", dtype),)))
            for dtype in (self.dtype, self.base.model.dtype)
        )
        ratio = (np.maximum(*alike) + small_us) / (np.maximum(*other) + small_us)
        return found * ratio, below + self.wider, above + self.wider, alike[1]

    def single(self) -> Single:
        return _one_of(self)


@dataclass(frozen=True)
class RooflineBase:
    """From the spec sheet alone. kind, fixed: the table's kind and its columns that are not sizes; names: of sizes."""

    device: DeviceSpec
    kind: str
    names: tuple[str, ...]
    fixed: tuple[tuple[str, str | bool], ...]

    def times(self, sizes: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        memory_us, compute_us = roofline_parts(self.device, self.kind, columns_of(self.names, sizes, self.fixed))
        half = np.full(len(memory_us), ROOFLINE_HALF_WIDTH)
        found = np.maximum(memory_us, compute_us) / _REACHED + _SMALL_KERNEL_US[self.device.kind]
        return found, half, half, compute_us

    def single(self) -> Single:
        return _one_of(self)


def roofline_parts(
    device: DeviceSpec, kind: str, columns: dict[str, npt.NDArray[Any]]
) -> tuple[FloatArray, FloatArray]:
    """(µs of the fewest bytes, µs of the arithmetic) at the device's peaks, (shapes,) each; no arithmetic where the
    peak is not known, and none for softmax. All rows are of one number format."""
    memory_us = min_bytes(kind, columns) / (device.memory_gb_per_s * 1e3)
    peak = None if kind == "softmax" else device.peak(str(columns["dtype"].flat[0])) if memory_us.size else None
    return memory_us, np.zeros(len(memory_us)) if peak is None else flops(kind, columns) / (peak * 1e6)


def columns_of(
    names: tuple[str, ...], sizes: Sizes, fixed: tuple[tuple[str, str | bool], ...]
) -> dict[str, npt.NDArray[Any]]:
    """Columns as a table has them: sizes by name, and what is the same in every row."""
    rows = len(sizes[0])
    same = {name: np.broadcast_to(np.array(value), (rows,)) for name, value in fixed}
    return {**dict(zip(names, sizes, strict=True)), **same}


@dataclass(frozen=True)
class SoftmaxBase:
    """Softmax from its model. sizes: batch, rows, cols. fused: as one kernel, or as the three of the fallback."""

    model: SoftmaxModel
    dtype: str
    mask: str
    direction: str
    fused: bool = True

    def times(self, sizes: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        works = [
            Softmax(batch, rows, cols, dtype=self.dtype, mask=self.mask, direction=self.direction)
            for batch, rows, cols in zip(*(size.tolist() for size in sizes), strict=True)
        ]
        return _halves(self.model.predict(works, fused=self.fused), np.zeros(len(works)))

    def single(self) -> Single:
        return _one_of(self)


@dataclass(frozen=True)
class AttentionBase:
    """Attention from its model. sizes: batch, heads, kv_heads, seq_q, seq_k, head_dim."""

    model: AttentionModel
    dtype: str
    causal: bool
    direction: str

    def times(self, sizes: Sizes) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        shapes = self._shapes(sizes)
        peak = self.model.device.peak(self.dtype)
        floor_us = shapes.flops / (peak * 1e6) if peak else np.zeros(len(shapes))
        return _halves(self.model.predict(shapes, quick=True), floor_us)

    def single(self) -> Single:
        return _one_of(self)

    def _shapes(self, sizes: Sizes) -> AttentionShapes:
        rows = len(sizes[0])
        causal, backward = np.full(rows, self.causal), np.full(rows, self.direction == "backward")
        batch, heads, kv_heads, seq_q, seq_k, head_dim = sizes
        return AttentionShapes(batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, backward, self.dtype)


def _halves(found: Estimates, floor_us: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """A model's answer as a base gives it."""
    middle = found.latency_us
    return middle, np.log(middle / found.low_us), np.log(found.high_us / middle), floor_us


def _one_of(base: Base) -> Single:
    """One shape by way of arrays, for models that have no other."""
    last = [0.0, 0.0]

    def one(*sizes: int) -> tuple[float, float]:
        latency_us, below, above, floor_us = base.times(tuple(np.array([size]) for size in sizes))
        last[:] = float(below[0]), float(above[0])
        return float(latency_us[0]), float(floor_us[0])

    return one, lambda latency_us: (last[0], last[1])
