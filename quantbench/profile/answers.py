"""Answers profile queries, for one shape, for arrays of shapes or for a transformer layer.

Entry points: `Asker` for GEMMs, softmax and attention, `Experts`, `ask_collective`, `layer_of` for a layer; their
results `Estimates` and `LayerEstimate`. Used by `profile.profile`; the exporters and `tools` use the results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import exp, log
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, UnsupportedError, require_choice, require_int
from quantbench.latency.estimate import Estimate, name_bound
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.libraries import LIBRARIES
from quantbench.latency.model_times import require_reach
from quantbench.latency.moe import FEWEST_ROWS, MoEModel
from quantbench.latency.op_times import CORRELATION, OpEstimate, ShapeEstimate, total
from quantbench.profile.interpolation import INTERPOLATED, MEASURED, MODELLED, SOURCES
from quantbench.profile.sources import ALIKE, SIZES, Chosen, by_provider, choose_gemm, choose_vector, roofline_parts
from quantbench.profile.table import LARGEST, Table
from quantbench.workload import MoE, Op
from quantbench.workload.kinds import Compute
from quantbench.workload.ops import COLLECTIVE_DTYPES, COLLECTIVE_OPS, LARGEST_MESSAGE_BYTES

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_REMEMBERED = 2**16  # most cached answers for single shapes
# Workload fields that `Asker.ask` takes as `format_asked`; the provider is its last element.
_FORMATS = {
    "gemm": ("dtype", "layout"), "softmax": ("dtype", "mask", "direction"),
    "attention": ("dtype", "causal", "direction"),
}  # fmt: skip
_MAIN_FORMAT = {"gemm": (None, None, None), "softmax": (None, "causal", "forward", None)}


# If neither arithmetic nor bytes explain this share of the time, the bound is latency.
_EXPLAINED = 1.0 / 3.0


@dataclass(frozen=True)
class Estimates:
    """Times of many shapes (not `latency.estimate.Estimates`); arrays have the broadcast shape of the query's sizes.

    low_us, high_us: interval of each time.
    source_code: index in SOURCES.
    outside: True if the shape is outside the measured range.
    compute_us, memory_us: time of the arithmetic alone and of the memory traffic alone, at the device's peaks.
    note: one note for all shapes.
    what: the estimated operation, named in the reason why a shape has no measured row.
    format: as in `Estimate`.
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
    format: str = ""

    @cached_property
    def source(self) -> npt.NDArray[np.str_]:
        """Source of each time: measured, interpolated or modelled."""
        return np.array(SOURCES)[self.source_code]

    @cached_property
    def bound(self) -> npt.NDArray[np.str_]:
        """Bound of each time: compute, memory or latency, whichever explains most of it."""
        return name_bound(_EXPLAINED * self.latency_us, self.compute_us, self.memory_us)

    def __len__(self) -> int:
        return len(self.latency_us)

    def reshape(self, *shape: int) -> Estimates:
        values = ((name, value) for name, value in vars(self).items() if isinstance(value, np.ndarray))
        arrays: dict[str, Any] = {name: value.reshape(shape) for name, value in values}
        return replace(self, **arrays)

    def __getitem__(self, row: int) -> Estimate:
        outside = bool(self.outside[row])
        beyond = self.source_code[row] == MODELLED and (outside or bool(self.note))
        return Estimate(
            float(self.latency_us[row]), float(self.low_us[row]), float(self.high_us[row]), str(self.source[row]),
            str(self.bound[row]), outside, self.note,
            unmeasured=f"{self.what}: beyond the rows of the profile" if beyond else "",
            format=self.format,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Estimate]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class LayerEstimate(Estimate):
    """Time of one transformer layer.

    source: least certain source among the operations.
    bound: the bound that accounts for the most time.
    parts: estimates of the operations.
    """

    parts: ShapeEstimate | None = None

    @property
    def ops(self) -> tuple[OpEstimate, ...]:
        return () if self.parts is None else self.parts.ops


def layer_of(ops: Sequence[Op], found: Sequence[Estimate]) -> LayerEstimate:
    """Sums the estimates `found` of a layer's operations, which must have count 1."""
    works = [OpEstimate(op, one) for op, one in zip(ops, found, strict=True)]
    parts = total(works, CORRELATION)
    by_bound: dict[str, float] = {}
    for one in found:
        by_bound[one.bound] = by_bound.get(one.bound, 0.0) + one.latency_us
    return LayerEstimate(
        parts.latency_us, parts.low_us, parts.high_us, max((one.source for one in found), key=SOURCES.index),
        max(by_bound, key=lambda bound: by_bound[bound]), any(one.outside for one in found), "; ".join(parts.notes),
        parts=parts,
    )  # fmt: skip


def broadcast_sizes(
    who: str, names: tuple[str, ...], given: tuple[Any, ...], largest: int = LARGEST
) -> tuple[tuple[IntArray, ...], tuple[int, ...]]:
    """Returns (flat int64 arrays of equal length, broadcast shape). Raises InputError for values that are not sizes."""
    arrays = []
    for name, values in zip(names, given, strict=True):
        array = np.asarray(values)
        if array.dtype.kind not in "iuf":
            raise InputError(who, f"{name} = {values!r}"[:100], f"whole numbers from 1 to {largest}")
        with np.errstate(invalid="ignore"):
            bad = ~((array >= 1) & (array <= largest))
            if array.dtype.kind == "f":
                bad |= array != np.floor(array)
        if bad.any():
            raise InputError(who, f"{name} = {array[bad].flat[0]}", f"whole numbers from 1 to {largest}")
        arrays.append(array.astype(np.int64))
    try:
        wide = np.broadcast_arrays(*arrays)
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(names, arrays, strict=True))
        raise InputError(who, f"arrays of {shapes}", "shapes that broadcast") from None
    return tuple(np.ascontiguousarray(array).ravel() for array in wide), wide[0].shape


@dataclass
class Asker:
    """Query engine of one profile. Caches the rows and model selected per format, and the answers for single shapes.

    sources: number of workloads that `works` answered, by source.
    """

    profile: Profile
    _chosen: dict[tuple[Any, ...], Chosen] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], Estimate] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)

    def ask(self, kind: str, format_asked: tuple[Any, ...], sizes: tuple[Any, ...]) -> Estimate | Estimates:
        """Returns an Estimate for plain numbers, Estimates for arrays.

        kind: gemm, softmax or attention.
        format_asked: arguments of the kind's `choose_` function after the profile.
        sizes: sizes in the order of SIZES.
        """
        chosen = self._choice(kind, format_asked)
        if not all(type(size) is int for size in sizes):
            return self._many(chosen, sizes)
        key = (kind, *format_asked, *sizes)
        known = self._known.get(key)
        if known is None:
            found = self._many(chosen, sizes)
            assert isinstance(found, Estimate)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = found
        return known

    def works(self, works: Sequence[Compute]) -> list[Estimate]:
        """Estimates each workload, in order, with one query per kind and format."""
        groups: dict[tuple[Any, ...], dict[Compute, None]] = {}
        for work in works:
            if work.kind not in _FORMATS:
                raise UnsupportedError(
                    "profile", str(work), "products, attention or softmax: it has no table of others"
                )
            key = (work.kind, *(getattr(work, name) for name in _FORMATS[work.kind]))
            groups.setdefault(key, {})[work] = None
        known: dict[Compute, Estimate] = {}
        for (kind, *of), group in groups.items():
            sizes = tuple(np.array([getattr(work, name) for work in group], dtype=np.int64) for name in SIZES[kind])
            found = self.ask(kind, (*of, None), sizes)
            assert isinstance(found, Estimates)
            known.update(zip(group, found, strict=True))
        self.sources.update(one.source for one in known.values())
        return [known[work] for work in works]

    def trust(self, kind: str) -> float | None:
        surface = self._choice(kind, _MAIN_FORMAT.get(kind, (None, True, "forward", None))).surface
        return float(surface.trust.half_width) if len(surface.latency_us) else None

    def _choice(self, kind: str, format_asked: tuple[Any, ...]) -> Chosen:
        key = (kind, *format_asked)
        if key not in self._chosen:
            choose = choose_gemm if kind == "gemm" else partial(choose_vector, kind)
            self._chosen[key] = choose(self.profile, *format_asked)
        return self._chosen[key]

    def _many(self, chosen: Chosen, given: tuple[Any, ...]) -> Estimate | Estimates:
        who = f"profile.{chosen.kind}"
        asked, shape = broadcast_sizes(who, SIZES[chosen.kind], given)
        latency, low, high, code, outside = chosen.surface.many(asked)
        if chosen.kind == "gemm":
            # Measured GEMMs are answered from their row; models do not cover longer sides.
            m, n, k, _ = asked
            too_long = np.maximum(np.maximum(m, n), k) > LARGEST_SIDE
            for row in np.flatnonzero((code != MEASURED) & too_long)[:1]:
                require_reach(int(m[row]), int(n[row]), int(k[row]))
        bad = ~(np.isfinite(high) & (low > 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise InputError(who, f"the model says {latency[row]:g} µs for {[int(s[row]) for s in asked]}",
                             "a finite time above 0 (the model is not sound)")  # fmt: skip
        notes = []
        if chosen.note:
            notes.append(chosen.note)
            code = np.where(code == MEASURED, INTERPOLATED, code).astype(np.int8)
            low, high = low * exp(-chosen.wider), high * exp(chosen.wider)
        if chosen.model_note and (code == MODELLED).any():
            notes.append(chosen.model_note)
        if outside.any():
            notes.append(chosen.outside_words("" if shape == () else f"{int(outside.sum())} of {len(outside)} "))
        memory_us, compute_us = roofline_parts(self.profile.device, chosen.kind, asked, chosen.fixed)
        what = "products" if chosen.kind == "gemm" else chosen.kind
        if ("direction", "backward") in chosen.fixed:
            what = f"backward {what}"
        words = ("causal" if value is True else "full" if value is False else value for _, value in chosen.fixed)
        found = Estimates(latency, low, high, code, outside, compute_us, memory_us, "; ".join(notes), what,
                          " ".join(filter(None, words)))  # fmt: skip
        return found[0] if shape == () else found.reshape(*shape)


@dataclass(frozen=True)
class Experts:
    """Times of MoE layers on one device. table: of kind moe. Models are fitted on first use, and kept."""

    device: DeviceSpec
    table: Table
    _models: dict[tuple[str, str], MoEModel] = field(default_factory=dict)

    @cached_property
    def _row_of(self) -> dict[tuple[Any, str], int]:
        """Row of each layer and provider, in the table's order."""
        keys = zip(self.table.workloads(), self.table["provider"].tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}

    def ask(self, works: Sequence[MoE], provider: str | None = None) -> list[Estimate]:
        """Returns one estimate per layer. provider: None for the one with most rows of the layer's dtype.

        Raises UnsupportedError if the provider measured no layer of the dtype.
        """
        found: dict[MoE, Estimate] = {}
        for dtype in dict.fromkeys(work.dtype for work in works):
            of = provider or self.table.most("provider", self.table["dtype"] == dtype) or ""
            rows = {work: self._row_of.get((work, of)) for work in works if work.dtype == dtype}
            for work, row in rows.items():
                if row is not None:
                    us, low, high = (float(self.table[name][row]) for name in ("latency_us", "low_us", "high_us"))
                    found[work] = Estimate(us, low, high, "measured", note=f"measured by {of}")
            unknown = [work for work, row in rows.items() if row is None]
            if unknown:
                said = self._model(dtype, of, provider is not None).predict(unknown)
                found.update(zip(unknown, said, strict=True))
        return [found[work] for work in works]

    def _model(self, dtype: str, provider: str, asked: bool) -> MoEModel:
        key = (dtype, provider)
        if key not in self._models:
            rows = np.flatnonzero((self.table["dtype"] == dtype) & (self.table["provider"] == provider))
            library = provider.partition(".")[0]
            if asked and not len(rows):
                raise UnsupportedError("profile.moe", f"no layer of {dtype} by {provider}", "a provider with rows")
            if len(rows) < FEWEST_ROWS:
                made = MoEModel.best(self.device, dtype=dtype, library=library if library in LIBRARIES else "")
            else:
                library = library if library in LIBRARIES else "torch"
                works, times_us = [work for work, _ in self._row_of], self.table["latency_us"][rows]
                made = MoEModel.fit(self.device, [works[i] for i in rows], times_us, library=library)
            self._models[key] = made
        return self._models[key]


_WHO = "profile.collective"
# Half-width in log time outside the measured message sizes, or if fewer than three were measured.
_BLIND = log(1.3)
_LEAST_HALF_WIDTH = 0.01


def ask_collective(
    table: Table, op: str, message_bytes: Any, num_gpus: int, num_nodes: int, dtype: str | None, provider: str | None
) -> Estimate | Estimates:
    """Implements `Profile.collective`.

    Only message sizes are interpolated, as a power law between two measured sizes, because there is no network model.
    Smaller messages than measured take as long as the smallest one, larger ones run at the rate of the largest (as in
    `latency.interconnect.Link`).
    """
    require_choice(_WHO, "op", op, COLLECTIVE_OPS)
    if dtype is not None:
        require_choice(_WHO, "dtype", dtype, COLLECTIVE_DTYPES)
    require_int(_WHO, "num_gpus", num_gpus, low=2)
    require_int(_WHO, "num_nodes", num_nodes)
    (asked,), shape = broadcast_sizes(_WHO, ("message_bytes",), (message_bytes,), LARGEST_MESSAGE_BYTES)

    rows = (table["op"] == op) & (table["num_gpus"] == num_gpus) & (table["num_nodes"] == num_nodes)
    if not rows.any():
        raise UnsupportedError(_WHO, f"{op} over {_over(num_gpus, num_nodes)} was not measured", _measured(table, op))
    kept = dtype if dtype is not None and (rows & (table["dtype"] == dtype)).any() else table.most("dtype", rows)
    rows, of = by_provider(table, rows & (table["dtype"] == kept), provider)
    found = table.where(rows)
    known_bytes, known_us = found["message_bytes"], found["latency_us"]
    log_bytes, log_us = np.log(known_bytes), np.log(known_us)
    half_width, notes = _half_width(log_bytes, log_us), []
    same = dtype in (None, kept)
    if not same:
        half_width += ALIKE
        notes.append(f"{dtype} was not measured: assumed to take as long as the same number of bytes of {kept}")

    latency_us = np.exp(np.interp(np.log(asked), log_bytes, log_us))
    latency_us *= np.maximum(asked / known_bytes[-1], 1.0)
    row = np.minimum(np.searchsorted(known_bytes, asked), len(found) - 1)
    measured = known_bytes[row] == asked
    exact = measured & same
    outside = (asked < known_bytes[0]) | (asked > known_bytes[-1])
    half_widths = np.where(outside, max(half_width, _BLIND), half_width)
    if outside.any():
        notes.append(f"outside the measured messages ({known_bytes[0]} to {known_bytes[-1]} bytes)")
    answer = Estimates(
        np.where(measured, known_us[row], latency_us),
        np.where(exact, found["low_us"][row], latency_us * np.exp(-half_widths)),
        np.where(exact, found["high_us"][row], latency_us * np.exp(half_widths)),
        np.where(exact, MEASURED, np.where(outside, MODELLED, INTERPOLATED)).astype(np.int8),
        outside,
        np.zeros(len(asked)),
        asked / float((known_bytes / known_us).max()),
        "; ".join(notes),
        format=f"{dtype or kept} {of}",
    )
    return answer[0] if shape == () else answer.reshape(*shape)


def _half_width(log_bytes: FloatArray, log_us: FloatArray) -> float:
    """Returns the 0.9 quantile of the error of interpolating each inner row from its neighbours, log time."""
    if len(log_us) < 3:
        return _BLIND
    share = (log_bytes[1:-1] - log_bytes[:-2]) / (log_bytes[2:] - log_bytes[:-2])
    between = log_us[:-2] * (1.0 - share) + log_us[2:] * share
    return max(_LEAST_HALF_WIDTH, float(np.quantile(np.abs(log_us[1:-1] - between), 0.9)))


def _measured(table: Table, op: str) -> str:
    """Lists the measured collectives, for the error message."""
    if not len(table):
        return "a profile with collectives: of `quantbench comm`, or `quantbench import aiconfigurator --table nccl`"
    rows = table["op"] == op
    if not rows.any():
        return "one of " + ", ".join(np.unique(table["op"]).tolist())
    pairs = np.unique(np.stack([table["num_nodes"][rows], table["num_gpus"][rows]]), axis=1).T.tolist()
    return f"{op} over " + ", ".join(_over(gpus, nodes) for nodes, gpus in pairs)


def _over(num_gpus: int, num_nodes: int) -> str:
    return f"{num_gpus} GPUs" + (f" on {num_nodes} nodes" if num_nodes > 1 else "")
