"""Points as curves along an axis, and which of many curves a picture shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantbench.analysis.summary import Point

# Sizes that span more than this factor are drawn on a logarithmic axis.
_WIDE = 24.0


@dataclass(frozen=True)
class Series:
    """Points of one op, provider, number format and held axes, ascending along `axis`."""

    axis: str
    op: str
    provider: str
    dtype: str
    held: dict[str, int]
    points: tuple[Point, ...]

    @property
    def sizes(self) -> list[int]:
        return [point.axes[self.axis] for point in self.points]


def series_along(points: Iterable[Point], axis: str) -> list[Series]:
    """Every curve along `axis`, in the order of first appearance. One that has a size twice (two kernels that a table
    tells apart) keeps the faster figure."""
    groups: dict[tuple[str, str, str, tuple[tuple[str, int], ...]], list[Point]] = {}
    for point in points:
        if axis in point.axes:
            held = tuple((name, value) for name, value in point.axes.items() if name != axis)
            groups.setdefault((point.op, point.provider, point.workload.dtype, held), []).append(point)
    found = []
    for (op, provider, dtype, held), own in groups.items():
        fastest: dict[int, Point] = {}
        for point in sorted(own, key=lambda p: -p.latency_us):
            fastest[point.axes[axis]] = point
        ascending = tuple(point for _, point in sorted(fastest.items()))
        found.append(Series(axis, op, provider, dtype, dict(held), ascending))
    return found


def typical(curves: Sequence[Series], most: int) -> list[Series]:
    """At most `most` of the curves: all, or as many evenly spaced ones from the smaller to the larger work, of those
    with most points."""
    if len(curves) <= most:
        return list(curves)
    longest = max(len(curve.points) for curve in curves)
    full = [curve for curve in curves if len(curve.points) >= 0.9 * longest]
    full.sort(key=lambda curve: curve.points[-1].workload.flops or curve.points[-1].workload.min_bytes)
    last = len(full) - 1
    # Small products wait for launches and memory and have no teeth to show: the lower third is left out.
    return [full[round(last * (1 / 3 + 2 / 3 * i / (most - 1)))] for i in range(most)]


def series_names(curves: Sequence[Series]) -> list[str]:
    """What tells each of these curves from the others; `measured` where there is one alone."""
    names = []
    for curve in curves:
        parts = [f"{name.replace('_', '-')}={value}" for name, value in curve.held.items()]
        if len({c.dtype for c in curves}) > 1:
            parts.insert(0, curve.dtype)
        if len({c.provider for c in curves}) > 1:
            parts.insert(0, curve.provider)
        names.append(" ".join(parts) or curve.provider)
    return names


def is_wide(sizes: Sequence[int]) -> bool:
    """Whether the sizes want a logarithmic axis."""
    return min(sizes) > 0 and max(sizes) / min(sizes) > _WIDE
