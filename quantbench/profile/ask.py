"""Asking a profile: one shape in microseconds, or a million at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.gemm_input import LARGEST_SIDE
from quantbench.latency.reach import require_reach
from quantbench.profile.bases import columns_of, roofline_parts
from quantbench.profile.choose import Chosen, choose_attention, choose_gemm, choose_softmax
from quantbench.profile.estimate import (
    INTERPOLATED,
    MEASURED,
    MODELLED,
    SOURCES,
    Estimate,
    Estimates,
    bound_of,
    plain_estimate,
)
from quantbench.profile.sizes import LARGEST, IntArray, broadcast_sizes
from quantbench.workload import Attention, Gemm, Softmax
from quantbench.workload.dtypes import DTYPES
from quantbench.workload.transformer import Compute

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile

One = Callable[[int, int, int, int], Estimate]

_INFINITE = float("inf")
_REMEMBERED = 2**16  # single shapes


@dataclass
class Asker:
    """Answers for a profile. What was chosen once for a format is kept."""

    profile: Profile
    _chosen: dict[tuple[Any, ...], Chosen] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], Estimate] = field(default_factory=dict)
    _prepared: dict[tuple[Any, ...], tuple[Chosen, One]] = field(default_factory=dict)

    def gemm(
        self, m: Any, n: Any, k: Any, dtype: str | None, layout: str | None, batch: Any, provider: str | None
    ) -> Estimate | Estimates:
        """See `Profile.gemm`."""
        chosen, ask = self._prepared.get((dtype, layout, provider)) or self._prepare(dtype, layout, provider)
        if type(m) is type(n) is type(k) is type(batch) is int:
            return ask(m, n, k, batch)
        return self._many(chosen, (m, n, k, batch))

    def _prepare(self, dtype: str | None, layout: str | None, provider: str | None) -> tuple[Chosen, One]:
        chosen = choose_gemm(self.profile, dtype, layout, provider)
        ready = self._prepared[dtype, layout, provider] = chosen, single_gemm(chosen, self.profile.device)
        return ready

    def trust(self, kind: str) -> float | None:
        """See `Profile.trust`."""
        if kind == "gemm":
            surface = self._prepare(None, None, None)[0].surface
        elif kind == "softmax":
            surface = choose_softmax(self.profile, None, "causal", "forward", None).surface
        else:
            surface = choose_attention(self.profile, None, True, "forward", None).surface
        return float(surface.trust.half_width) if len(surface.latency_us) else None

    def softmax(
        self, batch: Any, rows: Any, cols: Any, dtype: str | None, mask: str, direction: str, provider: str | None
    ) -> Estimate | Estimates:
        """See `Profile.softmax`."""
        key = ("softmax", dtype, mask, direction, provider)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = choose_softmax(self.profile, dtype, mask, direction, provider)
        if type(batch) is type(rows) is type(cols) is int:
            work = Softmax(batch, rows, cols, dtype=chosen.dtype, mask=mask, direction=direction)
            return self._one(chosen, work, (batch, rows, cols))
        if mask == "causal" and np.any(np.asarray(rows) != np.asarray(cols)):
            raise InputError("profile.softmax", "mask = 'causal' with rows unlike cols", "rows equal to cols")
        return self._many(chosen, (batch, rows, cols))

    def attention(
        self, sizes: tuple[Any, ...], dtype: str | None, causal: bool, direction: str, provider: str | None
    ) -> Estimate | Estimates:
        """See `Profile.attention`. sizes: batch, heads, kv_heads, seq_q, seq_k, head_dim."""
        key = ("attention", dtype, causal, direction, provider)
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._chosen[key] = choose_attention(self.profile, dtype, causal, direction, provider)
        batch, heads, kv_heads, seq_q, seq_k, head_dim = sizes
        if all(type(size) is int for size in sizes):
            work = Attention(
                batch, heads, seq_q, seq_k, head_dim, kv_heads, dtype=chosen.dtype, causal=causal, direction=direction
            )
            return self._one(chosen, work, (batch, heads, work.kv_heads, seq_q, seq_k, head_dim))
        kv = np.where(np.asarray(kv_heads) == 0, heads, kv_heads)
        if causal and np.any(np.asarray(seq_q) != np.asarray(seq_k)):
            raise InputError("profile.attention", "causal with seq_q unlike seq_k", "seq_q equal to seq_k")
        if np.any(np.asarray(heads) % np.maximum(kv, 1) != 0):
            raise InputError("profile.attention", "kv_heads", "a divisor of heads")
        return self._many(chosen, (batch, heads, kv, seq_q, seq_k, head_dim))

    def _one(self, chosen: Chosen, work: Softmax | Attention, sizes: tuple[int, ...]) -> Estimate:
        known = self._known.get((chosen.kind, chosen.fixed, work))
        if known is not None:
            return known
        device = self.profile.device
        peak = None if isinstance(work, Softmax) else device.peak(work.dtype)
        compute_us = 0.0 if peak is None else work.flops / (peak * 1e6)
        found = chosen.surface.one(*sizes)
        made = _single(chosen, found, compute_us, work.min_bytes / (device.memory_gb_per_s * 1e3))
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[chosen.kind, chosen.fixed, work] = made
        return made

    def _many(self, chosen: Chosen, given: tuple[Any, ...]) -> Estimate | Estimates:
        who = f"profile.{chosen.kind}"
        asked, shape = broadcast_sizes(who, chosen.sizes, given)
        latency, low, high, code, outside = chosen.surface.many(asked)
        if chosen.kind == "gemm":
            _require_reach_of_all(asked, code != MEASURED)
        bad = ~(np.isfinite(high) & (low > 0))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise InputError(who, f"the model says {latency[row]:g} µs for {[int(s[row]) for s in asked]}",
                             "a finite time above 0 (the model is not sound)")  # fmt: skip
        if chosen.note:
            code = np.where(code == MEASURED, INTERPOLATED, code).astype(np.int8)
            low, high = low * exp(-chosen.wider), high * exp(chosen.wider)
        notes = [chosen.note] if chosen.note else []
        if chosen.model_note and (code == MODELLED).any():
            notes.append(chosen.model_note)
        if outside.any():
            notes.append(chosen.outside_words(f"{int(outside.sum())} of {len(outside)} "))
        parts = roofline_parts(self.profile.device, chosen.kind, columns_of(chosen.sizes, asked, chosen.fixed))
        found = Estimates(latency, low, high, code, outside, parts[1], parts[0], "; ".join(notes))
        return found[0] if shape == () else found.reshape(*shape)

    def works(self, works: Sequence[Compute]) -> list[Estimate]:
        """An estimate of each workload, in order; those of one kind and format are asked for together."""
        groups: dict[tuple[Any, ...], dict[Compute, None]] = {}
        for work in works:
            groups.setdefault(_format_of(work), {})[work] = None
        known: dict[Compute, Estimate] = {}
        for group in groups.values():
            known.update(zip(group, self._group(list(group)), strict=True))
        return [known[work] for work in works]

    def _group(self, works: list[Any]) -> Estimates:
        def sizes(*names: str) -> list[IntArray]:
            return [np.array([getattr(work, name) for work in works], dtype=np.int64) for name in names]

        first = works[0]
        found: Estimate | Estimates
        if isinstance(first, Gemm):
            m, n, k, batch = sizes("m", "n", "k", "batch")
            found = self.gemm(m, n, k, first.dtype, first.layout, batch, None)
        elif isinstance(first, Softmax):
            batch, rows, cols = sizes("batch", "rows", "cols")
            found = self.softmax(batch, rows, cols, first.dtype, first.mask, first.direction, None)
        else:
            every = tuple(sizes("batch", "heads", "kv_heads", "seq_q", "seq_k", "head_dim"))
            found = self.attention(every, first.dtype, first.causal, first.direction, None)
        assert isinstance(found, Estimates)
        return found


def single_gemm(chosen: Chosen, device: DeviceSpec) -> One:
    """A function (m, n, k, batch) → Estimate that remembers its answers: planners ask for the same shapes again."""
    peak, kind = device.peak(chosen.dtype), DTYPES[chosen.dtype]
    per_product_us, per_byte_us = 2.0 / (peak * 1e6) if peak else 0.0, 1.0 / (device.memory_gb_per_s * 1e3)
    width, out_width = kind.element_bytes * per_byte_us, DTYPES[kind.output].element_bytes * per_byte_us
    one, known = chosen.surface.one, dict[tuple[int, ...], Estimate]()
    remembered = known.get

    def ask(m: int, n: int, k: int, batch: int) -> Estimate:
        sizes = m, n, k, batch
        found = remembered(sizes)
        if found is not None:
            return found
        if not (0 < m <= LARGEST_SIDE and 0 < n <= LARGEST_SIDE and 0 < k <= LARGEST_SIDE and 0 < batch <= LARGEST):
            broadcast_sizes("profile.gemm", ("m", "n", "k", "batch"), sizes)
            if sizes not in chosen.surface.rows:
                require_reach(m, n, k)
        elements, area = m * n, k * batch
        compute_us = elements * area * per_product_us
        memory_us = (m + n) * area * width + elements * batch * out_width
        found = _single(chosen, one(m, n, k, batch), compute_us, memory_us)
        if len(known) >= _REMEMBERED:
            known.clear()
        known[sizes] = found
        return found

    return ask


def _require_reach_of_all(asked: tuple[IntArray, ...], modelled: npt.NDArray[np.bool_]) -> None:
    """Raise InputError for the first modelled product with a side that no model knows; measured ones have their row."""
    m, n, k, _ = asked
    for row in np.flatnonzero(modelled & (np.maximum(np.maximum(m, n), k) > LARGEST_SIDE))[:1]:
        require_reach(int(m[row]), int(n[row]), int(k[row]))


def _format_of(work: Compute) -> tuple[Any, ...]:
    if isinstance(work, Gemm):
        return ("gemm", work.dtype, work.layout)
    if isinstance(work, Softmax):
        return ("softmax", work.dtype, work.mask, work.direction)
    return ("attention", work.dtype, work.causal, work.direction)


def _single(
    chosen: Chosen, found: tuple[float, float, float, int, bool], compute_us: float, memory_us: float
) -> Estimate:
    latency_us, low_us, high_us, code, outside = found
    if 0 < low_us <= high_us < _INFINITE and not (chosen.note or outside or (code == MODELLED and chosen.model_note)):
        return plain_estimate(latency_us, low_us, high_us, SOURCES[code], compute_us, memory_us)
    if not 0 < low_us <= high_us < float("inf"):
        raise InputError(f"profile.{chosen.kind}", f"the model says {latency_us:g} µs",
                         "a finite time above 0 (the model is not sound)")  # fmt: skip
    notes = [chosen.note] if chosen.note else []
    if chosen.note:
        code = INTERPOLATED if code == MEASURED else code
        low_us, high_us = low_us * exp(-chosen.wider), high_us * exp(chosen.wider)
    if code == MODELLED and chosen.model_note:
        notes.append(chosen.model_note)
    if outside:
        notes.append(chosen.outside_words())
    bound = bound_of(latency_us, compute_us, memory_us)
    return Estimate(latency_us, low_us, high_us, SOURCES[code], bound, outside, "; ".join(notes))
