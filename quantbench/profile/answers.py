"""Answers queries of a profile: one shape or a million at once. Entry point: `Asker`, called by `Profile`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.gemm.model import LARGEST_SIDE
from quantbench.latency.model_times import require_reach
from quantbench.profile.estimate import INTERPOLATED, MEASURED, MODELLED, Estimates
from quantbench.profile.sources import Chosen, choose_attention, choose_gemm, choose_softmax, columns_of, roofline_parts
from quantbench.profile.table import LARGEST
from quantbench.workload import Gemm, Softmax
from quantbench.workload.ops import Compute

if TYPE_CHECKING:
    from quantbench.profile.profile import Profile


IntArray = npt.NDArray[np.int64]


def broadcast_sizes(
    who: str, names: tuple[str, ...], given: tuple[Any, ...], largest: int = LARGEST
) -> tuple[tuple[IntArray, ...], tuple[int, ...]]:
    """(flat int64 arrays of one length, the common shape). Raises InputError for what is no size."""
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


_REMEMBERED = 2**16  # single shapes


@dataclass
class Asker:
    """Answers the queries of one profile. Keeps the rows and the model selected for each format, and single answers.

    sources: how many workloads `works` answered from each source.
    """

    profile: Profile
    _chosen: dict[tuple[Any, ...], Chosen] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], Estimate] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)

    def gemm(
        self, m: Any, n: Any, k: Any, dtype: str | None, layout: str | None, batch: Any, provider: str | None
    ) -> Estimate | Estimates:
        """See `Profile.gemm`."""
        return self._ask(choose_gemm, (dtype, layout, provider), (m, n, k, batch))

    def softmax(
        self, batch: Any, rows: Any, cols: Any, dtype: str | None, mask: str, direction: str, provider: str | None
    ) -> Estimate | Estimates:
        """See `Profile.softmax`."""
        if mask == "causal" and np.any(np.asarray(rows) != np.asarray(cols)):
            raise InputError("profile.softmax", "mask = 'causal' with rows unlike cols", "rows equal to cols")
        return self._ask(choose_softmax, (dtype, mask, direction, provider), (batch, rows, cols))

    def attention(
        self, sizes: tuple[Any, ...], dtype: str | None, causal: bool, direction: str, provider: str | None
    ) -> Estimate | Estimates:
        """See `Profile.attention`. sizes: batch, heads, kv_heads, seq_q, seq_k, head_dim."""
        batch, heads, kv_heads, seq_q, seq_k, head_dim = sizes
        if causal and np.any(np.asarray(seq_q) != np.asarray(seq_k)):
            raise InputError("profile.attention", "causal with seq_q unlike seq_k", "seq_q equal to seq_k")
        plain = type(kv_heads) is int
        kv_heads = (kv_heads or heads) if plain else np.where(np.asarray(kv_heads) == 0, heads, kv_heads)
        if np.any(np.asarray(heads) % np.maximum(kv_heads, 1) != 0):
            raise InputError("profile.attention", f"kv_heads = {kv_heads} of {heads} heads"[:100], "a divisor of heads")
        given = (batch, heads, kv_heads, seq_q, seq_k, head_dim)
        return self._ask(choose_attention, (dtype, causal, direction, provider), given)

    def trust(self, kind: str) -> float | None:
        """See `Profile.trust`."""
        if kind == "gemm":
            surface = self._choice(choose_gemm, (None, None, None)).surface
        elif kind == "softmax":
            surface = self._choice(choose_softmax, (None, "causal", "forward", None)).surface
        else:
            surface = self._choice(choose_attention, (None, True, "forward", None)).surface
        return float(surface.trust.half_width) if len(surface.latency_us) else None

    def _choice(self, choose: Callable[..., Chosen], format_asked: tuple[Any, ...]) -> Chosen:
        key = (choose, *format_asked)
        if key not in self._chosen:
            self._chosen[key] = choose(self.profile, *format_asked)
        return self._chosen[key]

    def _ask(
        self, choose: Callable[..., Chosen], format_asked: tuple[Any, ...], sizes: tuple[Any, ...]
    ) -> Estimate | Estimates:
        chosen = self._choice(choose, format_asked)
        if not all(type(size) is int for size in sizes):
            return self._many(chosen, sizes)
        key = (choose, *format_asked, *sizes)
        known = self._known.get(key)
        if known is None:
            found = self._many(chosen, sizes)
            assert isinstance(found, Estimate)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = found
        return known

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
            notes.append(chosen.outside_words("" if shape == () else f"{int(outside.sum())} of {len(outside)} "))
        parts = roofline_parts(self.profile.device, chosen.kind, columns_of(chosen.sizes, asked, chosen.fixed))
        notes_said = "; ".join(notes)
        found = Estimates(latency, low, high, code, outside, parts[1], parts[0], notes_said, _words(chosen))
        return found[0] if shape == () else found.reshape(*shape)

    def works(self, works: Sequence[Compute]) -> list[Estimate]:
        """An estimate of each workload, in order; those of one kind and format are asked for together."""
        groups: dict[tuple[Any, ...], dict[Compute, None]] = {}
        for work in works:
            groups.setdefault(_format_of(work), {})[work] = None
        known: dict[Compute, Estimate] = {}
        for group in groups.values():
            known.update(zip(group, self._group(list(group)), strict=True))
        self.sources.update(one.source for one in known.values())
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


def _require_reach_of_all(asked: tuple[IntArray, ...], modelled: npt.NDArray[np.bool_]) -> None:
    """Raise InputError for the first modelled product with a side that no model knows; measured ones have their row."""
    m, n, k, _ = asked
    for row in np.flatnonzero(modelled & (np.maximum(np.maximum(m, n), k) > LARGEST_SIDE))[:1]:
        require_reach(int(m[row]), int(n[row]), int(k[row]))


def _words(chosen: Chosen) -> str:
    """What is estimated, for people: `products`, `backward attention`."""
    backward = "backward " if ("direction", "backward") in chosen.fixed else ""
    return f"{backward}{'products' if chosen.kind == 'gemm' else chosen.kind}"


def _format_of(work: Compute) -> tuple[Any, ...]:
    if isinstance(work, Gemm):
        return ("gemm", work.dtype, work.layout)
    if isinstance(work, Softmax):
        return ("softmax", work.dtype, work.mask, work.direction)
    return ("attention", work.dtype, work.causal, work.direction)
