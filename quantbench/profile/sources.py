"""Selects a profile's rows and model for a query, and combines them in an interpolator.

`choose` is the entry point. A dtype or layout without rows uses the rows of a similar dtype (its
twin) or of the most frequent layout, with a wider interval and a note. Where the profile has no
model, times are predicted from the device's spec sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice
from quantbench.latency.attention import AttentionModel
from quantbench.latency.attention_cost_model import AttentionShapes
from quantbench.latency.estimate import Estimates
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.libraries import library_of, writes_cache
from quantbench.latency.model_times import TWINS, best_gemm_model
from quantbench.latency.op_times import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    KERNEL_OVERHEAD_US,
)
from quantbench.latency.softmax import SoftmaxModel
from quantbench.profile.interpolation import Base, FloatArray, Predicted, Sizes, Surface
from quantbench.profile.models import Models
from quantbench.profile.table import TIMES, Table
from quantbench.workload import Softmax
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES, VECTOR_DTYPES
from quantbench.workload.ops import DIRECTIONS, LAYOUTS, MASKS

BoolArray = npt.NDArray[np.bool_]
#: Values by name of the columns that are not sizes, such as dtype and layout.
Fixed = Mapping[str, str | bool]

#: Table columns with the sizes of a workload, by kind of workload.
SIZES = {
    "gemm": ("m", "n", "k", "batch"),
    "softmax": ("batch", "rows", "cols"),
    "attention": ("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"),
}
# Families of lines for `Surface`, tried in order: for each family, the sizes that grow together
# along its lines, as indices in SIZES.
_FAMILIES: dict[str, tuple[tuple[int, ...], ...]] = {
    "gemm": ((0,), (1,), (2,), (1, 2), (0, 1), (0, 2), (0, 1, 2), (3,)),
    "softmax": ((0,), (1, 2), (1,), (2,)),
    "attention": ((3, 4), (0,), (1, 2), (5,), (4,), (3,), (1,), (2,)),
}
#: Extra half-width (log time) if the rows are of another layout or of the twin dtype. The times of
#: cuBLAS's layouts differ by up to 15 % if the operands exceed L2.
SIMILAR_HALF_WIDTH = log(1.15)
# Half-width (log time) of an estimate from the spec sheet, by kind of device.
_ROOFLINE = {"cuda": log(2.0), "cpu": log(4.0)}


def roofline_parts(
    device: DeviceSpec, kind: str, sizes: Sizes, fixed: Fixed
) -> tuple[FloatArray, FloatArray]:
    """Returns the time of the minimum memory traffic and the time of the arithmetic, at the peaks.

    Both arrays are (shapes,) in µs. The arithmetic counts as 0 µs for softmax and for a dtype
    without a known peak.

    sizes: sizes in the order of SIZES, (shapes,) each.
    fixed: values of the columns that are not sizes.
    """
    dtype = str(fixed["dtype"])
    flops = np.zeros(len(sizes[0]))
    if kind == "gemm":
        m, n, k, batch = (size.astype(np.float64) for size in sizes)
        of = DTYPES[dtype]
        moved = batch * (
            np.round(m * k * of.a_bytes + k * n * of.b_bytes)
            + m * n * DTYPES[of.output].element_bytes
        )
        flops = 2.0 * m * n * k * batch
    elif kind == "attention":
        shapes = _attention_shapes(sizes, fixed)
        moved = shapes.min_bytes
        flops = shapes.flops
    else:
        batch, rows, cols = (size.astype(np.float64) for size in sizes)
        # Only unmasked elements are read, but the whole result is written. The backward pass reads
        # two matrices: the output and its gradient.
        live = rows * (rows + 1) / 2 if fixed["mask"] == "causal" else rows * cols
        reads = 1.0 if fixed["direction"] == "forward" else 2.0
        moved = DTYPES[dtype].element_bytes * batch * (reads * live + rows * cols)
    memory_us = moved / (device.memory_gb_per_s * 1e3)
    return memory_us, flops / ((device.peak(dtype) or np.inf) * 1e6)


def _attention_shapes(sizes: Sizes, fixed: Fixed) -> AttentionShapes:
    """Converts sizes, in the order of SIZES, to the attention model's shapes."""
    count = len(sizes[0])
    masks = np.full(count, fixed["causal"])
    backward = np.full(count, fixed["direction"] == "backward")
    columns: Any = (*sizes, masks, backward, fixed["dtype"])
    return AttentionShapes(*columns)


def _product(model: GemmModel, layout: str, wider: float, sizes: Sizes) -> Predicted:
    """Predicts GEMMs with a model. The shortest possible time is the time of the arithmetic.

    wider: extra half-width of the interval in log time.
    """
    # Longer sides are clipped. Their prediction is not used, because GEMMs with such sides take
    # their time from a measured row (`answers`).
    m, n, k, batch = (np.minimum(size, LARGEST_SIDE) for size in sizes)
    found = model.predict(m, n, k, batch=batch, layout=layout)
    half = np.log(found.high_us / found.latency_us) + wider
    floor_us = np.prod(np.array(sizes, dtype=np.float64), axis=0) * (
        2.0 / model.ensemble.machine.flop_per_us
    )
    return found.latency_us, half, half, floor_us


def _roofline(device: DeviceSpec, kind: str, fixed: Fixed, sizes: Sizes) -> Predicted:
    """Predicts workloads of any kind from the device's spec sheet alone."""
    memory_us, compute_us = roofline_parts(device, kind, sizes, fixed)
    on = device.torch_kind
    half = np.full(len(memory_us), _ROOFLINE[on])
    busy_us = np.maximum(memory_us / BANDWIDTH_EFFICIENCY[on], compute_us / COMPUTE_EFFICIENCY[on])
    return busy_us + KERNEL_OVERHEAD_US[on], half, half, compute_us


def _softmax(model: SoftmaxModel, fused: bool, fixed: Fixed, sizes: Sizes) -> Predicted:
    """Predicts softmax with a model. The shortest possible time is taken as 0.

    fused: True to predict one fused kernel, False to predict several kernels.
    """
    words: Any = dict(fixed)
    words.pop("provider")
    rows = np.stack(sizes, axis=1).tolist()
    works = [Softmax(*row, **words) for row in rows]
    return _with_halves(model.predict(works, fused=fused), np.zeros(len(works)))


def _attention(model: AttentionModel, fixed: Fixed, sizes: Sizes) -> Predicted:
    """Predicts attention with a model. The shortest possible time is the time of the arithmetic."""
    _, floor_us = roofline_parts(model.device, "attention", sizes, fixed)
    writes = fixed["causal"] and writes_cache(str(fixed["provider"]))
    found = model.predict(_attention_shapes(sizes, fixed), cache_write=writes)
    return _with_halves(found, floor_us)


def _with_halves(found: Estimates, floor_us: FloatArray) -> Predicted:
    """Converts the intervals of estimates to half-widths in log time.

    floor_us: shortest possible times in µs.
    """
    middle = found.latency_us
    return middle, np.log(middle / found.low_us), np.log(found.high_us / middle), floor_us


def _product_base(
    device: DeviceSpec, models: Models, dtype: str, library: str, layout: str
) -> tuple[Base, str, bool]:
    """Returns a GEMM model for a dtype, its note, and whether the model is the profile's own.

    The profile's model for `library` is preferred, then the profile's first model for the dtype,
    then the model that `best_gemm_model` finds. A CPU is predicted from its spec sheet.

    Raises UnsupportedError for a dtype that the device does not support.
    """
    if device.kind == "cpu":
        note = f"no model of products on {device.name}: from the rates of a usual core"
        note += ", good to a factor of four"
        return partial(_roofline, device, "gemm", {"dtype": dtype}), note, False
    if device.peak(dtype) is None:
        raise UnsupportedError(
            "profile.gemm", f"{device.name} has no peak for {dtype}", f"one of {device.dtypes}"
        )
    fitted = models.product(dtype, library)
    if fitted is not None:
        return partial(_product, fitted, layout, 0.0), fitted.note, True
    model, note = best_gemm_model(device, dtype, library, models.product)
    wider = 0.0 if model.dtype == dtype else SIMILAR_HALF_WIDTH
    return partial(_product, model, layout, wider), note, False


@dataclass(frozen=True)
class Chosen:
    """Rows and model selected to answer queries of one dtype, layout, mask and direction.

    kind: gemm, softmax or attention.
    surface: interpolator over the rows and the model.
    fixed: values of the columns that are not sizes.
    note: which similar dtype or layout the rows have; "" if they have the query's dtype and layout.
        With a note, no time counts as measured.
    wider: extra half-width of the interval in log time; 0 if `note` is "".
    model_note: note on the model's source.
    """

    kind: str
    surface: Surface
    fixed: Fixed
    note: str = ""
    wider: float = 0.0
    model_note: str = ""

    def outside_words(self, count: str = "") -> str:
        """Returns a note that shapes are outside the measured range.

        count: start of the note, such as "3 of 8 "; "" for a single shape.
        """
        if not len(self.surface.latency_us):
            return "the profile has no measured row of this kind"
        spans = zip(SIZES[self.kind], self.surface.range, strict=True)
        return (
            f"{count}outside the measured range "
            f"({', '.join(f'{n} {low} to {high}' for n, (low, high) in spans)})"
        )


def choose(
    device: DeviceSpec, table: Table, models: Models, of: Mapping[str, Any], provider: str | None
) -> Chosen:
    """Selects the rows and the model for queries of one dtype, layout, mask and direction.

    of: values by name: dtype and layout for GEMMs; dtype, mask and direction for softmax; dtype,
        causal and direction for attention. None as dtype or layout selects the value with the most
        rows.
    provider: provider of the rows; None selects the provider with the most rows.

    Raises InputError for an unknown value, and UnsupportedError for a dtype that the device does
    not support.
    """
    kind = table.kind
    who = f"profile.{kind}"
    dtype = of["dtype"] or table.most_frequent("dtype") or _usual_dtype(kind, models)
    require_choice(who, "dtype", dtype, GEMM_DTYPES if kind == "gemm" else VECTOR_DTYPES)
    rows = np.ones(len(table), dtype=bool)
    for name, choices in (("layout", LAYOUTS), ("mask", MASKS), ("direction", DIRECTIONS)):
        if of.get(name) is not None:
            require_choice(who, name, of[name], choices)
    for name in of.keys() & {"mask", "causal", "direction"}:
        rows &= table[name] == of[name]
    rows, row_dtype, notes = _of_format(table, dtype, rows)
    fixed = {**of, "dtype": dtype}
    if kind == "gemm":
        rows, fixed["layout"] = _of_layout(table, rows, of["layout"], notes)
    if kind == "gemm" and not rows.any() and provider is not None:
        fixed["provider"] = _library_of_models(models, provider)
    else:
        rows, fixed["provider"] = by_provider(table, rows, provider)
    base: Base
    fitted = False
    if kind == "gemm":
        library = library_of(fixed["provider"]) if fixed["provider"] else ""
        base, model_note, fitted = _product_base(
            device, models, row_dtype, library, fixed["layout"]
        )
        usual = models.product(row_dtype)
        if usual and not library:
            fixed["provider"] = usual.library
    else:
        base, model_note = _vector_base(device, models, kind, fixed, row_dtype)
    sizes = tuple(table[name][rows] for name in SIZES[kind])
    times: Any = {name: table[name][rows] for name in TIMES}
    surface = Surface(sizes, **times, base=base, families=_FAMILIES[kind], fitted=fitted)
    return Chosen(
        kind, surface, fixed, "; ".join(notes), SIMILAR_HALF_WIDTH * len(notes), model_note
    )


def _of_layout(
    table: Table, rows: BoolArray, layout: str | None, notes: list[str]
) -> tuple[BoolArray, str]:
    """Returns the rows of a layout, and the layout that the query is about.

    rows: mask of the candidate rows.
    layout: None selects the most frequent layout. A layout without rows gets the rows of the most
        frequent layout, and a note is added to `notes`.
    """
    if not rows.any():
        return rows, layout or "nt"
    of = table["layout"] == layout
    if not (rows & of).any():
        usual = table.most_frequent("layout", rows)
        of = table["layout"] == usual
        if layout is None:
            layout = usual
        else:
            notes.append(f"layout {layout} was not measured: taken to run as {usual}")
    return rows & of, str(layout)


def _library_of_models(models: Models, provider: str) -> str:
    """Returns a provider's library. Raises InputError if the profile has no model for it."""
    library = library_of(provider)
    libraries = sorted({model.library for model in models.gemm})
    if library not in libraries:
        have = ", ".join(libraries) or "none: it has neither rows nor models of products"
        raise InputError("profile.gemm", f"provider = {provider!r}", f"one of {have}")
    return library


def _usual_dtype(kind: str, models: Models) -> str:
    """Returns the dtype to assume for a kind of workload without rows."""
    if kind == "gemm" and models.gemm:
        return models.gemm[0].dtype
    if kind == "attention" and models.attention is not None:
        return models.attention.dtype
    return "bf16"


def _vector_base(
    device: DeviceSpec, models: Models, kind: str, fixed: Fixed, row_dtype: str
) -> tuple[Base, str]:
    """Returns a model of softmax or attention, and the model's note.

    If the profile has no model of the kind, times come from the spec sheet. The same holds for
    attention in a dtype without a peak on the device.

    row_dtype: dtype of the selected rows.
    """
    of_rows = {**fixed, "dtype": row_dtype}
    if kind == "softmax" and models.softmax is not None:
        return partial(_softmax, models.softmax, models.softmax_fused, of_rows), models.softmax.note
    if kind == "attention" and models.attention is not None and device.peak(row_dtype) is not None:
        return partial(_attention, models.attention, of_rows), models.attention.note
    what = kind if kind == "softmax" else f"{row_dtype} {kind}"
    note = f"no model of {what} on {device.name}: from its spec sheet"
    return partial(_roofline, device, kind, fixed), note


def _of_format(table: Table, dtype: str, rows: BoolArray) -> tuple[BoolArray, str, list[str]]:
    """Returns the rows of a dtype or else of its twin (`TWINS`), the rows' dtype, and notes.

    The twin is used, with a note, if it has rows and the dtype has none.

    rows: mask of the candidate rows.
    """
    found = rows & (table["dtype"] == dtype)
    twin = TWINS.get(dtype)
    if twin is None or found.any():
        return found, dtype, []
    of_twin = rows & (table["dtype"] == twin)
    if not of_twin.any():
        return found, dtype, []
    return of_twin, twin, [f"{dtype} was not measured: taken to run as {twin}"]


def by_provider(table: Table, rows: BoolArray, provider: str | None) -> tuple[BoolArray, str]:
    """Returns the rows of a provider, and the provider's name ("" if there are no rows).

    rows: mask of the candidate rows.
    provider: None selects the provider with the most rows. The name of a library (vllm) selects
        that library's provider with the most rows (such as vllm.flash_attn_fa3).

    Raises InputError if the provider has no rows.
    """
    if provider is None:
        provider = table.most_frequent("provider", rows)
        if provider is None:
            return rows, ""
    elif provider not in table["provider"][rows]:
        usual = table.most_frequent("provider", rows & table.by_library(provider))
        provider = usual or provider
    found = rows & (table["provider"] == provider)
    if not found.any():
        have = ", ".join(sorted(set(table["provider"][rows].tolist()))) or "none"
        raise InputError(f"profile.{table.kind}", f"provider = {provider!r}", f"one of {have}")
    return found, provider
