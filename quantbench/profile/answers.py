"""Estimates times from a profile, for single shapes and for arrays of shapes.

`Profile` calls `Shapes` for GEMMs, softmax and attention, `Experts` for MoE layers, and
`collective_estimates` for collectives. A workload with a measured row gets the time of the row.
Other times are interpolated between rows or predicted by a model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.estimate import Estimate, name_bound
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.libraries import LIBRARIES, library_of
from quantbench.latency.model_times import require_reach
from quantbench.latency.moe import FEWEST_ROWS, MoEModel
from quantbench.profile.interpolation import INTERPOLATED, MEASURED, MODELLED, SOURCES
from quantbench.profile.models import Models
from quantbench.profile.sources import (
    SIMILAR_HALF_WIDTH,
    SIZES,
    Chosen,
    by_provider,
    choose,
    roofline_parts,
)
from quantbench.profile.table import TIMES, Table
from quantbench.workload import Collective, MoE
from quantbench.workload.kinds import Compute
from quantbench.workload.ops import LARGEST_MESSAGE_BYTES

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_LARGEST = 2**31 - 1  # largest size in a shape
_MOST_CACHED = 2**16  # largest number of cached estimates for single shapes
# Fields of each kind of workload that are not sizes. A format is their values and a provider.
_FORMATS = {
    "gemm": ("dtype", "layout"),
    "softmax": ("dtype", "mask", "direction"),
    "attention": ("dtype", "causal", "direction"),
}
#: Values of the fields in _FORMATS, then the provider. None as dtype, layout or provider selects
#: the value with the most rows.
Format = tuple[Any, ...]

# Names of the attention masks, by the value of `causal`.
_MASKS: dict[str | bool, str] = {True: "causal", False: "full"}

# A shape is bound by latency if, at the device's peaks, its arithmetic takes less than this
# fraction of the estimated time and its memory traffic does, too.
_EXPLAINED = 1.0 / 3.0


@dataclass(frozen=True)
class ProfileEstimates:
    """Times of many shapes. Arrays have the broadcast shape of the query's sizes.

    low_us, high_us: interval around each time.
    source_code: source of each time, as an index in SOURCES.
    outside: whether each shape is outside the measured range.
    compute_us, memory_us: time that the arithmetic alone and the memory traffic alone take at the
        device's peaks.
    note: caveats that apply to all shapes.
    op: name of the operation, used in `Estimate.unmeasured`.
    format: dtype and the other values that are not sizes, as in `Estimate.format`.
    """

    latency_us: FloatArray
    low_us: FloatArray
    high_us: FloatArray
    source_code: npt.NDArray[np.int8]
    outside: npt.NDArray[np.bool_]
    compute_us: FloatArray = field(repr=False)
    memory_us: FloatArray = field(repr=False)
    note: str = ""
    op: str = ""
    format: str = ""

    @cached_property
    def source(self) -> npt.NDArray[np.str_]:
        """Source of each time: measured, interpolated or modelled."""
        return np.array(SOURCES)[self.source_code]

    @cached_property
    def bound(self) -> npt.NDArray[np.str_]:
        """What limits each time: compute, memory or latency.

        The bound is compute or memory, whichever takes longer at the device's peaks. If the longer
        one takes less than a third of the estimated time, the bound is latency.
        """
        return name_bound(_EXPLAINED * self.latency_us, self.compute_us, self.memory_us)

    def __len__(self) -> int:
        return len(self.latency_us)

    def shaped(self, shape: tuple[int, ...]) -> Estimate | ProfileEstimates:
        """Returns the estimates as arrays of this shape; for the shape (), the single Estimate."""
        if shape == ():
            return self[0]
        arrays: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                arrays[name] = value.reshape(shape)
        return replace(self, **arrays)

    def __getitem__(self, row: int) -> Estimate:
        outside = bool(self.outside[row])
        beyond = self.source_code[row] == MODELLED and (outside or bool(self.note))
        return Estimate(
            float(self.latency_us[row]),
            float(self.low_us[row]),
            float(self.high_us[row]),
            str(self.source[row]),
            str(self.bound[row]),
            outside,
            self.note,
            unmeasured=f"{self.op}: beyond the rows of the profile" if beyond else "",
            format=self.format,
        )

    def __iter__(self) -> Iterator[Estimate]:
        return (self[row] for row in range(len(self)))


def broadcast_sizes(
    who: str, names: tuple[str, ...], given: tuple[Any, ...], largest: int = _LARGEST
) -> tuple[tuple[IntArray, ...], tuple[int, ...]]:
    """Returns the sizes as flat int64 arrays of equal length, and the shape they broadcast to.

    who: the caller's name for error messages.
    names, given: names and values of the sizes.
    largest: largest allowed size.

    Raises InputError for values that are not whole numbers from 1 to `largest`, and for arrays
    that do not broadcast.
    """
    arrays = []
    for name, values in zip(names, given, strict=True):
        array = np.asarray(values)
        bad: Any = [repr(values)]
        if array.dtype.kind in "iuf":
            bad = array[~((array >= 1) & (array <= largest) & (array == np.floor(array)))]
        if len(bad):
            raise InputError(who, f"{name} = {bad[0]}"[:100], f"whole numbers from 1 to {largest}")
        arrays.append(array.astype(np.int64))
    try:
        wide = np.broadcast_arrays(*arrays)
    except ValueError:
        pairs = zip(names, arrays, strict=True)
        shapes = ", ".join(f"{name} {array.shape}" for name, array in pairs)
        raise InputError(who, f"arrays of {shapes}", "shapes that broadcast") from None
    return tuple(np.ascontiguousarray(array).ravel() for array in wide), wide[0].shape


class Shapes:
    """Estimates times of GEMMs, softmax and attention on one device.

    tables: measured tables by kind.
    models: models for shapes that were not measured.

    The rows and the model of each format are selected once, and estimates for single shapes are
    cached.
    """

    def __init__(self, device: DeviceSpec, tables: Mapping[str, Table], models: Models) -> None:
        self.device = device
        self.tables = tables
        self.models = models
        self.chosen = cache(self._choose)
        self._one = lru_cache(_MOST_CACHED)(self._many)

    def estimate(
        self, kind: str, of: Format, sizes: tuple[Any, ...]
    ) -> Estimate | ProfileEstimates:
        """Returns an Estimate for plain numbers, or ProfileEstimates for arrays.

        kind: gemm, softmax or attention.
        of: format of the shapes.
        sizes: sizes in the order of SIZES.
        """
        plain = all(type(size) is int for size in sizes)
        return (self._one if plain else self._many)(kind, of, sizes)

    def estimates(self, works: Sequence[Compute]) -> dict[Compute, Estimate]:
        """Estimates each workload, with one array query per kind and format.

        Raises UnsupportedError for a workload that is no GEMM, softmax or attention.
        """
        groups: dict[tuple[str, Format], dict[Compute, None]] = {}
        for work in works:
            if work.kind not in _FORMATS:
                raise UnsupportedError(
                    "profile",
                    str(work),
                    "products, attention or softmax: it has no table of others",
                )
            of = (*map(partial(getattr, work), _FORMATS[work.kind]), None)
            groups.setdefault((work.kind, of), {})[work] = None
        found: dict[Compute, Estimate] = {}
        for (kind, of), group in groups.items():
            sizes = [np.array([getattr(work, name) for work in group]) for name in SIZES[kind]]
            times: Any = self._many(kind, of, tuple(sizes))
            found.update(zip(group, times, strict=True))
        return found

    def _choose(self, kind: str, of: Format) -> Chosen:
        """Selects the rows and the model for a format."""
        *words, provider = of
        fixed = dict(zip(_FORMATS[kind], words, strict=True))
        return choose(self.device, self.tables[kind], self.models, fixed, provider)

    def _many(self, kind: str, of: Format, sizes: tuple[Any, ...]) -> Estimate | ProfileEstimates:
        """Implements `estimate`.

        Raises InputError for invalid sizes, for an unmeasured GEMM with a side above LARGEST_SIDE,
        and for a model whose times are not finite and above 0.
        """
        chosen = self.chosen(kind, of)
        who = f"profile.{kind}"
        flat, shape = broadcast_sizes(who, SIZES[kind], sizes)
        if kind == "gemm":
            # The models cover sides up to LARGEST_SIDE. A GEMM with a longer side needs a measured
            # row.
            too_long = np.maximum.reduce(flat[:3]) > LARGEST_SIDE
            if too_long.any():
                unmeasured = too_long & (chosen.surface.index.find(flat) < 0)
                for row in np.flatnonzero(unmeasured)[:1]:
                    require_reach(*(int(size[row]) for size in flat[:3]))
        with np.errstate(all="ignore"):  # times that are not finite and above 0 are refused below
            latency, low, high, code, outside = chosen.surface.many(flat)
        bad = ~(np.isfinite(high) & (low > 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            shown = f"the model says {latency[row]:g} µs for {[int(size[row]) for size in flat]}"
            raise InputError(who, shown, "a finite time above 0 (the model is not sound)")
        notes = []
        if chosen.note:
            notes.append(chosen.note)
            # The rows are of a similar dtype or layout, so no time counts as measured.
            code[code == MEASURED] = INTERPOLATED
            low *= exp(-chosen.wider)
            high *= exp(chosen.wider)
        if chosen.model_note and (code == MODELLED).any():
            notes.append(chosen.model_note)
        if outside.any():
            count = f"{outside.sum()} of {len(outside)} " if shape else ""
            notes.append(chosen.outside_words(count))
        memory_us, compute_us = roofline_parts(self.device, kind, flat, chosen.fixed)
        op = "products" if kind == "gemm" else kind
        if chosen.fixed.get("direction") == "backward":
            op = f"backward {op}"
        words = [_MASKS.get(value) or str(value) for value in chosen.fixed.values()]
        return ProfileEstimates(
            latency,
            low,
            high,
            code,
            outside,
            compute_us,
            memory_us,
            "; ".join(notes),
            op,
            format=" ".join(filter(None, words)),
        ).shaped(shape)


class Experts:
    """Estimates times of MoE layers on one device.

    table: measured rows, a table of kind moe.

    Models are fitted on first use and cached.
    """

    def __init__(self, device: DeviceSpec, table: Table) -> None:
        self.device = device
        self.table = table
        self._models: dict[tuple[str, str], MoEModel] = {}

    @cached_property
    def _row_of(self) -> dict[tuple[Any, str], int]:
        """Index of the table's row for each pair (layer, provider), in the table's order."""
        keys = zip(self.table.workloads(), self.table["provider"].tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}

    def estimates(self, works: Sequence[MoE], provider: str | None = None) -> dict[MoE, Estimate]:
        """Estimates each layer, from its measured row or else from a model.

        provider: provider whose kernels run the layers; None selects, for each dtype, the provider
            with the most rows.

        Raises UnsupportedError if `provider` is given but has no row of a layer's dtype.
        """
        found: dict[MoE, Estimate] = {}
        unmeasured: dict[tuple[str, str], list[MoE]] = defaultdict(list)
        usual = cache(self._usual_provider)
        for work in dict.fromkeys(works):
            of = provider or usual(work.dtype)
            row = self._row_of.get((work, of))
            if row is None:
                unmeasured[work.dtype, of].append(work)
            else:
                times: Any = {name: float(self.table[name][row]) for name in TIMES}
                found[work] = Estimate(**times, source="measured", note=f"measured by {of}")
        for (dtype, of), layers in unmeasured.items():
            if provider and not len(self._rows(dtype, of)):
                raise UnsupportedError(
                    "profile.moe", f"no layer of {dtype} by {of}", "a provider with rows"
                )
            found.update(zip(layers, self._model(dtype, of).predict(layers), strict=True))
        return found

    def model(self, dtype: str, library: str) -> MoEModel:
        """Returns the model for one dtype and library.

        library: a library, or a provider such as trtllm.cutlass. For a library, the provider with
            the most rows of the dtype is used.

        The model is fitted to the provider's rows. With fewer than FEWEST_ROWS rows, it is the
        shipped model.
        """
        if "." in library:
            return self._model(dtype, library)
        rows = (self.table["dtype"] == dtype) & self.table.by_library(library)
        return self._model(dtype, self.table.most_frequent("provider", rows) or library)

    def _usual_provider(self, dtype: str) -> str:
        return self.table.most_frequent("provider", self.table["dtype"] == dtype) or ""

    def _rows(self, dtype: str, provider: str) -> IntArray:
        of = (self.table["dtype"] == dtype) & (self.table["provider"] == provider)
        return np.flatnonzero(of)

    def _model(self, dtype: str, provider: str) -> MoEModel:
        key = (dtype, provider)
        if key not in self._models:
            self._models[key] = self._fitted(dtype, provider)
        return self._models[key]

    def _fitted(self, dtype: str, provider: str) -> MoEModel:
        """Fits a model to a provider's rows, or loads the shipped model if the rows are few."""
        rows = self._rows(dtype, provider)
        if len(rows) < FEWEST_ROWS:
            library = provider.partition(".")[0]
            library = library if library in LIBRARIES else ""
            return MoEModel.best(self.device, dtype=dtype, library=library)
        works = [work for work, _ in self._row_of]
        fitted = [works[i] for i in rows]
        times_us = self.table["latency_us"][rows]
        return MoEModel.fit(self.device, fitted, times_us, library=library_of(provider))


_WHO = "profile.collective"
# Half-width (log time) of an interval without leave-one-out errors: used if fewer than three
# message sizes were measured, and the minimum for times outside the measured sizes.
_BLIND = log(1.3)
# Smallest half-width (log time) of the interval around an interpolated time.
_LEAST_HALF_WIDTH = 0.01


def collective_estimates(
    table: Table,
    op: str,
    message_bytes: Any,
    num_gpus: int,
    num_nodes: int,
    dtype: str | None,
    provider: str | None,
) -> Estimate | ProfileEstimates:
    """Implements `Profile.collective`.

    Between two measured message sizes, the time is interpolated as a power law. There is no network
    model, so the numbers of GPUs and nodes must have been measured. A message below the measured
    sizes takes as long as the smallest measured message. A message above the measured sizes runs at
    the rate of the largest measured message (as in `latency.interconnect.Link`).
    """
    Collective(
        op, 2**10, num_gpus, dtype or "bf16", num_nodes
    )  # raises InputError for invalid ones
    (sizes,), shape = broadcast_sizes(
        _WHO, ("message_bytes",), (message_bytes,), LARGEST_MESSAGE_BYTES
    )

    rows = (table["op"] == op) & (table["num_gpus"] == num_gpus) & (table["num_nodes"] == num_nodes)
    if not rows.any():
        raise UnsupportedError(
            _WHO, f"{op} over {_over(num_gpus, num_nodes)} was not measured", _measured(table, op)
        )
    row_dtype = dtype
    if dtype is None or not (rows & (table["dtype"] == dtype)).any():
        row_dtype = table.most_frequent("dtype", rows)
    rows, of = by_provider(table, rows & (table["dtype"] == row_dtype), provider)
    found = table.where(rows)
    row_bytes = found["message_bytes"]
    row_us = found["latency_us"]
    log_bytes = np.log(row_bytes)
    log_us = np.log(row_us)
    half_width = _half_width(log_bytes, log_us)
    notes = []
    if dtype not in (None, row_dtype):
        half_width += SIMILAR_HALF_WIDTH
        notes.append(
            f"{dtype} was not measured: "
            f"assumed to take as long as the same number of bytes of {row_dtype}"
        )

    latency_us = np.exp(np.interp(np.log(sizes), log_bytes, log_us))
    latency_us *= np.maximum(sizes / row_bytes[-1], 1.0)
    row = np.minimum(np.searchsorted(row_bytes, sizes), len(found) - 1)
    measured = row_bytes[row] == sizes
    exact = measured & (dtype in (None, row_dtype))
    outside = (sizes < row_bytes[0]) | (sizes > row_bytes[-1])
    half_widths = np.where(outside, max(half_width, _BLIND), half_width)
    if outside.any():
        notes.append(f"outside the measured messages ({row_bytes[0]} to {row_bytes[-1]} bytes)")
    return ProfileEstimates(
        np.where(measured, row_us[row], latency_us),
        np.where(exact, found["low_us"][row], latency_us * np.exp(-half_widths)),
        np.where(exact, found["high_us"][row], latency_us * np.exp(half_widths)),
        np.where(exact, MEASURED, np.where(outside, MODELLED, INTERPOLATED)).astype(np.int8),
        outside,
        np.zeros(len(sizes)),
        sizes / float((row_bytes / row_us).max()),
        "; ".join(notes),
        format=f"{dtype or row_dtype} {of}",
    ).shaped(shape)


def _half_width(log_bytes: FloatArray, log_us: FloatArray) -> float:
    """Returns the half-width, in log time, of the interval around an interpolated time.

    Each row except the first and the last is interpolated from its two neighbours. The half-width
    is the 0.9 quantile of the errors, but at least _LEAST_HALF_WIDTH. With fewer than three rows,
    it is _BLIND.

    log_bytes, log_us: (rows,), logarithms of message sizes and times, ascending in size.
    """
    if len(log_us) < 3:
        return _BLIND
    share = (log_bytes[1:-1] - log_bytes[:-2]) / (log_bytes[2:] - log_bytes[:-2])
    between = log_us[:-2] * (1.0 - share) + log_us[2:] * share
    return max(_LEAST_HALF_WIDTH, float(np.quantile(np.abs(log_us[1:-1] - between), 0.9)))


def _measured(table: Table, op: str) -> str:
    """Lists the measured collectives for an error message."""
    if not len(table):
        return (
            "a profile with collectives: of `quantbench comm`, "
            "or `quantbench import aiconfigurator --table nccl`"
        )
    rows = table["op"] == op
    if not rows.any():
        return f"one of {', '.join(np.unique(table['op']).tolist())}"
    pairs = np.unique(
        np.stack([table["num_nodes"][rows], table["num_gpus"][rows]]), axis=1
    ).T.tolist()
    return f"{op} over " + ", ".join(_over(gpus, nodes) for nodes, gpus in pairs)


def _over(num_gpus: int, num_nodes: int) -> str:
    """Returns the number of GPUs, and of nodes if there are several, in words."""
    return f"{num_gpus} GPUs" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
