"""What tensor parallelism costs each product, and what more tokens in a micro-batch gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from quantbench.analysis.summary import Point
from quantbench.workload import Gemm

DEGREES = (2, 4, 8)
TOKENS = (512, 1024, 2048, 4096, 8192)
# Linear layers of models that are split: hidden sizes and widths of the MLP as the tables have them.
_LARGE = range(4096, 16384 + 1)


@dataclass(frozen=True)
class Price:
    """tp · time of the split product over the time of the whole one: all ratios and their median; 1.2 is 20 % more of
    the GPU's time. column: n is split (qkv, up), else k (projection, down)."""

    column: bool
    tp: int
    tokens: int
    ratios: tuple[float, ...]

    @property
    def price(self) -> float:
        return median(self.ratios)


def prices(points: Sequence[Point]) -> tuple[Price, ...]:
    """For each way to split, degree and number of tokens."""
    times = _times(points)
    found = []
    for column in (True, False):
        for tp in DEGREES:
            for tokens in TOKENS:
                ratios = []
                for (m, n, k), whole_us in times.items():
                    if m != tokens or n not in _LARGE or k not in _LARGE or (n if column else k) % tp:
                        continue
                    part = (m, n // tp, k) if column else (m, n, k // tp)
                    if part in times:
                        ratios.append(tp * times[part] / whole_us)
                if ratios:
                    found.append(Price(column, tp, tokens, tuple(ratios)))
    return tuple(found)


def rates(points: Sequence[Point]) -> dict[int, float]:
    """Median TFLOP/s of the large products by number of tokens, where m is at most the tokens of a few samples."""
    by_tokens: dict[int, list[float]] = {}
    for (m, n, k), us in _times(points).items():
        if n in _LARGE and k in _LARGE and m >= TOKENS[0] and m & (m - 1) == 0:
            by_tokens.setdefault(m, []).append(2 * m * n * k / us / 1e6)
    return {m: median(found) for m, found in sorted(by_tokens.items())}


def token_ratios(points: Sequence[Point], few: int, many: int) -> tuple[float, ...]:
    """Time per token at `few` tokens over that at `many`, for each of the large products."""
    times = _times(points)
    return tuple(
        (us / few) / (times[many, n, k] / many)
        for (m, n, k), us in times.items()
        if m == few and n in _LARGE and k in _LARGE and (many, n, k) in times
    )


def enough_tokens(found: dict[int, float], share: float = 0.95) -> int:
    """The fewest tokens that reach `share` of the best rate."""
    best = max(found.values())
    return next(m for m, rate in found.items() if rate >= share * best)


def _times(points: Sequence[Point]) -> dict[tuple[int, int, int], float]:
    return {(p.workload.m, p.workload.n, p.workload.k): p.latency_us for p in points if isinstance(p.workload, Gemm)}
