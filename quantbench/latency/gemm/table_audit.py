"""Finds measured GEMM times that no hardware explains, so that models are not fitted to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantbench.latency.gemm.cost_model import FloatArray, IndexArray

#: why a row is unexplained, in the order in which they are tested
REASONS = ("above the peak", "another method", "slower than larger products", "faster than smaller products")
# Clocks above the nominal boost clock, and rounding of times.
_ABOVE_PEAK = 1.05
#: least ratio of two times that contradict each other; the largest steps at tile and wave edges are 1.9
# A row is unexplained if its rate is above the GPU's peak; if at least two products as large or larger in m, n, k and
# batch take half its time or less (padding to them would be faster: their kernels exist, so the time holds something
# else); if it takes half the time of two or more smaller products that nothing else contradicts; or if it was timed by
# another method than most rows. Tile and wave edges stay: of the public bf16 tables 0.0 to 1.0 % of the rows are
# unexplained.
_CONTRADICTION = 2.0
_FEWEST = 2
_CHUNK = 256


@dataclass(frozen=True)
class Unexplained:
    """Row without an explanation.

    row: its index.
    reason: one of REASONS.
    ratio: how far it is off: of its rate to the peak, or of the two contradicting times; 1 for another method.
    words: the evidence.
    """

    row: int
    reason: str
    ratio: float
    words: str


def audit(
    sizes: Sequence[FloatArray],
    latency_us: FloatArray,
    flop_per_us: float,
    *,
    group: IndexArray,
    methods: Sequence[str] = (),
) -> list[Unexplained]:
    """Returns the unexplained rows, those that are furthest off first.

    sizes: m, n, k and batch, (rows,) each.
    latency_us: (rows,).
    flop_per_us: peak of the device.
    group: (rows,); times of different groups (layouts, recorded kernels) are not compared.
    methods: how each row was timed, (rows,); empty if all in one way.
    """
    m, n, k, batch = (np.asarray(x, dtype=np.int64) for x in sizes)
    found: dict[int, Unexplained] = {}

    def say(row: int, reason: str, ratio: float, words: str) -> None:
        found.setdefault(row, Unexplained(row, reason, float(ratio), words))

    def shape(row: int) -> str:
        return f"{m[row]}×{n[row]}×{k[row]}" + (f" × {batch[row]}" if batch[row] > 1 else "")

    rate = 2.0 * m * n * k * batch / latency_us / flop_per_us
    for row in np.flatnonzero(rate > _ABOVE_PEAK).tolist():
        say(row, REASONS[0], rate[row], f"{rate[row]:.2f} of the peak rate")
    usual = max(set(methods), key=list(methods).count, default="")
    for row, method in enumerate(methods):
        if method != usual:
            say(row, REASONS[1], 1.0, f"timed as {method}, most rows as {usual}")
    rest = np.setdiff1d(np.arange(len(latency_us)), list(found))
    rest = rest[np.argsort(latency_us[rest], kind="stable")]
    larger, against = _contradictions([x[rest] for x in (m, n, k, batch)], group[rest], latency_us[rest])
    alone = Counter(against[larger == 1].tolist())
    for row, count, fast in zip(rest.tolist(), larger.tolist(), rest[against].tolist(), strict=True):
        if count >= _FEWEST:
            ratio = latency_us[row] / latency_us[fast]
            words = f"{latency_us[row]:.1f} µs; {shape(fast)} takes {latency_us[fast]:.1f} µs"
            say(row, REASONS[2], ratio, words + f", {count} larger products take half or less")
    for place, count in alone.items():
        if count >= _FEWEST:
            row, slow = int(rest[place]), int(rest[np.flatnonzero((against == place) & (larger == 1))[-1]])
            words = f"{latency_us[row]:.1f} µs; {shape(slow)} takes {latency_us[slow]:.1f} µs"
            say(row, REASONS[3], latency_us[slow] / latency_us[row], words)
    return sorted(found.values(), key=lambda one: -one.ratio)


def _contradictions(
    sizes: Sequence[IndexArray], group: IndexArray, latency_us: FloatArray
) -> tuple[IndexArray, IndexArray]:
    """Returns, for rows in ascending order of time, how many larger products take half or less, and the fastest one."""
    count, fastest = np.zeros((2, len(group)), dtype=np.intp)
    ends = np.searchsorted(latency_us, latency_us / _CONTRADICTION, side="right")
    for start in range(0, len(group), _CHUNK):
        part = slice(start, start + _CHUNK)
        end = int(ends[part].max(initial=0))
        larger = np.arange(end)[None, :] < ends[part, None]
        for size in sizes:
            larger &= size[None, :end] >= size[part, None]
        larger &= group[None, :end] == group[part, None]
        count[part] = larger.sum(axis=1)
        if end:
            fastest[part] = larger.argmax(axis=1)
    return count, fastest
