"""Selects the rows and the model of a profile that answer a query, and the models themselves as one interface.

`choose_gemm`, `choose_softmax` and `choose_attention` return a `Chosen`. If there is no exact match, they use the
closest format or layout, widen the interval and add a note. Called by `answers.Asker`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.latency.estimate import Estimates
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.checks import flops, min_bytes
from quantbench.profile.interpolation import Base, Surface
from quantbench.profile.models import ProductModel
from quantbench.workload import Softmax
from quantbench.workload.dtypes import GEMM_DTYPES, VECTOR_DTYPES
from quantbench.workload.ops import DIRECTIONS, MASKS
from quantbench.workload.ops import LAYOUTS as GEMM_LAYOUTS

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile
    from quantbench.profile.table import Table


FloatArray = npt.NDArray[np.float64]
Sizes = tuple[npt.NDArray[np.int64], ...]

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

    def _shapes(self, sizes: Sizes) -> AttentionShapes:
        rows = len(sizes[0])
        causal, backward = np.full(rows, self.causal), np.full(rows, self.direction == "backward")
        batch, heads, kv_heads, seq_q, seq_k, head_dim = sizes
        return AttentionShapes(batch, heads, kv_heads, seq_q, seq_k, head_dim, causal, backward, self.dtype)


def _halves(found: Estimates, floor_us: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """A model's answer as a base gives it."""
    middle = found.latency_us
    return middle, np.log(middle / found.low_us), np.log(found.high_us / middle), floor_us


BoolArray = npt.NDArray[np.bool_]

# bf16 and fp16 move the same bytes at the same peak, by kernels of the same tiles.
_TWIN = {"bf16": "fp16", "fp16": "bf16"}
# What a layout or a twin format that was not measured may differ by, in log time (cuBLAS's layouts differ by up to
# 15 % where operands outgrow L2), and what a format of other bytes and another peak may.
ALIKE, _TRANSFERRED = log(1.15), log(1.3)

# Sizes that move together along the lines between measured shapes, by their place among the sizes; tried in order.
_FAMILIES: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemm": ((0,), (1,), (2,), (1, 2), (0, 1), (0, 2), (0, 1, 2), (3,)),
    "softmax": ((0,), (1, 2), (1,), (2,)),
    "attention": ((3, 4), (0,), (1, 2), (5,), (4,), (3,), (1,), (2,)),
}
_SIZES = {"gemm": PRODUCT_SIZES, "softmax": SOFTMAX_SIZES, "attention": ATTENTION_SIZES}


@dataclass(frozen=True)
class Chosen:
    """surface: answers the query. dtype: the requested number format. note: says if a similar format or layout answers.
    wider: extra half-width of the interval in log time; above 0, no answer is reported as measured. model_note: note
    of the model."""

    kind: str
    surface: Surface
    dtype: str
    fixed: tuple[tuple[str, str | bool], ...]
    note: str = ""
    wider: float = 0.0
    model_note: str = ""

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names of the sizes."""
        return _SIZES[self.kind]

    def outside_words(self, count: str = "") -> str:
        """That a shape, or so many of them, lie outside of what was measured, for people."""
        if not len(self.surface.latency_us):
            return "the profile has no measured row of this kind"
        spans = zip(self.sizes, self.surface.range, strict=True)
        return f"{count}outside the measured range ({', '.join(f'{n} {low} to {high}' for n, (low, high) in spans)})"


def choose_gemm(profile: Profile, dtype: str | None, layout: str | None, provider: str | None) -> Chosen:
    """For products of a format and layout; None: what the profile has most rows of."""
    table = profile.tables["gemm"]
    modelled = profile.models.gemm[0].dtype if profile.models.gemm else "bf16"
    asked = most(table, "dtype", None) or modelled if dtype is None else dtype
    require_choice("profile.gemm", "dtype", asked, GEMM_DTYPES)
    if layout is not None:
        require_choice("profile.gemm", "layout", layout, GEMM_LAYOUTS)
    notes, wider = [], 0.0
    of, rows = _rows_of(table, asked)
    if rows is None:
        return _without_rows(profile, asked, layout or "nt")
    if of != asked:
        notes.append(f"{asked} was not measured: taken to run as {of}")
        wider += ALIKE
    kept = most(table, "layout", rows) or "nt"
    if layout is not None and layout != kept:
        if (rows & (table["layout"] == layout)).any():
            kept = layout
        else:
            notes.append(f"layout {layout} was not measured: taken to run as {kept}")
            wider += ALIKE
    rows = rows & (table["layout"] == kept)
    rows, who = by_provider(table, rows, provider)
    base, model_note = _product_base(profile, of)
    fixed = (("dtype", asked), ("layout", layout or kept), ("provider", who))
    return Chosen("gemm", _surface(table, rows, base), asked, fixed, "; ".join(notes), wider, model_note)


def _without_rows(profile: Profile, dtype: str, layout: str) -> Chosen:
    table = profile.tables["gemm"]
    base, model_note = _product_base(profile, dtype)
    fixed = (("dtype", dtype), ("layout", layout), ("provider", ""))
    return Chosen("gemm", _surface(table, np.zeros(len(table), dtype=bool), base), dtype, fixed, "", 0.0, model_note)


def _product_base(profile: Profile, dtype: str) -> tuple[Base, str]:
    """(a model of products of `dtype`, what to know of it)."""
    device, models = profile.device, profile.models
    own = models.product(dtype)
    if own is not None:
        return ProductBase(own), own.note
    twin = models.product(_TWIN.get(dtype, ""))
    if twin is not None and device.peak(dtype) == device.peak(twin.dtype):
        return ProductBase(twin, ALIKE), f"the model of {twin.dtype} stands for {dtype}"
    if device.kind == "cuda" and device.peak(dtype) is None:
        have = ", ".join(sorted(device.peak_tflops))
        raise UnsupportedError("profile.gemm", f"{device.name} has no peak for {dtype}", f"one of {have}")
    if models.gemm:
        other = models.gemm[0]
        note = f"{dtype} was not measured: the model of {other.dtype}, times what bytes and peaks make of it"
        return TransferredBase(ProductBase(other), device, dtype, _TRANSFERRED), note
    note = f"no model of products on {device.name}: from its spec sheet, good to a factor of two"
    return RooflineBase(device, "gemm", PRODUCT_SIZES, (("dtype", dtype),)), note


def choose_softmax(profile: Profile, dtype: str | None, mask: str, direction: str, provider: str | None) -> Chosen:
    """For softmax of a format, mask and direction."""
    who = "profile.softmax"
    table, model = profile.tables["softmax"], profile.models.softmax
    asked = most(table, "dtype", None) or "bf16" if dtype is None else dtype
    require_choice(who, "dtype", asked, VECTOR_DTYPES)
    require_choice(who, "mask", mask, MASKS)
    require_choice(who, "direction", direction, DIRECTIONS)
    rows, kept, note, wider = _of_format(table, asked, (table["mask"] == mask) & (table["direction"] == direction))
    rows, name = by_provider(table, rows, provider)
    fixed = (("dtype", asked), ("mask", mask), ("direction", direction), ("provider", name))
    base: Base
    if model is None:
        base = RooflineBase(profile.device, "softmax", SOFTMAX_SIZES, fixed)
        model_note = f"no model of softmax on {profile.device.name}: from its spec sheet"
    else:
        base = SoftmaxBase(model, kept, mask, direction, profile.models.softmax_fused)
        model_note = model.note
    return Chosen("softmax", _surface(table, rows, base), asked, fixed, note, wider, model_note)


def choose_attention(profile: Profile, dtype: str | None, causal: bool, direction: str, provider: str | None) -> Chosen:
    """For attention of a format, mask and direction."""
    who = "profile.attention"
    table, model = profile.tables["attention"], profile.models.attention
    asked = dtype
    if asked is None:
        asked = most(table, "dtype", None) or ("bf16" if model is None else model.dtype)
    require_choice(who, "dtype", asked, VECTOR_DTYPES)
    require_choice(who, "direction", direction, DIRECTIONS)
    rows, kept, note, wider = _of_format(
        table, asked, (table["causal"] == causal) & (table["direction"] == direction)
    )  # fmt: skip
    rows, name = by_provider(table, rows, provider)
    fixed = (("dtype", asked), ("causal", causal), ("direction", direction), ("provider", name))
    base: Base
    if model is None or profile.device.peak(kept) is None:
        base = RooflineBase(profile.device, "attention", ATTENTION_SIZES, fixed)
        model_note = f"no model of {kept} attention on {profile.device.name}: from its spec sheet"
    else:
        base, model_note = AttentionBase(model, kept, causal, direction), model.note
    return Chosen("attention", _surface(table, rows, base), asked, fixed, note, wider, model_note)


def _of_format(table: Table, asked: str, rows: BoolArray) -> tuple[BoolArray, str, str, float]:
    """(rows of the format, or of its twin; the format that they are of; a note; how much wider)."""
    for of in (asked, _TWIN.get(asked, asked)):
        found = rows & (table["dtype"] == of)
        if found.any():
            if of == asked:
                return found, of, "", 0.0
            return found, of, f"{asked} was not measured: taken to run as {of}", ALIKE
    return np.zeros(len(table), dtype=bool), asked, "", 0.0


def _rows_of(table: Table, asked: str) -> tuple[str, BoolArray | None]:
    for of in (asked, _TWIN.get(asked, asked)):
        rows = table["dtype"] == of
        if rows.any():
            return of, rows
    return asked, None


def most(table: Table, column: str, rows: BoolArray | None) -> str | None:
    """The text that most rows have, the first in order where several do; None without rows."""
    values = table[column] if rows is None else table[column][rows]
    if not len(values):
        return None
    names, counts = np.unique(values, return_counts=True)
    return str(names[int(np.argmax(counts))])


def by_provider(table: Table, rows: BoolArray, provider: str | None) -> tuple[BoolArray, str]:
    """The rows of one provider: the one asked for, or the one with most of them."""
    if provider is None:
        usual = most(table, "provider", rows)
        return (rows, "") if usual is None else (rows & (table["provider"] == usual), usual)
    found = rows & (table["provider"] == provider)
    if not found.any():
        have = Counter(table["provider"][rows].tolist())
        raise InputError(
            f"profile.{table.kind}", f"provider = {provider!r}", "one of " + (", ".join(sorted(have)) or "none")
        )
    return found, provider


def _surface(table: Table, rows: BoolArray, base: Base) -> Surface:
    kept = np.flatnonzero(rows)
    sizes = tuple(table[name][kept] for name in _SIZES[table.kind])
    latency_us, low_us, high_us = (table[name][kept] for name in ("latency_us", "low_us", "high_us"))
    return Surface(sizes, latency_us, low_us, high_us, base, _FAMILIES[table.kind])
