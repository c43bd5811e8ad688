"""How many heads, and how wide: fused causal attention over head_dim and over the number of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from quantbench.analysis.summary import Point
from quantbench.workload import Attention

#: the width that others are held against
USUAL = 128
SEQUENCES = (1024, 2048, 4096, 8192, 16384)
# Fewer pairs than this make no statement.
_FEWEST = 10


@dataclass(frozen=True)
class Width:
    """Speed of heads of head_dim over that of heads of 128, at the same heads × head_dim, key width, batch and
    sequence: the ratios, their median, and the range from 10 to 90 % of them."""

    head_dim: int
    seq: int
    ratios: tuple[float, ...]
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Fours:
    """Does batch × heads % 4 matter? Speed of shapes with a number of heads between two powers of two over what lies
    between its neighbours: where batch × heads is no multiple of 4 (off), and where it is one (on)."""

    off: tuple[float, ...]
    on: tuple[float, ...]


def widths(points: Sequence[Point]) -> tuple[Width, ...]:
    """For every head_dim and sequence length that there are enough shapes of."""
    rate: dict[tuple[int, int, int, int, int], float] = {}
    for work, tflops in _rates(points):
        key = (work.head_dim, work.seq_q, work.batch, work.heads * work.head_dim, work.kv_heads * work.head_dim)
        rate[key] = max(tflops, rate.get(key, 0.0))
    found = []
    for head_dim in sorted({key[0] for key in rate} - {USUAL}):
        for seq in SEQUENCES:
            ratios = [
                value / rate[USUAL, *key[1:]]
                for key, value in rate.items()
                if key[:2] == (head_dim, seq) and (USUAL, *key[1:]) in rate
            ]
            if len(ratios) >= _FEWEST:
                low, middle, high = (float(q) for q in np.quantile(ratios, (0.1, 0.5, 0.9)))
                found.append(Width(head_dim, seq, tuple(ratios), low, middle, high))
    return tuple(found)


def head_counts(points: Sequence[Point], seq: int, head_dim: int = USUAL) -> dict[int, float]:
    """TFLOP/s of one sample by its number of heads, every head with its own keys."""
    found: dict[int, float] = {}
    for work, tflops in _rates(points):
        if (work.batch, work.seq_q, work.head_dim) == (1, seq, head_dim) and work.kv_heads == work.heads:
            found[work.heads] = max(tflops, found.get(work.heads, 0.0))
    return dict(sorted(found.items()))


def fours(points: Sequence[Point], seq: int) -> Fours | None:
    """The folklore asks (heads / tp × MBS) % 4 == 0. None where the table has no heads between powers of two."""
    rate: dict[tuple[int, int, int, int], float] = {}
    for work, tflops in _rates(points):
        if work.seq_q >= seq:
            key = (work.batch, work.heads, work.kv_heads, work.seq_q * 1000 + work.head_dim)
            rate[key] = max(tflops, rate.get(key, 0.0))
    off: list[float] = []
    on: list[float] = []
    for (batch, heads, kv_heads, rest), tflops in rate.items():
        if heads & (heads - 1) == 0:
            continue
        below = 1 << (heads.bit_length() - 1)
        neighbours = [rate.get((batch, h, kv_heads, rest)) for h in (below, 2 * below)]
        if None in neighbours:
            continue
        share = (log(heads) - log(below)) / log(2)
        low, high = (log(n) for n in neighbours if n is not None)
        relative = tflops / exp(low + share * (high - low))
        (on if batch * heads % 4 == 0 else off).append(relative)
    if min(len(off), len(on)) < _FEWEST:
        return None
    return Fours(tuple(off), tuple(on))


def _rates(points: Sequence[Point]) -> list[tuple[Attention, float]]:
    return [(p.workload, p.tflops) for p in points if isinstance(p.workload, Attention) and p.workload.causal]
