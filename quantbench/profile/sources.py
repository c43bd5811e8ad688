"""Selects the rows and the model of a profile that answer a query.

Entry points: `choose_gemm` and `choose_vector` (softmax and attention), which return a `Chosen`; `by_provider`,
`roofline_parts`; the names of columns `SIZES` and `ALIKE`. Used by `answers`.

Without an exact match, the closest dtype or layout is used, with a wider interval and a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.latency.estimate import Estimates
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import library_of
from quantbench.latency.model_times import TWINS, best_gemm_model
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.interpolation import Base, FloatArray, Predicted, Sizes, Surface
from quantbench.profile.table import flops, min_bytes
from quantbench.workload import Softmax
from quantbench.workload.dtypes import GEMM_DTYPES, VECTOR_DTYPES
from quantbench.workload.ops import DIRECTIONS, MASKS
from quantbench.workload.ops import LAYOUTS as GEMM_LAYOUTS

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile
    from quantbench.profile.table import Table


BoolArray = npt.NDArray[np.bool_]
#: the query's values of table columns that are not sizes, as (column, value)
Fixed = tuple[tuple[str, str | bool], ...]

#: table columns that hold the sizes of a workload, by kind
SIZES = {
    "gemm": ("m", "n", "k", "batch"),
    "softmax": ("batch", "rows", "cols"),
    "attention": ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"),
}
# Sizes that grow together along the lines between measured shapes, by their index in SIZES; tried in order.
_FAMILIES: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemm": ((0,), (1,), (2,), (1, 2), (0, 1), (0, 2), (0, 1, 2), (3,)),
    "softmax": ((0,), (1, 2), (1,), (2,)),
    "attention": ((3, 4), (0,), (1, 2), (5,), (4,), (3,), (1,), (2,)),
}
# Extra half-widths in log time: for a layout or twin dtype that was not measured (cuBLAS's layouts differ by up to 15 %
# if operands exceed L2), and for an estimate from the spec sheet.
ALIKE, _ROOFLINE = log(1.15), log(2.0)
_SMALL_KERNEL_US = {"cuda": 3.0, "cpu": 2.0}
_REACHED = 0.75  # assumed share of the peaks


def roofline_parts(device: DeviceSpec, kind: str, sizes: Sizes, fixed: Fixed) -> tuple[FloatArray, FloatArray]:
    """Returns the times of the least memory traffic and of the arithmetic at the device's peaks, (shapes,) µs each.

    The time of the arithmetic is 0 for softmax, and if the peak is unknown.
    """
    rows = len(sizes[0])
    columns: dict[str, npt.NDArray[Any]] = dict(zip(SIZES[kind], sizes, strict=True))
    columns |= {name: np.broadcast_to(np.array(value), (rows,)) for name, value in fixed}
    memory_us = min_bytes(kind, columns) / (device.memory_gb_per_s * 1e3)
    peak = None if kind == "softmax" or not rows else device.peak(str(dict(fixed)["dtype"]))
    return memory_us, np.zeros(rows) if peak is None else flops(kind, columns) / (peak * 1e6)


def _product(sizes: Sizes, *, model: GemmModel, layout: str, wider: float = 0.0) -> Predicted:
    """Predicts GEMMs with a model. wider: extra half-width, log time."""
    # Longer sides are answered from their rows alone (`answers`).
    m, n, k, batch = (np.minimum(size, LARGEST_SIDE) for size in sizes)
    found = model.predict(m, n, k, batch=batch, layout=layout)
    half = np.log(found.high_us / found.latency_us) + wider
    floor_us = np.prod(np.array(sizes, dtype=np.float64), axis=0) * (2.0 / model.ensemble.machine.flop_per_us)
    return found.latency_us, half, half, floor_us


def _roofline(sizes: Sizes, *, device: DeviceSpec, kind: str, fixed: Fixed) -> Predicted:
    """Predicts any kind from the device's spec sheet alone."""
    memory_us, compute_us = roofline_parts(device, kind, sizes, fixed)
    half = np.full(len(memory_us), _ROOFLINE)
    return np.maximum(memory_us, compute_us) / _REACHED + _SMALL_KERNEL_US[device.torch_kind], half, half, compute_us


def _softmax(sizes: Sizes, *, model: SoftmaxModel, fused: bool, dtype: str, mask: str, direction: str) -> Predicted:
    works = [
        Softmax(batch, rows, cols, dtype=dtype, mask=mask, direction=direction)
        for batch, rows, cols in zip(*(size.tolist() for size in sizes), strict=True)
    ]
    return _with_halves(model.predict(works, fused=fused), np.zeros(len(works)))


def _attention(sizes: Sizes, *, model: AttentionModel, dtype: str, causal: bool, direction: str) -> Predicted:
    rows = len(sizes[0])
    batch, heads, kv_heads, seq_q, seq_k, head_dim = sizes
    masks, backward = np.full(rows, causal), np.full(rows, direction == "backward")
    shapes = AttentionShapes(batch, heads, kv_heads, seq_q, seq_k, head_dim, masks, backward, dtype)
    peak = model.device.peak(dtype)
    floor_us = shapes.flops / (peak * 1e6) if peak else np.zeros(rows)
    return _with_halves(model.predict(shapes), floor_us)


def _with_halves(found: Estimates, floor_us: FloatArray) -> Predicted:
    middle = found.latency_us
    return middle, np.log(middle / found.low_us), np.log(found.high_us / middle), floor_us


@dataclass(frozen=True)
class Chosen:
    """Rows and model selected to answer queries of one dtype, layout, mask and direction.

    surface: interpolator over the rows and the model.
    fixed: values of columns that are not sizes.
    note: set if a similar dtype or layout is used instead; then no answer is reported as measured.
    wider: extra half-width of the interval, log time, if `note` is set.
    model_note: note on the model's source.
    """

    kind: str
    surface: Surface
    fixed: Fixed
    note: str = ""
    wider: float = 0.0
    model_note: str = ""

    def outside_words(self, count: str = "") -> str:
        """Returns the note that a shape, or `count` of them, is outside the measured range."""
        if not len(self.surface.latency_us):
            return "the profile has no measured row of this kind"
        spans = zip(SIZES[self.kind], self.surface.range, strict=True)
        return f"{count}outside the measured range ({', '.join(f'{n} {low} to {high}' for n, (low, high) in spans)})"


def choose_gemm(profile: Profile, dtype: str | None, layout: str | None, provider: str | None) -> Chosen:
    """Selects rows and model for GEMMs of a dtype and layout; None selects the one with the most rows."""
    table = profile.tables["gemm"]
    modelled = profile.models.gemm[0].dtype if profile.models.gemm else "bf16"
    asked = table.most("dtype") or modelled if dtype is None else dtype
    require_choice("profile.gemm", "dtype", asked, GEMM_DTYPES)
    if layout is not None:
        require_choice("profile.gemm", "layout", layout, GEMM_LAYOUTS)
    rows, of, note, wider = _of_format(table, asked, np.ones(len(table), dtype=bool))
    notes = [note] if note else []
    kept, who = layout or "nt", ""
    if rows.any():
        kept = table.most("layout", rows) or "nt"
        if layout is not None and layout != kept:
            if (rows & (table["layout"] == layout)).any():
                kept = layout
            else:
                notes.append(f"layout {layout} was not measured: taken to run as {kept}")
                wider += ALIKE
        rows, who = by_provider(table, rows & (table["layout"] == kept), provider)
    elif provider is not None:
        who = library_of(provider)
        libraries = sorted({model.library for model in profile.models.gemm})
        if who not in libraries:
            expected = "one of " + (", ".join(libraries) or "none: it has neither rows nor models of products")
            raise InputError("profile.gemm", f"provider = {provider!r}", expected)
    base, model_note = _product_base(profile, of, library_of(who) if who else "", layout or kept)
    usual = profile.models.product(of)
    fixed = (("dtype", asked), ("layout", layout or kept), ("provider", who or (usual.library if usual else "")))
    return Chosen("gemm", _surface(table, rows, base), fixed, "; ".join(notes), wider, model_note)


def _product_base(profile: Profile, dtype: str, library: str, layout: str) -> tuple[Base, str]:
    """Returns (a model of GEMMs of `dtype`, of `library` if there is one, its note)."""
    device, models = profile.device, profile.models
    if device.kind == "cpu":
        note = f"no model of products on {device.name}: from its spec sheet, good to a factor of two"
        return partial(_roofline, device=device, kind="gemm", fixed=(("dtype", dtype),)), note
    if device.peak(dtype) is None:
        raise UnsupportedError("profile.gemm", f"{device.name} has no peak for {dtype}", f"one of {device.dtypes}")
    own = models.product(dtype, library) or models.product(dtype)
    if own is not None:
        return partial(_product, model=own, layout=layout), own.note
    model, note = best_gemm_model(device, dtype, library, models.product)
    return partial(_product, model=model, layout=layout, wider=ALIKE if model.dtype != dtype else 0.0), note


def choose_vector(
    kind: str, profile: Profile, dtype: str | None, mask: str | bool, direction: str, provider: str | None
) -> Chosen:
    """Selects rows and model for softmax or attention; None selects the dtype or provider with the most rows.

    mask: the mask of softmax; of attention, whether it is causal.
    """
    who, table, device = f"profile.{kind}", profile.tables[kind], profile.device
    softmax, attention = profile.models.softmax, profile.models.attention
    usual = attention.dtype if kind == "attention" and attention is not None else "bf16"
    asked = table.most("dtype") or usual if dtype is None else dtype
    require_choice(who, "dtype", asked, VECTOR_DTYPES)
    require_choice(who, "direction", direction, DIRECTIONS)
    if kind == "softmax":
        require_choice(who, "mask", mask, MASKS)
    column = "mask" if kind == "softmax" else "causal"
    rows, of, note, wider = _of_format(table, asked, (table[column] == mask) & (table["direction"] == direction))
    rows, name = by_provider(table, rows, provider)
    fixed = (("dtype", asked), (column, mask), ("direction", direction), ("provider", name))
    base: Base
    if kind == "softmax" and softmax is not None:
        fused, model_note = profile.models.softmax_fused, softmax.note
        base = partial(_softmax, model=softmax, fused=fused, dtype=of, mask=str(mask), direction=direction)
    elif kind == "attention" and attention is not None and device.peak(of) is not None:
        model_note = attention.note
        base = partial(_attention, model=attention, dtype=of, causal=bool(mask), direction=direction)
    else:
        base = partial(_roofline, device=device, kind=kind, fixed=fixed)
        what = kind if kind == "softmax" else f"{of} {kind}"
        model_note = f"no model of {what} on {device.name}: from its spec sheet"
    return Chosen(kind, _surface(table, rows, base), fixed, note, wider, model_note)


def _of_format(table: Table, asked: str, rows: BoolArray) -> tuple[BoolArray, str, str, float]:
    """Returns (rows of the dtype or else of its twin, their dtype, note, extra half-width in log time)."""
    for of in (asked, TWINS.get(asked, asked)):
        found = rows & (table["dtype"] == of)
        if found.any():
            if of == asked:
                return found, of, "", 0.0
            return found, of, f"{asked} was not measured: taken to run as {of}", ALIKE
    return np.zeros(len(table), dtype=bool), asked, "", 0.0


def by_provider(table: Table, rows: BoolArray, provider: str | None) -> tuple[BoolArray, str]:
    """Returns the rows of `provider`, or of the one with the most rows if None, and that provider.

    provider: a library stands for its provider with the most rows (vllm for vllm.flash_attn_fa3).
    """
    if provider is None:
        usual = table.most("provider", rows)
        return (rows, "") if usual is None else (rows & (table["provider"] == usual), usual)
    if provider not in table["provider"][rows]:
        of_library = [library_of(name) == provider for name in table["provider"].tolist()]
        provider = table.most("provider", rows & np.array(of_library, dtype=bool)) or provider
    found = rows & (table["provider"] == provider)
    if not found.any():
        have = ", ".join(sorted(set(table["provider"][rows].tolist()))) or "none"
        raise InputError(f"profile.{table.kind}", f"provider = {provider!r}", f"one of {have}")
    return found, provider


def _surface(table: Table, rows: BoolArray, base: Base) -> Surface:
    kept = np.flatnonzero(rows)
    sizes = tuple(table[name][kept] for name in SIZES[table.kind])
    latency_us, low_us, high_us = (table[name][kept] for name in ("latency_us", "low_us", "high_us"))
    return Surface(sizes, latency_us, low_us, high_us, base, _FAMILIES[table.kind])
